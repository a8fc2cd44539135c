//! Changes to single logits: bias, mask, and the three penalties on recent tokens.
//!
//! Repeat penalty: Keskar et al., "CTRL", arXiv 1909.05858, with negative logits
//! multiplied so that the penalty always lowers. Frequency and presence penalty:
//! subtracted, as in OpenAI's API reference. What a reader would get wrong: the
//! history is the whole sequence, prompt included, and a token that is no
//! candidate (minus infinity) stays none.

use super::{SampleError, SamplerSettings};
use model::TokenMask;

/// `logit - amount`, kept finite; minus infinity stays.
pub(super) fn lowered(logit: f32, amount: f32) -> f32 {
    if logit == f32::NEG_INFINITY {
        logit
    } else {
        (logit - amount).clamp(f32::MIN, f32::MAX)
    }
}

/// Adds the bias; minus infinity forbids the token.
pub(super) fn apply_bias(row: &mut [f32], logit_bias: &[(u32, f32)]) {
    for &(token, bias) in logit_bias {
        let logit = &mut row[token as usize];
        *logit = if bias == f32::NEG_INFINITY {
            bias
        } else {
            lowered(*logit, -bias)
        };
    }
}

/// Forbids every token that the mask does not allow.
pub(super) fn apply_mask(row: &mut [f32], mask: &TokenMask) -> Result<(), SampleError> {
    if mask.n_vocab() != row.len() {
        return Err(SampleError::MaskLength {
            found: mask.n_vocab(),
            expected: row.len(),
        });
    }
    let mut is_empty = true;
    for (token, logit) in row.iter_mut().enumerate() {
        if mask.is_allowed(token as u32) {
            is_empty = false;
        } else {
            *logit = f32::NEG_INFINITY;
        }
    }
    if is_empty {
        return Err(SampleError::EmptyMask { n_vocab: row.len() });
    }
    Ok(())
}

/// The newest `last_n` tokens of `history`; all of them for -1.
pub(super) fn recent(history: &[u32], last_n: i32) -> &[u32] {
    match usize::try_from(last_n) {
        Ok(n) => &history[history.len().saturating_sub(n)..],
        Err(_) => history,
    }
}

/// A number per token of the vocabulary that costs nothing to clear.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    values: Vec<u32>,
    touched: Vec<u32>,
}

impl Tally {
    /// Room for `n_vocab` tokens, all at zero.
    pub(super) fn reset(&mut self, n_vocab: usize) {
        self.values.resize(n_vocab, 0);
        for token in self.touched.drain(..) {
            self.values[token as usize] = 0;
        }
    }

    /// Replaces the value of `token`; a token is touched by a value above zero.
    pub(super) fn update(&mut self, token: u32, change: impl Fn(u32) -> u32) {
        let value = &mut self.values[token as usize];
        if *value == 0 {
            self.touched.push(token);
        }
        *value = change(*value);
    }

    /// Touched tokens with their values, in the order of their first touch.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.touched
            .iter()
            .map(|&token| (token, self.values[token as usize]))
    }
}

/// Repeat, frequency and presence penalty, in this order, on every token of `seen`.
pub(super) fn apply_penalties(
    row: &mut [f32],
    settings: &SamplerSettings,
    seen: &[u32],
    counts: &mut Tally,
) {
    counts.reset(row.len());
    for &token in seen {
        counts.update(token, |count| count + 1);
    }
    for (token, count) in counts.iter() {
        let logit = &mut row[token as usize];
        let scaled = if *logit > 0.0 {
            *logit / settings.repeat_penalty
        } else {
            *logit * settings.repeat_penalty
        };
        // A finite logit times a penalty may overflow; it stays a candidate.
        let scaled = if *logit == f32::NEG_INFINITY {
            *logit
        } else {
            scaled.clamp(f32::MIN, f32::MAX)
        };
        let amount = count as f32 * settings.frequency_penalty + settings.presence_penalty;
        *logit = lowered(scaled, amount);
    }
}
