//! The bundled model against its reference values, computed in float32 over
//! the dequantized weights: greedy text, log-probabilities, captured features
//! and the drafter's greedy rounds.

use model::{
    Batch, DraftRequest, Forward, KvType, Model, Options, PagePool, Reference, RowOutput,
    SequencePages, Want, WindowConvention,
};
use serde_json::Value;
use testing::{EXACT, bundled, full, open, pool_of, read_to_string, reference, testdata};

/// Two candidates closer than this may change places in another rounding.
const NEAR_TIE: f32 = 0.05;

struct Prompt {
    name: String,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    /// For each greedy token, the five likeliest with their log-probabilities.
    top5: Vec<Vec<(u32, f32)>>,
    features: Option<Vec<f32>>,
    rounds: Vec<Round>,
}

/// A greedy round of the drafter.
struct Round {
    /// Position of the newest token.
    anchor: usize,
    draft: Vec<u32>,
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("an array of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn number(value: &Value) -> f32 {
    value.as_f64().expect("a number") as f32
}

fn golden() -> Vec<Prompt> {
    let golden = read_to_string(&testdata("nano-glimmer/golden.json"));
    let golden: Value = serde_json::from_str(&golden).expect("JSON");
    let candidate = |c: &Value| (c[0].as_u64().expect("an id") as u32, number(&c[1]));
    let prompt = |p: &Value| {
        let steps = p["top5"].as_array().expect("a step for each token").iter();
        let rounds = p["draft"].as_array().expect("rounds").iter();
        let features = p.get("features_at_last_prompt_token");
        Prompt {
            name: p["name"].as_str().expect("a name").to_string(),
            prompt: ids(&p["prompt_ids"]),
            greedy: ids(&p["greedy_ids"]),
            top5: steps
                .map(|s| {
                    s.as_array()
                        .expect("candidates")
                        .iter()
                        .map(candidate)
                        .collect()
                })
                .collect(),
            features: features.map(|f| f.as_array().expect("floats").iter().map(number).collect()),
            rounds: rounds
                .map(|r| Round {
                    anchor: r["anchor"].as_u64().expect("a position") as usize,
                    draft: ids(&r["draft"]),
                })
                .collect(),
        }
    };
    let prompts = golden["prompts"].as_array().expect("prompts");
    assert_eq!(prompts.len(), 9);
    prompts.iter().map(prompt).collect()
}

fn model(kv: KvType) -> Model<Reference> {
    let options = Options { kv, ..EXACT };
    reference(&open(&bundled("nano-glimmer-q8_0.gguf")), options)
}

/// Computes the next `tokens` and gives the logits of the last `n_wanted`.
fn advance(
    model: &mut Model<Reference>,
    pool: &mut PagePool,
    pages: &mut SequencePages,
    tokens: &[u32],
    n_wanted: usize,
) -> Vec<Vec<f32>> {
    let n = tokens.len() as u32;
    let copies = pages.reserve(pool, n).expect("free pages");
    model.copy_pages(&copies).expect("copies");
    let mut batch = Batch::default();
    batch.push(0, pages.len(), tokens);
    batch.wanted = (n - n_wanted as u32..n).collect();
    let want = vec![Want::Full; n_wanted];
    let outputs = model.pass(&batch, &[pages], &want).expect("a pass");
    pages.accept(pool, n);
    outputs.into_iter().map(full).collect()
}

/// Log-probabilities of a row, and its likeliest token.
fn log_probabilities(logits: &[f32]) -> (Vec<f32>, u32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&v| f64::from(v - max).exp()).sum();
    let best = logits
        .iter()
        .position(|&v| v == max)
        .expect("a largest logit");
    let all = logits.iter().map(|&v| v - max - sum.ln() as f32).collect();
    (all, best as u32)
}

/// Compares the rows that predict the greedy tokens from `first` on. Gives how
/// many steps are too close for the limit to decide which token is the best.
fn check_rows(prompt: &Prompt, first: usize, rows: &[Vec<f32>], limit: f32) -> usize {
    let mut n_undecided = 0;
    for (i, row) in rows.iter().enumerate() {
        let step = first + i;
        let what = format!("{}, token {step}", prompt.name);
        let (found, best) = log_probabilities(row);
        let expected = &prompt.top5[step];
        if expected[0].1 - expected[1].1 > 2.0 * limit {
            assert_eq!(best, prompt.greedy[step], "{what}");
        } else {
            n_undecided += 1;
        }
        for &(token, expected) in expected {
            let d = (found[token as usize] - expected).abs();
            assert!(
                d <= limit,
                "{what}: log-probability of {token} off by {d:.1e}"
            );
        }
    }
    n_undecided
}

/// Compares a round's proposals: each is the golden one, or as likely.
fn check_draft(what: &str, rows: &[Vec<f32>], golden: &[u32]) {
    assert_eq!(rows.len(), golden.len(), "{what}");
    for (j, (logits, &token)) in rows.iter().zip(golden).enumerate() {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let behind = max - logits[token as usize];
        assert!(
            behind <= NEAR_TIE,
            "{what}, draft {j}: {token} is {behind:.3} behind"
        );
    }
}

#[test]
fn greedy_text_features_and_drafts() {
    let mut model = model(KvType::F32);
    let drafter = open(&bundled("nano-glimmer-dflash-q8_0.gguf"));
    model
        .attach_drafter(&drafter, WindowConvention::Below)
        .expect("a drafter that fits");
    let mut pool = pool_of(&model);
    let (mut n_undecided, mut n_drafts, mut n_same) = (0, 0, 0);
    for prompt in golden() {
        let all = [&prompt.prompt[..], &prompt.greedy].concat();
        let (mut pages, n_prompt) = (SequencePages::new(), prompt.prompt.len());
        if prompt.features.is_some() {
            model.backend_mut().record_probes();
        }
        let rows = advance(&mut model, &mut pool, &mut pages, &prompt.prompt, 1);
        n_undecided += check_rows(&prompt, 0, &rows, 1e-3);
        if let Some(features) = &prompt.features {
            check_features(&mut model, features);
        }
        for round in &prompt.rounds {
            let done = pages.len() as usize;
            if round.anchor > done {
                let tokens = &all[done..round.anchor];
                let rows = advance(&mut model, &mut pool, &mut pages, tokens, tokens.len());
                n_undecided += check_rows(&prompt, done + 1 - n_prompt, &rows, 1e-3);
            }
            let request = DraftRequest {
                seq: 0,
                anchor: all[round.anchor],
                n_draft: round.draft.len(),
            };
            let rows = model
                .draft(&[request], &[&pages], Want::Full)
                .expect("a draft");
            let rows: Vec<Vec<f32>> = rows.into_iter().flatten().map(full).collect();
            check_draft(
                &format!("{} at {}", prompt.name, round.anchor),
                &rows,
                &round.draft,
            );
            n_drafts += rows.len();
            let best = rows.iter().map(|row| log_probabilities(row).1);
            n_same += best
                .zip(&round.draft)
                .filter(|(best, golden)| best == *golden)
                .count();
        }
        let done = pages.len() as usize;
        let tokens = &all[done..all.len() - 1];
        let rows = advance(&mut model, &mut pool, &mut pages, tokens, tokens.len());
        n_undecided += check_rows(&prompt, done + 1 - n_prompt, &rows, 1e-3);
        pages.clear(&mut pool);
    }
    assert_eq!(n_undecided, 0, "the golden text has no tie within 1e-3");
    assert_eq!(n_drafts, 135 * 15);
    // The rest are the near ties that were let through one by one.
    assert!(
        n_drafts - n_same <= 5,
        "{n_same} of {n_drafts} drafts are the golden ones"
    );
}

/// The residual streams that the drafter reads, at the last row.
fn check_features(model: &mut Model<Reference>, golden: &[f32]) {
    let values = model.backend_mut().take_probes().values;
    let n_embd = model.config().n_embd;
    let mut found = Vec::new();
    // Inputs of layers 2, 5 and 7.
    for il in [1, 4, 6] {
        let probe = values
            .iter()
            .find(|(name, layer, _)| (*name, *layer) == ("l_out", il));
        let (_, _, rows) = probe.expect("the layer's output");
        found.extend_from_slice(&rows[rows.len() - n_embd..]);
    }
    assert_eq!(found.len(), golden.len());
    for (i, (found, golden)) in found.iter().zip(golden).enumerate() {
        let d = (found - golden).abs();
        assert!(d <= 1e-3, "feature {i}: {found}, expected {golden}");
    }
}

#[test]
fn f16_keys_and_values_stay_near() {
    let mut model = model(KvType::F16);
    let mut pool = pool_of(&model);
    let mut n_undecided = 0;
    // Two long prompts would double the time and add nothing.
    for prompt in golden().iter().filter(|p| !p.name.starts_with("tool")) {
        let mut pages = SequencePages::new();
        let rows = advance(&mut model, &mut pool, &mut pages, &prompt.prompt, 1);
        n_undecided += check_rows(prompt, 0, &rows, 2e-2);
        let tokens = &prompt.greedy[..prompt.greedy.len() - 1];
        let rows = advance(&mut model, &mut pool, &mut pages, tokens, tokens.len());
        n_undecided += check_rows(prompt, 1, &rows, 2e-2);
        pages.clear(&mut pool);
    }
    assert!(
        n_undecided <= 22,
        "{n_undecided} of 448 steps are near ties"
    );
}

/// Plain greedy decoding, one row at a time, as a program would do it.
#[test]
fn decodes_greedily() {
    let mut model = model(KvType::F32);
    let mut pool = pool_of(&model);
    let prompt = golden().remove(0);
    let mut pages = SequencePages::new();
    let mut rows = prompt.prompt.clone();
    let mut text = Vec::new();
    while text.len() < prompt.greedy.len() {
        let copies = pages
            .reserve(&mut pool, rows.len() as u32)
            .expect("free pages");
        model.copy_pages(&copies).expect("copies");
        let mut batch = Batch::default();
        batch.push(0, pages.len(), &rows);
        batch.want_last();
        let outputs = model
            .pass(&batch, &[&pages], &[Want::Argmax])
            .expect("a pass");
        pages.accept(&mut pool, rows.len() as u32);
        let RowOutput::Argmax { token, .. } = outputs[0] else {
            panic!("expected the best token, got {outputs:?}");
        };
        text.push(token);
        rows = vec![token];
    }
    assert_eq!(text, prompt.greedy);
}
