//! What the fields of a generation mean, whatever its wire format: sampling,
//! stops, budget, cache.
//!
//! What one would get wrong: what is not given is the model's own default and
//! not the API's, and temperature 0 is greedy.

use crate::api_error::ApiError;
use crate::generation_fields::{GenerationFields, Stop};
use crate::model::ServedModel;
use engine::{CacheUse, SampleError, SamplerSettings};
use std::time::{Duration, Instant};

/// Most stop strings of a request.
const MOST_STOPS: usize = 16;
/// Most bytes of a stop string.
const MOST_STOP_BYTES: usize = 1024;
/// Most DRY breakers of a request.
const MOST_BREAKERS: usize = 32;
/// OpenAI's range of a bias.
const BIAS: std::ops::RangeInclusive<f32> = -100.0..=100.0;

/// When a request is to be over.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// The moment.
    pub at: Instant,
    /// How long after the request's arrival that is.
    pub after: Duration,
}

impl GenerationFields {
    /// Is the answer sent as it is made?
    pub fn is_stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Does the stream end with the token counts?
    pub fn includes_usage(&self) -> bool {
        let options = self.stream_options.as_ref();
        options.is_some_and(|options| options.include_usage == Some(true))
    }

    /// Checks what concerns the stream alone.
    ///
    /// # Errors
    /// 400 for options without a stream and for padding.
    pub fn check_stream(&self) -> Result<(), ApiError> {
        let Some(options) = &self.stream_options else {
            return Ok(());
        };
        if !self.is_stream() {
            let expected = "none, since stream is not true";
            return Err(ApiError::value("stream_options", "an object", expected));
        }
        match options.include_obfuscation {
            Some(true) => Err(ApiError::unsupported(
                "stream_options.include_obfuscation",
                "chunks are not padded; false is allowed",
            )),
            _ => Ok(()),
        }
    }

    /// Number of answers.
    ///
    /// # Errors
    /// 400 if it is 0 or more than can run at a time.
    pub fn n_choices(&self, most: usize) -> Result<usize, ApiError> {
        match self.n.unwrap_or(1) {
            n if (1..=most).contains(&n) => Ok(n),
            n => Err(ApiError::value("n", n, format!("1 to {most}"))),
        }
    }

    /// The stop strings.
    ///
    /// # Errors
    /// 400 for an empty one and for more or longer ones than are allowed.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop.clone()],
            Some(Stop::Many(stops)) => stops.clone(),
        };
        if stops.len() > MOST_STOPS {
            let found = format!("{} strings", stops.len());
            return Err(ApiError::value(
                "stop",
                found,
                format!("at most {MOST_STOPS}"),
            ));
        }
        for (index, stop) in stops.iter().enumerate() {
            if stop.is_empty() || stop.len() > MOST_STOP_BYTES {
                return Err(ApiError::value(
                    format_args!("stop[{index}]"),
                    format_args!("a string of {} bytes", stop.len()),
                    format_args!("1 to {MOST_STOP_BYTES}"),
                ));
            }
        }
        Ok(stops)
    }

    /// How the prompt may use the cache.
    pub fn cache(&self) -> CacheUse {
        CacheUse {
            is_on: self.cache_prompt.unwrap_or(true),
            salt: self.cache_salt.as_deref().map(Into::into),
        }
    }

    /// The earlier one of the request's deadline and the server's.
    ///
    /// # Errors
    /// 400 if it is 0.
    pub fn deadline(
        &self,
        arrived: Instant,
        most: Option<Duration>,
    ) -> Result<Option<Deadline>, ApiError> {
        if self.deadline_ms == Some(0) {
            return Err(ApiError::value("deadline_ms", 0, "1 or more"));
        }
        let own = self.deadline_ms.map(Duration::from_millis);
        let after = own.into_iter().chain(most).min();
        // A moment that the clock cannot say never comes.
        let at = |after| Some((arrived.checked_add(after)?, after));
        Ok(after.and_then(at).map(|(at, after)| Deadline { at, after }))
    }

    /// The settings of the sampler: what is given, else the model's defaults.
    ///
    /// # Errors
    /// 400 naming the field that is out of its range.
    pub fn sampling(&self, model: &ServedModel) -> Result<SamplerSettings, ApiError> {
        let mut s = model.defaults.clone();
        if let Some(found) = self.temperature.filter(|t| t.is_nan() || *t < 0.0) {
            return Err(ApiError::value("temperature", found, "0 or more"));
        }
        for (to, from) in [
            (&mut s.temperature, self.temperature),
            (&mut s.top_p, self.top_p),
            (&mut s.min_p, self.min_p),
            (&mut s.typical_p, self.typical_p),
            (&mut s.top_n_sigma, self.top_n_sigma),
            (&mut s.repeat_penalty, self.repeat_penalty),
            (&mut s.frequency_penalty, self.frequency_penalty),
            (&mut s.presence_penalty, self.presence_penalty),
            (&mut s.dry_multiplier, self.dry_multiplier),
            (&mut s.dry_base, self.dry_base),
            (&mut s.xtc_probability, self.xtc_probability),
            (&mut s.xtc_threshold, self.xtc_threshold),
            (&mut s.dynatemp_range, self.dynatemp_range),
            (&mut s.dynatemp_exponent, self.dynatemp_exponent),
        ] {
            *to = from.unwrap_or(*to);
        }
        s.top_k = match self.top_k {
            None => s.top_k,
            Some(k @ -1..) => u32::try_from(k.max(0)).unwrap_or(u32::MAX),
            Some(k) => return Err(ApiError::value("top_k", k, "-1 or more")),
        };
        s.repeat_last_n = self.repeat_last_n.unwrap_or(s.repeat_last_n);
        s.dry_allowed_length = self.dry_allowed_length.unwrap_or(s.dry_allowed_length);
        s.dry_penalty_last_n = self.dry_penalty_last_n.unwrap_or(s.dry_penalty_last_n);
        s.min_keep = self.min_keep.unwrap_or(s.min_keep);
        if s.dry_multiplier > 0.0 {
            s.dry_breakers = self.breakers(model)?;
        }
        s.logit_bias = self.bias(model.tokenizer.n_vocab())?;
        s.seed = match self.seed {
            // The same 64 bits, whatever their sign.
            Some(seed) => seed.cast_unsigned(),
            None => model.seed()?,
        };
        s.validate().map_err(out_of_range)?;
        Ok(s)
    }

    fn breakers(&self, model: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
        const FIELD: &str = "dry_sequence_breakers";
        let Some(breakers) = &self.dry_sequence_breakers else {
            return Ok(model.dry_breakers().to_vec());
        };
        if breakers.len() > MOST_BREAKERS {
            let found = format!("{} strings", breakers.len());
            return Err(ApiError::value(
                FIELD,
                found,
                format!("at most {MOST_BREAKERS}"),
            ));
        }
        if let Some(index) = breakers.iter().position(String::is_empty) {
            let param = format!("{FIELD}[{index}]");
            return Err(ApiError::value(
                param,
                "an empty string",
                "one character or more",
            ));
        }
        let breakers = breakers.iter().map(String::as_str);
        Ok(crate::model::breaking_tokens(&model.tokenizer, breakers))
    }

    fn bias(&self, n_vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
        let mut bias = Vec::new();
        for (key, &value) in self.logit_bias.iter().flatten() {
            let param = format!("logit_bias.{}", gguf::shown(key));
            let token = key.parse::<u32>().ok();
            let Some(token) = token.filter(|&token| (token as usize) < n_vocab) else {
                let expected = format!("the id of a token, 0 to {}", n_vocab - 1);
                return Err(ApiError::value("logit_bias", gguf::shown(key), expected));
            };
            if !BIAS.contains(&value) {
                return Err(ApiError::value(param, value, "-100 to 100"));
            }
            // OpenAI: -100 should ban the token.
            let is_ban = value == *BIAS.start();
            bias.push((token, if is_ban { f32::NEG_INFINITY } else { value }));
        }
        Ok(bias)
    }
}

/// The sampler's own word about a setting, with the field it came from.
fn out_of_range(error: SampleError) -> ApiError {
    match error {
        SampleError::OutOfRange {
            field,
            found,
            allowed,
        } => ApiError::value(field, found, allowed),
        other => ApiError::bad("invalid_value", None, other),
    }
}
