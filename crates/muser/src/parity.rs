//! `muser parity`: are the numbers right?
//!
//! Three questions: do logits equal those of a golden file (`--golden`), how
//! far is one backend or KV type from another over a text (`--against`,
//! `--against-kv`), and what are all intermediate values (`--dump`). What
//! "far" means is defined in `measure.rs` alone.

mod against;
mod dump;
mod golden;
mod measure;
mod ops;

use crate::input::{parse_ids, read_text, read_text_file};
use crate::model_file::{CpuArgs, Device, Kv, LoadArgs, MemoryArgs, ModelArgs, ModelFile};
use anyhow::{Context, bail, ensure};
use clap::ArgGroup;
use engine::{Engine, Sequence};
use indicatif::ProgressBar;
use model::{Batch, Config, Forward, PagePool, RowOutput, SequencePages, Want};
use std::path::PathBuf;
use std::process::ExitCode;
use text::Special;

/// Rows whose logits are held at a time.
const CHUNK_ROWS: usize = 32;
/// Tokens of a text that are compared unless told otherwise.
const MOST_TOKENS: usize = 512;
/// What passes unless told otherwise.
struct Bounds {
    relative_rms: f64,
    /// Largest difference of a logit.
    logits: f64,
    /// Largest difference of a log-probability.
    logprobs: f64,
}

/// With f32 activations.
const EXACT: Bounds = Bounds {
    relative_rms: 3e-5,
    logits: 2e-3,
    logprobs: 1e-3,
};

/// With activations of eight bits (docs/numerics.md): single logits of the toy models
/// may be anywhere; a log-probability of SmolLM2 in Q4_1 is off by up to 1.37 (llama.cpp: 1.19).
const INT8: Bounds = Bounds {
    relative_rms: 0.12,
    logits: f64::INFINITY,
    logprobs: 1.5,
};

impl Bounds {
    /// What passes where `device` is compared with exact values.
    fn of(device: Device) -> &'static Bounds {
        match device {
            Device::Cpu | Device::Cuda(_) => &INT8,
            Device::Reference => &EXACT,
        }
    }
}
/// The text that is compared unless another is given.
const TEXT: &str = include_str!("parity/text.txt");

/// Compare logits with golden values, backends with each other, or dump all values
#[derive(clap::Args, Debug)]
#[command(group = ArgGroup::new("question").required(true).multiple(true)
    .args(["golden", "against", "against_kv", "dump"]))]
#[command(
    after_help = "Exit code: 0 within the limits or where none are given, 1 outside or on an \
    error.\n\n\
    Examples:\n  \
    muser parity --model text-nano-f32.gguf --golden golden-text-nano-f32.npz\n  \
    muser parity --golden golden.json --kv f16 --max-abs 2e-2\n  \
    muser parity --model model.gguf --against-kv f32 --text story.txt --max-kl 1e-3\n  \
    muser parity --model model.gguf --against reference --ops --max-tokens 16\n  \
    muser parity --model model.gguf --ids 1,2,3 --dump values/\n\n\
    Golden files: .npz with tokens_NAME and logits_NAME (or logits_NAME_lastN: the last N rows); \
    or .json with prompts of prompt_ids, greedy_ids (or answer_ids, any answer) and top5 \
    log-probabilities. In a .json file greedy tokens must be equal, too, except where golden \
    log-probabilities of both are within 0.05 (or twice --max-abs, if that is more)."
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Compare logits with this golden file (.npz, or .json with log-probabilities)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["against", "against_kv", "dump"])]
    golden: Option<PathBuf>,
    /// Compare with this device, which is taken for right, over a text
    #[arg(long, value_name = "DEVICE", conflicts_with = "dump")]
    against: Option<Device>,
    /// Compare with keys and values of this type [default with --against: f32]
    #[arg(long, value_enum, value_name = "KV", conflicts_with = "dump")]
    against_kv: Option<Kv>,
    /// Compare the devices after every operation, and name the first that is outside of the limits
    #[arg(long, requires = "against", conflicts_with_all = ["against_kv", "max_kl"])]
    ops: bool,
    /// Write every intermediate value as .npy to this new directory, named as llama.cpp's nodes
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Device under test [default: cpu with --against, else reference: golden values and dumps want
    /// exact arithmetic]
    #[arg(long)]
    device: Option<Device>,
    #[command(flatten)]
    cpu: CpuArgs,
    /// Element type of stored keys and values under test [default: f32, but f16 with --against or
    /// --against-kv and without --ops]
    #[arg(long, value_enum)]
    kv: Option<Kv>,
    /// Tokens of context [default: what the model was trained for]
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<usize>,
    /// Text to compute; `-` reads it from standard input [default: a paragraph of the program's]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["golden", "ids"])]
    text: Option<PathBuf>,
    /// Control tokens spelled in the text are control tokens
    #[arg(long, requires = "text")]
    special: bool,
    /// Token ids to compute, such as 1,2,3; `-` reads them from standard input
    #[arg(long, value_name = "IDS", conflicts_with = "golden")]
    ids: Option<String>,
    /// Compute the first N tokens of the text [default: 512]
    #[arg(long, short = 'n', value_name = "N", conflicts_with_all = ["golden", "ids"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// With --golden or --ops: largest absolute difference that passes [default: 2e-3 of logits,
    /// 1e-3 of log-probabilities, any with --ops; on other devices any and 1.5]
    #[arg(long, value_name = "X", value_parser = limit)]
    max_abs: Option<f64>,
    /// With --golden or --ops: largest relative RMS difference that passes, of logits or of an
    /// operation's result [default: 3e-5, on the CPU device 0.12]
    #[arg(long, value_name = "X", value_parser = limit)]
    max_rms: Option<f64>,
    /// With --against or --against-kv: largest mean KL divergence that passes [default: none, and
    /// no verdict]
    #[arg(long, value_name = "X", value_parser = limit, conflicts_with_all = ["golden", "dump"])]
    max_kl: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A limit of the command line; `inf` lets everything pass.
fn limit(word: &str) -> Result<f64, String> {
    let value = word.parse::<f64>().ok().filter(|&v| v >= 0.0);
    value.ok_or_else(|| format!("found {word:?}, expected a number that is not negative"))
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.golden {
        return golden::run(args, path);
    }
    let has_limit = args.max_abs.is_some() || args.max_rms.is_some();
    ensure!(
        !has_limit || args.ops,
        "--max-abs and --max-rms need --golden or --ops"
    );
    if let Some(dir) = &args.dump {
        return dump::run(args, dir);
    }
    let device = args.against.unwrap_or(args.device());
    if args.ops {
        return ops::run(args, device);
    }
    against::run(args, device, args.against_kv.unwrap_or(Kv::F32))
}

impl Args {
    /// The device under test.
    fn device(&self) -> Device {
        self.device.unwrap_or(match self.against {
            Some(_) => Device::Cpu,
            None => Device::Reference,
        })
    }

    fn load_args(&self, device: Device, kv: Kv) -> LoadArgs {
        LoadArgs {
            device,
            cpu: self.cpu.clone(),
            kv,
            ctx: self.ctx,
            memory: MemoryArgs::default(),
        }
    }

    fn session(&self, file: &ModelFile, device: Device, kv: Kv) -> anyhow::Result<Session> {
        let model = self.load_args(device, kv).load(file)?;
        Ok(Session {
            engine: Engine::new(model, self.ctx)?,
            sequence: Sequence::new(),
        })
    }

    /// The tokens of `--ids`, of `--text` or of the program's own text.
    fn tokens(&self, file: &ModelFile) -> anyhow::Result<Vec<u32>> {
        let config = Config::from_metadata(file.gguf.metadata());
        let config = config.with_context(|| format!("cannot load {}", file.name))?;
        let n_ctx = self.ctx.unwrap_or(config.n_ctx).min(config.n_ctx);
        let tokens = match &self.ids {
            Some(ids) => parse_ids(&read_text(ids, "the token ids")?, config.n_vocab)?,
            None => {
                let text = match &self.text {
                    Some(path) => read_text_file(path, "the text")?,
                    None => TEXT.to_string(),
                };
                let special = match self.special {
                    true => Special::Parse,
                    false => Special::Text,
                };
                let mut tokens = file.tokenizer()?.encode_prompt(&text, special);
                tokens.truncate(
                    self.max_tokens
                        .map_or(MOST_TOKENS.min(n_ctx), |n| n as usize),
                );
                tokens
            }
        };
        ensure!(!tokens.is_empty(), "there are no tokens to compute");
        ensure!(
            tokens.len() <= n_ctx,
            "found {} tokens to compute, expected at most the context of {n_ctx}",
            tokens.len()
        );
        Ok(tokens)
    }
}

/// A loaded model with one sequence.
struct Session {
    engine: Engine,
    sequence: Sequence,
}

impl Session {
    fn config(&self) -> &Config {
        self.engine.model().config()
    }

    fn n_ctx(&self) -> usize {
        self.engine.n_ctx()
    }

    /// Device and KV type in words.
    fn describe(&self) -> String {
        let model = self.engine.model();
        format!("{}, kv {}", model.caps().device, model.capacity().layout.ty)
    }

    /// Appends tokens to the sequence; gives position and logits of the new
    /// rows from position `first` on.
    fn append(&mut self, tokens: &[u32], first: usize) -> anyhow::Result<Vec<(usize, Vec<f32>)>> {
        self.sequence.push(tokens);
        let mut rows = Vec::new();
        let mut not_finite = None;
        let want = |position| (position >= first).then_some(Want::Full);
        self.engine
            .compute(&mut self.sequence, want, |position, output| match output {
                RowOutput::Full(logits) => rows.push((position, logits)),
                RowOutput::NonFinite { token } => {
                    not_finite.get_or_insert((position, token));
                }
                RowOutput::Argmax { .. } | RowOutput::TopK { .. } => {
                    unreachable!("whole rows are asked for")
                }
            })?;
        if let Some((position, token)) = not_finite {
            bail!(
                "{}: the logits at position {position} are not finite, first that of token {token}",
                self.describe()
            );
        }
        Ok(rows)
    }

    /// Computes a new sequence and hands position and logits of the rows from
    /// position `first` on to `each`.
    fn rows(
        &mut self,
        tokens: &[u32],
        first: usize,
        bar: &ProgressBar,
        mut each: impl FnMut(usize, &[f32]),
    ) -> anyhow::Result<()> {
        let before = std::mem::take(&mut self.sequence);
        self.engine.free(before);
        for chunk in tokens.chunks(CHUNK_ROWS) {
            for (position, logits) in self.append(chunk, first)? {
                each(position, &logits);
            }
            bar.inc(chunk.len() as u64);
        }
        Ok(())
    }
}

/// Computes all rows of `tokens`, and calls `each` after every pass.
fn passes<M: Forward>(
    model: &mut M,
    tokens: &[u32],
    mut each: impl FnMut(&mut M),
) -> Result<(), model::Error> {
    let capacity = model.capacity();
    let mut pool = PagePool::new(capacity.layout, capacity.max_slabs);
    let mut pages = SequencePages::new();
    for chunk in tokens.chunks(CHUNK_ROWS) {
        let n_rows = chunk.len() as u32;
        let copies = pages.reserve(&mut pool, n_rows)?;
        model.copy_pages(&copies)?;
        let batch = Batch::span(0, pages.len(), chunk);
        let want = vec![Want::Argmax; chunk.len()];
        model.pass(&batch, &[&pages], &want)?;
        pages.accept(&mut pool, n_rows);
        each(model);
    }
    Ok(())
}
