//! `muser synth` from outside: files load and compute, a seed means the same
//! bytes, and nothing half-written stays under the final name.

use gguf::Gguf;
use model::{
    Batch, DrafterConfig, Forward, KvType, Model, Options, PagePool, Reference, RowOutput,
    SequencePages, Want, WindowConvention, vocabulary_digest,
};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;
use text::{Special, Tokenizer};

/// Lengths of a file that takes no time.
const TINY: [&str; 14] = [
    "--layers", "4", "--embd", "256", "--ff", "512", "--heads", "2", "--vocab", "512", "--ctx",
    "256", "--window", "16",
];

fn muser(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muser"));
    command.args(args).output().expect("muser starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Writes a file; panics with what muser says if that fails.
fn synth(folder: &TempDir, name: &str, args: &[&str]) -> PathBuf {
    let path = folder.path().join(name);
    let mut all = vec!["synth", path.to_str().expect("UTF-8")];
    all.extend(args);
    let output = muser(&all);
    assert!(output.status.success(), "{}", text(&output.stderr));
    path
}

/// Names of all files in a folder, hidden ones too.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    entries
        .map(|e| {
            e.expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        })
        .collect()
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Runs a few tokens; gives the logits of the last.
fn logits(file: &Gguf) -> Vec<f32> {
    let options = Options {
        kv: KvType::F32,
        kv_bytes: 64 << 20,
    };
    let mut model = Model::load(Reference::new(), file, options).unwrap_or_else(|e| panic!("{e}"));
    let capacity = model.capacity();
    let mut pool = PagePool::new(capacity.layout, capacity.max_slabs);
    let mut pages = SequencePages::new();
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap_or_else(|e| panic!("{e}"));
    let tokens = tokenizer.encode(
        "Once upon a time there were three small bears.",
        Special::Text,
    );
    let mut batch = Batch::default();
    batch.push(0, 0, &tokens);
    batch.want_last();
    let copies = pages
        .reserve(&mut pool, tokens.len() as u32)
        .unwrap_or_else(|e| panic!("{e}"));
    assert!(copies.is_empty());
    let outputs = model
        .pass(&batch, &[&pages], &[Want::Full])
        .unwrap_or_else(|e| panic!("{e}"));
    match outputs.into_iter().next() {
        Some(RowOutput::Full(logits)) => logits,
        other => panic!("found {other:?}"),
    }
}

/// Every graph and mix computes finite, varied logits.
#[test]
fn files_compute() {
    let folder = folder();
    for args in [
        vec![],
        vec!["--mix", "q4_k_m"],
        vec!["--mix", "f32"],
        vec!["--mix", "f16"],
        vec!["--mix", "bf16"],
        vec!["--mix", "q4_0", "--head", "q5_k"],
        vec!["--mix", "q6_k"],
        vec!["--mix", "iq3_s"],
        vec!["--mix", "iq2_xxs"],
        vec!["--mix", "nvfp4"],
        vec!["--arch", "llama"],
    ] {
        let mut all = TINY.to_vec();
        all.extend(&args);
        all.push("--force");
        let file = Gguf::open(&synth(&folder, "a.gguf", &all)).expect("a readable file");
        let logits = logits(&file);
        assert_eq!(logits.len(), 512);
        assert!(logits.iter().all(|v| v.is_finite()), "{args:?}");
        let n = logits.len() as f32;
        let mean = logits.iter().sum::<f32>() / n;
        let deviation = (logits.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n).sqrt();
        assert!(
            (0.3..3.0).contains(&deviation),
            "{args:?}: deviation {deviation}"
        );
    }
}

#[test]
fn nano_is_the_bundled_shape() {
    let folder = folder();
    let made = Gguf::open(&synth(&folder, "a.gguf", &[])).expect("a readable file");
    let bundled = testing::open(&testing::bundled("nano-glimmer-q8_0.gguf"));
    assert_eq!(made.tensors().len(), bundled.tensors().len());
    for tensor in bundled.tensors() {
        let other = made.tensor(&tensor.name).expect("the same names");
        assert_eq!(
            (other.ty, &other.shape),
            (tensor.ty, &tensor.shape),
            "{}",
            tensor.name
        );
    }
    let own = ["general.name", "general.description", "general.license"];
    for (key, value) in bundled
        .metadata()
        .iter()
        .filter(|(key, _)| !own.contains(key))
    {
        assert!(made.metadata().get(key) == Some(value), "{key}");
    }
    let q_norm = made.tensor("blk.3.attn_q_norm.weight").expect("a norm");
    assert!(
        q_norm
            .data
            .as_chunks::<4>()
            .0
            .iter()
            .all(|&v| f32::from_le_bytes(v) == 3.87)
    );
}

/// A drafter fits the model of its width and vocabulary, whatever the seeds.
#[test]
fn drafters_fit() {
    let folder = folder();
    let target = Gguf::open(&synth(&folder, "a.gguf", &["--seed", "1"])).expect("a readable file");
    let drafter = synth(
        &folder,
        "b.gguf",
        &["--shape", "drafter-nano", "--seed", "2"],
    );
    let drafter = Gguf::open(&drafter).expect("a readable file");
    assert_eq!(
        vocabulary_digest(target.metadata()).expect("a vocabulary"),
        vocabulary_digest(drafter.metadata()).expect("a vocabulary")
    );
    let options = Options::default();
    let mut model = Model::load(Reference::new(), &target, options).expect("a good model");
    let config = model.attach_drafter(&drafter, WindowConvention::default());
    let config: DrafterConfig = config.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.target_places, [2, 5, 7]);
    assert_eq!((config.block_size, config.mask_token), (16, 4095));
}

#[test]
fn a_seed_means_the_same_bytes() {
    let folder = folder();
    let read = |name: &str, seed: &str| {
        let mut args = TINY.to_vec();
        args.extend(["--mix", "q4_k_m", "--seed", seed]);
        std::fs::read(synth(&folder, name, &args)).expect("a readable file")
    };
    let first = read("a.gguf", "5");
    assert!(first == read("b.gguf", "5"));
    assert!(first != read("c.gguf", "6"));
    // Another digest means other files for the seeds of earlier measurements.
    let file = Gguf::from_bytes(first.into()).expect("a readable file");
    let data = file.tensors().iter().flat_map(|tensor| tensor.data.iter());
    let fnv = data.fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    assert_eq!(format!("{fnv:016x}"), "ba39bc369afa6999");
}

#[test]
fn dry_run_shows_the_published_structure() {
    let folder = folder();
    let path = folder.path().join("a.gguf");
    let path = path.to_str().expect("UTF-8");
    let output = muser(&[
        "synth",
        path,
        "--shape",
        "30b",
        "--head",
        "q5_k",
        "--dry-run",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<Vec<&str>> = text(&output.stdout)
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    for expected in [
        "blk.N.ffn_down.weight Q6_K 19968 x 6656 26 2,834,657,280 0-5, 8, 11, 14, 17, 20, 23, 26, \
         29, 32, 35, 38, 41, 44-51",
        "blk.N.ffn_down.weight Q4_K 19968 x 6656 26 1,943,764,992 6-7, 9-10, 12-13, 15-16, 18-19, \
         21-22, 24-25, 27-28, 30-31, 33-34, 36-37, 39-40, 42-43",
        "output.weight Q5_K 6656 x 202048 1 924,571,648",
        "total 731 tensors 27,854,794,240 parameters 16,743,567,360 bytes",
        "4.81 bits per weight",
    ] {
        let expected: Vec<&str> = expected.split_whitespace().collect();
        assert!(
            lines.contains(&expected),
            "{expected:?} in\n{}",
            text(&output.stdout)
        );
    }
    assert!(names(folder.path()).is_empty());
}

/// The message of a call that fails.
fn failure(args: &[&str]) -> String {
    let output = muser(args);
    assert!(!output.status.success(), "{args:?} succeeded");
    text(&output.stderr).trim_end().to_string()
}

#[test]
fn refusals() {
    let folder = folder();
    let path = folder.path().join("a.gguf");
    let path = path.to_str().expect("UTF-8");
    for (args, expected) in [
        (
            vec!["--embd", "300"],
            "error: --embd: found 300, expected a multiple of 32, the length of a block of Q8_0",
        ),
        (
            vec!["--ff", "300"],
            "error: --ff: found 300, expected a multiple of 32, the length of a block of Q8_0",
        ),
        (
            vec!["--heads", "2", "--head-dim", "24"],
            "error: --heads times --head-dim: found 48, expected a multiple of 32, the length of a \
             block of Q8_0",
        ),
        (
            vec!["--heads", "3"],
            "error: --heads-kv: found 2, expected a divisor of the 3 query heads",
        ),
        (
            vec!["--head-dim", "33"],
            "error: --head-dim: found 33, expected an even number",
        ),
        (
            vec!["--embd", "8388608", "--ff", "8388608", "--layers", "1000"],
            "error: the tensors have more bytes than a file can: expected less than 2^56",
        ),
        (
            vec!["--vocab", "400", "--merges", "17"],
            "error: --merges: found 17, expected at most 16 for a vocabulary of 400 tokens",
        ),
        (
            vec!["--target-layers", "1"],
            "error: --target-layers: only a drafter reads layers of a target",
        ),
        (
            vec!["--shape", "drafter-nano", "--head", "q8_0"],
            "error: --head: a drafter has no head of its own",
        ),
        (
            vec!["--shape", "drafter-nano", "--arch", "llama"],
            "error: --arch: the shape is a drafter's, whose graph is dflash",
        ),
    ] {
        let mut all = vec!["synth", path];
        all.extend(&args);
        assert_eq!(failure(&all), expected, "{args:?}");
        assert!(names(folder.path()).is_empty(), "{args:?}");
    }
    let message = failure(&["synth", path, "--mix", "q9"]);
    let expected =
        "error: invalid value 'q9' for '--mix <MIX>': expected q4_k_m or one of f32, f16,";
    assert!(message.starts_with(expected), "{message}");
}

/// What no number of its kind can be is refused before anything is made.
#[test]
fn numbers_outside_their_ranges() {
    for (flag, value, range) in [
        ("--layers", "0", "1..=1024"),
        ("--layers", "1025", "1..=1024"),
        ("--embd", "9223372036854775807", "1..=16777216"),
        ("--embd", "18446744073709551615", "1..=16777216"),
        ("--ff", "0", "1..=16777216"),
        ("--heads", "65537", "1..=65536"),
        ("--heads-kv", "0", "1..=65536"),
        ("--head-dim", "4294967296", "1..=65536"),
        ("--vocab", "100", "384..=1048576"),
        ("--vocab", "4294967296", "384..=1048576"),
        ("--merges", "100000000", "0..=16777216"),
        ("--merges", "18446744073709551615", "0..=16777216"),
        ("--window", "0", "1..=16777216"),
        ("--ctx", "1", "2..=16777216"),
        ("--target-layers", "4294967295", "0..=1024"),
    ] {
        let message = failure(&["synth", "a.gguf", "--dry-run", flag, value]);
        let start = format!("error: invalid value '{value}' for '{flag} <");
        assert!(message.starts_with(&start), "{message}");
        let end = if value.len() > 19 {
            "number too large"
        } else {
            range
        };
        assert!(message.contains(end), "{message}");
    }
}

#[test]
fn an_existing_file_stays() {
    let folder = folder();
    let path = folder.path().join("a.gguf");
    std::fs::write(&path, "mine").expect("a writable folder");
    let name = path.to_str().expect("UTF-8");
    let mut args = vec!["synth", name];
    args.extend(TINY);
    assert_eq!(
        failure(&args),
        format!("error: {name} exists; --force replaces it")
    );
    assert_eq!(std::fs::read(&path).expect("a readable file"), b"mine");
    args.push("--force");
    assert!(muser(&args).status.success());
    Gguf::open(&path).expect("a readable file");
    assert_eq!(names(folder.path()), ["a.gguf"]);
}

/// A link stays a link: what it leads to is replaced.
#[cfg(unix)]
#[test]
fn links_are_written_through() {
    let folder = folder();
    let (path, link) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    let name = link.to_str().expect("UTF-8");
    let mut args = vec!["synth", name];
    args.extend(TINY);
    args.push("--force");
    let expected = format!("error: {name}: found a link that leads to nothing");
    assert!(failure(&args).starts_with(&expected));
    std::fs::write(&path, "mine").expect("a writable folder");
    assert!(muser(&args).status.success());
    Gguf::open(&path).expect("a readable file");
    assert_eq!(std::fs::read_link(&link).expect("a link"), path);
}

/// What a killed run left is named and stays: another run may be writing it.
#[test]
fn leftovers_are_named() {
    let folder = folder();
    let left = folder.path().join(".Ab12Cd.gguf.partial");
    std::fs::write(&left, [0; 2048]).expect("a writable folder");
    let path = folder.path().join("a.gguf");
    let mut args = vec!["synth", path.to_str().expect("UTF-8")];
    args.extend(TINY);
    let output = muser(&args);
    assert!(output.status.success());
    let expected = format!(
        "warning: {} (2.00 KiB) is an unfinished file; delete it unless another muser writes it \
         now\n",
        left.display()
    );
    assert_eq!(text(&output.stderr), expected);
    assert!(left.exists());
}

#[test]
fn places_that_are_no_file() {
    let folder = folder();
    let directory = folder.path().to_str().expect("UTF-8");
    let expected = format!("error: {directory}: found a directory, expected a file");
    assert_eq!(failure(&["synth", directory]), expected);
    let name = format!("{directory}/missing/a.gguf");
    let expected = format!("error: {name}: cannot be written: ");
    assert!(failure(&["synth", &name]).starts_with(&expected));
    assert!(names(folder.path()).is_empty());
}

/// More than any disk has is refused before anything is written.
#[test]
fn too_large_for_the_disk() {
    let folder = folder();
    let path = folder.path().join("a.gguf");
    let name = path.to_str().expect("UTF-8");
    let args = [
        "synth", name, "--embd", "1048576", "--ff", "1048576", "--layers", "1000",
    ];
    let message = failure(&args);
    let start = format!("error: cannot write {name}: it needs 3,507,");
    assert!(
        message.starts_with(&start) && message.ends_with(" are available"),
        "{message}"
    );
    assert!(names(folder.path()).is_empty());
}

/// A write that fails midway leaves nothing, neither under the final name nor
/// beside it.
#[cfg(unix)]
#[test]
fn a_failed_write_leaves_nothing() {
    let folder = folder();
    let path = folder.path().join("a.gguf");
    let script = "trap '' XFSZ; ulimit -f 4096; exec \"$0\" synth \"$1\"";
    let mut shell = Command::new("sh");
    shell
        .args(["-c", script, env!("CARGO_BIN_EXE_muser")])
        .arg(&path);
    let output = shell.output().expect("a shell");
    assert!(!output.status.success());
    let message = text(&output.stderr);
    let name = path.display();
    let start = format!("error: cannot write {name}: it needs 11,88");
    assert!(message.starts_with(&start), "{message}");
    assert!(message.contains(" bytes, "), "{message}");
    assert!(message.contains(" are available: "), "{message}");
    assert!(message.contains("File too large"), "{message}");
    assert!(names(folder.path()).is_empty());
}

#[test]
fn help_has_examples() {
    let output = muser(&["synth", "--help"]);
    assert!(output.status.success());
    let help = text(&output.stdout);
    for expected in [
        "muser synth 17gb.gguf --shape 30b --head q5_k",
        "--target-layers",
        "--dry-run",
    ] {
        assert!(help.contains(expected), "{expected} in\n{help}");
    }
}
