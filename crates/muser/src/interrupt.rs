//! Ctrl-C as a request to stop: the command ends in order, with its figures
//! printed and nothing half-written left behind.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// From now on the first Ctrl-C is a request; a second one ends the process.
pub fn watch() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if IS_REQUESTED.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })?;
    Ok(())
}

/// Was Ctrl-C pressed?
pub fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::Relaxed)
}

/// The exit code of an interrupted command, as shells know it.
pub fn exit_code() -> ExitCode {
    ExitCode::from(130)
}
