//! Random walks: a model that likes any token that it is allowed.
#![allow(
    dead_code,
    reason = "every test file compiles this module and uses another part of it"
)]

use model::{Constraint, Guide, Verdict};
use std::sync::Arc;
use text::{
    AnswerFormat, GuideFactory, Reader, Tokenizer, TurnEnd, TurnEvent, TurnFormat, TurnSettings,
};

/// A turn whose answer has this format.
pub fn answer(answer: AnswerFormat) -> TurnSettings {
    TurnSettings {
        answer,
        ..TurnSettings::default()
    }
}

/// The format that a JSON schema describes.
pub fn schema(schema: serde_json::Value) -> AnswerFormat {
    AnswerFormat::JsonSchema(schema)
}

/// Where a walk must have ended.
const MOST_TOKENS: usize = 3000;
/// From where on a walk looks for the end.
const N_WILD: usize = 24;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// What a walk wants to come to, most wanted first.
const CLOSERS: [&str; 6] = ["\"", "}", "]", ")", "1", "e"];
const CALL_CLOSERS: [&str; 4] = ["</atem:parameter>\n", "}", "]", "</atem:invoke>"];

/// Chooses among the tokens that a constraint allows, at random at first and
/// then towards an end.
pub struct Chooser {
    pub tokenizer: Arc<Tokenizer>,
    pub random: Random,
    ends: Vec<u32>,
    text: Vec<u8>,
    n_chosen: usize,
}

impl Chooser {
    pub fn new(tokenizer: &Arc<Tokenizer>, seed: u64) -> Chooser {
        Chooser {
            tokenizer: Arc::clone(tokenizer),
            random: Random(seed),
            ends: tokenizer.end_tokens(),
            text: Vec::new(),
            n_chosen: 0,
        }
    }

    /// The next token; `None` if none is allowed.
    pub fn choose(&mut self, constraint: Constraint) -> Option<u32> {
        let allowed: Vec<u32> = match constraint {
            Constraint::Forced(token) => vec![token],
            Constraint::Masked(mask) => mask.tokens().collect(),
            Constraint::Free => self.free(),
        };
        if allowed.is_empty() {
            return None;
        }
        let token = self.wanted(&allowed);
        let token = token.unwrap_or_else(|| self.random.of(&allowed));
        self.n_chosen += 1;
        match self.tokenizer.is_control(token) {
            true => self.text.clear(),
            false => self
                .text
                .extend(self.tokenizer.token_bytes(token).unwrap_or_default()),
        }
        Some(token)
    }

    /// What a model may well write where all is allowed: text, seldom a marker.
    fn free(&mut self) -> Vec<u32> {
        let is_over = self.n_chosen > N_WILD;
        let markers = ["<|eom|>", "<|eot|>"].map(|text| self.tokenizer.id_of(text));
        match self.random.below(12) {
            0..2 => markers
                .into_iter()
                .flatten()
                .chain(self.ends.clone())
                .collect(),
            _ if is_over => self.ends.clone(),
            _ => {
                let n_vocab = self.tokenizer.n_vocab();
                let tokens = (0..40).map(|_| self.random.below(n_vocab) as u32);
                let text: Vec<u32> = tokens
                    .filter(|&id| !self.tokenizer.is_control(id))
                    .collect();
                match text.is_empty() {
                    true => self.ends.clone(),
                    false => text,
                }
            }
        }
    }

    fn wanted(&mut self, allowed: &[u32]) -> Option<u32> {
        if self.n_chosen < N_WILD {
            return None;
        }
        let eom = self.tokenizer.id_of("<|eom|>");
        let mut ends: Vec<u32> = self.ends.iter().copied().chain(eom).collect();
        if self.random.below(3) == 0 {
            ends.reverse();
        }
        let end = ends.into_iter().find(|end| allowed.contains(end));
        end.or_else(|| self.closer(allowed))
    }

    /// The token that comes furthest towards the first closer that one leads to.
    fn closer(&self, allowed: &[u32]) -> Option<u32> {
        let closers: &[&str] = match self.text.starts_with(b"<atem:") {
            true => &CALL_CLOSERS,
            false => &CLOSERS,
        };
        closers.iter().find_map(|closer| {
            let closer = closer.as_bytes();
            let done = (0..closer.len())
                .rev()
                .find(|&n| self.text.ends_with(&closer[..n]))?;
            let leads = |&&id: &&u32| {
                let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
                !bytes.is_empty() && closer[done..].starts_with(bytes)
            };
            let length = |&&id: &&u32| self.tokenizer.token_bytes(id).map(<[u8]>::len);
            allowed.iter().filter(leads).max_by_key(length).copied()
        })
    }
}

/// A finished walk.
#[derive(Debug)]
pub struct Walk {
    pub tokens: Vec<u32>,
    pub events: Vec<TurnEvent>,
    pub end: TurnEnd,
}

impl Walk {
    pub fn content(&self) -> String {
        self.texts(|event| match event {
            TurnEvent::Content(text) => Some(text),
            _ => None,
        })
    }

    pub fn reasoning(&self) -> String {
        self.texts(|event| match event {
            TurnEvent::Reasoning(text) => Some(text),
            _ => None,
        })
    }

    fn texts(&self, text: impl Fn(&TurnEvent) -> Option<&String>) -> String {
        self.events.iter().filter_map(text).cloned().collect()
    }

    pub fn calls(&self) -> Vec<(&str, serde_json::Value)> {
        let call = |event: &'_ TurnEvent| match event {
            TurnEvent::ToolCall { arguments, .. } => Some(arguments.clone().into()),
            _ => None,
        };
        let names = self.events.iter().filter_map(|event| match event {
            TurnEvent::ToolCall { name, .. } => Some(name.as_str()),
            _ => None,
        });
        names.zip(self.events.iter().filter_map(call)).collect()
    }
}

/// Walks a turn to its end, in the guide and the reader alike.
pub fn walk(factory: &GuideFactory, settings: &TurnSettings, chooser: &mut Chooser) -> Walk {
    let (mut guide, mut reader) = factory.turn(settings).expect("a guide");
    let mut tokens = Vec::new();
    let mut events = Vec::new();
    loop {
        let constraint = guide.constraint();
        let Some(token) = chooser.choose(constraint) else {
            panic!(
                "{:?} after {}",
                guide.failure(),
                spelled(&chooser.tokenizer, &tokens)
            );
        };
        tokens.push(token);
        assert!(
            tokens.len() < MOST_TOKENS,
            "no end: {}",
            spelled(&chooser.tokenizer, &tokens)
        );
        events.extend(reader.push(token));
        let verdict = guide.accept(token);
        assert_eq!(verdict == Verdict::Stop, reader.end().is_some());
        if verdict == Verdict::Stop {
            break;
        }
    }
    let (rest, end) = reader.finish();
    events.extend(rest);
    Walk {
        tokens,
        events,
        end,
    }
}

/// Tokens as text with control tokens.
pub fn spelled(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    tokenizer.decode(tokens, text::ControlText::Keep)
}

/// Feeds the text of a turn, markers as control tokens; every token must be
/// allowed.
pub fn feed(guide: &mut dyn Guide, tokenizer: &Tokenizer, text: &str) {
    for token in tokenizer.encode(text, text::Special::Parse) {
        assert!(
            allows(guide.constraint(), token),
            "{:?} of {text} is not allowed: {:?}",
            tokenizer.token_text(token),
            guide.failure()
        );
        guide.accept(token);
    }
}

pub fn allows(constraint: Constraint, token: u32) -> bool {
    match constraint {
        Constraint::Free => true,
        Constraint::Forced(forced) => forced == token,
        Constraint::Masked(mask) => mask.is_allowed(token),
    }
}

/// A guide and the reader of a turn.
pub fn turn(
    tokenizer: &Arc<Tokenizer>,
    format: TurnFormat,
    settings: &TurnSettings,
) -> (Box<dyn Guide>, Reader) {
    let factory = GuideFactory::new(Arc::clone(tokenizer), format).expect("a factory");
    factory.turn(settings).expect("a guide")
}
