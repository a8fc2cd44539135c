//! IQ4_NL: 32 elements in 18 bytes, `x = d * LEVELS[q]`.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0..2  | `d`, f16                                                     |
//! | 2..18 | 4-bit `q`: byte `i` holds element i (low), element i+16 (high) |
//!
//! What a reader would get wrong: there is no level 0; the smallest are -10
//! and 1.

use super::codebook::IQ4_LEVELS;
use super::{f16_at, part};

/// Decodes a block.
pub fn decode_block(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    let q: &[u8; 16] = part(block, 2);
    for i in 0..16 {
        out[i] = d * IQ4_LEVELS[(q[i] & 15) as usize] as f32;
        out[i + 16] = d * IQ4_LEVELS[(q[i] >> 4) as usize] as f32;
    }
}
