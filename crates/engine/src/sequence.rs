//! One sequence: its tokens, and the pages of those that were computed.
//!
//! The newest tokens may not have been computed yet: a sampled token becomes a
//! row only when something after it is asked for.

use model::SequencePages;

/// Tokens of a sequence and the pages that hold their keys and values.
///
/// Pages belong to an engine's pool: give a sequence back with
/// [`crate::Engine::free`].
#[derive(Debug, Default)]
pub struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) pages: SequencePages,
}

impl Sequence {
    /// A sequence without tokens.
    pub fn new() -> Sequence {
        Sequence::default()
    }

    /// A sequence of `tokens`, none of them computed.
    pub(crate) fn of(tokens: Vec<u32>) -> Sequence {
        Sequence {
            tokens,
            pages: SequencePages::new(),
        }
    }

    /// All tokens, computed or not.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of tokens, computed or not.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Has the sequence no token?
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens whose keys and values are stored.
    pub fn n_computed(&self) -> usize {
        self.pages.len() as usize
    }

    /// Adds tokens that are not computed yet.
    pub fn push(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }
}
