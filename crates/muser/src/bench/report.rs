//! What was measured, as a table, as JSON and as CSV.

use super::workload::Work;
use serde::Serialize;
use std::fmt::Write;

/// Everything one run measured.
#[derive(Debug, Serialize)]
pub struct Report {
    pub model: String,
    pub quantization: String,
    pub device: String,
    pub threads: usize,
    pub kv: String,
    pub bandwidth_gb_s: f64,
    /// Memory beyond the mapped weights.
    pub resident_mb: Option<f64>,
    pub repetitions: usize,
    pub lines: Vec<Line>,
}

/// One work.
#[derive(Debug, Serialize)]
pub struct Line {
    /// `prefill` or `decode`.
    pub work: &'static str,
    pub n_tokens: usize,
    pub depth: usize,
    pub n_sequences: usize,
    pub tokens_per_second: f64,
    pub slowest: f64,
    pub fastest: f64,
    pub ms_per_pass: f64,
    /// Bytes a pass must read; none for prefill.
    pub bytes_per_pass: Option<u64>,
    /// Tokens a second at the read bandwidth.
    pub floor_tokens_per_second: Option<f64>,
    /// Measured over floor.
    pub ratio: Option<f64>,
}

impl Line {
    /// A line from the seconds of each repetition.
    pub fn new(work: Work, mut seconds: Vec<f64>, bytes: Option<u64>, bandwidth: f64) -> Line {
        seconds.sort_by(f64::total_cmp);
        let n = seconds.len();
        let median = (seconds[(n - 1) / 2] + seconds[n / 2]) / 2.0;
        let n_tokens = work.n_tokens() as f64;
        let floor = bytes.map(|bytes| work.n_sequences() as f64 * bandwidth / bytes as f64);
        let (name, n_each, depth, n_sequences) = match work {
            Work::Prefill { n_tokens } => ("prefill", n_tokens, 0, 1),
            Work::Decode {
                n_tokens,
                depth,
                n_sequences,
            } => ("decode", n_tokens, depth, n_sequences),
        };
        Line {
            work: name,
            n_tokens: n_each,
            depth,
            n_sequences,
            tokens_per_second: n_tokens / median,
            slowest: n_tokens / seconds[n - 1],
            fastest: n_tokens / seconds[0],
            ms_per_pass: median * 1e3 / work.n_passes() as f64,
            bytes_per_pass: bytes,
            floor_tokens_per_second: floor,
            ratio: floor.map(|floor| n_tokens / median / floor),
        }
    }
}

impl Report {
    /// For people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let resident = self.resident_mb.map_or(String::new(), |mb| {
            format!(", {mb:.0} MB beside the weights")
        });
        let _ = writeln!(
            out,
            "{}: {} on {}, kv {}, read bandwidth {:.1} GB/s{resident}; medians of {}\n",
            self.model,
            self.quantization,
            self.device,
            self.kv,
            self.bandwidth_gb_s,
            self.repetitions,
        );
        let _ = writeln!(
            out,
            "{:<8} {:>6} {:>7} {:>4} {:>10} {:>18} {:>9} {:>10} {:>9} {:>6}",
            "work",
            "tokens",
            "depth",
            "seqs",
            "tokens/s",
            "min .. max",
            "ms/pass",
            "MB/pass",
            "floor",
            "ratio"
        );
        for line in &self.lines {
            let range = format!("{:.1} .. {:.1}", line.slowest, line.fastest);
            let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_string());
            let _ = writeln!(
                out,
                "{:<8} {:>6} {:>7} {:>4} {:>10.2} {:>18} {:>9.2} {:>10} {:>9} {:>6}",
                line.work,
                line.n_tokens,
                line.depth,
                line.n_sequences,
                line.tokens_per_second,
                range,
                line.ms_per_pass,
                or_dash(
                    line.bytes_per_pass
                        .map(|b| format!("{:.1}", b as f64 / 1e6))
                ),
                or_dash(line.floor_tokens_per_second.map(|f| format!("{f:.1}"))),
                or_dash(line.ratio.map(|r| format!("{:.0} %", r * 100.0))),
            );
        }
        out
    }

    /// For spreadsheets: one row a line, each with its scope.
    pub fn csv(&self) -> String {
        let mut out = String::from(
            "model,quantization,device,threads,kv,bandwidth_gb_s,work,n_tokens,depth,n_sequences,\
             tokens_per_second,slowest,fastest,ms_per_pass,bytes_per_pass,floor_tokens_per_second,\
             ratio\n",
        );
        let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
        let number = |value: Option<f64>| value.map_or(String::new(), |v| format!("{v:.4}"));
        for line in &self.lines {
            let _ = writeln!(
                out,
                "{},{},{},{},{},{:.3},{},{},{},{},{:.4},{:.4},{:.4},{:.4},{},{},{}",
                quoted(&self.model),
                quoted(&self.quantization),
                quoted(&self.device),
                self.threads,
                self.kv,
                self.bandwidth_gb_s,
                line.work,
                line.n_tokens,
                line.depth,
                line.n_sequences,
                line.tokens_per_second,
                line.slowest,
                line.fastest,
                line.ms_per_pass,
                line.bytes_per_pass.map_or(String::new(), |b| b.to_string()),
                number(line.floor_tokens_per_second),
                number(line.ratio),
            );
        }
        out
    }
}
