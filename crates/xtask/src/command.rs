//! Child processes: run to success, with what they print passed on.
//!
//! A child of `cargo run` inherits the variables cargo sets for this crate. They are removed before another cargo is
//! started, since some build scripts watch them and everything behind those would be built again.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Outcome;

/// A command in the folder `root`, without the variables that cargo set for this crate.
pub fn command(root: &Path, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(root)
        .stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if [
            "CARGO_PKG_",
            "CARGO_MANIFEST_",
            "CARGO_BIN_NAME",
            "CARGO_CRATE_NAME",
        ]
        .iter()
        .any(|prefix| name.starts_with(prefix))
        {
            command.env_remove(&*name);
        }
    }
    command
}

/// The Python of a virtual environment of its own under `target/<name>`.
///
/// # Errors
/// `python3` or its module `venv` is missing.
pub fn python(root: &Path, name: &str) -> Outcome<PathBuf> {
    let venv = root.join("target").join(name).join("venv");
    let python = venv.join("bin/python3");
    if !python.exists() {
        let folder = venv.to_string_lossy();
        run(&mut command(root, "python3", &["-m", "venv", &folder]))?;
    }
    Ok(python)
}

/// Runs a command to its end, its output going where this process's goes.
///
/// # Errors
/// The program cannot be started, or it ends with another status than 0.
pub fn run(command: &mut Command) -> Outcome<()> {
    let shown = shown(command);
    println!("$ {shown}");
    let status = command
        .status()
        .map_err(|error| format!("`{shown}` could not be started: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{shown}` failed: {status}").into())
    }
}

/// Runs a command to its end and gives each line of its standard output to `line` as well as printing it.
///
/// # Errors
/// As [`run`], or its output cannot be read.
pub fn run_lines(command: &mut Command, mut line: impl FnMut(&str)) -> Outcome<()> {
    let shown = shown(command);
    println!("$ {shown}");
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("`{shown}` could not be started: {error}"))?;
    if let Some(output) = child.stdout.take() {
        for bytes in BufReader::new(output).split(b'\n') {
            let text = String::from_utf8_lossy(&bytes?).into_owned();
            println!("{text}");
            line(&text);
        }
    }
    let status = child.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{shown}` failed: {status}").into())
    }
}

/// Standard output of a command that prints little.
///
/// # Errors
/// The program cannot be started, or it fails: then with what it said on standard error.
pub fn output(command: &mut Command) -> Outcome<Vec<u8>> {
    let shown = shown(command);
    let output = command
        .output()
        .map_err(|error| format!("`{shown}` could not be started: {error}"))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(format!("`{shown}` failed: {}: {said}", output.status).into())
    }
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_is_an_error_that_names_it() {
        let here = Path::new(".");
        let error = run(&mut command(here, "false", &["x"]))
            .expect_err("false succeeds")
            .to_string();
        assert!(
            error.starts_with("`false x` failed: exit status: 1"),
            "{error}"
        );
        let error = run(&mut command(here, "no-such-program", &[]))
            .expect_err("it started")
            .to_string();
        assert!(
            error.starts_with("`no-such-program` could not be started"),
            "{error}"
        );
        let error = output(&mut command(here, "sh", &["-c", "echo why >&2; exit 3"]))
            .expect_err("exit 3")
            .to_string();
        assert!(error.ends_with("exit status: 3: why"), "{error}");
    }

    #[test]
    fn lines_are_passed_on_and_the_status_still_counts() {
        let mut seen = Vec::new();
        let outcome = run_lines(
            &mut command(Path::new("."), "sh", &["-c", "printf 'a\\nb'; exit 1"]),
            |line| {
                seen.push(line.to_owned());
            },
        );
        assert_eq!(seen, ["a", "b"]);
        assert!(outcome.is_err());
    }
}
