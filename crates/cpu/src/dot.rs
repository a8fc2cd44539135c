//! Products with f32 activations: F32, F16 and BF16 weights, and every encoding
//! without an integer kernel, whose rows are decoded first.
//!
//! Lane `l` of 16 takes the elements `k = l mod 16` by ascending fma; the lanes
//! are then added pairwise, 8-4-2-1. What a reader would get wrong: here a lane
//! is a column of the weights, in [`crate::quant`] it is an output row.

use crate::lanes::{Available, Kernel, LANES, Lanes};
use crate::matmul::OutColumns;
use crate::quant::Scratch;
use gguf::{TensorType, quant};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows that are decoded at once: kernels take so many together.
const ROWS: usize = 4;

/// Output rows of a part of a product.
pub(crate) struct Job<'a> {
    /// The encoding.
    pub(crate) ty: TensorType,
    /// Whole rows.
    pub(crate) weights: &'a [u8],
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// Elements of a row.
    pub(crate) cols: usize,
    /// Output rows to compute.
    pub(crate) rows: Range<usize>,
    /// Activations, `[n][cols]`.
    pub(crate) x: &'a [f32],
    /// Where to.
    pub(crate) out: OutColumns<'a>,
}

/// Does the work of `job`.
pub(crate) fn multiply(isa: Available, job: &Job<'_>, scratch: &mut Scratch) {
    match job.ty {
        TensorType::F32 => run::<F32>(isa, job, job.rows.clone(), job.weights),
        TensorType::F16 => run::<F16>(isa, job, job.rows.clone(), job.weights),
        TensorType::BF16 => run::<BF16>(isa, job, job.rows.clone(), job.weights),
        ty => {
            let decode = quant::decoder(ty);
            let mut row = job.rows.start;
            while row < job.rows.end {
                let end = (row + ROWS).min(job.rows.end);
                scratch.row.resize((end - row) * job.cols, 0.0);
                let bytes = &job.weights[row * job.row_bytes..end * job.row_bytes];
                decode(bytes, &mut scratch.row);
                run::<Decoded>(isa, job, row..end, &scratch.row);
                row = end;
            }
        }
    }
}

/// Elements of weights.
trait Element {
    /// What rows are made of.
    type Unit;
    /// Units of 16 elements.
    const UNITS: usize;
    /// Does the first row lie at the start, not that of the job's first row?
    const IS_DECODED: bool = false;

    /// 16 elements.
    fn load<L: Lanes>(l: L, units: &[Self::Unit]) -> L::V;
}

struct F32;
struct F16;
struct BF16;
struct Decoded;

impl Element for F32 {
    type Unit = u8;
    const UNITS: usize = 64;

    #[inline(always)]
    fn load<L: Lanes>(l: L, units: &[u8]) -> L::V {
        let mut bytes = [0; 64];
        bytes[..units.len()].copy_from_slice(units);
        let mut x = [0.0; LANES];
        for i in 0..LANES {
            x[i] = f32::from_le_bytes(*bytes[4 * i..].first_chunk().expect("4 bytes"));
        }
        l.load(&x)
    }
}

impl Element for F16 {
    type Unit = u8;
    const UNITS: usize = 32;

    #[inline(always)]
    fn load<L: Lanes>(l: L, units: &[u8]) -> L::V {
        l.load_f16(&halves(units))
    }
}

impl Element for BF16 {
    type Unit = u8;
    const UNITS: usize = 32;

    #[inline(always)]
    fn load<L: Lanes>(l: L, units: &[u8]) -> L::V {
        let halves = halves(units);
        let mut bits = [0; LANES];
        for i in 0..LANES {
            bits[i] = (halves[i] as u32) << 16;
        }
        let mut x = [0.0; LANES];
        for i in 0..LANES {
            x[i] = f32::from_bits(bits[i]);
        }
        l.load(&x)
    }
}

/// 16 elements of two bytes; zeros where `units` has ended.
#[inline(always)]
fn halves(units: &[u8]) -> [u16; LANES] {
    let mut bytes = [0; 2 * LANES];
    bytes[..units.len()].copy_from_slice(units);
    let mut halves = [0; LANES];
    for i in 0..LANES {
        halves[i] = u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
    }
    halves
}

impl Element for Decoded {
    type Unit = f32;
    const UNITS: usize = LANES;
    const IS_DECODED: bool = true;

    #[inline(always)]
    fn load<L: Lanes>(l: L, units: &[f32]) -> L::V {
        l.load_part(units)
    }
}

/// Products of some rows of a job.
struct Dots<'a, E: Element> {
    job: &'a Job<'a>,
    rows: Range<usize>,
    weights: &'a [E::Unit],
    element: PhantomData<E>,
}

fn run<E: Element>(isa: Available, job: &Job<'_>, rows: Range<usize>, weights: &[E::Unit]) {
    isa.run(Dots::<E> {
        job,
        rows,
        weights,
        element: PhantomData,
    });
}

impl<E: Element> Kernel for Dots<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        // As many sums as fit the registers.
        if L::QUERIES == 4 {
            self.blocks::<L, 4>(l);
        } else {
            self.blocks::<L, 2>(l);
        }
    }
}

impl<E: Element> Dots<'_, E> {
    /// All products, `N` weight rows and `N` activation rows at once.
    #[inline(always)]
    fn blocks<L: Lanes, const N: usize>(&self, l: L) {
        let n = self.job.x.len() / self.job.cols;
        let mut row = self.rows.start;
        while row < self.rows.end {
            let is_whole = self.rows.end - row >= N;
            let mut c = 0;
            while n - c >= N && is_whole {
                self.block::<L, N, N>(l, row, c);
                c += N;
            }
            while c < n {
                if is_whole {
                    self.block::<L, N, 1>(l, row, c);
                } else {
                    self.block::<L, 1, 1>(l, row, c);
                }
                c += 1;
            }
            row += if is_whole { N } else { 1 };
        }
    }

    /// `R` rows from `row` on with `C` activation rows from `col` on.
    #[inline(always)]
    fn block<L: Lanes, const R: usize, const C: usize>(&self, l: L, row: usize, col: usize) {
        let cols = self.job.cols;
        let units = cols * E::UNITS / LANES;
        let first = if E::IS_DECODED {
            row - self.rows.start
        } else {
            row
        };
        let mut w: [&[E::Unit]; R] = [&[]; R];
        for r in 0..R {
            w[r] = &self.weights[(first + r) * units..][..units];
        }
        let mut x: [&[f32]; C] = [&[]; C];
        for c in 0..C {
            x[c] = &self.job.x[(col + c) * cols..][..cols];
        }
        let mut sums = [[l.splat(0.0); R]; C];
        let (whole, rest) = (cols / LANES, cols % LANES);
        for k in 0..whole {
            let mut wk = [l.splat(0.0); R];
            for r in 0..R {
                wk[r] = E::load(l, &w[r][k * E::UNITS..][..E::UNITS]);
            }
            for c in 0..C {
                let xk: &[f32; LANES] = x[c][k * LANES..].first_chunk().expect("16 elements");
                let xk = l.load(xk);
                for r in 0..R {
                    sums[c][r] = l.fma(wk[r], xk, sums[c][r]);
                }
            }
        }
        if rest > 0 {
            for c in 0..C {
                let xk = l.load_part(&x[c][whole * LANES..]);
                for r in 0..R {
                    let wk = E::load(l, &w[r][whole * E::UNITS..]);
                    sums[c][r] = l.fma(wk, xk, sums[c][r]);
                }
            }
        }
        for c in 0..C {
            let mut out = [0.0; R];
            for r in 0..R {
                out[r] = l.sum(sums[c][r]);
            }
            // SAFETY: whoever made the job keeps the columns `rows` to it.
            unsafe { self.job.out.write(col + c, row, &out) }
        }
    }
}
