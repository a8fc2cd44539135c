//! `/tokenize`, `/detokenize`, `/apply-template`: the text side without the
//! model.

use crate::admission::admit;
use crate::api_error::ApiError;
use crate::app::App;
use crate::body::{JsonBytes, announce};
use crate::fields::{Ignored, parse};
use crate::openai::chat_fields::ChatFields;
use crate::request::{Arrival, blocking};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use text::{ControlText, Special};
use utoipa::ToSchema;

/// A text to become tokens.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// The text.
    content: String,
    /// Put the token that begins a text before it, if the model wants one?
    add_special: Option<bool>,
    /// Are control tokens that the text spells control tokens?
    parse_special: Option<bool>,
    /// Also give each token's text?
    with_pieces: Option<bool>,
}

/// Tokens.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Tokens {
    tokens: Vec<u32>,
    /// For each token its text as the model's file spells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pieces: Option<Vec<String>>,
}

/// Makes tokens of a text.
#[utoipa::path(
    post,
    path = "/tokenize",
    tag = "text",
    request_body = TokenizeRequest,
    responses((status = 200, body = Tokens), crate::openapi::NoText)
)]
pub async fn tokenize(
    State(app): State<Arc<App>>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Response, ApiError> {
    let tokenizer = Arc::clone(&app.model()?.tokenizer);
    let (body, ignored) = blocking(move || {
        let (request, ignored) = parse::<TokenizeRequest>(&bytes)?;
        let special = match request.parse_special.unwrap_or(false) {
            true => Special::Parse,
            false => Special::Text,
        };
        let tokens = tokenizer.encode(&request.content, special);
        let tokens = match request.add_special.unwrap_or(false) {
            true => tokenizer.with_bos(tokens),
            false => tokens,
        };
        let piece = |&id: &u32| tokenizer.token_text(id).unwrap_or_default().to_string();
        let wants_pieces = request.with_pieces.unwrap_or(false);
        let pieces = wants_pieces.then(|| tokens.iter().map(piece).collect());
        Ok((Tokens { tokens, pieces }, ignored))
    })
    .await?;
    Ok(noted(body, &ignored))
}

/// Tokens to become a text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// Their ids.
    tokens: Vec<u32>,
    /// Spell control tokens instead of leaving them out?
    keep_special: Option<bool>,
}

/// A text.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TextBody {
    content: String,
}

/// Makes a text of tokens.
#[utoipa::path(
    post,
    path = "/detokenize",
    tag = "text",
    request_body = DetokenizeRequest,
    responses((status = 200, body = TextBody), crate::openapi::NoText)
)]
pub async fn detokenize(
    State(app): State<Arc<App>>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Response, ApiError> {
    let tokenizer = Arc::clone(&app.model()?.tokenizer);
    let (body, ignored) = blocking(move || {
        let (request, ignored) = parse::<DetokenizeRequest>(&bytes)?;
        let n_vocab = tokenizer.n_vocab();
        check_tokens("tokens", &request.tokens, n_vocab)?;
        let control = match request.keep_special.unwrap_or(false) {
            true => ControlText::Keep,
            false => ControlText::Skip,
        };
        let content = tokenizer.decode(&request.tokens, control);
        Ok((TextBody { content }, ignored))
    })
    .await?;
    Ok(noted(body, &ignored))
}

/// Checks that every id is a token's.
///
/// # Errors
/// 400 naming the first that is none.
pub(crate) fn check_tokens(param: &str, tokens: &[u32], n_vocab: usize) -> Result<(), ApiError> {
    match tokens.iter().position(|&id| id as usize >= n_vocab) {
        Some(index) => Err(ApiError::value(
            format_args!("{param}[{index}]"),
            tokens[index],
            format_args!("the id of a token, 0 to {}", n_vocab - 1),
        )),
        None => Ok(()),
    }
}

/// The prompt of a conversation.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct PromptBody {
    /// As text; a control token looks like the text that spells it.
    prompt: String,
    /// As the model gets it.
    tokens: Vec<u32>,
}

/// Makes a prompt of a chat request, without answering it.
#[utoipa::path(
    post,
    path = "/apply-template",
    tag = "text",
    request_body = crate::openapi::ChatRequest,
    responses((status = 200, body = PromptBody), crate::openapi::NoAnswer)
)]
pub async fn apply_template(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Response, ApiError> {
    let admitted = admit::<ChatFields>(app, arrival, bytes).await?;
    let tokens = admitted.prepared.prompts[0].tokens.clone();
    let prompt = admitted.model.tokenizer.decode(&tokens, ControlText::Keep);
    let response = Json(PromptBody { prompt, tokens }).into_response();
    Ok(admitted.notes().on(response))
}

/// An answer, with what was ignored of the request.
fn noted(body: impl Serialize, ignored: &Ignored) -> Response {
    let mut response = Json(body).into_response();
    announce(ignored, response.headers_mut());
    response
}
