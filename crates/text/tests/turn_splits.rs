//! Turns in every chunking: each marker, tag and character of two, three and
//! four bytes is cut into tokens at every place.

mod vocabulary;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock};
use text::{Reader, Special, Tokenizer, Tool, TurnEnd, TurnEvent, TurnFormat};
use vocabulary::{CONTROL, NORMAL, alphabet, byte_level};

const MARKERS: [&str; 5] = [
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "<|end_of_text|>",
];

/// What is cut everywhere.
const PROBES: [&str; 18] = [
    MARKERS[0],
    MARKERS[1],
    MARKERS[2],
    MARKERS[3],
    MARKERS[4],
    " to=self",
    " to=user",
    " to=f",
    "assistant",
    "<atem:function_calls>",
    "<atem:invoke name=\"f\">",
    "<atem:parameter name=\"k\">",
    "</atem:parameter>",
    "</atem:invoke>",
    "</atem:function_calls>",
    "\u{e9}",
    "\u{20ac}",
    "\u{1F600}",
];

/// All bytes are tokens, and so is every part of every probe.
static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let alphabet = alphabet();
    let parts: BTreeSet<String> = PROBES
        .iter()
        .map(|probe| format!("x{probe}y"))
        .flat_map(|probe| {
            let n_bytes = probe.len();
            let ranges = (0..n_bytes)
                .flat_map(move |start| (start + 2..=n_bytes).map(move |end| start..end));
            ranges
                .map(|range| probe.as_bytes()[range].to_vec())
                .collect::<Vec<_>>()
        })
        .map(|bytes| {
            bytes
                .iter()
                .map(|&byte| alphabet[usize::from(byte)].as_str())
                .collect()
        })
        .filter(|part: &String| !MARKERS.contains(&part.as_str()))
        .collect();
    let markers = MARKERS.iter().map(|&marker| (marker, CONTROL));
    let parts = parts.iter().map(|part| (part.as_str(), NORMAL));
    let tokens: Vec<(&str, i32)> = markers.chain(parts).collect();
    let mut metadata = byte_level("llama4", &[], &tokens);
    metadata.insert("tokenizer.ggml.eos_token_id", gguf::Value::U32(256 + 4));
    Arc::new(Tokenizer::from_metadata(&metadata).expect("a tokenizer"))
});

static TOKENS: LazyLock<HashMap<Vec<u8>, u32>> = LazyLock::new(|| {
    let ids = 0..TOKENIZER.n_vocab() as u32;
    ids.filter(|&id| !TOKENIZER.is_control(id))
        .map(|id| (TOKENIZER.token_bytes(id).expect("a token").to_vec(), id))
        .collect()
});

/// The one token of these bytes.
fn token(bytes: &[u8]) -> Option<u32> {
    TOKENS.get(bytes).copied()
}

/// Text in the largest tokens that cut it at `cuts`, in bytes; markers in it are
/// text.
fn cut_at(text: &str, cuts: &[usize]) -> Vec<u32> {
    let mut ids = Vec::new();
    let mut start = 0;
    for &end in cuts.iter().chain([&text.len()]) {
        let piece = &text.as_bytes()[start..end];
        match token(piece) {
            Some(id) => ids.push(id),
            None => ids.extend(piece.iter().map(|&byte| token(&[byte]).expect("a byte"))),
        }
        start = end;
    }
    ids
}

/// All pairs of places in a text, and the text in one piece.
fn all_cuts(text: &str) -> Vec<Vec<usize>> {
    let n_bytes = text.len();
    let pairs =
        (1..n_bytes).flat_map(|first| (first..n_bytes).map(move |second| vec![first, second]));
    pairs.chain([vec![], (1..n_bytes).collect()]).collect()
}

fn tools() -> Arc<[Tool]> {
    let tools =
        serde_json::json!([{"name": "f", "parameters": {"properties": {"k": {"type": "string"}}}}]);
    serde_json::from_value::<Vec<Tool>>(tools)
        .expect("tools")
        .into()
}

/// The events of a turn with neighbours joined; no token gives a part of a
/// character.
fn read(ids: &[u32]) -> (Vec<TurnEvent>, TurnEnd) {
    let format = TurnFormat::of_chat(&TOKENIZER);
    let mut reader = Reader::new(Arc::clone(&TOKENIZER), format, tools(), &[]).expect("a reader");
    let mut events = Vec::new();
    for &id in ids {
        join(&mut events, reader.push(id));
    }
    let (rest, end) = reader.finish();
    join(&mut events, rest);
    (events, end)
}

fn join(events: &mut Vec<TurnEvent>, more: Vec<TurnEvent>) {
    use TurnEvent::{Content, Reasoning};
    for event in more {
        if let Content(text) | Reasoning(text) = &event {
            assert!(!text.contains(char::REPLACEMENT_CHARACTER), "{text:?}");
        }
        match (events.last_mut(), event) {
            (Some(Content(last)), Content(text)) | (Some(Reasoning(last)), Reasoning(text)) => {
                last.push_str(&text);
            }
            (_, event) => events.push(event),
        }
    }
}

fn parse(text: &str) -> Vec<u32> {
    TOKENIZER.encode(text, Special::Parse)
}

/// `probe` as text between two turn parts, in every chunking: always these events.
fn check(before: &str, probe: &str, after: &str, events: &[TurnEvent], end: TurnEnd) {
    for cuts in all_cuts(probe) {
        let ids = [parse(before), cut_at(probe, &cuts), parse(after)].concat();
        let expected = (events.to_vec(), end);
        assert_eq!(
            read(&ids),
            expected,
            "{before}[{probe}]{after} cut at {cuts:?}"
        );
    }
}

fn content(text: &str) -> TurnEvent {
    TurnEvent::Content(text.to_owned())
}

fn reasoning(text: &str) -> TurnEvent {
    TurnEvent::Reasoning(text.to_owned())
}

fn call(key: &str, value: &str) -> Vec<TurnEvent> {
    let arguments = serde_json::Map::from_iter([(key.to_owned(), value.into())]);
    let name = "f".to_owned();
    vec![
        TurnEvent::ToolCallStart {
            index: 0,
            name: name.clone(),
        },
        TurnEvent::ToolCall {
            index: 0,
            name,
            arguments,
        },
    ]
}

#[test]
fn the_probes_are_cut_as_meant() {
    assert_eq!(cut_at("\u{1F600}", &[1, 3]).len(), 3);
    assert_eq!(cut_at("x<|eot|>y", &[]).len(), 1);
    // The marker itself can only be spelled in parts.
    assert_eq!(cut_at("<|eot|>", &[]).len(), 7);
    assert_eq!(parse("<|eot|>").len(), 1);
}

#[test]
fn what_spells_a_marker_is_text_in_every_channel() {
    use TurnEnd::EndOfTurn;
    for probe in PROBES {
        let probe = format!("x{probe}y");
        let probe = probe.as_str();
        check(
            " to=user<|message|>",
            probe,
            "<|eot|>",
            &[content(probe)],
            EndOfTurn,
        );
        check(
            "<|message|>",
            probe,
            "<|eot|>",
            &[content(probe)],
            EndOfTurn,
        );
        check(
            " to=self<|message|>",
            probe,
            "<|eom|><|start|>assistant<|message|>b<|eot|>",
            &[reasoning(probe), content("b")],
            EndOfTurn,
        );
        // Text where a header should be.
        check("", probe, "<|eot|>", &[content(probe)], EndOfTurn);
        check(
            "",
            probe,
            "<|message|>b<|eot|>",
            &[content(&format!("{probe}b"))],
            EndOfTurn,
        );
        check(
            " to=user<|message|>a<|eom|><|start|>",
            probe,
            "<|message|>b<|eot|>",
            &[content(&format!("a{probe}b"))],
            EndOfTurn,
        );
        // A body to a tool that is no call.
        check(
            " to=f<|message|>",
            probe,
            "<|eot|>",
            &[content(probe)],
            EndOfTurn,
        );
        // A value.
        if probe != "x</atem:parameter>y" {
            let before = " to=f<|message|><atem:function_calls><atem:invoke name=\"f\"><atem:parameter name=\"k\">";
            let after = "</atem:parameter></atem:invoke></atem:function_calls><|eot|>";
            check(before, probe, after, &call("k", probe), EndOfTurn);
        }
    }
}

#[test]
fn headers_and_tags_are_found_in_every_chunking() {
    use TurnEnd::EndOfTurn;
    let turn = " to=self<|message|>r<|eom|><|start|>assistant to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"k\">v</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>";
    let events = [vec![reasoning("r")], call("k", "v")].concat();
    let mut n_found = 0;
    for probe in PROBES.iter().filter(|probe| !MARKERS.contains(probe)) {
        for (at, _) in turn.match_indices(probe) {
            check(
                &turn[..at],
                probe,
                &turn[at + probe.len()..],
                &events,
                EndOfTurn,
            );
            n_found += 1;
        }
    }
    assert_eq!(n_found, 9);
    check(
        "",
        " to=user",
        "<|message|>a<|eot|>",
        &[content("a")],
        EndOfTurn,
    );
    check(
        "<|eom|><|start|>",
        "assistant",
        "<|message|>a<|eot|>",
        &[content("a")],
        EndOfTurn,
    );
}

#[test]
fn characters_are_whole_in_every_chunking() {
    for character in ["\u{e9}", "\u{20ac}", "\u{1F600}"] {
        for probe in [
            character.to_owned(),
            format!("x{character}y"),
            character.repeat(2),
        ] {
            let (events, end) = (&[content(&probe)], TurnEnd::Budget);
            check(" to=user<|message|>", &probe, "", events, end);
            let stop = [probe.clone()];
            for cuts in all_cuts(&probe) {
                // As a stop string: nothing of it comes out, and what comes before does.
                let format = TurnFormat::of_chat(&TOKENIZER);
                let reader = Reader::new(Arc::clone(&TOKENIZER), format, tools(), &stop);
                let mut reader = reader.expect("a reader");
                let ids = [
                    parse(" to=user<|message|>a"),
                    cut_at(&probe, &cuts),
                    parse("b"),
                ]
                .concat();
                let events: Vec<TurnEvent> = ids.iter().flat_map(|&id| reader.push(id)).collect();
                assert_eq!(events, [content("a")], "{probe} cut at {cuts:?}");
                assert_eq!(reader.end(), Some(TurnEnd::StopString));
            }
        }
    }
}
