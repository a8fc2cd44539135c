//! Reading logits back: argmax, largest k and log-sum-exp on the device, whole rows
//! only where they are asked for.
//!
//! What a reader would get wrong: the sum of exponentials is f64 in an order of its
//! own (threads, then chunks), the same on every run; against the specification's
//! ascending order its last bit may differ.

use crate::buffer::Buf;
use crate::device::{Cuda, arguments, functions};
use crate::driver::{Grid, Memory, Pinned};
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

/// Where the device works: what is read back lies in front, in this order.
struct Places {
    /// Largest logits, 16 bytes each; sums of exponentials, f64; logits and keys of the largest k.
    table: u64,
    sums: u64,
    top_logits: u64,
    top_keys: u64,
    /// Bytes of all that.
    read_bytes: usize,
    /// Keys and first tokens that are not finite, of each chunk; sums of each chunk.
    keys: u64,
    bad: u64,
    parts: u64,
    /// Keys of the chunks, by turns.
    rounds: [u64; 2],
}

/// Is the sum of exponentials wanted?
fn is_summed(want: &Want) -> bool {
    matches!(
        want,
        Want::TopK {
            logsumexp: true,
            ..
        }
    )
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
        let most = |w: &Want| match *w {
            Want::TopK { k, .. } => k.min(rows.n_vocab),
            _ => 0,
        };
        let k = want.iter().map(most).max().unwrap_or(0);
        let k = if k > MAX_TOP { 0 } else { k };
        let places = self.places(rows, k)?;
        self.largest(rows, &places);
        if want.iter().any(is_summed) {
            self.exponentials(rows, &places);
        }
        if k > 0 {
            self.top(rows, k, &places);
        }
        self.take_failure()?;
        let bytes = self.answers(places.table, places.read_bytes)?;
        let at = |place: u64| &bytes[(place - places.table) as usize..];
        let (tables, sums) = (at(places.table), at(places.sums));
        let (top_logits, top_keys) = (at(places.top_logits), at(places.top_keys));
        let row_bytes = rows.n_vocab * size_of::<f32>();
        let mut answers = Outputs::with_capacity(rows.n);
        for (r, want) in want.iter().enumerate() {
            let Largest {
                token,
                logit,
                not_finite,
            } = Largest::read(&tables.as_chunks::<16>().0[r]);
            if not_finite != u32::MAX {
                answers.push(RowOutput::NonFinite { token: not_finite });
                continue;
            }
            let whole = || -> Result<Vec<f32>, DeviceError> {
                let at = rows.address + (r * row_bytes) as u64;
                Ok(floats(&self.stream.download(at, row_bytes)?))
            };
            answers.push(match *want {
                Want::Argmax => RowOutput::Argmax { token, logit },
                Want::Full => RowOutput::Full(whole()?),
                Want::TopK { k, .. } if k.min(rows.n_vocab) > MAX_TOP => {
                    model::select(&whole()?, *want)
                }
                Want::TopK { k: own, logsumexp } => {
                    let sum = f64::from_le_bytes(sums.as_chunks::<8>().0[r]);
                    let keys = &top_keys.as_chunks::<8>().0[r * k..][..own.min(k)];
                    let logits = &top_logits.as_chunks::<4>().0[r * k..];
                    let token = |key: &[u8; 8]| !(u64::from_le_bytes(*key) as u32);
                    let logit_of = |x: &[u8; 4]| f32::from_le_bytes(*x);
                    RowOutput::TopK {
                        top: keys
                            .iter()
                            .map(token)
                            .zip(logits.iter().map(logit_of))
                            .collect(),
                        logsumexp: logsumexp.then(|| (f64::from(logit) + sum.ln()) as f32),
                    }
                }
            });
        }
        Ok(answers)
    }

    /// Room for the answers of these rows with `k` logits each.
    fn places(&mut self, rows: Rows, k: usize) -> Result<Places, DeviceError> {
        let (n, n_chunks) = (rows.n, rows.n_chunks());
        let mut end = 0;
        let mut part = |bytes: usize| {
            end += bytes.next_multiple_of(16);
            (end - bytes.next_multiple_of(16)) as u64
        };
        let (table, sums) = (part(16 * n), part(8 * n));
        let (top_logits, top_keys) = (part(4 * k * n), part(8 * k * n));
        let keys = part(8 * n_chunks * n);
        let (bad, parts) = (part(4 * n_chunks * n), part(8 * n_chunks * n));
        let rounds = [part(8 * n_chunks * k * n), part(8 * n_chunks * k * n)];
        if self.answers.as_ref().is_none_or(|a| a.bytes() < end) {
            self.stream.finish()?;
            self.answers = None;
            self.answers = Some(Memory::new(&self.context, "answers", end)?);
        }
        let start = self.answers.as_ref().map_or(0, Memory::address);
        Ok(Places {
            table: start + table,
            sums: start + sums,
            top_logits: start + top_logits,
            top_keys: start + top_keys,
            read_bytes: keys as usize,
            keys: start + keys,
            bad: start + bad,
            parts: start + parts,
            rounds: rounds.map(|at| start + at),
        })
    }

    /// Bytes of the device, by way of memory that it reaches itself.
    fn answers(&mut self, from: u64, n: usize) -> Result<Vec<u8>, DeviceError> {
        if self.read_back.as_ref().is_none_or(|p| p.bytes() < n) {
            self.read_back = None;
            self.read_back = Some(Pinned::new(&self.context, n.next_power_of_two())?);
        }
        let pinned = self.read_back.as_mut().expect("just made");
        self.stream.fetch(pinned, from, n)?;
        Ok(pinned.as_mut_slice()[..n].to_vec())
    }

    /// Largest logit of each row, and whether all are finite.
    fn largest(&mut self, rows: Rows, at: &Places) {
        let n = rows.n_vocab as u32;
        let function = self.select.chunk_largest;
        self.launch_alone(
            function,
            grid(rows.n_chunks(), rows.n),
            arguments![at.keys, at.bad, rows.address, n],
        );
        let grid = Grid {
            blocks: [rows.n as u32, 1, 1],
            threads: 32,
            shared: 0,
        };
        let (function, n_chunks) = (self.select.row_largest, rows.n_chunks() as u32);
        self.launch_alone(
            function,
            grid,
            arguments![at.table, at.keys, at.bad, rows.address, n, n_chunks],
        );
    }

    /// The `k` largest logits of each row, row after row.
    fn top(&mut self, rows: Rows, k: usize, at: &Places) {
        let mut n_chunks = rows.n_chunks();
        let [mut keys, mut fewer] = at.rounds;
        let n = rows.n_vocab as u32;
        let place = |n_chunks: usize, round: u64| if n_chunks == 1 { at.top_keys } else { round };
        keys = place(n_chunks, keys);
        let function = self.select.top_of_logits;
        self.launch_alone(
            function,
            grid(n_chunks, rows.n),
            arguments![keys, rows.address, n, k as u32],
        );
        while n_chunks > 1 {
            let n_keys = n_chunks * k;
            n_chunks = n_keys.div_ceil(CHUNK);
            let to = place(n_chunks, fewer);
            let function = self.select.top_of_keys;
            self.launch_alone(
                function,
                grid(n_chunks, rows.n),
                arguments![to, keys, n_keys as u32, k as u32],
            );
            (keys, fewer) = (to, keys);
        }
        let function = self.select.logits_of_keys;
        self.launch_alone(
            function,
            grid(k.div_ceil(THREADS as usize), rows.n),
            arguments![at.top_logits, keys, rows.address, n, k as u32],
        );
    }

    /// The sum of exponentials of each row against its largest logit.
    fn exponentials(&mut self, rows: Rows, at: &Places) {
        let n = rows.n_vocab as u32;
        let function = self.select.chunk_exponentials;
        self.launch_alone(
            function,
            grid(rows.n_chunks(), rows.n),
            arguments![at.parts, rows.address, at.table, n],
        );
        let grid = Grid {
            blocks: [rows.n as u32, 1, 1],
            threads: 32,
            shared: 0,
        };
        let (function, n_chunks) = (self.select.row_exponentials, rows.n_chunks() as u32);
        self.launch_alone(function, grid, arguments![at.sums, at.parts, n_chunks]);
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
