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
        let mut all = |cols| be.alloc(RowSet::All, cols);
        let (n_q, n_kv) = (c.n_q(), c.n_kv());
        Ok(Activations {
            x: all(c.n_embd)?,
            h: all(c.n_embd)?,
            q: all(n_q)?,
            k: all(n_kv)?,
            v: all(n_kv)?,
            gate: all(n_q)?,
            attn: all(n_q)?,
            ff: all(c.n_ff)?,
            up: all(c.n_ff)?,
            out: all(c.n_embd)?,
            normed: be.alloc(RowSet::Wanted, c.n_embd)?,
            logits: be.alloc(RowSet::Wanted, c.n_vocab)?,
        })
    }
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
