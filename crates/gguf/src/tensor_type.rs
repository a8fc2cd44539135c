//! The encodings a tensor can have, by ggml's numbers and spelling.
//!
//! A row of a tensor is a whole number of blocks; the bytes of a block are
//! described in `quant/<type>.rs`. Source: `constants.py` of the PyPI package
//! `gguf`.

use std::fmt;

macro_rules! tensor_types {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $block:literal, $bytes:literal;)*) => {
        /// Encoding of a tensor's elements.
        #[allow(non_camel_case_types, missing_docs)] // ggml's own spelling says it all
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum TensorType { $($(#[$doc])* $name,)* }

        impl TensorType {
            /// Every encoding, in the order of ggml's numbers.
            pub const ALL: &'static [TensorType] = &[$(TensorType::$name,)*];

            /// The encoding with ggml's number `id`, if Muser knows it.
            pub fn from_id(id: u32) -> Option<TensorType> {
                match id { $($id => Some(TensorType::$name),)* _ => None }
            }

            /// ggml's number, as stored in a file.
            pub fn id(self) -> u32 {
                match self { $(TensorType::$name => $id,)* }
            }

            /// ggml's spelling, for example `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(TensorType::$name => stringify!($name),)* }
            }

            /// Elements in a block; a row's length must be a multiple of it.
            pub fn block_len(self) -> usize {
                match self { $(TensorType::$name => $block,)* }
            }

            /// Bytes of a block.
            pub fn block_bytes(self) -> usize {
                match self { $(TensorType::$name => $bytes,)* }
            }
        }
    };
}

tensor_types! {
    F32 = 0, 1, 4;
    F16 = 1, 1, 2;
    Q4_0 = 2, 32, 18;
    Q4_1 = 3, 32, 20;
    Q5_0 = 6, 32, 22;
    Q5_1 = 7, 32, 24;
    Q8_0 = 8, 32, 34;
    Q2_K = 10, 256, 84;
    Q3_K = 11, 256, 110;
    Q4_K = 12, 256, 144;
    Q5_K = 13, 256, 176;
    Q6_K = 14, 256, 210;
    IQ2_XXS = 16, 256, 66;
    IQ2_XS = 17, 256, 74;
    IQ3_XXS = 18, 256, 98;
    IQ1_S = 19, 256, 50;
    IQ4_NL = 20, 32, 18;
    IQ3_S = 21, 256, 110;
    IQ2_S = 22, 256, 82;
    IQ4_XS = 23, 256, 136;
    I8 = 24, 1, 1;
    I16 = 25, 1, 2;
    I32 = 26, 1, 4;
    I64 = 27, 1, 8;
    F64 = 28, 1, 8;
    IQ1_M = 29, 256, 56;
    BF16 = 30, 1, 2;
    TQ1_0 = 34, 256, 54;
    TQ2_0 = 35, 256, 66;
    MXFP4 = 39, 32, 17;
    NVFP4 = 40, 64, 36;
}

impl TensorType {
    /// The encoding spelled `name`, in either case (`q4_k`, `Q4_K`).
    pub fn from_name(name: &str) -> Option<TensorType> {
        TensorType::ALL
            .iter()
            .copied()
            .find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// Bytes of a row of `n` elements, or `None` if `n` is no multiple of the
    /// block or the size overflows.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        let block = self.block_len() as u64;
        if !n.is_multiple_of(block) {
            return None;
        }
        (n / block).checked_mul(self.block_bytes() as u64)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
