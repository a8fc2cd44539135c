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
//! time it is. Instructions, recursion, source and output are bounded; what a
//! template holds in its variables meanwhile is not.

use crate::chat::{Conversation, Message};
use crate::date::DateTime;
use crate::error::Error;
use crate::marks::{Marks, SpelledTokens, cut_heads};
use crate::tojson::tojson;
use crate::tokenizer::Tokenizer;
use crate::{Segment, Special};
use minijinja::{Environment, ErrorKind, Value};
use std::collections::{BTreeMap, HashSet};
use std::{fmt, io};

const PLAIN: &str = "chat_template";
const MARKED: &str = "chat_template (marked)";

/// Most bytes of a template's source.
pub const MOST_SOURCE_BYTES: usize = 256 * 1024;
/// Most bytes of a rendered prompt.
pub const MOST_OUTPUT_BYTES: usize = 64 * 1024 * 1024;
/// Most instructions of one rendering.
pub const MOST_INSTRUCTIONS: u64 = 5_000_000;
const MOST_NESTED_CALLS: usize = 64;

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

/// A chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    tokens: ControlTokens,
    spelled: SpelledTokens,
    marks: Marks,
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
    /// [`Error::TemplateSourceTooLarge`], [`Error::TemplateSyntax`].
    pub fn new(source: &str, tokens: ControlTokens) -> Result<ChatTemplate, Error> {
        if source.len() > MOST_SOURCE_BYTES {
            return Err(Error::TemplateSourceTooLarge {
                found_bytes: source.len(),
                most_bytes: MOST_SOURCE_BYTES,
            });
        }
        let source = without_generation_tags(source);
        let spelled = SpelledTokens::new(
            &source,
            tokens.all.iter().map(String::as_str),
            tokens.bos.iter().chain(&tokens.eos).map(String::as_str),
        );
        let marks = spelled.marks(&source, "")?;
        let cut_heads = cut_heads(&source, tokens.all.iter().map(String::as_str));
        let mut environment = environment();
        add(&mut environment, PLAIN, source.clone())?;
        add(&mut environment, MARKED, spelled.mark(&source, &marks))?;
        let variables = environment
            .get_template(PLAIN)
            .map(|template| template.undeclared_variables(false))
            .map_err(|error| syntax(&error))?;
        Ok(ChatTemplate {
            environment,
            source,
            tokens,
            spelled,
            marks,
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
    /// [`Error::ToolArguments`]; one of the limits; anything else that goes
    /// wrong in a template as [`Error::TemplateFailed`];
    /// [`Error::TemplateEditsControlTokens`] and
    /// [`Error::ControlTokenInPieces`] where control tokens cannot be kept
    /// apart from text.
    pub fn render(&self, conversation: &Conversation) -> Result<Vec<Segment>, Error> {
        let inputs = Inputs::new(conversation)?;
        let plain = self.run(&self.environment, PLAIN, &inputs, |token| token.to_owned())?;

        let marks = self.spelled.marks(&self.source, &inputs.text)?;
        let marked = if marks == self.marks {
            self.run(&self.environment, MARKED, &inputs, |token| {
                self.spelled.mark(token, &marks)
            })?
        } else {
            let mut environment = self.environment.clone();
            add(
                &mut environment,
                MARKED,
                self.spelled.mark(&self.source, &marks),
            )?;
            self.run(&environment, MARKED, &inputs, |token| {
                self.spelled.mark(token, &marks)
            })?
        };
        let segments = self.spelled.split(&marked, &marks);
        if !segments
            .iter()
            .flat_map(|segment| segment.text.bytes())
            .eq(plain.bytes())
        {
            return Err(Error::TemplateEditsControlTokens);
        }
        self.check_whole(&segments, &inputs)?;
        Ok(segments)
    }

    fn run(
        &self,
        environment: &Environment<'static>,
        name: &str,
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
        let template = environment
            .get_template(name)
            .map_err(|error| syntax(&error))?;
        let mut output = Output::default();
        let outcome = template
            .render_captured_to(Value::from_iter(variables), &mut output)
            .map(|_| ());
        match outcome {
            Ok(()) => String::from_utf8(output.bytes).map_err(|_| Error::TemplateFailed {
                reason: "the output is no UTF-8".to_owned(),
            }),
            Err(_) if output.is_full => Err(Error::TemplateOutputTooLarge {
                most_bytes: MOST_OUTPUT_BYTES,
            }),
            Err(error) => Err(failure(&error)),
        }
    }

    /// A template that puts control tokens together from pieces would get
    /// text in their place: say so instead.
    fn check_whole(&self, segments: &[Segment], inputs: &Inputs) -> Result<(), Error> {
        if self.cut_heads.is_empty() {
            return Ok(());
        }
        let mut strings = Vec::new();
        collect_strings(&inputs.json, &mut strings);
        let is_cut = |token: &str| {
            let mut heads = self.cut_heads.iter();
            let mut texts = segments.iter().filter(|s| s.special == Special::Text);
            heads.any(|head| token.starts_with(head))
                && texts.any(|segment| segment.text.contains(token))
                && !strings.iter().any(|string| string.contains(token))
        };
        match self.tokens.all.iter().find(|token| is_cut(token)) {
            Some(token) => Err(Error::ControlTokenInPieces {
                token: token.clone(),
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
    json: serde_json::Value,
}

impl Inputs {
    fn new(conversation: &Conversation) -> Result<Inputs, Error> {
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
            json,
        })
    }
}

fn parse_arguments(message: &mut Message) -> Result<(), Error> {
    for call in &mut message.tool_calls {
        call.function.arguments = serde_json::Value::Object(call.arguments()?);
    }
    Ok(())
}

fn collect_strings<'v>(value: &'v serde_json::Value, strings: &mut Vec<&'v str>) {
    match value {
        serde_json::Value::String(text) => strings.push(text),
        serde_json::Value::Array(items) => {
            items.iter().for_each(|item| collect_strings(item, strings));
        }
        serde_json::Value::Object(map) => {
            for (key, item) in map {
                strings.push(key);
                collect_strings(item, strings);
            }
        }
        _ => {}
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(MOST_INSTRUCTIONS));
    environment.set_recursion_limit(MOST_NESTED_CALLS);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment
}

fn add(
    environment: &mut Environment<'static>,
    name: &'static str,
    source: String,
) -> Result<(), Error> {
    environment
        .add_template_owned(name, source)
        .map_err(|error| syntax(&error))
}

/// What `raise_exception` was given, to be found again behind the engine's
/// error.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(
        minijinja::Error::new(ErrorKind::InvalidOperation, message.clone())
            .with_source(Raised(message)),
    )
}

fn strftime_now(now: DateTime) -> Value {
    Value::from_function(move |format: String| {
        now.format(&format)
            .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, error.to_string()))
    })
}

fn syntax(error: &minijinja::Error) -> Error {
    Error::TemplateSyntax {
        reason: error.to_string(),
    }
}

/// The named error behind an error of the engine, which wraps one error per
/// macro that it came through.
fn failure(error: &minijinja::Error) -> Error {
    let mut innermost = error.to_string();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Error::TemplateRaised {
                message: message.clone(),
            };
        }
        if let Some(engine) = error.downcast_ref::<minijinja::Error>() {
            if engine.kind() == ErrorKind::OutOfFuel {
                return Error::TemplateInstructions {
                    most: MOST_INSTRUCTIONS,
                };
            }
            innermost = engine.to_string();
        }
        cause = error.source();
    }
    Error::TemplateFailed { reason: innermost }
}

/// A bounded buffer.
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    is_full: bool,
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MOST_OUTPUT_BYTES {
            self.is_full = true;
            return Err(io::Error::other("the output is too large"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Templates made for training wrap the answer in `{% generation %}`, which
/// has no effect on the text.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start + 2..start + length];
        let word = tag.trim_matches(['-', '+']).trim();
        let same_effect = match word {
            "generation" => tag.replace(word, "if true"),
            "endgeneration" => tag.replace(word, "endif"),
            _ => tag.to_owned(),
        };
        out.push_str(&rest[..start + 2]);
        out.push_str(&same_effect);
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}
