//! Builds GGUF files byte by byte, right and wrong ones, independently of the
//! writer, and reads everything of a file that could be opened.

// Each test file uses its own part of this.
#![allow(dead_code)]

use gguf::{Array, Bytes, Gguf, Value};
use std::path::PathBuf;

/// Where the oracle's files lie.
pub fn oracle(name: &str) -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/oracle"
    ))
    .join(name)
}

/// The oracle's GGUF files.
pub const ORACLE_FILES: [&str; 7] = [
    "text-nano-q8_0.gguf",
    "text-nano-f16.gguf",
    "text-nano-f32.gguf",
    "text-kq-q4km.gguf",
    "text-kq-iq3mix.gguf",
    "text-kq-zoo.gguf",
    "dflash-nano-f32.gguf",
];

/// A length (u64) and the text.
pub fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// A key with a value of the given type number.
pub fn key(name: impl AsRef<[u8]>, value_type: u32, value: &[u8]) -> Vec<u8> {
    [&text(name)[..], &value_type.to_le_bytes(), value].concat()
}

/// An array value: element type, count, elements.
pub fn array(element_type: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [
        &element_type.to_le_bytes()[..],
        &count.to_le_bytes(),
        elements,
    ]
    .concat()
}

/// An entry of the tensor directory.
pub fn entry(name: impl AsRef<[u8]>, shape: &[u64], ty: u32, offset: u64) -> Vec<u8> {
    let mut out = text(name);
    out.extend((shape.len() as u32).to_le_bytes());
    shape.iter().for_each(|n| out.extend(n.to_le_bytes()));
    out.extend(ty.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// Magic, version and counts.
pub fn counts(version: u32, n_tensors: u64, n_keys: u64) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(n_tensors.to_le_bytes());
    out.extend(n_keys.to_le_bytes());
    out
}

/// A file of version 3 with `data_bytes` of tensor data after padding to 32.
pub fn file(keys: &[Vec<u8>], entries: &[Vec<u8>], data_bytes: usize) -> Vec<u8> {
    let mut out = counts(3, entries.len() as u64, keys.len() as u64);
    keys.iter().chain(entries).for_each(|part| out.extend(part));
    out.resize(out.len().next_multiple_of(32) + data_bytes, 7);
    out
}

/// A file with a key of every type, arrays of every type, and three tensors.
pub fn every_type() -> Vec<u8> {
    let sizes = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];
    let mut keys = Vec::new();
    for (ty, &size) in (0u32..).zip(&sizes) {
        let element = match ty {
            8 => text("text"),
            9 => array(8, 2, &[text("a"), text("")].concat()),
            _ => vec![1; size],
        };
        let three = array(ty, 3, &element.repeat(3));
        keys.push(key(format!("key.{ty}"), ty, &element));
        keys.push(key(format!("key.array.{ty}"), 9, &three));
    }
    let entries = [
        entry("f32", &[3, 2], 0, 0),
        entry("q8_0", &[64], 8, 32),
        entry("f16", &[2, 1, 2, 1], 1, 128),
    ];
    file(&keys, &entries, 136)
}

/// The error of `bytes` as text.
pub fn error_of(bytes: Vec<u8>) -> String {
    match Gguf::from_bytes(Bytes::from(bytes)) {
        Ok(_) => "no error".to_string(),
        Err(error) => error.to_string(),
    }
}

/// Reads every byte that a file gives access to; gives how many.
pub fn walk(gguf: &Gguf) -> u64 {
    let mut seen = u64::from(gguf.version()) + gguf.alignment();
    for (key, value) in gguf.metadata().iter() {
        seen += key.len() as u64 + walk_value(value);
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor(&tensor.name).unwrap().data.len(), {
            let sum: u64 = tensor.data.iter().map(|&b| u64::from(b)).sum();
            seen += sum & 1;
            tensor.data.len()
        });
    }
    seen
}

fn walk_value(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.chars().count() as u64,
        Value::Array(array) => walk_array(array),
        _ => 1,
    }
}

fn walk_array(array: &Array) -> u64 {
    match array {
        Array::String(strings) => strings.iter().map(|s| s.chars().count() as u64).sum(),
        Array::Array(arrays) => arrays.iter().map(walk_array).sum(),
        other => other.len() as u64,
    }
}
