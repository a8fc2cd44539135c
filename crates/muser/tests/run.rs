//! `muser run` as people call it.

mod common;

use common::{changed_model, check_error, muser, muser_with, oracle};
use gguf::Value as Key;
use serde_json::Value;
use std::io::Read;
use testing::root;

/// A golden prompt of the bundled model: its text and its greedy answer up to
/// the end of the turn.
fn golden(name: &str) -> (String, String) {
    let path = root("testdata/nano-glimmer/golden.json");
    let text = std::fs::read_to_string(path).expect("the golden file");
    let golden: Value = serde_json::from_str(&text).expect("golden JSON");
    let prompts = golden["prompts"].as_array().expect("prompts");
    let case = prompts
        .iter()
        .find(|p| p["name"] == name)
        .expect("the case");
    let prompt = case["messages"][0]["content"].as_str().expect("a prompt");
    let turn = case["greedy_text"].as_str().expect("a turn");
    let turn = turn.split("<|eot|>").next().expect("a turn");
    (prompt.to_string(), turn.to_string())
}

/// Golden answers are those of exact arithmetic.
const GREEDY: [&str; 7] = [
    "run",
    "--device",
    "reference",
    "--temperature",
    "0",
    "--repeat-penalty",
    "1",
];
const DATE: [&str; 2] = ["--date", "2026-11-30"];

#[test]
fn the_answer_is_all_of_stdout() {
    let (prompt, turn) = golden("list");
    let answer = turn.strip_prefix(" to=user<|message|>").expect("an answer");
    let low = ["--reasoning", "low", &prompt];
    let outcome = muser(&[&GREEDY[..], &DATE, &low].concat());
    assert_eq!(outcome.stdout, format!("{answer}\n"), "{}", outcome.stderr);
    assert_eq!(outcome.code, 0);
    let lines: Vec<&str> = outcome.stderr.lines().collect();
    assert_eq!(
        lines[0],
        "nano-glimmer (bundled) | muse-glimmer | Q8_0 | reference (scalar f32) | weights in the \
         program | kv f16 | context 2048 | up to 20.52 MiB beside the weights at full context | speculation off (no \
         --draft) | greedy, min-p 0.05 (of the bundled model, changed by flags)"
    );
    let figures = lines[1];
    assert!(figures.starts_with("prompt 66 tokens, "), "{figures}");
    assert!(figures.contains(" | stop | seed "), "{figures}");
    assert_eq!(lines.len(), 2, "no reasoning at this strength");
}

#[test]
fn reasoning_goes_to_stderr_and_markers_nowhere() {
    let (prompt, turn) = golden("story-high");
    let (reasoning, answer) = turn
        .split_once("<|eom|><|start|>assistant to=user<|message|>")
        .expect("two messages");
    let reasoning = reasoning
        .strip_prefix(" to=self<|message|>")
        .expect("one to self");
    let high = ["--reasoning", "high", "-n", "64", &prompt];
    let outcome = muser(&[&GREEDY[..], &DATE, &high].concat());
    assert_eq!(outcome.stdout, format!("{answer}\n"));
    assert!(
        outcome.stderr.contains(&format!("\n{reasoning}\n\n")),
        "{}",
        outcome.stderr
    );
    assert!(
        outcome.stderr.contains(" | length | "),
        "{}",
        outcome.stderr
    );
    let all = outcome.stdout + &outcome.stderr;
    assert!(!all.contains("<|") && !all.contains("to="), "{all}");
    assert!(
        !all.contains('\u{1b}'),
        "colours only on terminals: {all:?}"
    );
}

#[test]
fn json_holds_everything() {
    let (prompt, turn) = golden("story-high");
    let args = ["--json", "-n", "64", "--seed", "5", &prompt];
    let outcome = muser(&[&GREEDY[..], &DATE, &args].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let (reasoning, answer) = turn
        .split_once("<|eom|><|start|>assistant to=user<|message|>")
        .expect("two messages");
    let text = |key: &str| report[key].as_str().expect("a text");
    assert_eq!(text("content"), answer);
    assert_eq!(
        format!(" to=self<|message|>{}", text("reasoning_content")),
        reasoning
    );
    assert_eq!(report["finish_reason"], "length");
    assert_eq!(report["seed"], 5);
    assert_eq!(report["usage"]["completion_tokens"], 64);
    assert_eq!(report["tool_calls"], Value::Array(Vec::new()));
    assert!(
        report["timings"]["decode_tokens_per_second"]
            .as_f64()
            .expect("a rate")
            > 0.0
    );
}

/// They change how fast an answer comes, and nothing else.
#[test]
fn drafts_change_no_answer() {
    let drafter = testing::bundled("nano-glimmer-dflash-q8_0.gguf");
    let drafter = drafter.display().to_string();
    let answer = |sampling: &[&str], draft: &[&str]| {
        let args = ["run", "--json", "-n", "48", "Tell me a story about a fox."];
        let outcome = muser(&[&args[..], &DATE, sampling, draft].concat());
        assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
        let report: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
        let drafted = report["timings"]["drafted_tokens"].as_u64();
        let said =
            ["content", "reasoning_content", "ended", "usage"].map(|key| report[key].clone());
        (said, drafted.expect("a count"))
    };
    for sampling in [&["--temperature", "0"][..], &["--seed", "3"]] {
        let (expected, drafted) = answer(sampling, &[]);
        assert_eq!(drafted, 0);
        let (found, drafted) = answer(sampling, &["--draft", &drafter, "--draft-max", "7"]);
        assert_eq!(found, expected);
        assert!(drafted > 0, "every length is tried");
        let (found, _) = answer(sampling, &["--draft", "ngram"]);
        assert_eq!(found, expected);
    }
    let with = |draft: &str, most: &str| {
        muser(&[
            "run",
            "-n",
            "3",
            "--draft",
            draft,
            "--draft-max",
            most,
            "Hello",
        ])
    };
    let outcome = with(&drafter, "7");
    let start = outcome.stderr.lines().next().expect("a start line");
    let speculation = format!("| speculation DFlash ({drafter}), up to 7 tokens a draft |");
    assert!(start.contains(&speculation), "{start}");
    let outcome = with(&drafter, "16");
    let expected = "error: drafts of up to 16 tokens, expected 1 to 15\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (1, expected));
    // A drafter of another model.
    let outcome = with(&oracle("dflash-nano-f32.gguf"), "7");
    let expected = "the drafter does not fit the model: the width of the residual stream is 64 in \
                    the drafter, 256 in the model";
    assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
}

#[test]
fn a_seed_names_an_answer() {
    let args = |seed| {
        [
            "run",
            "--seed",
            seed,
            "-n",
            "30",
            "Tell me a story about a lighthouse",
        ]
    };
    let first = muser(&args("11"));
    assert_eq!(muser(&args("11")).stdout, first.stdout);
    assert_ne!(muser(&args("12")).stdout, first.stdout);
    assert!(
        first
            .stderr
            .contains("temperature 0.6, min-p 0.05, repeat-penalty 1.15")
    );
    assert!(
        first.stderr.trim_end().ends_with("seed 11"),
        "{}",
        first.stderr
    );
}

#[test]
fn stop_strings_cut_the_answer() {
    let (prompt, turn) = golden("list");
    let answer = turn.strip_prefix(" to=user<|message|>").expect("an answer");
    let stop = &answer[4..13];
    let args = [
        "--reasoning",
        "low",
        "--stop",
        "not in it",
        "--stop",
        stop,
        &prompt,
    ];
    let outcome = muser(&[&GREEDY[..], &DATE, &args].concat());
    assert_eq!(
        outcome.stdout,
        format!(
            "{}\n",
            &answer[..answer.find(stop).expect("it")].trim_end_matches('\n')
        )
    );
    assert!(outcome.stderr.contains(" | stop | "), "{}", outcome.stderr);
}

#[test]
fn a_prompt_may_come_from_standard_input() {
    let (prompt, turn) = golden("list");
    let answer = turn.strip_prefix(" to=user<|message|>").expect("an answer");
    let stdout = format!("{answer}\n");
    let args = [&GREEDY[..], &DATE, &["--reasoning", "low", "-"]].concat();
    for line_end in ["", "\n", "\r\n"] {
        let input = format!("{prompt}{line_end}");
        let outcome = muser_with(&args, input.as_bytes());
        assert_eq!(outcome.stdout, stdout, "{line_end:?}");
    }
    let words: Vec<&str> = prompt.split(' ').collect();
    let words = [&GREEDY[..], &DATE, &["--reasoning", "low"], &words].concat();
    assert_eq!(muser(&words).stdout, stdout, "words joined by blanks");
    check_error(
        &["run", "-"],
        b"caf\xe9",
        "cannot read the prompt: standard input: found the byte 0xe9 at offset 3, which is not \
         valid UTF-8 there, expected UTF-8",
    );
    let empty = "the prompt is empty: there was no text on standard input";
    check_error(&["run", "-"], b"", empty);
    check_error(&["run", "-"], b"\n", empty);
    let empty = "the prompt is empty; give a text, or - to read one from standard input";
    check_error(&["run", ""], b"", empty);
}

#[test]
fn raw_continues_plain_text() {
    let args = ["--raw", "--json", "-n", "5"];
    let tokens = |extra: &[&str], prompt: &str| {
        let outcome = muser(&[&GREEDY[..], &args, extra, &[prompt]].concat());
        let report: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
        report["usage"]["prompt_tokens"].as_u64().expect("a count")
    };
    // BOS, then the control token as one token or spelled by many.
    assert_eq!(tokens(&["--special"], "<|start|>"), 2);
    assert!(tokens(&[], "<|start|>") > 4);
    let outcome = muser(&["run", "--raw", "--system", "Be brief.", "Hi"]);
    assert_eq!(outcome.code, 2, "{}", outcome.stderr);
}

#[test]
fn what_cannot_work_is_refused_before_anything_runs() {
    let long = "word ".repeat(3000);
    for (context, remedy) in [
        (
            "2048",
            "the model was trained for no more, so --ctx cannot help",
        ),
        ("1024", "--ctx gives more, up to 2048"),
    ] {
        let outcome = muser(&[&["run", "--ctx", context], &DATE[..], &[&long]].concat());
        assert_eq!(outcome.code, 1);
        let expected = format!(
            "error: the prompt has 3058 tokens, but the context holds {context} and one place \
             must be left for the answer; {remedy}"
        );
        assert_eq!(outcome.stderr.lines().last(), Some(&*expected));
    }
    let outcome = muser(&["run", "--max-tokens", "0", "Hi"]);
    let expected = "error: invalid value '0' for '--max-tokens <N>': 0 is not in 1..";
    assert!(outcome.stderr.starts_with(expected), "{}", outcome.stderr);
    assert_eq!(outcome.code, 2);
    check_error(
        &["run", "--date", "2026-02-30", "Hi"],
        b"",
        "--date: found the date 2026-02-30, expected a day of the years 1 to 9999, as 2026-01-31",
    );
    check_error(
        &["run", "--temperature", "inf", "Hi"],
        b"",
        "--temperature: found inf, expected a finite number",
    );
    check_error(
        &["run", "--ctx", "4096", "Hi"],
        b"",
        "a context of 4096 tokens is outside what this model can hold: 2 to 2048",
    );
    let folder = tempfile::tempdir().expect("a folder");
    let template = folder.path().join("plain.jinja");
    std::fs::write(&template, "{{ messages[0].content }}").expect("a template");
    let template = template.display().to_string();
    for (flag, value, variable) in [
        ("--reasoning", "low", "reasoning_strength"),
        ("--date", "2026-01-31", "a date"),
    ] {
        check_error(
            &["run", "--chat-template", &template, flag, value, "Hi"],
            b"",
            &format!(
                "{flag} has no effect: the chat template of {template} does not use {variable}"
            ),
        );
    }
    let outcome = muser(&["run", "--reasoning", "maximal", "Hi"]);
    assert_eq!(outcome.code, 2);
    for level in ["maximal", "low", "medium", "high", "xhigh"] {
        assert!(outcome.stderr.contains(level), "{}", outcome.stderr);
    }
}

#[test]
fn an_answer_by_schema_and_reasoning_within_its_budget() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let schema = file("schema.json", r#"{"enum": ["red", "green"]}"#);
    let (prompt, _) = golden("story-high");
    let demands = [
        "--json",
        "--reasoning",
        "high",
        "--json-schema",
        &schema,
        "--reasoning-budget",
        "6",
        &prompt,
    ];
    let outcome = muser(&[&GREEDY[..], &DATE, &demands].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let text = |key: &str| report[key].as_str().expect("a text");
    assert!(
        ["\"red\"", "\"green\""].contains(&text("content")),
        "{report}"
    );
    assert_eq!(report["finish_reason"], "stop");
    // The model's own words, cut after six tokens.
    assert!(!text("reasoning_content").is_empty());
    let words = [
        "tokenize",
        "--json",
        "--bos",
        "never",
        text("reasoning_content"),
    ];
    let tokens: Value = serde_json::from_str(&muser(&words).stdout).expect("JSON");
    assert_eq!(
        tokens["tokens"].as_array().map(Vec::len),
        Some(6),
        "{tokens}"
    );

    let wrong = file("wrong.json", r#"{"items": {"type": "strin"}}"#);
    check_error(
        &["run", "--json-schema", &wrong, "Hi"],
        b"",
        "JSON schema: #/items: Invalid type: strin",
    );
    let cut = file("cut.json", "{");
    check_error(
        &["run", "--json-schema", &cut, "Hi"],
        b"",
        &format!("{cut}: EOF while parsing an object at line 1 column 1"),
    );
    let outcome = muser(&["run", "--raw", "--reasoning-budget", "3", "Hi"]);
    assert_eq!(outcome.code, 2, "{}", outcome.stderr);
}

#[test]
fn a_model_that_is_none_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().display().to_string();
    let model = |path: &str| {
        vec![
            "run".to_string(),
            "-m".to_string(),
            path.to_string(),
            "Hi".into(),
        ]
    };
    let outcome = muser(&model(&path));
    assert_eq!(
        outcome.stderr,
        format!("error: cannot open the model: {path}: found a directory, expected a file\n")
    );
    let drafter = root("models/nano-glimmer-dflash-q8_0.gguf")
        .display()
        .to_string();
    let outcome = muser(&model(&drafter));
    assert!(
        outcome.stderr.contains("this file is a drafter"),
        "{}",
        outcome.stderr
    );
    // The oracle's files bring no chat template.
    let outcome = muser(&model(&oracle("text-nano-f32.gguf")));
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.stderr.contains("chat template"),
        "{}",
        outcome.stderr
    );
    assert!(outcome.stderr.contains("--raw"), "{}", outcome.stderr);
}

/// Ctrl-C ends an answer in order: figures printed, exit code 130.
#[cfg(unix)]
#[test]
fn an_interrupted_answer_keeps_its_figures() {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_muser"))
        .args([
            "run",
            "--raw",
            "--seed",
            "3",
            "--temperature",
            "2",
            "Once upon a time",
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // The first byte of the answer: the handler is in place by then.
    let mut first = [0u8];
    let mut stdout = child.stdout.take().expect("a pipe");
    stdout.read_exact(&mut first).expect("an answer");
    let pid = child.id().to_string();
    let killed = std::process::Command::new("kill")
        .args(["-INT", &pid])
        .status();
    assert!(killed.expect("kill runs").success());
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("the rest");
    let outcome = child.wait_with_output().expect("the binary ends");
    let stderr = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!(outcome.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains(" | interrupted | seed 3"), "{stderr}");
}

#[test]
fn settings_come_from_flags_then_the_file_then_the_architecture() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("nano.gguf").display().to_string();
    let made = muser(&["synth", &model, "--layers", "4"]);
    assert_eq!(made.code, 0, "{}", made.stderr);
    let start = |flags: &[&str]| {
        let outcome = muser(&[&["run", "-m", &model, "-n", "1"], flags, &["Hi"]].concat());
        let line = outcome.stderr.lines().next().expect("a line").to_string();
        line.rsplit(" | ").next().expect("settings").to_string()
    };
    let published = "temperature 1, top-k 64, top-p 0.95 (of the architecture)";
    assert_eq!(start(&[]), published);
    assert_eq!(
        start(&[
            "--top-k",
            "5",
            "--frequency-penalty",
            "0.5",
            "--presence-penalty",
            "-1"
        ]),
        "temperature 1, top-k 5, top-p 0.95, frequency-penalty 0.5, presence-penalty -1 (of the \
         architecture, changed by flags)"
    );
}

/// The settings of the start line, and the line after it.
fn start_of(model: &str, flags: &[&str]) -> (String, String) {
    let args = ["run", "-m", model, "-n", "1", "--raw"];
    let outcome = muser(&[&args, flags, &["Hi"]].concat());
    let mut lines = outcome.stderr.lines().map(str::to_string);
    let start = lines.next().expect("a line");
    let settings = start.rsplit(" | ").next().expect("settings");
    (settings.to_string(), lines.next().unwrap_or_default())
}

#[test]
fn sampling_keys_of_the_file_are_honoured_or_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.gguf");
    let model = |keys: &[(&str, Key)]| {
        let named =
            |&(key, ref value): &(&str, Key)| (format!("general.sampling.{key}"), value.clone());
        let keys: Vec<(String, Key)> = keys.iter().map(named).collect();
        let keys: Vec<(&str, Key)> = keys.iter().map(|(k, v)| (&**k, v.clone())).collect();
        changed_model(&path, "nano-glimmer-q8_0.gguf", &keys)
    };
    let all = model(&[
        ("temp", Key::F32(0.5)),
        ("top_k", Key::I32(7)),
        ("top_p", Key::F32(0.75)),
        ("min_p", Key::F64(0.25)),
        ("xtc_probability", Key::F32(0.125)),
        ("xtc_threshold", Key::F32(0.25)),
        ("penalty_repeat", Key::F32(1.5)),
        ("penalty_last_n", Key::I32(-1)),
        ("mirostat", Key::I32(2)),
        ("sequence", Key::String("top_k;temp".into())),
    ]);
    let words = "top-k 7, top-p 0.75, min-p 0.25, xtc-probability 0.125, xtc-threshold 0.25, \
                 repeat-penalty 1.5, repeat-last-n -1";
    let not = "not honoured of the file: general.sampling.mirostat, general.sampling.sequence";
    let (settings, next) = start_of(&all, &[]);
    assert_eq!(settings, format!("temperature 0.5, {words} (of the file)"));
    assert_eq!(next, not);
    let (settings, _) = start_of(&all, &["--temperature", "1", "--repeat-last-n", "64"]);
    let words = words.trim_end_matches(", repeat-last-n -1");
    let expected = format!("temperature 1, {words} (of the file, changed by flags)");
    assert_eq!(settings, expected);
    // One key alone: all others are neutral; below 0 is no limit.
    let (settings, next) = start_of(&model(&[("top_k", Key::I32(-1))]), &[]);
    assert_eq!(settings, "temperature 1 (of the file)");
    assert!(next.starts_with("raw completion"), "{next}");
    let (settings, _) = start_of(&model(&[("top_k", Key::U32(u32::MAX))]), &[]);
    assert_eq!(settings, "temperature 1, top-k 4294967295 (of the file)");

    let model = model(&[("temp", Key::F32(f32::NAN)), ("top_p", Key::F32(2.0))]);
    let run = ["run", "-m", &model, "Hi"];
    let message = format!(
        "{model}: metadata key general.sampling.temp: found NaN, expected a finite number; \
         --temperature can replace it"
    );
    check_error(&run, b"", &message);
    let message = format!(
        "{model}: metadata key general.sampling.top_p: found 2, expected 0 to 1; --top-p can \
         replace it"
    );
    check_error(&[&run[..], &["--temperature", "1"]].concat(), b"", &message);
    let flags = ["--temperature", "1", "--top-p", "-0.5"];
    let message = "--top-p: found -0.5, expected 0 to 1";
    check_error(&[&run[..], &flags].concat(), b"", message);
    let wrong = changed_model(
        &path,
        "nano-glimmer-q8_0.gguf",
        &[("general.sampling.temp", Key::String("hot".into()))],
    );
    let message =
        format!("{wrong}: metadata key general.sampling.temp: found string, expected f32");
    check_error(&["run", "-m", &wrong, "Hi"], b"", &message);
}

/// What a file says of itself reaches the terminal, but steers nothing.
#[test]
fn a_name_cannot_steer_a_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.gguf");
    let name = "nano\u{1b}]0;title\u{7}\u{9b}2J\nerror: no".to_string();
    let keys = [
        ("general.name", Key::String(name)),
        ("general.sampling.x\u{1b}[2J", Key::U32(0)),
    ];
    let model = changed_model(&path, "nano-glimmer-q8_0.gguf", &keys);
    let outcome = muser(&["run", "-m", &model, "-n", "1", "--raw", "Hi"]);
    let start = format!("nano\\u{{1b}}]0;title\\u{{7}}\\u{{9b}}2J\\nerror: no ({model}) | ");
    assert!(outcome.stderr.starts_with(&start), "{}", outcome.stderr);
    let named = "not honoured of the file: general.sampling.x\\u{1b}[2J\n";
    assert!(outcome.stderr.contains(named), "{}", outcome.stderr);
    let is_steering = |c: char| c.is_control() && c != '\n';
    assert!(
        !outcome.stderr.contains(is_steering),
        "{:?}",
        outcome.stderr
    );
}

#[test]
fn a_template_without_bos_gets_the_one_that_the_file_wants() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = |name: &str, source: &str| {
        let template = folder.path().join(name);
        std::fs::write(&template, source).expect("a template");
        let template = template.display().to_string();
        let args = [
            "run",
            "--json",
            "-n",
            "1",
            "--chat-template",
            &template,
            "Hello there",
        ];
        let report: Value = serde_json::from_str(&muser(&args).stdout).expect("JSON");
        report["usage"]["prompt_tokens"].as_u64().expect("a count")
    };
    assert_eq!(tokens("without", "{{ messages[0].content }}"), 3);
    assert_eq!(
        tokens("with", "{{ bos_token }}{{ messages[0].content }}"),
        3
    );
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_muser"))
        .args(["inspect", "--full"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary starts");
    drop(child.stdout.take());
    let outcome = child.wait_with_output().expect("the binary ends");
    assert_eq!(String::from_utf8_lossy(&outcome.stderr), "");
    assert_eq!(outcome.status.code(), Some(0));
}
