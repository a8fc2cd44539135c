//! Q5_0: 5-bit codes less 16. Layout: [`gguf::quant::q5_0`].

use super::{Block, Rows, Simd, Unpacked, q4_0};

/// The encoding.
pub(super) struct Q50;

impl Block for Q50 {
    const BYTES: usize = 22;
    const MAX_CODE: i32 = 31;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn offset<S: Simd>(_: S) -> i32 {
        16
    }

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: &Rows) -> Unpacked<S> {
        let d = s.f16(s.dword(rows, 0));
        Unpacked {
            codes: codes(s, rows, 2),
            d,
            min: d,
        }
    }
}

/// The 5-bit codes whose 4 bytes of fifth bits start at `at`, 16 of the others
/// after them.
#[inline(always)]
pub(super) fn codes<S: Simd>(s: S, rows: &Rows, at: usize) -> [S::I; 8] {
    let high = s.dword(rows, at);
    let mut codes = q4_0::codes(s, rows, at + 4);
    for t in 0..8 {
        let bits = s.spread(s.shr(high, 4 * t as u32));
        codes[t] = s.or(codes[t], bits);
    }
    codes
}
