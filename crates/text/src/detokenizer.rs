//! Token ids to text as they come, one at a time.
//!
//! What one would get wrong: a token is bytes, not characters. A character's
//! bytes may lie in several tokens and one token may hold the end of one
//! character and the beginning of the next, so bytes wait here until they are a
//! character or certainly never will be.

use crate::tokenizer::{ControlText, Tokenizer};
use std::sync::Arc;

/// Turns a stream of ids into a stream of text.
///
/// However the ids are spread over calls, all returned texts joined, the one of
/// [`Detokenizer::finish`] included, equal [`Tokenizer::decode`] of all ids
/// with [`ControlText::Skip`].
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The blank that encoding put before a text may come now.
    at_start: bool,
    /// The beginning of a character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Decodes a text from its beginning; control tokens leave no trace.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Detokenizer {
        Detokenizer {
            tokenizer,
            at_start: true,
            pending: Vec::new(),
        }
    }

    /// Decodes what follows a text: a blank at the beginning is meant.
    ///
    /// Differs from [`Detokenizer::new`] only for SentencePiece files.
    pub fn continuing(tokenizer: Arc<Tokenizer>) -> Detokenizer {
        Detokenizer {
            at_start: false,
            ..Detokenizer::new(tokenizer)
        }
    }

    /// Does a blank at the beginning of the next token leave no trace?
    pub(crate) fn drops_blank(&self) -> bool {
        self.at_start && self.tokenizer.add_space_prefix()
    }

    /// Bytes of a character that is not complete yet.
    pub(crate) fn n_pending(&self) -> usize {
        self.pending.len()
    }

    /// Adds a token; gives the text that is complete now, often none.
    ///
    /// Bytes that can be no character become U+FFFD, as many as
    /// [`String::from_utf8_lossy`] makes of the whole.
    pub fn push(&mut self, id: u32) -> String {
        let piece = self
            .tokenizer
            .piece(id, ControlText::Skip, &mut self.at_start);
        self.pending.extend_from_slice(piece);
        let mut text = String::new();
        let mut done = 0;
        let mut waiting = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            if !chunk.invalid().is_empty() {
                let is_last = done + chunk.invalid().len() == self.pending.len();
                if is_last && may_become_character(chunk.invalid()) {
                    waiting = chunk.invalid().len();
                    break;
                }
                text.push(char::REPLACEMENT_CHARACTER);
                done += chunk.invalid().len();
            }
        }
        debug_assert_eq!(done + waiting, self.pending.len());
        self.pending.drain(..done);
        text
    }

    /// Ends the text: U+FFFD if half a character was left, else nothing.
    ///
    /// Afterwards the detokenizer is at the beginning of a new text.
    pub fn finish(&mut self) -> String {
        self.at_start = true;
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// Are these bytes the beginning of a character rather than an error?
fn may_become_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
