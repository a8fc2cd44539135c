//! Why a request ends without an answer, or an engine does not start.

use crate::sampler::SampleError;

/// Why a prompt of some length cannot be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// There is nothing to continue.
    #[error("the prompt has no tokens; at least one is needed to continue from")]
    Empty,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {n_tokens} tokens, but the context holds {n_ctx} and one place must be \
         left for the answer"
    )]
    TooLong {
        /// Tokens of the whole sequence with the prompt.
        n_tokens: usize,
        /// Tokens the context holds.
        n_ctx: usize,
    },
}

impl PromptError {
    /// Checks that a prompt of `n_tokens` can be continued in a context of `n_ctx`.
    ///
    /// # Errors
    /// Why it cannot.
    pub(crate) fn check(n_tokens: usize, n_ctx: usize) -> Result<(), PromptError> {
        match n_tokens {
            0 => Err(PromptError::Empty),
            _ if n_tokens >= n_ctx => Err(PromptError::TooLong { n_tokens, n_ctx }),
            _ => Ok(()),
        }
    }
}

/// Why the engine could not do what a request asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model, its pages or its device.
    #[error(transparent)]
    Model(#[from] model::Error),
    /// The sampler's settings or a row it could not use.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The length of the prompt.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// More context was asked for than the model has.
    #[error("a context of {found} tokens is outside what this model can hold: 2 to {n_ctx}")]
    Context {
        /// Tokens asked for.
        found: usize,
        /// Tokens the model was trained for.
        n_ctx: usize,
    },
    /// The guide lets no token through.
    #[error("the answer cannot go on: {reason}")]
    GuideFailed {
        /// The guide's own words.
        reason: String,
    },
    /// The logits of a row hold a NaN or an infinity.
    #[error(
        "the logits after position {position} are not finite (first at token {token}): the file \
         is damaged, or the prompt drives the model out of its range"
    )]
    NonFiniteLogits {
        /// Position of the row.
        position: usize,
        /// First token whose logit is not finite.
        token: u32,
    },
    /// The pages do not hold one sequence of the context asked for.
    #[error(
        "a context of {n_ctx} tokens needs {wanted} slabs of pages, but the memory for keys and \
         values holds {total}"
    )]
    PoolTooSmall {
        /// Tokens asked for.
        n_ctx: usize,
        /// Slabs that one such sequence needs.
        wanted: usize,
        /// Slabs there are.
        total: usize,
    },
    /// Drafts are to come from a drafter, but the model has none.
    #[error("drafts are to come from a drafter, but none is attached to the model")]
    NoDrafter,
    /// Longer drafts were asked for than the source of drafts makes, or empty ones.
    #[error("drafts of up to {found} tokens, expected 1 to {longest}")]
    DraftLength {
        /// Tokens asked for.
        found: usize,
        /// Tokens of the longest draft.
        longest: usize,
    },
    /// The engine's thread could not be started.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
    /// A bug ended the engine's thread.
    #[error("the engine's thread panicked: {0}")]
    Panicked(String),
}
