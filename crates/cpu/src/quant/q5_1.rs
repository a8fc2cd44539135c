//! Q5_1: 5-bit codes and a minimum. Layout: [`gguf::quant::q5_1`].

use super::{Block, Rows, Simd, Unpacked, q5_0, two_f16};

/// The encoding.
pub(super) struct Q51;

impl Block for Q51 {
    const BYTES: usize = 24;
    const MAX_CODE: i32 = 31;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn offset<S: Simd>(_: S) -> i32 {
        0
    }

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: &Rows) -> Unpacked<S> {
        let (d, min) = two_f16(s, s.dword(rows, 0));
        let codes = q5_0::codes(s, rows, 4);
        Unpacked { codes, d, min }
    }
}
