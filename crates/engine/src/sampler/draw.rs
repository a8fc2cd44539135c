//! Counter-based randomness: a draw is a function of (seed, position, stream) alone.
//!
//! There is no generator state to save, skip or roll back: the token at a
//! position gets the same number alone, packed with other sequences, resumed
//! from disk or verified as part of a draft. What a reader would get wrong: two
//! draws of one position need two streams, never two calls.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011).

/// What a draw at a position is for. Each use has its own independent numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Which candidate becomes the token.
    Token,
    /// Whether XTC acts at this position.
    Xtc,
}

impl Stream {
    fn word(self) -> u32 {
        match self {
            Stream::Token => 0,
            Stream::Xtc => 1,
        }
    }
}

/// A number in `[0, 1)` with 53 random bits, fixed by its three arguments.
///
/// `position` is the place in the sequence of the token that is being chosen.
pub fn draw(seed: u64, position: u64, stream: Stream) -> f64 {
    let (seed_low, seed_high) = halves(seed);
    let (position_low, position_high) = halves(position);
    let counter = [position_low, position_high, stream.word(), 0];
    let words = philox4x32_10(counter, [seed_low, seed_high]);
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    // 53 bits are exact in f64, and the largest gives 1 - 2^-53.
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// The seed of one of several choices for one prompt: the seed itself for the
/// first, so that it is the answer of a request for one choice.
pub fn choice_seed(seed: u64, choice: u32) -> u64 {
    if choice == 0 {
        return seed;
    }
    let (low, high) = halves(seed);
    // A stream that no draw uses.
    let words = philox4x32_10([choice, 0, u32::MAX, 0], [low, high]);
    u64::from(words[0]) << 32 | u64::from(words[1])
}

/// The block function of Philox4x32-10: ten rounds over one 128-bit counter.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let mut x = counter;
    let mut k = key;
    for _ in 0..10 {
        let (low_0, high_0) = halves(u64::from(MULTIPLIERS[0]) * u64::from(x[0]));
        let (low_1, high_1) = halves(u64::from(MULTIPLIERS[1]) * u64::from(x[2]));
        x = [high_1 ^ x[1] ^ k[0], low_1, high_0 ^ x[3] ^ k[1], low_0];
        k = [
            k[0].wrapping_add(KEY_STEPS[0]),
            k[1].wrapping_add(KEY_STEPS[1]),
        ];
    }
    x
}

/// Low and high 32 bits.
fn halves(value: u64) -> (u32, u32) {
    (value as u32, (value >> 32) as u32)
}
