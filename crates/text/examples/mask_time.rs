//! What structured output costs beside the model: the time to compile a grammar,
//! to find it again, and to say which tokens of a vocabulary may come next.
//!
//!     cargo run --release --package text --example mask_time MODEL.gguf

use gguf::Gguf;
use model::Constraint;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::{AnswerFormat, GuideFactory, Special, Tokenizer, TurnFormat, TurnSettings};

fn main() {
    let path = std::env::args().nth(1).expect("the path of a GGUF file");
    let file = Gguf::open(Path::new(&path)).unwrap_or_else(|error| panic!("{error}"));
    let tokenizer = Tokenizer::from_metadata(file.metadata());
    let tokenizer = Arc::new(tokenizer.unwrap_or_else(|error| panic!("{error}")));
    let start = Instant::now();
    let format = TurnFormat::of_completion(&tokenizer);
    let factory = GuideFactory::new(Arc::clone(&tokenizer), format);
    let factory = factory.unwrap_or_else(|error| panic!("{error}"));
    println!("{} tokens, trie {:?}", tokenizer.n_vocab(), start.elapsed());
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    });
    let text = r#"{"name": "Ada Lovelace of London", "age": 36, "tags": ["red", "blue", "green"]}"#;
    for (name, answer, text) in [
        ("JSON schema", AnswerFormat::JsonSchema(person), text),
        ("any JSON object", AnswerFormat::JsonObject, text),
        (
            "regular expression",
            AnswerFormat::Regex("[A-Z][a-z]+( [A-Za-z]+)*, [0-9]{1,3}\\.".to_owned()),
            "Ada Lovelace of London and many other places, 36.",
        ),
    ] {
        measure(&factory, &tokenizer, name, answer, text);
    }
}

fn measure(
    factory: &GuideFactory,
    tokenizer: &Tokenizer,
    name: &str,
    answer: AnswerFormat,
    text: &str,
) {
    let settings = TurnSettings {
        answer,
        ..TurnSettings::default()
    };
    let turn = || {
        let start = Instant::now();
        let (guide, _) = factory
            .turn(&settings)
            .unwrap_or_else(|error| panic!("{error}"));
        (guide, start.elapsed())
    };
    let (_, compiled) = turn();
    let (_, found) = turn();
    let mut masks: Vec<Duration> = Vec::new();
    for _ in 0..20 {
        let (mut guide, _) = turn();
        for token in tokenizer.encode(text, Special::Text) {
            let start = Instant::now();
            let constraint = guide.constraint();
            masks.push(start.elapsed());
            if let Constraint::Masked(mask) = &constraint {
                assert!(mask.is_allowed(token), "the text does not fit");
            }
            guide.accept(token);
        }
    }
    masks.sort_unstable();
    let at = |share: f64| masks[((masks.len() - 1) as f64 * share) as usize];
    println!(
        "{name}: compiled in {compiled:?}, found again in {found:?}; mask p50 {:?}, p95 {:?}, most {:?}",
        at(0.5),
        at(0.95),
        at(1.0)
    );
}
