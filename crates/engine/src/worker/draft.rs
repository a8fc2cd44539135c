//! Drafts of the next pass: who asks, what is proposed, what came of it.
//!
//! What a reader would get wrong: drafts are asked for before a pass is planned
//! and made after its pages are reserved, because a drafter reads the pages of
//! its sequence, and copies of shared pages must have been made.

use super::Worker;
use crate::scheduler::{SequenceId, Span};
use crate::speculate::{Ask, Candidate, Verify};

impl Worker {
    /// Tells the scheduler how many drafted tokens each decode asks for.
    pub(super) fn ask_for_drafts(&mut self) {
        let Some(speculator) = &mut self.speculator else {
            return;
        };
        let (mut ids, mut candidates) = (Vec::new(), Vec::new());
        let mut n_others = 0;
        for (&job, live) in self.jobs.iter_mut().filter(|(_, live)| live.is_branched) {
            let max_tokens = live.max_tokens.unwrap_or(usize::MAX);
            for (choice, place) in live.choices.iter_mut().zip(0..) {
                let id = SequenceId { job, choice: place };
                let len = choice.sequence.len();
                let n_left = len - choice.sequence.n_computed();
                if !self.scheduler.is_running(id) {
                    continue;
                }
                if n_left != 1 {
                    n_others += 1;
                    continue;
                }
                let n_to_come = (max_tokens - choice.n_generated).min(self.n_ctx - len);
                ids.push(id);
                candidates.push(Candidate {
                    pace: choice.pace.get_or_insert_with(|| speculator.pace()),
                    n_generated: choice.n_generated,
                    most: n_to_come - 1,
                });
            }
        }
        let lengths = speculator.lengths(&mut candidates, n_others, &self.cost);
        for (id, length) in ids.into_iter().zip(lengths) {
            self.scheduler.draft(id, length);
        }
    }

    /// For each span what is wanted of its newest rows, with its draft.
    ///
    /// # Errors
    /// Those of the model.
    pub(super) fn draft(&mut self, spans: &[Span]) -> Result<Vec<Verify>, model::Error> {
        let mut drafts = self.proposed(spans)?.into_iter();
        let verify = |span: &Span| {
            if !span.is_last {
                return Verify::default();
            }
            let live = &self.jobs[&span.id.job];
            let choice = &live.choices[span.id.choice as usize];
            let plain = Verify::plain(choice.sequence.len(), self.wanted(span.id));
            match span.n_drafts {
                0 => plain,
                _ => plain.with_draft(
                    &drafts.next().expect("a draft for each that asked"),
                    (&*choice.guide, &choice.constraint),
                    (live.logprobs, &choice.sampler),
                    self.n_vocab,
                ),
            }
        };
        Ok(spans.iter().map(verify).collect())
    }

    /// The drafts of those `spans` that have room for one.
    fn proposed(&mut self, spans: &[Span]) -> Result<Vec<Vec<u32>>, model::Error> {
        let ask = |span: &Span| {
            let live = &self.jobs[&span.id.job];
            Ask {
                sequence: &live.choices[span.id.choice as usize].sequence,
                n_draft: span.n_drafts,
            }
        };
        let asking = spans.iter().filter(|span| span.n_drafts > 0);
        let asks: Vec<Ask<'_>> = asking.map(ask).collect();
        let Some(speculator) = self.speculator.as_mut().filter(|_| !asks.is_empty()) else {
            return Ok(Vec::new());
        };
        let (drafts, time) = speculator.draft(&mut *self.model, &asks)?;
        self.counts.draft_time.observe(time);
        Ok(drafts)
    }

    /// Takes the next `n_rows` rows of `id`, all drafted right.
    pub(super) fn accept_drafts(&mut self, id: SequenceId, n_rows: usize) {
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let len = live.choice(id).sequence.n_computed() + n_rows;
        self.save(id, len, false);
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        live.timings.accepted += n_rows;
        let pages = &mut live.choice(id).sequence.pages;
        pages.accept(&mut self.pool, n_rows as u32);
        self.scheduler.computed(id, n_rows);
    }

    /// Takes the outcome of a draft of `id`, which may have ended by now.
    pub(super) fn learn(&mut self, id: SequenceId, n_drafted: usize, n_accepted: usize) {
        let Some(speculator) = self.speculator.as_mut().filter(|_| n_drafted > 0) else {
            return;
        };
        speculator.observe(n_drafted, n_accepted);
        if let Some(live) = self.jobs.get_mut(&id.job)
            && let Some(pace) = &mut live.choice(id).pace
        {
            pace.observe(n_drafted, n_accepted);
        }
    }
}
