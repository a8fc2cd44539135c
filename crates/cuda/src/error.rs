//! What can be missing or wrong between this program and a GPU.

use model::DeviceError;

/// Why the backend could not be made, or a call of the driver failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A shared library is not there.
    #[error("{library} was not found ({tried}); {remedy}")]
    LibraryMissing {
        /// What the library is.
        library: &'static str,
        /// The names and paths tried, separated by commas.
        tried: String,
        /// How to get it.
        remedy: &'static str,
    },
    /// The driver is older than the functions in use.
    #[error("the NVIDIA driver speaks CUDA {found}; at least CUDA {needed} is needed")]
    DriverTooOld {
        /// CUDA version of the driver.
        found: String,
        /// Smallest version that serves.
        needed: &'static str,
    },
    /// There is no such device.
    #[error("there is no CUDA device {ordinal}: the driver shows {count}")]
    DeviceMissing {
        /// The device asked for.
        ordinal: usize,
        /// Devices that the driver shows.
        count: usize,
    },
    /// The device lacks instructions that the kernels use.
    #[error("{device} has compute capability {}.{}; at least 8.0 is needed", .found.0, .found.1)]
    CapabilityTooLow {
        /// Name of the device.
        device: String,
        /// Its compute capability.
        found: (u32, u32),
    },
    /// The compiler does not know the device's architecture.
    #[error("NVRTC {}.{} cannot compile for sm_{architecture}; a newer one is needed", .version.0, .version.1)]
    ArchitectureUnknown {
        /// Version of the compiler.
        version: (u32, u32),
        /// Architecture of the device.
        architecture: u32,
    },
    /// A kernel does not compile: a bug of this program, or of the compiler.
    #[error("kernels {program} do not compile for sm_{architecture}: {log}")]
    Compile {
        /// Which kernels.
        program: String,
        /// Architecture of the device.
        architecture: u32,
        /// What the compiler said.
        log: String,
    },
    /// A call of the driver failed.
    #[error("{call}: {answer}")]
    Driver {
        /// The function.
        call: &'static str,
        /// Its answer.
        answer: String,
    },
}

impl From<Error> for DeviceError {
    fn from(error: Error) -> DeviceError {
        DeviceError::Lost(error.to_string())
    }
}
