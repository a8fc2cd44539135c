//! TQ1_0: 256 ternary elements in 54 bytes, `x = d * (t - 1)`, five base-3
//! digits `t` in a byte.
//!
//! | bytes  | field                                                       |
//! |--------|-------------------------------------------------------------|
//! | 0..32  | elements 0..160: digit `n` of byte `i` is element 32n + i   |
//! | 32..48 | elements 160..240: digit `n` of byte 32 + i is element 160 + 16n + i |
//! | 48..52 | elements 240..256: digit `n` (of four) of byte 48 + i is element 240 + 4n + i |
//! | 52..54 | `d`, f16                                                    |
//!
//! What a reader would get wrong: a byte is a fraction of 256, most significant
//! digit first: digit `n` is `3 * (byte * 3^n mod 256) / 256`.

use super::{f16_at, part};

const POWERS_OF_3: [u8; 5] = [1, 3, 9, 27, 81];

/// Decodes a block.
pub fn decode_block(block: &[u8; 54], out: &mut [f32; 256]) {
    let d = f16_at(block, 52);
    let (first, rest) = out.split_at_mut(160);
    let (second, third) = rest.split_at_mut(80);
    decode_digits::<32>(part(block, 0), d, first);
    decode_digits::<16>(part(block, 32), d, second);
    decode_digits::<4>(part(block, 48), d, third);
}

/// Digit `n` of byte `i` becomes element `W * n + i`.
fn decode_digits<const W: usize>(bytes: &[u8; W], d: f32, out: &mut [f32]) {
    for (n, out) in out.as_chunks_mut::<W>().0.iter_mut().enumerate() {
        for i in 0..W {
            let fraction = bytes[i].wrapping_mul(POWERS_OF_3[n]) as u32;
            out[i] = d * (((fraction * 3) >> 8) as i32 - 1) as f32;
        }
    }
}
