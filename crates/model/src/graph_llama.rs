//! The forward pass of the Llama family: Llama 2 and 3, SmolLM2, TinyLlama,
//! Mistral.
//!
//! Against Muse Glimmer: no norm on the embedding or on sub-layer outputs, no
//! gate, no norm on heads; every layer turns; the head may be the embedding;
//! projections may have biases.

use crate::Error;
use crate::activations::{Activations, Taps};
use crate::backend::{Attention, Backend, KvLayer};
use crate::config::Config;
use crate::weights::Loader;
use gguf::{Gguf, TensorType};

/// A projection with its bias, if the file has one.
pub(crate) struct Linear<B: Backend> {
    weight: B::Weight,
    bias: Option<B::Weight>,
}

impl<B: Backend> Linear<B> {
    fn load(
        from: &mut Loader<'_, B>,
        name: &str,
        cols: usize,
        rows: usize,
    ) -> Result<Linear<B>, Error> {
        Ok(Linear {
            weight: from.matrix(&format!("{name}.weight"), cols, rows)?,
            bias: from.vector_if_present(&format!("{name}.bias"), rows)?,
        })
    }

    fn apply(&self, be: &mut B, out: &mut B::Buf, x: &B::Buf) {
        be.matmul(out, &self.weight, x);
        if let Some(bias) = &self.bias {
            be.add_bias(out, bias);
        }
    }
}

/// The weights of a layer, named as in the file.
struct LayerWeights<B: Backend> {
    attn_norm: B::Weight,
    attn_q: Linear<B>,
    attn_k: Linear<B>,
    attn_v: Linear<B>,
    attn_output: Linear<B>,
    ffn_norm: B::Weight,
    ffn_gate: Linear<B>,
    ffn_up: Linear<B>,
    ffn_down: Linear<B>,
}

/// The weights of a model of the Llama family.
pub(crate) struct Weights<B: Backend> {
    pub(crate) token_embd: B::Weight,
    layers: Vec<LayerWeights<B>>,
    output_norm: B::Weight,
    /// `None` where the head is the embedding.
    output: Option<B::Weight>,
    rope: B::Rope,
}

impl<B: Backend> Weights<B> {
    /// Loads every tensor of a file.
    pub(crate) fn load(be: &mut B, file: &Gguf, c: &Config) -> Result<Weights<B>, Error> {
        let mut from = Loader::new(be, file);
        let factors = rope_factors(&mut from, c)?;
        let token_embd = from.matrix("token_embd.weight", c.n_embd, c.n_vocab)?;
        let layers = (0..c.n_layer).map(|il| LayerWeights::load(&mut from, c, il));
        let layers = layers.collect::<Result<_, _>>()?;
        let output_norm = from.vector("output_norm.weight", c.n_embd)?;
        let output = match from.has("output.weight") {
            true => Some(from.matrix("output.weight", c.n_embd, c.n_vocab)?),
            false => None,
        };
        from.finish(c.architecture.name())?;
        let rope = match factors {
            Some(factors) => be.load_rope(&c.rope.clone().divided_by(&factors))?,
            None => be.load_rope(&c.rope)?,
        };
        Ok(Weights {
            token_embd,
            layers,
            output_norm,
            output,
            rope,
        })
    }

    /// The matrix of the head.
    pub(crate) fn head(&self) -> &B::Weight {
        self.output.as_ref().unwrap_or(&self.token_embd)
    }
}

/// Llama 3.1's factors on the speed of each pair, if the file has them.
fn rope_factors<B: Backend>(
    from: &mut Loader<'_, B>,
    c: &Config,
) -> Result<Option<Vec<f32>>, Error> {
    const NAME: &str = "rope_freqs.weight";
    if !from.has(NAME) {
        return Ok(None);
    }
    let view = from.view(NAME, &[c.rope.inv_freq.len()])?;
    if view.ty != TensorType::F32 {
        return Err(Error::TensorType {
            name: NAME.into(),
            found: view.ty,
            expected: "F32",
        });
    }
    let (factors, _) = view.data.as_chunks::<4>();
    let factors: Vec<f32> = factors.iter().map(|b| f32::from_le_bytes(*b)).collect();
    match factors.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
        None => Ok(Some(factors)),
        Some(found) => Err(Error::TensorValue {
            name: NAME.into(),
            found: *found,
            expected: "positive finite numbers",
        }),
    }
}

impl<B: Backend> LayerWeights<B> {
    fn load(from: &mut Loader<'_, B>, c: &Config, il: usize) -> Result<LayerWeights<B>, Error> {
        let name = |part: &str| format!("blk.{il}.{part}");
        let (d, n_q, n_kv) = (c.n_embd, c.n_q(), c.n_kv());
        Ok(LayerWeights {
            attn_norm: from.vector(&name("attn_norm.weight"), d)?,
            attn_q: Linear::load(from, &name("attn_q"), d, n_q)?,
            attn_k: Linear::load(from, &name("attn_k"), d, n_kv)?,
            attn_v: Linear::load(from, &name("attn_v"), d, n_kv)?,
            attn_output: Linear::load(from, &name("attn_output"), n_q, d)?,
            ffn_norm: from.vector(&name("ffn_norm.weight"), d)?,
            ffn_gate: Linear::load(from, &name("ffn_gate"), d, c.n_ff)?,
            ffn_up: Linear::load(from, &name("ffn_up"), d, c.n_ff)?,
            ffn_down: Linear::load(from, &name("ffn_down"), c.n_ff, d)?,
        })
    }
}

/// One pass over the rows of the current step.
pub(crate) fn forward<B: Backend>(
    be: &mut B,
    c: &Config,
    w: &Weights<B>,
    a: &mut Activations<B>,
    kv: &mut B::Kv,
    mut taps: Option<Taps<'_, B>>,
) {
    be.embed(&mut a.x, &w.token_embd);
    be.probe("inp_embd", 0, &a.x);
    for (il, layer) in w.layers.iter().enumerate() {
        if let Some(taps) = &mut taps {
            taps.capture(be, il, &a.x);
        }
        attention(be, c, il, (layer, &w.rope), a, kv);
        feed_forward(be, c, il, layer, a);
    }
    if let Some(taps) = &mut taps {
        taps.capture(be, c.n_layer, &a.x);
    }
    let norm = (&w.output_norm, c.norm_eps);
    be.logits(
        &mut a.logits,
        &mut a.normed,
        &a.x,
        norm,
        w.head(),
        c.logit_scale,
        c.logit_cap,
    );
    be.probe("result_norm", 0, &a.normed);
    be.probe("result_output", 0, &a.logits);
}

fn attention<B: Backend>(
    be: &mut B,
    c: &Config,
    il: usize,
    (w, rope): (&LayerWeights<B>, &B::Rope),
    a: &mut Activations<B>,
    kv: &mut B::Kv,
) {
    let layer = &c.layers[il];
    let place = KvLayer {
        class: layer.class,
        index: layer.index,
    };
    be.rms_norm(&mut a.h, &a.x, Some(&w.attn_norm), c.norm_eps);
    be.probe("attn_norm", il, &a.h);
    w.attn_q.apply(be, &mut a.q, &a.h);
    w.attn_k.apply(be, &mut a.k, &a.h);
    w.attn_v.apply(be, &mut a.v, &a.h);
    be.rope(&mut a.q, rope, c.head_dim);
    be.rope(&mut a.k, rope, c.head_dim);
    be.probe("Qcur_rope", il, &a.q);
    be.probe("Kcur_rope", il, &a.k);
    be.probe("Vcur", il, &a.v);
    be.store_kv(kv, place, &a.k, &a.v);
    let at = Attention {
        layer: place,
        window: layer.window,
        scale: c.attention_scale(),
    };
    be.attend(&mut a.attn, &a.q, kv, &at);
    w.attn_output.apply(be, &mut a.out, &a.attn);
    be.probe("attn_out", il, &a.out);
    be.add(&mut a.x, &a.out);
    be.probe("ffn_inp", il, &a.x);
}

fn feed_forward<B: Backend>(
    be: &mut B,
    c: &Config,
    il: usize,
    w: &LayerWeights<B>,
    a: &mut Activations<B>,
) {
    be.rms_norm(&mut a.h, &a.x, Some(&w.ffn_norm), c.norm_eps);
    be.probe("ffn_norm", il, &a.h);
    w.ffn_gate.apply(be, &mut a.ff, &a.h);
    w.ffn_up.apply(be, &mut a.up, &a.h);
    be.swiglu(&mut a.ff, &a.up);
    w.ffn_down.apply(be, &mut a.out, &a.ff);
    be.probe("ffn_out", il, &a.out);
    be.add(&mut a.x, &a.out);
    be.probe("l_out", il, &a.x);
}
