//! Speculative decoding: draft, verify, accept.
//!
//! A draft is a guess at the next tokens. One pass computes the newest token and
//! the drafted ones, as rows like any other. Then each row's output becomes a
//! token exactly as in plain decode, and the next row counts only if its token
//! is the one that was drafted. So nothing can change but speed, for every
//! setting of the sampler: a drafter that proposes its likeliest token is
//! accepted with the probability that rejection sampling would accept it with
//! (Leviathan et al., 2023, arXiv:2211.17192). What a reader would get wrong:
//! there is no roll-back. Rows that were not accepted were never a part of their
//! sequence.

mod pace;
mod source;

pub use pace::{Acceptance, Drafting, Pace, Turn, draft_lengths};
pub(crate) use source::Ask;
pub use source::{LONGEST_LOOKUP, looked_up};

use crate::Error;
use crate::choice::{checked, wanted};
use crate::cost::CostModel;
use crate::sampler::Sampler;
use model::{Constraint, DeviceError, Forward, Guide, RowOutput, Verdict, Want};
use source::{Dflash, DraftSource, NGram};
use std::time::{Duration, Instant};

/// Rounds after which drafts that are seldom right are given up for good.
pub const GIVE_UP_ROUNDS: u64 = 200;
/// Tokens that a round must give on average by then; 1 is what plain decode gives.
pub const GIVE_UP_TOKENS: f64 = 1.2;
/// First guess at how often a drafted token is accepted.
const FIRST_RATE: f64 = 0.7;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafts {
    /// From nowhere: one token a pass.
    #[default]
    Off,
    /// From the drafter that is attached to the model.
    Dflash,
    /// From earlier tokens of the sequence itself.
    NGram,
}

/// Settings of speculation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// Where drafts come from.
    pub drafts: Drafts,
    /// Tokens of a draft at least, where the answer may still be as long. With
    /// 0 lengths are what pays, and nothing is drafted where nothing pays.
    pub least: usize,
    /// Tokens of a draft at most; `None` for as many as the source can.
    pub most: Option<usize>,
}

/// What speculation runs with, for start lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpeculationInfo {
    /// The source of drafts in words.
    pub source: &'static str,
    /// Tokens of a draft at least.
    pub least: usize,
    /// Tokens of a draft at most.
    pub most: usize,
}

/// What speculation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpeculationCounts {
    /// Drafts that were verified.
    pub rounds: u64,
    /// Their tokens.
    pub drafted: u64,
    /// Of these: accepted.
    pub accepted: u64,
}

impl SpeculationCounts {
    /// Takes a round.
    pub(crate) fn add(&mut self, n_drafted: usize, n_accepted: usize) {
        self.rounds += 1;
        self.drafted += n_drafted as u64;
        self.accepted += n_accepted as u64;
    }

    /// Tokens that a round gave on average, the one behind the accepted ones
    /// included; 0 without a round.
    pub fn tokens_per_round(&self) -> f64 {
        match self.rounds {
            0 => 0.0,
            rounds => (self.accepted + rounds) as f64 / rounds as f64,
        }
    }
}

/// A sequence that may draft in the next pass.
pub(crate) struct Candidate<'a> {
    pub pace: &'a mut Pace,
    pub n_generated: usize,
    /// Tokens that its answer may still have, but one: the pass gives that anyway.
    pub most: usize,
}

/// Drafts and learns.
pub(crate) struct Speculator {
    source: Box<dyn DraftSource>,
    least: usize,
    most: usize,
    /// Of all sequences.
    acceptance: Acceptance,
    /// Of drafting passes by rows.
    cost: CostModel,
    counts: SpeculationCounts,
    /// Since rounds were last looked at.
    recent: SpeculationCounts,
    /// Why nothing is drafted any more.
    stopped: Option<String>,
}

impl Speculator {
    /// `None` where speculation is off.
    ///
    /// # Errors
    /// [`Error::NoDrafter`], [`Error::DraftLength`].
    pub fn new(model: &dyn Forward, settings: Speculation) -> Result<Option<Speculator>, Error> {
        let source: Box<dyn DraftSource> = match settings.drafts {
            Drafts::Off => return Ok(None),
            Drafts::NGram => Box::new(NGram),
            Drafts::Dflash => {
                let config = model.drafter().ok_or(Error::NoDrafter)?;
                let longest = config.most_drafted();
                Box::new(Dflash { longest })
            }
        };
        let longest = source.longest();
        let most = settings.most.unwrap_or(longest);
        if !(1..=longest).contains(&most) {
            let found = most;
            return Err(Error::DraftLength { found, longest });
        }
        Ok(Some(Speculator {
            source,
            least: settings.least.min(most),
            most,
            acceptance: Acceptance::guess(FIRST_RATE),
            cost: CostModel::new(),
            counts: SpeculationCounts::default(),
            recent: SpeculationCounts::default(),
            stopped: None,
        }))
    }

    pub fn info(&self) -> SpeculationInfo {
        SpeculationInfo {
            source: self.source.name(),
            least: self.least,
            most: self.most,
        }
    }

    pub fn counts(&self) -> SpeculationCounts {
        self.counts
    }

    /// Why nothing is drafted any more; `None` while something may be.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// The pace of a new sequence.
    pub fn pace(&self) -> Pace {
        Pace::new(&self.acceptance)
    }

    /// Draft lengths for `candidates`, which decode beside `n_others` rows;
    /// `pass_cost` is what passes of the model have taken.
    pub fn lengths(
        &self,
        candidates: &mut [Candidate<'_>],
        n_others: usize,
        pass_cost: &CostModel,
    ) -> Vec<usize> {
        let mut lengths = vec![0; candidates.len()];
        if self.stopped.is_some() {
            return lengths;
        }
        let mut n_rows = candidates.len() + n_others;
        let (mut open, mut places) = (Vec::new(), Vec::new());
        for (place, candidate) in candidates.iter_mut().enumerate() {
            let most = self.most.min(candidate.most);
            let least = self.least.min(most);
            match candidate.pace.turn(candidate.n_generated) {
                _ if least > 0 => lengths[place] = least,
                Turn::Trial(length) => lengths[place] = length.min(most),
                Turn::Closed => {}
                Turn::Open => {
                    let rate = candidate.pace.rate();
                    open.push(Drafting { rate, most });
                    places.push(place);
                }
            }
            n_rows += lengths[place];
        }
        if pass_cost.at_least(candidates.len() + n_others).is_zero() {
            // Without drafts first: that is what drafts are measured by.
            return lengths;
        }
        let seconds = |cost: &CostModel, n: usize| cost.at_least(n).as_secs_f64();
        let drafting = |n_sequences, n_tokens| {
            let rows = self.source.rows(n_sequences, n_tokens);
            seconds(&self.cost, rows)
        };
        let pass = |n| seconds(pass_cost, n);
        let paying = draft_lengths(&open, n_rows - open.len(), pass, drafting);
        for (place, length) in places.into_iter().zip(paying) {
            lengths[place] = length;
            let candidate = &mut candidates[place];
            if candidate.most > 0 {
                candidate.pace.decided(candidate.n_generated, length);
            }
        }
        lengths
    }

    /// A draft for each of `asks`, with the time it took. A device that has no
    /// room for drafting drafts no more.
    ///
    /// # Errors
    /// Those of the model.
    pub fn draft(
        &mut self,
        model: &mut dyn Forward,
        asks: &[Ask<'_>],
    ) -> Result<(Vec<Vec<u32>>, Duration), model::Error> {
        let start = Instant::now();
        let drafts = match self.source.draft(model, asks) {
            Ok(drafts) => drafts,
            Err(model::Error::Device(error @ DeviceError::OutOfMemory { .. })) => {
                self.stop(error.to_string());
                vec![Vec::new(); asks.len()]
            }
            Err(error) => return Err(error),
        };
        let time = start.elapsed();
        let n_tokens = asks.iter().map(|ask| ask.n_draft).sum();
        let n_rows = self.source.rows(asks.len(), n_tokens);
        if n_rows > 0 {
            self.cost.measured(n_rows, time);
        }
        Ok((drafts, time))
    }

    /// Takes the outcome of a draft that was verified.
    pub fn observe(&mut self, n_drafted: usize, n_accepted: usize) {
        self.acceptance.observe(n_drafted, n_accepted);
        self.counts.add(n_drafted, n_accepted);
        self.recent.add(n_drafted, n_accepted);
        if self.recent.rounds < GIVE_UP_ROUNDS {
            return;
        }
        let tokens = std::mem::take(&mut self.recent).tokens_per_round();
        if tokens < GIVE_UP_TOKENS {
            self.stop(format!(
                "{GIVE_UP_ROUNDS} rounds gave {tokens:.2} tokens each, expected at least \
                 {GIVE_UP_TOKENS}"
            ));
        }
    }

    /// Drafts no more.
    fn stop(&mut self, why: String) {
        tracing::warn!(why, "speculation is given up");
        self.stopped = Some(why);
    }
}

/// The newest tokens of a sequence in a pass: the last known one, and drafted
/// ones behind it.
#[derive(Debug, Default)]
pub(crate) struct Verify {
    /// Tokens of the sequence before the draft.
    n_known: usize,
    draft: Vec<u32>,
    /// Was the drafted token behind these one that the guide does not allow?
    is_cut: bool,
    /// Of the last known token's row, then of each drafted token's.
    wants: Vec<Option<Want>>,
    outputs: Vec<Option<RowOutput>>,
}

impl Verify {
    /// Without a draft; `want` of the newest of `n_known` tokens.
    pub fn plain(n_known: usize, want: Option<Want>) -> Verify {
        Verify {
            n_known,
            wants: vec![want],
            ..Verify::default()
        }
    }

    /// Adds as much of `draft` as plain decode could come to, as far as the guide
    /// can tell. `constraint` is on the token after the newest.
    pub fn with_draft(
        mut self,
        draft: &[u32],
        (guide, constraint): (&dyn Guide, &Constraint),
        (logprobs, sampler): (Option<usize>, &Sampler),
        n_vocab: usize,
    ) -> Verify {
        if draft.is_empty() {
            return self;
        }
        let mut guide = guide.fork();
        let mut constraint = constraint.clone();
        for &token in draft {
            let is_possible = match &constraint {
                Constraint::Free => (token as usize) < n_vocab,
                Constraint::Forced(forced) => *forced == token,
                Constraint::Masked(mask) => mask.is_allowed(token),
            };
            if !is_possible {
                self.is_cut = true;
                break;
            }
            // Nothing is sampled behind a last token.
            if guide.accept(token) == Verdict::Stop {
                break;
            }
            constraint = match checked(guide.constraint(), n_vocab) {
                Ok(constraint) => constraint,
                // Plain decode fails there, if it comes there.
                Err(_) => break,
            };
            self.draft.push(token);
            self.wants.push(wanted(logprobs, sampler, &constraint));
        }
        self
    }

    /// The drafted tokens.
    pub fn draft(&self) -> &[u32] {
        &self.draft
    }

    /// Drafted tokens that were looked at, one that the guide did not allow
    /// included.
    pub fn n_drafted(&self) -> usize {
        self.draft.len() + usize::from(self.is_cut)
    }

    /// What is wanted of the last known token's row, then of each drafted one's.
    pub fn wants(&self) -> &[Option<Want>] {
        &self.wants
    }

    /// Takes the outputs of the wanted rows, in order.
    pub fn take(&mut self, outputs: &mut impl Iterator<Item = RowOutput>) {
        let output = |want: &Option<Want>| {
            want.map(|_| outputs.next().expect("an output for each wanted row"))
        };
        self.outputs = self.wants.iter().map(output).collect();
    }

    /// How many drafted tokens are those that `tokens`, the sequence as it is
    /// now, has in their places.
    pub fn n_accepted(&self, tokens: &[u32]) -> usize {
        let new = tokens[self.n_known..].iter();
        new.zip(&self.draft).take_while(|(a, b)| a == b).count()
    }

    /// The output of the row of the newest of `tokens`, if that row was in the
    /// pass: it is the last known token or all since are as drafted.
    pub fn newest(&self, tokens: &[u32]) -> Option<Option<&RowOutput>> {
        let n_new = tokens.len() - self.n_known;
        let is_drafted = self.n_accepted(tokens) == n_new;
        let output = self.outputs.get(n_new).filter(|_| is_drafted)?;
        Some(output.as_ref())
    }
}
