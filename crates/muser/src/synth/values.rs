//! Random weights, made as encoded blocks: nothing is quantized, so that the
//! disk is the limit.
//!
//! The bytes of a tensor are those of a counter-based generator: word `w` is
//! the SplitMix64 finalizer of `key + w * gamma`, and the key depends on seed
//! and tensor name alone. Then each block gets scales that bring its elements
//! to the wanted standard deviation. Only integers and exactly rounded
//! arithmetic are used, so a seed means the same bytes on every machine.
//!
//! What a reader would get wrong: the codes of a block are uniform over all of
//! their values, not shaped like those of a trained model, so decoded weights
//! are uniform or sums of uniforms, not normal. Source of the generator: Steele,
//! Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014).

use gguf::{TensorType, quant};

/// Increment of the counter: 2^64 over the golden ratio, odd.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
/// Blocks that are made at once; a multiple of 8, so that a chunk of any
/// encoding starts at a whole word.
const CHUNK_BLOCKS: usize = 4096;
/// Blocks from which the deviation of an encoding is measured. With these the
/// measured value is within 1 % for each of them.
const SAMPLE_BLOCKS: usize = 256;

/// What a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// A matrix: zero mean, standard deviation `1 / sqrt(row length)`.
    Matrix,
    /// The same number everywhere.
    Constant(f32),
    /// A norm's weights: uniform from 0.9 to 1.1.
    NearOne,
}

/// The finalizer of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of a tensor: FNV-1a over its name, mixed with the seed.
fn key(seed: u64, name: &str) -> u64 {
    let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    mix(mix(seed) ^ fnv)
}

/// Fills `out` with the generator's bytes from word `first` on.
fn fill(key: u64, first: u64, out: &mut [u8]) {
    let word = |index: u64| mix(key.wrapping_add(index.wrapping_mul(GAMMA))).to_le_bytes();
    let (words, rest) = out.as_chunks_mut::<8>();
    for (index, bytes) in (first..).zip(words.iter_mut()) {
        *bytes = word(index);
    }
    rest.copy_from_slice(&word(first + words.len() as u64)[..rest.len()]);
}

/// Where the scale of a block lies, and of which kind it is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    /// Numbers as they are, without blocks.
    Plain,
    /// An f16 at a byte.
    F16(usize),
    /// An f16 at a byte, of random sign, for codes whose mean is not zero.
    Signed(usize),
    /// An f16 at the first byte and an offset, `ratio` times as large, at the
    /// second: it takes the mean of the codes away.
    Offset(usize, usize, f32),
    /// The four top bits of four u16 that start at a byte.
    Tops(usize),
    /// The same byte in a number of places at the start.
    Bytes(usize),
}

fn scale_of(ty: TensorType) -> Option<Scale> {
    use Scale::{Bytes, F16, Offset, Plain, Signed, Tops};
    Some(match ty {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => Plain,
        TensorType::Q8_0
        | TensorType::IQ1_S
        | TensorType::IQ2_XXS
        | TensorType::IQ2_XS
        | TensorType::IQ2_S
        | TensorType::IQ3_XXS
        | TensorType::IQ3_S => F16(0),
        TensorType::Q4_0 | TensorType::Q5_0 | TensorType::IQ4_NL | TensorType::IQ4_XS => Signed(0),
        TensorType::Q3_K => Signed(108),
        TensorType::Q6_K => Signed(208),
        TensorType::TQ1_0 => F16(52),
        TensorType::TQ2_0 => Signed(64),
        TensorType::Q4_1 => Offset(0, 2, -7.5),
        TensorType::Q5_1 => Offset(0, 2, -15.5),
        TensorType::Q2_K => Offset(80, 82, 1.5),
        TensorType::Q4_K => Offset(0, 2, 7.5),
        TensorType::Q5_K => Offset(0, 2, 15.5),
        TensorType::IQ1_M => Tops(48),
        TensorType::MXFP4 => Bytes(1),
        TensorType::NVFP4 => Bytes(4),
        TensorType::I8 | TensorType::I16 | TensorType::I32 | TensorType::I64 | TensorType::F64 => {
            return None;
        }
    })
}

/// Can random matrices be made in this encoding?
pub fn can_make(ty: TensorType) -> bool {
    scale_of(ty).is_some()
}

/// Makes random bytes legal and usual codes of the encoding, before scales are
/// put in.
fn tidy(ty: TensorType, block: &mut [u8]) {
    match ty {
        // Writers use codes of -127 to 127.
        TensorType::Q8_0 => {
            for q in &mut block[2..] {
                *q = if *q == 0x80 { 0x81 } else { *q };
            }
        }
        // The same code for scale and minimum of a sub-block, at least half of the range.
        TensorType::Q4_K | TensorType::Q5_K => {
            for i in 0..4 {
                block[4 + i] |= 0xa0;
                block[8 + i] = block[4 + i];
                block[12 + i] = (block[12 + i] & 15) * 0x11;
            }
        }
        TensorType::Q2_K => {
            for scale in &mut block[..16] {
                *scale = (*scale & 15) * 0x11;
            }
        }
        // No code 3: it becomes 2.
        TensorType::TQ2_0 => {
            for q in &mut block[..64] {
                *q &= !(*q & *q >> 1 & 0x55);
            }
        }
        _ => {}
    }
}

/// Scales that a block may get, one of them by chance.
struct Scales {
    scale: Scale,
    /// Bits of 128 scales around the wanted one (0.75 to 1.25 times), each with
    /// its offset; for [`Scale::Bytes`] the code.
    choices: Vec<(u16, u16)>,
}

fn f16_bits(value: f32) -> u16 {
    let mut bytes = Vec::with_capacity(2);
    quant::encode_row(TensorType::F16, &[value], &mut bytes).expect("a small finite number");
    u16::from_le_bytes([bytes[0], bytes[1]])
}

impl Scales {
    /// Scales around `d`; of a byte scale, the code `code`.
    fn new(scale: Scale, d: f32, code: u8) -> Scales {
        let around = |step: u16| d * (0.75 + f32::from(step) / 256.0);
        let choices = match scale {
            Scale::Plain => Vec::new(),
            Scale::Bytes(_) => vec![(code.into(), 0); 128],
            Scale::Offset(_, _, ratio) => (0..128)
                .map(|step| (f16_bits(around(step)), f16_bits(around(step) * ratio)))
                .collect(),
            _ => (0..128).map(|step| (f16_bits(around(step)), 0)).collect(),
        };
        Scales { scale, choices }
    }

    /// Puts scales where random bytes are; those decide which.
    fn put(&self, block: &mut [u8]) {
        let random = |block: &[u8], at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        let choice = |bits: u16| self.choices[usize::from(bits & 127)];
        match self.scale {
            Scale::Plain => {}
            Scale::F16(at) => {
                let (d, _) = choice(random(block, at));
                block[at..at + 2].copy_from_slice(&d.to_le_bytes());
            }
            Scale::Signed(at) => {
                let bits = random(block, at);
                let d = choice(bits).0 | bits & 0x8000;
                block[at..at + 2].copy_from_slice(&d.to_le_bytes());
            }
            Scale::Offset(at, offset_at, _) => {
                let (d, offset) = choice(random(block, at));
                block[at..at + 2].copy_from_slice(&d.to_le_bytes());
                block[offset_at..offset_at + 2].copy_from_slice(&offset.to_le_bytes());
            }
            Scale::Tops(at) => {
                let (d, _) = choice(random(block, 0));
                for word in 0..4 {
                    let top = &mut block[at + 2 * word + 1];
                    *top = *top & 15 | ((d >> (4 * word) & 15) as u8) << 4;
                }
            }
            Scale::Bytes(n) => block[..n].fill(self.choices[0].0 as u8),
        }
    }
}

/// Turns `n` random words of 4 bytes into numbers of -1 to 1, exactly.
fn symmetric(word: [u8; 4]) -> f32 {
    // 24 bits fit an f32; the half keeps the mean at zero.
    let integer = (i32::from_le_bytes(word) >> 8) as f32;
    (integer + 0.5) * (1.0 / 8_388_608.0)
}

/// Root of the mean square of blocks with these scales.
fn deviation(ty: TensorType, scales: &Scales) -> f64 {
    let mut bytes = vec![0; SAMPLE_BLOCKS * ty.block_bytes()];
    fill(key(0, ty.name()), 0, &mut bytes);
    finish_blocks(ty, scales, &mut bytes);
    let mut values = vec![0.0; SAMPLE_BLOCKS * ty.block_len()];
    quant::decode_row(ty, &bytes, &mut values).expect("whole blocks");
    let squares: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    (squares / values.len() as f64).sqrt()
}

fn finish_blocks(ty: TensorType, scales: &Scales, bytes: &mut [u8]) {
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        tidy(ty, block);
        scales.put(block);
    }
}

/// Scales with which elements deviate by `wanted`; byte scales come as near as
/// their codes allow.
fn scales_for(ty: TensorType, scale: Scale, wanted: f64) -> Scales {
    if let Scale::Bytes(_) = scale {
        let distance = |code: u8| {
            let found = deviation(ty, &Scales::new(scale, 0.0, code));
            (found / wanted).max(wanted / found)
        };
        // Code 255 is NaN by the specification of both encodings, 0 is zero in one.
        let best = (1..127 + 64).min_by(|&a, &b| distance(a).total_cmp(&distance(b)));
        return Scales::new(scale, 0.0, best.expect("a range of codes"));
    }
    let unit = deviation(ty, &Scales::new(scale, 1.0, 0));
    Scales::new(scale, (wanted / unit) as f32, 0)
}

/// Makes the data of one tensor, chunk after chunk.
pub struct Generator {
    ty: TensorType,
    key: u64,
    /// `middle + spread * u`, u uniform from -1 to 1; for plain numbers.
    middle: f32,
    spread: f32,
    scales: Scales,
    blocks_left: u64,
    next_word: u64,
}

impl Generator {
    /// The data of a tensor of `bytes` bytes in rows of `cols` elements.
    ///
    /// # Panics
    /// If the encoding cannot be made ([`can_make`]), or values other than a
    /// matrix's are wanted in blocks.
    pub fn new(seed: u64, info: &gguf::TensorInfo, bytes: u64, values: Values) -> Generator {
        let ty = info.ty;
        let scale = scale_of(ty).expect("an encoding that can be made");
        let wanted = 1.0 / (info.shape[0] as f64).sqrt();
        let (middle, spread) = match values {
            Values::Matrix => (0.0, (3.0f64.sqrt() * wanted) as f32),
            Values::Constant(value) => (value, 0.0),
            Values::NearOne => (1.0, 0.1),
        };
        assert!(
            values == Values::Matrix || scale == Scale::Plain,
            "{}: vectors are plain numbers",
            info.name
        );
        Generator {
            ty,
            key: key(seed, &info.name),
            middle,
            spread,
            scales: match scale {
                Scale::Plain => Scales::new(scale, 0.0, 0),
                _ => scales_for(ty, scale, wanted),
            },
            blocks_left: bytes / ty.block_bytes() as u64,
            next_word: 0,
        }
    }

    /// Puts the next chunk into `out`; false if there is none.
    pub fn next_chunk(&mut self, out: &mut Vec<u8>) -> bool {
        let n_blocks = self.blocks_left.min(CHUNK_BLOCKS as u64) as usize;
        self.blocks_left -= n_blocks as u64;
        out.clear();
        if self.scales.scale == Scale::Plain {
            self.plain(n_blocks, out);
        } else {
            out.resize(n_blocks * self.ty.block_bytes(), 0);
            fill(self.key, self.next_word, out);
            self.next_word += out.len() as u64 / 8;
            finish_blocks(self.ty, &self.scales, out);
        }
        n_blocks > 0
    }

    /// `n` plain numbers, from 4 random bytes each.
    fn plain(&mut self, n: usize, out: &mut Vec<u8>) {
        let mut words = vec![0; 4 * n];
        fill(self.key, self.next_word, &mut words);
        self.next_word += words.len() as u64 / 8;
        let (words, _) = words.as_chunks::<4>();
        let values: Vec<f32> = words
            .iter()
            .map(|&word| self.middle + self.spread * symmetric(word))
            .collect();
        quant::encode_row(self.ty, &values, out).expect("finite numbers below 4");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::TensorInfo;

    const COLS: usize = 2048;
    const ROWS: usize = 64;

    fn tensor(seed: u64, ty: TensorType, name: &str) -> Vec<u8> {
        let info = TensorInfo {
            name: name.to_string(),
            ty,
            shape: vec![COLS as u64, ROWS as u64],
        };
        let bytes = info.data_bytes().expect("a good shape");
        let mut generator = Generator::new(seed, &info, bytes, Values::Matrix);
        let (mut all, mut chunk) = (Vec::new(), Vec::new());
        while generator.next_chunk(&mut chunk) {
            all.extend_from_slice(&chunk);
        }
        assert_eq!(all.len() as u64, bytes, "{ty}");
        all
    }

    /// Every encoding gives finite elements of zero mean and the wanted
    /// deviation, within what its scales can express.
    #[test]
    fn moments() {
        for &ty in TensorType::ALL.iter().filter(|&&ty| can_make(ty)) {
            let mut values = vec![0.0; COLS * ROWS];
            quant::decode_row(ty, &tensor(7, ty, "a"), &mut values).expect("whole rows");
            assert!(values.iter().all(|v| v.is_finite()), "{ty}");
            let n = values.len() as f64;
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let squares = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
            let wanted = 1.0 / (COLS as f64).sqrt();
            let ratio = squares.sqrt() / wanted;
            let bound = match ty {
                TensorType::MXFP4 => 0.5..1.5,
                TensorType::NVFP4 => 0.8..1.2,
                _ => 0.96..1.04,
            };
            assert!(
                bound.contains(&ratio),
                "{ty}: deviation {ratio} times the wanted one"
            );
            assert!(
                mean.abs() < 0.02 * wanted,
                "{ty}: mean {} deviations",
                mean / wanted
            );
        }
    }

    /// Bytes depend on seed, name and place; chunks do not repeat.
    #[test]
    fn streams_differ() {
        let ty = TensorType::Q4_K;
        let first = tensor(1, ty, "a");
        assert_eq!(first, tensor(1, ty, "a"));
        assert_ne!(first, tensor(2, ty, "a"));
        assert_ne!(first, tensor(1, ty, "b"));
        let plain = tensor(1, TensorType::F32, "a");
        let chunk = CHUNK_BLOCKS * 4;
        assert_ne!(plain[..chunk], plain[chunk..2 * chunk]);
    }

    /// The generator's words are part of what a seed means.
    #[test]
    fn words_are_fixed() {
        // The first outputs of SplitMix64 from state 0, which counts before it mixes.
        let mut bytes = [0; 24];
        fill(0, 1, &mut bytes);
        let words: Vec<u64> = bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|&word| u64::from_le_bytes(word))
            .collect();
        assert_eq!(
            words,
            [
                0xe220_a839_7b1d_cdaf,
                0x6e78_9e6a_a1b9_65f4,
                0x06c4_5d18_8009_454f
            ]
        );
    }
}
