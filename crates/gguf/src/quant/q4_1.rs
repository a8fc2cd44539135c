//! Q4_1: 32 elements in 20 bytes, `x = d * q + m`.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0..2  | `d`, f16                                                     |
//! | 2..4  | `m`, f16                                                     |
//! | 4..20 | 4-bit `q`: byte `i` holds element i (low), element i+16 (high) |
//!
//! The encoder writes the bytes that the package's `quantize` writes. What a
//! reader would get wrong: `m` is the smallest element and is added; the
//! minimum of the K-quants is subtracted.

use super::{f16_at, inverse, part, put_f16};

/// Decodes a block.
#[inline(always)]
pub fn decode_block(block: &[u8; 20], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    let m = f16_at(block, 2);
    let q: &[u8; 16] = part(block, 4);
    for i in 0..16 {
        out[i] = d * (q[i] & 15) as f32 + m;
    }
    for i in 0..16 {
        out[i + 16] = d * (q[i] >> 4) as f32 + m;
    }
}

/// Encodes finite `x`; false if scale or minimum overflow f16.
pub(super) fn encode_block(x: &[f32; 32], block: &mut [u8; 20]) -> bool {
    let (d, min, code) = codes(x, 15);
    for i in 0..16 {
        block[4 + i] = code[i] | code[i + 16] << 4;
    }
    put_f16(block, 0, d).is_finite() & put_f16(block, 2, min).is_finite()
}

/// Scale, minimum and codes 0 to `top` that span the range of `x`.
#[inline(always)]
pub(super) fn codes(x: &[f32; 32], top: i32) -> (f32, f32, [u8; 32]) {
    let min = x.iter().copied().fold(f32::INFINITY, f32::min);
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let d = (max - min) / top as f32;
    let inverse = inverse(d);
    let code = x.map(|v| (((v - min) * inverse + 0.5) as i32).clamp(0, top) as u8);
    (d, min, code)
}
