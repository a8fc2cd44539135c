//! Q3_K: sixteen groups of 16 with 6-bit scales less 32, codes less 4. Layout:
//! [`gguf::quant::q3_k`].

use super::{Codes, Pairs, Rows, Simd, SuperBlock, byte, minus_pair, nibbles};

/// The encoding.
pub(super) struct Q3K;

/// The last 16 bytes, a byte for each scale, and the third bits of the codes.
#[derive(Clone, Copy)]
pub(super) struct Head<S: Simd> {
    scales: [S::I; 4],
    /// In the upper half.
    d: S::I,
    high: [S::I; 8],
}

impl SuperBlock for Q3K {
    const BYTES: usize = 110;
    const GROUP: usize = 16;
    const MAX_CODE: i32 = 15;
    type Head<S: Simd> = Head<S>;

    #[inline(always)]
    fn pairs<S: Simd>(_: S) -> Pairs {
        Pairs::Offset
    }

    #[inline(always)]
    fn head<S: Simd>(s: S, rows: &Rows) -> Head<S> {
        // Two bytes of codes, the scales, d.
        let [a, b, c, d] = s.dwords4(rows, 94);
        let (low0, high0) = nibbles(s, across(s, a, b));
        let (low1, high1) = nibbles(s, across(s, b, c));
        let two = across(s, c, d);
        let mut scales = [low0, low1, high0, high1];
        for q in 0..4 {
            let upper = s.and(s.shr(two, 2 * q as u32), s.splat(0x0303_0303));
            scales[q] = s.or(scales[q], s.shl(upper, 4));
        }
        let high = s.dwords8(rows, 0);
        Head { scales, d, high }
    }

    #[inline(always)]
    fn factors<S: Simd>(s: S, head: &Head<S>) -> (S::F, S::F) {
        let d = s.f16(s.shr(head.d, 16));
        (d, d)
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &Head<S>, group: usize) -> S::I {
        s.add(byte(s, head.scales[group / 4], group % 4), s.splat(-32))
    }

    #[inline(always)]
    fn pair<S: Simd>(s: S, head: &Head<S>, p: usize) -> S::I {
        let (low, high) = (Self::scale(s, head, 2 * p), Self::scale(s, head, 2 * p + 1));
        minus_pair(s, low, high, 2)
    }

    #[inline(always)]
    fn part<S: Simd>(
        s: S,
        rows: &Rows,
        head: &Head<S>,
        part: usize,
        packed: &mut [S::I; 8],
    ) -> Codes<S> {
        if part.is_multiple_of(2) {
            *packed = s.dwords8(rows, 32 + part * 16);
        }
        let mut codes = [*packed; 2];
        for g in 0..2 {
            let shift = (part % 2 * 4 + g * 2) as u32;
            for t in 0..8 {
                let low = s.and(s.shr(packed[t], shift), s.splat(0x0303_0303));
                let high = to_bit2(s, head.high[t], part * 2 + g);
                codes[g][t] = s.or(low, s.and(high, s.splat(0x0404_0404)));
            }
        }
        codes
    }
}

/// The dword that starts in the middle of `low`.
#[inline(always)]
fn across<S: Simd>(s: S, low: S::I, high: S::I) -> S::I {
    s.or(s.shr(low, 16), s.shl(high, 16))
}

/// Shifts bit `from` of every byte to bit 2; the other bits are noise.
#[inline(always)]
fn to_bit2<S: Simd>(s: S, x: S::I, from: usize) -> S::I {
    if from < 2 {
        s.shl(x, 2 - from as u32)
    } else {
        s.shr(x, from as u32 - 2)
    }
}
