//! Least-squares fits of scales and minima for the K-quant encoders.
//!
//! For given codes the squared error is a quadratic form in scale and offset,
//! so the best pair is the solution of a 2 x 2 system; the search is over the
//! codes, by spanning a little less or more than the range. What a reader would
//! get wrong: an offset may only be subtracted, since the format's minimum has
//! no sign.

use super::inverse;
use half::f16;

/// Sums run in this many lanes, so that the compiler can vectorize them.
const LANES: usize = 8;

/// The nearest integer of a number below 2^22 in magnitude, ties to even.
#[inline(always)]
fn round(v: f32) -> f32 {
    const MAGIC: f32 = (3 << 22) as f32;
    v + MAGIC - MAGIC
}

/// Sum of `f(i)` for `i` in `0..N`.
#[inline(always)]
fn sum<const N: usize>(f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for i in (0..N).step_by(LANES) {
        for l in 0..LANES {
            lanes[l] += f(i + l);
        }
    }
    ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5]))
        + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))
}

/// Smallest and largest of `x`.
#[inline(always)]
fn range<const N: usize>(x: &[f32; N]) -> (f32, f32) {
    let (mut min, mut max) = ([x[0]; LANES], [x[0]; LANES]);
    for x in x.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            min[l] = if x[l] < min[l] { x[l] } else { min[l] };
            max[l] = if x[l] > max[l] { x[l] } else { max[l] };
        }
    }
    (
        min.into_iter().fold(f32::INFINITY, f32::min),
        max.into_iter().fold(f32::NEG_INFINITY, f32::max),
    )
}

/// Largest magnitude of `x`.
pub(super) fn largest<const N: usize>(x: &[f32; N]) -> f32 {
    let (min, max) = range(x);
    max.max(-min)
}

/// Codes 0 to `top` of `x` on the lattice `scale * q - min`.
#[inline(always)]
pub(super) fn codes<const N: usize>(x: &[f32; N], scale: f32, min: f32, top: f32) -> [f32; N] {
    codes_inverse(x, inverse(scale), min, top)
}

#[inline(always)]
fn codes_inverse<const N: usize>(x: &[f32; N], inverse: f32, min: f32, top: f32) -> [f32; N] {
    let mut q = [0.0; N];
    for i in 0..N {
        let v = (x[i] + min) * inverse;
        let v = if v > 0.0 { v } else { 0.0 };
        let v = if v < top { v } else { top };
        q[i] = round(v);
    }
    q
}

/// Scale and minimum, both at least 0, of `x = scale * q - min` with codes 0 to
/// `top`: the least squared error over lattices of `top + t` steps, `t` in
/// `tries`, across the range of `x`.
#[inline(always)]
pub(super) fn scale_and_min<const N: usize>(x: &[f32; N], top: f32, tries: &[f32]) -> (f32, f32) {
    let (low, high) = range(x);
    let low = low.min(0.0);
    let span = high - low;
    if span <= 0.0 {
        return (0.0, -low);
    }
    // Relative to the low end, so that a large common offset does not cancel digits.
    let mut y = [0.0; N];
    for i in 0..N {
        y[i] = x[i] - low;
    }
    let n = N as f32;
    let sum_y = sum::<N>(|i| y[i]);
    let (mut best_gain, mut best) = (f32::NEG_INFINITY, (0.0, 0.0));
    for t in tries {
        let q = codes_inverse(&y, (top + t) / span, 0.0, top);
        let sum_q = sum::<N>(|i| q[i]);
        let sum_qq = sum::<N>(|i| q[i] * q[i]);
        let sum_qy = sum::<N>(|i| q[i] * y[i]);
        let determinant = n * sum_qq - sum_q * sum_q;
        let mut scale = (n * sum_qy - sum_q * sum_y) / determinant;
        let mut offset = (sum_y - scale * sum_q) / n;
        if determinant <= 0.0 {
            // All codes are equal: any offset will do.
            offset = 0.0;
            scale = sum_qy / sum_qq;
        } else if low + offset > 0.0 {
            // The value of code 0 is low + offset; above 0 it cannot be written.
            offset = -low;
            scale = (sum_qy - offset * sum_q) / sum_qq;
        }
        let gain = 2.0 * (scale * sum_qy + offset * sum_y)
            - scale * scale * sum_qq
            - 2.0 * scale * offset * sum_q
            - n * offset * offset;
        if gain > best_gain && scale > 0.0 {
            best_gain = gain;
            best = (scale, -(low + offset));
        }
    }
    best
}

/// The scale of `x = scale * q` with codes -`top` to `top - 1`: the least
/// squared error over scales that give the largest element the code
/// `-(top + t)`, `t` in `tries`.
#[inline(always)]
pub(super) fn signed_scale<const N: usize>(x: &[f32; N], top: f32, tries: &[f32]) -> f32 {
    let (min, max) = range(x);
    let extreme = if max > -min { max } else { min };
    if extreme == 0.0 {
        return 0.0;
    }
    let (mut best_gain, mut best) = (0.0, 0.0);
    for t in tries {
        let q = signed_codes_inverse(x, -(top + t) / extreme, top);
        let sum_qq = sum::<N>(|i| q[i] * q[i]);
        let sum_qx = sum::<N>(|i| q[i] * x[i]);
        // The error at the best scale is the sum of squares of x less this.
        let gain = sum_qx * sum_qx / sum_qq;
        if gain > best_gain {
            best_gain = gain;
            best = sum_qx / sum_qq;
        }
    }
    best
}

/// Codes -`top` to `top - 1` of `x` on the lattice `scale * q`.
#[inline(always)]
pub(super) fn signed_codes<const N: usize>(x: &[f32; N], scale: f32, top: f32) -> [f32; N] {
    signed_codes_inverse(x, inverse(scale), top)
}

#[inline(always)]
fn signed_codes_inverse<const N: usize>(x: &[f32; N], inverse: f32, top: f32) -> [f32; N] {
    let mut q = [0.0; N];
    for i in 0..N {
        let v = x[i] * inverse;
        let v = if v > -top { v } else { -top };
        let v = if v < top - 1.0 { v } else { top - 1.0 };
        q[i] = round(v);
    }
    q
}

/// The f16 nearest to `largest / top`, or the next larger if `top` steps of the
/// nearest would fall short by more than half a step (subnormal f16 only).
/// `None` if it overflows.
pub(super) fn super_scale(largest: f32, top: f32) -> Option<f16> {
    let mut d = f16::from_f32(largest / top);
    if d.to_f32() * (top + 0.5) < largest {
        d = f16::from_bits(d.to_bits() + 1);
    }
    d.is_finite().then_some(d)
}

/// Nearest multiple of `d` to each of `v`, as a code of at most `top` in
/// magnitude.
pub(super) fn scale_codes<const N: usize>(v: &[f32; N], d: f16, low: f32, top: f32) -> [f32; N] {
    let d = d.to_f32();
    v.map(|v| {
        if d == 0.0 {
            0.0
        } else {
            (v / d).round_ties_even().clamp(low, top)
        }
    })
}
