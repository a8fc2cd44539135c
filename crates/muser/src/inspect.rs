//! `muser inspect`: what is in a file, and what Muser makes of it.
//!
//! What a reader would get wrong: a file that Muser cannot run is no error
//! here, as long as it is a GGUF file; the reason is part of the report.

mod report;
mod sizes;
mod table;
mod verdict;

use crate::model_file::ModelArgs;
use crate::terminal::{BOLD, grouped, one_line, print_line};
use gguf::{Gguf, TensorInfo, shown};
pub use sizes::Sizes;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use table::{Align, write_rows};
pub use table::{write_sizes, write_tensor_groups};

/// Show what is in a GGUF file and what Muser makes of it
#[derive(clap::Args, Debug)]
#[command(
    long_about = "Show what is in a GGUF file: metadata, tensors, types, sizes; and what \
    Muser makes of it, or why it cannot run it.\n\n\
    The exit code is 0 if the file is readable, whether Muser can run it or not."
)]
#[command(after_help = "Examples:\n  \
    muser inspect\n  \
    muser inspect model.gguf --tensors\n  \
    muser inspect model.gguf --full | less\n  \
    muser inspect model.gguf --json | jq .total.bits_per_weight")]
pub struct Args {
    /// GGUF file; of a split model any part [default: the bundled nano-glimmer]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The same, as other commands name it
    #[arg(long, short, value_name = "FILE", conflicts_with = "file")]
    model: Option<PathBuf>,
    /// Show long texts and arrays in full
    #[arg(long)]
    full: bool,
    /// List every tensor instead of groups
    #[arg(long)]
    tensors: bool,
    /// Print everything as JSON
    #[arg(long, conflicts_with_all = ["full", "tensors"])]
    json: bool,
}

/// Prints the report.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let model = args.file.clone().or_else(|| args.model.clone());
    let file = ModelArgs { model }.open()?;
    if args.json {
        print_line(serde_json::to_string_pretty(&report::Report::new(&file))?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = io::BufWriter::new(anstream::stdout().lock());
    write_report(&mut out, &file.name, &file.gguf, args)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn write_report(out: &mut impl Write, name: &str, file: &Gguf, args: &Args) -> io::Result<()> {
    let tensors: Vec<TensorInfo> = file.tensors().iter().map(|t| t.info()).collect();
    let parts = match file.paths().len() {
        0 | 1 => String::new(),
        n => format!(", {n} parts"),
    };
    writeln!(
        out,
        "{BOLD}{}{BOLD:#}: GGUF version {}, {} bytes{parts}, alignment {}\n",
        one_line(name),
        file.version(),
        grouped(file.file_bytes()),
        file.alignment(),
    )?;

    let metadata = file.metadata();
    writeln!(out, "{BOLD}Metadata{BOLD:#}: {} keys", metadata.len())?;
    let row = |(key, value): (&str, &gguf::Value)| {
        [
            shown(key),
            report::type_text(value),
            report::value_text(value, args.full),
        ]
    };
    let rows: Vec<[String; 3]> = metadata.iter().map(row).collect();
    write_rows(out, &[Align::Left; 3], &rows)?;
    writeln!(out)?;

    writeln!(out, "{BOLD}Tensors{BOLD:#}: {}", tensors.len())?;
    if args.tensors {
        table::write_tensors(out, &tensors)?;
    } else {
        write_tensor_groups(out, &tensors)?;
    }
    writeln!(out)?;
    write_sizes(out, &Sizes::of(&tensors))?;
    writeln!(out)?;
    verdict::Verdict::of(file).write(out)
}
