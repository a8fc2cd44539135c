//! What people see: messages on stderr, colours only on terminals.
//!
//! What one would get wrong: texts that come from a file, a model or a template
//! may hold control characters, which steer a terminal. So messages are always
//! escaped, and what goes to stdout is escaped where stdout is a terminal; a
//! pipe or a file gets it byte for byte.

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressStyle};
use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Write};

/// Reasoning and everything that is not the answer itself.
pub const DIM: Style = Style::new().dimmed();
/// Labels and headings.
pub const BOLD: Style = Style::new().bold();
const ERROR: Style = AnsiColor::Red.on_default().bold();
const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// Prints an error with its causes, each once.
pub fn report(error: &anyhow::Error) {
    anstream::eprint!("{ERROR}error:{ERROR:#} ");
    let mut printed = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let text = one_line(&text);
        // A transparent cause says what its parent said.
        if printed.contains(&*text) {
            continue;
        }
        if !printed.is_empty() {
            anstream::eprint!(": ");
        }
        anstream::eprint!("{text}");
        printed.push_str(&text);
    }
    anstream::eprintln!();
}

/// Prints a warning.
pub fn warn(message: &str) {
    let message = one_line(message);
    anstream::eprintln!("{WARNING}warning:{WARNING:#} {message}");
}

/// Prints a remark in one dim line.
pub fn remark(message: &str) {
    let message = one_line(message);
    anstream::eprintln!("{DIM}{message}{DIM:#}");
}

/// `text` with its control characters as escapes (`\u{1b}`, `\n`): it takes
/// one line and steers nothing.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, &[])
}

/// As [`one_line`], but line feeds and tabs stay: text of several lines.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, &['\n', '\t'])
}

fn escaped<'t>(text: &'t str, kept: &[char]) -> Cow<'t, str> {
    let is_escaped = |c: char| c.is_control() && !kept.contains(&c);
    if !text.contains(is_escaped) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match is_escaped(c) {
            true => out.extend(c.escape_debug()),
            false => out.push(c),
        }
    }
    out.into()
}

/// Did the reader of our output go away (`muser ... | head`)?
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}

/// `1234567` as `1.18 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

/// `1234567` as `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A figure for programs: three decimals.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// `1 token`, `2 tokens`.
pub fn count(n: usize, noun: &str) -> String {
    match n {
        1 => format!("1 {noun}"),
        n => format!("{n} {noun}s"),
    }
}

/// Writes a piece of text to stdout at once, as it is; on a terminal as
/// [`lines`]. Unlike `print!`, a closed pipe is an error.
pub fn print_piece(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let text = match out.is_terminal() {
        true => lines(text),
        false => text.into(),
    };
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// As [`print_piece`], with a line end behind it.
pub fn print_line(line: impl std::fmt::Display) -> std::io::Result<()> {
    print_piece(&format!("{line}\n"))
}

/// As [`print_piece`]; on a terminal a line end follows if the text has none,
/// while a pipe gets nothing but the text.
pub fn print_text(text: &str) -> std::io::Result<()> {
    print_piece(text)?;
    match std::io::stdout().is_terminal() && !text.ends_with('\n') {
        true => print_piece("\n"),
        false => Ok(()),
    }
}

/// A bar over `total` rows on stderr; hidden where that is no terminal.
pub fn progress(total: u64, label: &'static str) -> ProgressBar {
    const TEMPLATE: &str = "{msg} {bar:30} {pos}/{len} ({eta} left)";
    let style = ProgressStyle::with_template(TEMPLATE).expect("a valid template");
    ProgressBar::new(total)
        .with_style(style)
        .with_message(label)
}

/// A bar over `total` bytes on stderr; hidden where that is no terminal.
pub fn byte_progress(total: u64) -> ProgressBar {
    const TEMPLATE: &str =
        "{bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} ({eta} left) {msg}";
    let style = ProgressStyle::with_template(TEMPLATE).expect("a valid template");
    ProgressBar::new(total).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_become_escapes_and_nothing_else_does() {
        for (text, one, several) in [
            (
                "plain \"quoted\" \\",
                "plain \"quoted\" \\",
                "plain \"quoted\" \\",
            ),
            ("\u{1b}[2J", "\\u{1b}[2J", "\\u{1b}[2J"),
            (
                "a\u{9b}b\u{7f}\0",
                "a\\u{9b}b\\u{7f}\\0",
                "a\\u{9b}b\\u{7f}\\0",
            ),
            ("over\rwritten", "over\\rwritten", "over\\rwritten"),
            ("two\n\tlines", "two\\n\\tlines", "two\n\tlines"),
            // A family: people joined by U+200D. Then an accent of its own.
            (
                "\u{1f468}\u{200d}\u{1f467} e\u{301}",
                "\u{1f468}\u{200d}\u{1f467} e\u{301}",
                "\u{1f468}\u{200d}\u{1f467} e\u{301}",
            ),
        ] {
            assert_eq!((&*one_line(text), &*lines(text)), (one, several));
        }
    }

    #[test]
    fn counts() {
        let found = [0, 1, 2].map(|n| count(n, "token"));
        assert_eq!(found, ["0 tokens", "1 token", "2 tokens"]);
    }
}
