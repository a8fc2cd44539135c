//! [`Simd`] with AVX2: 8 rows, products of unsigned and signed bytes in i16.
//!
//! What a reader would get wrong: `maddubs` saturates. It never does here: two
//! products of a code up to 63 and an activation up to 127 fit, eight-bit codes
//! come as magnitude and sign, and sums of pairs are kept below 2^15.

use super::product::{products32, products256};
use super::simd::{Rows, Simd, dwords_of_rows};
use super::walk::{Job, Scratch};
use super::{Block, SuperBlock};
use gguf::TensorType;
#[allow(clippy::wildcard_imports)] // some fifty intrinsics, all with their own prefix
use std::arch::x86_64::*;

/// The instructions are there.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Does the work of `job`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(ty: TensorType, job: &Job<'_>, scratch: &mut Scratch) {
    by_type!(ty, run256, run32, (job, scratch));
}

/// The job, for an encoding in super-blocks.
#[target_feature(enable = "avx2,fma,f16c")]
fn run256<F: SuperBlock>(job: &Job<'_>, scratch: &mut Scratch) {
    products256::<Avx2, F>(Avx2(()), job, scratch);
}

/// The job, for an encoding in blocks.
#[target_feature(enable = "avx2,fma,f16c")]
fn run32<F: Block>(job: &Job<'_>, scratch: &mut Scratch) {
    products32::<Avx2, F>(Avx2(()), job, scratch);
}

/// One instruction.
macro_rules! op {
    ($name:ident($($arg:expr),*)) => { op!($name::<>($($arg),*)) };
    ($name:ident::<$($n:literal)?>($($arg:expr),*)) => {
        // SAFETY: only `run256` and `run32` make an `Avx2`, whose callers have
        // found the instructions.
        unsafe { $name::<$($n)?>($($arg),*) }
    };
}

impl Avx2 {
    #[inline(always)]
    fn load16(self, bytes: &[u8; 16]) -> __m128i {
        op!(_mm_loadu_si128(bytes.as_ptr().cast()))
    }

    #[inline(always)]
    fn load32(self, bytes: &[u8; 32]) -> __m256i {
        op!(_mm256_loadu_si256(bytes.as_ptr().cast()))
    }

    /// Dwords of rows from 16 bytes of rows `p` and `p + 4` in `x[p]`.
    #[inline(always)]
    fn transpose(self, x: [__m256i; 4]) -> [__m256i; 4] {
        let a = op!(_mm256_unpacklo_epi32(x[0], x[1]));
        let b = op!(_mm256_unpackhi_epi32(x[0], x[1]));
        let c = op!(_mm256_unpacklo_epi32(x[2], x[3]));
        let d = op!(_mm256_unpackhi_epi32(x[2], x[3]));
        [
            op!(_mm256_unpacklo_epi64(a, c)),
            op!(_mm256_unpackhi_epi64(a, c)),
            op!(_mm256_unpacklo_epi64(b, d)),
            op!(_mm256_unpackhi_epi64(b, d)),
        ]
    }

    /// `sum + scale * sum_k codes[k] * x[k]`, `scale` in both halves of a lane.
    #[inline(always)]
    fn products(
        self,
        mut sum: __m256i,
        codes: &[__m256i],
        x: &[i32],
        scale: __m256i,
        max_code: i32,
    ) -> __m256i {
        // As many as can be added in i16 before they are scaled to i32.
        let at_once = match max_code {
            15 => 8,
            31 => 4,
            63 => 2,
            _ => 1,
        };
        let at_once = codes.len().min(at_once);
        for (codes, x) in codes.chunks_exact(at_once).zip(x.chunks_exact(at_once)) {
            let mut pairs = op!(_mm256_setzero_si256());
            for k in 0..at_once {
                let x = self.splat(x[k]);
                let two = if max_code == 255 {
                    let magnitude = op!(_mm256_abs_epi8(codes[k]));
                    let signed = op!(_mm256_sign_epi8(x, codes[k]));
                    op!(_mm256_maddubs_epi16(magnitude, signed))
                } else {
                    op!(_mm256_maddubs_epi16(codes[k], x))
                };
                pairs = if k == 0 {
                    two
                } else {
                    op!(_mm256_add_epi16(pairs, two))
                };
            }
            let scaled = op!(_mm256_madd_epi16(pairs, scale));
            sum = self.add(sum, scaled);
        }
        sum
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const COLUMNS: usize = 4;
    const CODE_BIAS: i32 = 0;
    type I = __m256i;
    type F = __m256;

    #[inline(always)]
    fn splat(self, x: i32) -> __m256i {
        op!(_mm256_set1_epi32(x))
    }

    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn xor(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_xor_si256(a, b))
    }

    #[inline(always)]
    fn add(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_sub_epi32(a, b))
    }

    #[inline(always)]
    fn shl(self, a: __m256i, bits: u32) -> __m256i {
        let count = op!(_mm_cvtsi32_si128(bits as i32));
        op!(_mm256_sll_epi32(a, count))
    }

    #[inline(always)]
    fn shr(self, a: __m256i, bits: u32) -> __m256i {
        let count = op!(_mm_cvtsi32_si128(bits as i32));
        op!(_mm256_srl_epi32(a, count))
    }

    #[inline(always)]
    fn sar(self, a: __m256i, bits: u32) -> __m256i {
        let count = op!(_mm_cvtsi32_si128(bits as i32));
        op!(_mm256_sra_epi32(a, count))
    }

    #[inline(always)]
    fn select(self, mask: __m256i, a: __m256i, b: __m256i) -> __m256i {
        self.or(self.and(mask, a), op!(_mm256_andnot_si256(mask, b)))
    }

    #[inline(always)]
    fn lookup(self, codes: __m256i, table: &[i8; 16]) -> __m256i {
        let table = op!(_mm_loadu_si128(table.as_ptr().cast()));
        let table = op!(_mm256_broadcastsi128_si256(table));
        op!(_mm256_shuffle_epi8(table, codes))
    }

    #[inline(always)]
    fn spread(self, bits: __m256i) -> __m256i {
        let bits = self.and(bits, self.splat(15));
        let copies = op!(_mm256_mullo_epi32(bits, self.splat(0x0204_0810)));
        self.and(copies, self.splat(0x1010_1010))
    }

    #[inline(always)]
    fn dword(self, rows: &Rows, at: usize) -> __m256i {
        let [a, b, c, d, e, f, g, h] = dwords_of_rows(rows, at);
        op!(_mm256_setr_epi32(a, b, c, d, e, f, g, h))
    }

    #[inline(always)]
    fn dwords4(self, rows: &Rows, at: usize) -> [__m256i; 4] {
        let mut x = [self.splat(0); 4];
        for p in 0..4 {
            let low = op!(_mm256_castsi128_si256(self.load16(rows.part(p, at))));
            x[p] = op!(_mm256_inserti128_si256::<1>(
                low,
                self.load16(rows.part(p + 4, at))
            ));
        }
        self.transpose(x)
    }

    #[inline(always)]
    fn dwords8(self, rows: &Rows, at: usize) -> [__m256i; 8] {
        let mut out = [self.splat(0); 8];
        let mut x = [[self.splat(0); 4]; 2];
        for p in 0..4 {
            let a = self.load32(rows.part(p, at));
            let b = self.load32(rows.part(p + 4, at));
            x[0][p] = op!(_mm256_permute2x128_si256::<0x20>(a, b));
            x[1][p] = op!(_mm256_permute2x128_si256::<0x31>(a, b));
        }
        for c in 0..2 {
            out[4 * c..][..4].copy_from_slice(&self.transpose(x[c]));
        }
        out
    }

    #[inline(always)]
    fn scale(self, scale: __m256i, _max_code: i32) -> __m256i {
        let low = self.and(scale, self.splat(0xffff));
        self.or(low, self.shl(scale, 16))
    }

    #[inline(always)]
    fn add_scaled<const C: usize>(
        self,
        sums: &mut [__m256i; C],
        codes: &[__m256i; 8],
        x: &[&[i32; 8]; C],
        scales: [__m256i; 2],
        (group, max_code): (usize, i32),
    ) {
        each_column!(c < C, {
            sums[c] = if group == 32 {
                self.products(sums[c], codes, x[c], scales[0], max_code)
            } else {
                let half = self.products(sums[c], &codes[..4], &x[c][..4], scales[0], max_code);
                self.products(half, &codes[4..], &x[c][4..], scales[1], max_code)
            };
        });
    }

    #[inline(always)]
    fn dots<const C: usize>(
        self,
        codes: &[__m256i; 8],
        x: &[&[i32; 8]; C],
        max_code: i32,
    ) -> [__m256i; C] {
        let one = self.splat(0x0001_0001);
        let mut dots = [self.splat(0); C];
        each_column!(c < C, {
            dots[c] = self.products(dots[c], codes, x[c], one, max_code);
        });
        dots
    }

    #[inline(always)]
    fn add_pairs(self, sum: __m256i, pairs: __m256i, x: i32) -> __m256i {
        let products = op!(_mm256_madd_epi16(pairs, self.splat(x)));
        self.add(sum, products)
    }

    #[inline(always)]
    fn splat_f32(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn float(self, a: __m256i) -> __m256 {
        op!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn f16(self, bits: __m256i) -> __m256 {
        let bits = self.and(bits, self.splat(0xffff));
        let low = op!(_mm256_castsi256_si128(bits));
        let high = op!(_mm256_extracti128_si256::<1>(bits));
        let halves = op!(_mm_packus_epi32(low, high));
        op!(_mm256_cvtph_ps(halves))
    }

    #[inline(always)]
    fn add_f32(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn mul_f32(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn fms(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmsub_ps(a, b, c))
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> __m256 {
        op!(_mm256_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, a: __m256, to: &mut [f32; 16]) {
        op!(_mm256_storeu_ps(to.as_mut_ptr(), a));
    }
}
