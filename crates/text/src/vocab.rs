//! The vocabulary of a file: every token's text, kind and bytes, and the ids
//! with a role.
//!
//! What one would get wrong: a token's text is not what it stands for. A
//! normal token of a byte-level vocabulary is spelled in the alphabet that
//! GPT-2 uses for bytes (`Ġ` is a blank), one of a SentencePiece vocabulary
//! has U+2581 for a blank, and `<0x0A>` is one byte there; the text of control
//! and user-defined tokens is always meant literally. Nor is a token's type
//! what the file says: what frames a chat is a control token, whatever the
//! file calls it.
//!
//! Source: the GGUF specification, section "Tokenizer".

use crate::Error;
use gguf::Metadata;
use std::collections::HashMap;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
pub(crate) const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub(crate) const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const PAD: &str = "tokenizer.ggml.padding_token_id";
const UNK: &str = "tokenizer.ggml.unknown_token_id";
const MASK: &str = "tokenizer.ggml.mask_token_id";

/// What frames the messages of a turn: start, message, end of message, end of
/// turn.
pub(crate) const FRAME_MARKERS: [&str; 4] = ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"];

/// What a token is for; the format's numbers 1 to 6 in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenType {
    /// Made from text by the model's merges.
    Normal,
    /// Stands for text that no token can spell.
    Unknown,
    /// Marks structure: beginning of text, end of turn, ...
    Control,
    /// Matched in any text before the merges run.
    UserDefined,
    /// Fills a hole in the id range.
    Unused,
    /// One byte of a SentencePiece vocabulary, spelled `<0xXX>`.
    Byte,
}

impl TokenType {
    fn new(number: i64) -> Option<TokenType> {
        Some(match number {
            1 => TokenType::Normal,
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => return None,
        })
    }

    /// The type that a token has here. Files exist that call the tokens of a
    /// chat's frame user-defined; these would be found in any text, and a
    /// user's words could end a turn or begin the other side's.
    fn hardened(self, id: u32, text: &str, special: &SpecialIds) -> TokenType {
        let is_spelled_as_control =
            text.len() > 4 && text.starts_with("<|") && text.ends_with("|>");
        let has_role = [special.bos, special.eos, special.eot, special.eom].contains(&Some(id));
        let is_found_in_text =
            self == TokenType::UserDefined && (is_spelled_as_control || has_role);
        match is_found_in_text || FRAME_MARKERS.contains(&text) {
            true => TokenType::Control,
            false => self,
        }
    }
}

/// Ids with a role; `None` where the file names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Beginning of text.
    pub bos: Option<u32>,
    /// End of text.
    pub eos: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// End of message: the turn goes on with another message.
    pub eom: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Unknown.
    pub unk: Option<u32>,
    /// The unknown place that a block-diffusion drafter fills.
    pub mask: Option<u32>,
}

impl SpecialIds {
    fn from_metadata(metadata: &Metadata, n_vocab: usize) -> Result<SpecialIds, Error> {
        let id = |key: &'static str| -> Result<Option<u32>, Error> {
            match metadata.u32(key)? {
                Some(found) if found as usize >= n_vocab => Err(Error::SpecialIdOutOfRange {
                    key,
                    found,
                    n_vocab,
                }),
                id => Ok(id),
            }
        };
        Ok(SpecialIds {
            bos: id(BOS)?,
            eos: id(EOS)?,
            eot: id(EOT)?,
            eom: id(EOM)?,
            pad: id(PAD)?,
            unk: id(UNK)?,
            mask: id(MASK)?,
        })
    }
}

/// Byte strings one after another in one allocation, by index.
#[derive(Debug, Default)]
struct Arena {
    data: Vec<u8>,
    ends: Vec<usize>,
}

impl Arena {
    /// Ends the current string: all that was added to `data` since the last.
    fn seal(&mut self) {
        self.ends.push(self.data.len());
    }

    fn get(&self, index: usize) -> Option<&[u8]> {
        let &end = self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.data[start..end])
    }
}

/// All tokens of a file.
#[derive(Debug)]
pub(crate) struct Vocab {
    texts: Arena,
    bytes: Arena,
    types: Vec<TokenType>,
    ids: HashMap<Box<str>, u32>,
    special: SpecialIds,
}

impl Vocab {
    /// Reads tokens, types and special ids.
    ///
    /// `bytes_of(id, text, kind, out)` appends what a normal, user-defined or
    /// byte token stands for; other tokens stand for nothing.
    pub(crate) fn from_metadata(
        metadata: &Metadata,
        bytes_of: impl Fn(u32, &str, TokenType, &mut Vec<u8>) -> Result<(), Error>,
    ) -> Result<Vocab, Error> {
        let tokens = required(metadata.strings(TOKENS)?, TOKENS, "an array of strings")?;
        let numbers = metadata.integers(TOKEN_TYPE)?;
        let numbers = required(numbers, TOKEN_TYPE, "an array of integers")?;
        let n_vocab = tokens.len();
        if n_vocab == 0 || u32::try_from(n_vocab).is_err() {
            return Err(Error::TokenCount {
                found: n_vocab,
                most: u32::MAX,
            });
        }
        same_length(TOKEN_TYPE, numbers.len(), n_vocab)?;

        let special = SpecialIds::from_metadata(metadata, n_vocab)?;
        let mut texts = Arena::default();
        let mut bytes = Arena::default();
        let mut types = Vec::with_capacity(n_vocab);
        let mut ids = HashMap::with_capacity(n_vocab);
        for ((id, text), &number) in (0u32..).zip(tokens.iter()).zip(&numbers) {
            let kind =
                TokenType::new(number).ok_or(Error::UnknownTokenType { id, found: number })?;
            let kind = kind.hardened(id, text, &special);
            if let Some(first) = ids.insert(text.into(), id) {
                return Err(Error::DuplicateToken {
                    first,
                    second: id,
                    text: gguf::shown(text),
                });
            }
            texts.data.extend_from_slice(text.as_bytes());
            texts.seal();
            if let TokenType::Normal | TokenType::UserDefined | TokenType::Byte = kind {
                bytes_of(id, text, kind, &mut bytes.data)?;
            }
            bytes.seal();
            types.push(kind);
        }
        Ok(Vocab {
            texts,
            bytes,
            types,
            ids,
            special,
        })
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.types.len()
    }

    /// The token's text as the file spells it.
    pub(crate) fn text(&self, id: u32) -> Option<&str> {
        let text = self.texts.get(id as usize)?;
        Some(std::str::from_utf8(text).expect("copied from a str"))
    }

    /// What the token stands for; empty for control, unknown and unused tokens.
    pub(crate) fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id as usize)
    }

    /// What kind of token this is.
    pub(crate) fn kind(&self, id: u32) -> Option<TokenType> {
        self.types.get(id as usize).copied()
    }

    /// The token that the file spells `text`.
    pub(crate) fn id_of(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Ids with a role.
    pub(crate) fn special(&self) -> &SpecialIds {
        &self.special
    }

    /// Every id with its text and kind, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str, TokenType)> {
        (0u32..).zip(&self.types).map(|(id, &kind)| {
            let text = self.text(id).expect("every token has a text");
            (id, text, kind)
        })
    }
}

/// The value of a key that must be there.
pub(crate) fn required<T>(
    value: Option<T>,
    key: &'static str,
    wanted: &'static str,
) -> Result<T, Error> {
    value.ok_or(Error::KeyMissing { key, wanted })
}

/// An array that runs parallel to the tokens must be as long.
pub(crate) fn same_length(key: &'static str, found: usize, expected: usize) -> Result<(), Error> {
    if found != expected {
        return Err(Error::ArrayLength {
            key,
            found,
            expected,
        });
    }
    Ok(())
}
