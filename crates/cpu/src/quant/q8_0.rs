//! Q8_0: signed bytes. Layout: [`gguf::quant::q8_0`].

use super::{Block, Rows, Simd, Unpacked};

/// The encoding.
pub(super) struct Q80;

impl Block for Q80 {
    const BYTES: usize = 34;
    const MAX_CODE: i32 = 255;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn offset<S: Simd>(_: S) -> i32 {
        S::CODE_BIAS
    }

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: &Rows) -> Unpacked<S> {
        let d = s.f16(s.dword(rows, 0));
        let mut codes = s.dwords8(rows, 2);
        if S::CODE_BIAS != 0 {
            for codes in &mut codes {
                *codes = s.xor(*codes, s.splat(0x8080_8080_u32 as i32));
            }
        }
        Unpacked { codes, d, min: d }
    }
}
