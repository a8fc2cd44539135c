//! Where a model's bytes lie: mapped, brought in beforehand, copied, locked;
//! and a file that is cut while it is mapped.

use gguf::{Bytes, Error, Gguf, TensorInfo, TensorType, Writer};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

/// Bytes of the second tensor: more than one report of progress.
const LARGE_BYTES: usize = 33 << 20;

/// Writes a file with two tensors.
fn write(folder: &Path) -> PathBuf {
    let path = folder.join("model.gguf");
    let tensor = |name: &str, elements: usize| TensorInfo {
        name: name.to_string(),
        ty: TensorType::I8,
        shape: vec![elements as u64],
    };
    let tensors = [tensor("small", 96), tensor("large", LARGE_BYTES)];
    let metadata = gguf::Metadata::default();
    let mut writer = Writer::create(&path, &metadata, &tensors).unwrap();
    writer.append("small", &[7; 96]).unwrap();
    writer.append("large", &vec![9; LARGE_BYTES]).unwrap();
    writer.finish().unwrap();
    path
}

#[test]
fn a_copy_in_memory_has_the_same_bytes_and_outlives_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path());
    let mut gguf = Gguf::open(&path).unwrap();
    assert!(gguf.files().are_mapped());
    let mapped: Vec<Bytes> = gguf.tensors().iter().map(|t| t.data.clone()).collect();
    let headers: Vec<u8> = gguf.headers()[0].to_vec();

    let mut reports = Vec::new();
    gguf.read_into_memory(&mut |n| reports.push(n)).unwrap();
    assert_eq!(reports.iter().sum::<u64>(), gguf.file_bytes());
    assert!(reports.len() > 1, "progress in one step");
    assert!(!gguf.files().are_mapped());
    for (tensor, mapped) in gguf.tensors().iter().zip(&mapped) {
        assert_eq!(*tensor.data, **mapped, "{}", tensor.name);
        assert_ne!(tensor.data.as_ptr(), mapped.as_ptr(), "{}", tensor.name);
    }
    assert_eq!(*gguf.headers()[0], *headers);

    drop(mapped);
    OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(100)
        .unwrap();
    gguf.files().check().expect("a copy needs no file");
    assert!(gguf.tensor("large").unwrap().data.iter().all(|&b| b == 9));
}

#[test]
fn a_cut_file_is_noticed_and_names_the_tensor() {
    for (cut, tensor) in [(1, "large"), (LARGE_BYTES as u64 + 40, "small")] {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path());
        let gguf = Gguf::open(&path).unwrap();
        gguf.files().check().expect("as it was opened");
        let file = OpenOptions::new().append(true).open(&path).unwrap();
        file.set_len(gguf.file_bytes() + 10).unwrap();
        gguf.files().check().expect("longer takes nothing away");
        let found = gguf.file_bytes() - cut;
        file.set_len(found).unwrap();
        let error = gguf.files().check().expect_err("it was cut");
        assert!(matches!(&error, Error::FileCut { .. }), "{error}");
        let text = format!(
            "{}: the file was cut to {found} bytes while in use, expected {}: tensor {tensor} is \
             no longer whole",
            path.display(),
            gguf.file_bytes()
        );
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn bringing_in_reports_all_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&write(folder.path())).unwrap();
    let mut reports = Vec::new();
    gguf.files().prefetch(&mut |n| reports.push(n));
    assert_eq!(reports.iter().sum::<u64>(), gguf.file_bytes());
    assert!(reports.len() > 1, "progress in one step");
}

#[cfg(target_os = "linux")]
/// Containers often allow little locked memory: both outcomes are right, if the
/// refusal says what to change.
#[test]
fn locking_works_or_says_what_to_raise() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&write(folder.path())).unwrap();
    match gguf.files().lock() {
        Ok(()) => assert!(locked_kib() >= LARGE_BYTES as u64 / 1024),
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("cannot lock") && text.contains("ulimit -l"),
                "{text}"
            );
        }
    }
}

#[cfg(target_os = "linux")]
/// Locked memory of this process, as Linux tells it.
fn locked_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmLck:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
