//! The guide of a turn: tells the engine where the answer ends.

use crate::reader::Reader;
use model::{Constraint, Guide, Verdict};

/// Stops at end tokens and stop strings; lets every token through.
#[derive(Clone, Debug)]
pub struct TurnGuide {
    reader: Reader,
}

impl TurnGuide {
    /// A guide that goes on from where `reader` is. Give it a clone of the
    /// reader that makes the caller's text.
    pub fn new(reader: Reader) -> TurnGuide {
        TurnGuide { reader }
    }

    /// The reader, with all tokens that were accepted.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }
}

impl Guide for TurnGuide {
    fn constraint(&mut self) -> Constraint {
        Constraint::Free
    }

    fn accept(&mut self, token: u32) -> Verdict {
        self.reader.push(token);
        match self.reader.end() {
            Some(_) => Verdict::Stop,
            None => Verdict::Continue,
        }
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}
