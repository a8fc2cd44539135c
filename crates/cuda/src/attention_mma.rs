//! Attention on tensor cores, over pages of f16: few rows shared by many blocks of
//! threads, many rows side by side.
//!
//! What a reader would get wrong: which heads it takes depends on the model alone,
//! never on a pass, so every route of a sequence has one order of sums. The norm,
//! rotation and store of heads before it, and the gate after it, are done inside
//! the launch for few rows; both wait for the next operation: see [`Pending`].

use crate::attention::{Pending, Sight};
use crate::buffer::Buf;
use crate::device::{Cuda, Turn, arguments, functions};
use crate::driver::{Function, Grid, Memory};
use crate::kv::{Kv, Place};
use crate::products::Activations;
use model::backend::{KvLayer, RowSet};
use model::{DeviceError, Step};

/// Query heads of a tile; threads of a block; rows of a block of threads where they are many. kernels/attention_mma.cu
/// has the same.
const HEADS: usize = 16;
const THREADS: u32 = 256;
const ROWS: usize = 8;

/// Up to this many rows are shared by many blocks of threads.
const FEW_ROWS: usize = 32;

/// Columns of a group of integer activations.
const GROUP: usize = 256;

functions!(MmaFunctions {
    attend_few,
    attend_many,
});

/// Can heads of `dim` elements be attended to on tensor cores?
pub(crate) fn has_heads(dim: usize) -> bool {
    matches!(dim, 32 | 64 | 128)
}

/// What an attention reads and writes; kernels/attention_mma.cu has the same.
#[repr(C)]
#[derive(Clone, Copy)]
struct Job {
    q: u64,
    rows: u64,
    place: Place,
    out: u64,
    states: u64,
    arrivals: u64,
    n_segments: u32,
    n_spans: u32,
    n_head: u32,
    n_head_kv: u32,
    first_row: u32,
    window: u32,
    /// On scores whose exponentials are powers of two.
    scale: f32,
}

/// Norm, rotation and store that an attention does first, if `k` is not 0; kernels/attention_mma.cu has the same.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fresh {
    k: u64,
    v: u64,
    q_norm: u64,
    k_norm: u64,
    eps: f32,
    turn: Turn,
}

impl Fresh {
    const DONE: Fresh = Fresh {
        k: 0,
        v: 0,
        q_norm: 0,
        k_norm: 0,
        eps: 0.0,
        turn: Turn::NONE,
    };
}

/// Norm and rotation of heads of q and k and the store of k and v.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    /// Weights of the two norms.
    pub(crate) norms: [u64; 2],
    pub(crate) eps: f32,
    pub(crate) turn: Turn,
    pub(crate) place: Place,
    pub(crate) dim: usize,
    pub(crate) n_head: usize,
    pub(crate) n_head_kv: usize,
    pub(crate) is_half: bool,
}

/// An attention of few rows that has not been started.
pub(crate) struct Few {
    function: Function,
    grid: Grid,
    job: Job,
    fresh: Fresh,
    n_rows: usize,
    /// Can its result be converted? Its tiles are whole groups.
    has_groups: bool,
}

impl Few {
    pub(crate) fn out(&self) -> u64 {
        self.job.out
    }

    pub(crate) fn has_groups(&self) -> bool {
        self.has_groups
    }
}

/// Segments and spans that the positions of a step lie in, rounded up so that they seldom grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Units {
    segments: usize,
    spans: usize,
}

impl Units {
    pub(crate) fn of(step: &Step) -> Units {
        const PAGES_OF_SEGMENT: usize = 2;
        const PAGES_OF_SPAN: usize = 16;
        let pages = step.pages.iter().flatten().map(Vec::len).max().unwrap_or(0);
        Units {
            segments: pages.div_ceil(PAGES_OF_SEGMENT).next_multiple_of(16),
            spans: pages.div_ceil(PAGES_OF_SPAN).next_multiple_of(4),
        }
    }

    /// The larger of both, each by itself.
    pub(crate) fn or(self, other: Units) -> Units {
        Units {
            segments: self.segments.max(other.segments),
            spans: self.spans.max(other.spans),
        }
    }
}

/// Bytes of shared memory of a block of threads, where rows are few and where they are many: see FewMemory and ManyMemory.
fn shared_bytes(dim: usize) -> [usize; 2] {
    let queries = 2 * HEADS * dim * 2;
    let few = queries + ROWS * HEADS * (dim + 4 + 2) * 4 + 16;
    let many = ROWS * queries + 2 * 64 * (2 * dim + 40) * 2;
    [few, many]
}

/// Bytes of the state of a tile of heads.
fn state_bytes(dim: usize) -> usize {
    HEADS * (dim + 2) * size_of::<f32>()
}

impl Cuda {
    /// Are heads of this shape attended to on tensor cores?
    pub(crate) fn uses_mma(&self, kv: &Kv, layer: KvLayer) -> bool {
        kv.is_half() && has_heads(kv.layout.classes[layer.class as usize].head_dim)
    }

    /// Are so many rows shared by many blocks of threads?
    fn are_few(&self, n_rows: usize, dim: usize) -> bool {
        n_rows <= FEW_ROWS || shared_bytes(dim)[1] > self.context.shared_bytes as usize
    }

    /// Norms, turns and stores heads, now or inside the attention that follows.
    pub(crate) fn prepare_heads(&mut self, heads: Heads, may_wait: bool) {
        self.start_pending();
        let n_rows = self.n_rows(RowSet::All);
        if may_wait && n_rows <= FEW_ROWS {
            self.pending = Some(Pending::Heads(heads));
        } else {
            self.start_heads(heads);
        }
    }

    pub(crate) fn start_heads(&mut self, heads: Heads) {
        let Heads {
            q,
            k,
            v,
            norms: [q_norm, k_norm],
            eps,
            turn,
            place,
            ..
        } = heads;
        let n_heads = heads.n_head + 2 * heads.n_head_kv;
        let grid = Grid {
            blocks: [
                n_heads.div_ceil(8) as u32,
                self.n_rows(RowSet::All) as u32,
                1,
            ],
            threads: 128,
            shared: 0,
        };
        let sizes = [heads.dim, heads.n_head, heads.n_head_kv].map(|n| n as u32);
        let [dim, n_head, n_head_kv] = sizes;
        let (rows, is_half) = (self.step_buffer.rows(), u32::from(heads.is_half));
        let function = self.rows.norm_turn_store;
        self.launch(
            function,
            grid,
            arguments![
                q, k, v, q_norm, k_norm, eps, dim, n_head, n_head_kv, rows, turn, place, is_half
            ],
        );
    }

    /// Attention of all rows of the step.
    pub(crate) fn attend_mma(
        &mut self,
        out: &Buf,
        q: &Buf,
        kv: &Kv,
        (layer, scale, sight): (KvLayer, f32, Sight),
    ) -> Result<(), DeviceError> {
        let class = kv.layout.classes[layer.class as usize];
        let (dim, n_head_kv) = (class.head_dim, class.n_head_kv);
        let (n_head, n_rows) = (q.cols / dim, self.n_rows(RowSet::All));
        let place = kv.place(layer, self.step_buffer.pages());
        let fresh = self.take_fresh(q, place);
        let group = n_head / n_head_kv;
        let tiles = n_head_kv * group.div_ceil(HEADS);
        let is_few = self.are_few(n_rows, dim);
        let Units { segments, spans } = self.units;
        let (at_once, slots) = match is_few {
            true => (n_rows.min(FEW_ROWS), segments + spans),
            false => (n_rows, 2),
        };
        self.reserve_states(at_once * tiles * slots * state_bytes(dim))?;
        self.reserve_arrivals(at_once * tiles * (spans + 1) * size_of::<u32>())?;
        let job = Job {
            q: q.address(),
            rows: self.step_buffer.rows(),
            place,
            out: out.address(),
            states: self.states.as_ref().map_or(0, Memory::address),
            arrivals: self.arrivals.as_ref().map_or(0, Memory::address),
            n_segments: segments as u32,
            n_spans: spans as u32,
            n_head: n_head as u32,
            n_head_kv: n_head_kv as u32,
            first_row: 0,
            window: sight.numbers().1,
            scale: scale * std::f32::consts::LOG2_E,
        };
        let functions = self.mma_kernels(dim)?;
        let (few, many) = (functions.attend_few, functions.attend_many);
        let shared = shared_bytes(dim).map(|bytes| bytes as u32);
        if !is_few {
            let grid = Grid {
                blocks: [1, tiles as u32, n_rows as u32],
                threads: THREADS,
                shared: shared[1],
            };
            self.launch(many, grid, arguments![job]);
            return Ok(());
        }
        let workers = (2 * self.context.n_multiprocessors as usize).div_ceil(at_once * tiles);
        self.pending = Some(Pending::Few(Few {
            function: few,
            grid: Grid {
                blocks: [
                    workers.clamp(1, segments) as u32,
                    tiles as u32,
                    at_once as u32,
                ],
                threads: THREADS,
                shared: shared[0],
            },
            job,
            fresh,
            n_rows,
            // Every tile begins and ends with a group.
            has_groups: group.is_multiple_of(HEADS.min(group))
                && (HEADS.min(group) * dim).is_multiple_of(GROUP),
        }));
        Ok(())
    }

    /// What is left to do with the heads of q, if they wait for this attention; anything else that waits is started.
    fn take_fresh(&mut self, q: &Buf, place: Place) -> Fresh {
        match self.pending.take() {
            Some(Pending::Heads(heads)) if heads.q == q.address() && heads.place == place => {
                Fresh {
                    k: heads.k,
                    v: heads.v,
                    q_norm: heads.norms[0],
                    k_norm: heads.norms[1],
                    eps: heads.eps,
                    turn: heads.turn,
                }
            }
            other => {
                self.pending = other;
                self.start_pending();
                Fresh::DONE
            }
        }
    }

    /// Starts an attention of few rows; with a gate its result is multiplied by the sigmoid of that, and with a form it
    /// is converted.
    pub(crate) fn start_few(&mut self, few: &Few, gate: u64, form: Activations) {
        let mut job = few.job;
        let at_once = few.grid.blocks[2] as usize;
        for first in (0..few.n_rows).step_by(at_once) {
            let mut grid = few.grid;
            grid.blocks[2] = at_once.min(few.n_rows - first) as u32;
            job.first_row = first as u32;
            self.launch(few.function, grid, arguments![job, few.fresh, gate, form]);
        }
    }

    fn reserve_arrivals(&mut self, bytes: usize) -> Result<(), DeviceError> {
        if self.arrivals.as_ref().is_some_and(|a| a.bytes() >= bytes) {
            return Ok(());
        }
        // The work so far may still use what is freed here.
        self.stream.finish()?;
        self.arrivals = None;
        let memory = Memory::new(&self.context, "arrivals of attention", bytes)?;
        self.stream.clear(memory.address(), bytes)?;
        self.arrivals = Some(memory);
        self.forget_recordings();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::shared_bytes;

    /// What the structures in kernels/attention_mma.cu need, at least.
    #[test]
    fn shared_memory() {
        assert_eq!(shared_bytes(128), [76_816, 141_312]);
        assert_eq!(shared_bytes(32)[0], 4096 / 2 + 8 * 16 * 38 * 4 + 16);
    }
}
