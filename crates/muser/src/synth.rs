//! `muser synth`.

use std::process::ExitCode;

/// (being written)
#[derive(clap::Args, Debug)]
pub struct Args {}

pub fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not there yet")
}
