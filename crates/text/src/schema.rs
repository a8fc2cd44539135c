//! Two questions to the JSON schema of a tool's parameters: may this argument be
//! a string, and which arguments are there?
//!
//! A schema is a list of conditions that all have to hold; what it does not
//! mention it allows. What a reader would get wrong: so a property without a
//! type allows strings, and `allOf` allows one only if all its parts do. An
//! argument that no part of the schema describes is another thing: the
//! schema does not forbid it, but says nothing about it either.
//!
//! Source: JSON Schema, draft 2020-12, "Core" section 8.2.3 (`$ref`), 10.2 and
//! 10.3 (applicators), "Validation" section 6.1 (`type`, `enum`, `const`).

use regex::Regex;
use serde_json::{Map, Value};
use std::cell::Cell;

/// Most schemas that one question looks into: references may go in circles.
const MOST_SCHEMAS: usize = 512;

/// Does the schema of an object allow a string under this key? `None` if it
/// says nothing about the key.
pub(crate) fn argument_allows_string(parameters: &Value, key: &str) -> Option<bool> {
    let question = Question {
        root: parameters,
        n_left: Cell::new(MOST_SCHEMAS),
    };
    let answer = question.argument(parameters, key);
    // What was cut short says nothing.
    answer.filter(|_| question.n_left.get() > 0)
}

/// A key that the schema of an object names.
pub(crate) struct Key<'s> {
    /// The whole schema.
    pub(crate) root: &'s Value,
    /// The key.
    pub(crate) name: &'s str,
    /// Must it be there?
    pub(crate) is_required: bool,
    /// Schemas of its value, which all have to hold.
    schemas: Vec<&'s Value>,
}

/// The keys that a schema names in `properties`, itself or by `$ref` and
/// `allOf`, in order.
pub(crate) fn keys(parameters: &Value) -> Vec<Key<'_>> {
    let question = Question {
        root: parameters,
        n_left: Cell::new(MOST_SCHEMAS),
    };
    let parts = question.parts(parameters);
    let mut keys: Vec<Key> = Vec::new();
    let properties = parts.iter().filter_map(|part| part.get("properties"));
    for (name, schema) in properties.filter_map(Value::as_object).flatten() {
        match keys.iter_mut().find(|key| key.name == name) {
            Some(key) => key.schemas.push(schema),
            None => keys.push(Key {
                root: parameters,
                name,
                is_required: parts.iter().any(|part| {
                    list(part, "required")
                        .iter()
                        .any(|required| required == name)
                }),
                schemas: vec![schema],
            }),
        }
    }
    keys
}

impl<'s> Key<'s> {
    /// The only strings that its value can be; `None` if others are allowed.
    pub(crate) fn strings(&self) -> Option<Vec<&'s str>> {
        let question = Question {
            root: self.root,
            n_left: Cell::new(MOST_SCHEMAS),
        };
        let parts = self
            .schemas
            .iter()
            .flat_map(|schema| question.parts(schema));
        let choices = parts.filter_map(|part| match (part.get("const"), part.get("enum")) {
            (Some(only), _) => Some(vec![only]),
            (None, Some(Value::Array(choices))) => Some(choices.iter().collect()),
            _ => None,
        });
        let choices = choices.map(|choices| choices.into_iter().filter_map(Value::as_str));
        choices
            .map(Iterator::collect::<Vec<_>>)
            .reduce(|a, b| a.into_iter().filter(|text| b.contains(text)).collect())
    }

    /// The schema of its value on its own, with what it refers to.
    pub(crate) fn with_definitions(&self) -> Value {
        let schema = match self.schemas.as_slice() {
            [Value::Object(only)] => only.clone(),
            several => {
                let all = several.iter().map(|&schema| schema.clone()).collect();
                Map::from_iter([("allOf".to_owned(), all)])
            }
        };
        with_definitions(self.root, schema)
    }
}

/// A part of the schema `root` on its own, with what it may refer to.
pub(crate) fn with_definitions(root: &Value, mut part: Map<String, Value>) -> Value {
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(name) {
            part.insert(name.to_owned(), definitions.clone());
        }
    }
    Value::Object(part)
}

/// The schemas directly inside of a schema, with their JSON pointers.
pub(crate) fn inner_schemas<'s>(
    schema: &'s Map<String, Value>,
) -> Vec<(String, &'s Map<String, Value>)> {
    const BY_NAME: [&str; 5] = [
        "properties",
        "patternProperties",
        "dependentSchemas",
        "$defs",
        "definitions",
    ];
    const VALUES: [&str; 5] = ["const", "enum", "default", "examples", "x-guidance"];
    let mut inner = Vec::new();
    let mut add = |pointer: String, value: &'s Value| {
        inner.extend(value.as_object().map(|schema| (pointer, schema)))
    };
    for (key, value) in schema
        .iter()
        .filter(|(key, _)| !VALUES.contains(&key.as_str()))
    {
        let pointer = format!("/{}", key.replace('~', "~0").replace('/', "~1"));
        match value {
            Value::Object(schemas) if BY_NAME.contains(&key.as_str()) => {
                for (name, value) in schemas {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    add(format!("{pointer}/{name}"), value);
                }
            }
            Value::Array(schemas) => {
                let schemas = schemas.iter().enumerate();
                schemas.for_each(|(index, value)| add(format!("{pointer}/{index}"), value));
            }
            value => add(pointer, value),
        }
    }
    inner
}

struct Question<'s> {
    /// The whole schema, to which references refer.
    root: &'s Value,
    n_left: Cell<usize>,
}

impl<'s> Question<'s> {
    /// A schema and all that hold with it: by `$ref` and `allOf`.
    fn parts(&self, schema: &'s Value) -> Vec<&'s Value> {
        if !self.looks_into_another() {
            return Vec::new();
        }
        let inner = self.target(schema).into_iter().chain(list(schema, "allOf"));
        let inner = inner.flat_map(|inner| self.parts(inner));
        std::iter::once(schema).chain(inner).collect()
    }

    /// Counts a schema; false if it is one too many.
    fn looks_into_another(&self) -> bool {
        self.n_left.set(self.n_left.get().saturating_sub(1));
        self.n_left.get() > 0
    }

    fn argument(&self, schema: &Value, key: &str) -> Option<bool> {
        if !self.looks_into_another() {
            return None;
        }
        let inner = |inner: &Value| self.argument(inner, key);
        let mut answers = vec![self.property(schema, key)];
        answers.extend(self.target(schema).map(inner));
        answers.extend(list(schema, "allOf").iter().map(inner));
        for choice in ["anyOf", "oneOf"] {
            let choices = list(schema, choice).iter().filter_map(inner);
            answers.push(choices.reduce(|a, b| a || b));
        }
        answers.into_iter().flatten().reduce(|a, b| a && b)
    }

    /// What `properties` and its like say themselves.
    fn property(&self, schema: &Value, key: &str) -> Option<bool> {
        let named = schema.get("properties").and_then(|all| all.get(key));
        let patterns = schema.get("patternProperties").and_then(Value::as_object);
        let matching = patterns
            .into_iter()
            .flatten()
            .filter_map(|(pattern, inner)| {
                let is_match = Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(key));
                is_match.then_some(inner)
            });
        let allows = |inner: &Value| self.allows_string(inner);
        let described = named.into_iter().chain(matching).map(allows);
        described
            .reduce(|a, b| a && b)
            .or_else(|| schema.get("additionalProperties").map(allows))
    }

    fn allows_string(&self, schema: &Value) -> bool {
        if !self.looks_into_another() {
            return false;
        }
        let conditions = match schema {
            Value::Bool(is_allowed) => return *is_allowed,
            Value::Object(conditions) => conditions,
            _ => return false,
        };
        let inner = |inner: &Value| self.allows_string(inner);
        conditions
            .iter()
            .all(|(name, condition)| match name.as_str() {
                "type" => names_string(condition),
                "const" => condition.is_string(),
                "enum" => list(schema, name).iter().any(Value::is_string),
                "allOf" => list(schema, name).iter().all(inner),
                "anyOf" | "oneOf" => list(schema, name).iter().any(inner),
                "not" => !self.allows_every_string(condition),
                "$ref" => self.target(schema).is_some_and(inner),
                _ => true,
            })
    }

    /// Is no string refused? Then `not` of it refuses all.
    fn allows_every_string(&self, schema: &Value) -> bool {
        if !self.looks_into_another() {
            return false;
        }
        let conditions = match schema {
            Value::Bool(is_allowed) => return *is_allowed,
            Value::Object(conditions) => conditions,
            _ => return false,
        };
        let inner = |inner: &Value| self.allows_every_string(inner);
        conditions
            .iter()
            .all(|(name, condition)| match name.as_str() {
                "type" => names_string(condition),
                "const" | "enum" | "pattern" | "format" | "minLength" | "maxLength" | "oneOf" => {
                    false
                }
                "allOf" => list(schema, name).iter().all(inner),
                "anyOf" => list(schema, name).iter().any(inner),
                "not" => !self.allows_string(condition),
                "$ref" => self.target(schema).is_some_and(inner),
                _ => true,
            })
    }

    /// What `$ref` refers to; references out of the schema are not followed.
    fn target(&self, schema: &Value) -> Option<&'s Value> {
        let reference = schema.get("$ref")?.as_str()?;
        self.root.pointer(reference.strip_prefix('#')?)
    }
}

fn names_string(types: &Value) -> bool {
    match types {
        Value::Array(names) => names.iter().any(|name| name == "string"),
        name => name == "string",
    }
}

fn list<'s>(schema: &'s Value, name: &str) -> &'s [Value] {
    schema
        .get(name)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}
