//! Which tokens a text was made of: so that a message that was generated here
//! comes back in the next prompt as the very tokens that the model wrote.
//!
//! A model does not always write a text in the tokens that encoding it gives. The
//! prefix cache looks for tokens, so the text alone would miss it. What lies
//! between two control tokens is encoded on its own: that is what is remembered,
//! where it differs from the encoding. What a reader would get wrong: the key is
//! not the text but all tokens before it and the text. The same words in
//! another conversation, or of a user, are encoded as ever, and what a prompt's
//! tokens are never depends on what others talked about.

use crate::tokenizer::{ControlText, Tokenizer};
use blake3::Hasher;
use lru::LruCache;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an entry costs beside its tokens, about.
const ENTRY_BYTES: usize = 160;

type Key = [u8; 32];

/// The tokens of texts that were generated here, least recently used first out.
///
/// It can be shared between threads; one for each model.
#[derive(Debug)]
pub struct Memo {
    tokenizer: Arc<Tokenizer>,
    most_bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    entries: LruCache<Key, Arc<[u32]>>,
    counts: MemoCounts,
}

/// What a memo holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoCounts {
    /// Texts in it.
    pub n_entries: usize,
    /// Bytes that they take, about; never more than the limit.
    pub n_bytes: usize,
    /// Texts that were found in it and given their tokens.
    pub n_found: u64,
    /// Texts that had to leave.
    pub n_evicted: u64,
}

impl Memo {
    /// An empty memo that takes `most_bytes` at most; 0 turns it off.
    pub fn new(tokenizer: Arc<Tokenizer>, most_bytes: usize) -> Memo {
        Memo {
            tokenizer,
            most_bytes,
            state: Mutex::new(State {
                entries: LruCache::unbounded(),
                counts: MemoCounts::default(),
            }),
        }
    }

    /// Remembers what was generated behind a prompt. Tokens that do not make a
    /// text exactly, such as half a character, are left out.
    pub fn remember(&self, prompt: &[u32], generated: &[u32]) {
        let tokens = [prompt, generated].concat();
        let mut prefix = Prefix::new(&self.tokenizer);
        let mut start = 0;
        while start < tokens.len() {
            let length = tokens[start..]
                .iter()
                .position(|&id| self.tokenizer.is_border(id))
                .unwrap_or(tokens.len() - start);
            let end = start + length;
            if end > prompt.len() && length > 0 {
                prefix.extend_to(&tokens[..start]);
                self.remember_span(&prefix, &tokens[start..end]);
            }
            start = end + 1;
        }
    }

    fn remember_span(&self, prefix: &Prefix, ids: &[u32]) {
        let bytes = self.tokenizer.decode_bytes(ids, ControlText::Skip);
        let Ok(text) = String::from_utf8(bytes) else {
            return;
        };
        let mut encoded = Vec::new();
        self.tokenizer.encode_plain(&text, &mut encoded);
        if !text.is_empty() && encoded != ids {
            self.insert(prefix.key(&text), ids.into());
        }
    }

    fn insert(&self, key: Key, ids: Arc<[u32]>) {
        if cost(&ids) > self.most_bytes {
            return;
        }
        let mut state = self.state();
        let State { entries, counts } = &mut *state;
        let mut n_bytes = counts.n_bytes + cost(&ids);
        n_bytes -= entries.put(key, ids).map_or(0, |old| cost(&old));
        while n_bytes > self.most_bytes {
            let Some((_, oldest)) = entries.pop_lru() else {
                break;
            };
            n_bytes -= cost(&oldest);
            counts.n_evicted += 1;
        }
        counts.n_bytes = n_bytes;
        counts.n_entries = entries.len();
    }

    /// Appends the ids of `text`, which stands between two control tokens: those
    /// that it was made of behind the very tokens `ids`, else those that encoding
    /// gives.
    pub(crate) fn encode(&self, prefix: &mut Prefix, text: &str, ids: &mut Vec<u32>) {
        match self.find(prefix, text, ids) {
            Some(found) => ids.extend_from_slice(&found),
            None => self.tokenizer.encode_plain(text, ids),
        }
    }

    fn find(&self, prefix: &mut Prefix, text: &str, ids: &[u32]) -> Option<Arc<[u32]>> {
        if text.is_empty() || self.state().entries.is_empty() {
            return None;
        }
        prefix.extend_to(ids);
        let mut state = self.state();
        let found = state.entries.get(&prefix.key(text)).cloned()?;
        state.counts.n_found += 1;
        Some(found)
    }

    /// What it holds and did.
    pub fn counts(&self) -> MemoCounts {
        self.state().counts
    }

    /// No step in between leaves the state inconsistent, so a panic elsewhere
    /// does no harm.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cost(ids: &[u32]) -> usize {
    ENTRY_BYTES + size_of_val(ids)
}

/// A digest of tokens that only grow; a BOS in front does not count, since it may
/// be put there later.
pub(crate) struct Prefix {
    bos: Option<u32>,
    hasher: Hasher,
    n_tokens: usize,
}

impl Prefix {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Prefix {
        Prefix {
            bos: tokenizer.bos(),
            hasher: Hasher::new(),
            n_tokens: 0,
        }
    }

    /// `tokens` begin with those that were there before.
    fn extend_to(&mut self, tokens: &[u32]) {
        let tokens = match tokens.split_first() {
            Some((first, rest)) if Some(*first) == self.bos => rest,
            _ => tokens,
        };
        let new = &tokens[self.n_tokens..];
        let bytes: Vec<u8> = new.iter().flat_map(|token| token.to_le_bytes()).collect();
        self.hasher.update(&bytes);
        self.n_tokens = tokens.len();
    }

    /// The key of a text behind these tokens.
    fn key(&self, text: &str) -> Key {
        let mut hasher = self.hasher.clone();
        hasher.update(&(self.n_tokens as u64).to_le_bytes());
        hasher.update(text.as_bytes());
        *hasher.finalize().as_bytes()
    }
}
