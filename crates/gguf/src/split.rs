//! Models that are split into several files, `NAME-00001-of-0000N.gguf`.
//!
//! File names count parts from 1, the key `split.no` from 0. All parts carry
//! `split.no` and `split.count`; only the first part's metadata describes the
//! model. Source: `gguf_writer.py` and `constants.py` of the PyPI package
//! `gguf`.

use crate::file::Part;
use crate::{Error, Metadata};
use std::path::{Path, PathBuf};

const KEY_NO: &str = "split.no";
const KEY_COUNT: &str = "split.count";
const KEY_TENSORS: &str = "split.tensors.count";

/// What a file name says about a split.
struct Name<'a> {
    /// The path without `-0000x-of-0000N.gguf`.
    stem: &'a str,
    part: u32,
    count: u32,
}

impl Name<'_> {
    /// Reads a name; `None` if it does not follow the pattern or the numbers
    /// make no sense (part 0, or 3 of 2).
    fn parse(file_name: &str) -> Option<Name<'_>> {
        let rest = file_name.strip_suffix(".gguf")?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, part) = rest.rsplit_once('-')?;
        let (part, count) = (number(part)?, number(count)?);
        (1..=count)
            .contains(&part)
            .then_some(Name { stem, part, count })
    }

    fn of_part(&self, part: u32) -> String {
        format!("{}-{part:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

/// A number of exactly five digits.
fn number(text: &str) -> Option<u32> {
    let digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

/// Opens the file at `path`, and all other parts if its name says that it is
/// one of several; gives them in order.
pub(crate) fn open(path: &Path) -> Result<Vec<Part>, Error> {
    let name = path
        .file_name()
        .and_then(|name| Name::parse(name.to_str()?))
        .filter(|name| name.count > 1);
    let Some(name) = name else {
        let part = Part::open(path)?;
        check_whole(&part.header.metadata).map_err(|e| e.in_file(path))?;
        return Ok(vec![part]);
    };
    let paths: Vec<PathBuf> = (1..=name.count)
        .map(|part| path.with_file_name(name.of_part(part)))
        .collect();
    // The given path first: if it is wrong itself, no other part is to blame.
    let given = open_part(path, &name, name.part)?;
    let mut parts = Vec::new();
    for (part, path) in (1..name.part).zip(&paths) {
        parts.push(open_part(path, &name, part)?);
    }
    parts.push(given);
    for (part, path) in (1..).zip(&paths).skip(parts.len()) {
        parts.push(open_part(path, &name, part)?);
    }
    let total: usize = parts.iter().map(|part| part.header.entries.len()).sum();
    for (index, (part, path)) in parts.iter().zip(&paths).enumerate() {
        let found = part.header.metadata.u64(KEY_TENSORS);
        found
            .and_then(|found| {
                if found.is_none() && index > 0 {
                    return Ok(());
                }
                equal(KEY_TENSORS, found, total as u64)
            })
            .map_err(|e| e.in_file(path))?;
    }
    Ok(parts)
}

/// Refuses a part of a split model whose other parts cannot be found.
pub(crate) fn check_whole(metadata: &Metadata) -> Result<(), Error> {
    match metadata.u64(KEY_COUNT)? {
        Some(count) if count > 1 => Err(Error::SplitName { count }),
        _ => Ok(()),
    }
}

/// Opens the part that is number `part` (from 1) and checks its keys.
fn open_part(path: &Path, name: &Name<'_>, part: u32) -> Result<Part, Error> {
    let count = name.count;
    let opened = Part::open(path).map_err(|e| match e {
        Error::Missing { path } if part != name.part => {
            Error::SplitPartMissing { path, part, count }
        }
        other => other,
    })?;
    let metadata = &opened.header.metadata;
    let keys = metadata
        .u64(KEY_COUNT)
        .and_then(|found| equal(KEY_COUNT, found, count.into()))
        .and_then(|()| metadata.u64(KEY_NO))
        .and_then(|found| equal(KEY_NO, found, u64::from(part - 1)));
    keys.map_err(|e| e.in_file(path))?;
    Ok(opened)
}

fn equal(key: &'static str, found: Option<u64>, expected: u64) -> Result<(), Error> {
    if found == Some(expected) {
        return Ok(());
    }
    Err(Error::SplitKey {
        key,
        found: found.map_or_else(|| "nothing".to_string(), |n| n.to_string()),
        expected,
    })
}
