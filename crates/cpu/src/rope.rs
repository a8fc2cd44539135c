//! Rotary positions: sine and cosine of the pass's rows, and the turn itself.
//!
//! Angles are f64, sine and cosine those of the `libm` crate, so that the bits
//! do not depend on the platform. The table of a pass is computed at its first
//! turn and serves all layers. Pairs are neighbours or halves: `model::Rope`
//! says which.

use crate::lanes::{Available, Kernel, Lanes};
use crate::pool::Pool;
use model::{Pairing, Rope, Row};

/// Sines and cosines that a task computes at least: about 30 us.
const PAIRS_PER_TASK: usize = 512;

/// A rotation and its table for one step.
pub(crate) struct Turns {
    rope: Rope,
    /// The step that the table belongs to.
    step: u64,
    /// Per row: the cosines of all pairs, then the sines, times the magnitude.
    table: Vec<f32>,
}

impl Turns {
    pub(crate) fn new(rope: Rope) -> Turns {
        Turns {
            rope,
            step: 0,
            table: Vec::new(),
        }
    }

    /// Makes the table that of step `step`, whose rows are `rows`.
    pub(crate) fn prepare(&mut self, pool: &mut Pool, step: u64, rows: &[Row]) {
        if self.step == step {
            return;
        }
        self.step = step;
        let rope = &self.rope;
        let n_pairs = rope.inv_freq.len();
        if n_pairs == 0 {
            return;
        }
        self.table.resize(rows.len() * 2 * n_pairs, 0.0);
        let rows_per_task = PAIRS_PER_TASK.div_ceil(n_pairs);
        pool.for_chunks(
            &mut self.table,
            rows_per_task * 2 * n_pairs,
            &|task, table| {
                let rows = &rows[task * rows_per_task..];
                for (row, table) in rows.iter().zip(table.chunks_exact_mut(2 * n_pairs)) {
                    let (cos, sin) = table.split_at_mut(n_pairs);
                    for j in 0..n_pairs {
                        let angle = f64::from(row.pos) * rope.inv_freq[j];
                        let (s, c) = libm::sincos(angle);
                        cos[j] = c as f32 * rope.magnitude;
                        sin[j] = s as f32 * rope.magnitude;
                    }
                }
            },
        );
    }

    /// Turns every head of `x`, the elements of row `r` of the step.
    pub(crate) fn turn(&self, machine: Available, r: usize, x: &mut [f32], head_dim: usize) {
        let n_pairs = self.rope.inv_freq.len();
        if n_pairs == 0 {
            return;
        }
        let table = &self.table[r * 2 * n_pairs..][..2 * n_pairs];
        let (cos, sin) = table.split_at(n_pairs);
        machine.run(Turn {
            x,
            head_dim,
            pairing: self.rope.pairing,
            cos,
            sin,
        });
    }
}

/// `(a, b)` to `(a * cos - b * sin, a * sin + b * cos)`, each operation rounded.
struct Turn<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    pairing: Pairing,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let n_pairs = self.cos.len();
        for head in self.x.chunks_exact_mut(self.head_dim) {
            let turning = &mut head[..2 * n_pairs];
            match self.pairing {
                Pairing::Neighbours => {
                    let (pairs, _) = turning.as_chunks_mut::<2>();
                    for ((pair, cos), sin) in pairs.iter_mut().zip(self.cos).zip(self.sin) {
                        let [a, b] = *pair;
                        *pair = [a * cos - b * sin, a * sin + b * cos];
                    }
                }
                Pairing::Halves => {
                    let (first, second) = turning.split_at_mut(n_pairs);
                    for j in 0..n_pairs {
                        let (a, b) = (first[j], second[j]);
                        first[j] = a * self.cos[j] - b * self.sin[j];
                        second[j] = a * self.sin[j] + b * self.cos[j];
                    }
                }
            }
        }
    }
}
