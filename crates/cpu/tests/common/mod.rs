//! What the backend's tests share beside `testing`: settings to compare.
#![allow(dead_code)] // each test binary uses its part

use cpu::{Cpu, CpuOptions, Isa};

/// A backend with these settings.
pub fn cpu(isa: Isa, threads: usize) -> Cpu {
    let options = CpuOptions {
        threads: Some(threads),
        isa: Some(isa),
    };
    Cpu::new(options).unwrap_or_else(|e| panic!("{e}"))
}

/// The instruction sets of this machine.
pub fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|i| i.is_available()).collect()
}
