//! Typed access to a file's key-value section.
//!
//! Arrays of strings stay in the mapping; they were checked to be UTF-8 and in
//! bounds when the header was read. All other values are copied out.

use crate::shown;
use crate::{Bytes, Error};
use indexmap::IndexMap;
use std::fmt;

/// Alignment of tensor data in bytes without the key `general.alignment`.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

/// Longest key that is read or written, as the format's document says.
pub(crate) const MAX_KEY_BYTES: u64 = 65_535;

/// The format's numbers of the value types.
pub(crate) mod value_type {
    pub(crate) const U8: u32 = 0;
    pub(crate) const I8: u32 = 1;
    pub(crate) const U16: u32 = 2;
    pub(crate) const I16: u32 = 3;
    pub(crate) const U32: u32 = 4;
    pub(crate) const I32: u32 = 5;
    pub(crate) const F32: u32 = 6;
    pub(crate) const BOOL: u32 = 7;
    pub(crate) const STRING: u32 = 8;
    pub(crate) const ARRAY: u32 = 9;
    pub(crate) const U64: u32 = 10;
    pub(crate) const I64: u32 = 11;
    pub(crate) const F64: u32 = 12;
}

/// Arrays in arrays are read and written down to this many levels.
pub(crate) const MAX_ARRAY_DEPTH: usize = 4;

/// One value of the key-value section.
// The variants are the format's own type names.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the format's own type names
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// An array value, by the type of its elements.
// The variants are the format's own type names.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the format's own type names
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(StringArray),
    /// Arrays of arrays, at most as deep as the reader allows.
    Array(Vec<Array>),
}

/// An array of strings that stay where they lie in the file.
#[derive(Clone)]
pub struct StringArray {
    /// The array's elements as stored: each a u64 length, then the text.
    data: Bytes,
    /// Start and length of each text inside `data`.
    spans: Vec<(u64, u32)>,
}

impl StringArray {
    /// An array over `data`; every span must be in bounds and valid UTF-8.
    pub(crate) fn new(data: Bytes, spans: Vec<(u64, u32)>) -> StringArray {
        StringArray { data, spans }
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Is there no string?
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let &(start, len) = self.spans.get(index)?;
        let text = &self.data[start as usize..start as usize + len as usize];
        Some(std::str::from_utf8(text).expect("checked when the header was read"))
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).expect("index in range"))
    }
}

impl fmt::Debug for StringArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl PartialEq for StringArray {
    fn eq(&self, other: &StringArray) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<S: AsRef<str>> FromIterator<S> for StringArray {
    /// An array of its own, in the form in which a file stores it.
    ///
    /// # Panics
    /// If a string has 2^32 bytes or more.
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> StringArray {
        let mut data = Vec::new();
        let mut spans = Vec::new();
        for string in strings {
            let text = string.as_ref();
            let len = u32::try_from(text.len()).expect("a string of less than 4 GiB");
            data.extend_from_slice(&u64::from(len).to_le_bytes());
            spans.push((data.len() as u64, len));
            data.extend_from_slice(text.as_bytes());
        }
        StringArray::new(Bytes::from(data), spans)
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
        }
    }

    /// Is there no element?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type's name as the format spells it, for messages.
    pub fn element_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "u8",
            Array::I8(_) => "i8",
            Array::U16(_) => "u16",
            Array::I16(_) => "i16",
            Array::U32(_) => "u32",
            Array::I32(_) => "i32",
            Array::U64(_) => "u64",
            Array::I64(_) => "i64",
            Array::F32(_) => "f32",
            Array::F64(_) => "f64",
            Array::Bool(_) => "bool",
            Array::String(_) => "string",
            Array::Array(_) => "array",
        }
    }
}

impl Value {
    /// The type's name as the format spells it, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F32(_) => "f32",
            Value::F64(_) => "f64",
            Value::Bool(_) => "bool",
            Value::String(_) => "string",
            Value::Array(_) => "array",
        }
    }

    /// The error that `key` holds this value where `wanted` is needed.
    pub(crate) fn wrong_type(&self, key: &str, wanted: &'static str) -> Error {
        let number = match self {
            Value::F32(x) => x.to_string(),
            Value::F64(x) => x.to_string(),
            Value::Bool(x) => x.to_string(),
            Value::String(_) | Value::Array(_) => String::new(),
            integer => integer.as_integer().unwrap_or_default().to_string(),
        };
        Error::KeyType {
            key: shown(key),
            found: match self {
                Value::Array(array) => format!("array of {}", array.element_name()),
                Value::String(_) => "string".to_string(),
                other => format!("{} {number}", other.type_name()),
            },
            wanted,
        }
    }

    /// Any integer type, widened.
    fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}

/// The key-value section, in the file's order.
///
/// The typed getters give `Ok(None)` for a missing key and
/// [`Error::KeyType`] for one of another type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: IndexMap<String, Value>,
}

impl Metadata {
    /// Sets `key`; gives back the value it had.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) -> Option<Value> {
        self.entries.insert(key.into(), value)
    }

    /// Removes `key`; gives back the value it had.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.entries.shift_remove(key)
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Is there no key?
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All keys and values in the file's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// An integer that fits u32, of whatever integer type it is stored as.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.typed(key, "u32", |v| u32::try_from(v.as_integer()?).ok())
    }

    /// An integer that fits u64, of whatever integer type it is stored as.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "u64", |v| u64::try_from(v.as_integer()?).ok())
    }

    /// A floating-point number (f64 is rounded to f32).
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.typed(key, "f32", |v| match *v {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        })
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "bool", |v| match *v {
            Value::Bool(x) => Some(x),
            _ => None,
        })
    }

    /// A text.
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "string", |v| match v {
            Value::String(x) => Some(x.as_str()),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&StringArray>, Error> {
        self.typed(key, "array of string", |v| match v {
            Value::Array(Array::String(x)) => Some(x),
            _ => None,
        })
    }

    /// An array of any integer type whose elements all fit i64.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, Error> {
        self.typed(key, "array of integers", |v| {
            let Value::Array(array) = v else { return None };
            Some(match array {
                Array::U8(v) => v.iter().map(|&x| x.into()).collect(),
                Array::I8(v) => v.iter().map(|&x| x.into()).collect(),
                Array::U16(v) => v.iter().map(|&x| x.into()).collect(),
                Array::I16(v) => v.iter().map(|&x| x.into()).collect(),
                Array::U32(v) => v.iter().map(|&x| x.into()).collect(),
                Array::I32(v) => v.iter().map(|&x| x.into()).collect(),
                Array::I64(v) => v.clone(),
                Array::U64(v) => v
                    .iter()
                    .map(|&x| i64::try_from(x).ok())
                    .collect::<Option<Vec<i64>>>()?,
                _ => return None,
            })
        })
    }

    /// An array of f32.
    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>, Error> {
        self.typed(key, "array of f32", |v| match v {
            Value::Array(Array::F32(x)) => Some(x.as_slice()),
            _ => None,
        })
    }

    /// Alignment of tensor data in bytes: the key `general.alignment`, or 32.
    ///
    /// # Errors
    /// If it is no power of two from 8 to 1,048,576, or no u32.
    pub fn alignment(&self) -> Result<u64, Error> {
        const LEAST: u64 = 8;
        const MOST: u64 = 1 << 20;
        match self.get("general.alignment") {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(&Value::U32(found)) => {
                let found = u64::from(found);
                if found.is_power_of_two() && (LEAST..=MOST).contains(&found) {
                    return Ok(found);
                }
                Err(Error::Alignment {
                    found,
                    least: LEAST,
                    most: MOST,
                })
            }
            Some(other) => Err(other.wrong_type("general.alignment", "u32")),
        }
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.entries.get(key) else {
            return Ok(None);
        };
        convert(value)
            .map(Some)
            .ok_or_else(|| value.wrong_type(key, wanted))
    }
}
