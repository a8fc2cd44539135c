//! HTTP: engine events in, wire formats out.
//!
//! The way of a request: bytes -> fields (`body`, `generation`, `openai`) ->
//! prompt and guide (`admission`, `text`) -> engine -> events -> turns (`turn`) -> wire format
//! (`stream`, `openai`). A new wire format is a module beside `openai`.
#![forbid(unsafe_code)]

mod admission;
mod api_error;
mod app;
mod auth;
mod body;
mod error;
mod generation;
mod health;
mod listen;
mod metrics;
mod model;
mod openai;
mod openapi;
mod request;
mod router;
mod server;
mod settings;
mod stream;
mod text_routes;
mod turn;

pub use auth::ApiKeys;
pub use error::Error;
pub use model::{DRY_BREAKERS, ModelParts, breaking_tokens};
pub use server::{Server, Stopper};
pub use settings::{Limits, Settings, TlsFiles};
