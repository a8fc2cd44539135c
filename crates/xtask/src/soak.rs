//! Many conversations at once on one server, with clients that go away, and then each answer once more, alone.
//!
//! Requests are greedy and ask for log-probabilities. Rows that crossed, were lost, or were taken from the wrong place
//! of the cache would show as another token or as another bit of a log-probability.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Outcome;
use crate::serving::{Build, Client, Server, Streamed};

/// What to run.
#[derive(clap::Args, Debug)]
pub struct Options {
    /// Seconds of load
    #[arg(long, default_value_t = 180)]
    seconds: u64,
    /// Conversations at a time
    #[arg(long, default_value_t = 64)]
    clients: u64,
    /// Another seed, another load
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Answers that are computed once more, alone
    #[arg(long, default_value_t = 200)]
    repeated: usize,
}

/// Memory that the server may have more at the end than after a third of the time: allocators keep some.
const GROWTH_BYTES: u64 = 48 << 20;

/// A request and what came of it.
struct Exchange {
    body: Value,
    answer: Answer,
}

/// All that a client got to see, choice by choice.
#[derive(Debug, Default, PartialEq)]
struct Answer(Vec<Choice>);

/// One of the answers to a request.
#[derive(Clone, Debug, Default, PartialEq)]
struct Choice {
    reasoning: String,
    content: String,
    /// Tokens with their log-probabilities, as they were written.
    tokens: Vec<(String, String)>,
    finish_reason: String,
}

/// What the clients did, all together.
#[derive(Default)]
struct Tally {
    n_answers: usize,
    n_broken_off: usize,
    failures: Vec<String>,
    /// The newest answers.
    exchanges: VecDeque<Exchange>,
}

/// Runs the load and the checks, and prints them as `cargo test` prints tests.
///
/// # Errors
/// The server cannot be started, or a check fails.
pub fn run(root: &Path, options: &Options) -> Outcome<()> {
    let server = Server::start(
        root,
        Build::Checked,
        &[
            "--sequences",
            "64",
            "--queue",
            "512",
            // Room for some sequences and some cache, so that both have to give way.
            "--kv-memory",
            "24MiB",
            "--prefix-cache",
            "8MiB",
            "--log-level",
            "warn",
            "--date",
            "2026-01-01",
        ],
    )?;
    let start = Instant::now();
    let time = Duration::from_secs(options.seconds);
    let tally = Mutex::new(Tally::default());
    let mut early_bytes = 0;
    std::thread::scope(|scope| -> Outcome<()> {
        for index in 0..options.clients {
            let (tally, client) = (&tally, server.client());
            scope.spawn(move || {
                let random = Random(options.seed << 32 | index);
                converse(&client, random, start + time, options.repeated, tally);
            });
        }
        std::thread::sleep(time / 3);
        early_bytes = server.memory_bytes()?;
        Ok(())
    })?;
    let late_bytes = server.memory_bytes()?;
    let tally = tally.into_inner()?;
    println!(
        "{} answers, {} broken off, {} failures in {:.0} s",
        tally.n_answers,
        tally.n_broken_off,
        tally.failures.len(),
        start.elapsed().as_secs_f64()
    );
    let client = server.client();
    let checks = [
        ("no_answer_is_lost", none_lost(&tally)),
        ("pages_return", pages_return(&client)),
        ("memory_stays", memory_stays(early_bytes, late_bytes)),
        ("cache_and_sequences_gave_way", cache_worked(&client)),
        (
            "answers_are_those_of_requests_alone",
            same_alone(&client, &tally.exchanges),
        ),
    ];
    report(&checks)
}

/// Prints the checks in the words of `cargo test`.
fn report(checks: &[(&str, Outcome<String>)]) -> Outcome<()> {
    for (name, outcome) in checks {
        match outcome {
            Ok(found) => println!("test soak::{name} ... ok ({found})"),
            Err(error) => println!("test soak::{name} ... FAILED\n{error}"),
        }
    }
    let n_failed = checks
        .iter()
        .filter(|(_, outcome)| outcome.is_err())
        .count();
    let verdict = if n_failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {verdict}. {} passed; {n_failed} failed; 0 ignored; 0 measured; 0 filtered out",
        checks.len() - n_failed
    );
    match n_failed {
        0 => Ok(()),
        n => Err(format!("{n} checks of the soak failed").into()),
    }
}

/// One client: conversation after conversation until `end`.
fn converse(client: &Client, mut random: Random, end: Instant, kept: usize, tally: &Mutex<Tally>) {
    while Instant::now() < end {
        let secret = format!("{:08x}", random.next());
        let mut messages = vec![json!({
            "role": "system",
            "content": format!("The secret code of this conversation is {secret}. {}", random.filler()),
        })];
        for _ in 0..1 + random.below(4) {
            messages.push(json!({"role": "user", "content": random.question(&secret)}));
            let max_tokens = [4, 24, 24, 96][random.below(4)];
            let effort = ["low", "high"][random.below(2)];
            // Choices share a prompt at first and no page in the end: more than there is room for.
            let n_choices = [1, 1, 1, 1, 6][random.below(5)];
            let body = json!({
                "messages": &messages,
                "temperature": 0,
                "max_tokens": max_tokens,
                "n": n_choices,
                "reasoning_effort": effort,
                "logprobs": true,
                "top_logprobs": 2,
                "stream": true,
            });
            let patience = match random.below(8) {
                0 => random.below(12),
                _ => usize::MAX,
            };
            let outcome = answer(client, &body, patience);
            let Ok(mut tally) = tally.lock() else {
                return;
            };
            match outcome {
                Ok(None) => {
                    tally.n_broken_off += 1;
                    break;
                }
                Ok(Some(answer)) => {
                    messages.push(json!({"role": "assistant", "content": &answer.0[0].content}));
                    tally.n_answers += 1;
                    tally.exchanges.push_back(Exchange { body, answer });
                    if tally.exchanges.len() > kept {
                        tally.exchanges.pop_front();
                    }
                }
                Err(error) => {
                    tally.failures.push(format!("{secret}: {error}"));
                    break;
                }
            }
        }
    }
}

/// The answer to a request; `None` if the client went away after `patience` events.
fn answer(client: &Client, body: &Value, patience: usize) -> Outcome<Option<Answer>> {
    let n_choices = body["n"].as_u64().map_or(1, |n| n as usize);
    let mut answer = Answer(vec![Choice::default(); n_choices]);
    let mut n_events = 0;
    let streamed = client.stream("/v1/chat/completions", body, |event| {
        answer.take(event);
        n_events += 1;
        match n_events > patience {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    match streamed {
        Streamed::BrokenOff => Ok(None),
        Streamed::Refused(status, text) => Err(format!("status {status}: {text}").into()),
        Streamed::Done
            if answer
                .0
                .iter()
                .any(|choice| choice.finish_reason.is_empty()) =>
        {
            Err("no finish reason".into())
        }
        Streamed::Done => Ok(Some(answer)),
    }
}

impl Answer {
    fn take(&mut self, event: &Value) {
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().map(|index| index as usize);
            if let Some(taken) = index.and_then(|index| self.0.get_mut(index)) {
                taken.take(choice);
            }
        }
    }
}

impl Choice {
    fn take(&mut self, choice: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.reasoning += &text(&choice["delta"]["reasoning_content"]);
        self.content += &text(&choice["delta"]["content"]);
        self.finish_reason += &text(&choice["finish_reason"]);
        for token in choice["logprobs"]["content"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let alternatives = (
                token["logprob"].to_string(),
                token["top_logprobs"].to_string(),
            );
            self.tokens
                .push((text(&token["token"]), format!("{alternatives:?}")));
        }
    }
}

fn none_lost(tally: &Tally) -> Outcome<String> {
    if let Some(first) = tally.failures.first() {
        return Err(format!("{} failures, the first: {first}", tally.failures.len()).into());
    }
    if tally.n_answers == 0 || tally.n_broken_off == 0 {
        return Err(format!(
            "{} answers and {} broken off: too little load to say anything",
            tally.n_answers, tally.n_broken_off
        )
        .into());
    }
    Ok(format!("{} answers", tally.n_answers))
}

/// Cancelled requests leave within a pass; only the cache holds pages then.
fn pages_return(client: &Client) -> Outcome<String> {
    let patience = Instant::now() + Duration::from_secs(10);
    loop {
        let running = client.metric("sequences_running")? + client.metric("sequences_waiting")?;
        let (used, cached) = (client.metric("pages_used")?, client.metric("cache_pages")?);
        if running == 0.0 && used == cached {
            return Ok(format!("{cached} pages, all of the cache"));
        }
        if Instant::now() > patience {
            return Err(format!(
                "{running} sequences are left, {used} pages are in use, {cached} by the cache"
            )
            .into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn memory_stays(early_bytes: u64, late_bytes: u64) -> Outcome<String> {
    let mib = |bytes: u64| format!("{:.0} MiB", bytes as f64 / (1 << 20) as f64);
    let found = format!(
        "{} after a third, {} at the end",
        mib(early_bytes),
        mib(late_bytes)
    );
    match late_bytes > early_bytes + GROWTH_BYTES {
        true => Err(format!("{found}, at most {} more are expected", mib(GROWTH_BYTES)).into()),
        false => Ok(found),
    }
}

fn cache_worked(client: &Client) -> Outcome<String> {
    let mut found = Vec::new();
    for name in [
        "cached_tokens",
        "cache_evictions",
        "preemptions",
        "jobs_cancelled",
    ] {
        let n = client.metric(&format!("{name}_total"))?;
        if n == 0.0 {
            return Err(format!("{name} is 0: the load did not reach what it is for").into());
        }
        found.push(format!("{name} {n}"));
    }
    Ok(found.join(", "))
}

/// Computes the newest answers again, one at a time and without the cache.
fn same_alone(client: &Client, exchanges: &VecDeque<Exchange>) -> Outcome<String> {
    for Exchange {
        body,
        answer: under_load,
    } in exchanges
    {
        let mut body = body.clone();
        body["cache_prompt"] = json!(false);
        let alone = answer(client, &body, usize::MAX)?.ok_or("an answer")?;
        if alone != *under_load {
            return Err(format!("{body}\nunder load: {under_load:?}\nalone: {alone:?}").into());
        }
    }
    match exchanges.is_empty() {
        true => Err("there is no answer to compute again".into()),
        false => Ok(format!("{} answers, bit for bit", exchanges.len())),
    }
}

/// Numbers that a seed determines (splitmix64, Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Text that makes some prompts a few tokens and some several pages long.
    fn filler(&mut self) -> String {
        let n = [0, 0, 20, 120, 400][self.below(5)];
        let word = |random: &mut Random| {
            [
                "the", "old", "sea", "light", "keeper", "boat", "wind", "and", "saw", "a",
            ][random.below(10)]
        };
        (0..n).map(|_| word(self)).collect::<Vec<_>>().join(" ")
    }

    fn question(&mut self, secret: &str) -> String {
        match self.below(4) {
            0 => format!("Repeat the secret code {secret}."),
            1 => "Tell me a story about a lighthouse.".to_owned(),
            2 => format!("Name {} fruits.", 2 + self.below(5)),
            _ => format!("What is {} and {}?", self.below(100), self.below(100)),
        }
    }
}
