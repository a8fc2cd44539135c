//! Forced, forbidden, single and strict calls, and the reasoning budget.

mod vocabulary;
mod walk;

use model::Constraint;
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use text::{
    AnswerFormat, GuideFactory, Special, Tokenizer, Tool, ToolChoice, TurnEnd, TurnEvent,
    TurnFormat, TurnSettings,
};
use vocabulary::{oracle, tokenizer_of};
use walk::{Chooser, Walk, allows, feed, walk};

static MODELS: LazyLock<Vec<(Arc<Tokenizer>, GuideFactory)>> = LazyLock::new(|| {
    let nano = tokenizer_of("models/nano-glimmer-q8_0.gguf");
    [nano, oracle()]
        .into_iter()
        .map(|tokenizer| {
            let format = TurnFormat::of_chat(&tokenizer);
            let factory = GuideFactory::new(Arc::clone(&tokenizer), format).expect("a factory");
            (tokenizer, factory)
        })
        .collect()
});

fn tool(name: &str, parameters: impl Into<Value>) -> Value {
    let parameters: Value = parameters.into();
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

fn tools_of(tools: Value) -> Arc<[Tool]> {
    serde_json::from_value::<Vec<Tool>>(tools)
        .expect("tools")
        .into()
}

fn tools() -> Arc<[Tool]> {
    tools_of(json!([
        tool(
            "get_weather",
            json!({
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "unit": {"enum": ["C", "F", 1]},
                },
                "required": ["city", "unit"],
            })
        ),
        tool("ns.now", json!({"type": "object", "properties": {}})),
        tool(
            "get",
            json!({
                "type": "object",
                "properties": {
                    "where": {"$ref": "#/$defs/place"},
                    "exact": {"type": "boolean"},
                    "a": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
                    "ab": {"type": ["string", "null"]},
                },
                "required": ["where"],
                "$defs": {"place": {
                    "type": "object",
                    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                    "required": ["x"],
                    "additionalProperties": false,
                }},
            })
        ),
        tool("bare", Value::Null),
    ]))
}

/// Are these arguments what the schema of the tool above says?
fn fits(name: &str, arguments: &Value) -> bool {
    let keys: Vec<&str> = arguments
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    let knows = |known: &[&str]| keys.iter().all(|key| known.contains(key));
    let has = |key: &str, is: &dyn Fn(&Value) -> bool| arguments.get(key).is_none_or(is);
    match name {
        "get_weather" => {
            knows(&["city", "days", "unit"])
                && arguments["city"].is_string()
                && has("days", &|days| {
                    (1..=14).contains(&days.as_i64().unwrap_or(0))
                })
                && ["C", "F"].contains(&arguments["unit"].as_str().unwrap_or_default())
        }
        "get" => {
            knows(&["where", "exact", "a", "ab"])
                && (0..=9).contains(&arguments["where"]["x"].as_i64().unwrap_or(-1))
                && has("exact", &Value::is_boolean)
                && has("a", &|a| {
                    a.as_array()
                        .is_some_and(|a| a.len() <= 2 && a.iter().all(|x| x == "x" || x == "y"))
                })
                && has("ab", &Value::is_string)
        }
        "ns.now" | "bare" => keys.is_empty(),
        _ => false,
    }
}

fn settings(tool_choice: ToolChoice) -> TurnSettings {
    TurnSettings {
        tools: tools(),
        tool_choice,
        ..TurnSettings::default()
    }
}

/// Walks many turns; every call must fit its tool.
fn walks(settings: &TurnSettings, seeds: std::ops::Range<u64>, check: impl Fn(&Walk)) {
    for (tokenizer, factory) in MODELS.iter() {
        for seed in seeds.clone() {
            let done = walk(factory, settings, &mut Chooser::new(tokenizer, seed));
            for (name, arguments) in done.calls() {
                assert!(fits(name, &arguments), "{name} {arguments} in {done:?}");
            }
            assert_ne!(done.end, TurnEnd::Budget);
            check(&done);
        }
    }
}

#[test]
fn a_required_call_comes_and_fits() {
    walks(&settings(ToolChoice::Required), 0..60, |done| {
        assert!(!done.calls().is_empty(), "{done:?}");
        assert_eq!(done.content(), "");
    });
}

#[test]
fn a_named_call_is_that_of_the_name() {
    for name in ["get_weather", "get", "ns.now", "bare"] {
        walks(
            &settings(ToolChoice::Named(name.to_owned())),
            0..12,
            |done| {
                assert!(!done.calls().is_empty());
                assert!(done.calls().iter().all(|(called, _)| *called == name));
            },
        );
    }
}

#[test]
fn no_call_where_none_is_allowed() {
    walks(&settings(ToolChoice::None), 0..60, |done| {
        let is_text =
            |event: &TurnEvent| matches!(event, TurnEvent::Content(_) | TurnEvent::Reasoning(_));
        assert!(done.events.iter().all(is_text), "{done:?}");
    });
}

#[test]
fn at_most_one_call_where_they_are_not_parallel() {
    for tool_choice in [ToolChoice::Auto, ToolChoice::Required] {
        let is_forced = tool_choice == ToolChoice::Required;
        let single = TurnSettings {
            parallel_tool_calls: false,
            ..settings(tool_choice)
        };
        walks(&single, 0..60, |done| {
            assert!(
                (usize::from(is_forced)..=1).contains(&done.calls().len()),
                "{done:?}"
            );
        });
    }
    // Several are possible where they are.
    let (tokenizer, factory) = &MODELS[0];
    let most = (0..60).map(|seed| {
        let done = walk(
            factory,
            &settings(ToolChoice::Required),
            &mut Chooser::new(tokenizer, seed),
        );
        done.calls().len()
    });
    assert!(most.max() > Some(1));
}

#[test]
fn a_formatted_answer_or_calls() {
    let both = TurnSettings {
        answer: AnswerFormat::Regex("[0-9]{1,3}".to_owned()),
        ..settings(ToolChoice::Auto)
    };
    walks(&both, 0..60, |done| {
        let text = done.content();
        let is_answer = (1..=3).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        assert!(
            is_answer || (text.is_empty() && !done.calls().is_empty()),
            "{done:?}"
        );
    });
}

/// One allowed turn of each kind, fed as the model writes it.
#[test]
fn what_the_model_writes_is_allowed() {
    const NOW: &str = "<atem:function_calls>\n<atem:invoke name=\"ns.now\">\n</atem:invoke>\n</atem:function_calls>";
    const WEATHER: &str = "<atem:function_calls>\n<atem:invoke name=\"get_weather\">\n\
        <atem:parameter name=\"unit\">C</atem:parameter>\n<atem:parameter name=\"days\">14</atem:parameter>\n\
        <atem:parameter name=\"city\">S\u{e3}o <Paulo> \u{1F600}\n</atem:parameter>\n</atem:invoke>\n</atem:function_calls>";
    const GET: &str = "<atem:function_calls>\n<atem:invoke name=\"get\">\n\
        <atem:parameter name=\"ab\"></atem:parameter>\n<atem:parameter name=\"where\">{\"x\": 3}</atem:parameter>\n\
        <atem:parameter name=\"a\">[\"x\", \"y\"]</atem:parameter>\n</atem:invoke>\n</atem:function_calls>";
    let check = |settings: &TurnSettings, text: &str| {
        let (tokenizer, factory) = &MODELS[0];
        let (mut guide, _) = factory.turn(settings).expect("a guide");
        feed(&mut *guide, tokenizer, text);
    };
    let required = settings(ToolChoice::Required);
    check(&required, &format!(" to=ns.now<|message|>{NOW}<|eot|>"));
    check(
        &required,
        &format!(" to=get<|message|>{GET}<|end_of_text|>"),
    );
    check(
        &required,
        &format!(
            " to=self<|message|>Call both.<|eom|><|start|>assistant to=get_weather<|message|>{WEATHER}<|eom|><|start|>assistant to=ns.now<|message|>{NOW}<|eot|>"
        ),
    );
    let auto = TurnSettings {
        parallel_tool_calls: false,
        ..settings(ToolChoice::Auto)
    };
    check(
        &auto,
        &format!(
            " to=user<|message|>One moment.<|eom|><|start|>assistant to=get_weather<|message|>{WEATHER}<|eot|>"
        ),
    );
    check(
        &settings(ToolChoice::None),
        " to=self<|message|>x<|eom|><|start|>assistant to=user<|message|>Hello<|eot|>",
    );
}

#[test]
fn what_may_not_come_in_a_call() {
    let (tokenizer, factory) = &MODELS[1];
    let check = |settings: &TurnSettings, before: &str, refused: &[&str], allowed: &[&str]| {
        let (mut guide, _) = factory.turn(settings).expect("a guide");
        feed(&mut *guide, tokenizer, before);
        let constraint = guide.constraint();
        let first = |text: &str| tokenizer.encode(text, Special::Parse)[0];
        for text in refused {
            assert!(
                !allows(constraint.clone(), first(text)),
                "{text:?} after {before:?}"
            );
        }
        for text in allowed {
            assert!(
                allows(constraint.clone(), first(text)),
                "{text:?} after {before:?}"
            );
        }
    };
    let required = settings(ToolChoice::Required);
    let ends = ["<|eot|>", "<|eom|>", "<|end_of_text|>", "<|start|>"];
    check(&required, "", &["<|message|>", "H", "<|eot|>"], &[" "]);
    check(&required, " to=", &["u"], &["s", "g", "n", "b"]);
    check(&required, " to=get", &["="], &["<|message|>", "_"]);
    check(
        &settings(ToolChoice::None),
        " to=",
        &["g", "n", "b"],
        &["s", "u"],
    );
    let head = " to=get<|message|><atem:function_calls>\n<atem:invoke name=\"get\">\n<";
    check(
        &required,
        " to=get<|message|>",
        &["{", "a", "<|eot|>"],
        &["<"],
    );
    // The required parameter is missing, so the call cannot be closed.
    check(&required, head, &["/"], &["a"]);
    let written = format!("{head}atem:parameter name=\"where\">{{\"x\": 3}}</atem:parameter>\n<");
    check(&required, &written, &ends, &["/", "a"]);
    // A key comes once; one key may begin with another.
    check(
        &required,
        &format!("{written}atem:parameter name=\""),
        &["w"],
        &["e", "a"],
    );
    check(
        &required,
        &format!("{written}atem:parameter name=\"a"),
        &["c"],
        &["\"", "b"],
    );
    // Raw text goes up to the closing tag; no control token is in it.
    let text = format!("{written}atem:parameter name=\"ab\">no < end");
    check(&required, &text, &ends, &["<", "x", "\n", "\""]);
    let complete = " to=bare<|message|><atem:function_calls>\n<atem:invoke name=\"bare\">\n</atem:invoke>\n</atem:function_calls>";
    check(&required, complete, &["\n", "<", "<|start|>"], &ends[..3]);
    let single = TurnSettings {
        parallel_tool_calls: false,
        ..required
    };
    check(&single, complete, &["<|eom|>", "<|start|>"], &["<|eot|>"]);
}

#[test]
fn strict_tools_are_well_formed_and_others_free() {
    let mut strict = tool(
        "f",
        json!({"properties": {"n": {"type": "boolean"}}, "required": ["n"]}),
    );
    strict["function"]["strict"] = json!(true);
    let settings = TurnSettings {
        tools: tools_of(json!([strict, tool("g", json!({}))])),
        ..TurnSettings::default()
    };
    let (tokenizer, factory) = &MODELS[1];
    let mut guide = factory.turn(&settings).expect("a guide").0;
    let mut free = guide.fork();
    feed(&mut *guide, tokenizer, " to=f<|message|>");
    assert_ne!(guide.constraint(), Constraint::Free);
    feed(&mut *free, tokenizer, " to=g<|message|>");
    assert_eq!(free.constraint(), Constraint::Free);
}

#[test]
fn a_turn_without_rules_is_free() {
    for settings in [TurnSettings::default(), settings(ToolChoice::Auto)] {
        let mut guide = MODELS[0].1.turn(&settings).expect("a guide").0;
        assert_eq!(guide.constraint(), Constraint::Free);
        guide.accept(70);
        assert_eq!(guide.constraint(), Constraint::Free);
        assert_eq!(guide.failure(), None);
    }
}

#[test]
fn the_reasoning_budget_forces_the_end_of_the_message() {
    for (tokenizer, factory) in MODELS.iter() {
        let id = |text: &str| tokenizer.id_of(text).expect("a marker");
        for budget in [0, 1, 5, 30] {
            for (answer, is_free) in [
                (AnswerFormat::Text, true),
                (AnswerFormat::Regex("ok".to_owned()), false),
            ] {
                let settings = TurnSettings {
                    answer,
                    reasoning_budget: Some(budget),
                    ..TurnSettings::default()
                };
                let (mut guide, _) = factory.turn(&settings).expect("a guide");
                if budget > 0 {
                    feed(&mut *guide, tokenizer, " to=self<|message|>");
                    for n in 0..budget {
                        assert_eq!(guide.constraint() == Constraint::Free, is_free, "token {n}");
                        guide.accept(tokenizer.encode("x", Special::Text)[0]);
                    }
                    for marker in ["<|eom|>", "<|start|>"] {
                        assert_eq!(guide.constraint(), Constraint::Forced(id(marker)));
                        guide.accept(id(marker));
                    }
                    feed(&mut *guide, tokenizer, "assistant");
                }
                let mut again = guide.fork();
                feed(&mut *again, tokenizer, " to=");
                let selves = tokenizer.encode("self", Special::Text);
                assert!(
                    !allows(again.constraint(), selves[0]),
                    "no second reasoning"
                );
                feed(&mut *guide, tokenizer, " to=user<|message|>ok<|eot|>");
            }
        }
    }
}

#[test]
fn the_budget_counts_all_reasoning_of_the_turn() {
    let (tokenizer, factory) = &MODELS[1];
    let settings = TurnSettings {
        reasoning_budget: Some(6),
        ..TurnSettings::default()
    };
    let (mut guide, _) = factory.turn(&settings).expect("a guide");
    let x = tokenizer.encode("x", Special::Text)[0];
    let eom = tokenizer.id_of("<|eom|>").expect("a marker");
    feed(&mut *guide, tokenizer, " to=self<|message|>");
    for _ in 0..4 {
        guide.accept(x);
    }
    feed(
        &mut *guide,
        tokenizer,
        "<|eom|><|start|>assistant to=self<|message|>",
    );
    for _ in 0..2 {
        assert_eq!(guide.constraint(), Constraint::Free);
        guide.accept(x);
    }
    assert_eq!(guide.constraint(), Constraint::Forced(eom));
    // Every walk keeps to it.
    for seed in 0..40 {
        let done = walk(factory, &settings, &mut Chooser::new(tokenizer, seed));
        let n_reasoning = reasoning_tokens(tokenizer, &done.tokens);
        assert!(n_reasoning <= 6, "{done:?}");
    }
}

/// Tokens between the header of a message to the model itself and its end.
fn reasoning_tokens(tokenizer: &Tokenizer, tokens: &[u32]) -> usize {
    let mut header = String::new();
    let mut is_body = false;
    let mut n_reasoning = 0;
    for &token in tokens {
        match tokenizer.token_text(token).expect("a token") {
            "<|message|>" if !is_body => is_body = true,
            "<|eom|>" | "<|start|>" | "<|eot|>" | "<|end_of_text|>" => {
                is_body = false;
                header.clear();
            }
            _ if is_body => n_reasoning += usize::from(header.ends_with("to=self")),
            _ => {
                let bytes = tokenizer.token_bytes(token).expect("a token");
                header.push_str(std::str::from_utf8(bytes).expect("ASCII"));
            }
        }
    }
    n_reasoning
}

#[test]
fn demands_that_cannot_be_met() {
    let check = |factory: &GuideFactory, settings: &TurnSettings, expected: &str| {
        let error = factory.turn(settings).err().expect("an error");
        assert_eq!(error.to_string(), expected);
    };
    let (_, factory) = &MODELS[0];
    let none = TurnSettings::default();
    let choose = |tool_choice: ToolChoice, tools: Value| TurnSettings {
        tools: tools_of(tools),
        tool_choice,
        ..none.clone()
    };
    check(
        factory,
        &choose(ToolChoice::Required, json!([])),
        "tool_choice: found no tools, expected at least one to choose from",
    );
    check(
        factory,
        &choose(ToolChoice::Named("g".into()), json!([tool("f", json!({}))])),
        "tool_choice: found the tool \"g\", expected one of the tools of the request",
    );
    for name in ["two words", "user", "self", "a<b"] {
        check(
            factory,
            &choose(ToolChoice::Required, json!([tool(name, json!({}))])),
            &format!(
                "tool \"{name}\": it cannot be called: its name cannot stand in the header of a message"
            ),
        );
    }
    let parameters = json!({"properties": {"a\"b": {}}, "required": ["a\"b"]});
    check(
        factory,
        &choose(ToolChoice::Required, json!([tool("f", parameters)])),
        "tool \"f\": it cannot be called: the required parameter \"a\\\"b\" cannot be written in a tag",
    );
    let plain = factory.with_format(TurnFormat::of_completion(&MODELS[0].0));
    check(
        &plain,
        &settings(ToolChoice::Required),
        "tool_choice: this model's chat format has no tool calls, expected auto or none",
    );
    let budget = TurnSettings {
        reasoning_budget: Some(1),
        ..none.clone()
    };
    check(
        &plain,
        &budget,
        "reasoning budget: this model's chat format has no reasoning to bound",
    );
    let stop = TurnSettings {
        stop: vec![String::new()],
        ..none
    };
    check(
        factory,
        &stop,
        "stop string 0: found an empty string, expected at least one character",
    );
}
