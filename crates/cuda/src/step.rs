//! The step buffer: everything that differs between two passes of one shape, at
//! fixed addresses.
//!
//! What a reader would get wrong: rows beyond the step's own, up to the padded
//! shape, are written too, as rows without a sequence.

use crate::attention::MOST_BLOCKS;
use crate::driver::{Context, Memory, Pinned, Stream};
use model::{DeviceError, Input, Shape, Step};
use std::sync::Arc;

/// A padding row's sequence, and a padding entry of the wanted rows.
const NONE: u32 = u32::MAX;

/// Words of a row: token, position, sequence, first row and number of rows of its sequence in the pass, and where the
/// page table of each class begins.
const ROW_WORDS: usize = 8;

/// How many of each thing the buffer has room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Room {
    rows: usize,
    wanted: usize,
    pages: usize,
}

impl Room {
    fn words(self) -> usize {
        self.rows * ROW_WORDS + self.wanted + self.pages
    }
}

/// The step buffer and its twin in host memory.
#[derive(Default)]
pub(crate) struct StepBuffer {
    room: Room,
    memory: Option<(Memory, Pinned)>,
}

impl StepBuffer {
    /// Uploads `step`. Gives whether the buffer moved. The stream must have passed the upload before.
    pub(crate) fn upload(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        step: &Step,
        shape: Shape,
    ) -> Result<bool, DeviceError> {
        let n_pages = step.pages.iter().flatten().map(Vec::len).sum();
        let has_moved = self.reserve(context, shape, n_pages)?;
        let room = self.room;
        let (memory, pinned) = self.memory.as_mut().expect("just reserved");
        let bytes = pinned.as_mut_slice();
        let mut words = bytes.as_chunks_mut::<4>().0.iter_mut();
        let mut put = |value: u32| {
            if let Some(word) = words.next() {
                *word = value.to_le_bytes();
            }
        };
        let tables = table_starts(step);
        let mut start = 0;
        for (r, row) in step.rows.iter().enumerate() {
            if r > 0 && step.rows[r - 1].seq != row.seq {
                start = r;
            }
            let same = step.rows[start..]
                .iter()
                .take_while(|other| other.seq == row.seq);
            let Input::Token(token) = row.input;
            let [full, sliding, drafter] = tables[row.seq as usize];
            let n_own = same.count() as u32;
            for word in [
                token,
                row.pos,
                row.seq,
                start as u32,
                n_own,
                full,
                sliding,
                drafter,
            ] {
                put(word);
            }
        }
        for _ in step.rows.len()..room.rows {
            for word in [0, 0, NONE, 0, 0, 0, 0, 0] {
                put(word);
            }
        }
        let padding = std::iter::repeat_n(NONE, room.wanted - step.wanted.len());
        step.wanted
            .iter()
            .copied()
            .chain(padding)
            .for_each(&mut put);
        let pages = step.pages.iter().flatten().flatten();
        pages.for_each(|page| put(page.map_or(NONE, |page| page.0)));
        let used = (room.words() - room.pages + n_pages) * 4;
        stream.upload(memory.address(), pinned, used)?;
        Ok(has_moved)
    }

    /// Makes room. Gives whether the buffer moved.
    fn reserve(
        &mut self,
        context: &Arc<Context>,
        shape: Shape,
        n_pages: usize,
    ) -> Result<bool, DeviceError> {
        let needed = Room {
            rows: shape.rows.max(self.room.rows).max(1),
            wanted: shape.wanted.max(self.room.wanted).max(1),
            pages: match n_pages <= self.room.pages {
                true => self.room.pages,
                false => n_pages.next_power_of_two().max(1024),
            },
        };
        if self.memory.is_some() && needed == self.room {
            return Ok(false);
        }
        let bytes = needed.words() * 4;
        self.memory = None;
        let memory = Memory::new(context, "the step buffer", bytes)?;
        self.memory = Some((memory, Pinned::new(context, bytes)?));
        self.room = needed;
        Ok(true)
    }

    fn address(&self) -> u64 {
        self.memory
            .as_ref()
            .map_or(0, |(memory, _)| memory.address())
    }

    /// Where the rows lie.
    pub(crate) fn rows(&self) -> u64 {
        self.address()
    }

    /// Where the indices of the wanted rows lie.
    pub(crate) fn wanted(&self) -> u64 {
        self.address() + (self.room.rows * ROW_WORDS * 4) as u64
    }

    /// Where the page ids of all tables lie.
    pub(crate) fn pages(&self) -> u64 {
        self.wanted() + (self.room.wanted * 4) as u64
    }
}

/// Where each sequence's tables begin in the list of all page ids.
fn table_starts(step: &Step) -> Vec<[u32; 3]> {
    let mut at = 0;
    let mut start = |table: &Vec<_>| {
        at += table.len() as u32;
        at - table.len() as u32
    };
    step.pages
        .iter()
        .map(|tables| [&tables[0], &tables[1], &tables[2]].map(&mut start))
        .collect()
}

/// States that attention keeps of a row at most, one for the pass's own rows included; see kernels/attention.cu.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct States {
    /// If each is a block of keys.
    pub(crate) blocks: usize,
    /// If each is a segment.
    pub(crate) segments: usize,
}

impl States {
    /// Those of a step, rounded up so that they seldom grow.
    pub(crate) fn of(step: &Step) -> States {
        const BLOCKS_OF_PAGE: usize = 4;
        const PAGES_OF_SHORT_CONTEXT: usize = 64;
        const PAGES_OF_LONG_SEGMENT: usize = 8;
        let pages = step.pages.iter().flatten().map(Vec::len).max().unwrap_or(0);
        let short = pages.min(PAGES_OF_SHORT_CONTEXT);
        let segments = short.max(pages / PAGES_OF_LONG_SEGMENT + 1) + 1;
        let blocks = (pages * BLOCKS_OF_PAGE + 1).min(MOST_BLOCKS);
        States {
            blocks: blocks.next_multiple_of(64),
            segments: segments.next_multiple_of(16),
        }
    }

    /// The larger of both, each by itself.
    pub(crate) fn or(self, other: States) -> States {
        States {
            blocks: self.blocks.max(other.blocks),
            segments: self.segments.max(other.segments),
        }
    }
}
