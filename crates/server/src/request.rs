//! What is known of a request whatever it asks for: its id, when it came, how
//! it went.

use crate::api_error::{ApiError, LoggedError};
use crate::app::App;
use crate::settings::Settings;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::time::Instant;
use tracing::Instrument;

/// The header that names a request.
const ID: &str = "x-request-id";
/// Most bytes of an id that a client may choose.
const MOST_ID_BYTES: usize = 128;

/// A request's arrival.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// When its headers were there.
    pub at: Instant,
}

impl Arrival {
    /// Writes the body to the log, if somebody asked for that.
    pub fn log_prompt(&self, settings: &Settings, body: &[u8]) {
        if settings.logs_prompts {
            // As a debug text, so that control characters are escapes.
            tracing::info!(body = ?String::from_utf8_lossy(body), "prompt");
        }
    }
}

/// Does work that takes a while on a thread where it keeps nobody waiting.
///
/// # Errors
/// Those of the work; 500 if it panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let span = tracing::Span::current();
    let work = tokio::task::spawn_blocking(move || span.in_scope(work));
    work.await
        .unwrap_or_else(|_| Err(ApiError::internal("preparing the request failed")))
}

/// Gives a request its id, counts it, and writes a line about it.
pub async fn observe(
    State(app): State<Arc<App>>,
    matched: Option<MatchedPath>,
    mut request: Request,
    next: Next,
) -> Response {
    let arrival = Arrival { at: Instant::now() };
    request.extensions_mut().insert(arrival);
    let given = request.headers().get(ID).cloned();
    let id = match given.filter(|id| id.len() <= MOST_ID_BYTES && id.to_str().is_ok()) {
        Some(id) => id,
        None => match crate::openai::random_id("req_") {
            Ok(id) => HeaderValue::try_from(id).unwrap_or(HeaderValue::from_static("req_")),
            Err(error) => return error.into_response(),
        },
    };
    // Paths that are no routes are of any number.
    let route = matched
        .as_ref()
        .map_or("unknown", |path| path.as_str())
        .to_string();
    let method = request.method().clone();
    // Whoever set a client's base URL looks for what it asked for.
    let path = matched.is_none().then(|| gguf::shown(request.uri().path()));
    let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default());
    let mut response = next.run(request).instrument(span.clone()).await;
    let status = response.status().as_u16();
    app.metrics.count(&route, status);
    let is_probe = matches!(route.as_str(), "/health" | "/metrics");
    let error = response.extensions_mut().remove::<LoggedError>();
    let code = error.as_ref().and_then(|error| error.code);
    let param = error.as_ref().and_then(|error| error.param.as_deref());
    span.in_scope(|| {
        let ms = arrival.at.elapsed().as_millis();
        let path = path.as_deref();
        match is_probe {
            true => tracing::debug!(%method, route, path, status, code, param, ms, "answered"),
            false => tracing::info!(%method, route, path, status, code, param, ms, "answered"),
        }
    });
    let headers = response.headers_mut();
    headers.insert(ID, id);
    // Answers are for the one who asked.
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}
