//! The body of a message to a tool is calls or comes back as text, letter by letter;
//! a text argument is what stands there.

#![no_main]

use gguf::{Bytes, Gguf};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use text::{Special, Tokenizer, Tool, TurnEvent, TurnFormat, TurnParser};

static MODEL: &[u8] = include_bytes!("../../testdata/oracle/text-nano-q8_0.gguf");

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let file = Gguf::from_bytes(Bytes::from(MODEL)).expect("the oracle's model");
    Arc::new(Tokenizer::from_metadata(file.metadata()).expect("its tokenizer"))
});

// The schema of the tool's parameters up to a byte 0xFF, then the body.
fuzz_target!(|data: &[u8]| {
    let (schema, body) = match data.iter().position(|&b| b == 0xFF) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (&[][..], data),
    };
    let schema: Value = serde_json::from_slice(schema).unwrap_or_default();
    let body = String::from_utf8_lossy(body);
    let tool = json!({"name": "f", "parameters": schema});
    let tools: Arc<[Tool]> = [serde_json::from_value(tool).expect("a tool")].into();
    let tokenizer = &*TOKENIZER;
    let head = tokenizer.encode(" to=f<|message|>", Special::Parse);
    let end = tokenizer.encode("<|eot|>", Special::Parse);
    let body_ids = tokenizer.encode(&body, Special::Text);
    for is_ended in [true, false] {
        let format = TurnFormat::of_chat(tokenizer);
        let mut parser = TurnParser::new(Arc::clone(tokenizer), format, Arc::clone(&tools));
        let ids = head.iter().chain(&body_ids);
        let mut events: Vec<TurnEvent> = ids.flat_map(|&id| parser.push(id)).collect();
        if is_ended {
            events.extend(end.iter().flat_map(|&id| parser.push(id)));
        }
        events.extend(parser.finish());
        let (mut text, mut n_calls) = (String::new(), 0);
        for event in events {
            match event {
                TurnEvent::Content(piece) | TurnEvent::CutToolCall(piece) => text.push_str(&piece),
                TurnEvent::ToolCall {
                    index,
                    name,
                    arguments,
                } => {
                    assert_eq!(index, n_calls);
                    n_calls += 1;
                    assert!(body.contains(&name));
                    for (key, value) in arguments {
                        assert!(body.contains(&key));
                        // A JSON string may have escapes; all other text stands there.
                        let is_there = |text: &str| body.contains(text) || body.contains('\\');
                        assert!(value.as_str().is_none_or(is_there));
                    }
                }
                TurnEvent::ToolCallStart { .. } => {}
                TurnEvent::Reasoning(text) => panic!("reasoning to a tool: {text}"),
            }
        }
        assert_eq!(parser.n_calls(), n_calls);
        // Blanks alone are no call, and no text that anybody misses.
        let is_text = text == body || (n_calls > 0 && text.is_empty());
        assert!(is_text, "{n_calls} calls, {text:?} of {body:?}");
    }
});
