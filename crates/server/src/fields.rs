//! From the bytes of a body to its fields.
//!
//! A field that nobody knows is let through and named; one that we know and
//! cannot do is refused, unless it asks for what happens anyway. What one would
//! get wrong: a request is read in two parts from the same bytes, its own
//! fields and those that every generation has, and a field is unknown only if
//! neither part has it. (`#[serde(flatten)]` would hide unknown fields.)

use crate::api_error::{ApiError, found};
use crate::generation_fields::{GenerationFields, REFUSED};
use crate::openai::chat_fields::ChatFields;
use crate::openai::completion_fields::CompletionFields;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_ignored::Path;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;
use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

/// Most bytes of the names of what was ignored.
const MOST_IGNORED_BYTES: usize = 1024;
/// Most characters at the beginning of an error about a body, and at its end:
/// between them may stand what a client wrote.
const SHOWN_CHARS: usize = 200;

/// The fields of a request that only its own interface has.
pub trait OwnFields: DeserializeOwned {
    /// Fields that it knows and cannot do.
    const REFUSED: &'static [Refused];
}

/// Reads the fields of a chat; gives the names of those that nobody knows.
///
/// # Errors
/// What is wrong with the body, as its client hears it.
pub fn read_chat(body: &[u8]) -> Result<String, String> {
    read::<ChatFields>(body)
}

/// As [`read_chat`], of a plain completion.
///
/// # Errors
/// What is wrong with the body, as its client hears it.
pub fn read_completion(body: &[u8]) -> Result<String, String> {
    read::<CompletionFields>(body)
}

fn read<T: OwnFields>(body: &[u8]) -> Result<String, String> {
    match parse_both::<T>(body) {
        Ok((_, _, ignored)) => Ok(ignored.names()),
        Err(error) => Err(error.message().to_string()),
    }
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
/// that is refused and asks for something.
pub fn parse_both<T: OwnFields>(bytes: &[u8]) -> Result<(T, GenerationFields, Ignored), ApiError> {
    let (first, second) = (part::<T>(bytes)?, part::<GenerationFields>(bytes)?);
    // What one part does not have the other may; what lies below a field is
    // reported only by the part that has the field.
    let is_below = |path: &&String| path.contains(['.', '[']);
    let in_neither = first.unknown.intersection(&second.unknown);
    let below = first.unknown.iter().chain(&second.unknown).filter(is_below);
    let mut unknown: BTreeSet<String> = in_neither.chain(below).cloned().collect();
    let refused = || T::REFUSED.iter().chain(REFUSED);
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
        _ => ApiError::bad("invalid_json", None, bounded(format!("body: {error}"))),
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
        place => bounded(place.to_string()),
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
        (None, false) => ApiError::invalid(&place, bounded(format!("{place}: {text}"))),
        (None, true) => ApiError::bad("invalid_json", None, bounded(format!("body: {text}"))),
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

/// A message without the middle of it, if it is long.
fn bounded(message: String) -> String {
    if message.len() <= 2 * SHOWN_CHARS {
        return message;
    }
    let end = |n: usize| message.char_indices().nth(n).map(|(at, _)| at);
    let start = |n: usize| message.char_indices().nth_back(n - 1).map(|(at, _)| at);
    match (end(SHOWN_CHARS), start(SHOWN_CHARS)) {
        (Some(end), Some(start)) if end < start => {
            format!("{} ... {}", &message[..end], &message[start..])
        }
        _ => message,
    }
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

/// Reads an object, or nothing. serde alone would take a list for the fields of
/// a struct in their order.
///
/// # Errors
/// What is wrong with the object; another kind of value.
pub fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let object = Option::<Object<T>>::deserialize(deserializer)?;
    Ok(object.map(|Object(value)| value))
}

struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Object<T>, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Object)
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

    /// Their names, of bounded length, in characters that a header may have.
    pub fn names(&self) -> String {
        let mut names = String::new();
        for name in &self.0 {
            let separator = if names.is_empty() { "" } else { ", " };
            if names.len() + separator.len() + name.len() > MOST_IGNORED_BYTES {
                names.push_str(separator);
                names.push_str("...");
                break;
            }
            names.push_str(separator);
            let is_plain = |c: char| c.is_ascii_graphic() && c != ',';
            names.extend(name.chars().map(|c| if is_plain(c) { c } else { '?' }));
        }
        names
    }
}
