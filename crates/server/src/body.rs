//! From the bytes of a body to a request: size, time, type, JSON, fields.
//!
//! A field that nobody knows is let through and named; one that we know and
//! cannot do is refused, unless it asks for what happens anyway. What one would
//! get wrong: a request is read in two parts from the same bytes, its own
//! fields and those that every generation has, and a field is unknown only if
//! neither part has it. (`#[serde(flatten)]` would hide unknown fields.)

use crate::api_error::{ApiError, found};
use crate::app::App;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::de::DeserializeOwned;
use serde_ignored::Path;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of the header that names what was ignored.
const MOST_IGNORED_BYTES: usize = 1024;

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

/// A field that we know and cannot do.
pub struct Refused {
    /// Its name.
    pub name: &'static str,
    /// Values, as JSON, that ask for what happens anyway; `null` always does.
    pub neutral: &'static [&'static str],
    /// Why not, and what there is instead.
    pub advice: &'static str,
}

/// One part of a request and the names of the fields that it does not have.
struct Part<T> {
    value: T,
    unknown: BTreeSet<String>,
}

/// Reads a request without fields of generation.
///
/// # Errors
/// 400 with the path of the first field that is wrong.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, Ignored), ApiError> {
    let part = part(bytes)?;
    Ok((part.value, Ignored(part.unknown)))
}

/// Reads a request in two parts.
///
/// # Errors
/// 400 with the path of the first field that is wrong, or with the name of one
/// of `refused`, or of those that no generation has, that asks for something.
pub fn parse_both<T: DeserializeOwned, U: DeserializeOwned>(
    bytes: &[u8],
    refused: &[Refused],
) -> Result<(T, U, Ignored), ApiError> {
    let (first, second) = (part::<T>(bytes)?, part::<U>(bytes)?);
    // What one part does not have the other may; what lies below a field is
    // reported only by the part that has the field.
    let is_below = |path: &&String| path.contains(['.', '[']);
    let in_neither = first.unknown.intersection(&second.unknown);
    let below = first.unknown.iter().chain(&second.unknown).filter(is_below);
    let mut unknown: BTreeSet<String> = in_neither.chain(below).cloned().collect();
    let refused = || refused.iter().chain(crate::generation::REFUSED);
    if refused().any(|field| unknown.contains(field.name)) {
        check_refused(bytes, refused())?;
        refused().for_each(|field| {
            unknown.remove(field.name);
        });
    }
    Ok((first.value, second.value, Ignored(unknown)))
}

/// Checks that every refused field asks for what happens anyway.
fn check_refused<'r>(
    bytes: &[u8],
    mut refused: impl Iterator<Item = &'r Refused>,
) -> Result<(), ApiError> {
    let body: Map<String, Value> = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::bad("invalid_json", None, format!("body: {error}")))?;
    let asks = |field: &&Refused| {
        body.get(field.name).is_some_and(|value| {
            let text = value.to_string();
            !value.is_null() && !field.neutral.contains(&text.as_str())
        })
    };
    match refused.find(asks) {
        Some(field) => Err(ApiError::unsupported(field.name, field.advice)),
        None => Ok(()),
    }
}

fn part<T: DeserializeOwned>(bytes: &[u8]) -> Result<Part<T>, ApiError> {
    // serde would take a list for the fields in their order.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        let message = "body: found a list, expected a JSON object";
        return Err(ApiError::bad("invalid_json", None, message));
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let mut track = serde_path_to_error::Track::new();
    let mut unknown = BTreeSet::new();
    let tracked = serde_path_to_error::Deserializer::new(&mut json, &mut track);
    let value = serde_ignored::deserialize(tracked, |path| {
        unknown.insert(shown_path(&path));
    });
    let value = value.map_err(|error| match error.classify() {
        serde_json::error::Category::Data => wrong_value(bytes, &track.path(), &error),
        _ => ApiError::bad("invalid_json", None, format!("body: {error}")),
    })?;
    let end = json.end();
    end.map_err(|error| ApiError::bad("invalid_json", None, format!("body: {error}")))?;
    Ok(Part { value, unknown })
}

/// The error of a value of the wrong type, in the words of JSON. serde's are
/// those of Rust, and it repeats the value, however long that is.
fn wrong_value(
    bytes: &[u8],
    path: &serde_path_to_error::Path,
    error: &serde_json::Error,
) -> ApiError {
    let text = error.to_string();
    let text = text
        .rsplit_once(" at line ")
        .map_or(&*text, |(text, _)| text);
    let place = match path.to_string().as_str() {
        "." => String::new(),
        place => place.to_string(),
    };
    let missing = text.strip_prefix("missing field `");
    if let Some(field) = missing.and_then(|field| field.strip_suffix('`')) {
        let separator = if place.is_empty() { "" } else { "." };
        return ApiError::value(format!("{place}{separator}{field}"), "none", "a value");
    }
    let expected = text.rsplit_once("expected ").map(|(_, expected)| expected);
    match (expected, place.is_empty()) {
        (Some(expected), false) => {
            let body = serde_json::from_slice(bytes).unwrap_or_default();
            // Quoted, since a number in quotes is a frequent mistake.
            let found = match value_at(&body, path) {
                Some(Value::String(text)) => format!("\"{}\"", gguf::shown(text)),
                other => found(other),
            };
            ApiError::value(&place, found, in_json(expected))
        }
        (Some(_), true) => {
            let body: Value = serde_json::from_slice(bytes).unwrap_or_default();
            let message = format!("body: found {}, expected a JSON object", found(Some(&body)));
            ApiError::bad("invalid_json", None, message)
        }
        (None, false) => ApiError::invalid(&place, format!("{place}: {text}")),
        (None, true) => ApiError::bad("invalid_json", None, format!("body: {text}")),
    }
}

/// The value that a path leads to.
fn value_at<'v>(root: &'v Value, path: &serde_path_to_error::Path) -> Option<&'v Value> {
    path.iter().try_fold(root, |value, step| match step {
        Segment::Seq { index } => value.get(index),
        Segment::Map { key } => value.get(key),
        // A step inside of Rust's types.
        Segment::Enum { .. } | Segment::Unknown => Some(value),
    })
}

/// What serde expected, as one says it of JSON.
fn in_json(expected: &str) -> String {
    let plain = match expected {
        "a boolean" => "true or false",
        "f32" | "f64" => "a number",
        "i32" => "a whole number of 32 bits",
        "i64" => "a whole number of 64 bits",
        "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "a sequence" => "a list",
        "a map" => "an object",
        name if name.starts_with("struct ") => "an object",
        // The variants of an enum.
        names => {
            let names = names.strip_prefix("one of ").unwrap_or(names);
            let names = names.replace('`', "");
            return match names.rsplit_once(", ").filter(|_| expected.contains('`')) {
                Some((first, last)) => format!("{first} or {last}"),
                None => names,
            };
        }
    };
    plain.to_string()
}

/// `a.b[0].c`, without the steps that are not in the JSON.
fn shown_path(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", shown_path(parent)),
        Path::Map { parent, key } => match shown_path(parent).as_str() {
            "" => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => shown_path(parent),
    }
}

/// The fields of a request that had no effect.
#[derive(Clone, Debug, Default)]
pub struct Ignored(BTreeSet<String>);

impl Ignored {
    /// Adds one.
    pub fn add(&mut self, name: String) {
        self.0.insert(name);
    }

    /// Names them in the log and in the header `x-muser-ignored`.
    pub fn announce(&self, headers: &mut HeaderMap) {
        if self.0.is_empty() {
            return;
        }
        let mut names = String::new();
        for name in &self.0 {
            let separator = if names.is_empty() { "" } else { ", " };
            if names.len() + separator.len() + name.len() > MOST_IGNORED_BYTES {
                names.push_str(separator);
                names.push_str("...");
                break;
            }
            names.push_str(separator);
            names.extend(
                name.chars()
                    .map(|c| match c.is_ascii_graphic() && c != ',' {
                        true => c,
                        false => '?',
                    }),
            );
        }
        tracing::info!(fields = names, "ignored");
        if let Ok(value) = HeaderValue::from_str(&names) {
            headers.insert("x-muser-ignored", value);
        }
    }
}
