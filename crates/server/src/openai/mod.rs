//! The OpenAI wire format: chat completions, legacy completions, models.
//!
//! A wire format turns a body into [`Prompt`](crate::turn::Prompt)s and
//! [`Piece`](crate::turn::Piece)s into an answer; everything between is shared.
//! The next format is a module beside this one.

#[cfg(feature = "http")]
pub mod chat;
pub mod chat_fields;
#[cfg(feature = "http")]
pub mod chat_request;
pub mod completion_fields;
#[cfg(feature = "http")]
pub mod completions;
#[cfg(feature = "http")]
mod identity;
#[cfg(feature = "http")]
pub mod logprobs;
#[cfg(feature = "http")]
pub mod models;
#[cfg(feature = "http")]
pub mod unused;
#[cfg(feature = "http")]
pub mod usage;

#[cfg(feature = "http")]
pub(crate) use identity::data;
#[cfg(feature = "http")]
pub use identity::{Identity, random_id};
