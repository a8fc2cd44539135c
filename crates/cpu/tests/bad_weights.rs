//! Weights that are no numbers: a scale of a block that is infinite or NaN makes the
//! rows it reaches `NonFinite`, on every instruction set, and nothing else happens.

mod common;

use common::{cpu, isas};
use gguf::{Bytes, Gguf, TensorType};
use model::{Batch, Forward, Options, RowOutput, SequencePages, Want};
use std::path::Path;
use testing::{bundled, loaded, open, pool_of, testdata};

/// The file at `path` with `bits` for the first scale of the first block of `tensor`.
fn with_scale(path: &Path, tensor: &str, bits: u16) -> Gguf {
    let whole = open(path);
    let mut bytes = std::fs::read(path).expect("readable");
    let data = &whole
        .tensor(tensor)
        .unwrap_or_else(|| panic!("no {tensor}"));
    let start = data.data.as_ptr() as usize - whole.headers()[0].as_ptr() as usize;
    let at = match data.ty {
        TensorType::Q8_0 | TensorType::Q4_K => 0,
        TensorType::Q6_K => 208,
        other => panic!("where {other} has its scale"),
    };
    bytes[start + at..start + at + 2].copy_from_slice(&bits.to_le_bytes());
    Gguf::from_bytes(Bytes::from(bytes)).expect("a whole file")
}

/// Logits of `n_rows` tokens, each row finite or not.
fn are_finite(file: &Gguf, isa: cpu::Isa, n_rows: usize) -> Vec<bool> {
    let mut model = loaded(cpu(isa, 2), file, Options::default());
    let mut pool = pool_of(&model);
    let tokens: Vec<u32> = (1..=n_rows as u32).collect();
    let mut pages = SequencePages::new();
    let copies = pages.reserve(&mut pool, n_rows as u32).expect("pages");
    model.copy_pages(&copies).expect("copies");
    let mut pass = || {
        let batch = Batch::span(0, 0, &tokens);
        let want = vec![Want::Argmax; n_rows];
        model.pass(&batch, &[&pages], &want).expect("a pass")
    };
    let first = pass();
    assert_eq!(first, pass(), "the same pass again");
    let is_finite = |output: &RowOutput| !matches!(output, RowOutput::NonFinite { .. });
    first.iter().map(is_finite).collect()
}

#[test]
fn scales_that_are_no_numbers() {
    let nano = bundled("nano-glimmer-q8_0.gguf");
    let mixed = testdata("oracle/text-kq-q4km.gguf");
    let (inf, minus_inf, nan) = (0x7c00, 0xfc00, 0x7e01);
    for isa in isas() {
        for (path, tensor, bits) in [
            (&nano, "blk.1.ffn_down.weight", inf),
            (&nano, "output.weight", nan),
            (&mixed, "blk.0.attn_q.weight", nan),
            (&mixed, "blk.1.ffn_down.weight", minus_inf),
        ] {
            let file = with_scale(path, tensor, bits);
            // One row and enough of them for every kind of kernel.
            for n_rows in [1, 3, 20] {
                let found = are_finite(&file, isa, n_rows);
                assert!(
                    found.iter().all(|f| !f),
                    "{isa}, {tensor}, {n_rows} rows: {found:?}"
                );
            }
        }
        assert_eq!(are_finite(&open(&nano), isa, 20), [true; 20], "{isa}");
    }
}
