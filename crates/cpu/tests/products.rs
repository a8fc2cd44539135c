//! Products of every encoding on every instruction set, bit for bit against the
//! canonical arithmetic written out naively.
//!
//! Integers come from the decoder of `gguf`, not from a second unpacking: with
//! `d = 1` and `dmin = 0` a decoded element is `scale * code`, with `d = 0` and
//! `dmin = 1` it is minus the minimum.

mod common;

use common::isas;
use cpu::{ActivationKind, Activations, Isa, Matrix, OutColumns, TILE_ROWS};
use gguf::{TensorType, TensorView, quant};
use half::f16;
use proptest::prelude::*;
use testing::blocks::{INTEGER, Random, Second, integer, put_f16, random_weights, view};

const ONE: f32 = 1.0;

fn decode(ty: TensorType, bytes: &[u8], cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; cols];
    quant::decode_row(ty, bytes, &mut out).expect("a row");
    out
}

/// `row` with these scales in every block.
fn with_scales(ty: TensorType, row: &[u8], first: f32, other: f32) -> Vec<u8> {
    let (d, second) = integer(ty).expect("an integer kernel");
    let mut row = row.to_vec();
    for block in row.chunks_mut(ty.block_bytes()) {
        put_f16(block, d, first);
        if let Second::Dmin(at) | Second::Min(at) = second {
            put_f16(block, at, other);
        }
    }
    row
}

/// int8 codes and scales of a row.
fn quantized(x: &[f32], block: usize) -> (Vec<i64>, Vec<f32>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for x in x.chunks(block) {
        let max = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        if x.iter().any(|v| !v.is_finite()) || max == 0.0 {
            codes.extend(x.iter().map(|_| 0));
            scales.push(if max == 0.0 && !x.iter().any(|v| v.is_nan()) {
                0.0
            } else {
                f32::NAN
            });
            continue;
        }
        let inverse = 127.0 / max;
        codes.extend(x.iter().map(|v| (v * inverse).round_ties_even() as i64));
        scales.push(max / 127.0);
    }
    (codes, scales)
}

/// Scales of a row's blocks: `d` and the second one.
fn scales(ty: TensorType, row: &[u8]) -> Vec<(f32, f32)> {
    let (d, second) = integer(ty).expect("an integer kernel");
    let f16_at = |block: &[u8], at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let pair = |block: &[u8]| match second {
        Second::None => (f16_at(block, d), 0.0),
        Second::Dmin(at) | Second::Min(at) => (f16_at(block, d), f16_at(block, at)),
    };
    row.chunks(ty.block_bytes()).map(pair).collect()
}

/// One output in the canonical arithmetic, int8 activations.
fn integer_product(ty: TensorType, row: &[u8], x: &[f32]) -> f32 {
    let (len, cols) = (ty.block_len(), x.len());
    let (codes, dy) = quantized(x, len);
    let weights = decode(ty, &with_scales(ty, row, ONE, 0.0), cols);
    let minima = decode(ty, &with_scales(ty, row, 0.0, ONE), cols);
    let dot = |w: &[f32], b: usize| -> i64 {
        let part = b * len..(b + 1) * len;
        w[part.clone()]
            .iter()
            .zip(&codes[part])
            .map(|(&w, &q)| w as i64 * q)
            .sum()
    };
    let second = integer(ty).expect("an integer kernel").1;
    let n_blocks = cols / len;
    let mut total = None;
    for j in 0..4 {
        let mut chain = 0.0f32;
        for b in j * n_blocks / 4..(j + 1) * n_blocks / 4 {
            let (d, other) = scales(ty, row)[b];
            let i = dot(&weights, b) as f32;
            let t = match second {
                Second::None => d * i,
                // The decoded minimum is negative.
                Second::Dmin(_) => d.mul_add(i, -(other * (-dot(&minima, b)) as f32)),
                Second::Min(_) => d.mul_add(i, other * dot(&minima, b) as f32),
            };
            chain = dy[b].mul_add(t, chain);
        }
        total = Some(total.map_or(chain, |total: f32| total + chain));
    }
    total.expect("four segments")
}

/// One output in the canonical arithmetic, f32 activations.
fn float_product(ty: TensorType, row: &[u8], x: &[f32]) -> f32 {
    let w = decode(ty, row, x.len());
    let mut lanes = [0.0f32; 16];
    for k in 0..x.len() {
        lanes[k % 16] = w[k].mul_add(x[k], lanes[k % 16]);
    }
    for width in [8, 4, 2, 1] {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
    }
    lanes[0]
}

/// The bits that count: all NaN are one.
fn bits(x: f32) -> u32 {
    if x.is_nan() { u32::MAX } else { x.to_bits() }
}

fn product(isa: Isa, view: &TensorView, x: &[f32]) -> Vec<f32> {
    let matrix = Matrix::new(view, isa).expect("a supported type");
    let n = x.len() / matrix.cols();
    let mut activations = Activations::new();
    activations.resize(matrix.activation_kind(), n, matrix.cols());
    activations.fill(isa, x);
    let mut out = vec![f32::INFINITY; n * matrix.n_rows()];
    matrix.multiply_all(&activations, &mut out);
    out
}

/// Every instruction set gives the naive result, bit for bit.
fn check(ty: TensorType, cols: usize, weights: &[u8], x: &[f32]) {
    let view = view(ty, cols, weights);
    let row_bytes = ty.row_bytes(cols as u64).expect("whole blocks") as usize;
    let mut wanted = Vec::new();
    for x in x.chunks(cols) {
        for row in weights.chunks(row_bytes) {
            wanted.push(match integer(ty) {
                Some(_) => integer_product(ty, row, x),
                None => float_product(ty, row, x),
            });
        }
    }
    let n_rows = weights.len() / row_bytes;
    for isa in isas() {
        let found = product(isa, &view, x);
        for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let (r, j) = (at / n_rows, at % n_rows);
            assert_eq!(
                bits(*found),
                bits(*wanted),
                "{ty} {isa} {n_rows} x {cols}, output [{r}][{j}]: {found} instead of {wanted}"
            );
        }
    }
}

fn check_random(ty: TensorType, n_rows: usize, n_blocks: usize, n_x: usize, seed: u64) {
    let mut random = Random(seed);
    let cols = n_blocks * ty.block_len();
    let weights = random_weights(ty, n_rows, cols, &mut random);
    let x = random.gaussians(n_x * cols);
    check(ty, cols, &weights, &x);
}

#[test]
fn shapes() {
    for (ty, ..) in INTEGER {
        for (n_rows, n_blocks) in [
            (16, 1),
            (1, 2),
            (17, 3),
            (40, 5),
            (31, 9),
            (64, 4),
            (100, 13),
        ] {
            check_random(ty, n_rows, n_blocks, 3, n_rows as u64);
        }
        for n_x in (1..=17).chain([31, 32, 33, 47, 50]) {
            check_random(ty, 33, 6, n_x, n_x as u64);
        }
        check_random(ty, 81, 5, 64, 7);
        check_random(ty, 20, 4, 130, 8);
        // Segments longer than what is unpacked at a time.
        let n_blocks = 16_384 / (7 * ty.block_len()) + 1;
        for n_x in [1, 3, 18] {
            check_random(ty, 33, n_blocks, n_x, 9);
        }
    }
}

#[test]
fn floats() {
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
        ] {
            check_random(ty, n_rows, cols, n_x, cols as u64);
        }
    }
}

#[test]
fn other_encodings() {
    for &ty in TensorType::ALL {
        if ty.block_len() > 1 && integer(ty).is_none() {
            check_random(ty, 9, 3, 5, 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_shape(
        entry in 0..INTEGER.len(),
        n_rows in 1usize..70,
        n_blocks in 1usize..12,
        n_x in 1usize..24,
        seed: u64,
    ) {
        check_random(INTEGER[entry].0, n_rows, n_blocks, n_x, seed);
    }
}

/// All bits of codes and scales set, or none, and activations at both ends.
#[test]
fn extremes() {
    for (ty, d, second) in INTEGER {
        let cols = 5 * ty.block_len();
        for fill in [0x00, 0xff, 0x80, 0x7f, 0x77, 0x88] {
            let mut weights = vec![fill; 17 * 5 * ty.block_bytes()];
            for block in weights.chunks_mut(ty.block_bytes()) {
                put_f16(block, d, 0.5);
                if let Second::Dmin(at) | Second::Min(at) = second {
                    put_f16(block, at, 0.25);
                }
            }
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
            check(ty, cols, &weights, &x);
            // Enough rows for the instruction sets that take many at once.
            check(ty, cols, &weights, &x.repeat(4));
        }
    }
}

#[test]
fn zeros() {
    let mut random = Random(3);
    for (ty, ..) in INTEGER {
        let len = ty.block_len();
        let cols = 6 * len;
        let mut weights = random_weights(ty, 18, cols, &mut random);
        weights[..ty.block_bytes() * 7].fill(0);
        let mut x = random.gaussians(4 * cols);
        x[..len].fill(0.0);
        x[cols..2 * cols].fill(-0.0);
        check(ty, cols, &weights, &x);
        let out = product(Isa::detect(), &view(ty, cols, &weights), &x[cols..2 * cols]);
        assert!(out.iter().all(|&y| y == 0.0), "{ty}: zeros give zeros");
    }
}

/// Activations so small that `127 / max` overflows count as zeros; the largest
/// finite ones do not.
#[test]
fn tiny_and_huge_activations() {
    let ty = TensorType::Q4_0;
    let weights = random_weights(ty, 16, 32, &mut Random(4));
    for isa in isas() {
        let view = view(ty, 32, &weights);
        let tiny = product(isa, &view, &[1e-37; 32]);
        assert!(tiny.iter().all(|&y| y == 0.0), "{isa}");
        assert_ne!(product(isa, &view, &[1e-36; 32]), tiny, "{isa}");
    }
    let mut x = [1e-30; 32];
    x[3] = -f32::MAX;
    check(ty, 32, &weights, &x);
}

#[test]
fn what_is_not_finite_arrives() {
    let mut random = Random(5);
    for (ty, d, second) in INTEGER {
        let cols = 5 * ty.block_len();
        let row_bytes = 5 * ty.block_bytes();
        let clean = random_weights(ty, 18, cols, &mut random);
        let x = random.gaussians(9 * cols);
        let places = match second {
            Second::None => vec![d],
            Second::Dmin(at) | Second::Min(at) => vec![d, at],
        };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for &at in &places {
                let mut weights = clean.clone();
                put_f16(&mut weights[3 * row_bytes + ty.block_bytes()..], at, bad);
                check(ty, cols, &weights, &x);
                for isa in isas() {
                    let out = product(isa, &view(ty, cols, &weights), &x);
                    for (i, y) in out.iter().enumerate() {
                        assert_eq!(y.is_finite(), i % 18 != 3, "{ty} {isa} output {i}");
                    }
                }
            }
            let mut x = x.clone();
            x[4 * cols + 7] = bad;
            check(ty, cols, &clean, &x);
            for isa in isas() {
                let out = product(isa, &view(ty, cols, &clean), &x);
                for (i, y) in out.iter().enumerate() {
                    assert_eq!(y.is_nan(), i / 18 == 4, "{ty} {isa} output {i}");
                }
            }
        }
    }
}

/// int8 activations cost little on Gaussian data.
#[test]
fn near_the_exact_product() {
    let mut random = Random(6);
    for (ty, ..) in INTEGER {
        let (n_rows, cols) = (32, 2048);
        let weights = match quant::can_encode(ty) {
            true => {
                let mut bytes = Vec::new();
                quant::encode_row(ty, &random.gaussians(n_rows * cols), &mut bytes)
                    .expect("finite");
                bytes
            }
            false => random_weights(ty, n_rows, cols, &mut random),
        };
        let x = random.gaussians(4 * cols);
        let found = product(Isa::detect(), &view(ty, cols, &weights), &x);
        let (mut error, mut power) = (0.0, 0.0);
        let rows: Vec<&[u8]> = weights.chunks(weights.len() / n_rows).collect();
        for (at, found) in found.iter().enumerate() {
            let w = decode(ty, rows[at % n_rows], cols);
            let x = &x[at / n_rows * cols..][..cols];
            let exact: f64 = w
                .iter()
                .zip(x)
                .map(|(&w, &x)| f64::from(w) * f64::from(x))
                .sum();
            error += (f64::from(*found) - exact).powi(2);
            power += exact.powi(2);
        }
        assert!(
            error / power < 5e-4,
            "{ty}: normalized MSE {}",
            error / power
        );
    }
}

/// Parts of the rows on several threads, whole tiles or not, give what one call
/// gives, and leave the columns beside the product alone.
#[test]
fn parts_and_threads() {
    let mut random = Random(7);
    let types = INTEGER.iter().map(|entry| entry.0);
    for ty in types.chain([TensorType::F16, TensorType::IQ2_S]) {
        let (n_rows, cols, n_x, stride) = (75, 512, 19, 80);
        let view = view(ty, cols, &random_weights(ty, n_rows, cols, &mut random));
        let x = random.gaussians(n_x * cols);
        for isa in isas() {
            let whole = product(isa, &view, &x);
            let matrix = Matrix::new(&view, isa).expect("a supported type");
            let mut activations = Activations::new();
            activations.resize(matrix.activation_kind(), n_x, cols);
            std::thread::scope(|scope| {
                for rows in [0..5, 5..6, 6..n_x] {
                    let (activations, x) = (&activations, &x);
                    // SAFETY: the threads' rows differ; products come later.
                    scope.spawn(move || unsafe { activations.fill_rows(isa, x, rows) });
                }
            });
            let mut out = vec![-7.0; n_x * stride];
            let columns = OutColumns::new(&mut out, stride);
            std::thread::scope(|scope| {
                for rows in [0..TILE_ROWS, TILE_ROWS..64, 64..70, 70..75] {
                    let (matrix, activations, columns) = (&matrix, &activations, &columns);
                    // SAFETY: the threads' output columns differ.
                    scope.spawn(move || unsafe { matrix.multiply(activations, rows, columns) });
                }
            });
            for (row, whole) in out.chunks(stride).zip(whole.chunks(n_rows)) {
                let found = row[..n_rows].iter().map(|&y| bits(y));
                assert!(found.eq(whole.iter().map(|&y| bits(y))), "{ty} {isa}");
                assert!(row[n_rows..].iter().all(|&y| y == -7.0), "{ty} {isa}");
            }
        }
    }
}

/// A last tile is moved up over rows of its neighbour, whose columns may already be
/// something else: it writes its own alone.
#[test]
fn a_part_writes_its_own_columns() {
    let mut random = Random(10);
    for (ty, ..) in INTEGER {
        let (n_rows, cols) = (75, 512);
        let view = view(ty, cols, &random_weights(ty, n_rows, cols, &mut random));
        for (isa, n_x) in isas()
            .into_iter()
            .flat_map(|isa| [(isa, 1), (isa, 3), (isa, 19)])
        {
            let matrix = Matrix::new(&view, isa).expect("a supported type");
            let mut activations = Activations::new();
            activations.resize(matrix.activation_kind(), n_x, cols);
            activations.fill(isa, &random.gaussians(n_x * cols));
            for rows in [70..75, 64..75, 3..9, 20..60] {
                let mut out = vec![-7.0; n_x * n_rows];
                let columns = OutColumns::new(&mut out, n_rows);
                // SAFETY: nobody else uses `out` meanwhile.
                unsafe { matrix.multiply(&activations, rows.clone(), &columns) };
                for (at, &y) in out.iter().enumerate() {
                    let is_own = rows.contains(&(at % n_rows));
                    assert_eq!(y != -7.0, is_own, "{ty} {isa} {rows:?}, output {at}");
                }
            }
        }
    }
}

/// Rows so long that every lane of a vector reads a stream of its own, in parts that
/// end inside a tile: the bits of one lane.
#[test]
fn streams_of_long_rows() {
    let mut random = Random(13);
    let (n_rows, cols) = (203, 4096);
    for (ty, ..) in INTEGER {
        let view = view(ty, cols, &random_weights(ty, n_rows, cols, &mut random));
        for n_x in [1, 3] {
            let x = random.gaussians(n_x * cols);
            let expected = product(Isa::Scalar, &view, &x);
            for isa in isas() {
                let matrix = Matrix::new(&view, isa).expect("a supported type");
                let mut activations = Activations::new();
                activations.resize(matrix.activation_kind(), n_x, cols);
                activations.fill(isa, &x);
                let mut out = vec![-7.0; n_x * n_rows];
                let columns = OutColumns::new(&mut out, n_rows);
                for rows in [0..195, 195..n_rows] {
                    // SAFETY: nobody else uses `out` meanwhile.
                    unsafe { matrix.multiply(&activations, rows, &columns) };
                }
                let same = out.iter().map(|&y| bits(y));
                assert!(same.eq(expected.iter().map(|&y| bits(y))), "{ty} {isa}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "rows 10..17 of 16")]
fn rows_beyond_the_matrix_are_a_bug() {
    let ty = TensorType::Q8_0;
    let view = view(ty, 32, &random_weights(ty, 16, 32, &mut Random(11)));
    let matrix = Matrix::new(&view, Isa::Scalar).expect("a supported type");
    let mut activations = Activations::new();
    activations.resize(matrix.activation_kind(), 1, 32);
    activations.fill(Isa::Scalar, &[1.0; 32]);
    let mut out = [0.0; 17];
    let columns = OutColumns::new(&mut out, 17);
    // SAFETY: nobody else uses `out` meanwhile.
    unsafe { matrix.multiply(&activations, 10..17, &columns) };
}

/// Lanes are reached by offsets of 32 bits.
#[test]
fn rows_of_128_mib_are_refused() {
    let row_bytes = (128 << 20) / 34 * 34 + 34;
    let view = view(TensorType::Q8_0, row_bytes / 34 * 32, &vec![0; row_bytes]);
    assert!(Matrix::new(&view, Isa::Scalar).is_err());
}

/// Buffers that served a larger pass serve a smaller one of another kind.
#[test]
fn buffers_are_reused() {
    let mut random = Random(8);
    let mut activations = Activations::new();
    let isa = Isa::detect();
    for (ty, n_x) in [
        (TensorType::Q4_K, 30),
        (TensorType::F32, 3),
        (TensorType::Q8_0, 30),
        (TensorType::Q4_K, 2),
    ] {
        let cols = 512;
        let view = view(ty, cols, &random_weights(ty, 16, cols, &mut random));
        let x = random.gaussians(n_x * cols);
        let matrix = Matrix::new(&view, isa).expect("a supported type");
        activations.resize(matrix.activation_kind(), n_x, cols);
        activations.fill(isa, &x);
        let mut out = vec![0.0; n_x * 16];
        matrix.multiply_all(&activations, &mut out);
        assert_eq!(out, product(isa, &view, &x), "{ty}");
    }
    let bytes = activations.bytes();
    activations.resize(ActivationKind::Int8Per256, 1, 256);
    assert_eq!(activations.bytes(), bytes, "nothing is given back");
}

#[test]
fn rows_are_decoded() {
    let mut random = Random(9);
    let ty = TensorType::Q6_K;
    let weights = random_weights(ty, 5, 512, &mut random);
    let matrix = Matrix::new(&view(ty, 512, &weights), Isa::Scalar).expect("a supported type");
    let mut row = vec![0.0; 512];
    matrix.decode_row(3, &mut row);
    assert_eq!(row, decode(ty, &weights[3 * 420..4 * 420], 512));
    assert_eq!(
        (matrix.n_rows(), matrix.cols(), matrix.bytes()),
        (5, 512, 2100)
    );
    assert_eq!(matrix.ty(), ty);
}

#[test]
fn integer_tensors_are_refused() {
    for ty in [
        TensorType::I8,
        TensorType::I16,
        TensorType::I32,
        TensorType::I64,
    ] {
        let view = view(ty, 4, &vec![0; 4 * ty.block_bytes()]);
        let error = Matrix::new(&view, Isa::Scalar).err().expect("an error");
        assert!(error.to_string().contains('w'), "{error}");
    }
}
