//! `muser bench`: speed, with the limit beside it.
//!
//! Decode is bound by the bytes it reads: encoded weights once a pass, stored
//! keys and values once a row. The read bandwidth is measured in the same run,
//! so each line says how far it is from that limit. What one would get wrong:
//! prefill is bound by arithmetic; its lines have no limit.

mod bandwidth;
mod plot;
mod report;
mod workload;

use crate::draft::DraftArgs;
use crate::input::{number, positive};
use crate::interrupt;
use crate::model_file::{self, Device, LoadArgs, ModelArgs, ModelFile};
use crate::output::check_writable;
use crate::terminal;
use anyhow::{Context, bail, ensure};
use indicatif::ProgressBar;
use model::kv::KvLayout;
use model::{Forward, PageClass};
use report::{Line, Report, Scope};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use workload::{Part, Runner, Work};

/// Measure prefill and decode speed against the machine's limit
///
/// Measures every prefill length of -p, and -n generated tokens for every depth of -d with every
/// number of packed sequences of -b; with --draft also drafts, and rounds of draft and
/// verification. Lists are separated by commas. Ctrl-C ends with what was
/// measured so far.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:\n  \
    muser bench\n  \
    muser bench --model model.gguf -p 512,2048 -n 64 -d 0,2048 -r 5\n  \
    muser bench --model model.gguf -p 0 -n 32 -b 1,2,4,16 --json\n  \
    muser bench --model model.gguf --draft drafter.gguf -p 0 -n 32 -d 2048 -b 1,8\n  \
    muser bench --model model.gguf -n 32 -d 0,1024,2048,4096 --plot speed.svg")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Prefill lengths in tokens, such as 512,2048 (0: none)
    #[arg(short = 'p', long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = number, default_value = "512")]
    prefill: Vec<usize>,
    /// Tokens that each sequence generates, as many as the context has behind the depth (0: none)
    #[arg(short = 'n', long, value_name = "N", value_parser = number, default_value = "64")]
    generate: usize,
    /// Depths at which generation begins, in tokens that each sequence has before, such as 0,2048
    #[arg(short = 'd', long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = number, default_value = "0")]
    depth: Vec<usize>,
    /// Sequences that generate together, packed into one pass, such as 1,4
    #[arg(short = 'b', long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = positive, default_value = "1")]
    batch: Vec<usize>,
    /// Repetitions; the median counts
    #[arg(short = 'r', long, value_name = "N", value_parser = positive, default_value = "5")]
    repetitions: usize,
    /// Print one JSON object
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print comma-separated values
    #[arg(long)]
    csv: bool,
    /// Draw speed over depth into an SVG file; replaces what is there
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut works = args.works()?;
    args.plot.as_deref().map_or(Ok(()), check_plot)?;
    let mut file = args.load.open(&args.model)?;
    args.draft.open(&args.load, &mut file)?;
    works.extend(args.rounds(&file)?);
    let model = args.model_for(&works, &file)?;
    let scope = args.scope(&file, &*model);
    let measure = || {
        args.bandwidth(scope.threads)
            .context("cannot measure the bandwidth")
    };
    let before = measure()?;

    interrupt::watch()?;
    let lines = args.measure(&works, &file, model, &scope, before)?;
    let resident_bytes = resident_bytes(&file);
    let after = match interrupt::is_requested() {
        true => before,
        false => measure()?,
    };
    let best = before.max(after);
    let report = Report {
        scope,
        bandwidth_gb_s: best / 1e9,
        resident_bytes,
        lines: lines.into_iter().map(|line| line.limited(best)).collect(),
    };
    if args.json {
        terminal::print_line(serde_json::to_string_pretty(&report)?)?;
    } else if args.csv {
        terminal::print_line(report.csv()?)?;
    } else {
        terminal::print_line(report.foot(before, cache_bytes()))?;
    }
    if let Some(path) = args.plot.as_deref().filter(|_| report.has_decode()) {
        plot::draw(&report, path).with_context(|| format!("cannot draw {}", path.display()))?;
    }
    if interrupt::is_requested() {
        let (done, all) = (report.lines.len(), terminal::count(works.len(), "work"));
        terminal::warn(&format!("interrupted: {done} of {all} measured"));
        return Ok(interrupt::exit_code());
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// Bytes a second that the device reads.
    fn bandwidth(&self, threads: usize) -> anyhow::Result<f64> {
        match self.load.device {
            Device::Cuda(ordinal) => Ok(model_file::cuda(ordinal)?.read_bandwidth()?),
            Device::Cpu | Device::Reference => {
                let threads = threads.min(cpu::pool::available_threads());
                Ok(bandwidth::measure(threads)?)
            }
        }
    }

    fn works(&self) -> anyhow::Result<Vec<Work>> {
        let mut works: Vec<Work> = (self.prefill.iter().filter(|&&n| n > 0))
            .map(|&n_tokens| Work::Prefill { n_tokens })
            .collect();
        if self.generate > 0 {
            for &depth in &self.depth {
                for &n_sequences in &self.batch {
                    works.push(Work::Decode {
                        n_tokens: self.generate,
                        depth,
                        n_sequences,
                    });
                }
            }
        }
        ensure!(
            !works.is_empty(),
            "nothing to measure: both -p and -n are 0"
        );
        ensure!(
            self.plot.is_none() || self.generate > 0,
            "--plot draws the speed of generating over depth, but -n is 0"
        );
        Ok(works)
    }

    /// What is measured of speculation.
    fn rounds(&self, file: &ModelFile) -> anyhow::Result<Vec<Work>> {
        let Some(n_drafted) = self.draft.n_drafted(file)? else {
            return Ok(Vec::new());
        };
        let parts = match file.drafter {
            Some(_) => &[Part::Draft, Part::Round][..],
            None => &[Part::Round],
        };
        let mut works = Vec::new();
        for &depth in self.depth.iter().filter(|_| self.generate > 0) {
            for &n_sequences in &self.batch {
                works.extend(parts.iter().map(|&part| Work::Speculate {
                    part,
                    n_drafted,
                    n_rounds: self.generate,
                    depth,
                    n_sequences,
                }));
            }
        }
        Ok(works)
    }

    /// The model with room for the largest of `works`.
    fn model_for(&self, works: &[Work], file: &ModelFile) -> anyhow::Result<Box<dyn Forward>> {
        let longest = works.iter().map(|w| w.rows_per_sequence()).max();
        let longest = longest.unwrap_or(0);
        let n_sequences = works.iter().map(|w| w.n_sequences()).max().unwrap_or(1);
        let model = self.load.load_sized(file, longest, n_sequences)?;
        self.load.check_length(model.config(), longest)?;
        let max_rows = model.caps().max_rows;
        ensure!(
            n_sequences <= max_rows,
            "--batch: found {n_sequences}, expected at most the {max_rows} rows of a pass"
        );
        let rows = |work: &Work| match work {
            Work::Speculate { n_drafted, .. } => n_sequences * (1 + n_drafted),
            Work::Prefill { .. } | Work::Decode { .. } => 0,
        };
        let n_rows = works.iter().map(rows).max().unwrap_or(0);
        ensure!(
            n_rows <= max_rows,
            "--batch and --draft-max: found {n_rows} rows of drafts, expected at most the \
             {max_rows} rows of a pass"
        );
        Ok(model)
    }

    fn scope(&self, file: &ModelFile, model: &dyn Forward) -> Scope {
        Scope {
            model: file.name.clone(),
            quantization: file.quantization(),
            device: model.caps().device,
            isa: self.load.isa().map(|isa| isa.to_string()),
            threads: self.load.n_threads(),
            weights: self.load.memory.describe(file),
            kv: model.capacity().layout.ty.to_string(),
            drafter: file.drafter.as_ref().map(|drafter| drafter.name.clone()),
            repetitions: self.repetitions,
        }
    }

    /// The lines of `works`, or of those before an interruption. A table's rows are
    /// printed as they come, with their limit at `bandwidth` bytes a second.
    fn measure(
        &self,
        works: &[Work],
        file: &ModelFile,
        model: Box<dyn Forward>,
        scope: &Scope,
        bandwidth: f64,
    ) -> anyhow::Result<Vec<Line>> {
        let layout = model.capacity().layout;
        let n_rows = works.iter().map(|w| w.n_rows(self.repetitions) as u64);
        let bar = terminal::progress(n_rows.sum(), "measuring");
        let is_table = !self.json && !self.csv;
        if is_table {
            print_above(&bar, &scope.head())?;
        }
        let mut runner = Runner::new(model, bar.clone());
        let mut lines = Vec::new();
        for &work in works {
            let Some(seconds) = runner.measure(work, self.repetitions)? else {
                break;
            };
            let line = Line::new(work, seconds, bytes_per_pass(file, &layout, work));
            let line = line.limited(bandwidth);
            if is_table {
                print_above(&bar, &line.row())?;
            }
            lines.push(line);
        }
        bar.finish_and_clear();
        Ok(lines)
    }
}

/// Prints a line of the table above the bar.
fn print_above(bar: &ProgressBar, line: &str) -> std::io::Result<()> {
    bar.suspend(|| terminal::print_line(line))
}

/// Checks before the work that a picture can be written to `path`.
fn check_plot(path: &Path) -> anyhow::Result<()> {
    if let Some(ending) = path.extension().filter(|e| !e.eq_ignore_ascii_case("svg")) {
        bail!(
            "--plot {}: found the ending .{}, expected .svg, which is what is drawn",
            path.display(),
            ending.display()
        );
    }
    check_writable(path)
}

/// Bytes that one pass of a decode work reads on average; `None` for prefill.
fn bytes_per_pass(file: &ModelFile, layout: &KvLayout, work: Work) -> Option<u64> {
    let Work::Decode {
        n_tokens,
        depth,
        n_sequences,
    } = work
    else {
        return None;
    };
    let tensors = file.gguf.tensors();
    // The embedding is read a row at a time, unless it is the head as well.
    let is_tied = file.gguf.tensor("output.weight").is_none();
    let weights = tensors
        .iter()
        .filter(|t| is_tied || t.name != "token_embd.weight")
        .map(|t| t.data.len() as u64)
        .sum::<u64>();
    // Those of a drafter are only written.
    let keys = [PageClass::Full, PageClass::Sliding].map(|class| {
        let class = layout.classes[class as usize];
        // A row sees itself and those before it.
        let window = class.window.map_or(usize::MAX, |w| w as usize);
        let seen: usize = (depth + 1..=depth + n_tokens).map(|n| n.min(window)).sum();
        let row_bytes = 2 * class.n_head_kv * class.head_dim * layout.ty.bytes();
        (class.n_layer * seen * row_bytes) as u64
    });
    Some(weights + keys.iter().sum::<u64>() * n_sequences as u64 / n_tokens as u64)
}

/// Memory of this process beside the weights, where the system says it.
fn resident_bytes(file: &ModelFile) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    // Weights that were read are the process's own memory, mapped ones are not.
    let weights = match file.is_bundled || file.gguf.files().are_mapped() {
        true => 0,
        false => file.gguf.file_bytes(),
    };
    Some((kib * 1024).saturating_sub(weights))
}

/// Bytes of the processor's last cache, where the system says it.
fn cache_bytes() -> Option<u64> {
    let caches = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let sizes = caches.filter_map(|cache| {
        let size = std::fs::read_to_string(cache.ok()?.path().join("size")).ok()?;
        let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
        Some(kib * 1024)
    });
    sizes.max()
}
