//! The guide of a turn: tells the engine what may come next and where the
//! answer ends.
//!
//! A turn without rules is free; the guide only finds its end. Under rules the
//! guide follows the messages of the turn: it restricts their headers, the
//! bodies that have a grammar, and where the turn may end; reasoning stays free
//! up to its budget. What a reader would get wrong: under rules every header is
//! restricted, or a model could write its answer where nobody looks for one.

use crate::call::Call;
use crate::grammar::{Grammar, NOTHING_FITS};
use crate::reader::Reader;
use crate::rules::Rules;
use crate::turn::{ASSISTANT, Marker, TurnFormat};
use model::{Constraint, Guide, TokenMask, Verdict};
use std::sync::Arc;

/// Ends a turn at end tokens and stop strings; under rules, lets through only
/// what keeps to them.
#[derive(Clone)]
pub struct TurnGuide {
    reader: Reader,
    ruled: Option<Ruled>,
}

impl TurnGuide {
    /// A guide without rules that goes on from where `reader` is. Give it a
    /// clone of the reader that makes the caller's text.
    pub fn new(reader: Reader) -> TurnGuide {
        TurnGuide {
            reader,
            ruled: None,
        }
    }

    /// A guide for a turn that has not begun.
    pub(crate) fn with_rules(reader: Reader, rules: Arc<Rules>) -> TurnGuide {
        TurnGuide {
            reader,
            ruled: Some(Ruled::new(rules)),
        }
    }

    /// The reader, with all tokens that were accepted.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }
}

impl Guide for TurnGuide {
    fn constraint(&mut self) -> Constraint {
        match &mut self.ruled {
            Some(ruled) if self.reader.end().is_none() => {
                ruled.constraint(self.reader.drops_blank())
            }
            _ => Constraint::Free,
        }
    }

    fn accept(&mut self, token: u32) -> Verdict {
        self.reader.push(token);
        if let Some(ruled) = &mut self.ruled {
            ruled.accept(token, self.reader.n_calls());
        }
        match self.reader.end() {
            Some(_) => Verdict::Stop,
            None => Verdict::Continue,
        }
    }

    fn failure(&self) -> Option<String> {
        self.ruled.as_ref()?.failure.clone()
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

/// A turn under rules.
#[derive(Clone)]
struct Ruled {
    rules: Arc<Rules>,
    place: Place,
    done: Done,
    /// Why nothing can come any more.
    failure: Option<String>,
}

#[derive(Clone)]
enum Place {
    /// Behind the end of a message.
    Border,
    /// Before `<|message|>`. Behind `<|start|>` the role comes first.
    Header {
        role: &'static str,
        written: Vec<u8>,
    },
    Reasoning,
    Answer(Option<Box<Grammar>>),
    Call(Option<Box<Call>>),
}

impl Place {
    fn header(role: &'static str) -> Place {
        Place::Header {
            role,
            written: Vec::new(),
        }
    }
}

/// What the turn has so far.
#[derive(Clone, Copy, Default)]
struct Done {
    n_reasoning: usize,
    n_calls: usize,
    /// An answer that followed its grammar?
    has_answer: bool,
}

impl Ruled {
    fn new(rules: Arc<Rules>) -> Ruled {
        let place = match rules.format {
            TurnFormat::MuseGlimmer { .. } => Place::header(""),
            TurnFormat::Plain { .. } => Place::Answer(rules.answer.clone().map(Box::new)),
        };
        Ruled {
            rules,
            place,
            done: Done::default(),
            failure: None,
        }
    }

    fn constraint(&mut self, drops_blank: bool) -> Constraint {
        if self.failure.is_some() {
            return Constraint::Masked(self.rules.none());
        }
        let mask = match self.mask() {
            Ok(None) => return Constraint::Free,
            Ok(Some(mask)) if drops_blank => self.rules.vocabulary.without_blank(mask),
            Ok(Some(mask)) => mask,
            Err(reason) => return self.fail(reason),
        };
        match mask.n_allowed() {
            0 => self.fail(NOTHING_FITS.to_owned()),
            1 => Constraint::Forced(mask.tokens().next().expect("one is allowed")),
            _ => Constraint::Masked(mask),
        }
    }

    fn fail(&mut self, reason: String) -> Constraint {
        self.failure = Some(reason);
        Constraint::Masked(self.rules.none())
    }

    /// The tokens that may come next; `None` if all may.
    fn mask(&mut self) -> Result<Option<TokenMask>, String> {
        let (rules, done) = (&*self.rules, self.done);
        let mask = match &mut self.place {
            Place::Answer(None) | Place::Call(None) => return Ok(None),
            Place::Border => rules.only(rules.format.start()),
            Place::Header { role, written } => rules.header_mask(role, written, done),
            Place::Reasoning if rules.is_spent(done) => rules.only(rules.format.eom()),
            Place::Reasoning if rules.is_kept(done) => return Ok(None),
            Place::Reasoning => TokenMask::clone(&rules.no_end),
            Place::Answer(Some(grammar)) => {
                let mut mask = grammar.mask()?;
                if grammar.is_complete() {
                    rules.allow_end(&mut mask, rules.may_call(done));
                }
                mask
            }
            Place::Call(Some(call)) => {
                let mut mask = call.mask(&rules.vocabulary)?;
                if call.is_complete() {
                    rules.allow_end(&mut mask, rules.is_parallel);
                }
                mask
            }
        };
        Ok(Some(mask))
    }

    /// Goes on by a token, which made the calls of the turn `n_calls`.
    fn accept(&mut self, token: u32, n_calls: usize) {
        self.done.n_calls = n_calls;
        let accepted = match self.rules.format.marker(token) {
            None => self.accept_text(token),
            Some(Marker::Start) => {
                self.place = Place::header(ASSISTANT);
                Ok(())
            }
            Some(Marker::Message) => self.begin_body(),
            Some(Marker::EndOfMessage) => {
                self.done.has_answer |= matches!(self.place, Place::Answer(Some(_)));
                self.place = Place::Border;
                Ok(())
            }
            Some(Marker::End(_)) => Ok(()),
        };
        if let Err(reason) = accepted {
            self.failure.get_or_insert(reason);
        }
    }

    fn accept_text(&mut self, token: u32) -> Result<(), String> {
        let bytes = self.rules.vocabulary.bytes(token);
        match &mut self.place {
            Place::Border => Err("a message begins without its marker".to_owned()),
            Place::Header { written, .. } => {
                written.extend_from_slice(bytes);
                Ok(())
            }
            Place::Reasoning => {
                self.done.n_reasoning += 1;
                Ok(())
            }
            Place::Answer(Some(grammar)) => grammar.accept(token),
            Place::Call(Some(call)) => call.accept(token, bytes),
            Place::Answer(None) | Place::Call(None) => Ok(()),
        }
    }

    /// Behind `<|message|>`, which means nothing inside of a body.
    fn begin_body(&mut self) -> Result<(), String> {
        let Place::Header { role, written } = &self.place else {
            self.done.n_reasoning += usize::from(matches!(self.place, Place::Reasoning));
            return Ok(());
        };
        let headers = self.rules.headers(role, self.done);
        let header = headers.iter().find(|(text, _)| text.as_bytes() == written);
        let &(_, recipient) = header.ok_or("it is no header of a message")?;
        self.place = match recipient {
            Recipient::Model => Place::Reasoning,
            Recipient::User => Place::Answer(self.rules.answer.clone().map(Box::new)),
            Recipient::Tool(index) => {
                let shape = self.rules.tools[index].shape.clone();
                Place::Call(shape.map(|shape| Box::new(Call::new(shape))))
            }
        };
        Ok(())
    }
}

/// To whom a message is.
#[derive(Clone, Copy)]
enum Recipient {
    Model,
    User,
    /// By index.
    Tool(usize),
}

impl Rules {
    fn none(&self) -> TokenMask {
        TokenMask::none(self.vocabulary.n_vocab())
    }

    fn only(&self, token: Option<u32>) -> TokenMask {
        let mut mask = self.none();
        token.into_iter().for_each(|token| mask.allow(token));
        mask
    }

    /// Is the reasoning budget used up?
    fn is_spent(&self, done: Done) -> bool {
        self.reasoning_budget
            .is_some_and(|most| done.n_reasoning >= most)
    }

    fn may_call(&self, done: Done) -> bool {
        !self.tools.is_empty() && (self.is_parallel || done.n_calls == 0)
    }

    /// Has the turn what it must have, so that it may end?
    fn is_kept(&self, done: Done) -> bool {
        match self.must_call {
            true => done.n_calls > 0,
            false => self.answer.is_none() || done.has_answer || done.n_calls > 0,
        }
    }

    fn allow_end(&self, mask: &mut TokenMask, may_go_on: bool) {
        let eom = self.format.eom().filter(|_| may_go_on);
        let ends = self.format.ends().chain(eom);
        ends.for_each(|token| mask.allow(token));
    }

    /// The headers that may come now.
    fn headers(&self, role: &str, done: Done) -> Vec<(String, Recipient)> {
        let mut headers = Vec::new();
        if !self.is_spent(done) {
            headers.push((format!("{role} to=self"), Recipient::Model));
        }
        if !self.must_call && !done.has_answer {
            headers.push((format!("{role} to=user"), Recipient::User));
            headers.push((role.to_owned(), Recipient::User));
        }
        if self.may_call(done) {
            let tools = self.tools.iter().enumerate();
            headers.extend(tools.map(|(index, tool)| {
                let header = format!("{role} to={}", tool.name);
                (header, Recipient::Tool(index))
            }));
        }
        headers
    }

    fn header_mask(&self, role: &str, written: &[u8], done: Done) -> TokenMask {
        let mut mask = self.none();
        for (header, _) in self.headers(role, done) {
            match header.as_bytes().strip_prefix(written) {
                Some([]) => self
                    .format
                    .message()
                    .into_iter()
                    .for_each(|token| mask.allow(token)),
                Some(rest) => self.vocabulary.allow_beginnings(rest, &mut mask),
                None => {}
            }
        }
        mask
    }
}
