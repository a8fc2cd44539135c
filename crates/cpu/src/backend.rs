//! The operations of the CPU backend.
//!
//! Each cuts its work into tasks at places where no sum is split. Small work
//! stays on the caller's thread, since waking others takes microseconds: which
//! of the two happens changes no bit.

use crate::attention::{Job, Sight};
use crate::device::{Buf, Cpu, Rotation, Then, Weight};
use crate::kv::{Half, Kv};
use crate::matmul::Matrix;
use crate::pool::Pool;
use crate::rope::Turns;
use crate::rows::{
    Add, AddNorm, HeadNorm, MulSigmoid, RmsNext, RmsNorm, Softcap, Swiglu, Zip, ZipInPlace,
};
use gguf::TensorView;
use model::backend::{Attention, BlockAttention, Caps, KvLayer, PageData, Probes, RowSet};
use model::kv::KvLayout;
use model::{Backend, DeviceError, Input, Outputs, PageClass, PageId, Rope, Shape, Step, Want};

/// Rows of the largest pass: activations are small next to the weights.
const MAX_ROWS: usize = 512;

/// Elements that a task adds, norms or copies at least: about 5 us.
const PLAIN_PER_TASK: usize = 1 << 15;

/// The same where each element takes an exponential.
const EXPONENTIAL_PER_TASK: usize = 1 << 13;

/// Calls `task` with the number and the elements of each row of `x`.
fn each_row(
    pool: &mut Pool,
    x: &mut [f32],
    cols: usize,
    task: &(dyn Fn(usize, &mut [f32]) + Sync),
) {
    if cols == 0 {
        return;
    }
    let rows = PLAIN_PER_TASK.div_ceil(cols);
    pool.for_chunks(x, rows * cols, &|chunk, x| {
        for (r, x) in x.chunks_exact_mut(cols).enumerate() {
            task(chunk * rows + r, x);
        }
    });
}

impl Cpu {
    /// `x = f(x, y)`, element by element.
    fn zip(&mut self, f: impl Zip + Sync, x: &mut Buf, y: &Buf, per_task: usize) {
        let machine = self.machine;
        assert_eq!(x.cols, y.cols, "columns of two buffers");
        let y = self.rows(y);
        let x = self.rows_mut(x);
        self.pool.for_chunks(x, per_task, &|chunk, x| {
            let y = &y[chunk * per_task..][..x.len()];
            machine.run(ZipInPlace { f, x, y });
        });
    }

    /// Stores each row's keys and values at its position.
    fn store(&mut self, kv: &mut Kv, layer: KvLayer, k: &Buf, v: &Buf) {
        let class = *kv.class(layer.class);
        let n_kv = class.n_head_kv * class.head_dim;
        assert_eq!((k.cols, v.cols), (n_kv, n_kv), "columns of keys and values");
        let halves = [(Half::Keys, self.rows(k)), (Half::Values, self.rows(v))];
        let (machine, step) = (self.machine, &self.step);
        let writer = kv.writer();
        let store = |task: usize| {
            let (head, (half, x)) = (task / 2, halves[task % 2]);
            for (row, x) in step.rows.iter().zip(x.chunks_exact(n_kv)) {
                let place = step.place(layer.class, row.seq, row.pos);
                let x = &x[head * class.head_dim..][..class.head_dim];
                // SAFETY: a task has a head and half of its own.
                unsafe { writer.store(machine, layer, half, place, head, x) }
            }
        };
        if step.rows.len() * n_kv < PLAIN_PER_TASK {
            (0..2 * class.n_head_kv).for_each(store);
        } else {
            self.pool.run(2 * class.n_head_kv, &store);
        }
    }
}

impl Backend for Cpu {
    type Buf = Buf;
    type Weight = Weight;
    type Kv = Kv;
    type Rope = Rotation;

    fn caps(&self) -> Caps {
        let threads = match self.threads() {
            1 => "1 thread".to_string(),
            n => format!("{n} threads"),
        };
        Caps {
            device: format!("cpu ({}, {threads})", self.isa()),
            max_rows: MAX_ROWS,
            same_bits_rows: MAX_ROWS,
        }
    }

    fn load(&mut self, tensor: &TensorView) -> Result<Weight, DeviceError> {
        let matrix = Matrix::new(tensor, self.isa())?;
        let mut vector = Vec::new();
        if matrix.n_rows() == 1 {
            vector.resize(matrix.cols(), 0.0);
            matrix.decode_row(0, &mut vector);
        }
        Ok(Weight { matrix, vector })
    }

    fn load_rope(&mut self, rope: &Rope) -> Result<Rotation, DeviceError> {
        self.turns.push(Turns::new(rope.clone()));
        Ok(Rotation {
            index: self.turns.len() - 1,
        })
    }

    fn alloc(&mut self, rows: RowSet, cols: usize) -> Result<Buf, DeviceError> {
        Ok(Buf::new(rows, cols))
    }

    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<Kv, DeviceError> {
        Ok(Kv::new(layout))
    }

    fn grow_kv(&mut self, kv: &mut Kv, n_slabs: usize) -> Result<(), DeviceError> {
        let before = kv.bytes();
        let grown = kv.grow(n_slabs);
        self.allocated_bytes += (kv.bytes() - before) as u64;
        grown
    }

    fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.step.clone_from(step);
        self.n_steps += 1;
        Ok(())
    }

    fn run(&mut self, _shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError> {
        record(self);
        Ok(())
    }

    fn read(&mut self, x: &Buf) -> Result<Vec<f32>, DeviceError> {
        Ok(self.rows(x).to_vec())
    }

    fn select(&mut self, logits: &Buf, want: &[Want]) -> Result<Outputs, DeviceError> {
        let rows = self.rows(logits).chunks(logits.cols.max(1));
        let (selector, pool) = (&mut self.selector, &mut self.pool);
        let of = |(row, &want)| selector.select(pool, row, want);
        Ok(rows.zip(want).map(of).collect())
    }

    fn export_page(
        &mut self,
        kv: &Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        Ok(kv.export(class, page, rows))
    }

    fn import_page(
        &mut self,
        kv: &mut Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        kv.import(class, page, data);
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
        kv.copy(class, from, to, rows);
        Ok(())
    }

    fn embed(&mut self, out: &mut Buf, table: &Weight) {
        let cols = out.cols;
        assert_eq!(cols, table.matrix.cols(), "columns of an embedding");
        let out = self.rows_mut(out);
        let rows = &self.step.rows;
        each_row(&mut self.pool, out, cols, &|r, out| {
            let Input::Token(token) = rows[r].input;
            table.matrix.decode_row(token as usize, out);
        });
    }

    fn matmul(&mut self, out: &mut Buf, w: &Weight, x: &Buf) {
        self.products([(out, &w.matrix)], x, Then::Nothing);
    }

    fn add_bias(&mut self, x: &mut Buf, bias: &Weight) {
        let (machine, cols) = (self.machine, x.cols);
        let x = self.rows_mut(x);
        each_row(&mut self.pool, x, cols, &|_, x| {
            let y = &bias.vector;
            machine.run(ZipInPlace { f: Add, x, y });
        });
    }

    fn rms_norm(&mut self, out: &mut Buf, x: &Buf, w: Option<&Weight>, eps: f32) {
        let (machine, cols) = (self.machine, x.cols);
        assert_eq!(out.cols, cols, "columns of a norm");
        let w = w.map(|w| &w.vector[..]);
        let x = self.rows(x);
        let out = self.rows_mut(out);
        each_row(&mut self.pool, out, cols, &|r, out| {
            let x = &x[r * cols..][..cols];
            machine.run(RmsNorm { out, x, w, eps });
        });
    }

    fn head_norm(&mut self, x: &mut Buf, w: &Weight, eps: f32) {
        let (machine, cols) = (self.machine, x.cols);
        let w = &w.vector[..];
        let x = self.rows_mut(x);
        each_row(&mut self.pool, x, cols, &|_, x| {
            machine.run(HeadNorm { x, w, eps });
        });
    }

    fn rope(&mut self, x: &mut Buf, rope: &Rotation, head_dim: usize) {
        let (machine, cols) = (self.machine, x.cols);
        let x = self.rows_mut(x);
        let turns = &mut self.turns[rope.index];
        turns.prepare(&mut self.pool, self.n_steps, &self.step.rows);
        let turns = &*turns;
        each_row(&mut self.pool, x, cols, &|r, x| {
            turns.turn(machine, r, x, head_dim);
        });
    }

    fn store_kv(&mut self, kv: &mut Kv, layer: KvLayer, k: &Buf, v: &Buf) {
        self.store(kv, layer, k, v);
    }

    fn attend(&mut self, out: &mut Buf, q: &Buf, kv: &Kv, at: &Attention) {
        let n_head = q.cols / kv.class(at.layer.class).head_dim;
        let q = self.rows(q);
        let out = self.rows_mut(out);
        let job = Job {
            machine: self.machine,
            step: &self.step,
            kv,
            layer: at.layer,
            scale: at.scale,
            sight: Sight::Causal(at.window),
            q,
            n_head,
            own: None,
        };
        self.planner.attend(&mut self.pool, out, &job);
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
        let n_head = q.cols / kv.class(at.layer.class).head_dim;
        let (q, k, v) = (self.rows(q), self.rows(k), self.rows(v));
        let out = self.rows_mut(out);
        let job = Job {
            machine: self.machine,
            step: &self.step,
            kv,
            layer: at.layer,
            scale: at.scale,
            sight: Sight::Block(at.window),
            q,
            n_head,
            own: Some((k, v)),
        };
        self.planner.attend(&mut self.pool, out, &job);
    }

    fn mul_sigmoid(&mut self, x: &mut Buf, gate: &Buf) {
        self.zip(MulSigmoid, x, gate, EXPONENTIAL_PER_TASK);
    }

    fn swiglu(&mut self, gate: &mut Buf, up: &Buf) {
        self.zip(Swiglu, gate, up, EXPONENTIAL_PER_TASK);
    }

    fn add(&mut self, x: &mut Buf, y: &Buf) {
        self.zip(Add, x, y, PLAIN_PER_TASK);
    }

    fn gather(&mut self, out: &mut Buf, x: &Buf) {
        let cols = x.cols;
        assert_eq!(out.cols, cols, "columns of two buffers");
        let x = self.rows(x);
        let out = self.rows_mut(out);
        let wanted = &self.step.wanted;
        each_row(&mut self.pool, out, cols, &|r, out| {
            out.copy_from_slice(&x[wanted[r] as usize * cols..][..cols]);
        });
    }

    fn softcap(&mut self, x: &mut Buf, scale: f32, cap: Option<f32>) {
        let machine = self.machine;
        let x = self.rows_mut(x);
        self.pool.for_chunks(x, EXPONENTIAL_PER_TASK, &|_, x| {
            machine.run(Softcap { x, scale, cap });
        });
    }

    fn copy_columns(&mut self, out: &mut Buf, first_col: usize, x: &Buf) {
        let (cols, out_cols) = (x.cols, out.cols);
        let x = self.rows(x);
        let out = self.rows_mut(out);
        each_row(&mut self.pool, out, out_cols, &|r, out| {
            out[first_col..first_col + cols].copy_from_slice(&x[r * cols..][..cols]);
        });
    }

    fn add_norm(
        &mut self,
        x: &mut Buf,
        y: &mut Buf,
        w: &Weight,
        eps: f32,
        next: Option<(&mut Buf, &Weight, f32)>,
    ) {
        let (machine, cols) = (self.machine, x.cols);
        let w = &w.vector[..];
        let y = self.rows(y);
        let x = self.rows_mut(x);
        let Some((out, next_w, next_eps)) = next else {
            each_row(&mut self.pool, x, cols, &|r, x| {
                let y = &y[r * cols..][..cols];
                let next = None;
                machine.run(AddNorm { x, y, w, eps, next });
            });
            return;
        };
        let out = self.rows_mut(out);
        let rows = PLAIN_PER_TASK.div_ceil(cols);
        let len = rows * cols;
        self.pool.for_pairs((x, len), (out, len), &|chunk, x, out| {
            let rows_of_two = x.chunks_exact_mut(cols).zip(out.chunks_exact_mut(cols));
            for (r, (x, out)) in rows_of_two.enumerate() {
                let y = &y[(chunk * rows + r) * cols..][..cols];
                let next = Some(RmsNext {
                    out,
                    w: &next_w.vector,
                    eps: next_eps,
                });
                machine.run(AddNorm { x, y, w, eps, next });
            }
        });
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
        let [w_q, w_k, w_v, w_gate] = w.map(|w| &w.matrix);
        let out = [(q, w_q), (k, w_k), (v, w_v), (gate, w_gate)];
        self.products(out, x, Then::Nothing);
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
        let (machine, q_cols, k_cols) = (self.machine, q.cols, k.cols);
        let [q_norm, k_norm] = w.map(|w| &w.vector[..]);
        let q_rows = self.rows_mut(q);
        let k_rows = self.rows_mut(k);
        let mut turn = None;
        if let Some((rope, head_dim)) = rope {
            let turns = &mut self.turns[rope.index];
            turns.prepare(&mut self.pool, self.n_steps, &self.step.rows);
            turn = Some((&*turns, head_dim));
        }
        let of_row = |r: usize, x: &mut [f32], w: &[f32]| {
            machine.run(HeadNorm { x, w, eps });
            if let Some((turns, head_dim)) = turn {
                turns.turn(machine, r, x, head_dim);
            }
        };
        let rows = PLAIN_PER_TASK.div_ceil(q_cols + k_cols);
        let (q_len, k_len) = (rows * q_cols, rows * k_cols);
        let halves = ((q_rows, q_len), (k_rows, k_len));
        self.pool.for_pairs(halves.0, halves.1, &|chunk, q, k| {
            let rows_of_two = q.chunks_exact_mut(q_cols).zip(k.chunks_exact_mut(k_cols));
            for (i, (q, k)) in rows_of_two.enumerate() {
                of_row(chunk * rows + i, q, q_norm);
                of_row(chunk * rows + i, k, k_norm);
            }
        });
        self.store(kv, layer, k, v);
    }

    fn ffn_in(&mut self, ff: &mut Buf, up: &mut Buf, w_gate: &Weight, w_up: &Weight, x: &Buf) {
        let out = [(ff, &w_gate.matrix), (up, &w_up.matrix)];
        self.products(out, x, Then::Swiglu);
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
        let then = Then::Softcap { scale, cap };
        self.products([(logits, &head.matrix)], normed, then);
    }

    fn probes(&mut self) -> Option<&mut Probes> {
        self.probes.as_mut()
    }
}
