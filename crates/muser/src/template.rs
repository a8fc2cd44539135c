//! `muser template`: the prompt that a chat template makes of a conversation.
//!
//! What one would get wrong: the prompt as text is not what the model gets. A
//! control token and a message that spells it look the same in the text; the
//! segments (`--json`) and the ids (`--tokens`) tell them apart.

use crate::chat::{ChatArgs, now, prompt_tokens};
use crate::input::read_text_file;
use crate::model_file::ModelArgs;
use crate::terminal::{print_line, print_text};
use crate::tokenize::join_ids;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use text::{Conversation, DateTime, Message, Segment, Special, Tokenizer};

/// Render a conversation as the model's prompt
///
/// CONVERSATION is a JSON file: an object with "messages" and, if wanted, "tools",
/// "reasoning_effort", "current_date" (as 2026-01-31) and other variables of the template, or only
/// the list of messages. Flags win over what it says.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:\n  \
    muser template chat.json\n  \
    echo '[{\"role\":\"user\",\"content\":\"Hi\"}]' | muser template --reasoning low -\n  \
    muser template --model model.gguf --chat-template mine.jinja --tokens chat.json\n  \
    muser template --json chat.json | jq '.segments[] | select(.kind == \"text\").text'\n\n\
    On a terminal, control characters are shown as escapes; a pipe or a file gets the prompt byte \
    for byte.")]
pub struct Args {
    /// File with the conversation as JSON; `-` reads it from standard input
    #[arg(value_name = "CONVERSATION")]
    conversation: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    chat: ChatArgs,
    /// Do not end the prompt with the start of the answer
    #[arg(long)]
    no_generation_prompt: bool,
    /// Print the token ids only, in one line
    #[arg(long, conflicts_with = "json")]
    tokens: bool,
    /// Print the segments with their kinds and token ids as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.chat.chat_template.as_deref() == Some(Path::new("-"))
        && args.conversation == Path::new("-")
    {
        bail!("standard input can be the conversation or the template, not both");
    }
    let conversation = args.conversation()?;
    let file = args.model.open()?;
    let tokenizer = file.tokenizer()?;
    let template = args.chat.template(&file, &tokenizer)?;
    let segments = template.render(&conversation)?;
    let prompt = || segments.iter().map(|s| s.text.as_str()).collect::<String>();
    if args.json {
        let report = report(&tokenizer, &segments, &prompt());
        print_line(format_args!("{report:#}"))?;
    } else if args.tokens {
        print_line(join_ids(&prompt_tokens(&tokenizer, &segments)))?;
    } else {
        print_text(&prompt())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn conversation(&self) -> anyhow::Result<Conversation> {
        let text = read_text_file(&self.conversation, "the conversation")?;
        let origin = || match self.conversation.to_str() {
            Some("-") => "conversation on standard input".to_string(),
            _ => format!("conversation {}", self.conversation.display()),
        };
        let mut conversation = parse(&text).with_context(origin)?;
        if self.chat.reasoning.is_some() {
            conversation.reasoning_strength = self.chat.reasoning;
        }
        if self.no_generation_prompt {
            conversation.add_generation_prompt = false;
        }
        let now = match (&self.chat.date, &conversation.current_date) {
            (None, Some(date)) => {
                let date = date.parse::<DateTime>().context("current_date");
                date.with_context(origin)?
            }
            (date, _) => now(date.as_deref())?,
        };
        if self.chat.date.is_some() || conversation.current_date.is_none() {
            conversation.current_date = Some(now.iso_date());
        }
        conversation.now = Some(now);
        Ok(conversation)
    }
}

/// An object with messages, or a bare list of them.
fn parse(json: &str) -> serde_json::Result<Conversation> {
    if json.trim_start().starts_with('[') {
        let messages: Vec<Message> = serde_json::from_str(json)?;
        return Ok(Conversation::new(messages));
    }
    serde_json::from_str(json)
}

fn report(tokenizer: &Tokenizer, segments: &[Segment], prompt: &str) -> Value {
    let tokens = prompt_tokens(tokenizer, segments);
    let alone = |s: &Segment| tokenizer.encode_segments(std::slice::from_ref(s));
    let each: Vec<Vec<u32>> = segments.iter().map(alone).collect();
    // Text may merge across a border where a segment is no token of its own.
    let is_split = each.concat() == tokens;
    let list = segments.iter().zip(&each).map(|(segment, ids)| {
        json!({
            "kind": match segment.special {
                Special::Parse => "control",
                Special::Text => "text",
            },
            "text": segment.text,
            "tokens": is_split.then_some(ids),
        })
    });
    json!({
        "segments": list.collect::<Vec<Value>>(),
        "prompt": prompt,
        "tokens": tokens,
    })
}
