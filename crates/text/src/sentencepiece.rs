//! SentencePiece-style BPE: no pre-tokenizer, merges by the score of what they
//! make.
//!
//! Of all neighbours whose join is a token, the join with the best score is
//! made first, the leftmost of equals; this repeats until nothing joins. Text
//! that is no token falls back to the byte tokens `<0xXX>`, then to the
//! unknown token.
//!
//! What one would get wrong: this is no merge list by rank. Two different
//! pairs that make the same token are equally good here, and equal scores are
//! settled by place, so the loop is written out.
//!
//! Source: Kudo and Richardson, "SentencePiece" (2018), section 3.1 (merges
//! with a priority queue), 3.2 (U+2581 for a blank).

use crate::Error;
use crate::vocab::{TokenType, Vocab, required, same_length};
use gguf::Metadata;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

const SCORES: &str = "tokenizer.ggml.scores";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// Stands for a blank in token texts.
const BLANK: &str = "\u{2581}";

/// Appends what a token stands for.
pub(crate) fn token_bytes(
    id: u32,
    text: &str,
    kind: TokenType,
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    if kind == TokenType::Byte {
        out.push(byte_of(text).ok_or_else(|| Error::ByteTokenSpelling {
            id,
            found: gguf::shown(text),
        })?);
    } else {
        out.extend_from_slice(text.replace(BLANK, " ").as_bytes());
    }
    Ok(())
}

/// The byte that `<0xXX>` spells.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_digits = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    two_digits.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The merge model of a SentencePiece vocabulary.
#[derive(Debug)]
pub(crate) struct SentencePiece {
    /// By id, higher is better; no negative zero.
    scores: Vec<f32>,
    bytes: [Option<u32>; 256],
    unknown: Option<u32>,
    add_space_prefix: bool,
    /// Length in bytes of the longest text that merges can make.
    longest: usize,
}

/// Part of the text that is one token, or one character that is none.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    /// Length in bytes; 0 once joined to the symbol before.
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours whose join is a token.
struct Join {
    score: f32,
    left: usize,
    right: usize,
    /// Length of both in bytes when found: another one now means it is stale.
    len: usize,
}

impl Ord for Join {
    fn cmp(&self, other: &Join) -> Ordering {
        let by_score = self.score.total_cmp(&other.score);
        by_score.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Join {
    fn partial_cmp(&self, other: &Join) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Join {
    fn eq(&self, other: &Join) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Join {}

impl SentencePiece {
    /// Reads the scores; a missing `add_space_prefix` means yes.
    pub(crate) fn from_metadata(
        metadata: &Metadata,
        vocab: &Vocab,
    ) -> Result<SentencePiece, Error> {
        let scores = required(metadata.floats(SCORES)?, SCORES, "an array of f32")?;
        same_length(SCORES, scores.len(), vocab.len())?;
        let mut bytes = [None; 256];
        let mut unknown = None;
        let mut longest = 0;
        for ((id, text, kind), score) in vocab.iter().zip(scores) {
            if score.is_nan() {
                return Err(Error::ScoreNotANumber { id });
            }
            match kind {
                TokenType::Byte => {
                    let byte = vocab.bytes(id).and_then(|bytes| bytes.first().copied());
                    bytes[usize::from(byte.expect("a byte token stands for one byte"))] = Some(id);
                }
                TokenType::Unknown => unknown = unknown.or(Some(id)),
                TokenType::Normal | TokenType::UserDefined => longest = longest.max(text.len()),
                TokenType::Control | TokenType::Unused => {}
            }
        }
        // Text must not become a control token, not even as the unknown one.
        let named = vocab.special().unk;
        let named = named.filter(|&id| vocab.kind(id) != Some(TokenType::Control));
        let model = SentencePiece {
            scores: scores.iter().map(|score| score + 0.0).collect(),
            bytes,
            unknown: named.or(unknown),
            add_space_prefix: metadata.bool(ADD_SPACE_PREFIX)?.unwrap_or(true),
            longest,
        };
        if model.made_by_merges(BLANK, vocab).is_none() {
            return Err(Error::BlankTokenMissing);
        }
        Ok(model)
    }

    /// Is a blank put before text (and taken off again when decoding)?
    pub(crate) fn add_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Bytes that neither a byte token nor the unknown token stands for.
    pub(crate) fn missing_bytes(&self) -> Vec<u8> {
        let missing = |&byte: &u8| self.bytes[usize::from(byte)].is_none();
        (0..=u8::MAX).filter(missing).collect()
    }

    /// Appends the ids of `text`, in which nothing is special and before
    /// which stands nothing or a special token.
    pub(crate) fn encode(&self, text: &str, vocab: &Vocab, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let prefix = if self.add_space_prefix { BLANK } else { "" };
        let text = format!("{prefix}{}", text.replace(' ', BLANK));
        let symbols = self.merge(&text, vocab);
        let mut at = Some(0);
        while let Some(index) = at {
            let Symbol {
                start, len, next, ..
            } = symbols[index];
            self.push_symbol(&text[start..start + len], vocab, ids);
            at = next;
        }
    }

    /// Joins neighbours until nothing joins; symbol 0 always stays the first.
    fn merge(&self, text: &str, vocab: &Vocab) -> Vec<Symbol> {
        let n_symbols = text.chars().count();
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                previous: index.checked_sub(1),
                next: (index + 1 < n_symbols).then_some(index + 1),
            })
            .collect();
        let mut joins = BinaryHeap::new();
        for left in 0..n_symbols {
            joins.extend(self.join(text, &symbols, Some(left), vocab));
        }
        while let Some(Join {
            left, right, len, ..
        }) = joins.pop()
        {
            let (a, b) = (symbols[left], symbols[right]);
            if a.len == 0 || b.len == 0 || a.len + b.len != len {
                continue;
            }
            symbols[left].len = len;
            symbols[left].next = b.next;
            symbols[right].len = 0;
            if let Some(next) = b.next {
                symbols[next].previous = Some(left);
            }
            joins.extend(self.join(text, &symbols, a.previous, vocab));
            joins.extend(self.join(text, &symbols, Some(left), vocab));
        }
        symbols
    }

    /// The join of `left` with its right neighbour, if it is a token.
    fn join(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: Option<usize>,
        vocab: &Vocab,
    ) -> Option<Join> {
        let left = left?;
        let right = symbols[left].next?;
        let len = symbols[left].len + symbols[right].len;
        if len > self.longest {
            return None;
        }
        let start = symbols[left].start;
        let id = self.made_by_merges(&text[start..start + len], vocab)?;
        Some(Join {
            score: self.scores[id as usize],
            left,
            right,
            len,
        })
    }

    /// The token that text can become by merges.
    fn made_by_merges(&self, text: &str, vocab: &Vocab) -> Option<u32> {
        let id = vocab.id_of(text)?;
        let kind = vocab.kind(id)?;
        matches!(kind, TokenType::Normal | TokenType::UserDefined).then_some(id)
    }

    /// Appends the token of `symbol`, or what stands for it.
    fn push_symbol(&self, symbol: &str, vocab: &Vocab, ids: &mut Vec<u32>) {
        if let Some(id) = self.made_by_merges(symbol, vocab) {
            ids.push(id);
            return;
        }
        let bytes: Option<Vec<u32>> = symbol
            .bytes()
            .map(|byte| self.bytes[usize::from(byte)])
            .collect();
        match bytes {
            Some(bytes) => ids.extend(bytes),
            None => ids.extend(self.unknown),
        }
    }
}
