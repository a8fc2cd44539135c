//! Chat flags that commands share, and the way from a conversation to tokens.

use crate::input::read_text_file;
use crate::model_file::ModelFile;
use anyhow::{Context, bail};
use clap::Args;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};
use text::{ChatTemplate, ControlTokens, DateTime, Reasoning, Segment, Tokenizer};

/// How a conversation becomes a prompt.
#[derive(Args, Clone, Debug)]
pub struct ChatArgs {
    /// Chat template to use instead of the model file's; control tokens stay those of the file
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// How much the model thinks first: low, medium, high or xhigh [default: the template's]
    #[arg(long, value_name = "LEVEL")]
    pub reasoning: Option<Reasoning>,
    /// Current date that the template tells the model, YYYY-MM-DD [default: today, UTC]
    #[arg(long, value_name = "DATE")]
    pub date: Option<String>,
}

impl ChatArgs {
    /// The template, the user's or the file's, checked to use what was asked for.
    pub fn template(
        &self,
        file: &ModelFile,
        tokenizer: &Tokenizer,
    ) -> anyhow::Result<ChatTemplate> {
        let tokens = ControlTokens::of(tokenizer);
        let (template, origin) = match &self.chat_template {
            Some(path) => {
                let source = read_text_file(path, "the chat template")?;
                let origin = path.display().to_string();
                (ChatTemplate::new(&source, tokens), origin)
            }
            None => {
                let source = file.gguf.metadata().str("tokenizer.chat_template")?;
                (ChatTemplate::from_file(source, tokens), file.name.clone())
            }
        };
        let template = template.with_context(|| origin.clone())?;
        if self.reasoning.is_some() && !template.uses_variable("reasoning_strength") {
            bail!(
                "--reasoning has no effect: the chat template of {origin} does not use \
                 reasoning_strength"
            );
        }
        let uses_date = ["current_date", "strftime_now"].map(|name| template.uses_variable(name));
        if self.date.is_some() && uses_date == [false, false] {
            bail!("--date has no effect: the chat template of {origin} does not use a date");
        }
        Ok(template)
    }
}

/// The tokens of a rendered prompt, with the BOS that the file wants.
pub fn prompt_tokens(tokenizer: &Tokenizer, segments: &[Segment]) -> Vec<u32> {
    tokenizer.with_bos(tokenizer.encode_segments(segments))
}

/// The date of `--date`, or today's.
pub fn now(date: Option<&str>) -> anyhow::Result<DateTime> {
    match date {
        Some(date) => date.parse::<DateTime>().context("--date"),
        None => {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            let seconds = since.context("the clock is before 1970")?.as_secs();
            Ok(DateTime::from_unix_seconds(seconds as i64)?)
        }
    }
}
