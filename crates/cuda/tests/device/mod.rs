//! The device under test.
#![allow(dead_code)] // each test binary uses its part

use cpu::{Cpu, CpuOptions, Isa};
use cuda::{Cuda, CudaOptions};

/// Kernels are compiled once for all tests.
fn options() -> CudaOptions {
    CudaOptions {
        cache: Some(std::env::temp_dir().join("muser-test-kernels")),
        ..CudaOptions::default()
    }
}

/// The first device.
pub fn device() -> Cuda {
    Cuda::new(&options()).unwrap_or_else(|e| panic!("{e}"))
}

/// The same, which launches every pass kernel by kernel.
pub fn unrecorded() -> Cuda {
    let options = CudaOptions {
        is_unrecorded: true,
        ..options()
    };
    Cuda::new(&options).unwrap_or_else(|e| panic!("{e}"))
}

/// The processor, to compare with.
pub fn cpu(isa: Isa, threads: usize) -> Cpu {
    let options = CpuOptions {
        threads: Some(threads),
        isa: Some(isa),
    };
    Cpu::new(options).unwrap_or_else(|e| panic!("{e}"))
}
