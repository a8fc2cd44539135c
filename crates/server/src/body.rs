//! The bytes of a body: size, time, type; and what is said of its fields that
//! nobody knows.

use crate::api_error::ApiError;
use crate::app::App;
use crate::fields::Ignored;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use std::sync::Arc;
use std::time::Duration;

/// The body of a request that says it is JSON.
pub struct JsonBytes(pub Bytes);

impl FromRequest<Arc<App>> for JsonBytes {
    type Rejection = ApiError;

    /// # Errors
    /// 415, 413, 408, or 400 if the client broke off.
    async fn from_request(request: Request, app: &Arc<App>) -> Result<JsonBytes, ApiError> {
        check_type(request.headers())?;
        let limits = &app.settings.limits;
        let read = read(request.into_body(), limits.body_bytes);
        match tokio::time::timeout(limits.body_timeout, read).await {
            Ok(bytes) => bytes.map(JsonBytes),
            Err(_) => Err(too_slow(limits.body_timeout)),
        }
    }
}

async fn read(body: Body, most: usize) -> Result<Bytes, ApiError> {
    to_bytes(body, most).await.map_err(|error| {
        let is_too_long = std::error::Error::source(&error)
            .is_some_and(|source| source.is::<http_body_util::LengthLimitError>());
        match is_too_long {
            true => ApiError::http(
                StatusCode::PAYLOAD_TOO_LARGE,
                "body_too_large",
                format!("body: found more than {most} bytes, expected at most that"),
            ),
            false => ApiError::bad("body_unreadable", None, format!("body: {error}")),
        }
    })
}

fn too_slow(after: Duration) -> ApiError {
    ApiError::http(
        StatusCode::REQUEST_TIMEOUT,
        "body_timeout",
        format!("body: not complete after {} s", after.as_secs_f64()),
    )
}

/// A page of another origin may send a form without being asked; JSON it may
/// not.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers.get(header::CONTENT_TYPE);
    let found = value.and_then(|value| value.to_str().ok());
    let essence = found.and_then(|found| found.split(';').next());
    if essence.is_some_and(|found| found.trim().eq_ignore_ascii_case("application/json")) {
        return Ok(());
    }
    let found = found.map_or_else(|| "none".to_string(), gguf::shown);
    Err(ApiError::http(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        format!("content-type: found {found}, expected application/json"),
    ))
}

/// Names what was ignored in the log and in the header `x-muser-ignored`.
pub fn announce(ignored: &Ignored, headers: &mut HeaderMap) {
    let names = ignored.names();
    if names.is_empty() {
        return;
    }
    tracing::info!(fields = names, "ignored");
    if let Ok(value) = HeaderValue::from_str(&names) {
        headers.insert("x-muser-ignored", value);
    }
}
