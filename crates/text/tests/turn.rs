//! The turn parser, the reader and the guide: examples and every split.

mod oracle;
mod turns;

use model::{Constraint, Guide, Verdict};
use oracle::{byte_ids, ids, tokenizer};
use serde_json::{Value, json};
use text::{FinishReason, Reader, Special, TurnEnd, TurnEvent, TurnFormat, TurnGuide};
use turns::{chat, content, read, reader, reasoning, tools};

fn cut(text: &str) -> TurnEvent {
    TurnEvent::CutToolCall(text.to_owned())
}

fn start(index: usize, name: &str) -> TurnEvent {
    TurnEvent::ToolCallStart {
        index,
        name: name.to_owned(),
    }
}

fn call(index: usize, name: &str, arguments: Value) -> [TurnEvent; 2] {
    let Value::Object(arguments) = arguments else {
        panic!("{arguments} is no object");
    };
    let call = TurnEvent::ToolCall {
        index,
        name: name.to_owned(),
        arguments,
    };
    [start(index, name), call]
}

/// Reads `text` with its markers as control tokens, in the usual tokens and
/// with one token for every byte.
fn check(text: &str, events: &[TurnEvent], end: TurnEnd) {
    for ids in [ids(text), byte_ids(text)] {
        let (found, found_end) = read(chat(), &ids, &[]);
        assert_eq!(found, events, "{text}");
        assert_eq!(found_end, end, "{text}");
    }
}

#[test]
fn answers() {
    use TurnEnd::{Budget, EndOfText, EndOfTurn};
    check(
        " to=self<|message|>Greet back.<|eom|><|start|>assistant to=user<|message|>Hello! é\u{1F600}<|eot|>",
        &[reasoning("Greet back."), content("Hello! é\u{1F600}")],
        EndOfTurn,
    );
    check(
        " to=user<|message|> a\n b <|end_of_text|>",
        &[content(" a\n b ")],
        EndOfText,
    );
    check(
        "<|message|>no recipient<|eot|>",
        &[content("no recipient")],
        EndOfTurn,
    );
    check(
        " to=user<|message|>one<|eom|><|start|>assistant to=user<|message|>two<|eot|>",
        &[content("onetwo")],
        EndOfTurn,
    );
    // The budget ends anywhere.
    check("", &[], Budget);
    check(" to=us", &[], Budget);
    check(" to=self", &[], Budget);
    check(
        " to=self<|message|>Thinking",
        &[reasoning("Thinking")],
        Budget,
    );
    check(
        " to=self<|message|>T<|eom|><|start|>assist",
        &[reasoning("T")],
        Budget,
    );
    check(" to=user<|message|>Answer", &[content("Answer")], Budget);
    // What comes behind the end means nothing.
    check(
        " to=user<|message|>A<|eot|><|start|>assistant to=user<|message|>B",
        &[content("A")],
        EndOfTurn,
    );
}

const CALL: &str = "<atem:function_calls>\n<atem:invoke name=\"get_weather\">\n\
    <atem:parameter name=\"city\">Paris</atem:parameter>\n<atem:parameter name=\"days\">2</atem:parameter>\n\
    </atem:invoke>\n</atem:function_calls>";

#[test]
fn tool_calls() {
    use TurnEnd::{Budget, EndOfTurn};
    let weather = |index| call(index, "get_weather", json!({"city": "Paris", "days": 2}));
    let f = |index, arguments| call(index, "f", arguments);
    check(
        &format!(" to=get_weather<|message|>{CALL}<|eot|>"),
        &weather(0),
        EndOfTurn,
    );
    check(
        &format!(
            " to=self<|message|>Look.<|eom|><|start|>assistant to=user<|message|>One moment.<|eom|><|start|>assistant to=get_weather<|message|>{CALL}<|eom|><|start|>assistant to=get_weather<|message|>{CALL}<|eot|>"
        ),
        &[
            &[reasoning("Look."), content("One moment.")],
            &weather(0)[..],
            &weather(1)[..],
        ]
        .concat(),
        EndOfTurn,
    );
    // Several in one message, blanks between the parts.
    check(
        " to=f<|message|>\n<atem:function_calls> <atem:invoke name=\"f\"></atem:invoke>\
         <atem:invoke name=\"g\"> <atem:parameter name=\"k\">1</atem:parameter></atem:invoke></atem:function_calls>\n<|eot|>",
        &[f(0, json!({})), call(1, "g", json!({"k": 1}))].concat(),
        EndOfTurn,
    );
    // The budget: a complete call counts, anything less is neither call nor answer.
    check(
        &format!(" to=get_weather<|message|>{CALL}"),
        &weather(0),
        Budget,
    );
    for length in 1..CALL.len() {
        let part = &CALL[..length];
        let (events, end) = read(chat(), &ids(&format!(" to=f<|message|>{part}")), &[]);
        let is_named = part.contains("get_weather\">");
        let expected = [start(0, "get_weather"), cut(part)];
        assert_eq!(events, expected[usize::from(!is_named)..], "{part}");
        assert_eq!(end, Budget);
    }
    check(" to=f<|message|>", &[], Budget);
}

#[test]
fn tool_bodies_that_are_no_calls_are_text() {
    let check_text = |body: &str| {
        check(
            &format!(" to=f<|message|>{body}<|eot|>"),
            &[content(body)],
            TurnEnd::EndOfTurn,
        );
    };
    check_text("plain words");
    check_text("{\"k\": 1}");
    check_text("<atem:function_calls></atem:function_calls>");
    check_text("<atem:function_calls><atem:invoke></atem:invoke></atem:function_calls>");
    check_text("before <atem:function_calls>");
    let check_late = |rest: &str| {
        let body = format!("<atem:function_calls><atem:invoke name=\"f\">{rest}");
        check(
            &format!(" to=f<|message|>{body}<|eot|>"),
            &[start(0, "f"), content(&body)],
            TurnEnd::EndOfTurn,
        );
    };
    check_late("");
    check_late("</atem:invoke>");
    check_late("</atem:invoke></atem:function_calls> and more");
    check_late("words</atem:invoke></atem:function_calls>");
    check_late("<atem:parameter name=\"k\">1</atem:invoke></atem:function_calls>");
    check_late(
        "<atem:parameter name=\"k\">{\"x\": \"</atem:parameter>\"}</atem:parameter></atem:invoke></atem:function_calls>",
    );
    check_late(
        "<atem:parameter name=\"k\">1</atem:parameter><atem:parameter name=\"k\">2</atem:parameter></atem:invoke></atem:function_calls>",
    );
    // Names end at a quote and hold no markup.
    for name in ["", "f\" x=\"", "f<", "f\n"] {
        check_text(&format!(
            "<atem:function_calls><atem:invoke name=\"{name}\"></atem:invoke></atem:function_calls>"
        ));
        check_late(&format!(
            "<atem:parameter name=\"{name}\">1</atem:parameter></atem:invoke></atem:function_calls>"
        ));
    }
    // Markup in other messages is text.
    check(
        &format!(" to=user<|message|>{CALL}<|eot|>"),
        &[content(CALL)],
        TurnEnd::EndOfTurn,
    );
    check(
        &format!(" to=self<|message|>{CALL}<|eot|>"),
        &[reasoning(CALL)],
        TurnEnd::EndOfTurn,
    );
    check(
        &format!("<|message|>{CALL}<|eot|>"),
        &[content(CALL)],
        TurnEnd::EndOfTurn,
    );
}

#[test]
fn values_are_typed_by_the_schema() {
    let check_value = |tool: &str, key: &str, text: &str, value: Value| {
        check(
            &format!(
                " to=x<|message|><atem:function_calls><atem:invoke name=\"{tool}\"><atem:parameter name=\"{key}\">{text}</atem:parameter></atem:invoke></atem:function_calls><|eot|>"
            ),
            &call(0, tool, json!({key: value})),
            TurnEnd::EndOfTurn,
        );
    };
    check_value("get_weather", "city", "5", json!("5"));
    check_value(
        "get_weather",
        "city",
        " a <b> & \"c\"\nd ",
        json!(" a <b> & \"c\"\nd "),
    );
    check_value("get_weather", "city", "", json!(""));
    check_value("get_weather", "days", "5", json!(5));
    check_value("get_weather", "days", "five", json!("five"));
    check_value("get_weather", "days", "", json!(""));
    check_value(
        "get_weather",
        "other",
        "[1, {\"b\": \"é\", \"a\": null}]",
        json!([1, {"b": "é", "a": null}]),
    );
    for key in ["union", "choice", "any", "ref", "one"] {
        check_value("ns.f", key, "1", json!("1"));
    }
    check_value("ns.f", "free", "1", json!("1"));
    for key in ["loop", "unknown"] {
        check_value("ns.f", key, "1", json!(1));
        check_value("ns.f", key, "one", json!("one"));
    }
    check_value("ns.f", "list", "[\"a\"]", json!(["a"]));
    check_value("unknown", "k", " true ", json!(true));
    let deep = "[".repeat(100_000);
    check_value("unknown", "k", &deep, json!(deep));
    // Order of appearance.
    let (events, _) = read(
        chat(),
        &ids(
            " to=x<|message|><atem:function_calls><atem:invoke name=\"x\"><atem:parameter name=\"z\">1</atem:parameter><atem:parameter name=\"a\">2</atem:parameter></atem:invoke></atem:function_calls><|eot|>",
        ),
        &[],
    );
    let Some(TurnEvent::ToolCall { arguments, .. }) = events.last() else {
        panic!("{events:?}");
    };
    assert_eq!(arguments.keys().collect::<Vec<_>>(), ["z", "a"]);
}

#[test]
fn turns_out_of_shape() {
    use TurnEnd::{Budget, EndOfTurn};
    // Text where a header should be is answer.
    check("Hello<|eot|>", &[content("Hello")], EndOfTurn);
    check(
        " to be or not<|eot|>",
        &[content(" to be or not")],
        EndOfTurn,
    );
    check(
        " to=a b<|message|>c<|eot|>",
        &[content(" to=a bc")],
        EndOfTurn,
    );
    check(
        "<|start|>assistants<|message|>x<|eot|>",
        &[content("assistantsx")],
        EndOfTurn,
    );
    let longest = "x".repeat(256);
    check(
        &format!(" to={longest}<|message|>c"),
        &[content("c")],
        Budget,
    );
    check(
        &format!(" to={longest}<|message|>{CALL}<|eot|>"),
        &call(0, "get_weather", json!({"city": "Paris", "days": 2})),
        EndOfTurn,
    );
    let long = format!(" to={}", "x".repeat(257));
    check(
        &format!("{long}<|message|>c<|eot|>"),
        &[content(&format!("{long}c"))],
        EndOfTurn,
    );
    // A header that nothing follows is dropped.
    check(" to=user<|eot|>", &[], EndOfTurn);
    check(
        " to=user<|eom|><|start|>assistant to=self<|message|>x",
        &[reasoning("x")],
        Budget,
    );
    check(" to=<|message|>x", &[content("x")], Budget);
    // Markers out of place.
    check(
        " to=self<|message|>a<|message|>b",
        &[reasoning("ab")],
        Budget,
    );
    check(
        " to=self<|message|>a<|start|>assistant to=user<|message|>b",
        &[reasoning("a"), content("b")],
        Budget,
    );
    check(
        "<|eom|><|eom|><|start|><|start|><|message|>a",
        &[content("a")],
        Budget,
    );
    check(
        " to=self<|message|>a<|eom|> to=user<|message|>b",
        &[reasoning("a"), content("b")],
        Budget,
    );
    check(
        " to=user<|message|>a<|patch|>b<|begin_of_text|>c",
        &[content("abc")],
        Budget,
    );
    check("<|patch|> to=self<|message|>a", &[reasoning("a")], Budget);
}

#[test]
fn another_roles_message_ends_the_turn() {
    use TurnEnd::{Budget, EndOfTurn};
    check(
        " to=user<|message|>a<|start|>user<|message|>b",
        &[content("a")],
        EndOfTurn,
    );
    check("<|start|>tool f<|message|>b", &[], EndOfTurn);
    for role in ["user", "system", "developer", "tool", "tool  f.g"] {
        check(&format!("<|start|>{role}<|message|>b"), &[], EndOfTurn);
    }
    check(
        "<|start|>tool f g<|message|>b",
        &[content("tool f gb")],
        Budget,
    );
    check("<|start|>us<|message|>b", &[content("b")], Budget);
    check("<|start|>users<|message|>b", &[content("usersb")], Budget);
    check("<|start|>assistant<|message|>b", &[content("b")], Budget);
}

#[test]
fn half_a_character_at_the_end_of_a_message() {
    let half = byte_ids("é")[0];
    let replacement = "\u{FFFD}";
    let with_half = |before: &str, after: &str| [ids(before), vec![half], ids(after)].concat();
    let (events, _) = read(
        chat(),
        &with_half(
            " to=self<|message|>a",
            "<|eom|><|start|>assistant to=user<|message|>b",
        ),
        &[],
    );
    assert_eq!(
        events,
        [reasoning(&format!("a{replacement}")), content("b")]
    );
    let (events, _) = read(chat(), &with_half(" to=user<|message|>a", ""), &[]);
    assert_eq!(events, [content(&format!("a{replacement}"))]);
    let (events, _) = read(chat(), &with_half("", "<|message|>a"), &[]);
    assert_eq!(events, [content(&format!("{replacement}a"))]);
}

#[test]
fn spelled_markers_are_text_in_every_split() {
    let tokenizer = tokenizer();
    for marker in [
        "<|start|>",
        "<|message|>",
        "<|eom|>",
        "<|eot|>",
        "<|end_of_text|>",
        "<|patch|>",
    ] {
        for at in 0..=marker.len() {
            let spelled = [
                ids(" to=user<|message|>a"),
                tokenizer.encode(&marker[..at], Special::Text),
                tokenizer.encode(&marker[at..], Special::Text),
                ids("b<|eot|>"),
            ];
            let (events, end) = read(chat(), &spelled.concat(), &[]);
            assert_eq!(
                events,
                [content(&format!("a{marker}b"))],
                "{marker} at {at}"
            );
            assert_eq!(end, TurnEnd::EndOfTurn);
        }
    }
    let header = tokenizer.encode(" to=self<|message|>a", Special::Text);
    let (events, _) = read(chat(), &header, &[]);
    assert_eq!(events, [content(" to=self<|message|>a")]);
}

#[test]
fn streams_as_soon_as_text_is_certain() {
    let mut reader = reader(chat(), &[]);
    for id in ids(" to=user<|message|>") {
        assert_eq!(reader.push(id), [], "the header");
    }
    for (id, text) in byte_ids("aé").into_iter().zip(["a", "", "é"]) {
        let expected = [content(text)];
        assert_eq!(reader.push(id), expected[usize::from(text.is_empty())..]);
    }
    assert_eq!(reader.end(), None);
    assert_eq!(reader.push(ids("<|eot|>")[0]), []);
    assert_eq!(reader.end(), Some(TurnEnd::EndOfTurn));
    assert_eq!(reader.push(ids("a")[0]), []);
    assert_eq!(reader.finish(), (Vec::new(), TurnEnd::EndOfTurn));
}

#[test]
fn plain_turns() {
    let tokenizer = tokenizer();
    let eos = tokenizer.special().eos.expect("the oracle has EOS");
    let eot = ids("<|eot|>")[0];
    let format = TurnFormat::of_completion(&tokenizer);
    let text = " to=self<|message|>a<|eom|><|start|>b";
    let (events, end) = read(format.clone(), &[ids(text), vec![eos]].concat(), &[]);
    assert_eq!(events, [content(" to=selfab")]);
    assert_eq!(end, TurnEnd::EndOfText);
    let (events, end) = read(
        format.clone(),
        &[ids("a"), vec![eot], ids("b")].concat(),
        &[],
    );
    assert_eq!(events, [content("a")]);
    assert_eq!(end, TurnEnd::EndOfTurn);
    let (events, end) = read(format, &ids("ab"), &["b"]);
    assert_eq!(events, [content("a")]);
    assert_eq!(end, TurnEnd::StopString);
}

#[test]
fn finish_reasons() {
    let check = |end: TurnEnd, n_calls: usize, reason: FinishReason, word: &str| {
        assert_eq!(end.finish_reason(n_calls), reason);
        assert_eq!(reason.as_str(), word);
    };
    check(TurnEnd::EndOfTurn, 0, FinishReason::Stop, "stop");
    check(TurnEnd::EndOfText, 0, FinishReason::Stop, "stop");
    check(TurnEnd::StopString, 0, FinishReason::Stop, "stop");
    check(TurnEnd::EndOfTurn, 2, FinishReason::ToolCalls, "tool_calls");
    check(TurnEnd::Budget, 0, FinishReason::Length, "length");
    check(TurnEnd::Budget, 1, FinishReason::Length, "length");
}

#[test]
fn stop_strings_look_at_the_answer_only() {
    let check_stop = |text: &str, stop: &[&str], events: &[TurnEvent], end: TurnEnd| {
        for ids in [ids(text), byte_ids(text)] {
            assert_eq!(
                read(chat(), &ids, stop),
                (events.to_vec(), end),
                "{text} with {stop:?}"
            );
        }
    };
    let turn =
        " to=self<|message|>an END<|eom|><|start|>assistant to=user<|message|>the END of it<|eot|>";
    check_stop(
        turn,
        &["END"],
        &[reasoning("an END"), content("the ")],
        TurnEnd::StopString,
    );
    check_stop(
        turn,
        &["é", " it"],
        &[reasoning("an END"), content("the END of")],
        TurnEnd::StopString,
    );
    check_stop(
        turn,
        &["END of them"],
        &[reasoning("an END"), content("the END of it")],
        TurnEnd::EndOfTurn,
    );
    check_stop(
        " to=user<|message|>café<|eot|>",
        &["é"],
        &[content("caf")],
        TurnEnd::StopString,
    );
    check_stop(
        " to=user<|message|>ab EN",
        &["END"],
        &[content("ab EN")],
        TurnEnd::Budget,
    );
    check_stop(" to=user<|message|>END", &["END"], &[], TurnEnd::StopString);
    // Held-back text comes before what follows it.
    check_stop(
        " to=user<|message|>a EN<|eom|><|start|>assistant to=self<|message|>D",
        &["END"],
        &[content("a EN"), reasoning("D")],
        TurnEnd::Budget,
    );
    check_stop(
        &format!(" to=get_weather<|message|>{CALL}<|eot|>"),
        &["Paris"],
        &call(0, "get_weather", json!({"city": "Paris", "days": 2})),
        TurnEnd::EndOfTurn,
    );
    let refused = Reader::new(tokenizer(), chat(), tools(), &[String::new()]).expect_err("empty");
    assert_eq!(
        refused.to_string(),
        "stop string 0: found an empty string, expected at least one character"
    );
}

#[test]
fn the_guide_stops_where_the_reader_does() {
    let check_guide = |text: &str, stop: &[&str], n_accepted: usize| {
        let ids = ids(text);
        let mut guide = TurnGuide::new(reader(chat(), stop));
        let verdicts: Vec<Verdict> = ids.iter().map(|&id| guide.accept(id)).collect();
        let continues = verdicts
            .iter()
            .take_while(|&&v| v == Verdict::Continue)
            .count();
        assert_eq!(continues, n_accepted, "{text}: {verdicts:?}");
        assert!(verdicts[continues..].iter().all(|&v| v == Verdict::Stop));
    };
    let turn = " to=self<|message|>x<|eom|><|start|>assistant to=user<|message|>the END<|eot|>a";
    check_guide(turn, &[], ids(turn).len() - 2);
    check_guide(
        " to=user<|message|>a<|end_of_text|>",
        &[],
        ids(" to=user<|message|>a").len(),
    );
    check_guide(
        " to=user<|message|>a.b",
        &["."],
        ids(" to=user<|message|>a").len(),
    );

    let ids = ids(turn);
    let mut guide = TurnGuide::new(reader(chat(), &[]));
    for (row, &id) in ids.iter().enumerate() {
        assert_eq!(guide.constraint(), Constraint::Free);
        let mut fork = guide.fork();
        for (later, &draft) in ids.iter().enumerate().skip(row) {
            let is_over = later + 2 >= ids.len();
            let expected = if is_over {
                Verdict::Stop
            } else {
                Verdict::Continue
            };
            assert_eq!(
                fork.accept(draft),
                expected,
                "a fork at {row}, token {later}"
            );
        }
        guide.accept(id);
    }
    assert_eq!(guide.reader().end(), Some(TurnEnd::EndOfTurn));
}
