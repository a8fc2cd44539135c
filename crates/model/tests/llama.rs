//! The Llama graph against formulas written a second time, in f64, straight
//! from the papers: RMSNorm (Zhang and Sennrich 2019), RoPE (Su et al. 2021),
//! grouped queries (Ainslie et al. 2023), SwiGLU (Shazeer 2020), sliding window
//! (Jiang et al. 2023), linear scaling (Chen et al. 2023), YaRN (Peng et al.
//! 2023). Whole files are made here, from weights to keys.

use gguf::{Gguf, Metadata, Value};
use model::{KvType, Model, Options, Reference};
use std::f64::consts::PI;
use testing::{EXACT, Parts, Tensor, distance, logits, reference, same_bits, text, tokens};

const N_LAYER: usize = 3;
const D: usize = 24;
const N_HEAD: usize = 6;
const N_HEAD_KV: usize = 2;
/// Not `D / N_HEAD`.
const HEAD_DIM: usize = 8;
const N_FF: usize = 40;
const N_VOCAB: usize = 30;
const N_Q: usize = N_HEAD * HEAD_DIM;
const N_KV: usize = N_HEAD_KV * HEAD_DIM;
const EPS: f64 = 1e-5;
const BASE: f64 = 10_000.0;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scaling {
    None,
    Linear(f64),
    OldLinear(f64),
    Yarn { factor: f64, context: f64 },
}

/// A model of the family.
#[derive(Clone, Copy, Debug)]
struct Variant {
    is_tied: bool,
    has_biases: bool,
    has_rope_factors: bool,
    n_rot: usize,
    scaling: Scaling,
    window: Option<usize>,
}

const PLAIN: Variant = Variant {
    is_tied: false,
    has_biases: false,
    has_rope_factors: false,
    n_rot: HEAD_DIM,
    scaling: Scaling::None,
    window: None,
};

/// Names and shapes of all tensors, row length first.
fn shapes(variant: &Variant) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("token_embd.weight".to_string(), vec![D, N_VOCAB])];
    if variant.has_rope_factors {
        all.push(("rope_freqs.weight".into(), vec![variant.n_rot / 2]));
    }
    for il in 0..N_LAYER {
        let mut add = |name: &str, shape: Vec<usize>| all.push((format!("blk.{il}.{name}"), shape));
        add("attn_norm.weight", vec![D]);
        add("ffn_norm.weight", vec![D]);
        for (name, cols, rows) in [
            ("attn_q", D, N_Q),
            ("attn_k", D, N_KV),
            ("attn_v", D, N_KV),
            ("attn_output", N_Q, D),
            ("ffn_gate", D, N_FF),
            ("ffn_up", D, N_FF),
            ("ffn_down", N_FF, D),
        ] {
            add(&format!("{name}.weight"), vec![cols, rows]);
            if variant.has_biases {
                add(&format!("{name}.bias"), vec![rows]);
            }
        }
    }
    all.push(("output_norm.weight".into(), vec![D]));
    if !variant.is_tied {
        all.push(("output.weight".into(), vec![D, N_VOCAB]));
    }
    all
}

/// Numbers in -1 .. 1 that depend on name and index.
fn values(name: &str, n: usize) -> Vec<f32> {
    let mut state = name
        .bytes()
        .fold(7u64, |h, b| h.wrapping_mul(131).wrapping_add(b.into()));
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn tensor(name: &str, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    let noise = values(name, n).into_iter();
    let scaled: Vec<f32> = if name.contains("norm") || name.contains("freqs") {
        noise.map(|v| 1.0 + 0.5 * v.abs()).collect()
    } else if name.ends_with("bias") {
        noise.map(|v| 0.3 * v).collect()
    } else {
        noise.map(|v| 2.0 * v / (shape[0] as f32).sqrt()).collect()
    };
    Tensor::floats(name, shape, &scaled)
}

fn file(variant: &Variant) -> Gguf {
    let mut meta = Metadata::default();
    meta.insert("general.architecture", text("llama"));
    let mut key = |name: &str, value| meta.insert(format!("llama.{name}"), value);
    for (name, value) in [
        ("block_count", N_LAYER),
        ("context_length", 256),
        ("embedding_length", D),
        ("feed_forward_length", N_FF),
        ("attention.head_count", N_HEAD),
        ("attention.head_count_kv", N_HEAD_KV),
        ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
        ("rope.dimension_count", variant.n_rot),
    ] {
        key(name, Value::U32(value as u32));
    }
    key("attention.layer_norm_rms_epsilon", Value::F32(EPS as f32));
    key("rope.freq_base", Value::F32(BASE as f32));
    if let Some(window) = variant.window {
        key("attention.sliding_window", Value::U32(window as u32));
    }
    let mut scale = |kind: &str, factor: f64| {
        key("rope.scaling.type", text(kind));
        key("rope.scaling.factor", Value::F32(factor as f32));
    };
    match variant.scaling {
        Scaling::None => {}
        Scaling::Linear(factor) => scale("linear", factor),
        Scaling::OldLinear(factor) => {
            key("rope.scale_linear", Value::F32(factor as f32));
        }
        Scaling::Yarn { factor, context } => {
            scale("yarn", factor);
            key(
                "rope.scaling.original_context_length",
                Value::U32(context as u32),
            );
        }
    }
    meta.insert("tokenizer.ggml.tokens", tokens(N_VOCAB));
    let tensors = shapes(variant)
        .iter()
        .map(|(name, shape)| tensor(name, shape))
        .collect();
    let metadata = meta;
    Parts { metadata, tensors }.write()
}

/// The second implementation: everything in f64, one sequence, no cache.
struct Naive {
    variant: Variant,
}

impl Naive {
    fn weights(&self, name: &str) -> Vec<f64> {
        let shapes = shapes(&self.variant);
        let (_, shape) = shapes
            .iter()
            .find(|(n, _)| n == name)
            .unwrap_or_else(|| panic!("{name}"));
        tensor(name, shape)
            .values()
            .into_iter()
            .map(f64::from)
            .collect()
    }

    /// `W x + b`.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = self.weights(&format!("{name}.weight"));
        let mut y: Vec<f64> = w
            .chunks(x.len())
            .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
            .collect();
        if self.variant.has_biases && name.starts_with("blk") {
            let b = self.weights(&format!("{name}.bias"));
            y.iter_mut().zip(b).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean_square = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let rms = (mean_square + EPS).sqrt();
        x.iter()
            .zip(self.weights(name))
            .map(|(x, w)| x / rms * w)
            .collect()
    }

    /// Radians a position of pair `j`, and the factor on the vector's length.
    fn speed(&self, j: usize) -> (f64, f64) {
        let n = self.variant.n_rot as f64;
        let speed = 1.0 / BASE.powf(2.0 * j as f64 / n);
        let speed = match self.variant.has_rope_factors {
            true => speed / self.weights("rope_freqs.weight")[j],
            false => speed,
        };
        match self.variant.scaling {
            Scaling::None => (speed, 1.0),
            Scaling::Linear(factor) | Scaling::OldLinear(factor) => (speed / factor, 1.0),
            Scaling::Yarn { factor, context } => {
                // Dimension at which a wave fits `turns` times into the context.
                let dimension =
                    |turns: f64| n * (context / (turns * 2.0 * PI)).ln() / (2.0 * BASE.ln());
                let low = dimension(32.0).floor().max(0.0);
                let high = dimension(1.0).ceil().min(n - 1.0);
                let ramp = ((j as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                let kept = 1.0 - ramp;
                (
                    speed / factor * (1.0 - kept) + speed * kept,
                    0.1 * factor.ln() + 1.0,
                )
            }
        }
    }

    /// Multiplies neighbours, taken as a complex number, by `m e^(i angle)`.
    fn turn(&self, x: &mut [f64], pos: usize) {
        for head in x.chunks_mut(HEAD_DIM) {
            for j in 0..self.variant.n_rot / 2 {
                let (speed, magnitude) = self.speed(j);
                let angle = speed * pos as f64;
                let (re, im) = (magnitude * angle.cos(), magnitude * angle.sin());
                let (a, b) = (head[2 * j], head[2 * j + 1]);
                head[2 * j] = a * re - b * im;
                head[2 * j + 1] = b * re + a * im;
            }
        }
    }

    fn attention(&self, q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>], row: usize) -> Vec<f64> {
        let mut out = vec![0.0; N_Q];
        for h in 0..N_HEAD {
            let of_query = h * HEAD_DIM..(h + 1) * HEAD_DIM;
            let shared = h * N_HEAD_KV / N_HEAD * HEAD_DIM;
            let of_key = shared..shared + HEAD_DIM;
            let sees = |key: &usize| self.variant.window.is_none_or(|w| row - key < w);
            let keys: Vec<usize> = (0..=row).filter(sees).collect();
            let score = |&key: &usize| {
                let pairs = q[row][of_query.clone()].iter().zip(&k[key][of_key.clone()]);
                let dot: f64 = pairs.map(|(q, k)| q * k).sum();
                (dot / (HEAD_DIM as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = keys.iter().map(score).collect();
            let total: f64 = weights.iter().sum();
            for (key, weight) in keys.iter().zip(&weights) {
                for (i, v) in v[*key][of_key.clone()].iter().enumerate() {
                    out[h * HEAD_DIM + i] += weight / total * v;
                }
            }
        }
        out
    }

    fn logits(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let embd = self.weights("token_embd.weight");
        let row = |&t: &u32| embd[t as usize * D..(t as usize + 1) * D].to_vec();
        let mut x: Vec<Vec<f64>> = tokens.iter().map(row).collect();
        let add = |x: &mut Vec<f64>, y: Vec<f64>| {
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        };
        for il in 0..N_LAYER {
            let name = |part: &str| format!("blk.{il}.{part}");
            let h: Vec<Vec<f64>> = x
                .iter()
                .map(|x| self.norm(&name("attn_norm.weight"), x))
                .collect();
            let project = |part: &str| -> Vec<Vec<f64>> {
                h.iter().map(|h| self.linear(&name(part), h)).collect()
            };
            let (mut q, mut k, v) = (project("attn_q"), project("attn_k"), project("attn_v"));
            for (pos, (q, k)) in q.iter_mut().zip(&mut k).enumerate() {
                self.turn(q, pos);
                self.turn(k, pos);
            }
            for (row, x) in x.iter_mut().enumerate() {
                let attn = self.attention(&q, &k, &v, row);
                add(x, self.linear(&name("attn_output"), &attn));
                let h = self.norm(&name("ffn_norm.weight"), x);
                let gate = self.linear(&name("ffn_gate"), &h).into_iter();
                let up = self.linear(&name("ffn_up"), &h);
                let ff: Vec<f64> = gate
                    .zip(up)
                    .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                    .collect();
                add(x, self.linear(&name("ffn_down"), &ff));
            }
        }
        let head = if self.variant.is_tied {
            "token_embd"
        } else {
            "output"
        };
        let last = |x: &Vec<f64>| self.linear(head, &self.norm("output_norm.weight", x));
        x.iter().map(last).collect()
    }
}

const TOKENS: [u32; 21] = [
    1,
    17,
    3,
    29,
    0,
    8,
    8,
    21,
    14,
    5,
    27,
    2,
    11,
    19,
    23,
    6,
    1,
    30 - 1,
    12,
    9,
    4,
];

fn model(variant: &Variant) -> Model<Reference> {
    reference(&file(variant), EXACT)
}

/// Compares a variant with its formulas; gives the logits.
#[track_caller]
fn check(variant: Variant) -> Vec<Vec<f32>> {
    let found = logits(&mut model(&variant), &TOKENS, 8);
    let expected = Naive { variant }.logits(&TOKENS);
    let expected: Vec<f32> = expected.concat().into_iter().map(|v| v as f32).collect();
    let (max_abs, relative_rms) = distance(&found.concat(), &expected);
    assert!(
        relative_rms <= 3e-6,
        "{variant:?}: max abs {max_abs:.1e}, relative RMS {relative_rms:.1e}"
    );
    found
}

#[test]
fn variants_equal_their_formulas() {
    let plain = check(PLAIN);
    let variants = [
        Variant {
            is_tied: true,
            ..PLAIN
        },
        Variant {
            has_biases: true,
            ..PLAIN
        },
        Variant {
            has_rope_factors: true,
            ..PLAIN
        },
        Variant { n_rot: 4, ..PLAIN },
        Variant {
            scaling: Scaling::Linear(4.0),
            ..PLAIN
        },
        Variant {
            scaling: Scaling::Yarn {
                factor: 4.0,
                context: 32.0,
            },
            ..PLAIN
        },
        Variant {
            window: Some(5),
            ..PLAIN
        },
        Variant {
            is_tied: true,
            has_biases: true,
            has_rope_factors: true,
            n_rot: 6,
            scaling: Scaling::Yarn {
                factor: 8.0,
                context: 512.0,
            },
            window: Some(7),
        },
    ];
    for variant in variants {
        let found = check(variant);
        let (_, apart) = distance(&found.concat(), &plain.concat());
        assert!(
            apart > 1e-3,
            "{variant:?} is no other model than the plain one"
        );
    }
}

#[test]
fn both_spellings_of_linear_scaling_are_one() {
    let old = check(Variant {
        scaling: Scaling::OldLinear(4.0),
        ..PLAIN
    });
    let new = check(Variant {
        scaling: Scaling::Linear(4.0),
        ..PLAIN
    });
    assert!(same_bits(&old, &new));
}

#[test]
fn chunks_change_no_bit() {
    for window in [None, Some(5)] {
        let variant = Variant { window, ..PLAIN };
        let options = Options {
            kv: KvType::F16,
            ..EXACT
        };
        let file = file(&variant);
        let whole = logits(&mut reference(&file, options), &TOKENS, 21);
        for chunk in [1, 4] {
            let found = logits(&mut reference(&file, options), &TOKENS, chunk);
            assert!(
                same_bits(&found, &whole),
                "window {window:?}, chunks of {chunk}"
            );
        }
    }
}

/// The message that a changed file gives.
#[track_caller]
fn refused(message: &str, variant: Variant, change: impl FnOnce(&mut Parts)) {
    let mut parts = Parts::of(&file(&variant));
    change(&mut parts);
    let error = Model::load(Reference::new(), &parts.write(), EXACT).map(drop);
    assert_eq!(error.expect_err("a refused file").to_string(), message);
}

#[test]
fn refusals() {
    let factors = Variant {
        has_rope_factors: true,
        ..PLAIN
    };
    refused(
        "tensor rope_freqs.weight: found the value 0, expected positive finite numbers",
        factors,
        |p| {
            *p.tensor("rope_freqs.weight") =
                Tensor::floats("rope_freqs.weight", &[4], &[1.0, 0.0, 1.0, 1.0])
        },
    );
    refused(
        "tensor rope_freqs.weight: found shape [8], expected [4]",
        factors,
        |p| *p.tensor("rope_freqs.weight") = Tensor::floats("rope_freqs.weight", &[8], &[1.0; 8]),
    );
    refused(
        "tensor blk.2.attn_k.bias: found shape [8], expected [16]",
        PLAIN,
        |p| {
            p.tensors
                .push(Tensor::floats("blk.2.attn_k.bias", &[8], &[1.0; 8]))
        },
    );
    refused(
        "tensor blk.1.ffn_up.weight is missing; expected shape [24, 40]",
        PLAIN,
        |p| p.remove("blk.1.ffn_up.weight"),
    );
    refused(
        "1 tensor(s) of the file are not part of a llama model, first: blk.0.attn_q_norm.weight; \
         a model that needs them would be computed wrongly",
        PLAIN,
        |p| {
            p.tensors
                .push(Tensor::floats("blk.0.attn_q_norm.weight", &[8], &[1.0; 8]))
        },
    );
}
