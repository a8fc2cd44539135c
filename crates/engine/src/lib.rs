//! TOKENS -> TOKENS: sequences over pages, the sampler chain, the loop of one
//! sequence, the service of many, speculation. No text, no device, no async.
#![forbid(unsafe_code)]

mod choice;
mod cost;
mod engine;
mod error;
mod job;
mod metrics;
mod prefix;
mod sampler;
mod scheduler;
mod sequence;
mod service;
mod speculate;
mod worker;

pub use cost::CostModel;
pub use engine::{Ending, Engine, Generated, Generation, Receive, Request};
pub use error::{Error, PromptError};
pub use job::{CacheUse, Event, Job, Listen, Refusal, Timings};
pub use metrics::{BUCKET_SECONDS, Histogram, Metrics};
pub use prefix::{CacheKey, Cut, PrefixCache, REGULAR_CUT_TOKENS};
pub use sampler::{
    LogProbs, MAX_TOP_CANDIDATES, RowsNeeded, SampleError, Sampled, Sampler, SamplerSettings,
    Stream, choice_seed, draw, philox4x32_10,
};
pub use scheduler::{
    JobId, MAX_PREFILL_ROWS, MIN_PREFILL_ROWS, PASS_TIME, Scheduler, SequenceId, Span,
};
pub use sequence::Sequence;
pub use service::{Handle, Info, Service, Settings, State};
pub use speculate::{
    Acceptance, Drafting, Drafts, GIVE_UP_ROUNDS, GIVE_UP_TOKENS, LONGEST_LOOKUP, Pace,
    Speculation, SpeculationCounts, SpeculationInfo, Turn, draft_lengths, looked_up,
};
