//! Products of many rows with AMX: 16 activation rows meet 16 output rows in one
//! instruction.
//!
//! A tile of weights as [`super::simd::Simd`] unpacks it, a vector for each four
//! columns, is what the matrix unit takes for its second operand; the first is
//! activations as they lie. What it gives, a vector of integer sums for each
//! activation row, goes through the same chain of roundings as everywhere.
//!
//! What a reader would get wrong: the scales of a super-block's groups differ, yet
//! its integer sum comes from one accumulation. Each code is multiplied by its
//! group's scale first; the product has 15 bits, and its two bytes are summed apart:
//! `sum(code * scale * q) = sum(low * q) + 256 * sum(high * q)`.
//!
//! Source of the instructions: Intel 64 and IA-32 Architectures Software Developer's
//! Manual, volume 1, chapter 18.

use super::avx512::Avx512;
use super::prefetch::{Cache, LINE_BYTES, prefetch};
use super::product::{Blocks, Super, SuperColumns, TILE_BLOCKS};
use super::simd::{Rows, Simd};
use super::walk::{Accumulate, Chains, Job, Scratch};
use super::{Block, Pairs, SuperBlock};
use crate::activation::Activations;
use gguf::TensorType;
use std::arch::asm;
#[allow(clippy::wildcard_imports)] // intrinsics, all with their own prefix
use std::arch::x86_64::*;
use std::ops::Range;

/// Activation rows and output rows of a tile.
const ROWS: usize = 16;

/// From this many activation rows on it pays.
pub(super) const MIN_ROWS: usize = ROWS;

/// Sums of a tile: `[activation row][output row]`.
type Sums = [[i32; 16]; ROWS];

/// What `ldtilecfg` reads: palette 1, and for each of the eight tiles its bytes a
/// row and its rows.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Sums in tiles 0 to 3; activations, `depth` columns of them, in 4 and 5; weights
    /// in 6 and 7.
    fn new(depth: usize) -> Config {
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        for tile in 0..8 {
            let (row_bytes, rows) = match tile {
                0..4 => (64, ROWS),
                4 | 5 => (depth, ROWS),
                _ => (64, depth / 4),
            };
            config.row_bytes[tile] = row_bytes as u16;
            config.rows[tile] = rows as u8;
        }
        config
    }
}

/// The matrix unit, set up for this thread until the value is dropped.
struct Unit;

impl Unit {
    /// # Safety
    /// The machine has AMX, and the process may use it.
    unsafe fn start(depth: usize) -> Unit {
        let config = Config::new(depth);
        // SAFETY: it reads the 64 bytes of the configuration, which is valid.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags));
        }
        Unit
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        // SAFETY: it only gives the tiles back; nobody else uses them.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
    }
}

/// Does the work of `job`, which has at least [`MIN_ROWS`] activation rows.
///
/// # Safety
/// The machine has AMX and AVX-512, and the process may use both.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn multiply(ty: TensorType, job: &Job<'_>, scratch: &mut Scratch) {
    // SAFETY: promised by the caller.
    unsafe { by_type!(ty, run256, run32, (job, scratch)) }
}

/// The job, for an encoding in super-blocks.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn run256<F: SuperBlock>(job: &Job<'_>, scratch: &mut Scratch) {
    // SAFETY: promised by the caller.
    let unit = unsafe { Unit::start(64) };
    // SAFETY: likewise.
    let s = unsafe { Avx512::new() };
    let mut accumulate = SuperTile {
        tile: Super::<Avx512, F>::new(s),
        products: [[s.splat(0); 64]; 2],
        sums: [[[0; 16]; ROWS]; 4],
        _unit: &unit,
    };
    job.walk(s, &mut accumulate, scratch);
}

/// The job, for an encoding in blocks.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn run32<F: Block>(job: &Job<'_>, scratch: &mut Scratch) {
    // SAFETY: promised by the caller.
    let unit = unsafe { Unit::start(32) };
    // SAFETY: likewise.
    let s = unsafe { Avx512::new() };
    let mut accumulate = BlockTile {
        tile: Blocks::<Avx512, F>::new(s),
        sums: [[[0; 16]; ROWS]; TILE_BLOCKS],
        _unit: &unit,
    };
    job.walk(s, &mut accumulate, scratch);
}

/// First rows of the tiles that cover `n` activation rows: the last is moved up to
/// end with them. With each comes the first row that no tile before has covered.
fn tile_starts(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n)
        .step_by(ROWS)
        .map(move |row| (row.min(n - ROWS), row))
}

/// A super-block's tile, reused.
#[repr(align(64))]
struct SuperTile<'a, F: SuperBlock> {
    tile: Super<Avx512, F>,
    /// Lower and upper bytes of codes times scales, columns `4k .. 4k + 4` in `[k]`.
    products: [[__m512i; 64]; 2],
    /// Of lower and upper bytes, for two tiles of activations.
    sums: [Sums; 4],
    _unit: &'a Unit,
}

impl<F: SuperBlock> Accumulate<Avx512> for SuperTile<'_, F> {
    const BLOCK_BYTES: usize = F::BYTES;
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn add(
        &mut self,
        s: Avx512,
        rows: Rows,
        blocks: Range<usize>,
        x: &Activations,
        mut sums: Chains<'_>,
    ) {
        let x = x.super_block(blocks.start);
        let head = self.tile.unpack(s, &rows);
        for part in 0..4 {
            for (r, run) in F::runs(part).into_iter().enumerate() {
                for half in 0..2 {
                    let group = if F::GROUP == 32 { run } else { 2 * run + half };
                    let scale = F::scale(s, &head, group);
                    for k in 4 * half..4 * half + 4 {
                        let codes = self.tile.codes[part][r][k];
                        let [low, high] = s.times_scale(codes, scale);
                        self.products[0][8 * run + k] = low;
                        self.products[1][8 * run + k] = high;
                    }
                }
            }
        }
        let mut starts = tile_starts(sums.n_rows());
        while let Some(first) = starts.next() {
            let second = starts.next();
            let tiles = [first.0, second.unwrap_or(first).0];
            // SAFETY: a `Unit` is set up for 64 columns; 16 rows from each start lie
            // inside the activations, since `tile_starts` says so.
            unsafe { self.multiply(tiles.map(|t| x.codes[t..t + ROWS].as_ptr().cast())) };
            self.finish(s, &x, first, 0, &mut sums);
            if let Some(second) = second {
                self.finish(s, &x, second, 2, &mut sums);
            }
        }
    }
}

impl<F: SuperBlock> SuperTile<'_, F> {
    /// Sums of the products with two tiles of activations.
    ///
    /// # Safety
    /// A [`Unit`] is set up for 64 columns; 16 rows of 256 bytes lie at each of `x`.
    #[inline(always)]
    unsafe fn multiply(&mut self, x: [*const u8; 2]) {
        // SAFETY: it reads 16 rows of 256 bytes at each of `x` and the products, which
        // have 8 KiB, writes the sums, which have 4 KiB, and uses no other memory.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                ".irp k,0,1,2,3",
                "tileloadd tmm4, [{x0} + {by256} + 64*\\k]",
                "tileloadd tmm6, [{w} + {by64} + 1024*\\k]",
                "tileloadd tmm5, [{x1} + {by256} + 64*\\k]",
                "tileloadd tmm7, [{w} + {by64} + 4096 + 1024*\\k]",
                "tdpbsud tmm0, tmm4, tmm6",
                "tdpbsud tmm2, tmm5, tmm6",
                "tdpbssd tmm1, tmm4, tmm7",
                "tdpbssd tmm3, tmm5, tmm7",
                ".endr",
                "tilestored [{sums} + {by64}], tmm0",
                "tilestored [{sums} + {by64} + 1024], tmm1",
                "tilestored [{sums} + {by64} + 2048], tmm2",
                "tilestored [{sums} + {by64} + 3072], tmm3",
                x0 = in(reg) x[0],
                x1 = in(reg) x[1],
                w = in(reg) self.products.as_ptr(),
                sums = in(reg) self.sums.as_mut_ptr(),
                by256 = in(reg) 256usize,
                by64 = in(reg) 64usize,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Adds the sums from `self.sums[at]` on to the chains of a tile's rows.
    #[inline(always)]
    fn finish(
        &self,
        s: Avx512,
        x: &SuperColumns<'_>,
        (start, first_new): (usize, usize),
        at: usize,
        sums: &mut Chains<'_>,
    ) {
        for r in first_new..start + ROWS {
            prefetch_row(x.codes, r + 2 * ROWS);
            let low = s.load_dwords(&self.sums[at][r - start]);
            let high = s.load_dwords(&self.sums[at + 1][r - start]);
            let dot = s.add(low, s.shl(high, 8));
            let (mut dots, mut minima) = ([dot], [s.splat(0)]);
            if F::pairs(s) != Pairs::None {
                let to = if F::pairs(s) == Pairs::Minima {
                    &mut minima
                } else {
                    &mut dots
                };
                self.tile.add_pairs(s, x, r, to);
            }
            let integers = (dots[0], minima[0]);
            let sum = self
                .tile
                .add_to_chain(s, integers, x.dy[r], sums.load(s, r));
            sums.store(s, r, sum);
        }
    }
}

/// A tile of blocks of 32, reused.
#[repr(align(64))]
struct BlockTile<'a, F: Block> {
    tile: Blocks<Avx512, F>,
    /// Of one tile of activations, block by block.
    sums: [Sums; TILE_BLOCKS],
    _unit: &'a Unit,
}

impl<F: Block> Accumulate<Avx512> for BlockTile<'_, F> {
    const BLOCK_BYTES: usize = F::BYTES;
    const BLOCKS: usize = TILE_BLOCKS;

    #[inline(always)]
    fn add(
        &mut self,
        s: Avx512,
        rows: Rows,
        blocks: Range<usize>,
        x: &Activations,
        mut sums: Chains<'_>,
    ) {
        let n_blocks = blocks.len();
        let tile = self.tile.unpack(s, &rows, n_blocks);
        let x = x.blocks(blocks);
        for (start, first_new) in tile_starts(sums.n_rows()) {
            for (j, block) in tile.iter().enumerate() {
                let codes = &x.codes[j * x.n_rows + start..][..ROWS];
                // SAFETY: a `Unit` is set up for 32 columns; 16 rows of 32 bytes are
                // there, and eight vectors of codes.
                unsafe { multiply32(codes, &block.codes, &mut self.sums[j]) };
            }
            for r in first_new..start + ROWS {
                let mut chain = sums.load(s, r);
                for (j, block) in tile.iter().enumerate() {
                    let dot = s.load_dwords(&self.sums[j][r - start]);
                    let at = j * x.n_rows + r;
                    chain = block.add_to_chain::<F>(s, dot, (x.dy[at], x.sums[at]), chain);
                }
                sums.store(s, r, chain);
            }
        }
    }
}

/// Asks for the codes of row `r`, if there is one: tiles are loaded in strides that
/// the processor does not foresee.
#[inline(always)]
fn prefetch_row(codes: &[[[i32; 8]; 8]], r: usize) {
    let row = codes.as_ptr().wrapping_add(r).cast::<u8>();
    for line in 0..256 / LINE_BYTES {
        prefetch(row.wrapping_add(LINE_BYTES * line), Cache::First);
    }
}

/// Sums of the products of one block with a tile of activations.
///
/// # Safety
/// A [`Unit`] is set up for 32 columns; `x` has 16 rows.
#[inline(always)]
unsafe fn multiply32(x: &[[i32; 8]], codes: &[__m512i; 8], sums: &mut Sums) {
    // SAFETY: it reads 16 rows of 32 bytes and eight vectors, writes the sums, which
    // have 1 KiB, and uses no other memory.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tileloadd tmm4, [{x} + {by32}]",
            "tileloadd tmm6, [{w} + {by64}]",
            "tdpbsud tmm0, tmm4, tmm6",
            "tilestored [{sums} + {by64}], tmm0",
            x = in(reg) x.as_ptr(),
            w = in(reg) codes.as_ptr(),
            sums = in(reg) sums.as_mut_ptr(),
            by32 = in(reg) 32usize,
            by64 = in(reg) 64usize,
            options(nostack, preserves_flags),
        );
    }
}
