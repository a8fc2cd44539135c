//! What the tests of the binary share: running it, and the repository's files.
#![allow(dead_code)] // each test binary uses its part

use gguf::{Metadata, TensorInfo, Value, Writer};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// What a run of the binary left behind.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `muser` with arguments.
pub fn muser<A: AsRef<std::ffi::OsStr>>(args: &[A]) -> Outcome {
    muser_with(args, b"")
}

/// Runs `muser` with arguments and standard input.
pub fn muser_with<A: AsRef<std::ffi::OsStr>>(args: &[A], stdin: &[u8]) -> Outcome {
    let mut child = Command::new(env!("CARGO_BIN_EXE_muser"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut input = child.stdin.take().expect("a pipe");
    let bytes = stdin.to_vec();
    // A command that does not read its input closes the pipe early.
    let writer = std::thread::spawn(move || input.write_all(&bytes).ok());
    let output = child.wait_with_output().expect("the binary ends");
    writer.join().expect("the writer ends");
    Outcome {
        code: output.status.code().expect("an exit code"),
        stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8 on stderr"),
    }
}

/// Path of a file below `testdata/oracle/`, as an argument.
pub fn oracle(name: &str) -> String {
    testing::testdata("oracle").join(name).display().to_string()
}

/// Writes the model `name` of the folder `models` to `path`, with these keys set.
pub fn changed_model(path: &Path, name: &str, keys: &[(&str, Value)]) -> String {
    rewritten(path, name, |metadata, _| {
        for (key, value) in keys {
            metadata.insert(*key, value.clone());
        }
    })
}

/// Writes the model `name` of the folder `models` to `path`, with what `change`
/// makes of its header. The data of a tensor whose size changes is zeros.
pub fn rewritten(
    path: &Path,
    name: &str,
    change: impl FnOnce(&mut Metadata, &mut Vec<TensorInfo>),
) -> String {
    let file = testing::open(&testing::bundled(name));
    let mut metadata = file.metadata().clone();
    let mut infos: Vec<TensorInfo> = file.tensors().iter().map(|t| t.info()).collect();
    change(&mut metadata, &mut infos);
    let mut writer = Writer::create(path, &metadata, &infos).expect("a writable folder");
    for info in &infos {
        let n_bytes = info.data_bytes().expect("a good shape") as usize;
        let same = file.tensor(&info.name).filter(|t| t.data.len() == n_bytes);
        let zeros = vec![0; n_bytes];
        let data = same.map_or(&zeros[..], |tensor| &tensor.data);
        writer.append(&info.name, data).expect("room");
    }
    writer.finish().expect("room");
    path.display().to_string()
}

/// Runs `muser` and checks that it fails with this message and exit code 1.
#[track_caller]
pub fn check_error<A: AsRef<std::ffi::OsStr>>(args: &[A], stdin: &[u8], message: &str) {
    let outcome = muser_with(args, stdin);
    assert_eq!(outcome.stderr, format!("error: {message}\n"));
    assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""));
}
