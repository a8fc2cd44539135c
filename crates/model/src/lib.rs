//! THE MODEL: one graph, written once over a small backend trait.
//!
//! No I/O, no threads, no unsafe code. A newcomer reads
//! `graph_muse_glimmer.rs` (the order of operations), `backend.rs` (what each
//! operation means) and `reference.rs` (each operation as its formula).
#![forbid(unsafe_code)]

mod activations;
pub mod backend;
mod batch;
mod config;
mod drafter;
mod error;
mod forward;
mod graph_llama;
mod graph_muse_glimmer;
mod guide;
pub mod kv;
mod neutral;
pub mod paired;
mod reference;
mod rope;
mod timed;
mod weights;

pub use backend::{Backend, Caps, Probes};
pub use batch::{Batch, Input, Outputs, Row, RowOutput, Shape, Step, Tables, Want, padded, select};
pub use config::{Architecture, Config, LayerConfig};
pub use drafter::{DraftRequest, DrafterConfig, WindowConvention};
pub use error::{DeviceError, Error};
pub use forward::{Capacity, Forward, Model, Options};
pub use guide::{Constraint, Guide, TokenMask, Verdict};
pub use kv::{KvType, PAGE_ROWS, PageClass, PageId, PagePool, SequencePages};
pub use paired::Paired;
pub use reference::Reference;
pub use rope::{Pairing, Rope, RopeScaling};
pub use timed::{Call, Timed};

/// BLAKE3 over the vocabulary: each token's length and text, in order. Two
/// files with one digest mean the same text by the same ids.
///
/// # Errors
/// [`Error::KeyMissing`] if the file has no tokens.
pub fn vocabulary_digest(meta: &gguf::Metadata) -> Result<[u8; 32], Error> {
    const KEY: &str = "tokenizer.ggml.tokens";
    let tokens = meta.strings(KEY)?.ok_or_else(|| Error::KeyMissing {
        key: KEY.into(),
        why: "it is the vocabulary",
    })?;
    let mut hasher = blake3::Hasher::new();
    for token in tokens.iter() {
        hasher.update(&(token.len() as u64).to_le_bytes());
        hasher.update(token.as_bytes());
    }
    Ok(*hasher.finalize().as_bytes())
}
