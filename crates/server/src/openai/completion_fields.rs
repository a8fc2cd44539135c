//! The fields that only a request of a plain completion has.

use crate::fields::{OwnFields, Refused};
use serde::Deserialize;
use utoipa::ToSchema;

/// What is known and not done.
const REFUSED: &[Refused] = &[
    Refused {
        name: "best_of",
        neutral: &["1"],
        advice: "ask for n answers and choose",
    },
    Refused {
        name: "suffix",
        neutral: &[r#""""#],
        advice: "this model continues text, it does not fill gaps",
    },
    Refused {
        name: "messages",
        neutral: &[],
        advice: "/v1/chat/completions answers conversations",
    },
    Refused {
        name: "max_completion_tokens",
        neutral: &[],
        advice: "its name here is max_tokens",
    },
    Refused {
        name: "response_format",
        neutral: &[r#"{"type":"text"}"#],
        advice: "use regex or grammar",
    },
    Refused {
        name: "top_logprobs",
        neutral: &["0"],
        advice: "logprobs says how many",
    },
];

/// The fields that only a completion has.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct CompletionFields {
    /// The model's name; none takes the one there is.
    pub model: Option<String>,
    /// What goes on.
    pub prompt: PromptField,
    /// Tokens of an answer at most; 16 if not given.
    #[schema(minimum = 1)]
    pub max_tokens: Option<usize>,
    /// Report the log-probabilities of the answer's tokens, with so many of the
    /// likeliest for each.
    #[schema(minimum = 0, maximum = 20)]
    pub logprobs: Option<usize>,
    /// Begin the answer with the prompt?
    pub echo: Option<bool>,
    /// A regular expression that the answer has to match; an addition of ours.
    pub regex: Option<String>,
    /// A Lark grammar that the answer has to match; an addition of ours.
    pub grammar: Option<String>,
}

/// One prompt or several, as text or tokens.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of such lists"
)]
pub enum PromptField {
    /// A text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// Texts.
    Texts(Vec<String>),
    /// Tokens, several times.
    TokenLists(Vec<Vec<u32>>),
}

impl OwnFields for CompletionFields {
    const REFUSED: &'static [Refused] = REFUSED;
}
