//! Byte-level BPE: every byte of a piece becomes one character of the GPT-2
//! alphabet, then merges join them by rank.
//!
//! What one would get wrong: control tokens are not part of the merge model at
//! all, so that text can never become one, whatever the merges say.
//!
//! Sources: Sennrich et al., "Neural Machine Translation of Rare Words with
//! Subword Units" (2016); Radford et al., "Language Models are Unsupervised
//! Multitask Learners" (2019), section 2.2, for the alphabet.

use crate::Error;
use crate::pretokenizer::Pretokenizer;
use crate::vocab::{TokenType, Vocab, required};
use gguf::{Metadata, StringArray};
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Merges, Vocab as BpeVocab};

const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";

/// Code points from here on stand for the bytes that are not printable.
const FIRST_MOVED: u32 = 0x100;

/// Does the alphabet leave this byte where it is (as the code point of the same number)?
const fn is_kept(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character for each byte.
const ALPHABET: [char; 256] = {
    let mut alphabet = ['\0'; 256];
    let mut moved = FIRST_MOVED;
    let mut byte = 0;
    while byte < 256 {
        let code = if is_kept(byte as u8) {
            byte as u32
        } else {
            moved += 1;
            moved - 1
        };
        alphabet[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => panic!("all codes lie below U+0144"),
        };
        byte += 1;
    }
    alphabet
};

/// The byte for each character below U+0144; `None` for those outside the alphabet.
const BYTES: [Option<u8>; 0x144] = {
    let mut bytes = [None; 0x144];
    let mut byte = 0;
    while byte < 256 {
        bytes[ALPHABET[byte] as usize] = Some(byte as u8);
        byte += 1;
    }
    bytes
};

/// Appends what a token stands for.
///
/// A normal token with a character outside the alphabet is literal, as in the
/// `tokenizers` byte-level decoder.
pub(crate) fn token_bytes(
    _id: u32,
    text: &str,
    kind: TokenType,
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    let start = out.len();
    if kind == TokenType::Normal {
        let spelled = text.chars().all(|c| {
            let byte = BYTES.get(c as usize).copied().flatten();
            out.extend(byte);
            byte.is_some()
        });
        if spelled {
            return Ok(());
        }
        out.truncate(start);
    }
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

/// The merge model of a byte-level vocabulary.
#[derive(Debug)]
pub(crate) struct ByteLevel {
    bpe: BPE,
    pretokenizer: Pretokenizer,
    missing_bytes: Vec<u8>,
}

impl ByteLevel {
    /// Reads the splitting rule (a missing key means `gpt-2`) and the merges.
    pub(crate) fn from_metadata(metadata: &Metadata, vocab: &Vocab) -> Result<ByteLevel, Error> {
        let pre = metadata.str(PRE)?.unwrap_or("gpt-2");
        let pretokenizer = Pretokenizer::new(pre).ok_or_else(|| Error::UnknownPre {
            found: gguf::shown(pre),
            supported: Pretokenizer::names(),
        })?;
        let merges = required(metadata.strings(MERGES)?, MERGES, "an array of strings")?;
        let pairs = merge_pairs(merges)?;
        let words = merge_vocab(vocab);

        let bpe = BPE::builder()
            .vocab_and_merges(words, pairs)
            .ignore_merges(pretokenizer.is_llama3())
            .build()
            .map_err(|source| unknown_merge(merges, vocab, &source.to_string()))?;
        let missing = |&byte: &u8| {
            let character = ALPHABET[usize::from(byte)].to_string();
            bpe.token_to_id(&character).is_none()
        };
        let missing_bytes = (0..=u8::MAX).filter(missing).collect();
        Ok(ByteLevel {
            bpe,
            pretokenizer,
            missing_bytes,
        })
    }

    /// Is this one of the Llama 3 rules?
    pub(crate) fn is_llama3(&self) -> bool {
        self.pretokenizer.is_llama3()
    }

    /// Bytes that no token spells: they vanish from text.
    pub(crate) fn missing_bytes(&self) -> &[u8] {
        &self.missing_bytes
    }

    /// Appends the ids of `text`, in which nothing is special.
    pub(crate) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut spelled = String::new();
        self.pretokenizer.split(text, |piece| {
            spelled.clear();
            spelled.extend(piece.bytes().map(|byte| ALPHABET[usize::from(byte)]));
            let tokens = self
                .bpe
                .tokenize(&spelled)
                .expect("only a missing unknown token is an error, and none is set");
            ids.extend(tokens.iter().map(|token| token.id));
        });
    }
}

/// Both parts of every merge.
fn merge_pairs(merges: &StringArray) -> Result<Merges, Error> {
    let pair = |(index, merge): (usize, &str)| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
            Ok((left.to_string(), right.to_string()))
        }
        _ => Err(Error::MergeWithoutBlank {
            index,
            found: gguf::shown(merge),
        }),
    };
    merges.iter().enumerate().map(pair).collect()
}

/// The tokens that merges may name and make.
fn merge_vocab(vocab: &Vocab) -> BpeVocab {
    let mut words = BpeVocab::default();
    words.reserve(vocab.len());
    for (id, text, kind) in vocab.iter() {
        if is_made_by_merges(kind) {
            words.insert(text.to_string(), id);
        }
    }
    words
}

/// Can merges name and make such a token?
fn is_made_by_merges(kind: TokenType) -> bool {
    matches!(kind, TokenType::Normal | TokenType::UserDefined)
}

/// Finds the merge that the builder refused, to name it.
fn unknown_merge(merges: &StringArray, vocab: &Vocab, reason: &str) -> Error {
    for (index, merge) in merges.iter().enumerate() {
        let Some((left, right)) = merge.split_once(' ') else {
            continue;
        };
        for token in [left, right, &format!("{left}{right}")] {
            let found = match vocab.id_of(token).and_then(|id| vocab.kind(id)) {
                None => "not in the vocabulary",
                Some(TokenType::Control) => "a control token",
                Some(kind) if !is_made_by_merges(kind) => "an unknown, unused or byte token",
                Some(_) => continue,
            };
            return Error::MergeUnknownToken {
                index,
                merge: gguf::shown(merge),
                token: gguf::shown(token),
                found,
            };
        }
    }
    Error::Bpe {
        reason: gguf::shown(reason),
    }
}
