//! TOKENS -> TOKENS: sequences over pages, the sampler chain, the loop. No
//! text, no device, no async.
#![forbid(unsafe_code)]

mod engine;
mod error;
mod sampler;
mod sequence;

pub use engine::{Ending, Engine, Generated, Generation, Receive, Request};
pub use error::Error;
pub use sampler::{
    LogProbs, MAX_TOP_CANDIDATES, RowsNeeded, SampleError, Sampled, Sampler, SamplerSettings,
    Stream, draw, philox4x32_10,
};
pub use sequence::Sequence;
