//! What a file will hold, before any of it is written: a pure function of
//! shape, mix and seed.
//!
//! What a reader would get wrong: `attn_q_norm` is 3.87 everywhere in Muse
//! Glimmer, because the factor on the queries is in no key. The seed is in the
//! metadata, so even the headers of two seeds differ.

use super::mix::{Mix, Place};
use super::shape::{Arch, Shape};
use super::values::Values;
use super::vocabulary::{Vocabulary, mask_token};
use anyhow::Context;
use gguf::{Array, Metadata, TensorInfo, TensorType, Value};
use model::{Config, DrafterConfig, WindowConvention};

/// The factor on Muse Glimmer's queries.
const QK_SCALE: f32 = 3.87;
/// Every fourth layer, counted from the last, sees all keys.
const PATTERN_PERIOD: usize = 4;
const ROPE_BASE: f32 = 500_000.0;
const NORM_EPS: f32 = 1e-5;
const LOGIT_CAP: f32 = 20.0;
/// The width whose logits are not scaled.
const UNSCALED_WIDTH: f32 = 256.0;
/// Beyond this no disk goes, and below it no sum overflows.
const MOST_BYTES: u64 = 1 << 56;
/// Rows of a drafter's block.
const BLOCK_ROWS: u32 = 16;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedTensor {
    pub info: TensorInfo,
    pub values: Values,
}

/// A file to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub metadata: Metadata,
    pub tensors: Vec<PlannedTensor>,
}

/// The encodings of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encodings {
    pub mix: Mix,
    /// Of the head, where it is not the mix's.
    pub head: Option<TensorType>,
}

impl Plan {
    /// The plan of a file; `base` is the bundled model's metadata, which gives
    /// the first tokens and the chat template.
    ///
    /// # Errors
    /// If Muser could not load such a model: the message names the flag.
    pub fn new(
        base: &Metadata,
        shape: &Shape,
        encodings: Encodings,
        seed: u64,
    ) -> anyhow::Result<Plan> {
        if encodings.head.is_some() && shape.arch == Arch::Dflash {
            anyhow::bail!("--head: a drafter has no head of its own");
        }
        let mut metadata = Metadata::default();
        describe(&mut metadata, shape, encodings, seed);
        let vocabulary = Vocabulary::new(base, shape.n_vocab, shape.n_merges)?;
        vocabulary.describe(&mut metadata);
        if shape.arch == Arch::Dflash {
            let mask = Value::U32(mask_token(shape.n_vocab));
            metadata.insert("tokenizer.ggml.mask_token_id", mask);
        }
        let template = base.str("tokenizer.chat_template")?;
        let template = template.context("the bundled model has no chat template")?;
        metadata.insert("tokenizer.chat_template", Value::String(template.into()));
        match shape.arch {
            Arch::Dflash => {
                let convention = WindowConvention::default();
                DrafterConfig::from_metadata(&metadata, convention).map_err(by_flag)?;
            }
            Arch::MuseGlimmer | Arch::Llama => {
                Config::from_metadata(&metadata).map_err(by_flag)?;
            }
        }
        let tensors = planned(shape, encodings);
        let mut n_bytes = 0u64;
        for PlannedTensor { info, .. } in &tensors {
            let row = info.shape[0];
            let block = info.ty.block_len() as u64;
            if !row.is_multiple_of(block) {
                anyhow::bail!(
                    "{}: found {row}, expected a multiple of {block}, the length of a block of {}",
                    row_flags(&info.name),
                    info.ty
                );
            }
            // Lengths are below 2^24 each and products of four, but bytes may overflow.
            n_bytes = n_bytes.saturating_add(info.data_bytes().unwrap_or(u64::MAX));
        }
        if n_bytes >= MOST_BYTES {
            anyhow::bail!("the tensors have more bytes than a file can: expected less than 2^56");
        }
        Ok(Plan { metadata, tensors })
    }

    /// The tensors, as the directory lists them.
    pub fn infos(&self) -> Vec<TensorInfo> {
        self.tensors.iter().map(|t| t.info.clone()).collect()
    }
}

/// The error, with the flag that sets a key in the key's place.
fn by_flag(error: model::Error) -> anyhow::Error {
    const FLAGS: [(&str, &str); 9] = [
        ("block_count", "--layers"),
        ("context_length", "--ctx"),
        ("embedding_length", "--embd"),
        ("feed_forward_length", "--ff"),
        ("attention.head_count", "--heads"),
        ("attention.head_count_kv", "--heads-kv"),
        ("attention.key_length", "--head-dim"),
        ("attention.sliding_window", "--window"),
        ("target_layers", "--target-layers"),
    ];
    let model::Error::KeyValue {
        key,
        found,
        expected,
    } = &error
    else {
        return error.into();
    };
    let part = key.split_once('.').map_or(key.as_str(), |(_, part)| part);
    match FLAGS.iter().find(|(of, _)| *of == part) {
        Some((_, flag)) => anyhow::anyhow!("{flag}: found {found}, expected {expected}"),
        None => error.into(),
    }
}

/// The flags that make the row length of the tensor `name`.
fn row_flags(name: &str) -> &'static str {
    match name.rsplit('.').nth(1) {
        Some("ffn_down") => "--ff",
        Some("attn_output") => "--heads times --head-dim",
        Some("fc") => "--embd times the number of --target-layers",
        _ => "--embd",
    }
}

/// Sets every key but the tokenizer's.
fn describe(metadata: &mut Metadata, shape: &Shape, encodings: Encodings, seed: u64) {
    let arch = shape.arch.name();
    let mix = encodings.mix;
    let head = match encodings.head {
        Some(ty) => format!(", head {}", ty.name().to_ascii_lowercase()),
        None => String::new(),
    };
    let text = |text: &str| Value::String(text.to_string());
    let number = |n: usize| Value::U32(u32::try_from(n).expect("a length below 2^32"));
    let mut set = |key: &str, value| {
        metadata.insert(key, value);
    };
    set("general.architecture", text(arch));
    set("general.type", text("model"));
    set("general.name", text("random weights"));
    let description =
        format!("Random weights for tests and measurements: mix {mix}{head}, seed {seed}");
    set("general.description", text(&description));
    if let Some(file_type) = mix.file_type() {
        set("general.file_type", Value::U32(file_type));
    }
    set("general.quantization_version", Value::U32(2));
    let mut set = |key: &str, value| {
        metadata.insert(format!("{arch}.{key}"), value);
    };
    set("block_count", number(shape.n_layer));
    set("context_length", number(shape.n_ctx));
    set("embedding_length", number(shape.n_embd));
    set("feed_forward_length", number(shape.n_ff));
    set("attention.head_count", number(shape.n_head));
    set("attention.head_count_kv", number(shape.n_head_kv));
    set("attention.key_length", number(shape.head_dim));
    set("attention.value_length", number(shape.head_dim));
    set("attention.layer_norm_rms_epsilon", Value::F32(NORM_EPS));
    set("rope.freq_base", Value::F32(ROPE_BASE));
    let pattern = |slides: &dyn Fn(usize) -> bool| {
        Value::Array(Array::Bool((0..shape.n_layer).map(slides).collect()))
    };
    match shape.arch {
        Arch::MuseGlimmer => {
            let slides = |il: usize| !(shape.n_layer - 1 - il).is_multiple_of(PATTERN_PERIOD);
            set("attention.sliding_window", number(shape.window));
            set("attention.sliding_window_pattern", pattern(&slides));
            let scale = 1.0 / (shape.n_embd as f32 / UNSCALED_WIDTH).sqrt();
            set("logit_scale", Value::F32(scale));
            set("final_logit_softcapping", Value::F32(LOGIT_CAP));
        }
        Arch::Llama => set("rope.dimension_count", number(shape.head_dim)),
        Arch::Dflash => {
            set("attention.sliding_window", number(shape.window));
            set("attention.sliding_window_pattern", pattern(&|_| true));
            set("block_size", Value::U32(BLOCK_ROWS));
            let layers = shape.target_layers.iter().map(|&il| il as i32).collect();
            set("target_layers", Value::Array(Array::I32(layers)));
        }
    }
}

/// Collects tensors in the order of the file.
struct Tensors {
    mix: Mix,
    all: Vec<PlannedTensor>,
}

impl Tensors {
    fn vector(&mut self, name: String, n: usize, values: Values) {
        self.push(name, TensorType::F32, vec![n as u64], values);
    }

    /// A matrix whose encoding follows from `part`.
    fn matrix(&mut self, name: String, part: &str, place: Place, shape: [usize; 2]) {
        let ty = self.mix.of(part, place);
        let shape = shape.map(|n| n as u64).to_vec();
        self.push(name, ty, shape, Values::Matrix);
    }

    fn push(&mut self, name: String, ty: TensorType, shape: Vec<u64>, values: Values) {
        let info = TensorInfo { name, ty, shape };
        self.all.push(PlannedTensor { info, values });
    }
}

/// Every tensor of a file, in its order.
fn planned(shape: &Shape, encodings: Encodings) -> Vec<PlannedTensor> {
    let mut tensors = Tensors {
        mix: encodings.mix,
        all: Vec::new(),
    };
    let d = shape.n_embd;
    let is_drafter = shape.arch == Arch::Dflash;
    if is_drafter {
        let n_features = shape.target_layers.len() * d;
        tensors.matrix("fc.weight".into(), "fc", Place::Other, [n_features, d]);
        tensors.vector("enc.output_norm.weight".into(), d, Values::NearOne);
    } else {
        let name = "token_embd.weight".to_string();
        tensors.matrix(name, "token_embd", Place::Other, [d, shape.n_vocab]);
    }
    for il in 0..shape.n_layer {
        layer(&mut tensors, shape, il);
    }
    tensors.vector("output_norm.weight".into(), d, Values::NearOne);
    if !is_drafter {
        tensors.matrix(
            "output.weight".into(),
            "output",
            Place::Head,
            [d, shape.n_vocab],
        );
        if let (Some(ty), Some(head)) = (encodings.head, tensors.all.last_mut()) {
            head.info.ty = ty;
        }
    }
    tensors.all
}

/// The tensors of a layer.
fn layer(tensors: &mut Tensors, shape: &Shape, il: usize) {
    let (d, n_ff) = (shape.n_embd, shape.n_ff);
    let n_q = shape.n_head * shape.head_dim;
    let n_kv = shape.n_head_kv * shape.head_dim;
    let is_glimmer = shape.arch == Arch::MuseGlimmer;
    let place = match shape.arch {
        Arch::Dflash => Place::DrafterLayer,
        _ => Place::Layer {
            il,
            n_layer: shape.n_layer,
        },
    };
    let name = |part: &str| format!("blk.{il}.{part}.weight");
    let mut matrix = |part: &str, cols: usize, rows: usize| {
        tensors.matrix(name(part), part, place, [cols, rows]);
    };
    matrix("attn_q", d, n_q);
    matrix("attn_k", d, n_kv);
    matrix("attn_v", d, n_kv);
    if is_glimmer {
        matrix("attn_gate", d, n_q);
    }
    matrix("attn_output", n_q, d);
    matrix("ffn_gate", d, n_ff);
    matrix("ffn_up", d, n_ff);
    matrix("ffn_down", n_ff, d);
    let mut vector = |part: &str, n: usize, values| tensors.vector(name(part), n, values);
    vector("attn_norm", d, Values::NearOne);
    vector("ffn_norm", d, Values::NearOne);
    if is_glimmer {
        vector("attn_q_norm", shape.head_dim, Values::Constant(QK_SCALE));
        vector("attn_k_norm", shape.head_dim, Values::Constant(1.0));
        vector("post_attention_norm", d, Values::NearOne);
        vector("post_ffw_norm", d, Values::NearOne);
    }
    if shape.arch == Arch::Dflash {
        vector("attn_q_norm", shape.head_dim, Values::NearOne);
        vector("attn_k_norm", shape.head_dim, Values::NearOne);
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::Name;
    use super::*;
    use crate::model_file::ModelArgs;
    use std::collections::BTreeMap;

    fn plan(name: Name, head: Option<TensorType>) -> Plan {
        let bundled = ModelArgs { model: None }.open().expect("the bundled model");
        let encodings = Encodings {
            mix: name.default_mix(),
            head,
        };
        Plan::new(bundled.gguf.metadata(), &name.shape(), encodings, 0).expect("a good plan")
    }

    fn bytes(plan: &Plan) -> u64 {
        plan.tensors
            .iter()
            .map(|t| t.info.data_bytes().expect("a good shape"))
            .sum()
    }

    fn parameters(plan: &Plan) -> u64 {
        plan.tensors
            .iter()
            .map(|t| t.info.shape.iter().product::<u64>())
            .sum()
    }

    /// The structure of the published file: counts by encoding and bytes of all
    /// tensors.
    #[test]
    fn full_size() {
        let published = plan(Name::Full, Some(TensorType::Q5_K));
        assert_eq!(published.tensors.len(), 731);
        let mut counts = BTreeMap::new();
        for tensor in &published.tensors {
            *counts.entry(tensor.info.ty).or_insert(0) += 1;
        }
        let expected = [
            (TensorType::F32, 313),
            (TensorType::Q4_K, 365),
            (TensorType::Q5_K, 1),
            (TensorType::Q6_K, 52),
        ];
        assert_eq!(counts, BTreeMap::from(expected));
        assert_eq!(bytes(&published), 16_743_567_360);
        assert_eq!(parameters(&published), 27_854_794_240);

        // What a token reads: everything but the embedding.
        let finer_head = plan(Name::Full, None);
        let embedding = finer_head.tensors[0]
            .info
            .data_bytes()
            .expect("a good shape");
        assert_eq!(bytes(&finer_head) - embedding, 16_165_710_080);
    }

    #[test]
    fn drafter_of_the_full_size() {
        let drafter = plan(Name::Drafter, None);
        assert_eq!(drafter.tensors.len(), 58);
        assert_eq!(bytes(&drafter), 1_618_131_968);
        let meta = &drafter.metadata;
        let layers = meta.integers("dflash.target_layers").expect("integers");
        assert_eq!(layers, Some(vec![2, 14, 26, 38, 50]));
        assert_eq!(
            meta.u32("tokenizer.ggml.mask_token_id").expect("an id"),
            Some(201_818)
        );
    }

    /// Every number of the real model that is in a key.
    #[test]
    fn full_metadata() {
        let plan = plan(Name::Full, None);
        let config = Config::from_metadata(&plan.metadata).expect("a good configuration");
        assert_eq!(
            (config.n_layer, config.n_embd, config.n_ff),
            (52, 6656, 19_968)
        );
        assert_eq!(
            (config.n_head, config.n_head_kv, config.head_dim),
            (32, 2, 128)
        );
        assert_eq!((config.n_vocab, config.n_ctx), (202_048, 131_072));
        assert_eq!(config.logit_scale, 0.196_116_13);
        assert_eq!(config.logit_cap, Some(20.0));
        let full: Vec<usize> = (0..52)
            .filter(|&il| config.layers[il].window.is_none())
            .collect();
        assert_eq!(full, (3..52).step_by(4).collect::<Vec<_>>());
        assert_eq!(config.layers[0].window, Some(2048));
        let merges = plan
            .metadata
            .strings("tokenizer.ggml.merges")
            .expect("strings");
        assert_eq!(merges.map(|m| m.len()), Some(439_802));
        for (key, id) in [
            ("bos", 200_000),
            ("eos", 200_001),
            ("eot", 200_008),
            ("padding", 200_018),
        ] {
            let key = format!("tokenizer.ggml.{key}_token_id");
            assert_eq!(plan.metadata.u32(&key).expect("an id"), Some(id), "{key}");
        }
    }

    #[test]
    fn medium_size() {
        let plan = plan(Name::Medium, None);
        assert_eq!(parameters(&plan), 1_573_102_592);
    }
}
