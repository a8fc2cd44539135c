//! Sampling flags, and where the defaults come from.
//!
//! A flag wins over the file's `general.sampling.*` keys, those win over what
//! the model's makers published for its architecture. What one would get wrong:
//! a file with one such key speaks for all of them: what it does not name is
//! neutral, and not the architecture's. The keys are those of the PyPI package
//! `gguf`; the ones that the sampler has nothing for are named at the start.

use crate::model_file::ModelFile;
use anyhow::{Context, bail};
use clap::Args;
use engine::{SampleError, SamplerSettings};
use gguf::{Metadata, Value, shown};
use model::Architecture;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use text::Tokenizer;

/// What the file's sampling keys begin with.
const PREFIX: &str = "general.sampling.";
/// The keys behind it that are honoured, with their fields of [`SamplerSettings`].
const KEYS: [(&str, &str); 8] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("xtc_probability", "xtc_probability"),
    ("xtc_threshold", "xtc_threshold"),
    ("penalty_repeat", "repeat_penalty"),
    ("penalty_last_n", "repeat_last_n"),
];

/// Sampling flags; what is not given comes from the model.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Divides the logits before the draw; 0 always takes the likeliest token [default: the model's]
    #[arg(long, value_name = "T", value_parser = number)]
    pub temperature: Option<f32>,
    /// Keep the K likeliest tokens (0: all) [default: the model's]
    #[arg(long, value_name = "K", value_parser = count)]
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens that add up to P (1: all) [default: the model's]
    #[arg(long, value_name = "P", value_parser = number)]
    pub top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the likeliest (0: all) [default: the model's]
    #[arg(long, value_name = "P", value_parser = number)]
    pub min_p: Option<f32>,
    /// Keep the most typical tokens that add up to P (1: all) [default: 1]
    #[arg(long, value_name = "P", value_parser = number)]
    pub typical_p: Option<f32>,
    /// Keep logits within N standard deviations of the highest (0: all) [default: 0]
    #[arg(long, value_name = "N", value_parser = number)]
    pub top_n_sigma: Option<f32>,
    /// Chance that XTC drops all but the least likely top choice (0: never) [default: the model's]
    #[arg(long, value_name = "P", value_parser = number)]
    pub xtc_probability: Option<f32>,
    /// Probability from which a token is a top choice for XTC [default: the model's, else 0.1]
    #[arg(long, value_name = "P", value_parser = number)]
    pub xtc_threshold: Option<f32>,
    /// Penalty on tokens used before (1: none) [default: the model's]
    #[arg(long, value_name = "F", value_parser = number)]
    pub repeat_penalty: Option<f32>,
    /// Tokens that penalties look back (-1: all) [default: the model's, else 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = last_n)]
    pub repeat_last_n: Option<i32>,
    /// Penalty per earlier use of a token (0: none) [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, value_parser = number)]
    pub frequency_penalty: Option<f32>,
    /// Penalty on any earlier use of a token (0: none) [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, value_parser = number)]
    pub presence_penalty: Option<f32>,
    /// Strength of the DRY penalty on repeated passages (0: none) [default: 0]
    #[arg(long, value_name = "F", value_parser = number)]
    pub dry_multiplier: Option<f32>,
    /// Base of the DRY penalty, to the power of the repeated length [default: 1.75]
    #[arg(long, value_name = "F", value_parser = number)]
    pub dry_base: Option<f32>,
    /// Longest repeated passage, in tokens, that DRY leaves alone [default: 2]
    #[arg(long, value_name = "N", value_parser = count)]
    pub dry_allowed_length: Option<u32>,
    /// Tokens that DRY looks back (-1: all) [default: -1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = last_n)]
    pub dry_last_n: Option<i32>,
    /// Text across which DRY matches nothing; may be given several times [default: line feed,
    /// colon, double quote, asterisk]
    #[arg(long, value_name = "TEXT")]
    pub dry_breaker: Vec<String>,
    /// Seed of the draws [default: a new one for each answer]
    #[arg(long, value_name = "N", value_parser = seed)]
    pub seed: Option<u64>,
}

/// A number on the command line.
fn number(text: &str) -> Result<f32, String> {
    text.parse().map_err(|_| "expected a number".to_string())
}

fn count(text: &str) -> Result<u32, String> {
    whole(text, u32::MIN..=u32::MAX)
}

fn last_n(text: &str) -> Result<i32, String> {
    whole(text, i32::MIN..=i32::MAX)
}

fn seed(text: &str) -> Result<u64, String> {
    whole(text, u64::MIN..=u64::MAX)
}

/// A whole number on the command line.
fn whole<T: FromStr + Display>(text: &str, range: RangeInclusive<T>) -> Result<T, String> {
    let (least, most) = range.into_inner();
    text.parse()
        .map_err(|_| format!("expected a whole number, {least} to {most}"))
}

/// Settings, and where they come from, for the start line.
pub struct Sampling {
    pub settings: SamplerSettings,
    pub origin: String,
    /// Keys of the file that the sampler has nothing for.
    pub not_honoured: Vec<String>,
}

impl SamplingArgs {
    /// The settings that flags change, by their names in [`SamplerSettings`].
    fn given(&self) -> Vec<&'static str> {
        let flags = [
            ("temperature", self.temperature.is_some()),
            ("top_k", self.top_k.is_some()),
            ("top_p", self.top_p.is_some()),
            ("min_p", self.min_p.is_some()),
            ("typical_p", self.typical_p.is_some()),
            ("top_n_sigma", self.top_n_sigma.is_some()),
            ("xtc_probability", self.xtc_probability.is_some()),
            ("xtc_threshold", self.xtc_threshold.is_some()),
            ("repeat_penalty", self.repeat_penalty.is_some()),
            ("repeat_last_n", self.repeat_last_n.is_some()),
            ("frequency_penalty", self.frequency_penalty.is_some()),
            ("presence_penalty", self.presence_penalty.is_some()),
            ("dry_multiplier", self.dry_multiplier.is_some()),
            ("dry_base", self.dry_base.is_some()),
            ("dry_allowed_length", self.dry_allowed_length.is_some()),
            ("dry_penalty_last_n", self.dry_last_n.is_some()),
            ("dry_breakers", !self.dry_breaker.is_empty()),
        ];
        let given = flags.into_iter().filter(|&(_, is_given)| is_given);
        given.map(|(field, _)| field).collect()
    }

    /// The settings for a model; flags win over the model's own defaults.
    ///
    /// # Errors
    /// A value outside its range, named by its flag or by its key and file.
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
        let given = self.given();
        if let Err(error) = s.validate() {
            return Err(by_origin(error, &given, file));
        }
        Ok(Sampling {
            settings: s,
            origin: match given.is_empty() {
                true => origin.to_string(),
                false => format!("{origin}, changed by flags"),
            },
            not_honoured: not_honoured(file.gguf.metadata()),
        })
    }
}

/// The error of a setting, named as whoever set it named it.
fn by_origin(error: SampleError, given: &[&str], file: &ModelFile) -> anyhow::Error {
    let SampleError::OutOfRange {
        field,
        found,
        allowed,
    } = &error
    else {
        return error.into();
    };
    let key = KEYS.iter().find(|(_, of)| of == field);
    match key.filter(|_| !given.contains(&field.as_str())) {
        Some((key, _)) => anyhow::anyhow!(
            "{}: metadata key {PREFIX}{key}: found {found}, expected {allowed}; {} can replace it",
            file.name,
            flag(field)
        ),
        None => anyhow::anyhow!("{}: found {found}, expected {allowed}", flag(field)),
    }
}

/// The flag of a field of [`SamplerSettings`].
fn flag(field: &str) -> String {
    match field {
        "dry_penalty_last_n" => "--dry-last-n".to_string(),
        field => format!("--{}", field.replace('_', "-")),
    }
}

/// The tokens across which DRY matches nothing.
fn breaking_tokens(tokenizer: &Tokenizer, own: &[String]) -> anyhow::Result<Vec<Vec<u32>>> {
    if own.iter().any(String::is_empty) {
        bail!("--dry-breaker: found an empty text, expected one character or more");
    }
    Ok(match own {
        [] => server::breaking_tokens(tokenizer, server::DRY_BREAKERS),
        own => server::breaking_tokens(tokenizer, own.iter().map(String::as_str)),
    })
}

/// The sampling keys of a file that the sampler has no setting for, as a
/// message may show them.
pub fn not_honoured(meta: &Metadata) -> Vec<String> {
    let is_known = |key: &str| KEYS.iter().any(|&(known, _)| known == key);
    let keys = meta.iter().map(|(key, _)| key);
    keys.filter(|key| key.strip_prefix(PREFIX).is_some_and(|k| !is_known(k)))
        .map(shown)
        .collect()
}

/// The settings of the file's keys; none if it has no key that is honoured.
fn file_settings(meta: &Metadata) -> Result<Option<SamplerSettings>, gguf::Error> {
    let float = |key: &str| meta.f32(&format!("{PREFIX}{key}"));
    let integer = |key: &str| signed(meta, &format!("{PREFIX}{key}"));
    let neutral = SamplerSettings::default();
    // No number of tokens is below 0: it means no limit, as 0 does.
    let top_k = integer("top_k")?.map(|n| n.clamp(0, u32::MAX.into()) as u32);
    let last_n = integer("penalty_last_n")?;
    let last_n = last_n.map(|n| n.clamp(i32::MIN.into(), i32::MAX.into()) as i32);
    let settings = SamplerSettings {
        temperature: float("temp")?.unwrap_or(neutral.temperature),
        top_k: top_k.unwrap_or(neutral.top_k),
        top_p: float("top_p")?.unwrap_or(neutral.top_p),
        min_p: float("min_p")?.unwrap_or(neutral.min_p),
        xtc_probability: float("xtc_probability")?.unwrap_or(neutral.xtc_probability),
        xtc_threshold: float("xtc_threshold")?.unwrap_or(neutral.xtc_threshold),
        repeat_penalty: float("penalty_repeat")?.unwrap_or(neutral.repeat_penalty),
        repeat_last_n: last_n.unwrap_or(neutral.repeat_last_n),
        ..neutral
    };
    let is_there = |key: &str| meta.get(&format!("{PREFIX}{key}")).is_some();
    Ok(KEYS
        .iter()
        .any(|(key, _)| is_there(key))
        .then_some(settings))
}

/// An integer of the file that may be negative.
fn signed(meta: &Metadata, key: &str) -> Result<Option<i64>, gguf::Error> {
    Ok(match meta.get(key) {
        Some(&Value::I8(n)) => Some(n.into()),
        Some(&Value::I16(n)) => Some(n.into()),
        Some(&Value::I32(n)) => Some(n.into()),
        Some(&Value::I64(n)) => Some(n),
        _ => meta.u32(key)?.map(i64::from),
    })
}

fn model_defaults(
    file: &ModelFile,
    architecture: Architecture,
) -> anyhow::Result<(SamplerSettings, &'static str)> {
    let of_file = file_settings(file.gguf.metadata()).with_context(|| file.name.clone())?;
    if let Some(settings) = of_file {
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
    if s.top_k > 0 {
        words.push(format!("top-k {}", s.top_k));
    }
    let mut add = |name: &str, value: f32, default: f32| {
        if value != default {
            words.push(format!("{name} {value}"));
        }
    };
    add("top-p", s.top_p, neutral.top_p);
    add("min-p", s.min_p, neutral.min_p);
    add("typical-p", s.typical_p, neutral.typical_p);
    add("top-n-sigma", s.top_n_sigma.max(0.0), 0.0);
    add("xtc-probability", s.xtc_probability, 0.0);
    if s.xtc_probability > 0.0 {
        add("xtc-threshold", s.xtc_threshold, neutral.xtc_threshold);
    }
    add("repeat-penalty", s.repeat_penalty, 1.0);
    add("frequency-penalty", s.frequency_penalty, 0.0);
    add("presence-penalty", s.presence_penalty, 0.0);
    add("dry-multiplier", s.dry_multiplier, 0.0);
    if s.repeat_last_n != neutral.repeat_last_n {
        words.push(format!("repeat-last-n {}", s.repeat_last_n));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_file::ModelArgs;
    use clap::Parser;
    use std::collections::BTreeSet;
    use text::Special;

    /// The flags of a command line.
    #[derive(Parser)]
    #[command(allow_negative_numbers = true)]
    struct Line {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn bundled() -> (ModelFile, std::sync::Arc<Tokenizer>) {
        let file = ModelArgs { model: None }.open().expect("the bundled model");
        let tokenizer = file.tokenizer().expect("its tokenizer");
        (file, tokenizer)
    }

    fn settings(words: &[&str]) -> anyhow::Result<SamplerSettings> {
        let line = Line::try_parse_from([&["test", "--seed", "5"], words].concat())?;
        let (file, tokenizer) = bundled();
        let architecture = Architecture::MuseGlimmer;
        let sampling = line.sampling.settings(&file, &tokenizer, architecture)?;
        Ok(sampling.settings)
    }

    /// Every flag changes its own field and no other.
    #[test]
    fn flags_are_fields() {
        type Change = fn(&mut SamplerSettings);
        let cases: [(&str, &str, Change); 15] = [
            ("--temperature", "0.5", |s| s.temperature = 0.5),
            ("--top-k", "4294967295", |s| s.top_k = u32::MAX),
            ("--top-p", "0.5", |s| s.top_p = 0.5),
            ("--min-p", "0.5", |s| s.min_p = 0.5),
            ("--typical-p", "0.5", |s| s.typical_p = 0.5),
            ("--top-n-sigma", "1.5", |s| s.top_n_sigma = 1.5),
            ("--xtc-probability", "0.5", |s| s.xtc_probability = 0.5),
            ("--xtc-threshold", "0.5", |s| s.xtc_threshold = 0.5),
            ("--repeat-penalty", "1.5", |s| s.repeat_penalty = 1.5),
            ("--repeat-last-n", "-1", |s| s.repeat_last_n = -1),
            ("--frequency-penalty", "-0.5", |s| {
                s.frequency_penalty = -0.5
            }),
            ("--presence-penalty", "-0.5", |s| s.presence_penalty = -0.5),
            ("--dry-base", "1.5", |s| s.dry_base = 1.5),
            ("--dry-allowed-length", "7", |s| s.dry_allowed_length = 7),
            ("--dry-last-n", "9", |s| s.dry_penalty_last_n = 9),
        ];
        for (flag, value, change) in cases {
            let mut expected = settings(&[]).expect("settings");
            change(&mut expected);
            assert_eq!(settings(&[flag, value]).expect(flag), expected, "{flag}");
        }
    }

    #[test]
    fn values_out_of_range_name_their_flag() {
        for (flag, value, message) in [
            (
                "--temperature",
                "nan",
                "--temperature: found NaN, expected a finite number",
            ),
            ("--top-p", "-1", "--top-p: found -1, expected 0 to 1"),
            (
                "--repeat-last-n",
                "-2",
                "--repeat-last-n: found -2, expected -1 or more",
            ),
            (
                "--dry-last-n",
                "-2",
                "--dry-last-n: found -2, expected -1 or more",
            ),
            (
                "--repeat-penalty",
                "0",
                "--repeat-penalty: found 0, expected a finite number above 0",
            ),
        ] {
            let error = settings(&[flag, value]).expect_err(message);
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn what_is_no_number_is_refused_with_what_it_can_be() {
        for (flag, value, expected) in [
            ("--temperature", "hot", "expected a number"),
            ("--top-k", "-1", "expected a whole number, 0 to 4294967295"),
            (
                "--repeat-last-n",
                "1.5",
                "expected a whole number, -2147483648 to 2147483647",
            ),
            (
                "--dry-allowed-length",
                "4294967296",
                "expected a whole number, 0 to 4294967295",
            ),
        ] {
            let error = settings(&[flag, value]).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// Text between the usual four is repeated text; they begin it anew.
    #[test]
    fn the_usual_breakers_of_dry() {
        let (_, tokenizer) = bundled();
        let found = settings(&["--dry-multiplier", "0.8"]).expect("settings");
        let found: BTreeSet<Vec<u32>> = found.dry_breakers.into_iter().collect();
        let breaks = |id: &u32| {
            let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
            bytes.iter().any(|byte| b"\n:\"*".contains(byte))
        };
        let ids = (0..tokenizer.n_vocab() as u32).filter(breaks);
        assert_eq!(found, ids.map(|id| vec![id]).collect());
        let asterisk = tokenizer.encode("*", Special::Text);
        assert!(found.contains(&asterisk), "{asterisk:?}");
        let own = settings(&["--dry-multiplier", "0.8", "--dry-breaker", "*"]);
        assert!(own.expect("settings").dry_breakers.len() < found.len());
    }

    #[test]
    fn settings_in_words() {
        for (words, expected) in [
            (
                &["--top-k", "4294967295"][..],
                "temperature 0.6, top-k 4294967295, min-p 0.05, repeat-penalty 1.15",
            ),
            (
                &["--repeat-last-n", "-1"],
                "temperature 0.6, min-p 0.05, repeat-penalty 1.15, repeat-last-n -1",
            ),
            (
                &["--xtc-threshold", "0.2"],
                "temperature 0.6, min-p 0.05, repeat-penalty 1.15",
            ),
            (
                &["--xtc-threshold", "0.2", "--xtc-probability", "1"],
                "temperature 0.6, min-p 0.05, xtc-probability 1, xtc-threshold 0.2, repeat-penalty 1.15",
            ),
        ] {
            assert_eq!(describe(&settings(words).expect("settings")), expected);
        }
    }
}
