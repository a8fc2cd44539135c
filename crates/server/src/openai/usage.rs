//! Counts and times of an answer.

use crate::turn::Totals;
use serde::Serialize;
use std::time::Duration;
use utoipa::ToSchema;

/// Tokens read and made.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Usage {
    prompt_tokens: usize,
    /// Tokens of all answers, reasoning and the end of the turn included.
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokens,
    completion_tokens_details: CompletionTokens,
}

/// Of the prompt's tokens.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct PromptTokens {
    /// Those whose keys and values were already there.
    cached_tokens: usize,
}

/// Of the answers' tokens.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct CompletionTokens {
    /// Those of the reasoning.
    reasoning_tokens: usize,
}

impl From<Totals> for Usage {
    fn from(totals: Totals) -> Usage {
        Usage {
            prompt_tokens: totals.prompt_tokens,
            completion_tokens: totals.completion_tokens,
            total_tokens: totals.prompt_tokens + totals.completion_tokens,
            prompt_tokens_details: PromptTokens {
                cached_tokens: totals.cached_tokens,
            },
            completion_tokens_details: CompletionTokens {
                reasoning_tokens: totals.reasoning_tokens,
            },
        }
    }
}

/// Where the time went; an addition of ours.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct TimingsBody {
    /// Wait for a place.
    queue_ms: f64,
    /// Prompt tokens that were computed.
    prefill_tokens: usize,
    prefill_ms: f64,
    /// Tokens of all answers.
    decode_tokens: usize,
    /// From the first token to the last.
    decode_ms: f64,
    /// Prompt tokens that were already there.
    cached_tokens: usize,
    /// Tokens that speculation proposed.
    drafted_tokens: usize,
    /// Those of them that were right.
    accepted_tokens: usize,
    /// Times that an answer gave up its place to an older one.
    preempted: usize,
}

impl From<Totals> for TimingsBody {
    fn from(totals: Totals) -> TimingsBody {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        TimingsBody {
            queue_ms: ms(totals.queue),
            prefill_tokens: totals.prefill_tokens,
            prefill_ms: ms(totals.prefill),
            decode_tokens: totals.completion_tokens,
            decode_ms: ms(totals.decode),
            cached_tokens: totals.cached_tokens,
            drafted_tokens: totals.drafted,
            accepted_tokens: totals.accepted,
            preempted: totals.preempted,
        }
    }
}
