//! Rules for Rust files, checked on their tokens.
//!
//! Tokens, not the syntax tree: so the bodies of macros (`macro_rules!`, `proptest!`) are held to the same rules as
//! everything else, and words in strings and comments are never taken for code.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use super::{FUNCTION_LINES, Violation};

/// Crates that may read the environment: the two that configure themselves, what only tests
/// use, and this one.
const ENVIRONMENT: [&str; 4] = ["muser", "server", "testing", "xtask"];
/// Crates without any unsafe code.
const SAFE: [&str; 4] = ["model", "text", "engine", "server"];
/// What of `std::env` reads or changes the environment.
const READS: [&str; 6] = ["var", "vars", "var_os", "vars_os", "set_var", "remove_var"];
/// Parts of type names that say nothing.
const VAGUE_TYPES: [&str; 3] = ["Manager", "Helper", "Utils"];

/// The rules for one Rust file.
pub fn check(path: &str, text: &str) -> Vec<Violation> {
    let mut scan = Scan {
        path,
        krate: krate(path),
        lines: text.lines().collect(),
        out: Vec::new(),
    };
    scan.head();
    match text.parse::<TokenStream>() {
        Ok(tokens) => {
            scan.forbids_unsafe(&tokens);
            scan.level(&tokens.into_iter().collect::<Vec<_>>(), is_test_file(path));
        }
        Err(error) => scan.push(0, "syntax", "", error.to_string(), "every file is Rust"),
    }
    scan.out
}

/// The crate that a file belongs to: `crates/<name>/...`.
fn krate(path: &str) -> &str {
    path.strip_prefix("crates/")
        .and_then(|rest| rest.split('/').next())
        .unwrap_or_default()
}

fn is_test_file(path: &str) -> bool {
    path.contains("/tests/")
        || path.contains("/benches/")
        || path.ends_with("/tests.rs")
        || path.starts_with("fuzz/")
}

struct Scan<'a> {
    path: &'a str,
    krate: &'a str,
    lines: Vec<&'a str>,
    out: Vec<Violation>,
}

impl Scan<'_> {
    fn push(&mut self, line: usize, rule: &'static str, item: &str, found: String, limit: &str) {
        let (path, item, limit) = (self.path.to_owned(), item.to_owned(), limit.to_owned());
        self.out.push(Violation {
            path,
            line,
            rule,
            item,
            found,
            limit,
        });
    }

    /// Source files of crates begin with their `//!` text.
    fn head(&mut self) {
        let is_source = self.path.starts_with("crates/") && self.path.contains("/src/");
        let first = self
            .lines
            .iter()
            .find(|line| !line.trim().is_empty())
            .copied()
            .unwrap_or_default();
        if is_source && !first.starts_with("//!") {
            self.push(
                1,
                "head-doc",
                "",
                format!("`{first}`"),
                "a file begins with `//!`: what it owns",
            );
        }
    }

    /// The root of a safe crate forbids unsafe code.
    fn forbids_unsafe(&mut self, tokens: &TokenStream) {
        let is_root = self.path == format!("crates/{}/src/lib.rs", self.krate);
        if !is_root || !SAFE.contains(&self.krate) {
            return;
        }
        let forbids = tokens.clone().into_iter().any(|tree| match tree {
            TokenTree::Group(group) => {
                group.stream().to_string().replace(' ', "") == "forbid(unsafe_code)"
            }
            _ => false,
        });
        if !forbids {
            self.push(
                1,
                "unsafe",
                "",
                "no `#![forbid(unsafe_code)]`".to_owned(),
                "this crate forbids unsafe code",
            );
        }
    }

    /// One sequence of tokens between two delimiters. `test`: inside code that only tests compile.
    fn level(&mut self, trees: &[TokenTree], test: bool) {
        let mut statement = None;
        let mut statement_test = test;
        for (at, tree) in trees.iter().enumerate() {
            let start = *statement.get_or_insert(line_of(tree));
            match tree {
                TokenTree::Ident(word) => {
                    self.word(&word.to_string(), &trees[at..], start, statement_test)
                }
                TokenTree::Group(group) => {
                    if is_attribute(trees, at) {
                        self.attribute(group);
                        statement_test |= is_test_attribute(group);
                    }
                    self.level(
                        &group.stream().into_iter().collect::<Vec<_>>(),
                        statement_test,
                    );
                    if group.delimiter() == Delimiter::Brace {
                        (statement, statement_test) = (None, test);
                    }
                }
                TokenTree::Punct(mark) if mark.as_char() == ';' => {
                    (statement, statement_test) = (None, test)
                }
                // A comma ends a field or an arm; it also stands between generics, where the item goes on.
                TokenTree::Punct(mark) if mark.as_char() == ',' => statement = None,
                _ => {}
            }
        }
    }

    /// A word of code, with the tokens from it on and the first line of its statement.
    fn word(&mut self, word: &str, rest: &[TokenTree], start: usize, test: bool) {
        let line = line_of(&rest[0]);
        match word {
            "fn" => self.function(rest),
            "struct" | "enum" | "trait" | "union" | "type" => self.type_name(rest),
            "unsafe" => self.unsafe_code(rest, start),
            "todo" | "unimplemented" if is_mark(rest.get(1), '!') => {
                self.push(
                    line,
                    "unfinished",
                    "",
                    format!("`{word}!`"),
                    "nothing unfinished is committed",
                );
            }
            "env" | "option_env" => self.environment(word, rest, test),
            _ => {}
        }
    }

    fn function(&mut self, rest: &[TokenTree]) {
        let Some(name) = name_after(rest) else { return };
        let line = line_of(&rest[0]);
        if name.starts_with("get_") || name.ends_with("_impl") || name.ends_with("_v2") {
            self.push(
                line,
                "name",
                &name,
                format!("fn {name}"),
                "no `get_`, `_impl`, `_v2`",
            );
        }
        let Some(body) = body(rest) else { return };
        let n_lines = body.span_close().end().line + 1 - line;
        if n_lines > FUNCTION_LINES {
            let found = format!("fn {name} has {n_lines} lines");
            self.push(
                line,
                "function-length",
                &name,
                found,
                &format!("limit {FUNCTION_LINES}"),
            );
        }
    }

    fn type_name(&mut self, rest: &[TokenTree]) {
        let Some(name) = name_after(rest) else { return };
        if VAGUE_TYPES.iter().any(|part| name.contains(part)) {
            self.push(
                line_of(&rest[0]),
                "name",
                &name,
                format!("type {name}"),
                "no `Manager`, `Helper`, `Utils`",
            );
        }
    }

    fn unsafe_code(&mut self, rest: &[TokenTree], start: usize) {
        if is_function_pointer(rest) {
            return;
        }
        let line = line_of(&rest[0]);
        if SAFE.contains(&self.krate) {
            self.push(
                line,
                "unsafe",
                "",
                "`unsafe`".to_owned(),
                "this crate has no unsafe code",
            );
        } else if !self.is_documented(line) && !self.is_documented(start) {
            let limit = "`// SAFETY:` directly above (a declaration: `# Safety` in its text)";
            self.push(
                line,
                "unsafe",
                "",
                "`unsafe` without its fact".to_owned(),
                limit,
            );
        }
    }

    /// True if the comments and attributes from `line` upwards, or the text that starts there, give the fact.
    fn is_documented(&self, line: usize) -> bool {
        let says = |text: &&str| {
            text.contains("// SAFETY:") || text.trim_start().starts_with("/// # Safety")
        };
        let above = self.lines[..line - 1]
            .iter()
            .rev()
            .take_while(|text| is_note(text));
        let below = self.lines[line - 1..]
            .iter()
            .take_while(|text| is_note(text));
        above.chain(below).any(says)
    }

    fn environment(&mut self, word: &str, rest: &[TokenTree], test: bool) {
        if ENVIRONMENT.contains(&self.krate) {
            return;
        }
        let found = match rest {
            [_, mark, TokenTree::Group(name), ..] if is_mark(Some(mark), '!') => {
                let name = name.stream().to_string();
                let is_package = word == "env" && name.starts_with("\"CARGO_PKG_");
                // A path of the checkout in a library would tie the binary to the machine that built it.
                let is_test_path = word == "env" && test && name.starts_with("\"CARGO_");
                (!is_package && !is_test_path).then(|| format!("`{word}!({name})`"))
            }
            [_, a, b, TokenTree::Ident(name), ..]
                if is_mark(Some(a), ':') && is_mark(Some(b), ':') =>
            {
                READS
                    .contains(&name.to_string().as_str())
                    .then(|| format!("`env::{name}`"))
            }
            [_, a, b, TokenTree::Group(names), ..]
                if is_mark(Some(a), ':') && is_mark(Some(b), ':') =>
            {
                let reads = |tree: &TokenTree| READS.contains(&tree.to_string().as_str());
                names
                    .stream()
                    .into_iter()
                    .find(reads)
                    .map(|name| format!("`env::{name}`"))
            }
            [_, a, b, star, ..]
                if is_mark(Some(a), ':') && is_mark(Some(b), ':') && is_mark(Some(star), '*') =>
            {
                Some("`env::*`".to_owned())
            }
            [_, TokenTree::Ident(renamed), ..] if renamed == "as" => {
                Some("`env` under another name".to_owned())
            }
            _ => None,
        };
        if let Some(found) = found {
            let limit = format!("only {} read the environment", ENVIRONMENT.join(", "));
            self.push(line_of(&rest[0]), "environment", "", found, &limit);
        }
    }

    fn attribute(&mut self, group: &Group) {
        let words: Vec<String> = words(group.stream());
        let Some(first) = words.first() else { return };
        let line = group.span_open().start().line;
        if first == "ignore" || (first == "cfg_attr" && words.iter().any(|word| word == "ignore")) {
            self.push(
                line,
                "ignored-test",
                "",
                "`#[ignore]`".to_owned(),
                "every test runs",
            );
        }
        let is_allow = first == "allow" || first == "expect";
        let is_plain_comment = |text: &str| {
            let text = text.trim_start();
            text.starts_with("//") && !text.starts_with("///") && !text.starts_with("//!")
        };
        let above = self.lines[..line - 1].iter().rev();
        let has_reason = words.iter().any(|word| word == "reason")
            || above
                .take_while(|text| is_note(text))
                .any(|text| is_plain_comment(text))
            || self.lines[group.span_close().end().line - 1].contains("] //");
        if is_allow && !has_reason {
            let lint = words.get(1..).unwrap_or_default().join("::");
            self.push(
                line,
                "allow",
                &lint,
                format!("`{first}({lint})`"),
                "a reason in it or in a comment above",
            );
        }
    }
}

/// The body of the function whose `fn` comes first, nothing for a declaration without one.
fn body(rest: &[TokenTree]) -> Option<&Group> {
    // Braces between angle brackets are a constant argument of the result's type.
    let mut n_open = 0i32;
    for (at, tree) in rest.iter().enumerate() {
        match tree {
            TokenTree::Punct(mark) => match mark.as_char() {
                ';' => return None,
                '<' => n_open += 1,
                '>' if !is_mark(at.checked_sub(1).and_then(|at| rest.get(at)), '-') => n_open -= 1,
                _ => {}
            },
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && n_open == 0 => {
                return Some(group);
            }
            _ => {}
        }
    }
    None
}

/// The name after a keyword; in a macro it may be one that the caller gives (`$name`).
fn name_after(rest: &[TokenTree]) -> Option<String> {
    match rest {
        [_, TokenTree::Ident(name), ..] => Some(name.to_string()),
        [_, mark, TokenTree::Ident(name), ..] if is_mark(Some(mark), '$') => {
            Some(format!("${name}"))
        }
        _ => None,
    }
}

/// True for `unsafe fn(...)` and `unsafe extern "C" fn(...)`: types, which nothing has to justify.
fn is_function_pointer(rest: &[TokenTree]) -> bool {
    let at = rest
        .iter()
        .take(4)
        .position(|tree| matches!(tree, TokenTree::Ident(word) if word == "fn"));
    at.is_some_and(|at| matches!(rest.get(at + 1), Some(TokenTree::Group(_))))
}

/// A line that only comments or gives an attribute.
fn is_note(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("//") || line.starts_with("#[")
}

fn is_attribute(trees: &[TokenTree], at: usize) -> bool {
    let is_bracket =
        matches!(&trees[at], TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket);
    let before = |n: usize| at.checked_sub(n).and_then(|at| trees.get(at));
    is_bracket && (is_mark(before(1), '#') || (is_mark(before(1), '!') && is_mark(before(2), '#')))
}

fn is_test_attribute(group: &Group) -> bool {
    let words = words(group.stream());
    let has = |wanted: &str| words.iter().any(|word| word == wanted);
    words
        .first()
        .is_some_and(|first| first == "test" || (first == "cfg" && has("test") && !has("not")))
}

fn is_mark(tree: Option<&TokenTree>, mark: char) -> bool {
    matches!(tree, Some(TokenTree::Punct(punct)) if punct.as_char() == mark)
}

fn line_of(tree: &TokenTree) -> usize {
    tree.span().start().line
}

/// All words in a stream, those inside of groups too.
fn words(stream: TokenStream) -> Vec<String> {
    let mut out = Vec::new();
    for tree in stream {
        match tree {
            TokenTree::Ident(word) => out.push(word.to_string()),
            TokenTree::Group(group) => out.extend(words(group.stream())),
            _ => {}
        }
    }
    out
}
