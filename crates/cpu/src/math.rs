//! exp, sigmoid, SiLU and tanh as programs: the same bits on every instruction
//! set, because each step is one IEEE operation.
//!
//! exp(x) = 2^n * (1 + e), n = rint(x * log2 e), r = x - n * ln 2 in two steps,
//! e = r + r^2 * q(r); q is the minimax polynomial of degree 4 for the relative
//! error of exp on |r| <= ln 2 / 2 (3.1e-9). Results below 2^-126 are 0: a
//! reader would expect subnormal numbers there.

use crate::Isa;
use crate::lanes::{Available, Kernel, LANES, Lanes};

/// `1.5 * 2^23`: adding it rounds to an integer, ties to even, and leaves that
/// integer in the low bits.
const ROUNDING: f32 = 12_582_912.0;
const LN_2_HIGH: f32 = std::f32::consts::LN_2;
const LN_2_LOW: f32 = -1.904_654_2e-9;
/// Coefficients of q, from r^4 down.
const Q: [f32; 5] = [
    0.001_381_453_8,
    0.008_368_745,
    0.041_668_39,
    0.166_665_21,
    0.499_999_94,
];
/// ln of the largest f32.
const LARGEST: f32 = 88.722_83;
/// ln of the smallest normal f32, rounded up.
const SMALLEST: f32 = -87.336_54;

/// `t`, whose low bits hold n, and e, of the formula above.
#[inline(always)]
fn reduced<L: Lanes>(l: L, x: L::V) -> (L::V, L::V) {
    let t = l.fma(x, l.splat(std::f32::consts::LOG2_E), l.splat(ROUNDING));
    let n = l.sub(t, l.splat(ROUNDING));
    let r = l.fma(n, l.splat(-LN_2_HIGH), x);
    let r = l.fma(n, l.splat(-LN_2_LOW), r);
    let mut q = l.splat(Q[0]);
    for i in 1..Q.len() {
        q = l.fma(q, r, l.splat(Q[i]));
    }
    (t, l.fma(l.mul(r, r), q, r))
}

/// e^x; infinity above ln of the largest f32, 0 below ln of the smallest normal
/// one, NaN of NaN; 1 of 0.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(l: L, x: L::V) -> L::V {
    let (largest, smallest) = (l.splat(LARGEST), l.splat(SMALLEST));
    let (t, e) = reduced(l, x);
    let y = l.add_to_exponent(l.add(l.splat(1.0), e), t);
    let y = l.if_greater(x, largest, l.splat(f32::INFINITY), y);
    let y = l.if_greater(smallest, x, l.splat(0.0), y);
    l.if_nan(x, x, y)
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub(crate) fn sigmoid<L: Lanes>(l: L, x: L::V) -> L::V {
    let e = exp(l, l.sub(l.splat(0.0), x));
    l.div(l.splat(1.0), l.add(l.splat(1.0), e))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu<L: Lanes>(l: L, x: L::V) -> L::V {
    l.mul(x, sigmoid(l, x))
}

/// `m / (m + 2)` with `m = exp(2x) - 1`, which keeps its digits near 0; beyond
/// 10 of either sign, that of 10.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(l: L, x: L::V) -> L::V {
    let ten = l.splat(10.0);
    let z = l.if_greater(x, ten, ten, x);
    let minus_ten = l.splat(-10.0);
    let z = l.if_greater(minus_ten, z, minus_ten, z);
    let (t, e) = reduced(l, l.add(z, z));
    let power = l.add_to_exponent(l.splat(1.0), t);
    let m = l.fma(power, e, l.sub(power, l.splat(1.0)));
    let y = l.div(m, l.add(m, l.splat(2.0)));
    l.if_nan(x, x, y)
}

/// A function of one variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// e^x.
    Exp,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x * sigmoid(x)`.
    Silu,
    /// Hyperbolic tangent.
    Tanh,
}

/// Replaces each element of `x` by the function's value, as the backend's
/// operations compute it.
///
/// # Panics
/// If the machine does not have `isa`.
pub fn apply(function: Function, isa: Isa, x: &mut [f32]) {
    let machine = Available::new(isa).unwrap_or_else(|| panic!("this machine has no {isa}"));
    machine.run(Apply(function, x));
}

struct Apply<'a>(Function, &'a mut [f32]);

impl Kernel for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for part in self.1.chunks_mut(LANES) {
            let x = l.load_part(part);
            let y = match self.0 {
                Function::Exp => exp(l, x),
                Function::Sigmoid => sigmoid(l, x),
                Function::Silu => silu(l, x),
                Function::Tanh => tanh(l, x),
            };
            l.store_part(y, part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Apply, Function};
    use crate::lanes::Available;
    use crate::{Isa, math};

    /// The scalar program has the same bits with and without the instruction.
    #[test]
    fn fma_instruction_changes_no_bit() {
        let x: Vec<f32> = (-3000..3000).map(|i| i as f32 * 0.0371).collect();
        for function in [Function::Exp, Function::Silu, Function::Tanh] {
            let (mut with, mut without) = (x.clone(), x.clone());
            math::apply(function, Isa::Scalar, &mut with);
            Available::portable().run(Apply(function, &mut without));
            let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&with), bits(&without), "{function:?}");
        }
    }
}
