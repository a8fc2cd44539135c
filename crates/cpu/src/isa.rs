//! Which instruction sets this machine has, found at run time.
//!
//! All of them give the same bits; a forced one is for tests and comparisons.

use std::fmt;
use std::str::FromStr;

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: the program that the others must equal.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// AVX-512, and AMX for products of many rows.
    Amx,
}

impl Isa {
    /// All of them, the narrowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// Does this machine have it?
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => Isa::Avx512.is_available() && amx::is_usable(),
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            Isa::Amx => false,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }

    /// The widest that this machine has.
    pub fn detect() -> Isa {
        let mut widest = Isa::Scalar;
        for isa in Isa::ALL {
            if isa.is_available() {
                widest = isa;
            }
        }
        widest
    }

    /// The name that flags and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Isa, String> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| format!("found {name:?}, expected scalar, avx2, avx512 or amx"))
    }
}

/// The matrix unit of Intel's server processors.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::x86_64::__cpuid_count;
    use std::sync::LazyLock;

    /// Does the processor have it, and does the system let this process use it?
    pub(super) fn is_usable() -> bool {
        static IS_USABLE: LazyLock<bool> = LazyLock::new(|| has_int8() && ask());
        *IS_USABLE
    }

    /// AMX-TILE and AMX-INT8: bits 24 and 25 of EDX, leaf 7 (Intel SDM, volume 2, CPUID).
    fn has_int8() -> bool {
        const BITS: u32 = 0b11 << 24;
        __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).edx & BITS == BITS
    }

    /// Asks the system for the tiles' state in this process: without, the first
    /// instruction ends it (Linux, Documentation/arch/x86/xstate.rst).
    fn ask() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: the call takes two numbers and touches no memory of ours.
        let refused = unsafe {
            libc::syscall(
                libc::SYS_arch_prctl,
                ARCH_REQ_XCOMP_PERM,
                XFEATURE_XTILEDATA,
            )
        };
        refused == 0
    }
}
