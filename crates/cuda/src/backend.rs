//! The operations of the CUDA backend: each chooses a kernel and its grid.
//!
//! What a reader would get wrong: launches return at once. The first failure is
//! kept and reported when a pass ends; until then nothing more is launched.

use crate::attention::Sight;
use crate::attention_mma::{Heads, has_heads};
use crate::buffer::Buf;
use crate::compile::Element;
use crate::device::{Cuda, Rotation, Turn, arguments};
use crate::driver::Grid;
use crate::kv::Kv;
use crate::products::{Activations, Epilogue};
use crate::select::floats;
use crate::weight::{Layout, Weight, layout_of};
use gguf::{TensorType, TensorView};
use model::backend::{Attention, BlockAttention, Caps, KvLayer, PageData, Probes, RowSet};
use model::kv::KvLayout;
use model::{Backend, DeviceError, Outputs, PageClass, PageId, Rope, Shape, Step, Want};

/// Rows of the largest pass.
const MAX_ROWS: usize = 2048;

/// Up to so many rows a group's elements are a thread's each.
const FEW_ROWS: usize = 32;

/// Elements of a group: a half-warp's.
const GROUP: usize = 256;

impl Cuda {
    /// A block of threads for each row: half-warps over its groups.
    fn row_blocks(&self, cols: usize, n_rows: usize) -> Grid {
        assert!(cols <= 1024 * GROUP, "a row of {cols} columns");
        Grid {
            blocks: [n_rows as u32, 1, 1],
            threads: (16 * cols.div_ceil(GROUP)).next_multiple_of(32).min(512) as u32,
            shared: 0,
        }
    }

    /// `out = x / rms(x) * w`; without `w`, 1. Rows of `cols` columns.
    fn norm(
        &mut self,
        out: &Buf,
        x: &Buf,
        w: Option<&Weight>,
        (cols, n_rows): (usize, usize),
        eps: f32,
    ) {
        let form = match cols == out.cols {
            true => self.form_beside(out),
            false => Activations::default(),
        };
        let w = w.map_or(0, Weight::vector);
        let function = self.rows.norm_rows;
        let grid = self.row_blocks(cols, n_rows);
        self.launch(
            function,
            grid,
            arguments![out.address(), x.address(), w, cols as u32, eps, form],
        );
        match cols == out.cols {
            true => self.wrote_with_form(out),
            false => self.wrote(out),
        }
    }

    /// `x = f(x, y)` with a kernel over groups.
    fn zip(&mut self, function: crate::driver::Function, x: &Buf, y: &Buf) {
        assert_eq!(x.cols, y.cols, "columns of two buffers");
        let form = self.form_beside(x);
        let grid = self.groups(x.cols, self.n_rows(x.set));
        self.launch(
            function,
            grid,
            arguments![x.address(), y.address(), x.cols as u32, form],
        );
        self.wrote_with_form(x);
    }

    /// A block of threads per head.
    fn turn_heads(&mut self, x: &Buf, rope: &Rotation, head_dim: usize) {
        let turn = self.turn(rope);
        let function = self.rows.rope;
        let grid = Grid {
            blocks: [(x.cols / head_dim) as u32, self.n_rows(x.set) as u32, 1],
            threads: 128,
            shared: (head_dim * size_of::<f32>()) as u32,
        };
        self.launch(
            function,
            grid,
            arguments![x.address(), x.cols as u32, head_dim as u32, turn],
        );
        self.wrote(x);
    }
}

impl Backend for Cuda {
    type Buf = Buf;
    type Weight = Weight;
    type Kv = Kv;
    type Rope = Rotation;

    fn caps(&self) -> Caps {
        let (major, minor) = self.capability();
        Caps {
            device: format!(
                "cuda ({}, compute capability {major}.{minor})",
                self.device()
            ),
            max_rows: MAX_ROWS,
            same_bits_rows: MAX_ROWS,
        }
    }

    fn kernel(&self, ty: TensorType) -> String {
        match layout_of(ty) {
            Some(Layout::Tiles(ty)) => format!("{ty}, int8 mma"),
            Some(Layout::Rows(Element::F32)) if ty != TensorType::F32 => {
                format!("{ty}, decoded to F32")
            }
            _ => ty.to_string(),
        }
    }

    fn load(&mut self, tensor: &TensorView) -> Result<Weight, DeviceError> {
        self.context.bind()?;
        self.load_weight(tensor)
    }

    fn load_rope(&mut self, rope: &Rope) -> Result<Rotation, DeviceError> {
        Ok(self.add_rope(rope))
    }

    fn alloc(&mut self, rows: RowSet, cols: usize) -> Result<Buf, DeviceError> {
        self.context.bind()?;
        self.buffers
            .add(&self.context, &self.stream, self.shape, (rows, cols))
    }

    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<Kv, DeviceError> {
        self.context.bind()?;
        for class in layout.classes {
            self.check_head_dim(class.head_dim, layout.ty.bytes())?;
        }
        let kv = Kv::new(layout);
        self.attention_kernels(if kv.is_half() {
            Element::F16
        } else {
            Element::F32
        })?;
        for class in layout.classes {
            if kv.is_half() && has_heads(class.head_dim) {
                self.mma_kernels(class.head_dim)?;
            }
        }
        Ok(kv)
    }

    fn grow_kv(&mut self, kv: &mut Kv, n_slabs: usize) -> Result<(), DeviceError> {
        self.context.bind()?;
        self.stream.finish()?;
        if kv.grow(&self.context, &self.stream, n_slabs)? {
            self.forget_recordings();
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.begin_step(step)
    }

    fn run(&mut self, shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError> {
        self.run_pass(shape, record)
    }

    fn read(&mut self, x: &Buf) -> Result<Vec<f32>, DeviceError> {
        self.context.bind()?;
        self.start_pending();
        self.take_failure()?;
        let n_rows = match x.set {
            RowSet::All => self.step.rows.len(),
            RowSet::Wanted => self.step.wanted.len(),
        };
        let bytes = self
            .stream
            .download(x.address(), n_rows * x.cols * size_of::<f32>())?;
        Ok(floats(&bytes))
    }

    fn select(&mut self, logits: &Buf, want: &[Want]) -> Result<Outputs, DeviceError> {
        self.select_rows(logits, want)
    }

    fn export_page(
        &mut self,
        kv: &Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        self.context.bind()?;
        kv.export(&self.stream, class, page, rows)
    }

    fn import_page(
        &mut self,
        kv: &mut Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        self.context.bind()?;
        kv.import(&self.context, &self.stream, class, page, data)
    }

    fn copy_page(
        &mut self,
        kv: &mut Kv,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.context.bind()?;
        kv.copy(&self.stream, class, from, to, rows)
    }

    fn embed(&mut self, out: &mut Buf, table: &Weight) {
        assert_eq!(out.cols, table.cols, "columns of an embedding");
        let n_rows = self.n_rows(out.set) as u32;
        let rows = self.step_buffer.rows();
        let (kernel, threads, n, blocks) = match table.layout {
            Layout::Tiles(ty) => {
                let n_blocks = table.n_blocks(ty);
                let kernel = self.product_kernels(ty).map(|f| f.embed);
                (kernel, ty.block_len() / 4, n_blocks, n_blocks)
            }
            Layout::Rows(element) => {
                let kernel = self.float_kernels(element).map(|f| f.embed);
                (kernel, 256, table.cols, table.cols.div_ceil(256))
            }
        };
        if let Some(kernel) = self.note(kernel.map_err(DeviceError::from)) {
            let grid = Grid {
                blocks: [blocks as u32, n_rows, 1],
                threads: threads as u32,
                shared: 0,
            };
            self.launch(
                kernel,
                grid,
                arguments![out.address(), table.memory.address(), rows, n as u32],
            );
        }
        self.wrote(out);
    }

    fn matmul(&mut self, out: &mut Buf, w: &Weight, x: &Buf) {
        self.products(&[(out, w)], x, Epilogue::default());
    }

    fn add_bias(&mut self, x: &mut Buf, bias: &Weight) {
        let n = (self.n_rows(x.set) * x.cols) as u64;
        let function = self.rows.add_bias;
        let grid = self.elements(n);
        self.launch(
            function,
            grid,
            arguments![x.address(), bias.vector(), x.cols as u32, n],
        );
        self.wrote(x);
    }

    fn rms_norm(&mut self, out: &mut Buf, x: &Buf, w: Option<&Weight>, eps: f32) {
        assert_eq!(out.cols, x.cols, "columns of a norm");
        let n_rows = self.n_rows(out.set);
        self.norm(out, x, w, (x.cols, n_rows), eps);
    }

    fn head_norm(&mut self, x: &mut Buf, w: &Weight, eps: f32) {
        let n_heads = x.cols / w.cols * self.n_rows(x.set);
        if w.cols > GROUP || w.cols == x.cols {
            return self.norm(x, x, Some(w), (w.cols, n_heads), eps);
        }
        let function = self.rows.norm_heads;
        let grid = Grid {
            blocks: [n_heads.div_ceil(8) as u32, 1, 1],
            threads: 128,
            shared: 0,
        };
        let (dim, n_heads) = (w.cols as u32, n_heads as u32);
        self.launch(
            function,
            grid,
            arguments![x.address(), w.vector(), dim, n_heads, eps],
        );
        self.wrote(x);
    }

    fn rope(&mut self, x: &mut Buf, rope: &Rotation, head_dim: usize) {
        self.turn_heads(x, rope, head_dim);
    }

    fn store_kv(&mut self, kv: &mut Kv, layer: KvLayer, k: &Buf, v: &Buf) {
        let class = kv.layout.classes[layer.class as usize];
        let n_kv = class.n_head_kv * class.head_dim;
        assert_eq!((k.cols, v.cols), (n_kv, n_kv), "columns of keys and values");
        let place = kv.place(layer, self.step_buffer.pages());
        let rows = self.step_buffer.rows();
        let function = self.rows.store_kv;
        let grid = Grid {
            blocks: [self.n_rows(k.set) as u32, 2, 1],
            threads: 128,
            shared: 0,
        };
        let is_half = u32::from(kv.is_half());
        self.launch(
            function,
            grid,
            arguments![k.address(), v.address(), rows, place, is_half],
        );
    }

    fn attend(&mut self, out: &mut Buf, q: &Buf, kv: &Kv, at: &Attention) {
        let sight = Sight::Causal(at.window);
        self.attend_rows(out, q, None, kv, (at.layer, at.scale, sight));
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
        let sight = Sight::Block(at.window);
        self.attend_rows(out, q, Some((k, v)), kv, (at.layer, at.scale, sight));
    }

    fn mul_sigmoid(&mut self, x: &mut Buf, gate: &Buf) {
        if !self.gate_pending(x, gate) {
            self.zip(self.rows.mul_sigmoid, x, gate);
        }
    }

    fn swiglu(&mut self, gate: &mut Buf, up: &Buf) {
        let n_rows = self.n_rows(gate.set);
        if n_rows > FEW_ROWS {
            return self.zip(self.rows.swiglu, gate, up);
        }
        assert_eq!(gate.cols, up.cols, "columns of two buffers");
        let form = self.form_beside(gate);
        let grid = Grid {
            blocks: [gate.cols.div_ceil(GROUP) as u32, n_rows as u32, 1],
            threads: GROUP as u32,
            shared: 0,
        };
        let (x, y, n) = (gate.address(), up.address(), gate.cols as u32);
        self.launch(self.rows.swiglu_few, grid, arguments![x, y, n, form]);
        self.wrote_with_form(gate);
    }

    fn add(&mut self, x: &mut Buf, y: &Buf) {
        assert_eq!(x.cols, y.cols, "columns of two buffers");
        let n = (self.n_rows(x.set) * x.cols) as u64;
        let function = self.rows.add;
        let grid = self.elements(n);
        self.launch(function, grid, arguments![x.address(), y.address(), n]);
        self.wrote(x);
    }

    fn gather(&mut self, out: &mut Buf, x: &Buf) {
        assert_eq!(out.cols, x.cols, "columns of two buffers");
        let n_wanted = self.n_rows(RowSet::Wanted) as u32;
        let wanted = self.step_buffer.wanted();
        let function = self.rows.gather;
        let grid = Grid {
            blocks: [x.cols.div_ceil(256) as u32, n_wanted, 1],
            threads: 256,
            shared: 0,
        };
        self.launch(
            function,
            grid,
            arguments![out.address(), x.address(), wanted, x.cols as u32],
        );
        self.wrote(out);
    }

    fn softcap(&mut self, x: &mut Buf, scale: f32, cap: Option<f32>) {
        self.softcap_rows(x, Epilogue::softcap(scale, cap));
        self.wrote(x);
    }

    fn copy_columns(&mut self, out: &mut Buf, first_col: usize, x: &Buf) {
        assert!(first_col + x.cols <= out.cols, "columns inside a buffer");
        let function = self.rows.copy_columns;
        let grid = Grid {
            blocks: [x.cols.div_ceil(256) as u32, self.n_rows(x.set) as u32, 1],
            threads: 256,
            shared: 0,
        };
        let sizes = [out.cols as u32, first_col as u32, x.cols as u32];
        let [out_cols, first, cols] = sizes;
        self.launch(
            function,
            grid,
            arguments![out.address(), out_cols, first, x.address(), cols],
        );
        self.wrote(out);
    }

    fn add_norm(
        &mut self,
        x: &mut Buf,
        y: &mut Buf,
        w: &Weight,
        eps: f32,
        next: Option<(&mut Buf, &Weight, f32)>,
    ) {
        if w.cols != x.cols {
            // A norm of heads: no kernel of its own.
            self.head_norm(y, w, eps);
            self.add(x, y);
            if let Some((out, w, eps)) = next {
                self.rms_norm(out, x, Some(w), eps);
            }
            return;
        }
        assert_eq!(x.cols, y.cols, "columns of a sum");
        let mut form = Activations::default();
        let (mut out, mut next_w, mut next_eps) = (0, 0, 0.0f32);
        if let Some((buf, w, eps)) = &next {
            assert_eq!(buf.cols, x.cols, "columns of a norm");
            form = self.form_beside(buf);
            (out, next_w, next_eps) = (buf.address(), w.vector(), *eps);
        }
        let function = self.rows.add_norm_rows;
        let grid = self.row_blocks(x.cols, self.n_rows(x.set));
        let n = x.cols as u32;
        self.launch(
            function,
            grid,
            arguments![
                x.address(),
                y.address(),
                w.vector(),
                eps,
                out,
                next_w,
                next_eps,
                n,
                form
            ],
        );
        self.wrote(x);
        if let Some((out, ..)) = next {
            self.wrote_with_form(out);
        }
    }

    fn qkv_gate(
        &mut self,
        q: &mut Buf,
        k: &mut Buf,
        v: &mut Buf,
        gate: &mut Buf,
        w: [&Weight; 4],
        x: &Buf,
    ) {
        let out = [(&*q, w[0]), (&*k, w[1]), (&*v, w[2]), (&*gate, w[3])];
        self.products(&out, x, Epilogue::default());
    }

    fn head_norm_rope_store(
        &mut self,
        q: &mut Buf,
        k: &mut Buf,
        v: &Buf,
        w: [&Weight; 2],
        eps: f32,
        rope: Option<(&Rotation, usize)>,
        kv: &mut Kv,
        layer: KvLayer,
    ) {
        let class = kv.layout.classes[layer.class as usize];
        let dim = class.head_dim;
        let is_fused =
            dim <= GROUP && w.iter().all(|w| w.cols == dim) && rope.is_none_or(|r| r.1 == dim);
        if !is_fused {
            self.head_norm(q, w[0], eps);
            self.head_norm(k, w[1], eps);
            if let Some((rope, head_dim)) = rope {
                self.rope(q, rope, head_dim);
                self.rope(k, rope, head_dim);
            }
            return self.store_kv(kv, layer, k, v);
        }
        let turn = rope.map_or(Turn::NONE, |(rope, _)| self.turn(rope));
        let (n_head, n_head_kv) = (q.cols / dim, class.n_head_kv);
        assert_eq!(
            (k.cols, v.cols),
            (n_head_kv * dim, n_head_kv * dim),
            "columns of keys and values"
        );
        let heads = Heads {
            q: q.address(),
            k: k.address(),
            v: v.address(),
            norms: w.map(Weight::vector),
            eps,
            turn,
            place: kv.place(layer, self.step_buffer.pages()),
            dim,
            n_head,
            n_head_kv,
            is_half: kv.is_half(),
        };
        self.prepare_heads(heads, self.uses_mma(kv, layer));
        self.wrote(q);
        self.wrote(k);
    }

    fn ffn_in(&mut self, ff: &mut Buf, up: &mut Buf, w_gate: &Weight, w_up: &Weight, x: &Buf) {
        self.products(&[(&*ff, w_gate), (&*up, w_up)], x, Epilogue::default());
        self.swiglu(ff, up);
    }

    fn logits(
        &mut self,
        logits: &mut Buf,
        normed: &mut Buf,
        x: &Buf,
        norm: (&Weight, f32),
        head: &Weight,
        scale: f32,
        cap: Option<f32>,
    ) {
        self.gather(normed, x);
        self.head_norm(normed, norm.0, norm.1);
        self.products(&[(&*logits, head)], normed, Epilogue::softcap(scale, cap));
    }

    fn probes(&mut self) -> Option<&mut Probes> {
        self.probes.as_mut()
    }
}
