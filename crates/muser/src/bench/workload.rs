//! What is measured, and how it is run.

use crate::{interrupt, terminal};
use anyhow::{bail, ensure};
use indicatif::ProgressBar;
use model::{
    Batch, DraftRequest, Forward, Input, Outputs, PagePool, Row, RowOutput, SequencePages, Want,
};
use std::fmt;
use std::time::Instant;

/// One thing to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Reading a prompt.
    Prefill {
        /// Its tokens.
        n_tokens: usize,
    },
    /// Generating, for several sequences together.
    Decode {
        /// Tokens of each sequence.
        n_tokens: usize,
        /// Tokens that each sequence has before.
        depth: usize,
        /// Sequences.
        n_sequences: usize,
    },
    /// Speculating, for several sequences together.
    Speculate {
        /// What of it.
        part: Part,
        /// Tokens of a draft.
        n_drafted: usize,
        /// How often. A round keeps one token, so that depths are those of decode.
        n_rounds: usize,
        /// Tokens that each sequence has before.
        depth: usize,
        /// Sequences.
        n_sequences: usize,
    },
}

/// A part of speculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Making a draft.
    Draft,
    /// Making a draft, verifying it, keeping what is right.
    Round,
}

impl Work {
    /// Rows that one of its sequences has in the end.
    pub fn rows_per_sequence(self) -> usize {
        match self {
            Work::Prefill { n_tokens } => n_tokens,
            Work::Decode {
                n_tokens, depth, ..
            } => depth.saturating_add(n_tokens),
            Work::Speculate {
                n_drafted,
                n_rounds,
                depth,
                ..
            } => depth.saturating_add(n_rounds).saturating_add(n_drafted),
        }
    }

    /// Sequences it runs together.
    pub fn n_sequences(self) -> usize {
        match self {
            Work::Prefill { .. } => 1,
            Work::Decode { n_sequences, .. } | Work::Speculate { n_sequences, .. } => n_sequences,
        }
    }

    /// Passes of one repetition; reading a prompt counts as one.
    pub fn n_passes(self) -> usize {
        match self {
            Work::Prefill { .. } => 1,
            Work::Decode { n_tokens, .. } => n_tokens,
            Work::Speculate { n_rounds, .. } => n_rounds,
        }
    }

    /// Rows that are computed for `repetitions`, the one that does not count and what
    /// lies before included.
    pub fn n_rows(self, repetitions: usize) -> usize {
        let before = match self {
            Work::Prefill { .. } => 0,
            Work::Decode {
                depth, n_sequences, ..
            }
            | Work::Speculate {
                depth, n_sequences, ..
            } => depth * n_sequences,
        };
        let each = match self {
            Work::Speculate {
                part: Part::Round,
                n_drafted,
                n_rounds,
                n_sequences,
                ..
            } => (1 + n_drafted) * n_rounds * n_sequences,
            _ => self.n_tokens(),
        };
        before.saturating_add(repetitions.saturating_add(1).saturating_mul(each))
    }

    /// Tokens of one repetition: those drafted, or those kept.
    pub fn n_tokens(self) -> usize {
        match self {
            Work::Prefill { n_tokens } => n_tokens,
            Work::Speculate {
                part,
                n_drafted,
                n_rounds,
                n_sequences,
                ..
            } => match part {
                Part::Draft => n_drafted * n_rounds * n_sequences,
                Part::Round => n_rounds * n_sequences,
            },
            Work::Decode {
                n_tokens,
                n_sequences,
                ..
            } => n_tokens * n_sequences,
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Work::Prefill { n_tokens } => write!(f, "prefill {n_tokens}"),
            Work::Decode {
                n_tokens,
                depth,
                n_sequences,
            } => {
                let sequences = terminal::count(n_sequences, "sequence");
                write!(f, "decode {n_tokens} at depth {depth}, {sequences}")
            }
            Work::Speculate {
                part,
                n_drafted,
                depth,
                n_sequences,
                ..
            } => {
                let sequences = terminal::count(n_sequences, "sequence");
                let part = match part {
                    Part::Draft => "draft",
                    Part::Round => "round",
                };
                write!(f, "{part} {n_drafted} at depth {depth}, {sequences}")
            }
        }
    }
}

/// Runs works on a model.
pub struct Runner {
    model: Box<dyn Forward>,
    pool: PagePool,
    bar: ProgressBar,
}

impl Runner {
    /// A runner; `bar` moves with the rows of every pass.
    pub fn new(model: Box<dyn Forward>, bar: ProgressBar) -> Runner {
        let capacity = model.capacity();
        Runner {
            pool: PagePool::new(capacity.layout, capacity.max_slabs),
            model,
            bar,
        }
    }

    /// Seconds of each repetition, after one that does not count. `None` if the work
    /// was interrupted.
    pub fn measure(&mut self, work: Work, repetitions: usize) -> anyhow::Result<Option<Vec<f64>>> {
        self.bar.set_message(work.to_string());
        let mut bases = Vec::new();
        if let Work::Decode {
            depth, n_sequences, ..
        }
        | Work::Speculate {
            depth, n_sequences, ..
        } = work
        {
            for seq in 0..n_sequences {
                let mut base = SequencePages::new();
                self.read_prompt(&mut base, seq, depth)?;
                bases.push(base);
            }
        }
        let mut seconds = Vec::new();
        for repetition in 0..=repetitions {
            if interrupt::is_requested() {
                break;
            }
            let taken = match work {
                Work::Prefill { n_tokens } => self.prefill(n_tokens)?,
                Work::Decode { n_tokens, .. } => self.decode(&bases, n_tokens)?,
                Work::Speculate {
                    part,
                    n_drafted,
                    n_rounds,
                    ..
                } => self.speculate(&bases, part, n_drafted, n_rounds)?,
            };
            if repetition > 0 {
                seconds.push(taken);
            }
        }
        for mut base in bases {
            base.clear(&mut self.pool);
        }
        Ok((!interrupt::is_requested()).then_some(seconds))
    }

    fn prefill(&mut self, n_tokens: usize) -> anyhow::Result<f64> {
        let mut pages = SequencePages::new();
        let start = Instant::now();
        let done = self.read_prompt(&mut pages, 0, n_tokens);
        let seconds = start.elapsed().as_secs_f64();
        pages.clear(&mut self.pool);
        done.map(|()| seconds)
    }

    /// Computes the first `n_tokens` tokens of sequence `seq`; the last row's
    /// token is read back.
    fn read_prompt(
        &mut self,
        pages: &mut SequencePages,
        seq: usize,
        n_tokens: usize,
    ) -> anyhow::Result<()> {
        let max_rows = self.model.caps().max_rows;
        while (pages.len() as usize) < n_tokens && !interrupt::is_requested() {
            let start = pages.len() as usize;
            let end = n_tokens.min(start + max_rows);
            let tokens: Vec<u32> = (start..end).map(|pos| self.token(seq, pos)).collect();
            let mut batch = Batch::default();
            batch.push(0, start as u32, &tokens);
            if end == n_tokens {
                batch.want_last();
            }
            let n_rows = (end - start) as u32;
            self.pass(&batch, std::slice::from_mut(pages), n_rows, n_rows)?;
        }
        Ok(())
    }

    /// Generates on branches of `bases`, which stay as they are.
    fn decode(&mut self, bases: &[SequencePages], n_tokens: usize) -> anyhow::Result<f64> {
        let mut branches: Vec<SequencePages> =
            bases.iter().map(|b| b.branch(&mut self.pool)).collect();
        let start = Instant::now();
        let mut outcome = Ok(());
        for _ in 0..n_tokens {
            let row = |(seq, pages): (usize, &SequencePages)| Row {
                input: Input::Token(self.token(seq, pages.len() as usize)),
                pos: pages.len(),
                seq: seq as u32,
            };
            let rows: Vec<Row> = branches.iter().enumerate().map(row).collect();
            let batch = Batch {
                wanted: (0..rows.len() as u32).collect(),
                rows,
            };
            outcome = self.pass(&batch, &mut branches, 1, 1);
            if outcome.is_err() || interrupt::is_requested() {
                break;
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        for branch in &mut branches {
            branch.clear(&mut self.pool);
        }
        outcome.map(|()| seconds)
    }

    /// Drafts on branches of `bases`, and verifies that if it is part of it.
    fn speculate(
        &mut self,
        bases: &[SequencePages],
        part: Part,
        n_drafted: usize,
        n_rounds: usize,
    ) -> anyhow::Result<f64> {
        let mut branches: Vec<SequencePages> =
            bases.iter().map(|b| b.branch(&mut self.pool)).collect();
        let start = Instant::now();
        let mut outcome = Ok(());
        for _ in 0..n_rounds {
            outcome = self.round(&mut branches, part, n_drafted);
            if outcome.is_err() || interrupt::is_requested() {
                break;
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        for branch in &mut branches {
            branch.clear(&mut self.pool);
        }
        outcome.map(|()| seconds)
    }

    /// One round. Without a drafter the draft is some tokens.
    fn round(
        &mut self,
        sequences: &mut [SequencePages],
        part: Part,
        n_drafted: usize,
    ) -> anyhow::Result<()> {
        let newest = |(seq, pages): (usize, &SequencePages)| self.token(seq, pages.len() as usize);
        let newest: Vec<u32> = sequences.iter().enumerate().map(newest).collect();
        let request = |(seq, &anchor): (u32, &u32)| DraftRequest {
            seq,
            anchor,
            n_draft: n_drafted,
        };
        let requests: Vec<DraftRequest> = (0..).zip(&newest).map(request).collect();
        let drafts: Vec<Vec<u32>> = match self.model.drafter() {
            Some(_) => {
                let tables: Vec<&SequencePages> = sequences.iter().collect();
                let drafts = self.model.draft(&requests, &tables, Want::Argmax)?;
                drafts
                    .into_iter()
                    .map(best_tokens)
                    .collect::<Result<_, _>>()?
            }
            None => newest.iter().map(|&token| vec![token; n_drafted]).collect(),
        };
        if part == Part::Draft {
            self.bar.inc((n_drafted * sequences.len()) as u64);
            return Ok(());
        }
        let mut batch = Batch::default();
        for (seq, (pages, draft)) in sequences.iter().zip(&drafts).enumerate() {
            batch.push(seq as u32, pages.len(), &newest[seq..=seq]);
            batch.push(seq as u32, pages.len() + 1, draft);
        }
        batch.wanted = (0..batch.rows.len() as u32).collect();
        self.pass(&batch, sequences, 1 + n_drafted as u32, 1)
    }

    /// One pass that gives each sequence `n_rows` rows, of which `n_kept` stay.
    fn pass(
        &mut self,
        batch: &Batch,
        sequences: &mut [SequencePages],
        n_rows: u32,
        n_kept: u32,
    ) -> anyhow::Result<()> {
        for pages in sequences.iter_mut() {
            let copies = pages.reserve(&mut self.pool, n_rows)?;
            self.model.copy_pages(&copies)?;
        }
        let tables: Vec<&SequencePages> = sequences.iter().collect();
        let want = vec![Want::Argmax; batch.wanted.len()];
        let outputs = self.model.pass(batch, &tables, &want)?;
        for output in outputs {
            let is_finite = !matches!(output, RowOutput::NonFinite { .. });
            ensure!(is_finite, "the model gives logits that are not finite");
        }
        for pages in sequences {
            pages.accept(&mut self.pool, n_kept);
        }
        self.bar.inc(batch.rows.len() as u64);
        Ok(())
    }

    /// Some token, another one at each place.
    fn token(&self, seq: usize, pos: usize) -> u32 {
        let n_vocab = self.model.config().n_vocab;
        ((pos * 7919 + seq * 104_729 + 17) % n_vocab) as u32
    }
}

/// The tokens of a draft.
fn best_tokens(outputs: Outputs) -> anyhow::Result<Vec<u32>> {
    let token = |output: RowOutput| match output {
        RowOutput::Argmax { token, .. } => Ok(token),
        _ => bail!("the drafter gives logits that are not finite"),
    };
    outputs.into_iter().map(token).collect()
}
