//! Attention over long contexts: the bits of a row do not depend on where its
//! pages lie, on the rows beside it, on threads or on the instruction set, on
//! both sides of the position where segments become longer; and the result is
//! the softmax-weighted mean, computed in f64.

mod common;

use common::{cpu, isas};
use cpu::Isa;
use model::KvType;
use testing::context::{
    Bench, HEAD_DIM, N_DISTINCT, N_HEAD, N_HEAD_KV, POSITIONS, WINDOWS, values,
};
use testing::distance;
use testing::suite::bits;

/// Each position on its own, one thread, scalar.
fn alone(ty: KvType) -> Vec<Vec<Vec<f32>>> {
    let mut bench = Bench::new(cpu(Isa::Scalar, 1), ty, |i| i);
    let of = |window| {
        let rows = POSITIONS.iter();
        rows.flat_map(|&pos| bench.attend(&[pos], window)).collect()
    };
    WINDOWS.map(of).to_vec()
}

fn check(ty: KvType) {
    let expected = alone(ty);
    for isa in isas() {
        for threads in [1, 2, 3] {
            // Pages in another order, the first in the middle.
            let mut bench = Bench::new(cpu(isa, threads), ty, |i| (i * 31 + 17) % 74);
            for (window, expected) in WINDOWS.into_iter().zip(&expected) {
                let what = format!("{isa}, {threads} threads, window {window:?}");
                // Neighbours on both sides, in passes of 1, 9 and 40 rows.
                for (before, after) in [(0, 0), (6, 2), (30, 9)] {
                    for (pos, expected) in POSITIONS.iter().zip(expected) {
                        let first = pos.saturating_sub(before);
                        let rows: Vec<u32> = (first..=pos + after).collect();
                        let found = bench.attend(&rows, window);
                        let found = &found[(pos - first) as usize];
                        let same = bits(found) == bits(expected);
                        assert!(same, "row {pos} of {} rows: {what}", rows.len());
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_company_or_place_f16() {
    check(KvType::F16);
}

#[test]
fn bits_do_not_depend_on_company_or_place_f32() {
    check(KvType::F32);
}

/// The formula in f64 over f32 keys and values.
fn exact(pos: u32, window: Option<u32>) -> Vec<f32> {
    let n_kv = N_HEAD_KV * HEAD_DIM;
    let (k, v) = (values(n_kv, 1), values(n_kv, 2));
    let q = values(N_HEAD * HEAD_DIM, 3);
    let first = window.map_or(0, |w| (pos + 1).saturating_sub(w));
    let at = |cols: usize, pos: u32| pos as usize % N_DISTINCT * cols;
    let mut out = Vec::new();
    for head in 0..N_HEAD {
        let q = &q[at(N_HEAD * HEAD_DIM, pos) + head * HEAD_DIM..][..HEAD_DIM];
        let kv_head = head / (N_HEAD / N_HEAD_KV) * HEAD_DIM;
        let score = |key: u32| {
            let k = &k[at(n_kv, key) + kv_head..][..HEAD_DIM];
            let products = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k));
            products.sum::<f64>() * f64::from(0.7f32)
        };
        let weights: Vec<f64> = (first..=pos).map(|key| score(key).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for dim in 0..HEAD_DIM {
            let value = |key: u32| f64::from(v[at(n_kv, key) + kv_head + dim]);
            let weighed = (first..=pos).zip(&weights).map(|(key, w)| value(key) * w);
            out.push((weighed.sum::<f64>() / sum) as f32);
        }
    }
    out
}

#[test]
fn near_the_exact_value() {
    let mut bench = Bench::new(cpu(Isa::detect(), 2), KvType::F32, |i| i);
    for window in WINDOWS {
        for pos in POSITIONS {
            let found = bench.attend(&[pos], window).concat();
            let (max_abs, relative_rms) = distance(&found, &exact(pos, window));
            assert!(
                max_abs <= 2e-6 && relative_rms <= 5e-6,
                "row {pos}, window {window:?}: max abs {max_abs:.1e}, relative RMS {relative_rms:.1e}"
            );
        }
    }
}

/// Scores far apart: the largest rules, nothing overflows.
#[test]
fn large_scores() {
    let mut bench = Bench::new(cpu(Isa::detect(), 2), KvType::F32, |i| i);
    bench.q.iter_mut().for_each(|q| *q *= 1e4);
    for pos in [0, 700, 18_000] {
        let found = bench.attend(&[pos], None).concat();
        assert!(found.iter().all(|v| v.abs() <= 1.0), "row {pos}");
    }
    // A query that is not finite reaches the output of its own head alone.
    bench.q.fill(0.5);
    let finite = bench.attend(&[900], None).concat();
    for bad in [f32::NAN, f32::INFINITY] {
        let at = 900 * N_HEAD * HEAD_DIM + HEAD_DIM;
        bench.q[at] = bad;
        // Infinite times keys of both signs.
        let found = bench.attend(&[900], None).concat();
        let head = HEAD_DIM..2 * HEAD_DIM;
        assert!(found[head.clone()].iter().all(|v| v.is_nan()), "{bad}");
        assert_eq!(bits(&found[..head.start]), bits(&finite[..head.start]));
        assert_eq!(bits(&found[head.end..]), bits(&finite[head.end..]));
    }
}
