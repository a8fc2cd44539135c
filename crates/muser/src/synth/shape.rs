//! The lengths of a model to be made: named ones, and changes to them.
//!
//! What a reader would get wrong: the ranges of the flags are not wider than
//! what `model::Config` takes, so that a refusal names a flag and not a key.

use super::mix::Mix;
use clap::{ValueEnum, value_parser};
use gguf::TensorType;

/// More would make a directory of tensors that is larger than many models.
const MOST_LAYERS: i64 = 1024;
/// Of a row, and of a sequence.
const MOST_ELEMENTS: i64 = 1 << 24;
const MOST_HEADS: i64 = 1 << 16;
const MOST_HEAD_DIM: i64 = 1 << 16;
/// A byte-level vocabulary has a token for each byte, and control tokens.
const LEAST_TOKENS: i64 = 384;
const MOST_TOKENS: i64 = 1 << 20;
/// More than the largest vocabulary has.
const MOST_MERGES: i64 = 1 << 24;

/// A named shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// As the bundled model: 11 M parameters, 8 layers of 256
    Nano,
    /// 1.57 G parameters: 28 layers of 2048, vocabulary 32,768
    #[value(name = "1.5b")]
    Medium,
    /// Muse Glimmer 30B: 27.9 G parameters, 52 layers of 6656, vocabulary 202,048
    #[value(name = "30b")]
    Full,
    /// DFlash drafter for 30b: 2.6 G parameters
    Drafter,
    /// DFlash drafter for nano and the bundled model
    DrafterNano,
    /// DFlash drafter for 1.5b
    #[value(name = "drafter-1.5b")]
    DrafterMedium,
}

/// Which graph a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    /// Meta's Muse Glimmer
    MuseGlimmer,
    /// Llama: no gate, no norms on sub-layer outputs and heads
    Llama,
    /// A drafter; has further keys, so it comes from a drafter's shape only
    #[value(skip)]
    Dflash,
}

impl Arch {
    /// `general.architecture`.
    pub fn name(self) -> &'static str {
        match self {
            Arch::MuseGlimmer => "muse-glimmer",
            Arch::Llama => "llama",
            Arch::Dflash => "dflash",
        }
    }
}

/// The lengths of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub arch: Arch,
    pub n_layer: usize,
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_head: usize,
    pub n_head_kv: usize,
    pub head_dim: usize,
    pub n_vocab: usize,
    /// `None`: one for each token that is no byte.
    pub n_merges: Option<usize>,
    pub window: usize,
    pub n_ctx: usize,
    /// Of a drafter: the target's layers whose inputs it reads; else empty.
    pub target_layers: Vec<u32>,
}

impl Name {
    /// The shape of this name.
    pub fn shape(self) -> Shape {
        let nano = Shape {
            arch: Arch::MuseGlimmer,
            n_layer: 8,
            n_embd: 256,
            n_ff: 768,
            n_head: 4,
            n_head_kv: 2,
            head_dim: 128,
            n_vocab: 4096,
            n_merges: None,
            window: 128,
            n_ctx: 2048,
            target_layers: Vec::new(),
        };
        let medium = Shape {
            n_layer: 28,
            n_embd: 2048,
            n_ff: 6144,
            n_head: 16,
            n_vocab: 32_768,
            window: 2048,
            n_ctx: 131_072,
            ..nano.clone()
        };
        let full = Shape {
            n_layer: 52,
            n_embd: 6656,
            n_ff: 19_968,
            n_head: 32,
            n_vocab: 202_048,
            n_merges: Some(439_802),
            ..medium.clone()
        };
        let drafter = |target: Shape, n_layer, n_head_kv, target_layers: &[u32]| Shape {
            arch: Arch::Dflash,
            n_layer,
            n_head_kv,
            target_layers: target_layers.to_vec(),
            ..target
        };
        match self {
            Name::Nano => nano,
            Name::Medium => medium,
            Name::Full => full,
            Name::Drafter => drafter(full, 5, 8, &[2, 14, 26, 38, 50]),
            Name::DrafterNano => drafter(nano, 2, 2, &[2, 5, 7]),
            Name::DrafterMedium => drafter(medium, 5, 4, &[2, 8, 14, 20, 26]),
        }
    }

    /// The mix that a file of this shape has without further flags.
    pub fn default_mix(self) -> Mix {
        match self {
            Name::Nano | Name::DrafterNano => Mix::Uniform(TensorType::Q8_0),
            _ => Mix::Q4KM,
        }
    }
}

/// Lengths that replace those of the named shape.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Shape (what is not given is that of --shape)")]
pub struct Changes {
    /// Graph that computes the model
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Layers
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_LAYERS))]
    layers: Option<u32>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_ELEMENTS))]
    embd: Option<u32>,
    /// Width of the feed-forward part
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_ELEMENTS))]
    ff: Option<u32>,
    /// Query heads
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_HEADS))]
    heads: Option<u32>,
    /// Key/value heads, which must divide the query heads
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_HEADS))]
    heads_kv: Option<u32>,
    /// Width of a head
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_HEAD_DIM))]
    head_dim: Option<u32>,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N")]
    #[arg(value_parser = value_parser!(u32).range(LEAST_TOKENS..=MOST_TOKENS))]
    vocab: Option<u32>,
    /// Merges of the tokenizer; more than one may make the same token [default: one for each token
    /// that is no byte; 439802 for 30b]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(..=MOST_MERGES))]
    merges: Option<u32>,
    /// Keys that a row of a sliding layer sees; a llama model has no such layers
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_ELEMENTS))]
    window: Option<u32>,
    /// Context length
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(2..=MOST_ELEMENTS))]
    ctx: Option<u32>,
    /// Layers of the target whose inputs a drafter reads
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    #[arg(value_parser = value_parser!(u32).range(..=MOST_LAYERS))]
    target_layers: Option<Vec<u32>>,
}

impl Changes {
    /// `shape` with the changes.
    ///
    /// # Errors
    /// If a change makes no sense for the kind of model.
    pub fn apply(&self, mut shape: Shape) -> anyhow::Result<Shape> {
        let is_drafter = shape.arch == Arch::Dflash;
        if is_drafter && self.arch.is_some() {
            anyhow::bail!("--arch: the shape is a drafter's, whose graph is dflash");
        }
        if !is_drafter && self.target_layers.is_some() {
            anyhow::bail!("--target-layers: only a drafter reads layers of a target");
        }
        let length = |n: u32| n as usize;
        let set = |to: &mut usize, from: Option<u32>| *to = from.map_or(*to, length);
        set(&mut shape.n_layer, self.layers);
        set(&mut shape.n_embd, self.embd);
        set(&mut shape.n_ff, self.ff);
        set(&mut shape.n_head, self.heads);
        set(&mut shape.n_head_kv, self.heads_kv);
        set(&mut shape.head_dim, self.head_dim);
        set(&mut shape.window, self.window);
        set(&mut shape.n_ctx, self.ctx);
        if let Some(n_vocab) = self.vocab.map(length) {
            // The number of merges belongs to the vocabulary that is replaced.
            shape.n_merges = shape.n_merges.filter(|_| n_vocab == shape.n_vocab);
            shape.n_vocab = n_vocab;
        }
        shape.n_merges = self.merges.map(length).or(shape.n_merges);
        shape.arch = self.arch.unwrap_or(shape.arch);
        if let Some(layers) = &self.target_layers {
            shape.target_layers.clone_from(layers);
        }
        Ok(shape)
    }
}
