//! The `tojson` filter as chat templates expect it: Python's `json.dumps`
//! with `ensure_ascii=False`.
//!
//! Separators are ", " and ": ", keys keep their order, nothing is escaped
//! for HTML. The built-in filter of the template engine differs in all three.

use crate::meter::{MOST_VALUE_BYTES, Meter, Stop};
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// Most characters that a level is indented by.
const MOST_INDENT: usize = 64;

/// How one value is written.
struct Style {
    /// Blanks per level; `None` writes one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

/// `value | tojson(indent=, ensure_ascii=, separators=, sort_keys=)`.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the engine hands keyword arguments over by value"
)]
pub(crate) fn tojson(
    meter: &Meter,
    value: &Value,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        Some(blanks) if blanks.as_str().is_some() => blanks.as_str().map(str::to_owned),
        Some(count) => Some(" ".repeat(usize::try_from(count)?.min(MOST_INDENT))),
        None => None,
    };
    if indent
        .as_ref()
        .is_some_and(|blanks| blanks.len() > MOST_INDENT)
    {
        return Err(refused("the indentation is too long"));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(refused("separators must be two strings")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style {
        indent,
        item_separator,
        key_separator,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    meter.pay(out.len() as u64)?;
    Ok(out)
}

impl Style {
    fn write(&self, value: &Value, level: usize, out: &mut String) -> Result<(), Error> {
        // Every item adds little; a value that is too long is noticed soon.
        if out.len() as u64 > MOST_VALUE_BYTES {
            return Err(Stop::ValueSize.into());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => self.write_map(value, level, out)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.write_items('[', ']', level, out, items, |item, out| {
                    self.write(&item, level + 1, out)
                })?;
            }
            other => return Err(refused(&format!("a value of kind {other} has no JSON"))),
        }
        Ok(())
    }

    fn write_map(&self, value: &Value, level: usize, out: &mut String) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            let entry = value.get_item(&key)?;
            entries.push((key, entry));
        }
        if self.sort_keys {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.write_items(
            '{',
            '}',
            level,
            out,
            entries.into_iter(),
            |(key, entry), out| {
                match key.kind() {
                    ValueKind::String => self.write_string(key.as_str().unwrap_or_default(), out),
                    ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                        out.push('"');
                        self.write(&key, level + 1, out)?;
                        out.push('"');
                    }
                    other => return Err(refused(&format!("a key of kind {other} has no JSON"))),
                }
                out.push_str(&self.key_separator);
                self.write(&entry, level + 1, out)
            },
        )
    }

    fn write_items<T>(
        &self,
        open: char,
        close: char,
        level: usize,
        out: &mut String,
        items: impl Iterator<Item = T>,
        mut write: impl FnMut(T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        let mut is_empty = true;
        for item in items {
            if !is_empty {
                out.push_str(&self.item_separator);
            }
            is_empty = false;
            self.new_line(level + 1, out);
            write(item, out)?;
        }
        if !is_empty {
            self.new_line(level, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, level: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(level));
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").expect("a String takes all");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A number as Python writes it.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let number = f64::try_from(value.clone())?;
    if number.is_nan() {
        return Ok("NaN".to_owned());
    }
    if number.is_infinite() {
        return Ok(if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned());
    }
    // Both languages write the shortest digits that read back the same and
    // change to exponents at 1e16 and below 1e-4; Python gives an exponent a
    // sign and at least two digits.
    let text = format!("{number:?}");
    Ok(match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, power) = match exponent.strip_prefix('-') {
                Some(power) => ('-', power),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{power:0>2}")
        }
        None => text,
    })
}

fn refused(reason: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {reason}"))
}
