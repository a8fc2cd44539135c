//! The tensor directory: name, encoding, shape and place of every tensor.
//!
//! A place is an offset in the tensor data, which starts at the first aligned
//! byte after the directory; it is no offset in the file. Tensors may lie in
//! any order and with gaps, but never share a byte.

use crate::reader::{MAX_TENSORS, Reader, Section, check_most};
use crate::shown;
use crate::{Error, TensorType};
use std::collections::HashSet;

/// Longest tensor name that is read or written. The format's document says
/// 64, but ggml can be built with room for 127, and such files exist.
pub(crate) const MAX_TENSOR_NAME_BYTES: u64 = 127;

/// Most dimensions of a tensor.
const MAX_DIMENSIONS: u64 = 4;

/// An entry takes at least: length and one byte of a name, the number of
/// dimensions and one of them, type and offset.
const LEAST_ENTRY_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// What a tensor is, before it has any bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, for example `blk.0.attn_q.weight`; 1 to 127 bytes.
    pub name: String,
    /// Encoding of the elements.
    pub ty: TensorType,
    /// Lengths in ggml's order: the contiguous dimension (row length) first.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Bytes that the encoded elements take.
    ///
    /// # Errors
    /// If the shape has no or more than 4 dimensions, one of them is 0, a row
    /// is no whole number of blocks, or there are 2^63 elements or more.
    pub fn data_bytes(&self) -> Result<u64, Error> {
        let name = || shown(&self.name);
        let found = self.shape.len() as u64;
        if !(1..=MAX_DIMENSIONS).contains(&found) {
            return Err(Error::Dimensions {
                name: name(),
                found,
                most: MAX_DIMENSIONS,
            });
        }
        if self.shape.contains(&0) {
            return Err(Error::ZeroDimension {
                name: name(),
                shape: self.shape.clone(),
            });
        }
        let row = self.shape[0];
        if !row.is_multiple_of(self.ty.block_len() as u64) {
            return Err(Error::PartialBlock {
                name: name(),
                ty: self.ty,
                found: row,
            });
        }
        let too_large = || Error::TensorTooLarge {
            name: name(),
            shape: self.shape.clone(),
        };
        let product = |first: u64| {
            self.shape[1..]
                .iter()
                .try_fold(first, |n, &dimension| n.checked_mul(dimension))
                .filter(|&n| n < 1 << 63)
                .ok_or_else(too_large)
        };
        product(row)?;
        product(self.ty.row_bytes(row).ok_or_else(too_large)?)
    }
}

/// A tensor of a file and where its bytes lie in the tensor data.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) info: TensorInfo,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Entry {
    /// First byte after it in the tensor data; only without overflow once
    /// [`check_placement`] passed.
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// Reads `count` entries.
pub(crate) fn read(reader: &mut Reader<'_>, count: u64) -> Result<Vec<Entry>, Error> {
    reader.check_count(count, LEAST_ENTRY_BYTES, "tensors", Section::Directory)?;
    check_most(count, MAX_TENSORS, "tensors", Section::Directory)?;
    let mut names = HashSet::new();
    let mut entries = Vec::with_capacity(count as usize);
    for index in 0..count {
        let at = Section::EntryAt { index, count };
        let found_bytes = reader.u64(at)?;
        if !(1..=MAX_TENSOR_NAME_BYTES).contains(&found_bytes) {
            return Err(Error::TensorNameLength {
                section: at.to_string(),
                found_bytes,
                limit_bytes: MAX_TENSOR_NAME_BYTES,
            });
        }
        let name = reader.text(found_bytes, at)?;
        if !names.insert(name) {
            return Err(Error::DuplicateTensor { name: shown(name) });
        }
        entries.push(entry(reader, name, at)?);
    }
    Ok(entries)
}

/// Reads what follows the name of an entry.
fn entry(reader: &mut Reader<'_>, name: &str, at: Section<'_>) -> Result<Entry, Error> {
    let found = u64::from(reader.u32(at)?);
    if !(1..=MAX_DIMENSIONS).contains(&found) {
        return Err(Error::Dimensions {
            name: shown(name),
            found,
            most: MAX_DIMENSIONS,
        });
    }
    let shape = (0..found)
        .map(|_| reader.u64(at))
        .collect::<Result<Vec<u64>, Error>>()?;
    let id = reader.u32(at)?;
    let ty = TensorType::from_id(id).ok_or_else(|| Error::UnknownTensorType {
        name: shown(name),
        found: id,
    })?;
    let offset = reader.u64(at)?;
    let info = TensorInfo {
        name: name.to_string(),
        ty,
        shape,
    };
    let bytes = info.data_bytes()?;
    Ok(Entry {
        info,
        offset,
        bytes,
    })
}

/// Checks that every tensor lies aligned inside a file of `file_bytes` whose
/// tensor data starts at `data_start`, and that no two share a byte.
pub(crate) fn check_placement(
    entries: &[Entry],
    alignment: u64,
    data_start: u64,
    file_bytes: u64,
) -> Result<(), Error> {
    for entry in entries {
        if !entry.offset.is_multiple_of(alignment) {
            return Err(Error::Misaligned {
                name: shown(&entry.info.name),
                found: entry.offset,
                alignment,
            });
        }
        let end = u128::from(data_start) + u128::from(entry.offset) + u128::from(entry.bytes);
        if end > u128::from(file_bytes) {
            return Err(Error::OutsideFile {
                name: shown(&entry.info.name),
                end,
                file_bytes,
            });
        }
    }
    let mut by_offset: Vec<&Entry> = entries.iter().collect();
    by_offset.sort_by_key(|entry| entry.offset);
    for pair in by_offset.windows(2) {
        if pair[1].offset < pair[0].end() {
            return Err(Error::Overlap {
                first: shown(&pair[0].info.name),
                second: shown(&pair[1].info.name),
                second_offset: pair[1].offset,
                first_end: pair[0].end(),
            });
        }
    }
    Ok(())
}
