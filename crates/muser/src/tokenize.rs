//! `muser tokenize`: what a model's tokenizer makes of a text, and back.
//!
//! What one would get wrong: control tokens that a text spells are text unless
//! `--special` is given, here as everywhere else.

use crate::input::{parse_ids, read_text};
use crate::model_file::ModelArgs;
use crate::terminal::{self, count, print_line, print_text};
use clap::ValueEnum;
use gguf::shown;
use serde_json::{Value, json};
use std::process::ExitCode;
use text::{ControlText, Special, Tokenizer};

/// Show the tokens of a text, or the text of token ids
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:\n  \
    muser tokenize \"Hello there\"\n  \
    muser tokenize --special --bos never \"<|start|>user<|message|>Hi<|eot|>\"\n  \
    muser tokenize --ids - < story.txt\n  \
    muser tokenize --decode 3968,1605,426\n  \
    muser tokenize --model SmolLM2-135M-Instruct.Q4_1.gguf --json \"Hello\" | jq '.tokens[].id'\n\n\
    On a terminal, control characters are shown as escapes; a pipe or a file gets text byte for \
    byte.")]
pub struct Args {
    /// The text; `-` reads it from standard input
    #[arg(value_name = "TEXT", required_unless_present = "decode")]
    text: Option<String>,
    #[command(flatten)]
    model: ModelArgs,
    /// Control tokens spelled in the text are control tokens; with --decode, spell them
    #[arg(long)]
    special: bool,
    /// Put the token that begins a text in front
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    bos: Bos,
    /// Print the text of these ids instead, such as 1,2,3; `-` reads them from standard input
    #[arg(long, value_name = "IDS", conflicts_with_all = ["text", "bos", "ids"])]
    decode: Option<String>,
    /// Print the ids only, in one line
    #[arg(long, conflicts_with = "json")]
    ids: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// When BOS is put in front.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Bos {
    /// If the model file says so and the text does not spell it, as for `muser run --raw`
    #[default]
    Rule,
    /// In any case
    Always,
    /// Not at all
    Never,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let file = args.model.open()?;
    let tokenizer = file.tokenizer()?;
    let ids = match (&args.decode, &args.text) {
        (Some(ids), _) => parse_ids(&read_text(ids, "the token ids")?, tokenizer.n_vocab())?,
        (None, text) => {
            let text = read_text(text.as_deref().unwrap_or_default(), "the text")?;
            warn_of_missing_bytes(&tokenizer, &text);
            args.encode(&tokenizer, &text)?
        }
    };
    if args.json {
        let report = report(&tokenizer, &ids, args.control());
        print_line(format_args!("{report:#}"))?;
    } else if args.decode.is_some() {
        print_text(&tokenizer.decode(&ids, args.control()))?;
    } else if args.ids {
        print_line(join_ids(&ids))?;
    } else {
        print_table(&tokenizer, &ids)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn encode(&self, tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
        let special = match self.special {
            true => Special::Parse,
            false => Special::Text,
        };
        let mut ids = match self.bos {
            Bos::Rule => return Ok(tokenizer.encode_prompt(text, special)),
            Bos::Always | Bos::Never => tokenizer.encode(text, special),
        };
        if self.bos == Bos::Always {
            let bos = tokenizer.bos();
            let bos = bos.ok_or_else(|| {
                anyhow::anyhow!("--bos always: the model file names no BOS token")
            })?;
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    fn control(&self) -> ControlText {
        match self.special {
            true => ControlText::Keep,
            false => ControlText::Skip,
        }
    }
}

/// `1,2,3`, which [`parse_ids`] reads.
pub fn join_ids(ids: &[u32]) -> String {
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    words.join(",")
}

/// A vocabulary that was trained without rare bytes loses them.
fn warn_of_missing_bytes(tokenizer: &Tokenizer, text: &str) {
    let missing = tokenizer.missing_bytes();
    let lost = |byte: &u8| text.as_bytes().contains(byte);
    let lost: Vec<String> = missing
        .iter()
        .filter(|b| lost(b))
        .map(|b| format!("0x{b:02x}"))
        .collect();
    if !lost.is_empty() {
        terminal::warn(&format!(
            "the vocabulary has no token for these bytes of the text, so it does not survive: {}",
            lost.join(" ")
        ));
    }
}

/// A token as a column of text: what it stands for in quotes, with `\xNN` for
/// bytes that are no character, or its spelling without quotes if it stands for
/// nothing.
fn cell(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if bytes.is_empty() {
        return shown(tokenizer.token_text(id).unwrap_or_default());
    }
    let mut out = String::new();
    for chunk in bytes.utf8_chunks() {
        out.push_str(&shown(chunk.valid()));
        out.extend(chunk.invalid().iter().map(|b| format!("\\x{b:02x}")));
    }
    format!("\"{out}\"")
}

fn print_table(tokenizer: &Tokenizer, ids: &[u32]) -> std::io::Result<()> {
    const WIDEST: usize = 28;
    let texts: Vec<String> = ids.iter().map(|&id| cell(tokenizer, id)).collect();
    let width = texts.iter().map(|t| t.chars().count()).max().unwrap_or(0);
    let width = width.clamp("text".len(), WIDEST);
    print_line(format_args!("{:>7}  {:width$}  bytes", "id", "text"))?;
    for (&id, text) in ids.iter().zip(&texts) {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        let hex: Vec<String> = bytes.iter().map(|b| format!("{b:02x}")).collect();
        let line = format!("{id:>7}  {text:width$}  {}", hex.join(" "));
        print_line(line.trim_end())?;
    }
    terminal::remark(&count(ids.len(), "token"));
    Ok(())
}

fn report(tokenizer: &Tokenizer, ids: &[u32], control: ControlText) -> Value {
    let tokens = ids.iter().map(|&id| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        json!({
            "id": id,
            "spelling": tokenizer.token_text(id),
            "is_control": tokenizer.is_control(id),
            // Null where the bytes are part of a character only.
            "text": std::str::from_utf8(bytes).ok(),
            "bytes": bytes,
        })
    });
    json!({
        "tokens": tokens.collect::<Vec<Value>>(),
        "text": tokenizer.decode(ids, control),
    })
}
