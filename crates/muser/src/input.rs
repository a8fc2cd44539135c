//! Text that people hand in: an argument, standard input or a file.
//!
//! What one would get wrong: text is checked here and never repaired. Bytes
//! that are no UTF-8 are an error that names the first of them, because a
//! prompt with U+FFFD in it would silently be another prompt.

use crate::terminal;
use anyhow::{Context, bail};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Most bytes of a text.
pub const MOST_TEXT_BYTES: u64 = 64 << 20;

/// The text that a positional argument stands for: itself, or all of standard
/// input for `-`. `what` is its name in errors: `the prompt`.
///
/// # Errors
/// Standard input cannot be read, is longer than [`MOST_TEXT_BYTES`] or is no
/// UTF-8 (with the offset of the first byte that is none).
pub fn read_text(arg: &str, what: &str) -> anyhow::Result<String> {
    match arg {
        "-" => read_utf8(std::io::stdin().lock(), what, "standard input"),
        text => Ok(text.to_string()),
    }
}

/// The text of a file, or of standard input for the path `-`.
///
/// # Errors
/// As [`read_text`], naming the file.
pub fn read_text_file(path: &Path, what: &str) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return read_text("-", what);
    }
    let origin = path.display().to_string();
    let file = File::open(path).with_context(|| format!("cannot read {what}: {origin}"))?;
    read_utf8(file, what, &origin)
}

fn read_utf8(from: impl Read, what: &str, origin: &str) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    from.take(MOST_TEXT_BYTES + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {what}: {origin}"))?;
    if bytes.len() as u64 > MOST_TEXT_BYTES {
        let most = terminal::bytes(MOST_TEXT_BYTES);
        bail!("cannot read {what}: {origin}: found more than {most}, expected at most that");
    }
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        let byte = error.as_bytes()[offset];
        anyhow::anyhow!(
            "cannot read {what}: {origin}: found the byte 0x{byte:02x} at offset {offset}, which \
             is not valid UTF-8 there, expected UTF-8"
        )
    })
}

/// A count on the command line, with blanks around it in lists.
///
/// # Errors
/// It is no whole number of 32 bits.
pub fn number(word: &str) -> Result<usize, String> {
    let number = word.trim().parse::<u32>().map(|n| n as usize);
    number.map_err(|_| "expected a whole number".to_string())
}

/// As [`number`], of what there must be one of.
///
/// # Errors
/// Also for 0.
pub fn positive(word: &str) -> Result<usize, String> {
    let number = number(word).ok().filter(|&n| n > 0);
    number.ok_or_else(|| "expected a whole number, 1 or more".to_string())
}

/// Token ids written as `1,2,3`, with a comma, blanks or both between them.
///
/// # Errors
/// A comma without an id on each side; the first word that is no id of a
/// vocabulary of `n_vocab` tokens.
pub fn parse_ids(text: &str, n_vocab: usize) -> anyhow::Result<Vec<u32>> {
    const EXPECTED: &str = "expected numbers such as 1,2,3";
    let mut ids = Vec::new();
    if text.trim().is_empty() {
        return Ok(ids);
    }
    for (n_commas, part) in text.split(',').enumerate() {
        if part.trim().is_empty() {
            match n_commas {
                0 => bail!("token ids: found nothing before the first comma, {EXPECTED}"),
                n => bail!("token ids: found nothing after comma {n}, {EXPECTED}"),
            }
        }
        for word in part.split_whitespace() {
            match word.parse::<u32>() {
                Ok(id) if (id as usize) < n_vocab => ids.push(id),
                Ok(id) => bail!("token {id} is not in the vocabulary of {n_vocab}"),
                Err(_) => bail!("token ids: found {word:?}, {EXPECTED}"),
            }
        }
    }
    Ok(ids)
}
