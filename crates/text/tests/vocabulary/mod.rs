//! Small vocabularies made for tests, and the files with real ones.
#![allow(
    dead_code,
    reason = "every test file compiles this module and uses another part of it"
)]

use gguf::{Array, Gguf, Metadata, Value};
use std::path::PathBuf;
use std::sync::Arc;
use text::Tokenizer;

pub const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
pub const CONTROL: i32 = 3;
pub const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// A file or folder of the repository.
pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// The tokenizer of a GGUF file of the repository.
pub fn tokenizer_of(path: &str) -> Arc<Tokenizer> {
    let path = repository(path);
    let file = Gguf::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Arc::new(Tokenizer::from_metadata(file.metadata()).expect("a tokenizer"))
}

/// The tokenizer of 512 tokens that the golden cases were made with.
pub fn oracle() -> Arc<Tokenizer> {
    tokenizer_of("testdata/oracle/text-nano-f32.gguf")
}

pub fn strings<S: AsRef<str>>(strings: impl IntoIterator<Item = S>) -> Value {
    Value::Array(Array::String(strings.into_iter().collect()))
}

/// The GPT-2 byte alphabet: bytes that print are themselves, the others follow
/// from U+0100 on in order.
pub fn alphabet() -> Vec<String> {
    let prints =
        |b: u32| (33..127).contains(&b) || (161..173).contains(&b) || (174..256).contains(&b);
    let mut moved = 256..;
    (0..256)
        .map(|b| {
            if prints(b) {
                b
            } else {
                moved.next().expect("endless")
            }
        })
        .map(|code| char::from_u32(code).expect("a character").to_string())
        .collect()
}

/// Metadata of a byte-level vocabulary: ids 0 to 255 are the bytes, then come
/// what `merges` make, then `tokens` with their types.
pub fn byte_level(pre: &str, merges: &[&str], tokens: &[(&str, i32)]) -> Metadata {
    let mut texts = alphabet();
    texts.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut types = vec![NORMAL; texts.len()];
    for &(text, kind) in tokens {
        texts.push(text.to_string());
        types.push(kind);
    }
    let mut metadata = Metadata::default();
    metadata.insert("tokenizer.ggml.model", Value::String("gpt2".into()));
    metadata.insert("tokenizer.ggml.pre", Value::String(pre.into()));
    metadata.insert("tokenizer.ggml.tokens", strings(texts));
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    metadata.insert("tokenizer.ggml.merges", strings(merges));
    metadata
}

/// Metadata of a SentencePiece vocabulary: `<unk>` `<s>` `</s>` are 0 to 2 (the
/// last two BOS and EOS), then come `tokens` with score and type, then, if
/// asked for, the 256 byte tokens.
pub fn sentencepiece(tokens: &[(&str, f32, i32)], has_bytes: bool) -> Metadata {
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    let mut types = vec![UNKNOWN, CONTROL, CONTROL];
    let mut scores = vec![0.0; 3];
    for &(text, score, kind) in tokens {
        texts.push(text.to_string());
        scores.push(score);
        types.push(kind);
    }
    if has_bytes {
        texts.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
        types.extend([BYTE; 256]);
        scores.extend([0.0; 256]);
    }
    let mut metadata = Metadata::default();
    metadata.insert("tokenizer.ggml.model", Value::String("llama".into()));
    metadata.insert("tokenizer.ggml.tokens", strings(texts));
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    metadata.insert("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
    metadata.insert("tokenizer.ggml.bos_token_id", Value::U32(1));
    metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(2));
    metadata
}

/// A small SentencePiece vocabulary with byte tokens: "▁hello" and "▁world"
/// and what leads to them.
pub fn hello_world() -> Metadata {
    let pieces = [
        "\u{2581}",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "llo",
        "hello",
        "\u{2581}hello",
        "or",
        "wor",
        "ld",
        "world",
        "\u{2581}world",
    ];
    let tokens: Vec<(&str, f32, i32)> = (0u8..)
        .zip(pieces)
        .map(|(i, piece)| (piece, -f32::from(i), NORMAL))
        .collect();
    sentencepiece(&tokens, true)
}
