//! Every operation of the backend: one suite, run on each instruction set and
//! number of threads, against scalar on one thread bit for bit and against the
//! reference backend within a bound. And fused operations against their default
//! bodies, bit for bit.

mod common;

use common::{cpu, isas};
use cpu::Isa;
use gguf::TensorType;
use model::backend::RowSet;
use model::{Backend, Input, KvType, Reference, Row, RowOutput, Step, Want};
use testing::Plain;
use testing::suite::{MANY, ODD, SINGLE, Shape, assert_same, is_product, results};
use testing::{Noise, distance, tensor};

/// Scalar on one thread against everything else.
fn check(shape: Shape, kv: KvType) {
    let expected = results(cpu(Isa::Scalar, 1), shape, kv);
    for isa in isas() {
        for threads in [1, 2, 3, 8] {
            let found = results(cpu(isa, threads), shape, kv);
            assert_same(&found, &expected, &format!("{isa}, {threads} threads"));
        }
        let unfused = results(Plain::new(cpu(isa, 2)), shape, kv);
        assert_same(&unfused, &expected, &format!("{isa}, unfused"));
    }
    let reference = results(Reference::new(), shape, kv);
    for ((op, found), (_, expected)) in expected.iter().zip(&reference) {
        // Integer activations are compared with f32 ones in `products.rs`; where
        // keys are stored as f16, one rounding of a key may go the other way.
        let limit = match (is_product(op), shape.ty, kv) {
            (true, TensorType::F16, _) => 2e-6,
            (true, ..) => 0.02,
            (false, _, KvType::F16) if op.starts_with("attend") => 2e-5,
            _ => 4e-6,
        };
        let (_, relative_rms) = distance(found, expected);
        assert!(
            relative_rms <= limit,
            "{op} against the reference: relative RMS {relative_rms:.2e}"
        );
    }
}

#[test]
fn odd_sizes() {
    check(ODD, KvType::F32);
}

#[test]
fn one_row() {
    check(SINGLE, KvType::F16);
}

#[test]
fn many_rows() {
    check(MANY, KvType::F16);
}

/// Reading back equals the specification, for every kind of question.
#[test]
fn select_is_the_specification() {
    let n_vocab = 5003;
    let mut noise = Noise(3);
    let mut values = noise.values(n_vocab * 8);
    // Ties, both zeros, one value throughout, the largest one last, and what is not finite,
    // also last: no number of lanes divides the vocabulary.
    for i in 0..n_vocab {
        values[n_vocab + i] = (values[n_vocab + i] * 20.0).round();
        values[2 * n_vocab + i] = if i % 3 == 0 { -0.0 } else { 0.0 };
        values[3 * n_vocab + i] = 4.5;
    }
    values[5 * n_vocab - 1] = 20.0;
    values[5 * n_vocab + 4321] = f32::NAN;
    values[6 * n_vocab + 17] = f32::NEG_INFINITY;
    values[8 * n_vocab - 1] = f32::INFINITY;
    let rows: Vec<&[f32]> = values.chunks(n_vocab).collect();
    let mut be = cpu(Isa::detect(), 3);
    let row = |token: u32| Row {
        input: Input::Token(token),
        pos: token,
        seq: 0,
    };
    let step = Step {
        rows: (0..8).map(row).collect(),
        wanted: (0..8).collect(),
        pages: vec![Default::default()],
    };
    be.step(&step).expect("a step");
    let table = tensor("table", TensorType::F32, n_vocab, 8, &values);
    let table = be.load(&table).expect("a table");
    let mut logits = be.alloc(RowSet::All, n_vocab).expect("memory");
    be.embed(&mut logits, &table);
    let top = |k, logsumexp| Want::TopK { k, logsumexp };
    for want in [
        Want::Argmax,
        Want::Full,
        top(1, false),
        top(5, true),
        top(39, true),
        top(40, false),
        top(256, true),
        top(n_vocab, false),
        top(2 * n_vocab, true),
        top(0, true),
    ] {
        let found = be.select(&logits, &[want; 8]).expect("an answer");
        for (r, (found, row)) in found.iter().zip(&rows).enumerate() {
            let expected = model::select(row, want);
            assert_eq!(*found, expected, "row {r}, {want:?}");
            let is_bad = matches!(found, RowOutput::NonFinite { .. });
            assert_eq!(is_bad, r >= 5, "row {r}");
        }
    }
}

/// A cap must not hide what is not finite: reading the logits back notices it.
#[test]
fn a_cap_keeps_what_is_not_finite() {
    let values = [
        1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        3e38,
        -3e38,
        0.0,
        -40.0,
    ];
    for isa in isas() {
        let mut be = cpu(isa, 1);
        let input = Input::Token(0);
        let step = Step {
            rows: vec![Row {
                input,
                pos: 0,
                seq: 0,
            }],
            wanted: vec![0],
            pages: vec![Default::default()],
        };
        be.step(&step).expect("a step");
        let table = tensor("table", TensorType::F32, values.len(), 1, &values);
        let table = be.load(&table).expect("a table");
        let mut x = be.alloc(RowSet::All, values.len()).expect("memory");
        be.embed(&mut x, &table);
        // 3e38 overflows with the scale, 1e38 does not.
        be.softcap(&mut x, 2.0, Some(20.0));
        let found = be.read(&x).expect("a buffer");
        let inf = f32::INFINITY;
        assert_eq!(found[1..3], [inf, -inf], "{isa}");
        assert!(found[3].is_nan(), "{isa}");
        assert_eq!(found[4..6], [inf, -inf], "{isa}");
        assert!(
            (found[0] - 20.0 * 0.1f32.tanh()).abs() < 1e-5,
            "{isa}: {}",
            found[0]
        );
        assert_eq!(found[6], 0.0, "{isa}");
        assert!(found[7] > -20.0 && found[7] < -19.98, "{isa}: {}", found[7]);
    }
}

#[test]
fn instruction_set_that_is_missing() {
    for isa in Isa::ALL {
        let options = cpu::CpuOptions {
            threads: Some(1),
            isa: Some(isa),
        };
        match (cpu::Cpu::new(options), isa.is_available()) {
            (Ok(be), true) => {
                let device = format!("cpu ({isa}, 1 thread)");
                assert_eq!(be.caps().device, device);
            }
            (Err(cpu::Error::IsaUnavailable { wanted, .. }), false) => assert_eq!(wanted, isa),
            (Ok(_), false) => panic!("{isa} on a machine without it"),
            (Err(error), _) => panic!("{error}"),
        }
    }
}
