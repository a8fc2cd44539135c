//! The direction of dependencies between the crates of the workspace.
//!
//! `LAYERS` names for each crate what it stands on directly; it may use that and all below it. Dependencies of tests
//! and build scripts are held to the same order, so that a test cannot pull a layer above into one below.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Violation;
use crate::Outcome;

/// Each crate with the crates that it stands on directly.
pub const LAYERS: &[(&str, &[&str])] = &[
    ("gguf", &[]),
    ("model", &["gguf"]),
    ("cpu", &["model"]),
    ("cuda", &["model"]),
    ("wgpu", &["model"]),
    ("testing", &["model"]),
    ("text", &["gguf", "model"]),
    ("engine", &["model"]),
    ("transfer", &["engine"]),
    ("server", &["engine", "text", "transfer"]),
    ("muser", &["cpu", "cuda", "wgpu", "server"]),
    ("xtask", &[]),
];

/// What only tests may use.
const FOR_TESTS: &str = "testing";

/// The lowest crate whose tests may use [`FOR_TESTS`].
const LOWEST_TESTED: &str = "model";

/// A dependency of one crate of the workspace on another.
#[derive(Debug, PartialEq, Eq)]
pub struct Edge {
    pub from: String,
    pub to: String,
    /// Empty, `dev` or `build`.
    pub kind: String,
}

impl Edge {
    /// The manifest of the crate that depends, relative to the root.
    pub fn manifest(&self) -> String {
        format!("crates/{}/Cargo.toml", self.from)
    }
}

/// The dependencies inside the workspace, from the output of `cargo metadata --no-deps`.
///
/// # Errors
/// The text is not that output.
pub fn edges(metadata: &[u8]) -> Outcome<Vec<Edge>> {
    let metadata: Value = serde_json::from_slice(metadata)?;
    let packages = metadata["packages"]
        .as_array()
        .ok_or("cargo metadata: no list `packages`")?;
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let members: BTreeSet<String> = packages.iter().map(name).collect();
    let mut edges = Vec::new();
    for package in packages {
        let dependencies = package["dependencies"]
            .as_array()
            .ok_or("cargo metadata: no list `dependencies`")?;
        // A dependency with a path is one of ours; the registry has crates of the same names.
        let ours = |value: &&Value| value["path"].is_string() && members.contains(&name(value));
        edges.extend(dependencies.iter().filter(ours).map(|dependency| Edge {
            from: name(package),
            to: name(dependency),
            kind: dependency["kind"].as_str().unwrap_or_default().to_owned(),
        }));
    }
    Ok(edges)
}

/// Checks one dependency; `manifest` is the text in which its line is looked up.
pub fn check(edge: &Edge, manifest: &str) -> Option<Violation> {
    let below = below(&edge.from);
    let is_below = |name: &str| below.as_ref().is_some_and(|below| below.contains(name));
    let is_for_tests = edge.to == FOR_TESTS && edge.kind == "dev";
    if is_below(&edge.to) || is_for_tests && (edge.from == LOWEST_TESTED || is_below(LOWEST_TESTED))
    {
        return None;
    }
    let names = |line: &str| line.split(['.', '=', ' ']).next() == Some(edge.to.as_str());
    let line = manifest.lines().position(names).map_or(0, |at| at + 1);
    let kind = if edge.kind.is_empty() {
        String::new()
    } else {
        format!(" ({})", edge.kind)
    };
    let item = format!("{} -> {}{kind}", edge.from, edge.to);
    let limit = match below {
        None => "each crate stands in the table of tidy/dependencies.rs".to_owned(),
        Some(below) if below.is_empty() => {
            format!("{} may use no crate of the workspace", edge.from)
        }
        Some(below) => {
            format!(
                "{} may use {}",
                edge.from,
                below.into_iter().collect::<Vec<_>>().join(", ")
            )
        }
    };
    Some(Violation {
        path: edge.manifest(),
        line,
        rule: "dependency",
        found: item.clone(),
        item,
        limit,
    })
}

/// All crates below `name`; nothing if the table does not have it.
fn below(name: &str) -> Option<BTreeSet<&'static str>> {
    let (_, direct) = LAYERS.iter().find(|(layer, _)| *layer == name)?;
    let mut all = BTreeSet::new();
    for &layer in *direct {
        all.insert(layer);
        all.extend(below(layer)?);
    }
    Some(all)
}
