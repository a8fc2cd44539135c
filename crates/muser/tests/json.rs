//! docs/json.md names every field that `--json` prints.

mod common;

use common::muser_with;
use serde_json::Value;
use std::collections::BTreeSet;

/// The names of all fields, those of metadata and arguments left out: they are data.
fn fields(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                found.insert(name.clone());
                if name != "metadata" && name != "arguments" {
                    fields(value, found);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| fields(value, found)),
        _ => {}
    }
}

/// The part of the page under the title `## name`.
fn section(page: &str, name: &str) -> String {
    let title = format!("## {name}\n");
    let start = page.find(&title).unwrap_or_else(|| panic!("no {title:?}"));
    let text = &page[start + title.len()..];
    text.split("\n## ")
        .next()
        .expect("a first part")
        .to_string()
}

#[track_caller]
fn check(args: &[&str], stdin: &str) {
    let page = testing::read_to_string(&testing::root("docs/json.md"));
    let text = section(&page, args[0]);
    let outcome = muser_with(args, stdin.as_bytes());
    assert_eq!(outcome.code, 0, "{args:?}: {}", outcome.stderr);
    let report: Value = serde_json::from_str(&outcome.stdout).expect("one JSON object");
    let mut found = BTreeSet::new();
    fields(&report, &mut found);
    assert!(!found.is_empty(), "{args:?} prints fields");
    let missing: Vec<&String> = (found.iter())
        .filter(|name| !text.contains(&format!("`{name}`")))
        .collect();
    assert!(
        missing.is_empty(),
        "{args:?}: docs/json.md lacks {missing:?}"
    );
}

#[test]
fn every_field_is_documented() {
    let golden = "../../testdata/nano-glimmer/golden.json";
    let conversation = r#"{"messages":[{"role":"user","content":"Hello"}]}"#;
    check(&["run", "--json", "-n", "3", "Hello"], "");
    check(&["bench", "--json", "-p", "4", "-n", "1", "-r", "1"], "");
    check(&["walk", "--json", "-r", "1"], "");
    check(
        &[
            "parity",
            "--json",
            "--golden",
            golden,
            "--device",
            "cpu",
            "--max-abs",
            "9",
        ],
        "",
    );
    check(
        &[
            "parity",
            "--json",
            "--against",
            "reference",
            "--max-tokens",
            "8",
        ],
        "",
    );
    check(
        &[
            "parity",
            "--json",
            "--against",
            "reference",
            "--ops",
            "--max-tokens",
            "8",
        ],
        "",
    );
    check(&["inspect", "--json"], "");
    check(&["template", "--json", "-"], conversation);
    check(&["tokenize", "--json", "Hello"], "");
}
