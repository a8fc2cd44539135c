//! What people see: messages on stderr, colours only on terminals.

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{ErrorKind, Write};

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
        // A transparent cause says what its parent said.
        if printed.contains(&text) {
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
    anstream::eprintln!("{WARNING}warning:{WARNING:#} {message}");
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

/// Writes a line to stdout; unlike `println!`, a closed pipe is an error.
pub fn print_line(line: impl std::fmt::Display) -> std::io::Result<()> {
    writeln!(std::io::stdout().lock(), "{line}")
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
