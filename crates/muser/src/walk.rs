//! `muser walk`: where the time of a pass goes, operation by operation.
//!
//! What one would get wrong: operations are clocked one by one, so their sum
//! can be more than an unclocked pass takes. And one row is bound by the bytes it
//! reads, many rows by their multiplications: so the rate is GB/s for one row, and
//! GMAC/s (10^9 multiplications with an addition) for more.

use crate::input::{number, positive};
use crate::model_file::{Device, LoadArgs, ModelArgs, ModelFile, cuda_in_step};
use crate::output::check_writable;
use crate::terminal;
use anyhow::{Context, bail};
use model::{
    Backend, Batch, Call, Forward, Input, PagePool, Reference, Row, RowOutput, SequencePages,
    Timed, Want,
};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Show where the time of one token goes, operation by operation
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:\n  \
    muser walk\n  \
    muser walk --model model.gguf --depth 2048\n  \
    muser walk --model model.gguf --rows 128 --trace walk.json   (opens in Perfetto)")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    load: LoadArgs,
    /// Tokens before the pass
    #[arg(long, value_name = "N", value_parser = number, default_value = "0")]
    depth: usize,
    /// Rows of the pass: 1 is one token of an answer, more is a part of a prompt
    #[arg(long, value_name = "N", value_parser = positive, default_value = "1")]
    rows: usize,
    /// Passes to measure; the median of each operation counts
    #[arg(short = 'r', long, value_name = "N", value_parser = positive, default_value = "9")]
    repetitions: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write the last pass as a trace for Perfetto or Chrome; replaces what is there
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    args.trace.as_deref().map_or(Ok(()), check_writable)?;
    let file = args.load.open(&args.model)?;
    match args.load.device {
        Device::Cpu => args.walk(args.load.cpu.device()?, &file),
        Device::Cuda(ordinal) => args.walk(cuda_in_step(ordinal)?, &file),
        Device::Reference => args.walk(Reference::new(), &file),
    }
}

impl Args {
    fn walk<B: Backend>(&self, be: B, file: &ModelFile) -> anyhow::Result<ExitCode> {
        let n_rows = self.depth.saturating_add(self.rows);
        let mut model = self.load.load_sized_on(Timed::new(be), file, (n_rows, 1))?;
        self.load.check_length(model.config(), n_rows)?;
        let max_rows = model.caps().max_rows;
        if self.rows > max_rows {
            bail!("--rows: found {}, expected at most {max_rows}", self.rows);
        }
        let passes = self.passes(&mut model)?;
        let steps = merge(&passes);
        let report = Walk::new(file, &model.caps().device, self, steps);
        if let (Some(path), Some(last)) = (&self.trace, passes.last()) {
            let trace = serde_json::to_vec(&trace(last))?;
            std::fs::write(path, trace)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        match self.json {
            true => terminal::print_line(format_args!("{:#}", report.json()))?,
            false => terminal::print_line(report.table().trim_end())?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The calls of each measured pass.
    fn passes<B: Backend>(
        &self,
        model: &mut model::Model<Timed<B>>,
    ) -> anyhow::Result<Vec<Vec<Call>>> {
        let capacity = model.capacity();
        let mut pool = PagePool::new(capacity.layout, capacity.max_slabs);
        let mut base = SequencePages::new();
        let chunk = model.caps().max_rows;
        while (base.len() as usize) < self.depth {
            let n = chunk.min(self.depth - base.len() as usize);
            pass(model, &mut pool, &mut base, n, false)?;
        }
        let mut passes = Vec::new();
        for repetition in 0..=self.repetitions {
            let mut branch = base.branch(&mut pool);
            pass(model, &mut pool, &mut branch, self.rows, true)?;
            branch.clear(&mut pool);
            let calls = model.backend_mut().take_calls();
            if repetition > 0 {
                passes.push(calls);
            }
        }
        Ok(passes)
    }
}

/// One pass of `n_rows` rows; the last is wanted if asked for.
fn pass<B: Backend>(
    model: &mut model::Model<Timed<B>>,
    pool: &mut PagePool,
    pages: &mut SequencePages,
    n_rows: usize,
    wants_last: bool,
) -> anyhow::Result<()> {
    let copies = pages.reserve(pool, n_rows as u32)?;
    model.copy_pages(&copies)?;
    let n_vocab = model.config().n_vocab as u32;
    let row = |pos: u32| Row {
        input: Input::Token((pos * 7919 + 17) % n_vocab),
        pos,
        seq: 0,
    };
    let mut batch = Batch {
        rows: (pages.len()..pages.len() + n_rows as u32)
            .map(row)
            .collect(),
        wanted: Vec::new(),
    };
    if wants_last {
        batch.want_last();
    }
    let want = vec![Want::Argmax; batch.wanted.len()];
    let outputs = model.pass(&batch, &[pages], &want)?;
    if let Some(&RowOutput::NonFinite { token }) = outputs.first() {
        let position = pages.len() as usize + n_rows - 1;
        return Err(engine::Error::NonFiniteLogits { position, token }.into());
    }
    pages.accept(pool, n_rows as u32);
    Ok(())
}

/// Calls that do the same in different layers, together.
#[derive(Clone, Debug)]
struct Step {
    call: Call,
    n_calls: usize,
    bytes: u64,
    macs: u64,
    /// Sum over the calls, median over the passes.
    time: Duration,
}

fn is_alike(a: &Call, b: &Call) -> bool {
    let key = |call: &Call| (call.op, call.rows, call.inner, call.cols);
    key(a) == key(b) && a.tensors == b.tensors && a.encoding == b.encoding
}

/// Merges the layers of each pass, then takes medians over the passes.
fn merge(passes: &[Vec<Call>]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut times: Vec<Vec<Duration>> = Vec::new();
    for (index, calls) in passes.iter().enumerate() {
        for call in calls {
            let place = match steps.iter().position(|s| is_alike(&s.call, call)) {
                Some(place) => place,
                None => {
                    steps.push(Step {
                        call: call.clone(),
                        n_calls: 0,
                        bytes: 0,
                        macs: 0,
                        time: Duration::ZERO,
                    });
                    times.push(vec![Duration::ZERO; passes.len()]);
                    steps.len() - 1
                }
            };
            times[place][index] += call.time;
            if index == 0 {
                steps[place].n_calls += 1;
                steps[place].bytes += call.bytes;
                steps[place].macs += call.macs;
            }
        }
    }
    for (step, times) in steps.iter_mut().zip(&mut times) {
        times.sort();
        step.time = times[times.len() / 2];
    }
    steps
}

/// A whole walk, ready to print.
struct Walk {
    model: String,
    device: String,
    n_rows: usize,
    depth: usize,
    repetitions: usize,
    steps: Vec<Step>,
    /// Sums over the steps.
    time: Duration,
    bytes: u64,
    macs: u64,
}

impl Walk {
    fn new(file: &ModelFile, device: &str, args: &Args, steps: Vec<Step>) -> Walk {
        Walk {
            model: file.name.clone(),
            device: device.to_string(),
            n_rows: args.rows,
            depth: args.depth,
            repetitions: args.repetitions,
            time: steps.iter().map(|s| s.time).sum(),
            bytes: steps.iter().map(|s| s.bytes).sum(),
            macs: steps.iter().map(|s| s.macs).sum(),
            steps,
        }
    }

    fn table(&self) -> String {
        let title = format!(
            "{} on {}: {} at depth {}, median of {}",
            self.model,
            self.device,
            terminal::count(self.n_rows, "row"),
            self.depth,
            self.repetitions
        );
        let mut lines = vec![title, String::new()];
        let unit = match self.n_rows {
            1 => "GB/s",
            _ => "GMAC/s",
        };
        lines.push(format!(
            "{:<21} {:<34} {:<22} {:>20} {:>5} {:>13} {:>10} {:>7} {unit:>7}",
            "operation", "tensors", "encoding", "shape", "calls", "bytes", "us", "share"
        ));
        for step in &self.steps {
            let Call {
                rows, inner, cols, ..
            } = step.call;
            let shape = match inner {
                0 => format!("{rows} x {cols}"),
                inner => format!("{rows} x {inner} -> {cols}"),
            };
            lines.push(format!(
                "{:<21} {:<34} {:<22} {shape:>20} {:>5} {:>13} {:>10.1} {:>5.1} % {:>7}",
                step.call.op,
                step.call.tensors,
                step.call.encoding,
                step.n_calls,
                terminal::grouped(step.bytes),
                microseconds(step.time),
                self.share(step) * 100.0,
                self.rate(step.bytes, step.macs, step.time),
            ));
        }
        lines.push(String::new());
        lines.push(format!(
            "sum: {:.1} us, {} bytes, {} {unit}, {:.1} tokens/s",
            microseconds(self.time),
            terminal::grouped(self.bytes),
            self.rate(self.bytes, self.macs, self.time),
            self.tokens_per_second(),
        ));
        lines.join("\n")
    }

    /// What bounds a pass of so many rows, 10^9 a second.
    fn rate(&self, bytes: u64, macs: u64, time: Duration) -> String {
        let work = match self.n_rows {
            1 => bytes,
            _ => macs,
        };
        match work {
            0 => "-".to_string(),
            work => format!("{:.1}", work as f64 / microseconds(time).max(1e-3) / 1e3),
        }
    }

    fn tokens_per_second(&self) -> f64 {
        self.n_rows as f64 / self.time.as_secs_f64().max(1e-12)
    }

    fn share(&self, step: &Step) -> f64 {
        step.time.as_secs_f64() / self.time.as_secs_f64().max(1e-12)
    }

    fn json(&self) -> Value {
        let step = |step: &Step| {
            json!({
                "op": step.call.op,
                "tensors": step.call.tensors,
                "encoding": step.call.encoding,
                "rows": step.call.rows,
                "inner": step.call.inner,
                "cols": step.call.cols,
                "calls": step.n_calls,
                "bytes": step.bytes,
                "macs": step.macs,
                "us": terminal::rounded(microseconds(step.time)),
                "share": terminal::rounded(self.share(step)),
            })
        };
        json!({
            "model": self.model,
            "device": self.device,
            "rows": self.n_rows,
            "depth": self.depth,
            "repetitions": self.repetitions,
            "total_us": terminal::rounded(microseconds(self.time)),
            "total_bytes": self.bytes,
            "total_macs": self.macs,
            "tokens_per_second": terminal::rounded(self.tokens_per_second()),
            "steps": self.steps.iter().map(step).collect::<Vec<Value>>(),
        })
    }
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// One pass in the trace format that Chrome and Perfetto read.
fn trace(calls: &[Call]) -> Value {
    let event = |call: &Call| {
        json!({
            "name": match call.tensors.is_empty() {
                true => call.op.to_string(),
                false => format!("{} {}", call.op, call.tensors),
            },
            "cat": call.op,
            "ph": "X",
            "ts": microseconds(call.start),
            "dur": microseconds(call.time),
            "pid": 1,
            "tid": 1,
            "args": {
                "encoding": call.encoding,
                "rows": call.rows,
                "inner": call.inner,
                "cols": call.cols,
                "bytes": call.bytes,
                "macs": call.macs,
            },
        })
    };
    json!({ "traceEvents": calls.iter().map(event).collect::<Vec<Value>>() })
}
