//! A shared view of bytes that lie in a mapped file, in the program itself or
//! on the heap.
//!
//! Cloning a view copies a pointer and a count, never the bytes: weights stay
//! in the mapping for as long as anything refers to them.

use crate::mapping::Mapping;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Owner of the memory behind a [`Bytes`].
pub(crate) trait Owner: Send + Sync {
    fn bytes(&self) -> &[u8];
}

impl Owner for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Owner for &'static [u8] {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A cheaply cloned range of shared bytes.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Owner>,
    range: Range<usize>,
}

impl Bytes {
    fn whole(owner: impl Owner + 'static) -> Bytes {
        let range = 0..owner.bytes().len();
        Bytes {
            owner: Arc::new(owner),
            range,
        }
    }

    /// All bytes of a file.
    pub(crate) fn mapped(mapping: &Arc<Mapping>) -> Bytes {
        Bytes {
            owner: Arc::<Mapping>::clone(mapping),
            range: 0..mapping.bytes().len(),
        }
    }

    /// Do these bytes lie in `mapping`?
    pub(crate) fn is_of(&self, mapping: &Arc<Mapping>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.owner), Arc::as_ptr(mapping))
    }

    /// Shows the same range of another copy of the file.
    pub(crate) fn move_to(&mut self, copy: &Arc<Mapping>) {
        assert_eq!(self.owner.bytes().len(), copy.bytes().len(), "a copy");
        self.owner = Arc::<Mapping>::clone(copy);
    }

    /// The part `range` of these bytes.
    ///
    /// # Panics
    /// If `range` does not lie inside them: callers check file input first.
    pub fn slice(&self, range: Range<usize>) -> Bytes {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "slice {range:?} of {} bytes",
            self.len()
        );
        Bytes {
            owner: Arc::clone(&self.owner),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes::whole(bytes)
    }
}

impl From<&'static [u8]> for Bytes {
    fn from(bytes: &'static [u8]) -> Bytes {
        Bytes::whole(bytes)
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.range.clone()]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len())
    }
}
