//! What an operation means: the trait between the graph and a device.
//!
//! About 25 operations of the size a transformer needs, not a tensor library.
//! `&mut` marks what an operation writes. Operations do not fail one by one: a
//! device keeps its first error and reports it at the end of [`Backend::run`].
//!
//! Fused operations have default bodies, and the default body is the
//! specification: a backend may override it only with equal bits.

use crate::DeviceError;
use crate::batch::{Outputs, Shape, Step, Want, select};
use crate::kv::{KvLayout, PageClass, PageId};
use crate::rope::Rope;
use gguf::{TensorType, TensorView};

/// Which rows of a pass a buffer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSet {
    /// One for each row of the pass.
    All,
    /// One for each wanted row.
    Wanted,
}

/// What a device can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// The device in words, for the start line.
    pub device: String,
    /// Rows of the largest pass.
    pub max_rows: usize,
    /// Up to how many rows of a pass the bits of a row do not depend on the
    /// others. The scheduler keeps passes inside it.
    pub same_bits_rows: usize,
}

/// Place of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Class of its pages.
    pub class: PageClass,
    /// Index among the layers of that class.
    pub index: usize,
}

/// Attention of rows over the pages of their own sequences.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Where keys and values lie.
    pub layer: KvLayer,
    /// Keys a row sees, itself included; `None` if all up to itself.
    pub window: Option<u32>,
    /// Factor on the scores.
    pub scale: f32,
}

/// Which keys a drafter's block row sees, by distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockWindow {
    /// All of them.
    All,
    /// `q - k < W`; keys after the row are always seen.
    Below(u32),
    /// `|q - k| <= W`.
    Within(u32),
}

impl BlockWindow {
    /// Does a row at `q` see the key at `k`?
    pub fn sees(self, q: u32, k: u32) -> bool {
        match self {
            BlockWindow::All => true,
            BlockWindow::Below(w) => i64::from(q) - i64::from(k) < i64::from(w),
            BlockWindow::Within(w) => q.abs_diff(k) <= w,
        }
    }
}

/// Attention of a drafter's block over context pages and over itself.
#[derive(Clone, Copy, Debug)]
pub struct BlockAttention {
    /// Where the context's keys and values lie.
    pub layer: KvLayer,
    /// Which keys a row sees.
    pub window: BlockWindow,
    /// Factor on the scores.
    pub scale: f32,
}

/// A page in canonical form: `[layer][K, V][row][head][dim]`, little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageData {
    /// Leading rows held.
    pub rows: usize,
    /// The elements.
    pub bytes: Vec<u8>,
}

/// Receives the intermediate values of a pass.
#[derive(Clone, Debug, Default)]
pub struct Probes {
    /// Name, layer and values `[rows, cols]`, in the order of computation.
    /// Names are the ones llama.cpp gives its graph nodes.
    pub values: Vec<(&'static str, usize, Vec<f32>)>,
}

/// A device.
#[allow(clippy::too_many_arguments)] // an operation names everything it reads and writes
pub trait Backend: Sized + Send {
    /// A buffer of `[rows, cols]` f32 activations.
    type Buf: Send;
    /// A loaded tensor.
    type Weight: Send;
    /// The memory of all pages.
    type Kv: Send;
    /// A loaded rotation.
    type Rope: Send;

    /// What the device can do.
    fn caps(&self) -> Caps;

    /// How the device computes products with weights of this encoding, in words.
    fn kernel(&self, ty: TensorType) -> String {
        ty.name().to_string()
    }

    /// Loads a tensor; may lay it out anew, once.
    ///
    /// # Errors
    /// [`DeviceError::UnsupportedType`], [`DeviceError::OutOfMemory`].
    fn load(&mut self, tensor: &TensorView) -> Result<Self::Weight, DeviceError>;

    /// Loads a rotation.
    fn load_rope(&mut self, rope: &Rope) -> Result<Self::Rope, DeviceError>;

    /// A buffer with `cols` columns.
    fn alloc(&mut self, rows: RowSet, cols: usize) -> Result<Self::Buf, DeviceError>;

    /// The pages' memory, with no slab yet.
    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<Self::Kv, DeviceError>;

    /// Makes sure that the first `n_slabs` slabs exist.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; slabs made before stay.
    fn grow_kv(&mut self, kv: &mut Self::Kv, n_slabs: usize) -> Result<(), DeviceError>;

    /// Uploads what differs between two passes of one shape.
    fn step(&mut self, step: &Step) -> Result<(), DeviceError>;

    /// Runs `record` over the uploaded step, or replays what it recorded for
    /// this shape before. An operation called outside of `run` is executed at
    /// once.
    fn run(&mut self, shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError>;

    /// Reads a buffer's rows of the current step, `[rows, cols]`.
    fn read(&mut self, x: &Self::Buf) -> Result<Vec<f32>, DeviceError>;

    /// Reads back what is wanted of each wanted row of `logits`, as
    /// [`crate::select`] says.
    fn select(&mut self, logits: &Self::Buf, want: &[Want]) -> Result<Outputs, DeviceError> {
        let values = self.read(logits)?;
        let n_vocab = values.len() / want.len().max(1);
        let rows = values.chunks(n_vocab.max(1));
        Ok(rows
            .zip(want)
            .map(|(row, &want)| select(row, want))
            .collect())
    }

    /// The first `rows` rows of a page, in canonical form.
    fn export_page(
        &mut self,
        kv: &Self::Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError>;

    /// Fills a page from its canonical form.
    ///
    /// # Panics
    /// If the data is not as long as its rows and the layout say: callers check
    /// what comes from outside.
    fn import_page(
        &mut self,
        kv: &mut Self::Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError>;

    /// Copies the first `rows` rows of page `from` to page `to`.
    fn copy_page(
        &mut self,
        kv: &mut Self::Kv,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError>;

    /// `out[r] = table[token of row r]`.
    fn embed(&mut self, out: &mut Self::Buf, table: &Self::Weight);

    /// `out[r][j] = sum_k w[j][k] * x[r][k]`.
    fn matmul(&mut self, out: &mut Self::Buf, w: &Self::Weight, x: &Self::Buf);

    /// `x[r] += bias`.
    fn add_bias(&mut self, x: &mut Self::Buf, bias: &Self::Weight);

    /// `out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * w`; without `w`, 1.
    fn rms_norm(&mut self, out: &mut Self::Buf, x: &Self::Buf, w: Option<&Self::Weight>, eps: f32);

    /// The same norm in place over each group of as many columns as `w` has:
    /// the heads of a row, or the whole row.
    fn head_norm(&mut self, x: &mut Self::Buf, w: &Self::Weight, eps: f32);

    /// Turns every head of `head_dim` columns by its row's position.
    fn rope(&mut self, x: &mut Self::Buf, rope: &Self::Rope, head_dim: usize);

    /// Stores each row's keys and values at its position.
    fn store_kv(&mut self, kv: &mut Self::Kv, layer: KvLayer, k: &Self::Buf, v: &Self::Buf);

    /// Softmax attention of each row's heads over the stored keys of its own
    /// sequence, in logical order; query head h reads key/value head
    /// `h / (n_head / n_head_kv)`. Rows of the same pass are read as stored.
    fn attend(&mut self, out: &mut Self::Buf, q: &Self::Buf, kv: &Self::Kv, at: &Attention);

    /// Attention of a block over the stored rows before its first position and
    /// over its own `k` and `v`, in both directions. Stores nothing.
    fn attend_block(
        &mut self,
        out: &mut Self::Buf,
        q: &Self::Buf,
        k: &Self::Buf,
        v: &Self::Buf,
        kv: &Self::Kv,
        at: &BlockAttention,
    );

    /// `x *= sigmoid(gate)`, element by element.
    fn mul_sigmoid(&mut self, x: &mut Self::Buf, gate: &Self::Buf);

    /// `gate = silu(gate) * up`, element by element.
    fn swiglu(&mut self, gate: &mut Self::Buf, up: &Self::Buf);

    /// `x += y`.
    fn add(&mut self, x: &mut Self::Buf, y: &Self::Buf);

    /// `out` = the wanted rows of `x`.
    fn gather(&mut self, out: &mut Self::Buf, x: &Self::Buf);

    /// `x *= scale`, then `x = cap * tanh(x / cap)` if there is a cap and `x` is
    /// finite: the cap must not hide an infinity from [`Backend::select`].
    fn softcap(&mut self, x: &mut Self::Buf, scale: f32, cap: Option<f32>);

    /// Copies `x` into the columns of `out` from `first_col` on.
    fn copy_columns(&mut self, out: &mut Self::Buf, first_col: usize, x: &Self::Buf);

    // Fused operations: the default body is the specification.

    /// `x += rms_norm(y) * w`, then `next.0 = rms_norm(x) * next.1` with its
    /// own epsilon. Clobbers `y`.
    fn add_norm(
        &mut self,
        x: &mut Self::Buf,
        y: &mut Self::Buf,
        w: &Self::Weight,
        eps: f32,
        next: Option<(&mut Self::Buf, &Self::Weight, f32)>,
    ) {
        self.head_norm(y, w, eps);
        self.add(x, y);
        if let Some((out, w, eps)) = next {
            self.rms_norm(out, x, Some(w), eps);
        }
    }

    /// The four products that read one attention input.
    fn qkv_gate(
        &mut self,
        q: &mut Self::Buf,
        k: &mut Self::Buf,
        v: &mut Self::Buf,
        gate: &mut Self::Buf,
        w: [&Self::Weight; 4],
        x: &Self::Buf,
    ) {
        self.matmul(q, w[0], x);
        self.matmul(k, w[1], x);
        self.matmul(v, w[2], x);
        self.matmul(gate, w[3], x);
    }

    /// Norms the heads of q and k, turns them if the layer turns, and stores
    /// keys and values.
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
        self.head_norm(q, w[0], eps);
        self.head_norm(k, w[1], eps);
        if let Some((rope, head_dim)) = rope {
            self.rope(q, rope, head_dim);
            self.rope(k, rope, head_dim);
        }
        self.store_kv(kv, layer, k, v);
    }

    /// `ff = silu(w_gate x) * (w_up x)`; clobbers `up`.
    fn ffn_in(
        &mut self,
        ff: &mut Self::Buf,
        up: &mut Self::Buf,
        w_gate: &Self::Weight,
        w_up: &Self::Weight,
        x: &Self::Buf,
    ) {
        self.matmul(ff, w_gate, x);
        self.matmul(up, w_up, x);
        self.swiglu(ff, up);
    }

    /// Final norm, head, scale and cap of the wanted rows. `normed` is scratch.
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
        self.gather(normed, x);
        self.head_norm(normed, norm.0, norm.1);
        self.matmul(logits, head, normed);
        self.softcap(logits, scale, cap);
    }

    /// The receiver of intermediate values, if someone asked for them.
    fn probes(&mut self) -> Option<&mut Probes> {
        None
    }

    /// Hands `x` to the receiver of intermediate values, if there is one.
    fn probe(&mut self, name: &'static str, layer: usize, x: &Self::Buf) {
        if self.probes().is_some() {
            // A device that fails here reports the same failure from `run`.
            let values = self.read(x).unwrap_or_default();
            if let Some(probes) = self.probes() {
                probes.values.push((name, layer, values));
            }
        }
    }
}
