//! Continuous integration: named steps, each timed, all of them run even if one fails, and a summary at the end.
//!
//! The last line is `N passed, N failed`, the sum over every test suite that ran; a step that failed for another reason
//! shows in the table above it and in the exit status.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::command::{command, output, run as run_command, run_lines};
use crate::{Outcome, client, fetch, gpu, tidy};

/// What to run.
#[derive(Args)]
pub struct Options {
    /// Only these steps, separated by commas
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Step>,
    /// Seconds that each fuzz target runs
    #[arg(long, default_value_t = 60)]
    fuzz_seconds: u32,
}

/// A step of continuous integration, in the order in which they run: the quick ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Step {
    /// Formatting of the workspace and of the fuzz targets
    Fmt,
    /// The rules of `cargo xtask tidy`
    Tidy,
    /// Lints of all targets, warnings are errors
    Clippy,
    /// All tests, by the command of the README
    Test,
    /// Every CUDA kernel, compiled for three architectures
    Kernels,
    /// Documentation, warnings are errors
    Doc,
    /// Golden tests that need a fetched model
    Golden,
    /// The server with the real `openai` package
    Client,
    /// Half a minute of many conversations on one server
    Soak,
    /// Every fuzz target for a minute, from the committed seeds
    Fuzz,
}

/// Tests that ran, from the closing lines of `cargo test`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    passed: u64,
    failed: u64,
}

impl Tally {
    /// Adds a line of the form `test result: ok. 3 passed; 0 failed; ...`; other lines change nothing.
    fn read(&mut self, line: &str) {
        let Some((_, counts)) = line.split_once("test result: ") else {
            return;
        };
        let count_before = |word: &str| -> u64 {
            let before = counts.split_once(word).map_or("", |(before, _)| before);
            before
                .rsplit(' ')
                .next()
                .and_then(|digits| digits.parse().ok())
                .unwrap_or(0)
        };
        self.passed += count_before(" passed");
        self.failed += count_before(" failed");
    }
}

/// How one step went.
struct Report {
    step: Step,
    outcome: Outcome<()>,
    took: Duration,
}

/// Runs the chosen steps, prints the summary and ends with an error if one failed.
///
/// # Errors
/// At least one step failed.
pub fn run(root: &Path, options: &Options) -> Outcome<()> {
    let mut tally = Tally::default();
    let mut reports = Vec::new();
    let chosen = |step: &&Step| options.only.is_empty() || options.only.contains(step);
    for &step in Step::value_variants().iter().filter(chosen) {
        println!("\n== {}", name(step));
        let start = Instant::now();
        let outcome = run_step(root, step, options, &mut tally);
        if let Err(error) = &outcome {
            println!("{}: {error}", name(step));
        }
        reports.push(Report {
            step,
            outcome,
            took: start.elapsed(),
        });
    }
    println!("\n{}", summary(&reports));
    let failed: Vec<_> = reports
        .iter()
        .filter(|report| report.outcome.is_err())
        .map(|r| name(r.step))
        .collect();
    if tally != Tally::default() {
        println!("{} passed, {} failed", tally.passed, tally.failed);
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("failed: {}", failed.join(", ")).into())
    }
}

fn run_step(root: &Path, step: Step, options: &Options, tally: &mut Tally) -> Outcome<()> {
    let cargo = |arguments: &[&str]| command(root, "cargo", arguments);
    match step {
        Step::Fmt => {
            run_command(&mut cargo(&["fmt", "--all", "--check"]))?;
            run_command(&mut cargo(&[
                "fmt",
                "--check",
                "--manifest-path",
                "fuzz/Cargo.toml",
            ]))
        }
        Step::Tidy => tidy::run(root),
        Step::Clippy => {
            // Golden and GPU tests are compiled only with their features; they are linted like the rest.
            let all = [
                "--workspace",
                "--all-targets",
                "--features",
                "muser/smollm2,cuda/gpu,cuda/nvrtc",
            ];
            run_command(&mut cargo(
                &[&["clippy"], &all[..], &["--", "-D", "warnings"]].concat(),
            ))
        }
        Step::Test => run_tests(&mut cargo(&["test", "--workspace"]), tally),
        Step::Kernels => {
            gpu::nvrtc(root)?;
            let compile = ["test", "--package", "cuda", "--features", "nvrtc"];
            run_tests(
                &mut cargo(&[&compile[..], &["--test", "compile"]].concat()),
                tally,
            )
        }
        Step::Doc => run_command(
            cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"),
        ),
        Step::Golden => golden_tests(root, tally),
        Step::Client => run_tests(&mut client::prepare(root)?, tally),
        Step::Soak => {
            let arguments = ["xtask", "soak", "--seconds", "30", "--repeated", "100"];
            run_tests(&mut cargo(&arguments), tally)
        }
        Step::Fuzz => fuzz(root, options.fuzz_seconds),
    }
}

/// Fetches SmolLM2 and runs the golden tests that read it.
///
/// # Errors
/// The model cannot be fetched, or a test fails.
pub fn golden(root: &Path) -> Outcome<()> {
    golden_tests(root, &mut Tally::default())
}

fn golden_tests(root: &Path, tally: &mut Tally) -> Outcome<()> {
    fetch::run(root, fetch::Model::Smollm2)?;
    // With `--workspace` the dependencies keep the features, and so the artefacts, of the step `test`.
    let arguments = [
        "test",
        "--workspace",
        "--features",
        "muser/smollm2",
        "--test",
        "smollm2",
    ];
    run_tests(&mut command(root, "cargo", &arguments), tally)
}

/// Compares answers with and without drafts: every request, draft length and way.
///
/// # Errors
/// The model cannot be fetched, or a test fails.
pub fn speculation(root: &Path) -> Outcome<()> {
    fetch::run(root, fetch::Model::Smollm2)?;
    let arguments = [
        "test",
        "--release",
        "--package",
        "muser",
        "--features",
        "smollm2,whole-product",
        "--test",
        "speculation",
        "--test",
        "smollm2",
    ];
    run_tests(
        &mut command(root, "cargo", &arguments),
        &mut Tally::default(),
    )
}

/// Tests the server with the real `openai` package.
///
/// # Errors
/// It cannot be installed, or a test fails.
pub fn client(root: &Path) -> Outcome<()> {
    run_tests(&mut client::prepare(root)?, &mut Tally::default())
}

/// Runs a command that counts tests as `cargo test` does and adds its counts to `tally`.
fn run_tests(command: &mut Command, tally: &mut Tally) -> Outcome<()> {
    let mut seen = Tally::default();
    let outcome = run_lines(command, |line| seen.read(line));
    tally.passed += seen.passed;
    tally.failed += seen.failed;
    outcome?;
    if seen.passed == 0 {
        Err("no test ran".into())
    } else {
        Ok(())
    }
}

/// Builds all fuzz targets, then runs each from its committed seeds.
fn fuzz(root: &Path, seconds: u32) -> Outcome<()> {
    let targets = String::from_utf8(output(&mut command(root, "cargo", &["fuzz", "list"]))?)?;
    if targets.trim().is_empty() {
        return Err("fuzz/Cargo.toml lists no target".into());
    }
    run_command(&mut command(root, "cargo", &["+nightly", "fuzz", "build"]))?;
    let mut failed = Vec::new();
    for target in targets.split_whitespace() {
        let (corpus, seeds) = (
            format!("fuzz/corpus/{target}"),
            format!("fuzz/seeds/{target}"),
        );
        // libFuzzer takes an empty folder for a start from nothing: a lost seed folder must not pass unseen.
        if fs::read_dir(root.join(&seeds)).map_or(0, Iterator::count) == 0 {
            failed.push(format!("{target} (no seeds in {seeds})"));
            continue;
        }
        fs::create_dir_all(root.join(&corpus))?;
        let time = format!("-max_total_time={seconds}");
        let limits = [
            "--",
            &time,
            "-timeout=20",
            "-verbosity=0",
            "-print_final_stats=1",
        ];
        let arguments = [
            &["+nightly", "fuzz", "run", target, &corpus, &seeds],
            &limits[..],
        ]
        .concat();
        if let Err(error) = run_command(&mut command(root, "cargo", &arguments)) {
            println!("{error}");
            failed.push(target.to_owned());
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("fuzz targets failed: {}", failed.join(", ")).into())
    }
}

fn name(step: Step) -> String {
    step.to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

fn summary(reports: &[Report]) -> String {
    let mut table = format!("{:<8} {:<6} {:>8}", "step", "result", "seconds");
    for report in reports {
        let result = if report.outcome.is_ok() {
            "ok"
        } else {
            "FAILED"
        };
        table += &format!(
            "\n{:<8} {result:<6} {:>8.1}",
            name(report.step),
            report.took.as_secs_f64()
        );
    }
    let total: Duration = reports.iter().map(|report| report.took).sum();
    table + &format!("\n{:<8} {:<6} {:>8.1}", "total", "", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tally_sums_the_closing_lines_of_cargo_test() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a ... ok",
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
            "5 passed; 7 failed",
        ] {
            tally.read(line);
        }
        assert_eq!(
            tally,
            Tally {
                passed: 13,
                failed: 2
            }
        );
    }

    #[test]
    fn a_test_command_that_runs_no_test_fails() {
        let here = Path::new(".");
        let mut tally = Tally::default();
        let none = "echo 'test result: ok. 0 passed; 0 failed;'";
        assert!(run_tests(&mut command(here, "sh", &["-c", none]), &mut tally).is_err());
        let some = "echo 'test result: ok. 4 passed; 0 failed;'";
        run_tests(&mut command(here, "sh", &["-c", some]), &mut tally).expect("tests ran");
        let failing = "echo 'test result: FAILED. 1 passed; 1 failed;'; exit 101";
        assert!(run_tests(&mut command(here, "sh", &["-c", failing]), &mut tally).is_err());
        assert_eq!(
            tally,
            Tally {
                passed: 5,
                failed: 1
            }
        );
    }

    #[test]
    fn the_summary_names_every_step_and_its_result() {
        let report = |step, outcome| Report {
            step,
            outcome,
            took: Duration::from_millis(1500),
        };
        let table = summary(&[
            report(Step::Fmt, Ok(())),
            report(Step::Test, Err("x".into())),
        ]);
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(rows[1], ["fmt", "ok", "1.5"]);
        assert_eq!(rows[2], ["test", "FAILED", "1.5"]);
        assert_eq!(rows[3], ["total", "3.0"]);
    }
}
