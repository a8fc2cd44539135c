//! Writes a GGUF file as a stream: header first, then tensor after tensor.
//!
//! Everything goes to a temporary file in the same folder, which takes the
//! final name only in [`Writer::finish`]: a reader never sees half a file.
//! The layout is that of the PyPI package `gguf`: version 3, tensors in the
//! order of the directory, each padded, also the last.

use crate::directory::{MAX_TENSOR_NAME_BYTES, TensorInfo};
use crate::header::MAGIC;
use crate::mapping::kind;
use crate::metadata::{MAX_ARRAY_DEPTH, MAX_KEY_BYTES, value_type};
use crate::reader::{
    MAX_HEADER_BYTES, MAX_KEYS, MAX_NESTED_ARRAYS, MAX_TENSORS, Section, check_most,
};
use crate::shown;
use crate::{Array, Error, Metadata, Value};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempPath};

/// The version that is written.
const VERSION: u32 = 3;

/// Writes go to the system in pieces of this size.
const BUFFER_BYTES: usize = 1 << 20;

/// A file that is being written.
///
/// Dropping it before [`Writer::finish`] leaves nothing behind and whatever
/// was under the final name untouched.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    out: BufWriter<File>,
    /// Removes the temporary file when dropped.
    temporary: TempPath,
    plan: Vec<Planned>,
    alignment: u64,
    file_bytes: u64,
    /// The tensor whose turn it is, and how much of it is written.
    current: usize,
    written_bytes: u64,
    /// A failed write leaves an unknown amount in the file.
    failed: bool,
}

/// A tensor of the directory.
#[derive(Debug)]
struct Planned {
    name: String,
    bytes: u64,
}

impl Writer {
    /// Starts a file that will appear at `path`, with `metadata` (whose key
    /// `general.alignment` sets the alignment) and room for `tensors`.
    ///
    /// # Errors
    /// If metadata or tensors break a rule of the format, `path` is something
    /// other than a file, or its folder cannot be written to.
    pub fn create(
        path: &Path,
        metadata: &Metadata,
        tensors: &[TensorInfo],
    ) -> Result<Writer, Error> {
        if let Ok(about) = std::fs::metadata(path)
            && !about.is_file()
        {
            return Err(Error::NotAFile {
                path: path.to_path_buf(),
                found: kind(about.file_type()),
            });
        }
        let alignment = metadata.alignment()?;
        check_most(metadata.len() as u64, MAX_KEYS, "keys", Section::Metadata)?;
        let n_tensors = tensors.len() as u64;
        check_most(n_tensors, MAX_TENSORS, "tensors", Section::Directory)?;
        let mut header = Vec::new();
        header.extend_from_slice(&MAGIC);
        put_u32(&mut header, VERSION);
        put_u64(&mut header, n_tensors);
        put_u64(&mut header, metadata.len() as u64);
        put_metadata(&mut header, metadata)?;
        let (plan, data_bytes) = put_directory(&mut header, tensors, alignment)?;
        if header.len() > MAX_HEADER_BYTES {
            return Err(Error::HeaderTooLong {
                section: "metadata and tensor directory".to_string(),
                limit_bytes: MAX_HEADER_BYTES as u64,
            });
        }
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        let (out, temporary) = temporary_beside(path)
            .map_err(|error| Error::Write {
                path: path.to_path_buf(),
                error,
            })?
            .into_parts();
        let mut writer = Writer {
            path: path.to_path_buf(),
            out: BufWriter::with_capacity(BUFFER_BYTES, out),
            temporary,
            plan,
            alignment,
            file_bytes: header.len() as u64 + data_bytes,
            current: 0,
            written_bytes: 0,
            failed: false,
        };
        writer.put(&header)?;
        Ok(writer)
    }

    /// Length of the finished file.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Appends `chunk` to the data of the tensor `name`, whose turn it must be:
    /// tensors come in the order of the directory, each in any number of
    /// chunks.
    ///
    /// # Errors
    /// If it is another tensor's turn, the tensor would get too many bytes, or
    /// the system cannot write (disk full). After the last of these only
    /// dropping the writer makes sense.
    pub fn append(&mut self, name: &str, chunk: &[u8]) -> Result<(), Error> {
        let planned = self.plan.get(self.current);
        let Some(planned) = planned.filter(|planned| planned.name == name) else {
            return Err(self.out_of_turn(name));
        };
        let expected_bytes = planned.bytes;
        let found_bytes = self.written_bytes + chunk.len() as u64;
        if found_bytes > expected_bytes {
            return Err(Error::TensorBytes {
                name: shown(name),
                found_bytes,
                expected_bytes,
            });
        }
        self.put(chunk)?;
        self.written_bytes = found_bytes;
        if found_bytes == expected_bytes {
            let padding = expected_bytes.next_multiple_of(self.alignment) - expected_bytes;
            self.put(&vec![0; padding as usize])?;
            self.current += 1;
            self.written_bytes = 0;
        }
        Ok(())
    }

    fn out_of_turn(&self, name: &str) -> Error {
        match self.plan.get(self.current) {
            Some(_) if self.written_bytes > 0 => self.incomplete(),
            planned => Error::TensorOrder {
                found: shown(name),
                expected: planned.map_or_else(
                    || "the end of the file".to_string(),
                    |planned| format!("tensor {}", shown(&planned.name)),
                ),
            },
        }
    }

    /// The error that the current tensor has too few bytes.
    fn incomplete(&self) -> Error {
        let planned = &self.plan[self.current];
        Error::TensorBytes {
            name: shown(&planned.name),
            found_bytes: self.written_bytes,
            expected_bytes: planned.bytes,
        }
    }

    /// Makes the file durable and gives it its name, replacing what was there
    /// in one step.
    ///
    /// # Errors
    /// If a tensor is missing or incomplete, or the system cannot write; then
    /// nothing changed under the final name.
    pub fn finish(mut self) -> Result<(), Error> {
        if self.current < self.plan.len() {
            return Err(self.incomplete());
        }
        self.put(&[])?;
        let path = self.path;
        let named = |error| Error::Write {
            path: path.clone(),
            error,
        };
        let file = self.out.into_inner().map_err(|e| named(e.into_error()))?;
        file.sync_all().map_err(named)?;
        drop(file);
        self.temporary.persist(&path).map_err(|e| named(e.error))?;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let result = if self.failed {
            Err(io::Error::other("an earlier write failed"))
        } else {
            self.out.write_all(bytes)
        };
        self.failed |= result.is_err();
        result.map_err(|error| Error::Write {
            path: self.path.clone(),
            error,
        })
    }
}

/// A new file in the folder of `path`, with the permissions of a usual one.
fn temporary_beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".").suffix(".gguf.partial");
    #[cfg(unix)]
    {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

fn put_u32(out: &mut Vec<u8>, n: u32) {
    out.extend_from_slice(&n.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, n: u64) {
    out.extend_from_slice(&n.to_le_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_u64(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn put_metadata(out: &mut Vec<u8>, metadata: &Metadata) -> Result<(), Error> {
    let mut n_nested = 0;
    for (index, (key, value)) in metadata.iter().enumerate() {
        if let Value::Array(array) = value {
            n_nested += array.n_nested();
        }
        let section = Section::Key(key);
        check_most(n_nested, MAX_NESTED_ARRAYS, "arrays in arrays", section)?;
        let found_bytes = key.len() as u64;
        if !(1..=MAX_KEY_BYTES).contains(&found_bytes) {
            return Err(Error::KeyLength {
                section: format!("metadata key {} of {}", index + 1, metadata.len()),
                found_bytes,
                limit_bytes: MAX_KEY_BYTES,
            });
        }
        put_text(out, key);
        put_value(out, key, value)?;
    }
    Ok(())
}

fn put_value(out: &mut Vec<u8>, key: &str, value: &Value) -> Result<(), Error> {
    put_u32(out, value.type_id());
    match value {
        Value::U8(x) => out.push(*x),
        Value::I8(x) => out.extend(x.to_le_bytes()),
        Value::U16(x) => out.extend(x.to_le_bytes()),
        Value::I16(x) => out.extend(x.to_le_bytes()),
        Value::U32(x) => out.extend(x.to_le_bytes()),
        Value::I32(x) => out.extend(x.to_le_bytes()),
        Value::U64(x) => out.extend(x.to_le_bytes()),
        Value::I64(x) => out.extend(x.to_le_bytes()),
        Value::F32(x) => out.extend(x.to_le_bytes()),
        Value::F64(x) => out.extend(x.to_le_bytes()),
        Value::Bool(x) => out.push((*x).into()),
        Value::String(x) => put_text(out, x),
        Value::Array(x) => put_array(out, key, x, 1)?,
    }
    Ok(())
}

fn put_array(out: &mut Vec<u8>, key: &str, array: &Array, depth: usize) -> Result<(), Error> {
    if depth > MAX_ARRAY_DEPTH {
        return Err(Error::ArrayDepth {
            key: shown(key),
            limit: MAX_ARRAY_DEPTH,
        });
    }
    put_u32(out, array.element_type_id());
    put_u64(out, array.len() as u64);
    match array {
        Array::U8(v) => out.extend(v),
        Array::I8(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U16(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I16(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::Bool(v) => out.extend(v.iter().map(|&x| u8::from(x))),
        Array::String(v) => v.iter().for_each(|x| put_text(out, x)),
        Array::Array(v) => {
            for inner in v {
                put_array(out, key, inner, depth + 1)?;
            }
        }
    }
    Ok(())
}

/// Lays out the tensors one after the other; gives the bytes of all with their
/// padding.
fn put_directory(
    out: &mut Vec<u8>,
    tensors: &[TensorInfo],
    alignment: u64,
) -> Result<(Vec<Planned>, u64), Error> {
    let mut names = HashSet::new();
    let mut plan = Vec::with_capacity(tensors.len());
    let mut offset = 0u64;
    for (index, info) in tensors.iter().enumerate() {
        let found_bytes = info.name.len() as u64;
        if !(1..=MAX_TENSOR_NAME_BYTES).contains(&found_bytes) {
            return Err(Error::TensorNameLength {
                section: format!("tensor directory, entry {} of {}", index + 1, tensors.len()),
                found_bytes,
                limit_bytes: MAX_TENSOR_NAME_BYTES,
            });
        }
        if !names.insert(info.name.as_str()) {
            return Err(Error::DuplicateTensor {
                name: shown(&info.name),
            });
        }
        let bytes = info.data_bytes()?;
        put_text(out, &info.name);
        put_u32(out, info.shape.len() as u32);
        info.shape.iter().for_each(|&n| put_u64(out, n));
        put_u32(out, info.ty.id());
        put_u64(out, offset);
        // One tensor has less than 2^63 bytes, so only the sum can overflow.
        offset = offset
            .checked_add(bytes.next_multiple_of(alignment))
            .filter(|&end| end < 1 << 63)
            .ok_or_else(|| Error::TensorTooLarge {
                name: shown(&info.name),
                shape: info.shape.clone(),
            })?;
        plan.push(Planned {
            name: info.name.clone(),
            bytes,
        });
    }
    Ok((plan, offset))
}

impl Value {
    /// The format's number of the value's type.
    fn type_id(&self) -> u32 {
        match self {
            Value::U8(_) => value_type::U8,
            Value::I8(_) => value_type::I8,
            Value::U16(_) => value_type::U16,
            Value::I16(_) => value_type::I16,
            Value::U32(_) => value_type::U32,
            Value::I32(_) => value_type::I32,
            Value::U64(_) => value_type::U64,
            Value::I64(_) => value_type::I64,
            Value::F32(_) => value_type::F32,
            Value::F64(_) => value_type::F64,
            Value::Bool(_) => value_type::BOOL,
            Value::String(_) => value_type::STRING,
            Value::Array(_) => value_type::ARRAY,
        }
    }
}

impl Array {
    /// Arrays in this one, on all levels.
    fn n_nested(&self) -> u64 {
        match self {
            Array::Array(v) => v.iter().map(|inner| 1 + inner.n_nested()).sum(),
            _ => 0,
        }
    }

    /// The format's number of the elements' type.
    fn element_type_id(&self) -> u32 {
        match self {
            Array::U8(_) => value_type::U8,
            Array::I8(_) => value_type::I8,
            Array::U16(_) => value_type::U16,
            Array::I16(_) => value_type::I16,
            Array::U32(_) => value_type::U32,
            Array::I32(_) => value_type::I32,
            Array::U64(_) => value_type::U64,
            Array::I64(_) => value_type::I64,
            Array::F32(_) => value_type::F32,
            Array::F64(_) => value_type::F64,
            Array::Bool(_) => value_type::BOOL,
            Array::String(_) => value_type::STRING,
            Array::Array(_) => value_type::ARRAY,
        }
    }
}
