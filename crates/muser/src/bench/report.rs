//! What was measured, as a table, as JSON and as CSV.
//!
//! What one would get wrong: rows of the table are printed while the run goes on, so
//! their limit is by the bandwidth from before the works. JSON and CSV come at the
//! end, with the better one of before and after.

use super::workload::{Part, Work};
use crate::terminal;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// What all works of a run share, known before the first.
#[derive(Debug, Serialize)]
pub struct Scope {
    pub model: String,
    pub quantization: String,
    pub device: String,
    /// Instruction set, of a device that has a choice.
    pub isa: Option<String>,
    pub threads: usize,
    /// Where the weights lie.
    pub weights: &'static str,
    pub kv: String,
    /// The drafter's file.
    pub drafter: Option<String>,
    pub repetitions: usize,
}

/// Everything one run measured.
#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub scope: Scope,
    /// Read bandwidth, 10^9 bytes a second.
    #[serde(serialize_with = "rounded")]
    pub bandwidth_gb_s: f64,
    /// Memory of the process beside the weights.
    pub resident_bytes: Option<u64>,
    pub lines: Vec<Line>,
}

/// One work.
#[derive(Debug, Serialize)]
pub struct Line {
    /// `prefill`, `decode`, `draft` or `round`.
    pub work: &'static str,
    /// Tokens of a draft.
    pub n_drafted: Option<usize>,
    pub n_tokens: usize,
    pub depth: usize,
    pub n_sequences: usize,
    #[serde(serialize_with = "rounded")]
    pub tokens_per_second: f64,
    #[serde(serialize_with = "rounded")]
    pub slowest: f64,
    #[serde(serialize_with = "rounded")]
    pub fastest: f64,
    #[serde(serialize_with = "rounded")]
    pub ms_per_pass: f64,
    /// Bytes a pass must read, on average; none for prefill.
    pub bytes_per_pass: Option<u64>,
    /// Tokens a second at the read bandwidth.
    #[serde(serialize_with = "rounded_option")]
    pub limit_tokens_per_second: Option<f64>,
    /// Measured over limit.
    #[serde(serialize_with = "rounded_option")]
    pub ratio: Option<f64>,
}

fn rounded<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(terminal::rounded(*value))
}

fn rounded_option<S: Serializer>(value: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
    value.map(terminal::rounded).serialize(to)
}

impl Line {
    /// A line from the seconds of each repetition and the bytes of a pass.
    pub fn new(work: Work, mut seconds: Vec<f64>, bytes: Option<u64>) -> Line {
        seconds.sort_by(f64::total_cmp);
        let n = seconds.len();
        let median = (seconds[(n - 1) / 2] + seconds[n / 2]) / 2.0;
        let n_tokens = work.n_tokens() as f64;
        let (name, n_each, depth, n_drafted) = match work {
            Work::Prefill { n_tokens } => ("prefill", n_tokens, 0, None),
            Work::Decode {
                n_tokens, depth, ..
            } => ("decode", n_tokens, depth, None),
            Work::Speculate {
                part,
                n_drafted,
                n_rounds,
                depth,
                ..
            } => match part {
                Part::Draft => ("draft", n_drafted * n_rounds, depth, Some(n_drafted)),
                Part::Round => ("round", n_rounds, depth, Some(n_drafted)),
            },
        };
        let n_sequences = work.n_sequences();
        Line {
            work: name,
            n_drafted,
            n_tokens: n_each,
            depth,
            n_sequences,
            tokens_per_second: n_tokens / median,
            slowest: n_tokens / seconds[n - 1],
            fastest: n_tokens / seconds[0],
            ms_per_pass: median * 1e3 / work.n_passes() as f64,
            bytes_per_pass: bytes,
            limit_tokens_per_second: None,
            ratio: None,
        }
    }

    /// The line with the limit that `bandwidth`, in bytes a second, sets.
    pub fn limited(mut self, bandwidth: f64) -> Line {
        let limit = |bytes: u64| self.n_sequences as f64 * bandwidth / bytes as f64;
        self.limit_tokens_per_second = self.bytes_per_pass.map(limit);
        let ratio = |limit: f64| self.tokens_per_second / limit;
        self.ratio = self.limit_tokens_per_second.map(ratio);
        self
    }

    /// The line's row of the table.
    pub fn row(&self) -> String {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_string());
        let megabytes = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
        let n_drafted = self.n_drafted.map_or(String::new(), |n| format!(" {n}"));
        columns([
            &format!("{}{n_drafted}", self.work),
            &self.n_tokens.to_string(),
            &self.depth.to_string(),
            &self.n_sequences.to_string(),
            &format!("{:.2}", self.tokens_per_second),
            &format!("{:.1} .. {:.1}", self.slowest, self.fastest),
            &format!("{:.2}", self.ms_per_pass),
            &or_dash(self.bytes_per_pass.map(megabytes)),
            &or_dash(self.limit_tokens_per_second.map(|l| format!("{l:.1}"))),
            &or_dash(self.ratio.map(|r| format!("{:.0} %", r * 100.0))),
        ])
    }
}

fn columns(cells: [&str; 10]) -> String {
    let [
        work,
        tokens,
        depth,
        seqs,
        speed,
        range,
        ms,
        mb,
        limit,
        ratio,
    ] = cells;
    format!(
        "{work:<8} {tokens:>6} {depth:>7} {seqs:>4} {speed:>10} {range:>18} {ms:>9} {mb:>10} \
         {limit:>9} {ratio:>6}"
    )
}

impl Scope {
    /// What stands above the rows of the table.
    pub fn head(&self) -> String {
        let drafter = self.drafter.as_ref();
        let drafter = drafter.map_or(String::new(), |name| format!(", drafter {name}"));
        let title = format!(
            "{}: {} on {}, weights {}, kv {}{drafter}; medians of {}\n",
            self.model, self.quantization, self.device, self.weights, self.kv, self.repetitions,
        );
        let names = [
            "work",
            "tokens",
            "depth",
            "seqs",
            "tokens/s",
            "min .. max",
            "ms/pass",
            "MB/pass",
            "limit",
            "ratio",
        ];
        format!("{title}\n{}", columns(names))
    }
}

impl Report {
    /// Is there a line of decode?
    pub fn has_decode(&self) -> bool {
        self.lines.iter().any(|line| line.work == "decode")
    }

    /// What stands below the rows of the table. They show limits by the bandwidth
    /// `shown`, in bytes a second; `cache_bytes` is the size of the last cache.
    pub fn foot(&self, shown: f64, cache_bytes: Option<u64>) -> String {
        let mut foot = String::new();
        if let Some(resident) = self.resident_bytes {
            let resident = terminal::bytes(resident);
            foot = format!("\n{resident} resident beside the weights");
        }
        if self.lines.iter().any(|line| line.n_drafted.is_some()) {
            foot += "\ndraft: drafted tokens; round: draft, verify, and one token kept, which is the \
                     least; each drafted one that is right is one more";
        }
        let read = self.lines.iter().filter_map(|l| l.bytes_per_pass).min();
        let Some(read_bytes) = read else {
            return foot;
        };
        let shown = shown / 1e9;
        foot += &format!("\nlimit: what {shown:.1} GB/s, the read bandwidth, allow for MB/pass");
        if self.bandwidth_gb_s > 1.02 * shown {
            let after = self.bandwidth_gb_s;
            foot += &format!("; after the works it was {after:.1} GB/s");
        }
        let has_exceeded = |r: f64| r * self.bandwidth_gb_s > shown;
        let is_exceeded = self.lines.iter().any(|l| l.ratio.is_some_and(has_exceeded));
        if cache_bytes.is_some_and(|cache| read_bytes <= cache) {
            foot += "; weights fit the processor's cache: memory is no limit";
        } else if is_exceeded {
            foot += "; ratios above 100 %: caches helped, or memory was busy when it was measured";
        }
        foot
    }

    /// For spreadsheets: the fields of JSON as columns, a row for each line.
    pub fn csv(&self) -> serde_json::Result<String> {
        let report = serde_json::to_value(self)?;
        let mut rows = Vec::new();
        for line in &self.lines {
            let line = serde_json::to_value(line)?;
            let fields = [&report, &line].into_iter().filter_map(Value::as_object);
            let fields = fields.flatten().filter(|(name, _)| *name != "lines");
            let (names, values): (Vec<_>, Vec<_>) = fields.unzip();
            if rows.is_empty() {
                rows.push(names.into_iter().cloned().collect::<Vec<_>>().join(","));
            }
            let cells: Vec<String> = values.into_iter().map(cell).collect();
            rows.push(cells.join(","));
        }
        Ok(rows.join("\n"))
    }
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => format!("\"{}\"", text.replace('"', "\"\"")),
        value => value.to_string(),
    }
}
