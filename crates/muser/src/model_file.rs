//! Where a model comes from: a file of the user's, or the program itself.

use anyhow::Context;
use clap::{Args, ValueEnum};
use cpu::{Cpu, CpuOptions, Isa};
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
    /// The scalar reference backend on one core: the oracle of the others
    #[default]
    Reference,
    /// The processor with all its cores; activations are rounded to 8 bits
    Cpu,
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

/// Settings of the CPU device.
#[derive(Args, Clone, Debug, Default)]
pub struct CpuArgs {
    /// Threads of the CPU device [default: what the quota and affinity of this process allow]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Instruction set of the CPU device: scalar, avx2 or avx512 [default: the widest there is]
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
}

impl CpuArgs {
    /// The processor as a device.
    pub fn device(&self) -> anyhow::Result<Cpu> {
        Ok(Cpu::new(CpuOptions {
            threads: self.threads,
            isa: self.isa,
        })?)
    }
}

/// How a model is loaded.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// Device that computes
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    #[command(flatten)]
    pub cpu: CpuArgs,
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
            Device::Cpu => Ok(Box::new(self.load_on(self.cpu.device()?, file)?)),
            Device::Reference => Ok(Box::new(self.load_on(Reference::new(), file)?)),
        }
    }

    /// Loads the model with room for `n_sequences` of `n_tokens` each.
    pub fn load_sized(
        &self,
        file: &ModelFile,
        n_tokens: usize,
        n_sequences: usize,
    ) -> anyhow::Result<Box<dyn Forward>> {
        let room = (n_tokens, n_sequences);
        match self.device {
            Device::Cpu => Ok(Box::new(self.load_sized_on(
                self.cpu.device()?,
                file,
                room,
            )?)),
            Device::Reference => Ok(Box::new(self.load_sized_on(
                Reference::new(),
                file,
                room,
            )?)),
        }
    }

    /// As [`LoadArgs::load`] on a device of the caller's, whatever `--device` says.
    pub fn load_on<B: Backend>(&self, be: B, file: &ModelFile) -> anyhow::Result<Model<B>> {
        let n_tokens = self.ctx.unwrap_or(usize::MAX);
        self.load_sized_on(be, file, (n_tokens, 1))
    }

    /// As [`LoadArgs::load_sized`] on a device of the caller's.
    pub fn load_sized_on<B: Backend>(
        &self,
        be: B,
        file: &ModelFile,
        (n_tokens, n_sequences): (usize, usize),
    ) -> anyhow::Result<Model<B>> {
        let load = || {
            let config = Config::from_metadata(file.gguf.metadata())?;
            let layout = config.kv_layout(self.kv.into());
            let n_slabs = layout.slabs_for(n_tokens.min(config.n_ctx), be.caps().max_rows);
            let options = Options {
                kv: self.kv.into(),
                kv_bytes: (n_sequences * n_slabs * layout.slab_bytes()) as u64,
            };
            Model::load_as(be, &file.gguf, config, options)
        };
        load().with_context(|| format!("cannot load {}", file.name))
    }

    /// Threads that compute.
    pub fn n_threads(&self) -> anyhow::Result<usize> {
        Ok(match self.device {
            Device::Cpu => self.cpu.device()?.threads(),
            Device::Reference => 1,
        })
    }
}
