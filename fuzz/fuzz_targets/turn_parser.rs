//! Any list of tokens is a turn: no panic, no marker in what comes out, the
//! guide stops where the reader does, and stop strings never come out.

#![no_main]

use gguf::{Bytes, Gguf};
use libfuzzer_sys::fuzz_target;
use model::{Guide, Verdict};
use std::sync::{Arc, LazyLock};
use text::{Reader, Special, Tokenizer, Tool, TurnEvent, TurnFormat, TurnGuide};

static MODEL: &[u8] = include_bytes!("../../testdata/oracle/text-nano-q8_0.gguf");

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let file = Gguf::from_bytes(Bytes::from(MODEL)).expect("the oracle's model");
    Arc::new(Tokenizer::from_metadata(file.metadata()).expect("its tokenizer"))
});

static TOOLS: LazyLock<Arc<[Tool]>> = LazyLock::new(|| {
    let tools: Vec<Tool> = serde_json::from_str(
        r##"[{"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"s": {"type": "string"}, "n": {"$ref": "#/$defs/n"}},
            "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}]}}}}}]"##,
    )
    .expect("tools");
    tools.into()
});

// The first byte picks the format and the stop strings. The rest is text whose
// markers are control tokens, up to a byte 0xFF; behind it every two bytes are
// an id.
fuzz_target!(|data: &[u8]| {
    let Some((&choice, data)) = data.split_first() else {
        return;
    };
    let tokenizer = &*TOKENIZER;
    let (text, numbers) = match data.iter().position(|&b| b == 0xFF) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &[][..]),
    };
    let mut ids = tokenizer.encode(&String::from_utf8_lossy(text), Special::Parse);
    ids.extend(
        numbers
            .chunks_exact(2)
            .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]]) % 600)),
    );
    let format = match choice & 1 {
        0 => TurnFormat::of_chat(tokenizer),
        _ => TurnFormat::of_completion(tokenizer),
    };
    let stop: Vec<String> = match choice & 2 {
        0 => Vec::new(),
        _ => vec!["END".to_owned(), "\n\n".to_owned()],
    };
    let tokens = Arc::clone(tokenizer);
    let mut reader =
        Reader::new(tokens, format, Arc::clone(&TOOLS), &stop).expect("no empty stop string");
    let mut guide = TurnGuide::new(reader.clone());
    let mut answer = String::new();
    let mut n_calls = 0;
    let mut take = |events: Vec<TurnEvent>| {
        for event in events {
            match event {
                TurnEvent::Content(text) => {
                    assert!(!text.is_empty());
                    answer.push_str(&text);
                }
                TurnEvent::ToolCall { index, .. } => {
                    assert_eq!(index, n_calls);
                    n_calls += 1;
                }
                _ => {}
            }
        }
    };
    for &id in &ids {
        let is_over = guide.fork().accept(id) == Verdict::Stop;
        assert_eq!(guide.accept(id) == Verdict::Stop, is_over);
        take(reader.push(id));
        assert_eq!(reader.end().is_some(), is_over);
    }
    take(reader.finish().0);
    assert_eq!(reader.n_calls(), n_calls);
    assert!(reader.finish_reason().is_some());
    // Reasoning or a call between two parts of the answer breaks a stop string,
    // so only turns of one message are looked at.
    let is_plain = choice & 1 == 1;
    assert!(!is_plain || stop.iter().all(|stop| !answer.contains(stop.as_str())));
});
