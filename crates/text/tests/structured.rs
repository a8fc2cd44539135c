//! Answers with a grammar: whatever a model likes, what comes out fits.

mod vocabulary;
mod walk;

use model::{Constraint, Verdict};
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use text::{AnswerFormat, GuideFactory, Special, Tokenizer, TurnEnd, TurnFormat};
use vocabulary::{CONTROL, NORMAL, byte_level, sentencepiece, tokenizer_of};
use walk::{Chooser, allows, answer, feed, schema, spelled, walk};

/// The tokenizers with what a factory makes of them: messages with channels, a
/// plain chat of byte-level tokens, one of SentencePiece.
static MODELS: LazyLock<Vec<(Arc<Tokenizer>, GuideFactory)>> = LazyLock::new(|| {
    let merges = [
        "Ġ Ġ", "\" :", "\" ,", "} <", "\" }", "1 2", "t r", "u e", "tr ue", "n ame",
    ];
    let mut chat_ml = byte_level("gpt-2", &merges[..8], &[("<|im_end|>", CONTROL)]);
    let n_tokens = 256 + 8;
    chat_ml.insert("tokenizer.ggml.eos_token_id", gguf::Value::U32(n_tokens));
    let pieces = [
        "\u{2581}",
        "\u{2581}{",
        "{\"",
        "\u{2581}true",
        "true",
        "a",
        "name",
        "1",
        "12",
    ];
    let pieces: Vec<_> = pieces.map(|piece| (piece, -1.0, NORMAL)).into();
    let small = [chat_ml, sentencepiece(&pieces, true)];
    let small = small.map(|metadata| Tokenizer::from_metadata(&metadata).expect("a tokenizer"));
    let nano = tokenizer_of("models/nano-glimmer-q8_0.gguf");
    let all = [nano].into_iter().chain(small.map(Arc::new));
    all.map(|tokenizer| {
        let format = TurnFormat::of_chat(&tokenizer);
        let factory = GuideFactory::new(Arc::clone(&tokenizer), format).expect("a factory");
        (tokenizer, factory)
    })
    .collect()
});

type Check = fn(&str) -> bool;

fn is_json(text: &str, check: impl Fn(&Value) -> bool) -> bool {
    serde_json::from_str(text).is_ok_and(|value| check(&value))
}

fn formats() -> impl Iterator<Item = (AnswerFormat, Check)> {
    schemas().into_iter().chain(others())
}

/// Schemas, and how to see without llguidance that a text fits them.
fn schemas() -> Vec<(AnswerFormat, Check)> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let tree = json!({
        "$ref": "#/$defs/node",
        "$defs": {"node": {
            "type": "object",
            "properties": {"is_leaf": {"type": "boolean"}, "left": {"$ref": "#/$defs/node"}},
            "required": ["is_leaf"],
            "additionalProperties": false,
        }},
    });
    vec![
        (schema(person), |text| {
            is_json(text, |value| {
                let age = value["age"].as_f64();
                value.as_object().is_some_and(|keys| keys.len() == 2)
                    && value["name"]
                        .as_str()
                        .is_some_and(|name| name.chars().count() <= 12)
                    && age.is_some_and(|age| (0.0..=150.0).contains(&age) && age.fract() == 0.0)
            })
        }),
        (schema(json!({"enum": ["red", "green", 3, null]})), |text| {
            is_json(text, |value| {
                [json!("red"), json!("green"), json!(3), Value::Null].contains(value)
            })
        }),
        (
            schema(
                json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
            ),
            |text| {
                is_json(text, |value| {
                    value.as_array().is_some_and(|items| {
                        (1..=3).contains(&items.len()) && items.iter().all(Value::is_boolean)
                    })
                })
            },
        ),
        (schema(tree), |text| {
            fn is_node(value: &Value) -> bool {
                value["is_leaf"].is_boolean()
                    && value.get("left").is_none_or(is_node)
                    && value.as_object().is_some_and(|keys| keys.len() <= 2)
            }
            is_json(text, is_node)
        }),
        (
            schema(json!({"anyOf": [{"type": "number"}, {"const": "none"}]})),
            |text| {
                // An exponent may be larger than any number that is read here.
                let number = text.split(['e', 'E']).next().unwrap_or_default();
                is_json(text, |value| value == "none") || is_json(number, Value::is_number)
            },
        ),
        (
            schema(json!({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"})),
            |text| {
                let text = text.trim_matches('"');
                text.len() == 6
                    && text[..2].bytes().all(|b| b.is_ascii_uppercase())
                    && &text[2..3] == "-"
                    && text[3..].bytes().all(|b| b.is_ascii_digit())
            },
        ),
    ]
}

/// As [`schemas`], for the other formats.
fn others() -> Vec<(AnswerFormat, Check)> {
    vec![
        (AnswerFormat::JsonObject, |text| is_json(text, Value::is_object)),
        (
            AnswerFormat::Regex("[0-9]{4}-[01][0-9](-[0-3][0-9])?".to_owned()),
            |text| {
                matches!(text.len(), 7 | 10)
                    && text.bytes().all(|b| b.is_ascii_digit() || b == b'-')
                    && text.split('-').map(str::len).eq([4, 2, 2].into_iter().take(text.len() / 3))
            },
        ),
        (AnswerFormat::Regex("^ab?$".to_owned()), |text| text == "a" || text == "ab"),
        (
            AnswerFormat::Regex("(yes|no)( indeed)?".to_owned()),
            |text| ["yes", "no", "yes indeed", "no indeed"].contains(&text),
        ),
        (AnswerFormat::Regex(" ?é{2,3}[\u{1F600}-\u{1F64F}]".to_owned()), |text| {
            let text = text.trim_start_matches(' ');
            let smile = text.trim_start_matches('é');
            (text.len() - smile.len()) / 2 >= 2
                && smile.chars().eq(smile.chars().take(1))
                && smile.starts_with(|c| ('\u{1F600}'..='\u{1F64F}').contains(&c))
        }),
        (
            AnswerFormat::Lark(
                "start: sum\nsum: item (\"+\" item){0,3}\nitem: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,3}/\n"
                    .to_owned(),
            ),
            |text| {
                let depth = text.bytes().try_fold(0u32, |depth, byte| match byte {
                    b'(' => Some(depth + 1),
                    b')' => depth.checked_sub(1),
                    b'+' | b'0'..=b'9' => Some(depth),
                    _ => None,
                });
                depth == Some(0) && !text.contains("++") && !text.contains("()") && !text.is_empty()
            },
        ),
    ]
}

#[test]
fn every_walk_under_the_mask_fits() {
    let mut n_walks = 0;
    for (tokenizer, factory) in MODELS.iter() {
        for (format, fits) in formats() {
            for seed in 0..12 {
                let mut chooser = Chooser::new(tokenizer, seed);
                let done = walk(factory, &answer(format.clone()), &mut chooser);
                let text = done.content();
                assert!(fits(&text), "{format:?}: {text:?}");
                assert_ne!(done.end, TurnEnd::Budget);
                n_walks += 1;
            }
        }
    }
    assert!(n_walks >= 300, "{n_walks} walks");
}

/// The walks above mean something: without the mask nothing fits, and the guide
/// says so.
#[test]
fn a_walk_that_ignores_the_mask_fails_by_name() {
    for (tokenizer, factory) in MODELS.iter() {
        for (format, fits) in formats() {
            let (mut guide, mut reader) = factory.turn(&answer(format.clone())).expect("a guide");
            let mut random = walk::Random(7);
            let mut text = String::new();
            let mut ids = tokenizer.encode("<|message|>", Special::Parse);
            if ids.len() > 1 {
                ids.clear();
            }
            ids.extend((0..40).map(|_| random.below(200) as u32 + 20));
            for id in ids
                .into_iter()
                .filter(|id| !tokenizer.end_tokens().contains(id))
            {
                guide.accept(id);
                for event in reader.push(id) {
                    if let text::TurnEvent::Content(piece) = event {
                        text.push_str(&piece);
                    }
                }
            }
            assert!(!fits(&text), "{format:?}: {text:?}");
            let Constraint::Masked(mask) = guide.constraint() else {
                panic!("{format:?} goes on after {text:?}");
            };
            assert_eq!(mask.n_allowed(), 0);
            assert!(guide.failure().is_some());
            assert!(guide.fork().failure().is_some());
        }
    }
}

#[test]
fn forks_are_equal_and_independent_at_every_token() {
    for (tokenizer, factory) in MODELS.iter() {
        for (format, _) in formats() {
            let settings = answer(format);
            let done = walk(factory, &settings, &mut Chooser::new(tokenizer, 3));
            let (mut guide, _) = factory.turn(&settings).expect("a guide");
            for (at, &token) in done.tokens.iter().enumerate() {
                let mut ahead = guide.fork();
                let mut astray = guide.fork();
                // One fork runs to the end, one runs into failure.
                for (later, &token) in done.tokens.iter().enumerate().skip(at) {
                    assert!(
                        allows(ahead.constraint(), token),
                        "token {later} of a fork at {at}"
                    );
                    let is_over = ahead.accept(token) == Verdict::Stop;
                    assert_eq!(is_over, later + 1 == done.tokens.len());
                }
                astray.accept(tokenizer.encode("\u{1F4A9}", Special::Text)[0]);
                let expected = guide.fork().constraint();
                assert_eq!(guide.constraint(), expected);
                assert!(allows(expected, token), "token {at}");
                guide.accept(token);
            }
        }
    }
}

/// What earlier answers did with a grammar changes nothing of the next one.
#[test]
fn a_grammar_is_compiled_once_and_every_turn_begins_anew() {
    let (tokenizer, _) = &MODELS[0];
    let format = TurnFormat::of_chat(tokenizer);
    let fresh = || GuideFactory::new(Arc::clone(tokenizer), format.clone()).expect("a factory");
    let kept = fresh();
    for (index, (answer_format, _)) in (0..).zip(formats()) {
        let settings = answer(answer_format.clone());
        for seed in 0..3 {
            let mut walks = [&kept, &fresh()]
                .map(|factory| walk(factory, &settings, &mut Chooser::new(tokenizer, seed)).tokens);
            walks.sort();
            assert_eq!(walks[0], walks[1], "{answer_format:?}");
        }
        let counts = kept.grammar_counts();
        assert_eq!(
            (counts.n_compiled, counts.n_found),
            (index + 1, 2 * (index + 1))
        );
        assert!(counts.n_bytes > 0);
    }
    // A grammar that an answer drove beyond its limits is as good as new.
    let costly = answer(AnswerFormat::Regex("[ab]*a[ab]{20}c".to_owned()));
    let fails_at = |factory: &GuideFactory| {
        let (mut guide, _) = factory.turn(&costly).expect("a guide");
        feed(&mut *guide, tokenizer, "<|message|>");
        let mut random = walk::Random(1);
        let letters = ["a", "b"].map(|letter| tokenizer.encode(letter, Special::Text)[0]);
        (0..100_000).find(|_| {
            guide.constraint();
            guide.accept(random.of(&letters));
            guide.failure().is_some()
        })
    };
    let expected = fails_at(&fresh());
    assert!(expected.is_some(), "a test of nothing");
    assert_eq!(fails_at(&kept), expected);
    assert_eq!(fails_at(&kept), expected);
}

/// However many grammars there are, so many bytes of them are kept, and those used
/// last.
#[test]
fn kept_grammars_have_a_limit() {
    let (tokenizer, _) = &MODELS[0];
    let format = TurnFormat::of_chat(tokenizer);
    let factory = GuideFactory::new(Arc::clone(tokenizer), format).expect("a factory");
    let long = |index: usize| {
        let description = format!("{index} {}", "is long ".repeat(12_000));
        let schema_of = json!({"type": "integer", "description": description});
        factory.turn(&answer(schema(schema_of))).expect("a guide");
        factory.grammar_counts()
    };
    let one = long(0).n_bytes;
    let n_too_many = (64 << 20) / one + 2;
    for index in 1..n_too_many {
        assert!(long(index).n_bytes <= 64 << 20);
    }
    let n_compiled = factory.grammar_counts().n_compiled;
    assert_eq!(
        long(n_too_many - 1).n_compiled,
        n_compiled,
        "the newest is there"
    );
    assert_eq!(long(0).n_compiled, n_compiled + 1, "the oldest had to go");
}

#[test]
fn reasoning_is_free_and_the_answer_is_not() {
    let (tokenizer, factory) = &MODELS[0];
    let settings = answer(AnswerFormat::Regex("a[bc]".to_owned()));
    let check = |before: &str, allowed: &[&str], refused: &[&str]| {
        let (mut guide, _) = factory.turn(&settings).expect("a guide");
        feed(&mut *guide, tokenizer, before);
        let constraint = guide.constraint();
        let first = |text: &str| tokenizer.encode(text, Special::Parse)[0];
        for text in allowed {
            assert!(
                allows(constraint.clone(), first(text)),
                "{text:?} after {before:?}"
            );
        }
        for text in refused {
            assert!(
                !allows(constraint.clone(), first(text)),
                "{text:?} after {before:?}"
            );
        }
    };
    let markers = ["<|start|>", "<|eom|>", "<|eot|>", "<|end_of_text|>"];
    let control = ["<|begin_of_text|>", "<|patch|>"];
    check(
        "",
        &["<|message|>", " to"],
        &[&markers[..], &control, &["a", "Hello"]].concat(),
    );
    // Anything but the end of the turn, which would lack its answer.
    let reasoning = " to=self<|message|>Let me see: \"ab\"?";
    check(
        reasoning,
        &["a", "{", "\n", "<|eom|>", "<|start|>"],
        &["<|eot|>", "<|end_of_text|>"],
    );
    let border = format!("{reasoning}<|eom|>");
    check(
        &border,
        &["<|start|>"],
        &["a", " to", "<|message|>", "<|eom|>", "<|eot|>"],
    );
    let header = format!("{border}<|start|>");
    check(
        &header,
        &["assistant"],
        &["user", "system", " to", "<|message|>"],
    );
    for header in [
        "<|message|>",
        " to=user<|message|>",
        &format!("{header}assistant to=user<|message|>"),
    ] {
        let all = [&markers[..], &control, &["<|message|>"]].concat();
        check(header, &["a"], &[&all[..], &["b", " a", "x"]].concat());
        check(&format!("{header}a"), &["b"], &all);
        // The end: the end tokens and nothing else.
        let complete = format!("{header}ab");
        check(
            &complete,
            &["<|eot|>", "<|end_of_text|>"],
            &["<|eom|>", "<|start|>", "a", " ", "\n"],
        );
    }
}

#[test]
fn a_complete_answer_can_only_end() {
    for (tokenizer, factory) in &MODELS[1..] {
        let settings = answer(AnswerFormat::Regex("a".to_owned()));
        let (mut guide, _) = factory.turn(&settings).expect("a guide");
        let letter = only(&guide.constraint(), tokenizer, "a");
        assert_eq!(guide.accept(letter), Verdict::Continue);
        let end = tokenizer.special().eos.expect("EOS");
        assert_eq!(guide.constraint(), Constraint::Forced(end));
        assert_eq!(guide.accept(end), Verdict::Stop);
    }
}

/// A token of the constraint that is this text.
fn only(constraint: &Constraint, tokenizer: &Tokenizer, text: &str) -> u32 {
    let ids = 0..tokenizer.n_vocab() as u32;
    ids.filter(|&id| tokenizer.token_bytes(id) == Some(text.as_bytes()))
        .find(|&id| allows(constraint.clone(), id))
        .unwrap_or_else(|| panic!("{text:?} is not allowed"))
}

#[test]
fn a_dead_end_has_a_name() {
    // The vocabulary cannot spell the second letter.
    let tokens = [("\u{2581}", 0.0, NORMAL), ("a", 0.0, NORMAL)];
    let metadata = sentencepiece(&tokens, false);
    let tokenizer = Arc::new(Tokenizer::from_metadata(&metadata).expect("a tokenizer"));
    let (mut guide, _) = walk::turn(
        &tokenizer,
        TurnFormat::of_chat(&tokenizer),
        &answer(AnswerFormat::Regex("ab".to_owned())),
    );
    assert_eq!(guide.failure(), None);
    let constraint = guide.constraint();
    guide.accept(only(&constraint, &tokenizer, "a"));
    for _ in 0..2 {
        let Constraint::Masked(mask) = guide.constraint() else {
            panic!("there is no b");
        };
        assert_eq!(mask.n_allowed(), 0);
        assert_eq!(
            guide.failure().expect("a reason"),
            "no token of the vocabulary fits"
        );
    }
    assert_eq!(spelled(&tokenizer, &[]), "");
}
