//! TOKENS -> TOKENS: sessions over pages and the sampler chain. No text, no device, no async.
#![forbid(unsafe_code)]

mod sampler;

pub use sampler::{
    LogProbs, MAX_TOP_CANDIDATES, RowsNeeded, SampleError, Sampled, Sampler, SamplerSettings,
    Stream, draw, philox4x32_10,
};
