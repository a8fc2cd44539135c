//! The buffers of a pass, allocated once.

use crate::backend::RowSet;
use crate::config::Config;
use crate::{Backend, DeviceError};

/// Every buffer the target's graph writes: `[rows, cols]`, f32. `normed` and
/// `logits` have a row for each wanted row, the others one for each row.
#[allow(missing_docs)] // the field's standard names
pub struct Activations<B: Backend> {
    /// The residual stream.
    pub x: B::Buf,
    /// The normed input of a sub-layer.
    pub h: B::Buf,
    pub q: B::Buf,
    pub k: B::Buf,
    pub v: B::Buf,
    pub gate: B::Buf,
    pub attn: B::Buf,
    pub ff: B::Buf,
    pub up: B::Buf,
    /// The output of a sub-layer.
    pub out: B::Buf,
    pub normed: B::Buf,
    pub logits: B::Buf,
}

impl<B: Backend> Activations<B> {
    /// Buffers for a model.
    pub fn new(be: &mut B, c: &Config) -> Result<Activations<B>, DeviceError> {
        let [x, h, q, k, v, gate, attn, ff, up, out] = all_cols(c);
        let [normed, logits] = wanted_cols(c);
        let mut all = |cols| be.alloc(RowSet::All, cols);
        Ok(Activations {
            x: all(x)?,
            h: all(h)?,
            q: all(q)?,
            k: all(k)?,
            v: all(v)?,
            gate: all(gate)?,
            attn: all(attn)?,
            ff: all(ff)?,
            up: all(up)?,
            out: all(out)?,
            normed: be.alloc(RowSet::Wanted, normed)?,
            logits: be.alloc(RowSet::Wanted, logits)?,
        })
    }
}

/// Columns of the buffers with all rows, in the order of [`Activations`].
fn all_cols(c: &Config) -> [usize; 10] {
    let (n_embd, n_q, n_kv, n_ff) = (c.n_embd, c.n_q(), c.n_kv(), c.n_ff);
    [
        n_embd, n_embd, n_q, n_kv, n_kv, n_q, n_q, n_ff, n_ff, n_embd,
    ]
}

/// Columns of the buffers with the wanted rows.
fn wanted_cols(c: &Config) -> [usize; 2] {
    [c.n_embd, c.n_vocab]
}

/// Bytes that the buffers take once a pass had `rows` rows, `wanted` of them wanted.
pub fn activation_bytes(c: &Config, rows: usize, wanted: usize) -> u64 {
    let all = rows * all_cols(c).iter().sum::<usize>();
    let wanted = wanted * wanted_cols(c).iter().sum::<usize>();
    ((all + wanted) * size_of::<f32>()) as u64
}

/// Captures the residual stream at chosen places, side by side, for a drafter.
///
/// Place `t` is the input of layer `t`; the layer count is the last layer's
/// output. All are taken before any norm.
pub struct Taps<'a, B: Backend> {
    /// The places, in the order of their columns.
    pub places: &'a [usize],
    /// `[rows, places * n_embd]`.
    pub features: &'a mut B::Buf,
    /// Width of the residual stream.
    pub n_embd: usize,
}

impl<B: Backend> Taps<'_, B> {
    /// Copies `x`, the residual stream at `place`, wherever it is wanted.
    pub fn capture(&mut self, be: &mut B, place: usize, x: &B::Buf) {
        for (i, _) in self.places.iter().enumerate().filter(|p| *p.1 == place) {
            be.copy_columns(self.features, i * self.n_embd, x);
        }
    }
}
