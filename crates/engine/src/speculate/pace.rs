//! How far to draft: a small model of what a round gives and what it costs.
//!
//! A round computes the newest token and `n` drafted ones in one pass. If each
//! is accepted with probability `a` once those before it are, it gives
//! `1 + a + ... + a^n` tokens (Leviathan et al., 2023, arXiv:2211.17192). What it
//! costs is measured. Everything here is a function of numbers; nothing here can
//! change a token. What a reader would get wrong: costs come in as lower bounds
//! where nothing was measured, so that every length is tried before it is given up.

/// Weight that a round leaves to the one before: some ten rounds count.
const FADE: f64 = 0.9;
/// Drafted tokens that a first guess stands for: a round or two outweigh it.
const PRIOR_TOKENS: f64 = 4.0;
/// Drafting must promise more tokens a second by this factor. Below it, clocks
/// decide more than drafts do.
const LEAST_GAIN: f64 = 1.02;
/// Tokens without drafts after a loss; doubled with each further one.
const SHORTEST_COOL_DOWN: usize = 32;
/// At one trial in so many tokens, trials that always fail cost less than 1 %.
const LONGEST_COOL_DOWN: usize = 512;
/// Tokens of a trial's draft.
const TRIAL_TOKENS: usize = 3;

/// How often drafted tokens are accepted, given that those before them are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Acceptance {
    accepted: f64,
    tried: f64,
}

impl Acceptance {
    /// A first guess, from 0 to 1.
    pub fn guess(rate: f64) -> Acceptance {
        Acceptance {
            accepted: rate * PRIOR_TOKENS,
            tried: PRIOR_TOKENS,
        }
    }

    /// Takes a round's outcome. Tokens behind the first wrong one say nothing.
    pub fn observe(&mut self, n_drafted: usize, n_accepted: usize) {
        let n_tried = n_drafted.min(n_accepted + 1);
        self.accepted = self.accepted * FADE + n_accepted as f64;
        self.tried = self.tried * FADE + n_tried as f64;
    }

    /// The rate, from 0 to 1.
    pub fn rate(&self) -> f64 {
        self.accepted / self.tried
    }
}

/// A sequence whose draft may have any length up to `most`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drafting {
    /// How often its drafted tokens are accepted.
    pub rate: f64,
    /// Tokens of its draft at most.
    pub most: usize,
}

/// Draft lengths that promise most tokens a second for all sequences together;
/// 0 for all if drafting promises no gain.
///
/// `n_others` rows are in the pass beside one for each of `sequences`.
/// `pass_seconds` is the time of a pass by rows; `draft_seconds` that of
/// drafting, by number of sequences and of their drafted tokens.
pub fn draft_lengths(
    sequences: &[Drafting],
    n_others: usize,
    pass_seconds: impl Fn(usize) -> f64,
    draft_seconds: impl Fn(usize, usize) -> f64,
) -> Vec<usize> {
    // What each further token of each draft adds: falls along a draft.
    let mut gains: Vec<(f64, usize)> = Vec::new();
    for (index, sequence) in sequences.iter().enumerate() {
        let mut gain = 1.0;
        gains.extend((0..sequence.most).map(|_| {
            gain *= sequence.rate;
            (gain, index)
        }));
    }
    gains.sort_by(|a, b| b.0.total_cmp(&a.0));
    let n_rows = sequences.len() + n_others;
    let mut n_tokens = n_rows as f64;
    let mut best = LEAST_GAIN * n_tokens / pass_seconds(n_rows);
    let (mut lengths, mut n_drafting) = (vec![0; sequences.len()], 0);
    let mut best_lengths = lengths.clone();
    for (n_drafted, (gain, index)) in (1..).zip(gains) {
        n_drafting += usize::from(lengths[index] == 0);
        lengths[index] += 1;
        n_tokens += gain;
        let seconds = pass_seconds(n_rows + n_drafted) + draft_seconds(n_drafting, n_drafted);
        let rate = n_tokens / seconds;
        if rate > best {
            best = rate;
            best_lengths.clone_from(&lengths);
        }
    }
    best_lengths
}

/// May a sequence draft in this pass?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// As much as pays.
    Open,
    /// So many tokens, to see whether it pays again.
    Trial(usize),
    /// No.
    Closed,
}

/// Acceptance and gate of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    acceptance: Acceptance,
    /// Generated tokens at which a closed gate is tried again.
    closed_until: Option<usize>,
    cool_down: usize,
}

impl Pace {
    /// The pace of a new sequence, where others had `acceptance`.
    pub fn new(acceptance: &Acceptance) -> Pace {
        Pace {
            acceptance: Acceptance::guess(acceptance.rate()),
            closed_until: None,
            cool_down: SHORTEST_COOL_DOWN,
        }
    }

    /// How often its drafted tokens are accepted.
    pub fn rate(&self) -> f64 {
        self.acceptance.rate()
    }

    /// What it may do after `n_generated` tokens. A trial is given once.
    pub fn turn(&mut self, n_generated: usize) -> Turn {
        match self.closed_until {
            None => Turn::Open,
            Some(until) if n_generated < until => Turn::Closed,
            Some(_) => {
                self.closed_until = None;
                Turn::Trial(TRIAL_TOKENS)
            }
        }
    }

    /// With an open gate, after `n_generated` tokens, a draft of `length` is what
    /// pays.
    pub fn decided(&mut self, n_generated: usize, length: usize) {
        if length > 0 {
            self.cool_down = SHORTEST_COOL_DOWN;
            return;
        }
        self.closed_until = Some(n_generated + self.cool_down);
        self.cool_down = LONGEST_COOL_DOWN.min(2 * self.cool_down);
    }

    /// Takes a round's outcome.
    pub fn observe(&mut self, n_drafted: usize, n_accepted: usize) {
        self.acceptance.observe(n_drafted, n_accepted);
    }
}
