//! Split models: any part opens all, and what does not fit is named.

mod common;

use common::oracle;
use gguf::{Bytes, Gguf, Metadata, TensorInfo, TensorView, Value, Writer};
use std::path::{Path, PathBuf};

fn part_path(folder: &Path, part: usize, count: usize) -> PathBuf {
    folder.join(format!("model-v1-{part:05}-of-{count:05}.gguf"))
}

fn write(path: &Path, metadata: &Metadata, tensors: &[TensorView]) {
    let infos: Vec<TensorInfo> = tensors.iter().map(TensorView::info).collect();
    let mut writer = Writer::create(path, metadata, &infos).unwrap();
    for tensor in tensors {
        writer.append(&tensor.name, &tensor.data).unwrap();
    }
    writer.finish().unwrap();
}

/// The keys of part `part` (from 1), as they should be.
fn split_keys(metadata: &mut Metadata, part: usize, count: usize, n_tensors: usize) {
    metadata.insert("split.no", Value::U16(part as u16 - 1));
    metadata.insert("split.count", Value::U16(count as u16));
    metadata.insert("split.tensors.count", Value::I32(n_tensors as i32));
}

/// A model in three parts, which `change` may spoil before it is written.
struct Split {
    folder: tempfile::TempDir,
    whole: Gguf,
}

impl Split {
    fn write(change: impl Fn(usize, &mut Metadata, &mut Vec<TensorView>)) -> Split {
        let folder = tempfile::tempdir().unwrap();
        let whole = Gguf::open(&oracle("dflash-nano-f32.gguf")).unwrap();
        let n_tensors = whole.tensors().len();
        for (part, range) in (1..).zip([0..10, 10..10, 10..n_tensors]) {
            let mut metadata = match part {
                1 => whole.metadata().clone(),
                _ => Metadata::default(),
            };
            split_keys(&mut metadata, part, 3, n_tensors);
            let mut tensors = whole.tensors()[range].to_vec();
            change(part, &mut metadata, &mut tensors);
            write(&part_path(folder.path(), part, 3), &metadata, &tensors);
        }
        Split { folder, whole }
    }

    fn path(&self, part: usize) -> PathBuf {
        part_path(self.folder.path(), part, 3)
    }

    /// Opening part `opened` must blame part `blamed`.
    fn check(&self, opened: usize, blamed: usize, expected: &str) {
        let error = Gguf::open(&self.path(opened)).unwrap_err().to_string();
        let path = self.path(blamed);
        assert_eq!(error, format!("{}: {expected}", path.display()));
    }
}

#[test]
fn any_part_opens_all() {
    let split = Split::write(|_, _, _| ());
    for part in 1..=3 {
        let gguf = Gguf::open(&split.path(part)).unwrap();
        assert_eq!(gguf.paths(), [split.path(1), split.path(2), split.path(3)]);
        assert_eq!(gguf.headers().len(), 3);
        assert_eq!(gguf.data_bytes(), split.whole.data_bytes());
        let sizes = gguf.paths().iter().map(|p| p.metadata().unwrap().len());
        assert_eq!(gguf.file_bytes(), sizes.sum::<u64>());
        assert_eq!(
            gguf.metadata().str("general.architecture").unwrap(),
            Some("dflash")
        );
        assert_eq!(gguf.metadata().u32("split.no").unwrap(), Some(0));
        assert_eq!(gguf.tensors().len(), split.whole.tensors().len());
        for (a, b) in gguf.tensors().iter().zip(split.whole.tensors()) {
            assert_eq!((a.info(), &a.data[..]), (b.info(), &b.data[..]));
            assert_eq!(gguf.tensor(&a.name).unwrap().data[..], b.data[..]);
        }
    }
}

#[test]
fn a_missing_part_is_named() {
    let split = Split::write(|_, _, _| ());
    std::fs::remove_file(split.path(2)).unwrap();
    split.check(1, 2, "part 2 of 3 of the split model is missing");
    split.check(3, 2, "part 2 of 3 of the split model is missing");
    split.check(2, 2, "no such file");
    std::fs::write(split.path(2), b"").unwrap();
    split.check(1, 2, "the file is empty, expected a GGUF file");
}

#[test]
fn keys_agree_with_the_names() {
    let spoil = |wrong: usize, key: &'static str, value: Option<Value>| {
        Split::write(move |part, metadata, _| {
            if part == wrong {
                match &value {
                    Some(value) => metadata.insert(key, value.clone()),
                    None => metadata.remove(key),
                };
            }
        })
    };
    spoil(2, "split.no", Some(Value::U16(2))).check(
        1,
        2,
        "metadata key split.no: found 2, expected 1",
    );
    spoil(3, "split.count", Some(Value::U16(4))).check(
        1,
        3,
        "metadata key split.count: found 4, expected 3",
    );
    spoil(1, "split.count", None).check(
        1,
        1,
        "metadata key split.count: found nothing, expected 3",
    );
    spoil(1, "split.no", None).check(2, 1, "metadata key split.no: found nothing, expected 0");
    spoil(1, "split.no", Some(Value::String("0".into()))).check(
        1,
        1,
        "metadata key split.no: found string, expected u64",
    );
    spoil(1, "split.tensors.count", Some(Value::I32(26))).check(
        3,
        1,
        "metadata key split.tensors.count: found 26, expected 25",
    );
    spoil(3, "split.tensors.count", Some(Value::I32(24))).check(
        1,
        3,
        "metadata key split.tensors.count: found 24, expected 25",
    );
    spoil(1, "split.tensors.count", None).check(
        1,
        1,
        "metadata key split.tensors.count: found nothing, expected 25",
    );
    // Only the first part must say how many tensors there are.
    let split = spoil(3, "split.tensors.count", None);
    assert!(Gguf::open(&split.path(1)).is_ok());
}

#[test]
fn a_tensor_in_two_parts() {
    let split = Split::write(|part, metadata, tensors| {
        if part == 2 {
            let whole = Gguf::open(&oracle("dflash-nano-f32.gguf")).unwrap();
            tensors.push(whole.tensors()[0].clone());
        }
        metadata.insert("split.tensors.count", Value::I32(26));
    });
    split.check(1, 2, "tensor fc.weight: found twice, expected once");
}

#[test]
fn a_part_under_another_name() {
    let split = Split::write(|_, _, _| ());
    let expected = "found one part of a split model of 3 parts, \
                    expected its name to end in -0000x-of-00003.gguf";
    let renamed = split.folder.path().join("model.gguf");
    std::fs::copy(split.path(1), &renamed).unwrap();
    let error = Gguf::open(&renamed).unwrap_err().to_string();
    assert_eq!(error, format!("{}: {expected}", renamed.display()));
    let bytes = Bytes::from(std::fs::read(&renamed).unwrap());
    let error = Gguf::from_bytes(bytes).unwrap_err().to_string();
    assert_eq!(error, expected);
}

/// Names that only look like parts are whole files.
#[test]
fn other_names_are_whole_files() {
    let folder = tempfile::tempdir().unwrap();
    let whole = oracle("dflash-nano-f32.gguf");
    for name in [
        "model-00001-of-00001.gguf",
        "model-1-of-3.gguf",
        "model-00000-of-00003.gguf",
        "model-00004-of-00003.gguf",
        "model-000001-of-00003.gguf",
        "model-00001-of-00003.bin",
        "00001-of-00003.gguf",
        "model-0000a-of-00003.gguf",
    ] {
        let path = folder.path().join(name);
        std::fs::copy(&whole, &path).unwrap();
        let gguf = Gguf::open(&path).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(gguf.paths(), [path]);
    }
}
