//! Block encodings: what the bytes of a block mean, and how to make them.
//!
//! One file per encoding holds its block layout, its decoder and, where Muser
//! writes it, its encoder.
