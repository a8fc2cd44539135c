//! The sampler chain against plain restatements of its stages, on random input.

use engine::{RowsNeeded, Sampled, Sampler, SamplerSettings};
use model::TokenMask;
use proptest::prelude::*;

const N_VOCAB: usize = 40;

fn sampler(settings: &SamplerSettings, n_vocab: usize) -> Sampler {
    Sampler::new(settings.clone(), n_vocab).unwrap()
}

/// Token ids by logit descending, ties to the lower id, forbidden ones left out.
fn descending(logits: &[f32]) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..logits.len() as u32)
        .filter(|&t| logits[t as usize] > f32::NEG_INFINITY)
        .collect();
    tokens.sort_by(|&a, &b| {
        let (a, b) = (logits[a as usize], logits[b as usize]);
        b.partial_cmp(&a).unwrap()
    });
    tokens
}

/// Logits from a coarse grid, so that ties, zeros of both signs and forbidden tokens are common.
fn coarse_logits(n_vocab: usize) -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        8 => (-12i32..=12).prop_map(|i| i as f32 * 0.5),
        1 => Just(-0.0f32),
        1 => Just(f32::NEG_INFINITY),
    ];
    prop::collection::vec(logit, n_vocab).prop_map(|mut logits| {
        logits[0] = logits[0].max(-6.0);
        logits
    })
}

fn fine_logits() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-8.0f32..8.0, N_VOCAB)
}

/// Settings of all stages that look at candidates only.
fn cuts() -> impl Strategy<Value = SamplerSettings> {
    let sizes = (0u32..20, 0u32..6, any::<u64>());
    let ends = (
        prop_oneof![Just(1.0f32), 0.0f32..1.0],
        prop_oneof![Just(0.0f32), 0.0f32..0.5],
        prop_oneof![Just(1.0f32), 0.1f32..1.0],
    );
    let rest = (
        prop_oneof![Just(0.0f32), 0.0f32..1.0],
        0.01f32..0.4,
        0.2f32..3.0,
        prop_oneof![Just(0.0f32), 0.0f32..2.0],
    );
    (sizes, ends, rest).prop_map(
        |((top_k, min_keep, seed), (top_p, min_p, typical_p), (xtc, threshold, temp, range))| {
            SamplerSettings {
                top_k,
                min_keep,
                seed,
                top_p,
                min_p,
                typical_p,
                xtc_probability: xtc,
                xtc_threshold: threshold,
                temperature: temp,
                dynatemp_range: range,
                ..SamplerSettings::default()
            }
        },
    )
}

/// Probabilities of `tokens` among themselves.
fn probabilities(logits: &[f32], tokens: &[u32], temperature: f64) -> Vec<f64> {
    let weight = |t: &u32| (f64::from(logits[*t as usize]) / temperature).exp();
    let sum: f64 = tokens.iter().map(weight).sum();
    tokens.iter().map(|t| weight(t) / sum).collect()
}

/// The chain from top-k to XTC, stage by stage from its documentation.
fn plain_chain(logits: &[f32], settings: &SamplerSettings, xtc_acts: bool) -> Vec<u32> {
    let keep = settings.min_keep.max(1) as usize;
    let mut tokens = descending(logits);
    if settings.top_k > 0 {
        tokens.truncate(settings.top_k.max(settings.min_keep) as usize);
    }
    if settings.typical_p < 1.0 {
        let p = probabilities(logits, &tokens, 1.0);
        let entropy: f64 = p.iter().map(|p| -p * p.ln()).sum();
        let mut order: Vec<usize> = (0..p.len()).collect();
        let distance = |i: usize| (-p[i].ln() - entropy).abs();
        order.sort_by(|&a, &b| distance(a).total_cmp(&distance(b)));
        let mut mass = 0.0;
        let mut kept = Vec::new();
        for i in order {
            kept.push(i);
            mass += p[i];
            if mass >= f64::from(settings.typical_p) && kept.len() >= keep {
                break;
            }
        }
        kept.sort_unstable();
        tokens = kept.into_iter().map(|i| tokens[i]).collect();
    }
    if settings.top_p < 1.0 {
        let p = probabilities(logits, &tokens, 1.0);
        let mut mass = 0.0;
        let reaches = |p: &f64| {
            mass += p;
            mass >= f64::from(settings.top_p)
        };
        let last = p.iter().position(reaches).unwrap_or(p.len() - 1);
        tokens.truncate((last + 1).max(keep));
    }
    if settings.min_p > 0.0 {
        let p = probabilities(logits, &tokens, 1.0);
        let n = p.iter().filter(|&&q| q >= f64::from(settings.min_p) * p[0]);
        tokens.truncate(n.count().max(keep));
    }
    if xtc_acts {
        let p = probabilities(logits, &tokens, 1.0);
        let n = p
            .iter()
            .filter(|&&q| q >= f64::from(settings.xtc_threshold));
        let gone = n.count().saturating_sub(1);
        if tokens.len() - gone >= keep {
            tokens.drain(..gone);
        }
    }
    tokens
}

/// For each token that occurs, what DRY takes away; by comparing all pairs of places.
fn plain_dry(history: &[u32], settings: &SamplerSettings) -> Vec<f64> {
    let mut taken = vec![0.0f64; N_VOCAB];
    let window = match settings.dry_penalty_last_n {
        -1 => history,
        n => &history[history.len() - history.len().min(n as usize)..],
    };
    let ends_in_breaker = |end: usize| {
        settings
            .dry_breakers
            .iter()
            .any(|b| window[..end].ends_with(b))
    };
    let end = window.len();
    for next in 1..end {
        let mut n = 0;
        while n < next && window[next - 1 - n] == window[end - 1 - n] && !ends_in_breaker(end - n) {
            n += 1;
        }
        let is_breaker = settings.dry_breakers.contains(&vec![window[next]]);
        if n >= settings.dry_allowed_length as usize && !is_breaker {
            let power = n as i32 - settings.dry_allowed_length as i32;
            let amount =
                f64::from(settings.dry_multiplier) * f64::from(settings.dry_base).powi(power);
            let known = &mut taken[window[next] as usize];
            *known = known.max(amount);
        }
    }
    taken
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_chain_equals_its_stages(logits in fine_logits(), settings in cuts()) {
        let settings = SamplerSettings {
            xtc_probability: settings.xtc_probability.round(),
            dynatemp_range: 0.0,
            ..settings
        };
        let kept = plain_chain(&logits, &settings, settings.xtc_probability == 1.0);
        let p = probabilities(&logits, &kept, f64::from(settings.temperature));
        let mut sampler = sampler(&settings, N_VOCAB);
        for position in 0..50 {
            let sampled = sampler.sample(&logits, position, &[], None).unwrap();
            prop_assert_eq!(sampled.n_candidates, kept.len());
            let place = kept.iter().position(|&t| t == sampled.token);
            prop_assert!(place.is_some(), "{} did not survive", sampled.token);
            prop_assert!((p[place.unwrap()] - sampled.probability).abs() < 1e-9);
        }
    }

    #[test]
    fn the_top_candidates_give_the_token_of_the_full_row(
        logits in coarse_logits(N_VOCAB),
        settings in cuts(),
        extra in 0u32..2,
    ) {
        let settings = SamplerSettings { top_k: settings.top_k + extra, ..settings };
        let full = |position| -> Sampled {
            sampler(&settings, N_VOCAB).sample(&logits, position, &[], None).unwrap()
        };
        // Forbidden tokens fill up the list, as they do on a device.
        let mut order = descending(&logits);
        let forbidden = (0..N_VOCAB as u32).filter(|&t| logits[t as usize] == f32::NEG_INFINITY);
        order.extend(forbidden);
        let top = |k: u32| -> Vec<(u32, f32)> {
            order.iter().take(k as usize).map(|&t| (t, logits[t as usize])).collect()
        };
        match settings.rows_needed(None) {
            RowsNeeded::Full => prop_assert_eq!(settings.top_k, 0),
            RowsNeeded::Argmax => {
                for position in 0..20 {
                    prop_assert_eq!(full(position).token, order[0]);
                }
            }
            RowsNeeded::TopK(k) => {
                let mut from_top = sampler(&settings, N_VOCAB);
                let mut candidates = top(k);
                for position in 0..20 {
                    let sampled = from_top.sample_top(&candidates, position).unwrap();
                    prop_assert_eq!(sampled, full(position));
                    candidates.rotate_left(1);
                }
            }
        }
    }

    #[test]
    fn a_sampler_has_no_memory(
        rows in prop::collection::vec(coarse_logits(N_VOCAB), 4),
        history in prop::collection::vec(0u32..6, 0..30),
        settings in cuts(),
    ) {
        let settings = SamplerSettings {
            repeat_penalty: 1.2,
            dry_multiplier: 0.5,
            top_n_sigma: 2.0,
            ..settings
        };
        let alone = |i: usize| {
            sampler(&settings, N_VOCAB).sample(&rows[i], i as u64, &history[i.min(history.len())..], None)
        };
        let mut shared = sampler(&settings, N_VOCAB);
        for i in [0, 1, 2, 3, 2, 0, 3, 1] {
            let seen = &history[i.min(history.len())..];
            let together = shared.sample(&rows[i], i as u64, seen, None);
            prop_assert_eq!(together, alone(i));
        }
    }

    #[test]
    fn greedy_is_the_first_of_the_highest(logits in coarse_logits(N_VOCAB), seed in any::<u64>()) {
        let greedy = SamplerSettings { temperature: 0.0, seed, ..SamplerSettings::default() };
        let top_1 = SamplerSettings { top_k: 1, seed, ..SamplerSettings::default() };
        let first = descending(&logits)[0];
        for settings in [greedy, top_1] {
            let sampled = sampler(&settings, N_VOCAB).sample(&logits, seed, &[], None).unwrap();
            prop_assert_eq!(sampled, Sampled { token: first, probability: 1.0, n_candidates: 1 });
        }
    }

    #[test]
    fn only_allowed_tokens_are_sampled(
        logits in coarse_logits(N_VOCAB),
        allowed in prop::collection::btree_set(0u32..N_VOCAB as u32, 0..6),
        settings in cuts(),
    ) {
        let mut mask = TokenMask::none(N_VOCAB);
        mask.allow(0);
        allowed.iter().for_each(|&token| mask.allow(token));
        let settings = SamplerSettings { top_n_sigma: 1.0, ..settings };
        let mut sampler = sampler(&settings, N_VOCAB);
        for position in 0..20 {
            let sampled = sampler.sample(&logits, position, &[], Some(&mask)).unwrap();
            prop_assert!(mask.is_allowed(sampled.token));
            prop_assert!(logits[sampled.token as usize] > f32::NEG_INFINITY);
        }
    }

    #[test]
    fn dry_equals_the_comparison_of_all_places(
        history in prop::collection::vec(0u32..3, 0..40),
        allowed in 0u32..4,
        window in prop_oneof![Just(-1i32), 1..40i32],
        breakers in prop::collection::vec(prop::collection::vec(0u32..4, 1..4), 0..3),
    ) {
        let settings = SamplerSettings {
            dry_multiplier: 0.7,
            dry_base: 1.1,
            dry_allowed_length: allowed,
            dry_penalty_last_n: window,
            dry_breakers: breakers,
            ..SamplerSettings::default()
        };
        let taken = plain_dry(&history, &settings);
        let lowered: Vec<f64> = taken.iter().map(|t| (-t).exp()).collect();
        let sum: f64 = lowered.iter().sum();
        let mut sampler = sampler(&settings, N_VOCAB);
        for position in 0..40 {
            let sampled = sampler.sample(&[0.0; N_VOCAB], position, &history, None).unwrap();
            let expected = lowered[sampled.token as usize] / sum;
            prop_assert!((sampled.probability - expected).abs() < 1e-6);
        }
    }
}

/// Pearson's statistic of 100,000 draws stays below its 0.999 quantile.
#[test]
fn draws_are_distributed_as_the_softmax() {
    const DRAWS: u64 = 100_000;
    let logits: Vec<f32> = (0..10).map(|i| i as f32 * 0.3).collect();
    let tokens: Vec<u32> = (0..10).collect();
    for (seed, temperature) in [(1u64, 1.0f32), (2, 0.5), (u64::MAX, 3.0)] {
        let settings = SamplerSettings {
            seed,
            temperature,
            ..SamplerSettings::default()
        };
        let mut sampler = sampler(&settings, 10);
        let mut counts = [0u32; 10];
        for position in 0..DRAWS {
            let sampled = sampler.sample(&logits, position, &[], None).unwrap();
            counts[sampled.token as usize] += 1;
        }
        let expected = probabilities(&logits, &tokens, f64::from(temperature));
        let statistic: f64 = (counts.iter().zip(&expected))
            .map(|(&n, p)| {
                let wanted = p * DRAWS as f64;
                (f64::from(n) - wanted).powi(2) / wanted
            })
            .sum();
        // Nine degrees of freedom.
        assert!(statistic < 27.88, "seed {seed}: {statistic}");
    }
}

/// The same where stages leave only some tokens, by their probability there.
#[test]
fn draws_behind_stages_are_distributed_as_what_they_leave() {
    const DRAWS: u64 = 100_000;
    let logits: Vec<f32> = (0..10).map(|i| i as f32 * 0.3).collect();
    let base = SamplerSettings::default;
    #[rustfmt::skip]
    let cases: [(SamplerSettings, &[u32]); 4] = [
        (SamplerSettings { top_k: 4, ..base() }, &[6, 7, 8, 9]),
        (SamplerSettings { min_p: 0.2, ..base() }, &[4, 5, 6, 7, 8, 9]),
        (SamplerSettings { top_p: 0.6, ..base() }, &[7, 8, 9]),
        (SamplerSettings { xtc_probability: 1.0, xtc_threshold: 0.14, ..base() }, &[0, 1, 2, 3, 4, 5, 6, 7]),
    ];
    for (seed, (settings, left)) in (1..).zip(cases) {
        let settings = SamplerSettings {
            seed,
            temperature: 1.0,
            ..settings
        };
        let mut sampler = sampler(&settings, 10);
        let mut counts = [0u32; 10];
        for position in 0..DRAWS {
            let sampled = sampler.sample(&logits, position, &[], None).unwrap();
            counts[sampled.token as usize] += 1;
        }
        let expected = probabilities(&logits, left, 1.0);
        let drawn = (0..10).filter(|&i| counts[i] > 0).map(|i| i as u32);
        assert_eq!(drawn.collect::<Vec<_>>(), left, "{settings:?}");
        let statistic: f64 = (left.iter().zip(&expected))
            .map(|(&token, p)| {
                let wanted = p * DRAWS as f64;
                (f64::from(counts[token as usize]) - wanted).powi(2) / wanted
            })
            .sum();
        // Pearson's 0.999 quantile of nine degrees of freedom, more than there are.
        assert!(statistic < 27.88, "{settings:?}: {statistic}");
    }
}

/// On a row of real size only a prefix is sorted: it must not show.
#[test]
fn a_sorted_prefix_gives_what_the_sorted_row_gives() {
    const N_VOCAB: usize = 202_048;
    let peaked: Vec<f32> = (0..N_VOCAB as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1_048_576.0)
        .collect();
    // Few distinct values, so that ties cross every boundary of a prefix.
    let tied: Vec<f32> = peaked.iter().map(|l| (l * 0.5).floor()).collect();
    let flat = vec![0.25; N_VOCAB];
    let base = SamplerSettings::default;
    #[rustfmt::skip]
    let cases = [
        base(),
        SamplerSettings { temperature: 5.0, ..base() },
        SamplerSettings { top_p: 0.9, ..base() },
        SamplerSettings { top_p: 0.01, min_p: 0.5, ..base() },
        SamplerSettings { xtc_probability: 1.0, xtc_threshold: 1e-5, ..base() },
        SamplerSettings { xtc_probability: 0.5, xtc_threshold: 1e-4, top_p: 0.5, temperature: 0.7, ..base() },
    ];
    for row in [&peaked, &tied, &flat] {
        for settings in &cases {
            let mut lazy = sampler(settings, N_VOCAB);
            let sorted = SamplerSettings {
                top_k: N_VOCAB as u32,
                ..settings.clone()
            };
            let mut sorted = sampler(&sorted, N_VOCAB);
            for position in 0..3 {
                let expected = sorted.sample(row, position, &[], None).unwrap();
                let found = lazy.sample(row, position, &[], None).unwrap();
                assert_eq!(found, expected, "{settings:?}");
            }
        }
    }
}
