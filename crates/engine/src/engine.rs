//! The loop from tokens to tokens: computes what a sequence lacks, samples,
//! asks the guide, goes on.
//!
//! An engine owns the model and the page pool; sequences borrow pages from it.
//! It sees no text: what may come next and where an answer ends is the guide's
//! affair.

use crate::choice::{checked, choose, explained, wanted};
use crate::error::{Error, PromptError};
use crate::sampler::{Sampler, SamplerSettings};
use crate::sequence::Sequence;
use model::{Batch, Constraint, Forward, Guide, Outputs, PagePool, RowOutput, Verdict, Want};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// A model with its page pool.
pub struct Engine {
    model: Box<dyn Forward>,
    pool: PagePool,
    n_ctx: usize,
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
        })
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
            self.pass(sequence, &want, &mut each)?;
        }
        Ok(())
    }

    /// One pass over the next rows of `sequence`, as many as the device takes.
    /// An error leaves the sequence as it was.
    fn pass(
        &mut self,
        sequence: &mut Sequence,
        want: impl Fn(usize) -> Option<Want>,
        mut each: impl FnMut(usize, RowOutput),
    ) -> Result<(), Error> {
        let start = sequence.n_computed();
        let end = sequence.len().min(start + self.model.caps().max_rows);
        let n_rows = (end - start) as u32;
        let mut batch = Batch::default();
        batch.push(0, start as u32, &sequence.tokens[start..end]);
        let mut wants = Vec::new();
        for (row, want) in (0..).zip((start..end).map(want)) {
            if let Some(want) = want {
                batch.wanted.push(row);
                wants.push(want);
            }
        }
        let copies = sequence.pages.reserve(&mut self.pool, n_rows)?;
        let computed = self
            .model
            .copy_pages(&copies)
            .and_then(|()| self.model.pass(&batch, &[&sequence.pages], &wants))
            .map_err(Error::from)
            .and_then(|outputs| finite(start, &batch.wanted, outputs));
        let outputs = match computed {
            Ok(outputs) => outputs,
            Err(error) => {
                sequence.pages.drop_reserve(&mut self.pool);
                return Err(error);
            }
        };
        sequence.pages.accept(&mut self.pool, n_rows);
        for (&row, output) in batch.wanted.iter().zip(outputs) {
            each(start + row as usize, output);
        }
        Ok(())
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
        let mut sampler = Sampler::new(request.sampling.clone(), self.model.config().n_vocab)?;
        PromptError::check(sequence.len(), self.n_ctx)?;
        let mut done = Generation {
            ending: Ending::MaxTokens,
            n_prefill: sequence.len() - sequence.n_computed(),
            prefill: Duration::ZERO,
            n_generated: 0,
            decode: Duration::ZERO,
        };
        let start = Instant::now();
        while request.max_tokens.is_none_or(|max| done.n_generated < max) {
            if sequence.len() == self.n_ctx {
                done.ending = Ending::Context;
                break;
            }
            let constraint = guide.constraint();
            let next = self.next_token(sequence, request, &mut sampler, constraint, receive);
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
        Ok(done)
    }

    /// Computes what is missing and chooses the token after it.
    fn next_token(
        &mut self,
        sequence: &mut Sequence,
        request: &Request,
        sampler: &mut Sampler,
        constraint: Constraint,
        receive: &mut dyn Receive,
    ) -> Result<Generated, Error> {
        let n_vocab = self.model.config().n_vocab;
        let constraint = checked(constraint, n_vocab)
            .map_err(|token| model::Error::TokenUnknown { token, n_vocab })?;
        let want = wanted(request.logprobs, sampler, &constraint);
        let last = sequence.len() - 1;
        if sequence.n_computed() > last {
            // Something computed the newest token already: its logits are gone.
            sequence.pages.reopen_newest(&mut self.pool);
        }
        let mut output = None;
        let first = sequence.n_computed();
        while sequence.n_computed() <= last {
            let want_last = |pos| want.filter(|_| pos == last);
            self.pass(sequence, want_last, |_, row| output = Some(row))?;
            if first < last {
                receive.prefilled(sequence.n_computed() - first, last + 1 - first);
            }
        }
        choose(
            sequence.tokens(),
            request.logprobs,
            sampler,
            &constraint,
            output.as_ref(),
        )
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

/// `outputs` of the rows `wanted` of a pass from `start` on, all finite.
fn finite(start: usize, wanted: &[u32], outputs: Outputs) -> Result<Outputs, Error> {
    for (&row, output) in wanted.iter().zip(&outputs) {
        if let RowOutput::NonFinite { token } = *output {
            return Err(Error::NonFiniteLogits {
                position: start + row as usize,
                token,
            });
        }
    }
    Ok(outputs)
}
