//! THE MODEL: one graph, written once over a small backend trait.
//!
//! No I/O, no threads, no unsafe code. A newcomer reads
//! `graph_muse_glimmer.rs` (the order of operations), `backend.rs` (what each
//! operation means) and `reference.rs` (each operation as its formula).
#![forbid(unsafe_code)]

mod guide;

pub use guide::{Constraint, Guide, TokenMask, Verdict};
