//! What is written reads back equal, or nothing is left under the name.

mod common;

use common::{ORACLE_FILES, every_type, oracle};
use gguf::{Array, Bytes, Error, Gguf, Metadata, TensorInfo, TensorType, Value, Writer};
use proptest::prelude::*;
use std::path::Path;

fn info(name: &str, ty: TensorType, shape: &[u64]) -> TensorInfo {
    TensorInfo {
        name: name.to_string(),
        ty,
        shape: shape.to_vec(),
    }
}

/// Writes everything of `gguf` to `path`, tensors in chunks of `chunk_bytes`.
fn copy(gguf: &Gguf, path: &Path, chunk_bytes: usize) {
    let infos: Vec<TensorInfo> = gguf.tensors().iter().map(|t| t.info()).collect();
    let mut writer = Writer::create(path, gguf.metadata(), &infos).unwrap();
    let file_bytes = writer.file_bytes();
    for tensor in gguf.tensors() {
        for chunk in tensor.data.chunks(chunk_bytes) {
            writer.append(&tensor.name, chunk).unwrap();
        }
    }
    writer.finish().unwrap();
    assert_eq!(std::fs::metadata(path).unwrap().len(), file_bytes);
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// The layout is the one of the package that wrote the oracle's files.
#[test]
fn oracle_files_are_written_again_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("copy.gguf");
    for (name, chunk_bytes) in ORACLE_FILES
        .iter()
        .zip([1 << 20, 1000, 4096, 33].iter().cycle())
    {
        copy(&Gguf::open(&oracle(name)).unwrap(), &path, *chunk_bytes);
        let same = std::fs::read(&path).unwrap() == std::fs::read(oracle(name)).unwrap();
        assert!(same, "{name}");
    }
    assert_eq!(names_in(folder.path()), ["copy.gguf"]);
}

#[test]
fn every_type_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("copy.gguf");
    let original = Gguf::from_bytes(Bytes::from(every_type())).unwrap();
    copy(&original, &path, 5);
    let copied = Gguf::open(&path).unwrap();
    assert_eq!(copied.headers()[0][..], original.headers()[0][..]);
    for (a, b) in copied.tensors().iter().zip(original.tensors()) {
        assert_eq!((a.info(), &a.data[..]), (b.info(), &b.data[..]));
    }
}

#[cfg(unix)]
#[test]
fn a_written_file_has_the_permissions_of_a_usual_one() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let usual = folder.path().join("usual");
    let written = folder.path().join("written.gguf");
    std::fs::write(&usual, b"").unwrap();
    let writer = Writer::create(&written, &Metadata::default(), &[]).unwrap();
    writer.finish().unwrap();
    let mode = |path| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&written), mode(&usual));
}

/// Runs `steps` on a writer of tensors a (4 bytes) and b (8 bytes); they must
/// fail with `expected` and leave the folder as it was.
fn check_steps(steps: impl FnOnce(Writer) -> Result<(), Error>, expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, b"as it was").unwrap();
    let tensors = [
        info("a", TensorType::I8, &[4]),
        info("b", TensorType::F32, &[1, 2]),
    ];
    let writer = Writer::create(&path, &Metadata::default(), &tensors).unwrap();
    assert_eq!(names_in(folder.path()).len(), 2, "the temporary file");
    let error = steps(writer).unwrap_err();
    assert_eq!(error.to_string(), expected);
    assert_eq!(names_in(folder.path()), ["model.gguf"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"as it was");
}

#[test]
fn tensors_come_in_order_and_whole() {
    check_steps(
        |mut w| w.append("b", &[0; 8]),
        "tensor b: cannot be written now, expected tensor a",
    );
    check_steps(
        |mut w| {
            w.append("a", &[0; 3])?;
            w.append("b", &[0; 8])
        },
        "tensor data of a: found 3 bytes to write, expected 4",
    );
    check_steps(
        |mut w| {
            w.append("a", &[0; 3])?;
            w.append("a", &[0; 2])
        },
        "tensor data of a: found 5 bytes to write, expected 4",
    );
    check_steps(
        |mut w| {
            w.append("a", &[0; 4])?;
            w.append("b", &[0; 8])?;
            w.append("b", &[0; 8])
        },
        "tensor b: cannot be written now, expected the end of the file",
    );
    check_steps(
        Writer::finish,
        "tensor data of a: found 0 bytes to write, expected 4",
    );
    check_steps(
        |mut w| {
            w.append("a", &[0; 4])?;
            w.append("b", &[0; 7])?;
            w.finish()
        },
        "tensor data of b: found 7 bytes to write, expected 8",
    );
}

/// `create` must fail with `expected` and leave nothing.
fn check_create(metadata: &Metadata, tensors: &[TensorInfo], expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let error = Writer::create(&path, metadata, tensors).unwrap_err();
    assert_eq!(error.to_string(), expected);
    assert!(names_in(folder.path()).is_empty());
}

#[test]
fn what_no_reader_takes_is_not_written() {
    let with = |key: &str, value: Value| {
        let mut metadata = Metadata::default();
        metadata.insert(key, value);
        metadata
    };
    let deep = (0..4).fold(Array::U8(vec![1]), |inner, _| Array::Array(vec![inner]));
    for (metadata, expected) in [
        (
            with("", Value::U8(1)),
            "metadata key 1 of 1: found a key of 0 bytes, expected 1 to 65535",
        ),
        (
            with("deep", Value::Array(deep)),
            "metadata key deep: found arrays nested deeper than 4 levels",
        ),
        (
            with(
                "many",
                Value::Array(Array::Array(vec![Array::Array(Vec::new()); 65_537])),
            ),
            "metadata key many: found 65537 arrays in arrays, expected at most 65536",
        ),
        (
            (0..65_537).map(|i| (i.to_string(), Value::U8(1))).fold(
                Metadata::default(),
                |mut metadata, (key, value)| {
                    metadata.insert(key, value);
                    metadata
                },
            ),
            "metadata: found 65537 keys, expected at most 65536",
        ),
        (
            with("general.alignment", Value::U32(48)),
            "metadata key general.alignment: found 48, expected a power of two from 8 to 1048576",
        ),
        (
            with("large", Value::Array(Array::U8(vec![0; 257 << 20]))),
            "metadata and tensor directory: found a header of more than 268435456 bytes, \
             expected at most that",
        ),
    ] {
        check_create(&metadata, &[], expected);
    }
    let ty = TensorType::F32;
    for (tensors, expected) in [
        (
            vec![info("", ty, &[1])],
            "tensor directory, entry 1 of 1: found a tensor name of 0 bytes, expected 1 to 127",
        ),
        (
            vec![info("t", ty, &[1]); 131_073],
            "tensor directory: found 131073 tensors, expected at most 131072",
        ),
        (
            vec![info("t", ty, &[1]), info("t", ty, &[2])],
            "tensor t: found twice, expected once",
        ),
        (
            vec![info("t", ty, &[])],
            "tensor t: found 0 dimensions, expected 1 to 4",
        ),
        (
            vec![info("t", ty, &[3, 0])],
            "tensor t: found shape [3, 0], expected no dimension of 0",
        ),
        (
            vec![info("t", TensorType::Q6_K, &[32])],
            "tensor t: found rows of 32 elements, expected a multiple of 256 for Q6_K",
        ),
        (
            vec![info("t", ty, &[1 << 60]), info("u", ty, &[1 << 60])],
            "tensor u: found shape [1152921504606846976], \
             expected less than 2^63 elements and bytes",
        ),
    ] {
        check_create(&Metadata::default(), &tensors, expected);
    }
}

#[test]
fn bad_targets() {
    let folder = tempfile::tempdir().unwrap();
    let create = |path: &Path| {
        let error = Writer::create(path, &Metadata::default(), &[]).unwrap_err();
        let message = error.to_string();
        let rest = message.strip_prefix(&format!("{}: ", path.display()));
        rest.unwrap_or_else(|| panic!("{message}")).to_string()
    };
    assert_eq!(create(folder.path()), "found a directory, expected a file");
    #[cfg(target_os = "linux")]
    assert_eq!(
        create(Path::new("/dev/null")),
        "found a device, expected a file"
    );
    let missing = create(&folder.path().join("no/such/folder.gguf"));
    assert!(
        missing.starts_with("cannot be written: No such file"),
        "{missing}"
    );
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z.]{0,12}", "\\PC{0,6}"]
}

fn array() -> impl Strategy<Value = Array> {
    use prop::collection::vec;
    let leaf = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..9).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        vec(any::<f32>(), 0..9).prop_map(Array::F32),
        vec(any::<f64>(), 0..9).prop_map(Array::F64),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        vec(text(), 0..9).prop_map(|v| Array::String(v.iter().collect())),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| vec(inner, 0..4).prop_map(Array::Array))
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f32>().prop_map(Value::F32),
        any::<f64>().prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        text().prop_map(Value::String),
        array().prop_map(Value::Array),
    ]
}

fn tensor() -> impl Strategy<Value = (TensorType, Vec<u64>)> {
    let ty = prop::sample::select(TensorType::ALL);
    (ty, prop::collection::vec(1..5u64, 1..=4)).prop_map(|(ty, mut shape)| {
        shape[0] *= ty.block_len() as u64;
        (ty, shape)
    })
}

proptest! {
    // Each case waits twice for the disk.
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn what_is_written_reads_back_equal(
        entries in prop::collection::vec((text(), value()), 0..12),
        tensors in prop::collection::vec(tensor(), 0..6),
        log_alignment in 3..12u32,
        fill in any::<u8>(),
        chunk_bytes in 1..5000usize,
    ) {
        let mut metadata = Metadata::default();
        metadata.insert("general.alignment", Value::U32(1 << log_alignment));
        for (key, value) in entries {
            metadata.insert(format!("k.{key}"), value);
        }
        let infos: Vec<TensorInfo> = tensors
            .iter()
            .enumerate()
            .map(|(i, (ty, shape))| info(&format!("t.{i}"), *ty, shape))
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let data = |i: usize| {
            let bytes = infos[i].data_bytes().unwrap() as usize;
            vec![fill.wrapping_add(i as u8); bytes]
        };
        let mut writer = Writer::create(&path, &metadata, &infos).unwrap();
        for (i, info) in infos.iter().enumerate() {
            for chunk in data(i).chunks(chunk_bytes) {
                writer.append(&info.name, chunk).unwrap();
            }
        }
        writer.finish().unwrap();

        let gguf = Gguf::open(&path).unwrap();
        prop_assert_eq!(gguf.alignment(), 1 << log_alignment);
        // Debug forms, so that NaN equals itself.
        prop_assert_eq!(format!("{:?}", gguf.metadata()), format!("{metadata:?}"));
        prop_assert_eq!(gguf.tensors().len(), infos.len());
        for (i, tensor) in gguf.tensors().iter().enumerate() {
            prop_assert_eq!(&tensor.info(), &infos[i]);
            prop_assert_eq!(&tensor.data[..], &data(i)[..]);
        }
        let again = folder.path().join("again.gguf");
        copy(&gguf, &again, 1 << 20);
        prop_assert!(std::fs::read(&path).unwrap() == std::fs::read(&again).unwrap());
    }
}

/// The test process runs itself once more under a limit on the size of files,
/// which fails writes in the same way as a full disk.
#[cfg(target_os = "linux")]
mod disk_full {
    use super::{info, names_in};
    use gguf::{Metadata, TensorType, Writer};

    /// In the folder that the child works in: says that it is the child.
    const MARK: &str = "this-process-has-a-file-limit";

    #[test]
    fn nothing_half_written_stays() {
        if std::path::Path::new(MARK).exists() {
            return write_too_much();
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(MARK), b"").unwrap();
        std::fs::write(folder.path().join("model.gguf"), b"as it was").unwrap();
        // The limit counts blocks of 512 bytes; its signal would end the child.
        let output = std::process::Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f 4096; exec \"$@\"", "sh"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "disk_full::nothing_half_written_stays"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("1 passed"), "{said}");
        let mut names = names_in(folder.path());
        names.sort();
        assert_eq!(names, ["model.gguf", MARK]);
        let model = std::fs::read(folder.path().join("model.gguf")).unwrap();
        assert_eq!(model, b"as it was");
    }

    fn write_too_much() {
        let tensors = [info("t", TensorType::I8, &[16 << 20])];
        let mut writer =
            Writer::create("model.gguf".as_ref(), &Metadata::default(), &tensors).unwrap();
        let chunk = vec![1; 1 << 20];
        let error = (0..16)
            .find_map(|_| writer.append("t", &chunk).err())
            .expect("a write beyond the limit fails");
        assert_eq!(
            error.to_string(),
            "model.gguf: cannot be written: File too large (os error 27)"
        );
        let again = writer.append("t", &[1]).unwrap_err();
        assert_eq!(
            again.to_string(),
            "model.gguf: cannot be written: an earlier write failed"
        );
        drop(writer);
        let mut names = names_in(".".as_ref());
        names.sort();
        assert_eq!(names, ["model.gguf", MARK]);
    }
}
