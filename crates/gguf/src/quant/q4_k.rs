//! Q4_K: 256 elements in 144 bytes; 8 sub-blocks of 32,
//! `x = (d * scale) * q - (dmin * min)`.
//!
//! | bytes   | field                                                      |
//! |---------|------------------------------------------------------------|
//! | 0..2    | `d`, f16                                                   |
//! | 2..4    | `dmin`, f16                                                |
//! | 4..16   | eight 6-bit scales and minima, see [`scales_and_minima`]   |
//! | 16..144 | 4-bit `q`, 32 bytes for each 64 elements: byte `i` holds element i (low) and i+32 (high) |
//!
//! What a reader would get wrong: the minimum is subtracted and both factors
//! are rounded to f32 before the code is applied; no fused multiply-add.

use super::{f16_at, fit, part};

/// Decodes a block.
#[inline(always)]
pub fn decode_block(block: &[u8; 144], out: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    let dmin = f16_at(block, 2);
    let (scales, minima) = scales_and_minima(part(block, 4));
    let q: &[u8; 128] = part(block, 16);
    for (j, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let q: &[u8; 32] = part(q, j * 32);
        let scale = d * scales[2 * j] as f32;
        let min = dmin * minima[2 * j] as f32;
        for i in 0..32 {
            out[i] = scale * (q[i] & 15) as f32 - min;
        }
        let scale = d * scales[2 * j + 1] as f32;
        let min = dmin * minima[2 * j + 1] as f32;
        for i in 0..32 {
            out[i + 32] = scale * (q[i] >> 4) as f32 - min;
        }
    }
}

/// The 6-bit scales and minima of Q4_K and Q5_K.
///
/// Of sub-blocks 0 to 3, bytes 0..4 hold the scales and bytes 4..8 the minima
/// in their low six bits. Of sub-block `4 + i`, byte `8 + i` holds the low four
/// bits of the scale (low half) and of the minimum (high half); their upper two
/// bits are the top bits of bytes `i` and `4 + i`.
#[inline(always)]
pub fn scales_and_minima(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let mut scales = [0; 8];
    let mut minima = [0; 8];
    for i in 0..4 {
        scales[i] = packed[i] & 63;
        minima[i] = packed[4 + i] & 63;
        scales[4 + i] = packed[8 + i] & 15 | packed[i] >> 6 << 4;
        minima[4 + i] = packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
    }
    (scales, minima)
}

/// Stores 6-bit scales and minima as [`scales_and_minima`] reads them.
fn pack_scales_and_minima(scales: &[u8; 8], minima: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for i in 0..4 {
        packed[i] = scales[i] | scales[4 + i] >> 4 << 6;
        packed[4 + i] = minima[i] | minima[4 + i] >> 4 << 6;
        packed[8 + i] = scales[4 + i] & 15 | minima[4 + i] << 4;
    }
    packed
}

/// Numbers of steps across the range that the encoder tries, less 15.
///
/// Relative RMS error on normally distributed weights: 0.0699; with the first try
/// alone 0.0736, with 21 tries 0.0694. Time grows with their number.
const TRIES: [f32; 8] = [0.0, -1.2, -0.8, -0.4, 0.4, 0.8, 1.2, 1.6];

/// Encodes finite `x`; false if a scale overflows f16.
pub(super) fn encode_block(x: &[f32; 256], block: &mut [u8; 144]) -> bool {
    let Some(code) = encode_codes(x, 15.0, &TRIES, &mut block[..16]) else {
        return false;
    };
    for (q, code) in block[16..].chunks_mut(32).zip(code.as_chunks::<64>().0) {
        for i in 0..32 {
            q[i] = code[i] | code[i + 32] << 4;
        }
    }
    true
}

/// The head of a Q4_K or Q5_K block (`d`, `dmin`, scales, minima) and the codes
/// 0 to `top` of its elements; `None` if a scale overflows f16.
pub(super) fn encode_codes(
    x: &[f32; 256],
    top: f32,
    tries: &[f32],
    head: &mut [u8],
) -> Option<[u8; 256]> {
    // Beyond this, sums of squares would lose their meaning before the scale overflows.
    if fit::largest(x) > 65504.0 * 63.0 * top {
        return None;
    }
    let (parts, _) = x.as_chunks::<32>();
    let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
    for s in 0..8 {
        (scales[s], minima[s]) = fit::scale_and_min(&parts[s], top, tries);
    }
    let d = fit::super_scale(scales.iter().copied().fold(0.0, f32::max), 63.0)?;
    let dmin = fit::super_scale(minima.iter().copied().fold(0.0, f32::max), 63.0)?;
    let scales = fit::scale_codes(&scales, d, 0.0, 63.0);
    let minima = fit::scale_codes(&minima, dmin, 0.0, 63.0);
    let mut code = [0; 256];
    for (s, code) in code.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = (d.to_f32() * scales[s], dmin.to_f32() * minima[s]);
        let q = fit::codes(&parts[s], scale, min, top);
        *code = q.map(|q| q as i32 as u8);
    }
    let packed = pack_scales_and_minima(&scales.map(|v| v as u8), &minima.map(|v| v as u8));
    head[0..2].copy_from_slice(&d.to_le_bytes());
    head[2..4].copy_from_slice(&dmin.to_le_bytes());
    head[4..16].copy_from_slice(&packed);
    Some(code)
}
