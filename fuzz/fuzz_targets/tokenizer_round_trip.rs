//! Any text survives encoding and decoding, whole or streamed; a user's part
//! of it never becomes a control token, whatever a template puts around it.

#![no_main]

use gguf::{Array, Bytes, Gguf, Metadata, Value};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};
use text::{ControlText, Detokenizer, Segment, Special, Tokenizer};

static MODEL: &[u8] = include_bytes!("../../testdata/oracle/text-nano-q8_0.gguf");

static BYTE_LEVEL: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let file = Gguf::from_bytes(Bytes::from(MODEL)).expect("the oracle's model");
    Arc::new(Tokenizer::from_metadata(file.metadata()).expect("its tokenizer"))
});

static SENTENCEPIECE: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_metadata(&sentencepiece()).expect("a tokenizer")));

/// Control tokens, a user-defined one, some words and all bytes.
fn sentencepiece() -> Metadata {
    let words = [
        "\u{2581}",
        "a",
        "b",
        "ab",
        "ba",
        "\u{2581}a",
        "aba",
        "\u{2581}\u{2581}",
        "<|",
    ];
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>", "<tool>"].map(String::from).into();
    let mut types = vec![2, 3, 3, 4];
    texts.extend(words.map(String::from));
    types.extend([1; 9]);
    texts.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    types.extend([6; 256]);
    let scores = (0..texts.len()).map(|id| (id % 5) as f32).collect();
    let mut metadata = Metadata::default();
    let mut set = |key: &str, value| metadata.insert(format!("tokenizer.ggml.{key}"), value);
    set("model", Value::String("llama".to_owned()));
    set(
        "tokens",
        Value::Array(Array::String(texts.iter().collect())),
    );
    set("token_type", Value::Array(Array::I32(types)));
    set("scores", Value::Array(Array::F32(scores)));
    set("bos_token_id", Value::U32(1));
    set("eos_token_id", Value::U32(2));
    metadata
}

fn controls(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
    let mut controls = ids.to_vec();
    controls.retain(|&id| tokenizer.is_control(id));
    controls
}

/// Decoding, streaming and the rule about control tokens for one text.
fn check(
    tokenizer: &Arc<Tokenizer>,
    template: &str,
    user: &str,
    survives: impl Fn(&str) -> String,
) {
    for (text, special) in [(template, Special::Parse), (user, Special::Text)] {
        let ids = tokenizer.encode(text, special);
        let decoded = tokenizer.decode(&ids, ControlText::Keep);
        assert_eq!(decoded, survives(text));
        let mut stream = Detokenizer::new(Arc::clone(tokenizer));
        let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
        streamed.push_str(&stream.finish());
        assert_eq!(streamed, tokenizer.decode(&ids, ControlText::Skip));
    }
    assert!(controls(tokenizer, &tokenizer.encode(user, Special::Text)).is_empty());

    let segment = |text: &str, special| Segment {
        text: text.to_owned(),
        special,
    };
    let segments = [
        segment(template, Special::Parse),
        segment(user, Special::Text),
        segment(template, Special::Parse),
    ];
    let ids = tokenizer.encode_segments(&segments);
    let one = controls(tokenizer, &tokenizer.encode(template, Special::Parse));
    let expected = if user.is_empty() {
        // Then the two halves of the template touch.
        controls(
            tokenizer,
            &tokenizer.encode(&template.repeat(2), Special::Parse),
        )
    } else {
        one.repeat(2)
    };
    assert_eq!(controls(tokenizer, &ids), expected);
    let whole = format!("{template}{user}{template}");
    assert_eq!(tokenizer.decode(&ids, ControlText::Keep), survives(&whole));
}

// The template's text up to a byte 0xFF, then the user's.
fuzz_target!(|data: &[u8]| {
    let (template, user) = match data.iter().position(|&b| b == 0xFF) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (&[][..], data),
    };
    let template = String::from_utf8_lossy(template);
    let user = String::from_utf8_lossy(user);
    check(&BYTE_LEVEL, &template, &user, str::to_owned);
    // There a blank and U+2581 are one.
    check(&SENTENCEPIECE, &template, &user, |text| {
        text.replace('\u{2581}', " ")
    });
});
