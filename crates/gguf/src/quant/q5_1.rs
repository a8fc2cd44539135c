//! Q5_1: 32 elements in 24 bytes, `x = d * q + m`.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0..2  | `d`, f16                                                     |
//! | 2..4  | `m`, f16                                                     |
//! | 4..8  | u32, bit `i` is bit 4 of the code of element i               |
//! | 8..24 | bits 0..4 of `q`: byte `i` holds element i (low), i+16 (high) |
//!
//! The encoder writes the bytes that the package's `quantize` writes. What a
//! reader would get wrong: `m` is added, not subtracted.

use super::{f16_at, part, put_f16, q4_1, q5_0};

/// Decodes a block.
#[inline(always)]
pub fn decode_block(block: &[u8; 24], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    let m = f16_at(block, 2);
    let code = q5_0::join(part(block, 4), part(block, 8));
    for i in 0..32 {
        out[i] = d * code[i] as f32 + m;
    }
}

/// Encodes finite `x`; false if scale or minimum overflow f16.
pub(super) fn encode_block(x: &[f32; 32], block: &mut [u8; 24]) -> bool {
    let (d, min, code) = q4_1::codes(x, 31);
    q5_0::split(&code, &mut block[4..]);
    put_f16(block, 0, d).is_finite() & put_f16(block, 2, min).is_finite()
}
