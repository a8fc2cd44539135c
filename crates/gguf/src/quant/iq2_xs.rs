//! IQ2_XS: 256 elements in 74 bytes; 16 sub-blocks of 16, each of two grid
//! entries of 8 magnitudes, `x = (d * (0.5 + scale) * 0.25) * magnitude * sign`.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..2   | `d`, f16                                                    |
//! | 2..66  | u16 for each entry: bits 0..9 grid index, bits 9..16 sign index |
//! | 66..74 | 4-bit scales: byte `i` holds that of sub-block 2i (low), 2i+1 (high) |
//!
//! What a reader would get wrong: as in IQ2_XXS the eighth sign of an entry is
//! the parity of the stored seven.

use super::codebook::{IQ2_XS, signs_with_parity};
use super::{f16_at, part, put_signed};

/// Decodes a block.
pub fn decode_block(block: &[u8; 74], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    let scales: &[u8; 8] = part(block, 66);
    for (k, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let word = u16::from_le_bytes(*part(block, 2 + k * 2));
        let scale = scales[k / 4] >> (k / 2 % 2 * 4) & 15;
        let scale = d * (0.5 + scale as f32) * 0.25;
        let signs = signs_with_parity((word >> 9) as u32);
        put_signed(out, scale, &IQ2_XS[(word & 511) as usize], signs);
    }
}
