//! What Muser makes of a file: which graph runs it with which numbers, or the
//! reason why none does.
//!
//! The judge is the loader itself: a file is loaded onto the reference backend,
//! which maps weights and copies none, so nothing here can disagree with
//! `muser run`. A drafter loads beside its target only: its tensors are checked
//! without one.

use super::table::{Align, write_rows};
use crate::sampling;
use crate::terminal::{BOLD, bytes, grouped};
use gguf::{Gguf, Metadata};
use model::backend::BlockWindow;
use model::{
    Architecture, Config, DrafterConfig, KvType, Model, Options, PAGE_ROWS, PageClass, Reference,
    WindowConvention,
};
use serde::Serialize;
use std::io::{self, Write};
use text::{ChatTemplate, ControlTokens, Tokenizer, TurnFormat};

/// The element type for which the size of keys and values is given.
const KV: KvType = KvType::F16;

/// What Muser makes of a file.
#[derive(Serialize)]
pub struct Verdict {
    usable: bool,
    /// `model`, `drafter`, or none if the architecture is unknown.
    role: Option<&'static str>,
    /// Why it is not usable.
    reason: Option<String>,
    model: Option<ModelFacts>,
    drafter: Option<DrafterFacts>,
    tokenizer: Option<TokenizerFacts>,
    /// Keys `general.sampling.*` that the sampler has nothing for.
    sampling_not_honoured: Vec<String>,
}

#[derive(Serialize)]
struct ModelFacts {
    architecture: &'static str,
    n_layer: usize,
    n_layer_full: usize,
    n_layer_sliding: usize,
    window: Option<u32>,
    n_embd: usize,
    n_ff: usize,
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    n_vocab: usize,
    n_ctx: usize,
    rope: RopeFacts,
    norm_eps: f32,
    post_norm_eps: Option<f32>,
    logit_scale: f32,
    logit_cap: Option<f32>,
    /// Bytes of weights that one token reads: all but the embedding, of which
    /// it reads a row, unless the embedding is the head.
    weight_bytes_per_token: u64,
    kv: KvFacts,
}

#[derive(Serialize)]
struct RopeFacts {
    /// As the file states it.
    base: Option<f32>,
    dimensions: usize,
    pairing: &'static str,
    /// `all`, `sliding` or `no`.
    layers: &'static str,
    scaling: Option<String>,
}

#[derive(Serialize)]
struct KvFacts {
    #[serde(rename = "type")]
    ty: String,
    full_bytes_per_token: u64,
    sliding_bytes_per_token: u64,
    /// Of one sequence as long as the context, without padding to pages.
    bytes_at_full_context: u64,
}

#[derive(Serialize)]
struct DrafterFacts {
    n_layer: usize,
    n_embd: usize,
    n_ff: usize,
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    block_size: usize,
    mask_token: u32,
    /// The target's layers whose inputs it reads.
    target_layers: Vec<usize>,
    window: Option<u32>,
}

#[derive(Serialize)]
struct TokenizerFacts {
    model: String,
    pre: Option<String>,
    n_tokens: usize,
    n_merges: usize,
    bos: Option<u32>,
    add_bos: bool,
    /// The tokens that end an answer.
    end: Vec<u32>,
    /// Bytes that no token spells.
    missing_bytes: Vec<u8>,
    /// BLAKE3 of the tokens: a drafter's equals its target's.
    digest: Option<String>,
    chat_template_bytes: Option<usize>,
    /// Why the template is of no use.
    chat_template_error: Option<String>,
    /// `muse-glimmer` or `plain`.
    turns: &'static str,
}

/// The message of an error with its causes.
fn message(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let next_text = next.to_string();
        if !text.contains(&next_text) {
            text = format!("{text}: {next_text}");
        }
        cause = next.source();
    }
    text
}

impl Verdict {
    /// Judges a file.
    pub fn of(file: &Gguf) -> Verdict {
        let meta = file.metadata();
        let mut verdict = Verdict {
            usable: false,
            role: None,
            reason: None,
            model: None,
            drafter: None,
            tokenizer: None,
            sampling_not_honoured: sampling::not_honoured(meta),
        };
        let judged = match Config::from_metadata(meta) {
            Err(model::Error::IsDrafter) => verdict.judge_drafter(file),
            Err(error) => Err(message(&error)),
            Ok(config) => verdict.judge_model(file, config),
        };
        let tokenizer = match Tokenizer::from_metadata(meta) {
            Ok(tokenizer) => {
                verdict.tokenizer = Some(TokenizerFacts::new(meta, &tokenizer));
                Ok(())
            }
            Err(error) => Err(format!("tokenizer: {}", message(&error))),
        };
        verdict.reason = judged.and(tokenizer).err();
        verdict.usable = verdict.reason.is_none();
        verdict
    }

    fn judge_drafter(&mut self, file: &Gguf) -> Result<(), String> {
        self.role = Some("drafter");
        let config = DrafterConfig::from_metadata(file.metadata(), WindowConvention::default());
        let config = config.map_err(|error| message(&error))?;
        self.drafter = Some(DrafterFacts::new(&config));
        config.check_tensors(file).map_err(|error| message(&error))
    }

    fn judge_model(&mut self, file: &Gguf, config: Config) -> Result<(), String> {
        self.role = Some("model");
        self.model = Some(ModelFacts::new(file, &config));
        let options = Options {
            kv: KV,
            kv_bytes: 0,
        };
        let loaded = Model::load_as(Reference::new(), file, config, options);
        loaded.map(drop).map_err(|error| message(&error))
    }

    /// Writes the verdict for people.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let what = match (self.usable, self.role) {
            (true, Some("drafter")) => "usable beside the model that it drafts for".to_string(),
            (true, _) => "can run".to_string(),
            (false, _) => "cannot run".to_string(),
        };
        writeln!(out, "{BOLD}Muser{BOLD:#}: {what}")?;
        let mut rows = Vec::new();
        let mut add = |name: &str, text: String| rows.push([name.to_string(), text]);
        if let Some(reason) = &self.reason {
            add("reason", reason.clone());
        }
        if let Some(model) = &self.model {
            model.describe(&mut add);
        }
        if let Some(drafter) = &self.drafter {
            drafter.describe(&mut add);
        }
        if let Some(tokenizer) = &self.tokenizer {
            tokenizer.describe(&mut add);
        }
        if !self.sampling_not_honoured.is_empty() {
            add("not honoured", self.sampling_not_honoured.join(", "));
        }
        write_rows(out, &[Align::Left; 2], &rows)
    }
}

impl ModelFacts {
    fn new(file: &Gguf, config: &Config) -> ModelFacts {
        let meta = file.metadata();
        let count = |class| config.layers.iter().filter(|l| l.class == class).count();
        let head = file.tensor("output.weight");
        let embedding = file.tensor("token_embd.weight").filter(|_| head.is_some());
        let embedding_bytes = embedding.map_or(0, |t| t.data.len() as u64);
        ModelFacts {
            architecture: config.architecture.name(),
            n_layer: config.n_layer,
            n_layer_full: count(PageClass::Full),
            n_layer_sliding: count(PageClass::Sliding),
            window: config.layers.iter().find_map(|l| l.window),
            n_embd: config.n_embd,
            n_ff: config.n_ff,
            n_head: config.n_head,
            n_head_kv: config.n_head_kv,
            head_dim: config.head_dim,
            n_vocab: config.n_vocab,
            n_ctx: config.n_ctx,
            rope: RopeFacts::new(meta, config),
            norm_eps: config.norm_eps,
            post_norm_eps: (config.architecture == Architecture::MuseGlimmer)
                .then_some(config.post_norm_eps),
            logit_scale: config.logit_scale,
            logit_cap: config.logit_cap,
            weight_bytes_per_token: file.data_bytes() - embedding_bytes,
            kv: KvFacts::new(config),
        }
    }

    fn describe(&self, add: &mut impl FnMut(&str, String)) {
        let (full, sliding) = (self.n_layer_full, self.n_layer_sliding);
        let layers = match (full, sliding, self.window) {
            (_, 0, _) | (_, _, None) => format!("{}, each sees all earlier tokens", self.n_layer),
            (0, _, Some(w)) => format!("{}, each sees {w} tokens", self.n_layer),
            (_, _, Some(w)) => format!(
                "{}: {full} see all earlier tokens, {sliding} see {w}",
                self.n_layer
            ),
        };
        add("architecture", self.architecture.to_string());
        add("layers", layers);
        add(
            "width",
            format!("{}, feed-forward {}", self.n_embd, self.n_ff),
        );
        add(
            "attention",
            format!(
                "{} query heads, {} key/value heads of {}",
                self.n_head, self.n_head_kv, self.head_dim
            ),
        );
        add("RoPE", self.rope.text(self.head_dim));
        let cap = self
            .logit_cap
            .map_or(String::new(), |cap| format!(", capped at {cap}"));
        add("logits", format!("times {}{cap}", self.logit_scale));
        add("context", format!("{} tokens", grouped(self.n_ctx as u64)));
        add(
            "weights",
            format!(
                "{} bytes read for a token",
                grouped(self.weight_bytes_per_token)
            ),
        );
        add("keys and values", self.kv.text(self.window));
    }
}

impl RopeFacts {
    fn new(meta: &Metadata, config: &Config) -> RopeFacts {
        // The very key that was read: the file may spell its architecture in two ways.
        let arch = meta
            .str("general.architecture")
            .ok()
            .flatten()
            .unwrap_or_default();
        let number = |key: &str| meta.f32(&format!("{arch}.{key}")).ok().flatten();
        let scaling = meta
            .str(&format!("{arch}.rope.scaling.type"))
            .ok()
            .flatten();
        let scaling = scaling.filter(|&s| !matches!(s, "none" | ""));
        let n_turning = config.layers.iter().filter(|l| l.rope).count();
        RopeFacts {
            base: number("rope.freq_base_swa").or_else(|| number("rope.freq_base")),
            dimensions: 2 * config.rope.inv_freq.len(),
            pairing: match config.rope.pairing {
                model::Pairing::Neighbours => "neighbours",
                model::Pairing::Halves => "halves",
            },
            layers: match n_turning {
                0 => "no",
                n if n == config.n_layer => "all",
                _ => "sliding",
            },
            scaling: scaling.map(|kind| match number("rope.scaling.factor") {
                Some(factor) => format!("{kind} {factor}"),
                None => kind.to_string(),
            }),
        }
    }

    fn text(&self, head_dim: usize) -> String {
        let base = self
            .base
            .map_or(String::new(), |base| format!("base {base}, "));
        let scaling = self
            .scaling
            .as_ref()
            .map_or(String::new(), |s| format!(", scaling {s}"));
        format!(
            "{base}{} of {head_dim} dimensions, on {} layers{scaling}",
            self.dimensions, self.layers
        )
    }
}

impl KvFacts {
    fn new(config: &Config) -> KvFacts {
        let layout = config.kv_layout(KV);
        let of_token = |class| (layout.page_bytes(class) / PAGE_ROWS) as u64;
        let n_rows = |class: PageClass| {
            let window = layout.classes[class as usize].window;
            window.map_or(config.n_ctx, |w| config.n_ctx.min(w as usize)) as u64
        };
        let at_full = |class| of_token(class) * n_rows(class);
        KvFacts {
            ty: KV.to_string(),
            full_bytes_per_token: of_token(PageClass::Full),
            sliding_bytes_per_token: of_token(PageClass::Sliding),
            bytes_at_full_context: at_full(PageClass::Full) + at_full(PageClass::Sliding),
        }
    }

    fn text(&self, window: Option<u32>) -> String {
        let full = grouped(self.full_bytes_per_token);
        let sliding = grouped(self.sliding_bytes_per_token);
        let growth = match (self.full_bytes_per_token, window) {
            (_, None) => format!("{full} bytes a token"),
            (0, Some(w)) => format!("{sliding} bytes a token up to {w} tokens"),
            (_, Some(w)) => format!("{full} bytes a token, and {sliding} up to {w} tokens"),
        };
        let most = bytes(self.bytes_at_full_context);
        format!("{growth} ({}); {most} at full context", self.ty)
    }
}

impl DrafterFacts {
    fn new(config: &DrafterConfig) -> DrafterFacts {
        let window = |window: &BlockWindow| match *window {
            BlockWindow::All => None,
            BlockWindow::Below(w) | BlockWindow::Within(w) => Some(w),
        };
        DrafterFacts {
            n_layer: config.n_layer,
            n_embd: config.n_embd,
            n_ff: config.n_ff,
            n_head: config.n_head,
            n_head_kv: config.n_head_kv,
            head_dim: config.head_dim,
            block_size: config.block_size,
            mask_token: config.mask_token,
            target_layers: config.target_places.clone(),
            window: config.windows.iter().find_map(window),
        }
    }

    fn describe(&self, add: &mut impl FnMut(&str, String)) {
        let window = self.window.map_or("all".to_string(), |w| w.to_string());
        add("architecture", "dflash (drafter)".to_string());
        add("layers", format!("{}, window {window}", self.n_layer));
        add(
            "width",
            format!("{}, feed-forward {}", self.n_embd, self.n_ff),
        );
        add(
            "attention",
            format!(
                "{} query heads, {} key/value heads of {}",
                self.n_head, self.n_head_kv, self.head_dim
            ),
        );
        add(
            "block",
            format!("{} rows, mask token {}", self.block_size, self.mask_token),
        );
        let layers: Vec<String> = self.target_layers.iter().map(usize::to_string).collect();
        add(
            "reads",
            format!("the inputs of the target's layers {}", layers.join(", ")),
        );
    }
}

impl TokenizerFacts {
    fn new(meta: &Metadata, tokenizer: &Tokenizer) -> TokenizerFacts {
        let text = |key: &str| meta.str(key).ok().flatten();
        let merges = meta.strings("tokenizer.ggml.merges").ok().flatten();
        let template = text("tokenizer.chat_template");
        let compiled =
            template.map(|source| ChatTemplate::new(source, ControlTokens::of(tokenizer)));
        let digest = model::vocabulary_digest(meta).ok();
        TokenizerFacts {
            model: text("tokenizer.ggml.model").unwrap_or_default().to_string(),
            pre: text("tokenizer.ggml.pre").map(str::to_string),
            n_tokens: tokenizer.n_vocab(),
            n_merges: merges.map_or(0, gguf::StringArray::len),
            bos: tokenizer.bos(),
            add_bos: tokenizer.add_bos(),
            end: tokenizer.end_tokens(),
            missing_bytes: tokenizer.missing_bytes(),
            digest: digest.map(|d| d.iter().map(|byte| format!("{byte:02x}")).collect()),
            chat_template_bytes: template.map(str::len),
            chat_template_error: compiled.and_then(Result::err).map(|error| message(&error)),
            turns: match TurnFormat::of_chat(tokenizer) {
                TurnFormat::MuseGlimmer { .. } => "muse-glimmer",
                TurnFormat::Plain { .. } => "plain",
            },
        }
    }

    fn describe(&self, add: &mut impl FnMut(&str, String)) {
        let pre = self
            .pre
            .as_ref()
            .map_or(String::new(), |pre| format!(" ({})", pre.escape_debug()));
        let (tokens, merges) = (grouped(self.n_tokens as u64), grouped(self.n_merges as u64));
        add(
            "tokenizer",
            format!("{}{pre}, {tokens} tokens, {merges} merges", self.model),
        );
        let bos = match (self.bos, self.add_bos) {
            (None, _) => "none".to_string(),
            (Some(id), true) => format!("{id} before every text"),
            (Some(id), false) => id.to_string(),
        };
        let end: Vec<String> = self.end.iter().map(u32::to_string).collect();
        let end = if end.is_empty() {
            "none".to_string()
        } else {
            end.join(", ")
        };
        add(
            "special tokens",
            format!("BOS {bos}; an answer ends at {end}"),
        );
        if !self.missing_bytes.is_empty() {
            add(
                "missing",
                format!("{} bytes that no token spells", self.missing_bytes.len()),
            );
        }
        add(
            "chat",
            match (self.chat_template_bytes, &self.chat_template_error) {
                (None, _) => "no template".to_string(),
                (Some(n), None) => format!(
                    "template of {} bytes, {} turns",
                    grouped(n as u64),
                    self.turns
                ),
                (Some(_), Some(error)) => format!("the template cannot be used: {error}"),
            },
        );
    }
}
