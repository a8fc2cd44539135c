//! Reading rows of logits back: the same answers as [`model::select`], sooner.
//!
//! The largest logits are found among blocks of the row: what is below the k-th
//! largest block maximum is not among the k largest. The order of the sums of
//! log-sum-exp is the specification's.

use crate::pool::Pool;
use model::{RowOutput, Want};

/// Logits of a block.
const BLOCK: usize = 64;

/// Exponentials that a task computes: about 50 us.
const EXPONENTIALS_PER_TASK: usize = 8192;

/// Buffers that are kept, so that nothing is allocated but the answers.
#[derive(Default)]
pub(crate) struct Selector {
    maxima: Vec<f32>,
    exponentials: Vec<f64>,
}

impl Selector {
    /// What `want` asks of a row of logits.
    pub(crate) fn select(&mut self, pool: &mut Pool, logits: &[f32], want: Want) -> RowOutput {
        if let Some(token) = first_non_finite(logits) {
            return RowOutput::NonFinite { token };
        }
        match want {
            Want::Argmax => {
                let (token, logit) = largest(logits);
                RowOutput::Argmax { token, logit }
            }
            Want::TopK { k, logsumexp } => RowOutput::TopK {
                top: self.top(logits, k),
                logsumexp: logsumexp.then(|| self.log_sum_exp(pool, logits)),
            },
            Want::Full => RowOutput::Full(logits.to_vec()),
        }
    }

    /// The `k` largest, largest first, ties to the lower id.
    fn top(&mut self, logits: &[f32], k: usize) -> Vec<(u32, f32)> {
        // Adding 0 makes the two zeros one.
        let order = |v: f32| v + 0.0;
        let better =
            |a: &(u32, f32), b: &(u32, f32)| order(b.1).total_cmp(&order(a.1)).then(a.0.cmp(&b.0));
        let mut floor = f32::NEG_INFINITY;
        if k > 0 && k <= logits.len() / BLOCK / 2 {
            self.maxima.clear();
            self.maxima.extend(logits.chunks(BLOCK).map(maximum));
            let at = self.maxima.len() - k;
            floor = *self.maxima.select_nth_unstable_by(at, f32::total_cmp).1;
        }
        let ids = (0..).zip(logits.iter().copied());
        let mut top: Vec<(u32, f32)> = ids.filter(|&(_, v)| v >= floor).collect();
        let k = k.min(top.len());
        if k > 0 && k < top.len() {
            top.select_nth_unstable_by(k - 1, better);
        }
        top.truncate(k);
        top.sort_unstable_by(better);
        top
    }

    /// `ln(sum(exp(x)))`, accumulated in f64 in ascending order.
    fn log_sum_exp(&mut self, pool: &mut Pool, logits: &[f32]) -> f32 {
        let max = maximum(logits);
        self.exponentials.resize(logits.len(), 0.0);
        pool.for_chunks(
            &mut self.exponentials,
            EXPONENTIALS_PER_TASK,
            &|task, out| {
                let x = &logits[task * EXPONENTIALS_PER_TASK..];
                for (out, x) in out.iter_mut().zip(x) {
                    *out = f64::from(x - max).exp();
                }
            },
        );
        let sum: f64 = self.exponentials.iter().sum();
        (f64::from(max) + sum.ln()) as f32
    }
}

/// First token whose logit is not finite.
fn first_non_finite(logits: &[f32]) -> Option<u32> {
    const EXPONENT: u32 = 0x7f80_0000;
    let is_finite = |block: &[f32]| {
        let bad = block
            .iter()
            .map(|v| u32::from(v.to_bits() & EXPONENT == EXPONENT));
        bad.fold(0, |a, b| a | b) == 0
    };
    let (index, block) = logits
        .chunks(BLOCK)
        .enumerate()
        .find(|(_, block)| !is_finite(block))?;
    let inside = block.iter().position(|v| !v.is_finite())?;
    Some((index * BLOCK + inside) as u32)
}

/// The largest of finite values; negative infinity of none.
fn maximum(x: &[f32]) -> f32 {
    // Sixteen maxima side by side: one would wait for itself.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (whole, rest) = x.as_chunks::<16>();
    for x in whole {
        for l in 0..16 {
            lanes[l] = if x[l] > lanes[l] { x[l] } else { lanes[l] };
        }
    }
    let all = lanes.iter().chain(rest).copied();
    all.fold(f32::NEG_INFINITY, f32::max)
}

/// The first token with the largest logit.
fn largest(logits: &[f32]) -> (u32, f32) {
    let max = maximum(logits);
    match logits.iter().position(|&v| v == max) {
        Some(token) => (token as u32, logits[token]),
        None => (0, f32::NEG_INFINITY),
    }
}
