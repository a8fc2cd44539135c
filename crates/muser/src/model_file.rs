//! Where a model comes from: a file of the user's, or the program itself.

use anyhow::Context;
use clap::{Args, ValueEnum};
use gguf::{Bytes, Gguf};
use model::{Backend, Config, Forward, KvType, Model, Options, Reference};
use std::path::PathBuf;
use std::sync::Arc;
use text::Tokenizer;

/// nano-glimmer, compiled in.
static BUNDLED: &[u8] = include_bytes!("../../../models/nano-glimmer-q8_0.gguf");

/// Which model a command works on.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// Model file (GGUF); of a split model any part [default: the bundled nano-glimmer]
    #[arg(long, short, value_name = "FILE")]
    pub model: Option<PathBuf>,
}

/// An opened model file.
pub struct ModelFile {
    pub gguf: Gguf,
    /// The path, or `nano-glimmer (bundled)`.
    pub name: String,
    /// Is it the model that is part of the program?
    pub is_bundled: bool,
}

impl ModelArgs {
    /// Opens the file.
    pub fn open(&self) -> anyhow::Result<ModelFile> {
        match &self.model {
            Some(path) => Ok(ModelFile {
                gguf: Gguf::open(path).context("cannot open the model")?,
                name: path.display().to_string(),
                is_bundled: false,
            }),
            None => Ok(ModelFile {
                gguf: Gguf::from_bytes(Bytes::from(BUNDLED))?,
                name: "nano-glimmer (bundled)".to_string(),
                is_bundled: true,
            }),
        }
    }
}

impl ModelFile {
    /// The file's tokenizer.
    pub fn tokenizer(&self) -> anyhow::Result<Arc<Tokenizer>> {
        let tokenizer = Tokenizer::from_metadata(self.gguf.metadata());
        let tokenizer = tokenizer.with_context(|| format!("tokenizer of {}", self.name))?;
        Ok(Arc::new(tokenizer))
    }

    /// The text of a metadata key, if it has that type.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.gguf.metadata().str(key).ok().flatten()
    }
}

/// Which device computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The scalar reference backend on one CPU core: the oracle of the others
    #[default]
    Reference,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    /// Half precision
    #[default]
    F16,
    /// As computed, for comparisons
    F32,
}

impl From<Kv> for KvType {
    fn from(kv: Kv) -> KvType {
        match kv {
            Kv::F16 => KvType::F16,
            Kv::F32 => KvType::F32,
        }
    }
}

/// How a model is loaded.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// Device that computes
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// Element type of stored keys and values
    #[arg(long, value_enum, default_value_t)]
    pub kv: Kv,
    /// Tokens of context [default: what the model was trained for]
    #[arg(long, value_name = "TOKENS")]
    pub ctx: Option<usize>,
}

impl LoadArgs {
    /// Loads the model with room for one sequence of the whole context.
    pub fn load(&self, file: &ModelFile) -> anyhow::Result<Box<dyn Forward>> {
        match self.device {
            Device::Reference => Ok(Box::new(self.load_on(Reference::new(), file)?)),
        }
    }

    /// The same on a device of the caller's, whatever `--device` says.
    pub fn load_on<B: Backend>(&self, be: B, file: &ModelFile) -> anyhow::Result<Model<B>> {
        let load = || {
            let config = Config::from_metadata(file.gguf.metadata())?;
            let n_ctx = self.ctx.unwrap_or(config.n_ctx).min(config.n_ctx);
            let layout = config.kv_layout(self.kv.into());
            let max_rows = be.caps().max_rows;
            let options = Options {
                kv: self.kv.into(),
                kv_bytes: (layout.slabs_for(n_ctx, max_rows) * layout.slab_bytes()) as u64,
            };
            Model::load_as(be, &file.gguf, config, options)
        };
        load().with_context(|| format!("cannot load {}", file.name))
    }
}
