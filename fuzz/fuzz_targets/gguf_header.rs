//! Any bytes are an error or a file of which everything can be read.

#![no_main]

use gguf::{Array, Bytes, Gguf, Value};
use libfuzzer_sys::fuzz_target;
use std::hint::black_box;

fuzz_target!(|data: &[u8]| {
    let gguf = match Gguf::from_bytes(Bytes::from(data.to_vec())) {
        Ok(gguf) => gguf,
        Err(error) => {
            // A message never grows with the input.
            assert!(error.to_string().len() < 4096);
            return;
        }
    };
    for (key, value) in gguf.metadata().iter() {
        black_box(key.chars().count());
        match value {
            Value::String(text) => drop(black_box(text.chars().count())),
            Value::Array(array) => walk(array),
            other => drop(black_box(other.type_name())),
        }
        // A typed getter gives an error or a value, whatever the type is.
        let _ = gguf.metadata().u32(key).is_ok();
        let _ = gguf.metadata().integers(key).is_ok();
    }
    let mut data_bytes = 0;
    for tensor in gguf.tensors() {
        let info = tensor.info();
        assert_eq!(info.data_bytes().ok(), Some(tensor.data.len() as u64));
        assert_eq!(
            gguf.tensor(&tensor.name).map(|t| &t.shape),
            Some(&tensor.shape)
        );
        black_box(tensor.data.iter().fold(0u8, |sum, b| sum ^ b));
        data_bytes += tensor.data.len() as u64;
    }
    // No two tensors share a byte, so together they fit.
    assert_eq!(data_bytes, gguf.data_bytes());
    let header_bytes: usize = gguf.headers().iter().map(|h| h.len()).sum();
    assert!(data_bytes + header_bytes as u64 <= gguf.file_bytes());
});

fn walk(array: &Array) {
    match array {
        Array::String(strings) => {
            black_box(strings.iter().map(|s| s.chars().count()).sum::<usize>());
        }
        Array::Array(arrays) => arrays.iter().for_each(walk),
        other => drop(black_box(other.len())),
    }
}
