//! `GET /v1/models`.

use crate::api_error::{ApiError, ErrorBody};
use crate::app::App;
use crate::model::ServedModel;
use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// The models of a server.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    object: &'static str,
    data: Vec<ModelBody>,
}

/// A model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelBody {
    /// The name to ask for.
    id: String,
    /// `model`.
    object: &'static str,
    /// Seconds since 1970 at which it was loaded.
    created: u64,
    /// `muser`.
    owned_by: &'static str,
    /// Tokens of context; an addition of ours.
    context_length: usize,
    /// Can it chat, or only continue text? An addition of ours.
    has_chat: bool,
}

fn body(model: &ServedModel, id: &str) -> ModelBody {
    ModelBody {
        id: id.to_string(),
        object: "model",
        created: model.created,
        owned_by: "muser",
        context_length: model.handle.info().n_ctx,
        has_chat: model.chat.is_some(),
    }
}

/// The models that can be asked for.
#[utoipa::path(
    get,
    path = "/v1/models",
    tag = "openai",
    responses(
        (status = 200, body = ModelList),
        (status = 503, body = ErrorBody),
        crate::openapi::NotLetIn
    )
)]
pub async fn list_models(State(app): State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    let model = app.model()?;
    Ok(Json(ModelList {
        object: "list",
        data: model.names.iter().map(|name| body(model, name)).collect(),
    }))
}

/// One model.
#[utoipa::path(
    get,
    path = "/v1/models/{model}",
    tag = "openai",
    params(("model" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = ModelBody),
        (status = 404, body = ErrorBody),
        (status = 503, body = ErrorBody),
        crate::openapi::NotLetIn
    )
)]
pub async fn show_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<ModelBody>, ApiError> {
    let model = app.model()?;
    model.check_name(Some(&name))?;
    Ok(Json(body(model, &name)))
}
