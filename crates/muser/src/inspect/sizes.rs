//! How large the tensors of a file are, by encoding and together.

use gguf::{TensorInfo, TensorType};
use serde::Serialize;

/// The tensors of one encoding.
#[derive(Clone, Debug, PartialEq)]
pub struct TypeSize {
    pub ty: TensorType,
    pub n_tensors: u64,
    pub n_parameters: u64,
    pub n_bytes: u64,
}

/// All tensors of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// By encoding, the one with the most bytes first.
    pub types: Vec<TypeSize>,
    pub n_tensors: u64,
    pub n_parameters: u64,
    pub n_bytes: u64,
}

/// The sums, as JSON has them.
#[derive(Serialize)]
pub struct Total {
    tensors: u64,
    parameters: u64,
    bytes: u64,
    bits_per_weight: f64,
}

impl Sizes {
    /// Adds up checked tensors.
    ///
    /// # Panics
    /// If a shape is not one that a file could have.
    pub fn of(tensors: &[TensorInfo]) -> Sizes {
        let mut types: Vec<TypeSize> = Vec::new();
        for tensor in tensors {
            let n_parameters: u64 = tensor.shape.iter().product();
            let n_bytes = tensor.data_bytes().expect("a shape that was checked");
            let index = match types.iter().position(|t| t.ty == tensor.ty) {
                Some(index) => index,
                None => {
                    types.push(TypeSize {
                        ty: tensor.ty,
                        n_tensors: 0,
                        n_parameters: 0,
                        n_bytes: 0,
                    });
                    types.len() - 1
                }
            };
            types[index].n_tensors += 1;
            types[index].n_parameters += n_parameters;
            types[index].n_bytes += n_bytes;
        }
        types.sort_by_key(|t| (std::cmp::Reverse(t.n_bytes), t.ty));
        let sum = |of: fn(&TypeSize) -> u64| types.iter().map(of).sum();
        Sizes {
            n_tensors: sum(|t| t.n_tensors),
            n_parameters: sum(|t| t.n_parameters),
            n_bytes: sum(|t| t.n_bytes),
            types,
        }
    }

    /// Bits that a parameter takes on average; 0 without parameters.
    pub fn bits_per_weight(&self) -> f64 {
        match self.n_parameters {
            0 => 0.0,
            n => self.n_bytes as f64 * 8.0 / n as f64,
        }
    }

    /// The sums.
    pub fn total(&self) -> Total {
        Total {
            tensors: self.n_tensors,
            parameters: self.n_parameters,
            bytes: self.n_bytes,
            bits_per_weight: self.bits_per_weight(),
        }
    }
}
