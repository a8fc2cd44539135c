//! From a file's tensors to a backend's weights: each name and shape is
//! checked once, here, and every tensor of the file must be used.

use crate::config::Config;
use crate::{Backend, Error};
use gguf::{Gguf, TensorType, TensorView, shown};
use std::collections::HashSet;
use std::ops::Range;

/// Takes tensors out of a file, by name and shape.
pub(crate) struct Loader<'a, B: Backend> {
    be: &'a mut B,
    file: &'a Gguf,
    taken: HashSet<String>,
}

impl<'a, B: Backend> Loader<'a, B> {
    pub(crate) fn new(be: &'a mut B, file: &'a Gguf) -> Loader<'a, B> {
        Loader {
            be,
            file,
            taken: HashSet::new(),
        }
    }

    /// Is there a tensor of this name?
    pub(crate) fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    /// The tensor `name`, which must have `shape` (ggml's order).
    pub(crate) fn view(&mut self, name: &str, shape: &[usize]) -> Result<TensorView, Error> {
        let expected: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        let Some(tensor) = self.file.tensor(name) else {
            let name = name.to_string();
            return Err(Error::TensorMissing { name, expected });
        };
        // Trailing lengths of 1 carry no meaning; some writers store them.
        let significant = tensor.shape.iter().rposition(|&n| n != 1);
        let found = &tensor.shape[..significant.map_or(1, |last| last + 1)];
        let wanted = expected.iter().rposition(|&n| n != 1);
        if found != &expected[..wanted.map_or(1, |last| last + 1)] {
            return Err(Error::TensorShape {
                name: name.to_string(),
                found: tensor.shape.clone(),
                expected,
            });
        }
        self.taken.insert(name.to_string());
        Ok(tensor.clone())
    }

    /// A matrix with `rows` rows of `cols` elements.
    pub(crate) fn matrix(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
    ) -> Result<B::Weight, Error> {
        let view = self.view(name, &[cols, rows])?;
        Ok(self.be.load(&view)?)
    }

    /// The rows of the matrix `name`, or `part` of the rows of the fused
    /// matrix `fused`, where a file has that instead.
    pub(crate) fn matrix_or_part(
        &mut self,
        name: &str,
        fused: (&str, usize),
        cols: usize,
        part: Range<usize>,
    ) -> Result<B::Weight, Error> {
        if self.has(name) || !self.has(fused.0) {
            return self.matrix(name, cols, part.len());
        }
        let whole = self.view(fused.0, &[cols, fused.1])?;
        let row_bytes = whole.data.len() / fused.1;
        let view = TensorView {
            name: name.to_string(),
            ty: whole.ty,
            shape: vec![cols as u64, part.len() as u64],
            data: whole
                .data
                .slice(part.start * row_bytes..part.end * row_bytes),
        };
        Ok(self.be.load(&view)?)
    }

    /// A norm's weight or a bias: `n` numbers that are not block-encoded.
    pub(crate) fn vector(&mut self, name: &str, n: usize) -> Result<B::Weight, Error> {
        let view = self.view(name, &[n])?;
        if !matches!(
            view.ty,
            TensorType::F32 | TensorType::F16 | TensorType::BF16
        ) {
            return Err(Error::TensorType {
                name: name.to_string(),
                found: view.ty,
                expected: "F32, F16 or BF16",
            });
        }
        Ok(self.be.load(&view)?)
    }

    /// Like [`Loader::vector`], for tensors that a file may lack.
    pub(crate) fn vector_if_present(
        &mut self,
        name: &str,
        n: usize,
    ) -> Result<Option<B::Weight>, Error> {
        if !self.has(name) {
            return Ok(None);
        }
        self.vector(name, n).map(Some)
    }

    /// Checks that every tensor of the file was taken.
    pub(crate) fn finish(self, architecture: &'static str) -> Result<(), Error> {
        let mut unused = self.file.tensors().iter().map(|t| t.name.as_str());
        let mut unused = unused.by_ref().filter(|name| !self.taken.contains(*name));
        match unused.next() {
            None => Ok(()),
            Some(first) => Err(Error::TensorsUnused {
                first: shown(first),
                count: 1 + unused.count(),
                architecture,
            }),
        }
    }
}

/// The weights of a Muse Glimmer layer, named as in the file.
#[allow(missing_docs)] // the tensors' own names
pub struct LayerWeights<B: Backend> {
    pub attn_norm: B::Weight,
    pub attn_q: B::Weight,
    pub attn_k: B::Weight,
    pub attn_v: B::Weight,
    pub attn_gate: B::Weight,
    pub attn_q_norm: B::Weight,
    pub attn_k_norm: B::Weight,
    pub attn_output: B::Weight,
    pub post_attention_norm: B::Weight,
    pub ffn_norm: B::Weight,
    pub ffn_gate: B::Weight,
    pub ffn_up: B::Weight,
    pub ffn_down: B::Weight,
    pub post_ffw_norm: B::Weight,
}

/// The weights of a Muse Glimmer model.
#[allow(missing_docs)] // the tensors' own names
pub struct Weights<B: Backend> {
    pub token_embd: B::Weight,
    pub layers: Vec<LayerWeights<B>>,
    pub output_norm: B::Weight,
    pub output: B::Weight,
    pub rope: B::Rope,
}

impl<B: Backend> Weights<B> {
    /// Loads every tensor of a Muse Glimmer file.
    ///
    /// # Errors
    /// [`Error::TensorMissing`], [`Error::TensorShape`], [`Error::TensorType`],
    /// [`Error::TensorsUnused`], [`Error::Device`].
    pub fn load(be: &mut B, file: &Gguf, c: &Config) -> Result<Weights<B>, Error> {
        let rope = be.load_rope(&c.rope)?;
        let mut from = Loader::new(be, file);
        let weights = Weights {
            token_embd: from.matrix("token_embd.weight", c.n_embd, c.n_vocab)?,
            layers: (0..c.n_layer)
                .map(|il| LayerWeights::load(&mut from, c, il))
                .collect::<Result<_, _>>()?,
            output_norm: from.vector("output_norm.weight", c.n_embd)?,
            output: from.matrix("output.weight", c.n_embd, c.n_vocab)?,
            rope,
        };
        from.finish(c.architecture.name())?;
        Ok(weights)
    }
}

impl<B: Backend> LayerWeights<B> {
    fn load(from: &mut Loader<'_, B>, c: &Config, il: usize) -> Result<LayerWeights<B>, Error> {
        let name = |part: &str| format!("blk.{il}.{part}.weight");
        let (d, n_q, n_kv) = (c.n_embd, c.n_q(), c.n_kv());
        let fused_name = name("attn_qkv");
        let fused = (fused_name.as_str(), n_q + 2 * n_kv);
        Ok(LayerWeights {
            attn_norm: from.vector(&name("attn_norm"), d)?,
            attn_q: from.matrix_or_part(&name("attn_q"), fused, d, 0..n_q)?,
            attn_k: from.matrix_or_part(&name("attn_k"), fused, d, n_q..n_q + n_kv)?,
            attn_v: from.matrix_or_part(&name("attn_v"), fused, d, n_q + n_kv..n_q + 2 * n_kv)?,
            attn_gate: from.matrix(&name("attn_gate"), d, n_q)?,
            attn_q_norm: from.vector(&name("attn_q_norm"), c.head_dim)?,
            attn_k_norm: from.vector(&name("attn_k_norm"), c.head_dim)?,
            attn_output: from.matrix(&name("attn_output"), n_q, d)?,
            post_attention_norm: from.vector(&name("post_attention_norm"), d)?,
            ffn_norm: from.vector(&name("ffn_norm"), d)?,
            ffn_gate: from.matrix(&name("ffn_gate"), d, c.n_ff)?,
            ffn_up: from.matrix(&name("ffn_up"), d, c.n_ff)?,
            ffn_down: from.matrix(&name("ffn_down"), c.n_ff, d)?,
            post_ffw_norm: from.vector(&name("post_ffw_norm"), d)?,
        })
    }
}
