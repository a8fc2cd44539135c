//! Kernels: their sources, the compiler, and the cache of what it made.
//!
//! A program is compiled for the architecture at hand when it is first needed,
//! and kept on disk under a digest of source, options and driver, so that a warm
//! start compiles nothing. What a reader would get wrong: the options are part of
//! the numerics contract, not of tuning.

use crate::Error;
use gguf::TensorType;
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

/// No contraction, no flush to zero, correctly rounded division and root: see docs/numerics.md.
const NUMERICS: [&str; 4] = [
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
];

/// Names of the compiler's library, newest first.
const LIBRARIES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Where the toolkit installs it, for machines whose loader does not look there.
const FOLDERS: [&str; 2] = ["/usr/local/cuda/lib64", "/opt/cuda/lib64"];

macro_rules! kernel {
    ($name:literal) => {
        ($name, include_str!(concat!("../kernels/", $name)))
    };
}

/// A file of kernels: name and text.
type File = (&'static str, &'static str);

const COMMON: File = kernel!("common.cuh");
const HEADS: File = kernel!("heads.cuh");
const ROWS: File = kernel!("rows.cu");
const ATTENTION: File = kernel!("attention.cu");
const ATTENTION_MMA: File = kernel!("attention_mma.cu");
const FLOATS: File = kernel!("floats.cu");
const SELECT: File = kernel!("select.cu");
const SHARED: File = kernel!("quant/shared.cuh");
const TILES: File = kernel!("tiles.cuh");
const PRODUCTS_OF_FORMAT: File = kernel!("products.cuh");
const WIDE: File = kernel!("wide.cuh");
const PRODUCTS: File = kernel!("products.cu");
const PAIR: File = kernel!("pair.cu");

/// Encodings that files mix in the projections of one input, and that share a launch there.
const PAIRS: [(TensorType, TensorType); 2] = [
    (TensorType::Q4_K, TensorType::Q6_K),
    (TensorType::Q5_K, TensorType::Q6_K),
];

/// Block encodings with integer kernels.
const FORMATS: [(TensorType, File); 12] = [
    (TensorType::Q2_K, kernel!("quant/q2_k.cuh")),
    (TensorType::Q3_K, kernel!("quant/q3_k.cuh")),
    (TensorType::Q4_K, kernel!("quant/q4_k.cuh")),
    (TensorType::Q5_K, kernel!("quant/q5_k.cuh")),
    (TensorType::Q6_K, kernel!("quant/q6_k.cuh")),
    (TensorType::IQ4_XS, kernel!("quant/iq4_xs.cuh")),
    (TensorType::Q4_0, kernel!("quant/q4_0.cuh")),
    (TensorType::Q4_1, kernel!("quant/q4_1.cuh")),
    (TensorType::Q5_0, kernel!("quant/q5_0.cuh")),
    (TensorType::Q5_1, kernel!("quant/q5_1.cuh")),
    (TensorType::Q8_0, kernel!("quant/q8_0.cuh")),
    (TensorType::IQ4_NL, kernel!("quant/iq4_nl.cuh")),
];

/// An element type of kernels that are compiled once for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32 bits.
    F32 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// The upper half of an F32.
    BF16 = 2,
}

/// Kernels that are compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Program {
    /// Operations on the elements of rows.
    Rows,
    /// Attention over pages of F32 or F16.
    Attention(Element),
    /// Attention over pages of F16 on tensor cores, with heads of this many elements.
    AttentionMma(usize),
    /// Products with weights that are not block-encoded.
    Floats(Element),
    /// Products with block-encoded weights.
    Products(TensorType),
    /// Products with weights of two encodings.
    Pair(TensorType, TensorType),
    /// Reading logits back.
    Select,
}

impl Program {
    /// All of them.
    pub fn all() -> Vec<Program> {
        use Element::{BF16, F16, F32};
        let mut all = vec![Program::Rows, Program::Select];
        all.extend([F32, F16].map(Program::Attention));
        all.extend([32, 64, 128].map(Program::AttentionMma));
        all.extend([F32, F16, BF16].map(Program::Floats));
        all.extend(FORMATS.map(|(ty, _)| Program::Products(ty)));
        all.extend(PAIRS.map(|(first, second)| Program::Pair(first, second)));
        all
    }

    /// Its name in messages and in the cache.
    pub fn name(self) -> String {
        match self {
            Program::Rows => "rows".into(),
            Program::Attention(element) => format!("attention {element:?}"),
            Program::AttentionMma(dim) => format!("attention mma {dim}"),
            Program::Floats(element) => format!("floats {element:?}"),
            Program::Products(ty) => format!("products {ty}"),
            Program::Pair(first, second) => format!("products {first} {second}"),
            Program::Select => "select".into(),
        }
    }

    /// Its text.
    fn source(self) -> String {
        let element = |element: Element| format!("#define ELEMENT {}\n", element as usize);
        let block_len = |ty: TensorType| {
            let has_digits = if has_digits(ty) {
                "#define HAS_DIGITS\n"
            } else {
                ""
            };
            format!("#define BLOCK_LEN {}\n{has_digits}", ty.block_len())
        };
        match self {
            Program::Rows => joined(&[COMMON, HEADS, ROWS]),
            Program::Select => joined(&[COMMON, SELECT]),
            Program::Attention(of) => element(of) + &joined(&[COMMON, ATTENTION]),
            Program::AttentionMma(dim) => {
                format!("#define DIM {dim}\n") + &joined(&[COMMON, HEADS, ATTENTION_MMA])
            }
            Program::Floats(of) => element(of) + &joined(&[COMMON, FLOATS]),
            Program::Products(ty) => {
                let files = [
                    COMMON,
                    SHARED,
                    TILES,
                    format(ty),
                    PRODUCTS_OF_FORMAT,
                    WIDE,
                    PRODUCTS,
                ];
                block_len(ty) + &joined(&files)
            }
            Program::Pair(first, second) => {
                let space = |name: &str, ty| {
                    let text = joined(&[format(ty), PRODUCTS_OF_FORMAT, WIDE]);
                    format!("namespace {name} {{\n{text}}}\n")
                };
                let shared = joined(&[COMMON, SHARED, TILES]);
                let formats = space("first", first) + &space("second", second);
                block_len(first) + &shared + &formats + &joined(&[PAIR])
            }
        }
    }
}

/// The text of files, each behind a directive that names it in messages.
fn joined(files: &[File]) -> String {
    let with_name = |(name, text): &File| format!("#line 1 \"{name}\"\n{text}\n");
    files.iter().map(with_name).collect()
}

/// The file of an encoding.
///
/// # Panics
/// If it has no integer kernel.
fn format(ty: TensorType) -> File {
    let found = FORMATS.iter().find(|(of, _)| *of == ty);
    found
        .unwrap_or_else(|| panic!("{ty} has no integer kernel"))
        .1
}

/// The pair of these two encodings, in the order of its kernels, if there is one.
pub(crate) fn pair_of(one: TensorType, other: TensorType) -> Option<(TensorType, TensorType)> {
    PAIRS
        .into_iter()
        .find(|&pair| pair == (one, other) || pair == (other, one))
}

/// Is there a kernel that multiplies rows of `ty` with int8 activations?
pub(crate) fn has_format(ty: TensorType) -> bool {
    FORMATS.iter().any(|(of, _)| *of == ty)
}

/// Do codes times scales of this encoding fit two digits? Asynchronous products take those.
pub(crate) fn has_digits(ty: TensorType) -> bool {
    matches!(ty, TensorType::Q4_K | TensorType::Q5_K | TensorType::Q6_K)
}

/// The architecture with asynchronous products.
const ASYNCHRONOUS: u32 = 90;

/// Has a device of this compute capability asynchronous products?
pub(crate) fn is_asynchronous((major, minor): (u32, u32)) -> bool {
    major * 10 + minor == ASYNCHRONOUS
}

fn options(architecture: u32) -> Vec<String> {
    // What one architecture alone has must be asked for.
    let own = if architecture == ASYNCHRONOUS {
        "a"
    } else {
        ""
    };
    let mut options = vec![
        format!("--gpu-architecture=sm_{architecture}{own}"),
        "--std=c++17".into(),
    ];
    options.extend(NUMERICS.map(String::from));
    options
}

type Handle = *mut c_void;

/// The compiler, NVRTC.
pub struct Compiler {
    version: (u32, u32),
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    /// Keeps the functions loaded.
    _library: Library,
    _built_in: Vec<Library>,
}

/// NVRTC's answer to an option that it does not know.
const INVALID_OPTION: c_int = 5;

impl Compiler {
    /// Loads NVRTC: `path` if given, else what the loader finds, else the toolkit's usual places.
    ///
    /// # Errors
    /// [`Error::LibraryMissing`].
    pub fn load(path: Option<&Path>) -> Result<Compiler, Error> {
        let mut candidates: Vec<PathBuf> = Vec::new();
        match path {
            Some(path) => candidates.push(path.into()),
            None => {
                candidates.extend(LIBRARIES.map(PathBuf::from));
                let inside = |folder: &&str| LIBRARIES.map(|name| Path::new(folder).join(name));
                candidates.extend(FOLDERS.iter().flat_map(inside));
            }
        }
        for candidate in &candidates {
            let built_in = built_in_functions(candidate);
            // SAFETY: loading NVRTC runs its initializers, which is what it is for.
            let Ok(library) = (unsafe { Library::new(candidate) }) else {
                continue;
            };
            if let Some(compiler) = Compiler::of(library, built_in) {
                return Ok(compiler);
            }
        }
        let tried: Vec<String> = candidates.iter().map(|c| c.display().to_string()).collect();
        Err(Error::LibraryMissing {
            library: "NVRTC, the CUDA compiler's library,",
            tried: tried.join(", "),
            remedy: "install it (CUDA toolkit, or `pip install nvidia-cuda-nvrtc`) and name its file, or put it on the loader's path",
        })
    }

    /// The functions of the library, if all are there.
    fn of(library: Library, built_in: Vec<Library>) -> Option<Compiler> {
        /// # Safety
        /// `T` must be the type of the function `name`.
        unsafe fn find<T: Copy>(library: &Library, name: &CStr) -> Option<T> {
            // SAFETY: as the caller promises.
            let symbol = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
            symbol.ok().map(|s| *s)
        }
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        // SAFETY: NVRTC's own signature.
        let version: Version = unsafe { find(&library, c"nvrtcVersion") }?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers to write.
        unsafe { version(&mut major, &mut minor) };
        Some(Compiler {
            version: (major as u32, minor as u32),
            // SAFETY: NVRTC's own signature.
            create: unsafe { find(&library, c"nvrtcCreateProgram") }?,
            // SAFETY: likewise.
            compile: unsafe { find(&library, c"nvrtcCompileProgram") }?,
            // SAFETY: likewise.
            log_size: unsafe { find(&library, c"nvrtcGetProgramLogSize") }?,
            // SAFETY: likewise.
            log: unsafe { find(&library, c"nvrtcGetProgramLog") }?,
            // SAFETY: likewise.
            cubin_size: unsafe { find(&library, c"nvrtcGetCUBINSize") }?,
            // SAFETY: likewise.
            cubin: unsafe { find(&library, c"nvrtcGetCUBIN") }?,
            // SAFETY: likewise.
            destroy: unsafe { find(&library, c"nvrtcDestroyProgram") }?,
            _library: library,
            _built_in: built_in,
        })
    }

    /// Its version.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compiles `program` for `sm_<architecture>`; gives the cubin.
    ///
    /// # Errors
    /// [`Error::ArchitectureUnknown`], [`Error::Compile`].
    pub fn compile(&self, program: Program, architecture: u32) -> Result<Vec<u8>, Error> {
        let source = CString::new(program.source()).expect("a text without zeros");
        let options: Vec<CString> = options(architecture)
            .into_iter()
            .map(|o| CString::new(o).expect("a text without zeros"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut handle = null_mut();
        // SAFETY: texts that end with zero and live on; no headers.
        let created =
            unsafe { (self.create)(&mut handle, source.as_ptr(), null(), 0, null(), null()) };
        let failed = |log: String| Error::Compile {
            program: program.name(),
            architecture,
            log,
        };
        if created != 0 {
            return Err(failed(format!("NVRTC answers {created}")));
        }
        // SAFETY: the program and as many texts as said.
        let compiled =
            unsafe { (self.compile)(handle, pointers.len() as c_int, pointers.as_ptr()) };
        let result = match compiled {
            0 => self
                .read(handle, self.cubin_size, self.cubin)
                .ok_or_else(|| failed("no cubin".into())),
            INVALID_OPTION => Err(Error::ArchitectureUnknown {
                version: self.version,
                architecture,
            }),
            _ => {
                let log = self
                    .read(handle, self.log_size, self.log)
                    .unwrap_or_default();
                Err(failed(
                    String::from_utf8_lossy(&log)
                        .trim_end_matches('\0')
                        .to_string(),
                ))
            }
        };
        // SAFETY: created above, destroyed once.
        unsafe { (self.destroy)(&mut handle) };
        result
    }

    /// A result of a program by the functions of its size and its bytes.
    fn read(
        &self,
        handle: Handle,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        bytes: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Option<Vec<u8>> {
        let mut n = 0;
        // SAFETY: a program that is alive, a size to write.
        let sized = unsafe { size(handle, &mut n) };
        let mut out = vec![0u8; n];
        // SAFETY: as many bytes as the program says.
        let read = unsafe { bytes(handle, out.as_mut_ptr().cast()) };
        (sized == 0 && read == 0).then_some(out)
    }
}

/// The library of built-in functions beside an NVRTC that is given by its path: NVRTC asks the loader for it by name,
/// and the loader knows it once it is loaded.
fn built_in_functions(nvrtc: &Path) -> Vec<Library> {
    let folder = nvrtc.parent().filter(|folder| folder.is_absolute());
    let Some(entries) = folder.and_then(|folder| std::fs::read_dir(folder).ok()) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.path());
    let is_built_in = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libnvrtc-builtins.so")
    };
    // SAFETY: it has data and no initializers of its own.
    let load = |path: PathBuf| unsafe { Library::new(path) }.ok();
    names.filter(is_built_in).filter_map(load).collect()
}

/// Compiles programs, or finds them compiled.
pub(crate) struct Kernels {
    architecture: u32,
    driver_version: i32,
    /// Folder of compiled kernels, if there is one.
    cache: Option<PathBuf>,
    nvrtc: Option<PathBuf>,
    compiler: Option<Compiler>,
    /// Programs compiled, and programs found compiled.
    pub(crate) n_compiled: usize,
    pub(crate) n_cached: usize,
}

impl Kernels {
    pub(crate) fn new(
        architecture: u32,
        driver_version: i32,
        cache: Option<PathBuf>,
        nvrtc: Option<PathBuf>,
    ) -> Kernels {
        Kernels {
            architecture,
            driver_version,
            cache,
            nvrtc,
            compiler: None,
            n_compiled: 0,
            n_cached: 0,
        }
    }

    /// The cubin of a program.
    pub(crate) fn cubin(&mut self, program: Program) -> Result<Vec<u8>, Error> {
        let path = self
            .cache
            .as_ref()
            .map(|folder| folder.join(self.file_name(program)));
        if let Some(cubin) = path.as_ref().and_then(|path| std::fs::read(path).ok()) {
            self.n_cached += 1;
            return Ok(cubin);
        }
        if self.compiler.is_none() {
            self.compiler = Some(Compiler::load(self.nvrtc.as_deref())?);
        }
        let compiler = self.compiler.as_ref().expect("just loaded");
        let cubin = compiler.compile(program, self.architecture)?;
        self.n_compiled += 1;
        if let Some(path) = path {
            // Without a cache the next start compiles again: slower, not wrong.
            store(&path, &cubin).ok();
        }
        Ok(cubin)
    }

    fn file_name(&self, program: Program) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(program.source().as_bytes());
        for option in options(self.architecture) {
            hasher.update(option.as_bytes());
        }
        hasher.update(&self.driver_version.to_le_bytes());
        let digest = hasher.finalize().to_hex();
        let name = program.name().replace(' ', "-");
        format!("{name}-sm_{}-{}.cubin", self.architecture, &digest[..32])
    }
}

/// Writes a file whole or not at all: another process may look for it meanwhile.
fn store(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    std::fs::write(&partial, bytes)?;
    std::fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::{Element, Kernels, Program};

    /// Whatever changes a kernel changes the name it is kept under.
    #[test]
    fn cache_names_differ() {
        let name = |architecture, driver, program| {
            let kernels = Kernels::new(architecture, driver, None, None);
            kernels.file_name(program)
        };
        let first = name(90, 13_000, Program::Rows);
        assert_eq!(first, name(90, 13_000, Program::Rows));
        assert_ne!(first, name(80, 13_000, Program::Rows));
        assert_ne!(first, name(90, 12_040, Program::Rows));
        let attention = |element| name(90, 13_000, Program::Attention(element));
        assert_ne!(attention(Element::F32), attention(Element::F16));
    }
}
