//! The candidates of one row in descending order, sorted only as far as asked.
//!
//! The order is logit descending, ties to the lower id; both zeros are equal.
//! Almost every chain looks at a few dozen of 202,048 candidates, so only a
//! prefix is extracted and grown on demand. What a reader would get wrong: how
//! far the prefix reaches never changes a result, because positions in the order
//! and the integer masses do not depend on it.

use super::mass::{row_mass, weight};
use std::ops::Range;

/// First prefix that is sorted; later ones grow by the factor below.
const FIRST_PREFIX: usize = 256;
const GROWTH: usize = 8;

/// Candidates of a row. All positions are positions in the descending order.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    /// Logits by token id, minus infinity where a token is no candidate. Only
    /// looked at while `keys` does not hold all candidates.
    pub(super) row: Vec<f32>,
    /// The first candidates in order, see [`key`].
    keys: Vec<u64>,
    len: usize,
}

impl Pool {
    /// Takes what is in `row` as the candidates.
    pub(super) fn open_row(&mut self) {
        self.keys.clear();
        self.len = self.row.iter().filter(|&&l| l > f32::NEG_INFINITY).count();
    }

    /// Takes exactly these candidates, in any order.
    pub(super) fn open_list(&mut self, candidates: impl Iterator<Item = (u32, f32)>) {
        self.keys.clear();
        self.keys.extend(
            candidates
                .filter(|&(_, logit)| logit > f32::NEG_INFINITY)
                .map(|(token, logit)| key(logit, token)),
        );
        self.keys.sort_unstable();
        self.len = self.keys.len();
    }

    /// Number of candidates.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Token and logit at position `i` of the descending order; `i < len`.
    pub(super) fn at(&mut self, i: usize) -> (u32, f32) {
        assert!(i < self.len, "candidate {i} of {}", self.len);
        if i >= self.keys.len() {
            self.sort_prefix((i + 1).max(FIRST_PREFIX).max(self.keys.len() * GROWTH));
        }
        split(self.keys[i])
    }

    /// Sum of the weights of `window`, relative to the window's first logit.
    ///
    /// A window that is longer than the sorted prefix must end at the last candidate.
    pub(super) fn mass(&mut self, window: Range<usize>, temperature: f64) -> u128 {
        let (token, base) = self.at(window.start);
        if window.end <= self.keys.len() {
            return self.keys[window]
                .iter()
                .map(|&k| u128::from(weight(split(k).1, base, temperature)))
                .sum();
        }
        assert_eq!(window.end, self.len, "an unsorted window reaches the end");
        let first = key(base, token);
        row_mass(&self.row, base, temperature, |id, logit| {
            logit > f32::NEG_INFINITY && (window.start == 0 || key(logit, id as u32) >= first)
        })
    }

    /// Token of the highest logit; a pool has at least one candidate.
    pub(super) fn first(&self) -> (u32, f32) {
        if let Some(&key) = self.keys.first() {
            return split(key);
        }
        let mut best = (0, f32::NEG_INFINITY);
        for (token, &logit) in self.row.iter().enumerate() {
            if logit > best.1 {
                best = (token as u32, logit);
            }
        }
        best
    }

    /// Sorts the first `wanted` candidates of the row, or more.
    fn sort_prefix(&mut self, wanted: usize) {
        self.keys.clear();
        // A long prefix is cheaper to sort whole than to select first.
        let wanted = if wanted * 4 >= self.len {
            self.len
        } else {
            wanted
        };
        let room = if wanted == self.len {
            usize::MAX
        } else {
            wanted * 2
        };
        // Everything below the floor is surely outside the prefix.
        let mut floor = f32::MIN;
        for (token, &logit) in self.row.iter().enumerate() {
            if logit < floor {
                continue;
            }
            self.keys.push(key(logit, token as u32));
            if self.keys.len() >= room {
                floor = keep_smallest(&mut self.keys, wanted);
            }
        }
        if self.keys.len() > wanted {
            keep_smallest(&mut self.keys, wanted);
        }
        self.keys.sort_unstable();
    }
}

/// Keeps the `wanted` smallest keys, in no order; returns the logit of the last of them.
fn keep_smallest(keys: &mut Vec<u64>, wanted: usize) -> f32 {
    let (_, &mut last, _) = keys.select_nth_unstable(wanted - 1);
    keys.truncate(wanted);
    split(last).1
}

/// A number that ascends where the logit descends and, at equal logits, with the id.
fn key(logit: f32, token: u32) -> u64 {
    // Adding zero makes -0 and 0 one value.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    u64::from(!ascending) << 32 | u64::from(token)
}

fn split(key: u64) -> (u32, f32) {
    let ascending = !((key >> 32) as u32);
    let bits = if ascending >> 31 == 1 {
        ascending & !(1 << 31)
    } else {
        !ascending
    };
    (key as u32, f32::from_bits(bits))
}
