//! Attention: whole rows side by side where there are many, else segments.
//!
//! What a reader would get wrong: which of the two is chosen depends on the shape
//! alone, so that a recording serves every context length; and it changes no bit.
//! Segments are merged by the launch after next: see [`Pending`]. Causal attention
//! over pages of f16 has kernels of its own: `attention_mma.rs`.

use crate::attention_mma::{Few, Heads};
use crate::buffer::Buf;
use crate::compile::Element;
use crate::device::{Cuda, arguments, functions};
use crate::driver::{Function, Grid, Memory};
use crate::kv::{Kv, Place};
use crate::products::Activations;
use model::DeviceError;
use model::backend::{BlockWindow, KvLayer, RowSet};

/// Columns that a block of threads merges.
const MERGED_COLUMNS: u32 = 256;

/// Threads of a column; kernels/attention.cu has the same.
const MERGING_PARTS: u32 = 4;

/// Keys of a block.
const BLOCK_KEYS: usize = 64;

/// Widest head: two elements a thread.
pub(crate) const MAX_HEAD_DIM: usize = 256;

functions!(AttentionFunctions {
    attend_split,
    attend_split_wide,
    attend_whole,
    attend_whole_wide,
    merge_states,
});

impl AttentionFunctions {
    /// The kernel of a route for heads of `dim` elements; the query heads and threads of a block; blocks that share a row.
    fn of(&self, route: Route, dim: usize) -> (Function, (usize, u32), usize) {
        let is_wide = dim > MAX_HEAD_DIM / 2;
        match (route, is_wide) {
            (Route::Whole, false) => (self.attend_whole, WHOLE, 1),
            (Route::Whole, true) => (self.attend_whole_wide, WHOLE, 1),
            (Route::States { workers }, false) => (self.attend_split, SPLIT, workers),
            (Route::States { workers }, true) => (self.attend_split_wide, SPLIT, workers),
        }
    }
}

/// Which keys a row sees.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sight {
    /// Stored ones up to itself, in a window.
    Causal(Option<u32>),
    /// Stored ones before the pass's rows of its sequence, and those rows.
    Block(BlockWindow),
}

impl Sight {
    /// Kind and window as kernels/attention.cu numbers them.
    pub(crate) fn numbers(self) -> (u32, u32) {
        match self {
            Sight::Causal(window) => (0, window.unwrap_or(0)),
            Sight::Block(BlockWindow::All) => (1, 0),
            Sight::Block(BlockWindow::Below(window)) => (2, window),
            Sight::Block(BlockWindow::Within(window)) => (3, window),
        }
    }
}

/// What an attention reads and writes; kernels/attention.cu has the same.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Job {
    q: u64,
    rows: u64,
    place: Place,
    own_k: u64,
    own_v: u64,
    out: u64,
    states: u64,
    n_slots: u32,
    n_head: u32,
    n_head_kv: u32,
    dim: u32,
    sight: u32,
    window: u32,
    scale: f32,
}

/// The second launch of an attention in segments; a gate is multiplied in it.
pub(crate) struct Merge {
    function: Function,
    grid: Grid,
    job: Job,
}

/// A launch that waits for the next operation, which may be done inside it.
pub(crate) enum Pending {
    Merge(Merge),
    Heads(Heads),
    Few(Few),
}

impl Pending {
    /// Where it leaves the result of an attention, if it is one and the result can be multiplied and converted inside it.
    fn out(&self) -> Option<u64> {
        match self {
            Pending::Merge(merge) => Some(merge.job.out),
            Pending::Few(few) => Some(few.out()),
            Pending::Heads(_) => None,
        }
    }
}

/// How the work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// A block of threads does all segments of a row.
    Whole,
    /// `workers` blocks share the states of a row; a second launch merges.
    States { workers: usize },
}

/// Query heads that a block of threads takes, and its threads; kernels/attention.cu has the same.
const WHOLE: (usize, u32) = (16, 256);
const SPLIT: (usize, u32) = (4, 128);

/// Up to this many rows there is room for a state of every block of keys that a row sees, up to [`MOST_BLOCKS`] of them;
/// with more rows there is work enough for segments, but in short contexts and windows.
const FINE_ROWS: usize = 8;
const FEW_BLOCKS: usize = 64;

/// More states than that would take longer to merge than they save.
pub(crate) const MOST_BLOCKS: usize = 1024;

/// The cut for `rows` rows of `n_head_kv` times `group` heads.
fn route(
    rows: usize,
    n_head_kv: usize,
    group: usize,
    n_slots: usize,
    n_multiprocessors: usize,
) -> Route {
    if rows * n_head_kv * group.div_ceil(WHOLE.0) >= 2 * n_multiprocessors {
        return Route::Whole;
    }
    let blocks = rows * n_head_kv * group.div_ceil(SPLIT.0);
    let workers = (4 * n_multiprocessors).div_ceil(blocks.max(1));
    Route::States {
        workers: workers.clamp(1, n_slots),
    }
}

/// Bytes of shared memory of a block of threads: keys and values, queries, scores and their maxima.
fn shared_bytes(dim: usize, queries: usize, element_bytes: usize) -> usize {
    let padded = dim.next_multiple_of(16);
    let rows = 2 * BLOCK_KEYS * (padded + 16) * element_bytes;
    rows + 4 * (queries * padded + queries * (BLOCK_KEYS + 1))
}

/// Heads in the columns of a merge.
fn joined_heads(dim: usize) -> usize {
    let columns = MERGED_COLUMNS as usize;
    columns / dim + if columns.is_multiple_of(dim) { 0 } else { 2 }
}

/// Bytes of shared memory of a merge: for each head in its columns two factors for every state and every segment, and a
/// sum.
fn joins_bytes(dim: usize, n_slots: usize) -> usize {
    joined_heads(dim) * (n_slots * 16 + 4)
}

impl Cuda {
    /// Can the device attend with heads of this width?
    pub(crate) fn check_head_dim(
        &self,
        dim: usize,
        element_bytes: usize,
    ) -> Result<(), DeviceError> {
        let needed = shared_bytes(dim, WHOLE.0, element_bytes);
        if dim <= MAX_HEAD_DIM && needed <= self.context.shared_bytes as usize {
            return Ok(());
        }
        Err(DeviceError::Unsupported {
            what: format!("attention with heads of {dim} elements"),
        })
    }

    /// States that there is room for, of each row and head.
    fn n_slots(&self, rows: usize, dim: usize) -> usize {
        /// Shared memory of a merge for columns and sums.
        const FIXED_BYTES: usize = 20 << 10;
        let room = (self.context.shared_bytes as usize).saturating_sub(FIXED_BYTES)
            / (16 * joined_heads(dim));
        let blocks = if rows <= FINE_ROWS {
            self.n_states.blocks
        } else {
            FEW_BLOCKS
        };
        blocks.min(room).max(self.n_states.segments)
    }

    /// Attention of all rows of the step.
    pub(crate) fn attend_rows(
        &mut self,
        out: &Buf,
        q: &Buf,
        own: Option<(&Buf, &Buf)>,
        kv: &Kv,
        (layer, scale, sight): (KvLayer, f32, Sight),
    ) {
        let launched = match (sight, own) {
            (Sight::Causal(_), None) if self.uses_mma(kv, layer) => {
                self.attend_mma(out, q, kv, (layer, scale, sight))
            }
            _ => {
                self.start_pending();
                self.try_attend(out, q, own, kv, (layer, scale, sight))
            }
        };
        self.note(launched);
        self.wrote(out);
    }

    fn try_attend(
        &mut self,
        out: &Buf,
        q: &Buf,
        own: Option<(&Buf, &Buf)>,
        kv: &Kv,
        (layer, scale, sight): (KvLayer, f32, Sight),
    ) -> Result<(), DeviceError> {
        let class = kv.layout.classes[layer.class as usize];
        let (dim, n_head_kv) = (class.head_dim, class.n_head_kv);
        assert!(
            n_head_kv > 0 && q.cols.is_multiple_of(dim * n_head_kv) && out.cols == q.cols,
            "{} columns of queries over {n_head_kv} key/value heads of {dim}",
            q.cols
        );
        let n_head = q.cols / dim;
        let rows = self.n_rows(RowSet::All);
        let group = n_head / n_head_kv;
        let n_multiprocessors = self.context.n_multiprocessors as usize;
        let n_slots = self.n_slots(rows, dim);
        let route = route(rows, n_head_kv, group, n_slots, n_multiprocessors);
        if let Route::States { .. } = route {
            self.reserve_states(rows * n_head * n_slots * (2 + dim) * size_of::<f32>())?;
        }
        let (sight, window) = sight.numbers();
        let job = Job {
            q: q.address(),
            rows: self.step_buffer.rows(),
            place: kv.place(layer, self.step_buffer.pages()),
            own_k: own.map_or(0, |(k, _)| k.address()),
            own_v: own.map_or(0, |(_, v)| v.address()),
            out: out.address(),
            states: self.states.as_ref().map_or(0, Memory::address),
            // A row that is done by one block of threads is done in segments.
            n_slots: if route == Route::Whole {
                0
            } else {
                n_slots as u32
            },
            n_head: n_head as u32,
            n_head_kv: n_head_kv as u32,
            dim: dim as u32,
            sight,
            window,
            scale,
        };
        let element = if kv.is_half() {
            Element::F16
        } else {
            Element::F32
        };
        let f = self.attention_kernels(element)?;
        let merge = f.merge_states;
        let (function, (queries, threads), workers) = f.of(route, dim);
        let grid = Grid {
            blocks: [
                workers as u32,
                (n_head_kv * group.div_ceil(queries)) as u32,
                rows as u32,
            ],
            threads,
            shared: shared_bytes(dim, queries, kv.layout.ty.bytes()) as u32,
        };
        self.launch(function, grid, arguments![job]);
        if let Route::States { .. } = route {
            let grid = Grid {
                blocks: [(q.cols as u32).div_ceil(MERGED_COLUMNS), rows as u32, 1],
                threads: MERGED_COLUMNS * MERGING_PARTS,
                shared: joins_bytes(dim, n_slots) as u32,
            };
            self.pending = Some(Pending::Merge(Merge {
                function: merge,
                grid,
                job,
            }));
        }
        Ok(())
    }

    /// Starts what waits, if anything does: whatever comes next may read its result.
    pub(crate) fn start_pending(&mut self) {
        self.start_waiting(0, Activations::default());
    }

    fn start_waiting(&mut self, gate: u64, form: Activations) {
        match self.pending.take() {
            Some(Pending::Merge(Merge {
                function,
                grid,
                job,
            })) => self.launch(function, grid, arguments![job, gate, form]),
            Some(Pending::Few(few)) => self.start_few(&few, gate, form),
            Some(Pending::Heads(heads)) => self.start_heads(heads),
            None => {}
        }
    }

    /// `x *= sigmoid(gate)` inside the launch that waits, if `x` is what it writes.
    pub(crate) fn gate_pending(&mut self, x: &Buf, gate: &Buf) -> bool {
        let waiting = self.pending.as_ref();
        if waiting.and_then(Pending::out) != Some(x.address()) {
            return false;
        }
        assert_eq!(x.cols, gate.cols, "columns of two buffers");
        let may_convert = match waiting {
            Some(Pending::Few(few)) => few.has_groups(),
            _ => true,
        };
        if may_convert {
            let form = self.form_beside(x);
            self.start_waiting(gate.address(), form);
            self.wrote_with_form(x);
        } else {
            self.start_waiting(gate.address(), Activations::default());
            self.wrote(x);
        }
        true
    }

    pub(crate) fn reserve_states(&mut self, bytes: usize) -> Result<(), DeviceError> {
        if self.states.as_ref().is_some_and(|s| s.bytes() >= bytes) {
            return Ok(());
        }
        // The work so far may still use what is freed here.
        self.stream.finish()?;
        self.states = None;
        self.states = Some(Memory::new(&self.context, "states of attention", bytes)?);
        self.forget_recordings();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Route, joined_heads, route};

    /// One row of a long context is shared by many blocks; a chunk is not.
    #[test]
    fn routes() {
        let of = |rows| route(rows, 2, 16, 258, 132);
        assert_eq!(of(1), Route::States { workers: 66 });
        assert_eq!(of(8), Route::States { workers: 9 });
        assert_eq!(of(16), Route::States { workers: 5 });
        assert_eq!(of(131), Route::States { workers: 1 });
        assert_eq!(of(132), Route::Whole);
        assert_eq!(route(512, 1, 1, 5, 132), Route::Whole);
    }

    #[test]
    fn heads_in_the_columns_of_a_merge() {
        assert_eq!([128, 256, 16].map(joined_heads), [2, 1, 16]);
        // Columns 256 to 511 of heads of 72: the fourth to the eighth.
        assert_eq!(joined_heads(72), 5);
    }
}
