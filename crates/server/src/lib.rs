//! HTTP: engine events in, wire formats out.
//!
//! Without its feature `http`, what reads requests is all there is: fuzzing wants it
//! alone.
//!
//! The way of a request: bytes -> fields (`body`, `fields`, `openai`) ->
//! prompt and guide (`admission`, `text`) -> engine -> events -> turns (`turn`) -> wire format
//! (`stream`, `openai`). A new wire format is a module beside `openai`.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(feature = "http"),
    allow(dead_code, reason = "what is read is for what answers")
)]

#[cfg(feature = "http")]
mod admission;
mod api_error;
#[cfg(feature = "http")]
mod app;
#[cfg(feature = "http")]
mod auth;
#[cfg(feature = "http")]
mod body;
#[cfg(feature = "http")]
mod error;
mod fields;
#[cfg(feature = "http")]
mod generation;
mod generation_fields;
#[cfg(feature = "http")]
mod health;
#[cfg(feature = "http")]
mod listen;
#[cfg(feature = "http")]
mod metrics;
#[cfg(feature = "http")]
mod model;
mod openai;
mod openapi;
#[cfg(feature = "http")]
mod request;
#[cfg(feature = "http")]
mod router;
#[cfg(feature = "http")]
mod server;
#[cfg(feature = "http")]
mod settings;
#[cfg(feature = "http")]
mod stream;
#[cfg(feature = "http")]
mod text_routes;
#[cfg(feature = "http")]
mod turn;

pub use fields::{read_chat, read_completion};

#[cfg(feature = "http")]
pub use auth::ApiKeys;
#[cfg(feature = "http")]
pub use error::Error;
#[cfg(feature = "http")]
pub use model::{DRY_BREAKERS, ModelParts, breaking_tokens};
#[cfg(feature = "http")]
pub use server::{Server, Stopper};
#[cfg(feature = "http")]
pub use settings::{Limits, Settings, TlsFiles};
