//! A chat request: its own fields, and the way from them to prompts.
//!
//! What one would get wrong: a field that would have no effect is refused, not
//! dropped. The chat template decides what has an effect, so the same request
//! may be good for one model and wrong for another.

use crate::admission::{Context, Fields, Prepared};
use crate::api_error::{ApiError, found};
use crate::fields::Ignored;
use crate::model::{Chat, ServedModel};
use crate::openai::chat_fields::{ChatFields, FormatKind, ResponseFormat};
use crate::openai::logprobs::MOST_TOP;
use crate::openai::unused::unused;
use crate::turn::{Prompt, Terms};
use serde_json::{Map, Value};
use std::sync::Arc;
use text::{
    AnswerFormat, Content, Conversation, Message, Reasoning, Tool, ToolChoice, TurnSettings,
};

/// Most tools of a request, as OpenAI has it.
const MOST_TOOLS: usize = 128;
/// Most bytes of a tool's name, as OpenAI has it.
const MOST_NAME_BYTES: usize = 64;
/// Most bytes of a field that only names something.
const MOST_LABEL_BYTES: usize = 512;
/// Variables of templates that have a field of their own.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "add_generation_prompt", "tool_choice"];

/// Fields of messages that are known and not done.
const REFUSED_OF_MESSAGES: [(&str, &str); 3] = [
    ("audio", "messages are text"),
    ("function_call", "use tool_calls"),
    ("refusal", "say it as content"),
];

impl Fields for ChatFields {
    type Extra = ();

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn prepare(self, context: &mut Context<'_>) -> Result<Prepared<()>, ApiError> {
        let Context {
            generation, model, ..
        } = *context;
        let chat = model.chat()?;
        self.check_labels()?;
        let tools = self.tools(chat)?;
        let (format, answer) = self.answer()?;
        let settings = TurnSettings {
            stop: generation.stops()?,
            answer,
            tool_choice: self.tool_choice(&tools, context.ignored)?,
            tools: Arc::clone(&tools),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            reasoning_budget: self.reasoning_budget(chat)?,
        };
        let terms = Terms {
            n_choices: generation.n_choices(model.handle.info().sequences)?,
            sampling: generation.sampling(model)?,
            max_tokens: self.max_tokens()?,
            logprobs: self.logprobs()?,
            cache: generation.cache(),
            deadline: context.deadline,
        };
        let conversation = self.conversation(model, chat, &tools, context.ignored)?;
        let segments = chat.template.render(&conversation);
        let segments = segments.map_err(|error| ApiError::invalid("messages", error))?;
        let unused = unused(&chat.template, &conversation, &segments);
        unused
            .into_iter()
            .for_each(|name| context.ignored.add(name));
        let turn = chat.guides.turn(&settings);
        let (guide, reader) = turn.map_err(|error| of_text(error, format))?;
        let (tokenizer, memo) = (&model.tokenizer, &chat.memo);
        let text::Prompt { tokens, cuts } =
            text::Prompt::new(tokenizer, &chat.format, &segments, Some(&**memo));
        let prompt = Prompt {
            tokens,
            cuts,
            guide,
            reader,
            memo: Some(Arc::clone(memo)),
        };
        Ok(Prepared {
            prompts: vec![prompt],
            terms,
            extra: (),
        })
    }
}

impl ChatFields {
    /// Checks the fields that only name something.
    fn check_labels(&self) -> Result<(), ApiError> {
        let labels = [
            ("safety_identifier", &self.safety_identifier),
            ("prompt_cache_key", &self.prompt_cache_key),
        ];
        for (name, label) in labels {
            if let Some(found) = label
                .as_ref()
                .filter(|label| label.len() > MOST_LABEL_BYTES)
            {
                let found = format!("{} bytes", found.len());
                return Err(ApiError::value(
                    name,
                    found,
                    format!("at most {MOST_LABEL_BYTES}"),
                ));
            }
        }
        Ok(())
    }

    fn max_tokens(&self) -> Result<Option<usize>, ApiError> {
        match (self.max_tokens, self.max_completion_tokens) {
            (Some(old), Some(new)) if old != new => Err(ApiError::value(
                "max_tokens",
                format!("{old}, while max_completion_tokens is {new}"),
                "one of the two",
            )),
            (Some(0), _) => Err(ApiError::value("max_tokens", 0, "1 or more")),
            (_, Some(0)) => Err(ApiError::value("max_completion_tokens", 0, "1 or more")),
            (old, new) => Ok(new.or(old)),
        }
    }

    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (_, Some(found)) if found > MOST_TOP => Err(ApiError::value(
                "top_logprobs",
                found,
                format!("0 to {MOST_TOP}"),
            )),
            (false, Some(found)) if found > 0 => Err(ApiError::value(
                "top_logprobs",
                found,
                "none, since logprobs is not true",
            )),
            (true, top) => Ok(Some(top.unwrap_or(0))),
            (false, _) => Ok(None),
        }
    }

    fn tools(&self, chat: &Chat) -> Result<Arc<[Tool]>, ApiError> {
        let list = self.tools.as_deref().unwrap_or_default();
        if list.is_empty() {
            return Ok(Arc::from([]));
        }
        if !chat.has_channels() || !chat.template.uses_variable("tools") {
            return Err(ApiError::unsupported(
                "tools",
                "the chat template of this model has no tools",
            ));
        }
        if list.len() > MOST_TOOLS {
            return Err(ApiError::value(
                "tools",
                list.len(),
                format!("at most {MOST_TOOLS}"),
            ));
        }
        let mut tools: Vec<Tool> = Vec::with_capacity(list.len());
        for (index, object) in list.iter().enumerate() {
            let tool = tool(index, object)?;
            if tools.iter().any(|other| other.name() == tool.name()) {
                return Err(ApiError::value(
                    format_args!("tools[{index}].function.name"),
                    format_args!("{}, a second time", gguf::shown(tool.name())),
                    "names that differ",
                ));
            }
            tools.push(tool);
        }
        Ok(tools.into())
    }

    fn tool_choice(&self, tools: &[Tool], ignored: &mut Ignored) -> Result<ToolChoice, ApiError> {
        const EXPECTED: &str = "none, auto, required or an object {\"type\": \"function\", \
                                \"function\": {\"name\": NAME}}";
        let wrong = |value: &Value| ApiError::value("tool_choice", found(Some(value)), EXPECTED);
        let choice = match &self.tool_choice {
            None | Some(Value::Null) => return Ok(ToolChoice::Auto),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => return Ok(ToolChoice::Auto),
                "none" => return Ok(ToolChoice::None),
                "required" => ToolChoice::Required,
                _ => return Err(wrong(&Value::String(word.clone()))),
            },
            Some(value @ Value::Object(object)) => {
                let name = object.get("function").and_then(|f| f.get("name"));
                match (object.get("type").and_then(Value::as_str), name) {
                    (Some("function"), Some(Value::String(name))) => {
                        let outer = object
                            .keys()
                            .filter(|key| !["type", "function"].contains(&key.as_str()));
                        outer.for_each(|key| ignored.add(format!("tool_choice.{key}")));
                        let inner = object["function"].as_object().into_iter();
                        let inner = inner.flat_map(Map::keys).filter(|key| *key != "name");
                        inner.for_each(|key| ignored.add(format!("tool_choice.function.{key}")));
                        ToolChoice::Named(name.clone())
                    }
                    (Some("allowed_tools"), _) => {
                        let advice = "send only the tools that are allowed";
                        return Err(ApiError::unsupported("tool_choice.allowed_tools", advice));
                    }
                    _ => return Err(wrong(value)),
                }
            }
            Some(value) => return Err(wrong(value)),
        };
        match &choice {
            ToolChoice::Named(name) if tools.iter().all(|tool| tool.name() != name) => {
                let found = gguf::shown(name);
                Err(ApiError::value(
                    "tool_choice",
                    found,
                    "the name of one of the tools",
                ))
            }
            ToolChoice::Required if tools.is_empty() => Err(ApiError::value(
                "tool_choice",
                "required",
                "none or auto without tools",
            )),
            _ => Ok(choice),
        }
    }

    /// The rule for the answer and the field that it is from.
    fn answer(&self) -> Result<(Option<&'static str>, AnswerFormat), ApiError> {
        let format = self.response_format.as_ref();
        let format = format.map(ResponseFormat::rule).transpose()?.flatten();
        let given = [
            ("response_format", format),
            ("regex", self.regex.clone().map(AnswerFormat::Regex)),
            ("grammar", self.grammar.clone().map(AnswerFormat::Lark)),
        ];
        let mut given = given.into_iter().filter_map(|(name, f)| Some((name, f?)));
        match (given.next(), given.next()) {
            (None, _) => Ok((None, AnswerFormat::Text)),
            (Some((name, format)), None) => Ok((Some(name), format)),
            (Some((first, _)), Some((second, _))) => Err(ApiError::value(
                second,
                format_args!("it beside {first}"),
                "one rule for the answer",
            )),
        }
    }

    fn reasoning_budget(&self, chat: &Chat) -> Result<Option<usize>, ApiError> {
        match self.reasoning_budget {
            Some(_) if !chat.has_channels() => Err(ApiError::unsupported(
                "reasoning_budget",
                "the answers of this model have no reasoning of their own",
            )),
            budget => Ok(budget),
        }
    }

    fn conversation(
        self,
        model: &ServedModel,
        chat: &Chat,
        tools: &[Tool],
        ignored: &mut Ignored,
    ) -> Result<Conversation, ApiError> {
        let now = model.now()?;
        let level = match &self.reasoning_effort {
            None => None,
            Some(word) => Some(word.parse::<Reasoning>().map_err(|_| {
                let expected = match word.as_str() {
                    "none" => {
                        "low, medium, high or xhigh; reasoning_budget 0 asks for no reasoning"
                    }
                    _ => "low, medium, high or xhigh",
                };
                ApiError::value("reasoning_effort", gguf::shown(word), expected)
            })?),
        };
        if level.is_some() && !chat.template.uses_variable("reasoning_strength") {
            let advice = "it has no effect, since the chat template of this model does not use \
                          reasoning_strength";
            return Err(ApiError::unsupported("reasoning_effort", advice));
        }
        let mut messages = self.messages;
        for (index, message) in messages.iter_mut().enumerate() {
            check_message(index, message)?;
        }
        let mut conversation = Conversation {
            tools: tools.to_vec(),
            reasoning_strength: level.or(model.reasoning),
            current_date: Some(now.iso_date()),
            now: Some(now),
            ..Conversation::new(messages)
        };
        let variables = self.chat_template_kwargs.unwrap_or_default();
        let says_level = |name: &&str| variables.contains_key(*name);
        if level.is_some()
            && ["reasoning_effort", "reasoning_strength"]
                .iter()
                .any(says_level)
        {
            let found = "a level beside the one in chat_template_kwargs";
            return Err(ApiError::value("reasoning_effort", found, "one of the two"));
        }
        for (name, value) in variables {
            set_variable(&mut conversation, chat, name, value, ignored)?;
        }
        Ok(conversation)
    }
}

impl ResponseFormat {
    /// The rule; none for any text.
    fn rule(&self) -> Result<Option<AnswerFormat>, ApiError> {
        let beside = |field: &str| {
            let kind = match self.r#type {
                FormatKind::Text => "text",
                FormatKind::JsonObject => "json_object",
                FormatKind::JsonSchema => "json_schema",
            };
            let expected = format!("none beside the type {kind}");
            ApiError::value(format!("response_format.{field}"), "a schema", expected)
        };
        match (self.r#type, &self.json_schema, &self.schema) {
            (FormatKind::Text, None, None) => Ok(None),
            (FormatKind::JsonObject, None, None) => Ok(Some(AnswerFormat::JsonObject)),
            (FormatKind::JsonObject, None, Some(schema)) => {
                Ok(Some(AnswerFormat::JsonSchema(schema.clone())))
            }
            (FormatKind::JsonSchema, Some(named), None) => {
                Ok(Some(AnswerFormat::JsonSchema(named.schema.clone())))
            }
            (FormatKind::JsonSchema, None, _) => Err(ApiError::value(
                "response_format.json_schema",
                "none",
                "an object with the field schema",
            )),
            (FormatKind::Text | FormatKind::JsonObject, Some(_), _) => Err(beside("json_schema")),
            (FormatKind::Text | FormatKind::JsonSchema, _, Some(_)) => Err(beside("schema")),
        }
    }
}

/// Checks a tool; `{"type": "function", "function": {...}}` is what OpenAI has.
fn tool(index: usize, object: &Map<String, Value>) -> Result<Tool, ApiError> {
    let at = |field: &str| format!("tools[{index}].{field}");
    if object.get("type").and_then(Value::as_str) != Some("function") {
        return Err(ApiError::value(
            at("type"),
            found(object.get("type")),
            "function",
        ));
    }
    let Some(Value::Object(function)) = object.get("function") else {
        return Err(ApiError::value(
            at("function"),
            found(object.get("function")),
            "an object",
        ));
    };
    let name = function.get("name");
    let is_sound = |name: &str| {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        (1..=MOST_NAME_BYTES).contains(&name.len())
            && name.bytes().all(is_allowed)
            // These two address no tool.
            && !["self", "user"].contains(&name)
    };
    if !name.and_then(Value::as_str).is_some_and(is_sound) {
        let expected = "1 to 64 letters, digits, _, - and ., other than self and user";
        return Err(ApiError::value(at("function.name"), found(name), expected));
    }
    match function.get("parameters") {
        None | Some(Value::Null | Value::Object(_)) => {}
        other => {
            return Err(ApiError::value(
                at("function.parameters"),
                found(other),
                "an object",
            ));
        }
    }
    Tool::new(object.clone()).map_err(|error| ApiError::invalid(at("function"), error))
}

/// Checks what a template would not, and says `developer` as templates do.
fn check_message(index: usize, message: &mut Message) -> Result<(), ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    match message.role.as_str() {
        "developer" => message.role = "system".to_string(),
        "system" | "user" | "assistant" => {}
        "tool" if message.tool_call_id.is_some() || message.name.is_some() => {}
        "tool" => {
            let expected = "the id of the call that is answered";
            return Err(ApiError::value(at("tool_call_id"), "none", expected));
        }
        other => {
            let expected = "system, developer, user, assistant or tool";
            return Err(ApiError::value(at("role"), gguf::shown(other), expected));
        }
    }
    for (field, advice) in REFUSED_OF_MESSAGES {
        if message
            .extra
            .get(field)
            .is_some_and(|value| !value.is_null())
        {
            return Err(ApiError::unsupported(at(field), advice));
        }
    }
    if message.role != "assistant" && !message.tool_calls.is_empty() {
        let found = format!("calls of the role {}", message.role);
        return Err(ApiError::value(
            at("tool_calls"),
            found,
            "calls of the assistant only",
        ));
    }
    let Some(Content::Parts(parts)) = &mut message.content else {
        return Ok(());
    };
    for (n, part) in parts.iter_mut().enumerate() {
        let is_text = part.kind == "text" && part.text.is_some();
        if !is_text {
            let found = match part.kind.as_str() {
                "text" => "a part without text".to_string(),
                kind => gguf::shown(kind),
            };
            let expected = "a text: this server takes no images, sounds or files";
            return Err(ApiError::value(
                at(&format!("content[{n}]")),
                found,
                expected,
            ));
        }
    }
    Ok(())
}

/// Sets a variable of the template; one that it does not read is named.
fn set_variable(
    conversation: &mut Conversation,
    chat: &Chat,
    name: String,
    value: Value,
    ignored: &mut Ignored,
) -> Result<(), ApiError> {
    let param = format!("chat_template_kwargs.{}", gguf::shown(&name));
    if OWN_VARIABLES.contains(&name.as_str()) {
        return Err(ApiError::value(
            param,
            "it here",
            "it as a field of the request",
        ));
    }
    let variable = match name.as_str() {
        "reasoning_effort" => "reasoning_strength",
        name => name,
    };
    if !chat.template.uses_variable(variable) {
        ignored.add(param);
        return Ok(());
    }
    let text = || match &value {
        Value::String(text) => Ok(text.clone()),
        other => Err(ApiError::value(&param, found(Some(other)), "a string")),
    };
    match variable {
        "reasoning_strength" => {
            let level = text()?.parse::<Reasoning>();
            let level = level.map_err(|error| ApiError::invalid(&param, error))?;
            conversation.reasoning_strength = Some(level);
        }
        "current_date" => conversation.current_date = Some(text()?),
        "knowledge_cutoff" => conversation.knowledge_cutoff = Some(text()?),
        _ => {
            conversation.variables.insert(name, value);
        }
    }
    Ok(())
}

/// What the text side says of a request, by the field that is meant; `format` is
/// the one that the rule for the answer is from.
pub(crate) fn of_text(error: text::Error, format: Option<&'static str>) -> ApiError {
    use text::Error;
    let param = match error {
        Error::Grammar { .. } | Error::GrammarTooLarge { .. } => format,
        Error::ToolNotCallable { .. } | Error::ToolSchema { .. } => Some("tools"),
        _ => None,
    };
    ApiError::bad("invalid_value", param.map(str::to_string), error)
}
