//! Every operation on the device, bit for bit against the scalar CPU backend, but
//! attention on tensor cores, which is held to a bound; fused operations against
//! their default bodies; reading back against its specification.

mod device;

use testing::Plain;
use testing::suite::{MANY, ODD, Results, SINGLE, Shape, assert_same, results};

use cpu::Isa;
use device::{cpu, device};
use gguf::TensorType;
use model::backend::RowSet;
use model::{Backend, Input, KvType, Row, RowOutput, Step, Want};
use testing::{Noise, tensor};

/// Largest difference of attention on tensor cores, against the largest output.
const NEAR: f32 = 1e-5;

fn check(shape: Shape, kv: KvType) {
    let expected = results(cpu(Isa::Scalar, 1), shape, kv);
    let found = results(device(), shape, kv);
    let is_mma = kv == KvType::F16 && [32, 64, 128].contains(&shape.head_dim);
    let is_near = |op: &str| is_mma && op == "attend";
    let same = |results: &Results| -> Results {
        let exact = results.iter().filter(|(op, _)| !is_near(op));
        exact.cloned().collect()
    };
    assert_same(&same(&found), &same(&expected), "cuda");
    for ((op, found), (_, expected)) in found.iter().zip(&expected) {
        if is_near(op) {
            assert_near(found, expected, NEAR, op);
        }
    }
    let unfused = results(Plain::new(device()), shape, kv);
    assert_same(&unfused, &found, "cuda, unfused");
}

#[track_caller]
fn assert_near(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    let largest = expected.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - expected).abs();
        assert!(
            difference <= bound * largest,
            "{what}[{i}]: {found} instead of {expected}, largest {largest}"
        );
    }
}

#[test]
fn odd_sizes() {
    check(ODD, KvType::F32);
    check(ODD, KvType::F16);
}

#[test]
fn one_row() {
    check(SINGLE, KvType::F16);
    check(SINGLE, KvType::F32);
}

#[test]
fn many_rows() {
    check(MANY, KvType::F16);
    check(MANY, KvType::F32);
}

/// Heads of two elements a thread; groups that leave queries over; enough rows for whole rows side by side.
#[test]
fn wide_heads() {
    let wide = Shape {
        head_dim: 256,
        n_head: 6,
        n_head_kv: 2,
        ..ODD
    };
    check(wide, KvType::F16);
    check(
        Shape {
            n_rows: 150,
            ..wide
        },
        KvType::F16,
    );
    let narrow = Shape {
        head_dim: 72,
        n_head: 36,
        n_head_kv: 2,
        ..MANY
    };
    check(narrow, KvType::F16);
}

/// The widths that tensor cores take, few rows and many, groups of more heads than a tile has.
#[test]
fn heads_on_tensor_cores() {
    for (head_dim, n_head, n_head_kv) in [(32, 6, 2), (64, 40, 2), (128, 32, 2), (128, 4, 2)] {
        for n_rows in [1, 7, 32, 150] {
            let shape = Shape {
                n_rows,
                head_dim,
                n_head,
                n_head_kv,
                ..MANY
            };
            check(shape, KvType::F16);
        }
    }
}

/// The pass that is recorded and the one that is replayed give what the first gave.
#[test]
fn every_row_count() {
    for n_rows in [2, 8, 9, 16, 17, 33, 64, 128] {
        check(Shape { n_rows, ..MANY }, KvType::F16);
    }
}

/// The rows of `values` as a buffer of logits.
fn logits(be: &mut cuda::Cuda, n_vocab: usize, values: &[f32]) -> cuda::Buf {
    let n = values.len() / n_vocab;
    let row = |token: u32| Row {
        input: Input::Token(token),
        pos: token,
        seq: 0,
    };
    let step = Step {
        rows: (0..n as u32).map(row).collect(),
        wanted: (0..n as u32).collect(),
        pages: vec![Default::default()],
    };
    be.step(&step).expect("a step");
    let table = tensor("table", TensorType::F32, n_vocab, n, values);
    let table = be.load(&table).expect("a table");
    let mut logits = be.alloc(RowSet::All, n_vocab).expect("memory");
    be.embed(&mut logits, &table);
    logits
}

/// Equal, but for the last bit of a sum of exponentials.
fn assert_answer(found: &RowOutput, expected: &RowOutput, what: &str) {
    let (mut found, mut expected) = (found.clone(), expected.clone());
    if let (RowOutput::TopK { logsumexp: a, .. }, RowOutput::TopK { logsumexp: b, .. }) =
        (&mut found, &mut expected)
        && let (Some(x), Some(y)) = (&a, &b)
    {
        assert!(
            x.to_bits().abs_diff(y.to_bits()) <= 1,
            "{what}: {x} instead of {y}"
        );
        (*a, *b) = (None, None);
    }
    assert_eq!(found, expected, "{what}");
}

#[test]
fn select_is_the_specification() {
    for n_vocab in [5003, 100, 202_048] {
        let mut noise = Noise(3);
        let mut values = noise.values(n_vocab * 6);
        // Ties, both zeros, one value throughout, and what is not finite.
        for i in 0..n_vocab {
            values[n_vocab + i] = (values[n_vocab + i] * 20.0).round();
            values[2 * n_vocab + i] = if i % 3 == 0 { -0.0 } else { 0.0 };
            values[3 * n_vocab + i] = 4.5;
        }
        values[4 * n_vocab + n_vocab - 7] = f32::NAN;
        values[5 * n_vocab + 17] = f32::NEG_INFINITY;
        let mut be = device();
        let buf = logits(&mut be, n_vocab, &values);
        let top = |k, logsumexp| Want::TopK { k, logsumexp };
        for want in [
            Want::Argmax,
            Want::Full,
            top(1, false),
            top(5, true),
            top(64, true),
            top(256, true),
            top(1024, false),
            top(1025, true),
            top(n_vocab, false),
            top(0, true),
        ] {
            let found = be.select(&buf, &[want; 6]).expect("an answer");
            for (r, (found, row)) in found.iter().zip(values.chunks(n_vocab)).enumerate() {
                let what = format!("row {r} of {n_vocab}, {want:?}");
                assert_answer(found, &model::select(row, want), &what);
                assert_eq!(
                    matches!(found, RowOutput::NonFinite { .. }),
                    r >= 4,
                    "{what}"
                );
            }
        }
        // Different questions in one call.
        let want = [
            Want::Full,
            top(3, true),
            Want::Argmax,
            top(40, false),
            Want::Argmax,
            Want::Full,
        ];
        let found = be.select(&buf, &want).expect("an answer");
        for ((found, row), want) in found.iter().zip(values.chunks(n_vocab)).zip(want) {
            assert_answer(found, &model::select(row, want), &format!("{want:?}"));
        }
    }
}

#[test]
fn a_cap_keeps_what_is_not_finite() {
    let inf = f32::INFINITY;
    let values = [1.0, inf, -inf, f32::NAN, 3e38, -3e38, 0.0, -40.0];
    let mut be = device();
    let mut x = logits(&mut be, values.len(), &values);
    // 3e38 overflows with the scale.
    be.softcap(&mut x, 2.0, Some(20.0));
    let found = be.read(&x).expect("a buffer");
    assert_eq!(found[1..3], [inf, -inf]);
    assert!(found[3].is_nan());
    assert_eq!(found[4..6], [inf, -inf]);
    assert!(
        (found[0] - 20.0 * 0.1f32.tanh()).abs() < 1e-5,
        "{}",
        found[0]
    );
    assert_eq!(found[6], 0.0);
    assert!(found[7] > -20.0 && found[7] < -19.98, "{}", found[7]);
}
