//! Products of every encoding for any number of rows, bit for bit against the
//! scalar CPU backend; and the rows of an embedding against the decoder.

mod device;

use testing::blocks::{INTEGER, Random, Second, put_f16, random_weights, view};

use cpu::Isa;
use device::{cpu, device};
use gguf::{TensorType, TensorView, quant};
use model::backend::RowSet;
use model::{Backend, Input, Row, Step};
use testing::tensor;

/// Rows of a pass that looks up `tokens`.
fn step(tokens: impl Iterator<Item = u32>) -> Step {
    let row = |(pos, token): (usize, u32)| Row {
        input: Input::Token(token),
        pos: pos as u32,
        seq: 0,
    };
    Step {
        rows: tokens.enumerate().map(row).collect(),
        wanted: Vec::new(),
        pages: vec![Default::default()],
    }
}

/// All NaN are one.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() })
        .collect()
}

/// Products of the rows of `x` with `w`, in one pass.
fn product<B: Backend>(be: &mut B, w: &TensorView, cols: usize, x: &[f32]) -> Vec<f32> {
    let n = x.len() / cols;
    be.step(&step(0..n as u32)).expect("a step");
    let table = be
        .load(&tensor("x", TensorType::F32, cols, n, x))
        .expect("a table");
    let n_out = w.shape[1] as usize;
    let w = be.load(w).expect("a matrix");
    let mut input = be.alloc(RowSet::All, cols).expect("memory");
    let mut out = be.alloc(RowSet::All, n_out).expect("memory");
    be.embed(&mut input, &table);
    be.matmul(&mut out, &w, &input);
    be.read(&out).expect("a buffer")
}

fn check(be: &mut cuda::Cuda, w: &TensorView, cols: usize, x: &[f32]) {
    let expected = product(&mut cpu(Isa::detect(), 2), w, cols, x);
    let found = product(be, w, cols, x);
    let n_out = w.shape[1] as usize;
    let what = format!("{} {n_out} x {cols}, {} rows", w.ty, x.len() / cols);
    for (at, (found, expected)) in bits(&found).iter().zip(bits(&expected)).enumerate() {
        let (r, j) = (at / n_out, at % n_out);
        assert_eq!(*found, expected, "{what}: output [{r}][{j}]");
    }
}

fn check_random(
    be: &mut cuda::Cuda,
    ty: TensorType,
    (n_rows, n_blocks, n_x): (usize, usize, usize),
) {
    let mut random = Random(n_rows as u64 * 1000 + n_x as u64);
    let cols = n_blocks * ty.block_len();
    let weights = random_weights(ty, n_rows, cols, &mut random);
    let x = random.gaussians(n_x * cols);
    check(be, &view(ty, cols, &weights), cols, &x);
}

#[test]
fn every_encoding_and_row_count() {
    let mut be = device();
    for (ty, ..) in INTEGER {
        for n_x in [1, 2, 3, 8, 9, 16, 17, 32, 64, 128, 512] {
            check_random(&mut be, ty, (40, 6, n_x));
        }
        for (n_rows, n_blocks) in [
            (16, 1),
            (1, 2),
            (17, 3),
            (31, 9),
            (64, 4),
            (100, 13),
            (200, 26),
        ] {
            check_random(&mut be, ty, (n_rows, n_blocks, 3));
        }
    }
}

/// The four products of one input with matrices of these encodings and rows.
fn four_products<B: Backend>(
    be: &mut B,
    w: &[TensorView; 4],
    cols: usize,
    x: &[f32],
) -> Vec<Vec<f32>> {
    let n = x.len() / cols;
    be.step(&step(0..n as u32)).expect("a step");
    let table = be
        .load(&tensor("x", TensorType::F32, cols, n, x))
        .expect("a table");
    let mut input = be.alloc(RowSet::All, cols).expect("memory");
    be.embed(&mut input, &table);
    let mut out = [0, 1, 2, 3].map(|i| {
        be.alloc(RowSet::All, w[i].shape[1] as usize)
            .expect("memory")
    });
    let w = [0, 1, 2, 3].map(|i| be.load(&w[i]).expect("a matrix"));
    let [q, k, v, gate] = &mut out;
    be.qkv_gate(q, k, v, gate, [&w[0], &w[1], &w[2], &w[3]], &input);
    out.iter().map(|y| be.read(y).expect("a buffer")).collect()
}

/// Encodings that share a launch, that do not, and that want another form of the input.
#[test]
fn mixed_encodings() {
    use TensorType::{F16, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let mut be = device();
    let mut random = Random(11);
    let cols = 1536;
    for types in [
        [Q4_K, Q4_K, Q6_K, Q4_K],
        [Q6_K, Q4_K, Q4_K, Q6_K],
        [Q5_K, Q6_K, Q6_K, Q5_K],
        [Q4_K, Q5_K, Q6_K, Q8_0],
        [Q8_0, Q4_K, F16, Q4_0],
    ] {
        for n_rows in [[500, 40, 40, 500], [9000, 16, 33, 4096]] {
            let w = [0, 1, 2, 3].map(|i| {
                view(
                    types[i],
                    cols,
                    &random_weights(types[i], n_rows[i], cols, &mut random),
                )
            });
            for n_x in [1, 8, 9, 16, 17, 33] {
                let x = random.gaussians(n_x * cols);
                let expected = four_products(&mut cpu(Isa::detect(), 2), &w, cols, &x);
                let found = four_products(&mut be, &w, cols, &x);
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(
                        bits(found) == bits(expected),
                        "{types:?}, {n_x} rows: product {i}"
                    );
                }
            }
        }
    }
}

/// Enough rows for two tiles a warp, and for blocks of threads that take several tiles in turn.
#[test]
fn large_matrices() {
    let mut be = device();
    for ty in [TensorType::Q4_K, TensorType::Q6_K, TensorType::Q8_0] {
        for n_x in [1, 8, 16, 40] {
            check_random(&mut be, ty, (24_000, 5, n_x));
            check_random(&mut be, ty, (8200, 3, n_x));
        }
    }
}

#[test]
fn floats() {
    let mut be = device();
    for ty in [
        TensorType::F32,
        TensorType::F16,
        TensorType::BF16,
        TensorType::F64,
    ] {
        for (n_rows, cols, n_x) in [
            (1, 1, 1),
            (5, 15, 2),
            (16, 16, 9),
            (7, 129, 4),
            (12, 64, 17),
            (300, 1000, 40),
        ] {
            check_random(&mut be, ty, (n_rows, cols, n_x));
        }
    }
}

/// Encodings without kernels are decoded when they are loaded.
#[test]
fn other_encodings() {
    let mut be = device();
    for &ty in TensorType::ALL {
        if ty.block_len() > 1 && INTEGER.iter().all(|entry| entry.0 != ty) {
            check_random(&mut be, ty, (9, 3, 5));
        }
    }
}

/// All bits of codes and scales set, or none, and activations at both ends.
#[test]
fn extremes() {
    let mut be = device();
    for (ty, d, second) in INTEGER {
        let cols = 5 * ty.block_len();
        let signs = |f: fn(usize) -> bool| -> Vec<f32> {
            (0..cols).map(|k| if f(k) { -1.0 } else { 1.0 }).collect()
        };
        let x = [
            signs(|_| false),
            signs(|_| true),
            signs(|k| k % 2 == 1),
            signs(|k| k / 4 % 2 == 1),
            signs(|k| k / 16 % 2 == 0),
        ];
        let x = x.concat();
        for fill in [0x00, 0xff, 0x80, 0x7f, 0x77, 0x88] {
            let mut weights = vec![fill; 17 * 5 * ty.block_bytes()];
            for block in weights.chunks_mut(ty.block_bytes()) {
                put_f16(block, d, 0.5);
                if let Second::Dmin(at) | Second::Min(at) = second {
                    put_f16(block, at, 0.25);
                }
            }
            let w = view(ty, cols, &weights);
            check(&mut be, &w, cols, &x);
            check(&mut be, &w, cols, &x.repeat(4));
        }
    }
}

/// Zeros, blocks of zeros, tiny and huge activations, and what is not finite.
#[test]
fn odd_activations() {
    let mut be = device();
    let mut random = Random(3);
    for (ty, ..) in INTEGER {
        let len = ty.block_len();
        let cols = 6 * len;
        let mut weights = random_weights(ty, 18, cols, &mut random);
        weights[..ty.block_bytes() * 7].fill(0);
        let w = view(ty, cols, &weights);
        let mut x = random.gaussians(9 * cols);
        x[..len].fill(0.0);
        x[cols..2 * cols].fill(-0.0);
        x[2 * cols..2 * cols + len].fill(1e-37);
        x[3 * cols..3 * cols + len].fill(1e-36);
        x[4 * cols + 3] = -f32::MAX;
        x[5 * cols + 7] = f32::NAN;
        x[6 * cols + 9] = f32::INFINITY;
        x[7 * cols + 1] = f32::NEG_INFINITY;
        check(&mut be, &w, cols, &x);
    }
}

/// Rows of an embedding, of every encoding, equal the decoder's.
#[test]
fn rows_are_decoded() {
    let mut be = device();
    let mut random = Random(5);
    for &ty in TensorType::ALL {
        if matches!(
            ty,
            TensorType::I8 | TensorType::I16 | TensorType::I32 | TensorType::I64
        ) {
            continue;
        }
        let (n_rows, cols) = (45, 3 * ty.block_len().max(11));
        let bytes = random_weights(ty, n_rows, cols, &mut random);
        let tokens = [0u32, 7, 8, 15, 16, 31, 32, 44, 3];
        be.step(&step(tokens.into_iter())).expect("a step");
        let table = be.load(&view(ty, cols, &bytes)).expect("a table");
        let mut out = be.alloc(RowSet::All, cols).expect("memory");
        be.embed(&mut out, &table);
        let found = be.read(&out).expect("a buffer");
        let row_bytes = bytes.len() / n_rows;
        for (found, token) in found.chunks(cols).zip(tokens) {
            let mut expected = vec![0.0; cols];
            let row = &bytes[token as usize * row_bytes..][..row_bytes];
            quant::decode_row(ty, row, &mut expected).expect("a row");
            assert_eq!(bits(found), bits(&expected), "{ty}, row {token}");
        }
    }
}

#[test]
fn integer_tensors_are_refused() {
    let mut be = device();
    for ty in [
        TensorType::I8,
        TensorType::I16,
        TensorType::I32,
        TensorType::I64,
    ] {
        let error = be.load(&view(ty, 4, &vec![0; 4 * ty.block_bytes()])).err();
        let error = error.expect("an error").to_string();
        assert!(error.contains("type I"), "{error}");
    }
}
