//! How a message shows text that comes from a file.
//!
//! A hostile file must not write to a terminal what its reader then takes for
//! the program's own words. What a reader would get wrong: control characters
//! are the smaller part of it; direction marks, joiners and letters without a
//! glyph change a line just as well.

/// Most characters that [`shown`] gives of a text, escapes included.
const SHOWN_CHARS: usize = 128;

/// `text` as a message may show it: on one line, with nothing that moves a
/// cursor, changes the direction of writing or is invisible.
///
/// Such characters, and `"` and `\`, become the escapes of a Rust string, so
/// that the result can stand between quotes and two texts never look the same.
/// After 128 characters it is cut, and ends in `... (N bytes)` with the length
/// of the whole text.
///
/// ```
/// assert_eq!(gguf::shown("blk.0.attn_q.weight"), "blk.0.attn_q.weight");
/// assert_eq!(gguf::shown("\u{1b}[2Jok"), "\\u{1b}[2Jok");
/// ```
pub fn shown(text: &str) -> String {
    let mut out = String::new();
    let mut n_chars = 0;
    for c in text.chars() {
        let piece = match c {
            '\'' => c.to_string(),
            // The Hangul fillers: letters to Unicode, blanks on a screen.
            '\u{115f}' | '\u{1160}' | '\u{3164}' | '\u{ffa0}' => c.escape_unicode().to_string(),
            // Escapes whatever is in no category that prints.
            _ => c.escape_debug().to_string(),
        };
        n_chars += piece.chars().count();
        if n_chars > SHOWN_CHARS {
            return format!("{out}... ({} bytes)", text.len());
        }
        out.push_str(&piece);
    }
    out
}
