//! One sequence of 18,700 positions with all its keys and values stored, for any
//! backend, and attention of any of its rows.

use crate::{Noise, tensor};
use gguf::TensorType;
use model::backend::{Attention, KvLayer, RowSet};
use model::kv::{ClassLayout, KvLayout};
use model::{Backend, Input, KvType, PAGE_ROWS, PageClass, PageId, Row, Step};

pub const HEAD_DIM: usize = 32;
pub const N_HEAD_KV: usize = 2;
pub const N_HEAD: usize = 6;
const N_ROWS: u32 = 18_700;
/// Distinct rows of keys, values and queries.
pub const N_DISTINCT: usize = 4001;

const LAYER: KvLayer = KvLayer {
    class: PageClass::Sliding,
    index: 1,
};

/// One sequence with all its keys and values stored.
pub struct Bench<B: Backend> {
    be: B,
    kv: B::Kv,
    pages: Vec<Option<PageId>>,
    pub q: Vec<f32>,
}

fn row(pos: u32) -> Row {
    Row {
        input: Input::Token(pos % N_DISTINCT as u32),
        pos,
        seq: 0,
    }
}

/// What all sequences hold: rows of keys, values and queries.
pub fn values(cols: usize, seed: u64) -> Vec<f32> {
    Noise(seed).values(cols * N_DISTINCT)
}

impl<B: Backend> Bench<B> {
    pub fn new(mut be: B, ty: KvType, place: impl Fn(u32) -> u32) -> Bench<B> {
        let class = ClassLayout {
            n_layer: 2,
            n_head_kv: N_HEAD_KV,
            head_dim: HEAD_DIM,
            window: None,
        };
        let layout = KvLayout {
            ty,
            classes: [ClassLayout::default(), class, ClassLayout::default()],
        };
        let n_pages = N_ROWS.div_ceil(PAGE_ROWS as u32);
        let mut bench = Bench {
            kv: be.alloc_kv(&layout).expect("memory"),
            be,
            pages: (0..n_pages).map(|i| Some(PageId(place(i)))).collect(),
            q: values(N_HEAD * HEAD_DIM, 3),
        };
        let n_slabs = n_pages as usize / layout.pages_per_slab(PageClass::Sliding) + 1;
        bench.be.grow_kv(&mut bench.kv, n_slabs).expect("memory");
        let n_kv = N_HEAD_KV * HEAD_DIM;
        let (k, v) = (values(n_kv, 1), values(n_kv, 2));
        for first in (0..N_ROWS).step_by(512) {
            bench.step((first..N_ROWS.min(first + 512)).map(row).collect());
            let (k, v) = (bench.buf(n_kv, &k), bench.buf(n_kv, &v));
            bench.be.store_kv(&mut bench.kv, LAYER, &k, &v);
        }
        bench
    }

    fn step(&mut self, rows: Vec<Row>) {
        let step = Step {
            rows,
            wanted: Vec::new(),
            pages: vec![[Vec::new(), self.pages.clone(), Vec::new()]],
        };
        self.be.step(&step).expect("a step");
    }

    /// The rows of `values` that belong to the step's rows.
    fn buf(&mut self, cols: usize, values: &[f32]) -> B::Buf {
        let table = tensor("values", TensorType::F32, cols, N_DISTINCT, values);
        let table = self.be.load(&table).expect("a table");
        let mut buf = self.be.alloc(RowSet::All, cols).expect("memory");
        self.be.embed(&mut buf, &table);
        buf
    }

    /// Attention of rows at these positions, in one pass.
    pub fn attend(&mut self, positions: &[u32], window: Option<u32>) -> Vec<Vec<f32>> {
        self.step(positions.iter().map(|&pos| row(pos)).collect());
        let cols = N_HEAD * HEAD_DIM;
        let q = self.q.clone();
        let q = self.buf(cols, &q);
        let mut out = self.be.alloc(RowSet::All, cols).expect("memory");
        let at = Attention {
            layer: LAYER,
            window,
            scale: 0.7,
        };
        self.be.attend(&mut out, &q, &self.kv, &at);
        let out = self.be.read(&out).expect("a buffer");
        out.chunks(cols).map(<[f32]>::to_vec).collect()
    }
}

/// Both sides of the first keys, of a page, of the change of segments.
pub const POSITIONS: [u32; 14] = [
    0, 1, 63, 64, 255, 256, 257, 1000, 16_382, 16_383, 16_384, 16_385, 18_431, 18_650,
];

pub const WINDOWS: [Option<u32>; 4] = [None, Some(1), Some(600), Some(2100)];
