//! The server as the real `openai` package sees it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::serving::Build;
use crate::{Outcome, command};

/// The packages; a newer client is a decision, not an accident.
const PACKAGES: [&str; 2] = ["openai==3.57.0", "schemathesis==4.32.5"];

/// Builds the server, installs the client if need be, and gives the command that tests the one with the other.
///
/// # Errors
/// `python3` or pip is missing, or the server cannot be built.
pub fn prepare(root: &Path) -> Outcome<Command> {
    let python = install(root)?;
    let program = Build::Checked.muser(root)?;
    let program = program.to_string_lossy();
    let python = python.to_string_lossy();
    let arguments = ["tools/openai_client.py", &program];
    Ok(command::command(root, &python, &arguments))
}

/// The Python that has the client.
fn install(root: &Path) -> Outcome<PathBuf> {
    let python = command::python(root, "client")?;
    let shown = python.to_string_lossy().into_owned();
    let install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ];
    let arguments = [&install[..], &PACKAGES].concat();
    command::run(&mut command::command(root, &shown, &arguments))?;
    Ok(python)
}
