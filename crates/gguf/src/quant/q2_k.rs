//! Q2_K: 256 elements in 84 bytes; 16 sub-blocks of 16,
//! `x = (d * scale) * q - (dmin * min)`.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..16  | byte `s`: scale (low 4 bits) and min (high) of sub-block s  |
//! | 16..80 | 2-bit `q`, 32 bytes for each half of 128 elements: byte `i` holds elements i, i+32, i+64, i+96, lowest bits first |
//! | 80..82 | `d`, f16                                                    |
//! | 82..84 | `dmin`, f16                                                 |
//!
//! What a reader would get wrong: the minimum is subtracted.

use super::{f16_at, part};

/// Decodes a block.
pub fn decode_block(block: &[u8; 84], out: &mut [f32; 256]) {
    let scales: &[u8; 16] = part(block, 0);
    let q: &[u8; 64] = part(block, 16);
    let d = f16_at(block, 80);
    let dmin = f16_at(block, 82);
    for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * (scales[s] & 15) as f32;
        let min = dmin * (scales[s] >> 4) as f32;
        let q: &[u8; 16] = part(q, s / 8 * 32 + s % 2 * 16);
        let shift = s / 2 % 4 * 2;
        for i in 0..16 {
            out[i] = scale * (q[i] >> shift & 3) as f32 - min;
        }
    }
}
