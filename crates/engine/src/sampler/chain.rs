//! The stages between the changed logits and the token.
//!
//! The candidates stand in descending order, so top-k, top-p and min-p shorten a
//! window at its end and XTC at its start; only locally typical sampling picks
//! from the middle and makes a new, shorter pool. Every stage measures the
//! softmax of the candidates that the stage before it left, at temperature 1.
//! What a reader would get wrong: the temperature comes last, so it moves the
//! draw but never which candidates survive.

use super::draw::{Stream, draw};
use super::mass::{UNIT, exp_not_positive, ln_mass, weight};
use super::pool::Pool;
use super::{Sampled, SamplerSettings};
use std::ops::Range;

/// Top-n-sigma (arXiv 2411.07641): forbids every logit below the highest minus
/// `n_sigma` standard deviations (of the population of candidates).
///
/// At least `keep` candidates stay: the threshold then moves down.
pub(super) fn cut_sigma(pool: &mut Pool, n_sigma: f32, keep: usize) {
    let len = pool.len();
    let candidates = || pool.row.iter().filter(|&&l| l > f32::NEG_INFINITY);
    let count = len as f64;
    let mean = candidates().map(|&l| f64::from(l)).sum::<f64>() / count;
    let squares = candidates().map(|&l| (f64::from(l) - mean) * (f64::from(l) - mean));
    let sigma = (squares.sum::<f64>() / count).sqrt();
    let (_, highest) = pool.first();
    let mut threshold = f64::from(highest) - f64::from(n_sigma) * sigma;
    if keep > 1 {
        let (_, kept) = pool.at(keep.min(len) - 1);
        threshold = threshold.min(f64::from(kept));
    }
    for logit in &mut pool.row {
        if f64::from(*logit) < threshold {
            *logit = f32::NEG_INFINITY;
        }
    }
    pool.open_row();
}

/// Top-k to the draw, on a pool with at least one candidate.
pub(super) fn choose(pool: &mut Pool, settings: &SamplerSettings, position: u64) -> Sampled {
    let keep = settings.min_keep.max(1) as usize;
    let mut window = 0..pool.len();
    if let Some(limit) = settings.top_limit() {
        window.end = window.end.min(limit as usize);
        // Sorts the whole window, so that no mass below needs the row.
        pool.at(window.end - 1);
    }
    if settings.typical_p < 1.0 {
        keep_typical(pool, window, settings.typical_p, keep);
        window = 0..pool.len();
    }
    if settings.top_p < 1.0 {
        window = cut_top_p(pool, window, settings.top_p, keep);
    }
    if settings.min_p > 0.0 {
        window = cut_min_p(pool, window, settings.min_p, keep);
    }
    let acts = settings.xtc_probability > 0.0
        && draw(settings.seed, position, Stream::Xtc) < f64::from(settings.xtc_probability);
    if acts {
        window = cut_top_choices(pool, window, settings.xtc_threshold, keep);
    }
    let temperature = final_temperature(pool, &window, settings);
    pick(
        pool,
        window,
        temperature,
        draw(settings.seed, position, Stream::Token),
    )
}

/// Top-p, nucleus sampling (Holtzman et al., arXiv 1904.09751): the shortest
/// start of the window with at least `top_p` of its mass.
fn cut_top_p(pool: &mut Pool, window: Range<usize>, top_p: f32, keep: usize) -> Range<usize> {
    let wanted = f64::from(top_p) * pool.mass(window.clone(), 1.0) as f64;
    let (_, base) = pool.at(window.start);
    let mut mass = 0u128;
    for i in window.clone() {
        mass += u128::from(weight(pool.at(i).1, base, 1.0));
        if mass as f64 >= wanted && i + 1 - window.start >= keep {
            return window.start..i + 1;
        }
    }
    window
}

/// Min-p (arXiv 2407.01082): what has at least `min_p` times the highest probability.
fn cut_min_p(pool: &mut Pool, window: Range<usize>, min_p: f32, keep: usize) -> Range<usize> {
    let (_, base) = pool.at(window.start);
    let threshold = f64::from(base) + libm::log(f64::from(min_p));
    for i in window.start + keep..window.end {
        if f64::from(pool.at(i).1) < threshold {
            return window.start..i;
        }
    }
    window
}

/// XTC, exclude top choices (text-generation-webui pull request 6335): drops all
/// but the least likely of the candidates with a probability of `threshold` or
/// more. Does nothing where fewer than `keep` would be left.
fn cut_top_choices(
    pool: &mut Pool,
    window: Range<usize>,
    threshold: f32,
    keep: usize,
) -> Range<usize> {
    let wanted = f64::from(threshold) * pool.mass(window.clone(), 1.0) as f64;
    let (_, base) = pool.at(window.start);
    let mut start = window.start;
    for i in window.clone() {
        if (weight(pool.at(i).1, base, 1.0) as f64) < wanted {
            break;
        }
        start = i;
    }
    if window.end - start < keep {
        return window;
    }
    start..window.end
}

/// Locally typical sampling (Meister et al., arXiv 2202.00666): of the
/// candidates by distance between surprisal `-ln p` and entropy, ties to the more
/// likely one, the fewest with at least `typical_p` of the mass.
fn keep_typical(pool: &mut Pool, window: Range<usize>, typical_p: f32, keep: usize) {
    let (mass, entropy) = entropy(pool, &window);
    let ln_mass = ln_mass(mass);
    let (_, base) = pool.at(window.start);
    let mut by_distance: Vec<(f64, usize)> = window
        .map(|i| {
            let surprisal = ln_mass - (f64::from(pool.at(i).1) - f64::from(base));
            ((surprisal - entropy).abs(), i)
        })
        .collect();
    by_distance.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let wanted = f64::from(typical_p) * mass as f64;
    let mut kept_mass = 0u128;
    let mut kept = Vec::new();
    for (_, i) in by_distance {
        let (token, logit) = pool.at(i);
        kept.push((token, logit));
        kept_mass += u128::from(weight(logit, base, 1.0));
        if kept_mass as f64 >= wanted && kept.len() >= keep {
            break;
        }
    }
    pool.open_list(kept.into_iter());
}

/// Mass and entropy (in nats) of the window's softmax, summed in order.
fn entropy(pool: &mut Pool, window: &Range<usize>) -> (u128, f64) {
    // Looking at the last one sorts them all: the sum below must have one order.
    pool.at(window.end - 1);
    let mass = pool.mass(window.clone(), 1.0);
    let (_, base) = pool.at(window.start);
    // H = ln Z - sum of p (l - base), with Z the mass and p = w / Z.
    let mut mean = 0.0;
    for i in window.clone() {
        let x = f64::from(pool.at(i).1) - f64::from(base);
        mean += exp_not_positive(x) * x;
    }
    (mass, ln_mass(mass) - mean * UNIT / mass as f64)
}

/// The temperature of the draw; 0 where the dynamic one reaches it.
///
/// Dynamic temperature (text of KoboldCpp pull request 600): from `temperature -
/// range`, but not below 0, to `temperature + range`, by a power of the entropy
/// over the highest entropy that so many candidates can have.
fn final_temperature(pool: &mut Pool, window: &Range<usize>, settings: &SamplerSettings) -> f64 {
    let temperature = f64::from(settings.temperature);
    let range = f64::from(settings.dynatemp_range);
    if range == 0.0 || window.len() < 2 {
        return temperature;
    }
    let (_, entropy) = entropy(pool, window);
    let share = (entropy / libm::log(window.len() as f64)).clamp(0.0, 1.0);
    let lowest = (temperature - range).max(0.0);
    let highest = temperature + range;
    lowest + (highest - lowest) * libm::pow(share, f64::from(settings.dynatemp_exponent))
}

/// The candidate in whose part of the window's mass the number `u` in `[0, 1)` falls.
fn pick(pool: &mut Pool, window: Range<usize>, temperature: f64, u: f64) -> Sampled {
    let (token, base) = pool.at(window.start);
    let n_candidates = window.len();
    let certain = Sampled {
        token,
        probability: 1.0,
        n_candidates,
    };
    if temperature <= 0.0 || n_candidates == 1 {
        return certain;
    }
    let total = pool.mass(window.clone(), temperature);
    // Below the total, whatever the conversion to f64 rounded.
    let target = ((u * total as f64) as u128).min(total - 1);
    let mut mass = 0u128;
    for i in window {
        let (token, logit) = pool.at(i);
        let weight = u128::from(weight(logit, base, temperature));
        mass += weight;
        if mass > target {
            return Sampled {
                token,
                probability: weight as f64 / total as f64,
                n_candidates,
            };
        }
    }
    unreachable!("the weights of a window add up to its mass")
}
