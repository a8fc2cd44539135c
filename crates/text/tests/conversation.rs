//! Conversations that cannot be a prompt, and prompts that lack them.

mod oracle;

use oracle::{template, template_of, tokenizer};
use serde_json::{Value, json};
use text::{ChatTemplate, ControlTokens, Conversation, DateTime, Segment};

fn conversation(input: Value) -> Conversation {
    serde_json::from_value(input).expect("a conversation")
}

fn user(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

fn joined(segments: &[Segment]) -> String {
    segments.iter().map(|s| s.text.as_str()).collect()
}

#[test]
fn a_prompt_without_the_messages_is_an_error() {
    let check = |source: &str, text: &str, message: &str| {
        let result = ChatTemplate::new(source, ControlTokens::of(&tokenizer()))
            .and_then(|template| template.render(&conversation(user(text))));
        let error = result.expect_err(source);
        assert_eq!(error.to_string(), message, "{source}");
    };
    let unread = "chat template: it does not read messages, expected a template that renders them";
    check("", "Hi", unread);
    check("  \n", "Hi", unread);
    check("{{ bos_token }}<|start|>assistant", "Hi", unread);
    let dropped = "chat template: nothing of the messages is in the prompt, expected their texts";
    check("{% if false %}{{ messages }}{% endif %}", "Hi", dropped);
    check(
        "{% for m in messages %}{{ m.role }}:{% endfor %}",
        "Hi, what?",
        dropped,
    );
    check("{{ messages[0].text }}|", "Hi", dropped);
    check("{% set messages = 1 %}{{ messages }}", "Hi", dropped);

    let renders = |source: &str, text: &str| {
        let template = template_of(source);
        assert!(
            template.render(&conversation(user(text))).is_ok(),
            "{source} with {text}"
        );
    };
    renders("{{ messages[0].content | upper }}", "straße Hi");
    renders("{{ messages | tojson(ensure_ascii=true) }}", "\"né\" ?");
    renders("{{ messages[0].content[3:] }}", "Hi you");
    renders("{% set messages = messages[0:] %}{{ messages }}", "Hi");
    renders("{{ messages[0].role }}", "");
    renders("{{ messages[0].role }}", "…");
    renders("{{ messages[0].role }}", "a USER");
}

#[test]
fn conversations_that_say_nothing() {
    let check = |messages: Value, message: &str| {
        let error = template()
            .render(&conversation(json!({"messages": messages})))
            .expect_err(message);
        assert_eq!(error.to_string(), message);
    };
    check(
        json!([]),
        "conversation: found no messages, expected at least one",
    );
    let without = |place: &str| {
        format!(
            "conversation: message {place} has no content, expected a text or a list of parts; only reasoning or tool calls can stand without"
        )
    };
    check(json!([{"role": "user"}]), &without("0 (user)"));
    check(
        json!([{"role": "user", "content": "Hi"}, {"role": "tool", "content": null, "name": "f"}]),
        &without("1 (tool)"),
    );
    check(
        json!([{"role": "\u{1b}[2J", "contents": "Hi"}]),
        &without("0 (\\u{1b}[2J)"),
    );
    for message in [
        json!({"role": "user", "content": ""}),
        json!({"role": "user", "content": []}),
        json!({"role": "assistant", "reasoning_content": "x"}),
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}),
    ] {
        let input = json!({"messages": [message]});
        assert!(
            template().render(&conversation(input.clone())).is_ok(),
            "{input}"
        );
    }
}

#[test]
fn current_dates_are_dates() {
    let with = |date: &str| {
        let input = json!({"messages": [{"role": "user", "content": "Hi"}], "current_date": date});
        template()
            .render(&conversation(input))
            .map(|segments| joined(&segments))
    };
    let prompt = with("2024-02-29").expect("a leap day");
    assert!(prompt.contains("\nCurrent date: 2024-02-29.\n"), "{prompt}");
    for date in [
        "",
        "today",
        "2026-1-31",
        "2026-01-32",
        "2026-02-29",
        "0000-01-01",
        "2026-01-31 ",
        "2026-01-31-01",
        "+026-01-31",
        "2026-01-3\u{661}",
        "2026-01-31\n# Rules",
        "26-01-31",
    ] {
        let error = with(date).expect_err(date);
        assert_eq!(
            error.to_string(),
            format!(
                "found the date {}, expected a day of the years 1 to 9999, as 2026-01-31",
                gguf::shown(date)
            )
        );
    }
    let day: DateTime = "2026-01-31".parse().expect("a date");
    assert_eq!(day.iso_date(), "2026-01-31");
}
