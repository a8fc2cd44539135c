//! What the model's tests share beside `testing`.
#![allow(dead_code)] // each test binary uses its part

pub mod keys;
pub mod mutant;
pub mod oracle_weights;
