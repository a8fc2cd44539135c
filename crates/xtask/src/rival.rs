//! Muser beside llama.cpp, in turn, on one machine and one model file.
//!
//! Machines are shared: speeds of two runs cannot be compared, ratios inside one round can. So the engines take turns,
//! each round gives a ratio for every work, and the median of the ratios counts.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{Outcome, command};

/// The release whose vendored llama.cpp is the rival; pip builds it for this machine.
const PACKAGE: &str = "llama-cpp-python==0.3.36";

/// What is measured.
#[derive(clap::Args, Debug)]
pub struct Options {
    /// Model file
    #[arg(long, short)]
    model: PathBuf,
    /// Threads of both
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Prefill lengths (0: none)
    #[arg(short = 'p', long, default_value = "512")]
    prefill: String,
    /// Tokens to generate (0: none)
    #[arg(short = 'n', long, default_value_t = 64)]
    generate: usize,
    /// Depths at which generation begins
    #[arg(short = 'd', long, default_value = "0")]
    depth: String,
    /// Sequences generated together
    #[arg(short = 'b', long, default_value = "1")]
    batch: String,
    /// Times that both take their turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Repetitions of a work inside a turn; their median counts
    #[arg(short = 'r', long, default_value_t = 3)]
    repetitions: usize,
    /// Muser reads the weights into its own memory instead of mapping the file
    #[arg(long)]
    no_mmap: bool,
    /// llama.cpp without re-packed weights and AMX, where its kernels for these crash
    #[arg(long)]
    plain_rival: bool,
    /// llama.cpp without flash attention, which is slower on some processors
    #[arg(long)]
    rival_without_flash: bool,
}

/// Installs the rival if need be, measures both, and prints a table in Markdown.
///
/// # Errors
/// `python3`, pip or a C++ compiler is missing, or one of the engines fails.
pub fn run(root: &Path, options: &Options) -> Outcome<()> {
    let python = install(root)?;
    command::run(&mut command::command(
        root,
        "cargo",
        &["build", "--release", "--package", "muser"],
    ))?;
    let mut rounds = Vec::new();
    for round in 1..=options.rounds {
        println!("round {round} of {}", options.rounds);
        rounds.push((options.muser(root)?, options.rival(root, &python)?));
    }
    println!("\n{}", table(&rounds)?);
    Ok(())
}

/// The Python that has the rival; installs it if need be.
///
/// # Errors
/// `python3`, pip or a C++ compiler is missing.
pub fn install(root: &Path) -> Outcome<PathBuf> {
    let python = command::python(root, "rival")?;
    let shown = python.to_string_lossy().into_owned();
    let import = ["-c", "import llama_cpp"];
    if command::output(&mut command::command(root, &shown, &import)).is_ok() {
        return Ok(python);
    }
    println!("pip builds llama.cpp for this machine, which takes some 20 minutes on two cores");
    let arguments = [
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--no-binary",
        "llama-cpp-python",
        PACKAGE,
    ];
    command::run(&mut command::command(root, &shown, &arguments))?;
    Ok(python)
}

impl Options {
    fn muser(&self, root: &Path) -> Outcome<Value> {
        let numbers = [self.threads, self.generate, self.repetitions].map(|n| n.to_string());
        let [threads, generate, repetitions] = &numbers;
        let model = self.model.to_string_lossy();
        let program = root.join("target/release/muser");
        let mut arguments = vec![
            "bench",
            "--json",
            "--model",
            &model,
            "--threads",
            threads,
            "-p",
            &self.prefill,
            "-n",
            generate,
            "-d",
            &self.depth,
            "-b",
            &self.batch,
            "-r",
            repetitions,
        ];
        arguments.extend(self.no_mmap.then_some("--no-mmap"));
        measured(root, &program, &arguments)
    }

    fn rival(&self, root: &Path, python: &Path) -> Outcome<Value> {
        let numbers = [self.threads, self.generate, self.repetitions].map(|n| n.to_string());
        let [threads, generate, repetitions] = &numbers;
        let model = self.model.to_string_lossy();
        let mut arguments = vec![
            "tools/rival_llama.py",
            &model,
            "--threads",
            threads,
            "--prefill",
            &self.prefill,
            "--generate",
            generate,
            "--depth",
            &self.depth,
            "--batch",
            &self.batch,
            "--repetitions",
            repetitions,
        ];
        arguments.extend(self.plain_rival.then_some("--plain"));
        arguments.extend(self.rival_without_flash.then_some("--no-flash"));
        measured(root, python, &arguments)
    }
}

/// The JSON that a program prints.
fn measured(root: &Path, program: &Path, arguments: &[&str]) -> Outcome<Value> {
    let program = program.to_string_lossy();
    let text = command::output(&mut command::command(root, &program, arguments))?;
    Ok(serde_json::from_slice(&text)?)
}

/// A line per work: medians of both, the median of the rounds' ratios, Muser's share of its limit.
fn table(rounds: &[(Value, Value)]) -> Outcome<String> {
    let mut out = String::from(
        "| work | depth | sequences | Muser tok/s | llama.cpp tok/s | ratio | of the limit |\n|---|---|---|---|---|---|---|\n",
    );
    let lines = |report: &Value| report["lines"].as_array().cloned().unwrap_or_default();
    let n_lines = rounds.first().map_or(0, |(muser, _)| lines(muser).len());
    for index in 0..n_lines {
        let mut columns = [vec![], vec![], vec![], vec![]];
        let mut title = String::new();
        for (muser, rival) in rounds {
            let (muser, rival) = (&lines(muser)[index], &lines(rival)[index]);
            for key in ["work", "n_tokens", "depth", "n_sequences"] {
                if muser[key] != rival[key] {
                    return Err(format!(
                        "the engines measured different works: {muser} and {rival}"
                    )
                    .into());
                }
            }
            title = format!(
                "| {} {} | {} | {} ",
                muser["work"].as_str().unwrap_or("?"),
                muser["n_tokens"],
                muser["depth"],
                muser["n_sequences"]
            );
            let speed = |line: &Value| line["tokens_per_second"].as_f64().unwrap_or(f64::NAN);
            columns[0].push(speed(muser));
            columns[1].push(speed(rival));
            columns[2].push(speed(muser) / speed(rival));
            columns[3].extend(muser["ratio"].as_f64());
        }
        let [muser, rival, ratio, limit] = columns.map(median);
        let limit = limit.map_or("-".to_string(), |f| format!("{:.0} %", f * 100.0));
        let number = |n: Option<f64>| n.map_or("-".to_string(), |n| format!("{n:.2}"));
        writeln!(
            out,
            "{title}| {} | {} | {} | {limit} |",
            number(muser),
            number(rival),
            number(ratio)
        )?;
    }
    Ok(out)
}

/// The middle of some values.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (n > 0).then(|| (values[(n - 1) / 2] + values[n / 2]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::table;
    use serde_json::{Value, json};

    fn report(work: &str, speed: f64, ratio: Option<f64>) -> Value {
        json!({"lines": [{"work": work, "n_tokens": 64, "depth": 0, "n_sequences": 1,
            "tokens_per_second": speed, "ratio": ratio}]})
    }

    /// The ratio is the median of the rounds' ratios, not the ratio of the medians.
    #[test]
    fn ratios_are_taken_round_by_round() {
        let rounds = [(30.0, 10.0), (80.0, 40.0), (50.0, 5.0)].map(|(muser, rival)| {
            (
                report("decode", muser, Some(0.5)),
                report("decode", rival, None),
            )
        });
        let table = table(&rounds).expect("the same works");
        let line = "| decode 64 | 0 | 1 | 50.00 | 10.00 | 3.00 | 50 % |";
        assert_eq!(table.lines().last(), Some(line));
    }

    #[test]
    fn different_works_are_not_compared() {
        let rounds = [(report("decode", 1.0, None), report("prefill", 1.0, None))];
        let error = table(&rounds).expect_err("works differ").to_string();
        assert!(error.contains("different works"), "{error}");
    }
}
