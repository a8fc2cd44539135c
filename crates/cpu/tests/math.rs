//! exp, sigmoid, SiLU and tanh: near the exact value, and the same bits on
//! every instruction set.

mod common;

use common::isas;
use cpu::Isa;
use cpu::math::{Function, apply};

/// Distance to the exact value, in units of the last place of the result.
fn ulps(found: f32, exact: f64) -> f64 {
    let nearest = exact as f32;
    let ulp = f64::from(nearest.abs().next_up()) - f64::from(nearest.abs());
    (f64::from(found) - exact).abs() / ulp
}

/// Values of every magnitude in `range`.
fn samples(low: f32, high: f32) -> Vec<f32> {
    let n = 400_000;
    let step = (f64::from(high) - f64::from(low)) / f64::from(n);
    let even = (0..=n).map(|i| (f64::from(low) + f64::from(i) * step) as f32);
    let small = (0..60_000u32).map(|i| f32::from_bits(0x2000_0000 + i * 0x2711));
    let small = small.flat_map(|v| [v, -v]);
    let all = even.chain(small).chain([0.0, -0.0, low, high]);
    all.filter(|v| (low..=high).contains(v)).collect()
}

fn check(function: Function, range: (f32, f32), exact: fn(f64) -> f64, limit: f64) {
    let x = samples(range.0, range.1);
    let mut expected = x.clone();
    apply(function, Isa::Scalar, &mut expected);
    let mut worst = (0.0, 0.0);
    for (&x, &y) in x.iter().zip(&expected) {
        let distance = ulps(y, exact(f64::from(x)));
        if distance > worst.0 {
            worst = (distance, x);
        }
    }
    assert!(
        worst.0 <= limit,
        "{function:?} of {}: {} ulp",
        worst.1,
        worst.0
    );
    for isa in isas() {
        let mut found = x.clone();
        apply(function, isa, &mut found);
        let same = |i: &usize| found[*i].to_bits() == expected[*i].to_bits();
        let differing = (0..x.len()).find(|i| !same(i)).map(|i| x[i]);
        assert_eq!(differing, None, "{function:?} with {isa}");
    }
}

#[test]
fn exp_is_near() {
    check(Function::Exp, (-87.0, 88.0), libm::exp, 1.5);
}

#[test]
fn sigmoid_is_near() {
    let exact = |x: f64| 1.0 / (1.0 + libm::exp(-x));
    check(Function::Sigmoid, (-87.0, 88.0), exact, 2.5);
}

#[test]
fn silu_is_near() {
    let exact = |x: f64| x / (1.0 + libm::exp(-x));
    check(Function::Silu, (-80.0, 88.0), exact, 3.0);
}

#[test]
fn tanh_is_near() {
    check(Function::Tanh, (-20.0, 20.0), libm::tanh, 3.0);
}

#[test]
fn values_at_the_ends() {
    let infinity = f32::INFINITY;
    let cases: [(Function, &[(f32, f32)]); 4] = [
        (
            Function::Exp,
            &[
                (0.0, 1.0),
                (-0.0, 1.0),
                (88.722_83, 3.402_8e38),
                (88.722_84, infinity),
                (infinity, infinity),
                (f32::MAX, infinity),
                (-87.336_54, 1.175_5e-38),
                (-87.336_55, 0.0),
                (-infinity, 0.0),
                (f32::MIN, 0.0),
            ],
        ),
        (
            Function::Sigmoid,
            &[(0.0, 0.5), (infinity, 1.0), (-infinity, 0.0), (-200.0, 0.0)],
        ),
        (
            Function::Silu,
            &[(0.0, 0.0), (infinity, infinity), (-200.0, 0.0)],
        ),
        (
            Function::Tanh,
            &[(0.0, 0.0), (infinity, 1.0), (-infinity, -1.0), (15.0, 1.0)],
        ),
    ];
    for isa in isas() {
        for (function, values) in cases {
            for &(x, expected) in values {
                let mut y = [x];
                apply(function, isa, &mut y);
                let is_near = y[0] == expected || (y[0] - expected).abs() <= expected.abs() * 1e-4;
                assert!(is_near, "{function:?} of {x} with {isa}: {}", y[0]);
            }
            let mut y = [f32::NAN; 20];
            apply(function, isa, &mut y);
            assert!(
                y.iter().all(|y| y.is_nan()),
                "{function:?} of NaN with {isa}"
            );
        }
    }
}
