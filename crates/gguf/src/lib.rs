//! FILE -> TENSORS: reads, checks, decodes and writes GGUF files.
//!
//! The header is checked completely before anything is used: every length,
//! count, offset and type. Tensor bytes are never copied; a [`TensorView`]
//! points into the mapping. What a block of an encoding means is said in
//! [`quant`].

mod bytes;
mod directory;
mod error;
mod file;
mod header;
mod mapping;
mod metadata;
pub mod quant;
mod reader;
mod shown;
mod split;
mod tensor_type;
mod writer;

pub use bytes::Bytes;
pub use directory::TensorInfo;
pub use error::Error;
pub use file::Gguf;
pub use mapping::{Files, Progress};
pub use metadata::{Array, Metadata, StringArray, Value};
pub use shown::shown;
pub use tensor_type::TensorType;
pub use writer::Writer;

/// A named tensor of a file: what it is and its raw bytes.
///
/// The bytes hold `shape[1] * shape[2] * ...` rows of `shape[0]` elements
/// each, row after row, each row a whole number of blocks of `ty`.
#[derive(Clone, Debug)]
pub struct TensorView {
    /// Name as in the file, for example `blk.0.attn_q.weight`.
    pub name: String,
    /// Encoding of the elements.
    pub ty: TensorType,
    /// Lengths in ggml's order: the contiguous dimension (row length) first.
    pub shape: Vec<u64>,
    /// The encoded elements; exactly as long as type and shape say.
    pub data: Bytes,
}

impl TensorView {
    /// What the tensor is, without its bytes.
    pub fn info(&self) -> TensorInfo {
        TensorInfo {
            name: self.name.clone(),
            ty: self.ty,
            shape: self.shape.clone(),
        }
    }
}
