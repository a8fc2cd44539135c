//! `GET /health`: may a load balancer send requests here?

use crate::app::App;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// How the server is.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Health {
    /// `starting`, `ready`, `draining` or `unhealthy`.
    status: &'static str,
    /// What is wrong, if something is.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

/// How the server is: 200 when it is ready, else 503.
#[utoipa::path(
    get,
    path = "/health",
    tag = "operation",
    responses(
        (status = 200, body = Health),
        (status = 403, body = crate::api_error::ErrorBody),
        (status = 503, body = Health)
    )
)]
pub async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Health>) {
    let state = app.loaded().map(|model| model.handle.state());
    let (status, why) = match state {
        None => ("starting", None),
        Some(engine::State::Ready) => ("ready", None),
        Some(engine::State::Draining) => ("draining", None),
        Some(engine::State::Unhealthy { why }) => ("unhealthy", Some(why)),
    };
    let code = match status {
        "ready" => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (code, Json(Health { status, why }))
}
