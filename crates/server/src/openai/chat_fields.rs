//! The fields that only a chat request has.

use crate::fields::{OwnFields, Refused};
use serde::Deserialize;
use serde_json::{Map, Value};
use text::Message;
use utoipa::ToSchema;

/// What is known and not done.
const REFUSED: &[Refused] = &[
    Refused {
        name: "audio",
        neutral: &[],
        advice: "answers are text",
    },
    Refused {
        name: "modalities",
        neutral: &[r#"["text"]"#],
        advice: "answers are text",
    },
    Refused {
        name: "functions",
        neutral: &["[]"],
        advice: "use tools",
    },
    Refused {
        name: "function_call",
        neutral: &[],
        advice: "use tool_choice",
    },
    Refused {
        name: "moderation",
        neutral: &[],
        advice: "nothing is moderated",
    },
    Refused {
        name: "prediction",
        neutral: &[],
        advice: "nothing is predicted from a text",
    },
    Refused {
        name: "prompt_cache_options",
        neutral: &["{}"],
        advice: "use cache_prompt",
    },
    Refused {
        name: "prompt_cache_retention",
        neutral: &[r#""in_memory""#, r#""in-memory""#],
        advice: "prompts are kept in memory as long as there is room",
    },
    Refused {
        name: "service_tier",
        neutral: &[r#""auto""#, r#""default""#],
        advice: "there is one tier",
    },
    Refused {
        name: "store",
        neutral: &["false"],
        advice: "answers are not stored",
    },
    Refused {
        name: "verbosity",
        neutral: &[r#""medium""#],
        advice: "say in a message how long the answer shall be",
    },
    Refused {
        name: "web_search_options",
        neutral: &[],
        advice: "there is no web search",
    },
    Refused {
        name: "guided_json",
        neutral: &[],
        advice: "use response_format",
    },
    Refused {
        name: "json_schema",
        neutral: &[],
        advice: "use response_format",
    },
    Refused {
        name: "chat_template",
        neutral: &[],
        advice: "it is chosen when the server starts, with --chat-template",
    },
    Refused {
        name: "continue_final_message",
        neutral: &["false"],
        advice: "an answer is a message of its own",
    },
];

/// The fields that only a chat has.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatFields {
    /// The model's name; none takes the one there is.
    pub model: Option<String>,
    /// The conversation, oldest message first.
    #[schema(value_type = Vec<crate::openapi::ChatMessage>, min_items = 1)]
    pub messages: Vec<Message>,
    /// What the model may call.
    #[schema(value_type = Option<Vec<crate::openapi::ChatTool>>)]
    pub tools: Option<Vec<Map<String, Value>>>,
    /// `none`, `auto`, `required` or an object that names a function.
    #[schema(value_type = Option<crate::openapi::ChatToolChoice>)]
    pub tool_choice: Option<Value>,
    /// May one turn make several calls?
    pub parallel_tool_calls: Option<bool>,
    /// What the answer has to look like; reasoning stays free.
    #[serde(default, deserialize_with = "crate::fields::object")]
    pub response_format: Option<ResponseFormat>,
    /// A regular expression that the answer has to match; an addition of ours.
    pub regex: Option<String>,
    /// A Lark grammar that the answer has to match; an addition of ours.
    pub grammar: Option<String>,
    /// The older name of `max_completion_tokens`.
    #[schema(minimum = 1)]
    pub max_tokens: Option<usize>,
    /// Tokens of an answer at most, reasoning included.
    #[schema(minimum = 1)]
    pub max_completion_tokens: Option<usize>,
    /// Report the log-probabilities of the answer's tokens?
    pub logprobs: Option<bool>,
    /// With so many of the likeliest tokens for each.
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<usize>,
    /// How much the model thinks first: `low`, `medium`, `high` or `xhigh`.
    pub reasoning_effort: Option<String>,
    /// Tokens after which the reasoning is brought to an end; an addition of
    /// ours.
    pub reasoning_budget: Option<usize>,
    /// More variables of the chat template; an addition of ours.
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// The client's own labels; they change nothing.
    #[schema(value_type = Option<Object>)]
    #[expect(dead_code, reason = "taken so that it is known; it changes nothing")]
    pub metadata: Option<Map<String, Value>>,
    /// The client's name for its user; it changes nothing.
    pub safety_identifier: Option<String>,
    /// Prompts find each other by what they say, so it changes nothing.
    pub prompt_cache_key: Option<String>,
}

/// What an answer has to look like.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    pub r#type: FormatKind,
    /// With `json_schema`: the schema and its name.
    #[serde(default, deserialize_with = "crate::fields::object")]
    pub json_schema: Option<NamedSchema>,
    /// With `json_object`: a schema without a name; an addition of ours.
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
}

/// The kinds of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FormatKind {
    /// Any text.
    Text,
    /// Some JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema,
}

/// A JSON schema with its name.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct NamedSchema {
    /// Its name; it changes nothing.
    #[expect(dead_code, reason = "taken so that it is known; it changes nothing")]
    pub name: Option<String>,
    /// What it is for; it changes nothing.
    #[expect(dead_code, reason = "taken so that it is known; it changes nothing")]
    pub description: Option<String>,
    /// The schema.
    #[schema(value_type = Object)]
    pub schema: Value,
    /// The schema is always kept strictly.
    #[expect(dead_code, reason = "taken so that it is known; it changes nothing")]
    pub strict: Option<bool>,
}

impl OwnFields for ChatFields {
    const REFUSED: &'static [Refused] = REFUSED;
}
