//! Chat templates: a conversation goes in, the prompt comes out as segments.
//!
//! What a reader would get wrong: the prompt is not one string to be
//! tokenized with special tokens on. Only the segments marked
//! [`Special::Parse`] may become control tokens; they come from the template's
//! own text, never from a message (`marks.rs` says how).
//!
//! A template runs as in Hugging Face's `apply_chat_template`: `trim_blocks`
//! and `lstrip_blocks`, loop controls, Python's string and dict methods, its
//! own `tojson`, `raise_exception`, and `strftime_now` if the caller says what
//! time it is. It comes from a file that no one has to trust, so everything
//! about it is bounded: see `program.rs` and `meter.rs`.

use crate::chat::{Content, Conversation, Message};
use crate::date::DateTime;
use crate::error::Error;
use crate::marks::{SpelledTokens, cut_heads};
use crate::meter::{Stop, refused};
use crate::program;
use crate::tokenizer::Tokenizer;
use crate::{Segment, Special};
use minijinja::Value;
use std::collections::{BTreeMap, HashSet};

/// Most bytes of a template's source.
pub const MOST_SOURCE_BYTES: usize = 64 * 1024;
/// Most tokens of one tag of a template.
pub const MOST_TAG_TOKENS: usize = 4096;
/// Most instructions of one rendering.
pub const MOST_INSTRUCTIONS: u64 = 5_000_000;

/// The control tokens of a vocabulary, as far as a template needs them.
#[derive(Clone, Debug, Default)]
pub struct ControlTokens {
    /// Text of the token that begins a text; the variable `bos_token`.
    pub bos: Option<String>,
    /// Text of the token that ends a text; the variable `eos_token`.
    pub eos: Option<String>,
    /// Texts of all control tokens.
    pub all: Vec<String>,
}

impl ControlTokens {
    /// Those of a file's vocabulary.
    pub fn of(tokenizer: &Tokenizer) -> ControlTokens {
        let text = |id: u32| tokenizer.token_text(id).map(str::to_owned);
        let special = tokenizer.special();
        let ids = 0..tokenizer.n_vocab() as u32;
        ControlTokens {
            bos: special.bos.and_then(text),
            eos: special.eos.and_then(text),
            all: ids
                .filter(|&id| tokenizer.is_control(id))
                .chain(special.unk)
                .filter_map(text)
                .collect(),
        }
    }
}

/// A chat template that is known to compile.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    tokens: ControlTokens,
    spelled: SpelledTokens,
    /// Beginnings of control tokens at which the source breaks off.
    cut_heads: Vec<String>,
    variables: HashSet<String>,
}

impl ChatTemplate {
    /// Compiles the template of a file; `source` is its
    /// `tokenizer.chat_template`.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`] without a source, else as [`ChatTemplate::new`].
    pub fn from_file(source: Option<&str>, tokens: ControlTokens) -> Result<ChatTemplate, Error> {
        ChatTemplate::new(source.ok_or(Error::NoChatTemplate)?, tokens)
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// [`Error::TemplateSourceTooLarge`], [`Error::TemplateTagTooLong`],
    /// [`Error::TemplateSyntax`]; [`Error::TemplateWithoutMessages`] if it
    /// never reads the messages.
    pub fn new(source: &str, tokens: ControlTokens) -> Result<ChatTemplate, Error> {
        let (source, variables) = program::compile(source)?;
        let spelled = SpelledTokens::new(
            &source,
            tokens.all.iter().map(String::as_str),
            tokens.bos.iter().chain(&tokens.eos).map(String::as_str),
        );
        let cut_heads = cut_heads(&source, tokens.all.iter().map(String::as_str));
        Ok(ChatTemplate {
            source,
            tokens,
            spelled,
            cut_heads,
            variables,
        })
    }

    /// Does the template read this variable at all? What it does not read
    /// would be dropped without a word.
    pub fn uses_variable(&self, name: &str) -> bool {
        self.variables.contains(name)
    }

    /// Renders a conversation. The texts of all segments together are byte for
    /// byte what a plain rendering gives; only segments marked
    /// [`Special::Parse`] are control tokens.
    ///
    /// # Errors
    /// [`Error::TemplateRaised`] with the template's own message;
    /// [`Error::NoMessages`], [`Error::MessageWithoutContent`],
    /// [`Error::ToolArguments`] and [`Error::Date`] for the conversation; one
    /// of the limits; [`Error::TemplateDropsMessages`] if nothing of them is in
    /// the prompt; anything else that goes wrong in a template as
    /// [`Error::TemplateFailed`]; [`Error::TemplateEditsControlTokens`] and
    /// [`Error::ControlTokenInPieces`] where control tokens cannot be kept
    /// apart from text.
    pub fn render(&self, conversation: &Conversation) -> Result<Vec<Segment>, Error> {
        let inputs = Inputs::new(conversation)?;
        let plain = self.run(&self.source, &inputs, str::to_owned)?;
        let marks = self.spelled.marks(&self.source, &inputs.text)?;
        let marked_source = self.spelled.mark(&self.source, &marks);
        let marked = self.run(&marked_source, &inputs, |token| {
            self.spelled.mark(token, &marks)
        })?;
        let segments = self.spelled.split(&marked, &marks);
        if !segments
            .iter()
            .flat_map(|segment| segment.text.bytes())
            .eq(plain.bytes())
        {
            return Err(Error::TemplateEditsControlTokens);
        }
        self.check_whole(&segments)?;
        match drops_messages(&conversation.messages, &plain) {
            true => Err(Error::TemplateDropsMessages),
            false => Ok(segments),
        }
    }

    fn run(
        &self,
        source: &str,
        inputs: &Inputs,
        token: impl Fn(&str) -> String,
    ) -> Result<String, Error> {
        let mut variables = inputs.variables.clone();
        for (key, text) in [
            ("bos_token", &self.tokens.bos),
            ("eos_token", &self.tokens.eos),
        ] {
            if let Some(text) = text {
                variables.insert(key.to_owned(), Value::from(token(text)));
            }
        }
        program::run(source, &variables)
    }

    /// A template that puts control tokens together from pieces would get
    /// text in their place: say so instead. In such a template a text that spells
    /// one cannot be told from the template's own, so it is refused as well.
    fn check_whole(&self, segments: &[Segment]) -> Result<(), Error> {
        if self.cut_heads.is_empty() {
            return Ok(());
        }
        let is_cut = |token: &str| {
            let mut heads = self.cut_heads.iter();
            let mut texts = segments.iter().filter(|s| s.special == Special::Text);
            heads.any(|head| token.starts_with(head))
                && texts.any(|segment| segment.text.contains(token))
        };
        match self.tokens.all.iter().find(|token| is_cut(token)) {
            Some(token) => Err(Error::ControlTokenInPieces {
                token: gguf::shown(token),
            }),
            None => Ok(()),
        }
    }
}

/// A conversation as template variables.
struct Inputs {
    variables: BTreeMap<String, Value>,
    /// All of it as JSON, to look for characters.
    text: String,
}

impl Inputs {
    fn new(conversation: &Conversation) -> Result<Inputs, Error> {
        check_messages(&conversation.messages)?;
        if let Some(date) = &conversation.current_date {
            date.parse::<DateTime>()?;
        }
        let mut conversation = conversation.clone();
        conversation
            .messages
            .iter_mut()
            .try_for_each(parse_arguments)?;
        let now = conversation.now;
        let mut json =
            serde_json::to_value(&conversation).map_err(|error| Error::TemplateFailed {
                reason: format!("the conversation has no JSON form: {error}"),
            })?;
        if conversation.tools.is_empty() {
            json["tools"] = serde_json::Value::Null;
        }
        let mut variables = BTreeMap::new();
        if let serde_json::Value::Object(map) = &json {
            for (name, value) in map {
                variables.insert(name.clone(), Value::from_serialize(value));
            }
        }
        if let Some(now) = now {
            variables.insert("strftime_now".to_owned(), strftime_now(now));
        }
        Ok(Inputs {
            variables,
            text: json.to_string(),
        })
    }
}

fn parse_arguments(message: &mut Message) -> Result<(), Error> {
    for call in &mut message.tool_calls {
        call.function.arguments = serde_json::Value::Object(call.arguments()?);
    }
    Ok(())
}

fn strftime_now(now: DateTime) -> Value {
    Value::from_function(move |format: String| {
        now.format(&format).map_err(|error| match error {
            Error::DateCode { found } => Stop::DateCode(found).into(),
            other => refused(other.to_string()),
        })
    })
}

/// A message that says nothing would reach the model as an empty one, or as
/// the word `None`.
fn check_messages(messages: &[Message]) -> Result<(), Error> {
    if messages.is_empty() {
        return Err(Error::NoMessages);
    }
    let says_nothing = |message: &Message| {
        message.content.is_none()
            && message.tool_calls.is_empty()
            && message.reasoning_content.is_none()
    };
    match messages.iter().position(says_nothing) {
        Some(index) => Err(Error::MessageWithoutContent {
            index,
            role: gguf::shown(&messages[index].role),
        }),
        None => Ok(()),
    }
}

/// Is none of the words that the messages say in the prompt? Words of ASCII
/// letters and digits are looked for without regard to case: no template
/// changes them otherwise. Templates may leave out what stands beside calls.
fn drops_messages(messages: &[Message], prompt: &str) -> bool {
    let texts = messages
        .iter()
        .filter(|message| message.tool_calls.is_empty())
        .flat_map(|message| match &message.content {
            Some(Content::Text(text)) => vec![text.as_str()],
            Some(Content::Parts(parts)) => parts.iter().filter_map(|p| p.text.as_deref()).collect(),
            None => Vec::new(),
        });
    let mut words = texts
        .flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric()))
        .filter(|word| !word.is_empty())
        .peekable();
    let prompt = prompt.to_ascii_lowercase();
    words.peek().is_some() && words.all(|word| !prompt.contains(&word.to_ascii_lowercase()))
}
