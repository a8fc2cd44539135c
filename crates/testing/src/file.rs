//! Files of the repository.

use gguf::Gguf;
use std::path::{Path, PathBuf};

/// A path below the root of the repository.
pub fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// A file below `testdata/`.
pub fn testdata(name: &str) -> PathBuf {
    root("testdata").join(name)
}

/// A file below `models/`.
pub fn bundled(name: &str) -> PathBuf {
    root("models").join(name)
}

/// Opens a model file.
pub fn open(path: &Path) -> Gguf {
    Gguf::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Reads a text file.
pub fn read_to_string(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
