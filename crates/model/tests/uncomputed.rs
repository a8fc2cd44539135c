//! Keys that would change the computation but are not computed are refused by
//! name; so are lengths that no model has.

mod common;

use common::keys::{dflash, llama, muse_glimmer, read, read_drafter, refused, with};
use gguf::{Array, Metadata, Value};
use model::{Pairing, Rope, RopeScaling};
use testing::text;

/// The three architectures, with their prefixes.
fn all() -> [(&'static str, Metadata); 3] {
    [
        ("muse-glimmer", muse_glimmer()),
        ("llama", llama()),
        ("dflash", dflash()),
    ]
}

/// Does `meta` mean the same with `key` as without?
fn is_neutral(prefix: &str, meta: &Metadata, key: &str, value: Value) -> bool {
    let changed = with(meta.clone(), &format!("{prefix}.{key}"), Some(value));
    match prefix {
        "dflash" => read_drafter(&changed) == read_drafter(meta),
        _ => read(&changed) == read(meta),
    }
}

#[test]
fn keys_that_change_the_computation() {
    let float = Value::F32;
    let whole = Value::U32;
    // Key, its neutral value, another one; as which text it is found.
    let cases = [
        ("attention.clamp_kqv", float(0.0), float(8.0), "8"),
        ("attention.key_length_swa", whole(16), whole(32), "32"),
        ("attention.max_alibi_bias", float(0.0), float(8.0), "8"),
        ("attention.output_scale", float(1.0), float(0.5), "0.5"),
        ("attention.scale", float(0.25), float(0.2501), "0.2501"),
        ("attention.shared_kv_layers", whole(0), whole(10), "10"),
        ("attention.temperature_scale", float(0.0), float(0.1), "0.1"),
        ("attn_logit_softcapping", float(0.0), float(50.0), "50"),
        ("embedding_scale", float(1.0), float(12.0), "12"),
        ("expert_count", whole(0), whole(8), "8"),
        ("nextn_predict_layers", whole(0), whole(1), "1"),
        ("pooling_type", whole(0), whole(1), "1"),
        ("rescale_every_n_layers", whole(0), whole(6), "6"),
        ("residual_scale", float(1.0), float(0.22), "0.22"),
        ("rope.dimension_count_swa", whole(16), whole(8), "8"),
        ("rope.scaling.attn_factor", float(1.0), float(0.9), "0.9"),
        ("rope.scaling.yarn_attn_factor", float(1.0), float(2.0), "2"),
        ("rope.scaling.yarn_ext_factor", float(1.0), float(0.0), "0"),
        (
            "rope.scaling.yarn_log_multiplier",
            float(0.0),
            float(0.1),
            "0.1",
        ),
        ("swin_norm", Value::Bool(false), Value::Bool(true), "true"),
        (
            "use_parallel_residual",
            Value::Bool(false),
            Value::Bool(true),
            "true",
        ),
    ];
    for (key, neutral, other, found) in cases {
        let expected = match neutral {
            Value::F32(x) => x.to_string(),
            Value::U32(x) => x.to_string(),
            Value::Bool(x) => x.to_string(),
            _ => unreachable!("no other type in the table"),
        };
        for (prefix, meta) in all() {
            assert!(
                is_neutral(prefix, &meta, key, neutral.clone()),
                "{prefix}.{key}"
            );
            let name = format!("{prefix}.{key}");
            let message = format!(
                "metadata key {name}: found {found}, expected {expected}: the graph of this \
                 architecture does not compute anything else"
            );
            refused(meta, &name, Some(other.clone()), &message);
        }
    }
}

#[test]
fn keys_without_a_neutral_value() {
    for key in [
        "activation_sparsity_scale",
        "rope.dimension_sections",
        "rope.scaling.alpha",
        "swiglu_clamp_exp",
    ] {
        for (prefix, meta) in all() {
            let name = format!("{prefix}.{key}");
            let message = format!(
                "metadata key {name}: found it, expected no such key: the graph of this \
                 architecture does not compute it"
            );
            let value = Value::Array(Array::F32(vec![1.0; 4]));
            refused(meta, &name, Some(value), &message);
        }
    }
}

/// What one architecture computes is refused in the others.
#[test]
fn keys_of_some_architectures() {
    let not_computed = |name: &str| {
        format!(
            "metadata key {name}: found it, expected no such key: the graph of this architecture \
             does not compute it"
        )
    };
    for key in ["attention.sliding_window_pattern", "rope.freq_base_swa"] {
        let name = format!("llama.{key}");
        refused(llama(), &name, Some(Value::F32(2.0)), &not_computed(&name));
    }
    let name = "dflash.rope.freq_base_swa";
    refused(dflash(), name, Some(Value::F32(2.0)), &not_computed(name));
    let cap = "llama.final_logit_softcapping";
    let message = format!(
        "metadata key {cap}: found 30, expected 0: the graph of this architecture does not \
         compute anything else"
    );
    refused(llama(), cap, Some(Value::F32(30.0)), &message);
    assert!(is_neutral(
        "llama",
        &llama(),
        "final_logit_softcapping",
        Value::F32(0.0)
    ));
    for (prefix, meta) in [("muse-glimmer", muse_glimmer()), ("llama", llama())] {
        let name = format!("{prefix}.attention.causal");
        let message = format!(
            "metadata key {name}: found false, expected true: the graph of this architecture does \
             not compute anything else"
        );
        refused(meta.clone(), &name, Some(Value::Bool(false)), &message);
        assert!(is_neutral(
            prefix,
            &meta,
            "attention.causal",
            Value::Bool(true)
        ));
    }
    // A key of another type is no neutral one.
    let name = "llama.embedding_scale";
    let message = format!("metadata key {name}: found u32 1, expected f32");
    refused(llama(), name, Some(Value::U32(1)), &message);
}

#[test]
fn a_scaling_factor_needs_its_type() {
    for (prefix, meta) in all() {
        let factor = format!("{prefix}.rope.scaling.factor");
        let message = format!(
            "metadata key {prefix}.rope.scaling.type is missing: rope.scaling.factor alone does \
             not say how it is to be used"
        );
        refused(meta.clone(), &factor, Some(Value::F32(8.0)), &message);
        assert!(is_neutral(
            prefix,
            &meta,
            "rope.scaling.factor",
            Value::F32(1.0)
        ));
        let explicit = with(
            meta.clone(),
            &format!("{prefix}.rope.scaling.type"),
            Some(text("none")),
        );
        assert!(is_neutral(
            prefix,
            &explicit,
            "rope.scaling.factor",
            Value::F32(8.0)
        ));
        let of_one = with(meta, &factor, Some(Value::F32(1.0)));
        assert!(is_neutral(
            prefix,
            &of_one,
            "rope.scaling.type",
            text("linear")
        ));
    }
}

#[test]
fn a_rotation_with_scaling_is_llamas_only() {
    for (prefix, meta) in [("muse-glimmer", muse_glimmer()), ("dflash", dflash())] {
        let name = |key: &str| format!("{prefix}.rope.{key}");
        let message = format!(
            "metadata key {}: found 4, expected no scaling: this model has none",
            name("scaling.factor")
        );
        let old = Some(Value::F32(4.0));
        refused(meta.clone(), &name("scale_linear"), old.clone(), &message);
        let scaled = with(meta.clone(), &name("scaling.factor"), old);
        let linear = Some(text("linear"));
        refused(scaled.clone(), &name("scaling.type"), linear, &message);
        let context = Some(Value::U32(512));
        let scaled = with(scaled, &name("scaling.original_context_length"), context);
        refused(scaled, &name("scaling.type"), Some(text("yarn")), &message);
        let part = format!(
            "metadata key {}: found 8, expected 16",
            name("dimension_count")
        );
        let eight = Some(Value::U32(8));
        refused(meta.clone(), &name("dimension_count"), eight, &part);
        assert!(is_neutral(
            prefix,
            &meta,
            "rope.dimension_count",
            Value::U32(16)
        ));
    }
}

#[test]
fn the_old_linear_key_must_agree() {
    let scaled = |kind: &str| {
        let meta = with(llama(), "llama.rope.scaling.type", Some(text(kind)));
        with(meta, "llama.rope.scaling.factor", Some(Value::F32(4.0)))
    };
    const OLD: &str = "llama.rope.scale_linear";
    let message = "metadata key llama.rope.scale_linear: found 2, expected the same as the \
                   rope.scaling keys say, or no such key";
    for kind in ["none", "linear"] {
        refused(scaled(kind), OLD, Some(Value::F32(2.0)), message);
        assert!(is_neutral(
            "llama",
            &scaled(kind),
            "rope.scale_linear",
            Value::F32(1.0)
        ));
    }
    let both = with(scaled("linear"), OLD, Some(Value::F32(4.0)));
    let linear = RopeScaling::Linear { factor: 4.0 };
    let rope = Rope::new(Pairing::Neighbours, 16, 500_000.0, linear);
    assert_eq!(read(&both).rope, rope);
}

/// A type from the file is shown escaped and cut.
#[test]
fn a_hostile_text_is_shown_harmless() {
    let name = "llama.rope.scaling.type";
    let message = format!(
        "metadata key {name}: found \\u{{1b}}[2J{}... (60004 bytes), expected none, linear or yarn",
        "x".repeat(119)
    );
    let kind = text(&format!("\x1b[2J{}", "x".repeat(60_000)));
    refused(llama(), name, Some(kind), &message);
    let message = format!(
        "architecture \"{}... (200 bytes)\" is not supported; supported: muse-glimmer, llama",
        "y".repeat(128)
    );
    refused(
        llama(),
        "general.architecture",
        Some(text(&"y".repeat(200))),
        &message,
    );
}

#[test]
fn a_long_list_is_cut() {
    let name = "dflash.target_layers";
    let message = format!(
        "metadata key {name}: found [1, 1, 1, 1, 1, 1, 1, 1, ... (5001 numbers)], expected numbers \
         from 0 up"
    );
    let layers = Value::Array(Array::I32([&[1; 5000], &[-1][..]].concat()));
    refused(dflash(), name, Some(layers), &message);
}

#[test]
fn lengths_that_no_model_has() {
    for (prefix, meta) in all() {
        for (key, found, most) in [
            ("block_count", 1 << 24, 4096),
            ("block_count", 4097, 4096),
            ("attention.head_count", 65_537, 65_536),
            ("attention.head_count_kv", 65_537, 65_536),
            ("attention.key_length", 1 << 24, 65_536),
            ("embedding_length", (1 << 24) + 1, 1 << 24),
            ("feed_forward_length", (1 << 24) + 1, 1 << 24),
            ("context_length", (1 << 24) + 1, 1 << 24),
        ] {
            let name = format!("{prefix}.{key}");
            let message =
                format!("metadata key {name}: found {found}, expected a number from 1 to {most}");
            refused(meta.clone(), &name, Some(Value::U32(found)), &message);
        }
        let name = format!("{prefix}.context_length");
        let message = format!(
            "metadata key {name}: found 1, expected at least 2: a token and the one after it"
        );
        refused(meta.clone(), &name, Some(Value::U32(1)), &message);

        // Each length is possible, their product is not.
        let length =
            |meta, key: &str, n| with(meta, &format!("{prefix}.{key}"), Some(Value::U32(n)));
        let wide = length(meta, "attention.head_count", 65_536);
        let wide = length(wide, "attention.head_count_kv", 65_536);
        let wide = length(wide, "attention.value_length", 65_536);
        let name = format!("{prefix}.attention.key_length");
        let message = format!(
            "metadata key {name}: found 65536, expected less: keys and values of a position in 8 \
             layers of 65536 heads would take 274877906944 bytes, at most 268435456 are possible"
        );
        refused(wide, &name, Some(Value::U32(65_536)), &message);
    }
    // Nor is a head as wide as any embedding.
    let wide = with(llama(), "llama.attention.key_length", None);
    let wide = with(wide, "llama.embedding_length", Some(Value::U32(1 << 24)));
    let wide = with(wide, "llama.attention.head_count_kv", Some(Value::U32(1)));
    let message = "metadata key llama.attention.key_length is missing: it is the width of a head";
    refused(
        wide,
        "llama.attention.head_count",
        Some(Value::U32(1)),
        message,
    );
}
