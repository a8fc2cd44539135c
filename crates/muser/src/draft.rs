//! Where drafts come from, as flags say it.

use crate::input::positive;
use crate::model_file::{LoadArgs, ModelFile};
use anyhow::ensure;
use clap::Args;
use engine::{Drafts, Speculation, SpeculationInfo};
use gguf::shown;
use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

/// Speculative decoding.
#[derive(Args, Clone, Debug)]
pub struct DraftArgs {
    /// What drafts tokens for the model to verify several at once, which changes no answer: the
    /// file of a DFlash drafter (GGUF); ngram, which looks up what was written before; off
    #[arg(long, value_name = "FILE|ngram|off", default_value = "off")]
    pub draft: DraftFrom,
    /// Tokens of a draft at most [default: as many as there can be; what pays is measured]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub draft_max: Option<usize>,
}

/// The value of `--draft`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftFrom {
    /// Nothing.
    Off,
    /// The tokens before.
    NGram,
    /// A drafter.
    File(PathBuf),
}

impl FromStr for DraftFrom {
    type Err = Infallible;

    fn from_str(word: &str) -> Result<DraftFrom, Infallible> {
        Ok(match word {
            "off" => DraftFrom::Off,
            "ngram" => DraftFrom::NGram,
            path => DraftFrom::File(path.into()),
        })
    }
}

impl DraftArgs {
    /// Opens the drafter of `file`, if there is to be one.
    pub fn open(&self, load: &LoadArgs, file: &mut ModelFile) -> anyhow::Result<()> {
        if let DraftFrom::File(path) = &self.draft {
            file.drafter = Some(load.open_drafter(path)?);
        }
        Ok(())
    }

    /// Tokens of the longest draft; `None` without drafts.
    ///
    /// # Errors
    /// A drafter of which none can be; longer drafts than it makes.
    pub fn n_drafted(&self, file: &ModelFile) -> anyhow::Result<Option<usize>> {
        let longest = match (&self.draft, &file.drafter) {
            (DraftFrom::Off, _) => return Ok(None),
            (_, Some(drafter)) => drafter.config()?.most_drafted(),
            (_, None) => engine::LONGEST_LOOKUP,
        };
        let found = self.draft_max.unwrap_or(longest);
        ensure!(
            found <= longest,
            "--draft-max: found {found}, expected 1 to {longest}"
        );
        Ok(Some(found))
    }

    /// The engine's settings.
    pub fn speculation(&self) -> Speculation {
        Speculation {
            drafts: match self.draft {
                DraftFrom::Off => Drafts::Off,
                DraftFrom::NGram => Drafts::NGram,
                DraftFrom::File(_) => Drafts::Dflash,
            },
            most: self.draft_max,
            ..Speculation::default()
        }
    }
}

/// Speculation in words.
pub fn describe(info: Option<&SpeculationInfo>, file: &ModelFile) -> String {
    let Some(SpeculationInfo { source, most, .. }) = info else {
        return format!("off ({OFF})");
    };
    let name = file.drafter.as_ref().map(|drafter| drafter.name.as_str());
    let name = name.map_or(String::new(), |name| format!(" ({})", shown(name)));
    format!("{source}{name}, up to {most} tokens a draft")
}

/// Why nothing is drafted.
pub const OFF: &str = "no --draft";
