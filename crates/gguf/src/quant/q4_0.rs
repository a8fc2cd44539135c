//! Q4_0: 32 elements in 18 bytes, `x = d * (q - 8)`.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0..2  | `d`, f16                                                     |
//! | 2..18 | 4-bit `q`: byte `i` holds element i (low), element i+16 (high) |
//!
//! The encoder writes the bytes that the package's `quantize` writes. What a
//! reader would get wrong: the element of largest magnitude gets code 0
//! whatever its sign, so `d` is negative when that element is positive.

use super::{f16_at, index_of_largest, inverse, part, put_f16};

/// Decodes a block.
#[inline(always)]
pub fn decode_block(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    let q: &[u8; 16] = part(block, 2);
    for i in 0..16 {
        out[i] = d * ((q[i] & 15) as i32 - 8) as f32;
    }
    for i in 0..16 {
        out[i + 16] = d * ((q[i] >> 4) as i32 - 8) as f32;
    }
}

/// Encodes finite `x`; false if the scale overflows f16.
pub(super) fn encode_block(x: &[f32; 32], block: &mut [u8; 18]) -> bool {
    let d = x[index_of_largest(x)] / -8.0;
    let inverse = inverse(d);
    let code = |v: f32| ((v * inverse + 8.5) as i32).clamp(0, 15) as u8;
    for i in 0..16 {
        block[2 + i] = code(x[i]) | code(x[i + 16]) << 4;
    }
    put_f16(block, 0, d).is_finite()
}
