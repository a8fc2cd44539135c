//! BACKEND: the CPU. Weights are read straight from the mapped file; every
//! instruction set, thread count and row count gives the same bits.
//!
//! `device.rs` is the state, `backend.rs` the operations; what they compute is in
//! `rows.rs`, `rope.rs`, `attention.rs` and `matmul.rs`, how work is shared in
//! `pool.rs`. What a reader would get wrong: tasks are cut so that no sum is
//! ever split between two of them; that, not luck, keeps the bits.

mod activation;
mod attention;
mod backend;
mod block;
mod device;
mod dot;
mod error;
mod isa;
mod kv;
mod lanes;
pub mod math;
mod matmul;
pub mod pool;
mod quant;
mod rope;
mod rows;
mod segment;
mod select;

pub use activation::{ActivationKind, Activations};
pub use device::{Buf, Cpu, CpuOptions, Rotation, Weight};
pub use error::Error;
pub use isa::Isa;
pub use kv::Kv;
pub use matmul::{Matrix, OutColumns, TILE_ROWS};
