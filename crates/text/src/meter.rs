//! What a rendering may spend, and the values that it may keep.
//!
//! The template of an untrusted file runs on one budget: whatever it makes or
//! reads is paid for in units of about one byte. What a reader would get
//! wrong: fuel alone bounds neither memory nor time, since one instruction can
//! double a string or compare two huge lists. So every value that an
//! instruction makes goes through [`Meter::keep`], which holds three facts on
//! which the rest relies: a value is a finite tree of limited depth, limited
//! size when written out, and nothing in it is lazy or can change later.

use crate::error::Error;
use minijinja::value::{Enumerator, Kwargs, Object, ValueKind};
use minijinja::{Error as EngineError, ErrorKind, Value};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Most bytes of values that one rendering makes and reads.
pub const MOST_WORK_BYTES: u64 = 512 << 20;
/// Most bytes of one value, written out.
pub const MOST_VALUE_BYTES: u64 = 32 << 20;
/// Most lists and objects inside one another.
pub const MOST_LEVELS: usize = 256;

/// What an item of a list or an object counts when it is made.
const ITEM_BYTES: u64 = 32;
/// What a part of a value counts beside its text, so that values of many
/// empty parts have a size.
const PART_BYTES: u64 = 16;
/// Bytes of a text that are read for one unit.
const READ_BYTES_PER_UNIT: u64 = 16;

/// Why a rendering was stopped, to be found again behind the engine's error.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Stop {
    #[error("{0}")]
    Raised(String),
    #[error("strftime code {0}")]
    DateCode(String),
    #[error("the budget is spent")]
    Work,
    #[error("a value is too large")]
    ValueSize,
    #[error("a value is too deep")]
    ValueDepth,
}

impl Stop {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Stop::Raised(message) => Error::TemplateRaised {
                message: gguf::shown(&message),
            },
            Stop::DateCode(found) => Error::DateCode { found },
            Stop::Work => Error::TemplateWork {
                most_bytes: MOST_WORK_BYTES,
            },
            Stop::ValueSize => Error::TemplateValueTooLarge {
                most_bytes: MOST_VALUE_BYTES,
            },
            Stop::ValueDepth => Error::TemplateValueTooDeep {
                most_levels: MOST_LEVELS,
            },
        }
    }
}

impl From<Stop> for EngineError {
    fn from(stop: Stop) -> EngineError {
        EngineError::new(ErrorKind::InvalidOperation, stop.to_string()).with_source(stop)
    }
}

/// An error that names what the engine may not do.
pub(crate) fn refused(reason: impl Into<String>) -> EngineError {
    EngineError::new(ErrorKind::InvalidOperation, reason.into())
}

/// Size of a value that is looked through.
#[derive(Default)]
struct Tally {
    n_parts: u64,
    bytes: u64,
}

/// The budget of one rendering.
#[derive(Debug)]
pub(crate) struct Meter {
    left: AtomicU64,
}

impl Meter {
    pub(crate) fn new() -> Arc<Meter> {
        Arc::new(Meter {
            left: AtomicU64::new(MOST_WORK_BYTES),
        })
    }

    pub(crate) fn pay(&self, units: u64) -> Result<(), EngineError> {
        // One thread renders: nothing comes between the two.
        let left = self.left.load(Ordering::Relaxed);
        self.left
            .store(left.saturating_sub(units), Ordering::Relaxed);
        match units <= left {
            true => Ok(()),
            false => Err(Stop::Work.into()),
        }
    }

    /// Pays for a text that does not exist yet.
    pub(crate) fn pay_text(&self, bytes: u64) -> Result<(), EngineError> {
        match bytes <= MOST_VALUE_BYTES {
            true => self.pay(bytes),
            false => Err(Stop::ValueSize.into()),
        }
    }

    /// Pays for a list of `n` items that does not exist yet.
    pub(crate) fn pay_items(&self, n: usize) -> Result<(), EngineError> {
        self.pay(ITEM_BYTES.saturating_mul(n as u64))
    }

    /// Takes a value that an instruction made: lists are made whole where the
    /// engine would make them item by item, then all of it is checked.
    pub(crate) fn keep(&self, value: Value) -> Result<Value, EngineError> {
        let value = match value.kind() {
            ValueKind::String => {
                self.pay(value.as_str().unwrap_or_default().len() as u64)?;
                value
            }
            ValueKind::Seq | ValueKind::Iterable => match value.downcast_object_ref::<Vec<Value>>()
            {
                Some(items) => {
                    self.pay_items(items.len())?;
                    value
                }
                None => {
                    let mut items = Vec::new();
                    for item in value.try_iter()? {
                        self.pay_items(1)?;
                        items.push(item);
                    }
                    Value::from(items)
                }
            },
            ValueKind::Map if value.downcast_object_ref::<Namespace>().is_some() => {
                return Ok(value);
            }
            ValueKind::Map => {
                self.pay_items(value.len().unwrap_or(0))?;
                match is_plain_map(&value) {
                    true => value,
                    false => Value::from_iter(pairs(&value)),
                }
            }
            _ => value,
        };
        self.check(&value)?;
        Ok(value)
    }

    /// Looks through a value that shall be kept.
    pub(crate) fn check(&self, value: &Value) -> Result<(), EngineError> {
        let mut tally = Tally::default();
        tally.add(value, 0, true)?;
        self.pay(tally.n_parts)
    }

    /// Pays for operands that are read once from one end to the other, without what is
    /// in their items.
    pub(crate) fn read(&self, operands: &[Value]) -> Result<(), EngineError> {
        for value in operands {
            let length = match value.as_str() {
                Some(text) => text.len() as u64 / READ_BYTES_PER_UNIT,
                None => value.len().unwrap_or(0) as u64,
            };
            self.pay(length + 1)?;
        }
        Ok(())
    }

    /// Pays for the operands of a filter, test or method. The first is read with all
    /// that is in it, `n_times`; where it is a list, the others are read again for
    /// each of its items.
    pub(crate) fn apply(&self, operands: &[Value], n_times: u64) -> Result<(), EngineError> {
        let Some((first, others)) = operands.split_first() else {
            return Ok(());
        };
        let mut of_first = Tally::default();
        of_first.add(first, 0, false)?;
        let mut of_others = Tally::default();
        for value in others {
            of_others.add(value, 0, false)?;
        }
        let n_items = match first.as_object() {
            Some(_) => first.len().unwrap_or(1) as u64,
            None => 1,
        };
        let once = of_first.n_parts + of_first.bytes / READ_BYTES_PER_UNIT;
        let each = n_items.max(1).saturating_mul(of_others.bytes);
        self.pay(once.saturating_add(each).saturating_mul(n_times))
    }

    /// Pays for the texts in a value that were made with it.
    pub(crate) fn keep_texts(&self, value: Value) -> Result<Value, EngineError> {
        let value = self.keep(value)?;
        let mut tally = Tally::default();
        tally.add(&value, 0, false)?;
        self.pay(tally.bytes)?;
        Ok(value)
    }

    /// Pays for values that are read with all that is in them.
    pub(crate) fn read_all(&self, values: &[Value]) -> Result<(), EngineError> {
        for value in values {
            let mut tally = Tally::default();
            tally.add(value, 0, false)?;
            self.pay(tally.n_parts + tally.bytes / READ_BYTES_PER_UNIT)?;
        }
        Ok(())
    }

    /// Pays for `a * b` where it repeats a text or a list.
    pub(crate) fn repeat(&self, a: &Value, b: &Value) -> Result<(), EngineError> {
        for (repeated, times) in [(a, b), (b, a)] {
            let Some(times) = times.as_usize() else {
                continue;
            };
            if let Some(text) = repeated.as_str() {
                self.pay_text((text.len() as u64).saturating_mul(times as u64))?;
            } else if let Some(length) = repeated.as_object().and_then(|_| repeated.len()) {
                self.pay_items(length.max(1).saturating_mul(times))?;
            }
        }
        Ok(())
    }

    /// Pays for writing a value out; escaping makes a character six at most.
    pub(crate) fn write(&self, value: &Value) -> Result<(), EngineError> {
        match value.as_str() {
            Some(text) => self.pay(text.len() as u64),
            None => {
                let mut tally = Tally::default();
                tally.add(value, 0, false)?;
                self.pay(6 * tally.bytes)
            }
        }
    }
}

impl Tally {
    /// Adds all parts of a value. `is_kept` refuses what may change later or
    /// refers to what no one sees: a chain of such values has no depth that
    /// could be checked.
    fn add(&mut self, value: &Value, level: usize, is_kept: bool) -> Result<(), EngineError> {
        if level > MOST_LEVELS {
            return Err(Stop::ValueDepth.into());
        }
        self.n_parts += 1;
        self.bytes += PART_BYTES + value.as_str().map_or(0, str::len) as u64;
        if self.bytes > MOST_VALUE_BYTES {
            return Err(Stop::ValueSize.into());
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                match value.downcast_object_ref::<Vec<Value>>() {
                    Some(items) => items
                        .iter()
                        .try_for_each(|item| self.add(item, level + 1, is_kept)),
                    None => value
                        .try_iter()?
                        .try_for_each(|item| self.add(&item, level + 1, is_kept)),
                }
            }
            ValueKind::Map if is_kept && !is_plain_map(value) => Err(refused(
                "a namespace, a macro or a loop cannot be part of a value",
            )),
            ValueKind::Map => pairs(value).try_for_each(|(key, item)| {
                self.add(&key, level + 1, is_kept)?;
                self.add(&item, level + 1, is_kept)
            }),
            _ => Ok(()),
        }
    }
}

fn pairs(map: &Value) -> impl Iterator<Item = (Value, Value)> {
    let pairs = map.as_object().and_then(|object| object.try_iter_pairs());
    pairs.into_iter().flatten()
}

/// Is this an object as JSON has them, not one of the engine's own?
fn is_plain_map(value: &Value) -> bool {
    static PLAIN: LazyLock<Value> = LazyLock::new(|| Value::from_iter([("key", 0)]));
    let type_of = |value: &Value| value.as_object().map(|object| object.type_name());
    type_of(value) == type_of(&PLAIN)
}

/// What `namespace()` gives: the only value that a template can change.
///
/// The engine's own would let a template hang namespaces into one another,
/// link by link, without any value being deep when it is stored.
#[derive(Debug, Default)]
pub(crate) struct Namespace(Mutex<BTreeMap<String, Value>>);

impl Namespace {
    /// A namespace that holds what `defaults`, an object, and `more` hold.
    pub(crate) fn new(
        meter: &Meter,
        defaults: Option<&Value>,
        more: &Kwargs,
    ) -> Result<Namespace, EngineError> {
        let namespace = Namespace::default();
        for (name, value) in defaults.into_iter().flat_map(pairs) {
            let name = name
                .as_str()
                .ok_or_else(|| refused("a namespace's names are strings"))?;
            namespace.set(meter, name, value)?;
        }
        for name in more.args() {
            namespace.set(meter, name, more.get(name)?)?;
        }
        Ok(namespace)
    }

    pub(crate) fn set(&self, meter: &Meter, name: &str, value: Value) -> Result<(), EngineError> {
        meter.check(&value)?;
        meter.pay_items(1)?;
        self.values().insert(name.to_owned(), value);
        Ok(())
    }

    fn values(&self) -> MutexGuard<'_, BTreeMap<String, Value>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.values().get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.values().keys().map(Value::from).collect())
    }
}
