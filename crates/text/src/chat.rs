//! A conversation as callers write it: the types of OpenAI-shaped JSON.
//!
//! Fields that are not named here are not dropped: they reach the template as
//! the caller wrote them. What a reader would get wrong: an absent `content`
//! is `null` to the template, and the arguments of a tool call may be a JSON
//! string here but are always an object when the template sees them.

use crate::date::DateTime;
use crate::error::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Map, Value};
use std::fmt;
use std::str::FromStr;

/// How strongly the model is asked to reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reasoning {
    /// Little.
    Low,
    /// Some.
    Medium,
    /// Much; what the template takes when nothing is said.
    High,
    /// As much as there is.
    Xhigh,
}

impl Reasoning {
    /// All levels, weakest first.
    pub const ALL: [Reasoning; 4] = [
        Reasoning::Low,
        Reasoning::Medium,
        Reasoning::High,
        Reasoning::Xhigh,
    ];

    /// The word of the template variable `reasoning_strength`.
    pub fn as_str(self) -> &'static str {
        match self {
            Reasoning::Low => "low",
            Reasoning::Medium => "medium",
            Reasoning::High => "high",
            Reasoning::Xhigh => "xhigh",
        }
    }
}

impl fmt::Display for Reasoning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Reasoning {
    type Err = Error;

    /// # Errors
    /// [`Error::UnknownReasoning`] for any word but the four levels.
    fn from_str(word: &str) -> Result<Reasoning, Error> {
        Reasoning::ALL
            .into_iter()
            .find(|level| level.as_str() == word)
            .ok_or_else(|| Error::UnknownReasoning {
                found: gguf::shown(word),
            })
    }
}

impl Serialize for Reasoning {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Reasoning {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Reasoning, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// What a chat template is given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// The messages, oldest first; a conversation without any cannot be
    /// rendered.
    pub messages: Vec<Message>,
    /// The tools that the model may call; none and an empty list are the same.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub tools: Vec<Tool>,
    /// Ends the prompt with the start of the answer.
    #[serde(default = "yes")]
    pub add_generation_prompt: bool,
    /// The template variable `reasoning_strength`; OpenAI's `reasoning_effort`.
    #[serde(
        default,
        alias = "reasoning_effort",
        skip_serializing_if = "Option::is_none"
    )]
    pub reasoning_strength: Option<Reasoning>,
    /// The template variable `current_date`, `YYYY-MM-DD`; checked when the
    /// conversation is rendered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_date: Option<String>,
    /// The template variable `knowledge_cutoff`: any text, as a rule
    /// `YYYY-MM-DD`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knowledge_cutoff: Option<String>,
    /// What `strftime_now` formats. `None`: the template has no such function.
    #[serde(skip)]
    pub now: Option<DateTime>,
    /// Every other template variable.
    #[serde(flatten)]
    pub variables: Map<String, Value>,
}

impl Conversation {
    /// A conversation of these messages that asks for an answer.
    pub fn new(messages: Vec<Message>) -> Conversation {
        Conversation {
            messages,
            add_generation_prompt: true,
            ..Conversation::default()
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant` or `tool`; the template
    /// judges it.
    pub role: String,
    /// The text; `null` if absent.
    #[serde(default)]
    pub content: Option<Content>,
    /// Name of the speaker, for a tool message the name of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Id of the call that a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The calls that an assistant message makes.
    #[serde(
        default,
        deserialize_with = "null_is_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub tool_calls: Vec<ToolCall>,
    /// The private reasoning that came before an assistant message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// To whom an assistant message is addressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipient: Option<String>,
    /// Does the turn end with this assistant message?
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_turn: Option<bool>,
    /// Every other field, as the caller wrote it.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: &str, text: &str) -> Message {
        Message {
            role: role.to_owned(),
            content: Some(Content::Text(text.to_owned())),
            ..Message::default()
        }
    }
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "content: expected a string, a list of parts or null"
)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Text, images and video in order.
    Parts(Vec<ContentPart>),
}

/// One part of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContentPart {
    /// `text`, `image`, `image_url` or `video`; the template judges it.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text of a text part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Every other field, as the caller wrote it.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A call of a tool in an assistant message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// What a tool message refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`.
    #[serde(
        rename = "type",
        default = "function",
        skip_serializing_if = "String::is_empty"
    )]
    pub kind: String,
    /// What is called and with what.
    pub function: FunctionCall,
    /// Every other field, as the caller wrote it.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Name and arguments of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of the tool.
    pub name: String,
    /// An object, or a string that holds one as JSON.
    #[serde(default = "no_arguments")]
    pub arguments: Value,
    /// Every other field, as the caller wrote it.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl ToolCall {
    /// The arguments as an object. An empty string is an empty object: clients
    /// send it for a call without arguments.
    ///
    /// # Errors
    /// [`Error::ToolArguments`] naming the call.
    pub fn arguments(&self) -> Result<Map<String, Value>, Error> {
        let wrong = |found: String| Error::ToolArguments {
            call: match &self.id {
                Some(id) => format!(
                    "{} (id {})",
                    gguf::shown(&self.function.name),
                    gguf::shown(id)
                ),
                None => gguf::shown(&self.function.name),
            },
            found,
        };
        match &self.function.arguments {
            Value::Object(map) => Ok(map.clone()),
            Value::String(text) if text.trim().is_empty() => Ok(Map::new()),
            Value::String(text) => match serde_json::from_str(text) {
                Ok(Value::Object(map)) => Ok(map),
                Ok(other) => Err(wrong(format!("a string that holds {}", kind_of(&other)))),
                Err(reason) => Err(wrong(format!("a string that is no JSON ({reason})"))),
            },
            other => Err(wrong(kind_of(other).to_owned())),
        }
    }
}

/// A tool that the model may call: the caller's JSON object, keys in the
/// caller's order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool(Map<String, Value>);

impl Tool {
    /// Takes `{"type": "function", "function": {"name": ...}}` or the inner
    /// object alone.
    ///
    /// # Errors
    /// [`Error::ToolName`] if there is no name.
    pub fn new(object: Map<String, Value>) -> Result<Tool, Error> {
        let tool = Tool(object);
        match tool.function().get("name") {
            Some(Value::String(name)) if !name.is_empty() => Ok(tool),
            Some(other) => Err(Error::ToolName {
                found: match other {
                    Value::String(_) => "an empty string",
                    other => kind_of(other),
                },
            }),
            None => Err(Error::ToolName { found: "none" }),
        }
    }

    /// Name of the tool, such as `get_weather` or `ns.fn`.
    pub fn name(&self) -> &str {
        self.function()
            .get("name")
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    /// The tool as the caller wrote it.
    pub fn object(&self) -> &Map<String, Value> {
        &self.0
    }

    /// JSON schema of the arguments.
    pub fn parameters(&self) -> Option<&Value> {
        self.function().get("parameters")
    }

    /// Are its calls to be well-formed whatever the model writes?
    pub fn is_strict(&self) -> bool {
        self.function().get("strict") == Some(&Value::Bool(true))
    }

    fn function(&self) -> &Map<String, Value> {
        match self.0.get("function") {
            Some(Value::Object(function)) => function,
            _ => &self.0,
        }
    }
}

impl Serialize for Tool {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Tool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Tool, D::Error> {
        Tool::new(Map::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// What a JSON value is, in words.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn yes() -> bool {
    true
}

fn function() -> String {
    "function".to_owned()
}

fn no_arguments() -> Value {
    Value::Object(Map::new())
}

fn null_is_empty<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
