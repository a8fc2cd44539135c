//! What can be wrong with the settings of the backend.

use crate::Isa;
use crate::pool::MAX_THREADS;

/// Why the backend could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A number of threads that makes no sense.
    #[error("threads: found {found}, expected 1 to {MAX_THREADS}")]
    ThreadCount {
        /// The number given.
        found: usize,
    },
    /// The instruction set asked for is not there.
    #[error("this machine has no {wanted}; the widest it has is {widest}")]
    IsaUnavailable {
        /// The instruction set asked for.
        wanted: Isa,
        /// The widest instruction set of the machine.
        widest: Isa,
    },
    /// The system refused a thread.
    #[error("thread {index} of {threads} could not be started: {error}")]
    ThreadRefused {
        /// Which one.
        index: usize,
        /// How many were asked for.
        threads: usize,
        /// The system's answer.
        error: std::io::Error,
    },
}
