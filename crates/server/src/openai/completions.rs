//! `POST /v1/completions`: plain text goes on.
//!
//! What one would get wrong: an answer is at most 16 tokens long unless the
//! request says more. That is OpenAI's rule for this interface, and clients of
//! it count on it.

use crate::admission::{Context, Fields, Prepared, admit};
use crate::api_error::ApiError;
use crate::app::App;
use crate::body::JsonBytes;
use crate::model::ServedModel;
use crate::openai::chat_request::of_text;
use crate::openai::completion_fields::{CompletionFields, PromptField};
use crate::openai::logprobs::{Columns, CompletionLogprobs, MOST_TOP};
use crate::openai::usage::{TimingsBody, Usage};
use crate::openai::{Identity, data};
use crate::request::Arrival;
use crate::stream::{Format, respond};
use crate::text_routes::check_tokens;
use crate::turn::{Piece, Prompt, Terms, TokenLogprob, Turns};
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Serialize;
use std::sync::Arc;
use text::{AnswerFormat, ControlText, Special, TurnEvent, TurnSettings};
use utoipa::ToSchema;

/// Tokens of an answer where the request does not say.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A complete answer, or a piece of a streamed one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Completion {
    #[serde(flatten)]
    identity: Identity,
    /// `text_completion`.
    object: &'static str,
    choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsBody>,
}

/// One of the answers.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`.
    finish_reason: Option<&'static str>,
}

impl Fields for CompletionFields {
    /// What each prompt's answers begin with.
    type Extra = Vec<String>;

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn prepare(self, context: &mut Context<'_>) -> Result<Prepared<Vec<String>>, ApiError> {
        let Context {
            generation,
            model,
            deadline,
            ..
        } = *context;
        let most = model.handle.info().sequences;
        let terms = Terms {
            n_choices: generation.n_choices(most)?,
            sampling: generation.sampling(model)?,
            max_tokens: match self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) {
                0 => return Err(ApiError::value("max_tokens", 0, "1 or more")),
                n => Some(n),
            },
            logprobs: self.logprobs()?,
            cache: generation.cache(),
            deadline,
        };
        let (format, answer) = match (&self.regex, &self.grammar) {
            (None, None) => (None, AnswerFormat::Text),
            (Some(regex), None) => (Some("regex"), AnswerFormat::Regex(regex.clone())),
            (None, Some(grammar)) => (Some("grammar"), AnswerFormat::Lark(grammar.clone())),
            (Some(_), Some(_)) => {
                let expected = "one rule for the answer";
                return Err(ApiError::value("grammar", "it beside regex", expected));
            }
        };
        let settings = TurnSettings {
            stop: generation.stops()?,
            answer,
            ..TurnSettings::default()
        };
        let is_echo = self.echo.unwrap_or(false);
        let token_lists = self.prompt.tokens(model)?;
        let n_answers = token_lists.len() * terms.n_choices;
        if token_lists.is_empty() || n_answers > most {
            let found = format!(
                "{} prompts with {} answers each",
                token_lists.len(),
                terms.n_choices
            );
            let expected = format!("1 to {most} answers in all");
            return Err(ApiError::value("prompt", found, expected));
        }
        let echo = |tokens: &Vec<u32>| match is_echo {
            true => model.tokenizer.decode(tokens, ControlText::Skip),
            false => String::new(),
        };
        let echoes = token_lists.iter().map(echo).collect();
        let turn = model.completions.turn(&settings);
        let (guide, reader) = turn.map_err(|error| of_text(error, format))?;
        let prompts = token_lists.into_iter().map(|tokens| Prompt {
            tokens,
            cuts: Vec::new(),
            guide: guide.fork(),
            reader: reader.clone(),
            memo: None,
        });
        Ok(Prepared {
            prompts: prompts.collect(),
            terms,
            extra: echoes,
        })
    }
}

impl CompletionFields {
    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        match self.logprobs {
            Some(found) if found > MOST_TOP => Err(ApiError::value(
                "logprobs",
                found,
                format!("0 to {MOST_TOP}"),
            )),
            Some(_) if self.echo == Some(true) => Err(ApiError::unsupported(
                "logprobs",
                "beside echo those of the prompt would be wanted, which are not computed",
            )),
            logprobs => Ok(logprobs),
        }
    }
}

impl PromptField {
    /// The tokens of each prompt.
    fn tokens(self, model: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
        let tokenizer = &model.tokenizer;
        let encode = |text: &String| tokenizer.encode_prompt(text, Special::Text);
        Ok(match self {
            PromptField::Text(text) => vec![encode(&text)],
            PromptField::Texts(texts) => texts.iter().map(encode).collect(),
            PromptField::Tokens(tokens) => {
                check_tokens("prompt", &tokens, tokenizer.n_vocab())?;
                vec![tokens]
            }
            PromptField::TokenLists(lists) => {
                for (index, tokens) in lists.iter().enumerate() {
                    check_tokens(&format!("prompt[{index}]"), tokens, tokenizer.n_vocab())?;
                }
                lists
            }
        })
    }
}

/// Continues plain text, without a chat template.
///
/// With `stream`, the answer is `text/event-stream`: objects
/// `text_completion`, then `[DONE]`.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "openai",
    request_body = crate::openapi::CompletionRequest,
    responses(
        (status = 200, body = Completion),
        crate::openapi::NoAnswer
    )
)]
pub async fn completions(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    JsonBytes(bytes): JsonBytes,
) -> Result<Response, ApiError> {
    let admitted = admit::<CompletionFields>(app, arrival, bytes).await?;
    let (is_stream, includes_usage) = (admitted.is_stream, admitted.includes_usage);
    let model = Arc::clone(&admitted.model);
    let terms = &admitted.prepared.terms;
    let (n_choices, has_logprobs) = (terms.n_choices, terms.logprobs.is_some());
    let (turns, echoes, notes) = admitted.start()?;
    let answers = echoes
        .iter()
        .flat_map(|echo| std::iter::repeat_n(echo, n_choices))
        .map(|echo| Answer {
            echo: Some(echo.clone()).filter(|echo| !echo.is_empty()),
            columns: has_logprobs.then(|| Columns::new(Arc::clone(&model.tokenizer), echo)),
        });
    let writer = Writer {
        identity: Identity::new("cmpl-", &model)?,
        answers: answers.collect(),
        includes_usage,
        last: None,
    };
    let response = match is_stream {
        true => respond(turns, writer),
        false => Json(collect(turns, writer).await?).into_response(),
    };
    Ok(notes.on(response))
}

/// Writes answers as objects.
struct Writer {
    identity: Identity,
    answers: Vec<Answer>,
    includes_usage: bool,
    /// The newest piece with a reason: the last of them also bears the times.
    last: Option<Completion>,
}

/// What is kept of one answer.
struct Answer {
    /// What its text begins with, until it is told.
    echo: Option<String>,
    columns: Option<Columns>,
}

impl Writer {
    fn object(&self, choices: Vec<CompletionChoice>) -> Completion {
        Completion {
            identity: self.identity.clone(),
            object: "text_completion",
            choices,
            usage: None,
            timings: None,
        }
    }

    /// What is new of an answer.
    fn choice(
        &mut self,
        index: usize,
        events: Vec<TurnEvent>,
        logprobs: &[TokenLogprob],
    ) -> CompletionChoice {
        let answer = &mut self.answers[index];
        let mut text = answer.echo.take().unwrap_or_default();
        for event in events {
            if let TurnEvent::Content(piece) = event {
                text.push_str(&piece);
            }
        }
        CompletionChoice {
            index,
            text,
            logprobs: answer
                .columns
                .as_mut()
                .map(|columns| columns.push(logprobs)),
            finish_reason: None,
        }
    }
}

/// The whole answers.
async fn collect(mut turns: Turns, mut writer: Writer) -> Result<Completion, ApiError> {
    let mut choices = vec![CompletionChoice::default(); turns.n_choices()];
    loop {
        match turns.next().await {
            Some(Piece::Choice {
                choice: index,
                events,
                logprobs,
                finish,
            }) => {
                let new = writer.choice(index, events, &logprobs);
                let choice = &mut choices[index];
                choice.index = index;
                choice.text.push_str(&new.text);
                match (&mut choice.logprobs, new.logprobs) {
                    (Some(all), Some(new)) => all.extend(new),
                    (all, new) => *all = all.take().or(new),
                }
                choice.finish_reason = finish.map(|reason| reason.as_str());
            }
            Some(Piece::Failed(error)) => return Err(error),
            Some(Piece::Ended(totals)) => {
                return Ok(Completion {
                    usage: Some(totals.into()),
                    timings: Some(totals.into()),
                    ..writer.object(choices)
                });
            }
            None => return Err(ApiError::internal("the answer had no end")),
        }
    }
}

impl Format for Writer {
    fn open(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn piece(&mut self, piece: Piece) -> Vec<Event> {
        let mut objects: Vec<Completion> = self.last.take().into_iter().collect();
        match piece {
            Piece::Choice {
                choice: index,
                events,
                logprobs,
                finish,
            } => {
                let mut choice = self.choice(index, events, &logprobs);
                choice.finish_reason = finish.map(|reason| reason.as_str());
                let object = self.object(vec![choice]);
                match finish {
                    Some(_) => self.last = Some(object),
                    None => objects.push(object),
                }
            }
            Piece::Ended(totals) => {
                if self.includes_usage {
                    objects.push(Completion {
                        usage: Some(totals.into()),
                        ..self.object(Vec::new())
                    });
                }
                if let Some(last) = objects.last_mut() {
                    last.timings = Some(totals.into());
                }
                let end = Event::default().data("[DONE]");
                return objects.iter().map(data).chain([end]).collect();
            }
            Piece::Failed(error) => {
                let error = data(&error.body());
                return objects.iter().map(data).chain([error]).collect();
            }
        }
        objects.iter().map(data).collect()
    }
}
