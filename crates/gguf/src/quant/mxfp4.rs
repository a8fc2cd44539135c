//! MXFP4: 32 elements in 17 bytes, `x = 2^(e - 128) * (2 * E2M1)`, the OCP
//! Microscaling Formats specification v1.0 with doubled levels.
//!
//! | bytes | field                                                        |
//! |-------|--------------------------------------------------------------|
//! | 0     | `e`, E8M0                                                    |
//! | 1..17 | 4-bit E2M1 codes: byte `i` holds element i (low), element i+16 (high) |
//!
//! What a reader would get wrong: the specification calls `e = 255` NaN; here,
//! as in the package, it is the scale 2^127.

use super::codebook::E2M1_DOUBLED;
use super::part;

/// Decodes a block.
pub fn decode_block(block: &[u8; 17], out: &mut [f32; 32]) {
    let scale = half_scale(block[0]);
    let q: &[u8; 16] = part(block, 1);
    for i in 0..16 {
        out[i] = scale * E2M1_DOUBLED[(q[i] & 15) as usize] as f32;
        out[i + 16] = scale * E2M1_DOUBLED[(q[i] >> 4) as usize] as f32;
    }
}

/// `2^(e - 128)`; below `e = 2` that is a subnormal f32.
fn half_scale(e: u8) -> f32 {
    f32::from_bits(match e {
        0 => 1 << 21,
        1 => 1 << 22,
        _ => (e as u32 - 1) << 23,
    })
}
