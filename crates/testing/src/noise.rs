//! Values that a test makes up.

use gguf::{TensorType, TensorView, quant};

/// Numbers in -1 to 1 that are the same everywhere.
pub struct Noise(
    /// The state: any seed.
    pub u64,
);

impl Noise {
    /// The next one.
    pub fn next_f32(&mut self) -> f32 {
        // SplitMix64 (Steele, Lea and Flood 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// The next `n`.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next_f32()).collect()
    }
}

/// A tensor of `rows` rows of `cols` elements, encoded as `ty`.
pub fn tensor(name: &str, ty: TensorType, cols: usize, rows: usize, values: &[f32]) -> TensorView {
    let mut data = Vec::new();
    for row in values.chunks(cols) {
        match ty {
            // Also values that are not finite, which the encoder refuses.
            TensorType::F32 => data.extend(row.iter().flat_map(|v| v.to_le_bytes())),
            _ => quant::encode_row(ty, row, &mut data).expect("finite values"),
        }
    }
    assert_eq!(values.len(), rows * cols, "elements of {name}");
    TensorView {
        name: name.to_string(),
        ty,
        shape: vec![cols as u64, rows as u64],
        data: data.into(),
    }
}
