//! Q6_K: sixteen groups of 16 with signed scales, codes less 32. Layout:
//! [`gguf::quant::q6_k`].

use super::{Codes, Pairs, Rows, Simd, SuperBlock, minus_pair};

/// The encoding.
pub(super) struct Q6K;

/// The last 18 bytes.
#[derive(Clone, Copy)]
pub(super) struct Head<S: Simd> {
    scales: [S::I; 4],
    /// In the upper half.
    d: S::I,
}

impl SuperBlock for Q6K {
    const BYTES: usize = 210;
    const GROUP: usize = 16;
    const MAX_CODE: i32 = 63;
    type Head<S: Simd> = Head<S>;

    #[inline(always)]
    fn pairs<S: Simd>(_: S) -> Pairs {
        Pairs::Offset
    }

    #[inline(always)]
    fn head<S: Simd>(s: S, rows: &Rows) -> Head<S> {
        Head {
            scales: s.dwords4(rows, 192),
            // The dword that ends with the block, so that nothing beyond is read.
            d: s.dword(rows, 206),
        }
    }

    #[inline(always)]
    fn factors<S: Simd>(s: S, head: &Head<S>) -> (S::F, S::F) {
        let d = s.f16(s.shr(head.d, 16));
        (d, d)
    }

    #[inline(always)]
    fn scale<S: Simd>(s: S, head: &Head<S>, group: usize) -> S::I {
        let shift = 24 - 8 * (group as u32 % 4);
        s.sar(s.shl(head.scales[group / 4], shift), 24)
    }

    #[inline(always)]
    fn pair<S: Simd>(s: S, head: &Head<S>, p: usize) -> S::I {
        let (low, high) = (Self::scale(s, head, 2 * p), Self::scale(s, head, 2 * p + 1));
        minus_pair(s, low, high, 5)
    }

    #[inline(always)]
    fn runs(part: usize) -> [usize; 2] {
        let first = part / 2 * 4 + part % 2;
        [first, first + 2]
    }

    #[inline(always)]
    fn part<S: Simd>(
        s: S,
        rows: &Rows,
        _: &Head<S>,
        part: usize,
        high: &mut [S::I; 8],
    ) -> Codes<S> {
        if part.is_multiple_of(2) {
            *high = s.dwords8(rows, 128 + part * 16);
        }
        let low = s.dwords8(rows, part * 32);
        let mut codes = [low; 2];
        for t in 0..8 {
            let (first, second) = if part.is_multiple_of(2) {
                (s.shl(high[t], 4), high[t])
            } else {
                (s.shl(high[t], 2), s.shr(high[t], 2))
            };
            codes[0][t] = join(s, low[t], first);
            codes[1][t] = join(s, s.shr(low[t], 4), second);
        }
        codes
    }
}

/// Bits 0 to 3 of every byte of `low` and bits 4 and 5 of `high`.
#[inline(always)]
fn join<S: Simd>(s: S, low: S::I, high: S::I) -> S::I {
    let both = s.select(s.splat(0x0f0f_0f0f), low, high);
    s.and(both, s.splat(0x3f3f_3f3f))
}
