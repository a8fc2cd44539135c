//! Every operation of the backend: one suite, run on each instruction set and
//! number of threads, against scalar on one thread bit for bit and against the
//! reference backend within a bound. And fused operations against their default
//! bodies, bit for bit.

mod common;

use common::plain::Plain;
use common::{cpu, isas};
use cpu::Isa;
use gguf::TensorType;
use model::backend::{Attention, BlockAttention, BlockWindow, KvLayer, RowSet};
use model::kv::{ClassLayout, KvLayout};
use model::{
    Backend, Input, KvType, PageClass, PageId, Pairing, Reference, Rope, RopeScaling, Row,
    RowOutput, Step, Want,
};
use testing::{Noise, distance, tensor};

/// Sizes of a suite.
#[derive(Clone, Copy, Debug)]
struct Shape {
    n_rows: usize,
    n_embd: usize,
    n_ff: usize,
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    /// Position of the first row.
    start: u32,
    /// Encoding of the matrices.
    ty: TensorType,
}

/// Nothing is a multiple of 16; little enough to stay on one thread.
const ODD: Shape = Shape {
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
const SINGLE: Shape = Shape {
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
const MANY: Shape = Shape {
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
type Results = Vec<(&'static str, Vec<f32>)>;

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
fn results<B: Backend>(be: B, shape: Shape, kv: KvType) -> Results {
    let mut bench = Bench::new(be, shape, kv);
    bench.row_operations();
    bench.heads();
    bench.fused();
    bench.results
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[track_caller]
fn assert_same(found: &Results, expected: &Results, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, ((op, found), (_, expected))) in found.iter().zip(expected).enumerate() {
        let is_finite = expected.iter().all(|v| v.is_finite());
        assert!(is_finite && !expected.is_empty(), "{op} ({i})");
        assert!(bits(found) == bits(expected), "{op} ({i}) with {what}");
    }
}

/// Scalar on one thread against everything else.
fn check(shape: Shape, kv: KvType) {
    let expected = results(cpu(Isa::Scalar, 1), shape, kv);
    for isa in isas() {
        for threads in [1, 2, 3, 8] {
            let found = results(cpu(isa, threads), shape, kv);
            assert_same(&found, &expected, &format!("{isa}, {threads} threads"));
        }
        let unfused = results(Plain::new(cpu(isa, 2)), shape, kv);
        assert_same(&unfused, &expected, &format!("{isa}, unfused"));
    }
    let reference = results(Reference::new(), shape, kv);
    for ((op, found), (_, expected)) in expected.iter().zip(&reference) {
        // Integer activations are compared with f32 ones in `products.rs`; where
        // keys are stored as f16, one rounding of a key may go the other way.
        let limit = match (is_product(op), shape.ty, kv) {
            (true, TensorType::F16, _) => 2e-6,
            (true, ..) => 0.02,
            (false, _, KvType::F16) if op.starts_with("attend") => 2e-5,
            _ => 4e-6,
        };
        let (_, relative_rms) = distance(found, expected);
        assert!(
            relative_rms <= limit,
            "{op} against the reference: relative RMS {relative_rms:.2e}"
        );
    }
}

/// Does the operation's result come from a product?
fn is_product(op: &str) -> bool {
    ["qkv_gate", "ffn_in", "matmul", "add_norm", "logits"]
        .iter()
        .any(|name| op.starts_with(name))
}

#[test]
fn odd_sizes() {
    check(ODD, KvType::F32);
}

#[test]
fn one_row() {
    check(SINGLE, KvType::F16);
}

#[test]
fn many_rows() {
    check(MANY, KvType::F16);
}

/// Reading back equals the specification, for every kind of question.
#[test]
fn select_is_the_specification() {
    let n_vocab = 5003;
    let mut noise = Noise(3);
    let mut values = noise.values(n_vocab * 6);
    // Ties, both zeros, one value throughout, and what is not finite.
    for i in 0..n_vocab {
        values[n_vocab + i] = (values[n_vocab + i] * 20.0).round();
        values[2 * n_vocab + i] = if i % 3 == 0 { -0.0 } else { 0.0 };
        values[3 * n_vocab + i] = 4.5;
    }
    values[4 * n_vocab + 4321] = f32::NAN;
    values[5 * n_vocab + 17] = f32::NEG_INFINITY;
    let rows: Vec<&[f32]> = values.chunks(n_vocab).collect();
    let mut be = cpu(Isa::detect(), 3);
    let row = |token: u32| Row {
        input: Input::Token(token),
        pos: token,
        seq: 0,
    };
    let step = Step {
        rows: (0..6).map(row).collect(),
        wanted: (0..6).collect(),
        pages: vec![Default::default()],
    };
    be.step(&step).expect("a step");
    let table = tensor("table", TensorType::F32, n_vocab, 6, &values);
    let table = be.load(&table).expect("a table");
    let mut logits = be.alloc(RowSet::All, n_vocab).expect("memory");
    be.embed(&mut logits, &table);
    let top = |k, logsumexp| Want::TopK { k, logsumexp };
    for want in [
        Want::Argmax,
        Want::Full,
        top(1, false),
        top(5, true),
        top(39, true),
        top(40, false),
        top(256, true),
        top(n_vocab, false),
        top(2 * n_vocab, true),
        top(0, true),
    ] {
        let found = be.select(&logits, &[want; 6]).expect("an answer");
        for (r, (found, row)) in found.iter().zip(&rows).enumerate() {
            let expected = model::select(row, want);
            assert_eq!(*found, expected, "row {r}, {want:?}");
            let is_bad = matches!(found, RowOutput::NonFinite { .. });
            assert_eq!(is_bad, r >= 4, "row {r}");
        }
    }
}

/// A cap must not hide what is not finite: reading the logits back notices it.
#[test]
fn a_cap_keeps_what_is_not_finite() {
    let values = [
        1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        3e38,
        -3e38,
        0.0,
        -40.0,
    ];
    for isa in isas() {
        let mut be = cpu(isa, 1);
        let input = Input::Token(0);
        let step = Step {
            rows: vec![Row {
                input,
                pos: 0,
                seq: 0,
            }],
            wanted: vec![0],
            pages: vec![Default::default()],
        };
        be.step(&step).expect("a step");
        let table = tensor("table", TensorType::F32, values.len(), 1, &values);
        let table = be.load(&table).expect("a table");
        let mut x = be.alloc(RowSet::All, values.len()).expect("memory");
        be.embed(&mut x, &table);
        // 3e38 overflows with the scale, 1e38 does not.
        be.softcap(&mut x, 2.0, Some(20.0));
        let found = be.read(&x).expect("a buffer");
        let inf = f32::INFINITY;
        assert_eq!(found[1..3], [inf, -inf], "{isa}");
        assert!(found[3].is_nan(), "{isa}");
        assert_eq!(found[4..6], [inf, -inf], "{isa}");
        assert!(
            (found[0] - 20.0 * 0.1f32.tanh()).abs() < 1e-5,
            "{isa}: {}",
            found[0]
        );
        assert_eq!(found[6], 0.0, "{isa}");
        assert!(found[7] > -20.0 && found[7] < -19.98, "{isa}: {}", found[7]);
    }
}

#[test]
fn instruction_set_that_is_missing() {
    for isa in Isa::ALL {
        let options = cpu::CpuOptions {
            threads: Some(1),
            isa: Some(isa),
        };
        match (cpu::Cpu::new(options), isa.is_available()) {
            (Ok(be), true) => {
                let device = format!("cpu ({isa}, 1 thread)");
                assert_eq!(be.caps().device, device);
            }
            (Err(cpu::Error::IsaUnavailable { wanted, .. }), false) => assert_eq!(wanted, isa),
            (Ok(_), false) => panic!("{isa} on a machine without it"),
            (Err(error), _) => panic!("{error}"),
        }
    }
}
