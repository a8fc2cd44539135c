//! `muser serve` as people start and stop it. What it answers is tested in the
//! crate `server`.
#![cfg(unix)]

mod common;

use common::muser;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// Starts a server of the bundled model on a free port.
fn serve(args: &[&str]) -> (Child, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_muser"))
        .args(["serve", "--port", "0", "--json", "--threads", "1"])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("a pipe");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    let start = serde_json::from_str(&line).expect("JSON");
    (child, start)
}

/// What a server answers to a request without a body.
fn get(start: &Value, path: &str) -> String {
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    ask(start, &head)
}

/// What a server answers to a request that asks for the end of the connection.
fn ask(start: &Value, request: &str) -> String {
    let url = start["url"].as_str().expect("an address");
    let address = url.strip_prefix("http://").expect("plain HTTP");
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

/// Ends a server with a signal; gives what it said.
fn end(mut child: Child, signal: &str) -> String {
    let pid = child.id().to_string();
    let sent = Command::new("kill").args([signal, &pid]).status();
    assert!(sent.expect("kill runs").success());
    let ended = child.wait().expect("an end");
    let mut said = String::new();
    let mut stderr = child.stderr.take().expect("a pipe");
    stderr.read_to_string(&mut said).expect("UTF-8");
    assert!(ended.success(), "{ended}: {said}");
    said
}

#[test]
fn the_start_line_says_what_is_served() {
    let (child, start) = serve(&[
        "--alias",
        "story",
        "--ctx",
        "512",
        "--sequences",
        "4",
        "--kv",
        "f32",
    ]);
    for (key, value) in [
        ("models", Value::from(vec!["story"])),
        ("n_ctx", 512.into()),
        ("sequences", 4.into()),
        ("queue", 64.into()),
        ("kv", "f32".into()),
        ("has_chat", true.into()),
    ] {
        assert_eq!(start[key], value, "{key}: {start}");
    }
    assert_eq!(start["speculation"]["why"], "no --draft");
    assert!(get(&start, "/health").contains("{\"status\":\"ready\"}"));
    assert!(get(&start, "/v1/models").contains("\"id\":\"story\""));
    let said = end(child, "-TERM");
    assert!(said.contains("draining"), "{said}");
    assert!(said.contains("route=\"/v1/models\" status=200"), "{said}");
}

#[test]
fn drafts_are_shown_and_counted() {
    let drafter = testing::bundled("nano-glimmer-dflash-q8_0.gguf");
    let drafter = drafter.display().to_string();
    let (child, start) = serve(&["--draft", &drafter, "--draft-max", "5"]);
    let speculation = &start["speculation"];
    assert_eq!(speculation["is_on"], true);
    assert_eq!(speculation["drafts"], "DFlash");
    assert_eq!(speculation["drafter"], drafter);
    assert_eq!(speculation["draft_max"], 5);
    let body = r#"{"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}"#;
    let length = body.len();
    let answer = ask(
        &start,
        &format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        ),
    );
    let (_, answer) = answer.split_once("\r\n\r\n").expect("a body");
    let answer: Value = serde_json::from_str(answer).expect("JSON");
    let count = |key: &str| answer["timings"][key].as_u64().expect("a count");
    assert!(
        count("drafted_tokens") > 0,
        "every length is tried: {answer}"
    );
    assert!(count("accepted_tokens") <= count("drafted_tokens"));
    let lines = [
        format!("muser_drafted_tokens_total {}\n", count("drafted_tokens")),
        format!("muser_accepted_tokens_total {}\n", count("accepted_tokens")),
        "muser_speculation_stopped 0\n".to_string(),
    ];
    // Counts are let out behind the pass that sent the answer.
    let are_shown = || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let metrics = get(&start, "/metrics");
        lines.iter().all(|line| metrics.contains(line))
    };
    assert!((0..100).any(|_| are_shown()), "{}", get(&start, "/metrics"));
    end(child, "-TERM");
}

#[test]
fn flags_are_honoured_and_shown() {
    let flags = [
        "--prefix-cache",
        "0",
        "--kv-memory",
        "64MiB",
        "--log-level",
        "off",
    ];
    let (child, start) = serve(&flags);
    assert_eq!(start["prefix_cache_bytes"], 0);
    assert!(start["kv_bytes"].as_u64().expect("a number") <= 64 << 20);
    assert_eq!(end(child, "-INT"), "");
}

#[test]
fn what_cannot_be_served_is_refused() {
    for (args, begin) in [
        (
            &["--host", "0.0.0.0"][..],
            "error: --host: found 0.0.0.0, which other machines can reach, expected a loopback \
             address such as 127.0.0.1, or --api-key-file FILE or --insecure beside it",
        ),
        (
            &["--kv-memory", "64MiB", "--prefix-cache", "1GiB"],
            "error: --prefix-cache: found 1.00 GiB, expected at most the memory for keys and values",
        ),
        (
            &["--api-key-file", "/nowhere/keys"],
            "error: cannot read the API key file /nowhere/keys: No such file",
        ),
        (
            &["--temperature", "nan"],
            "error: --temperature: found NaN, expected a finite number",
        ),
        (
            &["--date", "today"],
            "error: --date: found the date today, expected a day",
        ),
        (
            &["--draft", "/nowhere/drafter"],
            "error: cannot open the drafter: /nowhere/drafter: ",
        ),
        (
            &["--draft", "ngram", "--draft-max", "16"],
            "error: cannot start the engine: drafts of up to 16 tokens, expected 1 to 15",
        ),
        (
            &["--ctx", "100000"],
            "error: cannot start the engine: a context of 100000 tokens",
        ),
    ] {
        let outcome = muser(&[&["serve", "--port", "0"], args].concat());
        assert!(
            outcome.stderr.starts_with(begin),
            "{args:?}: {}",
            outcome.stderr
        );
        assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""));
    }
}

#[test]
fn flags_that_cannot_be_are_refused_with_what_they_can_be() {
    for (flag, value, expected) in [
        (
            "--host",
            "localhost",
            "expected an IP address, such as 127.0.0.1",
        ),
        ("--alias", "", "expected one character or more"),
        (
            "--kv-memory",
            "much",
            "expected a number of bytes, such as 512MiB or 8GiB",
        ),
        (
            "--prefix-cache",
            "-1",
            "expected a number of bytes, such as 512MiB or 8GiB",
        ),
        ("--max-body", "0", "expected 1 byte or more"),
    ] {
        let outcome = muser(&["serve", "--port", "0", flag, value]);
        let begin = format!("error: invalid value '{value}' for '{flag}");
        assert!(outcome.stderr.starts_with(&begin), "{}", outcome.stderr);
        assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
        assert_eq!(outcome.code, 2);
    }
}

/// Whoever runs the server learns from the log what a client asked wrongly, and
/// nothing of what it said.
#[test]
fn the_log_says_why_a_request_was_refused() {
    let (child, start) = serve(&["--seed", "7"]);
    assert_eq!(start["sampling"]["seed"], 7);
    let body = r#"{"messages": [{"role": "user", "content": "SECRET"}], "store": "SECRET"}"#;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    assert!(ask(&start, &request).contains("store is not supported"));
    assert!(get(&start, "/chat").contains("there is no /chat"));
    let said = end(child, "-TERM");
    for expected in [
        "route=\"/v1/chat/completions\" status=400 code=\"unsupported_parameter\" param=\"store\"",
        "route=\"unknown\" path=\"/chat\" status=404 code=\"unknown_path\"",
    ] {
        assert!(said.contains(expected), "{said}");
    }
    assert!(!said.contains("SECRET"), "{said}");
}
