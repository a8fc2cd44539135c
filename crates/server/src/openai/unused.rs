//! Fields inside of messages and tools that nobody knows: which of them leave no
//! trace in the prompt.
//!
//! A chat template may read any field of a message or a tool, so a field that we
//! do not know is not yet one without effect. What one would get wrong: that a
//! template mentions a name says little, since one may print whole objects. So
//! the conversation is rendered without the field, and the prompts are compared.

use serde_json::{Map, Value};
use std::collections::BTreeSet;
use text::{ChatTemplate, Content, Conversation, Segment, Tool};

/// Most fields that are tried one by one.
const MOST_TRIED: usize = 16;

/// The unknown fields of `conversation` without which the template makes the
/// same `prompt`, as `messages[].name`. What is `null` or empty asks for nothing
/// and is not named.
pub fn unused(
    template: &ChatTemplate,
    conversation: &Conversation,
    prompt: &[Segment],
) -> BTreeSet<String> {
    let names = unknown(conversation);
    let is_same = |without: &Conversation| template.render(without).is_ok_and(|s| s == prompt);
    if names.is_empty() || is_same(&without(conversation, &names)) {
        return names;
    }
    let mut unused = BTreeSet::new();
    for name in names.into_iter().take(MOST_TRIED) {
        let more = unused.iter().cloned().chain([name.clone()]).collect();
        if is_same(&without(conversation, &more)) {
            unused.insert(name);
        }
    }
    unused
}

fn unknown(conversation: &Conversation) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut conversation = conversation.clone();
    retain(&mut conversation, |name, value| {
        let is_empty = match value {
            Value::Null => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        if !is_empty {
            names.insert(name);
        }
        true
    });
    names
}

fn without(conversation: &Conversation, names: &BTreeSet<String>) -> Conversation {
    let mut conversation = conversation.clone();
    retain(&mut conversation, |name, _| !names.contains(&name));
    conversation
}

/// Keeps the unknown fields that `is_kept` says, by name and value.
fn retain(conversation: &mut Conversation, mut is_kept: impl FnMut(String, &Value) -> bool) {
    let mut keep = |place: &str, fields: &mut Map<String, Value>, known: &[&str]| {
        fields.retain(|name, value| {
            known.contains(&name.as_str()) || is_kept(format!("{place}.{name}"), value)
        });
    };
    for message in &mut conversation.messages {
        keep("messages[]", &mut message.extra, &[]);
        if let Some(Content::Parts(parts)) = &mut message.content {
            for part in parts {
                keep("messages[].content[]", &mut part.extra, &[]);
            }
        }
        for call in &mut message.tool_calls {
            keep("messages[].tool_calls[]", &mut call.extra, &[]);
            let function = &mut call.function.extra;
            keep("messages[].tool_calls[].function", function, &[]);
        }
    }
    for tool in &mut conversation.tools {
        let mut object = tool.object().clone();
        keep("tools[]", &mut object, &["type", "function"]);
        if let Some(Value::Object(function)) = object.get_mut("function") {
            let known = ["name", "description", "parameters", "strict"];
            keep("tools[].function", function, &known);
        }
        *tool = Tool::new(object).expect("its name is still there");
    }
}
