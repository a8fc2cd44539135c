//! TQ2_0: 256 ternary elements in 66 bytes, `x = d * (q - 1)`.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..64  | 2-bit `q`, 32 bytes for each half of 128 elements: byte `i` holds elements i, i+32, i+64, i+96, lowest bits first |
//! | 64..66 | `d`, f16                                                    |
//!
//! What a reader would get wrong: code 3 is not used by writers but decodes, as
//! 2.

use super::{f16_at, part};

/// Decodes a block.
pub fn decode_block(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = f16_at(block, 64);
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let q: &[u8; 32] = part(block, g / 4 * 32);
        for i in 0..32 {
            out[i] = d * ((q[i] >> (g % 4 * 2) & 3) as i32 - 1) as f32;
        }
    }
}
