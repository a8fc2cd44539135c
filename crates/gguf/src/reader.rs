//! Bounded little-endian reads from the front of a file.
//!
//! Nothing here is aligned and nothing is trusted: every read and every count
//! is compared with the bytes that are left before it is used.

use crate::Error;
use crate::shown;
use std::fmt;

/// Most bytes that magic, metadata and tensor directory may take together:
/// bounds the memory that a hostile file can make the reader use. A header
/// with 202,048 tokens and 439,802 merges takes about 16 MB.
pub(crate) const MAX_HEADER_BYTES: usize = 256 << 20;

/// Most keys, tensors and arrays in arrays of a file. In memory each takes many
/// times the bytes that it may have in the file; no model comes near.
pub(crate) const MAX_KEYS: u64 = 1 << 16;
pub(crate) const MAX_TENSORS: u64 = 1 << 17;
pub(crate) const MAX_NESTED_ARRAYS: u64 = 1 << 16;

/// Refuses more than `most` of something.
pub(crate) fn check_most(
    count: u64,
    most: u64,
    items: &'static str,
    section: Section<'_>,
) -> Result<(), Error> {
    if count <= most {
        return Ok(());
    }
    Err(Error::TooMany {
        section: section.to_string(),
        items,
        count,
        most,
    })
}

/// The part of a file that is being read, for messages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Section<'a> {
    /// Magic, version and the two counts.
    Header,
    /// The whole key-value section.
    Metadata,
    /// A key whose name is not read yet, by position.
    KeyAt { index: u64, count: u64 },
    /// The value of a key.
    Key(&'a str),
    /// The whole tensor directory.
    Directory,
    /// An entry of the tensor directory, by position.
    EntryAt { index: u64, count: u64 },
}

impl fmt::Display for Section<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Section::Header => write!(f, "header"),
            Section::Metadata => write!(f, "metadata"),
            Section::KeyAt { index, count } => {
                write!(f, "metadata key {} of {count}", index + 1)
            }
            Section::Key(key) => write!(f, "metadata key {}", shown(key)),
            Section::Directory => write!(f, "tensor directory"),
            Section::EntryAt { index, count } => {
                write!(f, "tensor directory, entry {} of {count}", index + 1)
            }
        }
    }
}

/// A position in the bytes of a file.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    limited: bool,
}

impl<'a> Reader<'a> {
    /// Starts at the first byte of a file.
    pub(crate) fn new(file: &'a [u8]) -> Reader<'a> {
        let limited = file.len() > MAX_HEADER_BYTES;
        let bytes = if limited {
            &file[..MAX_HEADER_BYTES]
        } else {
            file
        };
        Reader {
            bytes,
            at: 0,
            limited,
        }
    }

    /// Bytes read so far.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    fn left_bytes(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The next `n` bytes.
    pub(crate) fn take(&mut self, n: u64, section: Section<'_>) -> Result<&'a [u8], Error> {
        if n > self.left_bytes() {
            return Err(if self.limited {
                Error::HeaderTooLong {
                    section: section.to_string(),
                    limit_bytes: MAX_HEADER_BYTES as u64,
                }
            } else {
                Error::Truncated {
                    section: section.to_string(),
                    at: self.at as u64,
                    found_bytes: self.left_bytes(),
                    wanted_bytes: n,
                }
            });
        }
        let start = self.at;
        self.at += n as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn fixed<const N: usize>(&mut self, section: Section<'_>) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, section)?);
        Ok(out)
    }

    pub(crate) fn u32(&mut self, section: Section<'_>) -> Result<u32, Error> {
        self.fixed(section).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, section: Section<'_>) -> Result<u64, Error> {
        self.fixed(section).map(u64::from_le_bytes)
    }

    /// Refuses `count` things of at least `least_bytes` each that the rest of
    /// the file cannot hold.
    pub(crate) fn check_count(
        &self,
        count: u64,
        least_bytes: u64,
        items: &'static str,
        section: Section<'_>,
    ) -> Result<(), Error> {
        let most = self.left_bytes() / least_bytes;
        if count <= most {
            return Ok(());
        }
        Err(Error::Count {
            section: section.to_string(),
            items,
            count,
            most,
            left_bytes: self.left_bytes(),
        })
    }

    /// The next `n` bytes as text.
    pub(crate) fn text(&mut self, n: u64, section: Section<'_>) -> Result<&'a str, Error> {
        let start = self.at;
        let bytes = self.take(n, section)?;
        std::str::from_utf8(bytes).map_err(|e| Error::NotUtf8 {
            section: section.to_string(),
            at: (start + e.valid_up_to()) as u64,
        })
    }

    /// A length (u64) and as many bytes of text.
    pub(crate) fn string(&mut self, section: Section<'_>) -> Result<&'a str, Error> {
        let n = self.u64(section)?;
        self.text(n, section)
    }
}
