//! The turn parser: generated token ids in, reasoning, answer and tool calls
//! out.
//!
//! ```text
//! turn    = message { "<|eom|>" "<|start|>assistant" message } ( "<|eot|>" | end of text | end of tokens )
//! message = [ " to=" recipient ] "<|message|>" body
//! ```
//!
//! What a reader would get wrong: only real control tokens delimit. The same
//! characters spelled with ordinary tokens are text, and no marker ever
//! reaches the caller. Any list of tokens is a turn:
//!
//! - Where a header should be and text stands that cannot be one, the text is
//!   answer. A header that nothing follows is dropped.
//! - `<|start|>` and the end tokens end a message that `<|eom|>` did not;
//!   `<|message|>` inside a body leaves no trace, like every other control
//!   token.
//! - A header with another role than the assistant's ends the turn: the model
//!   has begun to write the other side's part.

use crate::chat::Tool;
use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;
use crate::tool_call;
use crate::vocab::FRAME_MARKERS;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Most bytes of a recipient; a longer one is no header.
const MOST_RECIPIENT_BYTES: usize = 256;
/// The role whose messages are read.
pub(crate) const ASSISTANT: &str = "assistant";
const OTHER_ROLES: [&str; 4] = ["user", "system", "developer", "tool"];

/// How a model's turns are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnFormat {
    /// Messages with headers, as Muse Glimmer writes them.
    MuseGlimmer {
        /// `<|start|>`.
        start: u32,
        /// `<|message|>`.
        message: u32,
        /// `<|eom|>`: the turn goes on.
        eom: u32,
        /// `<|eot|>`: the turn is over.
        eot: u32,
        /// End of text.
        eos: Option<u32>,
    },
    /// All text is the answer.
    Plain {
        /// The tokens that end a turn but are not end of text.
        eot: Vec<u32>,
        /// End of text.
        eos: Option<u32>,
        /// The text goes on where a prompt broke off: a blank at its beginning
        /// is meant.
        is_continuation: bool,
    },
}

impl TurnFormat {
    /// The format of a file's chats: Muse Glimmer's if the vocabulary has its
    /// markers, else plain.
    pub fn of_chat(tokenizer: &Tokenizer) -> TurnFormat {
        match FRAME_MARKERS.map(|text| tokenizer.id_of(text)) {
            [Some(start), Some(message), Some(eom), Some(eot)] => TurnFormat::MuseGlimmer {
                start,
                message,
                eom,
                eot,
                eos: tokenizer.special().eos,
            },
            _ => TurnFormat::plain(tokenizer, false),
        }
    }

    /// The format of plain completion.
    pub fn of_completion(tokenizer: &Tokenizer) -> TurnFormat {
        TurnFormat::plain(tokenizer, true)
    }

    fn plain(tokenizer: &Tokenizer, is_continuation: bool) -> TurnFormat {
        let eos = tokenizer.special().eos;
        TurnFormat::Plain {
            eot: tokenizer
                .end_tokens()
                .into_iter()
                .filter(|&id| Some(id) != eos)
                .collect(),
            eos,
            is_continuation,
        }
    }

    /// The token before a message's header, if messages have one.
    pub(crate) fn start(&self) -> Option<u32> {
        match *self {
            TurnFormat::MuseGlimmer { start, .. } => Some(start),
            TurnFormat::Plain { .. } => None,
        }
    }

    /// The token between header and body, if messages have a header.
    pub(crate) fn message(&self) -> Option<u32> {
        match *self {
            TurnFormat::MuseGlimmer { message, .. } => Some(message),
            TurnFormat::Plain { .. } => None,
        }
    }

    /// The token behind a message that is not the last, if turns have several.
    pub(crate) fn eom(&self) -> Option<u32> {
        match *self {
            TurnFormat::MuseGlimmer { eom, .. } => Some(eom),
            TurnFormat::Plain { .. } => None,
        }
    }

    /// The tokens that end a turn.
    pub(crate) fn ends(&self) -> impl Iterator<Item = u32> + '_ {
        let (eot, eos) = match self {
            TurnFormat::MuseGlimmer { eot, eos, .. } => (std::slice::from_ref(eot), eos),
            TurnFormat::Plain { eot, eos, .. } => (eot.as_slice(), eos),
        };
        eot.iter().chain(eos).copied()
    }

    /// What a token delimits, if it does.
    pub(crate) fn marker(&self, token: u32) -> Option<Marker> {
        match self {
            TurnFormat::MuseGlimmer {
                start,
                message,
                eom,
                eot,
                eos,
            } => match token {
                token if token == *start => Some(Marker::Start),
                token if token == *message => Some(Marker::Message),
                token if token == *eom => Some(Marker::EndOfMessage),
                token if token == *eot => Some(Marker::End(TurnEnd::EndOfTurn)),
                token if Some(token) == *eos => Some(Marker::End(TurnEnd::EndOfText)),
                _ => None,
            },
            TurnFormat::Plain { eot, eos, .. } => match token {
                token if Some(token) == *eos => Some(Marker::End(TurnEnd::EndOfText)),
                token if eot.contains(&token) => Some(Marker::End(TurnEnd::EndOfTurn)),
                _ => None,
            },
        }
    }
}

/// A control token that delimits.
pub(crate) enum Marker {
    Start,
    Message,
    EndOfMessage,
    End(TurnEnd),
}

/// Why a turn is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnEnd {
    /// The model ended its turn.
    EndOfTurn,
    /// The model ended the text.
    EndOfText,
    /// No more tokens were asked for.
    Budget,
    /// A stop string was complete.
    StopString,
}

/// Why an answer is over, in OpenAI's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It is complete.
    Stop,
    /// The token budget cut it.
    Length,
    /// It calls tools.
    ToolCalls,
}

impl TurnEnd {
    /// The reason for callers of a turn that made `n_calls` tool calls. A turn
    /// that the budget cut may lack calls, so it never counts as complete.
    pub fn finish_reason(self, n_calls: usize) -> FinishReason {
        match self {
            TurnEnd::Budget => FinishReason::Length,
            _ if n_calls > 0 => FinishReason::ToolCalls,
            _ => FinishReason::Stop,
        }
    }
}

impl FinishReason {
    /// `stop`, `length` or `tool_calls`.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        }
    }
}

/// What a turn says, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum TurnEvent {
    /// Text to the model itself.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A call has begun. It is a notice for people who watch: a body that
    /// turns out to be no call comes back as [`TurnEvent::Content`], one that
    /// the budget cuts as [`TurnEvent::CutToolCall`].
    ToolCallStart {
        /// Place among the calls of the turn, from 0.
        index: usize,
        /// Name of the tool.
        name: String,
    },
    /// A complete call.
    ToolCall {
        /// Place among the calls of the turn, from 0.
        index: usize,
        /// Name of the tool.
        name: String,
        /// The arguments in order of appearance.
        arguments: Map<String, Value>,
    },
    /// The text of a call that the budget cut: neither call nor answer.
    CutToolCall(String),
}

/// Where text goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Reasoning,
    Content,
}

#[derive(Clone, Debug)]
enum State {
    /// Before `<|message|>`. Behind `<|start|>` the header names a role.
    Header { text: String, has_role: bool },
    /// In a message to the model itself or to the user.
    Body(Channel),
    /// In a message to a tool.
    ToolBody { body: String, is_announced: bool },
}

/// Where the text of the next token goes, if it is no marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// To a message's header, which nobody reads.
    Header,
    /// To the reasoning.
    Reasoning,
    /// To the answer.
    Answer,
    /// To a call.
    Call,
}

/// What a header says.
#[derive(Debug, PartialEq, Eq)]
enum Header<'t> {
    /// Could be the beginning of one.
    Unfinished,
    /// The assistant's, to this recipient.
    To(Option<&'t str>),
    /// Another role's.
    OtherRole,
    /// Text.
    None,
}

/// Reads one turn, token by token.
#[derive(Clone, Debug)]
pub struct TurnParser {
    format: TurnFormat,
    tools: Arc<[Tool]>,
    detokenizer: Detokenizer,
    state: State,
    n_calls: usize,
    end: Option<TurnEnd>,
}

impl TurnParser {
    /// A parser at the beginning of a turn: behind `<|start|>assistant`, or at
    /// the beginning of a plain answer. `tools` are those of the conversation;
    /// their schemas decide what is text.
    pub fn new(tokenizer: Arc<Tokenizer>, format: TurnFormat, tools: Arc<[Tool]>) -> TurnParser {
        let (state, detokenizer) = match &format {
            TurnFormat::MuseGlimmer { .. } => (
                State::Header {
                    text: String::new(),
                    has_role: false,
                },
                Detokenizer::continuing(tokenizer),
            ),
            TurnFormat::Plain {
                is_continuation, ..
            } => (
                State::Body(Channel::Content),
                match is_continuation {
                    true => Detokenizer::continuing(tokenizer),
                    false => Detokenizer::new(tokenizer),
                },
            ),
        };
        TurnParser {
            format,
            tools,
            detokenizer,
            state,
            n_calls: 0,
            end: None,
        }
    }

    /// Adds a token; gives what is certain now. After the end of the turn
    /// tokens mean nothing.
    pub fn push(&mut self, token: u32) -> Vec<TurnEvent> {
        let mut events = Vec::new();
        if self.end.is_some() {
            return events;
        }
        match self.format.marker(token) {
            None => {
                let text = self.detokenizer.push(token);
                self.take_text(&text, &mut events);
            }
            Some(Marker::Message) => self.take_message_marker(&mut events),
            Some(Marker::Start) => self.next_message(true, &mut events),
            Some(Marker::EndOfMessage) => self.next_message(false, &mut events),
            Some(Marker::End(end)) => {
                self.next_message(false, &mut events);
                self.end = Some(end);
            }
        }
        events
    }

    /// Ends a turn whose tokens are used up; gives what was held back. A turn
    /// that is over stays as it is.
    pub fn finish(&mut self) -> Vec<TurnEvent> {
        let mut events = Vec::new();
        if self.end.is_none() {
            let rest = self.detokenizer.finish();
            self.take_text(&rest, &mut events);
            if let State::ToolBody { body, .. } = &self.state
                && tool_call::parse_body(body, &self.tools).is_none()
            {
                if !body.is_empty() {
                    events.push(TurnEvent::CutToolCall(body.clone()));
                }
            } else {
                self.close_message(&mut events);
            }
            self.end = Some(TurnEnd::Budget);
        }
        events
    }

    /// Why the turn is over; `None` while it is not.
    pub fn end(&self) -> Option<TurnEnd> {
        self.end
    }

    /// Does a blank at the beginning of the next token leave no trace?
    pub(crate) fn drops_blank(&self) -> bool {
        self.detokenizer.drops_blank()
    }

    /// Bytes of a character that is not complete yet.
    pub(crate) fn n_pending(&self) -> usize {
        self.detokenizer.n_pending()
    }

    /// Where the text of the next token goes.
    pub fn place(&self) -> Place {
        match &self.state {
            State::Header { .. } => Place::Header,
            State::Body(Channel::Reasoning) => Place::Reasoning,
            State::Body(Channel::Content) => Place::Answer,
            State::ToolBody { .. } => Place::Call,
        }
    }

    /// Number of complete calls so far.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    fn take_text(&mut self, piece: &str, events: &mut Vec<TurnEvent>) {
        if piece.is_empty() {
            return;
        }
        match &mut self.state {
            State::Body(channel) => push_text(events, *channel, piece),
            State::Header { text, has_role } => {
                text.push_str(piece);
                if read_header(text, *has_role) == Header::None {
                    push_text(events, Channel::Content, text);
                    self.state = State::Body(Channel::Content);
                }
            }
            State::ToolBody { body, is_announced } => {
                body.push_str(piece);
                if *is_announced {
                    return;
                }
                if let Some(name) = tool_call::first_name(body) {
                    *is_announced = true;
                    events.push(TurnEvent::ToolCallStart {
                        index: self.n_calls,
                        name: name.to_owned(),
                    });
                } else if !tool_call::may_be_body(body) {
                    push_text(events, Channel::Content, body);
                    self.state = State::Body(Channel::Content);
                }
            }
        }
    }

    fn take_message_marker(&mut self, events: &mut Vec<TurnEvent>) {
        if !matches!(self.state, State::Header { .. }) {
            return;
        }
        // Half a character turns the header into text, so the state may change.
        let rest = self.detokenizer.finish();
        self.take_text(&rest, events);
        let State::Header { text, has_role } = &self.state else {
            return;
        };
        self.state = match read_header(text, *has_role) {
            Header::To(Some("self")) => State::Body(Channel::Reasoning),
            Header::To(Some(recipient)) if recipient != "user" => State::ToolBody {
                body: String::new(),
                is_announced: false,
            },
            Header::OtherRole => {
                self.end = Some(TurnEnd::EndOfTurn);
                return;
            }
            Header::To(_) | Header::Unfinished | Header::None => State::Body(Channel::Content),
        };
    }

    fn next_message(&mut self, has_role: bool, events: &mut Vec<TurnEvent>) {
        let rest = self.detokenizer.finish();
        self.take_text(&rest, events);
        self.close_message(events);
        self.state = match self.format {
            TurnFormat::MuseGlimmer { .. } => State::Header {
                text: String::new(),
                has_role,
            },
            TurnFormat::Plain { .. } => State::Body(Channel::Content),
        };
    }

    /// The message is complete: its calls are, too.
    fn close_message(&mut self, events: &mut Vec<TurnEvent>) {
        let State::ToolBody { body, is_announced } = &self.state else {
            return;
        };
        let Some(calls) = tool_call::parse_body(body, &self.tools) else {
            push_text(events, Channel::Content, body);
            return;
        };
        let mut is_announced = *is_announced;
        for call in calls {
            let index = self.n_calls;
            self.n_calls += 1;
            if !std::mem::take(&mut is_announced) {
                events.push(TurnEvent::ToolCallStart {
                    index,
                    name: call.name.clone(),
                });
            }
            events.push(TurnEvent::ToolCall {
                index,
                name: call.name,
                arguments: call.arguments,
            });
        }
    }
}

/// Adds text to the last event if it goes to the same channel.
fn push_text(events: &mut Vec<TurnEvent>, channel: Channel, text: &str) {
    if text.is_empty() {
        return;
    }
    match (events.last_mut(), channel) {
        (Some(TurnEvent::Reasoning(last)), Channel::Reasoning)
        | (Some(TurnEvent::Content(last)), Channel::Content) => last.push_str(text),
        (_, Channel::Reasoning) => events.push(TurnEvent::Reasoning(text.to_owned())),
        (_, Channel::Content) => events.push(TurnEvent::Content(text.to_owned())),
    }
}

/// Reads what stands before `<|message|>`, complete or not.
fn read_header(text: &str, has_role: bool) -> Header<'_> {
    let mut rest = text;
    if has_role {
        let mut roles = OTHER_ROLES.iter().chain([&ASSISTANT]);
        if roles.any(|role| role.len() > text.len() && role.starts_with(text)) {
            return Header::Unfinished;
        }
        let is_other = OTHER_ROLES.iter().any(|role| {
            text.strip_prefix(role).is_some_and(|name| {
                name.is_empty() || (name.starts_with(' ') && is_recipient(name.trim_start()))
            })
        });
        if is_other {
            return Header::OtherRole;
        }
        rest = text.strip_prefix(ASSISTANT).unwrap_or(text);
    }
    let rest = rest.trim_start_matches(' ');
    match rest.strip_prefix("to=") {
        Some(recipient) if is_recipient(recipient) => match recipient {
            "" => Header::Unfinished,
            _ => Header::To(Some(recipient)),
        },
        Some(_) => Header::None,
        None if rest.is_empty() => Header::To(None),
        None if "to=".starts_with(rest) => Header::Unfinished,
        None => Header::None,
    }
}

/// Can this be a name in a header? Markers spelled as text cannot.
pub(crate) fn is_recipient(name: &str) -> bool {
    let is_foreign = |c: char| c.is_whitespace() || matches!(c, '<' | '>' | '|' | '"');
    name.len() <= MOST_RECIPIENT_BYTES && !name.contains(is_foreign)
}
