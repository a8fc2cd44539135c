//! `muser template` as people call it.

mod common;

use common::{check_error, muser, muser_with, oracle};
use serde_json::Value;
use std::io::Write;
use testing::root;

const HI: &[u8] = br#"[{"role": "user", "content": "Hi <|eot|>"}]"#;

/// The oracle's chat cases through the command: prompts byte for byte.
#[test]
fn the_oracles_cases() {
    let template = oracle("chat-template.jinja");
    let model = oracle("text-nano-f32.gguf");
    let cases = std::fs::read_to_string(oracle("chat-cases.json")).expect("the cases");
    let cases: Value = serde_json::from_str(&cases).expect("JSON");
    let cases = cases.as_array().expect("a list");
    assert_eq!(cases.len(), 12);
    for case in cases {
        let input = case["input"].to_string();
        let args = [
            "template",
            "--model",
            &model,
            "--chat-template",
            &template,
            "-",
        ];
        let outcome = muser_with(&args, input.as_bytes());
        assert_eq!(outcome.stderr, "", "{}", case["name"]);
        assert_eq!(
            outcome.stdout,
            case["prompt"].as_str().unwrap(),
            "{}",
            case["name"]
        );
        assert_eq!(outcome.code, 0);
    }
}

#[test]
fn flags_win_over_the_conversation() {
    let input = br#"{"messages": [{"role": "user", "content": "Hi"}],
        "reasoning_effort": "high", "current_date": "2001-02-03"}"#;
    let prompt = |flags: &[&str]| muser_with(&[&["template", "-"], flags].concat(), input).stdout;
    let plain = prompt(&[]);
    assert!(
        plain.contains("Current date: 2001-02-03.\n\nReasoning strength: high."),
        "{plain}"
    );
    assert!(
        plain.ends_with("<|message|>Hi<|eot|><|start|>assistant"),
        "{plain}"
    );
    let changed = prompt(&[
        "--reasoning",
        "low",
        "--date",
        "2026-11-30",
        "--no-generation-prompt",
    ]);
    assert!(
        changed.contains("Current date: 2026-11-30.\n\nReasoning strength: low."),
        "{changed}"
    );
    assert!(changed.ends_with("<|message|>Hi<|eot|>"), "{changed}");
}

#[test]
fn segments_tell_control_tokens_from_text() {
    let args = ["template", "--json", "--date", "2026-11-30", "-"];
    let found: Value = serde_json::from_str(&muser_with(&args, HI).stdout).expect("JSON");
    let segments = found["segments"].as_array().expect("segments");
    let text = |s: &Value| s["text"].as_str().unwrap().to_string();
    let joined: String = segments.iter().map(text).collect();
    assert_eq!(found["prompt"], joined.as_str());
    let user = segments
        .iter()
        .find(|s| text(s) == "Hi <|eot|>")
        .expect("the user's words");
    assert_eq!(user["kind"], "text");
    assert!(user["tokens"].as_array().unwrap().len() > 3, "{user}");
    let ends = segments.iter().filter(|s| text(s) == "<|eot|>");
    assert!(ends.clone().count() == 2 && ends.clone().all(|s| s["kind"] == "control"));
    for end in ends {
        assert_eq!(end["tokens"], serde_json::json!([3976]));
    }
    let ids = |v: &Value| {
        v.as_array()
            .unwrap()
            .iter()
            .map(Value::to_string)
            .collect::<Vec<_>>()
    };
    let each: Vec<String> = segments.iter().flat_map(|s| ids(&s["tokens"])).collect();
    assert_eq!(each, ids(&found["tokens"]));
    let line = muser_with(&["template", "--tokens", "--date", "2026-11-30", "-"], HI).stdout;
    assert_eq!(line, each.join(",") + "\n");
}

#[test]
fn a_template_of_the_users() {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(
        b"{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}",
    )
    .expect("written");
    let path = file.path().display().to_string();
    let outcome = muser_with(&["template", "--chat-template", &path, "-"], HI);
    assert_eq!(outcome.stdout, "<|begin_of_text|>[user] Hi <|eot|>\n");
    check_error(
        &[
            "template",
            "--chat-template",
            &path,
            "--reasoning",
            "low",
            "-",
        ],
        HI,
        &format!(
            "--reasoning has no effect: the chat template of {path} does not use \
             reasoning_strength"
        ),
    );
}

#[test]
fn bad_conversations() {
    let check = |stdin: &[u8], message: &str| check_error(&["template", "-"], stdin, message);
    check(
        b"",
        "conversation on standard input: EOF while parsing a value at line 1 column 0",
    );
    check(
        b"{\"messages\": [\n  {\"role\": \"user\" \"content\": \"Hi\"}]}",
        "conversation on standard input: expected `,` or `}` at line 2 column 19",
    );
    check(
        b"[{\"role\": \"user\", \"content\": \"Hi\"}",
        "conversation on standard input: EOF while parsing a list at line 1 column 34",
    );
    check(
        b"{}",
        "conversation on standard input: missing field `messages` at line 1 column 2",
    );
    check(
        b"{\"messages\": [], \"reasoning_effort\": \"max\"}",
        "conversation on standard input: reasoning strength: found \"max\", expected low, medium, \
         high or xhigh at line 1 column 43",
    );
    check(
        b"{\"messages\": [{\"role\": \"alien\", \"content\": \"x\"}]}",
        "chat template refuses the conversation: unknown role: alien",
    );
    check(
        b"[]",
        "conversation: found no messages, expected at least one",
    );
    check(
        b"[{\"role\": \"user\"}]",
        "conversation: message 0 (user) has no content, expected a text or a list of parts; only \
         reasoning or tool calls can stand without",
    );
    for (date, found) in [
        ("2026-02-30", "2026-02-30"),
        ("now\\u001b[2J", "now\\u{1b}[2J"),
    ] {
        let input = format!("{{\"messages\": [], \"current_date\": \"{date}\"}}");
        let message = format!(
            "conversation on standard input: current_date: found the date {found}, expected a day \
             of the years 1 to 9999, as 2026-01-31"
        );
        check(input.as_bytes(), &message);
    }
    check(
        b"[{\"role\": \"user\", \"content\": \"\xff\"}]",
        "cannot read the conversation: standard input: found the byte 0xff at offset 30, which \
         is not valid UTF-8 there, expected UTF-8",
    );
}

/// A template's own words steer no terminal.
#[test]
fn a_refusal_of_the_template_is_escaped() {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    let source = b"{{ raise_exception('no\x1b[2J\xc2\x9b1m ' ~ messages[0].role) }}";
    file.write_all(source).expect("written");
    let path = file.path().display().to_string();
    let outcome = muser_with(&["template", "--chat-template", &path, "-"], HI);
    assert_eq!(outcome.code, 1);
    let message = "error: chat template refuses the conversation: no\\u{1b}[2J\\u{9b}1m user";
    assert!(outcome.stderr.starts_with(message), "{}", outcome.stderr);
    let is_steering = |c: char| c.is_control() && c != '\n';
    assert!(
        !outcome.stderr.contains(is_steering),
        "{:?}",
        outcome.stderr
    );
}

#[test]
fn bad_flags() {
    check_error(
        &["template", "--date", "2026-02-30", "-"],
        HI,
        "--date: found the date 2026-02-30, expected a day of the years 1 to 9999, as 2026-01-31",
    );
    check_error(
        &["template", "--chat-template", "-", "-"],
        HI,
        "standard input can be the conversation or the template, not both",
    );
    let level = muser(&["template", "--reasoning", "max", "-"]);
    assert_eq!(level.code, 2);
    assert!(
        level
            .stderr
            .contains("reasoning strength: found \"max\", expected low, medium, high or xhigh"),
        "{}",
        level.stderr
    );
    check_error(
        &["template", "a\u{1b}[2J\u{9b}b"],
        b"",
        "cannot read the conversation: a\\u{1b}[2J\\u{9b}b: No such file or directory (os error 2)",
    );
    let missing = root("testdata/none.json").display().to_string();
    check_error(
        &["template", &missing],
        b"",
        &format!("cannot read the conversation: {missing}: No such file or directory (os error 2)"),
    );
}
