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

    /// A mask over `n_vocab` tokens from words of 32 bits, the lowest token
    /// first; bits behind the last token mean nothing.
    pub fn from_words(words: &[u32], n_vocab: usize) -> TokenMask {
        let mut mask = TokenMask::none(n_vocab);
        for (bits, pair) in mask.bits.iter_mut().zip(words.chunks(2)) {
            let high = pair.get(1).map_or(0, |&word| u64::from(word) << 32);
            *bits = u64::from(pair[0]) | high;
        }
        if let Some(last) = mask.bits.last_mut().filter(|_| !n_vocab.is_multiple_of(64)) {
            *last &= (1 << (n_vocab % 64)) - 1;
        }
        mask
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

    /// Forbids `token`; one outside the vocabulary is forbidden anyway.
    pub fn forbid(&mut self, token: u32) {
        if let Some(bits) = self.bits.get_mut(token as usize / 64) {
            *bits &= !(1 << (token % 64));
        }
    }

    /// Forbids what `other`, a mask over as many tokens, does not allow.
    ///
    /// # Panics
    /// If `other` speaks of another number of tokens.
    pub fn intersect(&mut self, other: &TokenMask) {
        assert_eq!(self.n_vocab, other.n_vocab, "masks of two vocabularies");
        for (bits, other) in self.bits.iter_mut().zip(&other.bits) {
            *bits &= other;
        }
    }

    /// Number of allowed tokens.
    pub fn n_allowed(&self) -> usize {
        self.bits
            .iter()
            .map(|bits| bits.count_ones() as usize)
            .sum()
    }

    /// The allowed tokens, ascending.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        self.bits.iter().zip(0u32..).flat_map(|(&bits, word)| {
            let mut rest = bits;
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros();
                rest &= rest.checked_sub(1)?;
                Some(word * 64 + bit)
            })
        })
    }

    /// Is `token` allowed? A token outside the vocabulary never is.
    pub fn is_allowed(&self, token: u32) -> bool {
        (token as usize) < self.n_vocab && self.bits[token as usize / 64] >> (token % 64) & 1 == 1
    }
}

/// Follows one sequence: says what may come next and where it ends.
pub trait Guide: Send {
    /// What may be sampled at the current place. A mask that allows no token
    /// says that the sequence cannot go on: the sampler fails by name, and
    /// [`Guide::failure`] says why.
    fn constraint(&mut self) -> Constraint;

    /// Takes the token that was sampled at the current place.
    fn accept(&mut self, token: u32) -> Verdict;

    /// Why no token fits at the current place; `None` where one does, or where
    /// the guide never restricts anything.
    fn failure(&self) -> Option<String> {
        None
    }

    /// An independent copy in the same state.
    fn fork(&self) -> Box<dyn Guide>;
}
