//! What the backend's tests share: settings to compare, models over pages, and
//! distances.
#![allow(dead_code)] // each test binary uses its part

pub mod blocks;
pub mod context;
pub mod lab;
pub mod plain;
pub mod suite;

use cpu::{Cpu, CpuOptions, Isa};
use gguf::{Gguf, TensorType, TensorView, quant};
use model::{
    Backend, Batch, Forward, KvType, Model, Options, PagePool, RowOutput, SequencePages, Want,
};
use std::path::{Path, PathBuf};

/// A file below `testdata/`.
pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(name)
}

/// A file below `models/`.
pub fn bundled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .join(name)
}

pub fn open(path: &Path) -> Gguf {
    Gguf::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A backend with these settings.
pub fn cpu(isa: Isa, threads: usize) -> Cpu {
    let options = CpuOptions {
        threads: Some(threads),
        isa: Some(isa),
    };
    Cpu::new(options).unwrap_or_else(|e| panic!("{e}"))
}

/// The instruction sets of this machine.
pub fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|i| i.is_available()).collect()
}

pub fn loaded<B: Backend>(be: B, file: &Gguf, kv: KvType) -> Model<B> {
    let kv_bytes = 512 << 20;
    Model::load(be, file, Options { kv, kv_bytes }).unwrap_or_else(|e| panic!("{e}"))
}

/// An empty pool of the size that `model` may use.
pub fn pool_of<B: Backend>(model: &Model<B>) -> PagePool {
    let capacity = model.capacity();
    PagePool::new(capacity.layout, capacity.max_slabs)
}

/// Computes `tokens` as the next rows of a sequence and accepts them.
pub fn append<B: Backend>(
    model: &mut Model<B>,
    pool: &mut PagePool,
    pages: &mut SequencePages,
    tokens: &[u32],
) -> Vec<Vec<f32>> {
    let n = tokens.len() as u32;
    let copies = pages.reserve(pool, n).expect("free pages");
    model.copy_pages(&copies).expect("copies");
    let batch = Batch::span(0, pages.len(), tokens);
    let want = vec![Want::Full; tokens.len()];
    let outputs = model.pass(&batch, &[pages], &want).expect("a pass");
    pages.accept(pool, n);
    outputs.into_iter().map(full).collect()
}

/// The logits of an output that asked for all of them.
pub fn full(output: RowOutput) -> Vec<f32> {
    match output {
        RowOutput::Full(logits) => logits,
        other => panic!("expected a whole row, got {other:?}"),
    }
}

/// First row and column whose bits differ.
pub fn first_difference(left: &[Vec<f32>], right: &[Vec<f32>]) -> Option<(usize, usize)> {
    assert_eq!(left.len(), right.len(), "rows to compare");
    for (r, (left, right)) in left.iter().zip(right).enumerate() {
        assert_eq!(left.len(), right.len(), "columns of row {r}");
        let differs = |i: &usize| left[*i].to_bits() != right[*i].to_bits();
        if let Some(col) = (0..left.len()).find(differs) {
            return Some((r, col));
        }
    }
    None
}

/// Largest absolute difference, and RMS of the difference over RMS of `right`.
pub fn distance(left: &[f32], right: &[f32]) -> (f64, f64) {
    assert_eq!(left.len(), right.len(), "values to compare");
    let (mut max, mut square, mut size) = (0f64, 0f64, 0f64);
    for (&l, &r) in left.iter().zip(right) {
        let d = f64::from(l) - f64::from(r);
        // f64::max drops a NaN.
        max = if d.is_nan() {
            f64::NAN
        } else {
            max.max(d.abs())
        };
        square += d * d;
        size += f64::from(r) * f64::from(r);
    }
    (max, (square / size).sqrt())
}

/// Numbers in -1 to 1 that are the same everywhere.
pub struct Noise(pub u64);

impl Noise {
    pub fn next_f32(&mut self) -> f32 {
        // SplitMix64 (Steele, Lea and Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next_f32()).collect()
    }
}

/// A tensor of `rows` rows of `cols` elements, encoded as `ty`.
pub fn tensor(name: &str, ty: TensorType, cols: usize, rows: usize, values: &[f32]) -> TensorView {
    let mut data = Vec::new();
    for row in values.chunks(cols) {
        match ty {
            // Also values that are not finite, which the encoder refuses.
            TensorType::F32 => data.extend(row.iter().flat_map(|v| v.to_le_bytes())),
            _ => quant::encode_row(ty, row, &mut data).expect("finite values"),
        }
    }
    assert_eq!(values.len(), rows * cols, "elements of {name}");
    TensorView {
        name: name.to_string(),
        ty,
        shape: vec![cols as u64, rows as u64],
        data: data.into(),
    }
}
