//! IQ4_XS: eight groups of 32 with 6-bit scales less 32; codes name levels.
//! Layout: [`gguf::quant::iq4_xs`].

use super::iq4_nl::levels;
use super::{Codes, Pairs, Rows, Simd, SuperBlock, minus_pair, nibbles};

/// The encoding.
pub(super) struct Iq4Xs;

/// The first 8 bytes.
#[derive(Clone, Copy)]
pub(super) struct Head<S: Simd> {
    /// `d`, and the upper two bits of the scales.
    d_two: S::I,
    /// The lower four bits of the scales.
    four: S::I,
}

impl SuperBlock for Iq4Xs {
    const BYTES: usize = 136;
    const GROUP: usize = 32;
    const MAX_CODE: i32 = 255;
    type Head<S: Simd> = Head<S>;

    #[inline(always)]
    fn pairs<S: Simd>(_: S) -> Pairs {
        if S::CODE_BIAS == 0 {
            Pairs::None
        } else {
            Pairs::Offset
        }
    }

    #[inline(always)]
    fn head<S: Simd>(s: S, rows: &Rows) -> Head<S> {
        let [d_two, four, _, _] = s.dwords4(rows, 0);
        Head { d_two, four }
    }

    #[inline(always)]
    fn factors<S: Simd>(s: S, head: &Head<S>) -> (S::F, S::F) {
        let d = s.f16(head.d_two);
        (d, d)
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &Head<S>, group: usize) -> S::I {
        let four = s.and(s.shr(head.four, 4 * group as u32), s.splat(15));
        let two = s.and(s.shr(head.d_two, 16 + 2 * group as u32), s.splat(3));
        s.add(s.or(four, s.shl(two, 4)), s.splat(-32))
    }

    #[inline(always)]
    fn pair<S: Simd>(s: S, head: &Head<S>, p: usize) -> S::I {
        let (low, high) = (Self::scale(s, head, 2 * p), Self::scale(s, head, 2 * p + 1));
        minus_pair(s, low, high, 7)
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, rows: &Rows, _: &Head<S>, part: usize, _: &mut [S::I; 8]) -> Codes<S> {
        let table = levels(S::CODE_BIAS);
        let packed = s.dwords8(rows, 8 + part * 32);
        let mut codes = [packed; 2];
        for g in 0..2 {
            for t in 0..4 {
                let (low, high) = nibbles(s, packed[g * 4 + t]);
                codes[g][t] = s.lookup(low, &table);
                codes[g][4 + t] = s.lookup(high, &table);
            }
        }
        codes
    }
}
