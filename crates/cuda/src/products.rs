//! Products: which kernel for how many columns, and the int8 form of their input.
//!
//! An input that feeds several products is converted once. A buffer that products
//! read is converted by the operation that writes it, from its second pass on. What
//! a reader would get wrong: "columns" are the rows of the pass.

use crate::Error;
use crate::buffer::Buf;
use crate::compile::{Kernels, Program, has_digits, is_asynchronous, pair_of};
use crate::device::{Cuda, arguments, functions};
use crate::driver::{Context, Function, Grid, Memory, Module};
use crate::weight::{Layout, Weight};
use gguf::TensorType;
use model::DeviceError;
use std::sync::Arc;

/// Threads of a block: a warp for each of four segments.
const THREADS: u32 = 128;

/// Columns of the kernel for the fewest.
const COLUMNS: u32 = 8;

/// The kernel for many columns: threads, stages, rows and columns of a block; kernels/products.cu has the same.
const GEMM_THREADS: u32 = 288;
const GEMM_STAGES: u32 = 3;
const GEMM_TILES: u32 = 8;
const GEMM_COLUMNS: u32 = 64;

/// From more columns than this on it is worth while: below, half of its columns would be empty.
const FEW_COLUMNS: u32 = 32;

/// The kernel of asynchronous products: threads, rows and columns of a block; kernels/wide.cuh has the same.
const WIDE_THREADS: u32 = 384;
const WIDE_TILES: u32 = 8;
const WIDE_COLUMNS: u32 = 128;

/// From more columns than this on it is the better one, where there is one.
const SOME_COLUMNS: u32 = 64;

/// Slots of a warp's ring; kernels/products.cuh has the same.
const SLOTS: u32 = 2;

/// Up to so many slots a block of threads of few columns reserves, where all of them are there at once: blocks of the next
/// kernels then find places on all multiprocessors alike. (On an H200 98.8 instead of 103.4 us a layer.)
const RESERVED_SLOTS: u32 = 4;

/// Bytes of shared memory that the system takes of a block of threads.
const SYSTEM_BYTES: u32 = 1024;

/// Segments of K.
const SEGMENTS: u32 = 4;

/// Matrices with this many rows have tiles enough for two to a warp: at 16 columns gate and up take 46 us with two and
/// 50 with one, the projection after attention is faster with one.
const WIDE_ROWS: usize = 8192;

functions!(ProductFunctions { pack_tiles, embed });

/// A kernel and its tile.
#[derive(Clone, Copy)]
struct Tile {
    function: Function,
    threads: u32,
    columns: u32,
    /// Kind of the activations that it reads.
    form: u32,
    /// Tiles of 16 rows that are taken together.
    n_tiles: u32,
    /// Blocks of threads that a multiprocessor holds; they take tiles in turn. 0: a block for every tile.
    resident: u32,
    /// Bytes of shared memory beside the slots, and of a slot of all warps.
    fixed: u32,
    slot: u32,
}

/// Stages of tiles, codes, digits and scales, each at a multiple of 1024 bytes; sums of the segments before; barriers; and
/// what it takes to begin at such a multiple.
fn wide_shared_bytes(tile_bytes: u32) -> u32 {
    let stage = WIDE_TILES * tile_bytes + WIDE_COLUMNS * (256 + 32 + 4);
    2 * stage.next_multiple_of(1024) + 128 * WIDE_COLUMNS * 4 + 1024 + 1024
}

/// How a product is launched.
struct Launch {
    grid: Grid,
    workers: u32,
    is_late: u32,
}

/// Kernels for few and for many columns.
struct Tiles {
    narrow: Tile,
    two: Tile,
    wide: Tile,
    several: Tile,
    many: Option<Tile>,
    wide_many: Option<Tile>,
}

impl Tiles {
    /// Those of a module of kernels for one encoding or for two that read one form.
    fn load(context: &Context, module: &Module, encodings: &[TensorType]) -> Result<Tiles, Error> {
        let block_len = encodings[0].block_len();
        let block_bytes = encodings
            .iter()
            .map(|ty| ty.block_bytes())
            .max()
            .unwrap_or(0);
        let form = if block_len == 256 { PER_256 } else { PER_32 };
        let unit = if block_len == 256 { 1 } else { 4 };
        let tile_bytes = 16 * block_bytes as u32;
        let tile = |name: &str, columns: u32, n_tiles: u32| -> Result<Tile, Error> {
            let function = module.function(name)?;
            // Two buffers of sums; rings with a barrier a slot.
            let fixed = 2 * SEGMENTS * n_tiles * 16 * columns * 4;
            let slot = SEGMENTS * (n_tiles * tile_bytes * unit + 8);
            let resident = function.resident(THREADS, fixed + SLOTS * slot)?;
            Ok(Tile {
                function,
                threads: THREADS,
                columns,
                form,
                n_tiles,
                resident,
                fixed,
                slot,
            })
        };
        // A block of threads for every tile; `sizes`: threads, columns, tiles.
        let whole = |name: &str, form: u32, sizes: [u32; 3], shared: u32| -> Result<Tile, Error> {
            let [threads, columns, n_tiles] = sizes;
            Ok(Tile {
                function: module.function(name)?,
                threads,
                columns,
                form,
                n_tiles,
                resident: 0,
                fixed: shared,
                slot: 0,
            })
        };
        let shared = gemm_shared_bytes(tile_bytes);
        let has_gemm = encodings.len() == 1
            && block_len == 256
            && context.capability.0 >= 9
            && shared <= context.shared_bytes;
        let many = match has_gemm {
            false => None,
            true => {
                let sizes = [GEMM_THREADS, GEMM_COLUMNS, GEMM_TILES];
                Some(whole("multiply_64", form, sizes, shared)?)
            }
        };
        let is_wide =
            is_asynchronous(context.capability) && encodings.iter().all(|&ty| has_digits(ty));
        let wide_many = match is_wide {
            false => None,
            true => {
                let sizes = [WIDE_THREADS, WIDE_COLUMNS, WIDE_TILES];
                let shared = wide_shared_bytes(tile_bytes);
                Some(whole("multiply_wide", PER_256_IN_ORDER, sizes, shared)?)
            }
        };
        Ok(Tiles {
            narrow: tile("multiply_8", COLUMNS, 1)?,
            two: tile("multiply_16", 16, 1)?,
            wide: tile("multiply_16_wide", 16, 2)?,
            several: tile("multiply_32", 32, 2)?,
            many,
            wide_many,
        })
    }

    /// The kernel for this many columns and output rows.
    fn of(&self, n_columns: u32, n_rows: usize) -> Tile {
        match n_columns {
            0..=8 => self.narrow,
            9..=16 if n_rows >= WIDE_ROWS => self.wide,
            9..=16 => self.two,
            17..=FEW_COLUMNS => self.several,
            33..=SOME_COLUMNS => self.many.unwrap_or(self.several),
            _ => self.wide_many.or(self.many).unwrap_or(self.several),
        }
    }
}

/// The kernels of one encoding.
pub(crate) struct ProductKernels {
    tiles: Tiles,
    pub(crate) pack_tiles: Function,
    pub(crate) embed: Function,
    /// Keeps the functions loaded.
    _functions: ProductFunctions,
}

impl ProductKernels {
    pub(crate) fn load(
        context: &Arc<Context>,
        kernels: &mut Kernels,
        ty: TensorType,
    ) -> Result<ProductKernels, Error> {
        let functions = ProductFunctions::load(context, kernels, Program::Products(ty))?;
        Ok(ProductKernels {
            tiles: Tiles::load(context, &functions.module, &[ty])?,
            pack_tiles: functions.pack_tiles,
            embed: functions.embed,
            _functions: functions,
        })
    }
}

/// The kernels of two encodings in one launch.
pub(crate) struct PairKernels {
    tiles: Tiles,
    /// Keeps the functions loaded.
    _module: Module,
}

impl PairKernels {
    pub(crate) fn load(
        context: &Arc<Context>,
        kernels: &mut Kernels,
        (first, second): (TensorType, TensorType),
    ) -> Result<PairKernels, Error> {
        let module = Module::load(context, &kernels.cubin(Program::Pair(first, second))?)?;
        Ok(PairKernels {
            tiles: Tiles::load(context, &module, &[first, second])?,
            _module: module,
        })
    }
}

/// Stages of tiles, codes, digits and scales; sums of the segments before; two barriers a stage.
fn gemm_shared_bytes(tile_bytes: u32) -> u32 {
    let stage = GEMM_TILES * tile_bytes + GEMM_COLUMNS * (256 + 32 + 4);
    let totals = 128 * GEMM_COLUMNS * 4;
    (GEMM_STAGES * stage + totals + 2 * 8 * GEMM_STAGES).next_multiple_of(128)
}

impl Tile {
    /// The launch for `n_columns` columns and `end` tiles of rows of `n_units` units of K each.
    fn launch(&self, context: &Context, n_columns: u32, (end, n_units): (u32, u32)) -> Launch {
        let n_groups = n_columns.div_ceil(self.columns);
        let places = self.resident * context.n_multiprocessors;
        let workers = match places {
            0 => end,
            _ => end.min((places / n_groups).max(1)),
        };
        let n_blocks = n_groups * workers;
        let slots = if self.slot > 0 { SLOTS } else { 0 };
        let mut shared = self.fixed + slots * self.slot;
        if self.columns == COLUMNS && n_blocks <= places {
            let of_each = n_blocks.div_ceil(context.n_multiprocessors);
            let room = (context.multiprocessor_shared_bytes / of_each).min(context.shared_bytes);
            let room = room.saturating_sub(SYSTEM_BYTES + self.fixed) / self.slot;
            let useful = n_units.div_ceil(SEGMENTS) * end.div_ceil(workers);
            let slots = room.min(RESERVED_SLOTS).min(useful).max(SLOTS);
            shared = self.fixed + slots * self.slot;
        }
        Launch {
            grid: Grid {
                blocks: [n_groups, workers, 1],
                threads: self.threads,
                shared,
            },
            workers,
            is_late: u32::from(n_blocks < places),
        }
    }
}

/// Matrices of one encoding, with where their products go.
type Matrices<'a> = Vec<(&'a Buf, &'a Weight)>;

/// The matrices of a launch, and how many tiles of `n_tiles` times 16 rows they have.
fn parts_of(matrices: &Matrices<'_>, n_tiles: u32) -> ([Part; 4], u32) {
    let mut parts = [Part::default(); 4];
    let mut end = 0;
    for (part, (y, w)) in parts.iter_mut().zip(matrices) {
        end += (w.n_rows as u32).div_ceil(16 * n_tiles);
        *part = Part {
            tiles: w.memory.address(),
            y: y.address(),
            n_out: w.n_rows as u32,
            end,
        };
    }
    (parts, end)
}

/// Kind of an int8 form, as kernels/common.cuh numbers them; 0 is none.
const PER_256: u32 = 1;
const PER_32: u32 = 2;
const PER_256_IN_ORDER: u32 = 3;

/// Kinds of forms, none left out.
pub(crate) const N_FORMS: usize = 3;

/// The newest input of products in one int8 form.
#[derive(Default)]
pub(crate) struct Form {
    /// Version and columns of the buffer that it was made of.
    of: (u64, u32),
    memory: Option<Memory>,
}

impl Form {
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |m| m.bytes() as u64)
    }
}

/// Where an int8 form lies; kernels/common.cuh has the same.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Activations {
    codes: u64,
    digits: u64,
    scales: u64,
    sums: u64,
    n_columns: u32,
    kind: u32,
}

/// A matrix of a launch; kernels/products.cu has the same.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Part {
    tiles: u64,
    y: u64,
    n_out: u32,
    end: u32,
}

/// What follows a product; kernels/products.cu has the same.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue {
    scale: f32,
    cap: f32,
    is_on: u32,
    has_cap: u32,
}

impl Epilogue {
    /// Scale, then cap.
    pub(crate) fn softcap(scale: f32, cap: Option<f32>) -> Epilogue {
        Epilogue {
            scale,
            cap: cap.unwrap_or(1.0),
            is_on: 1,
            has_cap: u32::from(cap.is_some()),
        }
    }
}

/// Units of K that a slot of a ring holds one of.
fn units_of(ty: TensorType, n_blocks: u32) -> u32 {
    if ty.block_len() == 256 {
        n_blocks
    } else {
        n_blocks.div_ceil(4)
    }
}

/// Are so many columns many, to whom buffers are written in another form?
fn are_many(n_columns: usize) -> bool {
    n_columns > SOME_COLUMNS as usize
}

impl Cuda {
    /// No form holds anything.
    pub(crate) fn forget_forms(&mut self) {
        for form in &mut self.forms {
            form.of = (0, 0);
        }
    }

    /// Room for a form of `kind`.
    fn form(
        &mut self,
        kind: u32,
        cols: usize,
        n_columns: usize,
    ) -> Result<Activations, DeviceError> {
        let (codes, digits, scales) = match kind {
            PER_32 => (cols, 0, cols / 8),
            _ => (cols, cols / 8, cols / 64),
        };
        // Each part begins at a multiple of 256 bytes.
        let part = |bytes: usize| (bytes * n_columns).next_multiple_of(256) as u64;
        let sums = if kind == PER_32 { scales } else { 0 };
        let bytes = part(codes) + part(digits) + part(scales) + part(sums);
        let form = &mut self.forms[kind as usize - 1];
        if form.bytes() < bytes {
            // The work so far may still use what is freed here.
            self.stream.finish()?;
            form.memory = None;
            form.memory = Some(Memory::new(
                &self.context,
                "int8 activations",
                bytes as usize,
            )?);
            form.of = (0, 0);
            self.forget_recordings();
        }
        let start = self.forms[kind as usize - 1]
            .memory
            .as_ref()
            .map_or(0, Memory::address);
        Ok(Activations {
            codes: start,
            digits: start + part(codes),
            scales: start + part(codes) + part(digits),
            sums: start + part(codes) + part(digits) + part(scales),
            n_columns: n_columns as u32,
            kind,
        })
    }

    /// Where an operation that writes `out` leaves its int8 form, if products read one. Follow it by
    /// [`Cuda::wrote_with_form`].
    pub(crate) fn form_beside(&mut self, out: &Buf) -> Activations {
        let n_columns = self.n_rows(out.set);
        match out.form(are_many(n_columns)) {
            0 => Activations::default(),
            kind => {
                let form = self.form(kind, out.cols, n_columns);
                self.note(form).unwrap_or_default()
            }
        }
    }

    /// Marks a buffer and the form beside it as written.
    pub(crate) fn wrote_with_form(&mut self, out: &Buf) {
        self.wrote(out);
        let n_columns = self.n_rows(out.set);
        let form = out.form(are_many(n_columns));
        if form > 0 {
            self.forms[form as usize - 1].of = (out.version(), n_columns as u32);
        }
    }

    /// The form of `x` that products read as `kind`.
    fn converted(&mut self, x: &Buf, kind: u32) -> Result<Activations, DeviceError> {
        let n_columns = self.n_rows(x.set);
        let form = self.form(kind, x.cols, n_columns)?;
        let of = (x.version(), n_columns as u32);
        x.set_form(are_many(n_columns), kind);
        if self.forms[kind as usize - 1].of != of || of.0 == 0 {
            self.forms[kind as usize - 1].of = of;
            let convert = self.rows.convert;
            let grid = self.groups(x.cols, n_columns);
            self.launch(convert, grid, arguments![x.address(), x.cols as u32, form]);
        }
        Ok(form)
    }

    /// Half-warps over groups of 256 elements of rows.
    pub(crate) fn groups(&self, cols: usize, n_rows: usize) -> Grid {
        let n_groups = cols.div_ceil(256);
        let threads = (16 * n_groups).next_multiple_of(32).min(128);
        Grid {
            blocks: [(16 * n_groups).div_ceil(threads) as u32, n_rows as u32, 1],
            threads: threads as u32,
            shared: 0,
        }
    }

    /// Products that read one input: one launch for all matrices of one encoding, and where kernels for two encodings
    /// exist and the columns are few, one for both.
    pub(crate) fn products(&mut self, out: &[(&Buf, &Weight)], x: &Buf, epilogue: Epilogue) {
        for (y, w) in out {
            let found = (y.cols, x.cols, self.n_rows(y.set));
            let wanted = (w.n_rows, w.cols, self.n_rows(x.set));
            assert_eq!(found, wanted, "columns and rows of a product");
        }
        assert!(out.len() <= 4, "{} products of one input", out.len());
        if self.n_rows(x.set) == 0 {
            return;
        }
        let mut groups: Vec<(TensorType, Matrices<'_>)> = Vec::new();
        for &(y, w) in out {
            let Layout::Tiles(ty) = w.layout else {
                self.dot(y, w, x, epilogue);
                continue;
            };
            match groups.iter_mut().find(|(of, _)| *of == ty) {
                Some((_, matrices)) => matrices.push((y, w)),
                None => groups.push((ty, vec![(y, w)])),
            }
        }
        let done = match &groups[..] {
            [one, other] if self.has_pairs(self.n_rows(x.set)) => match pair_of(one.0, other.0) {
                Some(pair) if pair.0 == one.0 => {
                    self.multiply_pair(pair, [&one.1, &other.1], x, epilogue)
                }
                Some(pair) => self.multiply_pair(pair, [&other.1, &one.1], x, epilogue),
                None => self.multiply_each(&groups, x, epilogue),
            },
            _ => self.multiply_each(&groups, x, epilogue),
        };
        self.note(done);
        for (y, _) in out {
            self.wrote(y);
        }
    }

    /// Are there kernels for two encodings and this many columns?
    fn has_pairs(&self, n_columns: usize) -> bool {
        let is_wide = are_many(n_columns) && is_asynchronous(self.context.capability);
        n_columns <= FEW_COLUMNS as usize || is_wide
    }

    /// A launch for each encoding.
    fn multiply_each(
        &mut self,
        groups: &[(TensorType, Matrices<'_>)],
        x: &Buf,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        for (ty, matrices) in groups {
            let n_columns = self.n_rows(x.set) as u32;
            let n_rows = matrices.iter().map(|(y, _)| y.cols).sum();
            let tile = self.product_kernels(*ty)?.tiles.of(n_columns, n_rows);
            let form = self.converted(x, tile.form)?;
            let (parts, end) = parts_of(matrices, tile.n_tiles);
            let n_blocks = matrices[0].1.n_blocks(*ty) as u32;
            let n_parts = matrices.len() as u32;
            let Launch { grid, is_late, .. } = tile.launch(
                &self.context,
                form.n_columns,
                (end, units_of(*ty, n_blocks)),
            );
            self.launch(
                tile.function,
                grid,
                arguments![parts, n_parts, end, n_blocks, form, epilogue, is_late],
            );
        }
        Ok(())
    }

    /// One launch for matrices of two encodings; each has workers by its share of the bytes.
    fn multiply_pair(
        &mut self,
        pair: (TensorType, TensorType),
        [first, second]: [&Matrices<'_>; 2],
        x: &Buf,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        let n_columns = self.n_rows(x.set) as u32;
        let n_rows = first.iter().chain(second).map(|(y, _)| y.cols).sum();
        let tile = self.pair_kernels(pair)?.tiles.of(n_columns, n_rows);
        let form = self.converted(x, tile.form)?;
        let (a_parts, a_end) = parts_of(first, tile.n_tiles);
        let (b_parts, b_end) = parts_of(second, tile.n_tiles);
        let n_blocks = first[0].1.n_blocks(pair.0) as u32;
        let sizes = (a_end + b_end, units_of(pair.0, n_blocks));
        let Launch {
            grid,
            workers,
            is_late,
        } = tile.launch(&self.context, form.n_columns, sizes);
        let split = match workers == a_end + b_end {
            true => a_end,
            false => {
                let a_bytes = f64::from(a_end) * pair.0.block_bytes() as f64;
                let b_bytes = f64::from(b_end) * pair.1.block_bytes() as f64;
                let share = f64::from(workers) * a_bytes / (a_bytes + b_bytes);
                (share.round() as u32).clamp(1, workers - 1)
            }
        };
        let (n_a, n_b) = (first.len() as u32, second.len() as u32);
        self.launch(
            tile.function,
            grid,
            arguments![
                a_parts, n_a, a_end, b_parts, n_b, b_end, split, n_blocks, form, epilogue, is_late
            ],
        );
        Ok(())
    }

    /// A product with weights that are not block-encoded.
    fn dot(&mut self, y: &Buf, w: &Weight, x: &Buf, epilogue: Epilogue) {
        let Layout::Rows(element) = w.layout else {
            unreachable!("tiles have integer kernels");
        };
        let loaded = self
            .float_kernels(element)
            .map(|f| f.dot)
            .map_err(DeviceError::from);
        let Some(function) = self.note(loaded) else {
            return;
        };
        let n_columns = self.n_rows(x.set);
        let grid = Grid {
            blocks: [w.n_rows.div_ceil(8) as u32, n_columns.div_ceil(8) as u32, 1],
            threads: THREADS,
            shared: 0,
        };
        let sizes = [w.n_rows as u32, w.cols as u32, n_columns as u32];
        let [n_out, n, n_columns] = sizes;
        self.launch(
            function,
            grid,
            arguments![
                y.address(),
                w.memory.address(),
                x.address(),
                n_out,
                n,
                n_columns
            ],
        );
        if epilogue.is_on > 0 {
            self.softcap_rows(y, epilogue);
        }
    }

    /// Scale and cap of all elements.
    pub(crate) fn softcap_rows(&mut self, x: &Buf, epilogue: Epilogue) {
        let n = (self.n_rows(x.set) * x.cols) as u64;
        let Epilogue {
            scale,
            cap,
            has_cap,
            ..
        } = epilogue;
        let function = self.rows.softcap;
        let grid = self.elements(n);
        self.launch(
            function,
            grid,
            arguments![x.address(), scale, cap, has_cap, n],
        );
    }

    /// A thread an element, or several where there are many.
    pub(crate) fn elements(&self, n: u64) -> Grid {
        let most = u64::from(self.context.n_multiprocessors) * 8;
        Grid {
            blocks: [n.div_ceil(256).min(most) as u32, 1, 1],
            threads: 256,
            shared: 0,
        }
    }
}
