//! IQ3_S: 256 elements in 110 bytes; 8 sub-blocks of 32, each of eight grid
//! entries of 4 magnitudes, `x = (d * (1 + 2 * scale)) * magnitude * sign`.
//!
//! | bytes    | field                                                     |
//! |----------|-----------------------------------------------------------|
//! | 0..2     | `d`, f16                                                  |
//! | 2..66    | bits 0..8 of the grid index of entry k                    |
//! | 66..74   | bit 8 of the grid indices: byte `s`, bit `i` is entry 8s + i |
//! | 74..106  | signs: byte `k`, bit `i` set: element 8k + i is negative  |
//! | 106..110 | 4-bit scales: byte `i` holds that of sub-block 2i (low), 2i+1 (high) |
//!
//! What a reader would get wrong: scales are odd numbers here, not halves as in
//! IQ3_XXS.

use super::codebook::{IQ3_S, pair};
use super::{f16_at, part, put_signed};

/// Decodes a block.
pub fn decode_block(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    let low: &[u8; 64] = part(block, 2);
    let high: &[u8; 8] = part(block, 66);
    let signs: &[u8; 32] = part(block, 74);
    let scales: &[u8; 4] = part(block, 106);
    let entry = |k: usize| &IQ3_S[low[k] as usize | (high[k / 8] as usize >> (k % 8) & 1) << 8];
    for (k, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = scales[k / 8] >> (k / 4 % 2 * 4) & 15;
        let scale = d * (1 + 2 * scale) as f32;
        put_signed(out, scale, &pair(entry(2 * k), entry(2 * k + 1)), signs[k]);
    }
}
