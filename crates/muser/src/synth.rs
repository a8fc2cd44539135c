//! `muser synth`: writes a model file with random weights, as a stream.
//!
//! What a reader would get wrong: nothing appears under the final name before
//! the last byte is on the disk; until then a hidden `.gguf.partial` file in the
//! same folder grows, which an error or Ctrl-C removes. A killed process leaves
//! it; since it looks like one that is being written, the next run names it and
//! deletes nothing.

mod mix;
mod plan;
mod shape;
mod values;
mod vocabulary;

use crate::inspect::{Sizes, write_sizes, write_tensor_groups};
use crate::interrupt;
use crate::model_file::ModelArgs;
use crate::terminal;
use anyhow::{Context, bail};
use gguf::{TensorInfo, TensorType, Writer};
use mix::{Mix, parse_type};
use plan::{Encodings, Plan};
use shape::{Changes, Name};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use values::Generator;

/// Write a GGUF file with random weights, of any size
#[derive(clap::Args, Debug)]
#[command(
    long_about = "Write a GGUF file with random weights, of a named or given shape and any \
    size: for tests and measurements where no trained file is at hand.\n\n\
    A seed means the same bytes on every machine. The vocabulary depends on its size alone, so \
    that a drafter fits every target with its width and vocabulary."
)]
#[command(after_help = "Examples:\n  \
    muser synth tiny.gguf\n  \
    muser synth 17gb.gguf --shape 30b --head q5_k\n  \
    muser synth dflash.gguf --shape drafter\n  \
    muser synth wide.gguf --shape 1.5b --layers 4 --embd 6656 --mix q8_0 --seed 7\n  \
    muser synth 17gb.gguf --shape 30b --dry-run")]
pub struct Args {
    /// File to write
    #[arg(value_name = "OUT.gguf")]
    out: PathBuf,
    /// Named shape
    #[arg(long, value_enum, default_value = "nano")]
    shape: Name,
    /// q4_k_m, or an encoding for all matrices: f32, bf16, q8_0, q4_k, iq3_s, ...
    /// [default: q8_0 for nano and its drafter, else q4_k_m]
    #[arg(long, value_name = "MIX")]
    mix: Option<Mix>,
    /// Encoding of the head [default: the mix's; q6_k in q4_k_m]
    #[arg(long, value_name = "TYPE", value_parser = parse_type)]
    head: Option<TensorType>,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replace the file if it is there; for a link, the file that it leads to
    #[arg(long)]
    force: bool,
    /// Show what would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    changes: Changes,
}

/// Writes the file.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let shape = args.changes.apply(args.shape.shape())?;
    let encodings = Encodings {
        mix: args.mix.unwrap_or(args.shape.default_mix()),
        head: args.head,
    };
    let bundled = ModelArgs { model: None }.open()?;
    let plan = Plan::new(bundled.gguf.metadata(), &shape, encodings, args.seed)?;
    drop(bundled);
    let infos = plan.infos();
    let sizes = Sizes::of(&infos);
    if args.dry_run {
        let mut out = anstream::stdout().lock();
        write_tensor_groups(&mut out, &infos)?;
        writeln!(out)?;
        write_sizes(&mut out, &sizes)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.out.is_file() && !args.force {
        bail!("{} exists; --force replaces it", args.out.display());
    }
    let out = target(&args.out)?;
    warn_of_leftovers(&out);
    interrupt::watch()?;
    let start = Instant::now();
    let file_bytes = write(&out, &plan, &infos, args.seed)?;
    let seconds = start.elapsed().as_secs_f64();
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}: {}, {}, {} parameters, {:.2} bits per weight, seed {}; {seconds:.1} s, {}/s",
        args.out.display(),
        terminal::bytes(file_bytes),
        terminal::count(infos.len(), "tensor"),
        terminal::grouped(sizes.n_parameters),
        sizes.bits_per_weight(),
        args.seed,
        terminal::bytes((file_bytes as f64 / seconds.max(1e-9)) as u64),
    )?;
    Ok(ExitCode::SUCCESS)
}

/// The path that is written: that of the file which `out` leads to, if it is a
/// link, since a new file of that name would take the link's place.
fn target(out: &Path) -> anyhow::Result<PathBuf> {
    match std::fs::symlink_metadata(out) {
        Ok(about) if about.is_symlink() => std::fs::canonicalize(out).with_context(|| {
            let out = out.display();
            format!("{out}: found a link that leads to nothing, expected a file or a free name")
        }),
        _ => Ok(out.to_path_buf()),
    }
}

/// Names the unfinished files in the folder of `out`.
fn warn_of_leftovers(out: &Path) {
    // Where the folder cannot be listed, writing will say what is wrong.
    let Ok(entries) = std::fs::read_dir(folder(out)) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') && name.ends_with(".gguf.partial") {
            let n_bytes = entry.metadata().map_or(0, |about| about.len());
            terminal::warn(&format!(
                "{} ({}) is an unfinished file; delete it unless another muser writes it now",
                entry.path().display(),
                terminal::bytes(n_bytes),
            ));
        }
    }
}

/// The folder of a file.
fn folder(file: &Path) -> &Path {
    let folder = file.parent().filter(|p| !p.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Writes the planned file to `out`; gives its length in bytes.
fn write(out: &Path, plan: &Plan, infos: &[TensorInfo], seed: u64) -> anyhow::Result<u64> {
    let data_bytes = infos
        .iter()
        .map(TensorInfo::data_bytes)
        .sum::<Result<u64, _>>()?;
    check_space(out, data_bytes)?;
    let mut writer = Writer::create(out, &plan.metadata, infos)
        .map_err(|error| explained(error, out, data_bytes))?;
    let file_bytes = writer.file_bytes();
    let bar = terminal::byte_progress(data_bytes);
    let mut chunk = Vec::new();
    for tensor in &plan.tensors {
        let name = &tensor.info.name;
        let tensor_bytes = tensor.info.data_bytes()?;
        let mut generator = Generator::new(seed, &tensor.info, tensor_bytes, tensor.values);
        while generator.next_chunk(&mut chunk) {
            writer
                .append(name, &chunk)
                .map_err(|error| explained(error, out, file_bytes))?;
            bar.inc(chunk.len() as u64);
            if interrupt::is_requested() {
                bail!("interrupted; {} was not written", out.display());
            }
        }
    }
    bar.set_message("waiting for the disk");
    writer
        .finish()
        .map_err(|error| explained(error, out, file_bytes))?;
    bar.finish_and_clear();
    Ok(file_bytes)
}

/// Fails if the disk certainly has too little room for `needed_bytes`.
fn check_space(out: &Path, needed_bytes: u64) -> anyhow::Result<()> {
    match available_bytes(out) {
        Some(available) if available < needed_bytes => bail!("{}", space(out, needed_bytes)),
        _ => Ok(()),
    }
}

/// The error; where room is missing, with how much.
fn explained(error: gguf::Error, out: &Path, needed_bytes: u64) -> anyhow::Error {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    let is_full = match &error {
        gguf::Error::Write { error, .. } => {
            matches!(error.kind(), FileTooLarge | QuotaExceeded | StorageFull)
        }
        _ => false,
    };
    let error = anyhow::Error::new(error);
    match is_full {
        true => error.context(space(out, needed_bytes)),
        false => error,
    }
}

/// What a file needs and what there is.
fn space(out: &Path, needed_bytes: u64) -> String {
    let needed = terminal::grouped(needed_bytes);
    let available = match available_bytes(out) {
        Some(n) => format!("{} are available", terminal::grouped(n)),
        None => "it is unknown how many are available".to_string(),
    };
    format!(
        "cannot write {}: it needs {needed} bytes, {available}",
        out.display()
    )
}

/// Bytes that may be written to the folder of `out`, if the system says.
fn available_bytes(out: &Path) -> Option<u64> {
    let folder = folder(out);
    #[cfg(unix)]
    {
        let about = rustix::fs::statvfs(folder).ok()?;
        about.f_bavail.checked_mul(about.f_frsize)
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}
