//! Log-probabilities of a row, before any stage of the chain.
//!
//! What a reader would get wrong: they are those of the model's own softmax, so
//! temperature, penalties and masks do not show in them, and a token that the
//! chain could not have chosen has one too.

use super::SampleError;
use super::mass::{ln_mass, row_mass};
use super::pool::Pool;

/// The log-probabilities (natural logarithm) of one row of logits.
#[derive(Clone, Debug)]
pub struct LogProbs<'a> {
    logits: &'a [f32],
    log_sum_exp: f64,
}

impl<'a> LogProbs<'a> {
    /// `log_probability(i) = logits[i] - ln(sum over j of exp(logits[j]))`.
    ///
    /// # Errors
    /// [`SampleError::NonFiniteLogits`] for NaN or plus infinity,
    /// [`SampleError::NoCandidate`] where every logit is minus infinity.
    pub fn new(logits: &'a [f32]) -> Result<LogProbs<'a>, SampleError> {
        super::check_finite(logits)?;
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if highest == f32::NEG_INFINITY {
            return Err(SampleError::NoCandidate {
                n_vocab: logits.len(),
            });
        }
        let mass = row_mass(logits, highest, 1.0, |_, _| true);
        Ok(LogProbs {
            logits,
            log_sum_exp: f64::from(highest) + ln_mass(mass),
        })
    }

    /// Logarithm of the sum of the exponentials of all logits.
    pub fn log_sum_exp(&self) -> f64 {
        self.log_sum_exp
    }

    /// Log-probability of `token`; none if it is outside the row.
    pub fn token(&self, token: u32) -> Option<f64> {
        self.logits
            .get(token as usize)
            .map(|&logit| f64::from(logit) - self.log_sum_exp)
    }

    /// The `k` most likely tokens with their log-probabilities, descending, ties
    /// to the lower id; fewer where fewer logits are above minus infinity.
    pub fn top(&self, k: usize) -> Vec<(u32, f64)> {
        let mut pool = Pool::default();
        pool.row.extend_from_slice(self.logits);
        pool.open_row();
        (0..k.min(pool.len()))
            .map(|i| {
                let (token, logit) = pool.at(i);
                (token, f64::from(logit) - self.log_sum_exp)
            })
            .collect()
    }
}
