//! Stop strings, found across the borders of tokens.
//!
//! The text is cut at the occurrence that is complete first; if two are
//! complete with the same character, at the longer one. This does not depend
//! on how the text is cut into pieces. What a reader would get wrong: "first"
//! is by end, not by beginning. With `abcd` and `bc`, the text `abcd` is cut
//! before `b`, since `bc` is complete when `abcd` is not.

use crate::error::Error;
use std::sync::Arc;

/// Looks for stop strings in a text that comes in pieces.
#[derive(Clone, Debug)]
pub struct StopStrings {
    strings: Arc<[String]>,
    /// The longest end of the text so far that may begin a stop string.
    held: String,
    is_stopped: bool,
}

impl StopStrings {
    /// None, one or several stop strings.
    ///
    /// # Errors
    /// [`Error::EmptyStopString`] if one of them is empty.
    pub fn new(strings: &[String]) -> Result<StopStrings, Error> {
        if let Some(index) = strings.iter().position(String::is_empty) {
            return Err(Error::EmptyStopString { index });
        }
        Ok(StopStrings {
            strings: strings.into(),
            held: String::new(),
            is_stopped: false,
        })
    }

    /// Adds a piece; gives the text that is certainly before any stop string.
    /// Once stopped, nothing more comes out.
    pub fn push(&mut self, piece: &str) -> String {
        if self.is_stopped {
            return String::new();
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        let occurrence = self
            .strings
            .iter()
            .filter_map(|stop| {
                text.find(stop.as_str())
                    .map(|start| (start + stop.len(), start))
            })
            .min();
        if let Some((_, start)) = occurrence {
            self.is_stopped = true;
            text.truncate(start);
        } else {
            let free = text.len() - self.beginning_at_end(&text);
            self.held = text.split_off(free);
        }
        text
    }

    /// Gives what was held back; the text ends or is interrupted here.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Was a stop string complete?
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Bytes at the end of `text` that begin a stop string.
    fn beginning_at_end(&self, text: &str) -> usize {
        self.strings
            .iter()
            .filter_map(|stop| {
                stop.char_indices()
                    .map(|(at, _)| at)
                    .rev()
                    .find(|&at| text.ends_with(&stop[..at]))
            })
            .max()
            .unwrap_or(0)
    }
}
