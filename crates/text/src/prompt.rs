//! A rendered conversation as tokens, with the places that are worth returning
//! to.
//!
//! The prefix cache keeps sliding pages at few places only: the cuts. A cut is the
//! number of tokens up to the end of a message. What a reader would get wrong: a
//! message ends where the template writes a control token that ends messages, not
//! where rendering fewer messages would end, since templates may render a message
//! in another way when more follow. Behind a control token encoding begins anew,
//! so another conversation that begins with the same text has the same tokens up
//! to the cut.

use crate::Segment;
use crate::memo::{Memo, Prefix};
use crate::tokenizer::Tokenizer;
use crate::turn::TurnFormat;

/// The tokens of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// All of them, with the BOS that the file wants.
    pub tokens: Vec<u32>,
    /// Token counts at the end of each message and of the prompt, ascending.
    pub cuts: Vec<usize>,
}

impl Prompt {
    /// The prompt of a rendered conversation. With a memo, messages that were
    /// generated here are the tokens that they were made of.
    pub fn new(
        tokenizer: &Tokenizer,
        format: &TurnFormat,
        segments: &[Segment],
        memo: Option<&Memo>,
    ) -> Prompt {
        let tokens = match memo {
            None => tokenizer.encode_segments(segments),
            Some(memo) => {
                let mut prefix = Prefix::new(tokenizer);
                tokenizer.encode_segments_with(segments, |plain, ids| {
                    memo.encode(&mut prefix, plain, ids);
                })
            }
        };
        let tokens = tokenizer.with_bos(tokens);
        let ends: Vec<u32> = format.ends().chain(format.eom()).collect();
        let behind_ends = (1..tokens.len()).filter(|&cut| ends.contains(&tokens[cut - 1]));
        let cuts = behind_ends.chain([tokens.len()]).collect();
        Prompt { tokens, cuts }
    }
}
