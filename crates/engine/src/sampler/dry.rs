//! DRY: a penalty on the token that would extend a repeated sequence.
//!
//! If the newest `n` tokens already stand somewhere earlier, the token that
//! followed there loses `multiplier * base ^ (n - allowed_length)`, for the
//! longest such `n >= allowed_length`. Source: the texts of text-generation-webui
//! pull request 5677 and of llama.cpp's completion documentation. What a reader
//! would get wrong: `n` does not count the extending token itself, so a repeated
//! sequence of `allowed_length` tokens, that token included, is free.

use super::SamplerSettings;
use super::penalties::Tally;
use std::collections::HashMap;

/// Sequences across which nothing is matched, found by their last token.
#[derive(Clone, Debug, Default)]
pub(super) struct Breakers {
    by_last: HashMap<u32, Vec<Vec<u32>>>,
}

impl Breakers {
    pub(super) fn new(sequences: &[Vec<u32>]) -> Breakers {
        let mut by_last: HashMap<u32, Vec<Vec<u32>>> = HashMap::new();
        for sequence in sequences {
            if let Some(&last) = sequence.last() {
                by_last.entry(last).or_default().push(sequence.clone());
            }
        }
        Breakers { by_last }
    }

    /// Tokens of `context` behind the newest complete breaker.
    fn open_tokens(&self, context: &[u32]) -> usize {
        let ends_breaker = |end: usize| {
            self.by_last
                .get(&context[end - 1])
                .is_some_and(|list| list.iter().any(|b| context[..end].ends_with(b)))
        };
        let last_break = (1..=context.len()).rev().find(|&end| ends_breaker(end));
        context.len() - last_break.unwrap_or(0)
    }

    /// Is `token` a breaker on its own? Such a token is never penalized: it is
    /// what ends a repetition.
    fn is_breaker(&self, token: u32) -> bool {
        self.by_last
            .get(&token)
            .is_some_and(|list| list.iter().any(|b| b.len() == 1))
    }
}

/// Buffers of [`apply_dry`] that keep their room between calls.
#[derive(Clone, Debug, Default)]
pub(super) struct DryScratch {
    reversed: Vec<u32>,
    matched: Vec<u32>,
    longest: Tally,
}

/// Lowers the logits of all tokens that would extend a repetition within `context`.
pub(super) fn apply_dry(
    row: &mut [f32],
    settings: &SamplerSettings,
    breakers: &Breakers,
    context: &[u32],
    scratch: &mut DryScratch,
) {
    let open = breakers.open_tokens(context);
    let allowed = settings.dry_allowed_length as usize;
    if open < allowed {
        return;
    }
    scratch.reversed.clear();
    scratch.reversed.extend(context.iter().rev());
    match_lengths(&scratch.reversed, &mut scratch.matched);
    scratch.longest.reset(row.len());
    for back in 1..context.len() {
        let n = (scratch.matched[back] as usize).min(open);
        let next = scratch.reversed[back - 1];
        if n >= allowed && !breakers.is_breaker(next) {
            // One more than the length, so that a length of zero is a touch too.
            scratch
                .longest
                .update(next, |known| known.max(n as u32 + 1));
        }
    }
    for (token, length_plus_one) in scratch.longest.iter() {
        let excess = f64::from(length_plus_one - 1) - allowed as f64;
        let power = libm::pow(f64::from(settings.dry_base), excess);
        let amount = f64::from(settings.dry_multiplier) * power;
        let logit = &mut row[token as usize];
        if *logit > f32::NEG_INFINITY {
            *logit = (f64::from(*logit) - amount).max(f64::from(f32::MIN)) as f32;
        }
    }
}

/// The Z array: `lengths[i]` is the length of the longest common prefix of
/// `tokens` and `tokens[i..]` (Gusfield, "Algorithms on Strings, Trees, and
/// Sequences", 1997, section 1.4). On a reversed history these are the lengths
/// of earlier copies of its end. Linear in the length.
fn match_lengths(tokens: &[u32], lengths: &mut Vec<u32>) {
    let len = tokens.len();
    lengths.clear();
    lengths.resize(len, 0);
    // The copy of a prefix that reaches furthest: it starts at `start` and ends before `end`.
    let (mut start, mut end) = (0, 0);
    for i in 1..len {
        let known = if i < end {
            (lengths[i - start] as usize).min(end - i)
        } else {
            0
        };
        let more = tokens[i + known..]
            .iter()
            .zip(&tokens[known..])
            .take_while(|(a, b)| a == b)
            .count();
        let length = known + more;
        lengths[i] = length as u32;
        if i + length > end {
            (start, end) = (i, i + length);
        }
    }
}
