//! Grammars over a vocabulary: which tokens keep a text inside a JSON schema,
//! a regular expression or a Lark grammar.
//!
//! The parser is llguidance; what is here is its border with our tokens. What a
//! reader would get wrong: a grammar is about text, so it never allows a control
//! token, not even by its number. Where a text may end is a question of its
//! own ([`Grammar::is_complete`]); which token ends it, the guide knows.
//!
//! A grammar comes from a request that no one has to trust. Its length, the
//! work to compile it and the work for each token are bounded; a grammar that
//! needs more is an error by name.

use crate::error::Error;
use crate::schema;
use crate::tokenizer::{ControlText, Special, Tokenizer};
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv,
};
use llguidance::{Logger, Matcher, ParserFactory};
use lru::LruCache;
use model::TokenMask;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most bytes of a JSON schema, as JSON.
pub const MOST_SCHEMA_BYTES: usize = 128 * 1024;
/// Most bytes of a regular expression or a Lark grammar: the time to compile one
/// grows with the square.
pub const MOST_GRAMMAR_BYTES: usize = 32 * 1024;
/// Stack to compile on, bytes: the library follows rules and references by
/// recursion, and they can be nested as deeply as a grammar is long. The deepest
/// ones of the tests need some 32 MiB; only what is used takes memory.
const STACK_BYTES: usize = 512 << 20;

/// Bytes of compiled grammars that are kept: some thousand of a few lines.
const MOST_KEPT_BYTES: usize = 64 << 20;
/// About what a compiled grammar takes beside its lexer, and for each byte of its
/// source.
const KEPT_BYTES: usize = 16 << 10;
const KEPT_BYTES_PER_BYTE: usize = 64;

/// Most parts of a refused schema that are tried to name the one that is wrong.
const MOST_TRIES: usize = 200;
/// Most lines of the library's error that are shown.
const MOST_LINES: usize = 4;

/// Why a text cannot go on where the grammar names no other reason.
pub(crate) const NOTHING_FITS: &str = "no token of the vocabulary fits";

/// What is compiled.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source {
    JsonSchema(Value),
    Regex(String),
    Lark(String),
    /// A value of a call: a Lark grammar of our own around the schema of a
    /// parameter.
    Parameter(String),
}

impl Source {
    fn kind(&self) -> &'static str {
        match self {
            Source::JsonSchema(_) | Source::Parameter(_) => "JSON schema",
            Source::Regex(_) => "regular expression",
            Source::Lark(_) => "Lark grammar",
        }
    }

    fn text(&self) -> Cow<'_, str> {
        match self {
            Source::JsonSchema(schema) => schema.to_string().into(),
            Source::Regex(text) | Source::Lark(text) | Source::Parameter(text) => text.into(),
        }
    }

    fn most_bytes(&self) -> usize {
        match self {
            Source::JsonSchema(_) | Source::Parameter(_) => MOST_SCHEMA_BYTES,
            Source::Regex(_) | Source::Lark(_) => MOST_GRAMMAR_BYTES,
        }
    }
}

/// Compiles grammars for one vocabulary, and keeps those that were used last.
pub(crate) struct Grammars {
    factory: ParserFactory,
    vocabulary: Arc<Vocabulary>,
    kept: Mutex<Kept>,
}

/// Compiled grammars at their beginning, by digest of their source.
///
/// What comes out is a copy of its own: what one text teaches the lexer counts
/// against the limits of no other, so an answer never depends on earlier ones.
struct Kept {
    grammars: LruCache<[u8; 32], (Grammar, usize)>,
    counts: GrammarCounts,
}

/// What became of grammars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrammarCounts {
    /// Grammars that were compiled.
    pub n_compiled: u64,
    /// Grammars that were there already.
    pub n_found: u64,
    /// Bytes of those that are kept, about.
    pub n_bytes: usize,
}

impl Kept {
    fn find(&mut self, key: &[u8; 32]) -> Option<Grammar> {
        let (grammar, _) = self.grammars.get(key)?;
        self.counts.n_found += 1;
        Some(grammar.copy())
    }

    /// Keeps a grammar of about `n_bytes`; those used longest ago make room.
    fn keep(&mut self, key: [u8; 32], grammar: &Grammar, n_bytes: usize) {
        self.counts.n_compiled += 1;
        if n_bytes > MOST_KEPT_BYTES {
            return;
        }
        let before = self.grammars.put(key, (grammar.copy(), n_bytes));
        self.counts.n_bytes += n_bytes;
        self.counts.n_bytes -= before.map_or(0, |(_, old_bytes)| old_bytes);
        while self.counts.n_bytes > MOST_KEPT_BYTES {
            let Some((_, (_, old_bytes))) = self.grammars.pop_lru() else {
                break;
            };
            self.counts.n_bytes -= old_bytes;
        }
    }
}

impl Grammars {
    /// Builds the trie of the vocabulary, which takes a while: once for each
    /// model.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>) -> Result<Grammars, Error> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer));
        let env: TokEnv = vocabulary.clone();
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(
            |error| Error::GrammarVocabulary {
                reason: shown(&error),
            },
        )?;
        Ok(Grammars {
            factory,
            vocabulary,
            kept: Mutex::new(Kept {
                grammars: LruCache::unbounded(),
                counts: GrammarCounts::default(),
            }),
        })
    }

    /// The vocabulary.
    pub(crate) fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// A grammar at its beginning: one that is kept, or compiled.
    ///
    /// # Errors
    /// [`Error::GrammarTooLarge`], [`Error::Grammar`].
    pub(crate) fn compile(&self, source: &Source) -> Result<Grammar, Error> {
        let text = source.text();
        let (kind, found_bytes) = (source.kind(), text.len());
        let most_bytes = source.most_bytes();
        if found_bytes > most_bytes {
            return Err(Error::GrammarTooLarge {
                kind,
                found_bytes,
                most_bytes,
            });
        }
        // A JSON schema and the grammar around one are never the same text.
        let key = [kind, "\n", &text].concat();
        let key = *blake3::hash(key.as_bytes()).as_bytes();
        if let Some(grammar) = self.kept().find(&key) {
            return Ok(grammar);
        }
        let compiled = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, || self.compile_here(source));
            let thread = thread.map_err(|error| format!("no thread to compile it: {error}"))?;
            let outcome = thread.join();
            outcome.unwrap_or_else(|_| Err("the grammar library panicked".to_owned()))
        });
        let (grammar, lexer_bytes) = compiled.map_err(|reason| Error::Grammar { kind, reason })?;
        let n_bytes = lexer_bytes + KEPT_BYTES + found_bytes * KEPT_BYTES_PER_BYTE;
        self.kept().keep(key, &grammar, n_bytes);
        Ok(grammar)
    }

    /// What became of grammars so far.
    pub(crate) fn counts(&self) -> GrammarCounts {
        self.kept().counts
    }

    /// Nothing in between leaves it inconsistent, so a panic elsewhere does no harm.
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The grammar, and the bytes of its lexer.
    fn compile_here(&self, source: &Source) -> Result<(Grammar, usize), String> {
        let grammar = match source {
            Source::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(with_whitespace(schema.clone()))
            }
            Source::Regex(regex) => {
                check_regex(regex)?;
                TopLevelGrammar::from_regex(regex)
            }
            Source::Lark(lark) | Source::Parameter(lark) => {
                TopLevelGrammar::from_lark(lark.clone())
            }
        };
        let grammar = self.begin(grammar, limits());
        grammar.map_err(|reason| match source {
            Source::JsonSchema(schema) => self.with_place(schema, reason),
            Source::Regex(_) => bare_reason(&reason),
            Source::Lark(_) | Source::Parameter(_) => reason,
        })
    }

    /// A grammar at its beginning, or why there is none. What no text fits is
    /// found here, before anything is generated.
    fn begin(
        &self,
        grammar: TopLevelGrammar,
        limits: ParserLimits,
    ) -> Result<(Grammar, usize), String> {
        let parser = self.factory.create_parser_from_init_ext(
            GrammarInit::Serialized(grammar),
            Logger::new(0, 0),
            InferenceCapabilities::default(),
            limits,
        );
        let parser = parser.map_err(|error| shown(&error))?;
        let lexer_bytes = parser.parser.lexer_stats().num_bytes;
        let mut grammar = Grammar {
            matcher: Matcher::new(Ok(parser)),
            vocabulary: Arc::clone(&self.vocabulary),
        };
        match grammar.mask() {
            Ok(mask) if mask.n_allowed() > 0 || grammar.is_complete() => Ok((grammar, lexer_bytes)),
            Err(reason) if reason != NOTHING_FITS => Err(reason),
            _ => Err("no text fits it".to_owned()),
        }
    }

    /// The reason with the innermost part of the schema that is refused for it,
    /// as a JSON pointer.
    fn with_place(&self, root: &Value, mut reason: String) -> String {
        let mut place = "#".to_owned();
        let mut part = root.as_object();
        let mut n_left = MOST_TRIES;
        while let Some(schema) = part.take() {
            for (pointer, inner) in schema::inner_schemas(schema).into_iter().take(n_left) {
                n_left -= 1;
                let alone = with_whitespace(schema::with_definitions(root, inner.clone()));
                let refusal = self
                    .begin(TopLevelGrammar::from_json_schema(alone), small_limits())
                    .err()
                    .filter(|found| reason.contains(found.as_str()));
                if let Some(found) = refusal {
                    place.push_str(&gguf::shown(&pointer));
                    (part, reason) = (Some(inner), found);
                    break;
                }
            }
        }
        format!("{place}: {reason}")
    }
}

/// JSON without endless blanks between its parts: a model that is not sure how
/// to go on would write them for ever.
pub(crate) fn with_whitespace(mut schema: Value) -> Value {
    if let Value::Object(keys) = &mut schema {
        let options = json!({"whitespace_pattern": "[ \\t\\n\\r]{0,16}"});
        keys.insert("x-guidance".to_owned(), options);
    }
    schema
}

fn limits() -> ParserLimits {
    ParserLimits {
        // One to two kilobytes each: no grammar holds more than about 50 MB.
        max_lexer_states: 30_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Enough to find what is wrong with a part of a schema, in a millisecond.
fn small_limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 50_000,
        max_grammar_size: 25_000,
        ..limits()
    }
}

/// Names the place of a mistake, which the grammar library does not.
fn check_regex(regex: &str) -> Result<(), String> {
    let Err(error) = regex_syntax::ast::parse::Parser::new().parse(regex) else {
        return Ok(());
    };
    let place = error.span().start.offset;
    Err(format!("at byte {place}: {}", error.kind()))
}

/// The reason without the place in the Lark grammar that a regular expression
/// becomes.
fn bare_reason(reason: &str) -> String {
    let inner = reason.split_once("(in regex): ").map(|(_, inner)| inner);
    let first = inner.and_then(|inner| inner.split("; ").next());
    first.unwrap_or(reason).to_owned()
}

/// The library's error on one line of bounded length. What it adds in angle
/// brackets is for its own authors.
fn shown(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string().replace('"', "'");
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let lines = lines.take_while(|line| !line.starts_with('<'));
    let lines: Vec<String> = lines.take(MOST_LINES).map(gguf::shown).collect();
    match lines.join("; ") {
        none if none == "NoExtensionBias" => NOTHING_FITS.to_owned(),
        reason => reason,
    }
}

/// A compiled grammar and how far a text has come in it.
///
/// A clone is in the same state; both share what the lexer has learned.
#[derive(Clone)]
pub(crate) struct Grammar {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
}

impl Grammar {
    /// One in the same state that shares nothing.
    fn copy(&self) -> Grammar {
        Grammar {
            matcher: self.matcher.deep_clone(),
            vocabulary: Arc::clone(&self.vocabulary),
        }
    }

    /// The tokens that may come next; none where the text can only end.
    ///
    /// # Errors
    /// The reason why the text can neither go on nor end, or the limit that
    /// the grammar exceeds.
    pub(crate) fn mask(&mut self) -> Result<TokenMask, String> {
        let text = &self.vocabulary.text;
        if self.matcher.is_stopped() {
            return match self.matcher.stop_reason().is_ok() {
                true => Ok(TokenMask::none(text.n_vocab())),
                false => Err(self.failure()),
            };
        }
        let allowed = self.matcher.compute_mask();
        let allowed = allowed.map_err(|error| shown(&error))?;
        let mut mask = TokenMask::from_words(allowed.as_slice(), text.n_vocab());
        mask.intersect(text);
        Ok(mask)
    }

    /// Goes on by a token.
    ///
    /// # Errors
    /// The reason, for a token that the mask did not allow.
    pub(crate) fn accept(&mut self, token: u32) -> Result<(), String> {
        if !self.vocabulary.text.is_allowed(token) {
            return Err(format!("token {token} is no text"));
        }
        let accepted = self.matcher.consume_token(token);
        accepted.map_err(|error| shown(&error))
    }

    /// May the text end here?
    pub(crate) fn is_complete(&mut self) -> bool {
        match self.matcher.is_stopped() {
            true => self.matcher.stop_reason().is_ok(),
            false => self.matcher.is_accepting().unwrap_or(false),
        }
    }

    fn failure(&self) -> String {
        let error = self.matcher.get_error();
        error.map_or_else(|| NOTHING_FITS.to_owned(), |error| shown(&error))
    }
}

/// A vocabulary as the grammar library sees it: text only.
pub(crate) struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
    /// The tokens that are text.
    text: TokenMask,
    /// All tokens that mean what they stand for where a blank would be dropped.
    without_blank: TokenMask,
}

impl Vocabulary {
    fn new(tokenizer: Arc<Tokenizer>) -> Vocabulary {
        let n_vocab = tokenizer.n_vocab();
        let mut text = TokenMask::none(n_vocab);
        let mut without_blank = TokenMask::none(n_vocab);
        let end = tokenizer.end_tokens().first().copied();
        let mut words: Vec<Vec<u8>> = (0..n_vocab as u32)
            .map(|id| match tokenizer.token_bytes(id) {
                // No character has this byte, and in the trie it marks control tokens.
                Some(bytes) if !bytes.is_empty() && !bytes.contains(&0xFF) => {
                    text.allow(id);
                    bytes.to_vec()
                }
                _ => Vec::new(),
            })
            .collect();
        for id in 0..n_vocab as u32 {
            let piece = tokenizer.piece(id, ControlText::Skip, &mut true);
            if Some(piece) == tokenizer.token_bytes(id) {
                without_blank.allow(id);
            }
        }
        if let Some(end) = end {
            // The library expects one control token at least; no grammar can name this.
            words[end as usize] = b"\xFF<>".to_vec();
        }
        let info = TokRxInfo::new(n_vocab as u32, end.unwrap_or(INVALID_TOKEN));
        Vocabulary {
            trie: TokTrie::from(&info, &words),
            tokenizer,
            text,
            without_blank,
        }
    }

    /// Number of tokens.
    pub(crate) fn n_vocab(&self) -> usize {
        self.text.n_vocab()
    }

    /// The tokens of `mask` that mean what they stand for where a blank at the
    /// beginning is dropped.
    pub(crate) fn without_blank(&self, mut mask: TokenMask) -> TokenMask {
        mask.intersect(&self.without_blank);
        mask
    }

    /// The bytes that a token stands for.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer.token_bytes(token).unwrap_or_default()
    }

    /// The tokenizer.
    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Allows every token that `text` begins with.
    pub(crate) fn allow_beginnings(&self, text: &[u8], mask: &mut TokenMask) {
        for token in self.trie.all_prefixes(text) {
            if self.text.is_allowed(token) {
                mask.allow(token);
            }
        }
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.tokenizer.encode(text, Special::Text),
            Err(_) => self.trie.greedy_tokenize(bytes),
        }
    }

    /// Is a text that is encoded on its own encoded as inside of another? Not
    /// where a blank is put before it.
    fn tokenize_is_canonical(&self) -> bool {
        !self.tokenizer.add_space_prefix()
    }
}
