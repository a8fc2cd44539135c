//! Reads turns of the oracle's tokenizer.
#![allow(
    dead_code,
    reason = "every test file compiles this module and uses another part of it"
)]

use crate::oracle::tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;
use text::{Reader, Tool, TurnEnd, TurnEvent, TurnFormat};

/// The tools of the tests, with schemas of every form.
pub fn tools() -> Arc<[Tool]> {
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let tools = json!([
        tool(
            "get_weather",
            json!({"type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"},
            }})
        ),
        tool(
            "ns.f",
            json!({
                "properties": {
                    "union": {"type": ["integer", "string"]},
                    "choice": {"enum": [1, "one"]},
                    "any": {"anyOf": [{"type": "null"}, {"type": "string"}]},
                    "ref": {"$ref": "#/$defs/name"},
                    "loop": {"$ref": "#/$defs/loop"},
                    "one": {"const": "1"},
                    "list": {"type": "array", "items": {"type": "string"}},
                    "free": {"description": "no type"},
                },
                "$defs": {"name": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
            })
        ),
        tool("f", json!({"properties": {"k": {"type": "string"}}})),
    ]);
    let tools: Vec<Tool> = serde_json::from_value(tools).expect("tools");
    tools.into()
}

/// A reader with these stop strings.
pub fn reader(format: TurnFormat, stop: &[&str]) -> Reader {
    let stop: Vec<String> = stop.iter().map(|&s| s.to_owned()).collect();
    Reader::new(tokenizer(), format, tools(), &stop).expect("a reader")
}

/// The format of the oracle's chats.
pub fn chat() -> TurnFormat {
    TurnFormat::of_chat(&tokenizer())
}

/// All events of a turn, texts of one channel joined, and why it ended.
pub fn read(format: TurnFormat, ids: &[u32], stop: &[&str]) -> (Vec<TurnEvent>, TurnEnd) {
    let mut reader = reader(format, stop);
    let mut events = Vec::new();
    for &id in ids {
        join(&mut events, reader.push(id));
    }
    let (rest, end) = reader.finish();
    join(&mut events, rest);
    let n_calls = events
        .iter()
        .filter(|e| matches!(e, TurnEvent::ToolCall { .. }))
        .count();
    assert_eq!(reader.n_calls(), n_calls);
    (events, end)
}

/// Adds events, texts of one channel joined.
pub fn join(events: &mut Vec<TurnEvent>, more: Vec<TurnEvent>) {
    use TurnEvent::{Content, Reasoning};
    for event in more {
        if let Content(text) | Reasoning(text) = &event {
            assert!(!text.is_empty(), "an empty text");
        }
        match (events.last_mut(), event) {
            (Some(Content(last)), Content(text)) | (Some(Reasoning(last)), Reasoning(text)) => {
                last.push_str(&text);
            }
            (_, event) => events.push(event),
        }
    }
}

/// Text of the answer.
pub fn content(text: &str) -> TurnEvent {
    TurnEvent::Content(text.to_owned())
}

/// Text of the reasoning.
pub fn reasoning(text: &str) -> TurnEvent {
    TurnEvent::Reasoning(text.to_owned())
}
