//! The state of the CPU backend: threads, the current step, converted
//! activations, scratch.

use crate::activation::{ActivationKind, Activations};
use crate::attention::Planner;
use crate::lanes::Available;
use crate::matmul::{Matrix, OutColumns, TILE_ROWS};
use crate::pool::{self, Pool};
use crate::rope::Turns;
use crate::rows::Softcap;
use crate::select::Selector;
use crate::{Error, Isa, rows};
use model::Step;
use model::backend::{Probes, RowSet};
use std::ops::Range;

/// Settings of the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads; all that this process may use if not given.
    pub threads: Option<usize>,
    /// Instruction set; the widest of the machine if not given.
    pub isa: Option<Isa>,
}

/// The CPU backend.
pub struct Cpu {
    pub(crate) machine: Available,
    pub(crate) pool: Pool,
    pub(crate) step: Step,
    /// Steps so far: names the current one.
    pub(crate) n_steps: u64,
    /// Writes to buffers so far: names the content of one.
    pub(crate) n_writes: u64,
    /// Bytes of buffers and of pages.
    pub(crate) allocated_bytes: u64,
    pub(crate) turns: Vec<Turns>,
    pub(crate) planner: Planner,
    pub(crate) selector: Selector,
    pub(crate) probes: Option<Probes>,
    inputs: Inputs,
}

/// `[rows, cols]`, f32.
pub struct Buf {
    pub(crate) set: RowSet,
    pub(crate) cols: usize,
    pub(crate) data: Vec<f32>,
    /// Which write its content is; 0 before the first.
    version: u64,
}

/// A tensor: in the file, and decoded if it is one row.
pub struct Weight {
    pub(crate) matrix: Matrix,
    /// The elements of a one-row tensor (norms and biases); else empty.
    pub(crate) vector: Vec<f32>,
}

/// A loaded rotation.
pub struct Rotation {
    pub(crate) index: usize,
}

impl Cpu {
    /// A backend with nothing loaded.
    ///
    /// # Errors
    /// [`Error::ThreadCount`] for 0 threads and for absurdly many,
    /// [`Error::IsaUnavailable`], [`Error::ThreadRefused`].
    pub fn new(options: CpuOptions) -> Result<Cpu, Error> {
        let isa = options.isa.unwrap_or_else(Isa::detect);
        let machine = Available::new(isa).ok_or_else(|| Error::IsaUnavailable {
            wanted: isa,
            widest: Isa::detect(),
        })?;
        let threads = options.threads.unwrap_or_else(pool::available_threads);
        Ok(Cpu {
            machine,
            pool: Pool::new(threads)?,
            step: Step::default(),
            n_steps: 0,
            n_writes: 0,
            allocated_bytes: 0,
            turns: Vec::new(),
            planner: Planner::default(),
            selector: Selector::default(),
            probes: None,
            inputs: Inputs::default(),
        })
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.machine.isa()
    }

    /// Bytes of activations and pages so far, beside the mapped weights. Pages
    /// become resident when they are written.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes + self.inputs.bytes()
    }

    /// From now on keeps every intermediate value that the graph offers.
    pub fn record_probes(&mut self) {
        self.probes = Some(Probes::default());
    }

    /// The intermediate values kept since the last call.
    pub fn take_probes(&mut self) -> Probes {
        self.probes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn n_rows(&self, set: RowSet) -> usize {
        match set {
            RowSet::All => self.step.rows.len(),
            RowSet::Wanted => self.step.wanted.len(),
        }
    }

    /// The rows of `x` in the current step.
    pub(crate) fn rows<'a>(&self, x: &'a Buf) -> &'a [f32] {
        &x.data[..self.n_rows(x.set) * x.cols]
    }

    /// The rows of `x` in the current step, for writing.
    pub(crate) fn rows_mut<'a>(&mut self, x: &'a mut Buf) -> &'a mut [f32] {
        let n = self.n_rows(x.set) * x.cols;
        if x.data.len() < n {
            self.allocated_bytes += 4 * (n - x.data.len()) as u64;
            x.data.resize(n, 0.0);
        }
        self.n_writes += 1;
        x.version = self.n_writes;
        &mut x.data[..n]
    }

    /// Products that read one input, in one round of tasks, with what follows
    /// each stretch of columns.
    pub(crate) fn products<const N: usize>(
        &mut self,
        out: [(&mut Buf, &Matrix); N],
        x: &Buf,
        then: Then,
    ) {
        let n_rows = self.n_rows(x.set);
        let input = self.rows(x);
        for (out, matrix) in &out {
            let found = (out.cols, x.cols, self.n_rows(out.set));
            let wanted = (matrix.n_rows(), matrix.cols(), n_rows);
            assert_eq!(found, wanted, "columns and rows of a product");
            let kind = matrix.activation_kind();
            self.inputs
                .convert(&mut self.pool, self.machine, kind, x, input);
        }
        let products = out.map(|(out, matrix)| Product {
            matrix,
            out: OutColumns::new(self.rows_mut(out), matrix.n_rows()),
        });
        let work = Work {
            machine: self.machine,
            inputs: &self.inputs,
            products,
            then,
            n_rows,
        };
        work.run(&mut self.pool);
    }
}

impl Buf {
    pub(crate) fn new(set: RowSet, cols: usize) -> Buf {
        Buf {
            set,
            cols,
            data: Vec::new(),
            version: 0,
        }
    }
}

/// The newest input of products in each form that was asked for.
#[derive(Default)]
struct Inputs {
    forms: [Form; 3],
}

#[derive(Default)]
struct Form {
    /// Version and rows of the buffer it was made of.
    of: (u64, usize),
    activations: Activations,
}

/// Elements that a task converts at least: about 10 us.
const CONVERTED_PER_TASK: usize = 1 << 15;

fn form_index(kind: ActivationKind) -> usize {
    match kind {
        ActivationKind::F32 => 0,
        ActivationKind::Int8Per256 => 1,
        ActivationKind::Int8Per32 => 2,
    }
}

impl Inputs {
    fn of(&self, kind: ActivationKind) -> &Activations {
        &self.forms[form_index(kind)].activations
    }

    fn bytes(&self) -> u64 {
        self.forms
            .iter()
            .map(|f| f.activations.bytes() as u64)
            .sum()
    }

    /// Converts `input`, the rows of `x`, unless that is what the form holds.
    fn convert(
        &mut self,
        pool: &mut Pool,
        machine: Available,
        kind: ActivationKind,
        x: &Buf,
        input: &[f32],
    ) {
        let form = &mut self.forms[form_index(kind)];
        let n_rows = input.len() / x.cols;
        if form.of == (x.version, n_rows) && x.version > 0 {
            return;
        }
        form.of = (x.version, n_rows);
        form.activations.resize(kind, n_rows, x.cols);
        let activations = &form.activations;
        let rows_per_task = CONVERTED_PER_TASK.div_ceil(x.cols.max(1));
        pool.run(n_rows.div_ceil(rows_per_task), &|task| {
            let first = task * rows_per_task;
            let rows = first..n_rows.min(first + rows_per_task);
            // SAFETY: each task has rows of its own, and products are computed
            // after this run.
            unsafe { activations.fill_rows(machine.isa(), input, rows) }
        });
    }
}

/// What follows a product, column by column.
#[derive(Clone, Copy)]
pub(crate) enum Then {
    Nothing,
    /// The first of two products becomes `silu(first) * second`.
    Swiglu,
    /// Scale and cap.
    Softcap {
        scale: f32,
        cap: Option<f32>,
    },
}

struct Product<'a> {
    matrix: &'a Matrix,
    out: OutColumns<'a>,
}

/// The products of one input.
struct Work<'a, const N: usize> {
    machine: Available,
    inputs: &'a Inputs,
    products: [Product<'a>; N],
    then: Then,
    n_rows: usize,
}

/// Multiplications below which waking other threads does not pay: 2 to 5 us.
const MIN_SHARED_PRODUCTS: usize = 1 << 17;

/// Tasks per thread: few, so that a thread reads long stretches of a weight;
/// several, so that a thread that was held back leaves its rest to the others.
const TASKS_PER_THREAD: usize = 6;

impl<const N: usize> Work<'_, N> {
    fn run(&self, pool: &mut Pool) {
        let tiles = |p: &Product<'_>| p.matrix.n_rows().div_ceil(TILE_ROWS);
        // Products that are joined afterwards are computed side by side.
        let n_tiles = match self.then {
            Then::Swiglu => tiles(&self.products[0]),
            _ => self.products.iter().map(tiles).sum(),
        };
        let multiplications = |p: &Product<'_>| p.matrix.n_rows() * p.matrix.cols() * self.n_rows;
        let total: usize = self.products.iter().map(multiplications).sum();
        let n_tasks = match total < MIN_SHARED_PRODUCTS {
            true => 1,
            false => n_tiles.min(pool.threads() * TASKS_PER_THREAD),
        };
        pool.run(n_tasks, &|task| {
            let bound = |task: usize| task * n_tiles / n_tasks;
            self.compute(bound(task)..bound(task + 1));
        });
    }

    /// Computes the tiles `tiles` of all products, counted through.
    fn compute(&self, tiles: Range<usize>) {
        if let Then::Swiglu = self.then {
            let rows = rows_of(tiles, self.products[0].matrix);
            for product in &self.products {
                self.multiply(product, rows.clone());
            }
            return self.swiglu(rows);
        }
        let mut first = 0;
        for product in &self.products {
            let end = first + product.matrix.n_rows().div_ceil(TILE_ROWS);
            let inside = tiles.start.clamp(first, end) - first..tiles.end.clamp(first, end) - first;
            first = end;
            if inside.is_empty() {
                continue;
            }
            let rows = rows_of(inside, product.matrix);
            self.multiply(product, rows.clone());
            if let Then::Softcap { scale, cap } = self.then {
                for r in 0..self.n_rows {
                    // SAFETY: these columns are this task's own.
                    let x = unsafe { product.out.part(r, rows.clone()) };
                    self.machine.run(Softcap { x, scale, cap });
                }
            }
        }
    }

    fn multiply(&self, product: &Product<'_>, rows: Range<usize>) {
        let input = self.inputs.of(product.matrix.activation_kind());
        // SAFETY: tasks have disjoint tiles, so these columns are this task's own.
        unsafe { product.matrix.multiply(input, rows, &product.out) }
    }

    fn swiglu(&self, columns: Range<usize>) {
        for r in 0..self.n_rows {
            // SAFETY: these columns are this task's own.
            let gate = unsafe { self.products[0].out.part(r, columns.clone()) };
            // SAFETY: likewise, and of another buffer.
            let up = unsafe { self.products[1].out.part(r, columns.clone()) };
            rows::swiglu(self.machine, gate, up);
        }
    }
}

/// The output rows of tiles.
fn rows_of(tiles: Range<usize>, matrix: &Matrix) -> Range<usize> {
    let end = (tiles.end * TILE_ROWS).min(matrix.n_rows());
    tiles.start * TILE_ROWS..end
}
