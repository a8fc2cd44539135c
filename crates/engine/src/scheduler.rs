//! Who computes how many rows in the next pass: a pure state machine.
//!
//! Sequences arrive, are admitted, are planned into passes, leave. It knows no
//! tokens, no pages and no clock: what a pass costs comes in as a measured
//! model, and whether pages are there is found out by the caller, who pre-empts
//! the newest sequence where they are not.
//!
//! Bounds, each a property test: every running decode gets a row in every pass,
//! so it never waits longer than the pass that is under way; beside decodes the
//! other rows are as many as keep the predicted pass within two decode passes or
//! [`PASS_TIME`], but never fewer than [`Scheduler::min_prefill_rows`]; the prefill
//! that has waited longest is served first. What a reader would get wrong: age
//! decides who keeps its pages, turns decide who is served; they are two orders.

use crate::cost::CostModel;
use std::collections::BTreeSet;
use std::time::Duration;

/// What a pass with decodes in it may take where two decode passes take less.
/// Ten tokens a second is about the speed of a reader.
pub const PASS_TIME: Duration = Duration::from_millis(100);
/// Rows that a prefill advances at least where decodes run. One weight read
/// serves 8 rows at nearly the price of one on every backend.
pub const MIN_PREFILL_ROWS: usize = 8;
/// Rows beside decodes at most.
pub const MAX_PREFILL_ROWS: usize = 512;

/// A job, by order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// A sequence: one choice of a job. The order is that of age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    /// The job.
    pub job: JobId,
    /// Which of its choices.
    pub choice: u32,
}

/// Rows of one sequence in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The sequence.
    pub id: SequenceId,
    /// How many of its next rows.
    pub n_rows: usize,
    /// Is its newest row among them, so that a token follows?
    pub is_last: bool,
    /// Rows of drafted tokens that may follow the newest.
    pub n_drafts: usize,
}

/// A sequence that may be planned.
#[derive(Clone, Copy, Debug)]
struct Running {
    id: SequenceId,
    /// Places it takes: a prompt with several choices holds theirs.
    n_places: usize,
    /// Rows that are known and not computed.
    n_left: usize,
    /// Has a token been sampled since it was admitted?
    is_decoding: bool,
    /// Drafted tokens that it asks for behind its newest.
    n_drafts: usize,
}

/// Waiting and running sequences.
#[derive(Clone, Debug)]
pub struct Scheduler {
    max_rows: usize,
    max_sequences: usize,
    /// By age: sequence and places.
    waiting: BTreeSet<(SequenceId, usize)>,
    /// By turn: who was served last stands last.
    running: Vec<Running>,
}

impl Scheduler {
    /// A scheduler for passes of at most `max_rows` rows over at most
    /// `max_sequences` sequences; fewer where passes have not a row for each
    /// and some for a prefill.
    ///
    /// # Panics
    /// If one of them is 0.
    pub fn new(max_rows: usize, max_sequences: usize) -> Scheduler {
        assert!(max_rows > 0 && max_sequences > 0, "a pass has a row");
        let mut scheduler = Scheduler {
            max_rows,
            max_sequences,
            waiting: BTreeSet::new(),
            running: Vec::new(),
        };
        let most = (max_rows - scheduler.min_prefill_rows()).max(1);
        scheduler.max_sequences = max_sequences.min(most);
        scheduler
    }

    /// Sequences that run at most.
    pub fn max_sequences(&self) -> usize {
        self.max_sequences
    }

    /// Rows that prefills advance in a pass at least, all together, if as many
    /// are left: [`MIN_PREFILL_ROWS`], or half of a pass that is smaller than
    /// two of them.
    pub fn min_prefill_rows(&self) -> usize {
        MIN_PREFILL_ROWS.min(self.max_rows.div_ceil(2))
    }

    /// Number of running sequences.
    pub fn n_running(&self) -> usize {
        self.running.len()
    }

    /// Number of waiting sequences.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The running sequences, in no order.
    pub fn running(&self) -> impl Iterator<Item = SequenceId> {
        self.running.iter().map(|r| r.id)
    }

    /// Is the sequence running?
    pub fn is_running(&self, id: SequenceId) -> bool {
        self.running.iter().any(|r| r.id == id)
    }

    /// A sequence waits for `n_places` places.
    ///
    /// # Panics
    /// If it can never have them.
    pub fn arrive(&mut self, id: SequenceId, n_places: usize) {
        assert!(
            (1..=self.max_sequences).contains(&n_places),
            "{n_places} of {} places",
            self.max_sequences
        );
        self.waiting.insert((id, n_places));
    }

    /// The oldest waiting sequence, if there are places for it. A newer one
    /// never passes it by.
    pub fn next_waiting(&self) -> Option<SequenceId> {
        let &(id, n_places) = self.waiting.first()?;
        let n_taken: usize = self.running.iter().map(|r| r.n_places).sum();
        (n_taken + n_places <= self.max_sequences).then_some(id)
    }

    /// The waiting sequence `id` runs; `n_left` of its rows are to be computed.
    pub fn admit(&mut self, id: SequenceId, n_left: usize) {
        let entry = self.waiting.iter().find(|(waiting, _)| *waiting == id);
        let &(_, n_places) = entry.expect("a waiting sequence");
        self.waiting.remove(&(id, n_places));
        self.running.push(Running {
            id,
            n_places,
            n_left,
            is_decoding: false,
            n_drafts: 0,
        });
    }

    /// In the next pass, `id` asks for rows of `n_drafts` drafted tokens.
    pub fn draft(&mut self, id: SequenceId, n_drafts: usize) {
        self.entry(id).n_drafts = n_drafts;
    }

    /// The rows of the next pass: those of decodes with their drafts, then those
    /// of prefills. Nothing is left out unless the pass is full or as long as it
    /// may be.
    pub fn plan(&mut self, cost: &CostModel) -> Vec<Span> {
        let is_decode = |r: &Running| r.is_decoding && r.n_left > 0;
        let is_prefill = |r: &Running| !r.is_decoding && r.n_left > 0;
        let n_left = |r: &Running| r.n_left;
        let prefill: usize = self
            .running
            .iter()
            .filter(|r| is_prefill(r))
            .map(n_left)
            .sum();
        let n_kept = prefill.min(self.min_prefill_rows());
        let n_decodes = self.share_drafts(n_kept, is_decode);
        let mut n_spare = self.spare_rows(n_decodes, cost);
        let mut spans = Vec::new();
        let mut served = vec![false; self.running.len()];
        for (r, served) in self
            .running
            .iter()
            .zip(&mut served)
            .filter(|(r, _)| is_decode(r))
        {
            // Known rows beyond the one that each decode has: forced tokens.
            let n_more = (r.n_left - 1).min(n_spare - n_kept);
            n_spare -= n_more;
            *served = n_more > 0;
            let mut span = r.span(1 + n_more);
            span.n_drafts = r.n_drafts;
            spans.push(span);
        }
        self.running.iter_mut().for_each(|r| r.n_drafts = 0);
        for (r, served) in self
            .running
            .iter()
            .zip(&mut served)
            .filter(|(r, _)| is_prefill(r))
        {
            let n_rows = r.n_left.min(n_spare);
            if n_rows == 0 {
                break;
            }
            n_spare -= n_rows;
            *served = true;
            spans.push(r.span(n_rows));
        }
        let mut served = served.into_iter();
        let (last, first): (Vec<_>, Vec<_>) = self
            .running
            .drain(..)
            .partition(|_| served.next() == Some(true));
        self.running = first;
        self.running.extend(last);
        spans
    }

    /// Cuts drafts to the rows that a pass has beside one for each decode and
    /// `n_kept` for prefills; the rows of decodes and drafts.
    fn share_drafts(&mut self, n_kept: usize, is_decode: impl Fn(&Running) -> bool) -> usize {
        let n_decodes = self.running.iter().filter(|r| is_decode(r)).count();
        let mut n_free = self.max_rows.saturating_sub(n_decodes + n_kept);
        let mut n_rows = n_decodes;
        for r in &mut self.running {
            // Behind forced tokens there is nothing to draft from.
            let most = if is_decode(r) && r.n_left == 1 {
                n_free
            } else {
                0
            };
            r.n_drafts = r.n_drafts.min(most);
            n_free -= r.n_drafts;
            n_rows += r.n_drafts;
        }
        n_rows
    }

    /// Rows of a pass beside `n_decodes` of decodes and their drafts.
    fn spare_rows(&self, n_decodes: usize, cost: &CostModel) -> usize {
        let most = self.max_rows - n_decodes;
        if n_decodes == 0 {
            return most;
        }
        let least = self.min_prefill_rows().min(most);
        let most = most.min(MAX_PREFILL_ROWS).max(least);
        let Some(decode) = cost.predicted(n_decodes) else {
            return least;
        };
        let limit = PASS_TIME.max(2 * decode);
        let fits = |n: usize| cost.predicted(n_decodes + n).is_some_and(|t| t <= limit);
        // Predictions never fall with the row count.
        let (mut low, mut high) = (least, most);
        while low < high {
            let middle = (low + high).div_ceil(2);
            match fits(middle) {
                true => low = middle,
                false => high = middle - 1,
            }
        }
        low
    }

    /// The next `n_rows` rows of `id` have their keys and values.
    pub fn computed(&mut self, id: SequenceId, n_rows: usize) {
        let running = self.entry(id);
        assert!(n_rows <= running.n_left, "rows that nobody asked for");
        running.n_left -= n_rows;
    }

    /// `n_tokens` more tokens of `id` are known: it decodes.
    pub fn sampled(&mut self, id: SequenceId, n_tokens: usize) {
        let running = self.entry(id);
        running.n_left += n_tokens;
        running.is_decoding = true;
    }

    /// The prompt of all choices of `id`'s job is computed: each goes on alone.
    pub fn branch(&mut self, id: SequenceId) {
        let running = self.entry(id);
        let n_places = std::mem::replace(&mut running.n_places, 1);
        let trunk = *running;
        let branches = (1..n_places as u32).map(|choice| Running {
            id: SequenceId { choice, ..id },
            ..trunk
        });
        self.running.extend(branches);
    }

    /// The newest running sequence: the one to pre-empt or refuse.
    pub fn newest(&self) -> Option<SequenceId> {
        self.running().max()
    }

    /// A running sequence waits again.
    pub fn preempt(&mut self, id: SequenceId) {
        let n_places = self.entry(id).n_places;
        self.leave(id);
        self.waiting.insert((id, n_places));
    }

    /// A sequence is gone, wherever it was.
    pub fn leave(&mut self, id: SequenceId) {
        self.running.retain(|r| r.id != id);
        self.waiting.retain(|&(waiting, _)| waiting != id);
    }

    fn entry(&mut self, id: SequenceId) -> &mut Running {
        let entry = self.running.iter_mut().find(|r| r.id == id);
        entry.expect("a running sequence")
    }
}

impl Running {
    fn span(&self, n_rows: usize) -> Span {
        Span {
            id: self.id,
            n_rows,
            is_last: n_rows == self.n_left,
            n_drafts: 0,
        }
    }
}
