//! The work of one thread in an attention: a tile's segments, block by block.
//!
//! What a reader would get wrong: the loop over blocks is outside of the
//! kernels. One kernel for all of it would have to keep the constants of one
//! step in registers through the others.

use crate::attention::{Job, Tile, View};
use crate::block::{
    self, BLOCK_KEYS, Block, Clip, Exponentials, MAX_QUERIES, MergeStates, Queries, Scores, State,
};
use crate::kv::{Element, Half, padded_dim, store_row};
use crate::lanes::{Available, Kernel, LANES, Lanes};
use crate::matmul::OutColumns;
use model::{KvType, PAGE_ROWS, PageId};
use std::cell::RefCell;
use std::iter::StepBy;
use std::ops::Range;

/// From this many queries on, a block's halves are converted to f32 once, not
/// once per four queries.
const CONVERT_QUERIES: usize = 17;

/// Buffers of a thread.
struct Scratch {
    /// The queries of a tile and head, `[rows][heads of the group][dim]`.
    q: Vec<f32>,
    clips: Vec<Clip>,
    /// The pass's own keys and values.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// A block's keys or values as f32.
    floats: Vec<f32>,
    scores: Box<Scores>,
    /// State of the segments so far, and of the segment at hand.
    total: Vec<f32>,
    segment: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        q: Vec::new(),
        clips: Vec::new(),
        keys: Vec::new(),
        values: Vec::new(),
        floats: Vec::new(),
        scores: Box::new([[0.0; BLOCK_KEYS]; MAX_QUERIES]),
        total: Vec::new(),
        segment: Vec::new(),
    });
}

fn with_scratch(f: impl FnOnce(&mut Scratch)) {
    SCRATCH.with_borrow_mut(f);
}

impl Scratch {
    /// Takes the tile's queries of key/value head `head`.
    fn gather(&mut self, job: &Job<'_>, tile: &Tile, head: usize) {
        let class = job.kv.class(job.layer.class);
        let (head_dim, dim) = (class.head_dim, padded_dim(class.head_dim));
        let group = job.n_head / class.n_head_kv;
        self.q.resize(tile.rows.len() * group * dim, 0.0);
        let mut to = self.q.chunks_exact_mut(dim);
        for row in tile.rows.clone() {
            let from = &job.q[(row * job.n_head + head * group) * head_dim..][..group * head_dim];
            for (from, to) in from.chunks_exact(head_dim).zip(&mut to) {
                to[..head_dim].copy_from_slice(from);
                to[head_dim..].fill(0.0);
            }
        }
    }
}

/// All segments of a tile and key/value head, into the columns of its heads in
/// the tile's rows.
///
/// # Safety
/// No other thread reads or writes those columns of those rows meanwhile.
pub(crate) unsafe fn whole_tile(
    job: &Job<'_>,
    tile: &Tile,
    head: usize,
    views: &[View],
    out: &OutColumns<'_>,
) {
    let class = job.kv.class(job.layer.class);
    let dim = padded_dim(class.head_dim);
    let group = job.n_head / class.n_head_kv;
    let n = tile.rows.len() * group;
    let len = State::len(n, dim);
    with_scratch(|scratch| {
        let mut total = std::mem::take(&mut scratch.total);
        let mut part = std::mem::take(&mut scratch.segment);
        total.resize(total.len().max(len), 0.0);
        part.resize(part.len().max(len), 0.0);
        let mut sums = State::of(&mut total, n, dim);
        sums.clear();
        scratch.gather(job, tile, head);
        for segment in 0..tile.n_segments() {
            if segment == 0 {
                one_segment(job, tile, views, (head, 0), scratch, &mut sums);
                continue;
            }
            let mut part = State::of(&mut part, n, dim);
            one_segment(job, tile, views, (head, segment), scratch, &mut part);
            let part = (&*part.max, &*part.sum, &*part.out);
            merge_segment(job.machine, &mut sums, part, dim);
        }
        let head_cols = group * class.head_dim;
        for (i, row) in tile.rows.clone().enumerate() {
            let columns = head * head_cols..(head + 1) * head_cols;
            job.machine.run(Divide {
                from: &sums.out[i * group * dim..][..group * dim],
                sums: &sums.sum[i * group..][..group],
                dim,
                // SAFETY: as the caller promises; the part is used up here.
                out: unsafe { out.part(row, columns) },
            });
        }
        (scratch.total, scratch.segment) = (total, part);
    });
}

/// One segment of a tile and head into `state`, the state of its queries.
pub(crate) fn lone_segment(
    job: &Job<'_>,
    tile: &Tile,
    views: &[View],
    (head, segment): (usize, usize),
    state: &mut [f32],
) {
    let class = job.kv.class(job.layer.class);
    let n = tile.rows.len() * (job.n_head / class.n_head_kv);
    let mut state = State::of(state, n, padded_dim(class.head_dim));
    with_scratch(|scratch| {
        scratch.gather(job, tile, head);
        one_segment(job, tile, views, (head, segment), scratch, &mut state);
    });
}

/// The same with the queries in the scratch.
fn one_segment(
    job: &Job<'_>,
    tile: &Tile,
    views: &[View],
    (head, segment): (usize, usize),
    scratch: &mut Scratch,
    state: &mut State<'_>,
) {
    let class = job.kv.class(job.layer.class);
    let group = job.n_head / class.n_head_kv;
    let is_own = segment >= tile.n_stored_segments();
    let positions = match is_own {
        true => Clip {
            lo: 0,
            hi: tile.own.len() as u32,
        },
        false => tile.segment(segment),
    };
    scratch.clips.clear();
    for view in &views[tile.rows.clone()] {
        let clip = if is_own { view.own } else { view.stored };
        let clip = Clip {
            lo: clip.lo.max(positions.lo),
            hi: clip.hi.min(positions.hi),
        };
        scratch.clips.extend(std::iter::repeat_n(clip, group));
    }
    state.clear();
    if is_own {
        own_keys(job, tile, head, scratch);
        own_segment(job, positions.hi, scratch, state);
        return;
    }
    let segment = StoredSegment {
        job,
        pages: &job.step.pages[tile.seq as usize][job.layer.class as usize],
        head,
        positions,
    };
    match job.kv.layout().ty {
        KvType::F16 => segment.merge::<u16>(scratch, state),
        KvType::F32 => segment.merge::<f32>(scratch, state),
    }
}

/// The pass's own keys and values of a head, laid out like a page's.
fn own_keys(job: &Job<'_>, tile: &Tile, head: usize, scratch: &mut Scratch) {
    let class = job.kv.class(job.layer.class);
    let (head_dim, dim) = (class.head_dim, padded_dim(class.head_dim));
    let (k, v) = job.own.expect("a block's own keys and values");
    let n_rows = tile.own.len().next_multiple_of(BLOCK_KEYS);
    scratch
        .keys
        .resize(scratch.keys.len().max(n_rows * dim), 0.0);
    let values_len = scratch.values.len().max(n_rows * dim);
    scratch.values.resize(values_len, 0.0);
    for (slot, row) in tile.own.clone().enumerate() {
        let at = (row * class.n_head_kv + head) * head_dim;
        let (k, v) = (&k[at..at + head_dim], &v[at..at + head_dim]);
        store_row(job.machine, &mut scratch.keys[..], Half::Keys, slot, k);
        store_row(job.machine, &mut scratch.values[..], Half::Values, slot, v);
    }
}

/// The blocks of a segment of stored keys.
struct StoredSegment<'a> {
    job: &'a Job<'a>,
    pages: &'a [Option<PageId>],
    head: usize,
    positions: Clip,
}

impl StoredSegment<'_> {
    /// The block whose first key is at position `start`.
    fn block<T: Element>(&self, start: u32) -> Block<'_, T> {
        let job = self.job;
        let dim = padded_dim(job.kv.class(job.layer.class).head_dim);
        let page = self.pages[start as usize / PAGE_ROWS];
        let page = page.unwrap_or_else(|| panic!("no page at position {start}"));
        let inside =
            start as usize % PAGE_ROWS * dim..(start as usize % PAGE_ROWS + BLOCK_KEYS) * dim;
        let half = |half| &job.kv.head::<T>(job.layer, half, page, self.head)[inside.clone()];
        Block {
            keys: half(Half::Keys),
            values: half(Half::Values),
        }
    }

    fn merge<T: Element>(&self, scratch: &mut Scratch, state: &mut State<'_>) {
        let job = self.job;
        let keys = BLOCK_KEYS as u32;
        let dim = padded_dim(job.kv.class(job.layer.class).head_dim);
        let end = self.positions.hi.div_ceil(keys);
        let is_converted = T::TYPE == KvType::F16 && scratch.clips.len() >= CONVERT_QUERIES;
        for index in self.positions.lo / keys..end {
            let start = index * keys;
            let block = self.block::<T>(start);
            let tile = TileBlock {
                machine: job.machine,
                clips: &scratch.clips,
                q: &scratch.q,
                dim,
                scale: job.scale,
                start,
            };
            let next = (index + 1 < end).then(|| self.block::<T>(start + keys));
            let (next, scores) = (next.as_ref(), &mut scratch.scores);
            match is_converted {
                true => tile.merge_converted(&block, next, &mut scratch.floats, scores, state),
                false => tile.merge(&block, next, scores, state),
            }
        }
    }
}

/// The elements of `from` as f32.
struct Convert<'a, T> {
    from: &'a [T],
    to: &'a mut Vec<f32>,
}

impl<T: Element> Kernel for Convert<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        if self.to.len() < self.from.len() {
            self.to.resize(self.from.len(), 0.0);
        }
        let (to, _) = self.to.as_chunks_mut::<LANES>();
        let (from, _) = self.from.as_chunks::<LANES>();
        for (to, from) in to.iter_mut().zip(from) {
            l.store(T::load(l, from), to);
        }
    }
}

/// The queries of a tile before the block that starts at `start`.
struct TileBlock<'a> {
    machine: Available,
    clips: &'a [Clip],
    q: &'a [f32],
    dim: usize,
    scale: f32,
    start: u32,
}

impl TileBlock<'_> {
    /// Calls `f` with as many queries at once as a block takes.
    fn each(&self, state: &mut State<'_>, mut f: impl FnMut(&Queries<'_>, &mut State<'_>)) {
        let mut clips = [Clip::default(); MAX_QUERIES];
        for first in (0..self.clips.len()).step_by(MAX_QUERIES) {
            let n = MAX_QUERIES.min(self.clips.len() - first);
            for i in 0..n {
                clips[i] = self.clips[first + i].inside(self.start);
            }
            let queries = Queries {
                q: &self.q[first * self.dim..(first + n) * self.dim],
                clips: &clips[..n],
                dim: self.dim,
                scale: self.scale,
            };
            f(&queries, &mut state.part(first, n, self.dim));
        }
    }

    fn merge<T: Element>(
        &self,
        block: &Block<'_, T>,
        next: Option<&Block<'_, T>>,
        scores: &mut Scores,
        state: &mut State<'_>,
    ) {
        self.each(state, |queries, state| {
            block::merge_block(self.machine, block, next, queries, scores, state);
        });
    }

    /// The same over the elements converted to f32 first: the keys, then, when
    /// those are done with, the values, so that either stay in the first cache.
    fn merge_converted<T: Element>(
        &self,
        block: &Block<'_, T>,
        next: Option<&Block<'_, T>>,
        floats: &mut Vec<f32>,
        scores: &mut Scores,
        state: &mut State<'_>,
    ) {
        let machine = self.machine;
        let (next_keys, next_values) = (next.map(|n| n.keys), next.map(|n| n.values));
        self.each(state, |queries, state| {
            let from = block.keys;
            machine.run(Convert { from, to: floats });
            let groups = block::score_block(machine, floats, next_keys, queries, scores);
            let Some(groups) = groups else { return };
            let factors = machine.run(Exponentials {
                scores,
                clips: queries.clips,
                groups,
                max: state.max,
            });
            let from = block.values;
            machine.run(Convert { from, to: floats });
            block::merge_values(
                machine,
                floats,
                next_values,
                queries,
                scores,
                &factors,
                state,
            );
        });
    }
}

/// The blocks of the pass's own keys, which are in the scratch.
fn own_segment(job: &Job<'_>, n_rows: u32, scratch: &mut Scratch, state: &mut State<'_>) {
    let dim = padded_dim(job.kv.class(job.layer.class).head_dim);
    for start in (0..n_rows).step_by(BLOCK_KEYS) {
        let inside = start as usize * dim..(start as usize + BLOCK_KEYS) * dim;
        let block = Block {
            keys: &scratch.keys[inside.clone()],
            values: &scratch.values[inside],
        };
        let tile = TileBlock {
            machine: job.machine,
            clips: &scratch.clips,
            q: &scratch.q,
            dim,
            scale: job.scale,
            start,
        };
        tile.merge(&block, None, &mut scratch.scores, state);
    }
}

/// Merges the results of a later segment into those of the ones before.
fn merge_segment(
    machine: Available,
    total: &mut State<'_>,
    (max, sum, out): (&[f32], &[f32], &[f32]),
    dim: usize,
) {
    for first in (0..max.len()).step_by(MAX_QUERIES) {
        let n = MAX_QUERIES.min(max.len() - first);
        machine.run(MergeStates {
            total: &mut total.part(first, n, dim),
            max: &max[first..first + n],
            sum: &sum[first..first + n],
            out: &out[first * dim..(first + n) * dim],
        });
    }
}

/// `out = o / l` of the heads of a row.
struct Divide<'a> {
    /// `[heads][dim]`.
    from: &'a [f32],
    sums: &'a [f32],
    dim: usize,
    /// `[heads][head_dim]`.
    out: &'a mut [f32],
}

impl Kernel for Divide<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let head_dim = self.out.len() / self.sums.len();
        for (i, out) in self.out.chunks_exact_mut(head_dim).enumerate() {
            let sum = l.splat(self.sums[i]);
            let (from, _) = self.from[i * self.dim..][..self.dim].as_chunks::<LANES>();
            for (from, out) in from.iter().zip(out.chunks_mut(LANES)) {
                l.store_part(l.div(l.load(from), sum), out);
            }
        }
    }
}

/// Merges the segments of one row and key/value head, and divides.
pub(crate) struct MergeSegments<'a> {
    /// The states of all tasks and their ends.
    pub(crate) states: &'a [f32],
    pub(crate) ends: &'a [usize],
    /// The tasks of the row's segments, this head.
    pub(crate) tasks: StepBy<Range<usize>>,
    /// Queries of the tile, and which of them are the row's.
    pub(crate) n_tile: usize,
    pub(crate) queries: Range<usize>,
    /// Padded dims of a head.
    pub(crate) dim: usize,
    /// `[heads of the group][head_dim]`.
    pub(crate) out: &'a mut [f32],
}

impl MergeSegments<'_> {
    pub(crate) fn run(self, machine: Available) {
        with_scratch(|scratch| {
            let n = self.queries.len();
            let len = State::len(n, self.dim);
            scratch.total.resize(scratch.total.len().max(len), 0.0);
            let mut total = State::of(&mut scratch.total, n, self.dim);
            total.clear();
            for task in self.tasks.clone() {
                let start = if task == 0 { 0 } else { self.ends[task - 1] };
                let state = &self.states[start..self.ends[task]];
                let (max, rest) = state.split_at(self.n_tile);
                let (sum, out) = rest.split_at(self.n_tile);
                let queries = self.queries.clone();
                let out = &out[queries.start * self.dim..queries.end * self.dim];
                let part = (&max[queries.clone()], &sum[queries], out);
                merge_segment(machine, &mut total, part, self.dim);
            }
            machine.run(Divide {
                from: total.out,
                sums: total.sum,
                dim: self.dim,
                out: self.out,
            });
        });
    }
}
