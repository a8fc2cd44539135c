//! IQ4_XS: 256 elements in 136 bytes; 8 sub-blocks of 32,
//! `x = (d * (scale - 32)) * LEVELS[q]` with the levels of IQ4_NL.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..2   | `d`, f16                                                    |
//! | 2..4   | u16, bits 2s..2s+2 are bits 4..6 of scale s                 |
//! | 4..8   | bits 0..4 of the scales: byte `i` holds scale 2i (low), 2i+1 (high) |
//! | 8..136 | 4-bit `q`, 16 bytes for each sub-block: byte `i` holds element i (low), i+16 (high) |
//!
//! What a reader would get wrong: codes pair elements 16 apart as in the
//! 32-blocks, not 32 apart as in Q4_K.

use super::codebook::IQ4_LEVELS;
use super::{f16_at, part};

/// Decodes a block.
pub fn decode_block(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    let scale_high = u16::from_le_bytes(*part(block, 2));
    let scale_low: &[u8; 4] = part(block, 4);
    for (s, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let four = (scale_low[s / 2] >> (s % 2 * 4) & 15) as i32;
        let two = (scale_high >> (2 * s) & 3) as i32;
        let scale = d * ((four | two << 4) - 32) as f32;
        let q: &[u8; 16] = part(block, 8 + s * 16);
        for i in 0..16 {
            out[i] = scale * IQ4_LEVELS[(q[i] & 15) as usize] as f32;
            out[i + 16] = scale * IQ4_LEVELS[(q[i] >> 4) as usize] as f32;
        }
    }
}
