//! Block encodings against the values and bytes of the PyPI package `gguf`
//! (`testdata/quant`), and the bounds of the encoders.

use gguf::TensorType;
use gguf::quant::{Error, can_encode, decode_row, encode_row};
use proptest::prelude::*;

const ENCODERS: [TensorType; 11] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
];

fn golden(name: &str) -> Vec<u8> {
    let path = format!("{}/../../testdata/quant/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (floats, left) = bytes.as_chunks();
    assert!(left.is_empty());
    floats.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

/// The value's bits, all NaN as one: their sign and payload mean nothing.
fn bits(x: f32) -> u32 {
    if x.is_nan() { 0x7fc00000 } else { x.to_bits() }
}

/// 64-bit FNV-1a of the little-endian values.
fn checksum(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|x| bits(*x).to_le_bytes());
    bytes.fold(0xcbf29ce484222325, |hash, byte| {
        (hash ^ byte as u64).wrapping_mul(0x100000001b3)
    })
}

fn decoded(ty: TensorType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.5; bytes.len() / ty.block_bytes() * ty.block_len()];
    decode_row(ty, bytes, &mut out).unwrap();
    out
}

fn encoded(ty: TensorType, x: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_row(ty, x, &mut bytes).unwrap();
    bytes
}

/// Same bits as the package, for every type, every grid entry and every kind of
/// scale.
#[test]
fn decodes_as_the_package_does() {
    let checksums = String::from_utf8(golden("checksums.txt")).unwrap();
    let mut n_types = 0;
    for line in checksums.lines() {
        let [name, count, hash] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("checksums.txt: {line}");
        };
        let ty = TensorType::from_name(name).unwrap();
        let values = decoded(ty, &golden(&format!("{name}.bin")));
        let stored = floats(&golden(&format!("{name}.f32")));
        for (i, (found, expected)) in values.iter().zip(&stored).enumerate() {
            assert_eq!(
                bits(*found),
                bits(*expected),
                "{ty} element {i}: {found} instead of {expected}"
            );
        }
        assert_eq!(values.len().to_string(), count, "{ty}: number of values");
        assert_eq!(format!("{:016x}", checksum(&values)), hash, "{ty}");
        n_types += 1;
    }
    assert_eq!(n_types, TensorType::ALL.len());
}

/// Same bytes as the package's `quantize`.
#[test]
fn encodes_as_the_package_does() {
    let x = floats(&golden("encode.f32"));
    for name in ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"] {
        let ty = TensorType::from_name(name).unwrap();
        let expected = golden(&format!("encode.{name}.bin"));
        let found = encoded(ty, &x);
        assert_eq!(found.len(), expected.len(), "{ty}");
        let (bytes, len) = (ty.block_bytes(), ty.block_len());
        for i in 0..x.len() / len {
            assert_eq!(
                found[i * bytes..(i + 1) * bytes],
                expected[i * bytes..(i + 1) * bytes],
                "{ty} block {i}: {:?}",
                &x[i * len..(i + 1) * len]
            );
        }
    }
}

/// f16 to f32 by another way: sign, exponent and mantissa as numbers.
#[test]
fn f16_is_exact_for_all_bits() {
    for half in 0..=u16::MAX {
        let mut out = [0.5];
        decode_row(TensorType::F16, &half.to_le_bytes(), &mut out).unwrap();
        let (exponent, mantissa) = ((half >> 10 & 31) as i32, (half & 1023) as f64);
        let magnitude = match (exponent, half & 1023) {
            (31, 0) => f64::INFINITY,
            (31, _) => f64::NAN,
            (0, _) => mantissa * 2f64.powi(-24),
            _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
        };
        let sign = if half >> 15 == 1 { -1.0 } else { 1.0 };
        assert_eq!(bits(out[0]), bits((sign * magnitude) as f32), "{half:#06x}");
    }
}

#[test]
fn wrong_lengths_are_errors() {
    for &ty in TensorType::ALL {
        let (bytes, len) = (ty.block_bytes(), ty.block_len());
        let mut out = vec![0.0; 2 * len];
        let found = decode_row(ty, &vec![0; 2 * bytes + 1], &mut out);
        let expected = Error::ByteLength {
            ty,
            elements: 2 * len,
            found: 2 * bytes + 1,
            expected: 2 * bytes,
        };
        assert_eq!(found, Err(expected));
        decode_row(ty, &[], &mut []).unwrap();
        if len == 1 {
            continue;
        }
        let expected = Error::RowLength {
            ty,
            found: len - 1,
            block: len,
        };
        let found = decode_row(ty, &vec![0; bytes], &mut out[..len - 1]);
        assert_eq!(found, Err(expected.clone()));
        let found = encode_row(ty, &vec![0.0; len - 1], &mut Vec::new());
        assert_eq!(found, Err(expected));
    }
}

#[test]
fn values_that_cannot_be_encoded_are_errors() {
    for &ty in TensorType::ALL {
        let mut x = vec![0.25; 512];
        let mut bytes = vec![7; 3];
        if !ENCODERS.contains(&ty) {
            assert!(!can_encode(ty), "{ty}");
            let found = encode_row(ty, &x, &mut bytes);
            assert_eq!(found, Err(Error::NoEncoder { ty }));
            continue;
        }
        assert!(can_encode(ty), "{ty}");
        let index = 300;
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            x[index] = value;
            let found = encode_row(ty, &x, &mut bytes).unwrap_err();
            assert!(
                matches!(found, Error::NotFinite { ty: t, index: i, .. } if (t, i) == (ty, index)),
                "{found}"
            );
        }
        if ty == TensorType::F32 {
            continue;
        }
        for value in [f32::MAX, f32::MIN] {
            x[index] = value;
            let found = encode_row(ty, &x, &mut bytes);
            assert_eq!(found, Err(Error::TooLarge { ty, index, value }));
        }
        assert_eq!(bytes, [7; 3], "{ty}: an error must leave the bytes alone");
    }
}

/// Largest error of storing `v` as an f16.
fn f16_error(v: f32) -> f32 {
    (v.abs() / 2048.0).max(2f32.powi(-25))
}

/// Largest error of an element in a block of 32 with these extremes.
fn bound(ty: TensorType, x: f32, min: f32, max: f32) -> f32 {
    let largest = max.max(-min);
    // Steps from one code to the next, codes from end to end, steps that the worst element is off.
    let (step, top, steps_off, offset_error) = match ty {
        TensorType::F32 => return 0.0,
        TensorType::F16 => return f16_error(x),
        TensorType::BF16 => return (x.abs() / 256.0).max(2f32.powi(-134)),
        TensorType::Q8_0 => (largest / 127.0, 127.0, 0.5, 0.0),
        // The codes are not symmetric: the opposite of the largest element is a whole step off.
        TensorType::Q4_0 => (largest / 8.0, 8.0, 1.0, 0.0),
        TensorType::Q5_0 => (largest / 16.0, 16.0, 1.0, 0.0),
        TensorType::Q4_1 => ((max - min) / 15.0, 15.0, 0.5, f16_error(min)),
        TensorType::Q5_1 => ((max - min) / 31.0, 31.0, 0.5, f16_error(min)),
        _ => panic!("{ty} has no bound for single elements"),
    };
    let arithmetic = 4.0 * f32::EPSILON * largest;
    step * steps_off + top * f16_error(step) + offset_error + arithmetic
}

/// Largest root mean square error of a straightforward K-quant encoder: codes
/// that span a sub-block, then 6-bit (Q6_K: 8-bit) scales and minima.
fn rms_bound(ty: TensorType, x: &[f32]) -> f32 {
    let (len, top, scale_top) = match ty {
        TensorType::Q4_K => (32, 15.0, 63.0),
        TensorType::Q5_K => (32, 31.0, 63.0),
        TensorType::Q6_K => (16, 32.0, 128.0),
        _ => panic!("{ty} is no K-quant with an encoder"),
    };
    let ranges = x.chunks(len).map(|x| {
        let min = x.iter().copied().fold(0.0, f32::min);
        let max = x.iter().copied().fold(0.0, f32::max);
        match ty {
            TensorType::Q6_K => (0.0, max.max(-min) / top),
            _ => (-min, (max - min) / top),
        }
    });
    let largest_min = ranges.clone().fold(0.0, |a, r| f32::max(a, r.0));
    let largest_step = ranges.clone().fold(0.0, |a, r| f32::max(a, r.1));
    let f16_errors = top * scale_top * f16_error(largest_step / scale_top)
        + scale_top * f16_error(largest_min / scale_top);
    let rounding = (top * largest_step + largest_min) / (2.0 * scale_top) + f16_errors;
    // Codes of Q6_K are not symmetric, as those of Q4_0.
    let steps_off = if ty == TensorType::Q6_K { 1.0 } else { 0.5 };
    let squares = ranges.map(|(_, step)| (steps_off * step + rounding).powi(2));
    (squares.sum::<f32>() * len as f32 / x.len() as f32).sqrt()
}

fn rms(x: impl Iterator<Item = f32>) -> f32 {
    let (n, sum) = x.fold((0, 0.0), |(n, sum), x| (n + 1, sum + x as f64 * x as f64));
    (sum / n as f64).sqrt() as f32
}

fn rms_error(ty: TensorType, x: &[f32]) -> f32 {
    let y = decoded(ty, &encoded(ty, x));
    rms(x.iter().zip(&y).map(|(x, y)| x - y))
}

/// Rows of 256 elements: of any magnitude, with an offset, with an outlier, the
/// first elements equal.
fn row() -> impl Strategy<Value = Vec<f32>> {
    let unit = prop::collection::vec(-1.0f32..1.0, 256);
    let outlier = (0usize..256, -40.0f32..40.0);
    let equal = (0usize..=256, prop_oneof![Just(0.0), -3.0f32..3.0]);
    let exponent = prop_oneof![4 => -9.0f32..3.0, 1 => -45.0f32..-9.0];
    (unit, exponent, -2.0f32..2.0, outlier, equal).prop_map(
        |(mut x, exponent, offset, (at, outlier), (n_equal, equal))| {
            x.iter_mut().for_each(|x| *x += offset);
            x[at] = outlier;
            x[..n_equal].fill(equal);
            let scale = 10f32.powf(exponent);
            x.iter_mut().for_each(|x| *x *= scale);
            x
        },
    )
}

/// Numbers that are about normally distributed, always the same.
fn normal(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n)
        .map(|_| (0..12).map(|_| uniform()).sum::<f32>() * 0.02)
        .collect()
}

/// Relative RMS error on normally distributed weights: the quality of the
/// encoders' search.
#[test]
fn normal_weights_keep_their_precision() {
    let x = normal(256 * 64);
    let limits = [
        (TensorType::Q8_0, 0.0053),
        (TensorType::Q6_K, 0.0171),
        (TensorType::Q5_K, 0.0358),
        (TensorType::Q5_1, 0.0376),
        (TensorType::Q5_0, 0.0420),
        (TensorType::Q4_K, 0.0707),
        (TensorType::Q4_1, 0.0776),
        (TensorType::Q4_0, 0.0850),
    ];
    for (ty, limit) in limits {
        let found = relative_error(ty, &x);
        assert!(
            found < limit,
            "{ty}: relative RMS error {found}, limit {limit}"
        );
        assert!(
            found > limit * 0.9,
            "{ty}: {found} is far below the limit {limit}: tighten it"
        );
    }
}

/// Relative RMS error of `x`.
fn relative_error(ty: TensorType, x: &[f32]) -> f32 {
    rms_error(ty, x) / rms(x.iter().copied())
}

/// Where the super-block's scale is a few units of the smallest f16, the
/// nearest one may be too small to reach the largest element.
#[test]
fn tiny_weights_are_not_cut_off() {
    const UNIT: f32 = 1.0 / (1 << 24) as f32;
    let cases = [
        (TensorType::Q4_K, 15.0 * 63.0, 0.035),
        (TensorType::Q5_K, 31.0 * 63.0, 0.018),
        (TensorType::Q6_K, 32.0 * 127.0, 0.011),
    ];
    for (ty, top, limit) in cases {
        for step in 0..=80 {
            let units = 1.0 + step as f32 * 0.025;
            let largest = top * UNIT * units;
            let element = |i: i32| match ty {
                TensorType::Q6_K => largest * ((i * 7 % 33) as f32 / 16.0 - 1.0),
                _ => largest * (i * 7 % 33) as f32 / 32.0,
            };
            let x: Vec<f32> = (0..256).map(element).collect();
            let found = relative_error(ty, &x);
            assert!(found < limit, "{ty}, {units} units: {found}");
        }
    }
}

/// Elements far above 0: the best line through them does not start at or below
/// 0, as the format needs.
#[test]
fn weights_of_one_sign_have_the_best_scale() {
    let x: Vec<f32> = (0..256).map(|i| 1.0 + (i * 7 % 32) as f32 / 31.0).collect();
    for (ty, limit) in [(TensorType::Q4_K, 0.0245), (TensorType::Q5_K, 0.0111)] {
        let found = relative_error(ty, &x);
        assert!(found < limit, "{ty}: {found}");
    }
}

#[test]
fn zeros_stay_zeros() {
    for ty in ENCODERS {
        for zero in [0.0, -0.0] {
            let y = decoded(ty, &encoded(ty, &[zero; 512]));
            assert!(y.iter().all(|y| *y == 0.0), "{ty}");
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_decode(bytes in prop::collection::vec(any::<u8>(), 2 * 210)) {
        for &ty in TensorType::ALL {
            let n = ty.block_bytes();
            let both = decoded(ty, &bytes[..2 * n]);
            let mut apart = decoded(ty, &bytes[..n]);
            apart.extend(decoded(ty, &bytes[n..2 * n]));
            prop_assert_eq!(checksum(&both), checksum(&apart), "{}", ty);
        }
    }

    #[test]
    fn elements_stay_within_their_bound(x in row()) {
        for ty in ENCODERS {
            if ty.block_len() == 256 {
                continue;
            }
            let y = decoded(ty, &encoded(ty, &x));
            for (x, y) in x.chunks(32).zip(y.chunks(32)) {
                let min = x.iter().copied().fold(f32::INFINITY, f32::min);
                let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                for (x, y) in x.iter().zip(y) {
                    let bound = bound(ty, *x, min, max);
                    prop_assert!((x - y).abs() <= bound, "{}: {} became {}, bound {}", ty, x, y, bound);
                }
            }
        }
    }

    #[test]
    fn k_quants_stay_within_the_straightforward_bound(x in row()) {
        for ty in [TensorType::Q4_K, TensorType::Q5_K, TensorType::Q6_K] {
            let (found, bound) = (rms_error(ty, &x), rms_bound(ty, &x));
            prop_assert!(found <= bound, "{}: RMS error {}, bound {}", ty, found, bound);
        }
    }

    /// Encoding what was decoded changes no value.
    #[test]
    fn encoding_again_changes_nothing(x in row()) {
        for name in ["F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0"] {
            let ty = TensorType::from_name(name).unwrap();
            let once = decoded(ty, &encoded(ty, &x));
            let twice = decoded(ty, &encoded(ty, &once));
            prop_assert_eq!(&once, &twice, "{}", ty);
        }
    }
}
