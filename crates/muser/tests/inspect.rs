//! `muser inspect` from outside: what it prints about good, strange and broken
//! files.

mod common;

use common::{changed_model, rewritten};
use gguf::{Array, Gguf, Metadata, TensorInfo, TensorType, Value, Writer};
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn muser(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muser"));
    command.args(args).output().expect("muser starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn bundled(name: &str) -> String {
    testing::bundled(name).display().to_string()
}

/// What a call that succeeds prints, its lines without blanks between columns.
fn report(args: &[&str]) -> Vec<String> {
    let mut all = vec!["inspect"];
    all.extend(args);
    let output = muser(&all);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text(&output.stdout).lines().map(words).collect()
}

fn report_json(args: &[&str]) -> Json {
    let mut all = vec!["inspect", "--json"];
    all.extend(args);
    let output = muser(&all);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Every expected line is there, in this order.
fn check(lines: &[String], expected: &[&str]) {
    let mut rest = lines.iter();
    for line in expected {
        let is_there = rest.any(|found| found == line);
        assert!(
            is_there,
            "{line:?} is not there (or not in order) in\n{}",
            lines.join("\n")
        );
    }
}

/// Writes a file without tensor data of interest.
fn file(folder: &TempDir, metadata: &[(&str, Value)], tensors: &[TensorInfo]) -> PathBuf {
    let path = folder.path().join("a.gguf");
    let mut all = Metadata::default();
    for (key, value) in metadata {
        all.insert(*key, value.clone());
    }
    let mut writer = Writer::create(&path, &all, tensors).expect("a writable folder");
    for tensor in tensors {
        let bytes = tensor.data_bytes().expect("a good shape");
        writer
            .append(&tensor.name, &vec![0; bytes as usize])
            .expect("room");
    }
    writer.finish().expect("room");
    path
}

fn string(value: &str) -> Value {
    Value::String(value.to_string())
}

#[test]
fn bundled_model() {
    let expected = [
        "nano-glimmer (bundled): GGUF version 3, 11,883,872 bytes, alignment 32",
        "Metadata: 32 keys",
        "general.architecture string \"muse-glimmer\"",
        "muse-glimmer.block_count u32 8",
        "muse-glimmer.attention.layer_norm_rms_epsilon f32 0.00001",
        "muse-glimmer.attention.sliding_window_pattern 8 x bool [true, true, true, false, true, \
         true, ...]",
        "tokenizer.ggml.tokens 4096 x string [\"!\", \"\\\"\", \"#\", \"$\", \"%\", \"&\", ...]",
        "Tensors: 115",
        "name type shape count bytes layers",
        "token_embd.weight Q8_0 256 x 4096 1 1,114,112",
        "blk.N.attn_norm.weight F32 256 8 8,192 0-7",
        "blk.N.attn_q.weight Q8_0 256 x 512 8 1,114,112 0-7",
        "blk.N.ffn_down.weight Q8_0 768 x 256 8 1,671,168 0-7",
        "output_norm.weight F32 256 1 1,024",
        "output.weight Q8_0 256 x 4096 1 1,114,112",
        "Sizes",
        "Q8_0 66 tensors 11,010,048 parameters 11,698,176 bytes",
        "F32 49 tensors 10,496 parameters 41,984 bytes",
        "total 115 tensors 11,020,544 parameters 11,740,160 bytes",
        "8.52 bits per weight",
        "Muser: can run",
        "architecture muse-glimmer",
        "layers 8: 2 see all earlier tokens, 6 see 128",
        "width 256, feed-forward 768",
        "attention 4 query heads, 2 key/value heads of 128",
        "RoPE base 500000, 128 of 128 dimensions, on sliding layers",
        "logits times 1, capped at 20",
        "context 2,048 tokens",
        "weights 10,626,048 bytes read for a token",
        "keys and values 2,048 bytes a token, and 6,144 up to 128 tokens (f16); 4.75 MiB at full \
         context",
        "tokenizer gpt2 (llama4), 4,096 tokens, 3,712 merges",
        "special tokens BOS 3968 before every text; an answer ends at 3969, 3976",
        "chat template of 5,841 bytes, muse-glimmer turns",
    ];
    check(&report(&[]), &expected);
    let path = bundled("nano-glimmer-q8_0.gguf");
    check(&report(&[&path]), &expected[1..]);
}

#[test]
fn lists_and_full_texts() {
    let lines = report(&["--tensors"]);
    check(
        &lines,
        &[
            "blk.0.attn_q.weight Q8_0 256 x 512 139,264",
            "blk.7.ffn_down.weight Q8_0 768 x 256 208,896",
        ],
    );
    assert!(!lines.iter().any(|l| l.starts_with("blk.N")));
    let full = report(&["--full"]);
    let pattern = "[true, true, true, false, true, true, true, false]";
    let line = format!("muse-glimmer.attention.sliding_window_pattern 8 x bool {pattern}");
    check(&full, &[&line]);
    let template = full
        .iter()
        .find(|l| l.starts_with("tokenizer.chat_template string"));
    assert!(template.expect("a template").ends_with("\""));
    assert!(template.expect("a template").len() > 5000);
}

#[test]
fn drafter() {
    let path = bundled("nano-glimmer-dflash-q8_0.gguf");
    let lines = report(&[&path]);
    check(
        &lines,
        &[
            "fc.weight Q8_0 768 x 256 1 208,896",
            "blk.N.ffn_down.weight Q8_0 768 x 256 2 417,792 0-1",
            "Muser: usable beside the model that it drafts for",
            "architecture dflash (drafter)",
            "layers 2, window 128",
            "block 16 rows, mask token 4095",
            "reads the inputs of the target's layers 2, 5, 7",
            "tokenizer gpt2 (llama4), 4,096 tokens, 3,712 merges",
        ],
    );
    let json = report_json(&[&path]);
    assert_eq!(json["muser"]["usable"], json!(true));
    assert_eq!(json["muser"]["role"], json!("drafter"));
    assert_eq!(json["muser"]["model"], Json::Null);
    assert_eq!(json["muser"]["drafter"]["target_layers"], json!([2, 5, 7]));
    let target = report_json(&[]);
    assert_eq!(
        json["muser"]["tokenizer"]["digest"],
        target["muser"]["tokenizer"]["digest"]
    );
}

/// A drafter's tensors are checked as a model's are.
#[test]
fn drafters_that_cannot_be_used() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("a.gguf");
    type Change = fn(&mut Metadata, &mut Vec<TensorInfo>);
    let cases: [(Change, &str); 5] = [
        (
            |_, tensors| tensors.retain(|t| t.name != "blk.1.ffn_down.weight"),
            "reason tensor blk.1.ffn_down.weight is missing; expected shape [768, 256]",
        ),
        (
            |_, tensors| tensors[0].shape = vec![256, 256],
            "reason tensor fc.weight: found shape [256, 256], expected [768, 256]",
        ),
        (
            |_, tensors| tensors.iter_mut().for_each(|t| t.ty = TensorType::Q8_0),
            "reason tensor enc.output_norm.weight: found type Q8_0, expected F32, F16 or BF16",
        ),
        (
            |_, tensors| {
                let (name, ty) = ("od\u{1b}d".to_string(), TensorType::F32);
                tensors.push(TensorInfo {
                    name,
                    ty,
                    shape: vec![1],
                });
            },
            "reason 1 tensor(s) of the file are not part of a dflash model, first: od\\u{1b}d; a \
             model that needs them would be computed wrongly",
        ),
        (
            |metadata, _| {
                let layers = Value::Array(Array::I32(vec![2, 5]));
                metadata.insert("dflash.target_layers", layers);
            },
            "reason tensor fc.weight: found shape [768, 256], expected [512, 256]",
        ),
    ];
    for (change, reason) in cases {
        let path = rewritten(&path, "nano-glimmer-dflash-q8_0.gguf", change);
        check(&report(&[&path]), &["Muser: cannot run", reason]);
        let json = report_json(&[&path]);
        assert_eq!(json["muser"]["role"], json!("drafter"), "{reason}");
        assert_eq!(json["muser"]["usable"], json!(false), "{reason}");
    }
}

#[test]
fn sampling_keys_that_are_not_honoured() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let keys = [
        ("general.sampling.mirostat", Value::I32(2)),
        ("general.sampling.temp", Value::F32(0.5)),
    ];
    let path = folder.path().join("a.gguf");
    let path = changed_model(&path, "nano-glimmer-q8_0.gguf", &keys);
    let line = "not honoured general.sampling.mirostat";
    check(&report(&[&path]), &["Muser: can run", line]);
    let json = report_json(&[&path]);
    assert_eq!(
        json["muser"]["sampling_not_honoured"],
        json!(["general.sampling.mirostat"])
    );
}

#[test]
fn json_of_the_bundled_model() {
    let json = report_json(&[]);
    let keys: Vec<&String> = json.as_object().expect("an object").keys().collect();
    assert_eq!(
        keys,
        ["file", "metadata", "tensors", "types", "total", "muser"]
    );
    assert_eq!(
        json["file"],
        json!({
            "name": "nano-glimmer (bundled)",
            "parts": [],
            "version": 3,
            "alignment": 32,
            "bytes": 11_883_872,
        })
    );
    let metadata = &json["metadata"];
    assert_eq!(metadata.as_object().map(|m| m.len()), Some(32));
    assert_eq!(
        metadata["muse-glimmer.block_count"],
        json!({ "type": "u32", "value": 8 })
    );
    let tokens = &metadata["tokenizer.ggml.tokens"];
    assert_eq!(
        (&tokens["type"], &tokens["elements"], &tokens["length"]),
        (&json!("array"), &json!("string"), &json!(4096))
    );
    assert_eq!(tokens["value"].as_array().map(Vec::len), Some(4096));
    assert_eq!(json["tensors"].as_array().map(Vec::len), Some(115));
    assert_eq!(
        json["tensors"][0],
        json!({
            "name": "token_embd.weight",
            "type": "Q8_0",
            "shape": [256, 4096],
            "bytes": 1_114_112,
        })
    );
    assert_eq!(
        json["types"][1],
        json!({ "type": "F32", "tensors": 49, "parameters": 10_496, "bytes": 41_984 })
    );
    assert_eq!(json["total"]["parameters"], json!(11_020_544));
}

#[test]
fn json_of_what_muser_makes_of_it() {
    let json = report_json(&[]);
    let verdict = &json["muser"];
    assert_eq!(
        (
            &verdict["usable"],
            &verdict["role"],
            &verdict["reason"],
            &verdict["drafter"]
        ),
        (&json!(true), &json!("model"), &Json::Null, &Json::Null)
    );
    assert_eq!(
        verdict["model"],
        json!({
            "architecture": "muse-glimmer",
            "n_layer": 8,
            "n_layer_full": 2,
            "n_layer_sliding": 6,
            "window": 128,
            "n_embd": 256,
            "n_ff": 768,
            "n_head": 4,
            "n_head_kv": 2,
            "head_dim": 128,
            "n_vocab": 4096,
            "n_ctx": 2048,
            "rope": {
                "base": 500_000.0,
                "dimensions": 128,
                "pairing": "neighbours",
                "layers": "sliding",
                "scaling": null,
            },
            "norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "logit_scale": 1.0,
            "logit_cap": 20.0,
            "weight_bytes_per_token": 10_626_048,
            "kv": {
                "type": "f16",
                "full_bytes_per_token": 2048,
                "sliding_bytes_per_token": 6144,
                "bytes_at_full_context": 2048 * 2048 + 128 * 6144,
            },
        })
    );
    let tokenizer = &verdict["tokenizer"];
    assert_eq!(tokenizer["end"], json!([3969, 3976]));
    assert_eq!(tokenizer["turns"], json!("muse-glimmer"));
    assert_eq!(tokenizer["chat_template_bytes"], json!(5841));
    assert_eq!(tokenizer["chat_template_error"], Json::Null);
}

/// Files that are good GGUF files but no model for Muser: the reason is given,
/// and the exit code is 0.
#[test]
fn what_cannot_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bundled = Gguf::open(Path::new(&bundled("nano-glimmer-q8_0.gguf"))).expect("the model");
    let whole: Vec<(&str, Value)> = bundled
        .metadata()
        .iter()
        .map(|(k, v)| (k, v.clone()))
        .collect();
    let infos: Vec<TensorInfo> = bundled.tensors().iter().map(|t| t.info()).collect();
    let without = |key: &str| -> Vec<(&str, Value)> {
        whole.iter().filter(|(k, _)| *k != key).cloned().collect()
    };
    let embedding = TensorInfo {
        name: "token_embd.weight".to_string(),
        ty: TensorType::Q4_K,
        shape: vec![256, 2],
    };
    let one = std::slice::from_ref(&embedding);
    for (metadata, tensors, reason) in [
        (
            vec![("general.architecture", string("gemma3"))],
            one,
            "reason architecture \"gemma3\" is not supported; supported: muse-glimmer, llama",
        ),
        (
            vec![],
            &[],
            "reason metadata key general.architecture is missing: it says which graph computes \
             the model",
        ),
        (
            without("muse-glimmer.logit_scale"),
            &infos[..],
            "reason metadata key muse-glimmer.logit_scale is missing: logits are scaled before \
             they are capped",
        ),
        (
            whole.clone(),
            &infos[..114],
            "reason tensor output.weight is missing; expected shape [256, 4096]",
        ),
        (
            without("tokenizer.ggml.merges"),
            &infos[..],
            "reason tokenizer: metadata key tokenizer.ggml.merges: missing, expected an array of \
             strings",
        ),
    ] {
        let path = file(&folder, &metadata, tensors);
        let path = path.to_str().expect("UTF-8");
        check(&report(&[path]), &["Muser: cannot run", reason]);
        let json = report_json(&[path]);
        assert_eq!(json["muser"]["usable"], json!(false));
        let found = json["muser"]["reason"].as_str().expect("a reason");
        assert_eq!(format!("reason {found}"), reason);
    }
}

/// A file cannot write to the terminal, and numbers that are none are texts.
#[test]
fn odd_values() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let metadata = [
        ("a\u{1b}[31mkey", string("red \u{1b}[31m\nline")),
        ("infinite", Value::F32(f32::INFINITY)),
        (
            "nested",
            Value::Array(Array::Array(vec![
                Array::U8(vec![1, 2]),
                Array::F64(vec![f64::NAN]),
                // JSON leaves this one alone, and a terminal does not.
                Array::String(["\u{9b}2J"].into_iter().collect()),
            ])),
        ),
        ("empty", Value::Array(Array::I16(vec![]))),
        ("most", Value::U64(u64::MAX)),
        ("long", string(&"x".repeat(1000))),
    ];
    let odd = TensorInfo {
        name: "od\u{7}d".to_string(),
        ty: TensorType::I8,
        shape: vec![1, 2, 3, 4],
    };
    let path = file(&folder, &metadata, &[odd]);
    let path = path.to_str().expect("UTF-8");
    let long = format!("long string \"{}\"... (1000 bytes)", "x".repeat(60));
    check(
        &report(&[path]),
        &[
            "a\\u{1b}[31mkey string \"red \\u{1b}[31m\\nline\"",
            "infinite f32 \"inf\"",
            "nested 3 x array [[1, 2], [\"NaN\"], [\"\\u{9b}2J\"]]",
            "empty 0 x i16 []",
            "most u64 18446744073709551615",
            &long,
            "od\\u{7}d I8 1 x 2 x 3 x 4 1 24",
        ],
    );
    let json = report_json(&[path]);
    assert_eq!(json["metadata"]["infinite"]["value"], json!("inf"));
    assert_eq!(
        json["metadata"]["nested"]["value"],
        json!([[1, 2], ["NaN"], ["\u{9b}2J"]])
    );
    assert_eq!(json["metadata"]["most"]["value"], json!(u64::MAX));
}

#[test]
fn unreadable() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("a.gguf");
    let name = path.to_str().expect("UTF-8");
    let failure = |name: &str| {
        let output = muser(&["inspect", name]);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        text(&output.stderr).trim_end().to_string()
    };
    let missing = format!("error: cannot open the model: {name}: no such file");
    assert_eq!(failure(name), missing);
    std::fs::write(&path, "PK\u{3}\u{4} and much more").expect("a writable folder");
    let other = format!(
        "error: cannot open the model: {name}: not a GGUF file: found \"PK\\x03\\x04\" at \
         the start, expected \"GGUF\""
    );
    assert_eq!(failure(name), other);
    let directory = folder.path().to_str().expect("UTF-8");
    let expected =
        format!("error: cannot open the model: {directory}: found a directory, expected a file");
    assert_eq!(failure(directory), expected);
}

#[test]
fn help_has_examples() {
    let output = muser(&["inspect", "--help"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("muser inspect model.gguf --tensors"));
}
