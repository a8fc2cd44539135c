//! How far apart two computations are: every measure of `muser parity`, with
//! its formula.
//!
//! What one would get wrong: the measures are not symmetric. The values that
//! are taken for right (golden values, or the backend compared against) come
//! second everywhere and are called `right`, written `r` below; the values
//! under test are `f`, for found.
//!
//! Rows must be finite: callers refuse others before they come here.

/// Tokens less likely than this under `right` do not count for the largest
/// difference of log-probabilities: far down in the tail it says nothing.
pub const LIKELY: f64 = 1e-3;

/// Distance of rows of numbers from the right ones.
#[derive(Clone, Debug, Default)]
pub struct Distance {
    n_rows: usize,
    n_same_top: usize,
    n_values: usize,
    max_abs: f64,
    sum_abs: f64,
    square_of_difference: f64,
    square_of_right: f64,
}

impl Distance {
    /// Adds a row. Both have the same length.
    pub fn add(&mut self, found: &[f32], right: &[f32]) {
        assert_eq!(found.len(), right.len(), "values of a row");
        for (&f, &r) in found.iter().zip(right) {
            let (f, r) = (f64::from(f), f64::from(r));
            self.max_abs = self.max_abs.max((f - r).abs());
            self.sum_abs += (f - r).abs();
            self.square_of_difference += (f - r) * (f - r);
            self.square_of_right += r * r;
        }
        self.n_values += found.len();
        self.n_rows += 1;
        self.n_same_top += usize::from(argmax(found) == argmax(right));
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// `max |f - r|` over all values of all rows.
    pub fn max_abs(&self) -> f64 {
        self.max_abs
    }

    /// Mean of `|f - r|` over all values of all rows.
    pub fn mean_abs(&self) -> f64 {
        self.sum_abs / self.n_values.max(1) as f64
    }

    /// `sqrt(sum (f - r)^2 / sum r^2)` over all values of all rows; 0 if
    /// nothing differs.
    pub fn relative_rms(&self) -> f64 {
        match self.square_of_difference {
            0.0 => 0.0,
            square => (square / self.square_of_right).sqrt(),
        }
    }

    /// Rows whose largest value is at the same place, the first of equals.
    pub fn n_same_top(&self) -> usize {
        self.n_same_top
    }
}

/// Divergence of next-token distributions from the right ones.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    n_rows: usize,
    n_same_top: usize,
    sum_kl: f64,
    max_kl: Largest,
    max_logprob: Largest,
}

/// A largest value and where it is; all zero before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Largest {
    /// The value.
    pub value: f64,
    /// Position of its row in the text.
    pub position: usize,
    /// The token, where the value belongs to one, else the likeliest.
    pub token: u32,
}

impl Largest {
    fn offer(&mut self, value: f64, position: usize, token: usize) {
        if value > self.value {
            let token = token as u32;
            *self = Largest {
                value,
                position,
                token,
            };
        }
    }
}

impl Divergence {
    /// Adds the logits of the row at `position`. Both have the same length.
    ///
    /// With `p = softmax(r)` and `q = softmax(f)`, in f64.
    pub fn add(&mut self, position: usize, found: &[f32], right: &[f32]) {
        assert_eq!(found.len(), right.len(), "values of a row");
        let (ln_z_found, ln_z_right) = (log_sum_exp(found), log_sum_exp(right));
        let mut kl = 0.0;
        for (token, (&f, &r)) in found.iter().zip(right).enumerate() {
            let ln_q = f64::from(f) - ln_z_found;
            let ln_p = f64::from(r) - ln_z_right;
            let p = ln_p.exp();
            kl += p * (ln_p - ln_q);
            if p >= LIKELY {
                self.max_logprob.offer((ln_q - ln_p).abs(), position, token);
            }
        }
        // Rounding can leave a little less than nothing.
        let kl = kl.max(0.0);
        let top = argmax(right);
        self.n_rows += 1;
        self.n_same_top += usize::from(argmax(found) == top);
        self.sum_kl += kl;
        self.max_kl.offer(kl, position, top);
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Mean over the rows of the Kullback-Leibler divergence `KL(p || q) =
    /// sum p ln(p / q)`, in nats.
    pub fn mean_kl(&self) -> f64 {
        self.sum_kl / self.n_rows.max(1) as f64
    }

    /// The row with the largest `KL(p || q)`.
    pub fn max_kl(&self) -> Largest {
        self.max_kl
    }

    /// The largest `|ln q - ln p|` over the tokens with `p >=` [`LIKELY`].
    pub fn max_logprob(&self) -> Largest {
        self.max_logprob
    }

    /// Rows with the same likeliest token, the first of equals.
    pub fn n_same_top(&self) -> usize {
        self.n_same_top
    }
}

/// `ln q = f - ln sum exp f` of one token.
pub fn log_probability(logits: &[f32], token: u32) -> f64 {
    f64::from(logits[token as usize]) - log_sum_exp(logits)
}

/// `ln sum exp x`, in f64.
fn log_sum_exp(x: &[f32]) -> f64 {
    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = x.iter().map(|&v| (f64::from(v) - max).exp()).sum();
    max + sum.ln()
}

/// Place of the largest value, the first of equals.
pub fn argmax(x: &[f32]) -> usize {
    let mut best = 0;
    for (i, &v) in x.iter().enumerate() {
        if v > x[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn near(found: f64, right: f64) {
        assert!(
            (found - right).abs() < 1e-6,
            "found {found}, expected {right}"
        );
    }

    #[test]
    fn distance_of_two_rows() {
        let mut d = Distance::default();
        d.add(&[1.0, 2.0], &[1.0, 2.0]);
        assert_eq!((d.max_abs(), d.relative_rms()), (0.0, 0.0));
        d.add(&[3.0, 0.0], &[0.0, 4.0]);
        assert_eq!((d.n_rows(), d.n_same_top()), (2, 1));
        near(d.max_abs(), 4.0);
        near(d.mean_abs(), 7.0 / 4.0);
        // 3^2 + 4^2 over 1 + 4 + 16.
        near(d.relative_rms(), (25.0f64 / 21.0).sqrt());
    }

    #[test]
    fn a_difference_from_nothing_is_infinite() {
        let mut d = Distance::default();
        d.add(&[1.0], &[0.0]);
        assert_eq!(d.relative_rms(), f64::INFINITY);
    }

    #[test]
    fn divergence_of_a_coin() {
        // p = 3/4, 1/4; q = 1/2, 1/2.
        let mut d = Divergence::default();
        d.add(7, &[0.0, 0.0], &[3f32.ln(), 0.0]);
        near(d.mean_kl(), 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln());
        assert_eq!((d.max_kl().position, d.max_kl().token), (7, 0));
        near(d.max_logprob().value, 2f64.ln());
        assert_eq!(d.max_logprob().token, 1);
        assert_eq!(d.n_same_top(), 1);
        // An equal row halves the mean and changes no maximum.
        d.add(8, &[5.0, 6.0], &[5.0, 6.0]);
        near(2.0 * d.mean_kl(), d.max_kl().value);
        assert_eq!(d.max_logprob().position, 7);
    }

    #[test]
    fn divergence_ignores_a_shift_and_the_tail() {
        let mut d = Divergence::default();
        d.add(0, &[101.0, 100.0, 60.0], &[1.0, 0.0, -80.0]);
        near(d.max_logprob().value, 0.0);
        near(d.mean_kl(), 0.0);
    }
}
