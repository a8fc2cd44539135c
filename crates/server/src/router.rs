//! Routes, and what every request goes through before it reaches one.
//!
//! From outside to inside: id and log, panics, CORS, host, key. What one would
//! get wrong: a browser asks without a key whether it may send one, so CORS
//! stands before the key.

use crate::api_error::ApiError;
use crate::app::App;
use crate::auth::check_local_host;
use crate::{Error, health, metrics, openai, openapi, request, text_routes};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::any::Any;
use std::sync::Arc;
use tower::ServiceBuilder;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// What anybody may see: a load balancer has no key.
const OPEN_PATHS: [&str; 1] = ["/health"];

const JSON: [(HeaderName, &str); 1] = [(header::CONTENT_TYPE, "application/json")];

/// All routes of a server.
///
/// # Errors
/// [`Error::CorsOrigin`].
pub(crate) fn router(app: &Arc<App>) -> Result<Router, Error> {
    let (router, document) = OpenApiRouter::with_openapi(openapi::document())
        .routes(routes!(openai::chat::chat_completions))
        .routes(routes!(openai::completions::completions))
        .routes(routes!(openai::models::list_models))
        .routes(routes!(openai::models::show_model))
        .routes(routes!(text_routes::tokenize))
        .routes(routes!(text_routes::detokenize))
        .routes(routes!(text_routes::apply_template))
        .routes(routes!(health::health))
        .routes(routes!(metrics::metrics))
        .split_for_parts();
    let paths: Arc<[String]> = document.paths.paths.keys().cloned().collect();
    let document = document.to_json().expect("the document has a JSON form");
    let document = Bytes::from(document);
    let guard = ServiceBuilder::new()
        .layer(from_fn_with_state(Arc::clone(app), request::observe))
        .layer(CatchPanicLayer::custom(panicked))
        .option_layer(cors(&app.settings.cors_origins)?)
        .layer(from_fn_with_state(Arc::clone(app), admit));
    Ok(router
        .route("/openapi.json", get(|| async move { (JSON, document) }))
        .fallback(move |uri: Uri| async move { no_route(&uri, &paths) })
        .method_not_allowed_fallback(no_method)
        .layer(guard)
        .with_state(Arc::clone(app)))
}

/// Lets in who may ask.
async fn admit(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if app.settings.wants_local_host() {
        let named = request.headers().get(header::HOST);
        // What is no text names no host of ours.
        let host = named.map(|host| host.to_str().unwrap_or("\u{fffd}"));
        check_local_host(host.or_else(|| request.uri().authority().map(|a| a.as_str())))?;
    }
    if !OPEN_PATHS.contains(&request.uri().path()) {
        app.settings.keys.check(request.headers())?;
    }
    Ok(next.run(request).await)
}

/// What lets pages of the given origins read answers; nothing without any.
fn cors(origins: &[String]) -> Result<Option<CorsLayer>, Error> {
    let origin = match origins {
        [] => return Ok(None),
        origins if origins.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        origins => {
            let value = |origin: &String| {
                let host = origin.split_once("://").map(|(_, host)| host);
                let is_origin = host.is_some_and(|host| !host.is_empty() && !host.contains('/'));
                HeaderValue::from_str(origin)
                    .ok()
                    .filter(|_| is_origin)
                    .ok_or_else(|| Error::CorsOrigin {
                        found: gguf::shown(origin),
                    })
            };
            AllowOrigin::list(origins.iter().map(value).collect::<Result<Vec<_>, _>>()?)
        }
    };
    let exposed = ["x-request-id", "x-muser-ignored"].map(HeaderName::from_static);
    Ok(Some(
        CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(exposed),
    ))
}

/// 404, with the path that may be meant: most often a base URL ends without
/// `/v1`, or has it twice.
fn no_route(uri: &Uri, paths: &[String]) -> ApiError {
    let path = uri.path().trim_end_matches('/');
    let is_near = |known: &&String| {
        !path.is_empty() && (known.ends_with(path) || path.ends_with(known.as_str()))
    };
    let near = paths.iter().filter(is_near).min_by_key(|known| known.len());
    let path = gguf::shown(uri.path());
    let message = match near {
        Some(near) => format!("path: found {path}, expected {near}"),
        None => format!("there is no {path}; /openapi.json lists what there is"),
    };
    ApiError::http(StatusCode::NOT_FOUND, "unknown_path", message)
}

async fn no_method(method: Method, uri: Uri) -> ApiError {
    let path = gguf::shown(uri.path());
    let message = format!("{path}: found the method {method}, expected what the header Allow says");
    ApiError::http(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        message,
    )
}

/// A bug of ours: the request fails, the server goes on.
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => {
            let text = panic.downcast::<&str>();
            text.map_or_else(
                |_| "it did not say why".to_string(),
                |text| text.to_string(),
            )
        }
    };
    tracing::error!(panic = text, "a request panicked");
    ApiError::internal("the request met a bug of the server").into_response()
}
