//! The DFlash drafter: one pass proposes a block of tokens after the newest one.
//!
//! It has no embedding and no head: it uses the target's. Its context is not
//! tokens but features: the target's residual stream at a few layers, projected
//! once. The keys and values of these features are computed at the end of the
//! target's own pass, so features never outlive a pass. What a reader would get
//! wrong: context rows skip `attn_norm`; block rows enter without the target's
//! input norm; pairs are halves, not neighbours; the anchor's own row predicts
//! nothing.

use crate::activations::Taps;
use crate::backend::{BlockAttention, BlockWindow, KvLayer, RowSet};
use crate::batch::{Batch, Tables};
use crate::config::{Config, Keys, Shape};
use crate::kv::{ClassLayout, PageClass};
use crate::rope::{Pairing, Rope, RopeScaling};
use crate::weights::Loader;
use crate::{Backend, DeviceError, Error, Reference};
use gguf::{Gguf, Metadata, shown};

/// How far a block row looks back in a sliding layer of window W.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WindowConvention {
    /// Keys at a distance below W, as the drafters at hand were trained.
    #[default]
    Below,
    /// Keys at a distance up to W.
    Within,
}

/// The numbers of a drafter. Lengths are in elements.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the field's standard names
pub struct DrafterConfig {
    pub n_layer: usize,
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_head: usize,
    pub n_head_kv: usize,
    pub head_dim: usize,
    pub norm_eps: f32,
    pub rope: Rope,
    /// Which keys a block row sees, per layer.
    pub windows: Vec<BlockWindow>,
    /// Rows of a block, the anchor's included.
    pub block_size: usize,
    /// The token that stands for "to be proposed".
    pub mask_token: u32,
    /// Places of the target's residual stream: `t` is the input of layer `t`.
    pub target_places: Vec<usize>,
    pub logit_scale: f32,
    pub logit_cap: Option<f32>,
}

impl DrafterConfig {
    /// Reads the configuration of a drafter file.
    ///
    /// # Errors
    /// [`Error::KeyMissing`], [`Error::KeyValue`], [`Error::DrafterUnsupported`].
    pub fn from_metadata(
        meta: &Metadata,
        convention: WindowConvention,
    ) -> Result<DrafterConfig, Error> {
        let found = meta.str("general.architecture")?.unwrap_or("");
        if found != "dflash" {
            let what = format!("its architecture is \"{}\", not \"dflash\"", shown(found));
            return Err(Error::DrafterUnsupported(what));
        }
        let keys = Keys::new(meta, "dflash");
        refuse_unknown_forms(meta)?;
        let shape = Shape::read(&keys)?;
        keys.refuse_other_rope(shape.head_dim)?;
        keys.refuse_uncomputed(
            &[
                "attention.causal",
                "attention.sliding_window_pattern",
                "final_logit_softcapping",
            ],
            shape.head_dim,
        )?;
        let base = keys.positive("rope.freq_base", "every layer turns by it")?;
        let block_size = keys.count("block_size", "it is the rows of a block")?;
        if block_size < 2 {
            return Err(keys.value("block_size", &block_size, &"at least 2"));
        }
        Ok(DrafterConfig {
            n_layer: shape.n_layer,
            n_embd: shape.n_embd,
            n_ff: shape.n_ff,
            n_head: shape.n_head,
            n_head_kv: shape.n_head_kv,
            head_dim: shape.head_dim,
            norm_eps: keys.positive("attention.layer_norm_rms_epsilon", "the norms need it")?,
            rope: Rope::new(Pairing::Halves, shape.head_dim, base, RopeScaling::None),
            windows: windows(&keys, meta, shape.n_layer, convention)?,
            block_size,
            mask_token: meta.u32("tokenizer.ggml.mask_token_id")?.ok_or_else(|| {
                Error::KeyMissing {
                    key: "tokenizer.ggml.mask_token_id".into(),
                    why: "it stands for the tokens to propose",
                }
            })?,
            target_places: target_places(&keys, meta)?,
            logit_scale: keys.positive_or_none("logit_scale")?.unwrap_or(1.0),
            logit_cap: keys.positive_or_none("final_logit_softcapping")?,
        })
    }

    /// Checks that the tensors in `file` are those of this drafter, without a target.
    ///
    /// # Errors
    /// [`Error::TensorMissing`], [`Error::TensorShape`], [`Error::TensorType`],
    /// [`Error::TensorsUnused`].
    pub fn check_tensors(&self, file: &Gguf) -> Result<(), Error> {
        // The head is the target's, so any vocabulary will do; nothing is computed.
        Drafter::load(&mut Reference::new(), file, self.clone(), 1).map(|_| ())
    }

    /// Checks that drafter and target belong together.
    ///
    /// # Errors
    /// [`Error::DrafterMismatch`] with both values.
    pub fn check_target(
        &self,
        target: &Config,
        drafter_meta: &Metadata,
        target_tokens: &[u8; 32],
    ) -> Result<(), Error> {
        let mismatch = |what, drafter: String, target: String| {
            Err(Error::DrafterMismatch {
                what,
                drafter,
                target,
            })
        };
        if self.n_embd != target.n_embd {
            let (d, t) = (self.n_embd.to_string(), target.n_embd.to_string());
            return mismatch("the width of the residual stream", d, t);
        }
        if let Some(&place) = self.target_places.iter().find(|&&p| p > target.n_layer) {
            let (d, t) = (place.to_string(), format!("at most {}", target.n_layer));
            return mismatch("a target layer", d, t);
        }
        if self.mask_token as usize >= target.n_vocab {
            let d = self.mask_token.to_string();
            return mismatch("the mask token", d, format!("below {}", target.n_vocab));
        }
        let tokens = crate::vocabulary_digest(drafter_meta)?;
        if tokens != *target_tokens {
            return mismatch("the vocabulary's digest", hex(&tokens), hex(target_tokens));
        }
        Ok(())
    }

    /// Pages of the drafter's context.
    pub fn class_layout(&self) -> ClassLayout {
        // A page may be released once no layer looks at it.
        let look_back = |window: &BlockWindow| match *window {
            BlockWindow::All => None,
            BlockWindow::Below(w) => Some(w),
            BlockWindow::Within(w) => Some(w + 1),
        };
        let look_back: Option<Vec<u32>> = self.windows.iter().map(look_back).collect();
        ClassLayout {
            n_layer: self.n_layer,
            n_head_kv: self.n_head_kv,
            head_dim: self.head_dim,
            window: look_back.and_then(|all| all.into_iter().max()),
        }
    }

    /// Tokens of a draft at most.
    pub fn most_drafted(&self) -> usize {
        self.block_size - 1
    }

    /// Bytes that the drafter's buffers take once a pass had `rows` rows, without
    /// the logits of its blocks.
    pub fn activation_bytes(&self, rows: usize) -> u64 {
        let columns: usize = self.columns().iter().sum();
        (rows * columns * size_of::<f32>()) as u64
    }

    /// Columns of the buffers with all rows, in the order of [`Activations`].
    fn columns(&self) -> [usize; 11] {
        let (n_embd, n_q, n_kv, n_ff) = (self.n_embd, self.n_q(), self.n_kv(), self.n_ff);
        let n_features = self.target_places.len() * n_embd;
        [
            n_features, n_embd, n_embd, n_embd, n_q, n_kv, n_kv, n_q, n_ff, n_ff, n_embd,
        ]
    }

    fn n_q(&self) -> usize {
        self.n_head * self.head_dim
    }

    fn n_kv(&self) -> usize {
        self.n_head_kv * self.head_dim
    }
}

fn hex(digest: &[u8; 32]) -> String {
    digest[..6].iter().map(|b| format!("{b:02x}")).collect()
}

/// Refuses what would be computed wrongly: the second generation of DFlash and
/// variants of the first that this graph does not have.
fn refuse_unknown_forms(meta: &Metadata) -> Result<(), Error> {
    const SECOND: [&str; 4] = [
        "dflash.conv_kernel_size",
        "dflash.conv_group_size",
        "dflash.selector_rank",
        "dflash.selector_top_k",
    ];
    if let Some(key) = SECOND.into_iter().find(|key| meta.get(key).is_some()) {
        let what = format!("it has the key {key} of DFlash 2, whose graph Muser does not have");
        return Err(Error::DrafterUnsupported(what));
    }
    for key in ["dflash.attention.causal", "dflash.sample_from_anchor"] {
        if meta.bool(key)? == Some(true) {
            let what = format!("{key} is true; only false is computed here");
            return Err(Error::DrafterUnsupported(what));
        }
    }
    Ok(())
}

fn windows(
    keys: &Keys<'_>,
    meta: &Metadata,
    n_layer: usize,
    convention: WindowConvention,
) -> Result<Vec<BlockWindow>, Error> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let has_pattern = meta.get(&format!("dflash.{PATTERN}")).is_some();
    let has_window = keys.u32("attention.sliding_window")?.is_some();
    if !has_pattern && !has_window {
        return Ok(vec![BlockWindow::All; n_layer]);
    }
    if !has_pattern {
        return Err(Error::KeyMissing {
            key: format!("dflash.{PATTERN}"),
            why: "a window is given, so it must be known which layers slide",
        });
    }
    let window = keys.count(
        "attention.sliding_window",
        "sliding layers need their window",
    )? as u32;
    let sliding = match convention {
        WindowConvention::Below => BlockWindow::Below(window),
        WindowConvention::Within => BlockWindow::Within(window),
    };
    let pattern = keys.layer_pattern(n_layer)?;
    let of = |slides: bool| if slides { sliding } else { BlockWindow::All };
    Ok(pattern.into_iter().map(of).collect())
}

fn target_places(keys: &Keys<'_>, meta: &Metadata) -> Result<Vec<usize>, Error> {
    const KEY: &str = "target_layers";
    let places = meta.integers(&format!("dflash.{KEY}"))?;
    let places = places.ok_or_else(|| Error::KeyMissing {
        key: format!("dflash.{KEY}"),
        why: "the context features come from these layers",
    })?;
    let found = || {
        let mut texts: Vec<String> = places.iter().take(8).map(i64::to_string).collect();
        if places.len() > texts.len() {
            texts.push(format!("... ({} numbers)", places.len()));
        }
        format!("[{}]", texts.join(", "))
    };
    if places.is_empty() {
        return Err(keys.value(KEY, &found(), &"at least one layer"));
    }
    let place = |&p: &i64| usize::try_from(p).ok();
    let converted: Option<Vec<usize>> = places.iter().map(place).collect();
    converted.ok_or_else(|| keys.value(KEY, &found(), &"numbers from 0 up"))
}

struct LayerWeights<B: Backend> {
    attn_norm: B::Weight,
    attn_q: B::Weight,
    attn_k: B::Weight,
    attn_v: B::Weight,
    attn_q_norm: B::Weight,
    attn_k_norm: B::Weight,
    attn_output: B::Weight,
    ffn_norm: B::Weight,
    ffn_gate: B::Weight,
    ffn_up: B::Weight,
    ffn_down: B::Weight,
}

impl<B: Backend> LayerWeights<B> {
    fn load(from: &mut Loader<'_, B>, c: &DrafterConfig, il: usize) -> Result<Self, Error> {
        let name = |part: &str| format!("blk.{il}.{part}.weight");
        let (d, n_q, n_kv) = (c.n_embd, c.n_q(), c.n_kv());
        Ok(LayerWeights {
            attn_norm: from.vector(&name("attn_norm"), d)?,
            attn_q: from.matrix(&name("attn_q"), d, n_q)?,
            attn_k: from.matrix(&name("attn_k"), d, n_kv)?,
            attn_v: from.matrix(&name("attn_v"), d, n_kv)?,
            attn_q_norm: from.vector(&name("attn_q_norm"), c.head_dim)?,
            attn_k_norm: from.vector(&name("attn_k_norm"), c.head_dim)?,
            attn_output: from.matrix(&name("attn_output"), n_q, d)?,
            ffn_norm: from.vector(&name("ffn_norm"), d)?,
            ffn_gate: from.matrix(&name("ffn_gate"), d, c.n_ff)?,
            ffn_up: from.matrix(&name("ffn_up"), d, c.n_ff)?,
            ffn_down: from.matrix(&name("ffn_down"), c.n_ff, d)?,
        })
    }
}

/// The buffers of a drafter's pass; `[rows, cols]`, f32.
struct Activations<B: Backend> {
    /// Residual streams of the target, side by side.
    features: B::Buf,
    /// The projected features.
    context: B::Buf,
    x: B::Buf,
    h: B::Buf,
    q: B::Buf,
    k: B::Buf,
    v: B::Buf,
    attn: B::Buf,
    ff: B::Buf,
    up: B::Buf,
    out: B::Buf,
    normed: B::Buf,
    logits: B::Buf,
}

/// A drafter beside its target.
pub(crate) struct Drafter<B: Backend> {
    pub(crate) config: DrafterConfig,
    fc: B::Weight,
    enc_output_norm: B::Weight,
    layers: Vec<LayerWeights<B>>,
    output_norm: B::Weight,
    rope: B::Rope,
    act: Activations<B>,
}

impl<B: Backend> Drafter<B> {
    /// Loads every tensor of a drafter file.
    pub(crate) fn load(
        be: &mut B,
        file: &Gguf,
        config: DrafterConfig,
        n_vocab: usize,
    ) -> Result<Drafter<B>, Error> {
        let c = &config;
        let rope = be.load_rope(&c.rope)?;
        let n_features = c.target_places.len() * c.n_embd;
        let mut from = Loader::new(be, file);
        let fc = from.matrix("fc.weight", n_features, c.n_embd)?;
        let enc_output_norm = from.vector("enc.output_norm.weight", c.n_embd)?;
        let output_norm = from.vector("output_norm.weight", c.n_embd)?;
        let layers = (0..c.n_layer).map(|il| LayerWeights::load(&mut from, c, il));
        let layers = layers.collect::<Result<_, _>>()?;
        from.finish("dflash")?;
        let act = Activations::new(be, c, n_vocab)?;
        Ok(Drafter {
            fc,
            enc_output_norm,
            layers,
            output_norm,
            rope,
            act,
            config,
        })
    }

    /// Where the target's pass leaves its residual streams.
    pub(crate) fn taps(&mut self) -> Taps<'_, B> {
        Taps {
            places: &self.config.target_places,
            features: &mut self.act.features,
            n_embd: self.config.n_embd,
        }
    }

    /// Projects the features of the pass's rows and stores their keys and
    /// values. Runs at the end of the target's pass.
    pub(crate) fn store_context(&mut self, be: &mut B, kv: &mut B::Kv) {
        let (c, a) = (&self.config, &mut self.act);
        be.matmul(&mut a.context, &self.fc, &a.features);
        be.head_norm(&mut a.context, &self.enc_output_norm, c.norm_eps);
        be.probe("dflash_features", 0, &a.context);
        for (il, w) in self.layers.iter().enumerate() {
            be.matmul(&mut a.k, &w.attn_k, &a.context);
            be.matmul(&mut a.v, &w.attn_v, &a.context);
            be.head_norm(&mut a.k, &w.attn_k_norm, c.norm_eps);
            be.rope(&mut a.k, &self.rope, c.head_dim);
            be.store_kv(kv, place(il), &a.k, &a.v);
        }
    }

    /// The block's pass over the rows of the current step, with the target's
    /// embedding and head.
    pub(crate) fn block(&mut self, be: &mut B, kv: &B::Kv, embd: &B::Weight, head: &B::Weight) {
        let (c, a) = (&self.config, &mut self.act);
        be.embed(&mut a.x, embd);
        for (il, w) in self.layers.iter().enumerate() {
            be.rms_norm(&mut a.h, &a.x, Some(&w.attn_norm), c.norm_eps);
            be.matmul(&mut a.q, &w.attn_q, &a.h);
            be.matmul(&mut a.k, &w.attn_k, &a.h);
            be.matmul(&mut a.v, &w.attn_v, &a.h);
            be.head_norm(&mut a.q, &w.attn_q_norm, c.norm_eps);
            be.head_norm(&mut a.k, &w.attn_k_norm, c.norm_eps);
            be.rope(&mut a.q, &self.rope, c.head_dim);
            be.rope(&mut a.k, &self.rope, c.head_dim);
            let at = BlockAttention {
                layer: place(il),
                window: c.windows[il],
                scale: 1.0 / (c.head_dim as f32).sqrt(),
            };
            be.attend_block(&mut a.attn, &a.q, &a.k, &a.v, kv, &at);
            be.matmul(&mut a.out, &w.attn_output, &a.attn);
            be.add(&mut a.x, &a.out);
            be.rms_norm(&mut a.h, &a.x, Some(&w.ffn_norm), c.norm_eps);
            be.ffn_in(&mut a.ff, &mut a.up, &w.ffn_gate, &w.ffn_up, &a.h);
            be.matmul(&mut a.out, &w.ffn_down, &a.ff);
            be.add(&mut a.x, &a.out);
            be.probe("dflash_l_out", il, &a.x);
        }
        let norm = (&self.output_norm, c.norm_eps);
        let (scale, cap) = (c.logit_scale, c.logit_cap);
        be.logits(&mut a.logits, &mut a.normed, &a.x, norm, head, scale, cap);
    }

    /// The block pass's logits, a row for each wanted row.
    pub(crate) fn logits(&self) -> &B::Buf {
        &self.act.logits
    }
}

impl<B: Backend> Activations<B> {
    fn new(be: &mut B, c: &DrafterConfig, n_vocab: usize) -> Result<Activations<B>, DeviceError> {
        let [features, context, x, h, q, k, v, attn, ff, up, out] = c.columns();
        let mut all = |cols| be.alloc(RowSet::All, cols);
        Ok(Activations {
            features: all(features)?,
            context: all(context)?,
            x: all(x)?,
            h: all(h)?,
            q: all(q)?,
            k: all(k)?,
            v: all(v)?,
            attn: all(attn)?,
            ff: all(ff)?,
            up: all(up)?,
            out: all(out)?,
            normed: be.alloc(RowSet::Wanted, c.n_embd)?,
            logits: be.alloc(RowSet::Wanted, n_vocab)?,
        })
    }
}

fn place(index: usize) -> KvLayer {
    KvLayer {
        class: PageClass::Drafter,
        index,
    }
}

/// A block to propose for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRequest {
    /// Index of the sequence in the tables given beside.
    pub seq: u32,
    /// The newest token: sampled, not yet through the target.
    pub anchor: u32,
    /// Tokens to propose: 1 to `block_size - 1`. Block rows see each other, so
    /// what is proposed depends on it.
    pub n_draft: usize,
}

/// The rows of a drafting pass: each request's anchor and masks, from the
/// sequence's next position on; all rows but the anchors are wanted.
///
/// # Errors
/// [`Error::SequenceUnknown`], [`Error::DraftedTwice`], [`Error::DraftLength`].
pub(crate) fn block_batch(
    requests: &[DraftRequest],
    tables: &Tables<'_>,
    config: &DrafterConfig,
) -> Result<Batch, Error> {
    let n_sequences = tables.len();
    let most = config.most_drafted();
    let mut has_block = vec![false; n_sequences];
    let mut batch = Batch::default();
    for &DraftRequest {
        seq,
        anchor,
        n_draft,
    } in requests
    {
        let Some(pages) = tables.get(seq as usize) else {
            return Err(Error::SequenceUnknown { seq, n_sequences });
        };
        if std::mem::replace(&mut has_block[seq as usize], true) {
            return Err(Error::DraftedTwice { seq });
        }
        if !(1..=most).contains(&n_draft) {
            let found = n_draft;
            return Err(Error::DraftLength { found, most });
        }
        let masks = vec![config.mask_token; n_draft];
        batch.push(seq, pages.len(), &[&[anchor], &masks[..]].concat());
        let end = batch.rows.len();
        batch.wanted.extend(end as u32 - n_draft as u32..end as u32);
    }
    Ok(batch)
}
