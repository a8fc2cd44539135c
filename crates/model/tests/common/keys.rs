//! Complete metadata of each architecture, to be changed, and what a reader
//! makes of it.

use gguf::{Array, Metadata, Value};
use model::{Config, DrafterConfig, WindowConvention};
use testing::{text, tokens};

/// Complete keys of an architecture; lengths are small and all different.
pub fn keys(architecture: &str) -> Metadata {
    let mut meta = Metadata::default();
    meta.insert("general.architecture", text(architecture));
    for (key, value) in [
        ("block_count", 8),
        ("context_length", 2048),
        ("embedding_length", 48),
        ("feed_forward_length", 96),
        ("attention.head_count", 6),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("attention.sliding_window", 128),
    ] {
        meta.insert(format!("{architecture}.{key}"), Value::U32(value));
    }
    for (key, value) in [
        ("rope.freq_base", 500_000.0),
        ("attention.layer_norm_rms_epsilon", 1e-5),
    ] {
        meta.insert(format!("{architecture}.{key}"), Value::F32(value));
    }
    meta.insert("tokenizer.ggml.tokens", tokens(20));
    meta
}

pub fn muse_glimmer() -> Metadata {
    let mut meta = keys("muse-glimmer");
    meta.insert("muse-glimmer.logit_scale", Value::F32(0.5));
    meta.insert("muse-glimmer.final_logit_softcapping", Value::F32(20.0));
    meta
}

pub fn llama() -> Metadata {
    let mut meta = keys("llama");
    meta.remove("llama.attention.sliding_window");
    meta
}

pub fn dflash() -> Metadata {
    let mut meta = keys("dflash");
    meta.insert("dflash.block_size", Value::U32(16));
    let layers = Value::Array(Array::I32(vec![2, 5, 8]));
    meta.insert("dflash.target_layers", layers);
    let pattern = (0..8).map(|il| il != 3).collect();
    let pattern = Value::Array(Array::Bool(pattern));
    meta.insert("dflash.attention.sliding_window_pattern", pattern);
    meta.insert("tokenizer.ggml.mask_token_id", Value::U32(19));
    meta
}

pub fn read(meta: &Metadata) -> Config {
    Config::from_metadata(meta).unwrap_or_else(|e| panic!("{e}"))
}

pub fn read_drafter(meta: &Metadata) -> DrafterConfig {
    let config = DrafterConfig::from_metadata(meta, WindowConvention::Below);
    config.unwrap_or_else(|e| panic!("{e}"))
}

/// `meta` with `key` changed (`None`: removed).
pub fn with(mut meta: Metadata, key: &str, value: Option<Value>) -> Metadata {
    match value {
        Some(value) => meta.insert(key, value),
        None => meta.remove(key),
    };
    meta
}

/// The message that `meta` with a changed key gives.
#[track_caller]
pub fn refused(meta: Metadata, key: &str, value: Option<Value>, message: &str) {
    let meta = with(meta, key, value);
    let found = match meta.get("general.architecture") {
        Some(Value::String(name)) if name == "dflash" && !message.contains("is a drafter") => {
            DrafterConfig::from_metadata(&meta, WindowConvention::Below).map(drop)
        }
        _ => Config::from_metadata(&meta).map(drop),
    };
    let found = found.expect_err("the key is refused");
    assert_eq!(found.to_string(), message);
}
