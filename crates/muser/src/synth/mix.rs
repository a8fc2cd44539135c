//! Type mixes: which encoding each matrix of a file gets.
//!
//! What a reader would get wrong: in `q4_k_m`, whether a layer's `attn_v` and
//! `ffn_down` are Q6_K depends on the layer; in a drafter they all are.

use super::values;
use gguf::TensorType;
use std::fmt;
use std::str::FromStr;

/// A mix by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// The usual Q4_K_M: Q4_K, with Q6_K for the head and for `attn_v` and
    /// `ffn_down` in half of the layers. The published 17 GB file has a head in
    /// Q5_K.
    Q4KM,
    /// One encoding for every matrix.
    Uniform(TensorType),
}

/// Part of a file a matrix belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Layer `il` of `n_layer`.
    Layer {
        /// Index of the layer.
        il: usize,
        /// Number of layers.
        n_layer: usize,
    },
    /// A layer of a drafter.
    DrafterLayer,
    /// The head.
    Head,
    /// Anything else.
    Other,
}

impl Mix {
    /// The encoding of the matrix called `part` (`attn_v`, `ffn_down`, ...).
    pub fn of(self, part: &str, place: Place) -> TensorType {
        if let Mix::Uniform(ty) = self {
            return ty;
        }
        let is_sensitive = matches!(part, "attn_v" | "ffn_down");
        let is_finer = match place {
            Place::Layer { il, n_layer } => is_sensitive && is_finer_layer(il, n_layer),
            Place::DrafterLayer => is_sensitive,
            Place::Head => true,
            Place::Other => false,
        };
        if is_finer {
            TensorType::Q6_K
        } else {
            TensorType::Q4_K
        }
    }

    /// `general.file_type`, where the mix has a number (`LlamaFileType` of the
    /// PyPI package `gguf`).
    pub fn file_type(self) -> Option<u32> {
        Some(match self {
            Mix::Q4KM => 15,
            Mix::Uniform(TensorType::F32) => 0,
            Mix::Uniform(TensorType::F16) => 1,
            Mix::Uniform(TensorType::Q4_0) => 2,
            Mix::Uniform(TensorType::Q4_1) => 3,
            Mix::Uniform(TensorType::Q8_0) => 7,
            Mix::Uniform(TensorType::Q5_0) => 8,
            Mix::Uniform(TensorType::Q5_1) => 9,
            Mix::Uniform(TensorType::Q4_K) => 14,
            Mix::Uniform(TensorType::Q5_K) => 16,
            Mix::Uniform(TensorType::Q6_K) => 18,
            Mix::Uniform(TensorType::BF16) => 32,
            Mix::Uniform(_) => return None,
        })
    }
}

/// The first and the last eighth of the layers, and every third between.
fn is_finer_layer(il: usize, n_layer: usize) -> bool {
    let eighth = n_layer / 8;
    il < eighth || il >= 7 * n_layer / 8 || (il - eighth) % 3 == 2
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mix::Q4KM => f.write_str("q4_k_m"),
            Mix::Uniform(ty) => f.write_str(&ty.name().to_ascii_lowercase()),
        }
    }
}

/// The encoding that a flag names.
pub fn parse_type(text: &str) -> Result<TensorType, String> {
    let ty = TensorType::from_name(text).filter(|&ty| values::can_make(ty));
    ty.ok_or_else(|| format!("expected one of {}", type_names().join(", ")))
}

fn type_names() -> Vec<String> {
    TensorType::ALL
        .iter()
        .filter(|&&ty| values::can_make(ty))
        .map(|ty| ty.name().to_ascii_lowercase())
        .collect()
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Mix, String> {
        if text.eq_ignore_ascii_case("q4_k_m") {
            return Ok(Mix::Q4KM);
        }
        parse_type(text)
            .map(Mix::Uniform)
            .map_err(|_| format!("expected q4_k_m or one of {}", type_names().join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finer_layers_of_the_30b() {
        let finer: Vec<usize> = (0..52).filter(|&il| is_finer_layer(il, 52)).collect();
        let expected: Vec<usize> = (0..6).chain((8..45).step_by(3)).chain(45..52).collect();
        assert_eq!(finer, expected);
        assert_eq!(finer.len(), 26);
    }

    #[test]
    fn names() {
        for (text, expected) in [
            ("q4_k_m", Ok(Mix::Q4KM)),
            ("Q8_0", Ok(Mix::Uniform(TensorType::Q8_0))),
            ("bf16", Ok(Mix::Uniform(TensorType::BF16))),
        ] {
            assert_eq!(text.parse::<Mix>(), expected, "{text}");
        }
        for text in ["", "q9", "i32", "f64"] {
            let message = text.parse::<Mix>().expect_err(text);
            assert!(
                message.starts_with("expected q4_k_m or one of f32, f16, q4_0,"),
                "{message}"
            );
        }
    }
}
