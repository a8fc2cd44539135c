//! One pass: plan, pages, rows, and what follows from each row's output.
//!
//! What a reader would get wrong: rows go to the cache before they are
//! accepted, because accepting them releases the pages behind the window, which
//! a cut inside the pass still needs.

use super::Worker;
use crate::Error;
use crate::choice::{checked, choose, explained, wanted};
use crate::engine::{Ending, Generated};
use crate::job::Event;
use crate::scheduler::{SequenceId, Span};
use crate::sequence::Sequence;
use model::kv::PageCopy;
use model::{Batch, Constraint, DeviceError, Outputs, RowOutput, SequencePages, Verdict, Want};
use std::time::Instant;

impl Worker {
    /// Runs the next pass, if a sequence runs.
    ///
    /// # Errors
    /// What the engine cannot go on from.
    pub(super) fn pass(&mut self) -> Result<(), Error> {
        let (spans, copies) = self.reserved_spans();
        if spans.is_empty() {
            return Ok(());
        }
        let (batch, wants) = self.batch(&spans);
        let start = Instant::now();
        let outputs = match self.compute(&spans, &batch, &wants, &copies) {
            Ok(outputs) => outputs,
            Err(model::Error::Device(error @ DeviceError::OutOfMemory { .. })) => {
                return self.out_of_memory(&spans, error);
            }
            Err(error) => return Err(error.into()),
        };
        let time = start.elapsed();
        self.cost.measured(batch.rows.len(), time);
        self.counts.pass_time.observe(time);
        self.counts.passes += 1;
        self.counts.rows += batch.rows.len() as u64;
        let mut outputs = batch.wanted.iter().zip(outputs).peekable();
        let mut end = 0;
        for span in spans {
            end += span.n_rows as u32;
            let output = outputs.next_if(|&(&row, _)| row < end);
            // An earlier span may have ended this one's job.
            if self.scheduler.is_running(span.id) {
                self.settle(span, output.as_ref().map(|(_, output)| output));
            }
        }
        Ok(())
    }

    /// The spans of the next pass that have pages, and the copies to make first.
    fn reserved_spans(&mut self) -> (Vec<Span>, Vec<PageCopy>) {
        let mut planned = self.scheduler.plan(&self.cost);
        // Who is older takes pages first, and is never pre-empted for a newer one.
        planned.sort_unstable_by_key(|span| span.id);
        let (mut spans, mut copies) = (Vec::new(), Vec::new());
        for mut span in planned {
            if !self.scheduler.is_running(span.id) {
                continue;
            }
            self.catch_up(&mut span);
            if let Some(more) = self.reserve(span) {
                copies.extend(more);
                spans.push(span);
            }
        }
        let mut kept = spans.iter().map(|span| span.id);
        assert!(
            kept.all(|id| self.scheduler.is_running(id)),
            "a sequence lost its pages to a newer one"
        );
        (spans, copies)
    }

    /// The rows of `spans`, in their order, with what is wanted of them.
    fn batch(&self, spans: &[Span]) -> (Batch, Vec<Want>) {
        let (mut batch, mut wants) = (Batch::default(), Vec::new());
        for (seq, span) in (0..).zip(spans) {
            let live = &self.jobs[&span.id.job];
            let sequence = &live.choices[span.id.choice as usize].sequence;
            let start = sequence.n_computed();
            let tokens = &sequence.tokens[start..start + span.n_rows];
            batch.push(seq, start as u32, tokens);
            if span.is_last
                && let Some(want) = self.wanted(span.id)
            {
                batch.want_last();
                wants.push(want);
            }
        }
        (batch, wants)
    }

    /// What must be read back of the newest row of `id`: enough for all choices
    /// that sample from it.
    fn wanted(&self, id: SequenceId) -> Option<Want> {
        let live = &self.jobs[&id.job];
        if live.max_tokens == Some(0) {
            return None;
        }
        let sampling = match live.is_branched {
            true => &live.choices[id.choice as usize..=id.choice as usize],
            false => &live.choices[..],
        };
        let want = |c: &super::Choice| wanted(live.logprobs, &c.sampler, &c.constraint);
        let mut all = sampling.iter().filter_map(want);
        let first = all.next()?;
        match all.all(|want| want == first) {
            true => Some(first),
            false => Some(Want::Full),
        }
    }

    fn compute(
        &mut self,
        spans: &[Span],
        batch: &Batch,
        wants: &[Want],
        copies: &[PageCopy],
    ) -> Result<Outputs, model::Error> {
        let of = |span: &Span| {
            let live = &self.jobs[&span.id.job];
            &live.choices[span.id.choice as usize].sequence.pages
        };
        let tables: Vec<&SequencePages> = spans.iter().map(of).collect();
        self.model.copy_pages(copies)?;
        self.model.pass(batch, &tables, wants)
    }

    /// The device has less room than the pool has pages: the pool gets smaller,
    /// and it is as if it had no page. The newest sequence gives way, or fails if
    /// it is alone.
    ///
    /// # Errors
    /// The device's, if there is not even room for the shortest sequence.
    fn out_of_memory(&mut self, spans: &[Span], error: DeviceError) -> Result<(), Error> {
        for span in spans {
            let live = self.jobs.get_mut(&span.id.job).expect("a running job");
            let pages = &mut live.choice(span.id).sequence.pages;
            pages.drop_reserve(&mut self.pool);
        }
        // What is left in use was computed, so the device has it.
        self.pool.shrink_to_used();
        let error = Error::Model(error.into());
        if self.pool.max_slabs() < self.pool.layout().slabs_for(2, self.max_rows) {
            return Err(error);
        }
        self.cache.clear(&mut self.pool);
        let newest = self.scheduler.newest().expect("a pass was planned");
        match self.scheduler.n_running() {
            1 => self.start_again(newest, error),
            _ => self.preempt(newest),
        }
        Ok(())
    }

    /// Takes the computed rows of a span, and what follows from the newest one.
    fn settle(&mut self, span: Span, output: Option<&RowOutput>) {
        let Span {
            id,
            n_rows,
            is_last,
        } = span;
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let Sequence { tokens, pages } = &live.choices[id.choice as usize].sequence;
        let len = pages.len() as usize + n_rows;
        if let Some(&RowOutput::NonFinite { token }) = output {
            // The rows before it may be what it suffers from, and be cached.
            if let Some(key) = &live.key {
                self.cache.forget(&mut self.pool, key, tokens);
            }
            let position = len - 1;
            self.fail(id.job, Error::NonFiniteLogits { position, token });
            return;
        }
        let (n_prompt, is_prompt) = (live.n_prompt, !live.is_branched);
        self.save(id, len, is_prompt && is_last);
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let choice = live.choice(id);
        choice.sequence.pages.accept(&mut self.pool, n_rows as u32);
        self.scheduler.computed(id, n_rows);
        let n_again = len.min(choice.n_lost).saturating_sub(len - n_rows);
        self.counts.recomputed_tokens += n_again as u64;
        if is_prompt && is_last {
            live.timings.prefill_tokens = n_prompt - live.timings.cached_tokens;
            let admitted = live.admitted.expect("an admitted job");
            live.timings.prefill = admitted.elapsed();
        }
        if is_prompt {
            let event = Event::Prefilled {
                done: len,
                total: n_prompt,
            };
            if !live.tell(event) {
                self.finish(id.job, Ending::Cancelled);
                return;
            }
            if is_last && live.max_tokens == Some(0) {
                self.finish(id.job, Ending::MaxTokens);
                return;
            }
        }
        if is_last {
            self.sample(id, output);
        }
    }

    /// Chooses the next token of `id`; of all choices, if its newest row is the
    /// last of their prompt.
    fn sample(&mut self, id: SequenceId, output: Option<&RowOutput>) {
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let choices = match live.is_branched {
            true => id.choice..id.choice + 1,
            false => 0..live.choices.len() as u32,
        };
        if !live.is_branched {
            live.is_branched = true;
            let (trunk, branches) = live.choices.split_first_mut().expect("a choice");
            for branch in branches {
                branch.sequence = Sequence {
                    tokens: trunk.sequence.tokens.clone(),
                    pages: trunk.sequence.pages.branch(&mut self.pool),
                };
                branch.n_cut = trunk.n_cut;
            }
            self.scheduler.branch(id);
        }
        for choice in choices {
            let id = SequenceId { choice, ..id };
            if !self.scheduler.is_running(id) {
                // A choice before it has ended the job.
                return;
            }
            let live = self.jobs.get_mut(&id.job).expect("a running job");
            let logprobs = live.logprobs;
            let choice = live.choice(id);
            let history = choice.sequence.tokens();
            let constraint = &choice.constraint;
            match choose(history, logprobs, &mut choice.sampler, constraint, output) {
                Ok(generated) => self.take(id, generated),
                Err(error) => {
                    let error = explained(error, &*choice.guide);
                    return self.fail(id.job, error);
                }
            }
        }
    }

    /// Adds a token to a sequence, and those that the guide forces after it:
    /// they are known without a pass of their own.
    fn take(&mut self, id: SequenceId, mut generated: Generated) {
        let mut n_new = 0;
        let (n_ctx, n_vocab) = (self.n_ctx, self.n_vocab);
        loop {
            let now = Instant::now();
            let live = self.jobs.get_mut(&id.job).expect("a running job");
            let token = generated.token;
            if live.first_token.is_none() {
                live.first_token = Some(now);
                self.counts.first_token.observe(now - live.submitted);
            }
            live.last_token = Some(now);
            live.timings.decode_tokens += 1;
            self.counts.generated_tokens += 1;
            let choice = live.choice(id);
            if let Some(before) = choice.last_token.replace(now) {
                self.counts.token_interval.observe(now - before);
            }
            choice.sequence.push(&[token]);
            choice.n_generated += 1;
            n_new += 1;
            let (n_generated, len) = (choice.n_generated, choice.sequence.len());
            let verdict = choice.guide.accept(token);
            let event = Event::Token {
                choice: id.choice as usize,
                generated,
            };
            if !live.tell(event) {
                return self.finish(id.job, Ending::Cancelled);
            }
            let ending = match verdict {
                Verdict::Stop => Some(Ending::Guide),
                Verdict::Continue if live.max_tokens == Some(n_generated) => {
                    Some(Ending::MaxTokens)
                }
                Verdict::Continue => (len == n_ctx).then_some(Ending::Context),
            };
            if let Some(ending) = ending {
                return self.end_choice(id, ending);
            }
            let logprobs = live.logprobs;
            let choice = live.choice(id);
            choice.constraint = match checked(choice.guide.constraint(), n_vocab) {
                Ok(constraint) => constraint,
                Err(token) => {
                    let error = model::Error::TokenUnknown { token, n_vocab };
                    return self.fail(id.job, error.into());
                }
            };
            match choice.constraint {
                // Others wait meanwhile, so no more at once than a pass takes.
                Constraint::Forced(token) if logprobs.is_none() && n_new < self.max_rows => {
                    generated = Generated {
                        token,
                        ..Generated::default()
                    };
                }
                _ => break,
            }
        }
        self.scheduler.sampled(id, n_new);
    }
}
