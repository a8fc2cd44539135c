//! Vocabularies of any size whose merges are valid.
//!
//! A vocabulary begins with the ordinary tokens of the bundled model (bytes,
//! then what merges of English text make). Behind them come pseudo-words of
//! one to four and more syllables, each with and without a blank before it;
//! the control tokens are last, at the real model's distances. Every part of a
//! pseudo-word is a token too, so there are several merges for one token, as in
//! the real file.
//!
//! What a reader would get wrong: a vocabulary is a function of its size and
//! its number of merges, not of the seed: a drafter and its target agree
//! whatever their seeds are. With the bundled model's size it is the bundled
//! model's vocabulary.

use anyhow::{Context, bail};
use gguf::{Array, Metadata, StringArray, Value};
use std::collections::HashSet;

/// Ordinary tokens of a byte.
const N_BYTES: usize = 256;
/// From this size on there are as many control tokens as in the real model.
const LARGE: usize = 1 << 16;
/// A blank in the byte-level alphabet.
const BLANK: char = '\u{120}';

/// Distances of the named control tokens from the first one.
const NAMED: [(usize, &str); 15] = [
    (0, "<|begin_of_text|>"),
    (1, "<|end_of_text|>"),
    (7, "<|eom|>"),
    (8, "<|eot|>"),
    (18, "<|finetune_right_pad|>"),
    (22, "<|start|>"),
    (23, "<|message|>"),
    (80, "<|image_start|>"),
    (81, "<|image_end|>"),
    (82, "<|vid_start|>"),
    (83, "<|vid_end|>"),
    (87, "<|vid_frame_separator|>"),
    (90, "<|image|>"),
    (91, "<|video|>"),
    (92, "<|patch|>"),
];
/// The drafter's mask token, in the real vocabulary.
const MASK: usize = 1818;

/// Tokens and merges.
#[derive(Debug)]
pub struct Vocabulary {
    tokens: Vec<String>,
    merges: Vec<String>,
    n_control: usize,
}

/// Number of control tokens of a vocabulary of `n_vocab`.
fn n_control(n_vocab: usize) -> usize {
    if n_vocab >= LARGE { 2048 } else { 128 }
}

/// The token that stands for what a drafter proposes.
pub fn mask_token(n_vocab: usize) -> u32 {
    let first = n_vocab - n_control(n_vocab);
    (first + MASK).min(n_vocab - 1) as u32
}

/// Syllables of pseudo-words.
const N_SYLLABLES: usize = 18;

fn syllable(digit: usize) -> [char; 2] {
    const CONSONANTS: [char; 6] = ['b', 'd', 'k', 'l', 'm', 's'];
    const VOWELS: [char; 3] = ['a', 'i', 'o'];
    [CONSONANTS[digit / 3], VOWELS[digit % 3]]
}

/// Ordinary tokens in order, each with the place where its first merge cuts it.
struct Ordinary {
    tokens: Vec<String>,
    known: HashSet<String>,
    /// Bytes of the left part; 0 for tokens that no merge here makes.
    cuts: Vec<usize>,
    limit: usize,
}

impl Ordinary {
    /// Adds a token unless it is there; false if the vocabulary is full.
    fn add(&mut self, token: String, cut: usize) -> bool {
        if self.tokens.len() < self.limit && !self.known.contains(&token) {
            self.known.insert(token.clone());
            self.tokens.push(token);
            self.cuts.push(cut);
        }
        self.tokens.len() < self.limit
    }

    /// Adds pseudo-words, shorter ones first, until the vocabulary is full.
    fn add_words(&mut self) {
        for n_syllables in 1u32.. {
            for index in 0..N_SYLLABLES.pow(n_syllables) {
                let digit =
                    |place: u32| index / N_SYLLABLES.pow(n_syllables - 1 - place) % N_SYLLABLES;
                let word: String = (0..n_syllables)
                    .flat_map(|at| syllable(digit(at)))
                    .collect();
                // A syllable is two bytes; the last one is joined to the rest.
                let cut = if n_syllables == 1 { 1 } else { word.len() - 2 };
                let blank_word = format!("{BLANK}{word}");
                let blank_cut = blank_word.len() - if n_syllables == 1 { word.len() } else { 2 };
                if !(self.add(word, cut) && self.add(blank_word, blank_cut)) {
                    return;
                }
            }
        }
    }

    /// Merges beyond the first for a token, at most `wanted`.
    fn further_merges(&self, wanted: usize) -> Vec<String> {
        let mut merges = Vec::new();
        for (token, &first_cut) in self.tokens.iter().zip(&self.cuts) {
            let cuts = token.char_indices().map(|(at, _)| at);
            for cut in cuts.filter(|&cut| cut > 0 && cut != first_cut && first_cut > 0) {
                if merges.len() == wanted {
                    return merges;
                }
                let (left, right) = token.split_at(cut);
                if self.known.contains(left) && self.known.contains(right) {
                    merges.push(format!("{left} {right}"));
                }
            }
        }
        merges
    }
}

impl Vocabulary {
    /// A vocabulary of `n_vocab` tokens on the ground of `base`, the bundled
    /// model's metadata; with `n_merges` merges, by default one for each token
    /// that is no byte.
    pub fn new(
        base: &Metadata,
        n_vocab: usize,
        n_merges: Option<usize>,
    ) -> anyhow::Result<Vocabulary> {
        let n_control = n_control(n_vocab);
        let least = N_BYTES + n_control;
        if n_vocab < least {
            bail!("--vocab: found {n_vocab}, expected at least {least}");
        }
        let limit = n_vocab - n_control;
        let (base_tokens, base_merges) = ordinary(base)?;
        let mut tokens = Ordinary {
            tokens: base_tokens.into_iter().take(limit).collect(),
            known: HashSet::new(),
            cuts: Vec::new(),
            limit,
        };
        tokens.known = tokens.tokens.iter().cloned().collect();
        tokens.cuts = vec![0; tokens.tokens.len()];
        let n_base = tokens.tokens.len();
        let mut merges = base_merges;
        merges.truncate(n_base - N_BYTES);
        if n_base < limit {
            tokens.add_words();
        }
        for (token, &cut) in tokens.tokens.iter().zip(&tokens.cuts).skip(n_base) {
            let (left, right) = token.split_at(cut);
            merges.push(format!("{left} {right}"));
        }
        if let Some(wanted) = n_merges {
            merges.truncate(wanted);
            merges.extend(tokens.further_merges(wanted - merges.len()));
            if merges.len() < wanted {
                let most = merges.len();
                bail!(
                    "--merges: found {wanted}, expected at most {most} for a vocabulary of \
                     {n_vocab} tokens"
                );
            }
        }
        let mut tokens = tokens.tokens;
        tokens.extend((0..n_control).map(control_token));
        Ok(Vocabulary {
            tokens,
            merges,
            n_control,
        })
    }

    /// Adds the tokenizer's keys to `metadata`.
    pub fn describe(&self, metadata: &mut Metadata) {
        let n_ordinary = self.tokens.len() - self.n_control;
        let kind = |id: usize| if id < n_ordinary { 1 } else { 3 };
        let types = (0..self.tokens.len()).map(kind).collect();
        let strings = |v: &[String]| Value::Array(Array::String(v.iter().collect::<StringArray>()));
        let control = |distance: usize| Value::U32((n_ordinary + distance) as u32);
        let mut set = |key: &str, value| {
            metadata.insert(format!("tokenizer.ggml.{key}"), value);
        };
        set("model", Value::String("gpt2".into()));
        set("pre", Value::String("llama4".into()));
        set("tokens", strings(&self.tokens));
        set("token_type", Value::Array(Array::I32(types)));
        set("merges", strings(&self.merges));
        set("bos_token_id", control(0));
        set("eos_token_id", control(1));
        set("eot_token_id", control(8));
        set("padding_token_id", control(18));
        set("add_bos_token", Value::Bool(true));
    }
}

/// The control token at a distance from the first.
fn control_token(distance: usize) -> String {
    match NAMED.iter().find(|named| named.0 == distance) {
        Some((_, text)) => (*text).to_string(),
        None => format!("<|reserved_special_token_{distance}|>"),
    }
}

/// The ordinary tokens of a file and its merges, one for each token that is no byte.
fn ordinary(base: &Metadata) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let missing = "the bundled model has no vocabulary";
    let tokens = base.strings("tokenizer.ggml.tokens")?.context(missing)?;
    let merges = base.strings("tokenizer.ggml.merges")?.context(missing)?;
    let n = N_BYTES + merges.len();
    Ok((
        tokens.iter().take(n).map(str::to_string).collect(),
        merges.iter().map(str::to_string).collect(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_file::ModelArgs;
    use text::{Special, Tokenizer};

    fn base() -> Metadata {
        let bundled = ModelArgs { model: None }.open().expect("the bundled model");
        bundled.gguf.metadata().clone()
    }

    /// Every size is a tokenizer that gives back what it encodes; tokens and
    /// merges are distinct.
    #[test]
    fn sizes() {
        let base = base();
        for (n_vocab, n_merges) in [
            (384, None),
            (385, Some(0)),
            (1000, None),
            (4096, None),
            (32_768, None),
            (40_000, Some(60_000)),
        ] {
            let vocabulary = Vocabulary::new(&base, n_vocab, n_merges).expect("a possible size");
            assert_eq!(vocabulary.tokens.len(), n_vocab);
            let expected = n_merges.unwrap_or(n_vocab - vocabulary.n_control - N_BYTES);
            assert_eq!(vocabulary.merges.len(), expected);
            let distinct: HashSet<&String> = vocabulary.tokens.iter().collect();
            assert_eq!(distinct.len(), n_vocab);
            let distinct: HashSet<&String> = vocabulary.merges.iter().collect();
            assert_eq!(distinct.len(), expected);
            let mut metadata = Metadata::default();
            vocabulary.describe(&mut metadata);
            let tokenizer = Tokenizer::from_metadata(&metadata).expect("a valid tokenizer");
            let text = "Hello, the bakodi said: 日本 <|eot|>";
            let ids = tokenizer.encode(text, Special::Text);
            assert_eq!(tokenizer.decode(&ids, text::ControlText::Keep), text);
            let eot = tokenizer.encode("<|eot|>", Special::Parse);
            assert_eq!(eot, [(n_vocab - vocabulary.n_control + 8) as u32]);
        }
    }

    #[test]
    fn bundled_size_is_the_bundled_vocabulary() {
        let base = base();
        let vocabulary = Vocabulary::new(&base, 4096, None).expect("a possible size");
        let mut metadata = Metadata::default();
        vocabulary.describe(&mut metadata);
        for (key, value) in metadata.iter() {
            assert!(Some(value) == base.get(key), "{key}");
        }
        assert_eq!(mask_token(4096), 4095);
        assert_eq!(mask_token(202_048), 201_818);
    }

    #[test]
    fn impossible_sizes() {
        for (n_vocab, n_merges, expected) in [
            (383, None, "--vocab: found 383, expected at least 384"),
            (
                400,
                Some(17),
                "--merges: found 17, expected at most 16 for a vocabulary of 400 tokens",
            ),
            (
                4096,
                Some(usize::MAX),
                "--merges: found 18446744073709551615, expected at most 3712 for a vocabulary of \
                 4096 tokens",
            ),
        ] {
            let error = Vocabulary::new(&base(), n_vocab, n_merges).expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
    }
}
