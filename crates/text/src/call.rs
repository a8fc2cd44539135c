//! A call that must be well-formed: the body of a message to a tool, constrained
//! to the model's own markup.
//!
//! ```text
//! <atem:function_calls>
//! <atem:invoke name="NAME">
//! <atem:parameter name="KEY">VALUE</atem:parameter>      each KEY of the schema at most once, in any order
//! </atem:invoke>                                         not before all required ones
//! </atem:function_calls>
//! ```
//!
//! A VALUE is raw text up to the closing tag where the schema allows a string
//! (one of the strings of an `enum` or `const`), else JSON of the schema. What a
//! reader would get wrong: raw text knows no escapes, so what a schema says about
//! the length, pattern or format of a string is not enforced; and a key that the
//! schema does not name cannot be written.

use crate::chat::Tool;
use crate::error::Error;
use crate::grammar::{Grammar, Grammars, Source, Vocabulary, with_whitespace};
use crate::schema;
use crate::tool_call::{
    BLOCK, BLOCK_END, INVOKE, INVOKE_END, NAME_END, PARAMETER, PARAMETER_END, is_name,
};
use model::TokenMask;
use serde_json::Value;
use std::sync::Arc;

/// What the calls of one tool look like.
pub(crate) struct CallShape {
    /// All before the first parameter.
    head: String,
    parameters: Vec<Parameter>,
}

struct Parameter {
    tag: String,
    is_required: bool,
    /// The value, its closing tag and the line end.
    value: Grammar,
}

impl CallShape {
    /// The shape that a tool's schema describes.
    ///
    /// # Errors
    /// [`Error::ToolNotCallable`] if the markup cannot say what the schema
    /// demands; [`Error::ToolSchema`] for a parameter whose schema cannot be
    /// enforced.
    pub(crate) fn new(tool: &Tool, grammars: &Grammars) -> Result<CallShape, Error> {
        let name = tool.name();
        let not_callable = |reason: String| Error::ToolNotCallable {
            tool: gguf::shown(name),
            reason,
        };
        if !is_name(name) {
            return Err(not_callable("its name cannot stand in a tag".to_owned()));
        }
        let mut parameters = Vec::new();
        for key in tool.parameters().map(schema::keys).unwrap_or_default() {
            let value = match is_name(key.name) {
                true => value_source(&key),
                false => None,
            };
            let Some(source) = value else {
                if key.is_required {
                    return Err(not_callable(format!(
                        "the required parameter \"{}\" cannot be written in a tag",
                        gguf::shown(key.name)
                    )));
                }
                continue;
            };
            let value = grammars.compile(&source).map_err(|error| {
                // The schema by itself has an error without our markup around it.
                let schema = Source::JsonSchema(key.with_definitions());
                let error = grammars.compile(&schema).err().unwrap_or(error);
                Error::ToolSchema {
                    tool: gguf::shown(name),
                    parameter: gguf::shown(key.name),
                    reason: error.to_string(),
                }
            })?;
            parameters.push(Parameter {
                tag: format!("{PARAMETER}{}{NAME_END}", key.name),
                is_required: key.is_required,
                value,
            });
        }
        Ok(CallShape {
            head: format!("{BLOCK}\n{INVOKE}{name}{NAME_END}\n"),
            parameters,
        })
    }
}

/// The grammar of a value up to the end of its line; `None` if nothing can be
/// written.
fn value_source(key: &schema::Key) -> Option<Source> {
    let close = Value::from(PARAMETER_END);
    let close_line = Value::from(format!("{PARAMETER_END}\n"));
    let lark = match schema::argument_allows_string(key.root, key.name) {
        Some(false) => {
            let schema = with_whitespace(key.with_definitions());
            format!("start: value {close_line}\nvalue: %json {schema}\n")
        }
        _ => match key.strings() {
            None => format!("start: text \"\\n\"\ntext[suffix={close}]: /(?s:.*)/\n"),
            Some(strings) => {
                let mut strings = strings.into_iter().filter(|s| !s.contains(PARAMETER_END));
                let choices: Vec<String> = strings
                    .by_ref()
                    .map(|s| Value::from(s).to_string())
                    .collect();
                if choices.is_empty() {
                    return None;
                }
                format!("start: ({}) {close_line}\n", choices.join(" | "))
            }
        },
    };
    Some(Source::Parameter(lark))
}

/// A call being written.
#[derive(Clone)]
pub(crate) struct Call {
    shape: Arc<CallShape>,
    /// Which parameters are there.
    is_written: Vec<bool>,
    part: Part,
}

#[derive(Clone)]
enum Part {
    /// Between values: what is written since the last one.
    Tags(Vec<u8>),
    Value(Box<Grammar>),
    Complete,
}

impl Call {
    /// A call that begins.
    pub(crate) fn new(shape: Arc<CallShape>) -> Call {
        Call {
            is_written: vec![false; shape.parameters.len()],
            shape,
            part: Part::Tags(Vec::new()),
        }
    }

    /// Is the last tag closed?
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.part, Part::Complete)
    }

    /// The tokens that may come next; none once the call is complete.
    ///
    /// # Errors
    /// As [`Grammar::mask`].
    pub(crate) fn mask(&mut self, vocabulary: &Vocabulary) -> Result<TokenMask, String> {
        if let Part::Value(value) = &mut self.part {
            return value.mask();
        }
        let mut mask = TokenMask::none(vocabulary.n_vocab());
        if let Part::Tags(written) = &self.part {
            for (tags, _) in self.next_tags() {
                if let Some(rest) = tags.as_bytes().strip_prefix(written.as_slice()) {
                    vocabulary.allow_beginnings(rest, &mut mask);
                }
            }
        }
        Ok(mask)
    }

    /// Goes on by a token, which stands for `bytes`.
    ///
    /// # Errors
    /// The reason, for a token that the mask did not allow.
    pub(crate) fn accept(&mut self, token: u32, bytes: &[u8]) -> Result<(), String> {
        match &mut self.part {
            Part::Complete => return Err("the call is complete".to_owned()),
            Part::Value(value) => {
                value.accept(token)?;
                if value.is_complete() {
                    self.part = Part::Tags(Vec::new());
                }
            }
            Part::Tags(written) => written.extend_from_slice(bytes),
        }
        let Part::Tags(written) = &self.part else {
            return Ok(());
        };
        let tags = self.next_tags();
        if let Some(&(_, next)) = tags.iter().find(|(tags, _)| tags.as_bytes() == written) {
            self.part = match next {
                None => Part::Complete,
                Some(index) => {
                    self.is_written[index] = true;
                    Part::Value(Box::new(self.shape.parameters[index].value.clone()))
                }
            };
            return Ok(());
        }
        match tags
            .iter()
            .any(|(tags, _)| tags.as_bytes().starts_with(written))
        {
            true => Ok(()),
            false => Err("it is no tag of a call".to_owned()),
        }
    }

    /// The tags that may stand here: one that opens a parameter, by index, or
    /// those that end the call. None begins with another.
    fn next_tags(&self) -> Vec<(String, Option<usize>)> {
        let head = match self.is_written.contains(&true) {
            true => "",
            false => &self.shape.head,
        };
        let missing = self.shape.parameters.iter().enumerate();
        let missing = missing.filter(|&(index, _)| !self.is_written[index]);
        let mut tags: Vec<_> = missing
            .clone()
            .map(|(index, parameter)| (format!("{head}{}", parameter.tag), Some(index)))
            .collect();
        if !missing
            .into_iter()
            .any(|(_, parameter)| parameter.is_required)
        {
            tags.push((format!("{head}{INVOKE_END}\n{BLOCK_END}"), None));
        }
        tags
    }
}
