//! The turn parser and the guide on random tokens, against references that
//! read whole messages.

mod oracle;
mod turns;

use model::{Guide, Verdict};
use oracle::{byte_ids, ids, tokenizer};
use proptest::prelude::*;
use text::{ControlText, TurnEnd, TurnEvent, TurnGuide};
use turns::{chat, read, reader};

/// Pieces of turns and of things that only look like them.
const PIECES: [&str; 28] = [
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|start|>assistant",
    " to=self<|message|>",
    " to=user<|message|>",
    " to=f<|message|>",
    "<|eom|><|start|>assistant to=f<|message|>",
    "<|patch|>",
    " to=",
    " to=user",
    "to",
    "assistant",
    "user",
    "tool f",
    " ",
    "\n",
    "<atem:function_calls>",
    "</atem:function_calls>",
    "<atem:invoke name=\"f\">",
    "</atem:invoke>",
    "<atem:parameter name=\"k\">",
    "</atem:parameter>",
    "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"k\">v</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    "é\u{1F600}",
    "word",
    "<|eot|",
    "|>",
];

fn random_ids() -> impl Strategy<Value = Vec<u32>> {
    let piece = prop_oneof![
        6 => prop::sample::select(PIECES.to_vec()).prop_map(ids),
        1 => prop::sample::select(PIECES.to_vec()).prop_map(byte_ids),
        2 => prop::collection::vec(0u32..512, 0..4),
        1 => prop::collection::vec(any::<u32>(), 0..2),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

/// Reads whole messages, not tokens: all text of a turn by channel, headers
/// left out, and why it ended. Texts of tool messages are not taken apart.
fn whole_turn(ids: &[u32]) -> (Vec<(char, String)>, TurnEnd) {
    let tokenizer = tokenizer();
    let marker = |name: &str| tokenizer.id_of(name).expect("a marker");
    let text_of = |ids: &[u32]| tokenizer.decode(ids, ControlText::Skip);
    let (start, message) = (marker("<|start|>"), marker("<|message|>"));
    let (eom, eot, eos) = (
        marker("<|eom|>"),
        marker("<|eot|>"),
        marker("<|end_of_text|>"),
    );
    let mut texts = Vec::new();
    let mut rest = ids;
    let mut has_role = false;
    loop {
        let length = rest
            .iter()
            .position(|id| [start, eom, eot, eos].contains(id));
        let this = &rest[..length.unwrap_or(rest.len())];
        let header_length = this.iter().position(|&id| id == message);
        let header = text_of(&this[..header_length.unwrap_or(this.len())]);
        // Further markers are left out: a character may lie around one.
        let unmarked = |ids: &[u32]| {
            let ids = ids.iter().copied().filter(|&id| id != message);
            text_of(&ids.collect::<Vec<u32>>())
        };
        let body = unmarked(&this[header_length.unwrap_or(this.len())..]);
        match kind_of(&header, has_role) {
            '?' if header_length.is_some() => texts.push(('c', body)),
            '?' => {}
            'o' if header_length.is_some() => return (texts, TurnEnd::EndOfTurn),
            'o' => {}
            'c' if header_length.is_none() => {}
            'n' => texts.push(('c', unmarked(this))),
            kind => texts.push((kind, body)),
        }
        let Some(length) = length else {
            return (texts, TurnEnd::Budget);
        };
        match rest[length] {
            id if id == eot => return (texts, TurnEnd::EndOfTurn),
            id if id == eos => return (texts, TurnEnd::EndOfText),
            id => has_role = id == start,
        }
        rest = &rest[length + 1..];
    }
}

/// c content, r reasoning, t tool, o other role, n no header, ? unfinished.
fn kind_of(header: &str, has_role: bool) -> char {
    let is_foreign = |c: char| c.is_whitespace() || "<>|\"".contains(c);
    let mut rest = header;
    if has_role {
        let roles = ["user", "system", "developer", "tool", "assistant"];
        if roles
            .iter()
            .any(|role| role.starts_with(header) && *role != header)
        {
            return '?';
        }
        if let Some((role, name)) = header.split_once(' ').or(Some((header, "")))
            && roles[..4].contains(&role)
            && !name.trim_start().contains(is_foreign)
        {
            return 'o';
        }
        rest = header.strip_prefix("assistant").unwrap_or(header);
    }
    match rest.trim_start_matches(' ') {
        "" => 'c',
        "t" | "to" | "to=" => '?',
        "to=self" => 'r',
        "to=user" => 'c',
        header => match header.strip_prefix("to=") {
            Some(name) if name.len() <= 256 && !name.contains(is_foreign) => 't',
            _ => 'n',
        },
    }
}

/// The text of events with calls written as a model writes them, without
/// blanks: those between tags are not kept.
fn as_written(events: &[TurnEvent]) -> String {
    let mut text = String::new();
    for event in events {
        match event {
            TurnEvent::Content(t) | TurnEvent::Reasoning(t) | TurnEvent::CutToolCall(t) => {
                text.push_str(t);
            }
            TurnEvent::ToolCallStart { .. } => {}
            TurnEvent::ToolCall {
                name, arguments, ..
            } => {
                text.push_str(&format!("<atem:invoke name=\"{name}\">"));
                for (key, value) in arguments {
                    let value = value
                        .as_str()
                        .map_or_else(|| value.to_string(), str::to_owned);
                    text.push_str(&format!(
                        "<atem:parameter name=\"{key}\">{value}</atem:parameter>"
                    ));
                }
                text.push_str("</atem:invoke>");
            }
        }
    }
    text
}

fn bare(text: &str) -> String {
    text.replace("<atem:function_calls>", "")
        .replace("</atem:function_calls>", "")
        .split_whitespace()
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Token by token gives what whole messages give, and nothing is lost.
    #[test]
    fn streaming_equals_whole_messages(ids in random_ids()) {
        let (events, end) = read(chat(), &ids, &[]);
        let (texts, whole_end) = whole_turn(&ids);
        prop_assert_eq!(end, whole_end);
        let reasoning: String = events.iter().filter_map(|event| match event {
            TurnEvent::Reasoning(text) => Some(text.as_str()),
            _ => None,
        }).collect();
        let expected: String = texts.iter().filter(|(kind, _)| *kind == 'r').map(|(_, text)| text.as_str()).collect();
        prop_assert_eq!(reasoning, expected);
        if texts.iter().all(|(kind, _)| *kind != 't') {
            let content: String = events.iter().filter_map(|event| match event {
                TurnEvent::Content(text) => Some(text.as_str()),
                _ => None,
            }).collect();
            let expected: String = texts.iter().filter(|(kind, _)| *kind == 'c').map(|(_, text)| text.as_str()).collect();
            prop_assert_eq!(content, expected);
            let is_text = |event: &TurnEvent| matches!(event, TurnEvent::Content(_) | TurnEvent::Reasoning(_));
            prop_assert!(events.iter().all(is_text));
        }
        let all: String = texts.iter().map(|(_, text)| text.as_str()).collect();
        prop_assert_eq!(bare(&as_written(&events)), bare(&all));
    }

    /// Stop strings cut the answer and change nothing before it; the guide
    /// stops at the same token.
    #[test]
    fn stop_strings_cut_any_turn(ids in random_ids(), stop in prop::sample::select(vec!["word", "é", "o", "t|", "a", "\n"])) {
        let (all, _) = read(chat(), &ids, &[]);
        let (cut, end) = read(chat(), &ids, &[stop]);
        let answer = |events: &[TurnEvent]| -> String {
            events.iter().filter_map(|event| match event {
                TurnEvent::Content(text) => Some(text.as_str()),
                _ => None,
            }).collect()
        };
        prop_assert!(answer(&all).starts_with(&answer(&cut)));
        prop_assert!(!cut.iter().any(|event| matches!(event, TurnEvent::Content(text) if text.contains(stop))));
        if end != TurnEnd::StopString {
            prop_assert_eq!(&all, &cut);
        }
        let mut guide = TurnGuide::new(reader(chat(), &[stop]));
        let mut text = reader(chat(), &[stop]);
        for &id in &ids {
            let verdict = guide.fork().accept(id);
            prop_assert_eq!(guide.accept(id), verdict);
            text.push(id);
            prop_assert_eq!(verdict == Verdict::Stop, text.end().is_some());
        }
    }
}

/// Half a character before a marker that ends no header, and half behind it.
#[test]
fn a_character_around_a_marker_is_whole() {
    let mut tokens = ids("x < y");
    let bytes = byte_ids("é");
    tokens.push(bytes[0]);
    tokens.extend(ids("<|message|>"));
    tokens.push(bytes[1]);
    let (events, _) = read(chat(), &tokens, &[]);
    let (texts, _) = whole_turn(&tokens);
    assert_eq!(texts, [('c', "x < yé".to_owned())]);
    assert_eq!(as_written(&events), "x < yé");
}
