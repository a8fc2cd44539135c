//! Q5_0: 32 elements in 22 bytes, `x = d * (q - 16)`.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0..2  | `d`, f16                                                     |
//! | 2..6  | u32, bit `i` is bit 4 of the code of element i               |
//! | 6..22 | bits 0..4 of `q`: byte `i` holds element i (low), i+16 (high) |
//!
//! The encoder writes the bytes that the package's `quantize` writes. What a
//! reader would get wrong: as in Q4_0 the sign of `d` is opposite to that of
//! the element of largest magnitude.

use super::{f16_at, index_of_largest, inverse, part, put_f16};

/// Decodes a block.
#[inline(always)]
pub fn decode_block(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    let code = join(part(block, 2), part(block, 6));
    for i in 0..32 {
        out[i] = d * (code[i] as i32 - 16) as f32;
    }
}

/// Encodes finite `x`; false if the scale overflows f16.
pub(super) fn encode_block(x: &[f32; 32], block: &mut [u8; 22]) -> bool {
    let d = x[index_of_largest(x)] / -16.0;
    let inverse = inverse(d);
    let code = x.map(|v| ((v * inverse + 16.5) as i32).clamp(0, 31) as u8);
    split(&code, &mut block[2..]);
    put_f16(block, 0, d).is_finite()
}

/// 5-bit codes from their fifth bits and their lower four.
#[inline(always)]
pub(super) fn join(high: &[u8; 4], low: &[u8; 16]) -> [u8; 32] {
    let high = u32::from_le_bytes(*high);
    std::array::from_fn(|i| {
        let four = if i < 16 {
            low[i] & 15
        } else {
            low[i - 16] >> 4
        };
        four | ((high >> i & 1) as u8) << 4
    })
}

/// Stores 5-bit codes: 4 bytes of fifth bits, then 16 of the lower four.
pub(super) fn split(code: &[u8; 32], bytes: &mut [u8]) {
    let high = (0..32).fold(0u32, |bits, i| bits | (code[i] as u32 >> 4) << i);
    bytes[..4].copy_from_slice(&high.to_le_bytes());
    for i in 0..16 {
        bytes[4 + i] = code[i] & 15 | code[i + 16] << 4;
    }
}
