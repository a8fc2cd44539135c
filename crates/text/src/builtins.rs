//! What a chat template may call: functions, filters, tests, methods.
//!
//! The lists are those of published templates, not all that the engine has.
//! What a reader would get wrong: a filter that makes more text than it is
//! given has to pay before it makes it, not after. `replace`, `join`, `indent`
//! and their like are therefore not the engine's own.

use crate::meter::{Meter, Namespace, Stop, refused};
use crate::tojson::tojson;
use minijinja::value::{Kwargs, Rest, StringInput, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter};
use minijinja::{filters, functions, tests};
use minijinja_contrib::pycompat;
use std::sync::Arc;

// Names of functions that only rewritten instructions call: no template can
// spell them.
pub(crate) const APPLY: &str = "(apply)";
pub(crate) const APPLY_OFTEN: &str = "(apply often)";
pub(crate) const KEEP: &str = "(keep)";
pub(crate) const KEEP_TEXTS: &str = "(keep texts)";
pub(crate) const READ: &str = "(read)";
pub(crate) const READ_ALL: &str = "(read all)";
pub(crate) const READ_KEY: &str = "(read key)";
pub(crate) const REPEAT: &str = "(repeat)";
pub(crate) const SET: &str = "(set)";
pub(crate) const SLICE: &str = "(slice)";
/// A filter that gives what it is given.
pub(crate) const NO_CONSTANT: &str = "|no_constant ";

/// Frames of loops and blocks inside one another; a macro's call counts four.
const MOST_FRAMES: usize = 64;
/// Most characters of a set that is stripped from a text.
const MOST_STRIPPED: usize = 256;
/// How often a sort looks at an item, the logarithm of the longest list; and how much
/// longer than reading a text the filters take that `map` may call.
const OFTEN: u64 = 20;

/// An environment that pays into `meter`.
pub(crate) fn environment<'s>(meter: &Arc<Meter>) -> Environment<'s> {
    let mut environment = Environment::empty();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_debug(false);
    environment.set_recursion_limit(MOST_FRAMES);
    add_operations(&mut environment, meter);
    add_functions(&mut environment, meter);
    add_filters(&mut environment);
    add_growing_filters(&mut environment, meter);
    add_tests(&mut environment);
    let payer = Arc::clone(meter);
    environment.set_unknown_method_callback(move |state, value, name, arguments| {
        method(&payer, state, value, name, arguments)
    });
    let payer = Arc::clone(meter);
    environment.set_formatter(move |out, state, value| {
        payer.write(value)?;
        escape_formatter(out, state, value)
    });
    environment
}

/// The functions of rewritten instructions.
fn add_operations(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    let payer = Arc::clone(meter);
    environment.add_function(KEEP, move |value: Value| payer.keep(value));
    let payer = Arc::clone(meter);
    environment.add_function(KEEP_TEXTS, move |value: Value| payer.keep_texts(value));
    let payer = Arc::clone(meter);
    environment.add_function(
        SET,
        move |value: Value, target: Value, name: &str| match target.downcast_object_ref() {
            Some(namespace) => Namespace::set(namespace, &payer, name, value),
            None => Err(refused(format!(
                "can only assign to namespaces, not {}",
                target.kind()
            ))),
        },
    );
    type Pay = fn(&Meter, &[Value]) -> Result<(), Error>;
    let operations: [(&str, Pay); 7] = [
        (APPLY, |meter, operands| meter.apply(operands, 1)),
        (APPLY_OFTEN, |meter, operands| meter.apply(operands, OFTEN)),
        (READ, Meter::read),
        (READ_ALL, Meter::read_all),
        (READ_KEY, |meter, operands| {
            meter.read(&operands[..1])?;
            meter.read_all(&operands[1..])
        }),
        (SLICE, |meter, operands| {
            // The engine negates a step.
            match operands.last().and_then(Value::as_i64) {
                Some(i64::MIN) => Err(refused("slice: the step is out of range")),
                _ => meter.read(&operands[..1]),
            }
        }),
        (REPEAT, |meter, operands| match operands {
            [a, b] => meter.repeat(a, b),
            _ => Ok(()),
        }),
    ];
    for (name, pay) in operations {
        let payer = Arc::clone(meter);
        environment.add_function(name, move |operands: Vec<Value>| {
            pay(&payer, &operands)?;
            // The engine unpacks a list from its end.
            Ok::<Value, Error>(operands.into_iter().rev().collect())
        });
    }
}

fn add_functions(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    environment.add_function("range", functions::range);
    environment.add_function("dict", functions::dict);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> { Err(Stop::Raised(message).into()) },
    );
    let payer = Arc::clone(meter);
    environment.add_function("namespace", move |defaults: Option<Value>, more: Kwargs| {
        Namespace::new(&payer, defaults.as_ref(), &more).map(Value::from_object)
    });
}

/// Filters that make at most a few times what they are given.
fn add_filters(environment: &mut Environment<'_>) {
    environment.add_filter(NO_CONSTANT.trim_matches(['|', ' ']), |value: Value| value);
    environment.add_filter("abs", filters::abs);
    environment.add_filter("attr", filters::attr);
    environment.add_filter("bool", filters::bool);
    environment.add_filter("capitalize", filters::capitalize);
    environment.add_filter("count", filters::length);
    environment.add_filter("d", filters::default);
    environment.add_filter("default", filters::default);
    environment.add_filter("dictsort", filters::dictsort);
    environment.add_filter("e", filters::escape);
    environment.add_filter("escape", filters::escape);
    environment.add_filter("first", filters::first);
    environment.add_filter("float", filters::float);
    environment.add_filter("int", filters::int);
    environment.add_filter("items", filters::items);
    environment.add_filter("last", filters::last);
    environment.add_filter("length", filters::length);
    environment.add_filter("lower", filters::lower);
    environment.add_filter("map", filters::map);
    environment.add_filter("max", filters::max);
    environment.add_filter("min", filters::min);
    environment.add_filter("reject", filters::reject);
    environment.add_filter("rejectattr", filters::rejectattr);
    environment.add_filter("reverse", filters::reverse);
    environment.add_filter("round", filters::round);
    environment.add_filter("safe", filters::safe);
    environment.add_filter("select", filters::select);
    environment.add_filter("selectattr", filters::selectattr);
    environment.add_filter("sort", filters::sort);
    environment.add_filter("string", filters::string);
    environment.add_filter("title", filters::title);
    environment.add_filter("unique", filters::unique);
    environment.add_filter("upper", filters::upper);
}

/// Filters that could make any amount: they pay first.
fn add_growing_filters(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    let payer = Arc::clone(meter);
    environment.add_filter("tojson", move |value: &Value, indent, options: Kwargs| {
        tojson(&payer, value, indent, options)
    });
    let payer = Arc::clone(meter);
    environment.add_filter("replace", move |text: String, from: String, to: String| {
        pay_replacement(&payer, &text, &from, &to)?;
        Ok::<String, Error>(text.replace(&from, &to))
    });
    let payer = Arc::clone(meter);
    environment.add_filter("join", move |list: &Value, separator: Option<String>| {
        join(&payer, list, &separator.unwrap_or_default())
    });
    let payer = Arc::clone(meter);
    environment.add_filter(
        "indent",
        move |text: StringInput<'_>,
              width: Option<usize>,
              first: Option<bool>,
              blank: Option<bool>,
              options: Kwargs| {
            let named: Option<usize> = options.get("width")?;
            let n_blanks = width.or(named).unwrap_or(4) as u64;
            let n_lines = text.as_str().matches('\n').count() as u64 + 1;
            let bytes = n_lines.saturating_mul(n_blanks);
            payer.pay_text(bytes.saturating_add(text.as_str().len() as u64))?;
            filters::indent(text, width, first, blank, options)
        },
    );
    let payer = Arc::clone(meter);
    environment.add_filter("list", move |state: &State, value: Value| {
        if let Some(text) = value.as_str() {
            payer.pay_items(text.len())?;
        }
        filters::list(state, value)
    });
    let payer = Arc::clone(meter);
    environment.add_filter("split", move |text: &Value, more: Rest<Value>| {
        split(&payer, text, &more)
    });
    let payer = Arc::clone(meter);
    environment.add_filter("trim", move |text: String, set: Option<String>| {
        payer.pay_text(text.len() as u64)?;
        let trimmed = match &set {
            Some(set) => {
                let set = stripped_set(set)?;
                text.trim_matches(&set[..])
            }
            None => text.trim(),
        };
        Ok::<String, Error>(trimmed.to_owned())
    });
}

fn add_tests(environment: &mut Environment<'_>) {
    environment.add_test("boolean", tests::is_boolean);
    environment.add_test("defined", tests::is_defined);
    environment.add_test("divisibleby", tests::is_divisibleby);
    environment.add_test("endingwith", tests::is_endingwith);
    environment.add_test("even", tests::is_even);
    environment.add_test("false", tests::is_false);
    environment.add_test("float", tests::is_float);
    environment.add_test("in", tests::is_in);
    environment.add_test("integer", tests::is_integer);
    environment.add_test("iterable", tests::is_iterable);
    environment.add_test("lower", tests::is_lower);
    environment.add_test("mapping", tests::is_mapping);
    environment.add_test("none", tests::is_none);
    environment.add_test("number", tests::is_number);
    environment.add_test("odd", tests::is_odd);
    environment.add_test("sameas", tests::is_sameas);
    environment.add_test("sequence", tests::is_sequence);
    environment.add_test("startingwith", tests::is_startingwith);
    environment.add_test("string", tests::is_string);
    environment.add_test("true", tests::is_true);
    environment.add_test("undefined", tests::is_undefined);
    environment.add_test("upper", tests::is_upper);
    for name in ["==", "eq", "equalto"] {
        environment.add_test(name, tests::is_eq);
    }
    for name in ["!=", "ne"] {
        environment.add_test(name, tests::is_ne);
    }
    for name in ["<", "lt", "lessthan"] {
        environment.add_test(name, tests::is_lt);
    }
    for name in ["<=", "le"] {
        environment.add_test(name, tests::is_le);
    }
    for name in [">", "gt", "greaterthan"] {
        environment.add_test(name, tests::is_gt);
    }
    for name in [">=", "ge"] {
        environment.add_test(name, tests::is_ge);
    }
}

/// Python's methods of strings, dicts and lists.
fn method(
    meter: &Meter,
    state: &State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let text_of = |index: usize| arguments.get(index).and_then(Value::as_str);
    if let Some(text) = value.as_str() {
        match name {
            // A format string makes text of any width.
            "format" => return Err(Error::from(ErrorKind::UnknownMethod)),
            "join" if let [list] = arguments => return join(meter, list, text).map(Value::from),
            "replace" if let (Some(from), Some(to)) = (text_of(0), text_of(1)) => {
                pay_replacement(meter, text, from, to)?;
            }
            "split" => return split(meter, value, arguments),
            "splitlines" => {
                meter.pay_text(text.len() as u64)?;
                meter.pay_items(text.lines().count())?;
            }
            "strip" | "lstrip" | "rstrip" if let Some(set) = text_of(0) => {
                stripped_set(set)?;
            }
            "count" if text_of(0) == Some("") => {
                return Err(refused("count: found an empty string to count"));
            }
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, name, arguments)
}

fn pay_replacement(meter: &Meter, text: &str, from: &str, to: &str) -> Result<(), Error> {
    let n_found = text.matches(from).count() as u64;
    meter.pay_text((text.len() as u64).saturating_add(n_found.saturating_mul(to.len() as u64)))
}

fn join(meter: &Meter, list: &Value, separator: &str) -> Result<String, Error> {
    let mut out = String::new();
    for (index, item) in list.try_iter()?.enumerate() {
        meter.write(&item)?;
        if index > 0 {
            meter.pay_text(separator.len() as u64)?;
            out.push_str(separator);
        }
        match item.as_str() {
            Some(text) => out.push_str(text),
            None => out.push_str(&item.to_string()),
        }
    }
    Ok(out)
}

fn split(meter: &Meter, text: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, most): (Option<Arc<str>>, Option<i64>) =
        minijinja::value::from_args(arguments)?;
    if text.kind() != ValueKind::String {
        return Err(refused(format!("cannot split {}", text.kind())));
    }
    let whole = text.as_str().unwrap_or_default();
    meter.pay_text(whole.len() as u64)?;
    meter.pay_items(match separator.as_deref() {
        Some(separator) => whole.split(separator).count(),
        None => whole.split_whitespace().count(),
    })?;
    filters::split(text, separator, most)
}

/// The characters of a set; each character of a text is looked for in it.
fn stripped_set(set: &str) -> Result<Vec<char>, Error> {
    let characters: Vec<char> = set.chars().take(MOST_STRIPPED + 1).collect();
    match characters.len() <= MOST_STRIPPED {
        true => Ok(characters),
        false => Err(refused(format!(
            "strip: found a set of more than {MOST_STRIPPED} characters"
        ))),
    }
}
