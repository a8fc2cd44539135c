//! How far values are from others.

/// First row and column whose bits differ.
pub fn first_difference(left: &[Vec<f32>], right: &[Vec<f32>]) -> Option<(usize, usize)> {
    assert_eq!(left.len(), right.len(), "rows to compare");
    for (r, (left, right)) in left.iter().zip(right).enumerate() {
        assert_eq!(left.len(), right.len(), "columns of row {r}");
        let differs = |i: &usize| left[*i].to_bits() != right[*i].to_bits();
        if let Some(col) = (0..left.len()).find(differs) {
            return Some((r, col));
        }
    }
    None
}

/// Are there as many rows, and do all have the same bits?
pub fn same_bits(left: &[Vec<f32>], right: &[Vec<f32>]) -> bool {
    left.len() == right.len() && first_difference(left, right).is_none()
}

/// Limits of a comparison: largest absolute difference, relative RMS.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest absolute difference.
    pub max_abs: f64,
    /// RMS of the difference over RMS of the golden values.
    pub relative_rms: f64,
}

/// What f32 activations over f32 keys and values must keep against the oracle.
pub const TEXT_LIMITS: Limits = Limits {
    max_abs: 2e-3,
    relative_rms: 3e-5,
};

/// The same for the drafter's raw logits, which are ten times as large.
pub const DRAFT_LIMITS: Limits = Limits {
    max_abs: f64::INFINITY,
    relative_rms: 5e-5,
};

impl Limits {
    /// Says by how much `found` is outside of the limits around `golden`.
    pub fn check(&self, what: &str, found: &[f32], golden: &[f32]) -> Result<(), String> {
        let (max_abs, relative_rms) = distance(found, golden);
        // Not "greater": a NaN is outside of every limit.
        if max_abs <= self.max_abs && relative_rms <= self.relative_rms {
            return Ok(());
        }
        Err(format!(
            "{what}: max abs {max_abs:.2e}, relative RMS {relative_rms:.2e}; limits {:.0e}, {:.0e}",
            self.max_abs, self.relative_rms
        ))
    }
}

/// Largest absolute difference, and RMS of the difference over RMS of `right`.
pub fn distance(left: &[f32], right: &[f32]) -> (f64, f64) {
    assert_eq!(left.len(), right.len(), "values to compare");
    let (mut max, mut square, mut size) = (0f64, 0f64, 0f64);
    for (&l, &r) in left.iter().zip(right) {
        let d = f64::from(l) - f64::from(r);
        // Not f64::max: it drops a NaN, whichever of the two is one.
        max = if max.is_nan() || d.abs() <= max {
            max
        } else {
            d.abs()
        };
        square += d * d;
        size += f64::from(r) * f64::from(r);
    }
    (max, (square / size).sqrt())
}
