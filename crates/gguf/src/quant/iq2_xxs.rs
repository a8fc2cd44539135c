//! IQ2_XXS: 256 elements in 66 bytes; 8 sub-blocks of 32, each of four grid
//! entries of 8 magnitudes, `x = (d * (0.5 + scale) * 0.25) * magnitude * sign`.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0..2  | `d`, f16                                                     |
//! | 2..66 | 8 bytes for each sub-block: four grid indices of a byte, then a u32: bits 7k..7k+7 are the sign index of entry k, bits 28..32 the scale |
//!
//! What a reader would get wrong: a sign index has 7 bits; the eighth sign is
//! their parity (see [`signs_with_parity`]).

use super::codebook::{IQ2_XXS, signs_with_parity};
use super::{f16_at, part, put_signed};

/// Decodes a block.
pub fn decode_block(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let index: &[u8; 4] = part(block, 2 + s * 8);
        let word = u32::from_le_bytes(*part(block, 6 + s * 8));
        let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (k, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let signs = signs_with_parity(word >> (7 * k));
            put_signed(out, scale, &IQ2_XXS[index[k] as usize], signs);
        }
    }
}
