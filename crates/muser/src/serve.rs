//! `muser serve`: one model behind an OpenAI-compatible interface.
//!
//! What people read goes to stderr; with `--json` one line on stdout says when
//! the server is ready and where. What one would get wrong: the server listens
//! before the model is loaded, so that `/health` can say `starting`.

use crate::chat::ChatArgs;
use crate::draft::{self, DraftArgs};
use crate::model_file::{LoadArgs, ModelArgs, ModelFile};
use crate::sampling::{Sampling, SamplingArgs, describe};
use crate::terminal::{self, remark};
use anyhow::{Context, bail};
use bytesize::ByteSize;
use clap::{Args as ClapArgs, ValueEnum};
use engine::{Info, Service};
use gguf::shown;
use model::Forward;
use serde_json::json;
use server::{ApiKeys, Limits, ModelParts, Server, Settings, TlsFiles};
use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tracing_subscriber::filter::LevelFilter;

/// Bytes of each end of a tensor that its digest looks at.
const DIGESTED_BYTES: usize = 64 << 10;

/// Serve a model to programs that speak OpenAI's interface
#[derive(ClapArgs, Debug)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    muser serve --model Muse-Glimmer-30B-Q4_K_M.gguf\n  \
    muser serve --model model.gguf --alias gpt-4o --ctx 32768 --sequences 8\n  \
    muser serve --model model.gguf --host 0.0.0.0 --api-key-file keys.txt \\\n      \
    --tls-cert cert.pem --tls-key key.pem\n  \
    muser serve --model model.gguf --draft drafter.gguf\n  \
    muser serve --port 0 --json | jq -r .url\n\n\
    Then:\n  \
    curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\\n      \
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n\n\
    SIGTERM or Ctrl-C lets running answers end; a second one cuts them.")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Name that requests may ask for; may be given several times, answers bear the first
    /// [default: the file's name without .gguf]
    #[arg(long, value_name = "NAME", value_parser = name)]
    alias: Vec<String>,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    chat: ChatArgs,
    /// Print one line of JSON on standard output when ready
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    log: LogArgs,
    // Last, since its heading goes on to the end.
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// How many answers at a time, and in how much memory.
#[derive(ClapArgs, Clone, Debug)]
struct EngineArgs {
    /// Answers that are made at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_1)]
    sequences: usize,
    /// Answers that may wait beside those; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: usize,
    /// Memory for keys and values, as 8GiB [default: what the sequences can take, up to half of
    /// the memory beside the weights]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    kv_memory: Option<ByteSize>,
    /// Of that, most that the prefix cache keeps of earlier prompts; 0 turns it off [default: half]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    prefix_cache: Option<ByteSize>,
}

/// Who can reach the server.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Network")]
struct NetworkArgs {
    /// Address to listen on; one that other machines reach needs --api-key-file or --insecure
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST),
        value_parser = address
    )]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// File with API keys, one a line; requests must bring one
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Serve everybody who reaches the address, without a key
    #[arg(long, conflicts_with = "api_key_file")]
    insecure: bool,
    /// Certificate chain for TLS (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key for TLS (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Origin whose web pages may read answers, or *; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
}

/// What one client can take.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Bytes of a request
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = body_bytes)]
    max_body: ByteSize,
    /// Seconds until a request's headers are there
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds)]
    header_timeout: u64,
    /// Seconds until a request's body is there
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds)]
    body_timeout: u64,
    /// Seconds that a client may leave its answer unread
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds)]
    reader_grace: u64,
    /// Seconds until an answer must be complete [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    deadline: Option<u64>,
    /// Connections at a time
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_1)]
    max_connections: usize,
}

/// What is written about requests.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Log")]
struct LogArgs {
    /// What goes to the log on standard error
    #[arg(long, value_enum, default_value_t, value_name = "LEVEL")]
    log_level: LogLevel,
    /// Write requests with their prompts to the log
    #[arg(long)]
    log_prompts: bool,
}

/// From which weight on something is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum LogLevel {
    /// Nothing
    Off,
    /// What failed
    Error,
    /// And what is odd
    Warn,
    /// And a line for each request
    #[default]
    Info,
    /// And what broke off
    Debug,
}

fn at_least_1(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a number, 1 or more".to_string()),
        Ok(n) => Ok(n),
    }
}

fn name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected one character or more".to_string()),
        name => Ok(name.to_string()),
    }
}

fn address(text: &str) -> Result<IpAddr, String> {
    let expected = "expected an IP address, such as 127.0.0.1 or 0.0.0.0 (all of this machine)";
    text.parse().map_err(|_| expected.to_string())
}

fn bytes(text: &str) -> Result<ByteSize, String> {
    let expected = "expected a number of bytes, such as 512MiB or 8GiB";
    text.parse().map_err(|_| expected.to_string())
}

fn body_bytes(text: &str) -> Result<ByteSize, String> {
    match bytes(text)? {
        ByteSize(0) => Err("expected 1 byte or more".to_string()),
        size => Ok(size),
    }
}

fn seconds(text: &str) -> Result<u64, String> {
    at_least_1(text).map(|n| n as u64)
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    args.log.begin();
    let settings = args.settings()?;
    if let Err(server::Error::OpenAddress { address }) = settings.check() {
        bail!(
            "--host: found {}, which other machines can reach, expected a loopback address such \
             as 127.0.0.1, or --api-key-file FILE or --insecure beside it",
            address.ip()
        );
    }
    let server = Server::start(settings.clone())?;
    server.stop_on_signals()?;
    let mut file = args.load.open(&args.model)?;
    args.draft.open(&args.load, &mut file)?;
    let tokenizer = file.tokenizer()?;
    let template = match has_template(args, &file) {
        true => Some(args.chat.template(&file, &tokenizer)?),
        false => None,
    };
    let kv_memory = args.engine.kv_memory.map(|size| size.as_u64());
    let model = args
        .load
        .load_shared(&file, args.engine.sequences, kv_memory)?;
    let sampling = args
        .sampling
        .settings(&file, &tokenizer, model.config().architecture)?;
    let identity = identity(&file, &*model);
    let service = start_engine(args, model, identity)?;
    let names = names(&args.alias, &file);
    let date = args.chat.date.as_deref();
    server.serve(ModelParts {
        names: names.clone(),
        tokenizer,
        template,
        defaults: sampling.settings.clone(),
        handle: service.handle(),
        date: date.map(str::parse).transpose().context("--date")?,
        reasoning: args.chat.reasoning,
        seed: args.sampling.seed,
        identity,
    })?;
    let start = Start {
        file: &file,
        names: &names,
        info: service.handle().info().clone(),
        sampling: &sampling,
        seed: args.sampling.seed,
        has_chat: has_template(args, &file),
        settings: &settings,
        url: url(server.address(), args.network.tls_cert.is_some()),
    };
    match args.json {
        true => terminal::print_line(start.json())?,
        false => start.print(),
    }
    server.wait()?;
    service.join().map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn settings(&self) -> anyhow::Result<Settings> {
        let network = &self.network;
        let keys = network.api_key_file.as_deref().map(ApiKeys::read);
        let tls = network.tls_cert.clone().zip(network.tls_key.clone());
        let seconds = Duration::from_secs;
        let body_bytes = usize::try_from(self.limits.max_body.as_u64());
        Ok(Settings {
            address: SocketAddr::new(network.host, network.port),
            tls: tls.map(|(certificate, key)| TlsFiles { certificate, key }),
            keys: keys.transpose()?.unwrap_or_default(),
            is_insecure: network.insecure,
            cors_origins: network.cors_origin.clone(),
            limits: Limits {
                body_bytes: body_bytes.context("--max-body")?,
                header_timeout: seconds(self.limits.header_timeout),
                body_timeout: seconds(self.limits.body_timeout),
                reader_grace: seconds(self.limits.reader_grace),
                deadline: self.limits.deadline.map(seconds),
                connections: self.limits.max_connections,
            },
            logs_prompts: self.log.log_prompts,
        })
    }
}

impl LogArgs {
    /// Begins to write the log.
    fn begin(&self) {
        use tracing_subscriber::filter::Targets;
        use tracing_subscriber::layer::SubscriberExt;
        use tracing_subscriber::util::SubscriberInitExt;
        let level = match self.log_level {
            LogLevel::Off => LevelFilter::OFF,
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
        };
        // What libraries say about their insides is for those who write them.
        let ours = Targets::new()
            .with_target("server", level)
            .with_target("engine", level);
        let format = tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false);
        tracing_subscriber::registry()
            .with(format)
            .with(ours)
            .init();
    }
}

/// Does the model get a chat template?
fn has_template(args: &Args, file: &ModelFile) -> bool {
    args.chat.chat_template.is_some() || file.text("tokenizer.chat_template").is_some()
}

fn start_engine(
    args: &Args,
    model: Box<dyn Forward>,
    identity: [u8; 32],
) -> anyhow::Result<Service> {
    let capacity = model.capacity();
    let kv_bytes = (capacity.max_slabs * capacity.layout.slab_bytes()) as u64;
    let prefix_cache = args.engine.prefix_cache.map(|size| size.as_u64());
    if let Some(found) = prefix_cache.filter(|&bytes| bytes > kv_bytes) {
        bail!(
            "--prefix-cache: found {}, expected at most the memory for keys and values, {}; \
             --kv-memory gives more",
            terminal::bytes(found),
            terminal::bytes(kv_bytes),
        );
    }
    let settings = engine::Settings {
        n_ctx: args.load.ctx,
        sequences: args.engine.sequences,
        queue: args.engine.queue,
        prefix_cache_bytes: prefix_cache.unwrap_or(kv_bytes / 2),
        identity,
        speculation: args.draft.speculation(),
    };
    Service::start(model, settings).context("cannot start the engine")
}

/// The names that requests may ask for.
fn names(aliases: &[String], file: &ModelFile) -> Vec<String> {
    if !aliases.is_empty() {
        return aliases.to_vec();
    }
    let stem = Path::new(&file.name).file_stem();
    match stem.filter(|_| !file.is_bundled) {
        Some(stem) => vec![stem.to_string_lossy().into_owned()],
        None => vec!["nano-glimmer".to_string()],
    }
}

/// A digest of what determines the keys and values of a prompt: header, tensor
/// directory, both ends of every tensor, those of a drafter as well, the device's
/// arithmetic, this program.
fn identity(file: &ModelFile, model: &dyn Forward) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let drafter = file.drafter.as_ref().map(|drafter| &drafter.gguf);
    for gguf in [&file.gguf].into_iter().chain(drafter) {
        for header in gguf.headers() {
            hasher.update(header);
        }
        for tensor in gguf.tensors() {
            let bytes: &[u8] = &tensor.data;
            let n = bytes.len().min(DIGESTED_BYTES);
            hasher.update(&bytes[..n]);
            hasher.update(&bytes[bytes.len() - n..]);
        }
    }
    let settings = [
        env!("CARGO_PKG_VERSION").to_string(),
        model.caps().device,
        model.capacity().layout.ty.to_string(),
    ];
    for setting in settings {
        hasher.update(setting.as_bytes());
        hasher.update(&[0]);
    }
    *hasher.finalize().as_bytes()
}

fn url(address: SocketAddr, is_tls: bool) -> String {
    let scheme = if is_tls { "https" } else { "http" };
    format!("{scheme}://{address}")
}

/// What is said when the server is ready.
struct Start<'a> {
    file: &'a ModelFile,
    names: &'a [String],
    info: Info,
    sampling: &'a Sampling,
    /// That of `--seed`.
    seed: Option<u64>,
    has_chat: bool,
    settings: &'a Settings,
    url: String,
}

impl Start<'_> {
    fn print(&self) {
        let Info {
            n_ctx,
            sequences,
            queue,
            prefix_cache_bytes,
            kv_capacity_bytes,
            ..
        } = self.info;
        let title = match self
            .file
            .text("general.name")
            .filter(|_| !self.file.is_bundled)
        {
            Some(name) => format!("{} ({})", shown(name), self.file.name),
            None => self.file.name.clone(),
        };
        remark(&format!(
            "{title} | {} | {} | kv {} | context {n_ctx}",
            self.info.architecture.name(),
            self.info.device,
            self.info.kv,
        ));
        let cache = match prefix_cache_bytes {
            0 => "prefix cache off (--prefix-cache 0)".to_string(),
            bytes => format!("prefix cache up to {}", terminal::bytes(bytes)),
        };
        remark(&format!(
            "{sequences} sequences, {queue} more may wait | keys and values up to {} | {cache}",
            terminal::bytes(kv_capacity_bytes),
        ));
        let speculation = draft::describe(self.info.speculation.as_ref(), self.file);
        remark(&format!("speculation {speculation}"));
        let sampling = describe(&self.sampling.settings);
        let seed = match self.seed {
            Some(seed) => format!("seed {seed} where a request has none"),
            None => "a new seed for each request that has none".to_string(),
        };
        remark(&format!(
            "sampling {sampling} ({}) | {seed}",
            self.sampling.origin
        ));
        if !self.sampling.not_honoured.is_empty() {
            let keys = self.sampling.not_honoured.join(", ");
            remark(&format!("not honoured of the file: {keys}"));
        }
        remark(&self.limits());
        if !self.has_chat {
            remark("the file has no chat template: /v1/completions only, no chats");
        }
        remark(&format!("{} at {}/v1", self.names.join(", "), self.url));
    }

    /// What one client can take, and who may be one.
    fn limits(&self) -> String {
        let Settings {
            keys,
            is_insecure,
            limits,
            ..
        } = self.settings;
        let deadline = match limits.deadline {
            Some(deadline) => format!("answers within {} s", deadline.as_secs()),
            None => "no deadline".to_string(),
        };
        let clients = match (keys.len(), is_insecure) {
            (0, false) => "clients of this machine only".to_string(),
            (0, true) => "anybody may ask (--insecure)".to_string(),
            (n, _) => format!("{} let in", terminal::count(n, "API key")),
        };
        format!(
            "requests up to {}, headers within {} s, bodies within {} s, unread for {} s at most, \
             {deadline}, {} at a time | {clients}",
            terminal::bytes(limits.body_bytes as u64),
            limits.header_timeout.as_secs(),
            limits.body_timeout.as_secs(),
            limits.reader_grace.as_secs(),
            terminal::count(limits.connections, "connection"),
        )
    }

    fn speculation(&self) -> serde_json::Value {
        let drafter = self.file.drafter.as_ref();
        match self.info.speculation {
            None => json!({ "is_on": false, "why": draft::OFF }),
            Some(info) => json!({
                "is_on": true,
                "drafts": info.source,
                "drafter": drafter.map(|drafter| drafter.name.as_str()),
                "draft_max": info.most,
            }),
        }
    }

    fn json(&self) -> serde_json::Value {
        let limits = &self.settings.limits;
        json!({
            "url": self.url,
            "models": self.names,
            "file": self.file.name,
            "architecture": self.info.architecture.name(),
            "device": self.info.device,
            "kv": self.info.kv.to_string(),
            "n_ctx": self.info.n_ctx,
            "sequences": self.info.sequences,
            "queue": self.info.queue,
            "kv_bytes": self.info.kv_capacity_bytes,
            "prefix_cache_bytes": self.info.prefix_cache_bytes,
            "speculation": self.speculation(),
            "sampling": {
                "settings": describe(&self.sampling.settings),
                "origin": self.sampling.origin,
                "seed": self.seed,
            },
            "has_chat": self.has_chat,
            "limits": {
                "body_bytes": limits.body_bytes,
                "header_timeout_s": limits.header_timeout.as_secs(),
                "body_timeout_s": limits.body_timeout.as_secs(),
                "reader_grace_s": limits.reader_grace.as_secs(),
                "deadline_s": limits.deadline.map(|deadline| deadline.as_secs()),
                "connections": limits.connections,
            },
            "api_keys": self.settings.keys.len(),
            "is_insecure": self.settings.is_insecure,
        })
    }
}
