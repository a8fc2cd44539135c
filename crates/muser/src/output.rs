//! A file that a command writes at its end.

use anyhow::{Context, bail};
use std::fs::OpenOptions;
use std::path::Path;

/// Checks before long work that `path` can be written, and leaves what is there as it
/// is; a free name is left free.
///
/// # Errors
/// It is a folder, or it cannot be opened for writing.
pub fn check_writable(path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        bail!(
            "cannot write {}: found a folder, expected a file",
            path.display()
        );
    }
    let was_there = path.exists();
    OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    if !was_there {
        // Work that fails leaves no empty file behind.
        std::fs::remove_file(path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
