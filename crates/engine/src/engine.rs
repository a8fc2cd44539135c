//! The loop from tokens to tokens: computes what a sequence lacks, samples,
//! asks the guide, goes on.
//!
//! An engine owns the model and the page pool; sequences borrow pages from it.
//! It sees no text: what may come next and where an answer ends is the guide's
//! affair.

use crate::choice::{checked, choose, explained, wanted};
use crate::cost::CostModel;
use crate::error::{Error, PromptError};
use crate::sampler::{Sampler, SamplerSettings};
use crate::sequence::Sequence;
use crate::speculate::{
    Ask, Candidate, Pace, Speculation, SpeculationCounts, SpeculationInfo, Speculator, Verify,
};
use model::{Batch, Constraint, Forward, Guide, PagePool, RowOutput, Verdict, Want};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// A model with its page pool.
pub struct Engine {
    model: Box<dyn Forward>,
    pool: PagePool,
    n_ctx: usize,
    cost: CostModel,
    /// None where speculation is off.
    speculator: Option<Speculator>,
}

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The sampler chain.
    pub sampling: SamplerSettings,
    /// Tokens to generate at most; `None` until the context is full.
    pub max_tokens: Option<usize>,
    /// Report each token's log-probability with as many alternatives.
    pub logprobs: Option<usize>,
}

/// A generated token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generated {
    /// The token.
    pub token: u32,
    /// Its log-probability under the model's own distribution, if asked for.
    pub logprob: Option<f64>,
    /// The most likely tokens there with theirs, if asked for.
    pub top: Vec<(u32, f64)>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The guide said stop.
    Guide,
    /// The request's token budget is used up.
    MaxTokens,
    /// The context is full.
    Context,
    /// The receiver of tokens broke off.
    Cancelled,
    /// The request's time is up. Only a [`crate::Service`] has deadlines.
    Deadline,
}

/// Takes what generation makes, as it is made.
pub trait Receive {
    /// `done` of `total` rows before the first token are computed.
    fn prefilled(&mut self, _done: usize, _total: usize) {}

    /// A token is known. Breaking off ends generation.
    fn token(&mut self, generated: &Generated) -> ControlFlow<()>;
}

impl<F: FnMut(&Generated) -> ControlFlow<()>> Receive for F {
    fn token(&mut self, generated: &Generated) -> ControlFlow<()> {
        self(generated)
    }
}

/// What generation did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Why it ended.
    pub ending: Ending,
    /// Rows computed before the first token.
    pub n_prefill: usize,
    /// Time until the first token was sampled.
    pub prefill: Duration,
    /// Tokens generated.
    pub n_generated: usize,
    /// Time from the first token to the last.
    pub decode: Duration,
    /// What speculation did for it.
    pub speculation: SpeculationCounts,
}

impl Generation {
    /// Prefill rows a second.
    pub fn prefill_rate(&self) -> f64 {
        self.n_prefill as f64 / self.prefill.as_secs_f64().max(1e-9)
    }

    /// Generated tokens a second after the first; 0 if there were fewer than two.
    pub fn decode_rate(&self) -> f64 {
        match self.n_generated {
            0 | 1 => 0.0,
            n => (n - 1) as f64 / self.decode.as_secs_f64().max(1e-9),
        }
    }
}

impl Engine {
    /// An engine whose sequences may have `n_ctx` tokens; `None` for as many
    /// as the model was trained for.
    ///
    /// # Errors
    /// [`Error::Context`].
    pub fn new(model: Box<dyn Forward>, n_ctx: Option<usize>) -> Result<Engine, Error> {
        let n_ctx = n_ctx_of(&*model, n_ctx)?;
        let capacity = model.capacity();
        Ok(Engine {
            pool: PagePool::new(capacity.layout, capacity.max_slabs),
            model,
            n_ctx,
            cost: CostModel::new(),
            speculator: None,
        })
    }

    /// Drafts from now on as `settings` say.
    ///
    /// # Errors
    /// [`Error::NoDrafter`], [`Error::DraftLength`].
    pub fn speculate(&mut self, settings: Speculation) -> Result<(), Error> {
        self.speculator = Speculator::new(&*self.model, settings)?;
        Ok(())
    }

    /// What speculation runs with; `None` where it is off.
    pub fn speculation(&self) -> Option<SpeculationInfo> {
        self.speculator.as_ref().map(Speculator::info)
    }

    /// Why nothing is drafted any more, though speculation was on.
    pub fn speculation_stopped(&self) -> Option<&str> {
        self.speculator.as_ref()?.stopped()
    }

    /// The model.
    pub fn model(&self) -> &dyn Forward {
        &*self.model
    }

    /// Tokens a sequence may have.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// The page pool, for counting.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Computes every token of `sequence` that is not computed yet, in passes
    /// of as many rows as the device takes, and hands the output of each new
    /// row to `each` (position, output), as `want` asks of that position.
    ///
    /// # Errors
    /// [`PromptError::TooLong`], [`Error::NonFiniteLogits`]; page exhaustion and
    /// device errors. The rows of passes before the failed one stay.
    pub fn compute(
        &mut self,
        sequence: &mut Sequence,
        want: impl Fn(usize) -> Option<Want>,
        mut each: impl FnMut(usize, RowOutput),
    ) -> Result<(), Error> {
        if sequence.len() > self.n_ctx {
            return Err(Error::Prompt(PromptError::TooLong {
                n_tokens: sequence.len(),
                n_ctx: self.n_ctx,
            }));
        }
        while sequence.n_computed() < sequence.len() {
            let start = sequence.n_computed();
            let end = sequence.len().min(start + self.model.caps().max_rows);
            let wants: Vec<Option<Want>> = (start..end).map(&want).collect();
            let outputs = self.pass(sequence, &[], &wants)?;
            for (pos, output) in (start..).zip(outputs) {
                if let Some(output) = output {
                    each(pos, output);
                }
            }
        }
        Ok(())
    }

    /// One pass over the next rows of `sequence` and those of `draft` behind them,
    /// one for each of `wants`; the output of each. Rows of the draft are not
    /// accepted. An error leaves the sequence as it was.
    fn pass(
        &mut self,
        sequence: &mut Sequence,
        draft: &[u32],
        wants: &[Option<Want>],
    ) -> Result<Vec<Option<RowOutput>>, Error> {
        let start = sequence.n_computed();
        let n_known = wants.len() - draft.len();
        let mut batch = Batch::default();
        batch.push(0, start as u32, &sequence.tokens[start..start + n_known]);
        batch.push(0, (start + n_known) as u32, draft);
        let wanted = (0..).zip(wants).filter(|(_, want)| want.is_some());
        batch.wanted = wanted.map(|(row, _)| row).collect();
        let wanted: Vec<Want> = wants.iter().copied().flatten().collect();
        let copies = sequence.pages.reserve(&mut self.pool, wants.len() as u32)?;
        let clock = Instant::now();
        let computed = self
            .model
            .copy_pages(&copies)
            .and_then(|()| self.model.pass(&batch, &[&sequence.pages], &wanted))
            .map_err(Error::from)
            .and_then(|outputs| {
                let mut outputs = outputs.into_iter();
                let output = |want: &Option<Want>| want.and_then(|_| outputs.next());
                let outputs: Vec<Option<RowOutput>> = wants.iter().map(output).collect();
                // A drafted row matters only once it is accepted.
                finite(start, outputs[..n_known].iter().map(Option::as_ref))?;
                Ok(outputs)
            });
        let outputs = match computed {
            Ok(outputs) => outputs,
            Err(error) => {
                sequence.pages.drop_reserve(&mut self.pool);
                return Err(error);
            }
        };
        self.cost.measured(wants.len(), clock.elapsed());
        sequence.pages.accept(&mut self.pool, n_known as u32);
        Ok(outputs)
    }

    /// Forgets every token from `len` on.
    ///
    /// # Errors
    /// [`model::Error::WindowReleased`] if keys that the last row kept would see
    /// when it is computed again have left the sliding window; nothing has
    /// changed then.
    ///
    /// # Panics
    /// If the sequence is shorter than `len`.
    pub fn roll_back(&mut self, sequence: &mut Sequence, len: usize) -> Result<(), Error> {
        assert!(len <= sequence.len(), "roll back to a longer sequence");
        if len <= sequence.n_computed() {
            sequence.pages.truncate(&mut self.pool, len as u32)?;
        }
        sequence.tokens.truncate(len);
        Ok(())
    }

    /// Another sequence with the same tokens, sharing its pages.
    pub fn branch(&mut self, sequence: &Sequence) -> Sequence {
        Sequence {
            tokens: sequence.tokens.clone(),
            pages: sequence.pages.branch(&mut self.pool),
        }
    }

    /// Returns a sequence's pages.
    pub fn free(&mut self, mut sequence: Sequence) {
        sequence.pages.clear(&mut self.pool);
    }

    /// Continues `sequence`. Each token goes to `receive` as soon as it is
    /// known; the guide says what may come and where to stop. The last token
    /// is in the sequence, but not computed.
    ///
    /// # Errors
    /// [`Error::Prompt`], [`Error::NonFiniteLogits`], [`model::Error::TokenUnknown`] for a forced
    /// token outside the vocabulary, [`Error::GuideFailed`], and those of the
    /// sampler and the device.
    /// What was generated before an error stays.
    pub fn generate(
        &mut self,
        sequence: &mut Sequence,
        request: &Request,
        guide: &mut dyn Guide,
        receive: &mut dyn Receive,
    ) -> Result<Generation, Error> {
        let sampler = Sampler::new(request.sampling.clone(), self.model.config().n_vocab)?;
        PromptError::check(sequence.len(), self.n_ctx)?;
        let mut done = Generation {
            ending: Ending::MaxTokens,
            n_prefill: sequence.len() - sequence.n_computed(),
            prefill: Duration::ZERO,
            n_generated: 0,
            decode: Duration::ZERO,
            speculation: SpeculationCounts::default(),
        };
        let with = (sampler, guide, receive);
        let generated = self.generate_tokens(sequence, request, with, &mut done);
        sequence.pages.drop_reserve(&mut self.pool);
        generated.map(|()| done)
    }

    fn generate_tokens(
        &mut self,
        sequence: &mut Sequence,
        request: &Request,
        (mut sampler, guide, receive): (Sampler, &mut dyn Guide, &mut dyn Receive),
        done: &mut Generation,
    ) -> Result<(), Error> {
        let n_vocab = self.model.config().n_vocab;
        let mut pace = self.speculator.as_ref().map(Speculator::pace);
        let mut verify = Verify::default();
        let start = Instant::now();
        while request.max_tokens.is_none_or(|max| done.n_generated < max) {
            if sequence.len() == self.n_ctx {
                done.ending = Ending::Context;
                break;
            }
            let constraint = checked(guide.constraint(), n_vocab)
                .map_err(|token| model::Error::TokenUnknown { token, n_vocab })?;
            if verify.newest(sequence.tokens()).is_some() {
                // The last pass has computed the newest token, as a draft.
                let output = verify.newest(sequence.tokens());
                finite(sequence.len() - 1, output)?;
                sequence.pages.accept(&mut self.pool, 1);
            } else {
                self.observe(&verify, sequence, &mut pace, done);
                let asked = (&*guide, &constraint, &sampler);
                verify = self.verify(sequence, request, asked, (&mut pace, done), receive)?;
            }
            let output = verify.newest(sequence.tokens()).flatten();
            let next = choose(
                sequence.tokens(),
                request.logprobs,
                &mut sampler,
                &constraint,
                output,
            );
            let next = next.map_err(|error| explained(error, guide))?;
            sequence.push(&[next.token]);
            done.n_generated += 1;
            match done.n_generated {
                1 => done.prefill = start.elapsed(),
                _ => done.decode = start.elapsed() - done.prefill,
            }
            let verdict = guide.accept(next.token);
            if receive.token(&next).is_break() {
                done.ending = Ending::Cancelled;
                break;
            }
            if verdict == Verdict::Stop {
                done.ending = Ending::Guide;
                break;
            }
        }
        self.observe(&verify, sequence, &mut pace, done);
        Ok(())
    }

    /// Computes what is missing, with a draft behind it where that pays.
    fn verify(
        &mut self,
        sequence: &mut Sequence,
        request: &Request,
        (guide, constraint, sampler): (&dyn Guide, &Constraint, &Sampler),
        (pace, done): (&mut Option<Pace>, &Generation),
        receive: &mut dyn Receive,
    ) -> Result<Verify, Error> {
        let last = sequence.len() - 1;
        if sequence.n_computed() > last {
            // Something computed the newest token already: its logits are gone.
            sequence.pages.reopen_newest(&mut self.pool);
        }
        let first = sequence.n_computed();
        let max_rows = self.model.caps().max_rows;
        while last + 1 - sequence.n_computed() > max_rows {
            self.pass(sequence, &[], &vec![None; max_rows])?;
            receive.prefilled(sequence.n_computed() - first, last + 1 - first);
        }
        let want = wanted(request.logprobs, sampler, constraint);
        let mut verify = Verify::plain(last + 1, want);
        let n_missing = last + 1 - sequence.n_computed();
        if n_missing == 1 && done.n_generated > 0 {
            let n_left = request
                .max_tokens
                .map_or(usize::MAX, |max| max - done.n_generated);
            let most = n_left.min(self.n_ctx - sequence.len()).min(max_rows) - 1;
            let draft = self.draft(sequence, pace, done.n_generated, most)?;
            let n_vocab = self.model.config().n_vocab;
            let asked = (request.logprobs, sampler);
            verify = verify.with_draft(&draft, (guide, constraint), asked, n_vocab);
        }
        let mut wants = vec![None; n_missing - 1];
        wants.extend_from_slice(verify.wants());
        let outputs = self.pass(sequence, verify.draft(), &wants)?;
        verify.take(&mut outputs.into_iter().flatten());
        if first < last {
            receive.prefilled(last + 1 - first, last + 1 - first);
        }
        Ok(verify)
    }

    /// A draft of at most `most` tokens, empty where none pays.
    fn draft(
        &mut self,
        sequence: &Sequence,
        pace: &mut Option<Pace>,
        n_generated: usize,
        most: usize,
    ) -> Result<Vec<u32>, Error> {
        let (Some(speculator), Some(pace)) = (&mut self.speculator, pace) else {
            return Ok(Vec::new());
        };
        let mut candidate = [Candidate {
            pace,
            n_generated,
            most,
        }];
        let n_draft = speculator.lengths(&mut candidate, 0, &self.cost)[0];
        if n_draft == 0 {
            return Ok(Vec::new());
        }
        let asks = [Ask { sequence, n_draft }];
        let (mut drafts, _) = speculator.draft(&mut *self.model, &asks)?;
        Ok(drafts.swap_remove(0))
    }

    /// Learns from a draft whose round is over.
    fn observe(
        &mut self,
        verify: &Verify,
        sequence: &Sequence,
        pace: &mut Option<Pace>,
        done: &mut Generation,
    ) {
        let n_drafted = verify.n_drafted();
        let (Some(speculator), Some(pace)) = (&mut self.speculator, pace) else {
            return;
        };
        if n_drafted == 0 {
            return;
        }
        let n_accepted = verify.n_accepted(sequence.tokens());
        speculator.observe(n_drafted, n_accepted);
        pace.observe(n_drafted, n_accepted);
        done.speculation.add(n_drafted, n_accepted);
    }
}

/// Tokens of a context that was asked for, or of the model's own.
pub(crate) fn n_ctx_of(model: &dyn Forward, asked: Option<usize>) -> Result<usize, Error> {
    let trained = model.config().n_ctx;
    let n_ctx = asked.unwrap_or(trained);
    if n_ctx < 2 || n_ctx > trained {
        return Err(Error::Context {
            found: n_ctx,
            n_ctx: trained,
        });
    }
    Ok(n_ctx)
}

/// An error unless the outputs of the rows from `start` on are finite.
fn finite<'a>(
    start: usize,
    outputs: impl IntoIterator<Item = Option<&'a RowOutput>>,
) -> Result<(), Error> {
    for (position, output) in (start..).zip(outputs) {
        if let Some(&RowOutput::NonFinite { token }) = output {
            return Err(Error::NonFiniteLogits { position, token });
        }
    }
    Ok(())
}
