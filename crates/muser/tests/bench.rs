//! `muser bench` and `muser walk` as people call them. Speeds are not judged.

mod common;

use common::{check_error, muser};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

fn json(args: &[&str]) -> Value {
    let outcome = muser(args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

#[test]
fn every_work_has_a_line_with_its_scope() {
    let folder = tempfile::tempdir().expect("a folder");
    let plot = folder.path().join("speed.svg").display().to_string();
    let works = ["-p", "8", "-n", "2", "-d", "0, 300", "-b", "1,2", "-r", "2"];
    let device = [
        "bench",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--isa",
        "scalar",
    ];
    let report = json(&[&device[..], &works, &["--json", "--plot", &plot]].concat());
    assert_eq!(report["device"], "cpu (scalar, 1 thread)");
    assert_eq!(report["quantization"], "Q8_0");
    assert_eq!(report["isa"], "scalar");
    assert_eq!(report["weights"], "in the program");
    assert_eq!(report["kv"], "f16");
    assert!(report["bandwidth_gb_s"].as_f64().expect("a rate") > 0.0);
    let lines = report["lines"].as_array().expect("lines");
    let scope = |line: &Value| {
        let number = |key: &str| line[key].as_u64().expect("a number");
        let work = line["work"].as_str().expect("a work").to_string();
        (
            work,
            number("n_tokens"),
            number("depth"),
            number("n_sequences"),
        )
    };
    let decode = |depth, n_sequences| ("decode".to_string(), 2, depth, n_sequences);
    let found: Vec<_> = lines.iter().map(scope).collect();
    let prefill = ("prefill".to_string(), 8, 0, 1);
    assert_eq!(
        found,
        [
            prefill,
            decode(0, 1),
            decode(0, 2),
            decode(300, 1),
            decode(300, 2)
        ]
    );
    // Weights without the embedding; keys and values of 2 heads of 128, twice 2 bytes each. At
    // depth 300 the two rows see 301 and 302 in 2 full layers and 128 in 6 sliding ones; at
    // depth 0 they see 1 and 2 in all.
    let weights = 11_740_160 - 1_114_112;
    let key = 2 * 128 * 4;
    assert_eq!(lines[0]["bytes_per_pass"], Value::Null);
    assert_eq!(lines[0]["limit_tokens_per_second"], Value::Null);
    assert_eq!(lines[1]["bytes_per_pass"], weights + 8 * 3 * key / 2);
    assert_eq!(
        lines[4]["bytes_per_pass"],
        weights + 2 * (301 + 302 + 6 * 128) * key
    );
    let picture = std::fs::read_to_string(&plot).expect("a picture");
    assert!(
        picture.starts_with("<svg") && picture.contains("2 sequences"),
        "{picture}"
    );
    let title = "nano-glimmer (bundled), Q8_0, cpu (scalar, 1 thread), kv f16";
    assert!(picture.contains(title), "{picture}");

    // The columns of CSV are the fields of JSON.
    let table = muser(&[&device[..], &["-p", "8", "-n", "0", "-r", "1", "--csv"]].concat()).stdout;
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 2);
    let fields = |value: &Value| value.as_object().expect("an object").clone();
    let fields = fields(&report).into_iter().chain(fields(&lines[0]));
    let names: Vec<String> = fields
        .map(|(name, _)| name)
        .filter(|n| n != "lines")
        .collect();
    assert_eq!(rows[0], names.join(","));
    let start = "\"nano-glimmer (bundled)\",\"Q8_0\",\"cpu (scalar, 1 thread)\",\"scalar\",1,\
                 \"in the program\",\"f16\",1,";
    assert!(rows[1].starts_with(start), "{table}");
}

/// One line of the table for each work, and below what its limit means.
#[test]
fn a_table_explains_its_limit() {
    let works = ["bench", "-p", "8", "-n", "2", "-r", "1", "--threads", "1"];
    let outcome = muser(&works);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(
        lines[0].contains(", weights in the program, kv f16; medians of 1"),
        "{lines:?}"
    );
    assert!(
        lines[2].starts_with("work ") && lines[2].ends_with(" limit  ratio"),
        "{lines:?}"
    );
    assert!(
        lines[3].starts_with("prefill ") && lines[4].starts_with("decode "),
        "{lines:?}"
    );
    assert!(
        lines[6].ends_with("iB resident beside the weights"),
        "{lines:?}"
    );
    assert!(
        lines[7].starts_with("limit: what ") && lines[7].contains(" GB/s"),
        "{lines:?}"
    );
}

#[test]
#[cfg(unix)]
fn an_interrupted_run_ends_with_what_was_measured() {
    // Far more than anyone waits for.
    let works = [
        "bench",
        "-p",
        "4",
        "-n",
        "1000",
        "-r",
        "1000",
        "--threads",
        "1",
    ];
    let mut child = Command::new(env!("CARGO_BIN_EXE_muser"))
        .args(works)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut rows = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut row = String::new();
    while !row.starts_with("prefill ") {
        row.clear();
        assert!(rows.read_line(&mut row).expect("UTF-8") > 0, "a row");
    }
    let killed = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(killed.expect("kill runs").success());
    let mut rest = String::new();
    rows.read_to_string(&mut rest).expect("UTF-8");
    assert!(rest.contains(" resident beside the weights"), "{rest}");
    let output = child.wait_with_output().expect("the binary ends");
    let message = "warning: interrupted: 1 of 2 works measured\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), message);
    assert_eq!(output.status.code(), Some(130));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let check = |args: &[&str], message: &str| {
        check_error(&[&["bench"], args].concat(), b"", message);
    };
    check(
        &["-p", "0", "-n", "0"],
        "nothing to measure: both -p and -n are 0",
    );
    check(
        &["-n", "0", "--plot", "speed.svg"],
        "--plot draws the speed of generating over depth, but -n is 0",
    );
    check(
        &["--plot", "speed.png"],
        "--plot speed.png: found the ending .png, expected .svg, which is what is drawn",
    );
    check(
        &["-d", "2040"],
        "2104 tokens of context are needed, but there are 2048",
    );
    check(
        &["--ctx", "4096"],
        "a context of 4096 tokens is outside what this model can hold: 2 to 2048",
    );
    check(
        &["-b", "1,1000"],
        "--batch: found 1000, expected at most the 512 rows of a pass",
    );
    check_error(
        &["walk", "--ctx", "4096"],
        b"",
        "a context of 4096 tokens is outside what this model can hold: 2 to 2048",
    );
}

#[test]
fn numbers_that_are_none_are_refused_by_their_flag() {
    let check = |args: &[&str], flag: &str, expected: &str| {
        let outcome = muser(args);
        let value = args[args.len() - 1];
        let message = format!("error: invalid value '{value}' for '{flag}': expected {expected}\n");
        assert!(outcome.stderr.starts_with(&message), "{}", outcome.stderr);
        assert_eq!(outcome.code, 2);
    };
    let (whole, positive) = ("a whole number", "a whole number, 1 or more");
    check(&["bench", "-r", "0"], "--repetitions <N>", positive);
    check(&["bench", "-b", "0"], "--batch <LIST>", positive);
    check(&["bench", "-p", "long"], "--prefill <LIST>", whole);
    check(&["bench", "-d", "1.5"], "--depth <LIST>", whole);
    check(&["bench", "-n", "99999999999"], "--generate <N>", whole);
    check(&["bench", "--threads", "0"], "--threads <N>", "1 to 256");
    check(&["walk", "--rows", "0"], "--rows <N>", positive);
    check(&["walk", "-r", "0"], "--repetitions <N>", positive);
}

#[test]
fn a_walk_names_every_operation_of_a_token() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("walk.json").display().to_string();
    let args = [
        "walk", "--device", "cpu", "--depth", "20", "-r", "1", "--json", "--trace", &path,
    ];
    let report = json(&args);
    assert_eq!((&report["rows"], &report["depth"]), (&1.into(), &20.into()));
    let steps = report["steps"].as_array().expect("steps");
    let find = |op: &str| steps.iter().find(|s| s["op"] == op).expect(op);
    assert_eq!(find("qkv_gate")["calls"], 8);
    assert_eq!(
        find("qkv_gate")["tensors"],
        "attn_q+attn_k+attn_v+attn_gate"
    );
    assert_eq!(find("logits")["bytes"], 1_114_112);
    let attend = steps.iter().filter(|s| s["op"] == "attend");
    let encodings: Vec<(&str, u64)> = attend
        .map(|s| {
            (
                s["encoding"].as_str().expect("an encoding"),
                s["calls"].as_u64().expect("calls"),
            )
        })
        .collect();
    assert_eq!(encodings, [("sliding f16", 6), ("full f16", 2)]);
    let shares = steps.iter().map(|s| s["share"].as_f64().expect("a share"));
    assert!((shares.sum::<f64>() - 1.0).abs() < 1e-3 * steps.len() as f64);
    let trace = std::fs::read_to_string(&path).expect("a trace");
    let trace: Value = serde_json::from_str(&trace).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let calls = steps.iter().map(|s| s["calls"].as_u64().expect("calls"));
    assert_eq!(events.len() as u64, calls.sum::<u64>());
}

/// Rows of one sequence share the keys and values that they read; products and sums do not.
#[test]
fn a_walk_counts_bytes_and_multiplications() {
    let check = |rows: u64| {
        let rows_arg = rows.to_string();
        let args = ["walk", "--depth", "20", "--rows", &rows_arg, "-r", "1"];
        let report = json(&[&args[..], &["--json"]].concat());
        let steps = report["steps"].as_array().expect("steps");
        let find = |op: &str| steps.iter().find(|s| s["op"] == op).expect(op);
        let number = |step: &Value, key: &str| step[key].as_u64().expect("a number");
        let sum = |key: &str| steps.iter().map(|s| number(s, key)).sum::<u64>();
        assert_eq!(number(&report, "total_bytes"), sum("bytes"));
        assert_eq!(number(&report, "total_macs"), sum("macs"));
        let ffn = find("ffn_in");
        let (inner, cols) = (number(ffn, "inner"), number(ffn, "cols"));
        assert_eq!(number(ffn, "macs"), 8 * 2 * rows * inner * cols);
        // Six sliding layers; keys and values of 2 heads of 128, 2 bytes each.
        let attend = find("attend");
        assert_eq!(number(attend, "bytes"), 6 * (20 + rows) * 2 * 2 * 128 * 2);
        let seen: u64 = (21..=20 + rows).sum();
        let cols = number(attend, "cols");
        assert_eq!(number(attend, "macs"), 6 * 2 * seen * cols);
        muser(&args).stdout
    };
    let table = check(1);
    assert!(
        table.contains(" share    GB/s\n") && table.contains(" -> "),
        "{table}"
    );
    let table = check(8);
    assert!(table.contains(" share  GMAC/s\n"), "{table}");
    assert!(table.trim_end().ends_with(" tokens/s"), "{table}");
}

#[test]
fn a_file_that_cannot_be_written_is_known_before_the_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().display().to_string();
    let message = format!("cannot write {path}: found a folder, expected a file");
    check_error(&["bench", "--plot", &path], b"", &message);
    check_error(&["walk", "--trace", &path], b"", &message);
    let lost = folder.path().join("lost/speed.svg").display().to_string();
    let message = format!("cannot write {lost}: No such file or directory (os error 2)");
    check_error(&["bench", "--plot", &lost], b"", &message);
}

/// Numbers beyond every model are refused by what they ask for, not by what they overflow.
#[test]
fn the_largest_numbers_are_refused_as_others() {
    let most = u32::MAX.to_string();
    let message = "4294967296 tokens of context are needed, but there are 2048";
    check_error(&["bench", "-p", "0", "-n", "1", "-d", &most], b"", message);
    check_error(&["walk", "--depth", &most], b"", message);
}

/// As `run` and `bench` do: figures of a damaged file mean nothing.
#[test]
fn a_walk_over_a_damaged_file_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("damaged.gguf");
    let mut bytes = std::fs::read(testing::bundled("nano-glimmer-q8_0.gguf")).expect("the model");
    // The scale of the last block of Q8_0, a half of 2 bytes before 32 codes.
    let at = bytes.len() - 34;
    bytes[at..at + 2].copy_from_slice(&[0xff, 0x7f]);
    std::fs::write(&path, bytes).expect("room");
    let path = path.display().to_string();
    let outcome = muser(&["walk", "--model", &path, "-r", "1"]);
    assert_eq!(outcome.code, 1, "{}", outcome.stdout);
    assert!(outcome.stderr.contains("not finite"), "{}", outcome.stderr);
}

#[test]
fn drafts_and_rounds_are_measured() {
    let drafter = testing::bundled("nano-glimmer-dflash-q8_0.gguf");
    let drafter = drafter.display().to_string();
    let works = |draft: &str| {
        let flags = [
            "bench", "--json", "-p", "0", "-n", "2", "-r", "1", "-b", "2",
        ];
        let outcome = muser(&[&flags[..], &["--draft", draft, "--draft-max", "3"]].concat());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        let report: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
        let lines = report["lines"].as_array().expect("lines").clone();
        lines
            .into_iter()
            .map(|line| {
                assert!(line["tokens_per_second"].as_f64() > Some(0.0), "{line}");
                let n = |key: &str| line[key].as_u64();
                let work = line["work"].as_str().expect("a word").to_string();
                (work, n("n_drafted"), n("n_tokens"))
            })
            .collect::<Vec<_>>()
    };
    let line = |work: &str, n_drafted, n_tokens| (work.to_string(), n_drafted, Some(n_tokens));
    let [decode, draft, round] = [
        line("decode", None, 2),
        line("draft", Some(3), 6),
        line("round", Some(3), 2),
    ];
    assert_eq!(works(&drafter), [decode.clone(), draft, round.clone()]);
    assert_eq!(works("ngram"), [decode, round]);
    check_error(
        &["bench", "--draft", &drafter, "--draft-max", "16"],
        b"",
        "--draft-max: found 16, expected 1 to 15",
    );
}
