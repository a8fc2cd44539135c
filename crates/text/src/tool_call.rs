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
//! tool's schema (`schema.rs`), not on its looks.

use crate::chat::Tool;
use crate::schema;
use serde_json::{Map, Value};

pub(crate) const BLOCK: &str = "<atem:function_calls>";
pub(crate) const BLOCK_END: &str = "</atem:function_calls>";
pub(crate) const INVOKE: &str = "<atem:invoke name=\"";
pub(crate) const INVOKE_END: &str = "</atem:invoke>";
pub(crate) const PARAMETER: &str = "<atem:parameter name=\"";
pub(crate) const PARAMETER_END: &str = "</atem:parameter>";
/// Ends the opening tag of an invoke or a parameter.
pub(crate) const NAME_END: &str = "\">";

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
    is_name(name).then_some((name, rest))
}

/// Can this stand in a tag as a name?
pub(crate) fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['"', '<', '\n'])
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
fn typed(value: &str, key: &str, parameters: Option<&Value>) -> Value {
    let allows_text = parameters.and_then(|schema| schema::argument_allows_string(schema, key));
    match allows_text {
        Some(true) => None,
        _ => exact_json(value),
    }
    .unwrap_or_else(|| Value::String(value.to_owned()))
}

/// A JSON text as a value, unless a number in it would lose digits: a number
/// is kept as 64 bits, and an id of 20 digits would become another one.
fn exact_json(text: &str) -> Option<Value> {
    let value = serde_json::from_str(text).ok()?;
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        rest = &rest[at..];
        let length = match rest.strip_prefix('"') {
            Some(string) => 1 + string_length(string),
            None => {
                let end = |c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E');
                let length = rest.find(end).unwrap_or(rest.len());
                if !keeps_its_digits(&rest[..length]) {
                    return None;
                }
                length
            }
        };
        rest = &rest[length..];
    }
    Some(value)
}

/// Bytes of a JSON string behind its opening quote, the closing one included.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |at| at + 1)
}

/// Does a JSON number say the same as the 64 bits that it is read into?
fn keeps_its_digits(number: &str) -> bool {
    if number.parse::<i64>().is_ok() || number.parse::<u64>().is_ok() {
        return true;
    }
    let read = number.parse::<f64>().map(|value| format!("{value:e}"));
    read.is_ok_and(|read| decimal(&read) == decimal(number))
}

/// Digits without zeros at either end, and the exponent of the last one;
/// signs are left out, they are never lost.
fn decimal(number: &str) -> (String, i64) {
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{}{fraction}", whole.trim_start_matches('-'));
    let digits = digits.trim_start_matches('0');
    let significant = digits.trim_end_matches('0');
    if significant.is_empty() {
        return (String::new(), 0);
    }
    let n_zeros = (digits.len() - significant.len()) as i64;
    // An exponent that does not fit made the number 0 or infinite.
    let exponent = exponent.parse::<i64>().unwrap_or(i64::MAX / 2);
    let last = exponent - fraction.len() as i64 + n_zeros;
    (significant.to_owned(), last)
}
