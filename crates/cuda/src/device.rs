//! The state of the CUDA backend: kernels, the current step, buffers, recorded
//! passes.
//!
//! What a reader would get wrong: the first pass of a shape is launched kernel by
//! kernel, the second is recorded, later ones are replayed. Whatever moves memory
//! that a recording names forgets all recordings.

use crate::Error;
use crate::attention::{AttentionFunctions, Pending};
use crate::attention_mma::{MmaFunctions, Units};
use crate::buffer::{Buf, Buffers, rows_of};
use crate::compile::{Element, Kernels, Program};
use crate::driver::{Argument, Context, Function, Graph, Grid, Memory, Pinned, Stream};
use crate::products::{Form, N_FORMS, PairKernels, ProductKernels};
use crate::select::SelectFunctions;
use crate::step::{States, StepBuffer};
use crate::weight::Staging;
use gguf::TensorType;
use model::backend::{Probes, RowSet};
use model::{DeviceError, Pairing, Rope, Shape, Step};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Passes of more rows are not recorded: launching them costs little beside computing them, and their shapes seldom
/// come back.
const MAX_RECORDED_ROWS: usize = 128;

/// Settings of the backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// The device, counted as the driver shows them.
    pub ordinal: usize,
    /// Folder that keeps compiled kernels; without it every start compiles.
    pub cache: Option<PathBuf>,
    /// File of the compiler's library; else the loader looks for it.
    pub nvrtc: Option<PathBuf>,
    /// Launch every pass kernel by kernel: for tests of the recordings.
    pub is_unrecorded: bool,
    /// Finish every launch before the next: for clocking operations from outside.
    pub is_in_step: bool,
}

/// Kernels that are loaded together; the fields are named as in `kernels/`.
macro_rules! functions {
    ($name:ident { $($function:ident),* $(,)? }) => {
        pub(crate) struct $name {
            $(pub(crate) $function: $crate::driver::Function,)*
            /// Keeps the functions loaded; has others for those who ask by name.
            #[allow(dead_code)] // most programs have no others
            pub(crate) module: $crate::driver::Module,
        }

        impl $name {
            pub(crate) fn load(
                context: &std::sync::Arc<$crate::driver::Context>,
                kernels: &mut $crate::compile::Kernels,
                program: $crate::compile::Program,
            ) -> Result<$name, $crate::Error> {
                let module = $crate::driver::Module::load(context, &kernels.cubin(program)?)?;
                Ok($name {
                    $($function: module.function(stringify!($function))?,)*
                    module,
                })
            }
        }
    };
}
pub(crate) use functions;

functions!(RowFunctions {
    norm_rows,
    add_norm_rows,
    norm_heads,
    rope,
    store_kv,
    norm_turn_store,
    add,
    add_bias,
    softcap,
    gather,
    copy_columns,
    convert,
    swiglu,
    swiglu_few,
    mul_sigmoid,
    read_all,
});

functions!(FloatFunctions { dot, embed });

/// The arguments of a launch.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => {
        &mut [$($crate::device::argument(&$argument)),*]
    };
}
pub(crate) use arguments;

pub(crate) fn argument<T: Copy>(value: &T) -> Argument<'_> {
    Argument::new(value)
}

/// A loaded rotation.
pub struct Rotation {
    index: usize,
}

/// A rotation and its table for one step: per row the cosines of all pairs, then the sines, times the magnitude.
struct Turns {
    rope: Rope,
    /// The step that the table belongs to.
    step: u64,
    table: Option<(Memory, Pinned)>,
}

/// What a kernel needs of a rotation; kernels/rows.cu has the same.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) table: u64,
    pub(crate) n_pairs: u32,
    pub(crate) is_halves: u32,
}

impl Turn {
    /// No dimension turns.
    pub(crate) const NONE: Turn = Turn {
        table: 0,
        n_pairs: 0,
        is_halves: 0,
    };
}

/// What is known of a shape of one function's passes.
enum Recording {
    /// One pass was launched kernel by kernel.
    Seen,
    Graph(Graph),
}

/// The CUDA backend.
pub struct Cuda {
    pub(crate) context: Arc<Context>,
    pub(crate) stream: Stream,
    kernels: Kernels,
    pub(crate) rows: RowFunctions,
    pub(crate) select: SelectFunctions,
    floats: HashMap<Element, FloatFunctions>,
    attention: HashMap<Element, AttentionFunctions>,
    /// By the elements of a head.
    attention_mma: HashMap<usize, MmaFunctions>,
    products: HashMap<TensorType, ProductKernels>,
    pairs: HashMap<(TensorType, TensorType), PairKernels>,
    pub(crate) step: Step,
    pub(crate) shape: Shape,
    pub(crate) step_buffer: StepBuffer,
    /// Steps so far: names the current one.
    n_steps: u64,
    /// Writes to buffers so far: names the content of one.
    n_writes: u64,
    pub(crate) buffers: Buffers,
    /// By kind.
    pub(crate) forms: [Form; N_FORMS],
    turns: Vec<Turns>,
    /// States of attention's segments and blocks, and how many of a row it has room for.
    pub(crate) states: Option<Memory>,
    pub(crate) n_states: States,
    /// Counts of attention's blocks of threads that are done, and how many states they can leave.
    pub(crate) arrivals: Option<Memory>,
    pub(crate) units: Units,
    /// A launch that waits for the next operation.
    pub(crate) pending: Option<Pending>,
    pub(crate) staging: Option<Staging>,
    /// Where logits are searched, and where the host reads what was found.
    pub(crate) answers: Option<Memory>,
    pub(crate) read_back: Option<Pinned>,
    pub(crate) probes: Option<Probes>,
    /// May the next launch begin before the one before is done?
    is_chained: bool,
    is_recording: bool,
    recordings: HashMap<(Shape, &'static str), Recording>,
    n_replayed: u64,
    is_unrecorded: bool,
    is_in_step: bool,
    /// The first failure since the last report.
    failure: Option<DeviceError>,
}

impl Cuda {
    /// Opens a device and makes ready the kernels that every model needs.
    ///
    /// # Errors
    /// [`Error`], each variant of it.
    pub fn new(options: &CudaOptions) -> Result<Cuda, Error> {
        let context = Context::open(options.ordinal)?;
        let (cache, nvrtc) = (options.cache.clone(), options.nvrtc.clone());
        let mut kernels =
            Kernels::new(context.architecture(), context.driver_version, cache, nvrtc);
        let rows = RowFunctions::load(&context, &mut kernels, Program::Rows)?;
        let select = SelectFunctions::load(&context, &mut kernels, Program::Select)?;
        Ok(Cuda {
            stream: Stream::new(&context)?,
            context,
            kernels,
            rows,
            select,
            floats: HashMap::new(),
            attention: HashMap::new(),
            attention_mma: HashMap::new(),
            products: HashMap::new(),
            pairs: HashMap::new(),
            step: Step::default(),
            shape: Shape { rows: 1, wanted: 1 },
            step_buffer: StepBuffer::default(),
            n_steps: 0,
            n_writes: 0,
            buffers: Buffers::default(),
            forms: Default::default(),
            turns: Vec::new(),
            states: None,
            n_states: States::default(),
            arrivals: None,
            units: Units::default(),
            pending: None,
            staging: None,
            answers: None,
            read_back: None,
            probes: None,
            is_chained: false,
            is_recording: false,
            recordings: HashMap::new(),
            n_replayed: 0,
            is_unrecorded: options.is_unrecorded || options.is_in_step,
            is_in_step: options.is_in_step,
            failure: None,
        })
    }

    /// Name of the device.
    pub fn device(&self) -> &str {
        &self.context.name
    }

    /// CUDA version of the driver, for receipts.
    pub fn driver_version(&self) -> String {
        crate::driver::version_text(self.context.driver_version)
    }

    /// Compute capability of the device.
    pub fn capability(&self) -> (u32, u32) {
        self.context.capability
    }

    /// Free and total bytes of the device's memory.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn memory_bytes(&self) -> Result<(u64, u64), Error> {
        self.context.memory_bytes()
    }

    /// Bytes a second that the device reads from its memory, as decode could see it: the best of a few walks over
    /// memory far beyond its caches.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::Lost`].
    pub fn read_bandwidth(&mut self) -> Result<f64, DeviceError> {
        const BYTES: usize = 2 << 30;
        const WALKS: usize = 8;
        const ROUNDS: usize = 5;
        self.context.bind()?;
        let (memory, out) = (
            Memory::new(&self.context, "a walk over memory", BYTES)?,
            Memory::new(&self.context, "a walk over memory", 4)?,
        );
        self.stream.clear(memory.address(), BYTES)?;
        let grid = Grid {
            blocks: [self.context.n_multiprocessors * 4, 1, 1],
            threads: 512,
            shared: 0,
        };
        let (function, n) = (self.rows.read_all, (BYTES / 16) as u64);
        let mut best = f64::INFINITY;
        for _ in 0..=ROUNDS {
            self.stream.finish()?;
            let start = Instant::now();
            for _ in 0..WALKS {
                self.launch_alone(
                    function,
                    grid,
                    arguments![out.address(), memory.address(), n],
                );
            }
            self.stream.finish()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        self.take_failure()?;
        Ok((WALKS * BYTES) as f64 / best)
    }

    /// Programs compiled so far, and programs found compiled.
    pub fn compiled_and_cached(&self) -> (usize, usize) {
        (self.kernels.n_compiled, self.kernels.n_cached)
    }

    /// Passes that were replayed from a recording.
    pub fn n_replayed(&self) -> u64 {
        self.n_replayed
    }

    /// Bytes of activations and scratch so far, beside weights and pages.
    pub fn scratch_bytes(&self) -> u64 {
        let forms = self.forms.iter().map(Form::bytes).sum::<u64>();
        let states = self.states.as_ref().map_or(0, |s| s.bytes() as u64);
        self.buffers.bytes() + forms + states
    }

    /// From now on keeps every intermediate value that the graph offers; passes are no longer recorded.
    pub fn record_probes(&mut self) {
        self.probes = Some(Probes::default());
    }

    /// The intermediate values kept since the last call.
    pub fn take_probes(&mut self) -> Probes {
        self.probes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Rows of a buffer in the current step, padded.
    pub(crate) fn n_rows(&self, set: RowSet) -> usize {
        rows_of(self.shape, set)
    }

    /// Marks a buffer as written.
    pub(crate) fn wrote(&mut self, x: &Buf) {
        self.n_writes += 1;
        x.set_version(self.n_writes);
    }

    /// Starts a kernel that waits for its predecessor itself.
    pub(crate) fn launch(
        &mut self,
        function: Function,
        grid: Grid,
        arguments: &mut [Argument<'_>],
    ) {
        self.start_pending();
        let may_chain = self.context.capability.0 >= 9;
        self.start(function, grid, self.is_chained && may_chain, arguments);
        self.is_chained = true;
    }

    /// Starts a kernel once everything before is done.
    pub(crate) fn launch_alone(
        &mut self,
        function: Function,
        grid: Grid,
        arguments: &mut [Argument<'_>],
    ) {
        self.start_pending();
        self.start(function, grid, false, arguments);
        self.is_chained = true;
    }

    fn start(
        &mut self,
        function: Function,
        grid: Grid,
        is_programmatic: bool,
        arguments: &mut [Argument<'_>],
    ) {
        if self.failure.is_some() || grid.blocks.contains(&0) {
            return;
        }
        let mut started = self
            .stream
            .launch(function, grid, is_programmatic, arguments);
        if self.is_in_step {
            started = started.and_then(|()| self.stream.finish());
        }
        self.note(started.map_err(DeviceError::from));
    }

    /// Keeps a failure until it is reported.
    pub(crate) fn note<T>(&mut self, result: Result<T, DeviceError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.failure.get_or_insert(error);
                None
            }
        }
    }

    /// Reports the first failure.
    pub(crate) fn take_failure(&mut self) -> Result<(), DeviceError> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// The kernels of products with block-encoded weights.
    pub(crate) fn product_kernels(&mut self, ty: TensorType) -> Result<&ProductKernels, Error> {
        if !self.products.contains_key(&ty) {
            let loaded = ProductKernels::load(&self.context, &mut self.kernels, ty)?;
            self.products.insert(ty, loaded);
        }
        Ok(&self.products[&ty])
    }

    /// The kernels of products with weights of two encodings.
    pub(crate) fn pair_kernels(
        &mut self,
        pair: (TensorType, TensorType),
    ) -> Result<&PairKernels, Error> {
        if !self.pairs.contains_key(&pair) {
            let loaded = PairKernels::load(&self.context, &mut self.kernels, pair)?;
            self.pairs.insert(pair, loaded);
        }
        Ok(&self.pairs[&pair])
    }

    /// The kernels of products with other weights.
    pub(crate) fn float_kernels(&mut self, element: Element) -> Result<&FloatFunctions, Error> {
        if !self.floats.contains_key(&element) {
            let loaded =
                FloatFunctions::load(&self.context, &mut self.kernels, Program::Floats(element))?;
            self.floats.insert(element, loaded);
        }
        Ok(&self.floats[&element])
    }

    /// The kernels of attention over pages of this element type.
    pub(crate) fn attention_kernels(
        &mut self,
        element: Element,
    ) -> Result<&AttentionFunctions, Error> {
        if !self.attention.contains_key(&element) {
            let loaded = AttentionFunctions::load(
                &self.context,
                &mut self.kernels,
                Program::Attention(element),
            )?;
            self.attention.insert(element, loaded);
        }
        Ok(&self.attention[&element])
    }

    /// The kernels of attention on tensor cores with heads of `dim` elements.
    pub(crate) fn mma_kernels(&mut self, dim: usize) -> Result<&MmaFunctions, Error> {
        if !self.attention_mma.contains_key(&dim) {
            let program = Program::AttentionMma(dim);
            let loaded = MmaFunctions::load(&self.context, &mut self.kernels, program)?;
            self.attention_mma.insert(dim, loaded);
        }
        Ok(&self.attention_mma[&dim])
    }

    /// Forgets all recordings: memory that they name has moved.
    pub(crate) fn forget_recordings(&mut self) {
        assert!(!self.is_recording, "memory moved while a pass was recorded");
        self.recordings.clear();
    }

    /// Loads a rotation.
    pub(crate) fn add_rope(&mut self, rope: &Rope) -> Rotation {
        self.turns.push(Turns {
            rope: rope.clone(),
            step: 0,
            table: None,
        });
        Rotation {
            index: self.turns.len() - 1,
        }
    }

    /// Makes the table of rotation `index` that of the current step.
    fn prepare_turns(&mut self, index: usize) -> Result<(), DeviceError> {
        let turns = &mut self.turns[index];
        let rope = &turns.rope;
        let n_pairs = rope.inv_freq.len();
        let row_bytes = 2 * n_pairs * size_of::<f32>();
        turns.step = self.n_steps;
        let room = turns.table.as_ref().map_or(0, |(memory, _)| memory.bytes());
        let needed = self.shape.rows.max(1) * row_bytes;
        let has_moved = room < needed;
        if has_moved {
            turns.table = None;
            let memory = Memory::new(&self.context, "sines and cosines", needed)?;
            turns.table = Some((memory, Pinned::new(&self.context, needed)?));
        }
        if let (Some((memory, pinned)), true) = (&mut turns.table, n_pairs > 0) {
            let rows = pinned.as_mut_slice().chunks_exact_mut(row_bytes);
            for (row, bytes) in self.step.rows.iter().zip(rows) {
                let (cos, sin) = bytes.split_at_mut(row_bytes / 2);
                let pairs = cos
                    .as_chunks_mut::<4>()
                    .0
                    .iter_mut()
                    .zip(sin.as_chunks_mut::<4>().0);
                for ((cos, sin), inv_freq) in pairs.zip(&rope.inv_freq) {
                    // The bits of the CPU backend: those of libm, on every machine.
                    let (s, c) = libm::sincos(f64::from(row.pos) * inv_freq);
                    *cos = (c as f32 * rope.magnitude).to_le_bytes();
                    *sin = (s as f32 * rope.magnitude).to_le_bytes();
                }
            }
            self.stream
                .upload(memory.address(), pinned, self.step.rows.len() * row_bytes)?;
            // Kernels read it before they wait for the one before.
            self.is_chained = false;
        }
        if has_moved {
            self.forget_recordings();
        }
        Ok(())
    }

    /// What a kernel needs of a rotation, in the current step.
    pub(crate) fn turn(&mut self, rotation: &Rotation) -> Turn {
        if self.turns[rotation.index].step != self.n_steps {
            let prepared = self.prepare_turns(rotation.index);
            self.note(prepared);
        }
        let Turns { rope, table, .. } = &self.turns[rotation.index];
        Turn {
            table: table.as_ref().map_or(0, |(memory, _)| memory.address()),
            n_pairs: rope.inv_freq.len() as u32,
            is_halves: u32::from(rope.pairing == Pairing::Halves),
        }
    }

    /// Uploads a step.
    pub(crate) fn begin_step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.context.bind()?;
        // What is on its way from host memory may not change below it.
        self.stream.finish()?;
        self.staging = None;
        self.is_chained = false;
        self.step.clone_from(step);
        self.n_steps += 1;
        self.shape = Shape {
            rows: model::padded(step.rows.len()),
            wanted: model::padded(step.wanted.len()),
        };
        let mut has_moved = self.buffers.grow(&self.context, &self.stream, self.shape)?;
        has_moved |= self
            .step_buffer
            .upload(&self.context, &self.stream, step, self.shape)?;
        let n_states = self.n_states.or(States::of(step));
        has_moved |= n_states != self.n_states;
        self.n_states = n_states;
        let units = self.units.or(Units::of(step));
        has_moved |= units != self.units;
        self.units = units;
        if has_moved {
            self.forget_recordings();
        }
        (0..self.turns.len()).try_for_each(|index| self.prepare_turns(index))
    }

    /// Runs a pass of the current step.
    pub(crate) fn run_pass<F: FnOnce(&mut Cuda)>(
        &mut self,
        shape: Shape,
        record: F,
    ) -> Result<(), DeviceError> {
        self.context.bind()?;
        self.forget_forms();
        // Functions of one shape are told apart by their closures: the target's pass, a drafter's block.
        let key = (shape, std::any::type_name::<F>());
        let may_record =
            shape.rows <= MAX_RECORDED_ROWS && self.probes.is_none() && !self.is_unrecorded;
        match self.recordings.get(&key) {
            Some(Recording::Graph(graph)) if may_record => {
                self.stream.replay(graph)?;
                self.n_replayed += 1;
            }
            Some(Recording::Seen) if may_record => {
                let graph = self.capture(record)?;
                self.stream.replay(&graph)?;
                self.recordings.insert(key, Recording::Graph(graph));
            }
            _ => {
                record(self);
                self.start_pending();
                self.recordings.insert(key, Recording::Seen);
            }
        }
        self.is_chained = false;
        self.forget_forms();
        self.take_failure()
    }

    fn capture(&mut self, record: impl FnOnce(&mut Cuda)) -> Result<Graph, DeviceError> {
        self.is_chained = false;
        self.stream.begin_capture()?;
        self.is_recording = true;
        record(self);
        self.start_pending();
        self.is_recording = false;
        let graph = self.stream.end_capture();
        self.take_failure()?;
        Ok(graph?)
    }
}
