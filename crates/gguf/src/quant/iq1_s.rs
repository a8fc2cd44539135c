//! IQ1_S: 256 elements in 50 bytes; 8 sub-blocks of 32, each of four grid
//! entries of 8 values -1, 0, 1, `x = (d * (1 + 2 * scale)) * (value + delta)`.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..2   | `d`, f16                                                    |
//! | 2..34  | bits 0..8 of the grid index of entry k                      |
//! | 34..50 | u16 for each sub-block: bits 3k..3k+3 are bits 8..11 of the grid index of its entry k, bits 12..15 the scale, bit 15 set: delta is -0.125, else 0.125 |
//!
//! What a reader would get wrong: delta moves all values, also the zeros.

use super::codebook::{IQ1, IQ1_DELTA};
use super::{f16_at, part};

/// Decodes a block.
pub fn decode_block(block: &[u8; 50], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low: &[u8; 4] = part(block, 2 + s * 4);
        let word = u16::from_le_bytes(*part(block, 34 + s * 2));
        let scale = d * (1 + 2 * (word >> 12 & 7)) as f32;
        let delta = if word >> 15 == 0 {
            IQ1_DELTA
        } else {
            -IQ1_DELTA
        };
        for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let entry = &IQ1[low[k] as usize | (word as usize >> (3 * k) & 7) << 8];
            for i in 0..8 {
                out[i] = scale * (entry[i] as f32 + delta);
            }
        }
    }
}
