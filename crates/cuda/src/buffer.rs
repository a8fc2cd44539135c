//! Activations on the device: `[rows, cols]` f32, as many rows as the largest pass
//! so far had.
//!
//! What a reader would get wrong: a buffer moves when it grows, so recorded
//! launches are forgotten then; between two passes of one shape it never moves.

use crate::driver::{Context, Memory, Stream};
use model::backend::RowSet;
use model::{DeviceError, Shape};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

/// `[rows, cols]`, f32.
pub struct Buf {
    pub(crate) set: RowSet,
    pub(crate) cols: usize,
    cell: Arc<Cell>,
}

/// What changes about a buffer. One thread at a time uses it.
struct Cell {
    address: AtomicU64,
    /// Which write its content is; 0 before the first.
    version: AtomicU64,
    /// The form in which products of few and of many columns asked for it last, as `products` numbers them.
    forms: [AtomicU32; 2],
}

impl Buf {
    pub(crate) fn address(&self) -> u64 {
        self.cell.address.load(Relaxed)
    }

    pub(crate) fn version(&self) -> u64 {
        self.cell.version.load(Relaxed)
    }

    pub(crate) fn set_version(&self, version: u64) {
        self.cell.version.store(version, Relaxed);
    }

    /// The form in which products asked for it last, with many columns or few.
    pub(crate) fn form(&self, are_many: bool) -> u32 {
        self.cell.forms[usize::from(are_many)].load(Relaxed)
    }

    pub(crate) fn set_form(&self, are_many: bool, form: u32) {
        self.cell.forms[usize::from(are_many)].store(form, Relaxed);
    }
}

/// A buffer's memory.
struct Held {
    cell: Weak<Cell>,
    set: RowSet,
    cols: usize,
    rows: usize,
    memory: Memory,
}

/// The memory of all buffers.
#[derive(Default)]
pub(crate) struct Buffers {
    held: Vec<Held>,
}

/// Rows of a set in a pass.
pub(crate) fn rows_of(shape: Shape, set: RowSet) -> usize {
    match set {
        RowSet::All => shape.rows,
        RowSet::Wanted => shape.wanted,
    }
}

fn zeroed(
    context: &Arc<Context>,
    stream: &Stream,
    rows: usize,
    cols: usize,
) -> Result<Memory, DeviceError> {
    let bytes = rows * cols * size_of::<f32>();
    let memory = Memory::new(context, "activations", bytes)?;
    stream.clear(memory.address(), bytes)?;
    Ok(memory)
}

impl Buffers {
    /// A buffer for passes of `shape`.
    pub(crate) fn add(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        shape: Shape,
        (set, cols): (RowSet, usize),
    ) -> Result<Buf, DeviceError> {
        let rows = rows_of(shape, set).max(1);
        let memory = zeroed(context, stream, rows, cols)?;
        let cell = Arc::new(Cell {
            address: AtomicU64::new(memory.address()),
            version: AtomicU64::new(0),
            forms: Default::default(),
        });
        self.held.push(Held {
            cell: Arc::downgrade(&cell),
            set,
            cols,
            rows,
            memory,
        });
        Ok(Buf { set, cols, cell })
    }

    /// Makes every buffer that is still in use as large as `shape` needs. Gives whether any moved.
    pub(crate) fn grow(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        shape: Shape,
    ) -> Result<bool, DeviceError> {
        self.held.retain(|held| held.cell.strong_count() > 0);
        let mut has_moved = false;
        for held in &mut self.held {
            let rows = rows_of(shape, held.set);
            let Some(cell) = held.cell.upgrade().filter(|_| rows > held.rows) else {
                continue;
            };
            if !has_moved {
                // The work so far may still use what is freed here.
                stream.finish()?;
                has_moved = true;
            }
            held.memory = zeroed(context, stream, rows, held.cols)?;
            held.rows = rows;
            cell.address.store(held.memory.address(), Relaxed);
            cell.version.store(0, Relaxed);
        }
        Ok(has_moved)
    }

    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> u64 {
        self.held
            .iter()
            .map(|held| held.memory.bytes() as u64)
            .sum()
    }
}
