//! The markers of a chat's frame, whatever a file calls them.

mod vocabulary;

use std::sync::Arc;
use text::{
    ControlText, ControlTokens, Special, Tokenizer, TurnEnd, TurnEvent, TurnFormat, TurnParser,
};
use vocabulary::{CONTROL, NORMAL, USER_DEFINED, byte_level, sentencepiece};

const MARKERS: [&str; 4] = ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"];
const UNKNOWN: i32 = 2;
const UNUSED: i32 = 5;

/// Byte-level and SentencePiece vocabularies with the markers as `kind`.
fn tokenizers(kind: i32) -> Vec<Arc<Tokenizer>> {
    let tokens = MARKERS.map(|text| (text, kind));
    let scored = [("\u{2581}", 0.0, NORMAL)]
        .into_iter()
        .chain(MARKERS.map(|text| (text, 0.0, kind)));
    let scored: Vec<_> = scored.collect();
    [
        byte_level("llama4", &[], &tokens),
        sentencepiece(&scored, true),
    ]
    .iter()
    .map(|metadata| Arc::new(Tokenizer::from_metadata(metadata).expect("a tokenizer")))
    .collect()
}

#[test]
fn markers_are_control_tokens_whatever_their_type() {
    for kind in [NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED] {
        for tokenizer in tokenizers(kind) {
            let all = MARKERS.concat();
            let marked = MARKERS.map(|text| tokenizer.id_of(text).expect("a marker"));
            assert!(
                marked.iter().all(|&id| tokenizer.is_control(id)),
                "type {kind}"
            );
            assert_eq!(
                tokenizer.encode(&all, Special::Parse),
                marked,
                "type {kind}"
            );

            let user = tokenizer.encode(&all, Special::Text);
            assert!(!user.iter().any(|id| marked.contains(id)), "type {kind}");
            assert_eq!(tokenizer.decode(&user, ControlText::Keep), all);
            assert_eq!(tokenizer.decode(&marked, ControlText::Skip), "");
            let known = ControlTokens::of(&tokenizer).all;
            assert!(
                MARKERS
                    .iter()
                    .all(|&text| known.iter().any(|token| token == text))
            );
        }
    }
}

#[test]
fn the_turn_reader_finds_them() {
    for kind in [NORMAL, CONTROL, USER_DEFINED] {
        for tokenizer in tokenizers(kind) {
            let format = TurnFormat::of_chat(&tokenizer);
            assert!(
                matches!(format, TurnFormat::MuseGlimmer { .. }),
                "type {kind}"
            );
            let mut parser = TurnParser::new(Arc::clone(&tokenizer), format, Arc::from([]));
            let mut ids = tokenizer.encode("<|message|>", Special::Parse);
            ids.extend(tokenizer.encode("a<|eot|>b", Special::Text));
            ids.extend(tokenizer.encode("<|eot|>c", Special::Parse));
            let text: String = ids
                .iter()
                .flat_map(|&id| parser.push(id))
                .map(|event| match event {
                    TurnEvent::Content(text) => text,
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!(text.trim_start(), "a<|eot|>b", "type {kind}");
            assert_eq!(parser.end(), Some(TurnEnd::EndOfTurn));
        }
    }
}

#[test]
fn a_file_without_all_markers_has_plain_turns() {
    for missing in 0..MARKERS.len() {
        let mut tokens = MARKERS.map(|text| (text, CONTROL));
        tokens[missing].0 = "<|other|>";
        let tokenizer = Tokenizer::from_metadata(&byte_level("llama4", &[], &tokens));
        let format = TurnFormat::of_chat(&tokenizer.expect("a tokenizer"));
        assert!(
            matches!(format, TurnFormat::Plain { .. }),
            "without {}",
            MARKERS[missing]
        );
    }
}

#[test]
fn other_control_tokens_that_are_called_user_defined() {
    let tokens = [
        ("<|im_end|>", USER_DEFINED),
        ("<end_of_turn>", USER_DEFINED),
        ("<tool>", USER_DEFINED),
        ("<|>", USER_DEFINED),
        ("<||>", USER_DEFINED),
        ("<|im_start|>", NORMAL),
    ];
    let mut metadata = byte_level("llama4", &[], &tokens);
    metadata.insert("tokenizer.ggml.eos_token_id", gguf::Value::U32(257));
    let tokenizer = Tokenizer::from_metadata(&metadata).expect("a tokenizer");
    let is_control: Vec<bool> = (256..262).map(|id| tokenizer.is_control(id)).collect();
    // Spelled as one, in a role, neither; too short to be one; made by merges.
    assert_eq!(is_control, [true, true, false, false, false, false]);
    assert_eq!(tokenizer.encode("<tool>", Special::Text), [258]);
    for text in ["<|im_end|>", "<end_of_turn>"] {
        let ids = tokenizer.encode(text, Special::Text);
        assert_eq!(ids.len(), text.len(), "one token for every byte of {text}");
    }
}

#[test]
fn a_merge_that_makes_a_marker_is_refused() {
    let merges = ["< |", "<| >"];
    let mut metadata = byte_level("llama4", &merges, &[("<|eot|>", NORMAL), ("eot|>", NORMAL)]);
    let mut list: Vec<&str> = merges.to_vec();
    list.push("<| eot|>");
    metadata.insert("tokenizer.ggml.merges", vocabulary::strings(list));
    let error = Tokenizer::from_metadata(&metadata).expect_err("a merge makes it");
    assert_eq!(
        error.to_string(),
        "tokenizer.ggml.merges: merge 2 (\"<| eot|>\") needs \"<|eot|>\", which is a control token, expected a normal token"
    );
}
