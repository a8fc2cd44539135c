//! `muser tokenize` as people call it.

mod common;

use common::{check_error, muser, muser_with, oracle, rewritten};
use serde_json::{Value, json};
use testing::root;

#[track_caller]
fn check(args: &[&str], stdin: &[u8], stdout: &str) {
    let outcome = muser_with(&[&["tokenize"], args].concat(), stdin);
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (0, stdout),
        "{}",
        outcome.stderr
    );
}

#[test]
fn the_table_shows_ids_texts_and_bytes() {
    check(
        &[
            "--model",
            &oracle("text-nano-f32.gguf"),
            "--special",
            "<|start|>user<|message|>\"é\n<|eot|>",
        ],
        b"",
        "     id  text               bytes\n    \
            400  <|begin_of_text|>\n    \
            422  <|start|>\n    \
            295  \"us\"               75 73\n    \
            257  \"er\"               65 72\n    \
            423  <|message|>\n      \
              1  \"\\\"\"               22\n    \
            127  \"\\xc3\"             c3\n    \
            102  \"\\xa9\"             a9\n    \
            198  \"\\n\"               0a\n    \
            408  <|eot|>\n",
    );
}

#[test]
fn ids_alone_and_bos() {
    check(&["--ids", "Hello there"], b"", "3968,1605,426\n");
    check(
        &["--ids", "--bos", "rule", "-"],
        b"Hello there",
        "3968,1605,426\n",
    );
    check(
        &["--ids", "--bos", "never", "Hello there"],
        b"",
        "1605,426\n",
    );
    check(
        &["--ids", "--bos", "always", "Hello there"],
        b"",
        "3968,1605,426\n",
    );
    check(&["--ids", "--bos", "never", ""], b"", "\n");
}

#[test]
fn control_tokens_only_if_asked_for() {
    let nano = oracle("text-nano-f32.gguf");
    let ids = |flags: &[&str]| {
        let args = [
            &["tokenize", "-m", &nano, "--ids", "--bos", "never"],
            flags,
            &["<|eot|>"],
        ];
        muser(&args.concat()).stdout
    };
    assert_eq!(ids(&["--special"]), "408\n");
    let as_text = ids(&[]);
    let as_text: Vec<u32> = as_text
        .trim()
        .split(',')
        .map(|id| id.parse().unwrap())
        .collect();
    assert!(as_text.iter().all(|&id| id < 400), "{as_text:?}");
}

#[test]
fn ids_become_text_again() {
    check(&["--decode", "3968,1605,426"], b"", "Hello there");
    check(
        &["--decode", "-", "--special"],
        b"3968, 1605\n426\n",
        "<|begin_of_text|>Hello there",
    );
    let text = "  two  blanks,\ttab, ü, 漢\n\n";
    let ids = muser_with(&["tokenize", "--ids", "-"], text.as_bytes()).stdout;
    check(&["--decode", "-"], ids.as_bytes(), text);
}

#[test]
fn json_has_everything() {
    let args = [
        "tokenize",
        "--json",
        "--special",
        "--bos",
        "never",
        "<|eot|>Hello",
    ];
    let found: Value = serde_json::from_str(&muser(&args).stdout).expect("JSON");
    let expected = json!({
        "tokens": [
            {"id": 3976, "spelling": "<|eot|>", "is_control": true, "text": "", "bytes": []},
            {
                "id": 1605, "spelling": "Hello", "is_control": false, "text": "Hello",
                "bytes": [72, 101, 108, 108, 111],
            },
        ],
        "text": "<|eot|>Hello",
    });
    assert_eq!(found, expected);
    let half = muser(&["tokenize", "--json", "--decode", "127"]).stdout;
    let half: Value = serde_json::from_str(&half).expect("JSON");
    assert_eq!(half["tokens"][0]["text"], Value::Null);
    assert_eq!(half["text"], "\u{fffd}");
}

/// The oracle's tokenizer cases through the command.
#[test]
fn the_oracles_cases() {
    let cases = std::fs::read_to_string(oracle("tokenizer-cases.json")).expect("the cases");
    let cases: Value = serde_json::from_str(&cases).expect("JSON");
    let cases = cases.as_array().expect("a list");
    assert_eq!(cases.len(), 27);
    for case in cases {
        let ids = case["ids"]
            .as_array()
            .expect("ids")
            .iter()
            .map(Value::to_string);
        let ids = ids.collect::<Vec<String>>().join(",") + "\n";
        let model = oracle("text-nano-f32.gguf");
        let text = case["text"].as_str().expect("a text");
        let args = [
            "--model",
            &model,
            "--ids",
            "--special",
            "--bos",
            "never",
            "-",
        ];
        check(&args, text.as_bytes(), &ids);
    }
}

#[test]
fn bad_input() {
    let check = |args: &[&str], stdin: &[u8], message: &str| {
        check_error(&[&["tokenize"], args].concat(), stdin, message);
    };
    check(
        &["-"],
        b"abc\xffdef",
        "cannot read the text: standard input: found the byte 0xff at offset 3, which is not \
         valid UTF-8 there, expected UTF-8",
    );
    check(
        &["-"],
        "half a character: é".as_bytes().split_last().unwrap().1,
        "cannot read the text: standard input: found the byte 0xc3 at offset 18, which is not \
         valid UTF-8 there, expected UTF-8",
    );
    check(
        &["--decode", "1,4096"],
        b"",
        "token 4096 is not in the vocabulary of 4096",
    );
    for (ids, place) in [
        ("1,,2", "after comma 1"),
        ("1,2,", "after comma 2"),
        (",1", "before the first comma"),
        ("1, ,2", "after comma 1"),
    ] {
        let message = format!("token ids: found nothing {place}, expected numbers such as 1,2,3");
        check(&["--decode", ids], b"", &message);
    }
    check(
        &["--decode", "1,two"],
        b"",
        "token ids: found \"two\", expected numbers such as 1,2,3",
    );
    check(
        &["--decode", "1,-2"],
        b"",
        "token ids: found \"-2\", expected numbers such as 1,2,3",
    );
    let missing = root("testdata/none.gguf").display().to_string();
    let outcome = muser(&["tokenize", "--model", &missing, "x"]);
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stderr.starts_with("error: cannot open the model: "),
        "{}",
        outcome.stderr
    );
    assert!(outcome.stderr.contains(&missing), "{}", outcome.stderr);
}

/// A pipe gets text as it is; tables, and messages, are escaped.
#[test]
fn control_characters_are_text_in_pipes_and_escapes_in_tables() {
    let escape = muser_with(&["tokenize", "--ids", "--bos", "never", "-"], b"\x1b").stdout;
    check(&["--decode", escape.trim()], b"", "\u{1b}");
    let outcome = muser(&["tokenize", "--bos", "never", "\u{1b}"]);
    let row = outcome.stdout.lines().nth(1).expect("a row");
    assert_eq!(row, "    215  \"\\u{1b}\"  1b");
    assert_eq!(outcome.stderr, "1 token\n");

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.gguf");
    let model = rewritten(&path, "nano-glimmer-q8_0.gguf", |metadata, _| {
        let key = "tokenizer.ggml.tokens";
        let tokens = metadata.strings(key).expect("strings").expect("tokens");
        let hostile = |(id, token): (usize, &str)| match id {
            4000 => "<\u{1b}[2J>".to_string(),
            _ => token.to_string(),
        };
        let tokens = tokens.iter().enumerate().map(hostile);
        let tokens: gguf::StringArray = tokens.collect::<Vec<String>>().iter().collect();
        metadata.insert(key, gguf::Value::Array(gguf::Array::String(tokens)));
    });
    let args = ["tokenize", "-m", &model, "--special", "--bos", "never"];
    let outcome = muser(&[&args[..], &["<\u{1b}[2J>"]].concat());
    let row = outcome.stdout.lines().nth(1).expect("a row");
    assert_eq!(row, "   4000  <\\u{1b}[2J>", "{}", outcome.stderr);
}

#[test]
fn an_oversized_text_is_refused() {
    let text = vec![b' '; (64 << 20) + 1];
    check_error(
        &["tokenize", "-"],
        &text,
        "cannot read the text: standard input: found more than 64.00 MiB, expected at most that",
    );
}
