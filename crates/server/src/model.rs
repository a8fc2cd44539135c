//! The model that is served: its names, its text side, its engine.

use crate::Error;
use crate::api_error::ApiError;
use engine::{Handle, SamplerSettings};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};
use text::{ChatTemplate, DateTime, GuideFactory, Memo, Reasoning, Special, Tokenizer, TurnFormat};

/// Texts across which DRY matches nothing, unless others are named.
pub const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
/// Bytes of tokens of earlier answers that are kept: some ten million tokens.
const MEMO_BYTES: usize = 64 << 20;

/// What a server is given to serve.
pub struct ModelParts {
    /// Names that requests may ask for; the first is the one that answers bear.
    pub names: Vec<String>,
    /// The file's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The file's chat template; without one there are only plain completions.
    pub template: Option<ChatTemplate>,
    /// Sampling where a request says nothing.
    pub defaults: SamplerSettings,
    /// The engine.
    pub handle: Handle,
    /// The date that templates are told; `None` for the day of the request.
    pub date: Option<DateTime>,
    /// How much the model thinks where a request says nothing; `None` leaves it
    /// to the template.
    pub reasoning: Option<Reasoning>,
    /// Seed of requests that have none; `None` for a new one each.
    pub seed: Option<u64>,
    /// Digest of all that determines an answer.
    pub identity: [u8; 32],
}

/// A model with what its requests need.
pub struct ServedModel {
    /// Names that requests may ask for.
    pub names: Vec<String>,
    /// Seconds since 1970 at which it was loaded.
    pub created: u64,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// What chats need.
    pub chat: Option<Chat>,
    /// Makes guides of plain completions.
    pub completions: GuideFactory,
    /// Sampling where a request says nothing.
    pub defaults: SamplerSettings,
    /// The engine.
    pub handle: Handle,
    /// How much the model thinks where a request says nothing.
    pub reasoning: Option<Reasoning>,
    seed: Option<u64>,
    date: Option<DateTime>,
    fingerprint: String,
    dry_breakers: OnceLock<Vec<Vec<u32>>>,
}

/// What chats need.
pub struct Chat {
    /// Conversation to prompt.
    pub template: ChatTemplate,
    /// Makes guides of turns.
    pub guides: GuideFactory,
    /// How turns are written.
    pub format: TurnFormat,
    /// The tokens that earlier answers were made of.
    pub memo: Arc<Memo>,
}

impl Chat {
    /// Has a turn of this model reasoning and calls?
    pub fn has_channels(&self) -> bool {
        matches!(self.format, TurnFormat::MuseGlimmer { .. })
    }
}

impl ServedModel {
    /// Builds what requests share.
    ///
    /// # Errors
    /// [`Error::NoModelName`], and [`Error::Text`] for a vocabulary that no
    /// guide can be made for.
    pub fn new(parts: ModelParts) -> Result<ServedModel, Error> {
        if parts.names.is_empty() {
            return Err(Error::NoModelName);
        }
        let tokenizer = parts.tokenizer;
        let format = TurnFormat::of_completion(&tokenizer);
        let completions = GuideFactory::new(Arc::clone(&tokenizer), format)?;
        let format = TurnFormat::of_chat(&tokenizer);
        let chat = parts.template.map(|template| Chat {
            template,
            guides: completions.with_format(format.clone()),
            format,
            memo: Arc::new(Memo::new(Arc::clone(&tokenizer), MEMO_BYTES)),
        });
        Ok(ServedModel {
            names: parts.names,
            created: unix_seconds(),
            chat,
            completions,
            tokenizer,
            defaults: parts.defaults,
            handle: parts.handle,
            reasoning: parts.reasoning,
            seed: parts.seed,
            date: parts.date,
            fingerprint: fingerprint(parts.identity),
            dry_breakers: OnceLock::new(),
        })
    }

    /// The name that answers bear.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// Changes when the same request may have another answer.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Checks the name that a request asks for; none asks for what there is.
    ///
    /// # Errors
    /// 404 naming the models that there are.
    pub fn check_name(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(name) if !self.names.iter().any(|known| known == name) => Err(ApiError::http(
                http::StatusCode::NOT_FOUND,
                "model_not_found",
                format!(
                    "model: found {}, expected {}",
                    match name {
                        "" => "an empty name".to_string(),
                        name => gguf::shown(name),
                    },
                    self.names.join(" or ")
                ),
            )),
            _ => Ok(()),
        }
    }

    /// What chats need.
    ///
    /// # Errors
    /// 400 if the model has no chat template.
    pub fn chat(&self) -> Result<&Chat, ApiError> {
        self.chat.as_ref().ok_or_else(|| {
            let message = format!(
                "{} has no chat template, so it cannot chat; /v1/completions continues plain text",
                self.name()
            );
            ApiError::bad("no_chat_template", None, message)
        })
    }

    /// The moment that templates are told.
    ///
    /// # Errors
    /// 500 if the clock shows no year that templates know.
    pub fn now(&self) -> Result<DateTime, ApiError> {
        let seconds = i64::try_from(unix_seconds()).unwrap_or(i64::MAX);
        let today = || DateTime::from_unix_seconds(seconds);
        self.date.map_or_else(today, Ok).map_err(ApiError::internal)
    }

    /// The seed of a request that has none.
    ///
    /// # Errors
    /// 500 without random numbers.
    pub fn seed(&self) -> Result<u64, ApiError> {
        let random = || {
            // 53 bits: JSON readers that take numbers for f64 keep them exact.
            let bits = getrandom::u64().map(|bits| bits >> 11);
            bits.map_err(|error| ApiError::internal(format!("no random numbers: {error}")))
        };
        self.seed.map_or_else(random, Ok)
    }

    /// The breakers of DRY where a request names none.
    pub fn dry_breakers(&self) -> &[Vec<u32>] {
        match self.defaults.dry_breakers.as_slice() {
            [] => self
                .dry_breakers
                .get_or_init(|| breaking_tokens(&self.tokenizer, DRY_BREAKERS)),
            breakers => breakers,
        }
    }
}

impl fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServedModel({})", self.names.join(", "))
    }
}

fn fingerprint(identity: [u8; 32]) -> String {
    let digits = identity.iter().take(6).map(|byte| format!("{byte:02x}"));
    ["fp_".to_string()].into_iter().chain(digits).collect()
}

/// Seconds since 1970; 0 before.
pub(crate) fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Every token whose text holds one of the breakers; where no token holds one
/// whole, the sequence that spells it.
pub fn breaking_tokens<'b>(
    tokenizer: &Tokenizer,
    breakers: impl IntoIterator<Item = &'b str>,
) -> Vec<Vec<u32>> {
    let mut tokens = Vec::new();
    for breaker in breakers {
        let holds = |bytes: &[u8]| {
            let mut windows = bytes.windows(breaker.len().max(1));
            windows.any(|window| window == breaker.as_bytes())
        };
        let before = tokens.len();
        tokens.extend(
            (0..tokenizer.n_vocab() as u32)
                .filter(|&id| tokenizer.token_bytes(id).is_some_and(holds))
                .map(|id| vec![id]),
        );
        if tokens.len() == before {
            tokens.push(tokenizer.encode(breaker, Special::Text));
        }
    }
    // A text that the vocabulary cannot spell breaks nothing.
    tokens.retain(|sequence| !sequence.is_empty());
    tokens
}
