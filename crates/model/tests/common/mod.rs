//! What the model's tests share: golden files, whole sequences through a
//! model, and distances.
#![allow(dead_code)] // each test binary uses its part

pub mod keys;
pub mod mutant;
pub mod oracle_weights;
pub mod rebuild;

use gguf::Gguf;
use model::backend::Backend;
use model::{
    Batch, Forward, KvType, Model, Options, PagePool, Reference, RowOutput, SequencePages, Want,
};
use std::io::Read;
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

/// The arrays of an npz file.
pub struct Golden {
    name: String,
    zip: npyz::npz::NpzArchive<std::io::BufReader<std::fs::File>>,
}

impl Golden {
    /// A golden file of the oracle. A missing one fails the test.
    pub fn open(name: &str) -> Golden {
        let path = testdata("oracle").join(name);
        let zip = npyz::npz::NpzArchive::open(&path)
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = name.to_string();
        Golden { name, zip }
    }

    fn read<T: npyz::Deserialize>(&mut self, key: &str) -> (Vec<u64>, Vec<T>) {
        let array = self.zip.by_name(key).expect("a readable golden file");
        let array = array.unwrap_or_else(|| panic!("{}: no array {key}", self.name));
        let shape = array.shape().to_vec();
        (shape, array.into_vec().expect("an array of the right type"))
    }

    pub fn floats(&mut self, key: &str) -> (Vec<u64>, Vec<f32>) {
        self.read(key)
    }

    pub fn tokens(&mut self, key: &str) -> Vec<u32> {
        let (_, values) = self.read::<i32>(key);
        values.into_iter().map(|v| v as u32).collect()
    }

    pub fn number(&mut self, key: &str) -> i32 {
        self.read::<i32>(key).1[0]
    }
}

/// Exact values: f32 keys and values.
pub const EXACT: Options = Options {
    kv: KvType::F32,
    kv_bytes: 256 << 20,
};

pub fn reference(file: &Gguf, options: Options) -> Model<Reference> {
    Model::load(Reference::new(), file, options).unwrap_or_else(|e| panic!("{e}"))
}

/// An empty pool of the size that `model` may use.
pub fn pool_of<B: Backend>(model: &Model<B>) -> PagePool {
    let capacity = model.capacity();
    PagePool::new(capacity.layout, capacity.max_slabs)
}

/// The logits of every row of `tokens`, computed in passes of `chunk` rows.
pub fn logits<B: Backend>(model: &mut Model<B>, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut pool = pool_of(model);
    let mut pages = SequencePages::new();
    let mut all = Vec::new();
    for tokens in tokens.chunks(chunk) {
        all.extend(append(model, &mut pool, &mut pages, tokens));
    }
    pages.clear(&mut pool);
    assert_eq!(pool.n_pages_used(), 0, "every page returns");
    all
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

/// Do all rows have the same bits?
pub fn same_bits(left: &[Vec<f32>], right: &[Vec<f32>]) -> bool {
    let bits = |row: &Vec<f32>| row.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    left.len() == right.len() && left.iter().zip(right).all(|(l, r)| bits(l) == bits(r))
}

/// Limits of a comparison: largest absolute difference, relative RMS.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_abs: f64,
    pub relative_rms: f64,
}

/// What f32 activations over f32 keys and values must keep against the oracle.
pub const TEXT_LIMITS: Limits = Limits {
    max_abs: 2e-3,
    relative_rms: 3e-5,
};

/// The same for the drafter's raw logits, which are ten times as large.
pub const DRAFT_LIMITS: Limits = Limits {
    max_abs: f64::INFINITY,
    relative_rms: 5e-5,
};

impl Limits {
    /// Says by how much `found` is outside of the limits around `golden`.
    pub fn check(&self, what: &str, found: &[f32], golden: &[f32]) -> Result<(), String> {
        let (max_abs, relative_rms) = distance(found, golden);
        // Not "greater": a NaN is outside of every limit.
        if max_abs <= self.max_abs && relative_rms <= self.relative_rms {
            return Ok(());
        }
        Err(format!(
            "{what}: max abs {max_abs:.2e}, relative RMS {relative_rms:.2e}; limits {:.0e}, {:.0e}",
            self.max_abs, self.relative_rms
        ))
    }
}

/// Largest absolute difference, and RMS of the difference over RMS of `right`.
pub fn distance(left: &[f32], right: &[f32]) -> (f64, f64) {
    assert_eq!(left.len(), right.len(), "values to compare");
    let (mut max, mut square, mut size) = (0f64, 0f64, 0f64);
    for (&l, &r) in left.iter().zip(right) {
        let d = f64::from(l) - f64::from(r);
        // Not f64::max: it drops a NaN, whichever of the two is one.
        max = if max.is_nan() || d.abs() <= max {
            max
        } else {
            d.abs()
        };
        square += d * d;
        size += f64::from(r) * f64::from(r);
    }
    (max, (square / size).sqrt())
}

pub fn read_to_string(path: &Path) -> String {
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|mut f| f.read_to_string(&mut text))
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text
}
