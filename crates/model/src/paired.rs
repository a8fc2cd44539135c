//! Two backends in step, compared after every operation.
//!
//! Both compute everything from their own values, so a difference grows on its
//! way to the logits: what matters is the first operation that is outside of
//! the limits, not the worst one. What a reader would get wrong: operations are
//! called one by one, outside of [`Backend::run`], and their results are read
//! at once. A backend that records a pass must execute such a call directly.

use crate::DeviceError;
use crate::backend::{Attention, Backend, BlockAttention, Caps, KvLayer, PageData, Probes, RowSet};
use crate::batch::{Outputs, RowOutput, Shape, Step, Want};
use crate::kv::{KvLayout, KvType, PAGE_ROWS, PageClass, PageId};
use crate::rope::Rope;
use gguf::TensorView;
use half::f16;
use std::collections::BTreeMap;
use std::fmt;

/// How far two results may be apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Largest absolute difference of two elements.
    pub max_abs: f64,
    /// RMS of the differences over RMS of the first backend's elements.
    pub relative_rms: f64,
}

impl Limit {
    /// Equal bit for bit.
    pub const SAME_BITS: Limit = Limit {
        max_abs: 0.0,
        relative_rms: 0.0,
    };
}

/// How far the results of one operation are apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Name of the operation, as in the trait.
    pub op: &'static str,
    /// Number of the call, counted from the start of all comparison.
    pub call: usize,
    /// The last probe before the call, with its layer.
    pub after: Option<(&'static str, usize)>,
    /// The first probe after the call, with its layer.
    pub before: Option<(&'static str, usize)>,
    /// Largest absolute difference; infinite if one side alone is not finite.
    pub max_abs: f64,
    /// RMS of the differences over RMS of the first backend's elements.
    pub relative_rms: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (call {}", self.op, self.call)?;
        if let Some((name, layer)) = self.after {
            write!(f, ", after {name} of layer {layer}")?;
        }
        if let Some((name, layer)) = self.before {
            write!(f, ", before {name} of layer {layer}")?;
        }
        let (max_abs, rms) = (self.max_abs, self.relative_rms);
        write!(f, "): max abs {max_abs:.2e}, relative RMS {rms:.2e}")
    }
}

/// What was found since the comparison began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Operations compared.
    pub n_calls: usize,
    /// The first operation outside of the limit.
    pub first: Option<Difference>,
    /// Of each operation, the call with the largest relative RMS.
    pub worst: BTreeMap<&'static str, Difference>,
}

/// Two backends that do the same, see the module's description. What it gives
/// back (buffers read, rows selected, pages exported) is the first backend's.
pub struct Paired<A: Backend, B: Backend> {
    a: A,
    b: B,
    limit: Limit,
    found: Comparison,
    step: Step,
    /// The last probe seen.
    after: Option<(&'static str, usize)>,
    /// The first failure of reading a buffer.
    failed: Option<DeviceError>,
}

/// Something of the one backend and of the other.
pub struct Pair<X, Y> {
    a: X,
    b: Y,
}

/// The pages of both backends.
pub struct PairedKv<X, Y> {
    a: X,
    b: Y,
    layout: KvLayout,
}

impl<A: Backend, B: Backend> Paired<A, B> {
    /// Two backends with nothing loaded.
    pub fn new(a: A, b: B, limit: Limit) -> Paired<A, B> {
        Paired {
            a,
            b,
            limit,
            found: Comparison::default(),
            step: Step::default(),
            after: None,
            failed: None,
        }
    }

    /// What was found so far.
    pub fn found(&self) -> &Comparison {
        &self.found
    }

    /// Gives back what was found, and begins anew.
    pub fn take_found(&mut self) -> Comparison {
        std::mem::take(&mut self.found)
    }

    /// Compares one result of `op`.
    fn compare(&mut self, op: &'static str, x: &Pair<A::Buf, B::Buf>) {
        match (self.a.read(&x.a), self.b.read(&x.b)) {
            (Ok(a), Ok(b)) => self.note(op, &a, &b),
            (Err(error), _) | (_, Err(error)) => {
                self.failed.get_or_insert(error);
            }
        }
    }

    fn note(&mut self, op: &'static str, a: &[f32], b: &[f32]) {
        let (max_abs, relative_rms) = distance(a, b);
        let difference = Difference {
            op,
            call: self.found.n_calls,
            after: self.after,
            before: None,
            max_abs,
            relative_rms,
        };
        self.found.n_calls += 1;
        let is_outside = max_abs > self.limit.max_abs || relative_rms > self.limit.relative_rms;
        if is_outside && self.found.first.is_none() {
            self.found.first = Some(difference.clone());
        }
        let worst = self
            .found
            .worst
            .entry(op)
            .or_insert_with(|| difference.clone());
        if relative_rms > worst.relative_rms {
            *worst = difference;
        }
    }

    /// Compares what the current step's rows of `layer` hold after a store.
    fn compare_stored(&mut self, op: &'static str, kv: &PairedKv<A::Kv, B::Kv>, layer: KvLayer) {
        let mut rows_of: BTreeMap<PageId, usize> = BTreeMap::new();
        for row in &self.step.rows {
            let (page, slot) = self.step.place(layer.class, row.seq, row.pos);
            let rows = rows_of.entry(page).or_default();
            *rows = (*rows).max(slot + 1);
        }
        for (page, rows) in rows_of {
            let a = self.a.export_page(&kv.a, layer.class, page, rows);
            let b = self.b.export_page(&kv.b, layer.class, page, rows);
            match (a, b) {
                (Ok(a), Ok(b)) => {
                    let [a, b] = [a, b].map(|data| kv.layer(layer, &data));
                    self.note(op, &a, &b);
                }
                (Err(error), _) | (_, Err(error)) => {
                    self.failed.get_or_insert(error);
                }
            }
        }
    }

    /// Compares rows read back: their logits, in the order given.
    fn compare_outputs(&mut self, op: &'static str, a: &Outputs, b: &Outputs) {
        let logits = |outputs: &Outputs| outputs.iter().flat_map(output_logits).collect();
        let (a, b): (Vec<f32>, Vec<f32>) = (logits(a), logits(b));
        self.note(op, &a, &b);
    }
}

impl<X, Y> PairedKv<X, Y> {
    /// The elements of one layer of an exported page.
    fn layer(&self, layer: KvLayer, data: &PageData) -> Vec<f32> {
        let class = &self.layout.classes[layer.class as usize];
        let row_bytes = class.n_head_kv * class.head_dim * self.layout.ty.bytes();
        let layer_bytes = 2 * data.rows * row_bytes;
        elements(
            self.layout.ty,
            &data.bytes[layer.index * layer_bytes..][..layer_bytes],
        )
    }
}

/// Little-endian elements of a page.
fn elements(ty: KvType, bytes: &[u8]) -> Vec<f32> {
    match ty {
        KvType::F16 => {
            let halves = bytes.as_chunks::<2>().0.iter();
            halves.map(|b| f16::from_le_bytes(*b).to_f32()).collect()
        }
        KvType::F32 => {
            let floats = bytes.as_chunks::<4>().0.iter();
            floats.map(|b| f32::from_le_bytes(*b)).collect()
        }
    }
}

/// The logits of a row that was read back. Where the largest logits are close,
/// the two backends may name different tokens; their logits are close then.
fn output_logits(output: &RowOutput) -> Vec<f32> {
    match output {
        RowOutput::Argmax { logit, .. } => vec![*logit],
        RowOutput::TopK { top, logsumexp } => top
            .iter()
            .map(|(_, logit)| *logit)
            .chain(*logsumexp)
            .collect(),
        RowOutput::Full(logits) => logits.clone(),
        RowOutput::NonFinite { .. } => vec![f32::NAN],
    }
}

/// Largest absolute difference, and RMS of the differences over RMS of `a`.
/// Elements of other bits always differ, also the two zeros; an element that is
/// not finite on one side alone differs infinitely.
fn distance(a: &[f32], b: &[f32]) -> (f64, f64) {
    if a.len() != b.len() {
        return (f64::INFINITY, f64::INFINITY);
    }
    let (mut max, mut square, mut size) = (0f64, 0f64, 0f64);
    for (&a, &b) in a.iter().zip(b) {
        let d = if a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) {
            0.0
        } else if a.is_finite() && b.is_finite() {
            (f64::from(a) - f64::from(b)).abs().max(f64::MIN_POSITIVE)
        } else {
            f64::INFINITY
        };
        max = max.max(d);
        square += d * d;
        if a.is_finite() {
            size += f64::from(a) * f64::from(a);
        }
    }
    let relative_rms = if square > 0.0 {
        (square / size).sqrt()
    } else {
        0.0
    };
    (max, relative_rms)
}

/// Operations that write one buffer: done on both sides, then compared.
macro_rules! compared {
    ($($op:ident($out:ident $(, $x:ident: $ty:ty => $a:expr, $b:expr)*);)*) => {
        $(fn $op(&mut self, $out: &mut Self::Buf $(, $x: $ty)*) {
            self.a.$op(&mut $out.a $(, $a)*);
            self.b.$op(&mut $out.b $(, $b)*);
            self.compare(stringify!($op), $out);
        })*
    };
}

impl<A: Backend, B: Backend> Backend for Paired<A, B> {
    type Buf = Pair<A::Buf, B::Buf>;
    type Weight = Pair<A::Weight, B::Weight>;
    type Kv = PairedKv<A::Kv, B::Kv>;
    type Rope = Pair<A::Rope, B::Rope>;

    fn caps(&self) -> Caps {
        let (a, b) = (self.a.caps(), self.b.caps());
        Caps {
            device: format!("{} against {}", a.device, b.device),
            max_rows: a.max_rows.min(b.max_rows),
            same_bits_rows: a.same_bits_rows.min(b.same_bits_rows),
        }
    }

    fn load(&mut self, tensor: &TensorView) -> Result<Self::Weight, DeviceError> {
        let (a, b) = (self.a.load(tensor)?, self.b.load(tensor)?);
        Ok(Pair { a, b })
    }

    fn load_rope(&mut self, rope: &Rope) -> Result<Self::Rope, DeviceError> {
        let (a, b) = (self.a.load_rope(rope)?, self.b.load_rope(rope)?);
        Ok(Pair { a, b })
    }

    fn alloc(&mut self, set: RowSet, cols: usize) -> Result<Self::Buf, DeviceError> {
        let (a, b) = (self.a.alloc(set, cols)?, self.b.alloc(set, cols)?);
        Ok(Pair { a, b })
    }

    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<Self::Kv, DeviceError> {
        Ok(PairedKv {
            a: self.a.alloc_kv(layout)?,
            b: self.b.alloc_kv(layout)?,
            layout: *layout,
        })
    }

    fn grow_kv(&mut self, kv: &mut Self::Kv, n_slabs: usize) -> Result<(), DeviceError> {
        self.a.grow_kv(&mut kv.a, n_slabs)?;
        self.b.grow_kv(&mut kv.b, n_slabs)
    }

    fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.step = step.clone();
        self.after = None;
        self.a.step(step)?;
        self.b.step(step)
    }

    fn run(&mut self, _shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError> {
        record(self);
        self.failed.take().map_or(Ok(()), Err)
    }

    fn read(&mut self, x: &Self::Buf) -> Result<Vec<f32>, DeviceError> {
        self.a.read(&x.a)
    }

    fn select(&mut self, logits: &Self::Buf, want: &[Want]) -> Result<Outputs, DeviceError> {
        let a = self.a.select(&logits.a, want)?;
        let b = self.b.select(&logits.b, want)?;
        self.compare_outputs("select", &a, &b);
        Ok(a)
    }

    fn export_page(
        &mut self,
        kv: &Self::Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        let a = self.a.export_page(&kv.a, class, page, rows)?;
        let b = self.b.export_page(&kv.b, class, page, rows)?;
        let ty = kv.layout.ty;
        self.note(
            "export_page",
            &elements(ty, &a.bytes),
            &elements(ty, &b.bytes),
        );
        Ok(a)
    }

    fn import_page(
        &mut self,
        kv: &mut Self::Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        assert!(data.rows <= PAGE_ROWS, "{} rows of a page", data.rows);
        self.a.import_page(&mut kv.a, class, page, data)?;
        self.b.import_page(&mut kv.b, class, page, data)
    }

    fn copy_page(
        &mut self,
        kv: &mut Self::Kv,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.a.copy_page(&mut kv.a, class, from, to, rows)?;
        self.b.copy_page(&mut kv.b, class, from, to, rows)
    }

    compared! {
        embed(out, table: &Self::Weight => &table.a, &table.b);
        matmul(out, w: &Self::Weight => &w.a, &w.b, x: &Self::Buf => &x.a, &x.b);
        add_bias(x, bias: &Self::Weight => &bias.a, &bias.b);
        rms_norm(
            out,
            x: &Self::Buf => &x.a, &x.b,
            w: Option<&Self::Weight> => w.map(|w| &w.a), w.map(|w| &w.b),
            eps: f32 => eps, eps
        );
        head_norm(x, w: &Self::Weight => &w.a, &w.b, eps: f32 => eps, eps);
        rope(x, rope: &Self::Rope => &rope.a, &rope.b, head_dim: usize => head_dim, head_dim);
        attend(
            out,
            q: &Self::Buf => &q.a, &q.b,
            kv: &Self::Kv => &kv.a, &kv.b,
            at: &Attention => at, at
        );
        attend_block(
            out,
            q: &Self::Buf => &q.a, &q.b,
            k: &Self::Buf => &k.a, &k.b,
            v: &Self::Buf => &v.a, &v.b,
            kv: &Self::Kv => &kv.a, &kv.b,
            at: &BlockAttention => at, at
        );
        mul_sigmoid(x, gate: &Self::Buf => &gate.a, &gate.b);
        swiglu(gate, up: &Self::Buf => &up.a, &up.b);
        add(x, y: &Self::Buf => &y.a, &y.b);
        gather(out, x: &Self::Buf => &x.a, &x.b);
        softcap(x, scale: f32 => scale, scale, cap: Option<f32> => cap, cap);
        copy_columns(
            out,
            first_col: usize => first_col, first_col,
            x: &Self::Buf => &x.a, &x.b
        );
    }

    fn store_kv(&mut self, kv: &mut Self::Kv, layer: KvLayer, k: &Self::Buf, v: &Self::Buf) {
        self.a.store_kv(&mut kv.a, layer, &k.a, &v.a);
        self.b.store_kv(&mut kv.b, layer, &k.b, &v.b);
        self.compare_stored("store_kv", kv, layer);
    }

    fn add_norm(
        &mut self,
        x: &mut Self::Buf,
        y: &mut Self::Buf,
        w: &Self::Weight,
        eps: f32,
        next: Option<(&mut Self::Buf, &Self::Weight, f32)>,
    ) {
        match next {
            Some((out, next, next_eps)) => {
                let next_a = Some((&mut out.a, &next.a, next_eps));
                self.a.add_norm(&mut x.a, &mut y.a, &w.a, eps, next_a);
                let next_b = Some((&mut out.b, &next.b, next_eps));
                self.b.add_norm(&mut x.b, &mut y.b, &w.b, eps, next_b);
                self.compare("add_norm", x);
                self.compare("add_norm", out);
            }
            None => {
                self.a.add_norm(&mut x.a, &mut y.a, &w.a, eps, None);
                self.b.add_norm(&mut x.b, &mut y.b, &w.b, eps, None);
                self.compare("add_norm", x);
            }
        }
    }

    fn qkv_gate(
        &mut self,
        q: &mut Self::Buf,
        k: &mut Self::Buf,
        v: &mut Self::Buf,
        gate: &mut Self::Buf,
        w: [&Self::Weight; 4],
        x: &Self::Buf,
    ) {
        let (w_a, w_b) = (w.map(|w| &w.a), w.map(|w| &w.b));
        self.a
            .qkv_gate(&mut q.a, &mut k.a, &mut v.a, &mut gate.a, w_a, &x.a);
        self.b
            .qkv_gate(&mut q.b, &mut k.b, &mut v.b, &mut gate.b, w_b, &x.b);
        for out in [q, k, v, gate] {
            self.compare("qkv_gate", out);
        }
    }

    fn head_norm_rope_store(
        &mut self,
        q: &mut Self::Buf,
        k: &mut Self::Buf,
        v: &Self::Buf,
        w: [&Self::Weight; 2],
        eps: f32,
        rope: Option<(&Self::Rope, usize)>,
        kv: &mut Self::Kv,
        layer: KvLayer,
    ) {
        let (w_a, w_b) = (w.map(|w| &w.a), w.map(|w| &w.b));
        let rope_a = rope.map(|(rope, head_dim)| (&rope.a, head_dim));
        let rope_b = rope.map(|(rope, head_dim)| (&rope.b, head_dim));
        let (a, b) = (&mut self.a, &mut self.b);
        a.head_norm_rope_store(&mut q.a, &mut k.a, &v.a, w_a, eps, rope_a, &mut kv.a, layer);
        b.head_norm_rope_store(&mut q.b, &mut k.b, &v.b, w_b, eps, rope_b, &mut kv.b, layer);
        self.compare("head_norm_rope_store", q);
        self.compare("head_norm_rope_store", k);
        self.compare_stored("head_norm_rope_store", kv, layer);
    }

    fn ffn_in(
        &mut self,
        ff: &mut Self::Buf,
        up: &mut Self::Buf,
        w_gate: &Self::Weight,
        w_up: &Self::Weight,
        x: &Self::Buf,
    ) {
        self.a
            .ffn_in(&mut ff.a, &mut up.a, &w_gate.a, &w_up.a, &x.a);
        self.b
            .ffn_in(&mut ff.b, &mut up.b, &w_gate.b, &w_up.b, &x.b);
        self.compare("ffn_in", ff);
    }

    fn logits(
        &mut self,
        logits: &mut Self::Buf,
        normed: &mut Self::Buf,
        x: &Self::Buf,
        norm: (&Self::Weight, f32),
        head: &Self::Weight,
        scale: f32,
        cap: Option<f32>,
    ) {
        let (norm_a, norm_b) = ((&norm.0.a, norm.1), (&norm.0.b, norm.1));
        let (a, b) = (&mut self.a, &mut self.b);
        a.logits(
            &mut logits.a,
            &mut normed.a,
            &x.a,
            norm_a,
            &head.a,
            scale,
            cap,
        );
        b.logits(
            &mut logits.b,
            &mut normed.b,
            &x.b,
            norm_b,
            &head.b,
            scale,
            cap,
        );
        self.compare("logits", logits);
    }

    fn probes(&mut self) -> Option<&mut Probes> {
        self.a.probes()
    }

    fn probe(&mut self, name: &'static str, layer: usize, x: &Self::Buf) {
        self.after = Some((name, layer));
        let found = &mut self.found;
        for difference in found.first.iter_mut().chain(found.worst.values_mut()) {
            difference.before.get_or_insert((name, layer));
        }
        self.a.probe(name, layer, &x.a);
        self.b.probe(name, layer, &x.b);
    }
}
