//! THE BINARY `muser`: commands, flags, terminal. Everything else is in the
//! libraries.

mod bench;
mod chat;
mod draft;
mod fault;
mod input;
mod inspect;
mod interrupt;
mod model_file;
mod output;
mod parity;
mod run;
mod sampling;
mod serve;
mod synth;
mod template;
mod terminal;
mod tokenize;
mod walk;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A local inference engine for Muse Glimmer 30B and small Llama models.
#[derive(Parser)]
#[command(
    name = "muser",
    version,
    propagate_version = true,
    max_term_width = 100
)]
#[command(
    after_help = "Without --model, commands use nano-glimmer, a tiny trained model of the \
                        Muse Glimmer architecture that is part of this program.\n\n\
                        Examples:\n  \
                        muser run \"Tell me a story about a lighthouse\"\n  \
                        muser serve --model Muse-Glimmer-30B-Q4_K_M.gguf --port 8080\n  \
                        muser run --model Muse-Glimmer-30B-Q4_K_M.gguf --reasoning low \"Hello\"\n  \
                        muser inspect model.gguf"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Serve(Box<serve::Args>),
    Inspect(inspect::Args),
    Tokenize(tokenize::Args),
    Template(template::Args),
    Parity(parity::Args),
    Synth(synth::Args),
    Bench(bench::Args),
    Walk(walk::Args),
}

fn main() -> ExitCode {
    fault::explain_bus_errors();
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Template(args) => template::run(&args),
        Command::Parity(args) => parity::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Walk(args) => walk::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) if terminal::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            terminal::report(&error);
            match interrupt::is_requested() {
                true => interrupt::exit_code(),
                false => ExitCode::FAILURE,
            }
        }
    }
}
