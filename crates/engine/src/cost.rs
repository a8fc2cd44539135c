//! What a pass of so many rows takes, as measured on the running machine.
//!
//! Passes are clocked by their padded row count, because passes of one shape
//! run the same launches. What a reader would get wrong: a pass of `n` rows
//! never takes more than `n / m` passes of `m < n` rows, so a large shape that
//! was slow once is not believed for ever; the small shapes that are measured
//! all the time bound it.

use model::padded;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Weight of the newest measurement. Contexts grow while a shape is in use, so
/// old times fade within a few passes; a single outlier moves a time by a third.
const NEWEST: f64 = 1.0 / 3.0;

/// Measured pass times by row count.
#[derive(Clone, Debug, Default)]
pub struct CostModel {
    /// Seconds by padded row count.
    seconds: BTreeMap<usize, f64>,
    /// Row counts that were measured once: that pass may have prepared its shape.
    fresh: BTreeSet<usize>,
}

impl CostModel {
    /// A model that has seen no pass.
    pub fn new() -> CostModel {
        CostModel::default()
    }

    /// Takes the time of a pass of `n_rows` rows.
    pub fn measured(&mut self, n_rows: usize, time: Duration) {
        let (n, time) = (padded(n_rows), time.as_secs_f64());
        if self.fresh.remove(&n) {
            self.seconds.insert(n, time);
            return;
        }
        match self.seconds.get_mut(&n) {
            Some(seconds) => *seconds += (time - *seconds) * NEWEST,
            None => {
                self.seconds.insert(n, time);
                self.fresh.insert(n);
            }
        }
    }

    /// What a pass of `n_rows` rows takes at least: the time of the largest shape
    /// up to it that was measured twice, 0 if there is none.
    pub fn at_least(&self, n_rows: usize) -> Duration {
        let up_to = self.seconds.range(..=padded(n_rows)).rev();
        let mut measured = up_to.filter(|(n, _)| !self.fresh.contains(n));
        let seconds = measured.next().map_or(0.0, |(_, &seconds)| seconds);
        Duration::from_secs_f64(seconds)
    }

    /// The time of a pass of `n_rows` rows: that of its shape, else between its
    /// neighbours, and never less than that of fewer rows. `None` before the
    /// first measurement.
    pub fn predicted(&self, n_rows: usize) -> Option<Duration> {
        let n = padded(n_rows) as f64;
        // The last measured point at or below, with what bounds it.
        let mut below: Option<(f64, f64)> = None;
        for (&m, &time) in &self.seconds {
            let m = m as f64;
            let time = match below {
                Some((fewer, least)) => time.min(least * m / fewer).max(least),
                None => time,
            };
            if m > n {
                let seconds = match below {
                    Some((fewer, least)) => least + (time - least) * (n - fewer) / (m - fewer),
                    None => time,
                };
                return Some(Duration::from_secs_f64(seconds));
            }
            below = Some((m, time));
        }
        below.map(|(m, time)| Duration::from_secs_f64(time * n / m))
    }
}
