//! IQ2_S: 256 elements in 82 bytes; 16 sub-blocks of 16, each of two grid
//! entries of 8 magnitudes, `x = (d * (0.5 + scale) * 0.25) * magnitude * sign`.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..2   | `d`, f16                                                    |
//! | 2..34  | bits 0..8 of the grid index of entry k                      |
//! | 34..66 | signs of entry k, bit `i` set: element i is negative        |
//! | 66..74 | bits 8..10 of the grid indices: byte `i` holds entries 4i to 4i+3, lowest bits first |
//! | 74..82 | 4-bit scales: byte `i` holds that of sub-block 2i (low), 2i+1 (high) |
//!
//! What a reader would get wrong: signs have a byte of their own here, without
//! the parity rule of IQ2_XS.

use super::codebook::IQ2_S;
use super::{f16_at, part, put_signed};

/// Decodes a block.
pub fn decode_block(block: &[u8; 82], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    let low: &[u8; 32] = part(block, 2);
    let signs: &[u8; 32] = part(block, 34);
    let high: &[u8; 8] = part(block, 66);
    let scales: &[u8; 8] = part(block, 74);
    for (k, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = scales[k / 4] >> (k / 2 % 2 * 4) & 15;
        let scale = d * (0.5 + scale as f32) * 0.25;
        let two = (high[k / 4] >> (k % 4 * 2) & 3) as usize;
        put_signed(out, scale, &IQ2_S[low[k] as usize | two << 8], signs[k]);
    }
}
