//! Sequences through a model, pass by pass.

use gguf::Gguf;
use model::{
    Backend, Batch, Forward, KvType, Model, Options, PagePool, Reference, RowOutput, SequencePages,
    Want,
};

/// Exact values: f32 keys and values.
pub const EXACT: Options = Options {
    kv: KvType::F32,
    kv_bytes: 256 << 20,
};

/// The model of a file on a backend.
pub fn loaded<B: Backend>(be: B, file: &Gguf, options: Options) -> Model<B> {
    Model::load(be, file, options).unwrap_or_else(|e| panic!("{e}"))
}

/// The model of a file on the reference backend.
pub fn reference(file: &Gguf, options: Options) -> Model<Reference> {
    loaded(Reference::new(), file, options)
}

/// An empty pool of the size that `model` may use.
pub fn pool_of<B: Backend>(model: &Model<B>) -> PagePool {
    let capacity = model.capacity();
    PagePool::new(capacity.layout, capacity.max_slabs)
}

/// The logits of every row of `tokens`, computed in passes of `chunk` rows.
pub fn logits<B: Backend>(model: &mut Model<B>, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut pool = pool_of(model);
    let mut pages = SequencePages::new();
    let mut all = Vec::new();
    for tokens in tokens.chunks(chunk) {
        all.extend(append(model, &mut pool, &mut pages, tokens));
    }
    pages.clear(&mut pool);
    assert_eq!(pool.n_pages_used(), 0, "every page returns");
    all
}

/// Computes `tokens` as the next rows of a sequence and accepts them.
pub fn append<B: Backend>(
    model: &mut Model<B>,
    pool: &mut PagePool,
    pages: &mut SequencePages,
    tokens: &[u32],
) -> Vec<Vec<f32>> {
    let n = tokens.len() as u32;
    let copies = pages.reserve(pool, n).expect("free pages");
    model.copy_pages(&copies).expect("copies");
    let batch = Batch::span(0, pages.len(), tokens);
    let want = vec![Want::Full; tokens.len()];
    let outputs = model.pass(&batch, &[pages], &want).expect("a pass");
    pages.accept(pool, n);
    outputs.into_iter().map(full).collect()
}

/// The logits of an output that asked for all of them.
pub fn full(output: RowOutput) -> Vec<f32> {
    match output {
        RowOutput::Full(logits) => logits,
        other => panic!("expected a whole row, got {other:?}"),
    }
}
