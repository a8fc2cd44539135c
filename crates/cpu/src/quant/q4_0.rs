//! Q4_0: codes less 8. Layout: [`gguf::quant::q4_0`].

use super::{Block, Rows, Simd, Unpacked, nibbles};

/// The encoding.
pub(super) struct Q40;

impl Block for Q40 {
    const BYTES: usize = 18;
    const MAX_CODE: i32 = 15;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn offset<S: Simd>(_: S) -> i32 {
        8
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

/// The 4-bit codes whose 16 bytes start at `at`.
#[inline(always)]
pub(super) fn codes<S: Simd>(s: S, rows: &Rows, at: usize) -> [S::I; 8] {
    let packed = s.dwords4(rows, at);
    let mut codes = [packed[0]; 8];
    for t in 0..4 {
        (codes[t], codes[4 + t]) = nibbles(s, packed[t]);
    }
    codes
}
