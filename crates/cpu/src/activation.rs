//! Activations in the form that products read: int8 with scales, or f32.
//!
//! One op that feeds several products (q, k, v, gate) converts its rows once.
//! What a reader would get wrong: integer forms lie block by block, not row by
//! row: block `b` of all rows, then block `b + 1`; so a tile of weights meets
//! one contiguous stretch of activations.

use crate::Isa;
use crate::quant::{BlockColumns, SuperColumns};
use std::cell::UnsafeCell;
use std::ops::Range;

/// The form of activations that a product reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationKind {
    /// As they are.
    F32,
    /// int8 with one scale per 256: K-quants and IQ4_XS.
    Int8Per256,
    /// int8 with one scale per 32: the encodings with blocks of 32.
    Int8Per32,
}

impl ActivationKind {
    /// Elements that share a scale; 1 for f32.
    pub fn block_len(self) -> usize {
        match self {
            ActivationKind::F32 => 1,
            ActivationKind::Int8Per256 => 256,
            ActivationKind::Int8Per32 => 32,
        }
    }
}

/// A growing buffer whose parts several threads write at once.
struct Shared<T>(UnsafeCell<Vec<T>>);

// SAFETY: all access from several threads at once goes through `Shared::part`,
// whose callers promise that no two of them overlap.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T: Copy + Default> Shared<T> {
    fn new() -> Shared<T> {
        Shared(UnsafeCell::new(Vec::new()))
    }

    /// Room for `n` elements; what was there is lost.
    fn grow(&mut self, n: usize) {
        let data = self.0.get_mut();
        if data.len() < n {
            *data = vec![T::default(); n];
        }
    }

    /// All elements.
    fn all(&self) -> &[T] {
        // SAFETY: readers come after writers (`Activations::fill_rows`).
        unsafe { &*self.0.get() }
    }

    /// The elements `at .. at + n`, for writing.
    ///
    /// # Safety
    /// Nothing else reads or writes them meanwhile.
    #[allow(clippy::mut_from_ref)] // that is what the caller's promise is about
    unsafe fn part(&self, at: usize, n: usize) -> &mut [T] {
        assert!(at + n <= self.all().len(), "a part of the buffer");
        let start = self.all().as_ptr().cast_mut();
        // SAFETY: the part lies inside the buffer.
        let part = unsafe { start.add(at) };
        // SAFETY: initialized, and the caller promises that it is not shared.
        unsafe { std::slice::from_raw_parts_mut(part, n) }
    }
}

/// `[n_rows, cols]` activations, ready for products of one kind.
///
/// The buffers are kept: once grown, nothing is allocated.
///
/// int8 form of a block: `max` its largest magnitude, `dy = max / 127`,
/// `q = rint(x * (127 / max))` (halves to even). A block of zeros, or of values
/// so small that `127 / max` overflows, gives `q = 0, dy = 0`; a block with a
/// value that is not finite gives `q = 0, dy = NaN`.
pub struct Activations {
    kind: ActivationKind,
    n_rows: usize,
    cols: usize,
    /// F32: the rows, `[n_rows][cols]`.
    values: Shared<f32>,
    /// int8: four codes a word, little-endian, `[block][n_rows][block_len / 4]`.
    codes: Shared<i32>,
    /// int8: `dy`, `[block][n_rows]`.
    scales: Shared<f32>,
    /// Per 256: pairs of i16 sums of 16 codes, `[block][n_rows][8]`.
    sums16: Shared<i32>,
    /// Per 256: pairs of i16 sums of 32 codes, `[block][n_rows][4]`.
    sums32: Shared<i32>,
    /// Per 32: the sum of the codes, `[block][n_rows]`.
    sums: Shared<f32>,
}

impl Default for Activations {
    fn default() -> Activations {
        Activations::new()
    }
}

impl Activations {
    /// No rows.
    pub fn new() -> Activations {
        Activations {
            kind: ActivationKind::F32,
            n_rows: 0,
            cols: 0,
            values: Shared::new(),
            codes: Shared::new(),
            scales: Shared::new(),
            sums16: Shared::new(),
            sums32: Shared::new(),
            sums: Shared::new(),
        }
    }

    /// Makes room for `n_rows` rows of `cols` elements; they must be filled
    /// before they are read. `cols` is a multiple of the kind's block.
    ///
    /// # Panics
    /// If it is not: [`crate::Matrix::new`] has checked it for its weights.
    pub fn resize(&mut self, kind: ActivationKind, n_rows: usize, cols: usize) {
        let block = kind.block_len();
        assert!(
            cols.is_multiple_of(block),
            "{cols} columns in blocks of {block}"
        );
        (self.kind, self.n_rows, self.cols) = (kind, n_rows, cols);
        let n_blocks = cols / block * n_rows;
        match kind {
            ActivationKind::F32 => self.values.grow(n_rows * cols),
            ActivationKind::Int8Per256 => {
                self.codes.grow(n_blocks * 64);
                self.scales.grow(n_blocks);
                self.sums16.grow(n_blocks * 8);
                self.sums32.grow(n_blocks * 4);
            }
            ActivationKind::Int8Per32 => {
                self.codes.grow(n_blocks * 8);
                self.scales.grow(n_blocks);
                self.sums.grow(n_blocks);
            }
        }
    }

    /// The form.
    pub fn kind(&self) -> ActivationKind {
        self.kind
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes that the buffers take.
    pub fn bytes(&self) -> usize {
        let words = [&self.codes, &self.sums16, &self.sums32].map(|b| b.all().len());
        let floats = [&self.values, &self.scales, &self.sums].map(|b| b.all().len());
        4 * (words.iter().sum::<usize>() + floats.iter().sum::<usize>())
    }

    /// Converts the rows `rows` of `x`, which holds all rows, `[n_rows, cols]`.
    /// Several threads may fill different rows at once.
    ///
    /// # Safety
    /// No other thread fills or reads any of these rows meanwhile, and no thread
    /// multiplies with `self` meanwhile.
    pub unsafe fn fill_rows(&self, isa: Isa, x: &[f32], rows: Range<usize>) {
        assert!(rows.end <= self.n_rows, "rows {rows:?} of {}", self.n_rows);
        assert_eq!(x.len(), self.n_rows * self.cols, "activations of all rows");
        assert!(isa.is_available(), "{isa} on a machine without it");
        for r in rows {
            let x = &x[r * self.cols..][..self.cols];
            match isa {
                // SAFETY: as the caller promises.
                Isa::Scalar => unsafe { self.fill_row(x, r) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the instructions are there, and as the caller promises.
                Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { self.fill_row_avx2(x, r) },
                #[cfg(not(target_arch = "x86_64"))]
                Isa::Avx2 | Isa::Avx512 | Isa::Amx => unreachable!("checked above"),
            }
        }
    }

    /// [`Activations::fill_row`], compiled with AVX2.
    ///
    /// # Safety
    /// As for [`Activations::fill_rows`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn fill_row_avx2(&self, x: &[f32], r: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.fill_row(x, r) }
    }

    /// Converts row `r`.
    ///
    /// # Safety
    /// As for [`Activations::fill_rows`].
    #[inline(always)]
    unsafe fn fill_row(&self, x: &[f32], r: usize) {
        let n = self.n_rows;
        match self.kind {
            ActivationKind::F32 => {
                // SAFETY: the row is this call's own.
                let to = unsafe { self.values.part(r * self.cols, self.cols) };
                to.copy_from_slice(x);
            }
            ActivationKind::Int8Per256 => {
                for (b, x) in x.as_chunks::<256>().0.iter().enumerate() {
                    let at = b * n + r;
                    // SAFETY: the row is this call's own.
                    let codes = unsafe { self.codes.part(at * 64, 64) };
                    // SAFETY: likewise.
                    let dy = unsafe { self.scales.part(at, 1) };
                    dy[0] = quantize(x, codes);
                    // SAFETY: likewise.
                    let sums16 = unsafe { self.sums16.part(at * 8, 8) };
                    // SAFETY: likewise.
                    let sums32 = unsafe { self.sums32.part(at * 4, 4) };
                    sum_groups(codes, sums16, sums32);
                }
            }
            ActivationKind::Int8Per32 => {
                for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
                    let at = b * n + r;
                    // SAFETY: the row is this call's own.
                    let codes = unsafe { self.codes.part(at * 8, 8) };
                    // SAFETY: likewise.
                    let dy = unsafe { self.scales.part(at, 1) };
                    dy[0] = quantize(x, codes);
                    // SAFETY: likewise.
                    let sums = unsafe { self.sums.part(at, 1) };
                    sums[0] = codes.iter().map(|&c| sum_bytes(c)).sum::<i32>() as f32;
                }
            }
        }
    }

    /// The rows of a [`ActivationKind::F32`] form, `[n_rows][cols]`.
    pub(crate) fn rows(&self) -> &[f32] {
        &self.values.all()[..self.n_rows * self.cols]
    }

    /// Block `b` of all rows of a [`ActivationKind::Int8Per256`] form.
    #[inline(always)]
    pub(crate) fn super_block(&self, b: usize) -> SuperColumns<'_> {
        let (at, n) = (b * self.n_rows, self.n_rows);
        SuperColumns {
            codes: self.codes.all()[at * 64..][..n * 64]
                .as_chunks()
                .0
                .as_chunks()
                .0,
            dy: &self.scales.all()[at..][..n],
            sums16: self.sums16.all()[at * 8..][..n * 8].as_chunks().0,
            sums32: self.sums32.all()[at * 4..][..n * 4].as_chunks().0,
        }
    }

    /// Blocks of all rows of a [`ActivationKind::Int8Per32`] form.
    #[inline(always)]
    pub(crate) fn blocks(&self, blocks: Range<usize>) -> BlockColumns<'_> {
        let n = self.n_rows;
        let (at, len) = (blocks.start * n, blocks.len() * n);
        BlockColumns {
            codes: self.codes.all()[at * 8..][..len * 8].as_chunks().0,
            dy: &self.scales.all()[at..][..len],
            sums: &self.sums.all()[at..][..len],
            n_rows: n,
        }
    }

    /// Converts all rows of `x`, `[n_rows, cols]`.
    pub fn fill(&mut self, isa: Isa, x: &[f32]) {
        // SAFETY: `self` is borrowed mutably, so nothing else uses it.
        unsafe { self.fill_rows(isa, x, 0..self.n_rows) }
    }
}

/// Adding it to `|v| < 2^22` rounds to an integer, halves to even, which then
/// lies in the low bits.
const ROUND: f32 = 12_582_912.0;

/// The codes of a block, four a word; gives `dy`.
#[inline(always)]
fn quantize<const N: usize>(x: &[f32; N], codes: &mut [i32]) -> f32 {
    const INFINITY: u32 = 0x7f80_0000;
    let mut max = 0u32;
    for v in x {
        max = max.max(v.to_bits() & 0x7fff_ffff);
    }
    let inverse = 127.0 / f32::from_bits(max);
    if max >= INFINITY || inverse.is_infinite() {
        codes.fill(0);
        return if max >= INFINITY { f32::NAN } else { 0.0 };
    }
    let mut bytes = [0u8; N];
    for k in 0..N {
        bytes[k] = (x[k] * inverse + ROUND).to_bits() as u8;
    }
    for (code, bytes) in codes.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *code = i32::from_le_bytes(*bytes);
    }
    f32::from_bits(max) / 127.0
}

/// Sum of four signed bytes.
#[inline(always)]
fn sum_bytes(word: i32) -> i32 {
    word.to_le_bytes().map(|b| b as i8 as i32).iter().sum()
}

/// Sums of 16 and of 32 codes as pairs of i16.
#[inline(always)]
fn sum_groups(codes: &[i32], sums16: &mut [i32], sums32: &mut [i32]) {
    let mut sums = [0; 16];
    for (sum, words) in sums.iter_mut().zip(codes.as_chunks::<4>().0) {
        *sum = words.iter().map(|&w| sum_bytes(w)).sum();
    }
    for p in 0..8 {
        sums16[p] = sums[2 * p] & 0xffff | sums[2 * p + 1] << 16;
    }
    for p in 0..4 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| sums[4 * p + i]);
        sums32[p] = (a + b) & 0xffff | (c + d) << 16;
    }
}
