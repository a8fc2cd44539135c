//! NVFP4: 64 elements in 36 bytes; 4 sub-blocks of 16,
//! `x = (scale / 2) * (2 * E2M1)`.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0..4  | scale of sub-block s, E4M3 without sign, bias 7              |
//! | 4..36 | 4-bit E2M1 codes, 8 bytes for each sub-block: byte `i` holds element i (low), i+8 (high) |
//!
//! What a reader would get wrong: scale 127, a NaN in other E4M3, is 0 here;
//! the top bit of a scale is ignored otherwise. The file's second level, an f32
//! for the whole tensor, is a tensor of its own and not applied here.

use super::codebook::E2M1_DOUBLED;
use super::part;

/// Decodes a block.
pub fn decode_block(block: &[u8; 36], out: &mut [f32; 64]) {
    for (s, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = half_scale(block[s]);
        let q: &[u8; 8] = part(block, 4 + s * 8);
        for i in 0..8 {
            out[i] = scale * E2M1_DOUBLED[(q[i] & 15) as usize] as f32;
            out[i + 8] = scale * E2M1_DOUBLED[(q[i] >> 4) as usize] as f32;
        }
    }
}

/// Half of the E4M3 number; every result is exact.
fn half_scale(bits: u8) -> f32 {
    let exponent = (bits >> 3 & 15) as u32;
    let mantissa = (bits & 7) as f32;
    if bits == 127 {
        0.0
    } else if exponent == 0 {
        mantissa / 1024.0
    } else {
        (8.0 + mantissa) * f32::from_bits((exponent + 127 - 11) << 23)
    }
}
