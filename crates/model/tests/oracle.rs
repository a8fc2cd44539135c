//! The reference backend against the oracle's golden values: logits, residual
//! streams, the drafter's features and logits.

mod common;

use common::oracle_weights::{
    A, B, DRAFT_A, DRAFT_NANO, KQ, NANO, TextShape, draft_plan, manifest_digest, sha256, text_plan,
};
use gguf::{Gguf, TensorType};
use model::{
    DraftRequest, Forward, KvType, Model, Options, Reference, SequencePages, Want, WindowConvention,
};
use testing::{
    DRAFT_LIMITS, EXACT, Golden, Limits, TEXT_LIMITS, append, distance, full, logits, open,
    pool_of, reference, testdata,
};

#[track_caller]
fn check(limits: Limits, what: &str, found: &[f32], golden: &[f32]) {
    if let Err(outside) = limits.check(what, found, golden) {
        panic!("{outside}");
    }
}

/// Compares every golden array of `golden-text-NAME-KIND.npz` with `file`.
fn check_text(file: &Gguf, name: &str, kind: &str) {
    let mut golden = Golden::open(&format!("oracle/golden-text-{name}-{kind}.npz"));
    let mut model = reference(file, EXACT);
    let sequences: &[&str] = match kind {
        "f32" => &["one", "short", "edge", "long"],
        _ => &["short", "long"],
    };
    for sequence in sequences {
        let tokens = golden.tokens(&format!("tokens_{sequence}"));
        let key = match (*sequence, kind) {
            (sequence, "f32") | (sequence @ "short", _) => format!("logits_{sequence}"),
            (sequence, _) => format!("logits_{sequence}_last8"),
        };
        let (_, expected) = golden.floats(&key);
        let found = logits(&mut model, &tokens, 64).concat();
        let last = &found[found.len() - expected.len()..];
        check(
            TEXT_LIMITS,
            &format!("{name} {kind} {key}"),
            last,
            &expected,
        );
    }
    if kind == "f32" {
        check_residuals(&mut model, &mut golden, name);
    }
}

/// The residual stream before the first layer and after every layer.
fn check_residuals(model: &mut Model<Reference>, golden: &mut Golden, name: &str) {
    let (shape, expected) = golden.floats("residual_short");
    let tokens = golden.tokens("tokens_short");
    model.backend_mut().record_probes();
    logits(model, &tokens, tokens.len());
    let values = model.backend_mut().take_probes().values;
    let streams = values
        .into_iter()
        .filter(|v| matches!(v.0, "inp_embd" | "l_out"));
    let streams: Vec<Vec<f32>> = streams.map(|(_, _, values)| values).collect();
    assert_eq!(streams.len() as u64, shape[0], "streams of {name}");
    let stream_len = expected.len() / streams.len();
    for (i, (found, expected)) in streams.iter().zip(expected.chunks(stream_len)).enumerate() {
        check(
            TEXT_LIMITS,
            &format!("{name} residual {i}"),
            found,
            expected,
        );
    }
}

fn check_stored(name: &str, kind: &str) {
    let file = open(&testdata(&format!("oracle/text-{name}-{kind}.gguf")));
    check_text(&file, name, kind);
}

/// Makes the oracle's three files of a configuration and checks each.
fn check_made(shape: &TextShape) {
    let plan = text_plan(shape);
    for ty in [TensorType::F32, TensorType::F16, TensorType::Q8_0] {
        let file = plan.write(ty);
        check_text(&file, shape.name, &ty.name().to_ascii_lowercase());
    }
}

#[test]
fn nano() {
    for kind in ["f32", "f16", "q8_0"] {
        check_stored("nano", kind);
    }
}

#[test]
fn kq_stored() {
    for kind in ["q4km", "iq3mix", "zoo"] {
        check_stored("kq", kind);
    }
}

#[test]
fn kq_made() {
    check_made(&KQ);
}

#[test]
fn a_made() {
    check_made(&A);
}

#[test]
fn b_made() {
    check_made(&B);
}

/// The generator's own proof: the files that are stored, byte for byte.
#[test]
fn generator_makes_the_stored_files() {
    for (plan, stored) in [
        (text_plan(&NANO), "text-nano-f32.gguf"),
        (draft_plan(&DRAFT_NANO), "dflash-nano-f32.gguf"),
    ] {
        plan.write(TensorType::F32);
        let stored_digest = sha256(&testdata("oracle").join(stored));
        assert_eq!(stored_digest, manifest_digest(stored), "{stored}");
    }
}

#[test]
fn f16_keys_and_values_stay_near() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let mut golden = Golden::open("oracle/golden-text-nano-f32.npz");
    let options = Options {
        kv: KvType::F16,
        ..EXACT
    };
    let mut model = reference(&file, options);
    for sequence in ["one", "short", "edge", "long"] {
        let tokens = golden.tokens(&format!("tokens_{sequence}"));
        let (_, expected) = golden.floats(&format!("logits_{sequence}"));
        let found = logits(&mut model, &tokens, 64).concat();
        let (_, relative_rms) = distance(&found, &expected);
        assert!(
            relative_rms <= 5e-3,
            "{sequence}: relative RMS {relative_rms:.2e}"
        );
        let exact = TEXT_LIMITS.check(sequence, &found, &expected);
        assert!(
            sequence == "one" || exact.is_err(),
            "{sequence}: f16 rounds nothing"
        );
    }
}

/// The drafter's logits under both windows, and its features.
fn check_drafter(target: &Gguf, drafter: &Gguf, name: &str) {
    let mut golden = Golden::open(&format!("oracle/golden-draft-{name}.npz"));
    let tokens = golden.tokens("context_tokens");
    let anchor = golden.number("anchor") as u32;
    for convention in [WindowConvention::Below, WindowConvention::Within] {
        let mut model = reference(target, EXACT);
        let config = model
            .attach_drafter(drafter, convention)
            .expect("a drafter that fits");
        for tag in ["short", "long"] {
            let what = format!("{name} {tag} {convention:?}");
            let context = &tokens[..golden.number(&format!("n_context_{tag}")) as usize];
            model.backend_mut().record_probes();
            let (mut pool, mut pages) = (pool_of(&model), SequencePages::new());
            append(&mut model, &mut pool, &mut pages, context);
            let request = DraftRequest {
                seq: 0,
                anchor,
                n_draft: config.block_size - 1,
            };
            let drafts = model
                .draft(&[request], &[&pages], Want::Full)
                .expect("a draft");
            let found: Vec<f32> = drafts.into_iter().flatten().flat_map(full).collect();
            let suffix = match convention {
                WindowConvention::Below => "_llamacpp_window",
                WindowConvention::Within => "",
            };
            // Row 0 is the anchor's own, which proposes nothing.
            let (shape, expected) = golden.floats(&format!("logits_{tag}{suffix}"));
            check(DRAFT_LIMITS, &what, &found, &expected[shape[1] as usize..]);

            let (_, expected) = golden.floats(&format!("features_{tag}"));
            let values = model.backend_mut().take_probes().values;
            let features = values.into_iter().find(|v| v.0 == "dflash_features");
            let (_, _, features) = features.expect("the drafter's features");
            let last = &features[features.len() - expected.len()..];
            check(DRAFT_LIMITS, &format!("features {what}"), last, &expected);
        }
    }
}

#[test]
fn drafter_nano() {
    let target = open(&testdata("oracle/text-nano-f32.gguf"));
    let drafter = open(&testdata("oracle/dflash-nano-f32.gguf"));
    check_drafter(&target, &drafter, "nano");
}

#[test]
fn drafter_a() {
    let target = text_plan(&A).write(TensorType::F32);
    let drafter = draft_plan(&DRAFT_A).write(TensorType::F32);
    check_drafter(&target, &drafter, "a");
}
