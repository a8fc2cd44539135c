//! Cutting text into the pieces that merges never cross.
//!
//! Every rule is the regular expression that the model's `tokenizer.json`
//! declares, with one change that leaves its matches as they are: the tail
//! `\s+(?!\S)|\s+` becomes `\s+`, and a run of blanks that a non-blank
//! follows gives its last blank back. Without the look-ahead the expression
//! runs on finite automata, so that no input, however long or odd, can make it
//! backtrack. The tests compare it with the declared expressions.

use regex::Regex;

const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
);
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
);
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// A splitting rule, as `tokenizer.ggml.pre` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    name: &'static str,
    expression: &'static str,
    /// Does the expression have `\s*[\r\n]+`, whose matches keep their last
    /// character?
    newline_runs: bool,
    /// Is every digit cut out before the expression runs on what lies between?
    single_digits: bool,
    /// Is it one of Llama 3? Then a piece that is a token stays whole without
    /// regard to the merges.
    is_llama3: bool,
}

impl Rule {
    const fn new(name: &'static str, expression: &'static str) -> Rule {
        Rule {
            name,
            expression,
            newline_runs: true,
            single_digits: false,
            is_llama3: false,
        }
    }

    const fn llama3(name: &'static str) -> Rule {
        Rule {
            is_llama3: true,
            ..Rule::new(name, LLAMA3)
        }
    }

    const fn gpt2(name: &'static str, single_digits: bool) -> Rule {
        Rule {
            newline_runs: false,
            single_digits,
            ..Rule::new(name, GPT2)
        }
    }
}

/// The rules by name.
const RULES: [Rule; 8] = [
    Rule::new("llama4", O200K),
    Rule::new("gpt-4o", O200K),
    Rule::llama3("llama-bpe"),
    Rule::llama3("llama3"),
    Rule::llama3("llama-v3"),
    Rule::gpt2("smollm", true),
    Rule::gpt2("gpt-2", false),
    Rule::new("qwen2", QWEN2),
];

/// Cuts text into pieces by one rule.
#[derive(Debug)]
pub(crate) struct Pretokenizer {
    rule: Rule,
    regex: Regex,
}

impl Pretokenizer {
    /// The rule that `tokenizer.ggml.pre` calls `name`.
    pub(crate) fn new(name: &str) -> Option<Pretokenizer> {
        let rule = *RULES.iter().find(|rule| rule.name == name)?;
        let regex = Regex::new(&format!(r"\A(?:{})", rule.expression))
            .expect("the expressions above are valid");
        Some(Pretokenizer { rule, regex })
    }

    /// The names of all rules, for messages.
    pub(crate) fn names() -> String {
        RULES.map(|rule| rule.name).join(", ")
    }

    /// Is the rule one of Llama 3? Then a piece that is a token stays whole
    /// without regard to the merges.
    pub(crate) fn is_llama3(&self) -> bool {
        self.rule.is_llama3
    }

    /// Hands every piece of `text` to `piece` in order; joined they are `text`.
    pub(crate) fn split<'t>(&self, text: &'t str, mut piece: impl FnMut(&'t str)) {
        if !self.rule.single_digits {
            return self.split_run(text, &mut piece);
        }
        let mut start = 0;
        for (at, digit) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
            let end = at + digit.len_utf8();
            self.split_run(&text[start..at], &mut piece);
            piece(&text[at..end]);
            start = end;
        }
        self.split_run(&text[start..], &mut piece);
    }

    /// Runs the expression over `text`.
    fn split_run<'t>(&self, text: &'t str, piece: &mut impl FnMut(&'t str)) {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let matched = match self.regex.find(rest) {
                Some(found) if !found.is_empty() => self.give_back(found.as_str(), rest),
                // The rules cover every character; a piece of one keeps going.
                _ => first.len_utf8(),
            };
            piece(&rest[..matched]);
            rest = &rest[matched..];
        }
    }

    /// Length in bytes of `found` at the start of `rest`, by `\s+(?!\S)|\s+`:
    /// of two or more blanks before a non-blank the last goes to what follows.
    fn give_back(&self, found: &str, rest: &str) -> usize {
        let whole = found.len();
        let Some(last) = found.chars().next_back().filter(|c| c.is_whitespace()) else {
            return whole;
        };
        let newline_run = self.rule.newline_runs && matches!(last, '\r' | '\n');
        let shorter = whole - last.len_utf8();
        if newline_run || whole == rest.len() || shorter == 0 {
            whole
        } else {
            shorter
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::OnceLock;
    use tokenizers::utils::SysRegex;

    /// As published: the o200k expression with the Muse Glimmer model facts,
    /// the others in the `tokenizer.json` of Llama 3, Qwen2 and GPT-2.
    const DECLARED: [(&str, &str); 4] = [
        (
            "llama4",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        (
            "llama-bpe",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        (
            "qwen2",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        (
            "gpt-2",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        ),
    ];

    /// Compiling an expression takes longer than splitting by it.
    fn split<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        static COMPILED: OnceLock<Vec<Pretokenizer>> = OnceLock::new();
        let all = || RULES.iter().filter_map(|rule| Pretokenizer::new(rule.name));
        let compiled = COMPILED.get_or_init(|| all().collect());
        let mut pieces = Vec::new();
        let pretokenizer = compiled.iter().find(|p| p.rule.name == name);
        let pretokenizer = pretokenizer.expect("a supported rule");
        pretokenizer.split(text, |piece| pieces.push(piece));
        pieces
    }

    fn declared() -> &'static [(&'static str, SysRegex)] {
        static COMPILED: OnceLock<Vec<(&str, SysRegex)>> = OnceLock::new();
        COMPILED.get_or_init(|| {
            let compile = |(name, expression)| {
                let regex = SysRegex::new(expression).expect("a published expression");
                (name, regex)
            };
            DECLARED.map(compile).into()
        })
    }

    /// `pieces` are joined by `|`, which the text itself must not contain.
    fn check(names: &[&str], text: &str, pieces: &str) {
        for name in names {
            assert_eq!(split(name, text).join("|"), pieces, "{name}: {text:?}");
        }
    }

    #[test]
    fn pieces_of_hand_checked_strings() {
        let o200k = ["llama4", "gpt-4o"];
        let llama3 = ["llama-bpe", "llama3", "llama-v3"];
        check(&o200k, "HelloWORLD don't", "Hello|WORLD| don't");
        check(&llama3, "HelloWORLD don't", "HelloWORLD| don|'t");
        check(&["qwen2"], "I'LL go'S", "I|'LL| go|'S");
        check(&["gpt-2", "smollm"], "I'll I'LL", "I|'ll| I|'|LL");
        check(&o200k, "1234567", "123|456|7");
        check(&llama3, "1234567", "123|456|7");
        check(&["qwen2", "smollm"], "1234", "1|2|3|4");
        check(&["gpt-2"], "x 1234", "x| 1234");
        check(&["smollm"], "x  12 y", "x|  |1|2| y");
        check(&["gpt-2", "llama-bpe"], "a   b  ", "a|  | b|  ");
        check(&o200k, "!!\r\n/x", "!!\r\n/|x");
        check(&llama3, "!!\r\n/x", "!!\r\n|/x");
        check(&["gpt-2"], "a\n\n b", "a|\n\n| b");
        check(&["qwen2"], " \n \n x", " \n \n| x");
        check(&["qwen2"], "(abc)", "(abc|)");
        check(&["gpt-2"], "(abc)", "(|abc|)");
        check(&["gpt-2"], "a\u{a0}b \u{a0}c", "a|\u{a0}|b| |\u{a0}|c");
        check(&o200k, "", "");
    }

    #[test]
    fn unknown_rules_are_not_found() {
        for name in ["", "default", "Llama4", "llama4 "] {
            assert!(Pretokenizer::new(name).is_none(), "{name:?}");
        }
    }

    /// Text in which all branches of the expressions meet.
    fn text() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            "[ \\t\\r\\n\u{a0}\u{2003}\u{3000}\u{85}]{1,4}",
            "'(s|T|re|VE|m|Ll|d|x|\u{17f})",
            "[a-cA-C]{1,4}",
            "[\u{e9}\u{c9}\u{1c5}\u{2b0}\u{732b}\u{5d0}\u{301}\u{308}]{1,4}",
            "[0-9\u{663}\u{2460}\u{bd}\u{2167}]{1,5}",
            "[!/.\u{200d}\u{200b}\u{1f642}<|>\\x00]{1,3}",
            any::<String>(),
        ];
        proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn pieces_equal_those_of_the_declared_expression(text in text()) {
            for (name, regex) in declared() {
                let declared: Vec<&str> =
                    regex.find_iter(&text).map(|(start, end)| &text[start..end]).collect();
                prop_assert_eq!(split(name, &text), declared, "{}", name);
            }
        }

        #[test]
        fn pieces_joined_are_the_text(text in text()) {
            for rule in RULES {
                prop_assert_eq!(split(rule.name, &text).concat(), text.as_str());
            }
        }
    }
}
