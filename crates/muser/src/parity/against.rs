//! Backend against backend over a text.
//!
//! Both run in step, a few rows at a time, so that the logits of a whole text
//! never lie in memory.

use super::measure::{Divergence, LIKELY, Largest};
use super::{Args, CHUNK_ROWS};
use crate::model_file::{Device, Kv, ModelFile};
use crate::terminal::{self, print_line};
use serde_json::{Value, json};
use std::process::ExitCode;
use text::ControlText;

/// Compares `--device` and `--kv` with `device` and `kv`, which are taken for
/// right.
pub fn run(args: &Args, device: Device, kv: Kv) -> anyhow::Result<ExitCode> {
    let file = args.model.open()?;
    let tokens = args.tokens(&file)?;
    let mut left = args.session(&file, args.device(), args.kv.unwrap_or(Kv::F16))?;
    let mut right = args.session(&file, device, kv)?;
    let bar = terminal::progress(tokens.len() as u64, "comparing");
    let mut divergence = Divergence::default();
    for chunk in tokens.chunks(CHUNK_ROWS) {
        let (left, right) = (left.append(chunk, 0)?, right.append(chunk, 0)?);
        for ((position, found), (_, right)) in left.iter().zip(&right) {
            divergence.add(*position, found, right);
        }
        bar.inc(chunk.len() as u64);
    }
    bar.finish_and_clear();
    // Without a bound there is nothing to pass.
    let passed = args.max_kl.map(|limit| divergence.mean_kl() <= limit);
    if args.json {
        let report = json!({
            "model": file.name,
            "candidate": left.describe(),
            "against": right.describe(),
            "tokens": tokens.len(),
            "kl": { "mean": divergence.mean_kl(), "max": place(divergence.max_kl()) },
            "same_top_rows": divergence.n_same_top(),
            "max_logprob_difference": place(divergence.max_logprob()),
            "limits": { "mean_kl": args.max_kl },
            "passed": passed,
        });
        print_line(format_args!("{report:#}"))?;
    } else {
        print_line(format_args!("model      {}", file.name))?;
        print_line(format_args!("candidate  {}", left.describe()))?;
        print_line(format_args!("against    {}", right.describe()))?;
        print_line(format_args!("tokens     {}\n", tokens.len()))?;
        print_measures(&file, &divergence)?;
        print_line(match (passed, args.max_kl) {
            (Some(true), Some(limit)) => format!("\nPASSED: within mean KL {limit:e}"),
            (_, Some(limit)) => format!("\nFAILED: outside mean KL {limit:e}"),
            (_, None) => "\nNO VERDICT: no bound was given; --max-kl X gives one".to_string(),
        })?;
    }
    Ok(ExitCode::from(u8::from(passed == Some(false))))
}

fn print_measures(file: &ModelFile, divergence: &Divergence) -> anyhow::Result<()> {
    let kl = divergence.max_kl();
    print_line(format_args!(
        "KL divergence       mean {:.3e}, max {:.3e} at position {}",
        divergence.mean_kl(),
        kl.value,
        kl.position
    ))?;
    let (same, rows) = (divergence.n_same_top(), divergence.n_rows());
    print_line(format_args!(
        "same top-1          {same} of {rows} ({:.2} %)",
        100.0 * same as f64 / rows.max(1) as f64
    ))?;
    let worst = divergence.max_logprob();
    // A model without a tokenizer still has token ids.
    let text = file
        .tokenizer()
        .ok()
        .map(|t| t.decode(&[worst.token], ControlText::Keep));
    print_line(format_args!(
        "log-probabilities   differ by at most {:.3e} at position {}, token {}{} (of tokens with \
         p >= {LIKELY})",
        worst.value,
        worst.position,
        worst.token,
        text.map(|t| format!(" {t:?}")).unwrap_or_default(),
    ))?;
    Ok(())
}

fn place(at: Largest) -> Value {
    json!({ "value": at.value, "position": at.position, "token": at.token })
}
