//! What one pass computes, whatever it is called above.
//!
//! Decode is one row each of many sequences, prefill many rows of one, verify
//! `1 + drafts` rows of one. They are not modes: any mixture is legal, as long
//! as the rows of one sequence are contiguous and ascending.

use crate::kv::{PageClass, PageId, SequencePages};

/// What enters the model in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A token id.
    Token(u32),
}

/// One position of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What enters.
    pub input: Input,
    /// Absolute position in the sequence, from 0.
    pub pos: u32,
    /// Index of the sequence in the pass's [`Tables`].
    pub seq: u32,
}

/// The rows of a pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// All rows; those of one sequence are contiguous and ascending.
    pub rows: Vec<Row>,
    /// Ascending indices into `rows` whose logits the caller wants.
    pub wanted: Vec<u32>,
}

impl Batch {
    /// Appends `tokens` of sequence `seq` at positions `start ..`; nothing of
    /// them is wanted yet.
    pub fn push(&mut self, seq: u32, start: u32, tokens: &[u32]) {
        self.rows
            .extend(tokens.iter().zip(start..).map(|(&token, pos)| Row {
                input: Input::Token(token),
                pos,
                seq,
            }));
    }

    /// Asks for the logits of the newest row.
    ///
    /// # Panics
    /// If there is no row.
    pub fn want_last(&mut self) {
        let last = self.rows.len().checked_sub(1).expect("a batch with a row");
        self.wanted.push(last as u32);
    }

    /// A batch of consecutive rows of sequence `seq`, all of them wanted.
    pub fn span(seq: u32, start: u32, tokens: &[u32]) -> Batch {
        let mut batch = Batch::default();
        batch.push(seq, start, tokens);
        batch.wanted = (0..tokens.len() as u32).collect();
        batch
    }

    /// The padded shape of this batch.
    pub fn shape(&self) -> Shape {
        Shape {
            rows: padded(self.rows.len()),
            wanted: padded(self.wanted.len()),
        }
    }
}

/// Row counts of a pass after padding. Two passes of one shape run the same
/// launches; only the step buffer differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape {
    /// Padded number of rows.
    pub rows: usize,
    /// Padded number of wanted rows.
    pub wanted: usize,
}

/// The row count that a pass of `n` rows is padded to, so that shapes are few.
/// A padding row has no sequence, stores nothing and attends to nothing.
pub fn padded(n: usize) -> usize {
    const STEPS: [usize; 11] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128];
    if n == 0 {
        return 0;
    }
    STEPS
        .into_iter()
        .find(|&s| s >= n)
        .unwrap_or_else(|| n.next_multiple_of(64))
}

/// The page tables of the sequences in a pass; `Row::seq` is the index.
pub type Tables<'a> = [&'a SequencePages];

/// Everything about a pass that differs between two passes of one shape: the
/// content of the step buffer.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// The rows, unpadded.
    pub rows: Vec<Row>,
    /// Indices of the wanted rows.
    pub wanted: Vec<u32>,
    /// Per sequence, per class: page of each 256 positions. `None` where a
    /// sliding page has been released or a class is not in use.
    pub pages: Vec<[Vec<Option<PageId>>; 3]>,
}

impl Step {
    /// The step of `batch` over `tables`.
    pub fn new(batch: &Batch, tables: &Tables<'_>) -> Step {
        let classes = |s: &&SequencePages| PageClass::ALL.map(|class| s.table(class).to_vec());
        Step {
            rows: batch.rows.clone(),
            wanted: batch.wanted.clone(),
            pages: tables.iter().map(classes).collect(),
        }
    }

    /// Page and slot of position `pos` of sequence `seq`.
    ///
    /// # Panics
    /// If the sequence holds no page there: a bug of the caller, which checks
    /// tables before a pass.
    pub fn place(&self, class: PageClass, seq: u32, pos: u32) -> (PageId, usize) {
        let table = &self.pages[seq as usize][class as usize];
        let page = table
            .get(pos as usize / crate::kv::PAGE_ROWS)
            .copied()
            .flatten();
        let page = page.unwrap_or_else(|| panic!("no {class} page at position {pos}"));
        (page, pos as usize % crate::kv::PAGE_ROWS)
    }
}

/// What is to be read back of a wanted row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The token with the largest logit (ties to the lower id).
    Argmax,
    /// The `k` largest logits, largest first (ties to the lower id).
    TopK {
        /// How many.
        k: usize,
        /// Also the natural log of the sum of exponentials over the whole row?
        logsumexp: bool,
    },
    /// The whole row.
    Full,
}

/// What was read back of a wanted row.
#[derive(Clone, Debug, PartialEq)]
pub enum RowOutput {
    /// Answer to [`Want::Argmax`].
    Argmax {
        /// The token.
        token: u32,
        /// Its logit.
        logit: f32,
    },
    /// Answer to [`Want::TopK`].
    TopK {
        /// Token and logit, largest first.
        top: Vec<(u32, f32)>,
        /// Log of the sum of exponentials of the whole row, if asked for.
        logsumexp: Option<f32>,
    },
    /// Answer to [`Want::Full`]: `n_vocab` logits.
    Full(Vec<f32>),
    /// The row holds a NaN or an infinity: nothing of it may be used.
    NonFinite {
        /// First token whose logit is not finite.
        token: u32,
    },
}

/// What a pass gives back: one entry per wanted row, in order.
pub type Outputs = Vec<RowOutput>;

/// The specification of reading back: what `want` asks of a row of logits. The
/// two zeros are one value to every order here.
pub fn select(logits: &[f32], want: Want) -> RowOutput {
    if let Some(token) = logits.iter().position(|v| !v.is_finite()) {
        return RowOutput::NonFinite {
            token: token as u32,
        };
    }
    // Adding 0 makes one zero of the two.
    let order = |v: f32| v + 0.0;
    let better = |a: &(u32, f32), b: &(u32, f32)| {
        let by_logit = order(b.1).total_cmp(&order(a.1));
        by_logit.then(a.0.cmp(&b.0))
    };
    match want {
        Want::Argmax => {
            let ids = (0..).zip(logits.iter().copied());
            let (token, logit) = ids.min_by(better).expect("a row has a logit");
            RowOutput::Argmax { token, logit }
        }
        Want::TopK { k, logsumexp } => {
            let mut top: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            let k = k.min(top.len());
            if k > 0 && k < top.len() {
                top.select_nth_unstable_by(k - 1, better);
            }
            top.truncate(k);
            top.sort_unstable_by(better);
            RowOutput::TopK {
                top,
                logsumexp: logsumexp.then(|| log_sum_exp(logits)),
            }
        }
        Want::Full => RowOutput::Full(logits.to_vec()),
    }
}

/// `ln(sum(exp(x)))`, accumulated in f64 in ascending order.
fn log_sum_exp(x: &[f32]) -> f32 {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = x.iter().map(|&v| f64::from(v - max).exp()).sum();
    (f64::from(max) + sum.ln()) as f32
}
