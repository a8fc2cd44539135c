//! Logits against a golden file.
//!
//! Two forms: an npz archive with `tokens_NAME` (`[T]`, integers) and
//! `logits_NAME` (`[T, n_vocab]`) or `logits_NAME_lastN` (the last N rows); or
//! a JSON file whose `prompts` hold `prompt_ids`, `greedy_ids` and, for each
//! greedy token, the `top5` pairs of id and log-probability there. With
//! `answer_ids` instead of `greedy_ids` the answer is any text, and the
//! likeliest of `top5` is the greedy token.
//!
//! What one would get wrong: golden tokens are fed, never the model's own
//! choice, so that a flip between two near equals does not change what
//! comes after it. Such a flip is no failure either; any other greedy token than
//! the golden one is.

use super::measure::{Distance, argmax, log_probability};
use super::{Args, Bounds, Session};
use crate::input::read_text_file;
use crate::model_file::Kv;
use crate::terminal::{self, count, print_line};
use anyhow::{Context, anyhow, bail, ensure};
use gguf::shown;
use npyz::npz::NpzArchive;
use npyz::{NpyFile, Order};
use serde::Deserialize;
use serde_json::json;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::process::ExitCode;

/// Two golden log-probabilities as close as this may change places.
const NEAR: f64 = 0.05;

/// What was found for one sequence.
struct Check {
    name: String,
    n_rows: usize,
    n_same_top: usize,
    /// Rows with another greedy token that golden values do not excuse; of
    /// log-probabilities only.
    n_wrong_top: usize,
    max_abs: f64,
    mean_abs: f64,
    /// Of logits only.
    relative_rms: Option<f64>,
}

/// What passes.
struct Limits {
    max_abs: f64,
    /// Of logits only.
    relative_rms: Option<f64>,
}

impl Limits {
    /// In words, what of `check` is outside.
    fn outside(&self, check: &Check) -> Vec<String> {
        let mut outside = Vec::new();
        if check.max_abs > self.max_abs {
            outside.push(format!("max abs above {:e}", self.max_abs));
        }
        let rms = check.relative_rms.zip(self.relative_rms);
        if let Some((_, limit)) = rms.filter(|(found, limit)| found > limit) {
            outside.push(format!("relative RMS above {limit:e}"));
        }
        if check.n_wrong_top > 0 {
            outside.push(count(check.n_wrong_top, "other greedy token"));
        }
        outside
    }

    /// The last line: what all `checks` keep, or what some of them do not.
    fn verdict(&self, checks: &[Check]) -> String {
        let failed = || checks.iter().filter(|c| !self.outside(c).is_empty());
        let worst = Check {
            name: String::new(),
            n_rows: 0,
            n_same_top: 0,
            n_wrong_top: checks.iter().map(|c| c.n_wrong_top).sum(),
            max_abs: checks.iter().map(|c| c.max_abs).fold(0.0, f64::max),
            mean_abs: 0.0,
            relative_rms: checks
                .iter()
                .filter_map(|c| c.relative_rms)
                .reduce(f64::max),
        };
        let max_abs = self.max_abs;
        match (failed().count(), self.relative_rms) {
            (0, None) => format!(
                "PASSED: within max abs {max_abs:e}, and no greedy token differs beyond ties"
            ),
            (0, Some(rms)) if max_abs.is_infinite() => {
                format!("PASSED: within relative RMS {rms:e}")
            }
            (0, Some(rms)) => format!("PASSED: within max abs {max_abs:e}, relative RMS {rms:e}"),
            (n, _) => format!(
                "FAILED: {n} of {}: {}",
                checks.len(),
                self.outside(&worst).join(", ")
            ),
        }
    }
}

/// The comparison with a golden file.
struct Checks {
    all: Vec<Check>,
    /// What the file holds that nothing was compared with, and why.
    skipped: Vec<String>,
}

/// Compares with the golden file at `path`.
pub fn run(args: &Args, path: &Path) -> anyhow::Result<ExitCode> {
    let file = args.model.open()?;
    let mut session = args.session(&file, args.device(), args.kv.unwrap_or(Kv::F32))?;
    let is_json = path.extension().is_some_and(|e| e == "json");
    let bounds = Bounds::of(args.device());
    let (default_max_abs, quantity) = match is_json {
        true => (bounds.logprobs, "log-probabilities"),
        false => (bounds.logits, "logits"),
    };
    let max_abs = args.max_abs.unwrap_or(default_max_abs);
    let max_rms = args.max_rms.unwrap_or(bounds.relative_rms);
    let limits = Limits {
        max_abs,
        relative_rms: (!is_json).then_some(max_rms),
    };
    let Checks {
        all: checks,
        skipped,
    } = match is_json {
        // What differs by the limit on both sides may change places, too.
        true => json_checks(&mut session, path, NEAR.max(2.0 * max_abs))?,
        false => npz_checks(&mut session, path)?,
    };
    let passed = checks.iter().all(|c| limits.outside(c).is_empty());
    if args.json {
        let list: Vec<_> = checks
            .iter()
            .map(|check| {
                json!({
                    "name": check.name,
                    "rows": check.n_rows,
                    "max_abs": check.max_abs,
                    "mean_abs": check.mean_abs,
                    "relative_rms": check.relative_rms,
                    "same_top_rows": check.n_same_top,
                    "wrong_top_rows": is_json.then_some(check.n_wrong_top),
                    "passed": limits.outside(check).is_empty(),
                })
            })
            .collect();
        let report = json!({
            "model": file.name,
            "golden": path.display().to_string(),
            "candidate": session.describe(),
            "quantity": quantity,
            "limits": {
                "max_abs": max_abs,
                "relative_rms": limits.relative_rms,
            },
            "checks": list,
            "skipped": skipped,
            "passed": passed,
        });
        print_line(format_args!("{report:#}"))?;
    } else {
        print_line(format_args!("model      {}", file.name))?;
        print_line(format_args!("candidate  {}", session.describe()))?;
        print_line(format_args!("golden     {}, {quantity}\n", path.display()))?;
        print_table(&checks, &limits)?;
        for what in &skipped {
            print_line(format_args!("skipped: {what}"))?;
        }
        print_line(format_args!("\n{}", limits.verdict(&checks)))?;
    }
    Ok(ExitCode::from(u8::from(!passed)))
}

fn print_table(checks: &[Check], limits: &Limits) -> io::Result<()> {
    let width = checks
        .iter()
        .map(|c| c.name.chars().count())
        .max()
        .unwrap_or(0);
    let width = width.max("sequence".len());
    print_line(format_args!(
        "{:width$}  {:>5}  {:>8}  {:>8}  {:>8}  {:>11}",
        "sequence", "rows", "max abs", "mean abs", "rel. RMS", "same top-1"
    ))?;
    for check in checks {
        let rms = check
            .relative_rms
            .map_or("-".to_string(), |rms| format!("{rms:.2e}"));
        let outside = limits.outside(check);
        let verdict = match outside.is_empty() {
            true => "ok".to_string(),
            false => format!("FAILED: {}", outside.join(", ")),
        };
        print_line(format_args!(
            "{:width$}  {:>5}  {:>8}  {:>8}  {rms:>8}  {:>11}  {verdict}",
            check.name,
            check.n_rows,
            format!("{:.2e}", check.max_abs),
            format!("{:.2e}", check.mean_abs),
            format!("{}/{}", check.n_same_top, check.n_rows),
        ))?;
    }
    Ok(())
}

/// A golden sequence of an npz archive.
struct Sequence {
    name: String,
    /// Key of its logits.
    logits: String,
    tokens: Vec<u32>,
    /// Trailing rows that have golden logits; all if `None`.
    n_last: Option<usize>,
}

fn npz_checks(session: &mut Session, path: &Path) -> anyhow::Result<Checks> {
    let (n_vocab, n_ctx) = (session.config().n_vocab, session.n_ctx());
    let mut npz = Npz::open(path)?;
    let (sequences, skipped) = npz.sequences(n_vocab, n_ctx)?;
    let n_tokens = sequences.iter().map(|s| s.tokens.len() as u64).sum();
    let bar = terminal::progress(n_tokens, "comparing");
    let mut checks = Vec::new();
    for sequence in &sequences {
        let n_rows = sequence.n_last.unwrap_or(sequence.tokens.len());
        let golden = npz.floats(&sequence.logits, [n_rows, n_vocab])?;
        let mut distance = Distance::default();
        let first = sequence.tokens.len() - n_rows;
        session.rows(&sequence.tokens, first, &bar, |position, logits| {
            let row = position - first;
            distance.add(logits, &golden[row * n_vocab..][..n_vocab]);
        })?;
        checks.push(Check {
            name: shown(&sequence.name),
            n_rows: distance.n_rows(),
            n_same_top: distance.n_same_top(),
            n_wrong_top: 0,
            max_abs: distance.max_abs(),
            mean_abs: distance.mean_abs(),
            relative_rms: Some(distance.relative_rms()),
        });
    }
    bar.finish_and_clear();
    Ok(Checks {
        all: checks,
        skipped,
    })
}

/// An npz archive, read array by array.
struct Npz {
    name: String,
    archive: NpzArchive<BufReader<File>>,
}

impl Npz {
    fn open(path: &Path) -> anyhow::Result<Npz> {
        let name = format!("golden file {}", path.display());
        // A FIFO would wait for a writer for good.
        let metadata = std::fs::metadata(path).with_context(|| name.clone())?;
        ensure!(
            metadata.is_file(),
            "{name}: found no regular file, expected an npz archive"
        );
        let archive = NpzArchive::open(path)
            .with_context(|| format!("{name}: cannot be read as an npz archive"))?;
        Ok(Npz { name, archive })
    }

    /// All sequences with golden logits, shortest first; and in words the arrays
    /// of tokens or logits that are part of none.
    fn sequences(
        &mut self,
        n_vocab: usize,
        n_ctx: usize,
    ) -> anyhow::Result<(Vec<Sequence>, Vec<String>)> {
        let mut names: Vec<String> = self.archive.array_names().map(str::to_string).collect();
        // The archive's own order is that of a hash table.
        names.sort();
        let mut sequences: Vec<Sequence> = Vec::new();
        let mut skipped = Vec::new();
        for name in names.iter().filter_map(|key| key.strip_prefix("tokens_")) {
            let Some((logits, n_last)) = names.iter().find_map(|key| rows_of(key, name)) else {
                skipped.push(format!("tokens_{}, which has no logits", shown(name)));
                continue;
            };
            let tokens = self.tokens(&format!("tokens_{name}"), n_vocab, n_ctx)?;
            ensure!(
                n_last.is_none_or(|n| n > 0 && n <= tokens.len()),
                "{}: found the array {}, but tokens_{} has {}",
                self.name,
                shown(logits),
                shown(name),
                count(tokens.len(), "token")
            );
            sequences.push(Sequence {
                name: logits["logits_".len()..].to_string(),
                logits: logits.to_string(),
                tokens,
                n_last,
            });
        }
        if sequences.is_empty() {
            bail!(
                "{}: found {}, expected tokens_NAME with logits_NAME or logits_NAME_lastN",
                self.name,
                match names.as_slice() {
                    [] => "no arrays".to_string(),
                    names => format!("the arrays {}", shown(&names.join(", "))),
                }
            );
        }
        let is_used = |key: &str| sequences.iter().any(|s| s.logits == key);
        let unused = names
            .iter()
            .filter(|key| key.starts_with("logits_") && !is_used(key));
        skipped.extend(unused.map(|key| format!("{}, which has no tokens of its own", shown(key))));
        sequences.sort_by_key(|s| s.tokens.len());
        Ok((sequences, skipped))
    }

    fn tokens(&mut self, key: &str, n_vocab: usize, n_ctx: usize) -> anyhow::Result<Vec<u32>> {
        let name = self.name.clone();
        let array = self.array(key)?;
        let key = shown(key);
        let shape = array.shape().to_vec();
        ensure!(
            shape.len() == 1 && shape[0] >= 1 && shape[0] <= n_ctx as u64,
            "{name}: array {key}: found shape {shape:?}, expected 1 to {n_ctx} tokens"
        );
        let tokens: Vec<i64> = match read_as::<i32, _>(array) {
            Ok(values) => values?.into_iter().map(i64::from).collect(),
            Err(array) => match read_as::<i64, _>(array) {
                Ok(values) => values?,
                Err(array) => bail!(
                    "{name}: array {key}: found type {}, expected '<i4' or '<i8'",
                    array.dtype().descr()
                ),
            },
        };
        let check = |(index, token): (usize, i64)| match u32::try_from(token) {
            Ok(id) if (id as usize) < n_vocab => Ok(id),
            _ => bail!(
                "{name}: array {key}: found token {token} at {index}, expected ids below {n_vocab}"
            ),
        };
        tokens.into_iter().enumerate().map(check).collect()
    }

    fn floats(&mut self, key: &str, expected: [usize; 2]) -> anyhow::Result<Vec<f32>> {
        let name = self.name.clone();
        let array = self.array(key)?;
        let key = shown(key);
        let shape = array.shape().to_vec();
        ensure!(
            shape == expected.map(|n| n as u64),
            "{name}: array {key}: found shape {shape:?}, expected {expected:?} (rows, vocabulary \
             of the model)"
        );
        ensure!(
            array.order() == Order::C,
            "{name}: array {key}: found Fortran order, expected C order"
        );
        let values: Vec<f32> = match read_as::<f32, _>(array) {
            Ok(values) => values?,
            Err(array) => match read_as::<f64, _>(array) {
                Ok(values) => values?.into_iter().map(|v| v as f32).collect(),
                Err(array) => bail!(
                    "{name}: array {key}: found type {}, expected '<f4' or '<f8'",
                    array.dtype().descr()
                ),
            },
        };
        let wrong = values.iter().position(|v| !v.is_finite());
        if let Some(at) = wrong {
            bail!(
                "{name}: array {key}: found {} at {at}, expected finite numbers",
                values[at]
            );
        }
        Ok(values)
    }

    fn array(&mut self, key: &str) -> anyhow::Result<NpyFile<impl Read>> {
        let array = self.archive.by_name(key);
        let what = || format!("{}: array {}", self.name, shown(key));
        // The reader's message quotes the header, which may be long.
        let array = array.map_err(|error| anyhow!("{}", shown(&error.to_string())));
        let array = array.with_context(what)?;
        array.with_context(|| format!("{} is missing", what()))
    }
}

/// The values as `T`, or the array again if they are of another type.
fn read_as<T: npyz::Deserialize, R: Read>(
    array: NpyFile<R>,
) -> Result<io::Result<Vec<T>>, NpyFile<R>> {
    Ok(array.try_data::<T>()?.collect())
}

/// Is `key` the golden logits of sequence `name`, and of how many last rows?
fn rows_of<'k>(key: &'k str, name: &str) -> Option<(&'k str, Option<usize>)> {
    let rest = key.strip_prefix("logits_")?.strip_prefix(name)?;
    match rest {
        "" => Some((key, None)),
        rest => Some((key, Some(rest.strip_prefix("_last")?.parse().ok()?))),
    }
}

/// A golden file of continuations.
#[derive(Deserialize)]
struct Continuations {
    #[serde(alias = "cases")]
    prompts: Vec<Continuation>,
}

#[derive(Deserialize)]
struct Continuation {
    name: Option<String>,
    prompt_ids: Vec<u32>,
    /// The likeliest tokens, each behind those before it.
    #[serde(alias = "greedy")]
    greedy_ids: Option<Vec<u32>>,
    /// Tokens of an answer that is not greedy.
    answer_ids: Option<Vec<u32>>,
    /// For each of these tokens the likeliest (id, log-probability) in its place.
    #[serde(alias = "top5_logprobs")]
    top5: Vec<Vec<(u32, f64)>>,
}

/// Two log-probabilities of golden tokens that are at most `near` apart may
/// change places.
fn json_checks(session: &mut Session, path: &Path, near: f64) -> anyhow::Result<Checks> {
    let what = || format!("golden file {}", path.display());
    let text = read_text_file(path, "the golden file")?;
    let golden: Continuations = serde_json::from_str(&text).with_context(what)?;
    let n_vocab = session.config().n_vocab;
    ensure!(!golden.prompts.is_empty(), "{}: found no prompts", what());
    let n_ctx = session.n_ctx();
    for (index, prompt) in golden.prompts.iter().enumerate() {
        prompt
            .check(n_vocab, n_ctx)
            .with_context(|| format!("{}: prompt {index}", what()))?;
    }
    let n_tokens = golden.prompts.iter().map(|p| p.tokens().len() as u64).sum();
    let bar = terminal::progress(n_tokens, "comparing");
    let mut checks = Vec::new();
    for (index, prompt) in golden.prompts.iter().enumerate() {
        let first = prompt.prompt_ids.len() - 1;
        let mut check = Check {
            name: match &prompt.name {
                Some(name) => shown(name),
                None => format!("prompt {index}"),
            },
            n_rows: 0,
            n_same_top: 0,
            n_wrong_top: 0,
            max_abs: 0.0,
            mean_abs: 0.0,
            relative_rms: None,
        };
        let (mut sum_abs, mut n_values) = (0.0, 0);
        session.rows(&prompt.tokens(), first, &bar, |position, logits| {
            let step = position - first;
            for &(token, right) in &prompt.top5[step] {
                let difference = (log_probability(logits, token) - right).abs();
                check.max_abs = check.max_abs.max(difference);
                sum_abs += difference;
                n_values += 1;
            }
            check.n_rows += 1;
            let (found, right) = (argmax(logits) as u32, prompt.greedy(step));
            match found == right {
                true => check.n_same_top += 1,
                false => check.n_wrong_top += usize::from(!prompt.is_near(step, found, near)),
            }
        })?;
        check.mean_abs = sum_abs / f64::from(n_values.max(1));
        checks.push(check);
    }
    bar.finish_and_clear();
    Ok(Checks {
        all: checks,
        skipped: Vec::new(),
    })
}

impl Continuation {
    /// The tokens behind the prompt, and the name of their list.
    fn answer(&self) -> (&[u32], &'static str) {
        match (&self.greedy_ids, &self.answer_ids) {
            (Some(ids), _) => (ids, "greedy_ids"),
            (None, Some(ids)) => (ids, "answer_ids"),
            (None, None) => (&[], "greedy_ids"),
        }
    }

    /// What is fed: all tokens but the last, whose logits nobody compares.
    fn tokens(&self) -> Vec<u32> {
        let (answer, _) = self.answer();
        [&self.prompt_ids, &answer[..answer.len() - 1]].concat()
    }

    /// The golden greedy token of a step.
    fn greedy(&self, step: usize) -> u32 {
        match &self.greedy_ids {
            Some(ids) => ids[step],
            None => {
                let top = self.top5[step].iter().max_by(|a, b| a.1.total_cmp(&b.1));
                top.expect("checked not to be empty").0
            }
        }
    }

    /// Do golden values call `token` as likely as the greedy one, but for `near`?
    fn is_near(&self, step: usize, token: u32, near: f64) -> bool {
        let top = &self.top5[step];
        let golden = |id: u32| top.iter().find(|pair| pair.0 == id).map(|pair| pair.1);
        match (golden(token), golden(self.greedy(step))) {
            (Some(found), Some(right)) => (found - right).abs() <= near,
            _ => false,
        }
    }

    fn check(&self, n_vocab: usize, n_ctx: usize) -> anyhow::Result<()> {
        let (answer, list) = self.answer();
        ensure!(!self.prompt_ids.is_empty(), "prompt_ids is empty");
        ensure!(
            self.greedy_ids.is_none() || self.answer_ids.is_none(),
            "found greedy_ids and answer_ids, expected one of them"
        );
        ensure!(!answer.is_empty(), "{list} is missing or empty");
        ensure!(
            self.top5.len() == answer.len(),
            "found {} entries of top5, expected one for each of {} {list}",
            self.top5.len(),
            answer.len()
        );
        if let Some(step) = self.top5.iter().position(Vec::is_empty) {
            bail!("entry {step} of top5 is empty");
        }
        if let Some((id, value)) = self.top5.iter().flatten().find(|p| !p.1.is_finite()) {
            bail!("top5: found {value} for token {id}, expected a finite number");
        }
        let n_tokens = self.prompt_ids.len() + answer.len() - 1;
        ensure!(
            n_tokens <= n_ctx,
            "found {n_tokens} tokens to compute, expected at most the context of {n_ctx}"
        );
        let pairs = self.top5.iter().flatten();
        let ids = self.prompt_ids.iter().chain(answer).copied();
        if let Some(id) = ids
            .chain(pairs.map(|p| p.0))
            .find(|&id| id as usize >= n_vocab)
        {
            bail!("token {id} is not in the vocabulary of {n_vocab}");
        }
        Ok(())
    }
}
