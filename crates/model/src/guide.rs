//! What the text side wants of a sequence, asked token by token.
//!
//! The engine sees tokens only. Stop strings, the end of a turn, grammars,
//! forced tool calls and thinking budgets reach it through this trait. A guide
//! is forked so that speculation can ask it row by row along a draft and keep
//! the fork of the last accepted row: the answer is cut exactly where plain
//! decoding would cut it.

/// What may be sampled next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// Any token.
    Free,
    /// This token and no other; nothing is sampled.
    Forced(u32),
    /// One of the tokens that the mask allows.
    Masked(TokenMask),
}

/// Does generation go on after a token?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Continue,
    /// The token is the last one.
    Stop,
}

/// A set of allowed token ids, one bit each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    bits: Vec<u64>,
    n_vocab: usize,
}

impl TokenMask {
    /// A mask over `n_vocab` tokens that allows none.
    pub fn none(n_vocab: usize) -> TokenMask {
        TokenMask {
            bits: vec![0; n_vocab.div_ceil(64)],
            n_vocab,
        }
    }

    /// Number of tokens the mask speaks of.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Allows `token`.
    ///
    /// # Panics
    /// If `token` is not below `n_vocab`.
    pub fn allow(&mut self, token: u32) {
        assert!(
            (token as usize) < self.n_vocab,
            "token {token} of {}",
            self.n_vocab
        );
        self.bits[token as usize / 64] |= 1 << (token % 64);
    }

    /// Is `token` allowed? A token outside the vocabulary never is.
    pub fn is_allowed(&self, token: u32) -> bool {
        (token as usize) < self.n_vocab && self.bits[token as usize / 64] >> (token % 64) & 1 == 1
    }
}

/// Follows one sequence: says what may come next and where it ends.
pub trait Guide: Send {
    /// What may be sampled at the current place.
    fn constraint(&mut self) -> Constraint;

    /// Takes the token that was sampled at the current place.
    fn accept(&mut self, token: u32) -> Verdict;

    /// An independent copy in the same state.
    fn fork(&self) -> Box<dyn Guide>;
}
