//! The suite of all operations, for any backend: a pass in its middle, with pages,
//! and the results of every operation in turn.

use crate::{Noise, tensor};
use gguf::TensorType;
use model::backend::{Attention, BlockAttention, BlockWindow, KvLayer, RowSet};
use model::kv::{ClassLayout, KvLayout};
use model::{Backend, Input, KvType, PageClass, PageId, Pairing, Rope, RopeScaling, Row, Step};

/// Sizes of a suite.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub n_rows: usize,
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_head: usize,
    pub n_head_kv: usize,
    pub head_dim: usize,
    /// Position of the first row.
    pub start: u32,
    /// Encoding of the matrices.
    pub ty: TensorType,
}

/// Nothing is a multiple of 16; little enough to stay on one thread.
pub const ODD: Shape = Shape {
    n_rows: 5,
    n_embd: 330,
    n_ff: 75,
    n_head: 6,
    n_head_kv: 2,
    head_dim: 38,
    start: 301,
    ty: TensorType::F16,
};

/// One row, as in decoding.
pub const SINGLE: Shape = Shape {
    n_rows: 1,
    n_embd: 576,
    n_ff: 1536,
    n_head: 9,
    n_head_kv: 3,
    head_dim: 64,
    start: 700,
    ty: TensorType::Q4_1,
};

/// Enough rows for every operation to be shared between threads.
pub const MANY: Shape = Shape {
    n_rows: 150,
    n_embd: 512,
    n_ff: 640,
    n_head: 8,
    n_head_kv: 1,
    head_dim: 64,
    start: 90,
    ty: TensorType::Q4_K,
};

/// A result of the suite: what, and its values.
pub type Results = Vec<(&'static str, Vec<f32>)>;

/// A backend in the middle of a pass, with one layer's pages.
struct Bench<B: Backend> {
    be: B,
    shape: Shape,
    noise: Noise,
    kv: B::Kv,
    results: Results,
}

const LAYER: KvLayer = KvLayer {
    class: PageClass::Full,
    index: 0,
};

/// Two thirds of the rows belong to one sequence, the rest to another; their
/// pages lie in any order.
fn step(shape: Shape) -> Step {
    let n_first = shape.n_rows - shape.n_rows / 3;
    let row = |seq: u32, i: usize, start: u32| Row {
        input: Input::Token((i * 7 % 50) as u32),
        pos: start + i as u32,
        seq,
    };
    let mut rows: Vec<Row> = (0..n_first).map(|i| row(0, i, shape.start)).collect();
    rows.extend((0..shape.n_rows - n_first).map(|i| row(1, i, 40)));
    let pages = |ids: &[u32]| ids.iter().map(|&id| Some(PageId(id))).collect();
    Step {
        wanted: (0..shape.n_rows as u32).step_by(2).collect(),
        rows,
        pages: vec![
            [pages(&[3, 0, 2, 5]), vec![], vec![]],
            [pages(&[1, 4]), vec![], vec![]],
        ],
    }
}

impl<B: Backend> Bench<B> {
    fn new(mut be: B, shape: Shape, kv: KvType) -> Bench<B> {
        let class = ClassLayout {
            n_layer: 1,
            n_head_kv: shape.n_head_kv,
            head_dim: shape.head_dim,
            window: None,
        };
        let layout = KvLayout {
            ty: kv,
            classes: [class, ClassLayout::default(), ClassLayout::default()],
        };
        let mut kv = be.alloc_kv(&layout).expect("memory");
        be.grow_kv(&mut kv, 2).expect("memory");
        let noise = Noise(7);
        let mut bench = Bench {
            be,
            shape,
            noise,
            kv,
            results: Vec::new(),
        };
        bench.store_context();
        bench.be.step(&step(shape)).expect("a step");
        bench
    }

    /// Keys and values of the positions before the step's rows.
    fn store_context(&mut self) {
        let mut context = step(self.shape);
        for (seq, len) in [(0, self.shape.start), (1, 40)] {
            let row = |pos: u32| Row {
                input: Input::Token(0),
                pos,
                seq,
            };
            for first in (0..len).step_by(256) {
                context.rows = (first..len.min(first + 256)).map(row).collect();
                context.wanted.clear();
                self.be.step(&context).expect("a step");
                let n = self.shape.n_head_kv * self.shape.head_dim;
                let (k, v) = (self.buf(n), self.buf(n));
                self.be.store_kv(&mut self.kv, LAYER, &k, &v);
            }
        }
    }

    /// A buffer of noise.
    fn buf(&mut self, cols: usize) -> B::Buf {
        self.buf_scaled(cols, 1.0)
    }

    fn buf_scaled(&mut self, cols: usize, scale: f32) -> B::Buf {
        // One row of an embedding for each of 50 tokens, taken by the rows.
        let values = self.noise.values(cols * 50);
        let table = tensor("table", TensorType::F32, cols, 50, &values);
        let table = self.be.load(&table).expect("a table");
        let mut buf = self.be.alloc(RowSet::All, cols).expect("memory");
        self.be.embed(&mut buf, &table);
        self.be.softcap(&mut buf, scale, None);
        buf
    }

    fn matrix(&mut self, cols: usize, rows: usize) -> B::Weight {
        let values = self.noise.values(cols * rows);
        let ty = match cols.is_multiple_of(self.shape.ty.block_len()) {
            true => self.shape.ty,
            false => TensorType::F16,
        };
        let view = tensor("matrix", ty, cols, rows, &values);
        self.be.load(&view).expect("a matrix")
    }

    fn vector(&mut self, n: usize) -> B::Weight {
        let values = self.noise.values(n);
        let view = tensor("vector", TensorType::F32, n, 1, &values);
        self.be.load(&view).expect("a vector")
    }

    fn empty(&mut self, cols: usize) -> B::Buf {
        self.be.alloc(RowSet::All, cols).expect("memory")
    }

    fn note(&mut self, what: &'static str, x: &B::Buf) {
        let values = self.be.read(x).expect("a buffer");
        self.results.push((what, values));
    }

    fn row_operations(&mut self) {
        let Shape { n_embd, n_ff, .. } = self.shape;
        let mut x = self.buf(n_embd);
        self.note("embed", &x);
        let y = self.buf(n_embd);
        let w = self.vector(n_embd);
        self.be.add(&mut x, &y);
        self.note("add", &x);
        self.be.add_bias(&mut x, &w);
        self.note("add_bias", &x);
        let mut out = self.empty(n_embd);
        self.be.rms_norm(&mut out, &x, Some(&w), 1e-5);
        self.note("rms_norm", &out);
        self.be.rms_norm(&mut out, &x, None, 1e-2);
        self.note("rms_norm without weight", &out);
        self.be.head_norm(&mut out, &w, 1e-5);
        self.note("head_norm of a row", &out);

        let mut gate = self.buf_scaled(n_ff, 30.0);
        let up = self.buf(n_ff);
        self.be.mul_sigmoid(&mut gate, &up);
        self.note("mul_sigmoid", &gate);
        self.be.swiglu(&mut gate, &up);
        self.note("swiglu", &gate);
        self.be.softcap(&mut gate, 0.2, Some(20.0));
        self.note("softcap", &gate);
        self.be.softcap(&mut gate, 0.3, None);
        self.note("scale", &gate);
        let mut wanted = self.be.alloc(RowSet::Wanted, n_ff).expect("memory");
        self.be.gather(&mut wanted, &gate);
        self.note("gather", &wanted);
        let mut wide = self.buf(n_ff + n_embd + 3);
        self.be.copy_columns(&mut wide, 2, &gate);
        self.note("copy_columns", &wide);
    }

    fn heads(&mut self) {
        let Shape {
            n_head,
            n_head_kv,
            head_dim,
            ..
        } = self.shape;
        let w = [self.vector(head_dim), self.vector(head_dim)];
        for pairing in [Pairing::Neighbours, Pairing::Halves] {
            // Some dimensions do not turn.
            let rope = Rope::new(pairing, head_dim - 4, 10_000.0, RopeScaling::None);
            let rope = self.be.load_rope(&rope).expect("a rotation");
            let mut q = self.buf(n_head * head_dim);
            self.be.head_norm(&mut q, &w[0], 1e-5);
            self.note("head_norm", &q);
            self.be.rope(&mut q, &rope, head_dim);
            self.note("rope", &q);
            let mut k = self.buf(n_head_kv * head_dim);
            let v = self.buf(n_head_kv * head_dim);
            self.be.head_norm_rope_store(
                &mut q,
                &mut k,
                &v,
                [&w[0], &w[1]],
                1e-5,
                Some((&rope, head_dim)),
                &mut self.kv,
                LAYER,
            );
            self.note("head_norm_rope_store q", &q);
            self.note("head_norm_rope_store k", &k);
            self.attention(&q, &k, &v);
        }
    }

    fn attention(&mut self, q: &B::Buf, k: &B::Buf, v: &B::Buf) {
        let mut out = self.empty(self.shape.n_head * self.shape.head_dim);
        let scale = 1.0 / (self.shape.head_dim as f32).sqrt();
        for window in [None, Some(1), Some(100)] {
            let at = Attention {
                layer: LAYER,
                window,
                scale,
            };
            self.be.attend(&mut out, q, &self.kv, &at);
            self.note("attend", &out);
        }
        for window in [
            BlockWindow::All,
            BlockWindow::Below(3),
            BlockWindow::Below(90),
            BlockWindow::Within(2),
        ] {
            let at = BlockAttention {
                layer: LAYER,
                window,
                scale,
            };
            self.be.attend_block(&mut out, q, k, v, &self.kv, &at);
            self.note("attend_block", &out);
        }
    }

    /// The operations with default bodies that multiply.
    fn fused(&mut self) {
        let Shape {
            n_embd,
            n_ff,
            n_head,
            n_head_kv,
            head_dim,
            ..
        } = self.shape;
        let (n_q, n_kv) = (n_head * head_dim, n_head_kv * head_dim);
        let mut x = self.buf(n_embd);
        let w = [n_q, n_kv, n_kv, n_q].map(|n| self.matrix(n_embd, n));
        let mut out = [n_q, n_kv, n_kv, n_q].map(|n| self.empty(n));
        let [q, k, v, gate] = &mut out;
        self.be
            .qkv_gate(q, k, v, gate, [&w[0], &w[1], &w[2], &w[3]], &x);
        for buf in &out {
            self.note("qkv_gate", buf);
        }
        let w = [self.matrix(n_embd, n_ff), self.matrix(n_embd, n_ff)];
        let (mut ff, mut up) = (self.empty(n_ff), self.empty(n_ff));
        self.be.ffn_in(&mut ff, &mut up, &w[0], &w[1], &x);
        self.note("ffn_in", &ff);
        let down = self.matrix(n_ff, n_embd);
        let mut y = self.empty(n_embd);
        self.be.matmul(&mut y, &down, &ff);
        self.note("matmul", &y);
        let norms = [self.vector(n_embd), self.vector(n_embd)];
        let mut h = self.empty(n_embd);
        let next = Some((&mut h, &norms[1], 1e-6));
        self.be.add_norm(&mut x, &mut y, &norms[0], 1e-2, next);
        self.note("add_norm sum", &x);
        self.note("add_norm next", &h);
        self.be.matmul(&mut y, &down, &ff);
        self.be.add_norm(&mut x, &mut y, &norms[1], 1e-5, None);
        self.note("add_norm last", &x);
        let head = self.matrix(n_embd, 1000);
        let mut wanted = |cols| self.be.alloc(RowSet::Wanted, cols).expect("memory");
        let (mut normed, mut logits) = (wanted(n_embd), wanted(1000));
        let norm = (&norms[0], 1e-5);
        self.be
            .logits(&mut logits, &mut normed, &x, norm, &head, 0.3, Some(20.0));
        self.note("logits normed", &normed);
        self.note("logits", &logits);
    }
}

/// All results of a backend.
pub fn results<B: Backend>(be: B, shape: Shape, kv: KvType) -> Results {
    let mut bench = Bench::new(be, shape, kv);
    bench.row_operations();
    bench.heads();
    bench.fused();
    bench.results
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[track_caller]
pub fn assert_same(found: &Results, expected: &Results, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, ((op, found), (_, expected))) in found.iter().zip(expected).enumerate() {
        let is_finite = expected.iter().all(|v| v.is_finite());
        assert!(is_finite && !expected.is_empty(), "{op} ({i})");
        assert!(bits(found) == bits(expected), "{op} ({i}) with {what}");
    }
}

/// Does the operation's result come from a product?
pub fn is_product(op: &str) -> bool {
    ["qkv_gate", "ffn_in", "matmul", "add_norm", "logits"]
        .iter()
        .any(|name| op.starts_with(name))
}
