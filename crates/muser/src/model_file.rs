//! Where a model comes from: a file of the user's, or the program itself.

use crate::input::number;
use crate::terminal;
use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use cpu::pool::MAX_THREADS;
use cpu::{Cpu, CpuOptions, Isa};
use cuda::{Cuda, CudaOptions};
use gguf::{Bytes, Gguf, TensorType};
use model::kv::KvLayout;
use model::{
    Backend, Config, DrafterConfig, Forward, KvType, Model, Options, Reference, WindowConvention,
};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Once};
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
    /// What drafts for it.
    pub drafter: Option<DrafterFile>,
}

/// An opened drafter file.
pub struct DrafterFile {
    pub gguf: Gguf,
    /// The path.
    pub name: String,
}

impl DrafterFile {
    /// Its numbers.
    pub fn config(&self) -> anyhow::Result<DrafterConfig> {
        let config =
            DrafterConfig::from_metadata(self.gguf.metadata(), WindowConvention::default());
        config.with_context(|| format!("cannot draft with {}", self.name))
    }
}

impl ModelArgs {
    /// Opens the file.
    pub fn open(&self) -> anyhow::Result<ModelFile> {
        match &self.model {
            Some(path) => Ok(ModelFile {
                gguf: Gguf::open(path).context("cannot open the model")?,
                name: path.display().to_string(),
                is_bundled: false,
                drafter: None,
            }),
            None => Ok(ModelFile {
                gguf: Gguf::from_bytes(Bytes::from(BUNDLED))?,
                name: "nano-glimmer (bundled)".to_string(),
                is_bundled: true,
                drafter: None,
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

    /// Sizes of pages for a model of `config`, and for its drafter.
    fn kv_layout(&self, config: &Config, kv: Kv) -> anyhow::Result<KvLayout> {
        let layout = config.kv_layout(kv.into());
        match &self.drafter {
            Some(drafter) => Ok(layout.with_drafter(&drafter.config()?)),
            None => Ok(layout),
        }
    }

    /// Bytes of all weights.
    fn weight_bytes(&self) -> u64 {
        let drafter = self.drafter.as_ref();
        self.gguf.data_bytes() + drafter.map_or(0, |drafter| drafter.gguf.data_bytes())
    }

    /// The text of a metadata key, if it has that type.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.gguf.metadata().str(key).ok().flatten()
    }

    /// The encodings of the matrices, the one with the most bytes first: `Q4_K+Q6_K`.
    pub fn quantization(&self) -> String {
        let mut bytes: Vec<(TensorType, usize)> = Vec::new();
        for tensor in self.gguf.tensors().iter().filter(|t| t.shape.len() > 1) {
            match bytes.iter_mut().find(|(ty, _)| *ty == tensor.ty) {
                Some((_, sum)) => *sum += tensor.data.len(),
                None => bytes.push((tensor.ty, tensor.data.len())),
            }
        }
        bytes.sort_by_key(|&(_, sum)| std::cmp::Reverse(sum));
        let names: Vec<&str> = bytes.iter().map(|(ty, _)| ty.name()).collect();
        names.join("+")
    }
}

/// Which device computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The processor with all its cores; activations are rounded to 8 bits.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its number; the same arithmetic.
    Cuda(usize),
    /// The scalar reference backend on one core: the oracle of the others.
    Reference,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(name: &str) -> Result<Device, String> {
        let ordinal = name.strip_prefix("cuda:").map(str::parse);
        match (name, ordinal) {
            ("cpu", _) => Ok(Device::Cpu),
            ("reference", _) => Ok(Device::Reference),
            ("cuda", _) => Ok(Device::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(Device::Cuda(ordinal)),
            _ => Err("expected cpu, cuda, cuda:N or reference".to_string()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.pad("cpu"),
            Device::Cuda(0) => f.pad("cuda"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Device::Reference => f.pad("reference"),
        }
    }
}

/// A GPU as a device. Compiled kernels are kept in the user's cache.
pub fn cuda(ordinal: usize) -> anyhow::Result<Cuda> {
    Ok(Cuda::new(&cuda_options(ordinal))?)
}

/// The same, which finishes every operation before the next begins: for clocking them.
pub fn cuda_in_step(ordinal: usize) -> anyhow::Result<Cuda> {
    Ok(Cuda::new(&CudaOptions {
        is_in_step: true,
        ..cuda_options(ordinal)
    })?)
}

fn cuda_options(ordinal: usize) -> CudaOptions {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    CudaOptions {
        ordinal,
        cache: cache.map(|cache| cache.join("muser/kernels")),
        nvrtc: folder("MUSER_NVRTC"),
        ..CudaOptions::default()
    }
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
    #[arg(long, value_name = "N", value_parser = n_threads)]
    pub threads: Option<usize>,
    /// Instruction set of the CPU device: scalar, avx2, avx512 or amx [default: the widest there is]
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
}

fn n_threads(word: &str) -> Result<usize, String> {
    let threads = number(word).ok().filter(|n| (1..=MAX_THREADS).contains(n));
    threads.ok_or_else(|| format!("expected 1 to {MAX_THREADS}"))
}

impl CpuArgs {
    /// Threads of the device.
    fn n_threads(&self) -> usize {
        self.threads.unwrap_or_else(cpu::pool::available_threads)
    }

    /// The processor as a device.
    pub fn device(&self) -> anyhow::Result<Cpu> {
        static IS_WARNED: Once = Once::new();
        let available = cpu::pool::available_threads();
        if let Some(threads) = self.threads.filter(|&n| n > available) {
            let warn = |text: &str| IS_WARNED.call_once(|| terminal::warn(text));
            warn(&format!(
                "--threads {threads}, but this process may use {available} processors: more \
                 threads than that only wait for each other"
            ));
        }
        Ok(Cpu::new(CpuOptions {
            threads: self.threads,
            isa: self.isa,
        })?)
    }
}

/// Where the weights lie.
#[derive(Args, Clone, Debug, Default)]
pub struct MemoryArgs {
    /// Read the weights into memory of the process's own instead of mapping the file
    #[arg(long)]
    pub no_mmap: bool,
    /// Bring all weights into memory before starting
    #[arg(long, conflicts_with = "no_mmap")]
    pub prefetch: bool,
    /// Keep the weights in memory, so that they are never read from the disk again
    #[arg(long)]
    pub mlock: bool,
}

impl MemoryArgs {
    /// Does to the opened file what they say.
    fn apply(&self, gguf: &mut Gguf) -> anyhow::Result<()> {
        if self.no_mmap || self.prefetch {
            let bar = terminal::byte_progress(gguf.file_bytes());
            match self.no_mmap {
                true => gguf.read_into_memory(&mut |n| bar.inc(n))?,
                false => gguf.files().prefetch(&mut |n| bar.inc(n)),
            }
            bar.finish_and_clear();
        }
        if self.mlock {
            gguf.files().lock()?;
        }
        Ok(())
    }

    /// Where the weights of `file` lie, for start lines and reports.
    pub fn describe(&self, file: &ModelFile) -> &'static str {
        if file.is_bundled {
            return "in the program";
        }
        match (self.no_mmap, self.prefetch, self.mlock) {
            (true, _, false) => "read into memory",
            (true, _, true) => "read into memory, locked",
            (false, false, false) => "mapped",
            (false, true, false) => "mapped, prefetched",
            (false, _, true) => "mapped, locked",
        }
    }

    /// Warns if weights and `kv_bytes` of keys and values do not fit the memory.
    fn warn_if_short(&self, file: &ModelFile, kv_bytes: u64) {
        let memory_bytes = memory_bytes();
        let weight_bytes = file.weight_bytes();
        if memory_bytes == 0 || weight_bytes.saturating_add(kv_bytes) <= memory_bytes {
            return;
        }
        let cost = match self.no_mmap || file.is_bundled || kv_bytes > memory_bytes {
            true => "the system may end the process",
            false => "weights will be read from the disk again and again",
        };
        terminal::warn(&format!(
            "{} has {} of weights, and its keys and values take up to {}, but there are {} of \
             memory: {cost}",
            file.name,
            terminal::bytes(weight_bytes),
            terminal::bytes(kv_bytes),
            terminal::bytes(memory_bytes),
        ));
    }
}

/// Bytes of memory that this process may use; 0 if the system does not say.
fn memory_bytes() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let limit = system.cgroup_limits().map(|limits| limits.total_memory);
    limit.unwrap_or(u64::MAX).min(system.total_memory())
}

/// How a model is loaded.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// Device that computes: cpu, cuda (or cuda:N for GPU N), or reference, the scalar oracle
    #[arg(long, default_value_t)]
    pub device: Device,
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// Element type of stored keys and values
    #[arg(long, value_enum, default_value_t)]
    pub kv: Kv,
    /// Tokens of context [default: what the model was trained for]
    #[arg(long, value_name = "TOKENS")]
    pub ctx: Option<usize>,
    #[command(flatten)]
    pub memory: MemoryArgs,
}

impl LoadArgs {
    /// Opens the file and brings its weights to where they shall lie.
    pub fn open(&self, model: &ModelArgs) -> anyhow::Result<ModelFile> {
        let mut file = model.open()?;
        self.warn_of_no_effect(&file);
        let applied = self.memory.apply(&mut file.gguf);
        applied.context("cannot open the model")?;
        Ok(file)
    }

    /// The same for the file of a drafter.
    pub fn open_drafter(&self, path: &Path) -> anyhow::Result<DrafterFile> {
        let open = || {
            let mut gguf = Gguf::open(path)?;
            self.memory.apply(&mut gguf)?;
            anyhow::Ok(gguf)
        };
        Ok(DrafterFile {
            gguf: open().context("cannot open the drafter")?,
            name: path.display().to_string(),
        })
    }

    /// Names flags that do nothing here.
    fn warn_of_no_effect(&self, file: &ModelFile) {
        let has_cpu_flags = self.cpu.threads.is_some() || self.cpu.isa.is_some();
        if has_cpu_flags && self.device != Device::Cpu {
            terminal::warn("--threads and --isa are for --device cpu and do nothing here");
        }
        let MemoryArgs {
            no_mmap,
            prefetch,
            mlock,
        } = self.memory;
        if file.is_bundled && (no_mmap || prefetch || mlock) {
            terminal::warn(
                "--no-mmap, --prefetch and --mlock do nothing for the bundled model, which is a \
                 part of the program",
            );
        }
    }

    /// Checks that `--ctx` fits the model, and a sequence of `n_tokens` both.
    pub fn check_length(&self, config: &Config, n_tokens: usize) -> anyhow::Result<()> {
        let n_ctx = self.ctx.unwrap_or(config.n_ctx);
        if n_ctx < 2 || n_ctx > config.n_ctx {
            bail!(engine::Error::Context {
                found: n_ctx,
                n_ctx: config.n_ctx,
            });
        }
        ensure!(
            n_tokens <= n_ctx,
            "{n_tokens} tokens of context are needed, but there are {n_ctx}"
        );
        Ok(())
    }

    /// Loads the model with room for one sequence of the whole context.
    pub fn load(&self, file: &ModelFile) -> anyhow::Result<Box<dyn Forward>> {
        match self.device {
            Device::Cpu => Ok(Box::new(self.load_on(self.cpu.device()?, file)?)),
            Device::Cuda(ordinal) => {
                let be = self.cuda_with_room(ordinal, file, (self.ctx.unwrap_or(usize::MAX), 1))?;
                Ok(Box::new(self.load_on(be, file)?))
            }
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
            Device::Cuda(ordinal) => {
                Ok(Box::new(self.load_sized_on(cuda(ordinal)?, file, room)?))
            }
            Device::Reference => Ok(Box::new(self.load_sized_on(
                Reference::new(),
                file,
                room,
            )?)),
        }
    }

    /// A GPU that has room for the model and `n_sequences` of `n_tokens` each.
    fn cuda_with_room(
        &self,
        ordinal: usize,
        file: &ModelFile,
        (n_tokens, n_sequences): (usize, usize),
    ) -> anyhow::Result<Cuda> {
        /// Activations, scratch and what the driver takes for itself.
        const RESERVE_BYTES: u64 = 3 << 29;
        let be = cuda(ordinal)?;
        let config = Config::from_metadata(file.gguf.metadata())?;
        let layout = file.kv_layout(&config, self.kv)?;
        let n_slabs = layout.slabs_for(n_tokens.min(config.n_ctx), be.caps().max_rows);
        let kv_bytes = n_sequences.saturating_mul(n_slabs * layout.slab_bytes()) as u64;
        let (free_bytes, _) = be.memory_bytes()?;
        let weight_bytes = file.weight_bytes();
        ensure!(
            weight_bytes
                .saturating_add(kv_bytes)
                .saturating_add(RESERVE_BYTES)
                <= free_bytes,
            "{} does not fit {}: {} of weights, {} of keys and values (less with --ctx) and {} \
             for activations, but {} are free",
            file.name,
            be.device(),
            terminal::bytes(weight_bytes),
            terminal::bytes(kv_bytes),
            terminal::bytes(RESERVE_BYTES),
            terminal::bytes(free_bytes),
        );
        Ok(be)
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
        self.load_with(be, file, n_tokens, |bytes| {
            bytes.saturating_mul(n_sequences as u64)
        })
    }

    /// Loads the model for `n_sequences` that share `kv_bytes`. If nothing is
    /// said about them, they are what the sequences can take, up to half of the
    /// memory beside the weights.
    pub fn load_shared(
        &self,
        file: &ModelFile,
        n_sequences: usize,
        kv_bytes: Option<u64>,
    ) -> anyhow::Result<Box<dyn Forward>> {
        let n_tokens = self.ctx.unwrap_or(usize::MAX);
        let shared = |memory_bytes: u64| {
            move |bytes: u64| {
                kv_bytes.unwrap_or_else(|| {
                    let free = match memory_bytes {
                        0 => u64::MAX,
                        memory => memory.saturating_sub(file.weight_bytes()) / 2,
                    };
                    bytes.saturating_mul(n_sequences as u64).min(free)
                })
            }
        };
        match self.device {
            Device::Cpu => {
                let (be, kv_bytes) = (self.cpu.device()?, shared(memory_bytes()));
                Ok(Box::new(self.load_with(be, file, n_tokens, kv_bytes)?))
            }
            Device::Cuda(ordinal) => {
                let be = cuda(ordinal)?;
                let (free_bytes, _) = be.memory_bytes()?;
                let kv_bytes = shared(free_bytes);
                Ok(Box::new(self.load_with(be, file, n_tokens, kv_bytes)?))
            }
            Device::Reference => {
                let (be, kv_bytes) = (Reference::new(), shared(memory_bytes()));
                Ok(Box::new(self.load_with(be, file, n_tokens, kv_bytes)?))
            }
        }
    }

    /// Loads the model with as many bytes for keys and values as `kv_bytes` makes
    /// of those of one sequence of `n_tokens`.
    fn load_with<B: Backend>(
        &self,
        be: B,
        file: &ModelFile,
        n_tokens: usize,
        kv_bytes: impl FnOnce(u64) -> u64,
    ) -> anyhow::Result<Model<B>> {
        let load = || {
            let config = Config::from_metadata(file.gguf.metadata())?;
            let layout = file.kv_layout(&config, self.kv)?;
            let n_slabs = layout.slabs_for(n_tokens.min(config.n_ctx), be.caps().max_rows);
            let options = Options {
                kv: self.kv.into(),
                kv_bytes: kv_bytes((n_slabs * layout.slab_bytes()) as u64),
            };
            match self.device {
                Device::Cuda(_) => {}
                Device::Cpu | Device::Reference => {
                    self.memory.warn_if_short(file, options.kv_bytes)
                }
            }
            anyhow::Ok(Model::load_as(be, &file.gguf, config, options)?)
        };
        let mut model = load().with_context(|| format!("cannot load {}", file.name))?;
        if let Some(DrafterFile { gguf, name }) = &file.drafter {
            let attached = model.attach_drafter(gguf, WindowConvention::default());
            attached.with_context(|| format!("cannot draft with {name}"))?;
        }
        Ok(model)
    }

    /// The instruction set in use, of a device that has a choice.
    pub fn isa(&self) -> Option<Isa> {
        let isa = self.cpu.isa.unwrap_or_else(Isa::detect);
        (self.device == Device::Cpu).then_some(isa)
    }

    /// Threads that compute.
    pub fn n_threads(&self) -> usize {
        match self.device {
            Device::Cpu => self.cpu.n_threads(),
            Device::Cuda(_) | Device::Reference => 1,
        }
    }
}
