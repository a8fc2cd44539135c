//! What a request may ask of the sampler, with the ranges that are checked.
//!
//! Names and meanings are those of llama.cpp's public documentation of its
//! sampling parameters. The defaults here are neutral: every stage is off and
//! the token is drawn from the softmax of the logits. What a reader would get
//! wrong: the stage order is fixed by the chain, not by the order of the fields.

use super::SampleError;
use model::TokenMask;
use std::fmt::Display;

/// The most candidates that a backend reads back for [`RowsNeeded::TopK`].
pub const MAX_TOP_CANDIDATES: u32 = 256;

/// Settings of one sequence's sampler chain.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerSettings {
    /// Divides the logits before the draw; 0 or less always picks the most
    /// likely token after bias, mask, penalties and DRY. 1 is neutral.
    pub temperature: f32,
    /// The temperature moves in `temperature - range ..= temperature + range`
    /// with the entropy of the candidates; 0 is off.
    pub dynatemp_range: f32,
    /// Power of the normalized entropy in the dynamic temperature.
    pub dynatemp_exponent: f32,
    /// Keeps the `top_k` most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keeps the most likely tokens whose probabilities add up to `top_p`; 1 is off.
    pub top_p: f32,
    /// Keeps tokens of at least `min_p` times the highest probability; 0 is off.
    pub min_p: f32,
    /// Keeps the tokens of the most typical surprisal with this mass; 1 is off.
    pub typical_p: f32,
    /// Keeps logits within this many standard deviations of the highest; 0 or less is off.
    pub top_n_sigma: f32,
    /// Chance that XTC removes all but the least likely of the tokens at or
    /// above `xtc_threshold`; 0 is off.
    pub xtc_probability: f32,
    /// Probability from which a token counts as a top choice for XTC.
    pub xtc_threshold: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 is off.
    pub repeat_penalty: f32,
    /// Tokens that the three penalties look back; 0 is off, -1 the whole context.
    pub repeat_last_n: i32,
    /// Subtracted from a logit once per recent occurrence of its token; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of every recent token; 0 is off.
    pub presence_penalty: f32,
    /// Strength of the DRY penalty on extending a repeated sequence; 0 is off.
    pub dry_multiplier: f32,
    /// Base of the DRY penalty `multiplier * base ^ (matched - allowed_length)`.
    pub dry_base: f32,
    /// Longest repeated sequence, in tokens, that DRY leaves alone.
    pub dry_allowed_length: u32,
    /// Tokens that DRY looks back; 0 is off, -1 the whole context.
    pub dry_penalty_last_n: i32,
    /// Token sequences across which DRY matches nothing. The text side makes
    /// them from strings.
    pub dry_breakers: Vec<Vec<u32>>,
    /// Added to the logits of tokens; minus infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the random numbers.
    pub seed: u64,
    /// No stage leaves fewer candidates than this, as long as there are that many; 0 acts as 1.
    pub min_keep: u32,
}

impl Default for SamplerSettings {
    fn default() -> SamplerSettings {
        SamplerSettings {
            temperature: 1.0,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: -1,
            dry_breakers: Vec::new(),
            logit_bias: Vec::new(),
            seed: 0,
            min_keep: 0,
        }
    }
}

/// What of a row of logits the sampler must see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsNeeded {
    /// The token of the highest logit, ties to the lower id; nothing is drawn.
    Argmax,
    /// The highest logits, at most [`MAX_TOP_CANDIDATES`], ties to the lower id:
    /// all of them go to [`super::Sampler::sample_top`].
    TopK(u32),
    /// Every logit, for [`super::Sampler::sample`].
    Full,
}

impl SamplerSettings {
    /// Checks every field against its range.
    ///
    /// # Errors
    /// [`SampleError::OutOfRange`] for the first field that is outside, in the
    /// order of the fields; [`SampleError::EmptyBreaker`] for a DRY breaker
    /// without tokens. Token ids are checked by [`super::Sampler::new`], which
    /// knows the vocabulary.
    pub fn validate(&self) -> Result<(), SampleError> {
        const FINITE: &str = "a finite number";
        const FRACTION: &str = "0 to 1";
        const NOT_NEGATIVE: &str = "a finite number, 0 or more";
        const TOKENS: &str = "-1 or more";
        let finite = |field, v: f32| check(field, v, v.is_finite(), FINITE);
        let fraction = |field, v: f32| check(field, v, (0.0..=1.0).contains(&v), FRACTION);
        let not_negative = |field, v: f32| check(field, v, v.is_finite() && v >= 0.0, NOT_NEGATIVE);
        let tokens = |field, v: i32| check(field, v, v >= -1, TOKENS);
        let above_0 = self.repeat_penalty.is_finite() && self.repeat_penalty > 0.0;
        let from_1 = self.dry_base.is_finite() && self.dry_base >= 1.0;

        finite("temperature", self.temperature)?;
        not_negative("dynatemp_range", self.dynatemp_range)?;
        not_negative("dynatemp_exponent", self.dynatemp_exponent)?;
        fraction("top_p", self.top_p)?;
        fraction("min_p", self.min_p)?;
        fraction("typical_p", self.typical_p)?;
        finite("top_n_sigma", self.top_n_sigma)?;
        fraction("xtc_probability", self.xtc_probability)?;
        fraction("xtc_threshold", self.xtc_threshold)?;
        check(
            "repeat_penalty",
            self.repeat_penalty,
            above_0,
            "a finite number above 0",
        )?;
        tokens("repeat_last_n", self.repeat_last_n)?;
        finite("frequency_penalty", self.frequency_penalty)?;
        finite("presence_penalty", self.presence_penalty)?;
        not_negative("dry_multiplier", self.dry_multiplier)?;
        check(
            "dry_base",
            self.dry_base,
            from_1,
            "a finite number, 1 or more",
        )?;
        tokens("dry_penalty_last_n", self.dry_penalty_last_n)?;
        if let Some(index) = self.dry_breakers.iter().position(Vec::is_empty) {
            return Err(SampleError::EmptyBreaker { index });
        }
        for &(token, bias) in &self.logit_bias {
            check(
                format_args!("logit_bias of token {token}"),
                bias,
                bias < f32::INFINITY,
                "a finite number or minus infinity",
            )?;
        }
        Ok(())
    }

    /// What the backend must read back for these settings and `mask`.
    ///
    /// Sampling from that part gives the same token as sampling from the full
    /// row. A forced token needs no row at all: the caller knows it already.
    pub fn rows_needed(&self, mask: Option<&TokenMask>) -> RowsNeeded {
        if mask.is_some() || self.changes_logits() {
            return RowsNeeded::Full;
        }
        if self.is_greedy() {
            return RowsNeeded::Argmax;
        }
        // The deviation is that of the whole row.
        if self.top_n_sigma > 0.0 {
            return RowsNeeded::Full;
        }
        match self.top_limit() {
            Some(1) => RowsNeeded::Argmax,
            Some(k) if k <= MAX_TOP_CANDIDATES => RowsNeeded::TopK(k),
            _ => RowsNeeded::Full,
        }
    }

    /// Is the token the most likely one, with nothing drawn?
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0
    }

    /// Is one of repeat, frequency and presence penalty on?
    pub(super) fn penalizes(&self) -> bool {
        self.repeat_last_n != 0
            && (self.repeat_penalty != 1.0
                || self.frequency_penalty != 0.0
                || self.presence_penalty != 0.0)
    }

    pub(super) fn uses_dry(&self) -> bool {
        self.dry_multiplier > 0.0 && self.dry_penalty_last_n != 0
    }

    /// How many candidates top-k keeps; none if it is off.
    pub(super) fn top_limit(&self) -> Option<u32> {
        (self.top_k > 0).then_some(self.top_k.max(self.min_keep))
    }

    fn changes_logits(&self) -> bool {
        !self.logit_bias.is_empty() || self.penalizes() || self.uses_dry()
    }
}

/// The error of a field unless its value `is_inside` the range `allowed`.
fn check(
    field: impl Display,
    found: impl Display,
    is_inside: bool,
    allowed: &'static str,
) -> Result<(), SampleError> {
    if is_inside {
        return Ok(());
    }
    Err(SampleError::OutOfRange {
        field: field.to_string(),
        found: found.to_string(),
        allowed,
    })
}
