//! What is done with the blocks of a tile: one row of activations or a few at a time
//! against codes that are unpacked once.

use super::prefetch::prefetch_ahead;
use super::simd::{Rows, Scalar, Simd};
use super::walk::{Accumulate, Chains, Job, Scratch};
use super::{Block, Codes, Pairs, SuperBlock, Unpacked};
use crate::activation::Activations;
use std::ops::Range;

/// Blocks of 32 that a tile holds.
pub(super) const TILE_BLOCKS: usize = 8;

/// Calls `$step` with 8, 4, 2 or 1 columns at a time until all are done.
macro_rules! by_columns {
    ($s:ty, $n:expr, |$at:ident| $step:ident($($arg:expr),*)) => {{
        let n: usize = $n;
        let mut $at = 0;
        while <$s>::COLUMNS >= 8 && n - $at >= 8 {
            $step::<$s, F, 8>($($arg),*);
            $at += 8;
        }
        while <$s>::COLUMNS >= 4 && n - $at >= 4 {
            $step::<$s, F, 4>($($arg),*);
            $at += 4;
        }
        while <$s>::COLUMNS >= 2 && n - $at >= 2 {
            $step::<$s, F, 2>($($arg),*);
            $at += 2;
        }
        while n - $at >= 1 {
            $step::<$s, F, 1>($($arg),*);
            $at += 1;
        }
    }};
}

/// A super-block's tile, reused.
#[repr(align(64))]
pub(super) struct Super<S: Simd, F: SuperBlock> {
    /// Its parts.
    pub(super) codes: [Codes<S>; 4],
    /// Scales of the halves of each run in `codes`, as [`Simd::scale`] makes them.
    scales: [[[S::I; 2]; 2]; 4],
    /// Two i16 for two consecutive groups, for [`Simd::add_pairs`].
    pairs: [S::I; 8],
    d: S::F,
    /// Unless [`Pairs::Minima`], unused.
    dmin: S::F,
    format: std::marker::PhantomData<F>,
}

impl<S: Simd, F: SuperBlock> Super<S, F> {
    /// Nothing yet.
    #[inline(always)]
    pub(super) fn new(s: S) -> Super<S, F> {
        let (zero, zero_f32) = (s.splat(0), s.splat_f32(0.0));
        Super {
            codes: [[[zero; 8]; 2]; 4],
            scales: [[[zero; 2]; 2]; 4],
            pairs: [zero; 8],
            d: zero_f32,
            dmin: zero_f32,
            format: std::marker::PhantomData,
        }
    }

    /// Unpacks a block; its head is for whoever wants the scales as they are.
    #[inline(always)]
    pub(super) fn unpack(&mut self, s: S, rows: &Rows) -> F::Head<S> {
        let head = F::head(s, rows);
        let mut kept = [s.splat(0); 8];
        self.codes[0] = F::part(s, rows, &head, 0, &mut kept);
        prefetch_ahead(rows, F::BYTES, (0, 4));
        self.codes[1] = F::part(s, rows, &head, 1, &mut kept);
        prefetch_ahead(rows, F::BYTES, (1, 4));
        self.codes[2] = F::part(s, rows, &head, 2, &mut kept);
        prefetch_ahead(rows, F::BYTES, (2, 4));
        self.codes[3] = F::part(s, rows, &head, 3, &mut kept);
        prefetch_ahead(rows, F::BYTES, (3, 4));
        for part in 0..4 {
            for r in 0..2 {
                self.scales[part][r] = scales::<S, F>(s, &head, F::runs(part)[r]);
            }
        }
        for p in 0..128 / F::GROUP {
            self.pairs[p] = F::pair(s, &head, p);
        }
        (self.d, self.dmin) = F::factors(s, &head);
        head
    }

    /// Adds the products of the pairs with the sums of the `C` columns from `at` on.
    #[inline(always)]
    pub(super) fn add_pairs<const C: usize>(
        &self,
        s: S,
        x: &SuperColumns<'_>,
        at: usize,
        to: &mut [S::I; C],
    ) {
        if F::GROUP == 16 {
            add_pairs::<S, C, 8>(s, &self.pairs, columns(x.sums16, at), to);
        } else {
            add_pairs::<S, C, 4>(s, &self.pairs, columns(x.sums32, at), to);
        }
    }

    /// Adds the block's product with a column, from its integers, to a chain.
    #[inline(always)]
    pub(super) fn add_to_chain(&self, s: S, integers: (S::I, S::I), dy: f32, sum: S::F) -> S::F {
        add_to_chain::<S, F>(s, (self.d, self.dmin), integers, dy, sum)
    }
}

impl<S: Simd, F: SuperBlock> Accumulate<S> for Super<S, F> {
    const BLOCK_BYTES: usize = F::BYTES;
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn add(
        &mut self,
        s: S,
        rows: Rows,
        blocks: Range<usize>,
        x: &Activations,
        mut sums: Chains<'_>,
    ) {
        let n = sums.n_rows();
        let x = x.super_block(blocks.start);
        // More would not stay in the registers.
        let has_room = F::GROUP == 32 && S::COLUMNS >= 8;
        match n {
            1 => return add_few::<S, F, 1>(s, &rows, &x, &mut sums),
            2 if has_room => return add_few::<S, F, 2>(s, &rows, &x, &mut sums),
            3 if has_room => return add_few::<S, F, 3>(s, &rows, &x, &mut sums),
            4 if has_room => return add_few::<S, F, 4>(s, &rows, &x, &mut sums),
            _ => {}
        }
        self.unpack(s, &rows);
        by_columns!(S, n, |at| add_super(s, self, &x, at, &mut sums));
    }
}

/// Adds the product of a block with the only `C` rows of activations to their sums.
/// Nothing of the tile is stored: a store whose address differs from a load of
/// weights by a multiple of 4 KiB delays it.
#[inline(always)]
fn add_few<S: Simd, F: SuperBlock, const C: usize>(
    s: S,
    rows: &Rows,
    x: &SuperColumns<'_>,
    sums: &mut Chains<'_>,
) {
    // With one, the next block's arithmetic overlaps already, and registers are scarce.
    if C == 1 {
        prefetch_ahead(rows, F::BYTES, (0, 1));
    }
    let head = F::head(s, rows);
    let mut kept = [s.splat(0); 8];
    let mut dots = [s.splat(0); C];
    let x_codes: &[[[i32; 8]; 8]; C] = columns(x.codes, 0);
    let codes = F::part(s, rows, &head, 0, &mut kept);
    if C > 1 {
        prefetch_ahead(rows, F::BYTES, (0, 4));
    }
    add_part::<S, F, C>(s, &mut dots, &head, &codes, 0, x_codes);
    let codes = F::part(s, rows, &head, 1, &mut kept);
    if C > 1 {
        prefetch_ahead(rows, F::BYTES, (1, 4));
    }
    add_part::<S, F, C>(s, &mut dots, &head, &codes, 1, x_codes);
    let codes = F::part(s, rows, &head, 2, &mut kept);
    if C > 1 {
        prefetch_ahead(rows, F::BYTES, (2, 4));
    }
    add_part::<S, F, C>(s, &mut dots, &head, &codes, 2, x_codes);
    let codes = F::part(s, rows, &head, 3, &mut kept);
    if C > 1 {
        prefetch_ahead(rows, F::BYTES, (3, 4));
    }
    add_part::<S, F, C>(s, &mut dots, &head, &codes, 3, x_codes);
    let mut minima = [s.splat(0); C];
    if F::pairs(s) != Pairs::None {
        let to = if F::pairs(s) == Pairs::Minima {
            &mut minima
        } else {
            &mut dots
        };
        for p in 0..128 / F::GROUP {
            let pair = F::pair(s, &head, p);
            each_column!(c < C, {
                let x = if F::GROUP == 16 {
                    x.sums16[c][p]
                } else {
                    x.sums32[c][p]
                };
                to[c] = s.add_pairs(to[c], pair, x);
            });
        }
    }
    let factors = F::factors(s, &head);
    each_column!(c < C, {
        let integers = (dots[c], minima[c]);
        let sum = add_to_chain::<S, F>(s, factors, integers, x.dy[c], sums.load(s, c));
        sums.store(s, c, sum);
    });
}

/// Scales of the halves of run `run`.
#[inline(always)]
fn scales<S: Simd, F: SuperBlock>(s: S, head: &F::Head<S>, run: usize) -> [S::I; 2] {
    if F::GROUP == 32 {
        [s.scale(F::scale(s, head, run), F::MAX_CODE); 2]
    } else {
        [
            s.scale(F::scale(s, head, 2 * run), F::MAX_CODE),
            s.scale(F::scale(s, head, 2 * run + 1), F::MAX_CODE),
        ]
    }
}

/// Adds the integer products of a part with `C` rows of activations.
#[inline(always)]
fn add_part<S: Simd, F: SuperBlock, const C: usize>(
    s: S,
    dots: &mut [S::I; C],
    head: &F::Head<S>,
    codes: &Codes<S>,
    part: usize,
    x_codes: &[[[i32; 8]; 8]; C],
) {
    for (codes, run) in codes.iter().zip(F::runs(part)) {
        let scales = scales::<S, F>(s, head, run);
        let x = runs(x_codes, run);
        s.add_scaled(dots, codes, &x, scales, (F::GROUP, F::MAX_CODE));
    }
}

/// Run `run` of each column.
#[inline(always)]
fn runs<const C: usize>(x_codes: &[[[i32; 8]; 8]; C], run: usize) -> [&[i32; 8]; C] {
    let mut x = [&x_codes[0][run]; C];
    each_column!(c < C, {
        x[c] = &x_codes[c][run];
    });
    x
}

/// `sum = fma(dy, t, sum)` of a super-block with `d, dmin` and `I_b, M_b`.
#[inline(always)]
fn add_to_chain<S: Simd, F: SuperBlock>(
    s: S,
    (d, dmin): (S::F, S::F),
    (dot, min): (S::I, S::I),
    dy: f32,
    sum: S::F,
) -> S::F {
    let dot = s.float(dot);
    let t = if F::pairs(s) == Pairs::Minima {
        s.fms(d, dot, s.mul_f32(dmin, s.float(min)))
    } else {
        s.mul_f32(d, dot)
    };
    s.fma(s.splat_f32(dy), t, sum)
}

/// A block of activations of all rows, a scale per 256.
pub(crate) struct SuperColumns<'a> {
    /// Codes, four a word, in runs of 32.
    pub(crate) codes: &'a [[[i32; 8]; 8]],
    /// Scales.
    pub(crate) dy: &'a [f32],
    /// Pairs of sums of 16.
    pub(crate) sums16: &'a [[i32; 8]],
    /// Pairs of sums of 32.
    pub(crate) sums32: &'a [[i32; 4]],
}

/// Adds the product of a tile with the `C` columns from `at` on to their sums.
#[inline(always)]
fn add_super<S: Simd, F: SuperBlock, const C: usize>(
    s: S,
    tile: &Super<S, F>,
    x: &SuperColumns<'_>,
    at: usize,
    sums: &mut Chains<'_>,
) {
    let mut dots = [s.splat(0); C];
    let x_codes: &[[[i32; 8]; 8]; C] = columns(x.codes, at);
    for part in 0..4 {
        for (r, run) in F::runs(part).into_iter().enumerate() {
            let (codes, scales) = (&tile.codes[part][r], tile.scales[part][r]);
            let x = runs(x_codes, run);
            s.add_scaled(&mut dots, codes, &x, scales, (F::GROUP, F::MAX_CODE));
        }
    }
    let mut minima = [s.splat(0); C];
    let pairs = F::pairs(s);
    if pairs != Pairs::None {
        let to = if pairs == Pairs::Minima {
            &mut minima
        } else {
            &mut dots
        };
        tile.add_pairs(s, x, at, to);
    }
    let dy: &[f32; C] = columns(x.dy, at);
    each_column!(c < C, {
        let sum = sums.load(s, at + c);
        let sum = tile.add_to_chain(s, (dots[c], minima[c]), dy[c], sum);
        sums.store(s, at + c, sum);
    });
}

/// Adds the products of the tile's pairs with the columns' sums.
#[inline(always)]
fn add_pairs<S: Simd, const C: usize, const N: usize>(
    s: S,
    pairs: &[S::I; 8],
    x: &[[i32; N]; C],
    to: &mut [S::I; C],
) {
    for p in 0..N {
        each_column!(c < C, {
            to[c] = s.add_pairs(to[c], pairs[p], x[c][p]);
        });
    }
}

/// `C` columns from `at` on.
#[inline(always)]
fn columns<T, const C: usize>(all: &[T], at: usize) -> &[T; C] {
    all[at..].first_chunk().expect("as many columns")
}

/// A tile of blocks of 32, reused.
pub(super) struct Blocks<S: Simd, F: Block> {
    tile: [Unpacked<S>; TILE_BLOCKS],
    format: std::marker::PhantomData<F>,
}

impl<S: Simd, F: Block> Blocks<S, F> {
    /// Nothing yet.
    #[inline(always)]
    pub(super) fn new(s: S) -> Blocks<S, F> {
        let (zero, zero_f32) = (s.splat(0), s.splat_f32(0.0));
        let block = Unpacked {
            codes: [zero; 8],
            d: zero_f32,
            min: zero_f32,
        };
        Blocks {
            tile: [block; TILE_BLOCKS],
            format: std::marker::PhantomData,
        }
    }

    /// Unpacks `n_blocks` blocks of whole rows, the first of which is at `rows`.
    #[inline(always)]
    pub(super) fn unpack(&mut self, s: S, rows: &Rows, n_blocks: usize) -> &[Unpacked<S>] {
        for j in 0..n_blocks {
            prefetch_ahead(rows, n_blocks * F::BYTES, (j, n_blocks));
            // SAFETY: so many blocks are there.
            let rows = unsafe { rows.skip(j) };
            self.tile[j] = F::unpack(s, &rows);
        }
        &self.tile[..n_blocks]
    }
}

impl<S: Simd> Unpacked<S> {
    /// `fma(dy, t, chain)` of a block whose codes as unpacked give `dot`.
    #[inline(always)]
    pub(super) fn add_to_chain<F: Block>(
        &self,
        s: S,
        dot: S::I,
        (dy, code_sum): (f32, f32),
        chain: S::F,
    ) -> S::F {
        let mut dot = s.float(dot);
        let code_sum = s.splat_f32(code_sum);
        if F::offset(s) != 0 {
            // Exact: integers below 2^24.
            dot = s.fma(s.splat_f32(-F::offset(s) as f32), code_sum, dot);
        }
        let t = if F::HAS_MIN {
            s.fma(self.d, dot, s.mul_f32(self.min, code_sum))
        } else {
            s.mul_f32(self.d, dot)
        };
        s.fma(s.splat_f32(dy), t, chain)
    }
}

impl<S: Simd, F: Block> Accumulate<S> for Blocks<S, F> {
    const BLOCK_BYTES: usize = F::BYTES;
    const BLOCKS: usize = TILE_BLOCKS;

    #[inline(always)]
    fn add(
        &mut self,
        s: S,
        rows: Rows,
        blocks: Range<usize>,
        x: &Activations,
        mut sums: Chains<'_>,
    ) {
        let n_blocks = blocks.len();
        let n = sums.n_rows();
        if n == 1 {
            // In turn, as above.
            let mut chain = [sums.load(s, 0)];
            prefetch_ahead(&rows, n_blocks * F::BYTES, (0, 1));
            for (j, b) in blocks.enumerate() {
                // SAFETY: `rows` are the first of `n_blocks` blocks of whole rows.
                let rows = unsafe { rows.skip(j) };
                let x = x.blocks(b..b + 1);
                add_block::<S, F, 1>(s, &F::unpack(s, &rows), &x, 0, &mut chain);
            }
            sums.store(s, 0, chain[0]);
            return;
        }
        let tile = self.unpack(s, &rows, n_blocks);
        let x = x.blocks(blocks);
        by_columns!(S, n, |at| add_blocks(s, tile, &x, at, &mut sums));
    }
}

/// Blocks of activations of all rows, a scale per 32: `[block][n_rows]`.
pub(crate) struct BlockColumns<'a> {
    /// Codes, four a word.
    pub(crate) codes: &'a [[i32; 8]],
    /// Scales.
    pub(crate) dy: &'a [f32],
    /// Sums of the codes.
    pub(crate) sums: &'a [f32],
    /// Columns of a block.
    pub(crate) n_rows: usize,
}

/// Adds the products of a tile's blocks with the `C` columns from `at` on.
#[inline(always)]
fn add_blocks<S: Simd, F: Block, const C: usize>(
    s: S,
    tile: &[Unpacked<S>],
    x: &BlockColumns<'_>,
    at: usize,
    sums: &mut Chains<'_>,
) {
    let mut chains = [s.splat_f32(0.0); C];
    each_column!(c < C, {
        chains[c] = sums.load(s, at + c);
    });
    for (j, block) in tile.iter().enumerate() {
        add_block::<S, F, C>(s, block, x, j * x.n_rows + at, &mut chains);
    }
    each_column!(c < C, {
        sums.store(s, at + c, chains[c]);
    });
}

/// Adds the products of a block with the `C` columns from `at` on to their chains.
#[inline(always)]
fn add_block<S: Simd, F: Block, const C: usize>(
    s: S,
    block: &Unpacked<S>,
    x: &BlockColumns<'_>,
    at: usize,
    chains: &mut [S::F; C],
) {
    let codes: &[[i32; 8]; C] = columns(x.codes, at);
    let dy: &[f32; C] = columns(x.dy, at);
    let code_sums: &[f32; C] = columns(x.sums, at);
    let mut x = [&codes[0]; C];
    each_column!(c < C, {
        x[c] = &codes[c];
    });
    let dots = s.dots(&block.codes, &x, F::MAX_CODE);
    each_column!(c < C, {
        let scale_and_sum = (dy[c], code_sums[c]);
        chains[c] = block.add_to_chain::<F>(s, dots[c], scale_and_sum, chains[c]);
    });
}

/// The job, for an encoding in super-blocks.
#[inline(always)]
pub(super) fn products256<S: Simd, F: SuperBlock>(s: S, job: &Job<'_>, scratch: &mut Scratch) {
    let mut accumulate = Super::<S, F>::new(s);
    job.walk(s, &mut accumulate, scratch);
}

/// The job, for an encoding in blocks.
#[inline(always)]
pub(super) fn products32<S: Simd, F: Block>(s: S, job: &Job<'_>, scratch: &mut Scratch) {
    let mut accumulate = Blocks::<S, F>::new(s);
    job.walk(s, &mut accumulate, scratch);
}

/// As [`products256`], in plain Rust.
pub(super) fn scalar256<F: SuperBlock>(job: &Job<'_>, scratch: &mut Scratch) {
    products256::<Scalar, F>(Scalar, job, scratch);
}

/// As [`products32`], in plain Rust.
pub(super) fn scalar32<F: Block>(job: &Job<'_>, scratch: &mut Scratch) {
    products32::<Scalar, F>(Scalar, job, scratch);
}
