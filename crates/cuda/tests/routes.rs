//! The bits of a row's logits do not depend on the route that computed them:
//! chunks, company in the pass, wrong drafts, where pages lie, recordings, fused
//! operations. And the logits are near the exact ones.

mod device;

use testing::Plain;
use testing::context::{Bench, POSITIONS, WINDOWS};
use testing::lab::{Lab, check_golden, differing, made_up, moved, text, with_drafter};
use testing::suite::bits;

use cpu::Isa;
use device::{cpu, device, unrecorded};
use gguf::Gguf;
use model::KvType;
use std::collections::HashMap;
use testing::{bundled, distance, first_difference, open, testdata};

fn check(file: &Gguf, kv: KvType, tokens: &[u32]) {
    let mut lab = Lab::new(device(), file, kv);
    let expected = lab.in_chunks(tokens, 512);
    let mut other = Lab::new(device(), file, kv);
    let found = moved(&mut lab, &mut other, tokens);
    assert_eq!(first_difference(&found, &expected), None, "moved");
    let none: [String; 0] = [];
    let (what, text) = ((file, kv), (tokens, &expected));
    assert_eq!(differing(device(), what, text, None), none);
    let few = ["one row at a time", "chunks of 64", "packed with 3"];
    let found = differing(unrecorded(), what, text, Some(&few));
    assert_eq!(found, none, "without recordings");
    let found = differing(Plain::new(device()), what, text, Some(&few));
    assert_eq!(found, none, "fused operations");
    // The kernels follow the CPU backend in every operation, so its logits are the same bits; but attention over pages of
    // f16 has an order of its own, and what it changes in the last place moves some roundings of activations.
    let on_cpu = Lab::new(cpu(Isa::detect(), 2), file, kv).in_chunks(tokens, 512);
    match kv {
        KvType::F32 => assert_eq!(
            first_difference(&expected, &on_cpu),
            None,
            "against the CPU"
        ),
        KvType::F16 => assert_near(&expected, &on_cpu, 0.12, "against the CPU"),
    }
}

/// Relative RMS of the difference.
#[track_caller]
fn assert_near(found: &[Vec<f32>], expected: &[Vec<f32>], bound: f64, what: &str) {
    let (max, rms) = distance(&found.concat(), &expected.concat());
    println!("{what}: largest difference {max:.2e}, relative RMS {rms:.2e}");
    assert!(rms <= bound, "{what}: relative RMS {rms:.2e}");
}

#[test]
fn nano_glimmer() {
    let file = open(&bundled("nano-glimmer-q8_0.gguf"));
    check(&file, KvType::F16, &text());
    check(&file, KvType::F32, &text());
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

/// One row at a time is replayed, but for the first two passes of each shape.
#[test]
fn passes_are_replayed() {
    let file = open(&bundled("nano-glimmer-q8_0.gguf"));
    let mut lab = Lab::new(device(), &file, KvType::F16);
    lab.in_chunks(&text()[..100], 1);
    assert_eq!(lab.model.backend_mut().n_replayed(), 98);
    let mut lab = Lab::new(unrecorded(), &file, KvType::F16);
    lab.in_chunks(&text()[..100], 1);
    assert_eq!(lab.model.backend_mut().n_replayed(), 0);
}

/// 1,000 rows one at a time, twice.
#[test]
fn runs_are_repeatable() {
    let file = open(&bundled("nano-glimmer-q8_0.gguf"));
    let tokens: Vec<u32> = text().into_iter().cycle().take(1000).collect();
    let run = || Lab::new(device(), &file, KvType::F16).in_chunks(&tokens, 1);
    assert_eq!(first_difference(&run(), &run()), None);
}

#[test]
fn drafts_do_not_depend_on_the_route() {
    let files = (
        &open(&testdata("oracle/text-nano-f32.gguf")),
        &open(&testdata("oracle/dflash-nano-f32.gguf")),
    );
    let (logits, drafts) = with_drafter(device(), files, 512);
    let without = Lab::new(device(), files.0, KvType::F16).in_chunks(&made_up(300), 512);
    assert_eq!(
        first_difference(&logits, &without),
        None,
        "beside a drafter"
    );
    for chunk in [7, 64, 100] {
        let (found, again) = with_drafter(device(), files, chunk);
        assert_eq!(
            first_difference(&found, &logits),
            None,
            "logits: chunks of {chunk}"
        );
        assert_eq!(
            first_difference(&again, &drafts),
            None,
            "drafts: chunks of {chunk}"
        );
    }
    let (found, again) = with_drafter(cpu(Isa::Scalar, 2), files, 64);
    assert_near(&logits, &found, 1e-3, "logits against the CPU");
    assert_near(&drafts, &again, 1e-3, "drafts against the CPU");
}

/// Both sides of the positions where segments end or become longer, on both routes.
#[test]
fn long_contexts() {
    for ty in [KvType::F16, KvType::F32] {
        let mut on_cpu = Bench::new(cpu(Isa::detect(), 2), ty, |i| i);
        let mut bench = Bench::new(device(), ty, |i| (i * 31 + 17) % 74);
        for window in WINDOWS {
            let mut first_found = HashMap::new();
            for (before, after) in [(0, 0), (6, 2), (30, 9), (300, 20)] {
                for pos in POSITIONS {
                    let first = pos.saturating_sub(before);
                    let rows: Vec<u32> = (first..=pos + after).collect();
                    let expected = on_cpu.attend(&rows, window);
                    let found = bench.attend(&rows, window);
                    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let what =
                            format!("row {} of {} rows, window {window:?}", rows[i], rows.len());
                        let first = first_found.entry(rows[i]).or_insert_with(|| bits(found));
                        assert!(bits(found) == *first, "{what}, against another route");
                        match ty {
                            KvType::F32 => assert!(bits(found) == bits(expected), "{what}"),
                            KvType::F16 => {
                                let (max, rms) = distance(found, expected);
                                assert!(rms <= 1e-5, "{what}: {max:.2e}, {rms:.2e}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn near_the_oracle_with_f32_activations() {
    for kind in ["f32", "f16"] {
        check_golden(device(), ("nano", kind), 2e-3, 3e-5);
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
        check_golden(device(), (name, kind), f64::INFINITY, 0.12);
    }
}
