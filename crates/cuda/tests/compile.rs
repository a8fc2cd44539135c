//! Every kernel compiles for the oldest and the newest architecture, and for the
//! one it is tuned for: no GPU is needed, NVRTC is.

use cuda::Error;
use cuda::compile::{Compiler, Program};
use std::path::{Path, PathBuf};

/// The compiler's library that `cargo xtask nvrtc` fetches, if it is there.
fn fetched() -> Option<PathBuf> {
    let mut folders = vec![testing::root("target/nvrtc")];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(folder) else {
            continue;
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("libnvrtc.so") {
                return Some(path);
            }
            if path.is_dir() {
                folders.push(path);
            }
        }
    }
    None
}

fn compiler() -> Compiler {
    let compiler = Compiler::load(fetched().as_deref());
    compiler.unwrap_or_else(|e| panic!("{e}; `cargo xtask nvrtc` fetches it"))
}

#[test]
fn every_kernel_compiles() {
    let compiler = &compiler();
    std::thread::scope(|scope| {
        for architecture in [80, 90, 120] {
            scope.spawn(move || {
                for program in Program::all() {
                    let cubin = compiler.compile(program, architecture);
                    let cubin = cubin.unwrap_or_else(|e| panic!("{e}"));
                    assert!(cubin.starts_with(b"\x7fELF"), "{}", program.name());
                }
            });
        }
    });
}

#[test]
fn an_unknown_architecture_is_named() {
    let found = compiler().compile(Program::Rows, 999);
    let error = found.expect_err("there is no sm_999");
    let is_named = matches!(
        error,
        Error::ArchitectureUnknown {
            architecture: 999,
            ..
        }
    );
    assert!(is_named, "{error}");
}

/// The name of a library that is not there is in the error.
#[test]
fn a_missing_compiler_is_named() {
    let path = Path::new("/nowhere/libnvrtc.so");
    let error = Compiler::load(Some(path)).err().expect("no such file");
    assert!(
        error.to_string().contains("/nowhere/libnvrtc.so"),
        "{error}"
    );
}
