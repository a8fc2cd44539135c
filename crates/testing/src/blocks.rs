//! Rows of random blocks of any encoding, with scales of usual size.

use gguf::{Bytes, TensorType, TensorView};
use half::f16;

/// Encodings with an integer kernel: where `d` and the second f16 of a block
/// lie, and what the second one is.
#[derive(Clone, Copy, PartialEq)]
pub enum Second {
    None,
    /// `dmin`: subtracted.
    Dmin(usize),
    /// `m`: added.
    Min(usize),
}

pub const INTEGER: [(TensorType, usize, Second); 12] = [
    (TensorType::Q4_0, 0, Second::None),
    (TensorType::Q4_1, 0, Second::Min(2)),
    (TensorType::Q5_0, 0, Second::None),
    (TensorType::Q5_1, 0, Second::Min(2)),
    (TensorType::Q8_0, 0, Second::None),
    (TensorType::IQ4_NL, 0, Second::None),
    (TensorType::Q2_K, 80, Second::Dmin(82)),
    (TensorType::Q3_K, 108, Second::None),
    (TensorType::Q4_K, 0, Second::Dmin(2)),
    (TensorType::Q5_K, 0, Second::Dmin(2)),
    (TensorType::Q6_K, 208, Second::None),
    (TensorType::IQ4_XS, 0, Second::None),
];

/// Deterministic numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub fn gaussian(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.uniform()).cos()
    }

    pub fn gaussians(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.gaussian()).collect()
    }
}

pub fn integer(ty: TensorType) -> Option<(usize, Second)> {
    let found = INTEGER.iter().find(|entry| entry.0 == ty);
    found.map(|&(_, d, second)| (d, second))
}

pub fn put_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Rows of random blocks with scales of both signs and usual size.
pub fn random_weights(ty: TensorType, n_rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let n_blocks = n_rows * cols / ty.block_len();
    let mut bytes = Vec::new();
    for _ in 0..n_blocks {
        let mut block: Vec<u8> = (0..ty.block_bytes()).map(|_| random.bits() as u8).collect();
        if let Some((d, second)) = integer(ty) {
            put_f16(&mut block, d, random.gaussian() * 0.01);
            if let Second::Dmin(at) | Second::Min(at) = second {
                put_f16(&mut block, at, random.gaussian() * 0.01);
            }
        } else if ty.block_len() == 1 {
            block = element(ty, random.gaussian());
        }
        bytes.extend(block);
    }
    bytes
}

/// An element of a type without blocks.
pub fn element(ty: TensorType, value: f32) -> Vec<u8> {
    match ty {
        TensorType::F32 => value.to_le_bytes().to_vec(),
        TensorType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        TensorType::BF16 => value.to_le_bytes()[2..].to_vec(),
        TensorType::F64 => f64::from(value).to_le_bytes().to_vec(),
        other => panic!("{other} is not a float"),
    }
}

pub fn view(ty: TensorType, cols: usize, bytes: &[u8]) -> TensorView {
    let n_rows = bytes.len() / ty.row_bytes(cols as u64).expect("whole blocks") as usize;
    TensorView {
        name: "w".into(),
        ty,
        shape: vec![cols as u64, n_rows as u64],
        data: Bytes::from(bytes.to_vec()),
    }
}
