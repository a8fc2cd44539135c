//! Reads a turn for its caller: the turn parser with stop strings on the
//! answer.
//!
//! The engine's guide holds a clone of the very reader that makes the
//! caller's text, so both see the end at the same token. What a reader would
//! get wrong: stop strings look at the answer only, never at reasoning or tool
//! calls; text that may begin one is given up when anything else comes.

use crate::chat::Tool;
use crate::error::Error;
use crate::stop::StopStrings;
use crate::tokenizer::Tokenizer;
use crate::turn::{FinishReason, Place, TurnEnd, TurnEvent, TurnFormat, TurnParser};
use std::sync::Arc;

/// A turn parser that also ends at stop strings.
#[derive(Clone, Debug)]
pub struct Reader {
    parser: TurnParser,
    stop: StopStrings,
    end: Option<TurnEnd>,
    n_calls: usize,
    /// Bytes of the answer's text, what is held back for a stop string included.
    n_answer: usize,
}

impl Reader {
    /// A reader at the beginning of a turn.
    ///
    /// # Errors
    /// [`Error::EmptyStopString`].
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        format: TurnFormat,
        tools: Arc<[Tool]>,
        stop: &[String],
    ) -> Result<Reader, Error> {
        Ok(Reader {
            parser: TurnParser::new(tokenizer, format, tools),
            stop: StopStrings::new(stop)?,
            end: None,
            n_calls: 0,
            n_answer: 0,
        })
    }

    /// Adds a token; gives what is certain now. After the end tokens mean
    /// nothing.
    pub fn push(&mut self, token: u32) -> Vec<TurnEvent> {
        if self.end.is_some() {
            return Vec::new();
        }
        let parsed = self.parser.push(token);
        self.pass_on(parsed)
    }

    /// Ends a turn whose tokens are used up; gives what was held back and why
    /// the turn is over.
    pub fn finish(&mut self) -> (Vec<TurnEvent>, TurnEnd) {
        if let Some(end) = self.end {
            return (Vec::new(), end);
        }
        let parsed = self.parser.finish();
        let events = self.pass_on(parsed);
        (events, self.end.unwrap_or(TurnEnd::Budget))
    }

    /// Why the turn is over; `None` while it is not.
    pub fn end(&self) -> Option<TurnEnd> {
        self.end
    }

    /// Does a blank at the beginning of the next token leave no trace?
    pub(crate) fn drops_blank(&self) -> bool {
        self.parser.drops_blank()
    }

    /// Where the text of the next token goes.
    pub fn place(&self) -> Place {
        self.parser.place()
    }

    /// Bytes of the answer up to the newest token: those given out, those held back
    /// because they may begin a stop string, and those of half a character.
    pub fn answer_bytes(&self) -> usize {
        self.n_answer + self.parser.n_pending()
    }

    /// Number of complete calls that were passed on.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// Why the answer is over, in OpenAI's words; `None` while it is not.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        Some(self.end?.finish_reason(self.n_calls))
    }

    fn pass_on(&mut self, parsed: Vec<TurnEvent>) -> Vec<TurnEvent> {
        let mut events = Vec::new();
        for event in parsed {
            match event {
                TurnEvent::Content(piece) => {
                    self.n_answer += piece.len();
                    let text = self.stop.push(&piece);
                    push_content(&mut events, text);
                    if self.stop.is_stopped() {
                        self.end = Some(TurnEnd::StopString);
                        return events;
                    }
                }
                other => {
                    push_content(&mut events, self.stop.flush());
                    if let TurnEvent::ToolCall { .. } = other {
                        self.n_calls += 1;
                    }
                    events.push(other);
                }
            }
        }
        if let Some(end) = self.parser.end() {
            push_content(&mut events, self.stop.flush());
            self.end = Some(end);
        }
        events
    }
}

fn push_content(events: &mut Vec<TurnEvent>, text: String) {
    if !text.is_empty() {
        events.push(TurnEvent::Content(text));
    }
}
