//! Attention of rows over pages: which keys each row sees, how the work is cut,
//! and in which order the parts merge.
//!
//! A row's keys are cut into segments at absolute positions, segments into
//! blocks of 64 (`block.rs`). Blocks merge ascending into their segment,
//! segments ascending into the first. How long a segment is depends on the
//! row's own position alone, so the cut, and with it every bit, is the same
//! whatever else is computed and by how many threads. A drafter's own rows are
//! a last segment of their own.
//!
//! Rows of one sequence that run together form a tile: their queries share each
//! load of a key or value row.

use crate::block::{Clip, MAX_QUERIES, State};
use crate::kv::{Kv, padded_dim};
use crate::lanes::Available;
use crate::matmul::OutColumns;
use crate::pool::Pool;
use crate::segment::{MergeSegments, lone_segment, whole_tile};
use model::backend::{BlockWindow, KvLayer};
use model::{PAGE_ROWS, Row, Step};
use std::ops::Range;

/// Rows at this position and beyond have long segments.
const LONG_CONTEXT: u32 = 16_384;

/// Queries of a tile at most, unless one row has more: they share a conversion
/// of a block to f32. Their scores stay in the first cache.
const TILE_QUERIES: usize = MAX_QUERIES;

/// Multiplications below which waking other threads does not pay: about 5 us.
const MIN_SHARED_WORK: usize = 1 << 17;

/// Positions of a segment of a row at `pos`.
fn segment_len(pos: u32) -> u32 {
    match pos < LONG_CONTEXT {
        true => PAGE_ROWS as u32,
        false => 8 * PAGE_ROWS as u32,
    }
}

/// What an attention reads and how.
pub(crate) struct Job<'a> {
    pub(crate) machine: Available,
    pub(crate) step: &'a Step,
    pub(crate) kv: &'a Kv,
    pub(crate) layer: KvLayer,
    pub(crate) scale: f32,
    pub(crate) sight: Sight,
    /// `[rows, n_head * head_dim]`.
    pub(crate) q: &'a [f32],
    pub(crate) n_head: usize,
    /// The rows' own keys and values, `[rows, n_head_kv * head_dim]`, for
    /// [`Sight::Block`].
    pub(crate) own: Option<(&'a [f32], &'a [f32])>,
}

/// Which keys a row sees.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sight {
    /// Stored ones up to itself, in a window.
    Causal(Option<u32>),
    /// Stored ones before the pass's rows of its sequence, and those rows.
    Block(BlockWindow),
}

/// The keys of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// Stored positions.
    pub(crate) stored: Clip,
    /// Rows of the pass, counted from the first of the sequence.
    pub(crate) own: Clip,
}

/// Consecutive rows of one sequence whose segments have one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(crate) rows: Range<usize>,
    pub(crate) seq: u32,
    /// Stored positions that any of them sees.
    stored: Clip,
    segment_len: u32,
    /// The pass's rows of the sequence, if they see those; else empty.
    pub(crate) own: Range<usize>,
    /// Tasks of the tiles before, per key/value head.
    first_segment: usize,
}

impl Tile {
    pub(crate) fn n_stored_segments(&self) -> usize {
        let Clip { lo, hi } = self.stored;
        match lo < hi {
            true => ((hi - 1) / self.segment_len - lo / self.segment_len + 1) as usize,
            false => 0,
        }
    }

    pub(crate) fn n_segments(&self) -> usize {
        self.n_stored_segments() + usize::from(!self.own.is_empty())
    }

    /// Positions of stored segment `index`, as far as any row sees them.
    pub(crate) fn segment(&self, index: usize) -> Clip {
        let first = self.stored.lo / self.segment_len + index as u32;
        Clip {
            lo: self.stored.lo.max(first * self.segment_len),
            hi: self.stored.hi.min((first + 1) * self.segment_len),
        }
    }
}

/// How the tasks of an attention are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// All on the caller's thread.
    Here,
    /// A task is a tile and a key/value head.
    Tiles,
    /// A task is a segment of a tile and a key/value head; a second round merges.
    Segments,
}

/// The cut for this many tiles times heads and this many multiplications.
fn route(n_tasks: usize, work: usize, threads: usize) -> Route {
    if threads == 1 || work < MIN_SHARED_WORK {
        Route::Here
    } else if n_tasks >= 8 * threads {
        Route::Tiles
    } else {
        Route::Segments
    }
}

/// The plan of a pass's attentions, kept so that nothing is allocated.
#[derive(Default)]
pub(crate) struct Planner {
    views: Vec<View>,
    tiles: Vec<Tile>,
    /// Ends of the segments' states.
    ends: Vec<usize>,
    states: Vec<f32>,
}

impl Planner {
    /// Attention of all rows of the step into `out`, `[rows, n_head * head_dim]`.
    pub(crate) fn attend(&mut self, pool: &mut Pool, out: &mut [f32], job: &Job<'_>) {
        let class = job.kv.class(job.layer.class);
        let n_q = job.n_head * class.head_dim;
        assert!(
            class.n_head_kv > 0 && job.n_head.is_multiple_of(class.n_head_kv),
            "{} query heads over {} key/value heads",
            job.n_head,
            class.n_head_kv
        );
        self.plan(job);
        let keys: usize = self.views.iter().map(View::n_keys).sum();
        let (tiles, views) = (&self.tiles, &self.views);
        let n_tasks = tiles.len() * class.n_head_kv;
        let out_columns = OutColumns::new(out, n_q);
        // Heads outside: all threads read the keys of one head, which fit a cache.
        let compute = |task: usize| {
            let (head, tile) = (task / tiles.len(), &tiles[task % tiles.len()]);
            // SAFETY: a task alone has the columns of its head in its tile's rows.
            unsafe { whole_tile(job, tile, head, views, &out_columns) }
        };
        match route(n_tasks, 2 * keys * n_q, pool.threads()) {
            Route::Here => (0..n_tasks).for_each(compute),
            Route::Tiles => pool.run(n_tasks, &compute),
            Route::Segments => self.by_segments(pool, out, job),
        }
    }

    /// Views and tiles of the step's rows.
    fn plan(&mut self, job: &Job<'_>) {
        let class = job.kv.class(job.layer.class);
        let group = job.n_head / class.n_head_kv;
        let max_rows = (TILE_QUERIES / group).max(1);
        self.views.clear();
        self.tiles.clear();
        let rows = &job.step.rows;
        let mut first_segment = 0;
        let mut start = 0;
        while start < rows.len() {
            let seq = rows[start].seq;
            let same = rows[start..].iter().take_while(|r| r.seq == seq).count();
            let sequence = start..start + same;
            let views = rows[sequence.clone()].iter();
            let first_pos = rows[start].pos;
            self.views
                .extend(views.map(|row| view(row, first_pos, same as u32, job.sight)));
            let mut at = start;
            while at < sequence.end {
                let segment_len = segment_len(rows[at].pos);
                let is_alike = |r: &&Row| self::segment_len(r.pos) == segment_len;
                let n = rows[at..sequence.end].iter().take_while(is_alike).count();
                let tile_rows = at..at + n.min(max_rows);
                let mut tile = Tile {
                    stored: union(&self.views[tile_rows.clone()]),
                    rows: tile_rows,
                    seq,
                    segment_len,
                    own: match job.sight {
                        Sight::Causal(_) => 0..0,
                        Sight::Block(_) => sequence.clone(),
                    },
                    first_segment,
                };
                at = tile.rows.end;
                first_segment += tile.n_segments();
                tile.first_segment = first_segment - tile.n_segments();
                self.tiles.push(tile);
            }
            start = sequence.end;
        }
    }

    /// Each segment of each head on its own, then the merges.
    fn by_segments(&mut self, pool: &mut Pool, out: &mut [f32], job: &Job<'_>) {
        let class = job.kv.class(job.layer.class);
        let n_head_kv = class.n_head_kv;
        let group = job.n_head / n_head_kv;
        let dim = padded_dim(class.head_dim);
        let (tiles, views) = (&self.tiles, &self.views);
        self.ends.clear();
        let mut end = 0;
        for tile in tiles {
            let len = State::len(tile.rows.len() * group, dim);
            for _ in 0..tile.n_segments() * n_head_kv {
                end += len;
                self.ends.push(end);
            }
        }
        if self.states.len() < end {
            self.states.resize(end, 0.0);
        }
        pool.for_parts(&mut self.states, &self.ends, &|index, state| {
            let of = |t: &Tile| t.first_segment * n_head_kv <= index;
            let tile = &tiles[tiles.partition_point(of) - 1];
            let index = index - tile.first_segment * n_head_kv;
            let (segment, head) = (index / n_head_kv, index % n_head_kv);
            lone_segment(job, tile, views, (head, segment), state);
        });
        let (ends, states) = (&self.ends, &self.states[..]);
        let head_cols = group * class.head_dim;
        let merge = |index: usize, out: &mut [f32]| {
            let (row, head) = (index / n_head_kv, index % n_head_kv);
            let tile = &tiles[tiles.partition_point(|t| t.rows.end <= row)];
            let first = tile.first_segment * n_head_kv + head;
            let end = (tile.first_segment + tile.n_segments()) * n_head_kv;
            let query = (row - tile.rows.start) * group;
            let merge = MergeSegments {
                states,
                ends,
                tasks: (first..end).step_by(n_head_kv),
                n_tile: tile.rows.len() * group,
                queries: query..query + group,
                dim,
                out,
            };
            merge.run(job.machine);
        };
        // A merge is a few multiplications per output: many to a task.
        if self.ends.len() * head_cols < MIN_SHARED_WORK / 8 {
            for (index, out) in out.chunks_mut(head_cols).enumerate() {
                merge(index, out);
            }
        } else {
            pool.for_chunks(out, head_cols, &merge);
        }
    }
}

impl View {
    fn n_keys(&self) -> usize {
        let n = |clip: Clip| clip.hi.saturating_sub(clip.lo) as usize;
        n(self.stored) + n(self.own)
    }
}

/// The keys that `row` sees; its sequence has `n_own` rows from `first_pos` on.
fn view(row: &Row, first_pos: u32, n_own: u32, sight: Sight) -> View {
    match sight {
        Sight::Causal(window) => View {
            stored: Clip {
                lo: window.map_or(0, |w| (row.pos + 1).saturating_sub(w)),
                hi: row.pos + 1,
            },
            own: Clip::default(),
        },
        Sight::Block(window) => {
            // Keys below `lo` and from `hi` on are out of sight.
            let (lo, hi) = match window {
                BlockWindow::All => (0, u32::MAX),
                BlockWindow::Below(w) => ((row.pos + 1).saturating_sub(w), u32::MAX),
                BlockWindow::Within(w) => (
                    row.pos.saturating_sub(w),
                    row.pos.saturating_add(w).saturating_add(1),
                ),
            };
            View {
                stored: Clip {
                    lo: lo.min(first_pos),
                    hi: hi.min(first_pos),
                },
                own: Clip {
                    lo: lo.saturating_sub(first_pos).min(n_own),
                    hi: hi.saturating_sub(first_pos).min(n_own),
                },
            }
        }
    }
}

/// All stored positions that any view has.
fn union(views: &[View]) -> Clip {
    let stored = views.iter().map(|v| v.stored).filter(|c| !c.is_empty());
    stored
        .reduce(|a, b| Clip {
            lo: a.lo.min(b.lo),
            hi: a.hi.max(b.hi),
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{Clip, MIN_SHARED_WORK, Route, Tile, route, segment_len};

    #[test]
    fn small_work_stays_here() {
        assert_eq!(route(1000, MIN_SHARED_WORK - 1, 8), Route::Here);
        assert_eq!(route(1000, MIN_SHARED_WORK, 1), Route::Here);
        assert_eq!(route(16, MIN_SHARED_WORK, 2), Route::Tiles);
        assert_eq!(route(15, MIN_SHARED_WORK, 2), Route::Segments);
    }

    /// The lengths are a part of the contract: docs/numerics.md.
    #[test]
    fn segments_are_longer_in_long_contexts() {
        let found = [0, 16_383, 16_384, 131_071].map(segment_len);
        assert_eq!(found, [256, 256, 2048, 2048]);
    }

    /// Segments begin at absolute multiples of their length and cover the keys.
    #[test]
    fn segments_cover_the_keys() {
        for (lo, hi, pos) in [
            (0, 1, 0),
            (0, 257, 256),
            (300, 900, 899),
            (5000, 16_384, 16_383),
            (0, 16_385, 16_384),
            (14_000, 20_000, 19_999),
        ] {
            let tile = Tile {
                rows: 0..1,
                seq: 0,
                stored: Clip { lo, hi },
                segment_len: segment_len(pos),
                own: 0..0,
                first_segment: 0,
            };
            let mut at = lo;
            for index in 0..tile.n_segments() {
                let segment = tile.segment(index);
                assert_eq!(segment.lo, at, "segment {index} of {lo}..{hi}");
                assert!(index == 0 || at.is_multiple_of(tile.segment_len));
                at = segment.hi;
            }
            assert_eq!(at, hi);
        }
    }
}
