//! How the output of one row becomes a token: the one rule of the synchronous
//! loop and of the service.
//!
//! What a reader would get wrong: log-probabilities want the whole row even
//! where the token is forced, so a request with them never skips a row.

use crate::Error;
use crate::engine::Generated;
use crate::sampler::{LogProbs, RowsNeeded, SampleError, Sampler};
use model::{Constraint, Guide, RowOutput, TokenMask, Want};

/// The constraint; as an error, the token that it forces and that does not exist.
pub(crate) fn checked(constraint: Constraint, n_vocab: usize) -> Result<Constraint, u32> {
    match constraint {
        Constraint::Forced(token) if token as usize >= n_vocab => Err(token),
        other => Ok(other),
    }
}

/// What must be read back of the newest row; `None` if its token is known.
pub(crate) fn wanted(
    logprobs: Option<usize>,
    sampler: &Sampler,
    constraint: &Constraint,
) -> Option<Want> {
    if logprobs.is_some() {
        return Some(Want::Full);
    }
    let mask = match constraint {
        Constraint::Forced(_) => return None,
        Constraint::Masked(mask) => Some(mask),
        Constraint::Free => None,
    };
    Some(match sampler.settings().rows_needed(mask) {
        RowsNeeded::Argmax => Want::Argmax,
        RowsNeeded::TopK(k) => Want::TopK {
            k: k as usize,
            logsumexp: false,
        },
        RowsNeeded::Full => Want::Full,
    })
}

/// The error; where the guide says why no token fits, with its reason.
pub(crate) fn explained(error: Error, guide: &dyn Guide) -> Error {
    match (&error, guide.failure()) {
        (Error::Sample(SampleError::EmptyMask { .. }), Some(reason)) => {
            Error::GuideFailed { reason }
        }
        _ => error,
    }
}

/// The token that follows `history`, from the output of its newest row: at
/// least what [`wanted`] says, nothing only where it says nothing.
///
/// # Errors
/// Those of the sampler.
pub(crate) fn choose(
    history: &[u32],
    logprobs: Option<usize>,
    sampler: &mut Sampler,
    constraint: &Constraint,
    output: Option<&RowOutput>,
) -> Result<Generated, Error> {
    let position = history.len() as u64;
    let (forced, mask): (_, Option<&TokenMask>) = match constraint {
        Constraint::Free => (None, None),
        Constraint::Forced(token) => (Some(*token), None),
        Constraint::Masked(mask) => (None, Some(mask)),
    };
    let token = match (forced, output) {
        (Some(token), _) => token,
        (None, None) => unreachable!("a row is wanted where nothing is forced"),
        (None, Some(RowOutput::NonFinite { .. })) => {
            unreachable!("the row is an error of its request")
        }
        (None, Some(RowOutput::Argmax { token, .. })) => *token,
        (None, Some(RowOutput::TopK { top, .. })) => sampler.sample_top(top, position)?.token,
        (None, Some(RowOutput::Full(logits))) => {
            sampler.sample(logits, position, history, mask)?.token
        }
    };
    let (mut logprob, mut top) = (None, Vec::new());
    if let (Some(k), Some(RowOutput::Full(logits))) = (logprobs, output) {
        let logprobs = LogProbs::new(logits)?;
        logprob = logprobs.token(token);
        top = logprobs.top(k);
    }
    Ok(Generated {
        token,
        logprob,
        top,
    })
}
