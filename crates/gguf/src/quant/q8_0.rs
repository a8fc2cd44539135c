//! Q8_0: 32 elements in 34 bytes, `x = d * q`.
//!
//! | bytes | field                                   |
//! |-------|-----------------------------------------|
//! | 0..2  | `d`, f16                                |
//! | 2..34 | `q`, signed byte; byte `i` is element i |
//!
//! The encoder writes the bytes that the package's `quantize` writes. What a
//! reader would get wrong: codes are rounded with the f32 scale, before it is
//! rounded to f16, and halves go away from zero.

use super::{f16_at, inverse, part, put_f16};

/// Decodes a block.
#[inline(always)]
pub fn decode_block(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    let q: &[u8; 32] = part(block, 2);
    for i in 0..32 {
        out[i] = d * (q[i] as i8 as f32);
    }
}

/// Encodes finite `x`; false if the scale overflows f16.
pub(super) fn encode_block(x: &[f32; 32], block: &mut [u8; 34]) -> bool {
    let largest = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let d = largest / 127.0;
    let inverse = inverse(d);
    for i in 0..32 {
        let scaled = x[i] * inverse;
        let floor = scaled.abs() as i32;
        let up = (scaled.abs() - floor as f32 >= 0.5) as i32;
        let magnitude = (floor + up).min(127);
        block[2 + i] = if scaled < 0.0 { -magnitude } else { magnitude } as u8;
    }
    put_f16(block, 0, d).is_finite()
}
