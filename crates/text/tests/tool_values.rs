//! Arguments of tool calls: what the schema calls a string stays a text, all
//! else is JSON without losing a digit.

mod oracle;

use oracle::{ids, tokenizer};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::{Tool, TurnEvent, TurnFormat, TurnParser};

/// What the argument `k` with the text `value` becomes under a schema.
fn argument(parameters: &Value, value: &str) -> Value {
    let tool = json!({"name": "f", "parameters": parameters});
    let tools: Arc<[Tool]> = vec![serde_json::from_value(tool).expect("a tool")].into();
    let mut parser = TurnParser::new(tokenizer(), TurnFormat::of_chat(&tokenizer()), tools);
    let turn = format!(
        " to=f<|message|><atem:function_calls><atem:invoke name=\"f\">\
         <atem:parameter name=\"k\">{value}</atem:parameter></atem:invoke></atem:function_calls><|eot|>"
    );
    let events: Vec<TurnEvent> = ids(&turn)
        .into_iter()
        .flat_map(|id| parser.push(id))
        .collect();
    match events.last() {
        Some(TurnEvent::ToolCall { arguments, .. }) => arguments["k"].clone(),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn check(parameters: &Value, allows_string: bool) {
    let expected = match allows_string {
        true => json!("1"),
        false => json!(1),
    };
    assert_eq!(argument(parameters, "1"), expected, "{parameters}");
}

/// Schemas, and whether they allow a string.
fn schemas() -> Vec<(Value, bool)> {
    vec![
        (json!({"type": "string"}), true),
        (json!({"type": "integer"}), false),
        (json!({"type": ["null", "string"]}), true),
        (json!({"type": ["null", "integer"]}), false),
        (json!({"enum": [1, "1"]}), true),
        (json!({"enum": [1, 2]}), false),
        (json!({"const": "1"}), true),
        (json!({"const": 1}), false),
        // What is not mentioned is allowed.
        (json!(true), true),
        (json!(false), false),
        (json!({}), true),
        (json!({"description": "no type"}), true),
        (json!("no schema"), false),
        // All conditions hold at once.
        (json!({"type": "string", "enum": [1]}), false),
        (json!({"type": "integer", "description": "string"}), false),
        (
            json!({"allOf": [{"type": "string"}, {"minLength": 1}]}),
            true,
        ),
        (
            json!({"allOf": [{"type": "string"}, {"type": "integer"}]}),
            false,
        ),
        (json!({"allOf": []}), true),
        (
            json!({"anyOf": [{"type": "null"}, {"type": "string"}]}),
            true,
        ),
        (
            json!({"anyOf": [{"type": "null"}, {"type": "integer"}]}),
            false,
        ),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "string"}]}),
            true,
        ),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "null"}]}),
            false,
        ),
        (
            json!({"anyOf": [{"type": "string"}], "type": "integer"}),
            false,
        ),
        (json!({"not": {"type": "string"}}), false),
        (json!({"not": {"type": "integer"}}), true),
        (json!({"not": {"type": "string", "minLength": 3}}), true),
        (json!({"not": {"not": {"type": "string"}}}), true),
        (json!({"not": {}}), false),
        (
            json!({"not": {"anyOf": [{"type": "null"}, {"type": "string"}]}}),
            false,
        ),
        (
            json!({"not": {"allOf": [{"type": "string"}, {"enum": ["a"]}]}}),
            true,
        ),
        (json!({"not": {"$ref": "#/$defs/text"}}), false),
        (json!({"$ref": "#/$defs/text"}), true),
        (json!({"$ref": "#/$defs/number"}), false),
        (json!({"$ref": "#/$defs/number/anyOf/0"}), false),
        (json!({"$ref": "#/$defs/text", "type": "integer"}), false),
        (json!({"$ref": "#/$defs/loop"}), false),
        (json!({"$ref": "#/nowhere"}), false),
        (json!({"$ref": "other.json"}), false),
    ]
}

#[test]
fn a_schema_is_a_list_of_conditions() {
    for (schema, allows_string) in schemas() {
        let defs = json!({
            "text": {"type": "string"}, "number": {"anyOf": [{"type": "number"}]},
            "loop": {"$ref": "#/$defs/loop"},
        });
        check(
            &json!({"properties": {"k": schema}, "$defs": defs}),
            allows_string,
        );
        check(
            &json!({"properties": {"other": {}}, "additionalProperties": schema, "$defs": defs}),
            allows_string,
        );
        check(
            &json!({"patternProperties": {"^[a-k]$": schema}, "$defs": defs}),
            allows_string,
        );
        // The same behind references and combinations at the root.
        let object = json!({"properties": {"k": schema}});
        let with_object = json!({"$ref": "#/$defs/object", "$defs": {
            "text": defs["text"], "number": defs["number"], "loop": defs["loop"], "object": object,
        }});
        check(&with_object, allows_string);
        check(
            &json!({"allOf": [{"type": "object"}, object], "$defs": defs}),
            allows_string,
        );
        check(
            &json!({"anyOf": [{"properties": {}}, object], "$defs": defs}),
            allows_string,
        );
    }
}

#[test]
fn where_a_key_is_described() {
    let text = json!({"type": "string"});
    let number = json!({"type": "number"});
    // Nothing is said about the key.
    check(&json!({}), false);
    check(&json!({"properties": {"other": text}}), false);
    check(&json!({"patternProperties": {"^x": text}}), false);
    check(&json!({"patternProperties": {"(": text}}), false);
    // `additionalProperties` is about keys that nothing else describes.
    check(
        &json!({"properties": {"k": number}, "additionalProperties": text}),
        false,
    );
    check(
        &json!({"patternProperties": {"k": number}, "additionalProperties": text}),
        false,
    );
    check(
        &json!({"properties": {"k": text}, "additionalProperties": false}),
        true,
    );
    // Every description holds.
    check(
        &json!({"properties": {"k": text}, "patternProperties": {"k": number}}),
        false,
    );
    check(
        &json!({"properties": {"k": text}, "allOf": [{"properties": {"k": number}}]}),
        false,
    );
    check(
        &json!({"anyOf": [{"properties": {"k": text}}, {"properties": {"k": number}}]}),
        true,
    );
    check(
        &json!({"allOf": [{"properties": {"k": text}}, {"properties": {"k": number}}]}),
        false,
    );
}

#[test]
fn references_in_circles_end_soon() {
    let circle = json!({"$ref": "#"});
    let many = vec![circle; 50];
    let start = Instant::now();
    check(
        &json!({"allOf": many, "properties": {"k": {"type": "string"}}}),
        false,
    );
    check(
        &json!({"properties": {"k": {"anyOf": [{"$ref": "#/properties/k"}, {"$ref": "#/properties/k"}]}}}),
        false,
    );
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn numbers_keep_their_digits() {
    let number = json!({"properties": {"k": {"type": "number"}}});
    let same = |text: &str| {
        let value = argument(&number, text);
        assert_eq!(value.to_string(), text);
        assert!(!value.is_string(), "{text}");
    };
    for text in [
        "0",
        "-1",
        "9007199254740993",
        "9223372036854775808",
        "18446744073709551615",
        "-9223372036854775808",
        "0.1",
        "-2.5",
        "1.5e-7",
        "0.30000000000000004",
        "[1,2.5,{\"a\":\"12345678901234567890123\"}]",
        "[\"\\\"98765432109876543210987\"]",
    ] {
        same(text);
    }
    for (text, value) in [
        ("1.0", json!(1.0)),
        ("-0.0", json!(-0.0)),
        ("1E2", json!(100.0)),
        ("1e30", json!(1e30)),
        ("1e+30", json!(1e30)),
        ("100e-1", json!(10.0)),
        (" [1, 2] ", json!([1, 2])),
        ("0e5", json!(0.0)),
    ] {
        assert_eq!(argument(&number, text), value);
    }
    // What would lose some stays as it was written.
    for text in [
        "18446744073709551616",
        "-9223372036854775809",
        "12345678901234567890123",
        "9007199254740993.0",
        "0.1000000000000000055",
        "1e400",
        "1e-400",
        "[1, 12345678901234567890123]",
        "{\"a\": \"\\\\\", \"b\": 98765432109876543210987}",
    ] {
        assert_eq!(argument(&number, text), json!(text));
    }
}
