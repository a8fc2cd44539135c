//! Q4_1: codes and a minimum. Layout: [`gguf::quant::q4_1`].

use super::{Block, Rows, Simd, Unpacked, q4_0, two_f16};

/// The encoding.
pub(super) struct Q41;

impl Block for Q41 {
    const BYTES: usize = 20;
    const MAX_CODE: i32 = 15;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn offset<S: Simd>(_: S) -> i32 {
        0
    }

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: &Rows) -> Unpacked<S> {
        let (d, min) = two_f16(s, s.dword(rows, 0));
        let codes = q4_0::codes(s, rows, 4);
        Unpacked { codes, d, min }
    }
}
