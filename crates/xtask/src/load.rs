//! What clients of a server see at 1, 4, 16, 64 at a time, beside llama.cpp's own batched decoding without any server.
//!
//! The rival has no HTTP, no queue and no text to make, so its speed is an upper bound of what its servers reach.

use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::serving::{Build, Client, Server, Streamed};
use crate::{Outcome, command, rival};

/// What is measured.
#[derive(clap::Args, Debug)]
pub struct Options {
    /// Model file [default: the bundled nano-glimmer]
    #[arg(long, short)]
    model: Option<PathBuf>,
    /// Clients at a time
    #[arg(short = 'b', long, value_delimiter = ',', default_value = "1,4,16,64")]
    clients: Vec<usize>,
    /// Threads of both
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Tokens of each answer
    #[arg(short = 'n', long, default_value_t = 64)]
    generate: usize,
    /// Seconds for each number of clients
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Times that both take their turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measure llama.cpp as well; it must be a model that it can load
    #[arg(long)]
    rival: bool,
    /// llama.cpp without re-packed weights and AMX, where its kernels for these crash
    #[arg(long)]
    plain_rival: bool,
}

/// The prompt; each client has a number in it, so that none is another's prefix.
const PROMPT: &str = "in the old town by the sea there was a lighthouse and";

/// What clients saw.
#[derive(Debug, Default)]
struct Seen {
    first_token: Vec<f64>,
    intervals: Vec<f64>,
    n_requests: usize,
    n_tokens: usize,
}

/// One number of clients in one round.
#[derive(Clone, Copy, Debug)]
struct Figures {
    requests_per_second: f64,
    tokens_per_second: f64,
    /// Median and 95th percentile, in milliseconds.
    first_token_ms: [f64; 2],
    interval_ms: [f64; 2],
}

/// Measures and prints a table in Markdown.
///
/// # Errors
/// The server or the rival fails.
pub fn run(root: &Path, options: &Options) -> Outcome<()> {
    let python = options.rival.then(|| rival::install(root)).transpose()?;
    let bias = options.no_end(root)?;
    let mut figures: Vec<Vec<Figures>> = vec![Vec::new(); options.clients.len()];
    let mut rivals: Vec<Vec<f64>> = vec![Vec::new(); options.clients.len()];
    for round in 1..=options.rounds {
        println!("round {round} of {}", options.rounds);
        let server = options.server(root)?;
        for (figures, &n_clients) in figures.iter_mut().zip(&options.clients) {
            figures.push(options.measure(&server, n_clients, &bias)?);
        }
        drop(server);
        if let Some(python) = &python {
            for (rivals, &n_clients) in rivals.iter_mut().zip(&options.clients) {
                rivals.push(options.rival_speed(root, python, n_clients)?);
            }
        }
    }
    println!("\n{}", table(&options.clients, &figures, &rivals)?);
    Ok(())
}

impl Options {
    fn server(&self, root: &Path) -> Outcome<Server> {
        let model = self.model.as_ref().map(|path| path.to_string_lossy());
        let threads = self.threads.to_string();
        let mut arguments = vec![
            "--sequences",
            "64",
            "--log-level",
            "warn",
            "--threads",
            &threads,
        ];
        if let Some(model) = &model {
            arguments.extend(["--model", model]);
        }
        Server::start(root, Build::Release, &arguments)
    }

    /// A bias that forbids the tokens that end an answer: all answers are equally long.
    fn no_end(&self, root: &Path) -> Outcome<Value> {
        let model = self.model.as_ref().map(|path| path.to_string_lossy());
        let mut arguments = vec!["run", "--release", "--quiet", "--", "inspect", "--json"];
        if let Some(model) = &model {
            arguments.extend(["--model", model]);
        }
        let text = command::output(&mut command::command(root, "cargo", &arguments))?;
        let report: Value = serde_json::from_slice(&text)?;
        let end = report["muser"]["tokenizer"]["end"].as_array();
        let end = end.ok_or("muser inspect names no end tokens")?;
        let bias = end.iter().map(|token| (token.to_string(), json!(-100)));
        Ok(Value::Object(bias.collect()))
    }

    /// Keeps `n_clients` requests going for the time.
    fn measure(&self, server: &Server, n_clients: usize, bias: &Value) -> Outcome<Figures> {
        let seen = Mutex::new(Seen::default());
        let failure = Mutex::new(None);
        let start = Instant::now();
        let end = start + Duration::from_secs(self.seconds);
        std::thread::scope(|scope| {
            for index in 0..n_clients {
                let (client, seen, failure) = (server.client(), &seen, &failure);
                scope.spawn(move || {
                    while Instant::now() < end {
                        if let Err(error) = self.request(&client, (index, bias), seen) {
                            failure
                                .lock()
                                .map(|mut f| *f = Some(error.to_string()))
                                .ok();
                            return;
                        }
                    }
                });
            }
        });
        if let Some(failure) = failure.into_inner()? {
            return Err(failure.into());
        }
        let mut seen = seen.into_inner()?;
        let seconds = start.elapsed().as_secs_f64();
        let mut percentiles = |of: fn(&mut Seen) -> &mut Vec<f64>| {
            let values = of(&mut seen);
            values.sort_by(f64::total_cmp);
            [0.5, 0.95].map(|p| {
                let index = (p * (values.len().max(1) - 1) as f64).round() as usize;
                values.get(index).map_or(f64::NAN, |seconds| seconds * 1e3)
            })
        };
        Ok(Figures {
            first_token_ms: percentiles(|seen| &mut seen.first_token),
            interval_ms: percentiles(|seen| &mut seen.intervals),
            requests_per_second: seen.n_requests as f64 / seconds,
            tokens_per_second: seen.n_tokens as f64 / seconds,
        })
    }

    /// One streamed request.
    fn request(
        &self,
        client: &Client,
        (index, bias): (usize, &Value),
        seen: &Mutex<Seen>,
    ) -> Outcome<()> {
        let body = json!({
            "prompt": format!("{index} {PROMPT}"),
            "max_tokens": self.generate,
            "logit_bias": bias,
            "seed": index,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let start = Instant::now();
        let mut last = None;
        let (mut first_token, mut intervals, mut n_tokens) = (f64::NAN, Vec::new(), 0);
        let streamed = client.stream("/v1/completions", &body, |event| {
            let now = Instant::now();
            if event["choices"][0]["text"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
            {
                match last.replace(now) {
                    None => first_token = (now - start).as_secs_f64(),
                    Some(before) => intervals.push((now - before).as_secs_f64()),
                }
            }
            n_tokens = event["usage"]["completion_tokens"]
                .as_u64()
                .unwrap_or(n_tokens);
            ControlFlow::Continue(())
        })?;
        if streamed != Streamed::Done || n_tokens != self.generate as u64 {
            return Err(
                format!("{streamed:?} after {n_tokens} of {} tokens", self.generate).into(),
            );
        }
        let mut seen = seen.lock().map_err(|_| "another client failed")?;
        seen.first_token.push(first_token);
        seen.intervals.extend(intervals);
        seen.n_requests += 1;
        seen.n_tokens += n_tokens as usize;
        Ok(())
    }

    /// Tokens a second of llama.cpp's batched decoding.
    fn rival_speed(&self, root: &Path, python: &Path, n_sequences: usize) -> Outcome<f64> {
        let model = self.model.as_ref().ok_or("--rival wants a --model")?;
        let (model, batch) = (model.to_string_lossy(), n_sequences.to_string());
        let (generate, threads) = (self.generate.to_string(), self.threads.to_string());
        let mut arguments = vec![
            "tools/rival_llama.py",
            &model,
            "--threads",
            &threads,
            "--prefill",
            "0",
            "--generate",
            &generate,
            "--batch",
            &batch,
        ];
        arguments.extend(self.plain_rival.then_some("--plain"));
        let python = python.to_string_lossy();
        let text = command::output(&mut command::command(root, &python, &arguments))?;
        let report: Value = serde_json::from_slice(&text)?;
        let speed = report["lines"][0]["tokens_per_second"].as_f64();
        Ok(speed.ok_or("the rival says no speed")?)
    }
}

/// Medians over the rounds; ratios are taken round by round.
fn table(clients: &[usize], figures: &[Vec<Figures>], rivals: &[Vec<f64>]) -> Outcome<String> {
    let mut out = String::from(
        "| clients | requests/s | tokens/s | first token ms p50, p95 | interval ms p50, p95 | llama.cpp tok/s | ratio |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for ((n_clients, figures), rivals) in clients.iter().zip(figures).zip(rivals) {
        let median = |of: &dyn Fn(&Figures) -> f64| {
            rival::median(figures.iter().map(of).collect()).unwrap_or(f64::NAN)
        };
        let ratios = figures
            .iter()
            .zip(rivals)
            .map(|(f, rival)| f.tokens_per_second / rival);
        let or_dash = |values: Vec<f64>| {
            rival::median(values).map_or("-".to_owned(), |median| format!("{median:.2}"))
        };
        writeln!(
            out,
            "| {n_clients} | {:.2} | {:.1} | {:.1}, {:.1} | {:.1}, {:.1} | {} | {} |",
            median(&|f| f.requests_per_second),
            median(&|f| f.tokens_per_second),
            median(&|f| f.first_token_ms[0]),
            median(&|f| f.first_token_ms[1]),
            median(&|f| f.interval_ms[0]),
            median(&|f| f.interval_ms[1]),
            or_dash(rivals.clone()),
            or_dash(ratios.collect()),
        )?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::{Figures, table};

    /// The ratio is the median of the rounds' ratios.
    #[test]
    fn a_line_has_medians() {
        let figures = [10.0, 30.0, 20.0].map(|tokens_per_second| Figures {
            requests_per_second: 1.0,
            tokens_per_second,
            first_token_ms: [5.0, 9.0],
            interval_ms: [2.0, 3.0],
        });
        let rivals = vec![vec![10.0, 10.0, 10.0]];
        let table = table(&[4], &[figures.to_vec()], &rivals).expect("a table");
        let line = "| 4 | 1.00 | 20.0 | 5.0, 9.0 | 2.0, 3.0 | 10.00 | 2.00 |";
        assert_eq!(table.lines().last(), Some(line));
    }
}
