//! The rules of the tree that no compiler checks.
//!
//! Each rule is a function from text to violations, so that its test is a few lines of input. `exceptions.rs` is the one
//! place where a violation can be let through; an exception that lets nothing through is itself an error.

mod dependencies;
mod exceptions;
mod rust;
#[cfg(test)]
mod tests;
mod text;

use std::fmt;
use std::fs;
use std::path::Path;

use exceptions::{EXCEPTIONS, Exception};

use crate::Outcome;
use crate::command::{command, output};

/// Longest file of code, in lines.
const FILE_LINES: usize = 800;
/// Longest function, in lines from its `fn` to its closing brace.
const FUNCTION_LINES: usize = 80;
/// Largest committed file outside `models/`, in bytes.
const FILE_BYTES: u64 = 2_000_000;

/// Files that the repository cannot be without.
const REQUIRED: [&str; 11] = [
    ".ci/run",
    ".gitignore",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "LICENSE",
    "NOTICE",
    "README.md",
    "models/README.md",
    "testdata/README.md",
];

/// Something a rule does not allow, printed as `path:line: rule: found, limit`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Violation {
    path: String,
    /// From 1; 0 when the whole file is meant.
    line: usize,
    rule: &'static str,
    /// What an exception names beside the path: a function, a dependency; empty when the file is meant.
    item: String,
    found: String,
    limit: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{}:{}: {}: {}, {}",
            self.path, self.line, self.rule, self.found, self.limit
        )
    }
}

/// Checks every file that git knows or would add, prints what is wrong.
///
/// # Errors
/// At least one violation, or git or cargo cannot be asked.
pub fn run(root: &Path) -> Outcome<()> {
    let listed = output(&mut command(
        root,
        "git",
        &[
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
    ))?;
    let mut paths: Vec<String> = String::from_utf8_lossy(&listed)
        .split('\0')
        .map(str::to_owned)
        .collect();
    paths.retain(|path| !path.is_empty() && root.join(path).is_file());
    paths.sort();
    paths.dedup();

    let mut violations = missing_files(&paths);
    for path in &paths {
        let file = root.join(path);
        violations.extend(text::check_size(path, fs::metadata(&file)?.len()));
        let bytes = fs::read(&file)?;
        if let Some(text) = text::of(&bytes) {
            violations.extend(check_text(path, text));
        }
    }
    let metadata = output(&mut command(
        root,
        "cargo",
        &["metadata", "--no-deps", "--format-version", "1"],
    ))?;
    for edge in dependencies::edges(&metadata)? {
        let manifest = fs::read_to_string(root.join(edge.manifest()))?;
        violations.extend(dependencies::check(&edge, &manifest));
    }
    report(paths.len(), apply(violations, EXCEPTIONS))
}

/// All rules that look into one file.
fn check_text(path: &str, text: &str) -> Vec<Violation> {
    let mut violations = text::check(path, text);
    if path.ends_with(".rs") {
        violations.extend(rust::check(path, text));
    }
    violations
}

fn missing_files(paths: &[String]) -> Vec<Violation> {
    let missing = REQUIRED
        .iter()
        .filter(|&&wanted| !paths.iter().any(|path| path == wanted));
    missing
        .map(|wanted| Violation {
            path: (*wanted).to_owned(),
            line: 0,
            rule: "required-file",
            item: String::new(),
            found: "missing".to_owned(),
            limit: "every checkout has it".to_owned(),
        })
        .collect()
}

/// Takes out what an exception allows and adds what is wrong with the exceptions.
fn apply(violations: Vec<Violation>, exceptions: &[Exception]) -> Vec<Violation> {
    let allows = |exception: &Exception, violation: &Violation| {
        exception.rule == violation.rule
            && exception.path == violation.path
            && exception.item == violation.item
    };
    let mut left: Vec<_> = Vec::new();
    for exception in exceptions {
        let complaint = if !violations
            .iter()
            .any(|violation| allows(exception, violation))
        {
            "allows nothing any more"
        } else if exception.reason.trim().is_empty() {
            "has no reason"
        } else {
            continue;
        };
        left.push(Violation {
            path: "crates/xtask/src/tidy/exceptions.rs".to_owned(),
            line: 0,
            rule: "exception",
            item: String::new(),
            found: format!(
                "{} for {} {} {complaint}",
                exception.rule, exception.path, exception.item
            ),
            limit: "each one is needed and says why".to_owned(),
        });
    }
    let allowed = |violation: &Violation| {
        exceptions
            .iter()
            .any(|exception| allows(exception, violation))
    };
    left.extend(
        violations
            .into_iter()
            .filter(|violation| !allowed(violation)),
    );
    left
}

fn report(n_files: usize, mut violations: Vec<Violation>) -> Outcome<()> {
    violations.sort_by(|a, b| (&a.path, a.line, a.rule).cmp(&(&b.path, b.line, b.rule)));
    for violation in &violations {
        println!("{violation}");
    }
    match violations.len() {
        0 => {
            println!("tidy: {n_files} files, nothing to say");
            Ok(())
        }
        n => Err(format!("tidy: {n_files} files, {n} violations").into()),
    }
}
