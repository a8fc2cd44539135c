//! Typed access to a file's key-value section.
//!
//! Strings and arrays of strings stay in the mapping; they were checked to be
//! UTF-8 and in bounds when the header was read.

use crate::{Bytes, Error};
use indexmap::IndexMap;

/// One value of the key-value section.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
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
#[derive(Clone, Debug)]
#[allow(missing_docs)]
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
#[derive(Clone, Debug)]
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
#[derive(Clone, Debug, Default)]
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

    /// An array of truth values.
    pub fn bools(&self, key: &str) -> Result<Option<&[bool]>, Error> {
        self.typed(key, "array of bool", |v| match v {
            Value::Array(Array::Bool(x)) => Some(x.as_slice()),
            _ => None,
        })
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
        convert(value).map(Some).ok_or_else(|| Error::KeyType {
            key: key.to_string(),
            found: match value {
                Value::Array(array) => format!("array of {}", array.element_name()),
                Value::String(_) => "string".to_string(),
                other => format!("{} {:?}", other.type_name(), other),
            },
            wanted,
        })
    }
}
