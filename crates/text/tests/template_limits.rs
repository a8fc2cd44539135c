//! What a hostile chat template can do: nothing but a named error.

mod oracle;

use serde_json::json;
use std::fs;
use std::time::{Duration, Instant};
use text::{
    ChatTemplate, ControlTokens, Conversation, Error, MOST_LEVELS, MOST_SOURCE_BYTES,
    MOST_TAG_TOKENS, Message, Segment,
};

const TOO_MUCH: &str =
    "chat template: the values that it makes and reads are more than 536870912 bytes altogether";
const TOO_LARGE: &str = "chat template: it holds a value of more than 33554432 bytes";
const TOO_DEEP: &str = "chat template: it holds a value of more than 256 levels";
const TOO_LONG: &str = "chat template: still running after 5000000 instructions";
/// Far more than any rendering needs here, far less than a hostile one wants.
const MOST_MEMORY_BYTES: u64 = 1 << 30;
const MOST_TIME: Duration = Duration::from_secs(60);

fn conversation() -> Conversation {
    Conversation::new(vec![Message::new("user", "Hi")])
}

/// Renders `source` and the messages behind it.
fn render(source: &str) -> Result<Vec<Segment>, Error> {
    let source = format!("{source}{{{{ messages | tojson }}}}");
    ChatTemplate::new(&source, ControlTokens::default())?.render(&conversation())
}

fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// The error that `source` ends in, in good time and little memory.
#[track_caller]
fn check(source: &str, message: &str) {
    let start = Instant::now();
    let error = render(source).expect_err(source);
    assert_eq!(error.to_string(), message, "{source:.200}");
    assert!(
        start.elapsed() < MOST_TIME,
        "{source:.200}: {:?}",
        start.elapsed()
    );
    assert!(
        peak_bytes() < MOST_MEMORY_BYTES,
        "{source:.200}: {} bytes",
        peak_bytes()
    );
}

#[test]
fn sources_and_tags_are_limited() {
    check(
        &" ".repeat(MOST_SOURCE_BYTES),
        "chat template: found 65559 bytes of source, expected at most 65536",
    );
    let sum = |n: usize| format!("\n{{{{ x{} }}}}", "+1".repeat(n));
    // The start of a tag, `x` and its end count too.
    assert!(render(&sum((MOST_TAG_TOKENS - 3) / 2).replace('x', "1")).is_ok());
    check(
        &sum(MOST_TAG_TOKENS / 2),
        "chat template: the tag in line 2 has more than 4096 tokens",
    );
    check(
        "{% block a %}{% endblock %}",
        "chat template: block a: blocks are not supported",
    );
}

/// As many of `piece` as one tag may hold, `n_tokens` each.
fn chain(piece: &str, n_tokens: usize) -> String {
    let most = (MOST_TAG_TOKENS - 16) / n_tokens;
    piece.repeat(most.min((MOST_SOURCE_BYTES - 200) / piece.len()))
}

/// Sources that the parser, the compiler or the engine go through recursively,
/// as deep as the limits let them.
fn deep_sources() -> Vec<String> {
    let mut sources: Vec<String> = [
        ("1", "+1", 2),
        ("x", "+1", 2),
        ("x", "-x", 2),
        ("1", "~1", 2),
        ("x", "~x", 2),
        ("2", "**2", 2),
        ("1", "*1", 2),
        ("x", "*x*1", 4),
        ("x", " and x", 2),
        ("x", " or 1", 2),
        ("x", "<x", 2),
        ("x", " in x", 2),
        ("x", " if x else x", 4),
        ("x", " if x", 2),
        ("x", ".a", 2),
        ("x", "[0]", 3),
        ("x", "[0:]", 4),
        ("x", "()", 2),
        ("x", ".a()", 4),
        ("x", "|e", 2),
        ("x", " is string", 2),
        ("x", " is not defined", 3),
    ]
    .into_iter()
    .map(|(first, piece, n_tokens)| format!("{{{{ {first}{} }}}}", chain(piece, n_tokens)))
    .collect();
    for (piece, n_tokens) in [("not ", 1), ("-", 1), ("x if x else ", 4)] {
        sources.push(format!("{{{{ {}x }}}}", chain(piece, n_tokens)));
    }
    // Chains in a frame that is itself deep.
    for (open, piece, n_tokens, close) in [
        ("(", "-", 1, ")"),
        ("[", "not ", 1, "]"),
        ("{1:", "x.a+", 4, "}"),
    ] {
        let depth = 60;
        let part = chain(piece, n_tokens * 70);
        sources.push(format!(
            "{{{{ {}x{} }}}}",
            format!("{open}{part}").repeat(depth),
            close.repeat(depth),
        ));
    }
    let elif = "{%elif x%}".repeat((MOST_SOURCE_BYTES - 200) / 10);
    sources.push(format!("{{%if x%}}{elif}{{%endif%}}"));
    let nested = "{%if x%}{%else%}".repeat(70);
    sources.push(format!("{nested}{}", "{%endif%}".repeat(70)));
    sources.push(format!("{{% set {}x = 1 %}}", chain("(", 1)));
    sources.push(format!(
        "{{% set {}x{} = 1 %}}",
        chain("(", 2),
        chain(")", 2)
    ));
    sources.push(format!("{{% set x{} = 1 %}}", chain(".a", 2)));
    sources.push(format!("{{% for {}x in y %}}{{% endfor %}}", chain("(", 1)));
    sources.push(format!(
        "{{% with {}x = y %}}{{% endwith %}}",
        chain("(", 1)
    ));
    sources.push(format!(
        "{{% filter e{} %}}{{% endfilter %}}",
        chain("|e", 2)
    ));
    sources.push("{%macro a()%}".repeat(140) + &"{%endmacro%}".repeat(140));
    sources.push("{%for a in[1]%}".repeat(140) + &"{%endfor%}".repeat(140));
    sources.push(format!("{{{{ {} }}}}", chain("[", 1)));
    sources.push(format!("{{{{ {}1{} }}}}", "[".repeat(70), "]".repeat(70)));
    sources.push(format!("{{{{ {}1{} }}}}", "{1:".repeat(70), "}".repeat(70)));
    sources
}

#[test]
fn no_source_overflows_the_stack() {
    for source in deep_sources() {
        let start = Instant::now();
        // Whether it is a prompt or an error is not the question here.
        if let Err(error) = render(&source) {
            let message = error.to_string();
            assert!(
                message.starts_with("chat template"),
                "{source:.80}: {message}"
            );
            assert!(message.len() < 400, "{source:.80}: {message}");
        }
        assert!(
            start.elapsed() < MOST_TIME,
            "{source:.80}: {:?}",
            start.elapsed()
        );
    }
}

#[test]
fn no_value_gets_too_deep() {
    let grow = |step: &str| {
        format!("{{% set ns = namespace(x=1) %}}{{% for i in range(100000) %}}{step}{{% endfor %}}")
    };
    for step in [
        "{% set ns.x = [ns.x] %}",
        "{% set ns.x = {'a': ns.x} %}",
        "{% set ns.x = [[ns.x], 1] %}",
        "{% set ns.x = dict(a=ns.x) %}",
        "{% set ns.x = ([ns.x] + [1]) %}",
        "{% set ns.x = ([ns.x] * 1) %}",
        "{% set ns.x = ([ns.x])[0:] %}",
        "{% set ns.x = ([ns.x] | list) %}",
        "{% set ns.x = ({'a': ns.x}.items()) %}",
        "{% set ns.x = ([ns.x] | reverse) %}",
        "{% set ns.x = ([ns.x] | map('list') | list if i else [ns.x]) %}",
    ] {
        check(&grow(step), TOO_DEEP);
    }
    // What is lazy in the engine does not nest.
    for step in [
        "{% set ns.x = ([1] + [])[0:] %}",
        "{% set ns.x = ([1])[::-1][::-1] %}",
    ] {
        assert!(
            render(&grow(step).replace("100000", "1000")).is_ok(),
            "{step}"
        );
    }
    let refused = "chat template failed: invalid operation: a namespace, a macro or a loop cannot be part of a value (in chat_template:1)";
    for step in [
        "{% set ns.x = namespace(x=ns.x) %}",
        "{% set ns.x = ns %}",
        "{% set y = [ns] %}",
        "{% set y = namespace() %}{% set y.next = ns %}",
        "{% for j in [1] %}{% if loop.changed(ns.x) %}{% endif %}{% set ns.x = loop %}{% endfor %}",
        "{% macro m() %}{{ i }}{% endmacro %}{% set ns.x = m %}",
        "{% macro m() %}{{ i }}{% endmacro %}{% set y = [m] %}",
    ] {
        check(&grow(step), refused);
    }
    let at_most = "{% set ns = namespace(x=1) %}{% for i in range(255) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}{{ ns.x | tojson }}{{ ns.x == [ns.x] }}";
    let rendered = render(at_most).expect("as deep as may be");
    assert!(rendered[0].text.contains(&"[".repeat(MOST_LEVELS - 1)));
}

#[test]
fn no_value_gets_too_large() {
    let grow = |step: &str| {
        format!(
            "{{% set ns = namespace(x='ab', l=[1]) %}}{{% for i in range(1000) %}}{step}{{% endfor %}}"
        )
    };
    for (step, message) in [
        ("{% set ns.x = ns.x ~ ns.x %}", TOO_LARGE),
        ("{% set ns.x = ns.x + ns.x %}", TOO_LARGE),
        ("{% set ns.x = ns.x * 2 %}", TOO_LARGE),
        ("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", TOO_LARGE),
        ("{% set ns.x = ns.x | replace('', ns.x) %}", TOO_LARGE),
        ("{% set ns.x = ns.x.replace('', ns.x) %}", TOO_LARGE),
        ("{% set ns.x = [ns.x, ns.x, ns.x] | join('') %}", TOO_LARGE),
        ("{% set ns.x = ''.join([ns.x, ns.x, ns.x]) %}", TOO_LARGE),
        ("{% set ns.l = ns.l + ns.l %}", TOO_LARGE),
        ("{% set ns.l = ns.l * 3 %}", TOO_MUCH),
        ("{% set ns.x = [ns.x, ns.x] | tojson %}", TOO_LARGE),
        (
            "{% set ns.l = [[ns.l, ns.l]] | first if i > 200 else [ns.l, ns.l] %}",
            TOO_LARGE,
        ),
    ] {
        check(&grow(step), message);
    }
    for (source, message) in [
        ("{{ 'x' | indent(100000000000) }}", TOO_LARGE),
        ("{{ 'x' | indent(width=100000000000) }}", TOO_LARGE),
        ("{{ 'x' * 1000000000 }}", TOO_LARGE),
        ("{{ ('x' * 100000000) * 100000000 }}", TOO_LARGE),
        ("{{ 'x' ~ ('x' * 100000000 ~ 'x') * 2 }}", TOO_LARGE),
        ("{{ 1000000000 * 'x' }}", TOO_LARGE),
        ("{{ [1] * 100000000000 }}", TOO_MUCH),
        ("{{ 2 in [1] * 9223372036854775807 }}", TOO_MUCH),
        ("{{ [] * 9223372036854775807 }}", TOO_MUCH),
        ("{{ range(100000) | join('a' * 1000000) }}", TOO_MUCH),
        ("{{ ('a' * 1000000).join(range(100000)) }}", TOO_MUCH),
        ("{{ (',' * 30000000).split(',') }}", TOO_MUCH),
        ("{{ (',' * 30000000) | split(',') }}", TOO_MUCH),
        ("{{ ('\\n' * 30000000).splitlines() }}", TOO_MUCH),
        ("{{ ('a' * 30000000) | list }}", TOO_MUCH),
        (
            "{% for a in range(100000) %}{{ 'x' * 10000 }}{% endfor %}",
            TOO_MUCH,
        ),
        (
            "{% for a in range(600) %}{% for b in range(1000) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
            TOO_LARGE,
        ),
        ("{{ [{'a': 'x' * 20000000}] * 2 }}", TOO_LARGE),
    ] {
        check(source, message);
    }
}

#[test]
fn what_would_take_forever() {
    for (source, message) in [
        (
            "{% set x = range(100000) %}{{ x | select('in', x) }}",
            TOO_MUCH,
        ),
        (
            "{% set x = ('a' * 30000000) %}{% for i in range(100000) %}{% if x == x ~ 'a' %}{% endif %}{% endfor %}",
            TOO_MUCH,
        ),
        (
            "{% set x = ('a' * 30000000) %}{% for i in range(100000) %}{% if x is upper %}{% endif %}{% endfor %}",
            TOO_MUCH,
        ),
        (
            "{% set x = range(100000) %}{% for i in range(100000) %}{% if x == x %}{% endif %}{% endfor %}",
            TOO_MUCH,
        ),
        (
            "{% set x = range(100000) %}{% set y = {'a': 1} %}{% for i in range(100000) %}{% if y[x] %}{% endif %}{% endfor %}",
            TOO_MUCH,
        ),
        (
            "{% for a in range(1000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
            TOO_LONG,
        ),
        (
            "{{ ('a' * 1000000).strip('b' * 1000000) }}",
            "chat template failed: invalid operation: strip: found a set of more than 256 characters (in chat_template:1)",
        ),
        (
            "{{ ('a' * 1000000) | trim('b' * 1000000) }}",
            "chat template failed: invalid operation: strip: found a set of more than 256 characters (in chat_template:1)",
        ),
        (
            "{{ 'a'.count('') }}",
            "chat template failed: invalid operation: count: found an empty string to count (in chat_template:1)",
        ),
        (
            "{{ 'a'[::-9223372036854775807 - 1] }}",
            "chat template failed: invalid operation: slice: the step is out of range (in chat_template:1)",
        ),
    ] {
        check(source, message);
    }
}

/// Many small texts, and a large one, taken again and again: each time all of it is
/// read, and what is made of it is kept.
#[test]
fn what_is_inside_lists_is_paid_for() {
    let texts = "{% set x = ['a' * 30000] * 1000 %}";
    let text = "{% set x = 'a' * 30000000 %}";
    let each = |set: &str, n: usize, step: &str| {
        let steps = (0..n).map(|i| step.replace("NR", &i.to_string()));
        format!("{set}{}", steps.collect::<String>())
    };
    let repeated =
        |set: &str, step: &str| format!("{set}{{% for i in range(100000) %}}{step}{{% endfor %}}");
    for source in [
        each(texts, 1400, "{% set yNR = x | map('upper') | list %}"),
        each(text, 1400, "{% set yNR = x.split('b') %}"),
        each(text, 1400, "{% set yNR = x | split('b') %}"),
        each(text, 1400, "{% set yNR = x.splitlines() %}"),
        repeated(text, "{% for c in x %}{% break %}{% endfor %}"),
        repeated(texts, "{% set y = x | map('title') | list %}"),
        repeated(texts, "{% set y = x | sort %}"),
        repeated(texts, "{% set y = x | select('equalto', 'b') | max %}"),
        repeated(
            texts,
            "{% set y = loop.changed(x if i is odd else x + []) %}",
        ),
        format!("{text}{{% set y = [{{'a': 1}}] * 4 %}}{{{{ y | sort(attribute=x) }}}}"),
    ] {
        check(&source, TOO_MUCH);
    }
}

#[test]
fn what_a_template_may_not_call() {
    for (source, message) in [
        (
            "{{ '%1000000000d' | format(1) }}",
            "unknown filter: filter format is unknown (in chat_template:1)",
        ),
        (
            "{{ '{:1000000000}'.format(1) }}",
            "unknown method: string has no method named format (in chat_template:1)",
        ),
        (
            "{{ 'x'.ljust(1000000000) }}",
            "unknown method: string has no method named ljust (in chat_template:1)",
        ),
        (
            "{{ 'x' | center(1000000000) }}",
            "unknown filter: filter center is unknown (in chat_template:1)",
        ),
        (
            "{{ [1] | batch(1000000000, 0) }}",
            "unknown filter: filter batch is unknown (in chat_template:1)",
        ),
        (
            "{{ debug() }}",
            "unknown function: debug is unknown (in chat_template:1)",
        ),
        (
            "{% include 'x' %}",
            "template not found: tried to include non-existing template \\\"x\\\" (in chat_template:1)",
        ),
    ] {
        check(source, &format!("chat template failed: {message}"));
    }
}

#[test]
fn variables_of_a_conversation_change_no_limit() {
    let mut conversation = conversation();
    for name in ["(keep)", "(read)", "(read all)", "(repeat)", "(set)"] {
        conversation.variables.insert(name.to_owned(), json!("x"));
    }
    let source = "{% set ns = namespace(x=1) %}{% set ns.x = [ns.x] * 2 %}{{ ns.x == 1 }}{{ messages | tojson }}";
    let template = ChatTemplate::new(source, ControlTokens::default()).expect(source);
    let segments = template.render(&conversation).expect(source);
    assert!(segments[0].text.starts_with("False["));
}

#[test]
fn real_conversations_stay_far_below_the_limits() {
    let turns = (0..4000).flat_map(|turn| {
        let call = json!({"id": format!("c{turn}"), "function": {"name": "f", "arguments": {"a": turn, "b": "text ".repeat(20)}}});
        [
            json!({"role": "assistant", "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": format!("c{turn}"), "content": "result ".repeat(20)}),
        ]
    });
    let messages: Vec<_> = [json!({"role": "user", "content": "Hi"})]
        .into_iter()
        .chain(turns)
        .collect();
    let conversation: Conversation =
        serde_json::from_value(json!({"messages": messages})).expect("a conversation");
    let start = Instant::now();
    let segments = oracle::template().render(&conversation).expect("a prompt");
    assert_eq!(
        segments
            .iter()
            .filter(|s| s.text.contains("result"))
            .count(),
        4000
    );
    assert!(start.elapsed() < MOST_TIME, "{:?}", start.elapsed());
}
