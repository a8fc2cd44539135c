//! Log-probabilities in the two forms that OpenAI has for them.
//!
//! What one would get wrong: a token is bytes and may be no text, so `token` is
//! for people and `bytes` is what it stands for.

use crate::turn::TokenLogprob;
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::Arc;
use text::Tokenizer;
use utoipa::ToSchema;

/// Alternatives of a token at most.
pub const MOST_TOP: usize = 20;

/// Those of a chat's answer.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// The tokens of `content`, in order.
    pub content: Vec<ContentToken>,
    /// There are no refusals.
    #[schema(value_type = Option<String>)]
    refusal: Option<()>,
}

/// A token of the answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ContentToken {
    #[serde(flatten)]
    token: Likely,
    /// The likeliest tokens at this place.
    top_logprobs: Vec<Likely>,
}

/// A token with its log-probability.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Likely {
    /// Its text; U+FFFD where it is none.
    token: String,
    /// Natural logarithm of its probability before the sampler chain.
    logprob: f64,
    /// What it stands for.
    bytes: Vec<u8>,
}

fn likely(tokenizer: &Tokenizer, token: u32, logprob: f64) -> Likely {
    Likely {
        token: text_of(tokenizer, token),
        logprob,
        bytes: bytes_of(tokenizer, token).to_vec(),
    }
}

/// The bytes of a token; those of its name for a control token.
fn bytes_of(tokenizer: &Tokenizer, token: u32) -> &[u8] {
    match tokenizer.token_bytes(token) {
        Some(bytes) if !bytes.is_empty() => bytes,
        _ => tokenizer.token_text(token).unwrap_or_default().as_bytes(),
    }
}

fn text_of(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(bytes_of(tokenizer, token)).into_owned()
}

impl ChatLogprobs {
    /// Those of some tokens.
    pub fn of(tokenizer: &Tokenizer, tokens: &[TokenLogprob]) -> ChatLogprobs {
        let content = tokens.iter().map(|entry| ContentToken {
            token: likely(tokenizer, entry.token, entry.logprob),
            top_logprobs: entry
                .top
                .iter()
                .map(|&(token, logprob)| likely(tokenizer, token, logprob))
                .collect(),
        });
        ChatLogprobs {
            content: content.collect(),
            refusal: None,
        }
    }
}

/// Those of a legacy completion: columns.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// Where each token begins, in characters of the whole text.
    text_offset: Vec<usize>,
    /// Natural logarithms.
    token_logprobs: Vec<f64>,
    /// Texts of the tokens.
    tokens: Vec<String>,
    /// For each token the likeliest ones with theirs.
    #[schema(value_type = Vec<Object>)]
    top_logprobs: Vec<Map<String, Value>>,
}

/// Makes [`CompletionLogprobs`] of the tokens of one text, piece by piece.
#[derive(Clone, Debug)]
pub struct Columns {
    tokenizer: Arc<Tokenizer>,
    /// Bytes before the next token, as they come: a token may end inside a
    /// character.
    bytes: Vec<u8>,
    /// Characters before `bytes`.
    n_characters: usize,
}

impl Columns {
    /// For a text that begins with `echoed`.
    pub fn new(tokenizer: Arc<Tokenizer>, echoed: &str) -> Columns {
        Columns {
            tokenizer,
            bytes: Vec::new(),
            n_characters: echoed.chars().count(),
        }
    }

    /// The next tokens.
    pub fn push(&mut self, tokens: &[TokenLogprob]) -> CompletionLogprobs {
        let mut columns = CompletionLogprobs::default();
        for entry in tokens {
            columns.text_offset.push(self.n_characters);
            columns.token_logprobs.push(entry.logprob);
            columns.tokens.push(text_of(&self.tokenizer, entry.token));
            let top = entry
                .top
                .iter()
                .map(|&(token, logprob)| (text_of(&self.tokenizer, token), Value::from(logprob)));
            columns.top_logprobs.push(top.collect());
            self.bytes.extend(bytes_of(&self.tokenizer, entry.token));
            self.count_whole_characters();
        }
        columns
    }

    fn count_whole_characters(&mut self) {
        let whole = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let text = std::str::from_utf8(&self.bytes[..whole]).unwrap_or_default();
        self.n_characters += text.chars().count();
        self.bytes.drain(..whole);
        // What is longer than a character can be is none.
        if self.bytes.len() >= 4 {
            self.n_characters += self.bytes.len();
            self.bytes.clear();
        }
    }
}

impl CompletionLogprobs {
    /// Adds what comes after.
    pub fn extend(&mut self, next: CompletionLogprobs) {
        self.text_offset.extend(next.text_offset);
        self.token_logprobs.extend(next.token_logprobs);
        self.tokens.extend(next.tokens);
        self.top_logprobs.extend(next.top_logprobs);
    }
}
