//! Q5_K: Q4_K with a fifth bit. Layout: [`gguf::quant::q5_k`].

use super::q4_k::Head;
use super::{Codes, Pairs, Rows, Simd, SuperBlock, nibbles};

/// The encoding.
pub(super) struct Q5K;

impl SuperBlock for Q5K {
    const BYTES: usize = 176;
    const GROUP: usize = 32;
    const MAX_CODE: i32 = 31;
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
    fn part<S: Simd>(
        s: S,
        rows: &Rows,
        _: &Head<S>,
        part: usize,
        high: &mut [S::I; 8],
    ) -> Codes<S> {
        if part == 0 {
            *high = s.dwords8(rows, 16);
        }
        let packed = s.dwords8(rows, 48 + part * 32);
        let bit = s.splat(0x1010_1010);
        let mut codes = [packed; 2];
        for t in 0..8 {
            let four = nibbles(s, packed[t]);
            codes[0][t] = s.or(four.0, s.and(to_bit4(s, high[t], 2 * part), bit));
            codes[1][t] = s.or(four.1, s.and(to_bit4(s, high[t], 2 * part + 1), bit));
        }
        codes
    }
}

/// Shifts bit `from` of every byte to bit 4; the other bits are noise.
#[inline(always)]
fn to_bit4<S: Simd>(s: S, x: S::I, from: usize) -> S::I {
    if from < 4 {
        s.shl(x, 4 - from as u32)
    } else {
        s.shr(x, from as u32 - 4)
    }
}
