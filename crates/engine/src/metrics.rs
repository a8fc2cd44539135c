//! What the service counts: plain data, copied out after every pass.
//!
//! Counters only grow, gauges are of the last pass. What a reader would get
//! wrong: `cached_tokens` counts rows that a running sequence took over, not
//! what a lookup found; a prompt that was looked up and then had to wait is
//! counted once, when it runs.

use crate::SpeculationCounts;
use std::time::Duration;

/// Upper bounds of a histogram's buckets in seconds; one more bucket has the rest.
pub const BUCKET_SECONDS: [f64; 18] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
    60.0, 300.0,
];

/// Times by bucket.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// How many in each bucket of [`BUCKET_SECONDS`] alone, then the rest.
    pub counts: [u64; BUCKET_SECONDS.len() + 1],
    /// Sum of all in seconds.
    pub sum_seconds: f64,
}

impl Histogram {
    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Takes one.
    pub(crate) fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BUCKET_SECONDS.partition_point(|&bound| bound < seconds);
        self.counts[bucket] += 1;
        self.sum_seconds += seconds;
    }
}

/// A snapshot of the service.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// Jobs taken.
    pub requests: u64,
    /// Jobs refused, for whatever reason.
    pub refused: u64,
    /// Jobs whose choices all ended by themselves.
    pub completed: u64,
    /// Jobs that were cancelled.
    pub cancelled: u64,
    /// Jobs that ran out of time.
    pub expired: u64,
    /// Jobs that failed.
    pub failed: u64,
    /// Tokens of prompts that were admitted.
    pub prompt_tokens: u64,
    /// Of these: taken over from the cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Prompts looked up.
    pub cache_lookups: u64,
    /// Prompts of which a part was taken over.
    pub cache_hits: u64,
    /// Positions that the cache gave up for room.
    pub cache_evictions: u64,
    /// Sequences that gave up their pages.
    pub preemptions: u64,
    /// Rows computed once more after that.
    pub recomputed_tokens: u64,
    /// Drafts.
    pub speculation: SpeculationCounts,
    /// Why nothing is drafted any more, though speculation was on.
    pub speculation_stopped: Option<String>,
    /// Passes.
    pub passes: u64,
    /// Rows of all passes.
    pub rows: u64,
    /// Sequences that run.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Pages in use, those of the cache included.
    pub pages_used: usize,
    /// Pages that the cache holds.
    pub cache_pages: usize,
    /// Their bytes.
    pub cache_bytes: u64,
    /// Bytes of slabs in use.
    pub kv_used_bytes: u64,
    /// Bytes of all slabs.
    pub kv_capacity_bytes: u64,
    /// From submission to the first token.
    pub first_token: Histogram,
    /// Between two tokens of one choice.
    pub token_interval: Histogram,
    /// Passes.
    pub pass_time: Histogram,
    /// Making the drafts of a pass.
    pub draft_time: Histogram,
}
