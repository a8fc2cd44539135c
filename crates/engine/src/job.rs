//! What a client asks of the service, and what it is told.
//!
//! Plain values that cross threads once: a job goes in, events come out. What a
//! reader would get wrong: a listener that says `Break` hears nothing more, not
//! even that its job has ended.

use crate::engine::{Ending, Generated};
use crate::error::{Error, PromptError};
use crate::sampler::{SampleError, SamplerSettings};
use model::Guide;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A prompt to be continued, once or in several choices.
pub struct Job {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// One for each choice; the prompt is computed once for all.
    pub guides: Vec<Box<dyn Guide>>,
    /// The sampler chain. Each choice draws with its own seed, see
    /// [`crate::choice_seed`].
    pub sampling: SamplerSettings,
    /// Tokens of each choice at most; `None` until the context is full.
    pub max_tokens: Option<usize>,
    /// Report each token's log-probability, under the distribution before the
    /// chain, with as many alternatives.
    pub logprobs: Option<usize>,
    /// Lengths of beginnings of the prompt that later jobs may share, such as
    /// the ends of its messages. The end of the prompt need not be named.
    pub cuts: Vec<usize>,
    /// Use of the prefix cache.
    pub cache: CacheUse,
    /// When it must have ended, waiting included.
    pub deadline: Option<Instant>,
    /// Hears what happens.
    pub receive: Box<dyn Listen>,
}

/// Use of the prefix cache by one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Look the prompt up, and leave the rows for others? Changes no bit of an
    /// answer.
    pub is_on: bool,
    /// Only jobs with the same salt share rows.
    pub salt: Option<Arc<str>>,
}

impl Default for CacheUse {
    fn default() -> CacheUse {
        CacheUse {
            is_on: true,
            salt: None,
        }
    }
}

/// Hears of a job what happens, as it happens, on the engine's thread.
pub trait Listen: Send {
    /// Must return at once. `Break` cancels the job.
    fn event(&mut self, event: Event) -> ControlFlow<()>;
}

impl<F: FnMut(Event) -> ControlFlow<()> + Send> Listen for F {
    fn event(&mut self, event: Event) -> ControlFlow<()> {
        self(event)
    }
}

/// What happened to a job. `Ended` or `Failed` is the last one.
#[derive(Clone, Debug)]
pub enum Event {
    /// It has left the queue.
    Started {
        /// Tokens of the prompt whose rows were found in the cache.
        cached_tokens: usize,
        /// Time in the queue.
        queue: Duration,
    },
    /// A part of the prompt is computed.
    Prefilled {
        /// Tokens whose rows are there, those from the cache included.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token is known.
    Token {
        /// Of which choice.
        choice: usize,
        /// The token.
        generated: Generated,
    },
    /// A choice has ended.
    ChoiceEnded {
        /// Which.
        choice: usize,
        /// Why.
        ending: Ending,
    },
    /// All choices have ended.
    Ended(Timings),
    /// The job has no answer. Tokens that came before are not to be used.
    Failed(Arc<Error>),
}

/// What a job took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to admission.
    pub queue: Duration,
    /// From admission until the prompt was computed.
    pub prefill: Duration,
    /// From the first token to the last, of whichever choice.
    pub decode: Duration,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these: found in the cache.
    pub cached_tokens: usize,
    /// Of these: computed.
    pub prefill_tokens: usize,
    /// Tokens of all choices.
    pub decode_tokens: usize,
    /// Tokens that a drafter proposed.
    pub drafted: usize,
    /// Of these: accepted.
    pub accepted: usize,
    /// How often pages had to be given up and came back or were computed again.
    pub preempted: usize,
}

/// Why a job was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There are as many as the engine may hold.
    #[error("the queue is full: {queue} wait already")]
    QueueFull {
        /// Choices that may wait.
        queue: usize,
    },
    /// The service takes no more jobs.
    #[error("the server is shutting down")]
    Draining,
    /// The engine has failed.
    #[error("the engine has failed: {why}")]
    Unhealthy {
        /// What happened.
        why: String,
    },
    /// The length of the prompt.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// A token of the prompt, or the first that the guide forces, does not exist.
    #[error("token {token} is not in the vocabulary of {n_vocab}")]
    TokenUnknown {
        /// The token id.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// No choice, or more than run together.
    #[error("{found} choices, expected 1 to {most}")]
    Choices {
        /// Choices asked for.
        found: usize,
        /// Sequences that run together.
        most: usize,
    },
    /// The sampler's settings.
    #[error(transparent)]
    Sampler(#[from] SampleError),
}
