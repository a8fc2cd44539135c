//! Device against device, operation by operation.
//!
//! What one would get wrong: each device goes on with its own values, so what
//! is wrong in one operation shows in all that follow. The first operation
//! outside of the limits is the one to look at; the table of the worst calls
//! says how far it went from there.

use super::{Args, EXACT, INT8, passes};
use crate::model_file::{self, Device, Kv};
use crate::terminal::print_line;
use model::paired::{Comparison, Difference, Limit};
use model::{Backend, KvType, Paired, Reference};
use serde_json::{Value, json};
use std::io;
use std::process::ExitCode;

/// Compares `--device` with `right`.
pub fn run(args: &Args, right: Device) -> anyhow::Result<ExitCode> {
    match right {
        Device::Reference => with_right(args, right, Reference::new()),
        Device::Cpu => with_right(args, right, args.cpu.device()?),
        Device::Cuda(ordinal) => with_right(args, right, model_file::cuda(ordinal)?),
    }
}

fn with_right<A: Backend>(args: &Args, against: Device, right: A) -> anyhow::Result<ExitCode> {
    match args.device() {
        Device::Reference => compare(args, against, right, Reference::new()),
        Device::Cpu => compare(args, against, right, args.cpu.device()?),
        Device::Cuda(ordinal) => compare(args, against, right, model_file::cuda(ordinal)?),
    }
}

fn compare<A: Backend, B: Backend>(
    args: &Args,
    against: Device,
    right: A,
    candidate: B,
) -> anyhow::Result<ExitCode> {
    let file = args.model.open()?;
    let tokens = args.tokens(&file)?;
    // All but the reference round alike.
    let is_reference = |device| device == Device::Reference;
    let bounds = match is_reference(against) == is_reference(args.device()) {
        true => &EXACT,
        false => &INT8,
    };
    let limit = Limit {
        max_abs: args.max_abs.unwrap_or(f64::INFINITY),
        relative_rms: args.max_rms.unwrap_or(bounds.relative_rms),
    };
    let devices = [candidate.caps().device, right.caps().device];
    let load = args.load_args(args.device(), args.kv.unwrap_or(Kv::F32));
    let mut model = load.load_on(Paired::new(right, candidate, limit), &file)?;
    passes(&mut model, &tokens, |_| ())?;
    let found = model.backend_mut().take_found();
    let passed = found.first.is_none();
    if args.json {
        let report = json!({
            "model": file.name,
            "candidate": devices[0],
            "against": devices[1],
            "kv": KvType::from(load.kv).to_string(),
            "tokens": tokens.len(),
            "operations": found.n_calls,
            "limits": { "max_abs": args.max_abs, "relative_rms": limit.relative_rms },
            "first_outside": found.first.as_ref().map(difference),
            "worst": found.worst.values().map(difference).collect::<Vec<Value>>(),
            "passed": passed,
        });
        print_line(format_args!("{report:#}"))?;
    } else {
        let kv = KvType::from(load.kv).to_string();
        print_line(format_args!("model      {}", file.name))?;
        print_line(format_args!("candidate  {}, kv {kv}", devices[0]))?;
        print_line(format_args!("against    {}, kv {kv}", devices[1]))?;
        print_line(format_args!("tokens     {}\n", tokens.len()))?;
        print_comparison(&found, limit)?;
    }
    Ok(ExitCode::from(u8::from(!passed)))
}

fn print_comparison(found: &Comparison, limit: Limit) -> io::Result<()> {
    print_line("the worst call of each operation:")?;
    for worst in found.worst.values() {
        print_line(format_args!("  {worst}"))?;
    }
    print_line(format_args!("\n{}", verdict(found, limit)))
}

fn verdict(found: &Comparison, limit: Limit) -> String {
    let limits = match limit.max_abs {
        f64::INFINITY => format!("relative RMS {:e}", limit.relative_rms),
        max_abs => format!("max abs {max_abs:e}, relative RMS {:e}", limit.relative_rms),
    };
    match &found.first {
        None => format!("PASSED: {} operations within {limits}", found.n_calls),
        Some(first) => format!("FAILED: first operation outside {limits}: {first}"),
    }
}

fn difference(found: &Difference) -> Value {
    let probe =
        |at: Option<(&str, usize)>| at.map(|(node, layer)| json!({ "node": node, "layer": layer }));
    json!({
        "operation": found.op,
        "call": found.call,
        "after": probe(found.after),
        "before": probe(found.before),
        "max_abs": found.max_abs,
        "relative_rms": found.relative_rms,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_names_the_first_operation() {
        let first = Difference {
            op: "attend",
            call: 7,
            after: Some(("Kcur_rope", 0)),
            before: Some(("attn_gated", 0)),
            max_abs: 0.5,
            relative_rms: 0.25,
        };
        let found = Comparison {
            n_calls: 40,
            first: Some(first.clone()),
            worst: [("attend", first)].into(),
        };
        let limit = Limit {
            max_abs: 0.1,
            relative_rms: 3e-5,
        };
        assert_eq!(
            verdict(&found, limit),
            "FAILED: first operation outside max abs 1e-1, relative RMS 3e-5: attend (call 7, \
             after Kcur_rope of layer 0, before attn_gated of layer 0): max abs 5.00e-1, \
             relative RMS 2.50e-1"
        );
        assert_eq!(
            difference(found.first.as_ref().unwrap()),
            json!({
                "operation": "attend",
                "call": 7,
                "after": { "node": "Kcur_rope", "layer": 0 },
                "before": { "node": "attn_gated", "layer": 0 },
                "max_abs": 0.5,
                "relative_rms": 0.25,
            })
        );
    }
}
