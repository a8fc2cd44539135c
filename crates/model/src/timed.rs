//! A backend that clocks every operation: the walk of a token.
//!
//! Each call of an operation becomes a [`Call`] with its shape, the bytes it
//! must read and the time it took. Operations run one by one, also on a device
//! that would record a pass, so that the sum is what the operations cost and
//! not what a recorded pass costs.

use crate::DeviceError;
use crate::backend::{Attention, Backend, BlockAttention, Caps, KvLayer, PageData, Probes, RowSet};
use crate::batch::{Outputs, Shape, Step, Want};
use crate::kv::{KvLayout, PageClass, PageId};
use crate::rope::Rope;
use gguf::{TensorType, TensorView};
use std::ops::Range;
use std::time::{Duration, Instant};

/// One call of an operation.
#[derive(Clone, Debug)]
pub struct Call {
    /// Name of the operation, as in the trait.
    pub op: &'static str,
    /// The tensors it reads, without layer and suffix (`attn_q`), if any.
    pub tensors: String,
    /// Encoding of what it reads, and the device's way with it, in words.
    pub encoding: String,
    /// Rows it writes.
    pub rows: usize,
    /// Columns it writes.
    pub cols: usize,
    /// Columns of a product's input, over which it sums; 0 for other operations.
    pub inner: usize,
    /// Multiplications of products and of attention, each with an addition.
    pub macs: u64,
    /// Bytes it must read: encoded weights, and each stored key and value that a row
    /// of the pass sees, once.
    pub bytes: u64,
    /// Start, since the pass began.
    pub start: Duration,
    /// Time it took.
    pub time: Duration,
}

/// A backend and the calls it was given since the last step.
pub struct Timed<B: Backend> {
    be: B,
    step: Step,
    start: Instant,
    calls: Vec<Call>,
}

/// A buffer with its columns.
pub struct TimedBuf<T> {
    buf: T,
    set: RowSet,
    cols: usize,
}

/// A weight with what is known of its tensor.
pub struct TimedWeight<T> {
    weight: T,
    name: String,
    ty: TensorType,
    row_bytes: u64,
    n_bytes: u64,
    n_elements: u64,
}

/// Pages with their layout.
pub struct TimedKv<T> {
    kv: T,
    layout: KvLayout,
}

/// What a call says of itself beside its time.
#[derive(Default)]
struct Note {
    tensors: String,
    encoding: String,
    inner: usize,
    macs: u64,
    bytes: u64,
}

impl<B: Backend> Timed<B> {
    /// A clocked backend.
    pub fn new(be: B) -> Timed<B> {
        Timed {
            be,
            step: Step::default(),
            start: Instant::now(),
            calls: Vec::new(),
        }
    }

    /// The calls since the last step, in order.
    pub fn take_calls(&mut self) -> Vec<Call> {
        std::mem::take(&mut self.calls)
    }

    fn n_rows(&self, set: RowSet) -> usize {
        match set {
            RowSet::All => self.step.rows.len(),
            RowSet::Wanted => self.step.wanted.len(),
        }
    }

    /// Runs `call` and notes it as `op`, which writes `shape`.
    fn clock(
        &mut self,
        op: &'static str,
        (set, cols): (RowSet, usize),
        note: Note,
        call: impl FnOnce(&mut B),
    ) {
        let start = self.start.elapsed();
        call(&mut self.be);
        let time = self.start.elapsed() - start;
        self.calls.push(Call {
            op,
            tensors: note.tensors,
            encoding: note.encoding,
            rows: self.n_rows(set),
            cols,
            inner: note.inner,
            macs: note.macs,
            bytes: note.bytes,
            start,
            time,
        });
    }

    /// What an operation with these weights reads, and how that is encoded.
    fn weights_read(&self, weights: &[&TimedWeight<B::Weight>]) -> Note {
        let names: Vec<&str> = weights.iter().map(|w| short(&w.name)).collect();
        let mut encodings: Vec<String> = Vec::new();
        for weight in weights {
            let encoding = self.be.kernel(weight.ty);
            if !encodings.contains(&encoding) {
                encodings.push(encoding);
            }
        }
        Note {
            tensors: names.join("+"),
            encoding: encodings.join("+"),
            bytes: weights.iter().map(|w| w.n_bytes).sum(),
            ..Note::default()
        }
    }

    /// As [`Timed::weights_read`], of products with `inner` columns of each row of `set`.
    fn products(&self, weights: &[&TimedWeight<B::Weight>], (set, inner): (RowSet, usize)) -> Note {
        let n_elements: u64 = weights.iter().map(|w| w.n_elements).sum();
        Note {
            inner,
            macs: self.n_rows(set) as u64 * n_elements,
            ..self.weights_read(weights)
        }
    }

    /// What attention over stored rows reads and computes, if a row at a position sees
    /// those of `sees` and its result has `cols` columns.
    fn keys_read(
        &self,
        kv: &TimedKv<B::Kv>,
        layer: KvLayer,
        cols: usize,
        sees: impl Fn(u32) -> Range<u32>,
    ) -> Note {
        let class = &kv.layout.classes[layer.class as usize];
        let key_bytes = 2 * class.n_head_kv * class.head_dim * kv.layout.ty.bytes();
        let (mut n_read, mut n_seen) = (0, 0);
        // Rows of a sequence share what they read.
        for rows in self.step.rows.chunk_by(|a, b| a.seq == b.seq) {
            let seen = rows.iter().map(|row| sees(row.pos));
            n_seen += seen.clone().map(|keys| keys.len() as u64).sum::<u64>();
            let union = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
            n_read += union.map_or(0, |keys| keys.len() as u64);
        }
        Note {
            encoding: format!("{} {}", layer.class, kv.layout.ty),
            // Scores and weighted values.
            macs: 2 * n_seen * cols as u64,
            bytes: n_read * key_bytes as u64,
            ..Note::default()
        }
    }
}

/// `blk.3.attn_q.weight` as `attn_q`.
fn short(name: &str) -> &str {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    match name.strip_prefix("blk.") {
        Some(rest) => rest.split_once('.').map_or(rest, |(_, part)| part),
        None => name,
    }
}

impl<T> TimedBuf<T> {
    fn shape(&self) -> (RowSet, usize) {
        (self.set, self.cols)
    }
}

impl<B: Backend> Backend for Timed<B> {
    type Buf = TimedBuf<B::Buf>;
    type Weight = TimedWeight<B::Weight>;
    type Kv = TimedKv<B::Kv>;
    type Rope = B::Rope;

    fn caps(&self) -> Caps {
        self.be.caps()
    }

    fn kernel(&self, ty: TensorType) -> String {
        self.be.kernel(ty)
    }

    fn load(&mut self, tensor: &TensorView) -> Result<Self::Weight, DeviceError> {
        Ok(TimedWeight {
            weight: self.be.load(tensor)?,
            name: tensor.name.clone(),
            ty: tensor.ty,
            row_bytes: tensor.ty.row_bytes(tensor.shape[0]).unwrap_or(0),
            n_bytes: tensor.data.len() as u64,
            n_elements: tensor.shape.iter().product(),
        })
    }

    fn load_rope(&mut self, rope: &Rope) -> Result<Self::Rope, DeviceError> {
        self.be.load_rope(rope)
    }

    fn alloc(&mut self, set: RowSet, cols: usize) -> Result<Self::Buf, DeviceError> {
        let buf = self.be.alloc(set, cols)?;
        Ok(TimedBuf { buf, set, cols })
    }

    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<Self::Kv, DeviceError> {
        Ok(TimedKv {
            kv: self.be.alloc_kv(layout)?,
            layout: *layout,
        })
    }

    fn grow_kv(&mut self, kv: &mut Self::Kv, n_slabs: usize) -> Result<(), DeviceError> {
        self.be.grow_kv(&mut kv.kv, n_slabs)
    }

    fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.step = step.clone();
        self.calls.clear();
        self.start = Instant::now();
        self.be.step(step)
    }

    fn run(&mut self, _shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError> {
        record(self);
        Ok(())
    }

    fn read(&mut self, x: &Self::Buf) -> Result<Vec<f32>, DeviceError> {
        self.be.read(&x.buf)
    }

    fn select(&mut self, logits: &Self::Buf, want: &[Want]) -> Result<Outputs, DeviceError> {
        let mut outputs = Ok(Outputs::new());
        self.clock("select", logits.shape(), Note::default(), |be| {
            outputs = be.select(&logits.buf, want);
        });
        outputs
    }

    fn export_page(
        &mut self,
        kv: &Self::Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        self.be.export_page(&kv.kv, class, page, rows)
    }

    fn import_page(
        &mut self,
        kv: &mut Self::Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        self.be.import_page(&mut kv.kv, class, page, data)
    }

    fn copy_page(
        &mut self,
        kv: &mut Self::Kv,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.be.copy_page(&mut kv.kv, class, from, to, rows)
    }

    fn embed(&mut self, out: &mut Self::Buf, table: &Self::Weight) {
        let mut note = self.weights_read(&[table]);
        note.bytes = table.row_bytes * self.step.rows.len() as u64;
        self.clock("embed", out.shape(), note, |be| {
            be.embed(&mut out.buf, &table.weight);
        });
    }

    fn matmul(&mut self, out: &mut Self::Buf, w: &Self::Weight, x: &Self::Buf) {
        let note = self.products(&[w], x.shape());
        self.clock("matmul", out.shape(), note, |be| {
            be.matmul(&mut out.buf, &w.weight, &x.buf);
        });
    }

    fn add_bias(&mut self, x: &mut Self::Buf, bias: &Self::Weight) {
        self.clock("add_bias", x.shape(), Note::default(), |be| {
            be.add_bias(&mut x.buf, &bias.weight);
        });
    }

    fn rms_norm(&mut self, out: &mut Self::Buf, x: &Self::Buf, w: Option<&Self::Weight>, eps: f32) {
        self.clock("rms_norm", out.shape(), Note::default(), |be| {
            be.rms_norm(&mut out.buf, &x.buf, w.map(|w| &w.weight), eps);
        });
    }

    fn head_norm(&mut self, x: &mut Self::Buf, w: &Self::Weight, eps: f32) {
        self.clock("head_norm", x.shape(), Note::default(), |be| {
            be.head_norm(&mut x.buf, &w.weight, eps);
        });
    }

    fn rope(&mut self, x: &mut Self::Buf, rope: &Self::Rope, head_dim: usize) {
        self.clock("rope", x.shape(), Note::default(), |be| {
            be.rope(&mut x.buf, rope, head_dim);
        });
    }

    fn store_kv(&mut self, kv: &mut Self::Kv, layer: KvLayer, k: &Self::Buf, v: &Self::Buf) {
        self.clock("store_kv", k.shape(), Note::default(), |be| {
            be.store_kv(&mut kv.kv, layer, &k.buf, &v.buf);
        });
    }

    fn attend(&mut self, out: &mut Self::Buf, q: &Self::Buf, kv: &Self::Kv, at: &Attention) {
        let window = at.window.unwrap_or(u32::MAX);
        let note = self.keys_read(kv, at.layer, out.cols, |pos| {
            (pos + 1).saturating_sub(window)..pos + 1
        });
        self.clock("attend", out.shape(), note, |be| {
            be.attend(&mut out.buf, &q.buf, &kv.kv, at);
        });
    }

    fn attend_block(
        &mut self,
        out: &mut Self::Buf,
        q: &Self::Buf,
        k: &Self::Buf,
        v: &Self::Buf,
        kv: &Self::Kv,
        at: &BlockAttention,
    ) {
        let sees = |q: u32| (0..q).find(|&key| at.window.sees(q, key)).unwrap_or(q)..q;
        let note = self.keys_read(kv, at.layer, out.cols, sees);
        self.clock("attend_block", out.shape(), note, |be| {
            be.attend_block(&mut out.buf, &q.buf, &k.buf, &v.buf, &kv.kv, at);
        });
    }

    fn mul_sigmoid(&mut self, x: &mut Self::Buf, gate: &Self::Buf) {
        self.clock("mul_sigmoid", x.shape(), Note::default(), |be| {
            be.mul_sigmoid(&mut x.buf, &gate.buf);
        });
    }

    fn swiglu(&mut self, gate: &mut Self::Buf, up: &Self::Buf) {
        self.clock("swiglu", gate.shape(), Note::default(), |be| {
            be.swiglu(&mut gate.buf, &up.buf);
        });
    }

    fn add(&mut self, x: &mut Self::Buf, y: &Self::Buf) {
        self.clock("add", x.shape(), Note::default(), |be| {
            be.add(&mut x.buf, &y.buf);
        });
    }

    fn gather(&mut self, out: &mut Self::Buf, x: &Self::Buf) {
        self.clock("gather", out.shape(), Note::default(), |be| {
            be.gather(&mut out.buf, &x.buf);
        });
    }

    fn softcap(&mut self, x: &mut Self::Buf, scale: f32, cap: Option<f32>) {
        self.clock("softcap", x.shape(), Note::default(), |be| {
            be.softcap(&mut x.buf, scale, cap);
        });
    }

    fn copy_columns(&mut self, out: &mut Self::Buf, first_col: usize, x: &Self::Buf) {
        self.clock("copy_columns", x.shape(), Note::default(), |be| {
            be.copy_columns(&mut out.buf, first_col, &x.buf);
        });
    }

    fn add_norm(
        &mut self,
        x: &mut Self::Buf,
        y: &mut Self::Buf,
        w: &Self::Weight,
        eps: f32,
        next: Option<(&mut Self::Buf, &Self::Weight, f32)>,
    ) {
        let next = next.map(|(out, w, eps)| (&mut out.buf, &w.weight, eps));
        self.clock("add_norm", x.shape(), Note::default(), |be| {
            be.add_norm(&mut x.buf, &mut y.buf, &w.weight, eps, next);
        });
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
        let note = self.products(&w, x.shape());
        let cols = q.cols + k.cols + v.cols + gate.cols;
        let w = w.map(|w| &w.weight);
        self.clock("qkv_gate", (q.set, cols), note, |be| {
            be.qkv_gate(&mut q.buf, &mut k.buf, &mut v.buf, &mut gate.buf, w, &x.buf);
        });
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
        let (shape, w) = ((q.set, q.cols + k.cols), w.map(|w| &w.weight));
        self.clock("head_norm_rope_store", shape, Note::default(), |be| {
            let (q, k, kv) = (&mut q.buf, &mut k.buf, &mut kv.kv);
            be.head_norm_rope_store(q, k, &v.buf, w, eps, rope, kv, layer);
        });
    }

    fn ffn_in(
        &mut self,
        ff: &mut Self::Buf,
        up: &mut Self::Buf,
        w_gate: &Self::Weight,
        w_up: &Self::Weight,
        x: &Self::Buf,
    ) {
        let note = self.products(&[w_gate, w_up], x.shape());
        self.clock("ffn_in", ff.shape(), note, |be| {
            let (w_gate, w_up) = (&w_gate.weight, &w_up.weight);
            be.ffn_in(&mut ff.buf, &mut up.buf, w_gate, w_up, &x.buf);
        });
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
        let note = self.products(&[head], (logits.set, x.cols));
        let norm = (&norm.0.weight, norm.1);
        self.clock("logits", logits.shape(), note, |be| {
            let (logits, normed) = (&mut logits.buf, &mut normed.buf);
            be.logits(logits, normed, &x.buf, norm, &head.weight, scale, cap);
        });
    }

    fn probes(&mut self) -> Option<&mut Probes> {
        self.be.probes()
    }

    fn probe(&mut self, name: &'static str, layer: usize, x: &Self::Buf) {
        self.be.probe(name, layer, &x.buf);
    }
}
