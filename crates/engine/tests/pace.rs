//! How far to draft: the model of a round's gain and cost, and the gate.

use engine::{Acceptance, CostModel, Drafting, Pace, Turn, draft_lengths, looked_up};
use proptest::prelude::*;
use std::time::Duration;

#[test]
fn acceptance_follows_what_it_sees() {
    let mut acceptance = Acceptance::guess(0.5);
    assert_eq!(acceptance.rate(), 0.5);
    // Four of five are right: three of fifteen drafted tokens say nothing.
    for _ in 0..200 {
        acceptance.observe(15, 4);
    }
    assert!((acceptance.rate() - 0.8).abs() < 1e-3, "{acceptance:?}");
    for _ in 0..200 {
        acceptance.observe(3, 3);
    }
    assert!(acceptance.rate() > 0.999, "{acceptance:?}");
    for _ in 0..20 {
        acceptance.observe(3, 0);
    }
    // Twenty rounds outweigh two hundred older ones.
    assert!(acceptance.rate() < 0.4, "{acceptance:?}");
}

/// Tokens a second of a choice of lengths.
fn speed(
    sequences: &[Drafting],
    lengths: &[usize],
    n_others: usize,
    pass_seconds: impl Fn(usize) -> f64,
    draft_seconds: impl Fn(usize, usize) -> f64,
) -> f64 {
    let expected =
        |(s, &n): (&Drafting, &usize)| -> f64 { (0..=n).map(|k| s.rate.powi(k as i32)).sum() };
    let tokens: f64 = sequences.iter().zip(lengths).map(expected).sum();
    let n_drafted: usize = lengths.iter().sum();
    let n_drafting = lengths.iter().filter(|&&n| n > 0).count();
    let pass = pass_seconds(sequences.len() + n_others + n_drafted);
    let draft = match n_drafting {
        0 => 0.0,
        _ => draft_seconds(n_drafting, n_drafted),
    };
    (tokens + n_others as f64) / (pass + draft)
}

#[test]
fn nothing_is_drafted_where_it_does_not_pay() {
    let one = |rate| [Drafting { rate, most: 15 }];
    let free = |_: usize, _: usize| 0.0;
    // A pass of twice the rows takes twice as long.
    assert_eq!(draft_lengths(&one(0.9), 0, |n| n as f64, free), [0]);
    // Rows cost nothing.
    assert_eq!(draft_lengths(&one(0.1), 0, |_| 1.0, free), [15]);
    assert_eq!(draft_lengths(&one(0.0), 0, |_| 1.0, free), [0]);
    // The draft takes as long as the pass.
    assert_eq!(draft_lengths(&one(0.4), 0, |_| 1.0, |_, _| 1.0), [0]);
    assert_eq!(draft_lengths(&one(0.9), 0, |_| 1.0, |_, _| 1.0), [15]);
    assert_eq!(draft_lengths(&[], 3, |_| 1.0, free), [0; 0]);
}

#[test]
fn rows_go_to_the_sequence_that_makes_most_of_them() {
    let sequences = [0.9, 0.2, 0.6].map(|rate| Drafting { rate, most: 7 });
    // Eight rows cost what one costs, the ninth is dear.
    let pass = |n: usize| if n <= 8 { 1.0 } else { 10.0 };
    let lengths = draft_lengths(&sequences, 0, pass, |_, _| 0.0);
    // 0.9 0.81 0.73 0.66 and 0.6; the next would be 0.59.
    assert_eq!(lengths, [4, 0, 1]);
}

proptest! {
    /// The choice is the best there is, up to the margin that clocks are given.
    #[test]
    fn lengths_are_the_best(
        rates in proptest::collection::vec(0.0f64..1.0, 1..3),
        most in 0usize..6,
        n_others in 0usize..4,
        base in 1.0f64..50.0,
        row in 0.1f64..10.0,
        draft in 0.0f64..20.0,
    ) {
        let sequences: Vec<Drafting> =
            rates.iter().map(|&rate| Drafting { rate, most }).collect();
        let pass = |n: usize| base + row * model::padded(n) as f64;
        let drafting = |n_sequences: usize, n_tokens: usize| {
            draft + 0.1 * (n_sequences + n_tokens) as f64
        };
        let found = draft_lengths(&sequences, n_others, pass, drafting);
        prop_assert!(found.iter().all(|&n| n <= most));
        let speed = |lengths: &[usize]| {
            speed(&sequences, lengths, n_others, pass, drafting)
        };
        let n_choices = (most + 1).pow(sequences.len() as u32);
        let choice = |i: usize| -> Vec<usize> {
            (0..sequences.len() as u32).map(|k| i / (most + 1).pow(k) % (most + 1)).collect()
        };
        let best = (0..n_choices).map(|i| speed(&choice(i))).fold(0.0, f64::max);
        prop_assert!(speed(&found) * 1.02 >= best * (1.0 - 1e-9), "{found:?}");
    }
}

#[test]
fn a_closed_gate_opens_for_a_trial_ever_more_seldom() {
    let mut pace = Pace::new(&Acceptance::guess(0.7));
    assert_eq!(pace.turn(1), Turn::Open);
    let (mut n, mut rests) = (1, Vec::new());
    for _ in 0..7 {
        pace.decided(n, 0);
        let closed_at = n;
        while pace.turn(n) == Turn::Closed {
            n += 1;
        }
        rests.push(n - closed_at);
        // The trial was given; the next look decides.
        assert_eq!(pace.turn(n + 1), Turn::Open);
        n += 1;
    }
    assert_eq!(rests, [32, 64, 128, 256, 512, 512, 512]);
    // A draft that pays makes the next rest short again.
    pace.decided(n, 4);
    assert_eq!(pace.turn(n), Turn::Open);
    pace.decided(n, 0);
    assert_eq!(pace.turn(n + 31), Turn::Closed);
    assert_eq!(pace.turn(n + 32), Turn::Trial(3));
}

#[test]
fn a_new_sequence_expects_what_others_had_and_soon_knows_better() {
    let mut others = Acceptance::guess(0.7);
    (0..100).for_each(|_| others.observe(4, 0));
    let mut pace = Pace::new(&others);
    assert!(pace.rate() < 0.05);
    pace.observe(4, 4);
    pace.observe(4, 4);
    assert!(pace.rate() > 0.6);
}

/// A shape that was measured once may have been prepared in that pass.
#[test]
fn costs_are_lower_bounds_until_they_are_measured() {
    let ms = Duration::from_millis;
    let mut cost = CostModel::new();
    assert_eq!(cost.at_least(16), Duration::ZERO);
    cost.measured(1, ms(500));
    assert_eq!(cost.at_least(1), Duration::ZERO);
    cost.measured(1, ms(10));
    assert_eq!(cost.at_least(1), ms(10));
    assert_eq!(cost.at_least(16), ms(10));
    cost.measured(16, ms(900));
    assert_eq!(cost.at_least(16), ms(10));
    cost.measured(16, ms(30));
    assert_eq!(cost.at_least(16), ms(30));
    assert_eq!(cost.at_least(9), ms(30));
    assert_eq!(cost.at_least(8), ms(10));
    assert_eq!(cost.at_least(100), ms(30));
}

#[test]
fn lookup_proposes_what_followed_the_longest_match() {
    // The newest of two equal matches.
    assert_eq!(looked_up(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2), [4, 8]);
    // A longer one, though it is older.
    assert_eq!(looked_up(&[7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 3), [3, 9, 1]);
    // One token is no match, and nothing matches before the first token.
    assert_eq!(looked_up(&[1, 2, 3, 4, 1], 3), [0u32; 0]);
    assert_eq!(looked_up(&[], 3), [0u32; 0]);
    assert_eq!(looked_up(&[5], 3), [0u32; 0]);
    // A text that repeats itself goes on repeating.
    assert_eq!(looked_up(&[1, 2, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
    assert_eq!(looked_up(&[4, 4, 4], 4), [4, 4, 4, 4]);
}
