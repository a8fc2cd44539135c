//! The reference backend: each operation as its formula, in scalar f32.
//!
//! It is the oracle for every other backend. Weights stay encoded in the file
//! and are decoded row by row. Sums run in 16 lanes (lane l takes the elements
//! k = l mod 16) that are then added pairwise, so that a compiler can vectorize
//! them; no operation looks at another row, so a row's bits do not depend on
//! what else is in the pass.

use crate::DeviceError;
use crate::backend::{Attention, Backend, BlockAttention, Caps, KvLayer, PageData, Probes, RowSet};
use crate::batch::{Input, Row, Shape, Step};
use crate::kv::{KvLayout, KvType, PAGE_ROWS, PageClass, PageId};
use crate::rope::Rope;
use gguf::{Bytes, TensorType, TensorView, quant};
use half::f16;

/// Rows of the largest pass: activations are small next to the weights.
const MAX_ROWS: usize = 512;

/// The scalar backend.
#[derive(Default)]
pub struct Reference {
    step: Step,
    /// Decoded weight row.
    row: Vec<f32>,
    /// Attention scores of one head.
    scores: Vec<f32>,
    probes: Option<Probes>,
}

/// `[rows, cols]`, f32.
pub struct Buf {
    set: RowSet,
    cols: usize,
    data: Vec<f32>,
}

/// A tensor as it lies in the file.
pub struct Weight {
    /// Row length.
    cols: usize,
    row_bytes: usize,
    decode: fn(&[u8], &mut [f32]),
    data: Bytes,
    /// Decoded elements of a one-row tensor (norms and biases).
    vector: Vec<f32>,
}

/// Slabs of pages. A page is `[layer][K, V][row][head][dim]`.
pub struct Kv {
    layout: KvLayout,
    slabs: Vec<Slab>,
}

/// A slab's elements, as stored.
enum Slab {
    F16(Vec<f16>),
    F32(Vec<f32>),
}

impl Reference {
    /// A backend with nothing loaded.
    pub fn new() -> Reference {
        Reference::default()
    }

    /// From now on keeps every intermediate value that the graph offers.
    pub fn record_probes(&mut self) {
        self.probes = Some(Probes::default());
    }

    /// The intermediate values kept since the last call.
    pub fn take_probes(&mut self) -> Probes {
        self.probes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn n_rows(&self, set: RowSet) -> usize {
        match set {
            RowSet::All => self.step.rows.len(),
            RowSet::Wanted => self.step.wanted.len(),
        }
    }

    /// The rows of `x` in the current step.
    fn rows<'a>(&self, x: &'a Buf) -> &'a [f32] {
        &x.data[..self.n_rows(x.set) * x.cols]
    }

    /// The rows of `x` in the current step, for writing.
    fn rows_mut<'a>(&self, x: &'a mut Buf) -> &'a mut [f32] {
        let n = self.n_rows(x.set) * x.cols;
        if x.data.len() < n {
            x.data.resize(n, 0.0);
        }
        &mut x.data[..n]
    }
}

impl Weight {
    fn decode_row(&self, index: usize, out: &mut [f32]) {
        let bytes = &self.data[index * self.row_bytes..][..self.row_bytes];
        (self.decode)(bytes, out);
    }

    fn n_rows(&self) -> usize {
        self.data.len() / self.row_bytes
    }
}

impl Kv {
    /// Range of the row of a layer's keys (`half` 0) or values (`half` 1) at
    /// a page's slot, in elements of its slab.
    fn row(
        &self,
        layer: KvLayer,
        half: usize,
        (page, slot): (PageId, usize),
    ) -> (usize, std::ops::Range<usize>) {
        let class = &self.layout.classes[layer.class as usize];
        let (slab, index) = self.layout.locate(page);
        let n_kv = class.n_head_kv * class.head_dim;
        let start =
            index * class.page_elements() + ((layer.index * 2 + half) * PAGE_ROWS + slot) * n_kv;
        (slab, start..start + n_kv)
    }

    fn store(&mut self, layer: KvLayer, half: usize, place: (PageId, usize), values: &[f32]) {
        let (slab, range) = self.row(layer, half, place);
        match &mut self.slabs[slab] {
            Slab::F32(data) => data[range].copy_from_slice(values),
            Slab::F16(data) => {
                for (to, &from) in data[range].iter_mut().zip(values) {
                    *to = f16::from_f32(from);
                }
            }
        }
    }

    /// One head of a stored row.
    fn load(
        &self,
        layer: KvLayer,
        half: usize,
        place: (PageId, usize),
        head: usize,
        out: &mut [f32],
    ) {
        let (slab, range) = self.row(layer, half, place);
        let from = range.start + head * out.len();
        match &self.slabs[slab] {
            Slab::F32(data) => out.copy_from_slice(&data[from..from + out.len()]),
            Slab::F16(data) => {
                for (to, from) in out.iter_mut().zip(&data[from..]) {
                    *to = from.to_f32();
                }
            }
        }
    }
}

/// `sum_k a[k] * b[k]`: 16 lanes, then pairwise 8-4-2-1.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let (a16, b16) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a16.remainder(), b16.remainder());
    for (a, b) in a16.zip(b16) {
        for l in 0..LANES {
            lanes[l] += a[l] * b[l];
        }
    }
    for (l, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[l] += a * b;
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
    }
    lanes[0]
}

/// `1 / sqrt(mean(x^2) + eps)`.
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Turns scores into softmax weights, in ascending order.
fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for s in scores.iter_mut() {
        *s = (*s - max).exp();
        sum += *s;
    }
    scores.iter_mut().for_each(|s| *s /= sum);
}

impl Backend for Reference {
    type Buf = Buf;
    type Weight = Weight;
    type Kv = Kv;
    type Rope = Rope;

    fn caps(&self) -> Caps {
        Caps {
            device: "reference (scalar f32)".into(),
            max_rows: MAX_ROWS,
            same_bits_rows: MAX_ROWS,
        }
    }

    fn load(&mut self, tensor: &TensorView) -> Result<Weight, DeviceError> {
        use TensorType::{I8, I16, I32, I64};
        if matches!(tensor.ty, I8 | I16 | I32 | I64) {
            return Err(DeviceError::UnsupportedType {
                name: tensor.name.clone(),
                ty: tensor.ty,
            });
        }
        let row_bytes = tensor.ty.row_bytes(tensor.shape[0]);
        let row_bytes = row_bytes.expect("checked when the header was read") as usize;
        let mut weight = Weight {
            cols: tensor.shape[0] as usize,
            row_bytes,
            decode: quant::decoder(tensor.ty),
            data: tensor.data.clone(),
            vector: Vec::new(),
        };
        if weight.n_rows() == 1 {
            let mut vector = vec![0.0; weight.cols];
            weight.decode_row(0, &mut vector);
            weight.vector = vector;
        }
        Ok(weight)
    }

    fn load_rope(&mut self, rope: &Rope) -> Result<Rope, DeviceError> {
        Ok(rope.clone())
    }

    fn alloc(&mut self, set: RowSet, cols: usize) -> Result<Buf, DeviceError> {
        let data = Vec::new();
        Ok(Buf { set, cols, data })
    }

    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<Kv, DeviceError> {
        Ok(Kv {
            layout: *layout,
            slabs: Vec::new(),
        })
    }

    fn grow_kv(&mut self, kv: &mut Kv, n_slabs: usize) -> Result<(), DeviceError> {
        let elements = kv.layout.slab_bytes() / kv.layout.ty.bytes();
        while kv.slabs.len() < n_slabs {
            kv.slabs.push(match kv.layout.ty {
                KvType::F16 => Slab::F16(vec![f16::ZERO; elements]),
                KvType::F32 => Slab::F32(vec![0.0; elements]),
            });
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.step = step.clone();
        Ok(())
    }

    fn run(&mut self, _shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError> {
        record(self);
        Ok(())
    }

    fn read(&mut self, x: &Buf) -> Result<Vec<f32>, DeviceError> {
        Ok(self.rows(x).to_vec())
    }

    fn export_page(
        &mut self,
        kv: &Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        let mut bytes = Vec::new();
        for_each_row(kv, class, page, rows, |slab, range| match &kv.slabs[slab] {
            Slab::F16(data) => {
                let elements = data[range].iter();
                bytes.extend(elements.flat_map(|v| v.to_bits().to_le_bytes()));
            }
            Slab::F32(data) => {
                let elements = data[range].iter();
                bytes.extend(elements.flat_map(|v| v.to_bits().to_le_bytes()));
            }
        });
        Ok(PageData { rows, bytes })
    }

    fn import_page(
        &mut self,
        kv: &mut Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        let wanted = kv.layout.page_bytes(class) / PAGE_ROWS * data.rows;
        assert_eq!(data.bytes.len(), wanted, "bytes of {} rows", data.rows);
        let mut places = Vec::new();
        for_each_row(kv, class, page, data.rows, |slab, range| {
            places.push((slab, range))
        });
        let mut bytes = &data.bytes[..];
        for (slab, range) in places {
            let (row, rest) = bytes.split_at(range.len() * kv.layout.ty.bytes());
            bytes = rest;
            match &mut kv.slabs[slab] {
                Slab::F16(to) => {
                    for (to, from) in to[range].iter_mut().zip(row.as_chunks::<2>().0) {
                        *to = f16::from_bits(u16::from_le_bytes(*from));
                    }
                }
                Slab::F32(to) => {
                    for (to, from) in to[range].iter_mut().zip(row.as_chunks::<4>().0) {
                        *to = f32::from_bits(u32::from_le_bytes(*from));
                    }
                }
            }
        }
        Ok(())
    }

    fn copy_page(
        &mut self,
        kv: &mut Kv,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let data = self.export_page(kv, class, from, rows)?;
        self.import_page(kv, class, to, &data)
    }

    fn embed(&mut self, out: &mut Buf, table: &Weight) {
        let cols = out.cols;
        let rows = self.rows_mut(out);
        for (row, out) in self.step.rows.iter().zip(rows.chunks_mut(cols)) {
            let Input::Token(token) = row.input;
            table.decode_row(token as usize, out);
        }
    }

    fn matmul(&mut self, out: &mut Buf, w: &Weight, x: &Buf) {
        let (n_out, cols) = (w.n_rows(), w.cols);
        assert_eq!((out.cols, x.cols), (n_out, cols), "columns of a product");
        let out = self.rows_mut(out);
        let x = &x.data[..out.len() / n_out * cols];
        self.row.resize(cols, 0.0);
        for j in 0..n_out {
            w.decode_row(j, &mut self.row);
            for (out, x) in out.chunks_mut(n_out).zip(x.chunks(cols)) {
                out[j] = dot(&self.row, x);
            }
        }
    }

    fn add_bias(&mut self, x: &mut Buf, bias: &Weight) {
        let cols = x.cols;
        for row in self.rows_mut(x).chunks_mut(cols) {
            for (x, b) in row.iter_mut().zip(&bias.vector) {
                *x += b;
            }
        }
    }

    fn rms_norm(&mut self, out: &mut Buf, x: &Buf, w: Option<&Weight>, eps: f32) {
        let cols = x.cols;
        let out = self.rows_mut(out);
        for (out, x) in out.chunks_mut(cols).zip(x.data.chunks(cols)) {
            let s = inverse_rms(x, eps);
            match w {
                Some(w) => {
                    for (out, (x, w)) in out.iter_mut().zip(x.iter().zip(&w.vector)) {
                        *out = x * s * w;
                    }
                }
                None => out.iter_mut().zip(x).for_each(|(out, x)| *out = x * s),
            }
        }
    }

    fn head_norm(&mut self, x: &mut Buf, w: &Weight, eps: f32) {
        for head in self.rows_mut(x).chunks_mut(w.cols) {
            let s = inverse_rms(head, eps);
            for (x, w) in head.iter_mut().zip(&w.vector) {
                *x = *x * s * w;
            }
        }
    }

    fn rope(&mut self, x: &mut Buf, rope: &Rope, head_dim: usize) {
        let cols = x.cols;
        let rows = self.rows_mut(x);
        for (row, x) in self.step.rows.iter().zip(rows.chunks_mut(cols)) {
            for j in 0..rope.inv_freq.len() {
                let (cos, sin) = rope.turn(j, row.pos);
                let (i0, i1) = rope.pair(j);
                for head in x.chunks_mut(head_dim) {
                    let (a, b) = (head[i0], head[i1]);
                    head[i0] = a * cos - b * sin;
                    head[i1] = a * sin + b * cos;
                }
            }
        }
    }

    fn store_kv(&mut self, kv: &mut Kv, layer: KvLayer, k: &Buf, v: &Buf) {
        for (r, row) in self.step.rows.iter().enumerate() {
            let place = self.step.place(layer.class, row.seq, row.pos);
            kv.store(layer, 0, place, &k.data[r * k.cols..][..k.cols]);
            kv.store(layer, 1, place, &v.data[r * v.cols..][..v.cols]);
        }
    }

    fn attend(&mut self, out: &mut Buf, q: &Buf, kv: &Kv, at: &Attention) {
        let first = |row: &Row| at.window.map_or(0, |w| (row.pos + 1).saturating_sub(w));
        let visible = |row: &Row| (first(row)..row.pos + 1).map(Key::Stored).collect();
        self.attend_keys(out, q, kv, (at.layer, at.scale), (None, &visible));
    }

    fn attend_block(
        &mut self,
        out: &mut Buf,
        q: &Buf,
        k: &Buf,
        v: &Buf,
        kv: &Kv,
        at: &BlockAttention,
    ) {
        let rows = self.step.rows.clone();
        let visible = |row: &Row| {
            let block = rows.iter().enumerate().filter(|(_, r)| r.seq == row.seq);
            let start = block.clone().map(|(_, r)| r.pos).min().unwrap_or(0);
            let context = (0..start).filter(|&pos| at.window.sees(row.pos, pos));
            let block = block.filter(|(_, r)| at.window.sees(row.pos, r.pos));
            context
                .map(Key::Stored)
                .chain(block.map(|(r, _)| Key::InPass(r)))
                .collect()
        };
        self.attend_keys(out, q, kv, (at.layer, at.scale), (Some((k, v)), &visible));
    }

    fn mul_sigmoid(&mut self, x: &mut Buf, gate: &Buf) {
        for (x, &g) in self.rows_mut(x).iter_mut().zip(&gate.data) {
            *x *= sigmoid(g);
        }
    }

    fn swiglu(&mut self, gate: &mut Buf, up: &Buf) {
        for (g, u) in self.rows_mut(gate).iter_mut().zip(&up.data) {
            *g = *g * sigmoid(*g) * u;
        }
    }

    fn add(&mut self, x: &mut Buf, y: &Buf) {
        for (x, y) in self.rows_mut(x).iter_mut().zip(&y.data) {
            *x += y;
        }
    }

    fn gather(&mut self, out: &mut Buf, x: &Buf) {
        let cols = x.cols;
        let rows = self.rows_mut(out);
        for (&r, out) in self.step.wanted.iter().zip(rows.chunks_mut(cols)) {
            out.copy_from_slice(&x.data[r as usize * cols..][..cols]);
        }
    }

    fn softcap(&mut self, x: &mut Buf, scale: f32, cap: Option<f32>) {
        for x in self.rows_mut(x) {
            *x *= scale;
            if let Some(cap) = cap
                && x.is_finite()
            {
                *x = cap * (*x / cap).tanh();
            }
        }
    }

    fn copy_columns(&mut self, out: &mut Buf, first_col: usize, x: &Buf) {
        let (cols, out_cols) = (x.cols, out.cols);
        let rows = self.rows_mut(out).chunks_mut(out_cols);
        for (out, x) in rows.zip(x.data.chunks(cols)) {
            out[first_col..first_col + cols].copy_from_slice(x);
        }
    }

    fn probes(&mut self) -> Option<&mut Probes> {
        self.probes.as_mut()
    }
}

/// A key that a row sees.
#[derive(Clone, Copy)]
enum Key {
    /// Stored at this position of the row's sequence.
    Stored(u32),
    /// In this row of the pass's own keys and values.
    InPass(usize),
}

/// The keys that a row sees, in logical order.
type Visible<'a> = &'a dyn Fn(&Row) -> Vec<Key>;

impl Reference {
    /// Attention of every row over the keys that `visible` gives it.
    fn attend_keys(
        &mut self,
        out: &mut Buf,
        q: &Buf,
        kv: &Kv,
        (layer, scale): (KvLayer, f32),
        (own, visible): (Option<(&Buf, &Buf)>, Visible<'_>),
    ) {
        let class = kv.layout.classes[layer.class as usize];
        let head_dim = class.head_dim;
        let group = q.cols / head_dim / class.n_head_kv;
        let cols = out.cols;
        let mut scores = std::mem::take(&mut self.scores);
        let mut value = vec![0.0; head_dim];
        let rows = self.rows_mut(out);
        for (r, (row, out)) in self.step.rows.iter().zip(rows.chunks_mut(cols)).enumerate() {
            let keys = visible(row);
            let fetch = |key: Key, half: usize, head: usize, to: &mut [f32]| match (key, own) {
                (Key::Stored(pos), _) => {
                    let place = self.step.place(layer.class, row.seq, pos);
                    kv.load(layer, half, place, head, to);
                }
                (Key::InPass(r), Some((k, v))) => {
                    let x = if half == 0 { k } else { v };
                    to.copy_from_slice(&x.data[r * x.cols + head * head_dim..][..head_dim]);
                }
                (Key::InPass(_), None) => unreachable!("a pass's own keys were not given"),
            };
            for (h, out) in out.chunks_mut(head_dim).enumerate() {
                let q = &q.data[r * q.cols + h * head_dim..][..head_dim];
                scores.clear();
                for &key in &keys {
                    fetch(key, 0, h / group, &mut value);
                    scores.push(dot(q, &value) * scale);
                }
                softmax(&mut scores);
                out.fill(0.0);
                for (&key, &weight) in keys.iter().zip(&scores) {
                    fetch(key, 1, h / group, &mut value);
                    for (out, v) in out.iter_mut().zip(&value) {
                        *out += weight * v;
                    }
                }
            }
        }
        self.scores = scores;
    }
}

/// Calls `visit` with slab and range of the first `rows` rows of a page, in
/// canonical order.
fn for_each_row(
    kv: &Kv,
    class: PageClass,
    page: PageId,
    rows: usize,
    mut visit: impl FnMut(usize, std::ops::Range<usize>),
) {
    for index in 0..kv.layout.classes[class as usize].n_layer {
        for half in 0..2 {
            for slot in 0..rows {
                let (slab, range) = kv.row(KvLayer { class, index }, half, (page, slot));
                visit(slab, range);
            }
        }
    }
}
