//! LOGITS -> TOKEN: the sampler chain.
//!
//! Order, with the names and meanings of llama.cpp's public documentation: logit
//! bias, token mask, repeat / frequency / presence penalty, DRY, top-n-sigma,
//! top-k, locally typical, top-p, min-p, XTC, temperature, draw. The result is a
//! function of (settings, logits, position, history, mask) and has the same bits
//! on every machine: exponentials are our own, sums are integers, randomness is
//! counter-based. What a reader would get wrong: a [`Sampler`] holds buffers, no
//! state. Calls may come in any order, and a clone may answer for the original.

mod chain;
mod draw;
mod dry;
mod logprobs;
mod mass;
mod penalties;
mod pool;
mod settings;

pub use draw::{Stream, choice_seed, draw, philox4x32_10};
pub use logprobs::LogProbs;
pub use settings::{MAX_TOP_CANDIDATES, RowsNeeded, SamplerSettings};

use dry::{Breakers, DryScratch};
use model::TokenMask;
use penalties::Tally;
use pool::Pool;

/// Why no token could be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A setting is outside its range.
    #[error("sampler setting {field}: found {found}, allowed is {allowed}")]
    OutOfRange {
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// The range, in words.
        allowed: &'static str,
    },
    /// A DRY breaker has no tokens.
    #[error("sampler setting dry_breakers: breaker {index} is empty, allowed is one token or more")]
    EmptyBreaker {
        /// Place in the list.
        index: usize,
    },
    /// A token id is not in the vocabulary.
    #[error("{place}: found token {token}, allowed is 0 to {}", .n_vocab - 1)]
    TokenOutOfVocab {
        /// Where the id stands.
        place: &'static str,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// The vocabulary has no tokens or more than token ids can name.
    #[error(
        "vocabulary of the sampler: found {found} tokens, allowed is 1 to {}",
        u32::MAX
    )]
    VocabSize {
        /// Its size.
        found: usize,
    },
    /// A row of logits has another length than the vocabulary.
    #[error("row of logits: found {found} values, expected {expected}")]
    RowLength {
        /// Its length.
        found: usize,
        /// Size of the vocabulary.
        expected: usize,
    },
    /// A token mask speaks of another vocabulary.
    #[error("token mask: found {found} tokens, expected {expected}")]
    MaskLength {
        /// Its length.
        found: usize,
        /// Size of the vocabulary.
        expected: usize,
    },
    /// A list of top candidates has another length than the chain asked for.
    #[error("top candidates: found {found}, expected {expected}")]
    CandidateCount {
        /// Its length.
        found: usize,
        /// What [`SamplerSettings::rows_needed`] says, at most the vocabulary.
        expected: usize,
    },
    /// The settings need every logit, but only the top ones were given.
    #[error("top candidates: these sampler settings need the full row of logits")]
    FullRowNeeded,
    /// A logit is NaN or plus infinity: the pass that made the row is broken.
    #[error(
        "logits are not finite: found {value} at token {index}, expected finite or minus infinity"
    )]
    NonFiniteLogits {
        /// The first such token.
        index: usize,
        /// Its logit.
        value: f32,
    },
    /// The mask forbids every token.
    #[error("token mask: it allows none of {n_vocab} tokens, expected at least one")]
    EmptyMask {
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// Every token has a logit of minus infinity after bias and mask.
    #[error("logits: none of {n_vocab} tokens is above minus infinity after bias and mask")]
    NoCandidate {
        /// Size of the vocabulary.
        n_vocab: usize,
    },
}

/// What the chain chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its probability in the draw, that is after all stages; 1 where nothing was
    /// drawn. For the model's own probability see [`LogProbs`].
    pub probability: f64,
    /// Candidates that the stages left; 1 for a greedy choice.
    pub n_candidates: usize,
}

/// A checked chain for one vocabulary, with its buffers.
#[derive(Clone, Debug)]
pub struct Sampler {
    settings: SamplerSettings,
    n_vocab: usize,
    breakers: Breakers,
    pool: Pool,
    counts: Tally,
    dry: DryScratch,
}

impl Sampler {
    /// A chain over `n_vocab` tokens.
    ///
    /// # Errors
    /// Those of [`SamplerSettings::validate`], and
    /// [`SampleError::TokenOutOfVocab`] for a biased token or a token of a DRY
    /// breaker that the vocabulary lacks.
    pub fn new(settings: SamplerSettings, n_vocab: usize) -> Result<Sampler, SampleError> {
        settings.validate()?;
        if n_vocab == 0 || n_vocab > u32::MAX as usize {
            return Err(SampleError::VocabSize { found: n_vocab });
        }
        let biased = settings.logit_bias.iter().map(|&(token, _)| token);
        check_tokens("sampler setting logit_bias", biased, n_vocab)?;
        let breaking = settings.dry_breakers.iter().flatten().copied();
        check_tokens("sampler setting dry_breakers", breaking, n_vocab)?;
        Ok(Sampler {
            breakers: Breakers::new(&settings.dry_breakers),
            settings,
            n_vocab,
            pool: Pool::default(),
            counts: Tally::default(),
            dry: DryScratch::default(),
        })
    }

    /// The settings.
    pub fn settings(&self) -> &SamplerSettings {
        &self.settings
    }

    /// Draws by another seed from now on.
    pub fn reseed(&mut self, seed: u64) {
        self.settings.seed = seed;
    }

    /// Chooses the token at `position` from the full row `logits` `[n_vocab]`.
    ///
    /// `history` is all tokens before `position`, the prompt included; penalties
    /// and DRY look at its end. Minus infinity in `logits` is a forbidden token.
    ///
    /// # Errors
    /// A row, mask or history that does not fit the vocabulary; NaN or plus
    /// infinity anywhere in the row, forbidden tokens included; a mask, bias or
    /// row that leaves no candidate.
    pub fn sample(
        &mut self,
        logits: &[f32],
        position: u64,
        history: &[u32],
        mask: Option<&TokenMask>,
    ) -> Result<Sampled, SampleError> {
        if logits.len() != self.n_vocab {
            return Err(SampleError::RowLength {
                found: logits.len(),
                expected: self.n_vocab,
            });
        }
        check_finite(logits)?;
        self.pool.row.clear();
        self.pool.row.extend_from_slice(logits);
        self.change_logits(history, mask)?;
        self.pool.open_row();
        if self.pool.len() == 0 {
            return Err(SampleError::NoCandidate {
                n_vocab: self.n_vocab,
            });
        }
        if self.settings.is_greedy() {
            return Ok(self.greedy());
        }
        if self.settings.top_n_sigma > 0.0 {
            let keep = self.settings.min_keep.max(1) as usize;
            chain::cut_sigma(&mut self.pool, self.settings.top_n_sigma, keep);
        }
        Ok(chain::choose(&mut self.pool, &self.settings, position))
    }

    /// Chooses the token at `position` from the highest logits alone.
    ///
    /// `candidates` are (token, logit) in any order, as many as
    /// [`SamplerSettings::rows_needed`] says without a mask, ties at the end to
    /// the lower id. The result equals that of [`Sampler::sample`] on the row.
    ///
    /// # Errors
    /// [`SampleError::FullRowNeeded`] where the settings look at more,
    /// [`SampleError::CandidateCount`] for another number of candidates, and the
    /// errors of [`Sampler::sample`] for what is in them.
    pub fn sample_top(
        &mut self,
        candidates: &[(u32, f32)],
        position: u64,
    ) -> Result<Sampled, SampleError> {
        let k = match self.settings.rows_needed(None) {
            RowsNeeded::Argmax => 1,
            RowsNeeded::TopK(k) => k as usize,
            RowsNeeded::Full => return Err(SampleError::FullRowNeeded),
        };
        if candidates.len() != k.min(self.n_vocab) {
            return Err(SampleError::CandidateCount {
                found: candidates.len(),
                expected: k.min(self.n_vocab),
            });
        }
        let tokens = candidates.iter().map(|&(token, _)| token);
        check_tokens("top candidates", tokens, self.n_vocab)?;
        if let Some(&(token, value)) = candidates.iter().find(|&&(_, l)| is_broken(l)) {
            return Err(SampleError::NonFiniteLogits {
                index: token as usize,
                value,
            });
        }
        self.pool.open_list(candidates.iter().copied());
        if self.pool.len() == 0 {
            return Err(SampleError::NoCandidate {
                n_vocab: self.n_vocab,
            });
        }
        if self.settings.is_greedy() {
            return Ok(self.greedy());
        }
        Ok(chain::choose(&mut self.pool, &self.settings, position))
    }

    /// Bias, mask, penalties and DRY, on the row in the pool.
    fn change_logits(
        &mut self,
        history: &[u32],
        mask: Option<&TokenMask>,
    ) -> Result<(), SampleError> {
        let row = &mut self.pool.row;
        penalties::apply_bias(row, &self.settings.logit_bias);
        if let Some(mask) = mask {
            penalties::apply_mask(row, mask)?;
        }
        if self.settings.penalizes() {
            let seen = penalties::recent(history, self.settings.repeat_last_n);
            check_tokens("history", seen.iter().copied(), self.n_vocab)?;
            penalties::apply_penalties(row, &self.settings, seen, &mut self.counts);
        }
        if self.settings.uses_dry() {
            let seen = penalties::recent(history, self.settings.dry_penalty_last_n);
            check_tokens("history", seen.iter().copied(), self.n_vocab)?;
            dry::apply_dry(row, &self.settings, &self.breakers, seen, &mut self.dry);
        }
        Ok(())
    }

    fn greedy(&self) -> Sampled {
        let (token, _) = self.pool.first();
        Sampled {
            token,
            probability: 1.0,
            n_candidates: 1,
        }
    }
}

/// Neither a number nor the minus infinity of a forbidden token.
fn is_broken(logit: f32) -> bool {
    logit.is_nan() || logit == f32::INFINITY
}

fn check_finite(logits: &[f32]) -> Result<(), SampleError> {
    match logits.iter().position(|&logit| is_broken(logit)) {
        Some(index) => Err(SampleError::NonFiniteLogits {
            index,
            value: logits[index],
        }),
        None => Ok(()),
    }
}

fn check_tokens(
    place: &'static str,
    tokens: impl IntoIterator<Item = u32>,
    n_vocab: usize,
) -> Result<(), SampleError> {
    match tokens.into_iter().find(|&t| t as usize >= n_vocab) {
        Some(token) => Err(SampleError::TokenOutOfVocab {
            place,
            token,
            n_vocab,
        }),
        None => Ok(()),
    }
}
