//! Tests that need a GPU, carried to a machine that has one.
//!
//! The bundle holds programs only, each stripped: test binaries, `muser`, and a script that runs the tests, prints
//! `N passed, N failed` and writes a receipt. What they read is in the checkout, so that has to travel too.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{Outcome, command};

/// The compiler of kernels, as pip knows it; any that knows sm_80, sm_90 and sm_120 will do.
const NVRTC: &str = "nvidia-cuda-nvrtc==13.0.88";

/// The script of the bundle.
const RUN: &str = "tools/gpu_run.sh";

/// What to build and where.
#[derive(clap::Args, Debug)]
pub struct Options {
    /// Folder of the bundle
    #[arg(long, value_name = "DIR", default_value = "target/gpu")]
    bundle: PathBuf,
    /// Build only; else the tests run here afterwards and write receipts/gpu.json
    #[arg(long)]
    build_only: bool,
    /// Leave `muser` out
    #[arg(long)]
    tests_only: bool,
}

/// Builds the bundle, and runs it unless told otherwise.
///
/// # Errors
/// Something does not build, or a test fails: without a GPU all of them do.
pub fn run(root: &Path, options: &Options) -> Outcome<()> {
    let bundle = root.join(&options.bundle);
    let tests = bundle.join("tests");
    if tests.exists() {
        fs::remove_dir_all(&tests)?;
    }
    fs::create_dir_all(&tests)?;
    for (name, program) in test_programs(root)? {
        strip(root, &program, &tests.join(name))?;
    }
    if !options.tests_only {
        let build = ["build", "--release", "--package", "muser"];
        command::run(&mut command::command(root, "cargo", &build))?;
        strip(
            root,
            &root.join("target/release/muser"),
            &bundle.join("muser"),
        )?;
    }
    fs::copy(root.join(RUN), bundle.join("run.sh"))?;
    fs::write(bundle.join("root"), root.to_string_lossy().as_bytes())?;
    let describe = ["describe", "--always", "--dirty", "--abbrev=40"];
    let commit = command::output(&mut command::command(root, "git", &describe))?;
    fs::write(bundle.join("commit"), commit.trim_ascii())?;
    let script = bundle.join("run.sh").to_string_lossy().into_owned();
    if options.build_only {
        println!("in a copy of the checkout on a machine with a GPU: sh {script} RECEIPT.json");
        return Ok(());
    }
    fs::create_dir_all(root.join("receipts"))?;
    command::run(&mut command::command(
        root,
        "sh",
        &[&script, "receipts/gpu.json"],
    ))
}

/// The test programs of the crate `cuda` that need a GPU, with their names.
fn test_programs(root: &Path) -> Outcome<Vec<(String, PathBuf)>> {
    let arguments = [
        "test",
        "--package",
        "cuda",
        "--features",
        "gpu",
        "--no-run",
        "--message-format=json",
    ];
    let messages = command::output(&mut command::command(root, "cargo", &arguments))?;
    programs(&String::from_utf8(messages)?)
}

/// Names and paths of the integration tests with the feature, from cargo's messages.
fn programs(messages: &str) -> Outcome<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line)?;
        let target = &message["target"];
        let is_gpu = target["required-features"] == serde_json::json!(["gpu"]);
        if let (true, Some(program), Some(name)) = (
            is_gpu,
            message["executable"].as_str(),
            target["name"].as_str(),
        ) {
            found.push((name.to_owned(), program.into()));
        }
    }
    match found.is_empty() {
        true => Err("cargo built no test that needs a GPU".into()),
        false => Ok(found),
    }
}

/// Copies a program without its symbols.
fn strip(root: &Path, from: &Path, to: &Path) -> Outcome<()> {
    let (from, to) = (from.to_string_lossy(), to.to_string_lossy());
    command::run(&mut command::command(root, "strip", &["-o", &to, &from]))
}

/// Fetches NVRTC into `target/nvrtc`, where the test that compiles all kernels looks for it.
///
/// # Errors
/// `python3` with pip is missing, or the download fails.
pub fn nvrtc(root: &Path) -> Outcome<()> {
    let folder = root.join("target/nvrtc");
    let stamp = folder.join("requirement");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == NVRTC) {
        println!("{NVRTC} is there");
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let to = folder.to_string_lossy();
    let arguments = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--target",
        &to,
        NVRTC,
    ];
    command::run(&mut command::command(root, "python3", &arguments))?;
    fs::write(stamp, NVRTC)?;
    println!("{NVRTC} is ready");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::programs;

    #[test]
    fn only_tests_with_the_feature_are_carried() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"compile"},"executable":"/a"}
{"reason":"compiler-artifact","target":{"name":"ops","required-features":["gpu"]},"executable":"/b"}
{"reason":"compiler-artifact","target":{"name":"cuda"},"executable":null}
{"reason":"build-finished","success":true}"#;
        let found = programs(messages).expect("messages");
        assert_eq!(found, [("ops".to_owned(), "/b".into())]);
        assert!(programs("{}").is_err(), "no test is an error");
    }
}
