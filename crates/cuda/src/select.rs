//! Reading logits back: argmax, largest k and log-sum-exp on the device, whole rows
//! only where they are asked for.
//!
//! What a reader would get wrong: the sum of exponentials is f64 in an order of its
//! own (threads, then chunks), the same on every run; against the specification's
//! ascending order its last bit may differ.

use crate::buffer::Buf;
use crate::device::{Cuda, arguments, functions};
use crate::driver::{Grid, Memory};
use model::{DeviceError, Outputs, RowOutput, Want};

/// Logits that a block of threads takes; kernels/select.cu has the same.
const CHUNK: usize = 2048;

/// Threads of a block.
const THREADS: u32 = 512;

/// Largest k that the device finds: from a chunk's keys at least half must go, or no round would make them fewer.
const MAX_TOP: usize = CHUNK / 2;

functions!(SelectFunctions {
    chunk_largest,
    row_largest,
    chunk_exponentials,
    row_exponentials,
    top_of_logits,
    top_of_keys,
    logits_of_keys,
});

/// What the device says of every row.
struct Largest {
    token: u32,
    logit: f32,
    /// First token whose logit is not finite; `u32::MAX` if all are.
    not_finite: u32,
}

impl Largest {
    /// From the 16 bytes of kernels/select.cu.
    fn read(bytes: &[u8; 16]) -> Largest {
        let word =
            |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        Largest {
            token: !word(0),
            logit: f32::from_bits(word(8)),
            not_finite: word(12),
        }
    }
}

/// The logits of a pass.
#[derive(Clone, Copy)]
struct Rows {
    address: u64,
    n_vocab: usize,
    n: usize,
}

impl Rows {
    fn n_chunks(self) -> usize {
        self.n_vocab.div_ceil(CHUNK)
    }
}

fn grid(n_chunks: usize, n_rows: usize) -> Grid {
    Grid {
        blocks: [n_chunks as u32, n_rows as u32, 1],
        threads: THREADS,
        shared: 0,
    }
}

impl Cuda {
    /// Answers `want`, one for each row of `logits`.
    pub(crate) fn select_rows(
        &mut self,
        logits: &Buf,
        want: &[Want],
    ) -> Result<Outputs, DeviceError> {
        self.context.bind()?;
        let rows = Rows {
            address: logits.address(),
            n_vocab: logits.cols,
            n: want.len(),
        };
        if rows.n == 0 || rows.n_vocab == 0 {
            return Ok(Outputs::new());
        }
        let table = Memory::new(&self.context, "answers", 16 * rows.n)?;
        let largest = self.largest(rows, &table)?;
        let most = |w: &Want| match *w {
            Want::TopK { k, .. } => k.min(rows.n_vocab),
            _ => 0,
        };
        let k = want.iter().map(most).max().unwrap_or(0);
        let top = match k {
            1..=MAX_TOP => self.top(rows, k)?,
            _ => Vec::new(),
        };
        let is_summed = |w: &Want| {
            matches!(
                w,
                Want::TopK {
                    logsumexp: true,
                    ..
                }
            )
        };
        let sums = match want.iter().any(is_summed) {
            true => self.exponentials(rows, &table)?,
            false => Vec::new(),
        };
        let row_bytes = rows.n_vocab * size_of::<f32>();
        let mut answers = Outputs::with_capacity(rows.n);
        for (r, (want, largest)) in want.iter().zip(&largest).enumerate() {
            let Largest {
                token,
                logit,
                not_finite,
            } = *largest;
            if not_finite != u32::MAX {
                answers.push(RowOutput::NonFinite { token: not_finite });
                continue;
            }
            let whole = |be: &Cuda| -> Result<Vec<f32>, DeviceError> {
                let bytes = be
                    .stream
                    .download(rows.address + (r * row_bytes) as u64, row_bytes)?;
                Ok(floats(&bytes))
            };
            answers.push(match *want {
                Want::Argmax => RowOutput::Argmax { token, logit },
                Want::Full => RowOutput::Full(whole(self)?),
                Want::TopK { .. } if k > MAX_TOP => model::select(&whole(self)?, *want),
                Want::TopK { k: own, logsumexp } => {
                    let top = top.get(r * k..(r + 1) * k).unwrap_or_default();
                    RowOutput::TopK {
                        top: top[..own.min(k)].to_vec(),
                        logsumexp: logsumexp.then(|| (f64::from(logit) + sums[r].ln()) as f32),
                    }
                }
            });
        }
        Ok(answers)
    }

    /// Largest logit of each row, and whether all are finite.
    fn largest(&mut self, rows: Rows, table: &Memory) -> Result<Vec<Largest>, DeviceError> {
        let n_chunks = rows.n_chunks();
        let keys = Memory::new(&self.context, "keys of logits", 8 * n_chunks * rows.n)?;
        let bad = Memory::new(&self.context, "keys of logits", 4 * n_chunks * rows.n)?;
        let n = rows.n_vocab as u32;
        let function = self.select.chunk_largest;
        self.launch_alone(
            function,
            grid(n_chunks, rows.n),
            arguments![keys.address(), bad.address(), rows.address, n],
        );
        let grid = Grid {
            blocks: [rows.n as u32, 1, 1],
            threads: 32,
            shared: 0,
        };
        let function = self.select.row_largest;
        self.launch_alone(
            function,
            grid,
            arguments![
                table.address(),
                keys.address(),
                bad.address(),
                rows.address,
                n,
                n_chunks as u32
            ],
        );
        self.take_failure()?;
        let bytes = self.stream.download(table.address(), 16 * rows.n)?;
        Ok(bytes
            .as_chunks::<16>()
            .0
            .iter()
            .map(Largest::read)
            .collect())
    }

    /// The `k` largest logits of each row, row after row.
    fn top(&mut self, rows: Rows, k: usize) -> Result<Vec<(u32, f32)>, DeviceError> {
        let mut n_chunks = rows.n_chunks();
        let mut keys = Memory::new(&self.context, "keys of logits", 8 * n_chunks * k * rows.n)?;
        let function = self.select.top_of_logits;
        self.launch_alone(
            function,
            grid(n_chunks, rows.n),
            arguments![keys.address(), rows.address, rows.n_vocab as u32, k as u32],
        );
        while n_chunks > 1 {
            let n_keys = n_chunks * k;
            n_chunks = n_keys.div_ceil(CHUNK);
            let fewer = Memory::new(&self.context, "keys of logits", 8 * n_chunks * k * rows.n)?;
            let function = self.select.top_of_keys;
            self.launch_alone(
                function,
                grid(n_chunks, rows.n),
                arguments![fewer.address(), keys.address(), n_keys as u32, k as u32],
            );
            // The keys before are freed here.
            self.stream.finish()?;
            keys = fewer;
        }
        let logits = Memory::new(&self.context, "largest logits", 4 * k * rows.n)?;
        let function = self.select.logits_of_keys;
        self.launch_alone(
            function,
            grid(k.div_ceil(THREADS as usize), rows.n),
            arguments![
                logits.address(),
                keys.address(),
                rows.address,
                rows.n_vocab as u32,
                k as u32
            ],
        );
        self.take_failure()?;
        let keys = self.stream.download(keys.address(), 8 * k * rows.n)?;
        let logits = self.stream.download(logits.address(), 4 * k * rows.n)?;
        let tokens = keys
            .as_chunks::<8>()
            .0
            .iter()
            .map(|key| !(u64::from_le_bytes(*key) as u32));
        Ok(tokens.zip(floats(&logits)).collect())
    }

    /// The sum of exponentials of each row against its largest logit.
    fn exponentials(&mut self, rows: Rows, table: &Memory) -> Result<Vec<f64>, DeviceError> {
        let n_chunks = rows.n_chunks();
        let parts = Memory::new(&self.context, "sums of exponentials", 8 * n_chunks * rows.n)?;
        let sums = Memory::new(&self.context, "sums of exponentials", 8 * rows.n)?;
        let function = self.select.chunk_exponentials;
        self.launch_alone(
            function,
            grid(n_chunks, rows.n),
            arguments![
                parts.address(),
                rows.address,
                table.address(),
                rows.n_vocab as u32
            ],
        );
        let grid = Grid {
            blocks: [rows.n as u32, 1, 1],
            threads: 32,
            shared: 0,
        };
        let function = self.select.row_exponentials;
        self.launch_alone(
            function,
            grid,
            arguments![sums.address(), parts.address(), n_chunks as u32],
        );
        self.take_failure()?;
        let bytes = self.stream.download(sums.address(), 8 * rows.n)?;
        Ok(bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|sum| f64::from_le_bytes(*sum))
            .collect())
    }
}

/// The f32 of little-endian bytes.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|x| f32::from_le_bytes(*x))
        .collect()
}
