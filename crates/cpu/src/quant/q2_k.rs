//! Q2_K: sixteen groups of 16 with 4-bit scales and minima. Layout:
//! [`gguf::quant::q2_k`].

use super::{Codes, Pairs, Rows, Simd, SuperBlock, byte, nibbles, pair, two_f16};

/// The encoding.
pub(super) struct Q2K;

/// Scales and minima, a byte each, and the last 4 bytes.
#[derive(Clone, Copy)]
pub(super) struct Head<S: Simd> {
    scales: [S::I; 4],
    minima: [S::I; 4],
    d_dmin: S::I,
}

impl SuperBlock for Q2K {
    const BYTES: usize = 84;
    const GROUP: usize = 16;
    const MAX_CODE: i32 = 15;
    type Head<S: Simd> = Head<S>;

    #[inline(always)]
    fn pairs<S: Simd>(_: S) -> Pairs {
        Pairs::Minima
    }

    #[inline(always)]
    fn head<S: Simd>(s: S, rows: &Rows) -> Head<S> {
        let packed = s.dwords4(rows, 0);
        let (mut scales, mut minima) = (packed, packed);
        for q in 0..4 {
            (scales[q], minima[q]) = nibbles(s, packed[q]);
        }
        Head {
            scales,
            minima,
            d_dmin: s.dword(rows, 80),
        }
    }

    #[inline(always)]
    fn factors<S: Simd>(s: S, head: &Head<S>) -> (S::F, S::F) {
        two_f16(s, head.d_dmin)
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &Head<S>, group: usize) -> S::I {
        byte(s, head.scales[group / 4], group % 4)
    }

    #[inline(always)]
    fn pair<S: Simd>(s: S, head: &Head<S>, p: usize) -> S::I {
        let (minima, at) = (head.minima[p / 2], p % 2 * 2);
        pair(s, byte(s, minima, at), byte(s, minima, at + 1))
    }

    #[inline(always)]
    fn part<S: Simd>(
        s: S,
        rows: &Rows,
        _: &Head<S>,
        part: usize,
        packed: &mut [S::I; 8],
    ) -> Codes<S> {
        if part.is_multiple_of(2) {
            *packed = s.dwords8(rows, 16 + part * 16);
        }
        let mask = s.splat(0x0303_0303);
        let mut codes = [*packed; 2];
        for g in 0..2 {
            let shift = (part % 2 * 4 + g * 2) as u32;
            for t in 0..8 {
                codes[g][t] = s.and(s.shr(packed[t], shift), mask);
            }
        }
        codes
    }
}
