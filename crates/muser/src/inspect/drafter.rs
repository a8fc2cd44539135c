//! Are a drafter's tensors all there, in the right shapes, and no others?
//!
//! A model is judged by loading it, but a drafter loads only beside its target.
//! So its tensors are held against the list from which `muser synth` writes
//! drafters; that what it writes can be attached is tested there. The errors are
//! those of loading.

use crate::synth::{Arch, Shape, tensors};
use gguf::{Gguf, TensorType};
use model::{DrafterConfig, Error};
use std::collections::HashSet;

/// Checks the tensors of a drafter's file.
///
/// # Errors
/// [`Error::TensorMissing`], [`Error::TensorShape`], [`Error::TensorType`] for a
/// norm, [`Error::TensorsUnused`].
pub fn check(file: &Gguf, config: &DrafterConfig) -> Result<(), Error> {
    let expected = tensors(&Shape {
        arch: Arch::Dflash,
        n_layer: config.n_layer,
        n_embd: config.n_embd,
        n_ff: config.n_ff,
        n_head: config.n_head,
        n_head_kv: config.n_head_kv,
        head_dim: config.head_dim,
        target_layers: config.target_places.iter().map(|&p| p as u32).collect(),
        // No tensor's shape depends on these.
        n_vocab: 0,
        n_merges: None,
        window: 0,
        n_ctx: 0,
    });
    let mut known = HashSet::new();
    for (name, shape) in expected {
        let Some(tensor) = file.tensor(&name) else {
            let expected = shape;
            return Err(Error::TensorMissing { name, expected });
        };
        if significant(&tensor.shape) != significant(&shape) {
            return Err(Error::TensorShape {
                name,
                found: tensor.shape.clone(),
                expected: shape,
            });
        }
        const NORM: [TensorType; 3] = [TensorType::F32, TensorType::F16, TensorType::BF16];
        if shape.len() == 1 && !NORM.contains(&tensor.ty) {
            return Err(Error::TensorType {
                name,
                found: tensor.ty,
                expected: "F32, F16 or BF16",
            });
        }
        known.insert(name);
    }
    let mut unused = file.tensors().iter().filter(|t| !known.contains(&t.name));
    match unused.next() {
        None => Ok(()),
        Some(first) => Err(Error::TensorsUnused {
            first: first.name.clone(),
            count: 1 + unused.count(),
            architecture: "dflash",
        }),
    }
}

/// A shape without trailing lengths of 1, which carry no meaning.
fn significant(shape: &[u64]) -> &[u64] {
    let last = shape.iter().rposition(|&n| n != 1);
    &shape[..last.map_or(1, |last| last + 1)]
}
