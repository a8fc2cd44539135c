//! One pass: plan, pages, drafts, rows, and what follows from each row's output.
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
use crate::speculate::Verify;
use model::kv::PageCopy;
use model::{Batch, Constraint, DeviceError, RowOutput, SequencePages, Verdict, Want};
use std::time::Instant;

impl Worker {
    /// Runs the next pass, if a sequence runs.
    ///
    /// # Errors
    /// What the engine cannot go on from.
    pub(super) fn pass(&mut self) -> Result<(), Error> {
        self.ask_for_drafts();
        let (spans, copies) = self.reserved_spans();
        if spans.is_empty() {
            return Ok(());
        }
        let verified = match self.compute(&spans, &copies) {
            Ok(verified) => verified,
            Err(model::Error::Device(error @ DeviceError::OutOfMemory { .. })) => {
                return self.out_of_memory(&spans, error);
            }
            Err(error) => return Err(error.into()),
        };
        for (span, verify) in spans.into_iter().zip(verified) {
            // An earlier span may have ended this one's job.
            if self.scheduler.is_running(span.id) {
                self.settle(span, &verify);
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
            if let Some(more) = self.reserve(&mut span) {
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

    /// Drafts for the spans, then computes their rows; what came of each.
    fn compute(
        &mut self,
        spans: &[Span],
        copies: &[PageCopy],
    ) -> Result<Vec<Verify>, model::Error> {
        self.model.copy_pages(copies)?;
        let mut verified = self.draft(spans)?;
        let (batch, wants) = self.batch(spans, &verified);
        let of = |span: &Span| {
            let live = &self.jobs[&span.id.job];
            &live.choices[span.id.choice as usize].sequence.pages
        };
        let tables: Vec<&SequencePages> = spans.iter().map(of).collect();
        let start = Instant::now();
        let outputs = self.model.pass(&batch, &tables, &wants)?;
        let time = start.elapsed();
        self.cost.measured(batch.rows.len(), time);
        self.counts.pass_time.observe(time);
        self.counts.passes += 1;
        self.counts.rows += batch.rows.len() as u64;
        let mut outputs = outputs.into_iter();
        verified.iter_mut().for_each(|v| v.take(&mut outputs));
        Ok(verified)
    }

    /// The rows of `spans`, in their order, with what is wanted of them.
    fn batch(&self, spans: &[Span], verified: &[Verify]) -> (Batch, Vec<Want>) {
        let (mut batch, mut wants) = (Batch::default(), Vec::new());
        for ((seq, span), verify) in (0..).zip(spans).zip(verified) {
            let live = &self.jobs[&span.id.job];
            let sequence = &live.choices[span.id.choice as usize].sequence;
            let start = sequence.n_computed();
            let end = start + span.n_rows;
            batch.push(seq, start as u32, &sequence.tokens[start..end]);
            batch.push(seq, end as u32, verify.draft());
            let first = batch.rows.len() - verify.draft().len();
            for (row, want) in (first as u32 - 1..).zip(verify.wants()) {
                if let &Some(want) = want {
                    batch.wanted.push(row);
                    wants.push(want);
                }
            }
        }
        (batch, wants)
    }

    /// What must be read back of the newest row of `id`: enough for all choices
    /// that sample from it.
    pub(super) fn wanted(&self, id: SequenceId) -> Option<Want> {
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

    /// Takes the computed rows of a span, and what follows from the newest ones.
    fn settle(&mut self, span: Span, verify: &Verify) {
        let Span {
            id,
            n_rows,
            is_last,
            ..
        } = span;
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let sequence = &live.choices[id.choice as usize].sequence;
        let len = sequence.n_computed() + n_rows;
        if is_last && self.is_broken(id, verify) {
            return;
        }
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let (n_prompt, is_prompt) = (live.n_prompt, !live.is_branched);
        self.save(id, len, is_prompt && is_last);
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        live.timings.drafted += verify.n_drafted();
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
            self.sample(id, verify);
        }
    }

    /// Fails the job if the newest row of `id` is not finite.
    fn is_broken(&mut self, id: SequenceId, verify: &Verify) -> bool {
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let tokens = live.choices[id.choice as usize].sequence.tokens();
        let Some(Some(&RowOutput::NonFinite { token })) = verify.newest(tokens) else {
            return false;
        };
        let position = tokens.len() - 1;
        // The rows before it may be what it suffers from, and be cached.
        if let Some(key) = &live.key {
            self.cache.forget(&mut self.pool, key, tokens);
        }
        self.fail(id.job, Error::NonFiniteLogits { position, token });
        true
    }

    /// Chooses the next tokens of `id`; of all choices, if its newest row is the
    /// last of their prompt.
    fn sample(&mut self, id: SequenceId, verify: &Verify) {
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
            self.follow(id, verify);
        }
    }

    /// Chooses tokens of `id` for as long as the pass has computed the row before
    /// them: one, and one more for each that was drafted right. Nothing is left
    /// of the rows behind.
    fn follow(&mut self, id: SequenceId, verify: &Verify) {
        let mut n_accepted = 0;
        // It is not running once it has ended, or a choice before it ended the job.
        while self.scheduler.is_running(id) {
            let live = self.jobs.get_mut(&id.job).expect("a running job");
            let choice = live.choice(id);
            let tokens = choice.sequence.tokens();
            let n_now = verify.n_accepted(tokens);
            if n_now > n_accepted {
                self.accept_drafts(id, n_now - n_accepted);
                n_accepted = n_now;
                continue;
            }
            if verify.newest(tokens).is_none() {
                choice.sequence.pages.drop_reserve(&mut self.pool);
                break;
            }
            if self.is_broken(id, verify) {
                return;
            }
            let live = self.jobs.get_mut(&id.job).expect("a running job");
            let logprobs = live.logprobs;
            let choice = live.choice(id);
            let history = choice.sequence.tokens();
            let output = verify.newest(history).flatten();
            let constraint = &choice.constraint;
            match choose(history, logprobs, &mut choice.sampler, constraint, output) {
                Ok(generated) => self.take(id, generated),
                Err(error) => {
                    let error = explained(error, &*choice.guide);
                    return self.fail(id.job, error);
                }
            }
        }
        self.learn(id, verify.n_drafted(), n_accepted);
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
