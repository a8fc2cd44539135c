//! TEXT <-> TOKENS. Pure: no I/O, no clock, no environment.
#![forbid(unsafe_code)]

mod builtins;
mod byte_level;
mod call;
mod chat;
mod date;
mod detokenizer;
mod error;
mod grammar;
mod guide;
mod marks;
mod memo;
mod meter;
mod pretokenizer;
mod program;
mod prompt;
mod reader;
mod rules;
mod schema;
mod sentencepiece;
mod stop;
mod template;
mod tojson;
mod tokenizer;
mod tool_call;
mod turn;
mod vocab;

pub use chat::{
    Content, ContentPart, Conversation, FunctionCall, Message, Reasoning, Tool, ToolCall,
};
pub use date::DateTime;
pub use detokenizer::Detokenizer;
pub use error::Error;
pub use grammar::{GrammarCounts, MOST_GRAMMAR_BYTES, MOST_SCHEMA_BYTES};
pub use guide::TurnGuide;
pub use memo::{Memo, MemoCounts};
pub use meter::{MOST_LEVELS, MOST_VALUE_BYTES, MOST_WORK_BYTES};
pub use prompt::Prompt;
pub use reader::Reader;
pub use rules::{AnswerFormat, GuideFactory, ToolChoice, TurnSettings};
pub use stop::StopStrings;
pub use template::{
    ChatTemplate, ControlTokens, MOST_INSTRUCTIONS, MOST_SOURCE_BYTES, MOST_TAG_TOKENS,
};
pub use tokenizer::{ControlText, Segment, Special, Tokenizer};
pub use turn::{FinishReason, Place, TurnEnd, TurnEvent, TurnFormat, TurnParser};
pub use vocab::SpecialIds;
