//! Stop strings: where a text is cut, and that pieces do not matter.

use proptest::prelude::*;
use text::StopStrings;

fn stop_strings(strings: &[&str]) -> StopStrings {
    let strings: Vec<String> = strings.iter().map(|&s| s.to_owned()).collect();
    StopStrings::new(&strings).expect("no empty string")
}

/// The text that comes out of `pieces`, and whether it was stopped.
fn read<'p>(strings: &[&str], pieces: impl IntoIterator<Item = &'p str>) -> (String, bool) {
    let mut stop = stop_strings(strings);
    let mut out = String::new();
    for piece in pieces {
        out.push_str(&stop.push(piece));
    }
    out.push_str(&stop.flush());
    (out, stop.is_stopped())
}

/// Letter by letter, from the definition: the first stop string to be
/// complete cuts, the longer one of two.
fn cut<'t>(strings: &[&str], text: &'t str) -> (&'t str, bool) {
    for (at, c) in text.char_indices() {
        let so_far = &text[..at + c.len_utf8()];
        let complete = strings.iter().filter(|stop| so_far.ends_with(*stop));
        if let Some(longest) = complete.map(|stop| stop.len()).max() {
            return (&so_far[..so_far.len() - longest], true);
        }
    }
    (text, false)
}

#[test]
fn cuts_in_every_split() {
    let check = |strings: &[&str], text: &str, expected: &str, is_stopped: bool| {
        let expected = (expected.to_owned(), is_stopped);
        assert_eq!(read(strings, [text]), expected, "{strings:?} in {text:?}");
        let letters: Vec<&str> = text.split("").filter(|piece| !piece.is_empty()).collect();
        assert_eq!(
            read(strings, letters.iter().copied()),
            expected,
            "{strings:?} in {letters:?}"
        );
        for (first, _) in text.char_indices() {
            for (second, _) in text.char_indices().filter(|&(at, _)| at >= first) {
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(read(strings, pieces), expected, "{strings:?} in {pieces:?}");
            }
        }
    };
    check(&[], "abc", "abc", false);
    check(&["b"], "abc", "a", true);
    check(&["\n\n"], "one\n\ntwo", "one", true);
    check(&["\n\n"], "one\n", "one\n", false);
    check(&["END"], "the ENEND of it", "the EN", true);
    check(&["END"], "the EN", "the EN", false);
    check(&["aab"], "aaab", "a", true);
    check(&["abab", "ba"], "ababab", "a", true);
    // The first to be complete, not the first to begin.
    check(&["abcd", "bc"], "abcd", "a", true);
    check(&["abcd", "bd"], "abcd", "", true);
    // The longer one of two that are complete together.
    check(&["c", "bc"], "abcd", "a", true);
    check(&["bc", "c"], "abcd", "a", true);
    check(&["é"], "caf\u{e9}!", "caf", true);
    check(&["é!", "x"], "café?", "café?", false);
    check(
        &["\u{1F600}\u{1F601}"],
        "a\u{1F600}\u{1F600}\u{1F601}b",
        "a\u{1F600}",
        true,
    );
    check(&["<|eot|>"], "say <|eot|> now", "say ", true);
}

#[test]
fn holds_back_no_more_than_it_must() {
    let mut stop = stop_strings(&["END", "\n\n"]);
    assert_eq!(stop.push("Hi E"), "Hi ");
    assert_eq!(stop.push("N"), "");
    assert_eq!(stop.push("E\n"), "ENE");
    assert_eq!(stop.flush(), "\n");
    assert_eq!(stop.push("\nEND"), "\n");
    assert!(stop.is_stopped());
    assert_eq!(stop.push("more"), "");
    assert_eq!(stop.flush(), "");
}

#[test]
fn an_empty_stop_string_is_refused() {
    let error = StopStrings::new(&["a".to_owned(), String::new()]).expect_err("an empty string");
    assert_eq!(
        error.to_string(),
        "stop string 1: found an empty string, expected at least one character"
    );
}

proptest! {
    #[test]
    fn pieces_do_not_matter(
        text in "[abé\u{1F600}]{0,24}",
        strings in prop::collection::vec("[abé\u{1F600}]{1,5}", 0..4),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
        let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        borders.push(text.len());
        let mut ends: Vec<usize> = cuts.iter().map(|cut| *cut.get(&borders)).collect();
        ends.push(text.len());
        ends.sort_unstable();
        let mut start = 0;
        let pieces: Vec<&str> = ends
            .iter()
            .map(|&end| &text[std::mem::replace(&mut start, end)..end])
            .collect();
        let (expected, is_stopped) = cut(&strings, &text);
        prop_assert_eq!(read(&strings, pieces), (expected.to_owned(), is_stopped));
    }
}
