//! A model file that is cut while a command reads it.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Whenever the cut is noticed, by a check or by a page that is gone, the end is an error
/// with a message.
#[test]
fn a_file_that_is_cut_under_a_command_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::copy(testing::bundled("nano-glimmer-q8_0.gguf"), &path).expect("room");
    let child = Command::new(env!("CARGO_BIN_EXE_muser"))
        .args(["walk", "--device", "reference", "-r", "1000000", "--model"])
        .arg(&path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    std::thread::sleep(Duration::from_millis(700));
    let file = File::options().write(true).open(&path).expect("the file");
    file.set_len(4_000_000).expect("a shorter file");
    let output = child.wait_with_output().expect("the binary ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.starts_with("error: ") && stderr.contains("was cut"),
        "{stderr}"
    );
}
