//! Q4_K: eight groups of 32 with 6-bit scales and minima. Layout:
//! [`gguf::quant::q4_k`].

use super::{Codes, Pairs, Rows, Simd, SuperBlock, byte, nibbles, pair, two_f16};

/// The encoding.
pub(super) struct Q4K;

/// The first 16 bytes of Q4_K and Q5_K, a byte for each scale and minimum.
#[derive(Clone, Copy)]
pub(super) struct Head<S: Simd> {
    d_dmin: S::I,
    scales: [S::I; 2],
    minima: [S::I; 2],
}

impl<S: Simd> Head<S> {
    #[inline(always)]
    pub(super) fn new(s: S, rows: &Rows) -> Head<S> {
        let [d_dmin, a, b, c] = s.dwords4(rows, 0);
        let (six, two) = (s.splat(0x3f3f_3f3f), s.splat(0x3030_3030));
        let (low, high) = nibbles(s, c);
        Head {
            d_dmin,
            scales: [s.and(a, six), s.or(low, s.and(s.shr(a, 2), two))],
            minima: [s.and(b, six), s.or(high, s.and(s.shr(b, 2), two))],
        }
    }

    #[inline(always)]
    pub(super) fn factors(&self, s: S) -> (S::F, S::F) {
        two_f16(s, self.d_dmin)
    }

    #[inline(always)]
    pub(super) fn scale(&self, s: S, group: usize) -> S::I {
        byte(s, self.scales[group / 4], group % 4)
    }

    #[inline(always)]
    pub(super) fn pair(&self, s: S, p: usize) -> S::I {
        let (minima, at) = (self.minima[p / 2], p % 2 * 2);
        pair(s, byte(s, minima, at), byte(s, minima, at + 1))
    }
}

impl SuperBlock for Q4K {
    const BYTES: usize = 144;
    const GROUP: usize = 32;
    const MAX_CODE: i32 = 15;
    type Head<S: Simd> = Head<S>;

    #[inline(always)]
    fn pairs<S: Simd>(_: S) -> Pairs {
        Pairs::Minima
    }

    #[inline(always)]
    fn head<S: Simd>(s: S, rows: &Rows) -> Head<S> {
        Head::new(s, rows)
    }

    #[inline(always)]
    fn factors<S: Simd>(s: S, head: &Head<S>) -> (S::F, S::F) {
        head.factors(s)
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &Head<S>, group: usize) -> S::I {
        head.scale(s, group)
    }

    #[inline(always)]
    fn pair<S: Simd>(s: S, head: &Head<S>, p: usize) -> S::I {
        head.pair(s, p)
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, rows: &Rows, _: &Head<S>, part: usize, _: &mut [S::I; 8]) -> Codes<S> {
        let packed = s.dwords8(rows, 16 + part * 32);
        let mut codes = [packed; 2];
        for t in 0..8 {
            (codes[0][t], codes[1][t]) = nibbles(s, packed[t]);
        }
        codes
    }
}
