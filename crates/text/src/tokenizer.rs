//! Text to token ids and whole id lists back to text.
//!
//! What one would get wrong: the same characters are a control token in a
//! template and ordinary text in a user's message. Every entry point
//! therefore asks which of the two a text is ([`Special`]), and a rendered chat
//! is a list of [`Segment`]s, not a string. Plain text on both sides of a
//! segment border is still one text to the merges.
//!
//! No text normalization is done: a GGUF file does not say which one its
//! tokenizer had, and decoding gives back what was encoded.

use crate::Error;
use crate::byte_level::{self, ByteLevel};
use crate::sentencepiece::{self, SentencePiece};
use crate::vocab::{self, ADD_BOS, SpecialIds, TokenType, Vocab, required};
use aho_corasick::{AhoCorasick, MatchKind};
use gguf::Metadata;

const MODEL: &str = "tokenizer.ggml.model";
const SUPPORTED_MODELS: &str = "gpt2, llama";

/// May a text spell control tokens?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// Yes: `<|eot|>` becomes the control token. For templates.
    Parse,
    /// No: `<|eot|>` is seven characters like any others. For what users write.
    Text,
}

/// A part of a text and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The characters.
    pub text: String,
    /// May they spell control tokens?
    pub special: Special,
}

/// What decoding makes of tokens that stand for no text (control, unknown,
/// unused).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlText {
    /// They leave no trace.
    Skip,
    /// They are spelled as the file spells them.
    Keep,
}

/// The model that turns plain text into ids.
#[derive(Debug)]
enum Model {
    ByteLevel(Box<ByteLevel>),
    SentencePiece(Box<SentencePiece>),
}

/// Finds tokens that are matched as a whole; the longest of those that start
/// first.
#[derive(Debug)]
struct Matcher {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl Matcher {
    fn new(
        vocab: &Vocab,
        is_matched: impl Fn(TokenType) -> bool,
    ) -> Result<Option<Matcher>, Error> {
        let (ids, texts): (Vec<u32>, Vec<&str>) = vocab
            .iter()
            .filter(|&(_, text, kind)| !text.is_empty() && is_matched(kind))
            .map(|(id, text, _)| (id, text))
            .unzip();
        if ids.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts)
            .map_err(|source| Error::TooManySpecialTokens {
                found: ids.len(),
                reason: source.to_string(),
            })?;
        Ok(Some(Matcher { automaton, ids }))
    }

    /// Hands every match to `matched` as (text before it, id); gives the text
    /// behind the last.
    fn split<'t>(&self, text: &'t str, mut matched: impl FnMut(&'t str, u32)) -> &'t str {
        let mut start = 0;
        for found in self.automaton.find_iter(text) {
            let id = self.ids[found.pattern().as_usize()];
            matched(&text[start..found.start()], id);
            start = found.end();
        }
        &text[start..]
    }
}

/// A file's tokenizer.
///
/// It is immutable and can be shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    model: Model,
    /// All that is matched in a template: control, unknown, user-defined.
    specials: Option<Matcher>,
    /// All that is matched in any text: user-defined.
    user_defined: Option<Matcher>,
    add_bos: bool,
}

impl Tokenizer {
    /// Builds the tokenizer that `metadata` describes in `tokenizer.ggml.*`.
    ///
    /// Models: `gpt2` (byte-level BPE) and `llama` (SentencePiece-style). A
    /// missing `pre` means `gpt-2`; a missing `add_bos_token` means yes for
    /// `llama` and Llama 3 files that name a BOS and no for others.
    /// `add_eos_token` is not read: it is about finished documents, and every
    /// text here is one that shall go on.
    ///
    /// # Errors
    /// Every missing, misshapen or inconsistent key, by name.
    pub fn from_metadata(metadata: &Metadata) -> Result<Tokenizer, Error> {
        let name = required(metadata.str(MODEL)?, MODEL, SUPPORTED_MODELS)?;
        let (vocab, model) = match name {
            "gpt2" => {
                let vocab = Vocab::from_metadata(metadata, byte_level::token_bytes)?;
                let model = Model::ByteLevel(Box::new(ByteLevel::from_metadata(metadata, &vocab)?));
                (vocab, model)
            }
            "llama" => {
                let vocab = Vocab::from_metadata(metadata, sentencepiece::token_bytes)?;
                let model =
                    Model::SentencePiece(Box::new(SentencePiece::from_metadata(metadata, &vocab)?));
                (vocab, model)
            }
            other => {
                return Err(Error::UnknownModel {
                    found: gguf::shown(other),
                    supported: SUPPORTED_MODELS,
                });
            }
        };
        let is_llama = match &model {
            Model::ByteLevel(model) => model.is_llama3(),
            Model::SentencePiece(_) => true,
        };
        let special = vocab.special();
        let add_bos = flag(metadata, ADD_BOS, is_llama, vocab::BOS, special.bos)?;
        let specials = Matcher::new(&vocab, |kind| {
            use TokenType::{Control, Unknown, UserDefined};
            matches!(kind, Control | Unknown | UserDefined)
        })?;
        let user_defined = Matcher::new(&vocab, |kind| kind == TokenType::UserDefined)?;
        Ok(Tokenizer {
            vocab,
            model,
            specials,
            user_defined,
            add_bos,
        })
    }

    /// The ids of `text`; BOS is not added.
    ///
    /// With [`Special::Text`] no control token is ever among them. Bytes that
    /// the vocabulary cannot spell are left out, see [`Tokenizer::missing_bytes`].
    pub fn encode(&self, text: &str, special: Special) -> Vec<u32> {
        let parts = std::iter::once((text, special));
        self.encode_parts(parts, |plain, ids| self.encode_plain(plain, ids))
    }

    /// The ids of a text whose parts come from different writers; BOS is not
    /// added.
    ///
    /// Control tokens are found inside runs of [`Special::Parse`] segments only;
    /// what lies between two control tokens is encoded as one string.
    pub fn encode_segments(&self, segments: &[Segment]) -> Vec<u32> {
        self.encode_segments_with(segments, |plain, ids| self.encode_plain(plain, ids))
    }

    /// As [`Tokenizer::encode_segments`], but `encode` appends the ids of what
    /// lies between two control tokens; it sees all ids before.
    pub(crate) fn encode_segments_with(
        &self,
        segments: &[Segment],
        encode: impl FnMut(&str, &mut Vec<u32>),
    ) -> Vec<u32> {
        let parts = segments.iter().map(|s| (s.text.as_str(), s.special));
        self.encode_parts(parts, encode)
    }

    /// The ids of a prompt for plain completion: with one BOS in front if the
    /// file wants one and the text does not spell it itself.
    pub fn encode_prompt(&self, text: &str, special: Special) -> Vec<u32> {
        self.with_bos(self.encode(text, special))
    }

    /// `ids` with one BOS in front if the file wants one and they do not begin
    /// with it: a chat template may write it itself.
    pub fn with_bos(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if let Some(bos) = self.bos().filter(|_| self.add_bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        ids
    }

    fn encode_parts<'p>(
        &self,
        parts: impl Iterator<Item = (&'p str, Special)>,
        mut encode: impl FnMut(&str, &mut Vec<u32>),
    ) -> Vec<u32> {
        let mut ids = Vec::new();
        // Plain text since the last control token.
        let mut plain = String::new();
        // Parts of templates since the last user text.
        let mut template = String::new();
        for (text, special) in parts.filter(|(text, _)| !text.is_empty()) {
            match special {
                Special::Parse => template.push_str(text),
                Special::Text => {
                    self.parse_template(&template, &mut plain, &mut ids, &mut encode);
                    template.clear();
                    plain.push_str(text);
                }
            }
        }
        self.parse_template(&template, &mut plain, &mut ids, &mut encode);
        encode(&plain, &mut ids);
        ids
    }

    /// Encodes `template` up to its last control token; moves the rest to `plain`.
    fn parse_template(
        &self,
        template: &str,
        plain: &mut String,
        ids: &mut Vec<u32>,
        encode: &mut impl FnMut(&str, &mut Vec<u32>),
    ) {
        let Some(matcher) = &self.specials else {
            plain.push_str(template);
            return;
        };
        let rest = matcher.split(template, |before, id| {
            plain.push_str(before);
            if self.vocab.kind(id) == Some(TokenType::UserDefined) {
                // Left to `encode_plain`, which sees the text across borders.
                plain.push_str(self.vocab.text(id).unwrap_or_default());
            } else {
                encode(plain, ids);
                plain.clear();
                ids.push(id);
            }
        });
        plain.push_str(rest);
    }

    /// Appends the ids of text without control tokens.
    pub(crate) fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) {
        let rest = match &self.user_defined {
            Some(matcher) => matcher.split(text, |before, id| {
                self.encode_ordinary(before, ids);
                ids.push(id);
            }),
            None => text,
        };
        self.encode_ordinary(rest, ids);
    }

    /// Appends the ids of text in which nothing is matched as a whole.
    fn encode_ordinary(&self, text: &str, ids: &mut Vec<u32>) {
        match &self.model {
            Model::ByteLevel(model) => model.encode(text, ids),
            Model::SentencePiece(model) => model.encode(text, &self.vocab, ids),
        }
    }

    /// The text of `ids`; invalid UTF-8 becomes U+FFFD as in
    /// [`String::from_utf8_lossy`], ids outside the vocabulary leave no trace.
    ///
    /// SentencePiece files that put a blank before a text have it taken off
    /// again, at the start and behind special tokens.
    pub fn decode(&self, ids: &[u32], control: ControlText) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids, control)).into_owned()
    }

    /// The bytes of the text of `ids`.
    pub(crate) fn decode_bytes(&self, ids: &[u32], control: ControlText) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut at_start = true;
        for &id in ids {
            bytes.extend_from_slice(self.piece(id, control, &mut at_start));
        }
        bytes
    }

    /// The bytes that `id` adds to a text; `at_start` says whether the blank
    /// before a text may come now.
    pub(crate) fn piece(&self, id: u32, control: ControlText, at_start: &mut bool) -> &[u8] {
        let Some(kind) = self.vocab.kind(id) else {
            return &[];
        };
        let bytes = self.vocab.bytes(id).unwrap_or_default();
        match kind {
            TokenType::Control | TokenType::Unknown | TokenType::Unused => {
                *at_start = true;
                match control {
                    ControlText::Skip => &[],
                    ControlText::Keep => self.vocab.text(id).unwrap_or_default().as_bytes(),
                }
            }
            TokenType::UserDefined => {
                *at_start = true;
                bytes
            }
            TokenType::Byte => {
                *at_start = false;
                bytes
            }
            TokenType::Normal => {
                let strip = std::mem::replace(at_start, false) && self.add_space_prefix();
                let rest = bytes.strip_prefix(b" ").filter(|_| strip);
                rest.unwrap_or(bytes)
            }
        }
    }

    /// Is a blank put before a text when it is encoded, and taken off again?
    pub(crate) fn add_space_prefix(&self) -> bool {
        match &self.model {
            Model::ByteLevel(_) => false,
            Model::SentencePiece(model) => model.add_space_prefix(),
        }
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The bytes that a token stands for: empty for control, unknown and
    /// unused tokens. `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocab.bytes(id)
    }

    /// A token as the file spells it, which is not the text it stands for:
    /// `Ġthe` for " the". `None` outside the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// Does the token mark structure rather than stand for text?
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.kind(id) == Some(TokenType::Control)
    }

    /// Is the token found in a template and never between its plain texts?
    pub(crate) fn is_border(&self, id: u32) -> bool {
        let kind = self.vocab.kind(id);
        matches!(kind, Some(TokenType::Control | TokenType::Unknown))
    }

    /// The token that the file spells `text`.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.vocab.id_of(text)
    }

    /// Ids with a role.
    pub fn special(&self) -> &SpecialIds {
        self.vocab.special()
    }

    /// Beginning of text.
    pub fn bos(&self) -> Option<u32> {
        self.vocab.special().bos
    }

    /// Does the file want BOS before a text? Then it names one.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// The tokens that end an answer, ascending: EOS and end of turn.
    ///
    /// End of message is none of them: after it the turn goes on.
    pub fn end_tokens(&self) -> Vec<u32> {
        let special = self.vocab.special();
        let mut ids: Vec<u32> = special.eos.into_iter().chain(special.eot).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Bytes that no token spells, ascending: text that holds them does not
    /// survive encoding (byte-level BPE leaves the byte out; SentencePiece has
    /// only the unknown token for its character unless the character itself is
    /// a token). Vocabularies that were trained without the rare ones do exist.
    pub fn missing_bytes(&self) -> Vec<u8> {
        match &self.model {
            Model::ByteLevel(model) => model.missing_bytes().to_vec(),
            Model::SentencePiece(model) => model.missing_bytes(),
        }
    }
}

/// A truth value that needs a token when the file says yes; `default` holds if
/// it says nothing and names the token.
fn flag(
    metadata: &Metadata,
    flag_key: &'static str,
    default: bool,
    id_key: &'static str,
    id: Option<u32>,
) -> Result<bool, Error> {
    match metadata.bool(flag_key)? {
        Some(true) if id.is_none() => Err(Error::SpecialIdMissing { id_key, flag_key }),
        Some(value) => Ok(value),
        None => Ok(default && id.is_some()),
    }
}
