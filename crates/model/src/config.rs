//! The numbers of a model, from its metadata.
//!
//! A missing required key is an error, never a default that another engine
//! happens to use: a wrong constant loads fine and speaks fluent nonsense. Two
//! constants of Muse Glimmer are in no key: the epsilon of the post norms
//! (1e-8) and the factor 3.87 on the queries, which the file stores as the
//! weight of `attn_q_norm`.

use crate::Error;
use crate::kv::{ClassLayout, KvLayout, KvType, PageClass};
use crate::rope::{Pairing, Rope, RopeScaling};
use gguf::{Array, Metadata, Value, shown};
use std::fmt::Display;

/// Epsilon of the norms after attention and after the feed-forward part.
const POST_NORM_EPS: f32 = 1e-8;
/// The period of the layer pattern where the file does not name it.
const DEFAULT_PATTERN_PERIOD: usize = 4;
/// Limits that no model reaches. They keep products of lengths far from
/// overflow, and memory small until the tensors' shapes have been checked.
const MOST_ELEMENTS: u32 = 1 << 24;
const MOST_LAYERS: u32 = 4096;
const MOST_HEADS: u32 = 1 << 16;
const MOST_HEAD_DIM: u32 = 1 << 16;
/// Of the keys and values of one position in all layers, in f32.
const MOST_POSITION_BYTES: usize = 256 << 20;
/// Names a file may have in `general.architecture`.
pub const SUPPORTED: &str = "muse-glimmer, llama";

/// Which graph computes the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Meta's Muse Glimmer (text).
    MuseGlimmer,
    /// Llama 2 and 3, SmolLM2, TinyLlama, Mistral.
    Llama,
}

impl Architecture {
    /// The prefix of the metadata keys and the name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::MuseGlimmer => "muse-glimmer",
            Architecture::Llama => "llama",
        }
    }
}

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Class of the layer's pages.
    pub class: PageClass,
    /// Index among the layers of that class.
    pub index: usize,
    /// Keys a row sees, itself included; `None` if all earlier ones.
    pub window: Option<u32>,
    /// Do queries and keys turn with their position?
    pub rope: bool,
}

/// The numbers of a model. Lengths are in elements.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the field's standard names
pub struct Config {
    pub architecture: Architecture,
    pub n_layer: usize,
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_vocab: usize,
    /// Positions the model was trained for.
    pub n_ctx: usize,
    pub n_head: usize,
    pub n_head_kv: usize,
    pub head_dim: usize,
    pub layers: Vec<LayerConfig>,
    /// Epsilon of all norms but the post norms.
    pub norm_eps: f32,
    /// Epsilon of the norms on the outputs of attention and feed-forward.
    pub post_norm_eps: f32,
    pub rope: Rope,
    /// Factor on the logits, before the cap.
    pub logit_scale: f32,
    /// `cap * tanh(logit / cap)`, after the scale.
    pub logit_cap: Option<f32>,
}

impl Config {
    /// Reads the configuration of a model file.
    ///
    /// # Errors
    /// [`Error::ArchitectureUnknown`], [`Error::IsDrafter`],
    /// [`Error::KeyMissing`], [`Error::KeyValue`].
    pub fn from_metadata(meta: &Metadata) -> Result<Config, Error> {
        let found = meta.str("general.architecture")?.unwrap_or("");
        match found {
            "muse-glimmer" | "muse_glimmer" => muse_glimmer(&Keys::new(meta, found)),
            "llama" => llama(&Keys::new(meta, found)),
            "dflash" => Err(Error::IsDrafter),
            "" => Err(Error::KeyMissing {
                key: "general.architecture".into(),
                why: "it says which graph computes the model",
            }),
            other => Err(Error::ArchitectureUnknown {
                found: shown(other),
                supported: SUPPORTED,
            }),
        }
    }

    /// Factor on the attention scores.
    pub fn attention_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Width of all query heads together.
    pub fn n_q(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn n_kv(&self) -> usize {
        self.n_head_kv * self.head_dim
    }

    /// Pages and slabs for this model without a drafter.
    pub fn kv_layout(&self, ty: KvType) -> KvLayout {
        let class = |class| ClassLayout {
            n_layer: self.layers.iter().filter(|l| l.class == class).count(),
            n_head_kv: self.n_head_kv,
            head_dim: self.head_dim,
            window: self
                .layers
                .iter()
                .filter(|l| l.class == class)
                .find_map(|l| l.window),
        };
        KvLayout {
            ty,
            classes: [
                class(PageClass::Full),
                class(PageClass::Sliding),
                ClassLayout::default(),
            ],
        }
    }
}

/// Numbers the layers of each class, in the order of `is_sliding`.
pub(crate) fn number_layers(
    is_sliding: &[bool],
    window: Option<u32>,
    rope: impl Fn(bool) -> bool,
) -> Vec<LayerConfig> {
    let mut counts = [0usize; 2];
    let layer = |&sliding: &bool| {
        let class = if sliding {
            PageClass::Sliding
        } else {
            PageClass::Full
        };
        let index = counts[class as usize];
        counts[class as usize] += 1;
        LayerConfig {
            class,
            index,
            window: window.filter(|_| sliding),
            rope: rope(sliding),
        }
    };
    is_sliding.iter().map(layer).collect()
}

fn muse_glimmer(keys: &Keys<'_>) -> Result<Config, Error> {
    let shape = Shape::read(keys)?;
    let window = keys.count(
        "attention.sliding_window",
        "sliding layers need their window",
    )?;
    let is_sliding = keys.layer_pattern(shape.n_layer)?;
    // Only sliding layers turn, so the base for sliding layers wins where a file has both.
    let base = keys.positive("rope.freq_base", "sliding layers turn by it")?;
    let base = keys.positive_or_none("rope.freq_base_swa")?.unwrap_or(base);
    keys.refuse_other_rope(shape.head_dim)?;
    keys.refuse_uncomputed(
        &[
            "attention.sliding_window_pattern",
            "final_logit_softcapping",
            "rope.freq_base_swa",
        ],
        shape.head_dim,
    )?;
    let rope = Rope::new(Pairing::Neighbours, shape.head_dim, base, RopeScaling::None);
    Ok(Config {
        architecture: Architecture::MuseGlimmer,
        n_layer: shape.n_layer,
        n_embd: shape.n_embd,
        n_ff: shape.n_ff,
        n_vocab: keys.n_vocab()?,
        n_ctx: shape.n_ctx,
        n_head: shape.n_head,
        n_head_kv: shape.n_head_kv,
        head_dim: shape.head_dim,
        layers: number_layers(&is_sliding, Some(window as u32), |sliding| sliding),
        norm_eps: keys.positive("attention.layer_norm_rms_epsilon", "the norms need it")?,
        post_norm_eps: POST_NORM_EPS,
        rope,
        logit_scale: keys.positive("logit_scale", "logits are scaled before they are capped")?,
        logit_cap: Some(keys.positive("final_logit_softcapping", "logits are capped")?),
    })
}

fn llama(keys: &Keys<'_>) -> Result<Config, Error> {
    let shape = Shape::read(keys)?;
    let scaling = keys.rope_scaling()?;
    let computed: &[&str] = match scaling {
        RopeScaling::Yarn { .. } => &["rope.scaling.attn_factor"],
        RopeScaling::None | RopeScaling::Linear { .. } => &[],
    };
    keys.refuse_uncomputed(computed, shape.head_dim)?;
    // Mistral 7B v0.1 slides on every layer; the others see everything.
    let window = keys.u32("attention.sliding_window")?.filter(|&w| w > 0);
    let n_rot = keys.u32("rope.dimension_count")?.map(|n| n as usize);
    let n_rot = n_rot.unwrap_or(shape.head_dim);
    if n_rot == 0 || n_rot > shape.head_dim || n_rot % 2 != 0 {
        let expected = format!("an even number up to {}", shape.head_dim);
        return Err(keys.value("rope.dimension_count", &n_rot, &expected));
    }
    let base = keys.positive_or_none("rope.freq_base")?.unwrap_or(10_000.0);
    let is_sliding = vec![window.is_some(); shape.n_layer];
    Ok(Config {
        architecture: Architecture::Llama,
        n_layer: shape.n_layer,
        n_embd: shape.n_embd,
        n_ff: shape.n_ff,
        n_vocab: keys.n_vocab()?,
        n_ctx: shape.n_ctx,
        n_head: shape.n_head,
        n_head_kv: shape.n_head_kv,
        head_dim: shape.head_dim,
        layers: number_layers(&is_sliding, window, |_| true),
        norm_eps: keys.positive("attention.layer_norm_rms_epsilon", "the norms need it")?,
        post_norm_eps: POST_NORM_EPS,
        rope: Rope::new(Pairing::Neighbours, n_rot, base, scaling),
        logit_scale: keys.positive_or_none("logit_scale")?.unwrap_or(1.0),
        logit_cap: None,
    })
}

/// The lengths that every architecture has.
pub(crate) struct Shape {
    pub n_layer: usize,
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_ctx: usize,
    pub n_head: usize,
    pub n_head_kv: usize,
    pub head_dim: usize,
}

impl Shape {
    /// # Errors
    /// [`Error::KeyMissing`], [`Error::KeyValue`], also for lengths whose
    /// product is beyond every model.
    pub(crate) fn read(keys: &Keys<'_>) -> Result<Shape, Error> {
        const HEADS_WHY: &str = "attention needs it";
        let n_embd = keys.count("embedding_length", "every layer has this width")?;
        let n_head = keys.count_up_to(MOST_HEADS, "attention.head_count", HEADS_WHY)?;
        let n_head_kv = match keys.u32("attention.head_count_kv")? {
            None if keys.prefix == "llama" => n_head,
            _ => keys.count_up_to(MOST_HEADS, "attention.head_count_kv", HEADS_WHY)?,
        };
        if n_head % n_head_kv != 0 {
            let expected = format!("a divisor of the {n_head} query heads");
            return Err(keys.value("attention.head_count_kv", &n_head_kv, &expected));
        }
        let head_dim = match keys.u32("attention.key_length")? {
            None if keys.prefix == "llama"
                && n_embd % n_head == 0
                && n_embd / n_head <= MOST_HEAD_DIM as usize =>
            {
                n_embd / n_head
            }
            _ => keys.count_up_to(
                MOST_HEAD_DIM,
                "attention.key_length",
                "it is the width of a head",
            )?,
        };
        let value_dim = match keys.u32("attention.value_length")? {
            None if keys.prefix == "llama" => head_dim,
            _ => keys.count("attention.value_length", "it is the width of a value head")?,
        };
        if value_dim != head_dim {
            let expected = format!("{head_dim}, as attention.key_length");
            return Err(keys.value("attention.value_length", &value_dim, &expected));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(keys.value("attention.key_length", &head_dim, &"an even number"));
        }
        let n_layer = keys.count_up_to(MOST_LAYERS, "block_count", "it is the number of layers")?;
        let position_bytes = n_layer * 2 * n_head_kv * head_dim * size_of::<f32>();
        if position_bytes > MOST_POSITION_BYTES {
            let expected = format!(
                "less: keys and values of a position in {n_layer} layers of {n_head_kv} heads \
                 would take {position_bytes} bytes, at most {MOST_POSITION_BYTES} are possible"
            );
            return Err(keys.value("attention.key_length", &head_dim, &expected));
        }
        Ok(Shape {
            n_layer,
            n_embd,
            n_ff: keys.count(
                "feed_forward_length",
                "the feed-forward part has this width",
            )?,
            n_ctx: match keys.count("context_length", "it is the longest sequence")? {
                1 => {
                    let expected = "at least 2: a token and the one after it";
                    return Err(keys.value("context_length", &1, &expected));
                }
                n_ctx => n_ctx,
            },
            n_head,
            n_head_kv,
            head_dim,
        })
    }
}

/// Reads `<prefix>.<key>` with the errors of a configuration.
pub(crate) struct Keys<'a> {
    meta: &'a Metadata,
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(meta: &'a Metadata, prefix: &'a str) -> Keys<'a> {
        Keys { meta, prefix }
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    /// An error about the value of `key`.
    pub(crate) fn value(&self, key: &str, found: &dyn Display, expected: &dyn Display) -> Error {
        Error::KeyValue {
            key: self.full(key),
            found: shown(&found.to_string()),
            expected: expected.to_string(),
        }
    }

    fn missing(&self, key: &str, why: &'static str) -> Error {
        let key = self.full(key);
        Error::KeyMissing { key, why }
    }

    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        Ok(self.meta.u32(&self.full(key))?)
    }

    pub(crate) fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        Ok(self.meta.f32(&self.full(key))?)
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        Ok(self.meta.bool(&self.full(key))?)
    }

    /// Is there the key, whatever its value?
    pub(crate) fn has(&self, key: &str) -> bool {
        self.meta.get(&self.full(key)).is_some()
    }

    /// A required length: at least 1, at most 2^24.
    pub(crate) fn count(&self, key: &str, why: &'static str) -> Result<usize, Error> {
        self.count_up_to(MOST_ELEMENTS, key, why)
    }

    /// A required length from 1 to `most`.
    fn count_up_to(&self, most: u32, key: &str, why: &'static str) -> Result<usize, Error> {
        let value = self.u32(key)?.ok_or_else(|| self.missing(key, why))?;
        if value == 0 || value > most {
            return Err(self.value(key, &value, &format!("a number from 1 to {most}")));
        }
        Ok(value as usize)
    }

    pub(crate) fn positive_or_none(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.f32(key)? {
            Some(v) if !(v.is_finite() && v > 0.0) => {
                Err(self.value(key, &v, &"a positive finite number"))
            }
            other => Ok(other),
        }
    }

    pub(crate) fn positive(&self, key: &str, why: &'static str) -> Result<f32, Error> {
        self.positive_or_none(key)?
            .ok_or_else(|| self.missing(key, why))
    }

    /// Tokens of the tokenizer: the only place that states the vocabulary.
    fn n_vocab(&self) -> Result<usize, Error> {
        let tokens = self.meta.strings("tokenizer.ggml.tokens")?;
        let tokens = tokens.filter(|t| !t.is_empty());
        let tokens = tokens.ok_or_else(|| Error::KeyMissing {
            key: "tokenizer.ggml.tokens".into(),
            why: "its length is the size of the vocabulary",
        })?;
        Ok(tokens.len())
    }

    /// Which layers slide: a period (the last of each period does not), one
    /// truth value per layer, or the default period.
    pub(crate) fn layer_pattern(&self, n_layer: usize) -> Result<Vec<bool>, Error> {
        const KEY: &str = "attention.sliding_window_pattern";
        let periodic = |period: usize| (0..n_layer).map(|il| il % period + 1 < period).collect();
        match self.meta.get(&self.full(KEY)) {
            None => Ok(periodic(DEFAULT_PATTERN_PERIOD)),
            Some(Value::Array(Array::Bool(flags))) if flags.len() == n_layer => Ok(flags.clone()),
            Some(Value::Array(array)) => Err(self.value(
                KEY,
                &format!("array of {} {}", array.len(), array.element_name()),
                &format!("one bool for each of the {n_layer} layers, or a period"),
            )),
            Some(_) => match self.count(KEY, "")? {
                1 => Err(self.value(KEY, &1, &"a period of at least 2")),
                period => Ok(periodic(period)),
            },
        }
    }

    /// Refuses a rotation of a part of the head, or one with scaling.
    pub(crate) fn refuse_other_rope(&self, head_dim: usize) -> Result<(), Error> {
        let scaling = match self.rope_scaling()? {
            RopeScaling::None => None,
            RopeScaling::Linear { factor } | RopeScaling::Yarn { factor, .. } => Some(factor),
        };
        if let Some(factor) = scaling {
            let expected = "no scaling: this model has none";
            return Err(self.value("rope.scaling.factor", &factor, &expected));
        }
        if let Some(n_rot) = self.u32("rope.dimension_count")?
            && n_rot as usize != head_dim
        {
            return Err(self.value("rope.dimension_count", &n_rot, &head_dim));
        }
        Ok(())
    }

    /// The scaling keys, in the current form and the old linear one.
    fn rope_scaling(&self) -> Result<RopeScaling, Error> {
        let kind = self.meta.str(&self.full("rope.scaling.type"))?;
        let factor = self.positive_or_none("rope.scaling.factor")?;
        let old = self.positive_or_none("rope.scale_linear")?;
        let linear = |factor: f32| match factor {
            1.0 => RopeScaling::None,
            factor => RopeScaling::Linear { factor },
        };
        let needed = || {
            factor
                .ok_or_else(|| self.missing("rope.scaling.factor", "the scaling needs its factor"))
        };
        let scaling = match kind {
            Some("none" | "") => RopeScaling::None,
            None if factor.is_some_and(|factor| factor != 1.0) => {
                let why = "rope.scaling.factor alone does not say how it is to be used";
                return Err(self.missing("rope.scaling.type", why));
            }
            None => return Ok(linear(old.unwrap_or(1.0))),
            Some("linear") => linear(needed()?),
            Some("yarn") => self.yarn(needed()?)?,
            Some(other) => {
                return Err(self.value("rope.scaling.type", &other, &"none, linear or yarn"));
            }
        };
        match old {
            Some(old) if old != 1.0 && scaling != linear(old) => {
                let expected = "the same as the rope.scaling keys say, or no such key";
                Err(self.value("rope.scale_linear", &old, &expected))
            }
            _ => Ok(scaling),
        }
    }

    fn yarn(&self, factor: f32) -> Result<RopeScaling, Error> {
        let or = |key, default| {
            let value = self.positive_or_none(key)?;
            Ok::<f32, Error>(value.unwrap_or(default))
        };
        Ok(RopeScaling::Yarn {
            factor,
            original_context: self.count(
                "rope.scaling.original_context_length",
                "YaRN's ramp depends on it",
            )? as u32,
            beta_fast: or("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: or("rope.scaling.yarn_beta_slow", 1.0)?,
            attention_factor: or("rope.scaling.attn_factor", 1.0)?,
        })
    }
}
