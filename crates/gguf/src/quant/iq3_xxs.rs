//! IQ3_XXS: 256 elements in 98 bytes; 8 sub-blocks of 32, each of eight grid
//! entries of 4 magnitudes, `x = (d * (0.5 + scale) * 0.5) * magnitude * sign`.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..2   | `d`, f16                                                    |
//! | 2..66  | grid index of entry k                                       |
//! | 66..98 | u32 for each sub-block: bits 7k..7k+7 are the sign index of its elements 8k to 8k+7, bits 28..32 the scale |
//!
//! What a reader would get wrong: a sign index covers two grid entries; the
//! eighth sign is the parity of the stored seven.

use super::codebook::{IQ3_XXS, pair, signs_with_parity};
use super::{f16_at, part, put_signed};

/// Decodes a block.
pub fn decode_block(block: &[u8; 98], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let index: &[u8; 8] = part(block, 2 + s * 8);
        let word = u32::from_le_bytes(*part(block, 66 + s * 4));
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        for (k, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let signs = signs_with_parity(word >> (7 * k));
            let (a, b) = (index[2 * k] as usize, index[2 * k + 1] as usize);
            put_signed(out, scale, &pair(&IQ3_XXS[a], &IQ3_XXS[b]), signs);
        }
    }
}
