//! What good files give: values, tensors, places, and the cost of opening.

mod common;

use common::{ORACLE_FILES, array, counts, entry, every_type, file, key, oracle, text, walk};
use gguf::{Array, Bytes, Gguf, Metadata, StringArray, TensorType, Value, Writer};
use std::time::{Duration, Instant};

fn open(name: &str) -> Gguf {
    Gguf::open(&oracle(name)).unwrap()
}

#[test]
fn oracle_files_open_and_add_up() {
    for name in ORACLE_FILES {
        let gguf = open(name);
        let size = std::fs::metadata(oracle(name)).unwrap().len();
        assert_eq!((gguf.version(), gguf.alignment()), (3, 32), "{name}");
        assert_eq!(gguf.file_bytes(), size, "{name}");
        assert_eq!(gguf.paths(), [oracle(name)], "{name}");
        let sum: u64 = gguf.tensors().iter().map(|t| t.data.len() as u64).sum();
        assert_eq!(gguf.data_bytes(), sum, "{name}");
        for tensor in gguf.tensors() {
            let info = tensor.info();
            assert_eq!(info.data_bytes().unwrap(), tensor.data.len() as u64);
            assert_eq!(gguf.tensor(&info.name).unwrap().info(), info);
        }
        assert!(walk(&gguf) > 1000, "{name}");
        assert!(gguf.tensor("no.such.tensor").is_none());
    }
}

#[test]
fn metadata_of_the_nano_file() {
    let gguf = open("text-nano-q8_0.gguf");
    let m = gguf.metadata();
    assert_eq!(m.str("general.architecture").unwrap(), Some("muse-glimmer"));
    assert_eq!(m.u32("muse-glimmer.block_count").unwrap(), Some(8));
    assert_eq!(
        m.f32("muse-glimmer.logit_scale").unwrap(),
        Some(0.196_116_13)
    );
    let pattern = vec![true, true, true, false, true, true, true, false];
    assert_eq!(
        m.get("muse-glimmer.attention.sliding_window_pattern"),
        Some(&Value::Array(Array::Bool(pattern)))
    );
    let tokens = m.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens.get(512)), (512, None));
    assert_eq!(tokens.get(423), Some("<|message|>"));
    assert_eq!(tokens.iter().nth(408), Some("<|eot|>"));
    let types = m.integers("tokenizer.ggml.token_type").unwrap().unwrap();
    assert_eq!((types.len(), types[0]), (512, 1));
    assert_eq!(m.str("no.such.key").unwrap(), None);
    assert_eq!(m.iter().next().unwrap().0, "general.architecture");

    let embedding = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!(embedding.ty, TensorType::Q8_0);
    assert_eq!(embedding.shape, [64, 512]);
    assert_eq!(gguf.tensors()[0].name, "token_embd.weight");
    assert_eq!(gguf.tensors().len(), 115);
}

#[test]
fn a_value_of_another_type_is_named() {
    let gguf = open("text-nano-q8_0.gguf");
    let m = gguf.metadata();
    let cases = [
        (
            m.u32("general.name").unwrap_err(),
            "metadata key general.name: found string, expected u32",
        ),
        (
            m.str("muse-glimmer.block_count").unwrap_err(),
            "metadata key muse-glimmer.block_count: found u32 8, expected string",
        ),
        (
            m.bool("muse-glimmer.final_logit_softcapping").unwrap_err(),
            "metadata key muse-glimmer.final_logit_softcapping: found f32 20, expected bool",
        ),
        (
            m.strings("tokenizer.ggml.token_type").unwrap_err(),
            "metadata key tokenizer.ggml.token_type: found array of i32, expected array of string",
        ),
        (
            m.floats("tokenizer.ggml.token_type").unwrap_err(),
            "metadata key tokenizer.ggml.token_type: found array of i32, expected array of f32",
        ),
    ];
    for (error, expected) in cases {
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn values_of_every_type() {
    let gguf = Gguf::from_bytes(Bytes::from(every_type())).unwrap();
    let m = gguf.metadata();
    assert_eq!(m.len(), 26);
    let f32_ones = f32::from_bits(0x0101_0101);
    let f64_ones = f64::from_bits(0x0101_0101_0101_0101);
    let strings = || Array::String(["a", ""].into_iter().collect());
    let scalars = [
        Value::U8(1),
        Value::I8(1),
        Value::U16(0x0101),
        Value::I16(0x0101),
        Value::U32(0x0101_0101),
        Value::I32(0x0101_0101),
        Value::F32(f32_ones),
        Value::Bool(true),
        Value::String("text".to_string()),
        Value::Array(strings()),
        Value::U64(0x0101_0101_0101_0101),
        Value::I64(0x0101_0101_0101_0101),
        Value::F64(f64_ones),
    ];
    let arrays = [
        Array::U8(vec![1; 3]),
        Array::I8(vec![1; 3]),
        Array::U16(vec![0x0101; 3]),
        Array::I16(vec![0x0101; 3]),
        Array::U32(vec![0x0101_0101; 3]),
        Array::I32(vec![0x0101_0101; 3]),
        Array::F32(vec![f32_ones; 3]),
        Array::Bool(vec![true; 3]),
        Array::String(["text"; 3].into_iter().collect()),
        Array::Array(vec![strings(), strings(), strings()]),
        Array::U64(vec![0x0101_0101_0101_0101; 3]),
        Array::I64(vec![0x0101_0101_0101_0101; 3]),
        Array::F64(vec![f64_ones; 3]),
    ];
    for (ty, (scalar, array)) in scalars.into_iter().zip(arrays).enumerate() {
        assert_eq!(m.get(&format!("key.{ty}")), Some(&scalar));
        let found = m.get(&format!("key.array.{ty}"));
        assert_eq!(found, Some(&Value::Array(array)));
    }
    assert_eq!(m.integers("key.array.10").unwrap().unwrap().len(), 3);
}

#[test]
fn integers_widen_but_never_wrap() {
    let keys = [
        key("minus", 5, &(-1i32).to_le_bytes()),
        key("large", 10, &u64::MAX.to_le_bytes()),
        key("larges", 9, &array(10, 1, &u64::MAX.to_le_bytes())),
        key("small", 0, &[200]),
    ];
    let gguf = Gguf::from_bytes(Bytes::from(file(&keys, &[], 0))).unwrap();
    let m = gguf.metadata();
    assert_eq!(m.u32("small").unwrap(), Some(200));
    assert_eq!(m.u64("large").unwrap(), Some(u64::MAX));
    for (error, expected) in [
        (
            m.u64("minus").unwrap_err(),
            "metadata key minus: found i32 -1, expected u64",
        ),
        (
            m.u32("large").unwrap_err(),
            "metadata key large: found u64 18446744073709551615, expected u32",
        ),
        (
            m.integers("larges").unwrap_err(),
            "metadata key larges: found array of u64, expected array of integers",
        ),
    ] {
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn version_2_and_no_tensors() {
    let mut bytes = counts(2, 0, 1);
    bytes.extend(key("k", 8, &text("v")));
    let gguf = Gguf::from_bytes(Bytes::from(bytes.clone())).unwrap();
    assert_eq!(gguf.version(), 2);
    assert_eq!(gguf.metadata().str("k").unwrap(), Some("v"));
    assert_eq!(gguf.headers().len(), 1);
    assert_eq!(&gguf.headers()[0][..], &bytes[..]);
    assert_eq!((gguf.data_bytes(), gguf.paths().len()), (0, 0));

    let empty = Gguf::from_bytes(Bytes::from(counts(3, 0, 0))).unwrap();
    assert!(empty.metadata().is_empty() && empty.tensors().is_empty());
}

/// Tensor data starts at the first multiple of the alignment after the
/// directory; tensors may come in any order, with gaps, unpadded at the end.
#[test]
fn places_follow_the_alignment() {
    let keys = [key("general.alignment", 4, &64u32.to_le_bytes())];
    let entries = [entry("late", &[3], 24, 128), entry("early", &[5], 24, 0)];
    let mut bytes = counts(3, 2, 1);
    keys.iter().chain(&entries).for_each(|p| bytes.extend(p));
    let header_bytes = bytes.len();
    let start = header_bytes.next_multiple_of(64);
    bytes.resize(start, 0);
    bytes.extend((0..131).map(|i| i as u8));
    let gguf = Gguf::from_bytes(Bytes::from(bytes)).unwrap();
    assert_eq!(gguf.alignment(), 64);
    assert_eq!(gguf.headers()[0].len(), header_bytes);
    assert_eq!(&gguf.tensor("late").unwrap().data[..], [128, 129, 130]);
    assert_eq!(&gguf.tensor("early").unwrap().data[..], [0, 1, 2, 3, 4]);
    assert_eq!(gguf.tensors()[0].name, "late");
    assert_eq!(gguf.data_bytes(), 8);
}

/// Nothing depends on where the bytes lie in memory.
#[test]
fn unaligned_bytes_read_the_same() {
    let bytes = every_type();
    let aligned = Gguf::from_bytes(Bytes::from(bytes.clone())).unwrap();
    for shift in 1..8 {
        let shifted = [&vec![0; shift][..], &bytes].concat();
        let view = Bytes::from(shifted);
        let gguf = Gguf::from_bytes(view.slice(shift..view.len())).unwrap();
        assert_eq!(gguf.metadata(), aligned.metadata());
        for (a, b) in gguf.tensors().iter().zip(aligned.tensors()) {
            assert_eq!((a.info(), &a.data[..]), (b.info(), &b.data[..]));
        }
    }
}

/// 202,048 tokens and 439,802 merges, as in the published model's files.
#[test]
fn a_real_size_vocabulary_opens_quickly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vocabulary.gguf");
    let mut metadata = Metadata::default();
    let tokens: StringArray = (0..202_048).map(|i| format!("token{i}")).collect();
    let merges: StringArray = (0..439_802).map(|i| format!("tok en{i}")).collect();
    let types = Array::I32(vec![1; 202_048]);
    metadata.insert("tokens", Value::Array(Array::String(tokens)));
    metadata.insert("types", Value::Array(types));
    metadata.insert("merges", Value::Array(Array::String(merges)));
    let writer = Writer::create(&path, &metadata, &[]).unwrap();
    writer.finish().unwrap();

    // The fastest of three: the machine may be busy with other tests.
    let mut fastest = Duration::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        let gguf = Gguf::open(&path).unwrap();
        fastest = fastest.min(start.elapsed());
        let merges = gguf.metadata().strings("merges").unwrap().unwrap();
        assert_eq!(merges.iter().last(), Some("tok en439801"));
    }
    println!("opened in {fastest:?}");
    assert!(fastest < Duration::from_millis(300), "{fastest:?}");
}
