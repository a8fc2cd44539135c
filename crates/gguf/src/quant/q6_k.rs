//! Q6_K: 256 elements in 210 bytes; 16 sub-blocks of 16,
//! `x = (d * scale) * (q - 32)`.
//!
//! | bytes    | field                                                     |
//! |----------|-----------------------------------------------------------|
//! | 0..128   | bits 0..4 of `q`, 64 bytes for each half of 128 elements: byte `i` holds element i (low) and i+64 (high) |
//! | 128..192 | bits 4..6 of `q`, 32 bytes for each half: byte `i` holds elements i, i+32, i+64, i+96, lowest bits first |
//! | 192..208 | signed byte `s`: scale of sub-block s                     |
//! | 208..210 | `d`, f16                                                  |
//!
//! What a reader would get wrong: scales are signed, and `d` lies at the end.

use super::{f16_at, fit, part};

/// Decodes a block.
#[inline(always)]
pub fn decode_block(block: &[u8; 210], out: &mut [f32; 256]) {
    let scales: &[u8; 16] = part(block, 192);
    let d = f16_at(block, 208);
    let (halves, _) = out.as_chunks_mut::<128>();
    for (h, half) in halves.iter_mut().enumerate() {
        for (g, out) in half.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low: &[u8; 32] = part(block, h * 64 + g % 2 * 32);
            let high: &[u8; 32] = part(block, 128 + h * 32);
            let (low_shift, high_shift) = (g / 2 * 4, g * 2);
            for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let scale = d * (scales[h * 8 + g * 2 + s] as i8 as f32);
                for i in 0..16 {
                    let four = low[s * 16 + i] >> low_shift & 15;
                    let two = high[s * 16 + i] >> high_shift & 3;
                    out[i] = scale * ((four | two << 4) as i32 - 32) as f32;
                }
            }
        }
    }
}

/// Codes of the largest element that the encoder tries, less 32 in magnitude.
const TRIES: [f32; 6] = [0.0, -1.0, -0.6, -0.3, 0.3, 0.6];

/// Encodes finite `x`; false if the scale overflows f16.
pub(super) fn encode_block(x: &[f32; 256], block: &mut [u8; 210]) -> bool {
    // Beyond this, sums of squares would lose their meaning before the scale overflows.
    if fit::largest(x) > 65504.0 * 127.0 * 32.0 {
        return false;
    }
    let (parts, _) = x.as_chunks::<16>();
    let scales: [f32; 16] = std::array::from_fn(|s| fit::signed_scale(&parts[s], 32.0, &TRIES));
    let Some(d) = fit::super_scale(fit::largest(&scales), 127.0) else {
        return false;
    };
    let scales = fit::scale_codes(&scales, d, -127.0, 127.0);
    let mut code = [0u8; 256];
    for (s, code) in code.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let q = fit::signed_codes(&parts[s], d.to_f32() * scales[s], 32.0);
        *code = q.map(|q| (q as i32 + 32) as u8);
        block[192 + s] = scales[s] as i8 as u8;
    }
    for (h, code) in code.as_chunks::<128>().0.iter().enumerate() {
        for i in 0..64 {
            block[h * 64 + i] = code[i] & 15 | code[i + 64] << 4;
        }
        for i in 0..32 {
            let high = |g: usize| code[g * 32 + i] >> 4 << (2 * g);
            block[128 + h * 32 + i] = high(0) | high(1) | high(2) | high(3);
        }
    }
    block[208..210].copy_from_slice(&d.to_le_bytes());
    true
}
