//! What every object of one answer has in common, and its way to the wire.

use crate::api_error::ApiError;
use crate::model::unix_seconds;
use serde::Serialize;
use utoipa::ToSchema;

/// What every object of one answer has in common.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Identity {
    /// `chatcmpl-...` or `cmpl-...`.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Changes when the same request may have another answer: with the model,
    /// its numbers or its settings.
    pub system_fingerprint: String,
}

impl Identity {
    /// A new one.
    ///
    /// # Errors
    /// 500 without random numbers.
    pub fn new(prefix: &str, model: &crate::model::ServedModel) -> Result<Identity, ApiError> {
        Ok(Identity {
            id: random_id(prefix)?,
            created: unix_seconds(),
            model: model.name().to_string(),
            system_fingerprint: model.fingerprint().to_string(),
        })
    }
}

/// `prefix` and 24 random hexadecimal digits.
///
/// # Errors
/// 500 without random numbers.
pub fn random_id(prefix: &str) -> Result<String, ApiError> {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes)
        .map_err(|error| ApiError::internal(format!("no random numbers: {error}")))?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{prefix}{digits}"))
}

/// The JSON of an event's data.
///
/// # Panics
/// If a wire type of ours has no JSON form.
pub(crate) fn data(value: &impl Serialize) -> axum::response::sse::Event {
    let json = serde_json::to_string(value).expect("wire types have a JSON form");
    axum::response::sse::Event::default().data(json)
}
