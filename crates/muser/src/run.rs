//! `muser run`: one prompt, one answer, streamed.
//!
//! The answer goes to stdout. Everything else goes to stderr: the start line,
//! the reasoning (dim), the figures at the end. So `muser run ... > file` holds
//! the answer and nothing else.
//!
//! What one would get wrong: a model can write control characters, so what a
//! terminal gets is not always what a pipe gets: `terminal.rs` has the rule.

use crate::chat::{ChatArgs, now, prompt_tokens};
use crate::draft::{self, DraftArgs};
use crate::input::{read_text, read_text_file};
use crate::interrupt;
use crate::model_file::{LoadArgs, ModelArgs, ModelFile};
use crate::sampling::{Sampling, SamplingArgs, describe};
use crate::terminal::{self, DIM, count, lines, remark};
use anyhow::{Context, anyhow, bail};
use engine::{Ending, Engine, Generated, Generation, Receive, Request, SamplerSettings, Sequence};
use gguf::shown;
use indicatif::ProgressBar;
use model::Guide;
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use text::{
    AnswerFormat, Conversation, GuideFactory, Message, Reader, Special, Tokenizer, TurnEvent,
    TurnFormat, TurnGuide, TurnSettings,
};

/// Answer one prompt, streamed
#[derive(clap::Args, Debug)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    muser run \"Tell me a story about a lighthouse\"\n  \
    muser run --reasoning low --seed 7 \"Name four fruits.\"\n  \
    muser run --model SmolLM2-135M-Instruct.Q4_1.gguf \"What is the capital of France?\"\n  \
    muser run --draft nano-glimmer-dflash-q8_0.gguf \"Tell me a story.\"\n  \
    git diff | muser run --system \"Review this change.\" -\n  \
    muser run --raw --max-tokens 40 \"Once upon a time\"\n  \
    muser run --json --temperature 0 \"Hello\" | jq .content\n  \
    muser run --json-schema person.json --reasoning-budget 200 \"Invent a person.\"\n\n\
    On a terminal, control characters of the answer are shown as escapes; a pipe or a file gets \
    the answer byte for byte.")]
pub struct Args {
    /// The prompt; several words are joined by blanks; `-` reads it from standard input, without
    /// the last line end
    #[arg(required = true, value_name = "PROMPT")]
    prompt: Vec<String>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Text of the system message [default: the template's own]
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    #[command(flatten)]
    chat: ChatArgs,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long, conflicts_with_all = ["chat_template", "reasoning", "date"])]
    raw: bool,
    /// With --raw: control tokens spelled in the prompt are control tokens
    #[arg(long, requires = "raw")]
    special: bool,
    /// Tokens to generate at most, reasoning included [default: until the context is full]
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// The answer is JSON that the JSON schema in this file describes; reasoning stays free
    #[arg(long, value_name = "FILE")]
    json_schema: Option<PathBuf>,
    /// End the reasoning after this many tokens, and go on with the answer [default: no limit]
    #[arg(long, value_name = "N", conflicts_with = "raw")]
    reasoning_budget: Option<u32>,
    /// Print one JSON object at the end instead of streaming
    #[arg(long)]
    json: bool,
    // Last, since its heading goes on to the end.
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let prompt = args.prompt()?;
    let mut file = args.load.open(&args.model)?;
    args.draft.open(&args.load, &mut file)?;
    let tokenizer = file.tokenizer()?;
    let (tokens, format) = args.tokens(&file, &tokenizer, &prompt)?;
    let (mut guide, reader) = args.turn(&tokenizer, format)?;

    let model = args.load.load(&file)?;
    let architecture = model.config().architecture;
    let sampling = args.sampling.settings(&file, &tokenizer, architecture)?;
    let request = Request {
        sampling: sampling.settings.clone(),
        max_tokens: args.max_tokens.map(|n| n as usize),
        logprobs: None,
    };
    let mut engine = Engine::new(model, args.load.ctx)?;
    engine.speculate(args.draft.speculation())?;
    if !args.json {
        print_start(args, &file, &engine, &sampling);
    }

    interrupt::watch()?;
    let mut sequence = Sequence::new();
    sequence.push(&tokens);
    let mut answer = Answer::new(reader, args.json);
    let outcome = engine.generate(&mut sequence, &request, &mut *guide, &mut answer);
    answer.bar.finish_and_clear();
    if outcome.is_err() {
        // The error begins a line of its own.
        answer.end_line();
    }
    let done = outcome.map_err(|error| match guide.failure() {
        Some(reason) => anyhow!("the answer cannot go on as demanded: {reason}"),
        None => with_remedy(error, &engine),
    })?;
    answer.finish()?;
    if let Some(why) = engine.speculation_stopped() {
        terminal::warn(&format!("nothing was drafted any more: {why}"));
    }
    if args.json {
        let report = answer.report(&file, &tokens, &request.sampling, &done);
        terminal::print_line(format_args!("{report:#}"))?;
    } else {
        answer.print_figures(&done, request.sampling.seed);
    }
    Ok(match interrupt::is_requested() {
        true => interrupt::exit_code(),
        false => ExitCode::SUCCESS,
    })
}

impl Args {
    fn prompt(&self) -> anyhow::Result<String> {
        if self.prompt != ["-"] {
            let prompt = self.prompt.join(" ");
            if prompt.is_empty() {
                bail!("the prompt is empty; give a text, or - to read one from standard input");
            }
            return Ok(prompt);
        }
        let mut prompt = read_text("-", "the prompt")?;
        // `echo` and editors end a text with one; it is not part of what was said.
        if prompt.ends_with('\n') {
            prompt.pop();
            prompt.truncate(prompt.strip_suffix('\r').unwrap_or(&prompt).len());
        }
        if prompt.is_empty() {
            bail!("the prompt is empty: there was no text on standard input");
        }
        Ok(prompt)
    }

    /// What guides the answer, and what reads it. A vocabulary's trie is built
    /// only where something demands it.
    fn turn(
        &self,
        tokenizer: &Arc<Tokenizer>,
        format: TurnFormat,
    ) -> anyhow::Result<(Box<dyn Guide>, Reader)> {
        let tokenizer = Arc::clone(tokenizer);
        let answer = match &self.json_schema {
            None if self.reasoning_budget.is_none() => {
                let reader = Reader::new(tokenizer, format, Arc::from([]), &self.stop)?;
                return Ok((Box::new(TurnGuide::new(reader.clone())), reader));
            }
            None => AnswerFormat::Text,
            Some(path) => {
                let text = read_text_file(path, "the JSON schema")?;
                let schema = serde_json::from_str(&text);
                AnswerFormat::JsonSchema(schema.with_context(|| path.display().to_string())?)
            }
        };
        let settings = TurnSettings {
            stop: self.stop.clone(),
            answer,
            reasoning_budget: self.reasoning_budget.map(|n| n as usize),
            ..TurnSettings::default()
        };
        Ok(GuideFactory::new(tokenizer, format)?.turn(&settings)?)
    }

    /// The prompt's tokens, and how the answer is to be read.
    fn tokens(
        &self,
        file: &ModelFile,
        tokenizer: &Tokenizer,
        prompt: &str,
    ) -> anyhow::Result<(Vec<u32>, TurnFormat)> {
        if self.raw {
            let special = match self.special {
                true => Special::Parse,
                false => Special::Text,
            };
            let tokens = tokenizer.encode_prompt(prompt, special);
            return Ok((tokens, TurnFormat::of_completion(tokenizer)));
        }
        let template = self.chat.template(file, tokenizer)?;
        let system = self.system.iter().map(|text| Message::new("system", text));
        let user = [Message::new("user", prompt)];
        let now = now(self.chat.date.as_deref())?;
        let conversation = Conversation {
            reasoning_strength: self.chat.reasoning,
            current_date: Some(now.iso_date()),
            now: Some(now),
            ..Conversation::new(system.chain(user).collect())
        };
        let segments = template.render(&conversation)?;
        let tokens = prompt_tokens(tokenizer, &segments);
        Ok((tokens, TurnFormat::of_chat(tokenizer)))
    }
}

fn print_start(args: &Args, file: &ModelFile, engine: &Engine, sampling: &Sampling) {
    let model = engine.model();
    let title = match file.text("general.name").filter(|_| !file.is_bundled) {
        Some(name) => format!("{} ({})", shown(name), file.name),
        None => file.name.clone(),
    };
    remark(&format!(
        "{title} | {} | {} | {} | weights {} | kv {} | context {} | up to {} beside the weights at \
         full context | speculation {} | {} ({})",
        model.config().architecture.name(),
        file.quantization(),
        model.caps().device,
        args.load.memory.describe(file),
        model.capacity().layout.ty,
        engine.n_ctx(),
        terminal::bytes(model.capacity().bytes()),
        draft::describe(engine.speculation().as_ref(), file),
        describe(&sampling.settings),
        sampling.origin,
    ));
    if !sampling.not_honoured.is_empty() {
        let keys = sampling.not_honoured.join(", ");
        remark(&format!("not honoured of the file: {keys}"));
    }
    if args.raw && model.config().architecture == model::Architecture::MuseGlimmer {
        remark("raw completion: no chat template, no reasoning");
    }
}

/// The error; if the prompt is too long, with what would help.
fn with_remedy(error: engine::Error, engine: &Engine) -> anyhow::Error {
    if !matches!(
        error,
        engine::Error::Prompt(engine::PromptError::TooLong { .. })
    ) {
        return error.into();
    }
    let trained = engine.model().config().n_ctx;
    match engine.n_ctx() < trained {
        true => anyhow!("{error}; --ctx gives more, up to {trained}"),
        false => anyhow!("{error}; the model was trained for no more, so --ctx cannot help"),
    }
}

/// Takes tokens, reads the turn, shows it.
struct Answer {
    reader: Reader,
    /// Collect instead of showing?
    is_quiet: bool,
    bar: ProgressBar,
    reasoning: String,
    content: String,
    calls: Vec<Value>,
    /// What went wrong while showing.
    failure: Option<std::io::Error>,
}

impl Answer {
    fn new(reader: Reader, is_quiet: bool) -> Answer {
        Answer {
            reader,
            is_quiet,
            bar: ProgressBar::hidden(),
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
            failure: None,
        }
    }

    fn take(&mut self, events: Vec<TurnEvent>) {
        for event in events {
            if let Err(error) = self.show(event) {
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Keeps an event, and shows it where it belongs.
    fn show(&mut self, event: TurnEvent) -> std::io::Result<()> {
        match event {
            TurnEvent::Reasoning(text) => {
                if !self.is_quiet {
                    anstream::eprint!("{DIM}{}{DIM:#}", lines(&text));
                }
                self.reasoning.push_str(&text);
            }
            TurnEvent::Content(text) => {
                if !self.is_quiet {
                    if self.content.is_empty() && !self.reasoning.is_empty() {
                        anstream::eprintln!("\n");
                    }
                    terminal::print_piece(&text)?;
                }
                self.content.push_str(&text);
            }
            TurnEvent::ToolCall {
                name, arguments, ..
            } => {
                let call = json!({ "name": name, "arguments": arguments });
                if !self.is_quiet {
                    remark(&format!("[calls {call}]"));
                }
                self.calls.push(call);
            }
            // Notices for people who watch; the outcome follows.
            TurnEvent::ToolCallStart { .. } | TurnEvent::CutToolCall { .. } => {}
        }
        Ok(())
    }

    /// Shows what was held back; fails if something could not be shown.
    fn finish(&mut self) -> anyhow::Result<()> {
        let (events, _) = self.reader.finish();
        self.take(events);
        self.end_line();
        match self.failure.take() {
            None => Ok(()),
            Some(error) => Err(error).context("cannot write the answer"),
        }
    }

    /// Ends the line that answer or reasoning left open.
    fn end_line(&mut self) {
        if self.is_quiet {
            return;
        }
        if self.content.is_empty() && !self.reasoning.is_empty() {
            anstream::eprintln!();
        } else if !self.content.is_empty() && !self.content.ends_with('\n') {
            let line_end = terminal::print_piece("\n");
            self.failure = self.failure.take().or(line_end.err());
        }
    }

    fn finish_reason(&self) -> &'static str {
        self.reader.finish_reason().map_or("length", |r| r.as_str())
    }

    /// Why it ended, with what `finish_reason` has no word for.
    fn ended(&self, done: &Generation) -> &'static str {
        match done.ending {
            Ending::Context => "context full",
            Ending::Cancelled => "interrupted",
            Ending::Deadline => "out of time",
            Ending::Guide | Ending::MaxTokens => self.finish_reason(),
        }
    }

    fn print_figures(&self, done: &Generation, seed: u64) {
        let ended = self.ended(done);
        let speculation = &done.speculation;
        let drafted = match speculation.rounds {
            0 => String::new(),
            rounds => format!(
                " | {} of {} accepted in {}, {:.2} a round with the one behind",
                speculation.accepted,
                count(speculation.drafted as usize, "drafted token"),
                count(rounds as usize, "round"),
                speculation.tokens_per_round(),
            ),
        };
        remark(&format!(
            "prompt {}, {:.1} tokens/s | generated {}, {:.1} tokens/s{drafted} | {ended} | seed {seed}",
            count(done.n_prefill, "token"),
            done.prefill_rate(),
            done.n_generated,
            done.decode_rate(),
        ));
        if self.content.is_empty() && self.calls.is_empty() {
            terminal::warn(&format!(
                "the answer is empty: {} came before it, then generation ended ({ended})",
                count(done.n_generated, "token"),
            ));
        }
    }

    /// Everything, for programs.
    fn report(
        &self,
        file: &ModelFile,
        prompt: &[u32],
        sampling: &SamplerSettings,
        done: &Generation,
    ) -> Value {
        json!({
            "model": file.name,
            "content": self.content,
            "reasoning_content": self.reasoning,
            "tool_calls": self.calls,
            "finish_reason": self.finish_reason(),
            "ended": self.ended(done),
            "seed": sampling.seed,
            "usage": {
                "prompt_tokens": prompt.len(),
                "completion_tokens": done.n_generated,
            },
            "timings": {
                "prefill_tokens": done.n_prefill,
                "prefill_ms": terminal::rounded(done.prefill.as_secs_f64() * 1e3),
                "decode_tokens": done.n_generated,
                "decode_ms": terminal::rounded(done.decode.as_secs_f64() * 1e3),
                "decode_tokens_per_second": terminal::rounded(done.decode_rate()),
                "draft_rounds": done.speculation.rounds,
                "drafted_tokens": done.speculation.drafted,
                "accepted_tokens": done.speculation.accepted,
            },
        })
    }
}

impl Receive for Answer {
    fn prefilled(&mut self, done: usize, total: usize) {
        // A bar only where there is more than one pass to wait for.
        if done < total && self.bar.is_hidden() {
            self.bar = terminal::progress(total as u64, "reading the prompt");
        }
        self.bar.set_position(done as u64);
        if done == total {
            self.bar.finish_and_clear();
        }
    }

    fn token(&mut self, generated: &Generated) -> ControlFlow<()> {
        let events = self.reader.push(generated.token);
        self.take(events);
        // Nobody reads on (`muser run ... | head`), or nobody waits.
        match self.failure.is_some() || interrupt::is_requested() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}
