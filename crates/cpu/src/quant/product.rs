//! The loops over tiles, blocks and activation rows, the same for all
//! encodings.
//!
//! What a reader would get wrong: a segment's sum starts at zero and the total
//! at minus zero, so that `0 + s` gives the bits of `s` also for a negative zero.

use super::prefetch::prefetch_ahead;
use super::simd::{Rows, Scalar, Simd};
use super::{Block, Codes, Pairs, SuperBlock, Unpacked};
use crate::activation::Activations;
use crate::matmul::OutColumns;
use std::ops::Range;

/// Addresses so far apart fall together in the first cache.
const CACHE_PERIOD_BYTES: usize = 4096;

/// Segments that a row's blocks are summed in.
const SEGMENTS: usize = 4;

/// Blocks of 32 that a tile holds.
pub(super) const TILE_BLOCKS: usize = 8;

/// Tiles that meet a block of activations in turn when there are many rows of
/// them, so that it comes from the second cache, not the third. Q4_K with 512
/// rows: 16 tiles 192 GMAC/s, 4 tiles 165, on a core with 2 MiB of second cache.
const TILES_AT_ONCE: usize = 16;

/// From this many activation rows on.
const MANY_ROWS: usize = 16;

/// Output rows of a part of a product.
pub(crate) struct Job<'a> {
    /// Whole rows, [`Job::row_bytes`] each: at least [`crate::TILE_ROWS`] of them.
    pub(crate) weights: &'a [u8],
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// Output rows to compute.
    pub(crate) rows: Range<usize>,
    /// All activation rows.
    pub(crate) x: &'a Activations,
    /// Where to.
    pub(crate) out: OutColumns<'a>,
}

/// Sums that wait for their next block: a line of 16 lanes each.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line(pub(crate) [f32; 16]);

/// Buffers of one thread, kept from one product to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Sums of the current segment, `[tile][activation row]`.
    segment: Vec<Line>,
    /// Sums of the segments before, likewise.
    total: Vec<Line>,
    /// A decoded row.
    pub(crate) row: Vec<f32>,
}

impl Scratch {
    /// Room for `n` sums.
    fn grow(&mut self, n: usize) {
        if self.segment.len() < n {
            self.segment.resize(n, Line([0.0; 16]));
            self.total.resize(n, Line([0.0; 16]));
        }
    }

    /// Adds a segment without blocks to `n` totals.
    fn add_nothing(&mut self, n: usize, stage: Stage) {
        for total in &mut self.total[..n] {
            for x in &mut total.0 {
                *x = if stage.is_first_segment {
                    0.0
                } else {
                    *x + 0.0
                };
            }
        }
    }
}

/// Where in a row's sum some blocks lie.
#[derive(Clone, Copy)]
pub(super) struct Stage {
    is_first_segment: bool,
    /// Are they the first of their segment?
    is_start: bool,
    /// Are they the last of their segment?
    is_end: bool,
}

/// The sums of a tile, a line for each activation row.
pub(super) struct Chains<'a> {
    segment: &'a mut [Line],
    total: &'a mut [Line],
    stage: Stage,
}

impl Chains<'_> {
    /// Activation rows.
    #[inline(always)]
    pub(super) fn n_rows(&self) -> usize {
        self.segment.len()
    }

    /// The sum of the segment so far of row `r`.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, s: S, r: usize) -> S::F {
        match self.stage.is_start {
            true => s.splat_f32(0.0),
            false => s.load(&self.segment[r].0),
        }
    }

    /// The same, further.
    #[inline(always)]
    pub(super) fn store<S: Simd>(&mut self, s: S, r: usize, sum: S::F) {
        let total = &mut self.total[r].0;
        match self.stage {
            Stage { is_end: false, .. } => s.store(sum, &mut self.segment[r].0),
            Stage {
                is_first_segment: true,
                ..
            } => s.store(sum, total),
            _ => s.store(s.add_f32(s.load(total), sum), total),
        }
    }
}

/// First block of segment `j` of `n_blocks`.
fn segment_start(j: usize, n_blocks: usize) -> usize {
    j * n_blocks / SEGMENTS
}

/// The output rows of `n` tiles: lane `l` of tile `t` has row
/// `first + l * apart + t * step`.
#[derive(Clone, Copy)]
struct Tiles {
    first: usize,
    apart: usize,
    n: usize,
    step: usize,
}

impl Tiles {
    /// Output row of a lane.
    #[inline(always)]
    fn row(self, t: usize, lane: usize) -> usize {
        self.first + lane * self.apart + t * self.step
    }
}

impl Job<'_> {
    /// Walks the job's tiles, block by block or some blocks of a segment at once,
    /// and writes their sums.
    ///
    /// With few rows of activations memory bounds: tiles go one by one, and each
    /// lane reads consecutive rows, so that the processor sees as many streams as
    /// lanes, each front to back. With many, tiles of neighbouring rows go together.
    #[inline(always)]
    pub(super) fn walk<S: Simd, A: Accumulate<S>>(
        &self,
        s: S,
        accumulate: &mut A,
        scratch: &mut Scratch,
    ) {
        let n_rows = self.weights.len() / self.row_bytes;
        assert!(
            n_rows >= S::LANES && self.rows.end <= n_rows,
            "rows of a job"
        );
        let mut first = self.rows.start;
        while first < self.rows.end {
            let left = self.rows.end - first;
            let (apart, n, step) = if left < S::LANES {
                (1, 1, 1)
            } else if self.x.n_rows() < MANY_ROWS {
                let apart = self.rows_apart::<S>(left / S::LANES);
                (apart, apart, 1)
            } else {
                (1, (left / S::LANES).min(TILES_AT_ONCE), S::LANES)
            };
            // The last tile of a matrix is moved up to end with it.
            let tiles = Tiles {
                first: first.min(n_rows - S::LANES),
                apart,
                n,
                step,
            };
            if step == 1 {
                for t in 0..n {
                    let first = tiles.row(t, 0);
                    let tile = Tiles {
                        first,
                        n: 1,
                        ..tiles
                    };
                    self.add_tiles(s, accumulate, scratch, tile);
                }
            } else {
                self.add_tiles(s, accumulate, scratch, tiles);
            }
            first += n * S::LANES;
        }
    }

    /// Rows from one lane to the next, at most `most`, such that what the lanes read
    /// at a time does not fall together in the first cache. 32 rows apart (16 lanes 36 KiB
    /// apart) Q4_K comes at 85 % of the plain read speed, 31 apart at 94 %.
    #[inline(always)]
    fn rows_apart<S: Simd>(&self, most: usize) -> usize {
        let least = CACHE_PERIOD_BYTES / (2 * S::LANES);
        let is_spread = |apart: &usize| {
            (1..S::LANES).all(|lanes| {
                let at = lanes * apart * self.row_bytes % CACHE_PERIOD_BYTES;
                (least..=CACHE_PERIOD_BYTES - least).contains(&at)
            })
        };
        let most = most.min(Rows::MAX_ROW_BYTES / self.row_bytes);
        // Shorter streams would cost more than lanes that meet now and then.
        let found = (most / 2 + 1..=most).rev().find(is_spread);
        found.unwrap_or(most)
    }

    /// Computes and writes tiles, block by block of all of them.
    #[inline(always)]
    fn add_tiles<S: Simd, A: Accumulate<S>>(
        &self,
        s: S,
        accumulate: &mut A,
        scratch: &mut Scratch,
        tiles: Tiles,
    ) {
        let n_x = self.x.n_rows();
        let n_sums = tiles.n * n_x;
        scratch.grow(n_sums);
        let n_blocks = self.row_bytes / A::BLOCK_BYTES;
        for j in 0..SEGMENTS {
            let (begin, end) = (segment_start(j, n_blocks), segment_start(j + 1, n_blocks));
            let mut stage = Stage {
                is_first_segment: j == 0,
                is_start: true,
                is_end: false,
            };
            if begin == end {
                scratch.add_nothing(n_sums, stage);
            }
            let mut b = begin;
            while b < end {
                let next = (b + A::BLOCKS).min(end);
                stage.is_end = next == end;
                for t in 0..tiles.n {
                    let chains = Chains {
                        segment: &mut scratch.segment[t * n_x..][..n_x],
                        total: &mut scratch.total[t * n_x..][..n_x],
                        stage,
                    };
                    let at = tiles.row(t, 0) * self.row_bytes + b * A::BLOCK_BYTES;
                    let start = self.weights[at..].as_ptr();
                    let apart_bytes = tiles.apart * self.row_bytes;
                    // SAFETY: the lanes' rows are whole rows of `weights` (`walk`), a row
                    // has `n_blocks` blocks, and `rows_apart` keeps the distance.
                    let rows = unsafe { Rows::new::<S>(start, apart_bytes, A::BLOCK_BYTES) };
                    if tiles.n == 1 {
                        prefetch_ahead(&rows, next - b);
                    }
                    accumulate.add(s, rows, b..next, self.x, chains);
                }
                stage.is_start = false;
                b = next;
            }
        }
        // Row by row, so that the tiles of a row are written one after the other.
        for r in 0..n_x {
            for t in 0..tiles.n {
                self.write::<S>(tiles, t, r, &scratch.total[t * n_x + r]);
            }
        }
    }

    /// Writes a tile's output rows of activation row `r`.
    #[inline(always)]
    fn write<S: Simd>(&self, tiles: Tiles, t: usize, r: usize, sums: &Line) {
        let first = tiles.row(t, 0);
        let is_inside = self.rows.start <= first && first + S::LANES <= self.rows.end;
        if tiles.apart == 1 && S::LANES == sums.0.len() && is_inside {
            // SAFETY: whoever made the job keeps the columns `rows` to it.
            return unsafe { self.out.write_line(r, first, &sums.0) };
        }
        for lane in 0..S::LANES {
            let row = tiles.row(t, lane);
            // A tile that was moved up has rows of the tile before it.
            if self.rows.contains(&row) {
                // SAFETY: likewise.
                unsafe { self.out.write(r, row, &sums.0[lane..=lane]) }
            }
        }
    }
}

/// What is done with blocks of a tile.
pub(super) trait Accumulate<S: Simd> {
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// Blocks taken at once.
    const BLOCKS: usize;

    /// Adds the products of `blocks`, the first of which is at `rows`, to a sum
    /// for each row of `x`.
    fn add(&mut self, s: S, rows: Rows, blocks: Range<usize>, x: &Activations, sums: Chains<'_>);
}

/// Calls `$step` with 8, 4, 2 or 1 columns at a time until all are done.
macro_rules! by_columns {
    ($s:ty, $n:expr, |$at:ident| $step:ident($($arg:expr),*)) => {{
        let n: usize = $n;
        let mut $at = 0;
        while <$s>::COLUMNS >= 8 && n - $at >= 8 {
            $step::<$s, F, 8>($($arg),*);
            $at += 8;
        }
        while <$s>::COLUMNS >= 4 && n - $at >= 4 {
            $step::<$s, F, 4>($($arg),*);
            $at += 4;
        }
        while <$s>::COLUMNS >= 2 && n - $at >= 2 {
            $step::<$s, F, 2>($($arg),*);
            $at += 2;
        }
        while n - $at >= 1 {
            $step::<$s, F, 1>($($arg),*);
            $at += 1;
        }
    }};
}

/// A super-block's tile, reused.
#[repr(align(64))]
pub(super) struct Super<S: Simd, F: SuperBlock> {
    /// Its parts.
    pub(super) codes: [Codes<S>; 4],
    /// Scales of the halves of each run in `codes`, as [`Simd::scale`] makes them.
    scales: [[[S::I; 2]; 2]; 4],
    /// Two i16 for two consecutive groups, for [`Simd::add_pairs`].
    pairs: [S::I; 8],
    d: S::F,
    /// Unless [`Pairs::Minima`], unused.
    dmin: S::F,
    format: std::marker::PhantomData<F>,
}

impl<S: Simd, F: SuperBlock> Super<S, F> {
    /// Nothing yet.
    #[inline(always)]
    pub(super) fn new(s: S) -> Super<S, F> {
        let (zero, zero_f32) = (s.splat(0), s.splat_f32(0.0));
        Super {
            codes: [[[zero; 8]; 2]; 4],
            scales: [[[zero; 2]; 2]; 4],
            pairs: [zero; 8],
            d: zero_f32,
            dmin: zero_f32,
            format: std::marker::PhantomData,
        }
    }

    /// Unpacks a block; its head is for whoever wants the scales as they are.
    #[inline(always)]
    pub(super) fn unpack(&mut self, s: S, rows: &Rows) -> F::Head<S> {
        let head = F::head(s, rows);
        let mut kept = [s.splat(0); 8];
        self.codes[0] = F::part(s, rows, &head, 0, &mut kept);
        self.codes[1] = F::part(s, rows, &head, 1, &mut kept);
        self.codes[2] = F::part(s, rows, &head, 2, &mut kept);
        self.codes[3] = F::part(s, rows, &head, 3, &mut kept);
        for part in 0..4 {
            for r in 0..2 {
                self.scales[part][r] = scales::<S, F>(s, &head, F::runs(part)[r]);
            }
        }
        for p in 0..128 / F::GROUP {
            self.pairs[p] = F::pair(s, &head, p);
        }
        (self.d, self.dmin) = F::factors(s, &head);
        head
    }

    /// Adds the products of the pairs with the sums of the `C` columns from `at` on.
    #[inline(always)]
    pub(super) fn add_pairs<const C: usize>(
        &self,
        s: S,
        x: &SuperColumns<'_>,
        at: usize,
        to: &mut [S::I; C],
    ) {
        if F::GROUP == 16 {
            add_pairs::<S, C, 8>(s, &self.pairs, columns(x.sums16, at), to);
        } else {
            add_pairs::<S, C, 4>(s, &self.pairs, columns(x.sums32, at), to);
        }
    }

    /// Adds the block's product with a column, from its integers, to a chain.
    #[inline(always)]
    pub(super) fn add_to_chain(&self, s: S, integers: (S::I, S::I), dy: f32, sum: S::F) -> S::F {
        add_to_chain::<S, F>(s, (self.d, self.dmin), integers, dy, sum)
    }
}

impl<S: Simd, F: SuperBlock> Accumulate<S> for Super<S, F> {
    const BLOCK_BYTES: usize = F::BYTES;
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn add(
        &mut self,
        s: S,
        rows: Rows,
        blocks: Range<usize>,
        x: &Activations,
        mut sums: Chains<'_>,
    ) {
        let n = sums.n_rows();
        let x = x.super_block(blocks.start);
        if n == 1 {
            return add_single::<S, F>(s, &rows, &x, &mut sums);
        }
        self.unpack(s, &rows);
        by_columns!(S, n, |at| add_super(s, self, &x, at, &mut sums));
    }
}

/// Adds the product of a block with the only row of activations to its sum.
/// Nothing of the tile is stored: a store whose address differs from a load of
/// weights by a multiple of 4 KiB delays it.
#[inline(always)]
fn add_single<S: Simd, F: SuperBlock>(
    s: S,
    rows: &Rows,
    x: &SuperColumns<'_>,
    sums: &mut Chains<'_>,
) {
    let head = F::head(s, rows);
    let mut kept = [s.splat(0); 8];
    let mut dot = [s.splat(0)];
    let codes = F::part(s, rows, &head, 0, &mut kept);
    single_part::<S, F>(s, &mut dot, &head, &codes, 0, &x.codes[0]);
    let codes = F::part(s, rows, &head, 1, &mut kept);
    single_part::<S, F>(s, &mut dot, &head, &codes, 1, &x.codes[0]);
    let codes = F::part(s, rows, &head, 2, &mut kept);
    single_part::<S, F>(s, &mut dot, &head, &codes, 2, &x.codes[0]);
    let codes = F::part(s, rows, &head, 3, &mut kept);
    single_part::<S, F>(s, &mut dot, &head, &codes, 3, &x.codes[0]);
    let mut min = [s.splat(0)];
    if F::pairs(s) != Pairs::None {
        let to = if F::pairs(s) == Pairs::Minima {
            &mut min
        } else {
            &mut dot
        };
        for p in 0..128 / F::GROUP {
            let x = if F::GROUP == 16 {
                x.sums16[0][p]
            } else {
                x.sums32[0][p]
            };
            to[0] = s.add_pairs(to[0], F::pair(s, &head, p), x);
        }
    }
    let (d, dmin) = F::factors(s, &head);
    let sum = add_to_chain::<S, F>(s, (d, dmin), (dot[0], min[0]), x.dy[0], sums.load(s, 0));
    sums.store(s, 0, sum);
}

/// Scales of the halves of run `run`.
#[inline(always)]
fn scales<S: Simd, F: SuperBlock>(s: S, head: &F::Head<S>, run: usize) -> [S::I; 2] {
    if F::GROUP == 32 {
        [s.scale(F::scale(s, head, run), F::MAX_CODE); 2]
    } else {
        [
            s.scale(F::scale(s, head, 2 * run), F::MAX_CODE),
            s.scale(F::scale(s, head, 2 * run + 1), F::MAX_CODE),
        ]
    }
}

/// Adds the integer products of a part with one row of activations.
#[inline(always)]
fn single_part<S: Simd, F: SuperBlock>(
    s: S,
    dot: &mut [S::I; 1],
    head: &F::Head<S>,
    codes: &Codes<S>,
    part: usize,
    x: &[[i32; 8]; 8],
) {
    for (codes, run) in codes.iter().zip(F::runs(part)) {
        let scales = scales::<S, F>(s, head, run);
        s.add_scaled(dot, codes, &[&x[run]], scales, (F::GROUP, F::MAX_CODE));
    }
}

/// `sum = fma(dy, t, sum)` of a super-block with `d, dmin` and `I_b, M_b`.
#[inline(always)]
fn add_to_chain<S: Simd, F: SuperBlock>(
    s: S,
    (d, dmin): (S::F, S::F),
    (dot, min): (S::I, S::I),
    dy: f32,
    sum: S::F,
) -> S::F {
    let dot = s.float(dot);
    let t = if F::pairs(s) == Pairs::Minima {
        s.fms(d, dot, s.mul_f32(dmin, s.float(min)))
    } else {
        s.mul_f32(d, dot)
    };
    s.fma(s.splat_f32(dy), t, sum)
}

/// A block of activations of all rows, a scale per 256.
pub(crate) struct SuperColumns<'a> {
    /// Codes, four a word, in runs of 32.
    pub(crate) codes: &'a [[[i32; 8]; 8]],
    /// Scales.
    pub(crate) dy: &'a [f32],
    /// Pairs of sums of 16.
    pub(crate) sums16: &'a [[i32; 8]],
    /// Pairs of sums of 32.
    pub(crate) sums32: &'a [[i32; 4]],
}

/// Adds the product of a tile with the `C` columns from `at` on to their sums.
#[inline(always)]
fn add_super<S: Simd, F: SuperBlock, const C: usize>(
    s: S,
    tile: &Super<S, F>,
    x: &SuperColumns<'_>,
    at: usize,
    sums: &mut Chains<'_>,
) {
    let mut dots = [s.splat(0); C];
    let x_codes: &[[[i32; 8]; 8]; C] = columns(x.codes, at);
    for part in 0..4 {
        for (r, run) in F::runs(part).into_iter().enumerate() {
            let (codes, scales) = (&tile.codes[part][r], tile.scales[part][r]);
            let mut x = [&x_codes[0][run]; C];
            each_column!(c < C, {
                x[c] = &x_codes[c][run];
            });
            s.add_scaled(&mut dots, codes, &x, scales, (F::GROUP, F::MAX_CODE));
        }
    }
    let mut minima = [s.splat(0); C];
    let pairs = F::pairs(s);
    if pairs != Pairs::None {
        let to = if pairs == Pairs::Minima {
            &mut minima
        } else {
            &mut dots
        };
        tile.add_pairs(s, x, at, to);
    }
    let dy: &[f32; C] = columns(x.dy, at);
    each_column!(c < C, {
        let sum = sums.load(s, at + c);
        let sum = tile.add_to_chain(s, (dots[c], minima[c]), dy[c], sum);
        sums.store(s, at + c, sum);
    });
}

/// Adds the products of the tile's pairs with the columns' sums.
#[inline(always)]
fn add_pairs<S: Simd, const C: usize, const N: usize>(
    s: S,
    pairs: &[S::I; 8],
    x: &[[i32; N]; C],
    to: &mut [S::I; C],
) {
    for p in 0..N {
        each_column!(c < C, {
            to[c] = s.add_pairs(to[c], pairs[p], x[c][p]);
        });
    }
}

/// `C` columns from `at` on.
#[inline(always)]
fn columns<T, const C: usize>(all: &[T], at: usize) -> &[T; C] {
    all[at..].first_chunk().expect("as many columns")
}

/// A tile of blocks of 32, reused.
pub(super) struct Blocks<S: Simd, F: Block> {
    tile: [Unpacked<S>; TILE_BLOCKS],
    format: std::marker::PhantomData<F>,
}

impl<S: Simd, F: Block> Blocks<S, F> {
    /// Nothing yet.
    #[inline(always)]
    pub(super) fn new(s: S) -> Blocks<S, F> {
        let (zero, zero_f32) = (s.splat(0), s.splat_f32(0.0));
        let block = Unpacked {
            codes: [zero; 8],
            d: zero_f32,
            min: zero_f32,
        };
        Blocks {
            tile: [block; TILE_BLOCKS],
            format: std::marker::PhantomData,
        }
    }

    /// Unpacks `n_blocks` blocks of whole rows, the first of which is at `rows`.
    #[inline(always)]
    pub(super) fn unpack(&mut self, s: S, rows: &Rows, n_blocks: usize) -> &[Unpacked<S>] {
        for j in 0..n_blocks {
            // SAFETY: so many blocks are there.
            let rows = unsafe { rows.skip(j) };
            self.tile[j] = F::unpack(s, &rows);
        }
        &self.tile[..n_blocks]
    }
}

impl<S: Simd> Unpacked<S> {
    /// `fma(dy, t, chain)` of a block whose codes as unpacked give `dot`.
    #[inline(always)]
    pub(super) fn add_to_chain<F: Block>(
        &self,
        s: S,
        dot: S::I,
        (dy, code_sum): (f32, f32),
        chain: S::F,
    ) -> S::F {
        let mut dot = s.float(dot);
        let code_sum = s.splat_f32(code_sum);
        if F::offset(s) != 0 {
            // Exact: integers below 2^24.
            dot = s.fma(s.splat_f32(-F::offset(s) as f32), code_sum, dot);
        }
        let t = if F::HAS_MIN {
            s.fma(self.d, dot, s.mul_f32(self.min, code_sum))
        } else {
            s.mul_f32(self.d, dot)
        };
        s.fma(s.splat_f32(dy), t, chain)
    }
}

impl<S: Simd, F: Block> Accumulate<S> for Blocks<S, F> {
    const BLOCK_BYTES: usize = F::BYTES;
    const BLOCKS: usize = TILE_BLOCKS;

    #[inline(always)]
    fn add(
        &mut self,
        s: S,
        rows: Rows,
        blocks: Range<usize>,
        x: &Activations,
        mut sums: Chains<'_>,
    ) {
        let n_blocks = blocks.len();
        let n = sums.n_rows();
        if n == 1 {
            // In turn, as above.
            let mut chain = [sums.load(s, 0)];
            for (j, b) in blocks.enumerate() {
                // SAFETY: `rows` are the first of `n_blocks` blocks of whole rows.
                let rows = unsafe { rows.skip(j) };
                let x = x.blocks(b..b + 1);
                add_block::<S, F, 1>(s, &F::unpack(s, &rows), &x, 0, &mut chain);
            }
            sums.store(s, 0, chain[0]);
            return;
        }
        let tile = self.unpack(s, &rows, n_blocks);
        let x = x.blocks(blocks);
        by_columns!(S, n, |at| add_blocks(s, tile, &x, at, &mut sums));
    }
}

/// Blocks of activations of all rows, a scale per 32: `[block][n_rows]`.
pub(crate) struct BlockColumns<'a> {
    /// Codes, four a word.
    pub(crate) codes: &'a [[i32; 8]],
    /// Scales.
    pub(crate) dy: &'a [f32],
    /// Sums of the codes.
    pub(crate) sums: &'a [f32],
    /// Columns of a block.
    pub(crate) n_rows: usize,
}

/// Adds the products of a tile's blocks with the `C` columns from `at` on.
#[inline(always)]
fn add_blocks<S: Simd, F: Block, const C: usize>(
    s: S,
    tile: &[Unpacked<S>],
    x: &BlockColumns<'_>,
    at: usize,
    sums: &mut Chains<'_>,
) {
    let mut chains = [s.splat_f32(0.0); C];
    each_column!(c < C, {
        chains[c] = sums.load(s, at + c);
    });
    for (j, block) in tile.iter().enumerate() {
        add_block::<S, F, C>(s, block, x, j * x.n_rows + at, &mut chains);
    }
    each_column!(c < C, {
        sums.store(s, at + c, chains[c]);
    });
}

/// Adds the products of a block with the `C` columns from `at` on to their chains.
#[inline(always)]
fn add_block<S: Simd, F: Block, const C: usize>(
    s: S,
    block: &Unpacked<S>,
    x: &BlockColumns<'_>,
    at: usize,
    chains: &mut [S::F; C],
) {
    let codes: &[[i32; 8]; C] = columns(x.codes, at);
    let dy: &[f32; C] = columns(x.dy, at);
    let code_sums: &[f32; C] = columns(x.sums, at);
    let mut x = [&codes[0]; C];
    each_column!(c < C, {
        x[c] = &codes[c];
    });
    let dots = s.dots(&block.codes, &x, F::MAX_CODE);
    each_column!(c < C, {
        let scale_and_sum = (dy[c], code_sums[c]);
        chains[c] = block.add_to_chain::<F>(s, dots[c], scale_and_sum, chains[c]);
    });
}

/// The job, for an encoding in super-blocks.
#[inline(always)]
pub(super) fn products256<S: Simd, F: SuperBlock>(s: S, job: &Job<'_>, scratch: &mut Scratch) {
    let mut accumulate = Super::<S, F>::new(s);
    job.walk(s, &mut accumulate, scratch);
}

/// The job, for an encoding in blocks.
#[inline(always)]
pub(super) fn products32<S: Simd, F: Block>(s: S, job: &Job<'_>, scratch: &mut Scratch) {
    let mut accumulate = Blocks::<S, F>::new(s);
    job.walk(s, &mut accumulate, scratch);
}

/// As [`products256`], in plain Rust.
pub(super) fn scalar256<F: SuperBlock>(job: &Job<'_>, scratch: &mut Scratch) {
    products256::<Scalar, F>(Scalar, job, scratch);
}

/// As [`products32`], in plain Rust.
pub(super) fn scalar32<F: Block>(job: &Job<'_>, scratch: &mut Scratch) {
    products32::<Scalar, F>(Scalar, job, scratch);
}
