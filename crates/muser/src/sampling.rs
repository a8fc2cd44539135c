//! Sampling flags, and where the defaults come from.
//!
//! A flag wins over the file's `general.sampling.*` keys, those win over what
//! the model's makers published for its architecture.

use crate::model_file::ModelFile;
use anyhow::bail;
use clap::Args;
use engine::SamplerSettings;
use model::Architecture;
use text::{Special, Tokenizer};

/// Sampling flags; what is not given comes from the model.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Divides the logits before the draw; 0 always takes the likeliest token [default: the model's]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep the K likeliest tokens (0: all) [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens that add up to P (1: all) [default: the model's]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the likeliest (0: all) [default: the model's]
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Keep the most typical tokens that add up to P (1: all) [default: 1]
    #[arg(long, value_name = "P")]
    pub typical_p: Option<f32>,
    /// Keep logits within N standard deviations of the highest (0: all) [default: 0]
    #[arg(long, value_name = "N")]
    pub top_n_sigma: Option<f32>,
    /// Chance that XTC drops all but the least likely top choice (0: never) [default: 0]
    #[arg(long, value_name = "P")]
    pub xtc_probability: Option<f32>,
    /// Probability from which a token is a top choice for XTC [default: 0.1]
    #[arg(long, value_name = "P")]
    pub xtc_threshold: Option<f32>,
    /// Penalty on tokens used before (1: none) [default: the model's]
    #[arg(long, value_name = "F")]
    pub repeat_penalty: Option<f32>,
    /// Tokens that penalties look back (-1: all) [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub repeat_last_n: Option<i32>,
    /// Penalty per earlier use of a token (0: none) [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Penalty on any earlier use of a token (0: none) [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Strength of the DRY penalty on repeated passages (0: none) [default: 0]
    #[arg(long, value_name = "F")]
    pub dry_multiplier: Option<f32>,
    /// Base of the DRY penalty, to the power of the repeated length [default: 1.75]
    #[arg(long, value_name = "F")]
    pub dry_base: Option<f32>,
    /// Longest repeated passage, in tokens, that DRY leaves alone [default: 2]
    #[arg(long, value_name = "N")]
    pub dry_allowed_length: Option<u32>,
    /// Tokens that DRY looks back (-1: all) [default: -1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub dry_last_n: Option<i32>,
    /// Text across which DRY matches nothing; may be given several times [default: line feed,
    /// colon, double quote, asterisk]
    #[arg(long, value_name = "TEXT")]
    pub dry_breaker: Vec<String>,
    /// Seed of the draws [default: a new one each time, printed at the end]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// Settings and a word on their origin, for the start line.
pub struct Sampling {
    pub settings: SamplerSettings,
    pub origin: String,
}

impl SamplingArgs {
    /// Does a flag change what the model brings?
    fn are_given(&self) -> bool {
        let floats = [
            self.temperature,
            self.top_p,
            self.min_p,
            self.typical_p,
            self.top_n_sigma,
            self.xtc_probability,
            self.xtc_threshold,
            self.repeat_penalty,
            self.frequency_penalty,
            self.presence_penalty,
            self.dry_multiplier,
            self.dry_base,
        ];
        floats.iter().any(Option::is_some)
            || self.top_k.is_some()
            || self.repeat_last_n.or(self.dry_last_n).is_some()
            || self.dry_allowed_length.is_some()
            || !self.dry_breaker.is_empty()
    }

    /// The settings for a model; flags win over the model's own defaults.
    pub fn settings(
        &self,
        file: &ModelFile,
        tokenizer: &Tokenizer,
        architecture: Architecture,
    ) -> anyhow::Result<Sampling> {
        let (mut s, origin) = model_defaults(file, architecture)?;
        let set = |to: &mut f32, from: Option<f32>| *to = from.unwrap_or(*to);
        set(&mut s.temperature, self.temperature);
        set(&mut s.top_p, self.top_p);
        set(&mut s.min_p, self.min_p);
        set(&mut s.typical_p, self.typical_p);
        set(&mut s.top_n_sigma, self.top_n_sigma);
        set(&mut s.xtc_probability, self.xtc_probability);
        set(&mut s.xtc_threshold, self.xtc_threshold);
        set(&mut s.repeat_penalty, self.repeat_penalty);
        set(&mut s.frequency_penalty, self.frequency_penalty);
        set(&mut s.presence_penalty, self.presence_penalty);
        set(&mut s.dry_multiplier, self.dry_multiplier);
        set(&mut s.dry_base, self.dry_base);
        s.dry_allowed_length = self.dry_allowed_length.unwrap_or(s.dry_allowed_length);
        s.dry_penalty_last_n = self.dry_last_n.unwrap_or(s.dry_penalty_last_n);
        if s.dry_multiplier > 0.0 {
            s.dry_breakers = breaking_tokens(tokenizer, &self.dry_breaker)?;
        }
        s.top_k = self.top_k.unwrap_or(s.top_k);
        s.repeat_last_n = self.repeat_last_n.unwrap_or(s.repeat_last_n);
        s.seed = match self.seed {
            Some(seed) => seed,
            // 53 bits: JSON readers that take numbers for f64 keep them exact.
            None => getrandom::u64()? >> 11,
        };
        s.validate()?;
        Ok(Sampling {
            settings: s,
            origin: match self.are_given() {
                true => format!("{origin}, changed by flags"),
                false => origin.to_string(),
            },
        })
    }
}

/// Every token whose text holds one of the breakers.
fn breaking_tokens(tokenizer: &Tokenizer, own: &[String]) -> anyhow::Result<Vec<Vec<u32>>> {
    const DEFAULT: [&str; 4] = ["\n", ":", "\"", "*"];
    let breakers: Vec<&str> = match own {
        [] => DEFAULT.to_vec(),
        own => own.iter().map(String::as_str).collect(),
    };
    let mut tokens = Vec::new();
    for breaker in breakers {
        if breaker.is_empty() {
            bail!("--dry-breaker: found an empty text, expected one character or more");
        }
        let holds = |bytes: &[u8]| {
            let mut windows = bytes.windows(breaker.len());
            windows.any(|window| window == breaker.as_bytes())
        };
        let found = (0..tokenizer.n_vocab() as u32)
            .filter(|&id| tokenizer.token_bytes(id).is_some_and(holds))
            .map(|id| vec![id]);
        let before = tokens.len();
        tokens.extend(found);
        if tokens.len() == before {
            // No token holds it whole: the sequence that spells it breaks.
            tokens.push(tokenizer.encode(breaker, Special::Text));
        }
    }
    Ok(tokens)
}

fn model_defaults(
    file: &ModelFile,
    architecture: Architecture,
) -> anyhow::Result<(SamplerSettings, &'static str)> {
    let meta = file.gguf.metadata();
    let temperature = meta.f32("general.sampling.temp")?;
    let top_p = meta.f32("general.sampling.top_p")?;
    let top_k = meta.u32("general.sampling.top_k")?;
    let min_p = meta.f32("general.sampling.min_p")?;
    if temperature.is_some() || top_p.is_some() || top_k.is_some() || min_p.is_some() {
        let neutral = SamplerSettings::default();
        let settings = SamplerSettings {
            temperature: temperature.unwrap_or(neutral.temperature),
            top_p: top_p.unwrap_or(neutral.top_p),
            top_k: top_k.unwrap_or(neutral.top_k),
            min_p: min_p.unwrap_or(neutral.min_p),
            ..neutral
        };
        return Ok((settings, "of the file"));
    }
    if file.is_bundled {
        // Read best in the samples that models/README.md describes.
        let settings = SamplerSettings {
            temperature: 0.6,
            min_p: 0.05,
            repeat_penalty: 1.15,
            ..SamplerSettings::default()
        };
        return Ok((settings, "of the bundled model"));
    }
    let settings = match architecture {
        // The checkpoint's generation_config.json.
        Architecture::MuseGlimmer => SamplerSettings {
            temperature: 1.0,
            top_p: 0.95,
            top_k: 64,
            ..SamplerSettings::default()
        },
        Architecture::Llama => SamplerSettings {
            temperature: 0.7,
            top_p: 0.95,
            top_k: 40,
            min_p: 0.05,
            ..SamplerSettings::default()
        },
    };
    Ok((settings, "of the architecture"))
}

/// The settings that are not neutral, in words.
pub fn describe(s: &SamplerSettings) -> String {
    let neutral = SamplerSettings::default();
    let mut words = vec![match s.is_greedy() {
        true => "greedy".to_string(),
        false => format!("temperature {}", s.temperature),
    }];
    let mut add = |name: &str, value: f32, default: f32| {
        if value != default {
            words.push(format!("{name} {value}"));
        }
    };
    add("top-k", s.top_k as f32, 0.0);
    add("top-p", s.top_p, neutral.top_p);
    add("min-p", s.min_p, neutral.min_p);
    add("typical-p", s.typical_p, neutral.typical_p);
    add("top-n-sigma", s.top_n_sigma.max(0.0), 0.0);
    add(
        "xtc-probability",
        s.xtc_probability,
        neutral.xtc_probability,
    );
    add("repeat-penalty", s.repeat_penalty, neutral.repeat_penalty);
    add(
        "frequency-penalty",
        s.frequency_penalty,
        neutral.frequency_penalty,
    );
    add(
        "presence-penalty",
        s.presence_penalty,
        neutral.presence_penalty,
    );
    add("dry-multiplier", s.dry_multiplier, neutral.dry_multiplier);
    words.join(", ")
}
