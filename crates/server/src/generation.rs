//! The fields that every generation has, whatever its wire format: sampling,
//! stops, budget, cache.
//!
//! Names are OpenAI's where it has one, else those of llama.cpp's public
//! documentation of its server. What one would get wrong: what is not given is
//! the model's own default and not the API's, and temperature 0 is greedy.

use crate::api_error::ApiError;
use crate::body::Refused;
use crate::model::ServedModel;
use engine::{CacheUse, SampleError, SamplerSettings};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use utoipa::ToSchema;

/// Most stop strings of a request.
const MOST_STOPS: usize = 16;
/// Most bytes of a stop string.
const MOST_STOP_BYTES: usize = 1024;
/// Most DRY breakers of a request.
const MOST_BREAKERS: usize = 32;
/// OpenAI's range of a bias.
const BIAS: std::ops::RangeInclusive<f32> = -100.0..=100.0;

/// What other servers know, and what it is here.
pub const REFUSED: &[Refused] = &[
    Refused {
        name: "mirostat",
        neutral: &["0"],
        advice: "use temperature, top_p or min_p",
    },
    Refused {
        name: "repetition_penalty",
        neutral: &["1", "1.0"],
        advice: "its name here is repeat_penalty",
    },
    Refused {
        name: "n_predict",
        neutral: &["-1"],
        advice: "its name here is max_tokens",
    },
    Refused {
        name: "min_tokens",
        neutral: &["0"],
        advice: "an answer ends where the model ends it",
    },
    Refused {
        name: "ignore_eos",
        neutral: &["false"],
        advice: "an answer ends where the model ends it",
    },
    Refused {
        name: "guided_regex",
        neutral: &[],
        advice: "its name here is regex",
    },
    Refused {
        name: "guided_grammar",
        neutral: &[],
        advice: "its name here is grammar (Lark)",
    },
    Refused {
        name: "guided_choice",
        neutral: &[],
        advice: "use regex, such as red|green",
    },
    Refused {
        name: "structured_outputs",
        neutral: &["{}"],
        advice: "use response_format, regex or grammar",
    },
    Refused {
        name: "stop_token_ids",
        neutral: &["[]"],
        advice: "use stop",
    },
    Refused {
        name: "dry_last_n",
        neutral: &[],
        advice: "its name here is dry_penalty_last_n",
    },
];

/// The fields.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct GenerationFields {
    /// Divides the logits before the draw; 0 always takes the likeliest token.
    #[schema(minimum = 0)]
    pub temperature: Option<f32>,
    /// Keeps the likeliest tokens that add up to this; 1 keeps all.
    #[schema(minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    /// Keeps so many of the likeliest tokens; 0 or -1 keeps all.
    #[schema(minimum = -1)]
    pub top_k: Option<i64>,
    /// Keeps tokens at least so many times as likely as the likeliest.
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f32>,
    /// Keeps the most typical tokens that add up to this; 1 keeps all.
    #[schema(minimum = 0, maximum = 1)]
    pub typical_p: Option<f32>,
    /// Keeps logits within so many standard deviations of the highest.
    pub top_n_sigma: Option<f32>,
    /// Penalty on tokens used before; 1 is none.
    pub repeat_penalty: Option<f32>,
    /// Tokens that penalties look back; -1 looks at all.
    #[schema(minimum = -1)]
    pub repeat_last_n: Option<i32>,
    /// Penalty per earlier use of a token.
    pub frequency_penalty: Option<f32>,
    /// Penalty on any earlier use of a token.
    pub presence_penalty: Option<f32>,
    /// Strength of the DRY penalty on repeated passages.
    #[schema(minimum = 0)]
    pub dry_multiplier: Option<f32>,
    /// Base of the DRY penalty.
    #[schema(minimum = 1)]
    pub dry_base: Option<f32>,
    /// Longest repeated passage, in tokens, that DRY leaves alone.
    pub dry_allowed_length: Option<u32>,
    /// Tokens that DRY looks back; -1 looks at all.
    #[schema(minimum = -1)]
    pub dry_penalty_last_n: Option<i32>,
    /// Texts across which DRY matches nothing.
    pub dry_sequence_breakers: Option<Vec<String>>,
    /// Chance that XTC drops all but the least likely top choice.
    #[schema(minimum = 0, maximum = 1)]
    pub xtc_probability: Option<f32>,
    /// Probability from which a token is a top choice for XTC.
    #[schema(minimum = 0, maximum = 1)]
    pub xtc_threshold: Option<f32>,
    /// How far the temperature moves with the entropy.
    #[schema(minimum = 0)]
    pub dynatemp_range: Option<f32>,
    /// Power of the normalized entropy in the dynamic temperature.
    #[schema(minimum = 0)]
    pub dynatemp_exponent: Option<f32>,
    /// No stage leaves fewer candidates than this.
    pub min_keep: Option<u32>,
    /// Key of the draws: the same request with the same seed has the same
    /// answer.
    pub seed: Option<i64>,
    /// Added to the logits of tokens, by their ids.
    pub logit_bias: Option<BTreeMap<String, f32>>,
    /// Answers to one prompt.
    #[schema(minimum = 1)]
    pub n: Option<usize>,
    /// Texts before which the answer ends.
    pub stop: Option<Stop>,
    /// Send the answer as it is made?
    pub stream: Option<bool>,
    /// What else a stream shall have.
    pub stream_options: Option<StreamOptions>,
    /// Use what is kept of earlier prompts, and keep this one?
    pub cache_prompt: Option<bool>,
    /// Keeps prompts of one tenant apart from those of others.
    pub cache_salt: Option<String>,
    /// Milliseconds from the request's arrival after which it fails.
    #[schema(minimum = 1)]
    pub deadline_ms: Option<u64>,
    /// The client's name for its user; it changes nothing.
    #[expect(dead_code, reason = "taken so that it is known; it changes nothing")]
    pub user: Option<String>,
}

/// One stop string or several.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub enum Stop {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// What else a stream shall have.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// A last chunk with the token counts?
    pub include_usage: Option<bool>,
    /// Padding that hides lengths; there is none.
    pub include_obfuscation: Option<bool>,
}

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
