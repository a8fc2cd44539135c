//! The bits of a row's logits do not depend on the route that computed them:
//! chunks, company in the pass, wrong drafts, where pages lie, threads,
//! instruction sets, fused operations. And the logits are near the exact ones.
//!
//! Every route gives the logits of the same rows; they are compared with the
//! whole text in as few passes as possible on one thread.

mod common;

use common::{cpu, isas};
use cpu::Isa;
use gguf::Gguf;
use model::KvType;
use testing::Plain;
use testing::lab::{Lab, check_golden, differing, made_up, moved, text, with_drafter};
use testing::{bundled, first_difference, open, testdata};

/// Every route on one thread, and on each instruction set and number of threads
/// the ones that cut work differently.
fn check(file: &Gguf, kv: KvType, tokens: &[u32]) {
    let widest = Isa::detect();
    let mut lab = Lab::new(cpu(widest, 1), file, kv);
    let expected = lab.in_chunks(tokens, 512);
    let mut other = Lab::new(cpu(widest, 2), file, kv);
    let found = moved(&mut lab, &mut other, tokens);
    assert_eq!(first_difference(&found, &expected), None, "moved");

    let none: [String; 0] = [];
    let (what, text) = ((file, kv), (tokens, &expected));
    assert_eq!(differing(cpu(widest, 1), what, text, None), none);
    let few = ["one row at a time", "chunks of 64", "packed with 3"];
    for threads in [2, 3, 8] {
        let found = differing(cpu(widest, threads), what, text, Some(&few));
        assert_eq!(found, none);
    }
    for isa in isas() {
        let found = differing(cpu(isa, 2), what, text, Some(&["chunks of 64"]));
        assert_eq!(found, none);
        // One row at a time takes another kernel; some rows of it will do.
        let mut lab = Lab::new(cpu(isa, 1), file, kv);
        let found = lab.in_chunks(&tokens[..40], 1);
        let difference = first_difference(&found, &expected[..40]);
        assert_eq!(difference, None, "{isa}: one row at a time");
    }
    let unfused = Plain::new(cpu(widest, 2));
    let found = differing(unfused, what, text, Some(&["chunks of 64", "chunks of 7"]));
    assert_eq!(found, none, "fused operations");
}

#[test]
fn nano_glimmer_f16() {
    check(
        &open(&bundled("nano-glimmer-q8_0.gguf")),
        KvType::F16,
        &text(),
    );
}

#[test]
fn nano_glimmer_f32() {
    check(
        &open(&bundled("nano-glimmer-q8_0.gguf")),
        KvType::F32,
        &text(),
    );
}

#[test]
fn k_quants() {
    let file = open(&testdata("oracle/text-kq-q4km.gguf"));
    check(&file, KvType::F16, &made_up(400));
}

#[test]
fn iq3_mix() {
    let file = open(&testdata("oracle/text-kq-iq3mix.gguf"));
    check(&file, KvType::F32, &made_up(400));
}

#[test]
fn zoo_of_encodings() {
    let file = open(&testdata("oracle/text-kq-zoo.gguf"));
    check(&file, KvType::F16, &made_up(400));
}

#[test]
fn f32_weights() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    check(&file, KvType::F16, &made_up(400));
}

/// The test of the test: a sum that depends on the number of rows is noticed.
#[test]
fn kernel_that_depends_on_the_number_of_rows_is_noticed() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let tokens = made_up(300);
    let be = || Plain::order_dependent(cpu(Isa::detect(), 1));
    let expected = Lab::new(be(), &file, KvType::F32).in_chunks(&tokens, 512);
    let what = (&file, KvType::F32);
    let found = differing(be(), what, (&tokens, &expected), None);
    let noticed = |name: &str| found.iter().any(|f| f.contains(name));
    for route in ["one row at a time", "chunks of 7", "packed", "verified"] {
        assert!(noticed(route), "{route} is not in {found:?}");
    }
    assert!(!noticed("chunks of 64"), "the large passes agree");
}

#[test]
fn drafts_do_not_depend_on_the_route() {
    let files = (
        &open(&testdata("oracle/text-nano-f32.gguf")),
        &open(&testdata("oracle/dflash-nano-f32.gguf")),
    );
    let widest = Isa::detect();
    let (logits, drafts) = with_drafter(cpu(widest, 1), files, 512);
    let without = Lab::new(cpu(widest, 1), files.0, KvType::F16).in_chunks(&made_up(300), 512);
    assert_eq!(
        first_difference(&logits, &without),
        None,
        "beside a drafter"
    );
    for (isa, threads, chunk) in [
        (widest, 2, 64),
        (widest, 3, 7),
        (Isa::Scalar, 8, 128),
        (Isa::Scalar, 1, 100),
    ] {
        let (found, again) = with_drafter(cpu(isa, threads), files, chunk);
        let what = format!("{isa}, {threads} threads, chunks of {chunk}");
        assert_eq!(first_difference(&found, &logits), None, "logits: {what}");
        assert_eq!(first_difference(&again, &drafts), None, "drafts: {what}");
    }
}

#[test]
fn near_the_oracle_with_f32_activations() {
    for kind in ["f32", "f16"] {
        check_golden(cpu(Isa::detect(), 2), ("nano", kind), 2e-3, 3e-5);
    }
}

#[test]
fn near_the_oracle_with_integer_activations() {
    for (name, kind) in [
        ("nano", "q8_0"),
        ("kq", "q4km"),
        ("kq", "iq3mix"),
        ("kq", "zoo"),
    ] {
        check_golden(cpu(Isa::detect(), 2), (name, kind), f64::INFINITY, 0.12);
    }
}
