//! Text from a file as messages show it.

use gguf::shown;

#[test]
fn what_is_shown_of_a_text() {
    for (text, expected) in [
        ("", ""),
        ("blk.0.attn_q.weight", "blk.0.attn_q.weight"),
        ("it's a key: 50 %", "it's a key: 50 %"),
        ("größe 尺寸 размер 🦀", "größe 尺寸 размер 🦀"),
        // Quotes and escapes are escaped: the result can be read back.
        (r#"a "b" \n"#, r#"a \"b\" \\n"#),
        ("a\0b\tc\rd\ne\x7f", r"a\0b\tc\rd\ne\u{7f}"),
        ("\x1b[2J\x1b]0;title\x07", r"\u{1b}[2J\u{1b}]0;title\u{7}"),
        // C1: one character does what ESC [ does.
        ("\u{9b}31m\u{85}", r"\u{9b}31m\u{85}"),
        ("\u{2028}\u{2029}", r"\u{2028}\u{2029}"),
        // Directions, overrides and isolates.
        ("\u{200e}\u{200f}\u{61c}", r"\u{200e}\u{200f}\u{61c}"),
        ("\u{202a}\u{202e}\u{202c}", r"\u{202a}\u{202e}\u{202c}"),
        ("\u{2066}\u{2068}\u{2069}", r"\u{2066}\u{2068}\u{2069}"),
        // What takes no room or leaves a blank.
        ("a\u{200b}\u{ad}\u{feff}b", r"a\u{200b}\u{ad}\u{feff}b"),
        ("\u{e0041}\u{301}", r"\u{e0041}\u{301}"),
        ("\u{a0}\u{3000}\u{3164}", r"\u{a0}\u{3000}\u{3164}"),
        ("\u{115f}\u{1160}\u{ffa0}", r"\u{115f}\u{1160}\u{ffa0}"),
        ("\u{e000}\u{10ffff}", r"\u{e000}\u{10ffff}"),
    ] {
        assert_eq!(shown(text), expected, "{text:?}");
    }
}

#[test]
fn a_long_text_is_cut_and_says_so() {
    assert_eq!(shown(&"x".repeat(128)), "x".repeat(128));
    let cut = format!("{}... (129 bytes)", "x".repeat(128));
    assert_eq!(shown(&"x".repeat(129)), cut);
    assert_eq!(
        shown(&"é".repeat(129)),
        format!("{}... (258 bytes)", "é".repeat(128))
    );
    // An escape counts as what it takes, and is not cut in the middle.
    let cut = format!("{}... (60000 bytes)", r"\u{1b}".repeat(21));
    assert_eq!(shown(&"\x1b".repeat(60_000)), cut);
}
