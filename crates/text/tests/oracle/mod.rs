//! The oracle's files: its tokenizer, its chat template, its cases.
#![allow(
    dead_code,
    reason = "every test file compiles this module and uses another part of it"
)]

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use text::{ChatTemplate, ControlTokens, Special, Tokenizer};

/// Path of a file of the oracle.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/oracle")
        .join(name)
}

/// A text file of the oracle.
pub fn text(name: &str) -> String {
    let path = path(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let file = gguf::Gguf::open(&path("text-nano-f32.gguf")).expect("the oracle's model");
    Arc::new(Tokenizer::from_metadata(file.metadata()).expect("its tokenizer"))
});

/// The tokenizer of the oracle's models: 400 tokens of text, all bytes among
/// them, and 112 control tokens with the real names.
pub fn tokenizer() -> Arc<Tokenizer> {
    Arc::clone(&TOKENIZER)
}

/// The oracle's chat template with the tokenizer's control tokens.
pub fn template() -> ChatTemplate {
    template_of(&text("chat-template.jinja"))
}

/// Any chat template with the tokenizer's control tokens.
pub fn template_of(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, ControlTokens::of(&tokenizer()))
        .unwrap_or_else(|error| panic!("{source}: {error}"))
}

/// Ids of a text whose markers are control tokens.
pub fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text, Special::Parse)
}

/// The same text with one token for every byte between the control tokens.
pub fn byte_ids(text: &str) -> Vec<u32> {
    let tokenizer = tokenizer();
    let token_of = |byte: u8| {
        (0..tokenizer.n_vocab() as u32)
            .find(|&id| tokenizer.token_bytes(id) == Some(&[byte]))
            .unwrap_or_else(|| panic!("no token for byte {byte}"))
    };
    ids(text)
        .into_iter()
        .flat_map(|id| match tokenizer.is_control(id) {
            true => vec![id],
            false => tokenizer
                .token_bytes(id)
                .into_iter()
                .flatten()
                .map(|&byte| token_of(byte))
                .collect(),
        })
        .collect()
}
