//! The streaming detokenizer against whole decodes.

mod vocabulary;

use proptest::prelude::*;
use std::sync::{Arc, OnceLock};
use text::{ControlText, Detokenizer, Special, Tokenizer};
use vocabulary::{CONTROL, NORMAL, USER_DEFINED, byte_level, hello_world, oracle, sentencepiece};

/// Bytes are ids 0 to 255 here; 256 is control, 257 user-defined.
fn bytes_only() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let build = || {
        let metadata = byte_level("gpt-2", &[], &[("<|c|>", CONTROL), ("猫", USER_DEFINED)]);
        Arc::new(Tokenizer::from_metadata(&metadata).expect("a tokenizer"))
    };
    Arc::clone(TOKENIZER.get_or_init(build))
}

fn sentencepiece_tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let build = || Arc::new(Tokenizer::from_metadata(&hello_world()).expect("a tokenizer"));
    Arc::clone(TOKENIZER.get_or_init(build))
}

/// What each push gives, and last what `finish` gives.
fn stream(mut detokenizer: Detokenizer, ids: &[u32]) -> Vec<String> {
    let mut texts: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    texts.push(detokenizer.finish());
    texts
}

fn check(ids: &[u32], texts: &[&str]) {
    assert_eq!(
        stream(Detokenizer::new(bytes_only()), ids),
        texts,
        "{ids:?}"
    );
}

#[test]
fn half_a_character_waits() {
    check(&[0x68, 0x69], &["h", "i", ""]);
    check(&[0xC3, 0xA9], &["", "é", ""]);
    check(&[0xE2, 0x82, 0xAC], &["", "", "€", ""]);
    check(&[0xF0, 0x9F, 0x99, 0x82], &["", "", "", "🙂", ""]);
}

#[test]
fn invalid_bytes_become_replacement_characters() {
    check(&[0xFF], &["\u{FFFD}", ""]);
    check(&[0x80, 0x41], &["\u{FFFD}", "A", ""]);
    check(&[0xE2, 0x82], &["", "", "\u{FFFD}"]);
    check(&[0xE2, 0x82, 0x41], &["", "", "\u{FFFD}A", ""]);
    check(&[0xE2, 0xC3, 0xA9], &["", "\u{FFFD}", "é", ""]);
    // E0 80: 80 cannot follow E0, so these are two errors, not one half.
    check(
        &[0xE0, 0x80, 0x80],
        &["", "\u{FFFD}\u{FFFD}", "\u{FFFD}", ""],
    );
    check(&[0xF4, 0x90], &["", "\u{FFFD}\u{FFFD}", ""]);
}

#[test]
fn control_tokens_leave_no_trace() {
    let ids = [0x61, 256, 0x62];
    check(&ids, &["a", "", "b", ""]);
    check(&[257, 0x61], &["猫", "a", ""]);
}

#[test]
fn ids_outside_the_vocabulary_leave_no_trace() {
    check(&[0x61, 258, u32::MAX, 0x62], &["a", "", "", "b", ""]);
}

#[test]
fn finish_begins_a_new_text() {
    let mut detokenizer = Detokenizer::new(bytes_only());
    assert_eq!(detokenizer.push(0xC3), "");
    assert_eq!(detokenizer.finish(), "\u{FFFD}");
    assert_eq!(detokenizer.push(0xA9), "\u{FFFD}");
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn the_blank_before_a_sentencepiece_text_is_taken_off() {
    let tokenizer = sentencepiece_tokenizer();
    let ids = tokenizer.encode("hello world", Special::Text);
    assert_eq!(ids.len(), 2);
    let stream_of = |detokenizer| stream(detokenizer, &ids).concat();
    let start = Detokenizer::new(Arc::clone(&tokenizer));
    assert_eq!(stream_of(start), "hello world");
    let middle = Detokenizer::continuing(Arc::clone(&tokenizer));
    assert_eq!(stream_of(middle), " hello world");
    // Only one blank is, and only before the text.
    let two = tokenizer.encode("  hello", Special::Text);
    let start = Detokenizer::new(Arc::clone(&tokenizer));
    assert_eq!(stream(start, &two).concat(), "  hello");
    // Behind a special token a text begins anew.
    let (hello, world) = (ids[0], ids[1]);
    let start = Detokenizer::new(Arc::clone(&tokenizer));
    assert_eq!(stream(start, &[1, hello, 2, world]).concat(), "helloworld");
}

#[test]
fn a_file_without_space_prefix_keeps_the_blank() {
    let mut metadata = sentencepiece(&[("\u{2581}", -1.0, NORMAL), ("a", -2.0, NORMAL)], true);
    let key = "tokenizer.ggml.add_space_prefix";
    metadata.insert(key, gguf::Value::Bool(false));
    let tokenizer = Arc::new(Tokenizer::from_metadata(&metadata).expect("a tokenizer"));
    let ids = tokenizer.encode(" a", Special::Text);
    assert_eq!(ids, [3, 4]);
    assert_eq!(stream(Detokenizer::new(tokenizer), &ids), [" ", "a", ""]);
}

/// Ids of bytes that are often parts of characters.
fn byte_ids() -> impl Strategy<Value = Vec<u32>> {
    let id = prop_oneof![
        0u32..258,
        prop::sample::select(vec![
            0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0xED, 0xA0
        ]),
        Just(256),
    ];
    prop::collection::vec(id, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn skipped_control_tokens_do_not_part_characters(ids in byte_ids()) {
        let tokenizer = bytes_only();
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| tokenizer.token_bytes(id).expect("in range")).copied().collect();
        let whole = String::from_utf8_lossy(&bytes);
        prop_assert_eq!(stream(Detokenizer::new(tokenizer), &ids).concat(), whole);
    }

    #[test]
    fn pushes_joined_equal_the_whole_decode(ids in byte_ids(), spm in prop::collection::vec(0u32..280, 0..40)) {
        for (tokenizer, ids) in [(bytes_only(), &ids), (sentencepiece_tokenizer(), &spm)] {
            let streamed = Detokenizer::new(Arc::clone(&tokenizer));
            let whole = tokenizer.decode(ids, ControlText::Skip);
            prop_assert_eq!(stream(streamed, ids).concat(), whole);
        }
    }

    #[test]
    fn a_text_comes_out_in_characters(text in any::<String>()) {
        let tokenizer = bytes_only();
        let ids = tokenizer.encode(&text, Special::Text);
        let texts = stream(Detokenizer::new(tokenizer), &ids);
        prop_assert_eq!(texts.concat(), text.as_str());
        // "猫" is matched whole; every other character waits for its last byte.
        let longest = texts.iter().map(|t| t.chars().count()).max();
        prop_assert!(longest <= Some(1));
    }
}

#[test]
fn golden_ids_stream_to_their_text() {
    let tokenizer = oracle();
    let text = "猫が窓 🙂 Élan <|eot|>";
    let ids = tokenizer.encode(text, Special::Parse);
    assert_eq!(tokenizer.decode(&ids, ControlText::Keep), text);
    assert_eq!(
        stream(Detokenizer::new(tokenizer), &ids).concat(),
        "猫が窓 🙂 Élan "
    );
}
