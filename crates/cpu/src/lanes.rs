//! Sixteen f32 at once: the vector that the row operations and attention are
//! written in, once for all instruction sets.
//!
//! A kernel is generic over [`Lanes`]; [`Available::run`] compiles it once per
//! instruction set. Each operation is one IEEE operation per lane and the order
//! inside [`Lanes::sum`] is fixed, so every instruction set gives the same bits
//! (NaN payloads excepted). A closure inside a kernel would be compiled without
//! the instruction set: kernels use loops.

use crate::Isa;
use half::f16;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Operations on sixteen lanes. A value of the type proves that the machine has
/// the instructions.
pub(crate) trait Lanes: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Attention keeps this many queries at once in registers.
    const QUERIES: usize;
    /// Attention keeps this many vectors of an output at once in registers.
    const TILE: usize;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// From half precision, exactly.
    fn load_f16(self, x: &[u16; LANES]) -> Self::V;
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    /// To half precision, ties to even.
    fn store_f16(self, v: Self::V, to: &mut [u16; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`; so `b` if one is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a > b ? x : y`; so `y` if one is NaN.
    fn if_greater(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// `a` is NaN ? x : y.
    fn if_nan(self, a: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Bits of `y` plus the bits of `t` shifted left by 23: times two to the
    /// integer in the low bits of `t`.
    fn add_to_exponent(self, y: Self::V, t: Self::V) -> Self::V;
    /// Lanes 8-15 onto 0-7, 4-7 onto 0-3, 2-3 onto 0-1, 1 onto 0.
    fn sum(self, v: Self::V) -> f32;
    /// The largest lane; any lane or NaN if one is NaN.
    fn largest(self, v: Self::V) -> f32;

    /// Asks for the elements of `x`, which are read soon.
    #[inline(always)]
    fn prefetch<T>(self, _x: &[T]) {}

    /// The elements of `x`, then zeros.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        let mut all = [0.0; LANES];
        all[..x.len()].copy_from_slice(x);
        self.load(&all)
    }

    /// As many lanes as `to` has.
    #[inline(always)]
    fn store_part(self, v: Self::V, to: &mut [f32]) {
        let mut all = [0.0; LANES];
        self.store(v, &mut all);
        to.copy_from_slice(&all[..to.len()]);
    }
}

/// Something to compute, written once for every instruction set. Mark `run`
/// and what it calls `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<L: Lanes>(self, l: L) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Available {
    isa: Isa,
    /// May the scalar program be compiled with the fma instruction?
    has_fma: bool,
}

impl Available {
    /// `isa`, if the machine has it.
    pub(crate) fn new(isa: Isa) -> Option<Available> {
        isa.is_available().then(|| Available {
            isa,
            has_fma: Isa::Avx2.is_available(),
        })
    }

    /// The scalar program without the fma instruction, whatever the machine has.
    #[cfg(test)]
    pub(crate) fn portable() -> Available {
        Available {
            isa: Isa::Scalar,
            has_fma: false,
        }
    }

    pub(crate) fn isa(self) -> Isa {
        self.isa
    }

    /// Computes `kernel` with this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        match self.isa {
            Isa::Scalar if self.has_fma => {
                // SAFETY: `has_fma` says that AVX2 with FMA and F16C was found.
                unsafe { x86::run_scalar(kernel) }
            }
            Isa::Scalar => kernel.run(Scalar),
            // SAFETY: only an instruction set that was found makes an `Available`.
            Isa::Avx2 => unsafe { x86::run_avx2(kernel) },
            // SAFETY: only an instruction set that was found makes an `Available`.
            Isa::Avx512 | Isa::Amx => unsafe { x86::run_avx512(kernel) },
        }
        #[cfg(not(target_arch = "x86_64"))]
        kernel.run(Scalar)
    }
}

/// Plain Rust: the program that the others equal.
#[derive(Clone, Copy)]
struct Scalar;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sixteen([f32; LANES]);

impl Sixteen {
    #[inline(always)]
    fn each(f: impl Fn(usize) -> f32) -> Sixteen {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f(i);
        }
        Sixteen(out)
    }
}

impl Lanes for Scalar {
    type V = Sixteen;
    const QUERIES: usize = 1;
    const TILE: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Sixteen {
        Sixteen([x; LANES])
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Sixteen {
        Sixteen(*x)
    }

    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> Sixteen {
        Sixteen::each(|i| f16::from_bits(x[i]).to_f32())
    }

    #[inline(always)]
    fn store(self, v: Sixteen, to: &mut [f32; LANES]) {
        *to = v.0;
    }

    #[inline(always)]
    fn store_f16(self, v: Sixteen, to: &mut [u16; LANES]) {
        for i in 0..LANES {
            to[i] = f16::from_f32(v.0[i]).to_bits();
        }
    }

    #[inline(always)]
    fn add(self, a: Sixteen, b: Sixteen) -> Sixteen {
        Sixteen::each(|i| a.0[i] + b.0[i])
    }

    #[inline(always)]
    fn sub(self, a: Sixteen, b: Sixteen) -> Sixteen {
        Sixteen::each(|i| a.0[i] - b.0[i])
    }

    #[inline(always)]
    fn mul(self, a: Sixteen, b: Sixteen) -> Sixteen {
        Sixteen::each(|i| a.0[i] * b.0[i])
    }

    #[inline(always)]
    fn div(self, a: Sixteen, b: Sixteen) -> Sixteen {
        Sixteen::each(|i| a.0[i] / b.0[i])
    }

    #[inline(always)]
    fn fma(self, a: Sixteen, b: Sixteen, c: Sixteen) -> Sixteen {
        Sixteen::each(|i| a.0[i].mul_add(b.0[i], c.0[i]))
    }

    #[inline(always)]
    fn max(self, a: Sixteen, b: Sixteen) -> Sixteen {
        self.if_greater(a, b, a, b)
    }

    #[inline(always)]
    fn if_greater(self, a: Sixteen, b: Sixteen, x: Sixteen, y: Sixteen) -> Sixteen {
        Sixteen::each(|i| if a.0[i] > b.0[i] { x.0[i] } else { y.0[i] })
    }

    #[inline(always)]
    fn if_nan(self, a: Sixteen, x: Sixteen, y: Sixteen) -> Sixteen {
        Sixteen::each(|i| if a.0[i].is_nan() { x.0[i] } else { y.0[i] })
    }

    #[inline(always)]
    fn add_to_exponent(self, y: Sixteen, t: Sixteen) -> Sixteen {
        Sixteen::each(|i| {
            let shift = t.0[i].to_bits() << 23;
            f32::from_bits(y.0[i].to_bits().wrapping_add(shift))
        })
    }

    #[inline(always)]
    fn sum(self, v: Sixteen) -> f32 {
        let mut lanes = v.0;
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for l in 0..width {
                lanes[l] += lanes[l + width];
            }
        }
        lanes[0]
    }

    #[inline(always)]
    fn largest(self, v: Sixteen) -> f32 {
        let mut largest = v.0[0];
        for l in 1..LANES {
            largest = if largest > v.0[l] { largest } else { v.0[l] };
        }
        largest
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernel, LANES, Lanes, Scalar};
    #[allow(clippy::wildcard_imports)] // some fifty intrinsics, all with their own prefix
    use std::arch::x86_64::*;

    /// The scalar program, compiled with the fma instruction: same bits, faster.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn run_scalar<K: Kernel>(kernel: K) -> K::Output {
        kernel.run(Scalar)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
        kernel.run(Avx2(()))
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
        kernel.run(Avx512(()))
    }

    /// Asks for every cache line of `x`.
    #[inline(always)]
    fn prefetch_lines<T>(x: &[T]) {
        const LINE_BYTES: usize = 64;
        for at in (0..size_of_val(x)).step_by(LINE_BYTES) {
            let line = x.as_ptr().cast::<i8>().wrapping_add(at);
            // SAFETY: SSE is part of x86-64, and prefetching reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line) }
        }
    }

    /// Proof of AVX2, FMA and F16C: made only where they are enabled.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    /// Proof of AVX-512 F: made only where it is enabled.
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(());

    /// An intrinsic whose instruction set the token at hand proves, and whose
    /// pointer, if it has one, comes from a reference to sixteen elements.
    macro_rules! proved {
        ($call:expr) => {{
            // SAFETY: the token at hand exists only where the instruction set is
            // enabled; a pointer reaches no further than its array.
            unsafe { $call }
        }};
    }

    /// Sixteen lanes in two registers: 0-7 and 8-15.
    #[derive(Clone, Copy)]
    pub(super) struct Two(__m256, __m256);

    macro_rules! both {
        ($op:ident, $($v:ident),*) => {
            Two(proved!($op($($v.0),*)), proved!($op($($v.1),*)))
        };
    }

    impl Avx2 {
        #[inline(always)]
        fn greater(self, a: Two, b: Two) -> Two {
            Two(
                proved!(_mm256_cmp_ps::<_CMP_GT_OQ>(a.0, b.0)),
                proved!(_mm256_cmp_ps::<_CMP_GT_OQ>(a.1, b.1)),
            )
        }

        #[inline(always)]
        fn shifted(self, y: __m256, t: __m256) -> __m256 {
            let (bits, t) = (
                proved!(_mm256_castps_si256(y)),
                proved!(_mm256_castps_si256(t)),
            );
            let shift = proved!(_mm256_slli_epi32::<23>(t));
            let bits = proved!(_mm256_add_epi32(bits, shift));
            proved!(_mm256_castsi256_ps(bits))
        }
    }

    impl Lanes for Avx2 {
        type V = Two;
        const QUERIES: usize = 2;
        const TILE: usize = 2;

        #[inline(always)]
        fn splat(self, x: f32) -> Two {
            let v = proved!(_mm256_set1_ps(x));
            Two(v, v)
        }

        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Two {
            Two(
                proved!(_mm256_loadu_ps(x[..8].as_ptr())),
                proved!(_mm256_loadu_ps(x[8..].as_ptr())),
            )
        }

        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> Two {
            let low = proved!(_mm_loadu_si128(x[..8].as_ptr().cast()));
            let high = proved!(_mm_loadu_si128(x[8..].as_ptr().cast()));
            Two(
                proved!(_mm256_cvtph_ps(low)),
                proved!(_mm256_cvtph_ps(high)),
            )
        }

        #[inline(always)]
        fn store(self, v: Two, to: &mut [f32; LANES]) {
            proved!(_mm256_storeu_ps(to[..8].as_mut_ptr(), v.0));
            proved!(_mm256_storeu_ps(to[8..].as_mut_ptr(), v.1));
        }

        #[inline(always)]
        fn store_f16(self, v: Two, to: &mut [u16; LANES]) {
            let low = proved!(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0));
            let high = proved!(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.1));
            proved!(_mm_storeu_si128(to[..8].as_mut_ptr().cast(), low));
            proved!(_mm_storeu_si128(to[8..].as_mut_ptr().cast(), high));
        }

        #[inline(always)]
        fn add(self, a: Two, b: Two) -> Two {
            both!(_mm256_add_ps, a, b)
        }

        #[inline(always)]
        fn sub(self, a: Two, b: Two) -> Two {
            both!(_mm256_sub_ps, a, b)
        }

        #[inline(always)]
        fn mul(self, a: Two, b: Two) -> Two {
            both!(_mm256_mul_ps, a, b)
        }

        #[inline(always)]
        fn div(self, a: Two, b: Two) -> Two {
            both!(_mm256_div_ps, a, b)
        }

        #[inline(always)]
        fn fma(self, a: Two, b: Two, c: Two) -> Two {
            both!(_mm256_fmadd_ps, a, b, c)
        }

        #[inline(always)]
        fn max(self, a: Two, b: Two) -> Two {
            both!(_mm256_max_ps, a, b)
        }

        #[inline(always)]
        fn if_greater(self, a: Two, b: Two, x: Two, y: Two) -> Two {
            let mask = self.greater(a, b);
            both!(_mm256_blendv_ps, y, x, mask)
        }

        #[inline(always)]
        fn if_nan(self, a: Two, x: Two, y: Two) -> Two {
            let mask = Two(
                proved!(_mm256_cmp_ps::<_CMP_UNORD_Q>(a.0, a.0)),
                proved!(_mm256_cmp_ps::<_CMP_UNORD_Q>(a.1, a.1)),
            );
            both!(_mm256_blendv_ps, y, x, mask)
        }

        #[inline(always)]
        fn add_to_exponent(self, y: Two, t: Two) -> Two {
            Two(self.shifted(y.0, t.0), self.shifted(y.1, t.1))
        }

        #[inline(always)]
        fn sum(self, v: Two) -> f32 {
            let eight = proved!(_mm256_add_ps(v.0, v.1));
            sum_of_eight(self, eight)
        }

        #[inline(always)]
        fn prefetch<T>(self, x: &[T]) {
            prefetch_lines(x);
        }

        #[inline(always)]
        fn largest(self, v: Two) -> f32 {
            let eight = proved!(_mm256_max_ps(v.0, v.1));
            largest_of_eight(self, eight)
        }
    }

    /// The tree 4-2-1.
    #[inline(always)]
    fn sum_of_eight(_proof: Avx2, v: __m256) -> f32 {
        let low = proved!(_mm256_castps256_ps128(v));
        let high = proved!(_mm256_extractf128_ps::<1>(v));
        let four = proved!(_mm_add_ps(low, high));
        let high = proved!(_mm_movehl_ps(four, four));
        let two = proved!(_mm_add_ps(four, high));
        let high = proved!(_mm_movehdup_ps(two));
        let one = proved!(_mm_add_ss(two, high));
        proved!(_mm_cvtss_f32(one))
    }

    #[inline(always)]
    fn largest_of_eight(_proof: Avx2, v: __m256) -> f32 {
        let low = proved!(_mm256_castps256_ps128(v));
        let high = proved!(_mm256_extractf128_ps::<1>(v));
        let four = proved!(_mm_max_ps(low, high));
        let high = proved!(_mm_movehl_ps(four, four));
        let two = proved!(_mm_max_ps(four, high));
        let high = proved!(_mm_movehdup_ps(two));
        let one = proved!(_mm_max_ss(two, high));
        proved!(_mm_cvtss_f32(one))
    }

    impl Avx512 {
        /// Lanes 0-7 and 8-15.
        #[inline(always)]
        fn halves(self, v: __m512) -> (__m256, __m256) {
            let low = proved!(_mm512_castps512_ps256(v));
            let bits = proved!(_mm512_castps_pd(v));
            let high = proved!(_mm512_extractf64x4_pd::<1>(bits));
            (low, proved!(_mm256_castpd_ps(high)))
        }
    }

    impl Lanes for Avx512 {
        type V = __m512;
        const QUERIES: usize = 4;
        const TILE: usize = 4;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            proved!(_mm512_set1_ps(x))
        }

        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> __m512 {
            proved!(_mm512_loadu_ps(x.as_ptr()))
        }

        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> __m512 {
            let halves = proved!(_mm256_loadu_si256(x.as_ptr().cast()));
            proved!(_mm512_cvtph_ps(halves))
        }

        #[inline(always)]
        fn store(self, v: __m512, to: &mut [f32; LANES]) {
            proved!(_mm512_storeu_ps(to.as_mut_ptr(), v));
        }

        #[inline(always)]
        fn store_f16(self, v: __m512, to: &mut [u16; LANES]) {
            let halves = proved!(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
            proved!(_mm256_storeu_si256(to.as_mut_ptr().cast(), halves));
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            proved!(_mm512_add_ps(a, b))
        }

        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            proved!(_mm512_sub_ps(a, b))
        }

        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            proved!(_mm512_mul_ps(a, b))
        }

        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            proved!(_mm512_div_ps(a, b))
        }

        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            proved!(_mm512_fmadd_ps(a, b, c))
        }

        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            proved!(_mm512_max_ps(a, b))
        }

        #[inline(always)]
        fn if_greater(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            let mask = proved!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b));
            proved!(_mm512_mask_blend_ps(mask, y, x))
        }

        #[inline(always)]
        fn if_nan(self, a: __m512, x: __m512, y: __m512) -> __m512 {
            let mask = proved!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a));
            proved!(_mm512_mask_blend_ps(mask, y, x))
        }

        #[inline(always)]
        fn add_to_exponent(self, y: __m512, t: __m512) -> __m512 {
            let (bits, t) = (
                proved!(_mm512_castps_si512(y)),
                proved!(_mm512_castps_si512(t)),
            );
            let shift = proved!(_mm512_slli_epi32::<23>(t));
            let bits = proved!(_mm512_add_epi32(bits, shift));
            proved!(_mm512_castsi512_ps(bits))
        }

        #[inline(always)]
        fn sum(self, v: __m512) -> f32 {
            let (low, high) = self.halves(v);
            let eight = proved!(_mm256_add_ps(low, high));
            sum_of_eight(Avx2(()), eight)
        }

        #[inline(always)]
        fn prefetch<T>(self, x: &[T]) {
            prefetch_lines(x);
        }

        #[inline(always)]
        fn largest(self, v: __m512) -> f32 {
            let (low, high) = self.halves(v);
            let eight = proved!(_mm256_max_ps(low, high));
            largest_of_eight(Avx2(()), eight)
        }
    }
}
