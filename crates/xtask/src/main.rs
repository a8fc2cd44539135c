//! The repository's own commands, run as `cargo xtask <command>`.
//!
//! Nothing here is part of the product, and the product never depends on it. Every command works from any folder of the
//! checkout: paths are taken from the place of this crate, not from the current folder.

mod ci;
mod client;
mod command;
mod fetch;
mod gpu;
mod load;
mod rival;
mod serving;
mod soak;
mod tidy;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What a command gives back; the text of an error is printed as it stands.
type Outcome<T> = Result<T, Box<dyn Error>>;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Checks and chores of the Muser repository"
)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check the rules of the tree that no compiler checks: lengths, layering, names, unsafe, unfinished work
    Tidy,
    /// Run the steps of continuous integration and print a summary
    Ci(ci::Options),
    /// Fetch a public model that the golden tests need, and check its SHA-256
    Fetch {
        /// Which model
        #[arg(value_enum)]
        model: fetch::Model,
    },
    /// Run the golden tests that need a fetched model (fetches it first)
    Golden,
    /// Compare answers with and without drafts: every request, draft length and way to an answer (minutes to hours)
    Speculation,
    /// Test the server with the real `openai` package (installs it under target/client first)
    Client,
    /// Build the tests that need a GPU into a folder to carry, and run them
    Gpu(gpu::Options),
    /// Fetch NVRTC, with which a test compiles all CUDA kernels
    Nvrtc,
    /// Measure Muser and llama.cpp in turn on a model file (builds llama.cpp under target/rival first)
    Rival(rival::Options),
    /// Keep many conversations going on a server, then compute their answers again, alone
    Soak(soak::Options),
    /// Measure what clients of a server see, beside llama.cpp's batched decoding
    Load(load::Options),
}

fn main() -> ExitCode {
    let root = root();
    let outcome = match Arguments::parse().command {
        Task::Tidy => tidy::run(root),
        Task::Ci(options) => ci::run(root, &options),
        Task::Fetch { model } => fetch::run(root, model).map(|_| ()),
        Task::Golden => ci::golden(root).map(|_| ()),
        Task::Speculation => ci::speculation(root),
        Task::Client => ci::client(root),
        Task::Gpu(options) => gpu::run(root, &options),
        Task::Nvrtc => gpu::nvrtc(root),
        Task::Rival(options) => rival::run(root, &options),
        Task::Soak(options) => soak::run(root, &options),
        Task::Load(options) => load::run(root, &options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the checkout: two folders above this crate.
fn root() -> &'static Path {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_folder.ancestors().nth(2).unwrap_or(crate_folder)
}
