//! Rotary position encoding: which dimensions turn together, and how fast.
//!
//! GGUF files of Muse Glimmer and of Llama pair neighbours (2j, 2j + 1): their
//! Q and K rows were reordered by the converter. The drafter's file keeps the
//! halves (j, j + n/2). Confusing the two loads fine and speaks nonsense.
//! Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear scaling); Peng et
//! al. 2023 (YaRN).

use std::f64::consts::PI;

/// Which two dimensions of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// (2j, 2j + 1), as in GGUF files whose rows were reordered.
    Neighbours,
    /// (j, j + n/2), as published by Hugging Face models.
    Halves,
}

/// A rotation: the angle of pair j at position p is `p * inv_freq[j]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Pairing of the dimensions.
    pub pairing: Pairing,
    /// Radians a position, one per pair; dimensions beyond `2 * len` of a head
    /// stay as they are.
    pub inv_freq: Vec<f64>,
    /// Factor on sine and cosine (YaRN's attention factor; else 1).
    pub magnitude: f32,
}

/// How positions beyond the trained context are squeezed into it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All angles divided by `factor`.
    Linear {
        /// Ratio of the new to the trained context.
        factor: f32,
    },
    /// Slow pairs divided by `factor`, fast ones kept, a ramp between.
    Yarn {
        /// Ratio of the new to the trained context.
        factor: f32,
        /// Context the model was trained with before scaling.
        original_context: u32,
        /// Rotations above which a pair is kept.
        beta_fast: f32,
        /// Rotations below which a pair is divided.
        beta_slow: f32,
        /// Further factor on the magnitude.
        attention_factor: f32,
    },
}

impl Rope {
    /// The rotation with `base^(-2j / n_rot)` radians a position.
    pub fn new(pairing: Pairing, n_rot: usize, base: f32, scaling: RopeScaling) -> Rope {
        let exponent = |j: usize| -2.0 * j as f64 / n_rot as f64;
        let mut inv_freq: Vec<f64> = (0..n_rot / 2)
            .map(|j| f64::from(base).powf(exponent(j)))
            .collect();
        let mut magnitude = 1.0;
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                inv_freq.iter_mut().for_each(|f| *f /= f64::from(factor));
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
            } => {
                // Pair whose wavelength fits `rotations` times into the trained context.
                let pair_of = |rotations: f32| {
                    let turns = f64::from(original_context) / (f64::from(rotations) * 2.0 * PI);
                    n_rot as f64 * turns.ln() / (2.0 * f64::from(base).ln())
                };
                let last = (n_rot - 1) as f64;
                let low = pair_of(beta_fast).floor().clamp(0.0, last);
                let high = pair_of(beta_slow).ceil().clamp(0.0, last);
                let width = (high - low).max(0.001);
                for (j, f) in inv_freq.iter_mut().enumerate() {
                    let divided = ((j as f64 - low) / width).clamp(0.0, 1.0);
                    *f = *f / f64::from(factor) * divided + *f * (1.0 - divided);
                }
                magnitude = (1.0 + 0.1 * factor.ln()) * attention_factor;
            }
        }
        Rope {
            pairing,
            inv_freq,
            magnitude,
        }
    }

    /// Divides each pair's speed by its factor (Llama 3's `rope_freqs`).
    ///
    /// # Panics
    /// If there is not one factor per pair.
    pub fn divided_by(mut self, factors: &[f32]) -> Rope {
        assert_eq!(factors.len(), self.inv_freq.len(), "one factor per pair");
        for (speed, &factor) in self.inv_freq.iter_mut().zip(factors) {
            *speed /= f64::from(factor);
        }
        self
    }

    /// Dimensions of a head that turn.
    pub fn n_rot(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// The dimensions of pair `j`.
    pub fn pair(&self, j: usize) -> (usize, usize) {
        match self.pairing {
            Pairing::Neighbours => (2 * j, 2 * j + 1),
            Pairing::Halves => (j, j + self.inv_freq.len()),
        }
    }

    /// Cosine and sine of pair `j` at `pos`, times the magnitude.
    pub fn turn(&self, j: usize, pos: u32) -> (f32, f32) {
        let (sin, cos) = (f64::from(pos) * self.inv_freq[j]).sin_cos();
        (cos as f32 * self.magnitude, sin as f32 * self.magnitude)
    }
}
