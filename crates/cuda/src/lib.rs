//! BACKEND: CUDA. One program runs with or without a GPU: the driver's library is
//! looked for when a device is opened, kernels are compiled there and kept.
//!
//! `device.rs` is the state, `backend.rs` the operations; `driver.rs` owns what the
//! driver hands out, `compile.rs` the kernels' sources. `products.rs`,
//! `attention.rs`, `kv.rs` and `select.rs` choose launches; what is computed is in
//! `kernels/`. What a reader would get wrong: nothing here decides the order of a
//! sum; tile and grid sizes change no bit.

mod attention;
mod attention_mma;
mod backend;
mod buffer;
pub mod compile;
mod device;
mod driver;
mod error;
mod kv;
mod products;
mod select;
mod step;
mod weight;

pub use buffer::Buf;
pub use device::{Cuda, CudaOptions, Rotation};
pub use error::Error;
pub use kv::Kv;
pub use weight::Weight;
