//! The rules of every metadata key, with the exact messages.

mod common;

use common::keys::{dflash, llama, muse_glimmer, read, read_drafter, refused, with};
use gguf::{Array, Metadata, Value};
use model::backend::BlockWindow;
use model::{
    Architecture, DrafterConfig, KvType, PageClass, Pairing, Rope, RopeScaling, WindowConvention,
};
use testing::text;

#[test]
fn muse_glimmer_keys() {
    let config = read(&muse_glimmer());
    assert_eq!(config.architecture, Architecture::MuseGlimmer);
    assert_eq!((config.n_layer, config.n_embd, config.n_ff), (8, 48, 96));
    assert_eq!((config.n_vocab, config.n_ctx), (20, 2048));
    assert_eq!(
        (config.n_head, config.n_head_kv, config.head_dim),
        (6, 2, 16)
    );
    assert_eq!((config.n_q(), config.n_kv()), (96, 32));
    assert_eq!((config.norm_eps, config.post_norm_eps), (1e-5, 1e-8));
    assert_eq!((config.logit_scale, config.logit_cap), (0.5, Some(20.0)));
    assert_eq!(config.attention_scale(), 0.25);
    let rope = Rope::new(Pairing::Neighbours, 16, 500_000.0, RopeScaling::None);
    assert_eq!(config.rope, rope);
    // Without the pattern key every fourth layer sees everything.
    let sliding: Vec<bool> = config.layers.iter().map(|l| l.window.is_some()).collect();
    assert_eq!(sliding, [true, true, true, false, true, true, true, false]);
    for (il, layer) in config.layers.iter().enumerate() {
        let slides = il % 4 != 3;
        assert_eq!(layer.window, slides.then_some(128));
        assert_eq!(layer.rope, slides, "only sliding layers turn");
        let (class, index) = match slides {
            true => (PageClass::Sliding, il - il / 4),
            false => (PageClass::Full, il / 4),
        };
        assert_eq!((layer.class, layer.index), (class, index));
    }
    let layout = config.kv_layout(KvType::F16);
    assert_eq!(layout.classes.map(|c| c.n_layer), [2, 6, 0]);
    assert_eq!(layout.classes.map(|c| c.window), [None, Some(128), None]);
    assert_eq!(layout.page_bytes(PageClass::Full), 2 * 2 * 256 * 32 * 2);
}

#[test]
fn muse_glimmer_may_be_spelled_with_an_underscore() {
    let mut meta = Metadata::default();
    for (key, value) in muse_glimmer().iter() {
        meta.insert(key.replace("muse-glimmer.", "muse_glimmer."), value.clone());
    }
    meta.insert("general.architecture", text("muse_glimmer"));
    assert_eq!(read(&meta), read(&muse_glimmer()));
}

#[test]
fn layer_pattern_forms() {
    const KEY: &str = "muse-glimmer.attention.sliding_window_pattern";
    let slides = |value: Value| -> Vec<bool> {
        let config = read(&with(muse_glimmer(), KEY, Some(value)));
        config.layers.iter().map(|l| l.window.is_some()).collect()
    };
    let every_fourth = [true, true, true, false, true, true, true, false];
    for value in [Value::U32(4), Value::I32(4), Value::U8(4)] {
        assert_eq!(slides(value), every_fourth);
    }
    assert_eq!(slides(Value::U32(2)), [true, false].repeat(4));
    let flags = vec![false, true, true, true, true, true, true, false];
    assert_eq!(slides(Value::Array(Array::Bool(flags.clone()))), flags);
    let cases = [
        (Value::U32(1), "1", "a period of at least 2"),
        (Value::U32(0), "0", "a number from 1 to 16777216"),
        (
            Value::Array(Array::Bool(flags[1..].to_vec())),
            "array of 7 bool",
            "one bool for each of the 8 layers, or a period",
        ),
        (
            Value::Array(Array::U32(vec![1; 8])),
            "array of 8 u32",
            "one bool for each of the 8 layers, or a period",
        ),
        (Value::Bool(true), "bool true", "u32"),
        (Value::F32(4.0), "f32 4", "u32"),
    ];
    for (value, found, expected) in cases {
        let message = format!("metadata key {KEY}: found {found}, expected {expected}");
        refused(muse_glimmer(), KEY, Some(value), &message);
    }
}

#[test]
fn base_of_sliding_layers_wins() {
    let meta = with(
        muse_glimmer(),
        "muse-glimmer.rope.freq_base_swa",
        Some(Value::F32(1234.0)),
    );
    let rope = Rope::new(Pairing::Neighbours, 16, 1234.0, RopeScaling::None);
    assert_eq!(read(&meta).rope, rope);
}

/// Required keys of every architecture: none has a default.
#[test]
fn required_keys() {
    let common = [
        ("block_count", "it is the number of layers"),
        ("context_length", "it is the longest sequence"),
        ("embedding_length", "every layer has this width"),
        (
            "feed_forward_length",
            "the feed-forward part has this width",
        ),
        ("attention.head_count", "attention needs it"),
        ("attention.layer_norm_rms_epsilon", "the norms need it"),
    ];
    for (key, why) in common {
        for meta in [muse_glimmer(), llama(), dflash()] {
            let prefix = meta
                .str("general.architecture")
                .unwrap()
                .unwrap()
                .to_string();
            let key = format!("{prefix}.{key}");
            let message = format!("metadata key {key} is missing: {why}");
            refused(meta, &key, None, &message);
        }
    }
    let heads = [
        ("attention.head_count_kv", "attention needs it"),
        ("attention.key_length", "it is the width of a head"),
        ("attention.value_length", "it is the width of a value head"),
    ];
    for (key, why) in heads {
        for meta in [muse_glimmer(), dflash()] {
            let prefix = meta
                .str("general.architecture")
                .unwrap()
                .unwrap()
                .to_string();
            let key = format!("{prefix}.{key}");
            let message = format!("metadata key {key} is missing: {why}");
            refused(meta, &key, None, &message);
        }
    }
    let muse_glimmer_only = [
        (
            "attention.sliding_window",
            "sliding layers need their window",
        ),
        ("rope.freq_base", "sliding layers turn by it"),
        ("logit_scale", "logits are scaled before they are capped"),
        ("final_logit_softcapping", "logits are capped"),
    ];
    for (key, why) in muse_glimmer_only {
        let key = format!("muse-glimmer.{key}");
        let message = format!("metadata key {key} is missing: {why}");
        refused(muse_glimmer(), &key, None, &message);
    }
    let tokens = "metadata key tokenizer.ggml.tokens is missing: its length is the size of the \
                  vocabulary";
    for meta in [muse_glimmer(), llama()] {
        refused(meta.clone(), "tokenizer.ggml.tokens", None, tokens);
        let empty = Value::Array(Array::String(std::iter::empty::<&str>().collect()));
        refused(meta, "tokenizer.ggml.tokens", Some(empty), tokens);
    }
}

#[test]
fn values_out_of_range() {
    let range = "a number from 1 to 16777216";
    let cases = [
        ("block_count", Value::U32(0), "0", "a number from 1 to 4096"),
        ("embedding_length", Value::U32(1 << 25), "33554432", range),
        (
            "attention.head_count_kv",
            Value::U32(4),
            "4",
            "a divisor of the 6 query heads",
        ),
        (
            "attention.head_count_kv",
            Value::U32(0),
            "0",
            "a number from 1 to 65536",
        ),
        (
            "attention.value_length",
            Value::U32(8),
            "8",
            "16, as attention.key_length",
        ),
        ("attention.sliding_window", Value::U32(0), "0", range),
        ("rope.dimension_count", Value::U32(8), "8", "16"),
        (
            "rope.freq_base",
            Value::F32(0.0),
            "0",
            "a positive finite number",
        ),
        (
            "rope.freq_base_swa",
            Value::F32(-1.0),
            "-1",
            "a positive finite number",
        ),
        (
            "logit_scale",
            Value::F32(f32::NAN),
            "NaN",
            "a positive finite number",
        ),
        (
            "final_logit_softcapping",
            Value::F32(0.0),
            "0",
            "a positive finite number",
        ),
        (
            "attention.layer_norm_rms_epsilon",
            Value::F32(f32::INFINITY),
            "inf",
            "a positive finite number",
        ),
        ("block_count", text("8"), "string", "u32"),
        ("block_count", Value::I32(-8), "i32 -8", "u32"),
        ("block_count", Value::F32(8.0), "f32 8", "u32"),
        ("logit_scale", Value::U32(1), "u32 1", "f32"),
        (
            "rope.scaling.type",
            text("ntk"),
            "ntk",
            "none, linear or yarn",
        ),
    ];
    for (key, value, found, expected) in cases {
        let key = format!("muse-glimmer.{key}");
        let message = format!("metadata key {key}: found {found}, expected {expected}");
        refused(muse_glimmer(), &key, Some(value), &message);
    }
}

#[test]
fn keys_that_contradict_each_other() {
    let odd = with(
        muse_glimmer(),
        "muse-glimmer.attention.key_length",
        Some(Value::U32(15)),
    );
    refused(
        odd,
        "muse-glimmer.attention.value_length",
        Some(Value::U32(15)),
        "metadata key muse-glimmer.attention.key_length: found 15, expected an even number",
    );
    let scaled = with(
        muse_glimmer(),
        "muse-glimmer.rope.scaling.factor",
        Some(Value::F32(2.0)),
    );
    refused(
        scaled,
        "muse-glimmer.rope.scaling.type",
        Some(text("linear")),
        "metadata key muse-glimmer.rope.scaling.factor: found 2, expected no scaling: this model has none",
    );
}

#[test]
fn architectures() {
    const KEY: &str = "general.architecture";
    let cases = [
        (
            Some(text("gpt2")),
            "architecture \"gpt2\" is not supported; supported: muse-glimmer, llama",
        ),
        (
            None,
            "metadata key general.architecture is missing: it says which graph computes the model",
        ),
        (
            Some(text("")),
            "metadata key general.architecture is missing: it says which graph computes the model",
        ),
        (
            Some(Value::U32(3)),
            "metadata key general.architecture: found u32 3, expected string",
        ),
        (
            Some(text("dflash")),
            "this file is a drafter (architecture dflash), not a model: it has no embedding and \
             no head of its own and works beside its target only",
        ),
    ];
    for (value, message) in cases {
        refused(muse_glimmer(), KEY, value, message);
    }
}

#[test]
fn llama_keys() {
    let config = read(&llama());
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.logit_scale, config.logit_cap), (1.0, None));
    assert!(config.layers.iter().all(|l| l.rope && l.window.is_none()));
    assert!(config.layers.iter().all(|l| l.class == PageClass::Full));

    let mut meta = llama();
    for key in [
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
    ] {
        meta.remove(&format!("llama.{key}"));
    }
    let config = read(&meta);
    assert_eq!(
        (config.n_head_kv, config.head_dim),
        (6, 8),
        "every head its own keys"
    );
    let rope = Rope::new(Pairing::Neighbours, 8, 10_000.0, RopeScaling::None);
    assert_eq!(config.rope, rope);

    let window = with(
        llama(),
        "llama.attention.sliding_window",
        Some(Value::U32(64)),
    );
    let config = read(&window);
    assert!(config.layers.iter().all(|l| l.window == Some(64)));
    assert!(config.layers.iter().all(|l| l.class == PageClass::Sliding));
    let none = with(
        llama(),
        "llama.attention.sliding_window",
        Some(Value::U32(0)),
    );
    assert_eq!(read(&none), read(&llama()));

    let partial = with(llama(), "llama.rope.dimension_count", Some(Value::U32(8)));
    assert_eq!(read(&partial).rope.n_rot(), 8);
}

#[test]
fn llama_refusals() {
    let cases = [
        (
            "expert_count",
            Value::U32(8),
            "8",
            "0: the graph of this architecture does not compute anything else",
        ),
        (
            "rope.dimension_count",
            Value::U32(18),
            "18",
            "an even number up to 16",
        ),
        (
            "rope.dimension_count",
            Value::U32(7),
            "7",
            "an even number up to 16",
        ),
        (
            "rope.dimension_count",
            Value::U32(0),
            "0",
            "an even number up to 16",
        ),
        (
            "rope.scaling.type",
            text("longrope"),
            "longrope",
            "none, linear or yarn",
        ),
    ];
    for (key, value, found, expected) in cases {
        let key = format!("llama.{key}");
        let message = format!("metadata key {key}: found {found}, expected {expected}");
        refused(llama(), &key, Some(value), &message);
    }
    assert_eq!(
        read(&with(llama(), "llama.expert_count", Some(Value::U32(0)))),
        read(&llama())
    );
}

#[test]
fn llama_scaling_keys() {
    let scaled = |entries: &[(&str, Value)]| {
        let mut meta = llama();
        for (key, value) in entries {
            meta.insert(format!("llama.rope.{key}"), value.clone());
        }
        meta
    };
    let expect = |entries: &[(&str, Value)], scaling| {
        let rope = Rope::new(Pairing::Neighbours, 16, 500_000.0, scaling);
        assert_eq!(read(&scaled(entries)).rope, rope, "{entries:?}");
    };
    let linear = RopeScaling::Linear { factor: 4.0 };
    expect(&[("scaling.type", text("none"))], RopeScaling::None);
    expect(&[("scale_linear", Value::F32(1.0))], RopeScaling::None);
    expect(&[("scale_linear", Value::F32(4.0))], linear);
    let factor = ("scaling.factor", Value::F32(4.0));
    expect(&[("scaling.type", text("linear")), factor.clone()], linear);
    let context = ("scaling.original_context_length", Value::U32(512));
    let yarn = |beta_fast, beta_slow, attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        original_context: 512,
        beta_fast,
        beta_slow,
        attention_factor,
    };
    let kind = ("scaling.type", text("yarn"));
    expect(
        &[kind.clone(), factor.clone(), context.clone()],
        yarn(32.0, 1.0, 1.0),
    );
    expect(
        &[
            kind.clone(),
            factor.clone(),
            context.clone(),
            ("scaling.yarn_beta_fast", Value::F32(16.0)),
            ("scaling.yarn_beta_slow", Value::F32(2.0)),
            ("scaling.attn_factor", Value::F32(0.9)),
        ],
        yarn(16.0, 2.0, 0.9),
    );
    refused(
        scaled(std::slice::from_ref(&kind)),
        "none",
        None,
        "metadata key llama.rope.scaling.factor is missing: the scaling needs its factor",
    );
    refused(
        scaled(&[kind, factor]),
        "none",
        None,
        "metadata key llama.rope.scaling.original_context_length is missing: YaRN's ramp depends \
         on it",
    );
}

#[test]
fn dflash_keys() {
    let config = read_drafter(&dflash());
    assert_eq!((config.n_layer, config.n_embd, config.n_ff), (8, 48, 96));
    assert_eq!((config.block_size, config.mask_token), (16, 19));
    assert_eq!(config.target_places, [2, 5, 8]);
    assert_eq!((config.logit_scale, config.logit_cap), (1.0, None));
    let rope = Rope::new(Pairing::Halves, 16, 500_000.0, RopeScaling::None);
    assert_eq!(config.rope, rope);
    let expected: Vec<BlockWindow> = (0..8)
        .map(|il| {
            if il == 3 {
                BlockWindow::All
            } else {
                BlockWindow::Below(128)
            }
        })
        .collect();
    assert_eq!(config.windows, expected);
    assert_eq!(
        config.class_layout().window,
        None,
        "layer 3 sees everything"
    );

    let within = DrafterConfig::from_metadata(&dflash(), WindowConvention::Within);
    let within = within.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(within.windows[0], BlockWindow::Within(128));

    const PATTERN: &str = "dflash.attention.sliding_window_pattern";
    let all = with(dflash(), PATTERN, Some(Value::U32(16)));
    assert_eq!(read_drafter(&all).class_layout().window, Some(128));
    let within = DrafterConfig::from_metadata(&all, WindowConvention::Within);
    let within = within.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(
        within.class_layout().window,
        Some(129),
        "a key at distance 128 is seen"
    );

    let mut none = with(dflash(), PATTERN, None);
    none.remove("dflash.attention.sliding_window");
    assert_eq!(read_drafter(&none).windows, vec![BlockWindow::All; 8]);
}

#[test]
fn dflash_refusals() {
    let array = |layers: &[i32]| Value::Array(Array::I32(layers.to_vec()));
    let missing = [
        ("dflash.block_size", "it is the rows of a block"),
        (
            "dflash.target_layers",
            "the context features come from these layers",
        ),
        ("dflash.rope.freq_base", "every layer turns by it"),
        (
            "tokenizer.ggml.mask_token_id",
            "it stands for the tokens to propose",
        ),
        (
            "dflash.attention.sliding_window_pattern",
            "a window is given, so it must be known which layers slide",
        ),
        (
            "dflash.attention.sliding_window",
            "sliding layers need their window",
        ),
    ];
    for (key, why) in missing {
        refused(
            dflash(),
            key,
            None,
            &format!("metadata key {key} is missing: {why}"),
        );
    }
    let values = [
        ("dflash.block_size", Value::U32(1), "1", "at least 2"),
        (
            "dflash.target_layers",
            array(&[]),
            "[]",
            "at least one layer",
        ),
        (
            "dflash.target_layers",
            array(&[3, -1]),
            "[3, -1]",
            "numbers from 0 up",
        ),
        (
            "dflash.target_layers",
            Value::U32(3),
            "u32 3",
            "array of integers",
        ),
    ];
    for (key, value, found, expected) in values {
        let message = format!("metadata key {key}: found {found}, expected {expected}");
        refused(dflash(), key, Some(value), &message);
    }
    for key in [
        "dflash.conv_kernel_size",
        "dflash.conv_group_size",
        "dflash.selector_rank",
        "dflash.selector_top_k",
    ] {
        let message = format!(
            "this drafter is not supported: it has the key {key} of DFlash 2, whose graph Muser \
             does not have"
        );
        refused(dflash(), key, Some(Value::U32(3)), &message);
    }
    for key in ["dflash.attention.causal", "dflash.sample_from_anchor"] {
        let message =
            format!("this drafter is not supported: {key} is true; only false is computed here");
        refused(dflash(), key, Some(Value::Bool(true)), &message);
        let harmless = with(dflash(), key, Some(Value::Bool(false)));
        assert_eq!(read_drafter(&harmless), read_drafter(&dflash()));
    }
    let other = DrafterConfig::from_metadata(&llama(), WindowConvention::Below);
    assert_eq!(
        other.expect_err("not a drafter").to_string(),
        "this drafter is not supported: its architecture is \"llama\", not \"dflash\""
    );
}
