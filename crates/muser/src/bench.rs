//! `muser bench`: speed, with the limit beside it.
//!
//! Decode is bound by the bytes it reads: encoded weights once a pass, stored
//! keys and values once a row. The read bandwidth is measured in the same run,
//! so each line says how far it is from its floor. What one would get wrong:
//! prefill is bound by arithmetic; its lines have no floor.

mod bandwidth;
mod plot;
mod report;
mod workload;

use crate::model_file::{self, Device, LoadArgs, ModelArgs, ModelFile};
use crate::output::check_writable;
use crate::terminal;
use anyhow::{Context, bail};
use model::kv::KvLayout;
use report::{Line, Report};
use std::path::PathBuf;
use std::process::ExitCode;
use workload::{Runner, Work};

/// Measure prefill and decode speed against the machine's limit
///
/// Measures every prefill length of -p, and -n generated tokens for every depth of -d with every
/// number of packed sequences of -b.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:\n  \
    muser bench\n  \
    muser bench --model model.gguf -p 512,2048 -n 64 -d 0,2048 -r 5\n  \
    muser bench --model model.gguf -p 0 -n 32 -b 1,2,4,16 --json\n  \
    muser bench --model model.gguf -n 32 -d 0,1024,2048,4096 --plot speed.svg")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    load: LoadArgs,
    /// Prefill lengths, in tokens (0: none)
    #[arg(
        short = 'p',
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "512"
    )]
    prefill: Vec<usize>,
    /// Tokens to generate (0: none)
    #[arg(short = 'n', long, value_name = "N", default_value_t = 64)]
    generate: usize,
    /// Depths at which generation begins, in tokens
    #[arg(
        short = 'd',
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "0"
    )]
    depth: Vec<usize>,
    /// Sequences generated together
    #[arg(
        short = 'b',
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1"
    )]
    batch: Vec<usize>,
    /// Repetitions; the median counts
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5)]
    repetitions: usize,
    /// Print one JSON object
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print comma-separated values
    #[arg(long)]
    csv: bool,
    /// Draw speed over depth into an SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let works = args.works()?;
    args.plot.as_deref().map_or(Ok(()), check_writable)?;
    let file = args.load.open(&args.model)?;
    let longest = works
        .iter()
        .map(|w| w.rows_per_sequence())
        .max()
        .unwrap_or(0);
    let n_sequences = works.iter().map(|w| w.n_sequences()).max().unwrap_or(1);
    let model = args.load.load_sized(&file, longest, n_sequences)?;
    args.load.check_length(model.config(), longest)?;
    let threads = args.load.n_threads();
    let layout = model.capacity().layout;
    let bandwidth = match args.load.device {
        Device::Cuda(ordinal) => model_file::cuda(ordinal)?.read_bandwidth()?,
        Device::Cpu | Device::Reference => {
            bandwidth::measure(threads).context("cannot measure the bandwidth")?
        }
    };

    let n_passes = works
        .iter()
        .map(|w| w.n_passes() * (args.repetitions + 1))
        .sum::<usize>();
    let bar = terminal::progress(n_passes as u64, "measuring");
    let device = model.caps().device;
    let mut runner = Runner::new(model, bar.clone());
    let mut lines = Vec::new();
    for work in works {
        let seconds = runner.measure(work, args.repetitions)?;
        let bytes = bytes_per_pass(&file, &layout, work);
        lines.push(Line::new(work, seconds, bytes, bandwidth));
    }
    bar.finish_and_clear();
    let report = Report {
        model: file.name.clone(),
        quantization: quantization(&file),
        device,
        threads,
        kv: layout.ty.to_string(),
        bandwidth_gb_s: bandwidth / 1e9,
        resident_mb: resident_bytes(&file).map(|bytes| bytes as f64 / 1e6),
        repetitions: args.repetitions,
        lines,
    };
    if args.json {
        terminal::print_line(serde_json::to_string_pretty(&report)?)?;
    } else if args.csv {
        terminal::print_line(report.csv().trim_end())?;
    } else {
        terminal::print_line(report.table().trim_end())?;
    }
    if let Some(path) = &args.plot {
        plot::draw(&report, path).with_context(|| format!("cannot draw {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn works(&self) -> anyhow::Result<Vec<Work>> {
        if self.repetitions == 0 {
            bail!("--repetitions: found 0, expected 1 or more");
        }
        if self.batch.contains(&0) {
            bail!("--batch: found 0, expected 1 or more sequences");
        }
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
        match works.is_empty() {
            true => bail!("nothing to measure: both -p and -n are 0"),
            false => Ok(works),
        }
    }
}

/// Bytes that one pass of a decode work reads; `None` for prefill.
fn bytes_per_pass(file: &ModelFile, layout: &KvLayout, work: Work) -> Option<u64> {
    let Work::Decode {
        depth, n_sequences, ..
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
    let keys = layout.classes.iter().map(|class| {
        let seen = class.window.map_or(depth, |w| depth.min(w as usize));
        let row_bytes = 2 * class.n_head_kv * class.head_dim * layout.ty.bytes();
        (class.n_layer * seen * row_bytes) as u64
    });
    Some(weights + keys.sum::<u64>() * n_sequences as u64)
}

/// The encodings of the matrices, the one with the most bytes first.
fn quantization(file: &ModelFile) -> String {
    let mut bytes: Vec<(gguf::TensorType, usize)> = Vec::new();
    for tensor in file.gguf.tensors().iter().filter(|t| t.shape.len() > 1) {
        match bytes.iter_mut().find(|(ty, _)| *ty == tensor.ty) {
            Some((_, sum)) => *sum += tensor.data.len(),
            None => bytes.push((tensor.ty, tensor.data.len())),
        }
    }
    bytes.sort_by_key(|&(_, sum)| std::cmp::Reverse(sum));
    let names: Vec<&str> = bytes.iter().map(|(ty, _)| ty.name()).collect();
    names.join("+")
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
