//! Where drafts come from.
//!
//! A source proposes; it decides nothing. What a reader would get wrong: a draft
//! may be shorter than asked for, or empty, and may be anything at all: a wrong
//! one costs time only.

use crate::sequence::Sequence;
use model::{DraftRequest, Forward, RowOutput, SequencePages, Want};

/// A sequence that asks for a draft.
pub(crate) struct Ask<'a> {
    /// All its tokens but the newest are computed.
    pub sequence: &'a Sequence,
    /// Tokens it wants, at least 1.
    pub n_draft: usize,
}

/// Proposes tokens that may follow.
pub(crate) trait DraftSource: Send {
    /// Its name on start lines.
    fn name(&self) -> &'static str;

    /// Tokens of a draft at most.
    fn longest(&self) -> usize;

    /// Rows that the model computes for the drafts of `n_sequences`, `n_tokens`
    /// long together.
    fn rows(&self, n_sequences: usize, n_tokens: usize) -> usize;

    /// A draft for each of `asks`.
    ///
    /// # Errors
    /// Those of the model.
    fn draft(
        &mut self,
        model: &mut dyn Forward,
        asks: &[Ask<'_>],
    ) -> Result<Vec<Vec<u32>>, model::Error>;
}

/// The drafter attached to the model.
pub(crate) struct Dflash {
    /// Tokens of a draft at most.
    pub longest: usize,
}

impl DraftSource for Dflash {
    fn name(&self) -> &'static str {
        "DFlash"
    }

    fn longest(&self) -> usize {
        self.longest
    }

    fn rows(&self, n_sequences: usize, n_tokens: usize) -> usize {
        n_sequences + n_tokens
    }

    fn draft(
        &mut self,
        model: &mut dyn Forward,
        asks: &[Ask<'_>],
    ) -> Result<Vec<Vec<u32>>, model::Error> {
        let max_rows = model.caps().max_rows;
        let mut drafts = Vec::new();
        let mut rest = asks;
        while !rest.is_empty() {
            // As many blocks as a pass holds.
            let mut n_rows = 0;
            let fits = |ask: &&Ask<'_>| {
                n_rows += self.rows(1, ask.n_draft);
                n_rows <= max_rows
            };
            let n_blocks = rest.iter().take_while(fits).count().max(1);
            let (now, later) = rest.split_at(n_blocks);
            let request = |(seq, ask): (u32, &Ask<'_>)| DraftRequest {
                seq,
                anchor: *ask.sequence.tokens().last().expect("a newest token"),
                n_draft: ask.n_draft,
            };
            let requests: Vec<DraftRequest> = (0..).zip(now).map(request).collect();
            let tables: Vec<&SequencePages> = now.iter().map(|ask| &ask.sequence.pages).collect();
            let outputs = model.draft(&requests, &tables, Want::Argmax)?;
            // What is not finite has no best token: the draft ends before it.
            let token = |output: RowOutput| match output {
                RowOutput::Argmax { token, .. } => Some(token),
                _ => None,
            };
            drafts.extend(
                outputs
                    .into_iter()
                    .map(|outputs| outputs.into_iter().map_while(token).collect()),
            );
            rest = later;
        }
        Ok(drafts)
    }
}

/// Looks the newest tokens up among the earlier ones (prompt lookup).
pub(crate) struct NGram;

/// Tokens of a looked-up draft at most: a pass of 16 rows.
pub const LONGEST_LOOKUP: usize = 15;
/// Tokens that must be found again. Single tokens are found nearly always, and
/// say nearly nothing.
const SHORTEST_MATCH: usize = 2;
/// Longer matches are not told apart.
const LONGEST_MATCH: usize = 16;

impl DraftSource for NGram {
    fn name(&self) -> &'static str {
        "n-gram"
    }

    fn longest(&self) -> usize {
        LONGEST_LOOKUP
    }

    fn rows(&self, _: usize, _: usize) -> usize {
        0
    }

    fn draft(
        &mut self,
        _: &mut dyn Forward,
        asks: &[Ask<'_>],
    ) -> Result<Vec<Vec<u32>>, model::Error> {
        let look = |ask: &Ask<'_>| looked_up(ask.sequence.tokens(), ask.n_draft);
        Ok(asks.iter().map(look).collect())
    }
}

/// What followed the longest earlier match of the end of `tokens`, the newest
/// of equal ones; `n_draft` tokens, or none without a match.
///
/// What follows may run into the end itself: then it goes on with what was just
/// proposed, as a text does that repeats itself.
pub fn looked_up(tokens: &[u32], n_draft: usize) -> Vec<u32> {
    // Length of the match that ends before `at`.
    let matched = |at: usize| {
        let before = tokens[..at].iter().rev();
        let equal = before.zip(tokens.iter().rev()).take(LONGEST_MATCH);
        equal.take_while(|(a, b)| a == b).count()
    };
    let found = (1..tokens.len()).map(|at| (matched(at), at)).max();
    let Some((_, at)) = found.filter(|&(n_matched, _)| n_matched >= SHORTEST_MATCH) else {
        return Vec::new();
    };
    let mut draft: Vec<u32> = Vec::with_capacity(n_draft);
    for next in at..at + n_draft {
        draft.push(match tokens.get(next) {
            Some(&token) => token,
            None => draft[next - tokens.len()],
        });
    }
    draft
}
