//! The reference backend against the oracle's golden values.

mod common;

use common::{EXACT, Golden, distance, logits, open, reference, testdata};

/// Limits for f32 activations: largest absolute difference, relative RMS.
const MAX_ABS: f64 = 2e-3;
const RELATIVE_RMS: f64 = 3e-5;

#[track_caller]
fn check(what: &str, found: &[f32], golden: &[f32]) {
    let (max, rms) = distance(found, golden);
    assert!(
        max <= MAX_ABS && rms <= RELATIVE_RMS,
        "{what}: max abs {max:.2e}, relative RMS {rms:.2e}"
    );
    println!("{what}: max abs {max:.2e}, relative RMS {rms:.2e}");
}

#[test]
fn nano_f32() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let mut golden = Golden::open("golden-text-nano-f32.npz");
    let mut model = reference(&file, EXACT);
    for sequence in ["one", "short", "edge", "long"] {
        let tokens = golden.tokens(&format!("tokens_{sequence}"));
        let (_, expected) = golden.floats(&format!("logits_{sequence}"));
        let found = logits(&mut model, &tokens, 64).concat();
        check(sequence, &found, &expected);
    }
}
