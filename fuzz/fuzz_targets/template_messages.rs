//! Any conversation is an error or a prompt in which no message became a
//! control token.

#![no_main]

use gguf::{Bytes, Gguf};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use text::{ChatTemplate, ControlTokens, Conversation, Segment, Special, Tokenizer};

static MODEL: &[u8] = include_bytes!("../../testdata/oracle/text-nano-q8_0.gguf");
static SOURCE: &str = include_str!("../../testdata/oracle/chat-template.jinja");

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let file = Gguf::from_bytes(Bytes::from(MODEL)).expect("the oracle's model");
    Tokenizer::from_metadata(file.metadata()).expect("its tokenizer")
});
static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
    ChatTemplate::new(SOURCE, ControlTokens::of(&TOKENIZER)).expect("the oracle's template")
});
/// The same without any knowledge of control tokens.
static PLAIN: LazyLock<ChatTemplate> = LazyLock::new(|| {
    ChatTemplate::new(SOURCE, ControlTokens::default()).expect("the oracle's template")
});

fn joined(segments: &[Segment]) -> String {
    segments.iter().map(|s| s.text.as_str()).collect()
}

/// The start, message and end tokens of a prompt are those of its messages.
fn n_control(segments: &[Segment]) -> usize {
    let ids = TOKENIZER.encode_segments(segments);
    ids.iter().filter(|&&id| TOKENIZER.is_control(id)).count()
}

fuzz_target!(|data: &[u8]| {
    let Ok(mut conversation) = serde_json::from_slice::<Conversation>(data) else {
        return;
    };
    let segments = match TEMPLATE.render(&conversation) {
        Ok(segments) => segments,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let plain = PLAIN.render(&conversation).expect("the same template");
    assert_eq!(joined(&segments), joined(&plain));
    let n_parsed = segments
        .iter()
        .filter(|s| s.special == Special::Parse)
        .count();
    assert_eq!(n_control(&segments), n_parsed);

    // The markers of the frame do not depend on what a message says.
    for message in &mut conversation.messages {
        message.name = message.name.take().map(|name| match name.is_empty() {
            true => name,
            false => "x".to_owned(),
        });
        if let Some(text::Content::Text(text)) = &mut message.content {
            "x".clone_into(text);
        }
    }
    let harmless = TEMPLATE.render(&conversation).expect("the same frame");
    assert_eq!(n_control(&harmless), n_parsed);
});
