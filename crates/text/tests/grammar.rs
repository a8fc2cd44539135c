//! Formats that cannot be: exact errors before anything is generated, and bounds
//! for what is meant to do harm.

mod vocabulary;
mod walk;

use model::Verdict;
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use text::{AnswerFormat, GuideFactory, Tokenizer, TurnFormat};
use vocabulary::{oracle, tokenizer_of};
use walk::{Chooser, answer, schema};

type Model = (Arc<Tokenizer>, GuideFactory);

static NANO: LazyLock<Model> =
    LazyLock::new(|| model(tokenizer_of("models/nano-glimmer-q8_0.gguf")));
static SMALL: LazyLock<Model> = LazyLock::new(|| model(oracle()));

fn model(tokenizer: Arc<Tokenizer>) -> Model {
    let format = TurnFormat::of_chat(&tokenizer);
    let factory = GuideFactory::new(Arc::clone(&tokenizer), format).expect("a factory");
    (tokenizer, factory)
}

fn check(format: AnswerFormat, expected: &str) {
    let settings = answer(format);
    let error = NANO.1.turn(&settings).err();
    let error = error.map_or_else(|| "none".to_owned(), |error| error.to_string());
    assert_eq!(error, expected, "{:?}", settings.answer);
}

/// Everything that is wrong with a format is said before anything is generated,
/// with its place.
#[test]
fn schemas_that_cannot_be() {
    let json =
        |value: Value, expected: &str| check(schema(value), &format!("JSON schema: {expected}"));
    json(json!(7), "#: schema must be an object or boolean");
    json(json!({"type": "strin"}), "#: Invalid type: strin");
    json(
        json!({"properties": {"a": {"type": "strin"}}}),
        "#/properties/a: Invalid type: strin",
    );
    json(
        json!({"properties": {"a": {"anyOf": [{"type": "null"}, {"items": {"minLength": "x"}}]}}}),
        "#/properties/a/anyOf/1/items: Expected positive integer for 'minLength', got 'x'",
    );
    json(
        json!({"items": {"$ref": "#/$defs/b"}}),
        "#/items: Reference segment '$defs' not found in '#/$defs/b'.",
    );
    json(
        json!({"$ref": "http://example.com/x"}),
        "#: Only absolute $ref's (#/...) are supported without 'referencing' feature; ref 'http://example.com/x'",
    );
    json(
        json!({"properties": {"a/~b": {"pattern": "(a"}}}),
        "#/properties/a~1~0b: regex parse error:; (a; ^; error: unclosed group",
    );
    json(
        json!({"items": {"not": {"type": "string"}}}),
        "#/items: Unimplemented keys: ['not']",
    );
    json(
        json!({"type": "object", "required": ["a"], "properties": {"a": false}}),
        "#: Unsatisfiable schema: required property 'a' is unsatisfiable",
    );
    json(
        json!({"type": "integer", "minimum": 3, "maximum": 2}),
        "#: Unsatisfiable schema: minimum (3) is greater than maximum (2)",
    );
    json(
        json!({"type": "string", "format": "nonsense"}),
        "#: Unknown format: nonsense",
    );
    json(
        json!({"const": "x".repeat(300_000)}),
        "found 300012 bytes, expected at most 131072",
    );
}

#[test]
fn expressions_and_grammars_that_cannot_be() {
    let regex = |regex: &str, expected: &str| {
        check(
            AnswerFormat::Regex(regex.to_owned()),
            &format!("regular expression: {expected}"),
        );
    };
    regex("ab(c", "at byte 2: unclosed group");
    regex(
        "a(?=b)",
        "at byte 1: look-around, including look-ahead and look-behind, is not supported",
    );
    regex(r"(a)\1", "at byte 3: backreferences are not supported");
    regex(r"\bword", "lookarounds not supported yet");
    regex(r"[^\x00-\x{10FFFF}]", "no text fits it");
    regex(
        &format!("{}a{}", "(".repeat(300), ")".repeat(300)),
        "at byte 250: exceed the maximum number of nested parentheses/brackets (250)",
    );
    regex(
        &"a".repeat(40_000),
        "found 40000 bytes, expected at most 32768",
    );

    let lark = |lark: &str, expected: &str| {
        check(
            AnswerFormat::Lark(lark.to_owned()),
            &format!("Lark grammar: {expected}"),
        );
    };
    lark("", "no start rule found");
    lark("start: A", "at 1(8): unknown name: 'A'; 1 | start: A; ^");
    lark(
        "start: b\n  b: /(/",
        "at 2(6): invalid regex '(' (in regex): regex parse error:; (; ^; error: unclosed group",
    );
    lark("start: start \"a\"", "no text fits it");
    // Control tokens are not there for a grammar, by name or by number.
    lark(
        "start: <|eot|>",
        "at 1(8): unknown special token: '<|eot|>'; following special tokens are available: \u{27e6}\u{27e7}; 1 | start: <|eot|>; ^",
    );
    let eot = NANO.0.id_of("<|eot|>").expect("a marker");
    lark(&format!("start: <[{eot}]>"), "no text fits it");
    lark(
        "start: %json {\"type\": 3}",
        "at 1(8): failed to compile JSON schema: type must be a string or array of strings; 1 | start: %json {'type': 3}; ^",
    );
}

/// Whatever a request may hold: a guide or an error, and no more stack than there
/// is.
#[test]
fn hostile_formats_are_survived() {
    let chain = |n: usize, rule: &dyn Fn(usize) -> String| -> String { (0..n).map(rule).collect() };
    let rules = chain(2600, &|n| format!("a{n:x}:a{:x}\n", n + 1));
    let terminals = chain(1900, &|n| format!("A{n:x}:A{:x} \"x\"\n", n + 1));
    let references = |n: usize, of: &dyn Fn(String) -> Value| {
        let definitions = (0..n).map(|at| (format!("d{at}"), of(format!("#/$defs/d{}", at + 1))));
        let mut definitions: serde_json::Map<String, Value> = definitions.collect();
        definitions.insert(format!("d{n}"), json!({"type": "null"}));
        schema(json!({"$ref": "#/$defs/d0", "$defs": definitions}))
    };
    let formats = [
        AnswerFormat::Lark(format!("{rules}a{:x}:\"y\"\nstart:a0", 2600)),
        AnswerFormat::Lark(format!("{terminals}A{:x}:\"y\"\nstart:A0", 1900)),
        AnswerFormat::Lark(format!("start: {}", "\"a\"? ".repeat(5000))),
        AnswerFormat::Lark(format!("start: {}", "(".repeat(32_000))),
        AnswerFormat::Lark("start: \"a\" | start start start".to_owned()),
        AnswerFormat::Regex("(a{1,1000}){1,1000}".to_owned()),
        AnswerFormat::Regex("(?:a?){1000}a{1000}".to_owned()),
        AnswerFormat::Regex("(.*a){50}(.*b){50}c".to_owned()),
        AnswerFormat::Regex("é".repeat(16_000)),
        references(3700, &|next| json!({"$ref": next})),
        references(2900, &|next| json!({"items": {"$ref": next}})),
        references(2650, &|next| json!({"$ref": next, "minLength": 1})),
        references(
            1900,
            &|next| json!({"allOf": [{"$ref": next}], "maxLength": 9}),
        ),
        references(
            2000,
            &|next| json!({"anyOf": [{"$ref": next}, {"type": "null"}]}),
        ),
        references(
            14,
            &|next| json!({"allOf": [{"$ref": next}, {"$ref": next}]}),
        ),
        schema((0..120).fold(
            json!(true),
            |inner, _| json!({"items": inner, "minItems": 1}),
        )),
        schema((0..120).fold(json!({"type": "x"}), |inner, _| json!({"items": inner}))),
        schema(json!({"enum": (0..20_000).collect::<Vec<u32>>()})),
        schema(json!({"type": "string", "maxLength": 100_000_000})),
        schema(json!({"minItems": 100_000_000})),
        schema(json!({"type": "number", "multipleOf": 1e-300})),
        schema(json!({"type": "integer", "minimum": -1e300, "maximum": 1e300})),
    ];
    for format in formats {
        for (tokenizer, factory) in [&*NANO, &*SMALL] {
            let Ok((mut guide, _)) = factory.turn(&answer(format.clone())) else {
                continue;
            };
            let mut chooser = Chooser::new(tokenizer, 1);
            for _ in 0..60 {
                let Some(token) = chooser.choose(guide.constraint()) else {
                    assert!(guide.failure().is_some());
                    break;
                };
                if guide.accept(token) == Verdict::Stop {
                    break;
                }
            }
        }
    }
}
