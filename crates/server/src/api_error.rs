//! What a client is told when a request cannot be answered: OpenAI's error
//! object.
//!
//! A message names what was found and what was expected. What one would get
//! wrong: after the first byte of a stream there is no status any more; the
//! same object then comes as an event, and the stream ends without `[DONE]`.

use engine::{PromptError, Refusal, SampleError};
use http::StatusCode;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Display;
use utoipa::ToSchema;

/// Seconds after which a refused client may try again: an answer takes about
/// as long, and the exact time nobody knows.
const RETRY_SECONDS: u32 = 1;

/// What the log says of an error: no message, since that may quote the request.
#[derive(Clone, Debug)]
pub(crate) struct LoggedError {
    /// The word for programs.
    pub(crate) code: Option<&'static str>,
    /// The field that is meant.
    pub(crate) param: Option<String>,
}

/// Why a request was refused or failed.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    detail: ErrorDetail,
    is_retryable: bool,
}

/// The body of every answer that is none.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    error: ErrorDetail,
}

/// What went wrong.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct ErrorDetail {
    /// What was found and what was expected.
    message: String,
    /// `invalid_request_error`, `rate_limit_error`, `server_error` ...
    r#type: &'static str,
    /// The field of the request that is meant.
    param: Option<String>,
    /// A word for programs.
    code: Option<&'static str>,
}

impl ApiError {
    fn new(
        status: StatusCode,
        r#type: &'static str,
        code: &'static str,
        message: impl Display,
    ) -> ApiError {
        ApiError {
            status,
            detail: ErrorDetail {
                message: message.to_string(),
                r#type,
                param: None,
                code: Some(code),
            },
            is_retryable: false,
        }
    }

    /// 400: a field holds what it must not.
    pub(crate) fn invalid(param: impl Display, message: impl Display) -> ApiError {
        ApiError::bad("invalid_value", Some(param.to_string()), message)
    }

    /// 400: a field with what was `found` and `expected`.
    pub(crate) fn value(
        param: impl Display,
        found: impl Display,
        expected: impl Display,
    ) -> ApiError {
        let message = format!("{param}: found {found}, expected {expected}");
        ApiError::invalid(param, message)
    }

    /// 400: a field that we know and cannot do.
    pub(crate) fn unsupported(param: impl Display, advice: impl Display) -> ApiError {
        let message = format!("{param} is not supported: {advice}");
        ApiError::bad("unsupported_parameter", Some(param.to_string()), message)
    }

    /// 400: the body as a whole.
    pub(crate) fn bad(
        code: &'static str,
        param: Option<String>,
        message: impl Display,
    ) -> ApiError {
        let mut error = ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_request_error",
            code,
            message,
        );
        error.detail.param = param;
        error
    }

    /// 401.
    pub(crate) fn unauthorized(message: impl Display) -> ApiError {
        let kind = "authentication_error";
        ApiError::new(StatusCode::UNAUTHORIZED, kind, "invalid_api_key", message)
    }

    /// 403.
    pub(crate) fn forbidden(message: impl Display) -> ApiError {
        let kind = "permission_error";
        ApiError::new(StatusCode::FORBIDDEN, kind, "forbidden_host", message)
    }

    /// An error of the request that is about HTTP itself.
    pub(crate) fn http(status: StatusCode, code: &'static str, message: impl Display) -> ApiError {
        ApiError::new(status, "invalid_request_error", code, message)
    }

    /// 503: not now.
    pub(crate) fn unavailable(code: &'static str, message: impl Display) -> ApiError {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        ApiError {
            is_retryable: true,
            ..ApiError::new(status, "server_error", code, message)
        }
    }

    /// 500: our fault.
    pub(crate) fn internal(message: impl Display) -> ApiError {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        ApiError::new(status, "server_error", "internal_error", message)
    }

    /// 504: the request's own time is over.
    pub(crate) fn deadline(ms: u128) -> ApiError {
        let message = format!("the answer was not complete {ms} ms after the request");
        let status = StatusCode::GATEWAY_TIMEOUT;
        ApiError::new(status, "server_error", "deadline_exceeded", message)
    }

    /// What the client reads.
    pub(crate) fn message(&self) -> &str {
        &self.detail.message
    }

    /// Is it a fault of the server's?
    pub(crate) fn is_ours(&self) -> bool {
        self.status == StatusCode::INTERNAL_SERVER_ERROR
    }

    /// The object, for an event of a stream.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody {
            error: self.detail.clone(),
        }
    }
}

/// A JSON value as a message shows what was found.
pub(crate) fn found(value: Option<&Value>) -> String {
    match value {
        None => "none".to_string(),
        Some(Value::String(text)) => gguf::shown(text),
        Some(Value::Array(_)) => "a list".to_string(),
        Some(Value::Object(_)) => "an object".to_string(),
        Some(scalar) => scalar.to_string(),
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        match refusal {
            Refusal::QueueFull { .. } => ApiError {
                is_retryable: true,
                ..ApiError::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_error",
                    "queue_full",
                    refusal,
                )
            },
            Refusal::Draining => ApiError::unavailable("draining", refusal),
            Refusal::Unhealthy { .. } => ApiError::unavailable("unhealthy", refusal),
            Refusal::Prompt(PromptError::TooLong { .. }) => {
                ApiError::bad("context_length_exceeded", None, refusal)
            }
            Refusal::Prompt(PromptError::Empty)
            | Refusal::TokenUnknown { .. }
            | Refusal::Choices { .. }
            | Refusal::Sampler(_) => ApiError::bad("invalid_value", None, refusal),
        }
    }
}

impl From<&engine::Error> for ApiError {
    fn from(error: &engine::Error) -> ApiError {
        match error {
            // Rules for the answer that no token keeps, and a bias that leaves none,
            // are the request's own.
            engine::Error::GuideFailed { .. }
            | engine::Error::Sample(
                SampleError::EmptyMask { .. } | SampleError::NoCandidate { .. },
            ) => ApiError::bad("answer_impossible", None, error),
            error => ApiError::internal(error),
        }
    }
}

#[cfg(feature = "http")]
impl axum::response::IntoResponse for ApiError {
    fn into_response(self) -> axum::response::Response {
        use http::{HeaderValue, header};
        let mut response = (self.status, axum::Json(self.body())).into_response();
        response.extensions_mut().insert(LoggedError {
            code: self.detail.code,
            param: self.detail.param,
        });
        if self.is_retryable {
            let headers = response.headers_mut();
            headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY_SECONDS));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}
