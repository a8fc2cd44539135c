//! IQ4_NL: codes name levels. Layout: [`gguf::quant::iq4_nl`].

use super::{Block, Rows, Simd, Unpacked, q4_0};
use gguf::quant::codebook::IQ4_LEVELS;

/// The encoding.
pub(super) struct Iq4Nl;

/// The levels, plus `bias`.
#[inline(always)]
pub(super) fn levels(bias: i32) -> [i8; 16] {
    let mut table = IQ4_LEVELS;
    for level in &mut table {
        *level = (*level as i32 + bias) as i8;
    }
    table
}

impl Block for Iq4Nl {
    const BYTES: usize = 18;
    const MAX_CODE: i32 = 255;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn offset<S: Simd>(_: S) -> i32 {
        S::CODE_BIAS
    }

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: &Rows) -> Unpacked<S> {
        let mut block = q4_0::Q40::unpack(s, rows);
        let table = levels(S::CODE_BIAS);
        for codes in &mut block.codes {
            *codes = s.lookup(*codes, &table);
        }
        block
    }
}
