//! Everything about a file as data: the JSON form of the report.
//!
//! Its keys are an interface: scripts read them. What a reader would get wrong:
//! JSON has no infinities and no NaN, so numbers that are none are texts.

use super::sizes::{Sizes, Total};
use super::verdict::Verdict;
use crate::model_file::ModelFile;
use gguf::{Array, TensorInfo, Value};
use serde::Serialize;
use serde_json::{Map, Value as Json, json};

/// Characters of a text that are shown without `--full`.
const SHOWN_CHARS: usize = 60;
/// Elements of an array that are shown without `--full`.
const SHOWN_ELEMENTS: usize = 6;

/// The whole report.
#[derive(Serialize)]
pub struct Report {
    file: FileReport,
    metadata: Map<String, Json>,
    tensors: Vec<TensorReport>,
    types: Vec<TypeReport>,
    total: Total,
    muser: Verdict,
}

#[derive(Serialize)]
struct FileReport {
    name: String,
    parts: Vec<String>,
    version: u32,
    alignment: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct TensorReport {
    name: String,
    #[serde(rename = "type")]
    ty: &'static str,
    shape: Vec<u64>,
    bytes: usize,
}

#[derive(Serialize)]
struct TypeReport {
    #[serde(rename = "type")]
    ty: &'static str,
    tensors: u64,
    parameters: u64,
    bytes: u64,
}

impl Report {
    /// The report on an opened file.
    pub fn new(file: &ModelFile) -> Report {
        let gguf = &file.gguf;
        let infos: Vec<TensorInfo> = gguf.tensors().iter().map(|t| t.info()).collect();
        let sizes = Sizes::of(&infos);
        let metadata = gguf.metadata().iter();
        Report {
            file: FileReport {
                name: file.name.clone(),
                parts: gguf
                    .paths()
                    .iter()
                    .map(|p| p.display().to_string())
                    .collect(),
                version: gguf.version(),
                alignment: gguf.alignment(),
                bytes: gguf.file_bytes(),
            },
            metadata: metadata
                .map(|(key, value)| (key.to_string(), entry(value)))
                .collect(),
            tensors: gguf
                .tensors()
                .iter()
                .map(|tensor| TensorReport {
                    name: tensor.name.clone(),
                    ty: tensor.ty.name(),
                    shape: tensor.shape.clone(),
                    bytes: tensor.data.len(),
                })
                .collect(),
            types: sizes
                .types
                .iter()
                .map(|t| TypeReport {
                    ty: t.ty.name(),
                    tensors: t.n_tensors,
                    parameters: t.n_parameters,
                    bytes: t.n_bytes,
                })
                .collect(),
            total: sizes.total(),
            muser: Verdict::of(gguf),
        }
    }
}

/// A key's value with its type.
fn entry(value: &Value) -> Json {
    match value {
        Value::Array(array) => json!({
            "type": "array",
            "elements": array.element_name(),
            "length": array.len(),
            "value": array_json(array, array.len()),
        }),
        scalar => json!({ "type": scalar.type_name(), "value": scalar_json(scalar) }),
    }
}

fn f64_json(number: f64) -> Json {
    match number.is_finite() {
        true => json!(number),
        false => Json::String(number.to_string()),
    }
}

/// The shortest decimal that means this f32, not the digits of its f64.
fn f32_json(number: f32) -> Json {
    f64_json(number.to_string().parse().unwrap_or(f64::NAN))
}

fn scalar_json(value: &Value) -> Json {
    match value {
        Value::U8(x) => json!(x),
        Value::I8(x) => json!(x),
        Value::U16(x) => json!(x),
        Value::I16(x) => json!(x),
        Value::U32(x) => json!(x),
        Value::I32(x) => json!(x),
        Value::U64(x) => json!(x),
        Value::I64(x) => json!(x),
        Value::F32(x) => f32_json(*x),
        Value::F64(x) => f64_json(*x),
        Value::Bool(x) => json!(x),
        Value::String(x) => json!(x),
        Value::Array(array) => array_json(array, array.len()),
    }
}

/// The first `most` elements.
fn array_json(array: &Array, most: usize) -> Json {
    match array {
        Array::U8(v) => json!(v[..most]),
        Array::I8(v) => json!(v[..most]),
        Array::U16(v) => json!(v[..most]),
        Array::I16(v) => json!(v[..most]),
        Array::U32(v) => json!(v[..most]),
        Array::I32(v) => json!(v[..most]),
        Array::U64(v) => json!(v[..most]),
        Array::I64(v) => json!(v[..most]),
        Array::F32(v) => v[..most].iter().map(|&x| f32_json(x)).collect(),
        Array::F64(v) => v[..most].iter().map(|&x| f64_json(x)).collect(),
        Array::Bool(v) => json!(v[..most]),
        Array::String(v) => v.iter().take(most).collect(),
        Array::Array(v) => v[..most]
            .iter()
            .map(|inner| array_json(inner, inner.len()))
            .collect(),
    }
}

/// `u32`, `4096 x string`.
pub fn type_text(value: &Value) -> String {
    match value {
        Value::Array(array) => format!("{} x {}", array.len(), array.element_name()),
        scalar => scalar.type_name().to_string(),
    }
}

/// A value for people, on one line; long ones shortened unless `full`.
pub fn value_text(value: &Value, full: bool) -> String {
    match value {
        Value::Array(array) => array_text(array, full),
        scalar => element_text(&scalar_json(scalar), full),
    }
}

fn array_text(array: &Array, full: bool) -> String {
    let most = match full {
        true => array.len(),
        false => array.len().min(SHOWN_ELEMENTS),
    };
    let mut texts: Vec<String> = match array {
        Array::Array(v) => v[..most].iter().map(|a| array_text(a, full)).collect(),
        scalars => match array_json(scalars, most) {
            Json::Array(elements) => elements.iter().map(|e| element_text(e, full)).collect(),
            other => vec![element_text(&other, full)],
        },
    };
    if most < array.len() {
        texts.push("...".to_string());
    }
    format!("[{}]", texts.join(", "))
}

/// A scalar for people.
fn element_text(element: &Json, full: bool) -> String {
    match element {
        Json::String(text) if full || text.chars().count() <= SHOWN_CHARS => format!("{text:?}"),
        Json::String(text) => {
            let start: String = text.chars().take(SHOWN_CHARS).collect();
            format!("{start:?}... ({} bytes)", text.len())
        }
        other => other.to_string(),
    }
}
