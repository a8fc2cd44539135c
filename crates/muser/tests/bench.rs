//! `muser bench` and `muser walk` as people call them. Speeds are not judged.

mod common;

use common::{check_error, muser};
use serde_json::Value;

fn json(args: &[&str]) -> Value {
    let outcome = muser(args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    serde_json::from_str(&outcome.stdout).expect("JSON")
}

#[test]
fn every_work_has_a_line_with_its_scope() {
    let folder = tempfile::tempdir().expect("a folder");
    let plot = folder.path().join("speed.svg").display().to_string();
    let works = ["-p", "8", "-n", "2", "-d", "0,300", "-b", "1,2", "-r", "2"];
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
    // Weights without the embedding; at depth 300 the keys and values of 2 full layers of 300
    // rows and of 6 sliding ones of 128, of 2 heads of 128, twice 2 bytes each.
    let weights = 11_740_160 - 1_114_112;
    let keys = (2 * 300 + 6 * 128) * 2 * 128 * 4;
    assert_eq!(lines[0]["bytes_per_pass"], Value::Null);
    assert_eq!(lines[1]["bytes_per_pass"], weights);
    assert_eq!(lines[4]["bytes_per_pass"], weights + 2 * keys);
    let picture = std::fs::read_to_string(&plot).expect("a picture");
    assert!(
        picture.starts_with("<svg") && picture.contains("2 sequences"),
        "{picture}"
    );

    let table = muser(&[&device[..], &["-p", "8", "-n", "0", "-r", "1", "--csv"]].concat()).stdout;
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 2);
    assert!(
        rows[1]
            .starts_with("\"nano-glimmer (bundled)\",\"Q8_0\",\"cpu (scalar, 1 thread)\",1,f16,")
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    check_error(
        &["bench", "-p", "0", "-n", "0"],
        b"",
        "nothing to measure: both -p and -n are 0",
    );
    check_error(
        &["bench", "-r", "0"],
        b"",
        "--repetitions: found 0, expected 1 or more",
    );
    check_error(
        &["bench", "-d", "2040"],
        b"",
        "2104 tokens of context are needed, but there are 2048",
    );
    check_error(
        &["bench", "--device", "cpu", "--threads", "0"],
        b"",
        "threads: found 0, expected 1 to 256",
    );
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
    let kernels: Vec<(&str, u64)> = attend
        .map(|s| {
            (
                s["kernel"].as_str().expect("a kernel"),
                s["calls"].as_u64().expect("calls"),
            )
        })
        .collect();
    assert_eq!(kernels, [("sliding f16", 6), ("full f16", 2)]);
    let shares = steps.iter().map(|s| s["share"].as_f64().expect("a share"));
    assert!((shares.sum::<f64>() - 1.0).abs() < 1e-6);
    let trace = std::fs::read_to_string(&path).expect("a trace");
    let trace: Value = serde_json::from_str(&trace).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let calls = steps.iter().map(|s| s["calls"].as_u64().expect("calls"));
    assert_eq!(events.len() as u64, calls.sum::<u64>());
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
