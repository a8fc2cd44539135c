//! `POST /v1/chat/completions`: turns as OpenAI's chat completions.
//!
//! What one would get wrong: a call is told when it is complete, never before,
//! since a body that looks like one may turn out to be text. So each call is one
//! delta with its whole arguments.

use crate::admission::admit;
use crate::api_error::ApiError;
use crate::app::App;
use crate::body::JsonBytes;
use crate::openai::chat_fields::ChatFields;
use crate::openai::logprobs::ChatLogprobs;
use crate::openai::usage::{TimingsBody, Usage};
use crate::openai::{Identity, data, random_id};
use crate::request::Arrival;
use crate::stream::{Format, respond};
use crate::turn::{Piece, Turns};
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Serialize;
use std::sync::Arc;
use text::{Tokenizer, TurnEvent};
use utoipa::ToSchema;

/// A complete answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatCompletion {
    #[serde(flatten)]
    identity: Identity,
    /// `chat.completion`.
    object: &'static str,
    choices: Vec<ChatChoice>,
    usage: Usage,
    timings: TimingsBody,
}

/// One of the answers.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    index: usize,
    message: ChatAnswer,
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    finish_reason: Option<&'static str>,
}

/// What the model said.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ChatAnswer {
    /// `assistant`.
    role: &'static str,
    /// The answer; `null` if there are only calls.
    content: Option<String>,
    /// There are no refusals.
    #[schema(value_type = Option<String>)]
    refusal: Option<()>,
    /// What the model said to itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody>,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct CallBody {
    /// Place among the calls; only in streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: String,
    /// `function`.
    r#type: &'static str,
    function: CalledFunction,
}

/// What is called and with what.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct CalledFunction {
    name: String,
    /// A JSON object as a string.
    arguments: String,
}

/// A piece of a streamed answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChunk {
    #[serde(flatten)]
    identity: Identity,
    /// `chat.completion.chunk`.
    object: &'static str,
    choices: Vec<ChatDelta>,
    /// Only in the last chunk, if it was asked for; `null` before.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    usage: Option<Option<Usage>>,
    /// Only in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

/// What is new of one of the answers.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatDelta {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

/// What is new.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody>,
}

/// Answers a conversation.
///
/// With `stream`, the answer is `text/event-stream`: objects
/// `chat.completion.chunk`, then `[DONE]`.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "openai",
    request_body = crate::openapi::ChatRequest,
    responses(
        (status = 200, body = ChatCompletion),
        crate::openapi::NoAnswer
    )
)]
pub async fn chat_completions(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Response, ApiError> {
    let admitted = admit::<ChatFields>(app, arrival, bytes).await?;
    let (is_stream, includes_usage) = (admitted.is_stream, admitted.includes_usage);
    let answers = Answers {
        identity: Identity::new("chatcmpl-", &admitted.model)?,
        tokenizer: Arc::clone(&admitted.model.tokenizer),
        has_logprobs: admitted.prepared.terms.logprobs.is_some(),
    };
    let (turns, (), notes) = admitted.start()?;
    let response = match is_stream {
        true => {
            let format = ChatStream {
                spoken: vec![Spoken::default(); turns.n_choices()],
                answers,
                includes_usage,
                last: None,
            };
            respond(turns, format)
        }
        false => Json(collect(turns, &answers).await?).into_response(),
    };
    Ok(notes.on(response))
}

/// What all objects of an answer have in common.
struct Answers {
    identity: Identity,
    tokenizer: Arc<Tokenizer>,
    has_logprobs: bool,
}

/// What an answer has said so far.
#[derive(Clone, Debug, Default)]
struct Spoken {
    reasoning: String,
    content: String,
    calls: Vec<CallBody>,
}

impl Spoken {
    /// Takes what is new; gives it as a delta.
    fn take(&mut self, events: Vec<TurnEvent>) -> Result<Delta, ApiError> {
        let mut delta = Delta::default();
        for event in events {
            match event {
                TurnEvent::Reasoning(text) => {
                    self.reasoning.push_str(&text);
                    delta
                        .reasoning_content
                        .get_or_insert_default()
                        .push_str(&text);
                }
                TurnEvent::Content(text) => {
                    self.content.push_str(&text);
                    delta.content.get_or_insert_default().push_str(&text);
                }
                TurnEvent::ToolCall {
                    name, arguments, ..
                } => {
                    let call = CallBody {
                        index: None,
                        id: random_id("call_")?,
                        r#type: "function",
                        function: CalledFunction {
                            name,
                            arguments: serde_json::Value::Object(arguments).to_string(),
                        },
                    };
                    let index = Some(self.calls.len());
                    self.calls.push(call.clone());
                    delta.tool_calls.push(CallBody { index, ..call });
                }
                // A notice for people; and what the budget cut, which is neither
                // call nor answer.
                TurnEvent::ToolCallStart { .. } | TurnEvent::CutToolCall { .. } => {}
            }
        }
        Ok(delta)
    }

    fn answer(self) -> ChatAnswer {
        ChatAnswer {
            role: "assistant",
            content: (!self.content.is_empty() || self.calls.is_empty()).then_some(self.content),
            refusal: None,
            reasoning_content: (!self.reasoning.is_empty()).then_some(self.reasoning),
            tool_calls: self.calls,
        }
    }
}

/// The whole answer.
async fn collect(mut turns: Turns, answers: &Answers) -> Result<ChatCompletion, ApiError> {
    let n = turns.n_choices();
    let mut spoken = vec![Spoken::default(); n];
    let mut logprobs = vec![Vec::new(); n];
    let mut reasons = vec![None; n];
    loop {
        match turns.next().await {
            Some(Piece::Choice {
                choice,
                events,
                logprobs: new,
                finish,
            }) => {
                spoken[choice].take(events)?;
                logprobs[choice].extend(new);
                reasons[choice] = finish.map(|reason| reason.as_str());
            }
            Some(Piece::Failed(error)) => return Err(error),
            Some(Piece::Ended(totals)) => {
                let parts = spoken.into_iter().zip(logprobs).zip(reasons).enumerate();
                let choices = parts.map(|(index, ((spoken, logprobs), reason))| ChatChoice {
                    index,
                    message: spoken.answer(),
                    logprobs: answers
                        .has_logprobs
                        .then(|| ChatLogprobs::of(&answers.tokenizer, &logprobs)),
                    finish_reason: reason,
                });
                return Ok(ChatCompletion {
                    identity: answers.identity.clone(),
                    object: "chat.completion",
                    choices: choices.collect(),
                    usage: totals.into(),
                    timings: totals.into(),
                });
            }
            None => return Err(ApiError::internal("the answer had no end")),
        }
    }
}

/// A streamed answer.
struct ChatStream {
    answers: Answers,
    spoken: Vec<Spoken>,
    includes_usage: bool,
    /// The newest chunk with a reason: the last of them also bears the times.
    last: Option<ChatChunk>,
}

impl ChatStream {
    fn chunk(&self, choices: Vec<ChatDelta>) -> ChatChunk {
        ChatChunk {
            identity: self.answers.identity.clone(),
            object: "chat.completion.chunk",
            choices,
            usage: self.includes_usage.then_some(None),
            timings: None,
        }
    }
}

impl Format for ChatStream {
    fn open(&mut self) -> Vec<Event> {
        let role = |index| ChatDelta {
            index,
            delta: Delta {
                role: Some("assistant"),
                content: Some(String::new()),
                ..Delta::default()
            },
            logprobs: None,
            finish_reason: None,
        };
        let chunk = |index| data(&self.chunk(vec![role(index)]));
        (0..self.spoken.len()).map(chunk).collect()
    }

    fn piece(&mut self, piece: Piece) -> Vec<Event> {
        let mut out: Vec<Event> = Vec::new();
        match piece {
            Piece::Choice {
                choice: index,
                events,
                logprobs,
                finish,
            } => {
                out.extend(self.last.take().map(|chunk| data(&chunk)));
                let delta = match self.spoken[index].take(events) {
                    Ok(delta) => delta,
                    Err(error) => return vec![data(&error.body())],
                };
                let logprobs = (self.answers.has_logprobs && !logprobs.is_empty())
                    .then(|| ChatLogprobs::of(&self.answers.tokenizer, &logprobs));
                if delta == Delta::default() && logprobs.is_none() && finish.is_none() {
                    return out;
                }
                let chunk = self.chunk(vec![ChatDelta {
                    index,
                    delta,
                    logprobs,
                    finish_reason: finish.map(|reason| reason.as_str()),
                }]);
                match finish {
                    Some(_) => self.last = Some(chunk),
                    None => out.push(data(&chunk)),
                }
            }
            Piece::Ended(totals) => {
                let mut last = self.last.take();
                if self.includes_usage {
                    out.extend(last.map(|chunk| data(&chunk)));
                    let mut chunk = self.chunk(Vec::new());
                    chunk.usage = Some(Some(totals.into()));
                    last = Some(chunk);
                }
                let last = last.map(|chunk| ChatChunk {
                    timings: Some(totals.into()),
                    ..chunk
                });
                out.extend(last.map(|chunk| data(&chunk)));
                out.push(Event::default().data("[DONE]"));
            }
            Piece::Failed(error) => {
                out.extend(self.last.take().map(|chunk| data(&chunk)));
                out.push(data(&error.body()));
            }
        }
        out
    }
}
