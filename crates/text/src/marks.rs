//! Keeps control tokens that a template spells apart from text that only
//! looks like them.
//!
//! The template is changed, never the messages: in its source, and in the
//! values of `bos_token` and `eos_token`, the first character of every spelled
//! control token is replaced by a private-use character that occurs nowhere in
//! the inputs. After rendering, a control token is where such a mark is
//! followed by the rest of its token; everything else is text, whatever it
//! spells and however it was put together. So filters, tests and slices see
//! the callers' strings as they are, and lengths in characters stay the same.

use crate::error::Error;
use crate::{Segment, Special};
use std::collections::HashSet;

/// Planes 15 and 16 without their last two code points, which are no
/// characters.
const PRIVATE_USE: [std::ops::RangeInclusive<u32>; 2] =
    [0x10_0000..=0x10_FFFD, 0xF_0000..=0xF_FFFD];

const FIRST_PRIVATE_USE: char = '\u{F0000}';

/// The control tokens that one template spells.
#[derive(Clone, Debug)]
pub(crate) struct SpelledTokens {
    /// Longest first, so that a token is found before one that it begins with.
    tokens: Vec<String>,
}

/// One mark for each spelled token, in the order of the tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marks(Vec<char>);

impl SpelledTokens {
    /// Those of `control` that `source` spells, and `named` (BOS and EOS).
    pub(crate) fn new<'a>(
        source: &str,
        control: impl Iterator<Item = &'a str>,
        named: impl Iterator<Item = &'a str>,
    ) -> SpelledTokens {
        let mut tokens: Vec<String> = control
            .filter(|token| source.contains(token))
            .chain(named)
            .filter(|token| is_markup(token))
            .map(str::to_owned)
            .collect();
        tokens.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        tokens.dedup();
        SpelledTokens { tokens }
    }

    /// Marks that occur neither in `source` nor in `inputs`.
    pub(crate) fn marks(&self, source: &str, inputs: &str) -> Result<Marks, Error> {
        let taken: HashSet<char> = source
            .chars()
            .chain(inputs.chars())
            .filter(|&c| c >= FIRST_PRIVATE_USE)
            .collect();
        let marks: Vec<char> = PRIVATE_USE
            .into_iter()
            .flatten()
            .filter_map(char::from_u32)
            .filter(|c| !taken.contains(c))
            .take(self.tokens.len())
            .collect();
        if marks.len() < self.tokens.len() {
            return Err(Error::NoFreeMark);
        }
        Ok(Marks(marks))
    }

    /// `text` with every spelled token marked.
    pub(crate) fn mark(&self, text: &str, marks: &Marks) -> String {
        let mut out = String::with_capacity(text.len() + text.len() / 16);
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            match self.tokens.iter().position(|token| rest.starts_with(token)) {
                Some(index) => {
                    out.push(marks.0[index]);
                    out.push_str(&self.tokens[index][first.len_utf8()..]);
                    rest = &rest[self.tokens[index].len()..];
                }
                None => {
                    out.push(first);
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
        out
    }

    /// Splits rendered text at its marks and takes them out. A mark whose
    /// token the template cut apart is text again.
    pub(crate) fn split(&self, rendered: &str, marks: &Marks) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut text = String::new();
        let mut rest = rendered;
        while let Some(first) = rest.chars().next() {
            let after = &rest[first.len_utf8()..];
            let is_private = first >= FIRST_PRIVATE_USE;
            let marked = marks.0.iter().position(|&mark| is_private && mark == first);
            let Some(token) = marked.map(|index| &self.tokens[index]) else {
                text.push(first);
                rest = after;
                continue;
            };
            let head = token.chars().next().map_or(0, char::len_utf8);
            match after.strip_prefix(&token[head..]) {
                Some(tail) => {
                    if !text.is_empty() {
                        segments.push(Segment {
                            text: std::mem::take(&mut text),
                            special: Special::Text,
                        });
                    }
                    segments.push(Segment {
                        text: token.clone(),
                        special: Special::Parse,
                    });
                    rest = tail;
                }
                None => {
                    text.push_str(&token[..head]);
                    rest = after;
                }
            }
        }
        if !text.is_empty() {
            segments.push(Segment {
                text,
                special: Special::Text,
            });
        }
        segments
    }
}

/// A control token spelled like a word would mark words of the template.
fn is_markup(token: &str) -> bool {
    token.chars().count() >= 3 && token.chars().any(|c| c.is_ascii_punctuation() && c != '_')
}

/// Beginnings of control tokens, of two characters or more, at which a piece
/// of the template's text breaks off, as in `'<|' ~ name ~ '|>'`.
pub(crate) fn cut_heads<'t>(source: &str, control: impl Iterator<Item = &'t str>) -> Vec<String> {
    const ENDS: [&str; 4] = ["'", "\"", "{{", "{%"];
    let heads: HashSet<&str> = control
        .filter(|token| is_markup(token))
        .flat_map(|token| {
            token
                .char_indices()
                .skip(2)
                .map(move |(at, _)| &token[..at])
        })
        .collect();
    let longest = heads.iter().map(|head| head.len()).max().unwrap_or(0);
    let mut cut = HashSet::new();
    for end in ENDS.iter().flat_map(|end| source.match_indices(end)) {
        let before = &source[..end.0];
        for length in 2..=longest.min(before.len()) {
            if let Some(head) = before.get(before.len() - length..)
                && heads.contains(head)
            {
                cut.insert(head.to_owned());
            }
        }
    }
    cut.into_iter().collect()
}
