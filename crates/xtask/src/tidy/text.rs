//! Rules for files of any language: size, length, machine paths, words that mark unfinished work.
//!
//! The words looked for are put together from parts, so that this file does not contain them.

use super::{FILE_BYTES, FILE_LINES, Violation};

/// Starts of paths that exist on one machine only.
pub const MACHINE_PATHS: [&str; 5] = [
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/t", "mp/"),
    concat!("../sha", "red"),
];
/// Words that mark unfinished work.
pub const UNFINISHED: [&str; 3] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
];
/// Names of files and folders that say nothing about what is inside.
const VAGUE_FILES: [&str; 5] = ["utils", "util", "helpers", "helper", "misc"];
/// Endings of files that hold code.
const CODE: [&str; 13] = [
    ".rs", ".cu", ".cuh", ".wgsl", ".py", ".sh", ".c", ".h", ".cpp", ".js", ".ts", ".html", ".css",
];

/// The bytes as text; nothing if they are not UTF-8 or contain a zero byte.
pub fn of(bytes: &[u8]) -> Option<&str> {
    if bytes.contains(&0) {
        None
    } else {
        str::from_utf8(bytes).ok()
    }
}

/// The size rule; the folder `models` is for what is larger.
pub fn check_size(path: &str, size_bytes: u64) -> Option<Violation> {
    let too_large = size_bytes > FILE_BYTES && !path.starts_with("models/");
    too_large.then(|| {
        violation(
            path,
            0,
            "file-size",
            &format!("{size_bytes} bytes"),
            &format!("limit {FILE_BYTES}"),
        )
    })
}

/// The rules for the text of a file.
pub fn check(path: &str, text: &str) -> Vec<Violation> {
    let mut out = Vec::new();
    let is_code = CODE.iter().any(|ending| path.ends_with(ending)) || text.starts_with("#!/");
    let n_lines = text.lines().count();
    if is_code && n_lines > FILE_LINES {
        out.push(violation(
            path,
            n_lines,
            "file-length",
            &format!("{n_lines} lines"),
            &format!("limit {FILE_LINES}"),
        ));
    }
    let stem = path
        .rsplit('/')
        .next()
        .and_then(|name| name.split('.').next())
        .unwrap_or_default();
    if is_code && VAGUE_FILES.contains(&stem) {
        out.push(violation(
            path,
            0,
            "name",
            &format!("file `{stem}`"),
            "a name that says what is inside",
        ));
    }
    for (at, line) in text.lines().enumerate() {
        for start in MACHINE_PATHS {
            if has_path(line, start) {
                out.push(violation(
                    path,
                    at + 1,
                    "machine-path",
                    &format!("`{start}`"),
                    "no path of one machine",
                ));
            }
        }
        for word in UNFINISHED {
            if is_code && has_word(line, word) {
                out.push(violation(
                    path,
                    at + 1,
                    "unfinished",
                    &format!("`{word}`"),
                    "nothing unfinished is committed",
                ));
            }
        }
    }
    out
}

/// True if `start` stands in the line as the start of a path, not inside one (`target/...`, `~/...`).
fn has_path(line: &str, start: &str) -> bool {
    line.match_indices(start).any(|(at, _)| {
        let inside = |c: char| c.is_alphanumeric() || "_-.~}*/".contains(c);
        start.starts_with("..") || !line[..at].ends_with(inside)
    })
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let part = |c: char| c.is_alphanumeric() || c == '_';
        !line[..at].ends_with(part) && !line[at + word.len()..].starts_with(part)
    })
}

fn violation(path: &str, line: usize, rule: &'static str, found: &str, limit: &str) -> Violation {
    Violation {
        path: path.to_owned(),
        line,
        rule,
        item: String::new(),
        found: found.to_owned(),
        limit: limit.to_owned(),
    }
}
