//! The body of a message to a tool: ATEM markup in, calls out.
//!
//! ```text
//! body      = block { block }                                   blanks between all parts
//! block     = "<atem:function_calls>" invoke { invoke } "</atem:function_calls>"
//! invoke    = '<atem:invoke name="' NAME '">' { parameter } "</atem:invoke>"
//! parameter = '<atem:parameter name="' KEY '">' VALUE "</atem:parameter>"
//! ```
//!
//! A KEY comes once in an invoke. What a reader would get wrong: a VALUE is neither trimmed nor unescaped and
//! runs to the next closing tag. Whether it is text or JSON depends on the
//! tool's schema, not on its looks.

use crate::chat::Tool;
use serde_json::{Map, Value};

const BLOCK: &str = "<atem:function_calls>";
const BLOCK_END: &str = "</atem:function_calls>";
const INVOKE: &str = "<atem:invoke name=\"";
const INVOKE_END: &str = "</atem:invoke>";
const PARAMETER: &str = "<atem:parameter name=\"";
const PARAMETER_END: &str = "</atem:parameter>";
/// Ends the opening tag of an invoke or a parameter.
const NAME_END: &str = "\">";

/// Most schemas inside schemas that are looked into.
const MOST_LEVELS: usize = 16;

/// One call that a message makes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Invocation {
    pub(crate) name: String,
    pub(crate) arguments: Map<String, Value>,
}

/// All calls of a body; `None` if the body is anything else.
pub(crate) fn parse_body(body: &str, tools: &[Tool]) -> Option<Vec<Invocation>> {
    let mut calls = Vec::new();
    let mut rest = body.trim_start();
    while !rest.is_empty() {
        rest = rest.strip_prefix(BLOCK)?.trim_start();
        let n_before = calls.len();
        while let Some(invoke) = rest.strip_prefix(INVOKE) {
            let (call, after) = parse_invoke(invoke, tools)?;
            calls.push(call);
            rest = after.trim_start();
        }
        if calls.len() == n_before {
            return None;
        }
        rest = rest.strip_prefix(BLOCK_END)?.trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// `text` begins behind `<atem:invoke name="`.
fn parse_invoke<'t>(text: &'t str, tools: &[Tool]) -> Option<(Invocation, &'t str)> {
    let (name, rest) = name_of(text)?;
    let schema = tools
        .iter()
        .find(|tool| tool.name() == name)
        .and_then(Tool::parameters);
    let mut arguments = Map::new();
    let mut rest = rest.trim_start();
    while let Some(parameter) = rest.strip_prefix(PARAMETER) {
        let (key, after) = name_of(parameter)?;
        let (value, after) = after.split_once(PARAMETER_END)?;
        let repeated = arguments.insert(key.to_owned(), typed(value, key, schema));
        if repeated.is_some() {
            return None;
        }
        rest = after.trim_start();
    }
    let call = Invocation {
        name: name.to_owned(),
        arguments,
    };
    Some((call, rest.strip_prefix(INVOKE_END)?))
}

/// A name up to its `">`.
fn name_of(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.split_once(NAME_END)?;
    (!name.is_empty() && !name.contains(['"', '<', '\n'])).then_some((name, rest))
}

/// Name of the first call, as soon as the unfinished `body` says it.
pub(crate) fn first_name(body: &str) -> Option<&str> {
    let block = body.trim_start().strip_prefix(BLOCK)?;
    let invoke = block.trim_start().strip_prefix(INVOKE)?;
    Some(name_of(invoke)?.0)
}

/// Can the unfinished `body` still become calls, as far as the first tags say?
pub(crate) fn may_be_body(body: &str) -> bool {
    let body = body.trim_start();
    match body.strip_prefix(BLOCK) {
        Some(block) => {
            let block = block.trim_start();
            block.starts_with(INVOKE) || INVOKE.starts_with(block)
        }
        None => BLOCK.starts_with(body),
    }
}

/// Text if the schema allows a string, else JSON, else text after all.
fn typed(value: &str, key: &str, schema: Option<&Value>) -> Value {
    let text = || Value::String(value.to_owned());
    let property = schema.and_then(|schema| schema.get("properties")?.get(key));
    match (property, schema) {
        (Some(property), Some(schema)) if allows_string(property, schema, 0) => text(),
        _ => serde_json::from_str(value).unwrap_or_else(|_| text()),
    }
}

/// Does a schema name strings among its values? One that says nothing about
/// the type does not.
fn allows_string(schema: &Value, root: &Value, level: usize) -> bool {
    if level > MOST_LEVELS {
        return false;
    }
    let any = |key: &str, test: &dyn Fn(&Value) -> bool| {
        schema
            .get(key)
            .and_then(Value::as_array)
            .is_some_and(|items| items.iter().any(test))
    };
    let by_type = match schema.get("type") {
        Some(Value::String(name)) => name == "string",
        Some(Value::Array(_)) => any("type", &|name| name == "string"),
        _ => false,
    };
    let by_reference = schema
        .get("$ref")
        .and_then(Value::as_str)
        .and_then(|reference| root.pointer(reference.strip_prefix('#')?))
        .is_some_and(|target| allows_string(target, root, level + 1));
    by_type
        || by_reference
        || schema.get("const").is_some_and(Value::is_string)
        || any("enum", &Value::is_string)
        || ["anyOf", "oneOf", "allOf"]
            .iter()
            .any(|key| any(key, &|inner| allows_string(inner, root, level + 1)))
}
