//! A backend that gets one thing wrong on purpose, so that tests can show that
//! they would notice.
//!
//! It wraps the reference backend and leaves every fused operation at its
//! default body, so that a change of one operation reaches all its uses.

use model::backend::{Attention, BlockAttention, BlockWindow, KvLayer, PageData, RowSet};
use model::kv::KvLayout;
use model::{
    Backend, Caps, DeviceError, PageClass, PageId, Pairing, Probes, Reference, Rope, Shape, Step,
};
use std::collections::BTreeMap;

type Buf = <Reference as Backend>::Buf;
type Weight = <Reference as Backend>::Weight;
type Kv = <Reference as Backend>::Kv;

/// What is done wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Nothing.
    None,
    GateMissing,
    /// The gate acts on the queries.
    GateBeforeAttention,
    /// The gate acts on the projected output; needs `n_q == n_embd`.
    GateAfterOutput,
    /// The gate is SiLU.
    GateIsSilu,
    ScaleAfterCap,
    InputNormMissing,
    HeadNormMissing,
    /// The sum is normed, not what is added.
    NormOfSum,
    ValuesTurn,
    AttentionScaleMissing,
    UpAndGateSwapped,
    /// Every rotation of halves turns neighbours.
    HalvesAsNeighbours,
    /// The drafter's context goes through `attn_norm`.
    ContextNormed,
    /// The drafter's block enters through the target's input norm.
    BlockInputNormed,
    /// Block row j predicts the token after its own.
    BlockRowsShifted,
    /// A block row sees one key more.
    BlockWindowOff,
    /// Sums of passes with more than eight rows round differently.
    RowsChangeSums,
    /// Attention rounds differently where pages are not in order.
    PlaceChangesAttention,
}

pub struct Mutant {
    inner: Reference,
    mutation: Mutation,
    step: Step,
    /// A copy of the gate, or of values that the graph wants unchanged.
    spare: Option<Buf>,
    is_gate_pending: bool,
    /// `attn_norm` of each layer of the file loaded last.
    attn_norms: BTreeMap<usize, Weight>,
    /// Index of the next product that reads the drafter's context, while any does.
    context_products: Option<usize>,
}

/// The drafter's mask token in the oracle's files.
const MASK_TOKEN: u32 = 500;

impl Mutant {
    pub fn new(mutation: Mutation) -> Mutant {
        Mutant {
            inner: Reference::new(),
            mutation,
            step: Step::default(),
            spare: None,
            is_gate_pending: false,
            attn_norms: BTreeMap::new(),
            context_products: None,
        }
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.mutation == mutation
    }

    /// A copy of `x`.
    fn copy(&mut self, x: &Buf) -> Buf {
        let values = self.inner.read(x).expect("the reference reads");
        let cols = values.len() / self.step.rows.len();
        let mut copy = self.inner.alloc(RowSet::All, cols).expect("memory");
        self.inner.copy_columns(&mut copy, 0, x);
        copy
    }

    /// `x` a rounding away from itself.
    fn nudge(&mut self, x: &mut Buf) {
        self.inner.softcap(x, 1.0 + f32::EPSILON, None);
    }

    fn is_draft(&self) -> bool {
        let model::Input::Token(last) = match self.step.rows.last() {
            Some(row) => row.input,
            None => return false,
        };
        last == MASK_TOKEN
    }
}

impl Backend for Mutant {
    type Buf = Buf;
    type Weight = Weight;
    type Kv = Kv;
    type Rope = Rope;

    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn load(&mut self, tensor: &gguf::TensorView) -> Result<Weight, DeviceError> {
        if let Some(name) = tensor.name.strip_suffix(".attn_norm.weight") {
            let il = name.trim_start_matches("blk.").parse().expect("blk.N");
            let copy = self.inner.load(tensor)?;
            self.attn_norms.insert(il, copy);
        }
        self.inner.load(tensor)
    }

    fn load_rope(&mut self, rope: &Rope) -> Result<Rope, DeviceError> {
        let mut rope = rope.clone();
        if self.is(Mutation::HalvesAsNeighbours) {
            rope.pairing = Pairing::Neighbours;
        }
        self.inner.load_rope(&rope)
    }

    fn alloc(&mut self, set: RowSet, cols: usize) -> Result<Buf, DeviceError> {
        self.inner.alloc(set, cols)
    }

    fn alloc_kv(&mut self, layout: &KvLayout) -> Result<Kv, DeviceError> {
        self.inner.alloc_kv(layout)
    }

    fn grow_kv(&mut self, kv: &mut Kv, n_slabs: usize) -> Result<(), DeviceError> {
        self.inner.grow_kv(kv, n_slabs)
    }

    fn step(&mut self, step: &Step) -> Result<(), DeviceError> {
        self.step = step.clone();
        if self.is(Mutation::BlockRowsShifted) && self.is_draft() {
            self.step.wanted.iter_mut().for_each(|row| *row -= 1);
        }
        self.context_products = None;
        self.inner.step(&self.step)
    }

    fn run(&mut self, _shape: Shape, record: impl FnOnce(&mut Self)) -> Result<(), DeviceError> {
        record(self);
        Ok(())
    }

    fn read(&mut self, x: &Buf) -> Result<Vec<f32>, DeviceError> {
        self.inner.read(x)
    }

    fn export_page(
        &mut self,
        kv: &Kv,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        self.inner.export_page(kv, class, page, rows)
    }

    fn import_page(
        &mut self,
        kv: &mut Kv,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        self.inner.import_page(kv, class, page, data)
    }

    fn copy_page(
        &mut self,
        kv: &mut Kv,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.inner.copy_page(kv, class, from, to, rows)
    }

    fn embed(&mut self, out: &mut Buf, table: &Weight) {
        self.inner.embed(out, table);
        if self.is(Mutation::BlockInputNormed) && self.is_draft() {
            let raw = self.copy(out);
            self.inner.rms_norm(out, &raw, None, 1e-5);
        }
    }

    fn matmul(&mut self, out: &mut Buf, w: &Weight, x: &Buf) {
        match self.context_products {
            Some(index) if self.is(Mutation::ContextNormed) => {
                let mut normed = self.copy(x);
                let norm = &self.attn_norms[&(index / 2)];
                self.inner.head_norm(&mut normed, norm, 1e-5);
                self.inner.matmul(out, w, &normed);
                self.context_products = Some(index + 1);
            }
            _ => self.inner.matmul(out, w, x),
        }
        if self.is_gate_pending {
            self.is_gate_pending = false;
            let gate = self.spare.as_ref().expect("a gate was kept");
            self.inner.mul_sigmoid(out, gate);
        }
        if self.is(Mutation::RowsChangeSums) && self.step.rows.len() > 8 {
            self.nudge(out);
        }
    }

    fn add_bias(&mut self, x: &mut Buf, bias: &Weight) {
        self.inner.add_bias(x, bias);
    }

    fn rms_norm(&mut self, out: &mut Buf, x: &Buf, w: Option<&Weight>, eps: f32) {
        if w.is_none() && self.is(Mutation::InputNormMissing) {
            self.inner.copy_columns(out, 0, x);
        } else {
            self.inner.rms_norm(out, x, w, eps);
        }
    }

    fn head_norm(&mut self, x: &mut Buf, w: &Weight, eps: f32) {
        self.inner.head_norm(x, w, eps);
    }

    fn rope(&mut self, x: &mut Buf, rope: &Rope, head_dim: usize) {
        self.inner.rope(x, rope, head_dim);
    }

    fn store_kv(&mut self, kv: &mut Kv, layer: KvLayer, k: &Buf, v: &Buf) {
        self.inner.store_kv(kv, layer, k, v);
    }

    fn attend(&mut self, out: &mut Buf, q: &Buf, kv: &Kv, at: &Attention) {
        let mut at = *at;
        if self.is(Mutation::AttentionScaleMissing) {
            at.scale = 1.0;
        }
        self.inner.attend(out, q, kv, &at);
        let in_order =
            |tables: &[Vec<Option<PageId>>; 3]| tables[PageClass::Full as usize].is_sorted();
        if self.is(Mutation::PlaceChangesAttention) && !self.step.pages.iter().all(in_order) {
            self.nudge(out);
        }
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
        let mut at = *at;
        if let (true, BlockWindow::Below(w)) = (self.is(Mutation::BlockWindowOff), at.window) {
            at.window = BlockWindow::Below(w + 1);
        }
        self.inner.attend_block(out, q, k, v, kv, &at);
    }

    fn mul_sigmoid(&mut self, x: &mut Buf, gate: &Buf) {
        match self.mutation {
            Mutation::GateMissing | Mutation::GateBeforeAttention => {}
            Mutation::GateAfterOutput => self.is_gate_pending = true,
            Mutation::GateIsSilu => {
                let mut activated = self.copy(gate);
                self.inner.swiglu(&mut activated, x);
                self.inner.copy_columns(x, 0, &activated);
            }
            _ => self.inner.mul_sigmoid(x, gate),
        }
    }

    fn swiglu(&mut self, gate: &mut Buf, up: &Buf) {
        self.inner.swiglu(gate, up);
    }

    fn add(&mut self, x: &mut Buf, y: &Buf) {
        self.inner.add(x, y);
    }

    fn gather(&mut self, out: &mut Buf, x: &Buf) {
        self.inner.gather(out, x);
    }

    fn softcap(&mut self, x: &mut Buf, scale: f32, cap: Option<f32>) {
        if self.is(Mutation::ScaleAfterCap) {
            self.inner.softcap(x, 1.0, cap);
            self.inner.softcap(x, scale, None);
        } else {
            self.inner.softcap(x, scale, cap);
        }
    }

    fn copy_columns(&mut self, out: &mut Buf, first_col: usize, x: &Buf) {
        self.inner.copy_columns(out, first_col, x);
    }

    fn add_norm(
        &mut self,
        x: &mut Buf,
        y: &mut Buf,
        w: &Weight,
        eps: f32,
        next: Option<(&mut Buf, &Weight, f32)>,
    ) {
        if self.is(Mutation::NormOfSum) {
            self.add(x, y);
            self.head_norm(x, w, eps);
        } else {
            self.head_norm(y, w, eps);
            self.add(x, y);
        }
        if let Some((out, w, eps)) = next {
            self.rms_norm(out, x, Some(w), eps);
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
        self.matmul(q, w[0], x);
        self.matmul(k, w[1], x);
        self.matmul(v, w[2], x);
        self.matmul(gate, w[3], x);
        if matches!(
            self.mutation,
            Mutation::GateBeforeAttention | Mutation::GateAfterOutput
        ) {
            self.spare = Some(self.copy(gate));
        }
    }

    fn head_norm_rope_store(
        &mut self,
        q: &mut Buf,
        k: &mut Buf,
        v: &Buf,
        w: [&Weight; 2],
        eps: f32,
        rope: Option<(&Rope, usize)>,
        kv: &mut Kv,
        layer: KvLayer,
    ) {
        if !self.is(Mutation::HeadNormMissing) {
            self.head_norm(q, w[0], eps);
            self.head_norm(k, w[1], eps);
        }
        let mut turned = self.copy(v);
        if let Some((rope, head_dim)) = rope {
            self.rope(q, rope, head_dim);
            self.rope(k, rope, head_dim);
            self.rope(&mut turned, rope, head_dim);
        }
        if self.is(Mutation::GateBeforeAttention) {
            let gate = self.spare.as_ref().expect("a gate was kept");
            self.inner.mul_sigmoid(q, gate);
        }
        let turns = self.is(Mutation::ValuesTurn);
        self.store_kv(kv, layer, k, if turns { &turned } else { v });
    }

    fn ffn_in(&mut self, ff: &mut Buf, up: &mut Buf, w_gate: &Weight, w_up: &Weight, x: &Buf) {
        let swapped = self.is(Mutation::UpAndGateSwapped);
        let (w_gate, w_up) = if swapped {
            (w_up, w_gate)
        } else {
            (w_gate, w_up)
        };
        self.matmul(ff, w_gate, x);
        self.matmul(up, w_up, x);
        self.swiglu(ff, up);
    }

    fn probes(&mut self) -> Option<&mut Probes> {
        self.inner.probes()
    }

    fn probe(&mut self, name: &'static str, _layer: usize, _x: &Buf) {
        if name == "dflash_features" {
            self.context_products = Some(0);
        }
    }
}
