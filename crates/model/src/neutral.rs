//! Keys that change what a model computes, but that no graph here computes.
//!
//! A file with such a key describes another computation, and would be computed
//! wrongly and fluently without it. So the key is refused by name, unless its
//! value is the one that changes nothing: converters write those too. Source of
//! the names: `constants.py` of the PyPI package `gguf`.

use crate::Error;
use crate::config::Keys;

/// The value of a key that changes nothing.
#[derive(Clone, Copy)]
enum Neutral {
    /// This number, stored as a float.
    Float(f32),
    /// This number, stored as an integer.
    Integer(u32),
    Truth(bool),
    /// The width of a head.
    HeadDim,
    /// `1 / sqrt(width of a head)`.
    InverseSqrtHeadDim,
    /// There is none.
    Never,
}

/// All such keys, without the architecture's prefix.
const KEYS: &[(&str, Neutral)] = &[
    ("activation_sparsity_scale", Neutral::Never),
    ("attention.causal", Neutral::Truth(true)),
    ("attention.clamp_kqv", Neutral::Float(0.0)),
    ("attention.key_length_swa", Neutral::HeadDim),
    ("attention.max_alibi_bias", Neutral::Float(0.0)),
    ("attention.output_scale", Neutral::Float(1.0)),
    ("attention.relative_buckets_count", Neutral::Integer(0)),
    ("attention.scale", Neutral::InverseSqrtHeadDim),
    ("attention.shared_kv_layers", Neutral::Integer(0)),
    ("attention.sliding_window_pattern", Neutral::Never),
    ("attention.temperature_length", Neutral::Integer(0)),
    ("attention.temperature_scale", Neutral::Float(0.0)),
    ("attention.value_length_swa", Neutral::HeadDim),
    ("attn_logit_softcapping", Neutral::Float(0.0)),
    ("embedding_scale", Neutral::Float(1.0)),
    ("expert_count", Neutral::Integer(0)),
    ("final_logit_softcapping", Neutral::Float(0.0)),
    ("full_attention_interval", Neutral::Integer(1)),
    ("nextn_predict_layers", Neutral::Integer(0)),
    ("pooling_type", Neutral::Integer(0)),
    ("rescale_every_n_layers", Neutral::Integer(0)),
    ("residual_scale", Neutral::Float(1.0)),
    ("rope.dimension_count_swa", Neutral::HeadDim),
    ("rope.dimension_sections", Neutral::Never),
    ("rope.freq_base_swa", Neutral::Never),
    ("rope.scaling.alpha", Neutral::Never),
    ("rope.scaling.attn_factor", Neutral::Float(1.0)),
    ("rope.scaling.yarn_attn_factor", Neutral::Float(1.0)),
    ("rope.scaling.yarn_ext_factor", Neutral::Float(1.0)),
    ("rope.scaling.yarn_log_multiplier", Neutral::Float(0.0)),
    ("swiglu_clamp_exp", Neutral::Never),
    ("swin_norm", Neutral::Truth(false)),
    ("use_parallel_residual", Neutral::Truth(false)),
];

impl Keys<'_> {
    /// Refuses every key that would change the computation, but those that
    /// the architecture's graph computes. `head_dim` is the width of a head.
    pub(crate) fn refuse_uncomputed(
        &self,
        computed: &[&str],
        head_dim: usize,
    ) -> Result<(), Error> {
        for &(key, neutral) in KEYS.iter().filter(|(key, _)| !computed.contains(key)) {
            if self.has(key) {
                self.check_neutral(key, neutral, head_dim)?;
            }
        }
        Ok(())
    }

    fn check_neutral(&self, key: &str, neutral: Neutral, head_dim: usize) -> Result<(), Error> {
        // Found and neutral value as text, where they differ.
        let difference = match neutral {
            Neutral::Float(neutral) => differ(self.f32(key)?, neutral),
            Neutral::Integer(neutral) => differ(self.u32(key)?, neutral),
            Neutral::Truth(neutral) => differ(self.bool(key)?, neutral),
            Neutral::HeadDim => differ(self.u32(key)?, head_dim as u32),
            Neutral::InverseSqrtHeadDim => {
                let neutral = 1.0 / (head_dim as f32).sqrt();
                // A writer may have rounded otherwise.
                let is_near = |found: &f32| (found / neutral - 1.0).abs() < 1e-6;
                differ(self.f32(key)?.filter(|found| !is_near(found)), neutral)
            }
            Neutral::Never => {
                let expected = "no such key: the graph of this architecture does not compute it";
                return Err(self.value(key, &"it", &expected));
            }
        };
        let Some((found, neutral)) = difference else {
            return Ok(());
        };
        let expected =
            format!("{neutral}: the graph of this architecture does not compute anything else");
        Err(self.value(key, &found, &expected))
    }
}

fn differ<T: Copy + PartialEq + ToString>(
    found: Option<T>,
    neutral: T,
) -> Option<(String, String)> {
    let found = found.filter(|found| *found != neutral)?;
    Some((found.to_string(), neutral.to_string()))
}
