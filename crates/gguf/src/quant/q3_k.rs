//! Q3_K: 256 elements in 110 bytes; 16 sub-blocks of 16,
//! `x = (d * (scale - 32)) * (q - 4)`.
//!
//! | bytes    | field                                                     |
//! |----------|-----------------------------------------------------------|
//! | 0..32    | bit 2 of `q`: byte `i`, bit `g` belongs to element 32g + i |
//! | 32..96   | bits 0..2 of `q`, 32 bytes for each half of 128 elements: byte `i` holds elements i, i+32, i+64, i+96, lowest bits first |
//! | 96..104  | bits 0..4 of the scales: byte `i` holds scale i (low), i+8 (high) |
//! | 104..108 | bits 4..6 of the scales: byte `i` holds scales i, i+4, i+8, i+12, lowest bits first |
//! | 108..110 | `d`, f16                                                  |
//!
//! What a reader would get wrong: seen as two bits and a mask, the offset of 4
//! applies where the mask bit is *not* set.

use super::{f16_at, part};

/// Decodes a block.
pub fn decode_block(block: &[u8; 110], out: &mut [f32; 256]) {
    let high: &[u8; 32] = part(block, 0);
    let low: &[u8; 64] = part(block, 32);
    let scale_low: &[u8; 8] = part(block, 96);
    let scale_high: &[u8; 4] = part(block, 104);
    let d = f16_at(block, 108);
    for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let four = scale_low[s % 8] >> (s / 8 * 4) & 15;
        let two = scale_high[s % 4] >> (s / 4 * 2) & 3;
        let scale = d * ((four | two << 4) as i32 - 32) as f32;
        let low: &[u8; 16] = part(low, s / 8 * 32 + s % 2 * 16);
        let high: &[u8; 16] = part(high, s % 2 * 16);
        let shift = s / 2 % 4 * 2;
        for i in 0..16 {
            let q = low[i] >> shift & 3 | (high[i] >> (s / 2) & 1) << 2;
            out[i] = scale * (q as i32 - 4) as f32;
        }
    }
}
