//! Every way in which a file or a path can be wrong, with its exact message.

mod common;

use common::{array, counts, entry, error_of, every_type, file, key, oracle, text, walk};
use gguf::{Bytes, Gguf};
use proptest::prelude::*;
use std::path::Path;
use std::time::{Duration, Instant};

fn check(bytes: Vec<u8>, expected: &str) {
    assert_eq!(error_of(bytes), expected);
}

fn check_path(path: &Path, expected: &str) {
    let error = Gguf::open(path).unwrap_err().to_string();
    assert_eq!(error, format!("{}: {expected}", path.display()));
}

/// A file whose only key is `k` with this value.
fn with_value(value_type: u32, value: &[u8]) -> Vec<u8> {
    file(&[key("k", value_type, value)], &[], 0)
}

/// A file with these tensors and 64 bytes of tensor data.
fn with_tensors(entries: &[Vec<u8>]) -> Vec<u8> {
    file(&[], entries, 64)
}

#[test]
fn magic_and_version() {
    check(
        b"GGML\x03\x00\x00\x00".to_vec(),
        "not a GGUF file: found \"GGML\" at the start, expected \"GGUF\"",
    );
    check(
        vec![0x7f, 0, b'"', 0xff, 0],
        r#"not a GGUF file: found "\x7f\x00\"\xff" at the start, expected "GGUF""#,
    );
    for (version, expected) in [
        (0, "GGUF version: found 0, expected 2 or 3"),
        (1, "GGUF version: found 1, expected 2 or 3"),
        (4, "GGUF version: found 4, expected 2 or 3"),
        (
            0x0300_0000,
            "big-endian GGUF version 3: found big-endian, expected little-endian",
        ),
        (
            0x0100_0000,
            "big-endian GGUF version 1: found big-endian, expected little-endian",
        ),
    ] {
        check(counts(version, 0, 0), expected);
    }
}

/// Counts far beyond the file fail before anything is allocated for them.
#[test]
fn huge_counts() {
    let start = Instant::now();
    let pad = |mut bytes: Vec<u8>| {
        bytes.resize(36, 0);
        bytes
    };
    for _ in 0..1000 {
        check(
            pad(counts(3, 0, 1 << 48)),
            "metadata: found a count of 281474976710656 keys, \
             expected at most 0 in the remaining 12 bytes",
        );
        check(
            pad(counts(3, u64::MAX, 0)),
            "tensor directory: found a count of 18446744073709551615 tensors, \
             expected at most 0 in the remaining 12 bytes",
        );
    }
    check(
        with_value(9, &array(10, 1 << 61, &[0; 15])),
        "metadata key k: found a count of 2305843009213693952 array elements, \
         expected at most 1 in the remaining 15 bytes",
    );
    for ty in [0, 7, 8, 9] {
        let error = error_of(with_value(9, &array(ty, u64::MAX, &[])));
        assert!(
            error.starts_with(
                "metadata key k: found a count of 18446744073709551615 array elements"
            ),
            "{error}"
        );
    }
    check(
        with_value(8, &u64::MAX.to_le_bytes()),
        "metadata key k: cut off at byte 45: found 19 bytes, expected 18446744073709551615",
    );
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_millis(500), "{elapsed:?}");
}

#[test]
fn keys_and_values() {
    check(
        file(&[key("", 0, &[1])], &[], 0),
        "metadata key 1 of 1: found a key of 0 bytes, expected 1 to 65535",
    );
    check(
        file(&[key("x".repeat(65_536), 0, &[1])], &[], 0),
        "metadata key 1 of 1: found a key of 65536 bytes, expected 1 to 65535",
    );
    check(
        file(&[key(b"ab\xffc", 0, &[1])], &[], 0),
        "metadata key 1 of 1: found invalid UTF-8 at byte 34, expected UTF-8 text",
    );
    check(
        file(&[key("k", 0, &[1]), key("k", 4, &[0; 4])], &[], 0),
        "metadata key k: found twice, expected once",
    );
    check(
        with_value(8, &text(b"caf\xc3")),
        "metadata key k: found invalid UTF-8 at byte 48, expected UTF-8 text",
    );
    check(
        with_value(9, &array(8, 2, &[text("ok"), text(b"\x80")].concat())),
        "metadata key k: found invalid UTF-8 at byte 67, expected UTF-8 text",
    );
    check(
        with_value(13, &[0; 8]),
        "metadata key k: found unknown value type 13, expected 0 to 12",
    );
    check(
        with_value(9, &array(99, 0, &[])),
        "metadata key k: found unknown value type 99, expected 0 to 12",
    );
    check(
        with_value(7, &[2]),
        "metadata key k: found a bool of byte 2, expected 0 or 1",
    );
    check(
        with_value(9, &array(7, 2, &[1, 255])),
        "metadata key k: found a bool of byte 255, expected 0 or 1",
    );
    // A name never reaches a terminal raw or at full length.
    check(
        file(&[key("a\x1b[2J\n\u{202e}", 13, &[0; 8])], &[], 0),
        "metadata key a\\u{1b}[2J\\n\\u{202e}: found unknown value type 13, expected 0 to 12",
    );
    let long = error_of(file(&[key("x".repeat(60_000), 13, &[0; 8])], &[], 0));
    assert!(long.len() < 250 && long.contains("xxx..."), "{long}");
}

#[test]
fn nesting() {
    let nest = |levels: usize| {
        let inner = array(4, 1, &[5, 0, 0, 0]);
        (1..levels).fold(inner, |inner, _| array(9, 1, &inner))
    };
    assert_eq!(error_of(with_value(9, &nest(4))), "no error");
    let expected = "metadata key k: found arrays nested deeper than 4 levels";
    check(with_value(9, &nest(5)), expected);
    check(with_value(9, &nest(1000)), expected);
}

/// What takes much more memory than bytes of the file is limited by number.
#[test]
fn many_small_things() {
    let empty = array(4, 0, &[]);
    let nested = |n: usize| array(9, n as u64, &empty.repeat(n));
    assert_eq!(error_of(with_value(9, &nested(65_536))), "no error");
    let expected = "metadata key k: found 65537 arrays in arrays, expected at most 65536";
    check(with_value(9, &nested(65_537)), expected);
    // Over the levels and over the keys.
    let levels = array(9, 2, &nested(32_768).repeat(2));
    let expected = "metadata key k: found 65538 arrays in arrays, expected at most 65536";
    check(with_value(9, &levels), expected);
    let two = [key("a", 9, &nested(65_535)), key("b", 9, &nested(2))];
    check(
        file(&two, &[], 0),
        "metadata key b: found 65537 arrays in arrays, expected at most 65536",
    );

    let keys = |n: usize| -> Vec<Vec<u8>> { (0..n).map(|i| key(i.to_string(), 0, &[1])).collect() };
    assert_eq!(error_of(file(&keys(65_536), &[], 0)), "no error");
    check(
        file(&keys(65_537), &[], 0),
        "metadata: found 65537 keys, expected at most 65536",
    );
    let entries: Vec<Vec<u8>> = (0..131_073)
        .map(|i| entry(i.to_string(), &[8], 0, i * 32))
        .collect();
    let data_bytes = entries.len() * 32;
    assert_eq!(
        error_of(file(&[], &entries[1..], data_bytes + 32)),
        "no error"
    );
    check(
        file(&[], &entries, data_bytes),
        "tensor directory: found 131073 tensors, expected at most 131072",
    );
}

#[test]
fn alignment() {
    let with = |ty: u32, value: &[u8]| file(&[key("general.alignment", ty, value)], &[], 0);
    for found in [0u32, 1, 4, 24, 33, 1 << 21, u32::MAX] {
        check(
            with(4, &found.to_le_bytes()),
            &format!(
                "metadata key general.alignment: found {found}, \
                 expected a power of two from 8 to 1048576"
            ),
        );
    }
    check(
        with(10, &32u64.to_le_bytes()),
        "metadata key general.alignment: found u64 32, expected u32",
    );
    assert_eq!(error_of(with(4, &8u32.to_le_bytes())), "no error");
}

#[test]
fn tensor_names_shapes_and_types() {
    for (bad, expected) in [
        (
            entry("", &[1], 0, 0),
            "tensor directory, entry 1 of 1: found a tensor name of 0 bytes, expected 1 to 127",
        ),
        (
            entry("n".repeat(128), &[1], 0, 0),
            "tensor directory, entry 1 of 1: found a tensor name of 128 bytes, expected 1 to 127",
        ),
        (
            entry(b"n\xc0", &[1], 0, 0),
            "tensor directory, entry 1 of 1: found invalid UTF-8 at byte 33, expected UTF-8 text",
        ),
        (
            entry("t", &[], 0, 0),
            "tensor t: found 0 dimensions, expected 1 to 4",
        ),
        (
            entry("t", &[1, 1, 1, 1, 1], 0, 0),
            "tensor t: found 5 dimensions, expected 1 to 4",
        ),
        (
            entry("t", &[4, 0], 0, 0),
            "tensor t: found shape [4, 0], expected no dimension of 0",
        ),
        (
            entry("t", &[33], 8, 0),
            "tensor t: found rows of 33 elements, expected a multiple of 32 for Q8_0",
        ),
        (
            entry("t", &[128, 2], 12, 0),
            "tensor t: found rows of 128 elements, expected a multiple of 256 for Q4_K",
        ),
        (
            entry("t", &[1 << 32, 1 << 32], 0, 0),
            "tensor t: found shape [4294967296, 4294967296], \
             expected less than 2^63 elements and bytes",
        ),
        (
            entry("t", &[1 << 62], 0, 0),
            "tensor t: found shape [4611686018427387904], \
             expected less than 2^63 elements and bytes",
        ),
        (
            entry("t", &[1], 4, 0),
            "tensor t: found unknown tensor type 4",
        ),
        (
            entry("t", &[1], u32::MAX, 0),
            "tensor t: found unknown tensor type 4294967295",
        ),
    ] {
        check(with_tensors(&[bad]), expected);
    }
    let longest = entry("n".repeat(127), &[1], 0, 0);
    assert_eq!(error_of(with_tensors(&[longest])), "no error");
}

#[test]
fn tensor_places() {
    check(
        with_tensors(&[entry("t", &[1], 0, 0), entry("t", &[1], 0, 32)]),
        "tensor t: found twice, expected once",
    );
    check(
        with_tensors(&[entry("t", &[1], 0, 4)]),
        "tensor t: found offset 4, expected a multiple of 32",
    );
    check(
        with_tensors(&[entry("t", &[17], 0, 0)]),
        "tensor data of t: found 128 bytes in the file, expected at least 132",
    );
    check(
        with_tensors(&[entry("t", &[1], 0, 64)]),
        "tensor data of t: found 128 bytes in the file, expected at least 132",
    );
    check(
        with_tensors(&[entry("t", &[1], 0, u64::MAX - 31)]),
        "tensor data of t: found 128 bytes in the file, \
         expected at least 18446744073709551652",
    );
    check(
        with_tensors(&[entry("b", &[4], 0, 32), entry("a", &[9], 0, 0)]),
        "tensor data of b: found at offset 32, expected at or after 36, the end of a",
    );
    check(
        with_tensors(&[entry("a", &[4], 0, 0), entry("b", &[4], 0, 0)]),
        "tensor data of b: found at offset 0, expected at or after 16, the end of a",
    );
}

/// Where `bytes[..n]` of a valid file is cut, by the message: 0 header,
/// 1 metadata, 2 tensor directory, 3 tensor data.
fn cut_section(whole: &Bytes, n: usize) -> usize {
    let error = Gguf::from_bytes(whole.slice(0..n)).unwrap_err().to_string();
    [
        "header: ",
        "metadata",
        "tensor directory",
        "tensor data of ",
    ]
    .iter()
    .position(|start| error.starts_with(start))
    .unwrap_or_else(|| panic!("cut at {n}: {error}"))
}

/// A file that is cut at any byte is an error that names the cut section.
fn check_every_cut(whole: &Bytes) {
    let gguf = Gguf::from_bytes(whole.clone()).unwrap();
    let header_bytes = gguf.headers()[0].len();
    let last = gguf.tensors().last().unwrap().data.len();
    let padding = last.next_multiple_of(32) - last;
    // The padding of the last tensor may be missing.
    let needed = match whole.len() % 32 {
        0 => whole.len() - padding,
        _ => whole.len(),
    };
    let mut section = 0;
    let mut seen = [0; 4];
    // Every byte of the header and of the first tensors; the rest in steps.
    for n in (0..needed).filter(|n| *n < header_bytes + 4096 || n % 13 == 0 || *n + 64 > needed) {
        let found = cut_section(whole, n);
        assert!(found >= section, "cut at {n}");
        assert_eq!(found == 0, n < 24, "cut at {n}");
        assert_eq!(found == 3, n >= header_bytes, "cut at {n}");
        section = found;
        seen[found] += 1;
    }
    assert!(seen.iter().all(|&n| n > 0), "{seen:?}");
    for n in needed..=whole.len() {
        Gguf::from_bytes(whole.slice(0..n)).unwrap();
    }
}

#[test]
fn truncated_at_every_byte() {
    check_every_cut(&Bytes::from(every_type()));
    let oracle = std::fs::read(oracle("dflash-nano-f32.gguf")).unwrap();
    check_every_cut(&Bytes::from(oracle));
    check(
        b"GG".to_vec(),
        "header: cut off at byte 0: found 2 bytes, expected 4",
    );
    check(
        file(&[], &[entry("t", &[1], 0, 0)], 0),
        "tensor data of t: found 64 bytes in the file, expected at least 68",
    );
}

/// A large file is no permission to use as much memory for its header.
#[test]
fn a_header_without_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.gguf");
    let mut bytes = counts(3, 0, 1);
    bytes.extend(key("k", 8, &(300u64 << 20).to_le_bytes()));
    std::fs::write(&path, bytes).unwrap();
    // The text would lie in a hole of the file, which takes no disk.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(400 << 20).unwrap();
    check_path(
        &path,
        "metadata key k: found a header of more than 268435456 bytes, expected at most that",
    );
}

#[test]
fn paths() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    check_path(folder.path(), "found a directory, expected a file");
    check_path(&at("missing.gguf"), "no such file");
    std::fs::write(at("empty.gguf"), b"").unwrap();
    check_path(&at("empty.gguf"), "the file is empty, expected a GGUF file");
    std::fs::write(at("text.gguf"), b"hello").unwrap();
    check_path(
        &at("text.gguf"),
        "not a GGUF file: found \"hell\" at the start, expected \"GGUF\"",
    );
}

#[cfg(unix)]
#[test]
fn special_files_do_not_block() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let made = std::process::Command::new("mkfifo")
        .arg(at("fifo.gguf"))
        .status()
        .unwrap();
    assert!(made.success());
    check_path(&at("fifo.gguf"), "found a FIFO, expected a file");
    let _socket = std::os::unix::net::UnixListener::bind(at("socket.gguf")).unwrap();
    check_path(&at("socket.gguf"), "found a socket, expected a file");
    check_path(Path::new("/dev/zero"), "found a device, expected a file");
}

#[cfg(unix)]
#[test]
fn unreadable_files() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let loops = folder.path().join("loop.gguf");
    std::os::unix::fs::symlink(&loops, &loops).unwrap();
    check_path(
        &loops,
        "cannot be read: Too many levels of symbolic links (os error 40)",
    );
    let locked = folder.path().join("locked.gguf");
    std::fs::write(&locked, every_type()).unwrap();
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o000)).unwrap();
    // The superuser may read it all the same; then it must open.
    match std::fs::read(&locked) {
        Ok(_) => assert!(Gguf::open(&locked).is_ok()),
        Err(_) => check_path(&locked, "cannot be read: Permission denied (os error 13)"),
    }
    // What not even the superuser can open: a path through a file, too long a
    // name.
    check_path(
        &locked.join("inside.gguf"),
        "cannot be read: Not a directory (os error 20)",
    );
    check_path(
        &folder.path().join("n".repeat(300)),
        "cannot be read: File name too long (os error 36)",
    );
}

/// Opens whatever the bytes are; if they open, all of them can be read.
fn survive(bytes: Vec<u8>) {
    if let Ok(gguf) = Gguf::from_bytes(Bytes::from(bytes)) {
        walk(&gguf);
    }
}

fn flip(mut bytes: Vec<u8>, flips: &[(prop::sample::Index, u8)]) -> Vec<u8> {
    for (at, mask) in flips {
        let at = at.index(bytes.len());
        bytes[at] ^= mask;
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn flipped_bytes_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1..=u8::MAX), 1..6),
    ) {
        survive(flip(every_type(), &flips));
    }

    #[test]
    fn flipped_bytes_of_a_real_header_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1..=u8::MAX), 1..6),
    ) {
        let whole = Gguf::open(&oracle("text-nano-q8_0.gguf")).unwrap();
        survive(flip(whole.headers()[0].to_vec(), &flips));
    }

    #[test]
    fn any_bytes_never_panic(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        survive([&b"GGUF\x03\0\0\0"[..], &tail].concat());
        survive(tail);
    }
}
