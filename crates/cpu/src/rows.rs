//! Operations on the elements of a row: norms, gates, sums, the cap.
//!
//! Each function computes one row, or one stretch of a row, from that row
//! alone; which thread calls it with which part is the caller's affair.

use crate::lanes::{Available, Kernel, LANES, Lanes};
use crate::math;

/// Squares are summed by 256: the groups' sums are independent chains.
const GROUP: usize = 256;

/// `1 / sqrt(mean(x^2) + eps)`: per 256 elements, lane l of 16 takes the
/// elements l mod 16 by ascending fma; lanes 8-4-2-1; then the sums ascending.
#[inline(always)]
pub(crate) fn inverse_rms<L: Lanes>(l: L, x: &[f32], eps: f32) -> f32 {
    let mut total = 0.0;
    for group in x.chunks(GROUP) {
        let mut squares = l.splat(0.0);
        let (whole, rest) = group.as_chunks::<LANES>();
        for x in whole {
            let x = l.load(x);
            squares = l.fma(x, x, squares);
        }
        if !rest.is_empty() {
            let x = l.load_part(rest);
            squares = l.fma(x, x, squares);
        }
        total += l.sum(squares);
    }
    1.0 / (total / x.len() as f32 + eps).sqrt()
}

/// `(x * s) * w`, or `x * s` without `w`; 16 elements from `at` on, or the rest.
#[inline(always)]
fn scaled<L: Lanes>(l: L, x: &[f32], s: L::V, w: Option<&[f32]>) -> L::V {
    let scaled = l.mul(part(l, x), s);
    match w {
        Some(w) => l.mul(scaled, part(l, w)),
        None => scaled,
    }
}

/// Up to 16 elements.
#[inline(always)]
fn part<L: Lanes>(l: L, x: &[f32]) -> L::V {
    match x.first_chunk::<LANES>() {
        Some(x) => l.load(x),
        None => l.load_part(x),
    }
}

/// Stores as many lanes as `to` has, 16 at most.
#[inline(always)]
fn put<L: Lanes>(l: L, v: L::V, to: &mut [f32]) {
    match to.first_chunk_mut::<LANES>() {
        Some(to) => l.store(v, to),
        None => l.store_part(v, to),
    }
}

/// The 16 elements of `x` from `at` on, or fewer at its end.
#[inline(always)]
fn at(x: &[f32], at: usize) -> &[f32] {
    &x[at..x.len().min(at + LANES)]
}

#[inline(always)]
fn at_mut(x: &mut [f32], at: usize) -> &mut [f32] {
    let end = x.len().min(at + LANES);
    &mut x[at..end]
}

/// `out = x / rms(x) * w` of one row.
pub(crate) struct RmsNorm<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) x: &'a [f32],
    pub(crate) w: Option<&'a [f32]>,
    pub(crate) eps: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let RmsNorm { out, x, w, eps } = self;
        assert!(
            out.len() == x.len() && w.is_none_or(|w| w.len() == x.len()),
            "columns of a norm"
        );
        let s = l.splat(inverse_rms(l, x, eps));
        for i in (0..x.len()).step_by(LANES) {
            let w = w.map(|w| at(w, i));
            put(l, scaled(l, at(x, i), s, w), at_mut(out, i));
        }
    }
}

/// The norm in place over each stretch of as many elements as `w` has.
pub(crate) struct HeadNorm<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) w: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for HeadNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for head in self.x.chunks_exact_mut(self.w.len()) {
            let s = l.splat(inverse_rms(l, head, self.eps));
            for i in (0..head.len()).step_by(LANES) {
                let y = scaled(l, at(head, i), s, Some(at(self.w, i)));
                put(l, y, at_mut(head, i));
            }
        }
    }
}

/// `x += y / rms(y) * w`, then `out = x / rms(x) * next`.
pub(crate) struct AddNorm<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) y: &'a [f32],
    pub(crate) w: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) next: Option<RmsNext<'a>>,
}

/// The norm of the sum: into `out`, with weight `w`.
pub(crate) struct RmsNext<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) w: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for AddNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let AddNorm { x, y, w, eps, next } = self;
        assert!(x.len() == y.len() && w.len() == y.len(), "columns of a sum");
        let s = l.splat(inverse_rms(l, y, eps));
        for i in (0..y.len()).step_by(LANES) {
            let normed = scaled(l, at(y, i), s, Some(at(w, i)));
            let sum = l.add(part(l, at(x, i)), normed);
            put(l, sum, at_mut(x, i));
        }
        if let Some(RmsNext { out, w, eps }) = next {
            let norm = RmsNorm {
                out,
                x,
                w: Some(w),
                eps,
            };
            norm.run(l);
        }
    }
}

/// A function of two elements.
pub(crate) trait Zip: Copy {
    fn of<L: Lanes>(self, l: L, x: L::V, y: L::V) -> L::V;
}

/// `x + y`.
#[derive(Clone, Copy)]
pub(crate) struct Add;

impl Zip for Add {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, x: L::V, y: L::V) -> L::V {
        l.add(x, y)
    }
}

/// `x * sigmoid(y)`.
#[derive(Clone, Copy)]
pub(crate) struct MulSigmoid;

impl Zip for MulSigmoid {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, x: L::V, y: L::V) -> L::V {
        l.mul(x, math::sigmoid(l, y))
    }
}

/// `silu(x) * y`.
#[derive(Clone, Copy)]
pub(crate) struct Swiglu;

impl Zip for Swiglu {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, x: L::V, y: L::V) -> L::V {
        l.mul(math::silu(l, x), y)
    }
}

/// `x = f(x, y)`, element by element.
pub(crate) struct ZipInPlace<'a, F> {
    pub(crate) f: F,
    pub(crate) x: &'a mut [f32],
    pub(crate) y: &'a [f32],
}

impl<F: Zip> Kernel for ZipInPlace<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        assert_eq!(self.x.len(), self.y.len(), "elements of two rows");
        for i in (0..self.x.len()).step_by(LANES) {
            let (x, y) = (part(l, at(self.x, i)), part(l, at(self.y, i)));
            put(l, self.f.of(l, x, y), at_mut(self.x, i));
        }
    }
}

/// `x *= scale`, then `x = cap * tanh(x / cap)` if there is a cap.
pub(crate) struct Softcap<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) scale: f32,
    pub(crate) cap: Option<f32>,
}

impl Kernel for Softcap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let scale = l.splat(self.scale);
        for part_of_x in self.x.chunks_mut(LANES) {
            let mut x = l.mul(part(l, part_of_x), scale);
            if let Some(cap) = self.cap {
                let cap = l.splat(cap);
                let capped = l.mul(cap, math::tanh(l, l.div(x, cap)));
                // What is not finite stays, to be noticed; only then is x - x a NaN.
                x = l.if_nan(l.sub(x, x), x, capped);
            }
            put(l, x, part_of_x);
        }
    }
}

/// The gate of two products: `gate = silu(gate) * up`.
pub(crate) fn swiglu(machine: Available, gate: &mut [f32], up: &[f32]) {
    machine.run(ZipInPlace {
        f: Swiglu,
        x: gate,
        y: up,
    });
}
