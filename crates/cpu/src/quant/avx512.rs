//! [`Simd`] with AVX-512: 16 rows, products by VNNI.

use super::product::{products32, products256};
use super::simd::{Rows, Simd};
use super::walk::{Job, Scratch};
use super::{Block, SuperBlock};
use gguf::TensorType;
#[allow(clippy::wildcard_imports)] // some fifty intrinsics, all with their own prefix
use std::arch::x86_64::*;

/// The instructions are there.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Does the work of `job`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn multiply(ty: TensorType, job: &Job<'_>, scratch: &mut Scratch) {
    by_type!(ty, run256, run32, (job, scratch));
}

/// The job, for an encoding in super-blocks.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn run256<F: SuperBlock>(job: &Job<'_>, scratch: &mut Scratch) {
    products256::<Avx512, F>(Avx512(()), job, scratch);
}

/// The job, for an encoding in blocks.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn run32<F: Block>(job: &Job<'_>, scratch: &mut Scratch) {
    products32::<Avx512, F>(Avx512(()), job, scratch);
}

/// One instruction.
macro_rules! op {
    ($name:ident($($arg:expr),*)) => { op!($name::<>($($arg),*)) };
    ($name:ident::<$($n:literal)?>($($arg:expr),*)) => {
        // SAFETY: only `run256` and `run32` make an `Avx512`, whose callers have
        // found the instructions.
        unsafe { $name::<$($n)?>($($arg),*) }
    };
}

/// `sum + a * b` over both i16 of a lane.
///
/// In assembly: LLVM makes two instructions of the intrinsic to shorten the chain,
/// which costs a tenth of the speed where many rows are in flight anyway.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_i16_products(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: it reads and writes these registers only.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

impl Avx512 {
    /// # Safety
    /// The machine has the instructions.
    #[inline(always)]
    pub(super) unsafe fn new() -> Avx512 {
        Avx512(())
    }

    /// Lower and upper bytes of the products of four codes a lane, eight bits and
    /// unsigned, with a scale a lane, an i16 in an i32. Products fit 16 bits.
    #[inline(always)]
    pub(super) fn times_scale(self, codes: __m512i, scale: __m512i) -> [__m512i; 2] {
        let scale = op!(_mm512_mask_blend_epi16(
            0xaaaa_aaaa,
            scale,
            self.shl(scale, 16)
        ));
        let (even, odd) = (self.splat(0x00ff_00ff), self.splat(0xff00_ff00_u32 as i32));
        let low = op!(_mm512_mullo_epi16(self.and(codes, even), scale));
        let codes = op!(_mm512_srli_epi16::<8>(codes));
        let high = op!(_mm512_mullo_epi16(codes, scale));
        [
            self.select(even, low, op!(_mm512_slli_epi16::<8>(high))),
            self.select(odd, high, op!(_mm512_srli_epi16::<8>(low))),
        ]
    }

    #[inline(always)]
    pub(super) fn load_dwords(self, from: &[i32; 16]) -> __m512i {
        op!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    /// 16 bytes at `at` of rows `row`, `row + 4`, `row + 8` and `row + 12`.
    #[inline(always)]
    fn quarter_rows(self, rows: &Rows, row: usize, at: usize) -> __m512i {
        let first = op!(_mm512_castsi128_si512(self.load16(rows.part(row, at))));
        let two = op!(_mm512_inserti32x4::<1>(
            first,
            self.load16(rows.part(row + 4, at))
        ));
        let three = op!(_mm512_inserti32x4::<2>(
            two,
            self.load16(rows.part(row + 8, at))
        ));
        op!(_mm512_inserti32x4::<3>(
            three,
            self.load16(rows.part(row + 12, at))
        ))
    }

    #[inline(always)]
    fn load16(self, bytes: &[u8; 16]) -> __m128i {
        op!(_mm_loadu_si128(bytes.as_ptr().cast()))
    }

    #[inline(always)]
    fn load32(self, bytes: &[u8; 32]) -> __m256i {
        op!(_mm256_loadu_si256(bytes.as_ptr().cast()))
    }

    /// Dwords of rows from 16 bytes of rows `p, p + 4, p + 8, p + 12` in `x[p]`.
    #[inline(always)]
    fn transpose(self, x: [__m512i; 4]) -> [__m512i; 4] {
        let a = op!(_mm512_unpacklo_epi32(x[0], x[1]));
        let b = op!(_mm512_unpackhi_epi32(x[0], x[1]));
        let c = op!(_mm512_unpacklo_epi32(x[2], x[3]));
        let d = op!(_mm512_unpackhi_epi32(x[2], x[3]));
        [
            op!(_mm512_unpacklo_epi64(a, c)),
            op!(_mm512_unpackhi_epi64(a, c)),
            op!(_mm512_unpacklo_epi64(b, d)),
            op!(_mm512_unpackhi_epi64(b, d)),
        ]
    }

    /// `sum_k codes[k] * x[c][k]` of unsigned codes over the `N` dwords from `at` on.
    /// Columns take turns: one after the other, waiting instructions would fill the
    /// scheduler.
    #[inline(always)]
    fn products<const C: usize, const N: usize>(
        self,
        codes: &[__m512i; 8],
        x: &[&[i32; 8]; C],
        at: usize,
    ) -> [__m512i; C] {
        let mut sums = [self.splat(0); C];
        for k in at..at + N {
            each_column!(c < C, {
                sums[c] = op!(_mm512_dpbusd_epi32(sums[c], codes[k], self.splat(x[c][k])));
            });
        }
        sums
    }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    const COLUMNS: usize = 8;
    const CODE_BIAS: i32 = 128;
    type I = __m512i;
    type F = __m512;

    #[inline(always)]
    fn splat(self, x: i32) -> __m512i {
        op!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    fn add(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    fn shl(self, a: __m512i, bits: u32) -> __m512i {
        let count = op!(_mm_cvtsi32_si128(bits as i32));
        op!(_mm512_sll_epi32(a, count))
    }

    #[inline(always)]
    fn shr(self, a: __m512i, bits: u32) -> __m512i {
        let count = op!(_mm_cvtsi32_si128(bits as i32));
        op!(_mm512_srl_epi32(a, count))
    }

    #[inline(always)]
    fn sar(self, a: __m512i, bits: u32) -> __m512i {
        let count = op!(_mm_cvtsi32_si128(bits as i32));
        op!(_mm512_sra_epi32(a, count))
    }

    #[inline(always)]
    fn select(self, mask: __m512i, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_ternarylogic_epi32::<0xca>(mask, a, b))
    }

    #[inline(always)]
    fn lookup(self, codes: __m512i, table: &[i8; 16]) -> __m512i {
        let table = op!(_mm_loadu_si128(table.as_ptr().cast()));
        let table = op!(_mm512_broadcast_i32x4(table));
        op!(_mm512_shuffle_epi8(table, codes))
    }

    #[inline(always)]
    fn spread(self, bits: __m512i) -> __m512i {
        const TABLE: [i32; 16] = {
            let mut table = [0; 16];
            let mut i = 0;
            while i < 16 {
                table[i] = (i as i32).wrapping_mul(0x0204_0810) & 0x1010_1010;
                i += 1;
            }
            table
        };
        let table = op!(_mm512_loadu_si512(TABLE.as_ptr().cast()));
        op!(_mm512_permutexvar_epi32(bits, table))
    }

    #[inline(always)]
    fn dword(self, rows: &Rows, at: usize) -> __m512i {
        let mut offsets = [0i32; 16];
        for l in 0..16 {
            offsets[l] = (l * rows.row_bytes()) as i32;
        }
        let offsets = op!(_mm512_loadu_si512(offsets.as_ptr().cast()));
        let start = rows.part::<4>(0, at).as_ptr().cast();
        // SAFETY: `part` has checked that the dword lies inside the block; the
        // same one of all lanes' rows can be read too (`Rows::new`).
        unsafe { _mm512_i32gather_epi32::<1>(offsets, start) }
    }

    #[inline(always)]
    fn dwords4(self, rows: &Rows, at: usize) -> [__m512i; 4] {
        let mut x = [self.splat(0); 4];
        for p in 0..4 {
            x[p] = self.quarter_rows(rows, p, at);
        }
        self.transpose(x)
    }

    #[inline(always)]
    fn dwords8(self, rows: &Rows, at: usize) -> [__m512i; 8] {
        let mut out = [self.splat(0); 8];
        let mut x = [[self.splat(0); 4]; 2];
        for p in 0..4 {
            let a = op!(_mm512_castsi256_si512(self.load32(rows.part(p, at))));
            let a = op!(_mm512_inserti64x4::<1>(
                a,
                self.load32(rows.part(p + 4, at))
            ));
            let b = op!(_mm512_castsi256_si512(self.load32(rows.part(p + 8, at))));
            let b = op!(_mm512_inserti64x4::<1>(
                b,
                self.load32(rows.part(p + 12, at))
            ));
            x[0][p] = op!(_mm512_shuffle_i32x4::<0x88>(a, b));
            x[1][p] = op!(_mm512_shuffle_i32x4::<0xdd>(a, b));
        }
        for c in 0..2 {
            out[4 * c..][..4].copy_from_slice(&self.transpose(x[c]));
        }
        out
    }

    #[inline(always)]
    fn scale(self, scale: __m512i, max_code: i32) -> __m512i {
        if max_code <= 15 {
            self.and(scale, self.splat(0xffff))
        } else {
            scale
        }
    }

    #[inline(always)]
    fn add_scaled<const C: usize>(
        self,
        sums: &mut [__m512i; C],
        codes: &[__m512i; 8],
        x: &[&[i32; 8]; C],
        scales: [__m512i; 2],
        (group, max_code): (usize, i32),
    ) {
        if group == 32 && max_code > 15 {
            let dots = self.products::<C, 8>(codes, x, 0);
            each_column!(c < C, {
                sums[c] = self.add(sums[c], op!(_mm512_mullo_epi32(dots[c], scales[0])));
            });
            return;
        }
        for i in 0..2 {
            let dots = self.products::<C, 4>(codes, x, 4 * i);
            each_column!(c < C, {
                sums[c] = if max_code <= 15 {
                    // 16 products are an i16: scaled and added by one instruction.
                    // The scale's upper half is zero, so that the dot's is ignored.
                    op!(add_i16_products(sums[c], dots[c], scales[i]))
                } else {
                    self.add(sums[c], op!(_mm512_mullo_epi32(dots[c], scales[i])))
                };
            });
        }
    }

    #[inline(always)]
    fn dots<const C: usize>(
        self,
        codes: &[__m512i; 8],
        x: &[&[i32; 8]; C],
        _max_code: i32,
    ) -> [__m512i; C] {
        self.products::<C, 8>(codes, x, 0)
    }

    #[inline(always)]
    fn add_pairs(self, sum: __m512i, pairs: __m512i, x: i32) -> __m512i {
        op!(add_i16_products(sum, pairs, self.splat(x)))
    }

    #[inline(always)]
    fn splat_f32(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn float(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn f16(self, bits: __m512i) -> __m512 {
        let halves = op!(_mm512_cvtepi32_epi16(bits));
        op!(_mm512_cvtph_ps(halves))
    }

    #[inline(always)]
    fn add_f32(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn mul_f32(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn fms(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmsub_ps(a, b, c))
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> __m512 {
        op!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, a: __m512, to: &mut [f32; 16]) {
        op!(_mm512_storeu_ps(to.as_mut_ptr(), a));
    }
}
