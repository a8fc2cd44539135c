//! TOKENS -> TOKENS: sessions over pages and the sampler chain. No text, no device, no async.
#![forbid(unsafe_code)]
