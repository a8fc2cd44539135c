//! A backend with every fused operation at its default body, and, if asked for, a
//! sum that depends on the number of rows: so that tests can show what fusing
//! changes, and that they would notice such a sum.

use gguf::TensorView;
use model::backend::{Attention, BlockAttention, Caps, KvLayer, PageData, RowSet};
use model::kv::KvLayout;
use model::{Backend, DeviceError, PageClass, PageId, Probes, Rope, Shape, Step};

pub struct Plain<B> {
    inner: B,
    /// Passes of more than eight rows add in two halves.
    is_order_dependent: bool,
    n_rows: usize,
}

impl<B: Backend> Plain<B> {
    pub fn new(inner: B) -> Plain<B> {
        Plain {
            inner,
            is_order_dependent: false,
            n_rows: 0,
        }
    }

    pub fn order_dependent(inner: B) -> Plain<B> {
        Plain {
            is_order_dependent: true,
            ..Plain::new(inner)
        }
    }
}

/// Operations that are the inner backend's.
macro_rules! same {
    ($($op:ident($out:ident $(, $x:ident: $ty:ty)*);)*) => {
        $(fn $op(&mut self, $out: &mut B::Buf $(, $x: $ty)*) {
            self.inner.$op($out $(, $x)*);
        })*
    };
}

impl<B: Backend> Backend for Plain<B> {
    type Buf = B::Buf;
    type Weight = B::Weight;
    type Kv = B::Kv;
    type Rope = B::Rope;

    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn load(&mut self, tensor: &TensorView) -> Result<B::Weight, DeviceError> {
        self.inner.load(tensor)
    }

    fn load_rope(&mut self, rope: &Rope) -> Result<B::Rope, DeviceError> {
        self.inner.load_rope(rope)
    }

    fn alloc(&mut self, rows: RowSet, cols: usize) -> Result<B::Buf, DeviceError> {
        self.inner.alloc(rows, cols)
    }

    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<B::Kv, DeviceError> {
        self.inner.alloc_kv(layout)
    }

    fn grow_kv(&mut self, kv: &mut B::Kv, n_slabs: usize) -> Result<(), DeviceError> {
        self.inner.grow_kv(kv, n_slabs)
    }

    fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.n_rows = step.rows.len();
        self.inner.step(step)
    }

    fn run(&mut self, _shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError> {
        record(self);
        Ok(())
    }

    fn read(&mut self, x: &B::Buf) -> Result<Vec<f32>, DeviceError> {
        self.inner.read(x)
    }

    fn export_page(
        &mut self,
        kv: &B::Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        self.inner.export_page(kv, class, page, rows)
    }

    fn import_page(
        &mut self,
        kv: &mut B::Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        self.inner.import_page(kv, class, page, data)
    }

    fn copy_page(
        &mut self,
        kv: &mut B::Kv,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.inner.copy_page(kv, class, from, to, rows)
    }

    fn add(&mut self, x: &mut B::Buf, y: &B::Buf) {
        if !self.is_order_dependent || self.n_rows <= 8 {
            return self.inner.add(x, y);
        }
        let cols = self.inner.read(y).expect("a buffer").len() / self.n_rows;
        let mut half = self.inner.alloc(RowSet::All, cols).expect("memory");
        self.inner.copy_columns(&mut half, 0, y);
        self.inner.softcap(&mut half, 0.5, None);
        self.inner.add(x, &half);
        self.inner.add(x, &half);
    }

    fn store_kv(&mut self, kv: &mut B::Kv, layer: KvLayer, k: &B::Buf, v: &B::Buf) {
        self.inner.store_kv(kv, layer, k, v);
    }

    same! {
        embed(out, table: &B::Weight);
        matmul(out, w: &B::Weight, x: &B::Buf);
        add_bias(x, bias: &B::Weight);
        rms_norm(out, x: &B::Buf, w: Option<&B::Weight>, eps: f32);
        head_norm(x, w: &B::Weight, eps: f32);
        rope(x, rope: &B::Rope, head_dim: usize);
        attend(out, q: &B::Buf, kv: &B::Kv, at: &Attention);
        attend_block(out, q: &B::Buf, k: &B::Buf, v: &B::Buf, kv: &B::Kv, at: &BlockAttention);
        mul_sigmoid(x, gate: &B::Buf);
        swiglu(gate, up: &B::Buf);
        gather(out, x: &B::Buf);
        softcap(x, scale: f32, cap: Option<f32>);
        copy_columns(out, first_col: usize, x: &B::Buf);
    }

    fn probes(&mut self) -> Option<&mut Probes> {
        self.inner.probes()
    }
}
