//! IQ1_M: 256 elements in 56 bytes; 16 sub-blocks of 16, each of two grid
//! entries of 8 values -1, 0, 1, `x = (d * (1 + 2 * scale)) * (value + delta)`
//! with the grid of IQ1_S.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..32  | bits 0..8 of the grid index of entry k                      |
//! | 32..48 | half-bytes, entry 2i (low) and 2i+1 (high) of byte `i`: bits 0..3 are bits 8..11 of the grid index, bit 3 set: delta is -0.125, else 0.125 |
//! | 48..56 | four u16: bits 3i..3i+3 of word `w` are the scale of sub-block 4w + i; bits 12..16 are bits 4w..4w+4 of `d`, f16 |
//!
//! What a reader would get wrong: `d` has no place of its own; it is put
//! together from the tops of the scale words.

use super::codebook::{IQ1, IQ1_DELTA};
use super::{part, plain};

/// Decodes a block.
pub fn decode_block(block: &[u8; 56], out: &mut [f32; 256]) {
    let low: &[u8; 32] = part(block, 0);
    let high: &[u8; 16] = part(block, 32);
    let words: [u16; 4] = std::array::from_fn(|w| u16::from_le_bytes(*part(block, 48 + 2 * w)));
    let bits = (0..4).fold(0, |bits, w| bits | words[w] >> 12 << (4 * w));
    let d = plain::f16_to_f32(bits);
    for (k, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let s = k / 2;
        let scale = d * (1 + 2 * (words[s / 4] >> (s % 4 * 3) & 7)) as f32;
        let half_byte = high[k / 2] >> (k % 2 * 4);
        let delta = if half_byte & 8 == 0 {
            IQ1_DELTA
        } else {
            -IQ1_DELTA
        };
        let entry = &IQ1[low[k] as usize | (half_byte as usize & 7) << 8];
        for i in 0..8 {
            out[i] = scale * (entry[i] as f32 + delta);
        }
    }
}
