//! The walk over a product's tiles, blocks and segments, the same for all encodings
//! and instruction sets.
//!
//! What a reader would get wrong: a segment's sum starts at zero and the total
//! at minus zero, so that `0 + s` gives the bits of `s` also for a negative zero.

use super::prefetch::AHEAD_BYTES;
use super::simd::{Rows, Simd};
use crate::activation::Activations;
use crate::matmul::OutColumns;
use std::ops::Range;

/// Addresses so far apart fall together in the first cache.
const CACHE_PERIOD_BYTES: usize = 4096;

/// Segments that a row's blocks are summed in.
const SEGMENTS: usize = 4;

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

/// A stream of a lane pays from this length on: its first [`AHEAD_BYTES`] nobody has
/// asked for. Rows of 360 bytes in streams of 2 to 6 KiB: 8 to 11 GB/s, where tile after
/// tile gives 11 to 14; rows of 1152 bytes in streams of 24 KiB 23, against 16.
const STREAM_BYTES: usize = 8 * AHEAD_BYTES;

/// The output rows of `n` tiles: lane `l` of tile `t` has row
/// `first + l * apart + t * step`.
#[derive(Clone, Copy)]
struct Tiles {
    first: usize,
    apart: usize,
    n: usize,
    step: usize,
    /// Do all of them meet a block of activations in turn?
    are_joined: bool,
    /// As [`Rows::ahead_bytes`].
    ahead_bytes: usize,
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
    /// lanes, each front to back; or, where those would be short, one stream of tiles of
    /// neighbouring rows. With many, such tiles go together.
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
            let tiles = Tiles {
                // The last tile of a matrix is moved up to end with it.
                first: first.min(n_rows - S::LANES),
                ..self.next_tiles::<S>(left / S::LANES)
            };
            if tiles.are_joined {
                self.add_tiles(s, accumulate, scratch, tiles);
            } else {
                for t in 0..tiles.n {
                    let first = tiles.row(t, 0);
                    let tile = Tiles {
                        first,
                        n: 1,
                        ..tiles
                    };
                    self.add_tiles(s, accumulate, scratch, tile);
                }
            }
            first += tiles.n * S::LANES;
        }
    }

    /// The tiles to take next from row 0 on, if `left` whole ones are left; part of one if
    /// none is.
    #[inline(always)]
    fn next_tiles<S: Simd>(&self, left: usize) -> Tiles {
        let neighbours = Tiles {
            first: 0,
            apart: 1,
            n: left.max(1),
            step: S::LANES,
            are_joined: false,
            ahead_bytes: S::LANES * self.row_bytes,
        };
        if self.x.n_rows() >= MANY_ROWS {
            return Tiles {
                n: left.clamp(1, TILES_AT_ONCE),
                are_joined: true,
                ahead_bytes: 0,
                ..neighbours
            };
        }
        let apart = self.rows_apart::<S>(left);
        if apart * self.row_bytes < STREAM_BYTES {
            return neighbours;
        }
        Tiles {
            apart,
            n: apart,
            step: 1,
            ahead_bytes: AHEAD_BYTES,
            ..neighbours
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
                    let rows = rows.ahead(tiles.ahead_bytes);
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
