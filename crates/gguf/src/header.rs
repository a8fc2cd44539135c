//! Reads and checks everything before the tensor data: magic, version,
//! metadata, tensor directory.
//!
//! Source: the GGUF specification (`docs/gguf.md` of ggml) and `constants.py`
//! of the PyPI package `gguf`. Version 3 differs from 2 only by permitting
//! big-endian files, which are refused here.
//!
//! Counts of the header are not capacities: each is compared with the bytes
//! that are left, divided by the least that one entry takes.

use crate::directory::{self, Entry};
use crate::metadata::{MAX_ARRAY_DEPTH, MAX_KEY_BYTES, value_type};
use crate::reader::{MAX_KEYS, MAX_NESTED_ARRAYS, Reader, Section, check_most};
use crate::shown;
use crate::{Array, Bytes, Error, Metadata, StringArray, Value};

/// The first bytes of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// A key takes at least a length, one byte of name, a type and one byte.
const LEAST_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// A string takes at least its length.
const LEAST_STRING_BYTES: u64 = 8;
/// An array takes at least its element type and length.
const LEAST_ARRAY_BYTES: u64 = 4 + 8;

/// The checked header of one file.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) metadata: Metadata,
    pub(crate) entries: Vec<Entry>,
    pub(crate) alignment: u64,
    /// Length of everything up to the end of the tensor directory.
    pub(crate) header_bytes: usize,
    /// Where offset 0 of the tensor data lies in the file.
    pub(crate) data_start: u64,
}

impl Header {
    /// Reads the header of `file`; tensors are checked to lie inside it.
    pub(crate) fn read(file: &Bytes) -> Result<Header, Error> {
        let mut reader = Reader::new(file);
        let version = version(&mut reader)?;
        let n_tensors = reader.u64(Section::Header)?;
        let n_keys = reader.u64(Section::Header)?;
        let metadata = metadata(&mut reader, n_keys, file)?;
        let alignment = metadata.alignment()?;
        let entries = directory::read(&mut reader, n_tensors)?;
        let header_bytes = reader.position();
        let data_start = (header_bytes as u64).next_multiple_of(alignment);
        directory::check_placement(&entries, alignment, data_start, file.len() as u64)?;
        Ok(Header {
            version,
            metadata,
            entries,
            alignment,
            header_bytes,
            data_start,
        })
    }
}

fn version(reader: &mut Reader<'_>) -> Result<u32, Error> {
    let magic = reader.take(4, Section::Header)?;
    if magic != MAGIC {
        return Err(Error::NotGguf {
            found: format!("\"{}\"", magic.escape_ascii()),
        });
    }
    let version = reader.u32(Section::Header)?;
    match version {
        2 | 3 => Ok(version),
        _ if (1..=0xffff).contains(&version.swap_bytes()) => Err(Error::BigEndian {
            version: version.swap_bytes(),
        }),
        _ => Err(Error::Version { found: version }),
    }
}

fn metadata(reader: &mut Reader<'_>, count: u64, file: &Bytes) -> Result<Metadata, Error> {
    reader.check_count(count, LEAST_KEY_BYTES, "keys", Section::Metadata)?;
    check_most(count, MAX_KEYS, "keys", Section::Metadata)?;
    let mut metadata = Metadata::default();
    let mut n_nested = 0;
    for index in 0..count {
        let at = Section::KeyAt { index, count };
        let found_bytes = reader.u64(at)?;
        if !(1..=MAX_KEY_BYTES).contains(&found_bytes) {
            return Err(Error::KeyLength {
                section: at.to_string(),
                found_bytes,
                limit_bytes: MAX_KEY_BYTES,
            });
        }
        let key = reader.text(found_bytes, at)?;
        let mut values = Values {
            reader,
            file,
            key,
            n_nested,
        };
        let value = values.value()?;
        n_nested = values.n_nested;
        if metadata.insert(key, value).is_some() {
            return Err(Error::DuplicateKey { key: shown(key) });
        }
    }
    Ok(metadata)
}

/// Reads the value of one key.
struct Values<'r, 'a> {
    reader: &'r mut Reader<'a>,
    file: &'r Bytes,
    key: &'a str,
    /// Arrays in arrays of the whole file so far.
    n_nested: u64,
}

/// Declares the readers of scalars and of their arrays, little-endian.
macro_rules! numbers {
    ($($ty:ident),*) => { $(
        fn $ty(&mut self) -> Result<$ty, Error> {
            const N: usize = size_of::<$ty>();
            let bytes = self.reader.take(N as u64, Section::Key(self.key))?;
            Ok($ty::from_le_bytes(std::array::from_fn(|i| bytes[i])))
        }
    )* };
}

/// Reads an array of `$ty`.
macro_rules! number_array {
    ($self:ident, $count:ident, $ty:ident) => {{
        const N: usize = size_of::<$ty>();
        $self.check_count($count, N as u64)?;
        let section = Section::Key($self.key);
        let bytes = $self.reader.take($count * N as u64, section)?;
        let (elements, _) = bytes.as_chunks::<N>();
        elements.iter().map(|&e| $ty::from_le_bytes(e)).collect()
    }};
}

impl Values<'_, '_> {
    numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

    fn check_count(&self, count: u64, least_bytes: u64) -> Result<(), Error> {
        let section = Section::Key(self.key);
        self.reader
            .check_count(count, least_bytes, "array elements", section)
    }

    fn truth(&self, byte: u8) -> Result<bool, Error> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(Error::BoolByte {
                key: shown(self.key),
                found,
            }),
        }
    }

    fn value(&mut self) -> Result<Value, Error> {
        Ok(match self.u32()? {
            value_type::U8 => Value::U8(self.u8()?),
            value_type::I8 => Value::I8(self.i8()?),
            value_type::U16 => Value::U16(self.u16()?),
            value_type::I16 => Value::I16(self.i16()?),
            value_type::U32 => Value::U32(self.u32()?),
            value_type::I32 => Value::I32(self.i32()?),
            value_type::F32 => Value::F32(self.f32()?),
            value_type::BOOL => {
                let byte = self.u8()?;
                Value::Bool(self.truth(byte)?)
            }
            value_type::STRING => {
                Value::String(self.reader.string(Section::Key(self.key))?.to_string())
            }
            value_type::ARRAY => Value::Array(self.array(1)?),
            value_type::U64 => Value::U64(self.u64()?),
            value_type::I64 => Value::I64(self.i64()?),
            value_type::F64 => Value::F64(self.f64()?),
            found => return Err(self.unknown_type(found)),
        })
    }

    fn unknown_type(&self, found: u32) -> Error {
        Error::ValueType {
            key: shown(self.key),
            found,
        }
    }

    fn array(&mut self, depth: usize) -> Result<Array, Error> {
        if depth > MAX_ARRAY_DEPTH {
            return Err(Error::ArrayDepth {
                key: shown(self.key),
                limit: MAX_ARRAY_DEPTH,
            });
        }
        let element_type = self.u32()?;
        let count = self.u64()?;
        Ok(match element_type {
            value_type::U8 => Array::U8(number_array!(self, count, u8)),
            value_type::I8 => Array::I8(number_array!(self, count, i8)),
            value_type::U16 => Array::U16(number_array!(self, count, u16)),
            value_type::I16 => Array::I16(number_array!(self, count, i16)),
            value_type::U32 => Array::U32(number_array!(self, count, u32)),
            value_type::I32 => Array::I32(number_array!(self, count, i32)),
            value_type::F32 => Array::F32(number_array!(self, count, f32)),
            value_type::BOOL => {
                self.check_count(count, 1)?;
                let bytes = self.reader.take(count, Section::Key(self.key))?;
                let truths: Result<_, Error> = bytes.iter().map(|&b| self.truth(b)).collect();
                Array::Bool(truths?)
            }
            value_type::STRING => Array::String(self.strings(count)?),
            value_type::ARRAY => {
                self.check_count(count, LEAST_ARRAY_BYTES)?;
                // Both far below 2^63: the header has no room for more.
                self.n_nested += count;
                let section = Section::Key(self.key);
                check_most(
                    self.n_nested,
                    MAX_NESTED_ARRAYS,
                    "arrays in arrays",
                    section,
                )?;
                let mut arrays = Vec::new();
                for _ in 0..count {
                    arrays.push(self.array(depth + 1)?);
                }
                Array::Array(arrays)
            }
            value_type::U64 => Array::U64(number_array!(self, count, u64)),
            value_type::I64 => Array::I64(number_array!(self, count, i64)),
            value_type::F64 => Array::F64(number_array!(self, count, f64)),
            found => return Err(self.unknown_type(found)),
        })
    }

    fn strings(&mut self, count: u64) -> Result<StringArray, Error> {
        self.check_count(count, LEAST_STRING_BYTES)?;
        let section = Section::Key(self.key);
        let start = self.reader.position();
        let mut spans = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let len = self.reader.string(section)?.len();
            // A header is far shorter than u32 can count.
            spans.push(((self.reader.position() - len - start) as u64, len as u32));
        }
        let data = self.file.slice(start..self.reader.position());
        Ok(StringArray::new(data, spans))
    }
}
