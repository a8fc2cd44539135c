//! What a request demands of a turn, checked and compiled: the way from
//! [`TurnSettings`] to a guide and a reader.
//!
//! What a reader would get wrong: rules never ask for what the model's format
//! cannot say. A demand that needs messages with recipients is an error by name
//! for a model that has none, not a promise that nobody keeps.

use crate::call::CallShape;
use crate::chat::Tool;
use crate::error::Error;
use crate::grammar::{Grammar, GrammarCounts, Grammars, Source, Vocabulary};
use crate::guide::TurnGuide;
use crate::reader::Reader;
use crate::tokenizer::Tokenizer;
use crate::turn::{TurnFormat, is_recipient};
use model::{Guide, TokenMask};
use serde_json::{Value, json};
use std::sync::Arc;

/// What the answer of a turn must look like.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AnswerFormat {
    /// Any text.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// Text of a Lark grammar, in llguidance's dialect.
    Lark(String),
}

impl AnswerFormat {
    fn source(&self) -> Option<Source> {
        match self {
            AnswerFormat::Text => None,
            AnswerFormat::JsonObject => Some(Source::JsonSchema(json!({"type": "object"}))),
            AnswerFormat::JsonSchema(schema) => Some(Source::JsonSchema(schema.clone())),
            AnswerFormat::Regex(regex) => Some(Source::Regex(regex.clone())),
            AnswerFormat::Lark(lark) => Some(Source::Lark(lark.clone())),
        }
    }
}

/// May or must a turn call tools?
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes.
    #[default]
    Auto,
    /// It may not.
    None,
    /// It must, whichever it likes.
    Required,
    /// It must call this one.
    Named(String),
}

/// What a request demands of a turn.
#[derive(Clone, Debug)]
pub struct TurnSettings {
    /// Stop strings; they look at the answer only.
    pub stop: Vec<String>,
    /// What the answer must look like.
    pub answer: AnswerFormat,
    /// The tools of the conversation. Calls of one that says `strict` are
    /// always well-formed.
    pub tools: Arc<[Tool]>,
    /// May or must they be called?
    pub tool_choice: ToolChoice,
    /// May there be more than one call?
    pub parallel_tool_calls: bool,
    /// Most tokens of reasoning in the turn; its end is forced behind them.
    pub reasoning_budget: Option<usize>,
}

impl Default for TurnSettings {
    fn default() -> TurnSettings {
        TurnSettings {
            stop: Vec::new(),
            answer: AnswerFormat::Text,
            tools: Arc::from([]),
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            reasoning_budget: None,
        }
    }
}

/// Makes the guides of a model's turns.
///
/// One for each model: it holds a trie of the whole vocabulary.
#[derive(Clone)]
pub struct GuideFactory {
    grammars: Arc<Grammars>,
    format: TurnFormat,
    /// All tokens but those that end a turn.
    no_end: Arc<TokenMask>,
}

impl GuideFactory {
    /// A factory for turns of this format.
    ///
    /// # Errors
    /// [`Error::GrammarVocabulary`] if no grammar can work on the vocabulary.
    pub fn new(tokenizer: Arc<Tokenizer>, format: TurnFormat) -> Result<GuideFactory, Error> {
        let grammars = Arc::new(Grammars::new(tokenizer)?);
        Ok(GuideFactory::over(grammars, format))
    }

    /// A factory for turns of another format of the same model; nothing is
    /// built again.
    pub fn with_format(&self, format: TurnFormat) -> GuideFactory {
        GuideFactory::over(Arc::clone(&self.grammars), format)
    }

    fn over(grammars: Arc<Grammars>, format: TurnFormat) -> GuideFactory {
        let n_vocab = grammars.vocabulary().n_vocab();
        let mut no_end = TokenMask::none(n_vocab);
        (0..n_vocab as u32).for_each(|token| no_end.allow(token));
        format.ends().for_each(|token| no_end.forbid(token));
        GuideFactory {
            grammars,
            format,
            no_end: Arc::new(no_end),
        }
    }

    /// A guide for the engine and a reader that makes the caller's text, both at
    /// the beginning of a turn. For several choices of one request, fork the one
    /// and clone the other.
    ///
    /// # Errors
    /// [`Error::EmptyStopString`]; [`Error::Grammar`] and
    /// [`Error::GrammarTooLarge`] for the answer's format; [`Error::NoEndToken`]
    /// if the vocabulary cannot end a formatted answer;
    /// [`Error::ToolChoiceWithoutTools`], [`Error::UnknownTool`],
    /// [`Error::ToolNotCallable`] and [`Error::ToolSchema`] for the tools;
    /// [`Error::FormatWithoutCalls`] and [`Error::FormatWithoutReasoning`] for
    /// what the model's format does not have.
    pub fn turn(&self, settings: &TurnSettings) -> Result<(Box<dyn Guide>, Reader), Error> {
        let reader = Reader::new(
            Arc::clone(self.grammars.vocabulary().tokenizer()),
            self.format.clone(),
            Arc::clone(&settings.tools),
            &settings.stop,
        )?;
        let guide = match self.rules(settings)? {
            None => TurnGuide::new(reader.clone()),
            Some(rules) => TurnGuide::with_rules(reader.clone(), Arc::new(rules)),
        };
        Ok((Box::new(guide), reader))
    }

    /// What became of the grammars of all requests, those of factories over the same
    /// model included.
    pub fn grammar_counts(&self) -> GrammarCounts {
        self.grammars.counts()
    }

    /// The rules of a turn; `None` if there are none.
    fn rules(&self, settings: &TurnSettings) -> Result<Option<Rules>, Error> {
        let must_call = matches!(
            settings.tool_choice,
            ToolChoice::Required | ToolChoice::Named(_)
        );
        let has_messages = matches!(self.format, TurnFormat::MuseGlimmer { .. });
        if must_call && !has_messages {
            return Err(Error::FormatWithoutCalls);
        }
        if settings.reasoning_budget.is_some() && !has_messages {
            return Err(Error::FormatWithoutReasoning);
        }
        let answer = match settings.answer.source() {
            None => None,
            Some(_) if self.format.ends().next().is_none() => return Err(Error::NoEndToken),
            Some(source) => Some(self.grammars.compile(&source)?),
        };
        let offered = offered_tools(settings)?;
        let is_every_call_shaped = must_call || answer.is_some() || !settings.parallel_tool_calls;
        let is_shaped = |tool: &Tool| is_every_call_shaped || tool.is_strict();
        let is_free = answer.is_none()
            && settings.reasoning_budget.is_none()
            && settings.tool_choice != ToolChoice::None
            && !offered.iter().any(|tool| is_shaped(tool));
        if is_free || (!has_messages && answer.is_none()) {
            return Ok(None);
        }
        let callable = |tool: &&Tool| self.callable(tool, is_shaped(tool)).transpose();
        let tools = match has_messages {
            true => offered
                .iter()
                .filter_map(callable)
                .collect::<Result<_, _>>()?,
            false => Vec::new(),
        };
        Ok(Some(Rules {
            vocabulary: Arc::clone(self.grammars.vocabulary()),
            format: self.format.clone(),
            no_end: Arc::clone(&self.no_end),
            answer,
            tools,
            must_call,
            is_parallel: settings.parallel_tool_calls,
            reasoning_budget: settings.reasoning_budget,
        }))
    }

    /// `None` for a tool that no header can name and that need not be called.
    fn callable(&self, tool: &Tool, is_shaped: bool) -> Result<Option<Callable>, Error> {
        let name = tool.name();
        if !is_recipient(name) || ["self", "user"].contains(&name) {
            return match is_shaped {
                true => Err(Error::ToolNotCallable {
                    tool: gguf::shown(name),
                    reason: "its name cannot stand in the header of a message".to_owned(),
                }),
                false => Ok(None),
            };
        }
        let shape = match is_shaped {
            true => Some(Arc::new(CallShape::new(tool, &self.grammars)?)),
            false => None,
        };
        Ok(Some(Callable {
            name: name.to_owned(),
            shape,
        }))
    }
}

/// The tools that the turn may call.
fn offered_tools(settings: &TurnSettings) -> Result<Vec<&Tool>, Error> {
    let tools = settings.tools.iter();
    let offered: Vec<&Tool> = match &settings.tool_choice {
        ToolChoice::None => Vec::new(),
        ToolChoice::Auto | ToolChoice::Required => tools.collect(),
        ToolChoice::Named(name) => tools.filter(|tool| tool.name() == name).take(1).collect(),
    };
    match &settings.tool_choice {
        ToolChoice::Required | ToolChoice::Named(_) if settings.tools.is_empty() => {
            Err(Error::ToolChoiceWithoutTools)
        }
        ToolChoice::Named(name) if offered.is_empty() => Err(Error::UnknownTool {
            found: gguf::shown(name),
        }),
        _ => Ok(offered),
    }
}

/// A tool that a turn may call.
pub(crate) struct Callable {
    pub(crate) name: String,
    /// `None`: the call's body is free.
    pub(crate) shape: Option<Arc<CallShape>>,
}

/// What one turn must keep to.
pub(crate) struct Rules {
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) format: TurnFormat,
    /// All tokens but those that end a turn.
    pub(crate) no_end: Arc<TokenMask>,
    /// The grammar of the answer, at its beginning.
    pub(crate) answer: Option<Grammar>,
    pub(crate) tools: Vec<Callable>,
    pub(crate) must_call: bool,
    pub(crate) is_parallel: bool,
    pub(crate) reasoning_budget: Option<usize>,
}
