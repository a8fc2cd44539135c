//! `muser parity` as people call it: verdicts, exit codes and bad input.

mod common;

use common::{check_error, muser, muser_with, oracle};
use npyz::WriterBuilder;
use npyz::npz::NpzWriter;
use serde_json::Value;
use std::path::Path;
use testing::root;

/// Runs with `--json`; gives exit code and report.
#[track_caller]
fn report(args: &[&str]) -> (i32, Value) {
    let outcome = muser(&[&["parity", "--json"], args].concat());
    let report = serde_json::from_str(&outcome.stdout);
    (
        outcome.code,
        report.unwrap_or_else(|e| panic!("{e}: {}", outcome.stderr)),
    )
}

#[test]
fn golden_logits_of_every_kind_of_array() {
    let (nano, golden) = (
        oracle("text-nano-f32.gguf"),
        oracle("golden-text-nano-f32.npz"),
    );
    let (code, found) = report(&["--model", &nano, "--golden", &golden]);
    assert_eq!(
        (code, &found["passed"]),
        (0, &Value::Bool(true)),
        "{found:#}"
    );
    let checks = found["checks"].as_array().expect("checks");
    let rows = |c: &Value| {
        (
            c["name"].as_str().unwrap().to_string(),
            c["rows"].as_u64().unwrap(),
        )
    };
    let all: Vec<(String, u64)> = checks.iter().map(rows).collect();
    let expected = [("one", 1), ("short", 12), ("edge", 27), ("long", 89)];
    assert_eq!(all, expected.map(|(name, n)| (name.to_string(), n)));
    for check in checks {
        assert_eq!(check["same_top_rows"], check["rows"]);
        assert!(
            check["max_abs"].as_f64().unwrap() > 0.0,
            "float64 golden values: {check}"
        );
    }

    let (kq, golden) = (
        oracle("text-kq-q4km.gguf"),
        oracle("golden-text-kq-q4km.npz"),
    );
    let (code, found) = report(&["--model", &kq, "--golden", &golden]);
    assert_eq!(code, 0, "{found:#}");
    assert_eq!(found["checks"][1]["name"], "long_last8");
    assert_eq!(found["checks"][1]["rows"], 8);
}

#[test]
fn the_verdict_is_the_exit_code() {
    let (nano, golden) = (
        oracle("text-nano-f32.gguf"),
        oracle("golden-text-nano-f32.npz"),
    );
    let run = |flags: &[&str]| {
        let outcome = muser(&[&["parity", "-m", &nano, "--golden", &golden], flags].concat());
        let last = outcome
            .stdout
            .lines()
            .last()
            .unwrap_or_default()
            .to_string();
        (outcome.code, last, outcome.stderr)
    };
    let line = |text: &str| text.to_string();
    assert_eq!(
        run(&[]),
        (
            0,
            line("PASSED: within max abs 2e-3, relative RMS 3e-5"),
            line("")
        )
    );
    assert_eq!(
        run(&["--max-abs", "0", "--max-rms", "1"]),
        (1, line("FAILED: 4 of 4: max abs above 0e0"), line(""))
    );
    // Keys and values in f16 are farther off than the limits allow.
    let (code, found) = report(&["-m", &nano, "--golden", &golden, "--kv", "f16"]);
    assert_eq!((code, &found["passed"]), (1, &Value::Bool(false)));
    let rms = found["checks"][3]["relative_rms"].as_f64().unwrap();
    assert!((1e-4..1e-2).contains(&rms), "{rms}");
}

#[test]
fn golden_log_probabilities() {
    let golden = root("testdata/nano-glimmer/golden.json")
        .display()
        .to_string();
    let (code, found) = report(&["--golden", &golden]);
    assert_eq!(code, 0, "{found:#}");
    let checks = found["checks"].as_array().expect("checks");
    assert_eq!(checks.len(), 9);
    for check in checks {
        assert_eq!(check["rows"], 64);
        assert_eq!(check["relative_rms"], Value::Null);
    }
    assert_eq!(found["quantity"], "log-probabilities");
    assert_eq!(found["limits"]["max_abs"], 1e-3);
    let (max, mean) = (&checks[0]["max_abs"], &checks[0]["mean_abs"]);
    assert!(mean.as_f64().unwrap() > 0.0 && mean.as_f64() < max.as_f64());
    let outcome = muser(&["parity", "--golden", &golden]);
    assert_eq!(
        outcome.stdout.lines().last(),
        Some("PASSED: within max abs 1e-3, and no greedy token differs beyond ties")
    );
}

/// One golden prompt of the bundled model, of three tokens, after a change.
fn golden_of(path: &Path, change: impl FnOnce(&mut Value)) -> String {
    let golden = root("testdata/nano-glimmer/golden.json");
    let text = std::fs::read_to_string(golden).expect("the golden file");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let prompt = &golden["prompts"][0];
    let first = |list: &str| prompt[list].as_array().expect("a list")[..3].to_vec();
    let mut short = serde_json::json!({
        "name": "short",
        "prompt_ids": prompt["prompt_ids"],
        "greedy_ids": first("greedy_ids"),
        "top5": first("top5"),
    });
    change(&mut short);
    let all = serde_json::json!({ "prompts": [short] });
    std::fs::write(path, all.to_string()).expect("written");
    path.display().to_string()
}

/// The greedy token is part of the verdict, unless golden values call another as
/// likely.
#[test]
fn golden_greedy_tokens() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("golden.json");
    let verdict = |change: &dyn Fn(&mut Value), flags: &[&str]| {
        let golden = golden_of(&path, change);
        let (code, found) = report(&[&["--golden", &golden], flags].concat());
        let check = &found["checks"][0];
        let (same, wrong) = (&check["same_top_rows"], &check["wrong_top_rows"]);
        (code, same.as_u64().unwrap(), wrong.as_u64().unwrap())
    };
    assert_eq!(verdict(&|_| (), &[]), (0, 3, 0));
    // The last token is compared and never fed.
    let second = |prompt: &Value| prompt["top5"][2][1][0].clone();
    let other = |prompt: &mut Value| prompt["greedy_ids"][2] = second(prompt);
    assert_eq!(verdict(&other, &[]), (1, 2, 1));
    assert_eq!(verdict(&|p| p["greedy_ids"][2] = 17.into(), &[]), (1, 2, 1));
    let near = |prompt: &mut Value| {
        let likely = prompt["top5"][2][0][1].as_f64().unwrap();
        prompt["top5"][2][1][1] = (likely - 0.04).into();
        prompt["greedy_ids"][2] = second(prompt);
    };
    assert_eq!(verdict(&near, &["--max-abs", "20"]), (0, 2, 0));
    let (code, same, wrong) = verdict(&near, &[]);
    assert_eq!(
        (code, same, wrong),
        (1, 2, 0),
        "the log-probability is wrong"
    );

    // An answer that is not greedy: the likeliest golden token is.
    let answer = |prompt: &mut Value| {
        let ids = prompt.as_object_mut().unwrap().remove("greedy_ids");
        prompt["answer_ids"] = ids.unwrap();
    };
    assert_eq!(verdict(&answer, &[]), (0, 3, 0));
    let wrong_top = |prompt: &mut Value| {
        answer(prompt);
        prompt["top5"][2] = serde_json::json!([[17, -0.1]]);
    };
    assert_eq!(verdict(&wrong_top, &["--max-abs", "100"]), (1, 2, 1));

    let golden = golden_of(&path, other);
    let outcome = muser(&["parity", "--golden", &golden]);
    let lines: Vec<&str> = outcome.stdout.lines().rev().collect();
    assert_eq!(lines[0], "FAILED: 1 of 1: 1 other greedy token");
    assert!(
        lines[2].ends_with("2/3  FAILED: 1 other greedy token"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn arrays_that_nothing_is_compared_with_are_named() {
    let golden = oracle("golden-text-nano-f16.npz");
    let nano = oracle("text-nano-f16.gguf");
    let skipped = [
        "tokens_edge, which has no logits",
        "tokens_one, which has no logits",
    ];
    let (code, found) = report(&["-m", &nano, "--golden", &golden]);
    assert_eq!((code, &found["skipped"]), (0, &serde_json::json!(skipped)));
    let stdout = muser(&["parity", "-m", &nano, "--golden", &golden]).stdout;
    for what in skipped {
        assert!(stdout.contains(&format!("\nskipped: {what}\n")), "{stdout}");
    }
}

#[test]
fn without_a_bound_there_is_no_verdict() {
    let args = ["--against-kv", "f32", "-n", "5"];
    let (code, found) = report(&args);
    assert_eq!((code, &found["passed"]), (0, &Value::Null));
    let outcome = muser(&[&["parity"], &args[..]].concat());
    let last = outcome.stdout.lines().last();
    assert_eq!(
        last,
        Some("NO VERDICT: no bound was given; --max-kl X gives one")
    );
}

#[test]
fn a_backend_equals_itself() {
    let outcome = muser(&[
        "parity",
        "--device",
        "reference",
        "--against",
        "reference",
        "--kv",
        "f32",
        "--max-tokens",
        "40",
        "--max-kl",
        "0",
    ]);
    assert_eq!(
        outcome.stdout,
        "model      nano-glimmer (bundled)\n\
         candidate  reference (scalar f32), kv f32\n\
         against    reference (scalar f32), kv f32\n\
         tokens     40\n\n\
         KL divergence       mean 0.000e0, max 0.000e0 at position 0\n\
         same top-1          40 of 40 (100.00 %)\n\
         log-probabilities   differ by at most 0.000e0 at position 0, token 0 \"!\" (of tokens \
         with p >= 0.001)\n\n\
         PASSED: within mean KL 0e0\n"
    );
    assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""));
}

#[test]
fn rounded_keys_and_values_differ_a_little() {
    let (code, found) = report(&["--against-kv", "f32"]);
    assert_eq!(code, 0);
    assert_eq!(found["candidate"], "reference (scalar f32), kv f16");
    assert_eq!(found["against"], "reference (scalar f32), kv f32");
    let mean = found["kl"]["mean"].as_f64().unwrap();
    let max = found["kl"]["max"]["value"].as_f64().unwrap();
    assert!(0.0 < mean && mean < max && max < 1e-3, "{found:#}");
    let (code, found) = report(&["--against-kv", "f32", "--max-kl", "1e-12", "-n", "20"]);
    assert_eq!((code, &found["tokens"]), (1, &Value::from(20)));
}

#[test]
fn operation_by_operation() {
    let nano = oracle("text-nano-f32.gguf");
    let args = [
        "--model",
        &nano,
        "--device",
        "reference",
        "--against",
        "reference",
        "--ops",
        "--ids",
        "1,2,3",
    ];
    let (code, found) = report(&[&args[..], &["--max-rms", "0", "--max-abs", "0"]].concat());
    assert_eq!(code, 0, "{found:#}");
    assert_eq!(found["first_outside"], Value::Null);
    let worst = found["worst"].as_array().expect("operations");
    let names: Vec<&str> = worst
        .iter()
        .map(|w| w["operation"].as_str().unwrap())
        .collect();
    assert!(
        names.contains(&"attend") && names.contains(&"logits"),
        "{names:?}"
    );
    let outcome = muser(&[&["parity"], &args[..]].concat());
    let operations = &found["operations"];
    let last = format!("PASSED: {operations} operations within relative RMS 3e-5");
    assert_eq!(outcome.stdout.lines().last(), Some(last.as_str()));
}

fn read_npy(path: &Path) -> (Vec<u64>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = npyz::NpyFile::new(&bytes[..]).expect("an npy file");
    (file.shape().to_vec(), file.into_vec().expect("f32"))
}

/// The dump holds the oracle's residual stream and logits under llama.cpp's
/// names, however many passes it took.
#[test]
fn a_dump_holds_the_golden_values() {
    let golden = oracle("golden-text-nano-f32.npz");
    let mut golden = npyz::npz::NpzArchive::open(golden).expect("the golden file");
    let tokens = golden.by_name("tokens_edge").unwrap().unwrap();
    let mut tokens = tokens.into_vec::<i32>().unwrap();
    let expected = golden
        .by_name("logits_edge")
        .unwrap()
        .unwrap()
        .into_vec::<f32>()
        .unwrap();
    // Longer than a pass; only the first rows have golden logits.
    tokens.extend([5; 20]);
    let ids: Vec<String> = tokens.iter().map(i32::to_string).collect();

    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("new/dump");
    let nano = oracle("text-nano-f32.gguf");
    let path = dir.display().to_string();
    let args = ["parity", "--model", &nano, "--ids", "-", "--dump", &path];
    let outcome = muser_with(&args, ids.join(" ").as_bytes());
    assert_eq!(outcome.stderr, "");
    assert_eq!(
        outcome.stdout,
        format!("91 nodes of 47 rows written to {path}\n")
    );

    let (shape, logits) = read_npy(&dir.join("result_output.npy"));
    assert_eq!(shape, [47, 512]);
    let furthest = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    assert!(furthest.fold(0.0, f32::max) < 2e-3);
    assert_eq!(read_npy(&dir.join("l_out-7.npy")).0, [47, 64]);
    assert_eq!(read_npy(&dir.join("inp_embd.npy")).0, [47, 64]);

    check_error(
        &["parity", "--model", &nano, "--ids", "1", "--dump", &path],
        b"",
        &format!("cannot write to {path}: found files in it, expected a new or an empty directory"),
    );
}

/// Writes an npz file of one array of tokens and one of logits.
fn write_npz(path: &Path, names: [&str; 2], tokens: &[i32], logits: &[f32], shape: [u64; 2]) {
    let mut npz = NpzWriter::create(path).expect("a file");
    let array = npz.array(names[0], Default::default()).expect("an array");
    let array = array.default_dtype().shape(&[tokens.len() as u64]);
    let mut writer = array.begin_nd().expect("begun");
    writer.extend(tokens.iter().copied()).expect("written");
    writer.finish().expect("written");
    let array = npz.array(names[1], Default::default()).expect("an array");
    let array = array.default_dtype().shape(&shape);
    let mut writer = array.begin_nd().expect("begun");
    writer.extend(logits.iter().copied()).expect("written");
    writer.finish().expect("written");
}

/// Lengths whose product is beyond 64 bits, and a header that is no header at all.
#[test]
fn golden_headers_that_lie() {
    use npyz::zip::ZipWriter;
    use npyz::zip::write::FileOptions;
    use std::io::Write;

    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("golden.npz");
    let name = path.display().to_string();
    let check = |header: &str, message: &str| {
        let mut zip = ZipWriter::new(std::fs::File::create(&path).expect("a file"));
        for entry in ["tokens_x.npy", "logits_x.npy"] {
            zip.start_file(entry, FileOptions::default())
                .expect("an entry");
            zip.write_all(b"\x93NUMPY\x01\x00").expect("written");
            let length = u16::try_from(header.len()).expect("a short header");
            zip.write_all(&length.to_le_bytes()).expect("written");
            zip.write_all(header.as_bytes()).expect("written");
        }
        zip.finish().expect("written");
        let outcome = muser(&["parity", "--golden", &name]);
        let start = format!("error: golden file {name}: array tokens_x: {message}");
        assert!(outcome.stderr.starts_with(&start), "{}", outcome.stderr);
        assert!(outcome.stderr.len() < 600, "{}", outcome.stderr);
        assert_eq!(outcome.code, 1);
    };
    check(
        "{'descr': '<i4', 'fortran_order': False, 'shape': (18446744073709551615, \
         18446744073709551615), }\n",
        "found shape [18446744073709551615, 18446744073709551615], expected 1 to 2048 tokens",
    );
    check(&"(".repeat(60_000), "");
}

#[test]
fn bad_golden_archives() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("golden.npz");
    let name = path.display().to_string();
    let nano = oracle("text-nano-f32.gguf");
    let zeros = vec![0.0; 1024];
    let check = |names, tokens: &[i32], logits: &[f32], shape, message: &str| {
        write_npz(&path, names, tokens, logits, shape);
        let message = format!("golden file {name}: {message}");
        check_error(&["parity", "-m", &nano, "--golden", &name], b"", &message);
    };
    let names = ["tokens_x", "logits_x"];
    check(
        ["tokens", "logits"],
        &[1, 2],
        &zeros,
        [2, 512],
        "found the arrays logits, tokens, expected tokens_NAME with logits_NAME or \
         logits_NAME_lastN",
    );
    check(
        ["tokens_x", "logits_y"],
        &[1, 2],
        &zeros,
        [2, 512],
        "found the arrays logits_y, tokens_x, expected tokens_NAME with logits_NAME or \
         logits_NAME_lastN",
    );
    check(
        names,
        &[1, 2],
        &zeros,
        [4, 256],
        "array logits_x: found shape [4, 256], expected [2, 512] (rows, vocabulary of the model)",
    );
    check(
        ["tokens_x", "logits_x_last3"],
        &[1, 2],
        &zeros,
        [2, 512],
        "found the array logits_x_last3, but tokens_x has 2 tokens",
    );
    check(
        names,
        &[1, 512],
        &zeros,
        [2, 512],
        "array tokens_x: found token 512 at 1, expected ids below 512",
    );
    check(
        names,
        &[-1, 2],
        &zeros,
        [2, 512],
        "array tokens_x: found token -1 at 0, expected ids below 512",
    );
    let mut holed = zeros;
    holed[600] = f32::NAN;
    check(
        names,
        &[1, 2],
        &holed,
        [2, 512],
        "array logits_x: found NaN at 600, expected finite numbers",
    );
}

#[test]
fn bad_golden_files() {
    let nano = oracle("text-nano-f32.gguf");
    let check = |golden: &str, message: &str| {
        let message = format!("golden file {golden}: {message}");
        check_error(&["parity", "-m", &nano, "--golden", golden], b"", &message);
    };
    check(
        &root("testdata/none.npz").display().to_string(),
        "No such file or directory (os error 2)",
    );
    check(
        &nano,
        "cannot be read as an npz archive: invalid Zip archive: Could not find central directory \
         end",
    );
    check(
        &oracle("manifest.json"),
        "missing field `prompts` at line 226 column 1",
    );
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("golden.json");
    let name = file.display().to_string();
    let check = |json: &str, message: &str| {
        std::fs::write(&file, json).expect("written");
        check(&name, message);
    };
    check(r#"{"prompts": []}"#, "found no prompts");
    check(
        r#"{"prompts": [{"prompt_ids": [1], "greedy_ids": [2, 3], "top5": [[[2, -0.5]]]}]}"#,
        "prompt 0: found 1 entries of top5, expected one for each of 2 greedy_ids",
    );
    check(
        r#"{"prompts": [{"prompt_ids": [1], "answer_ids": [2, 3], "top5": [[[2, -0.5]]]}]}"#,
        "prompt 0: found 1 entries of top5, expected one for each of 2 answer_ids",
    );
    check(
        r#"{"prompts": [{"prompt_ids": [1], "top5": []}]}"#,
        "prompt 0: greedy_ids is missing or empty",
    );
    check(
        r#"{"prompts": [{"prompt_ids": [1], "answer_ids": [2], "greedy_ids": [2], "top5": [[]]}]}"#,
        "prompt 0: found greedy_ids and answer_ids, expected one of them",
    );
    check(
        r#"{"prompts": [{"prompt_ids": [1], "greedy_ids": [2], "top5": [[]]}]}"#,
        "prompt 0: entry 0 of top5 is empty",
    );
    check(
        r#"{"prompts": [{"prompt_ids": [1], "greedy_ids": [2], "top5": [[[512, -0.5]]]}]}"#,
        "prompt 0: token 512 is not in the vocabulary of 512",
    );
    check(
        r#"{"prompts": [{"prompt_ids": [], "greedy_ids": [2], "top5": [[]]}]}"#,
        "prompt 0: prompt_ids is empty",
    );
}

#[test]
fn bad_flags() {
    let check = |args: &[&str], message: &str| {
        check_error(&[&["parity"], args].concat(), b"", message);
    };
    check(
        &["--against-kv", "f32", "--ids", "1,9999"],
        "token 9999 is not in the vocabulary of 4096",
    );
    check(
        &["--against-kv", "f32", "--ids", ""],
        "there are no tokens to compute",
    );
    check(
        &["--against-kv", "f32", "--ids", "1,2,3", "--ctx", "2"],
        "found 3 tokens to compute, expected at most the context of 2",
    );
    check(
        &["--against-kv", "f32", "--max-rms", "1"],
        "--max-abs and --max-rms need --golden or --ops",
    );
    for limit in ["nan", "-1", "x"] {
        let outcome = muser(&["parity", "--golden", "x.npz", &format!("--max-abs={limit}")]);
        let message = format!(
            "error: invalid value '{limit}' for '--max-abs <X>': found {limit:?}, expected a \
             number that is not negative\n"
        );
        assert!(outcome.stderr.starts_with(&message), "{}", outcome.stderr);
        assert_eq!(outcome.code, 2);
    }
    let none = muser(&["parity"]);
    assert_eq!(none.code, 2);
    assert!(
        none.stderr.contains("--golden <FILE>|--against <DEVICE>"),
        "{}",
        none.stderr
    );
    let both = muser(&["parity", "--golden", "x.npz", "--dump", "y"]);
    assert_eq!(both.code, 2);
}
