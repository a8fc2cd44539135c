//! The fields that every generation has, whatever its wire format.
//!
//! Names are OpenAI's where it has one, else those of llama.cpp's public
//! documentation of its server.

use crate::fields::Refused;
use serde::Deserialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

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
    #[serde(default, deserialize_with = "crate::fields::object")]
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
