//! `GET /openapi.json`, and the shapes of what is read by types that have no
//! schema of their own.

#![allow(
    dead_code,
    reason = "shapes of the document: nobody reads their fields"
)]

use crate::api_error::ErrorBody;
use crate::generation_fields::GenerationFields;
use crate::openai::chat_fields::ChatFields;
use crate::openai::completion_fields::CompletionFields;
use serde::Deserialize;
use serde_json::Value;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ComponentsBuilder, SecurityRequirement};
use utoipa::openapi::{InfoBuilder, OpenApi, OpenApiBuilder};
use utoipa::{IntoResponses, ToSchema};

/// The document without its paths.
pub(crate) fn document() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Muser")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("OpenAI-compatible server of one local model"));
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    let components =
        ComponentsBuilder::new().security_scheme("api_key", SecurityScheme::Http(bearer));
    // An empty requirement is one of the alternatives: a server may want no key.
    let security = [
        SecurityRequirement::default(),
        SecurityRequirement::new("api_key", [""; 0]),
    ];
    OpenApiBuilder::new()
        .info(info.build())
        .components(Some(components.build()))
        .security(Some(security))
        .build()
}

/// A chat request is read in these two parts.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatRequest {
    /// Fields of chats.
    #[serde(flatten)]
    pub chat: ChatFields,
    /// Fields of every generation.
    #[serde(flatten)]
    pub generation: GenerationFields,
}

/// A completion request is read in these two parts.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct CompletionRequest {
    /// Fields of completions.
    #[serde(flatten)]
    pub completion: CompletionFields,
    /// Fields of every generation.
    #[serde(flatten)]
    pub generation: GenerationFields,
}

/// Why a generation has no answer.
#[derive(IntoResponses)]
pub enum NoAnswer {
    /// A field is wrong, or the prompt does not fit.
    #[response(status = 400)]
    Invalid(ErrorBody),
    /// The API key is missing or wrong.
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// The host is not this machine, and no API key is set.
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// There is no such model.
    #[response(status = 404)]
    UnknownModel(ErrorBody),
    /// The body came too slowly.
    #[response(status = 408)]
    Slow(ErrorBody),
    /// The body is too long.
    #[response(status = 413)]
    Long(ErrorBody),
    /// The body is no JSON.
    #[response(status = 415)]
    NotJson(ErrorBody),
    /// The queue is full.
    #[response(status = 429)]
    Full(ErrorBody),
    /// The engine failed.
    #[response(status = 500)]
    Internal(ErrorBody),
    /// Starting, draining or unhealthy.
    #[response(status = 503)]
    Unavailable(ErrorBody),
    /// The deadline has passed.
    #[response(status = 504)]
    Late(ErrorBody),
}

/// Why a text has no tokens, or tokens no text.
#[derive(IntoResponses)]
pub enum NoText {
    /// A field is wrong.
    #[response(status = 400)]
    Invalid(ErrorBody),
    /// The API key is missing or wrong.
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// The host is not this machine, and no API key is set.
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// The body came too slowly.
    #[response(status = 408)]
    Slow(ErrorBody),
    /// The body is too long.
    #[response(status = 413)]
    Long(ErrorBody),
    /// The body is no JSON.
    #[response(status = 415)]
    NotJson(ErrorBody),
    /// Starting.
    #[response(status = 503)]
    Unavailable(ErrorBody),
}

/// Why somebody is not let in.
#[derive(IntoResponses)]
pub enum NotLetIn {
    /// The API key is missing or wrong.
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// The host is not this machine, and no API key is set.
    #[response(status = 403)]
    Forbidden(ErrorBody),
}

/// A message of a conversation. Fields that are not named here reach the chat
/// template.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: ChatRole,
    /// What is said; `null` if there are only calls.
    pub content: Option<ChatContent>,
    /// Name of the speaker, for a tool message the name of the tool.
    pub name: Option<String>,
    /// The call that a tool message answers.
    pub tool_call_id: Option<String>,
    /// The calls that an assistant message makes.
    pub tool_calls: Option<Vec<ChatCall>>,
    /// The reasoning that came before an assistant message.
    pub reasoning_content: Option<String>,
}

/// Who speaks.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChatRole {
    /// Rules for the model.
    System,
    /// The newer word for `system`.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// What is said.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ChatContent {
    /// As one text.
    Text(String),
    /// In parts.
    Parts(Vec<ChatPart>),
}

/// A part of what is said.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatPart {
    /// `text`.
    pub r#type: ChatPartKind,
    /// The text.
    pub text: String,
}

/// The kinds of parts.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChatPartKind {
    /// Text.
    Text,
}

/// A call that an assistant message makes.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatCall {
    /// What a tool message refers to.
    pub id: String,
    /// `function`.
    pub r#type: ChatToolKind,
    /// What is called.
    pub function: ChatCalled,
}

/// Name and arguments of a call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatCalled {
    /// Name of the tool.
    pub name: String,
    /// A JSON object as a string.
    pub arguments: String,
}

/// A tool that the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatTool {
    /// `function`.
    pub r#type: ChatToolKind,
    /// The function.
    pub function: ChatFunction,
}

/// The kinds of tools.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChatToolKind {
    /// A function of the client's.
    Function,
}

/// A function of the client's.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatFunction {
    /// Its name.
    #[schema(min_length = 1, max_length = 64, pattern = "^[A-Za-z0-9_.-]+$")]
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    /// Shall the arguments always keep to the schema?
    pub strict: Option<bool>,
}

/// May or must tools be called?
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ChatToolChoice {
    /// For all tools.
    Word(ChatToolChoiceWord),
    /// This one must.
    Named(ChatNamedTool),
}

/// May or must tools be called?
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChatToolChoiceWord {
    /// As the model likes.
    Auto,
    /// They may not.
    None,
    /// One must.
    Required,
}

/// The tool that must be called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatNamedTool {
    /// `function`.
    pub r#type: ChatToolKind,
    /// The function.
    pub function: ChatFunctionName,
}

/// A function by its name.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatFunctionName {
    /// The name.
    pub name: String,
}
