//! The forward pass of Muse Glimmer: the only place that knows its order of
//! operations.
//!
//! What a reader would get wrong: the embedding is normed without a weight; the
//! gate reads the same normed input as q, k and v and acts before the output
//! projection; sub-layer outputs are normed, with an epsilon of their own,
//! before they are added; layers that see everything do not turn; logits are
//! scaled first and capped second.

use crate::activations::{Activations, Taps};
use crate::backend::{Attention, Backend, KvLayer};
use crate::config::Config;
use crate::weights::{LayerWeights, Weights};

/// One pass over the rows of the current step.
pub fn forward<B: Backend>(
    be: &mut B,
    c: &Config,
    w: &Weights<B>,
    a: &mut Activations<B>,
    kv: &mut B::Kv,
    mut taps: Option<Taps<'_, B>>,
) {
    be.embed(&mut a.out, &w.token_embd);
    be.rms_norm(&mut a.x, &a.out, None, c.norm_eps);
    be.probe("inp_embd", 0, &a.x);
    be.rms_norm(&mut a.h, &a.x, Some(&w.layers[0].attn_norm), c.norm_eps);
    for (il, layer) in w.layers.iter().enumerate() {
        if let Some(taps) = &mut taps {
            taps.capture(be, il, &a.x);
        }
        attention(be, c, il, (layer, &w.rope), a, kv);
        let next = w.layers.get(il + 1).map(|l| &l.attn_norm);
        feed_forward(be, c, il, layer, next, a);
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
        &w.output,
        c.logit_scale,
        c.logit_cap,
    );
    be.probe("result_norm", 0, &a.normed);
    be.probe("result_output", 0, &a.logits);
}

/// Reads the normed input in `a.h`; leaves the feed-forward part's there.
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
    be.probe("attn_norm", il, &a.h);
    be.qkv_gate(
        &mut a.q,
        &mut a.k,
        &mut a.v,
        &mut a.gate,
        [&w.attn_q, &w.attn_k, &w.attn_v, &w.attn_gate],
        &a.h,
    );
    be.probe("Vcur", il, &a.v);
    be.probe("attn_gate", il, &a.gate);
    let rope = layer.rope.then_some((rope, c.head_dim));
    let norms = [&w.attn_q_norm, &w.attn_k_norm];
    be.head_norm_rope_store(&mut a.q, &mut a.k, &a.v, norms, c.norm_eps, rope, kv, place);
    be.probe("Qcur_rope", il, &a.q);
    be.probe("Kcur_rope", il, &a.k);
    let at = Attention {
        layer: place,
        window: layer.window,
        scale: c.attention_scale(),
    };
    be.attend(&mut a.attn, &a.q, kv, &at);
    be.mul_sigmoid(&mut a.attn, &a.gate);
    be.probe("attn_gated", il, &a.attn);
    be.matmul(&mut a.out, &w.attn_output, &a.attn);
    be.probe("attn_out", il, &a.out);
    let next = Some((&mut a.h, &w.ffn_norm, c.norm_eps));
    be.add_norm(
        &mut a.x,
        &mut a.out,
        &w.post_attention_norm,
        c.post_norm_eps,
        next,
    );
    be.probe("ffn_inp", il, &a.x);
}

/// Reads the normed input in `a.h`; leaves the next layer's there, if any.
fn feed_forward<B: Backend>(
    be: &mut B,
    c: &Config,
    il: usize,
    w: &LayerWeights<B>,
    next: Option<&B::Weight>,
    a: &mut Activations<B>,
) {
    be.probe("ffn_norm", il, &a.h);
    be.ffn_in(&mut a.ff, &mut a.up, &w.ffn_gate, &w.ffn_up, &a.h);
    be.matmul(&mut a.out, &w.ffn_down, &a.ff);
    be.probe("ffn_out", il, &a.out);
    let next = next.map(|w| (&mut a.h, w, c.norm_eps));
    be.add_norm(
        &mut a.x,
        &mut a.out,
        &w.post_ffw_norm,
        c.post_norm_eps,
        next,
    );
    be.probe("l_out", il, &a.x);
}
