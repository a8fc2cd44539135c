//! Every rule fires on what it forbids, at the right line, and is silent on what it allows.

use super::exceptions::Exception;
use super::{Violation, apply, check_text, dependencies, missing_files, text};

/// `wanted`: the violations as `line: rule: item`.
fn check(path: &str, source: &str, wanted: &[&str]) {
    let found: Vec<String> = check_text(path, source)
        .iter()
        .map(|v| format!("{}: {}: {}", v.line, v.rule, v.item))
        .collect();
    assert_eq!(found, wanted, "{path}:\n{source}");
}

/// A source file of the crate `gguf` with a head.
fn check_source(source: &str, wanted: &[&str]) {
    check(
        "crates/gguf/src/a.rs",
        &format!("//! Head.\n{source}"),
        wanted,
    );
}

#[test]
fn a_violation_prints_path_line_rule_found_and_limit() {
    let found = check_text(
        "crates/gguf/src/a.rs",
        &format!("//! Head.\nfn f() {{\n{}}}\n", "    g();\n".repeat(79)),
    );
    let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        ["crates/gguf/src/a.rs:2: function-length: fn f has 81 lines, limit 80"]
    );
}

#[test]
fn files_are_at_most_800_lines() {
    for path in ["a.rs", "a.cu", "a.cuh", "a.wgsl", "a.py", "a.sh"] {
        check(path, &"\n".repeat(800), &[]);
        check(path, &"\n".repeat(801), &["801: file-length: "]);
    }
    check(
        "run",
        &format!("#!/bin/sh\n{}", "\n".repeat(800)),
        &["801: file-length: "],
    );
    check("a.json", &"\n".repeat(5000), &[]);
}

#[test]
fn functions_are_at_most_80_lines() {
    let body = |n: usize| "    g();\n".repeat(n);
    check_source(&format!("fn f() {{\n{}}}\n", body(78)), &[]);
    check_source(
        &format!("fn f() {{\n{}}}\n", body(79)),
        &["2: function-length: f"],
    );
    check_source(
        &format!("impl A {{\n/// Text.\nfn f(&self) {{\n{}}}\n}}\n", body(79)),
        &["4: function-length: f"],
    );
    check_source(
        &format!("trait A {{\nfn a();\nfn f() {{\n{}}}\n}}\n", body(79)),
        &["4: function-length: f"],
    );
    check_source(
        &format!("mod a {{ fn f() {{ fn g() {{\n{}}} }} }}\n", body(79)),
        &["2: function-length: f", "2: function-length: g"],
    );
    // A where clause ends with a comma, a result can hold a block, an arrow is no bracket.
    check_source(
        &format!("fn f<B>(b: B)\nwhere\n    B: C,\n{{\n{}}}\n", body(76)),
        &["2: function-length: f"],
    );
    check_source(
        &format!("fn f() -> A<{{ 1 }}> {{\n{}}}\n", body(79)),
        &["2: function-length: f"],
    );
    check_source(
        &format!("fn f(g: impl Fn() -> u8) {{\n{}}}\n", body(79)),
        &["2: function-length: f"],
    );
    check_source(
        &format!(
            "proptest! {{ #[test] fn f(a in 0..9) {{\n{}}} }}\n",
            body(79)
        ),
        &["2: function-length: f"],
    );
    check_source(
        &format!(
            "macro_rules! m {{ ($n:ident) => {{ fn $n() {{\n{}}} }} }}\n",
            body(79)
        ),
        &["2: function-length: $n"],
    );
    check_source(
        &format!(
            "const F: fn(u8) = g;\nconst S: &str = \"fn f() {{\n{}}}\";\n",
            body(100)
        ),
        &[],
    );
}

#[test]
fn only_two_crates_and_this_one_read_the_environment() {
    let sources = [
        "fn f() { std::env::var(\"A\"); }",
        "fn f() { env::vars(); }",
        "fn f() { std::env::var_os(\"A\"); }",
        "fn f() { std::env::set_var(\"A\", \"b\"); }",
        "use std::env::var;",
        "use std::env::{args, var};",
        "use std::env::*;",
        "use std::env as e;",
        "const A: Option<&str> = option_env!(\"A\");",
        "const A: &str = env!(\"A\");",
        "const A: &str = env!(\"CARGO_MANIFEST_DIR\");",
    ];
    for source in sources {
        check_source(source, &["2: environment: "]);
        for krate in ["muser", "server", "xtask"] {
            check(
                &format!("crates/{krate}/src/a.rs"),
                &format!("//! Head.\n{source}"),
                &[],
            );
        }
    }
    check_source(
        "use std::env::args;\nconst V: &str = env!(\"CARGO_PKG_VERSION\");\n// std::env::var\n",
        &[],
    );
    check_source("const A: &str = \"std::env::var\";", &[]);
    let root = "env!(\"CARGO_MANIFEST_DIR\")";
    check_source(
        &format!("#[cfg(test)]\nmod tests {{ const A: &str = {root}; }}\nconst B: u8 = 1;"),
        &[],
    );
    check_source(
        &format!("#[test]\nfn a() {{ f({root}); }}\nfn b() {{ f({root}); }}"),
        &["4: environment: "],
    );
    check_source(
        &format!("#[cfg(not(test))]\nfn b() {{ f({root}); }}"),
        &["3: environment: "],
    );
    check(
        "crates/gguf/tests/a.rs",
        &format!("const A: &str = {root};"),
        &[],
    );
    check(
        "crates/gguf/tests/a.rs",
        "fn f() { std::env::var(\"A\"); }",
        &["1: environment: "],
    );
}

#[test]
fn unsafe_code_says_why_it_is_sound() {
    for source in [
        "fn f() { unsafe { g() } }",
        "unsafe impl Send for A {}",
        "/// Text.\nunsafe fn f() {}",
        "// SAFETY: too far away.\n\nfn f() { unsafe { g() } }",
        "macro_rules! m { () => { unsafe { g() } } }",
    ] {
        let found = check_text("crates/gguf/src/a.rs", &format!("//! Head.\n{source}"));
        assert!(
            matches!(&found[..], [v] if v.rule == "unsafe"),
            "{source}: {found:?}"
        );
    }
    check_source(
        "fn f() {\n    // SAFETY: a fact\n    // over two lines.\n    unsafe { g() }\n}",
        &[],
    );
    check_source(
        "fn f() {\n    // SAFETY: a fact.\n    let a =\n        unsafe { g() };\n}",
        &[],
    );
    check_source(
        "fn f() {\n    // SAFETY: a fact.\n    let a = h(1, 2)\n        .i(unsafe { g() });\n}",
        &["5: unsafe: "],
    );
    check_source(
        "fn f() {\n    match a {\n        // SAFETY: a fact.\n        A => unsafe { g() },\n        B => unsafe { h() },\n    }\n}",
        &["6: unsafe: "],
    );
    check_source(
        "/// Text.\n///\n/// # Safety\n/// What the caller owes.\n#[inline]\npub unsafe fn f() {}",
        &[],
    );
    check_source(
        "type F = unsafe extern \"C\" fn(u8);\nconst A: &str = \"unsafe\"; // unsafe",
        &[],
    );
}

#[test]
fn four_crates_have_no_unsafe_code() {
    for krate in ["model", "text", "engine", "server"] {
        let file = format!("crates/{krate}/src/lib.rs");
        check(&file, "//! Head.\n#![forbid(unsafe_code)]\n", &[]);
        check(&file, "//! Head.\n", &["1: unsafe: "]);
        check(
            &file,
            "//! Head.\n#![deny(unsafe_code)]\n",
            &["1: unsafe: "],
        );
        let source = "// SAFETY: a fact.\nunsafe impl Send for A {}\n";
        check(
            &format!("crates/{krate}/tests/a.rs"),
            source,
            &["2: unsafe: "],
        );
    }
}

#[test]
fn nothing_unfinished_and_no_test_that_does_not_run() {
    check_source("fn f() { todo!() }", &["2: unfinished: "]);
    check_source("fn f() { unimplemented!(\"a\") }", &["2: unfinished: "]);
    check_source("fn todo() { let unimplemented = \"todo!()\"; }", &[]);
    for word in text::UNFINISHED {
        check_source(&format!("// {word}: later"), &["2: unfinished: "]);
        check("a.py", &format!("# {word} later"), &["1: unfinished: "]);
        check_source(&format!("const MY_{word}S: u8 = 1;"), &[]);
    }
    check_source("#[test]\n#[ignore]\nfn f() {}", &["3: ignored-test: "]);
    check_source(
        "#[test]\n#[ignore = \"slow\"]\nfn f() {}",
        &["3: ignored-test: "],
    );
    check_source(
        "#[cfg_attr(debug_assertions, ignore)]\nfn f() {}",
        &["2: ignored-test: "],
    );
    check_source("fn ignore() { a.ignore() }", &[]);
}

#[test]
fn a_lint_is_allowed_only_with_a_reason() {
    check_source("#[allow(dead_code)]\nfn f() {}", &["2: allow: dead_code"]);
    check_source(
        "/// Text.\n#[expect(clippy::a)]\nfn f() {}",
        &["3: allow: clippy::a"],
    );
    check_source("#![allow(dead_code)]\n", &["2: allow: dead_code"]);
    check_source("#[allow(dead_code, reason = \"a reason\")]\nfn f() {}", &[]);
    check_source("// A reason.\n#[allow(dead_code)]\nfn f() {}", &[]);
    check_source(
        "// A reason.\n#[derive(Debug)]\n#[allow(dead_code)]\nstruct A;",
        &[],
    );
    check_source("#[allow(dead_code)] // a reason\nfn f() {}", &[]);
    check_source(
        "// Not about it.\n\n#[allow(dead_code)]\nfn f() {}",
        &["4: allow: dead_code"],
    );
    check_source("fn f() { allow(1); a.expect(\"b\"); }", &[]);
}

#[test]
fn names_are_the_words_of_the_field() {
    check_source("fn get_rows() {}", &["2: name: get_rows"]);
    check_source(
        "fn decode_impl() {}\nfn decode_v2() {}",
        &["2: name: decode_impl", "3: name: decode_v2"],
    );
    check_source(
        "struct PageManager;\nenum RowHelper {}\ntrait TextUtils {}",
        &[
            "2: name: PageManager",
            "3: name: RowHelper",
            "4: name: TextUtils",
        ],
    );
    check("crates/gguf/src/utils.rs", "//! Head.\n", &["0: name: "]);
    check("crates/gguf/src/misc/a.rs", "//! Head.\n", &[]);
    check_source("fn target() { a.get_rows() }", &[]);
}

#[test]
fn source_files_begin_with_their_head() {
    check("crates/gguf/src/a.rs", "use a::b;\n", &["1: head-doc: "]);
    check("crates/gguf/src/a.rs", "\n//! Head.\n", &[]);
    check("crates/gguf/tests/a.rs", "use a::b;\n", &[]);
    check(
        "crates/gguf/src/a.rs",
        "//! Head.\nfn f( {}\n",
        &["0: syntax: "],
    );
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    for start in text::MACHINE_PATHS {
        check(
            "a.md",
            &format!("one\n`{start}a`\n"),
            &["2: machine-path: "],
        );
        check_source(
            &format!("const A: &str = \"{start}a\";"),
            &["2: machine-path: "],
        );
    }
    for start in text::MACHINE_PATHS
        .iter()
        .filter(|start| start.starts_with('/'))
    {
        check(
            "a.md",
            &format!("target{start}a ~{start}a ./a{start}b https://a.b{start}c\n"),
            &[],
        );
    }
}

#[test]
fn large_files_stand_in_models() {
    assert_eq!(text::check_size("testdata/a.gguf", 2_000_000), None);
    let found = text::check_size("testdata/a.gguf", 2_000_001).expect("a large file passes");
    assert_eq!(
        found.to_string(),
        "testdata/a.gguf:0: file-size: 2000001 bytes, limit 2000000"
    );
    assert_eq!(text::check_size("models/a.gguf", 20_000_000), None);
}

#[test]
fn files_without_text_are_not_read_as_text() {
    assert_eq!(text::of(b"GGUF\x03\0\0\0"), None);
    assert_eq!(text::of(b"\xff\xfe"), None);
    assert_eq!(text::of("ö\n".as_bytes()), Some("ö\n"));
}

#[test]
fn required_files_are_there() {
    let all: Vec<String> = super::REQUIRED
        .iter()
        .map(|path| (*path).to_owned())
        .collect();
    assert_eq!(missing_files(&all), []);
    let missing: Vec<String> = missing_files(&all[1..])
        .into_iter()
        .map(|v| v.path)
        .collect();
    assert_eq!(missing, [super::REQUIRED[0]]);
}

/// `allowed`: whether the table allows `from` to use `to`.
fn check_edge(from: &str, to: &str, kind: &str, allowed: bool) {
    let edge = dependencies::Edge {
        from: from.to_owned(),
        to: to.to_owned(),
        kind: kind.to_owned(),
    };
    let manifest = format!("[package]\nname = \"{from}\"\n[dependencies]\n{to}.workspace = true\n");
    let found = dependencies::check(&edge, &manifest);
    assert_eq!(found.is_none(), allowed, "{from} -> {to}: {found:?}");
    if let Some(found) = found {
        assert_eq!((found.line, found.rule), (4, "dependency"));
        assert_eq!(found.path, format!("crates/{from}/Cargo.toml"));
    }
}

#[test]
fn crates_use_only_what_is_below_them() {
    for (from, to) in [
        ("model", "gguf"),
        ("cpu", "gguf"),
        ("engine", "gguf"),
        ("text", "model"),
        ("transfer", "model"),
        ("server", "transfer"),
        ("muser", "text"),
        ("muser", "cuda"),
    ] {
        check_edge(from, to, "", true);
        check_edge(to, from, "", false);
        check_edge(to, from, "dev", false);
    }
    for (from, to) in [
        ("engine", "text"),
        ("engine", "cpu"),
        ("text", "engine"),
        ("model", "cpu"),
        ("cpu", "cuda"),
    ] {
        check_edge(from, to, "", false);
    }
    for from in ["model", "cpu", "engine", "muser"] {
        check_edge(from, "testing", "dev", true);
        check_edge(from, "testing", "", false);
    }
    check_edge("gguf", "testing", "dev", false);
    for (layer, _) in dependencies::LAYERS {
        check_edge("xtask", layer, "", false);
        check_edge(layer, "xtask", "", false);
        check_edge("unknown", layer, "", false);
    }
}

#[test]
fn edges_are_the_dependencies_with_a_path() {
    let metadata = br#"{"packages": [
        {"name": "gguf", "dependencies": [{"name": "half", "kind": null}]},
        {"name": "wgpu", "dependencies": []},
        {"name": "model", "dependencies": [
            {"name": "gguf", "kind": null, "path": "/a/gguf"},
            {"name": "gguf", "kind": "dev", "path": "/a/gguf"},
            {"name": "wgpu", "kind": null}
        ]}
    ]}"#;
    let edge = |kind: &str| dependencies::Edge {
        from: "model".into(),
        to: "gguf".into(),
        kind: kind.into(),
    };
    assert_eq!(
        dependencies::edges(metadata).expect("metadata"),
        [edge(""), edge("dev")]
    );
    assert!(dependencies::edges(b"{}").is_err());
    assert!(dependencies::edges(b"error").is_err());
}

fn long_function(item: &str) -> Violation {
    Violation {
        path: "a.rs".to_owned(),
        line: 3,
        rule: "function-length",
        item: item.to_owned(),
        found: "81 lines".to_owned(),
        limit: "limit 80".to_owned(),
    }
}

#[test]
fn an_exception_allows_one_item_and_must_be_needed_and_explained() {
    let exception = |item, reason| Exception {
        rule: "function-length",
        path: "a.rs",
        item,
        reason,
    };
    let both = || vec![long_function("f"), long_function("g")];
    assert_eq!(
        apply(both(), &[exception("f", "a table")]),
        [long_function("g")]
    );
    let unused = apply(vec![long_function("g")], &[exception("f", "a table")]);
    assert_eq!(
        unused.iter().map(|v| v.rule).collect::<Vec<_>>(),
        ["exception", "function-length"]
    );
    assert!(
        unused[0].found.contains("allows nothing any more"),
        "{unused:?}"
    );
    let unexplained = apply(vec![long_function("f")], &[exception("f", " ")]);
    assert!(
        matches!(&unexplained[..], [v] if v.found.contains("has no reason")),
        "{unexplained:?}"
    );
    let other_rule = Exception {
        rule: "name",
        ..exception("f", "a table")
    };
    assert_eq!(apply(vec![long_function("f")], &[other_rule]).len(), 2);
}
