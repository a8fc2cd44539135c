//! Products of quantized weights: how a block is unpacked (one file each) and
//! what is done with it (here).
//!
//! A tile is as many rows as a vector has lanes, and 256 elements of each. It is
//! unpacked straight from the file's layout into a few KiB that stay in the
//! first cache, and then meets every activation row, so that one row and 512
//! rows take the same path. All sums inside a block are exact integers; the
//! chain over the blocks is one fma a block, in the lane of the output row.
//!
//! What a reader would get wrong: `codes[k]` of a tile are the elements
//! `4k .. 4k + 4` of the block in natural order, whatever the encoding's own
//! order is.

/// `$body` for every `$c` below `$n`, which is at most 8, without a loop: only so
/// do sums of columns lie in registers.
macro_rules! each_column {
    ($c:ident < $n:ident, $body:block) => {
        each_column!(@ $c $n $body 0 1 2 3 4 5 6 7)
    };
    (@ $c:ident $n:ident $body:block $($at:literal)*) => {
        $(if $n > $at {
            let $c = $at;
            $body
        })*
    };
}

/// Calls `$super_block::<format>` or `$block::<format>`, as the encoding is.
macro_rules! by_type {
    ($ty:expr, $super_block:ident, $block:ident, $args:tt) => {
        match $ty {
            TensorType::Q2_K => by_type!(@ $super_block, crate::quant::q2_k::Q2K, $args),
            TensorType::Q3_K => by_type!(@ $super_block, crate::quant::q3_k::Q3K, $args),
            TensorType::Q4_K => by_type!(@ $super_block, crate::quant::q4_k::Q4K, $args),
            TensorType::Q5_K => by_type!(@ $super_block, crate::quant::q5_k::Q5K, $args),
            TensorType::Q6_K => by_type!(@ $super_block, crate::quant::q6_k::Q6K, $args),
            TensorType::IQ4_XS => by_type!(@ $super_block, crate::quant::iq4_xs::Iq4Xs, $args),
            TensorType::Q4_0 => by_type!(@ $block, crate::quant::q4_0::Q40, $args),
            TensorType::Q4_1 => by_type!(@ $block, crate::quant::q4_1::Q41, $args),
            TensorType::Q5_0 => by_type!(@ $block, crate::quant::q5_0::Q50, $args),
            TensorType::Q5_1 => by_type!(@ $block, crate::quant::q5_1::Q51, $args),
            TensorType::Q8_0 => by_type!(@ $block, crate::quant::q8_0::Q80, $args),
            TensorType::IQ4_NL => by_type!(@ $block, crate::quant::iq4_nl::Iq4Nl, $args),
            other => unreachable!("no kernel for {other}"),
        }
    };
    (@ $run:ident, $format:ty, ($($arg:expr),*)) => { $run::<$format>($($arg),*) };
}

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod iq4_nl;
mod iq4_xs;
mod prefetch;
mod product;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod simd;
mod walk;

pub(crate) use product::{BlockColumns, SuperColumns};
use product::{scalar32, scalar256};
pub(crate) use simd::Rows;
use simd::Simd;
pub(crate) use walk::{Job, Scratch};

#[cfg(target_arch = "x86_64")]
use crate::Isa;
use crate::lanes::Available;
use gguf::TensorType;

/// What the products of pairs with the activations' sums are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pairs {
    /// Nothing.
    None,
    /// They are the minima of `M_b`.
    Minima,
    /// They are `-offset * scale` and belong to `I_b`.
    Offset,
}

/// An encoding in super-blocks of 256 elements with integer scales.
trait SuperBlock {
    /// Bytes of a block.
    const BYTES: usize;
    /// Elements that share a scale: 16 or 32.
    const GROUP: usize;
    /// Largest code as unpacked: 15, 31, 63, or 255 for eight bits with
    /// [`Simd::CODE_BIAS`].
    const MAX_CODE: i32;

    /// What [`SuperBlock::pair`] is for.
    fn pairs<S: Simd>(s: S) -> Pairs;

    /// What all parts need of a block.
    type Head<S: Simd>: Copy;

    /// Reads the head.
    fn head<S: Simd>(s: S, rows: &Rows) -> Self::Head<S>;

    /// `d`, and `dmin` if the pairs are minima.
    fn factors<S: Simd>(s: S, head: &Self::Head<S>) -> (S::F, S::F);

    /// Scale of group `group`, an i16 in an i32.
    fn scale<S: Simd>(s: S, head: &Self::Head<S>, group: usize) -> S::I;

    /// Two i16 for the groups `2 * p` and `2 * p + 1`: see [`Pairs`].
    fn pair<S: Simd>(s: S, head: &Self::Head<S>, p: usize) -> S::I;

    /// Which runs of 32 elements make up part `part` of 4.
    #[inline(always)]
    fn runs(part: usize) -> [usize; 2] {
        [2 * part, 2 * part + 1]
    }

    /// The codes of part `part`. `kept` is what part `part - 1` left there.
    fn part<S: Simd>(
        s: S,
        rows: &Rows,
        head: &Self::Head<S>,
        part: usize,
        kept: &mut [S::I; 8],
    ) -> Codes<S>;
}

/// Four codes of each row in a vector: a run of 32 elements, and another.
type Codes<S> = [[<S as Simd>::I; 8]; 2];

/// An encoding in blocks of 32 elements.
trait Block {
    /// Bytes of a block.
    const BYTES: usize;
    /// As in [`SuperBlock`].
    const MAX_CODE: i32;
    /// Is there a minimum to add?
    const HAS_MIN: bool;

    /// What is to be subtracted from a code.
    fn offset<S: Simd>(s: S) -> i32;

    /// Codes, `d` and minimum.
    fn unpack<S: Simd>(s: S, rows: &Rows) -> Unpacked<S>;
}

/// One block of 32 of as many rows as there are lanes.
#[derive(Clone, Copy)]
struct Unpacked<S: Simd> {
    /// Four codes of each row.
    codes: [S::I; 8],
    d: S::F,
    /// Unless [`Block::HAS_MIN`], unused.
    min: S::F,
}

/// Byte `i` of each dword.
#[inline(always)]
fn byte<S: Simd>(s: S, x: S::I, i: usize) -> S::I {
    s.and(s.shr(x, 8 * i as u32), s.splat(255))
}

/// The two f16 of a dword.
#[inline(always)]
fn two_f16<S: Simd>(s: S, x: S::I) -> (S::F, S::F) {
    (s.f16(x), s.f16(s.shr(x, 16)))
}

/// Lower and upper half of every byte.
#[inline(always)]
fn nibbles<S: Simd>(s: S, x: S::I) -> (S::I, S::I) {
    let mask = s.splat(0x0f0f_0f0f);
    (s.and(x, mask), s.and(s.shr(x, 4), mask))
}

/// `low` and `high` as the i16 halves of a dword.
#[inline(always)]
fn pair<S: Simd>(s: S, low: S::I, high: S::I) -> S::I {
    s.or(s.and(low, s.splat(0xffff)), s.shl(high, 16))
}

/// `-2^bits * low` and `-2^bits * high` as the i16 halves of a dword.
#[inline(always)]
fn minus_pair<S: Simd>(s: S, low: S::I, high: S::I, bits: u32) -> S::I {
    let zero = s.splat(0);
    let (low, high) = (s.sub(zero, low), s.sub(zero, high));
    pair(s, s.shl(low, bits), s.shl(high, bits))
}

/// Is there a kernel that multiplies rows of `ty` with int8 activations?
pub(crate) fn has_kernel(ty: TensorType) -> bool {
    use TensorType::{IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    matches!(
        ty,
        Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | IQ4_NL
    )
}

/// Does the work of `job` for an encoding that [`has_kernel`].
pub(crate) fn multiply(isa: Available, ty: TensorType, job: &Job<'_>, scratch: &mut Scratch) {
    #[cfg(target_arch = "x86_64")]
    match isa.isa() {
        Isa::Scalar => by_type!(ty, scalar256, scalar32, (job, scratch)),
        // SAFETY: `isa` proves that the machine has the instructions.
        Isa::Avx2 => unsafe { avx2::multiply(ty, job, scratch) },
        // SAFETY: likewise.
        Isa::Amx if job.x.n_rows() >= amx::MIN_ROWS => unsafe { amx::multiply(ty, job, scratch) },
        // SAFETY: likewise.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::multiply(ty, job, scratch) },
    }
    #[cfg(not(target_arch = "x86_64"))]
    by_type!(ty, scalar256, scalar32, (job, scratch));
}
