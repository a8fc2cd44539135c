//! What the tests of several crates share. Only tests depend on it.
//!
//! What a reader would get wrong: nothing here returns an error. A test that lacks a
//! file or a page fails where it asks for it, and the message names what is missing.
#![forbid(unsafe_code)]
#![allow(clippy::missing_panics_doc)] // see above
#![allow(missing_docs)] // names of a test's values say what they are; what they do not say has a text

pub mod blocks;
pub mod context;
mod distance;
mod file;
mod golden;
pub mod lab;
mod noise;
mod pass;
mod plain;
mod rebuild;
pub mod suite;

pub use distance::{DRAFT_LIMITS, Limits, TEXT_LIMITS, distance, first_difference, same_bits};
pub use file::{bundled, open, read_to_string, root, testdata};
pub use golden::Golden;
pub use noise::{Noise, tensor};
pub use pass::{EXACT, append, full, loaded, logits, pool_of, reference};
pub use plain::Plain;
pub use rebuild::{Parts, Tensor, changed, text, tokens};
