//! What a file's tensors must be, with the exact messages; what target and
//! drafter must have in common; and what a loaded model refuses to compute.

use gguf::{Array, Gguf, TensorType, Value};
use model::backend::PageData;
use model::kv::PageCopy;
use model::{
    Batch, DraftRequest, Error, Forward, Input, Model, PageClass, PageId, Reference, Row,
    SequencePages, Want, WindowConvention, vocabulary_digest,
};
use testing::{
    EXACT, Parts, Tensor, append, bundled, changed, distance, full, logits, open, pool_of,
    reference, same_bits, testdata, tokens,
};

const TOKENS: [u32; 12] = [400, 17, 33, 250, 3, 99, 128, 7, 311, 42, 5, 61];

fn target() -> Gguf {
    open(&testdata("oracle/text-nano-f32.gguf"))
}

fn drafter() -> Gguf {
    open(&testdata("oracle/dflash-nano-f32.gguf"))
}

fn load(file: &Gguf) -> Result<Model<Reference>, Error> {
    Model::load(Reference::new(), file, EXACT)
}

/// The message that a changed target gives.
#[track_caller]
fn refused(message: &str, change: impl FnOnce(&mut Parts)) {
    let error = match load(&changed(&target(), change)) {
        Ok(_) => panic!("the file was loaded; expected: {message}"),
        Err(error) => error,
    };
    assert_eq!(error.to_string(), message);
}

/// The logits of a changed target.
fn logits_with(change: impl FnOnce(&mut Parts)) -> Vec<Vec<f32>> {
    logits(
        &mut reference(&changed(&target(), change), EXACT),
        &TOKENS,
        12,
    )
}

#[test]
fn missing_tensors() {
    let cases = [
        ("token_embd.weight", "[64, 512]"),
        ("output_norm.weight", "[64]"),
        ("output.weight", "[64, 512]"),
        ("blk.7.attn_norm.weight", "[64]"),
        ("blk.3.attn_q.weight", "[64, 128]"),
        ("blk.3.attn_k.weight", "[64, 64]"),
        ("blk.3.attn_gate.weight", "[64, 128]"),
        ("blk.0.attn_q_norm.weight", "[32]"),
        ("blk.0.attn_k_norm.weight", "[32]"),
        ("blk.0.attn_output.weight", "[128, 64]"),
        ("blk.2.post_attention_norm.weight", "[64]"),
        ("blk.2.ffn_down.weight", "[128, 64]"),
        ("blk.2.post_ffw_norm.weight", "[64]"),
    ];
    for (name, shape) in cases {
        let message = format!("tensor {name} is missing; expected shape {shape}");
        refused(&message, |p| p.remove(name));
    }
}

#[test]
fn misshapen_tensors() {
    let swapped = "tensor blk.1.attn_output.weight: found shape [64, 128], expected [128, 64]";
    refused(swapped, |p| {
        p.tensor("blk.1.attn_output.weight").info.shape.reverse();
    });
    let short = "tensor token_embd.weight: found shape [64, 511], expected [64, 512]";
    refused(short, |p| {
        let tensor = p.tensor("token_embd.weight");
        tensor.info.shape = vec![64, 511];
        tensor.data.truncate(64 * 511 * 4);
    });
    let vocabulary = "tensor token_embd.weight: found shape [64, 512], expected [64, 500]";
    refused(vocabulary, |p| {
        p.metadata.insert("tokenizer.ggml.tokens", tokens(500));
    });
    let norm = "tensor blk.0.attn_q_norm.weight: found shape [16, 2], expected [32]";
    refused(norm, |p| {
        p.tensor("blk.0.attn_q_norm.weight").info.shape = vec![16, 2]
    });
}

#[test]
fn trailing_ones_of_a_shape_mean_nothing() {
    let plain = logits_with(|_| {});
    let found = logits_with(|p| p.tensor("output_norm.weight").info.shape = vec![64, 1, 1]);
    assert!(same_bits(&found, &plain));
}

#[test]
fn norms_are_plain_numbers() {
    let plain = logits_with(|_| {});
    let half = |ty| {
        move |p: &mut Parts| {
            let tensor = p.tensor("blk.0.attn_norm.weight");
            let mut data = Vec::new();
            gguf::quant::encode_row(ty, &tensor.values(), &mut data).expect("finite");
            (tensor.info.ty, tensor.data) = (ty, data);
        }
    };
    for ty in [TensorType::F16, TensorType::BF16] {
        let (_, relative_rms) = distance(&logits_with(half(ty)).concat(), &plain.concat());
        assert!(
            relative_rms > 0.0 && relative_rms < 0.1,
            "{ty}: {relative_rms}"
        );
    }
    let message = "tensor blk.0.attn_norm.weight: found type Q8_0, expected F32, F16 or BF16";
    refused(message, half(TensorType::Q8_0));
}

#[test]
fn integers_are_no_weights() {
    let message = "tensor output.weight has type I32, which this device cannot compute with";
    refused(message, |p| {
        p.tensor("output.weight").info.ty = TensorType::I32
    });
}

#[test]
fn unused_tensors() {
    let extra = |name: &str| Tensor::floats(name, &[4], &[1.0; 4]);
    let message = |count: usize, first: &str| {
        format!(
            "{count} tensor(s) of the file are not part of a muse-glimmer model, first: {first}; \
             a model that needs them would be computed wrongly"
        )
    };
    refused(&message(1, "blk.0.attn_q.bias"), |p| {
        p.tensors.push(extra("blk.0.attn_q.bias"));
    });
    refused(&message(2, "v.first"), |p| {
        p.tensors.insert(0, extra("v.first"));
        p.tensors.push(extra("v.last"));
    });
    let layer = "blk.7.attn_norm.weight";
    refused(&message(14, layer), |p| {
        p.metadata.insert("muse-glimmer.block_count", Value::U32(7));
        p.metadata
            .remove("muse-glimmer.attention.sliding_window_pattern");
    });
}

#[test]
fn head_norms_are_weights() {
    let plain = logits_with(|_| {});
    let mut ramp = Vec::new();
    let found = logits_with(|p| {
        let tensor = p.tensor("blk.5.attn_q_norm.weight");
        let values: Vec<f32> = (0..32).map(|i| 3.87 + i as f32 / 64.0).collect();
        *tensor = Tensor::floats("blk.5.attn_q_norm.weight", &[32], &values);
        ramp = values;
    });
    assert_eq!(ramp.len(), 32);
    assert!(
        !same_bits(&found, &plain),
        "a norm that is not constant is used, not ignored"
    );
    assert!(found.iter().flatten().all(|v| v.is_finite()));
}

#[test]
fn fused_qkv_gives_the_same_bits() {
    let file = open(&testdata("oracle/text-nano-q8_0.gguf"));
    let plain = logits(&mut reference(&file, EXACT), &TOKENS, 12);
    let fused = changed(&file, |p| {
        for il in 0..8 {
            let names = ["attn_q", "attn_k", "attn_v"].map(|n| format!("blk.{il}.{n}.weight"));
            let mut whole = p.tensor(&names[0]).clone();
            whole.info.name = format!("blk.{il}.attn_qkv.weight");
            whole.info.shape[1] = 128 + 64 + 64;
            for name in &names[1..] {
                whole.data.extend_from_slice(&p.tensor(name).data);
            }
            names.iter().for_each(|name| p.remove(name));
            p.tensors.push(whole);
        }
    });
    assert!(fused.tensor("blk.0.attn_q.weight").is_none());
    assert!(same_bits(
        &logits(&mut reference(&fused, EXACT), &TOKENS, 12),
        &plain
    ));
    let message = "tensor blk.0.attn_qkv.weight: found shape [64, 128], expected [64, 256]";
    refused(message, |p| {
        p.remove("blk.0.attn_q.weight");
        p.remove("blk.0.attn_k.weight");
        p.remove("blk.0.attn_v.weight");
        p.tensors.push(Tensor::floats(
            "blk.0.attn_qkv.weight",
            &[64, 128],
            &[0.5; 64 * 128],
        ));
    });
}

fn attach(change: impl FnOnce(&mut Parts)) -> Result<Model<Reference>, Error> {
    let mut model = reference(&target(), EXACT);
    let file = changed(&drafter(), change);
    model
        .attach_drafter(&file, WindowConvention::Below)
        .map(|_| model)
}

#[test]
fn drafter_and_target_must_fit() {
    let mismatch = |change: &dyn Fn(&mut Parts)| match attach(change) {
        Ok(_) => "no error".to_string(),
        Err(error) => error.to_string(),
    };
    let narrow = open(&bundled("nano-glimmer-dflash-q8_0.gguf"));
    let mut model = reference(&target(), EXACT);
    let error = model.attach_drafter(&narrow, WindowConvention::Below);
    assert_eq!(
        error.expect_err("another width").to_string(),
        "the drafter does not fit the model: the width of the residual stream is 256 in the \
         drafter, 64 in the model"
    );
    let layers = Value::Array(Array::I32(vec![1, 3, 9]));
    assert_eq!(
        mismatch(&|p| drop(p.metadata.insert("dflash.target_layers", layers.clone()))),
        "the drafter does not fit the model: a target layer is 9 in the drafter, at most 8 in the \
         model"
    );
    let mask = |p: &mut Parts| {
        p.metadata
            .insert("tokenizer.ggml.mask_token_id", Value::U32(512));
    };
    assert_eq!(
        mismatch(&mask),
        "the drafter does not fit the model: the mask token is 512 in the drafter, below 512 in \
         the model"
    );
    let other = mismatch(&|p| drop(p.metadata.insert("tokenizer.ggml.tokens", tokens(512))));
    let start = "the drafter does not fit the model: the vocabulary's digest is ";
    assert!(other.starts_with(start), "{other}");
    assert_eq!(
        mismatch(&|p| p.remove("fc.weight")),
        "tensor fc.weight is missing; expected shape [192, 64]"
    );
    assert_eq!(
        mismatch(&|p| p
            .tensors
            .push(Tensor::floats("output.weight", &[4], &[1.0; 4]))),
        "1 tensor(s) of the file are not part of a dflash model, first: output.weight; a model \
         that needs them would be computed wrongly"
    );
    // A refused drafter leaves the model as it was.
    assert!(
        model
            .attach_drafter(&drafter(), WindowConvention::Below)
            .is_ok()
    );
}

#[test]
fn vocabulary_digest_tells_token_lists_apart() {
    let digest = |list: &[&str]| {
        let mut meta = gguf::Metadata::default();
        let list = Value::Array(Array::String(list.iter().collect()));
        meta.insert("tokenizer.ggml.tokens", list);
        vocabulary_digest(&meta).expect("tokens")
    };
    assert_eq!(digest(&["a", "bc"]), digest(&["a", "bc"]));
    assert_ne!(digest(&["a", "bc"]), digest(&["ab", "c"]));
    assert_ne!(digest(&["a", "bc"]), digest(&["bc", "a"]));
    let none = vocabulary_digest(&gguf::Metadata::default()).expect_err("no tokens");
    let message = "metadata key tokenizer.ggml.tokens is missing: it is the vocabulary";
    assert_eq!(none.to_string(), message);
}

/// The output of the last layer is the place after all layers.
#[test]
fn features_of_the_last_layers_output() {
    let features = |places: [i32; 3]| {
        let layers = Value::Array(Array::I32(places.to_vec()));
        let mut model = attach(|p| drop(p.metadata.insert("dflash.target_layers", layers)))
            .unwrap_or_else(|e| panic!("{e}"));
        model.backend_mut().record_probes();
        let (mut pool, mut pages) = (pool_of(&model), SequencePages::new());
        append(&mut model, &mut pool, &mut pages, &TOKENS);
        let request = DraftRequest {
            seq: 0,
            anchor: 1,
            n_draft: 7,
        };
        let drafts = model
            .draft(&[request], &[&pages], Want::Full)
            .expect("a draft");
        let drafts: Vec<Vec<f32>> = drafts.concat().into_iter().map(full).collect();
        (model.backend_mut().take_probes().values, drafts)
    };
    let (values, last) = features([1, 3, 8]);
    assert!(last.iter().flatten().all(|v| v.is_finite()));
    // The projection, from the last layer's output as the third block of columns.
    let stream = |name: &str, layer: usize| {
        let probe = values.iter().find(|(n, l, _)| *n == name && *l == layer);
        &probe.unwrap_or_else(|| panic!("no {name} {layer}")).2
    };
    let sources = [stream("l_out", 0), stream("l_out", 2), stream("l_out", 7)];
    let parts = &mut Parts::of(&drafter());
    let (fc, norm) = (
        parts.tensor("fc.weight").values(),
        parts.tensor("enc.output_norm.weight").values(),
    );
    let mut expected = Vec::new();
    for row in 0..TOKENS.len() {
        let all: Vec<f64> = sources
            .iter()
            .flat_map(|s| s[row * 64..(row + 1) * 64].iter().map(|&v| f64::from(v)))
            .collect();
        let product =
            |w: &[f32]| -> f64 { w.iter().zip(&all).map(|(&w, x)| f64::from(w) * x).sum() };
        let context: Vec<f64> = fc.chunks(192).map(product).collect();
        let mean = context.iter().map(|v| v * v).sum::<f64>() / 64.0;
        let scale = 1.0 / (mean + 1e-5).sqrt();
        expected.extend(
            context
                .iter()
                .zip(&norm)
                .map(|(v, &w)| (v * scale) as f32 * w),
        );
    }
    let (_, relative_rms) = distance(stream("dflash_features", 0), &expected);
    assert!(relative_rms < 1e-5, "{relative_rms:.1e}");
    assert!(!same_bits(&features([1, 3, 7]).1, &last));
}

/// What a pass refuses before it computes anything.
#[test]
fn batches_must_continue_their_sequences() {
    let mut model = reference(&target(), EXACT);
    let mut pool = pool_of(&model);
    let mut sequences = [SequencePages::new(), SequencePages::new()];
    append(&mut model, &mut pool, &mut sequences[0], &TOKENS[..5]);
    for pages in &mut sequences {
        pages.reserve(&mut pool, 8).expect("pages");
    }
    let row = |seq, pos, token| Row {
        input: Input::Token(token),
        pos,
        seq,
    };
    let cases = [
        (
            vec![row(0, 4, 1)],
            "position 4 of sequence 0 does not follow its 5 rows",
        ),
        (
            vec![row(0, 6, 1)],
            "position 6 of sequence 0 does not follow its 5 rows",
        ),
        (
            vec![row(0, 5, 1), row(0, 7, 1)],
            "position 7 of sequence 0 does not follow its 6 rows",
        ),
        (
            vec![row(0, 5, 1), row(0, 5, 1)],
            "position 5 of sequence 0 does not follow its 6 rows",
        ),
        (
            vec![row(0, 5, 1), row(1, 0, 1), row(0, 6, 1)],
            "position 6 of sequence 0 does not follow its 6 rows",
        ),
        (
            vec![row(1, 0, 512)],
            "token 512 is not in the vocabulary of 512",
        ),
    ];
    for (rows, message) in cases {
        let wanted = Vec::new();
        let batch = Batch { rows, wanted };
        let tables = [&sequences[0], &sequences[1]];
        let error = model
            .pass(&batch, &tables, &[])
            .expect_err("a refused batch");
        assert_eq!(error.to_string(), message);
    }
    // The sequence goes on as if nothing had happened.
    let after = append(&mut model, &mut pool, &mut sequences[0], &TOKENS[5..]);
    let whole = logits(&mut reference(&target(), EXACT), &TOKENS, 12);
    assert!(same_bits(&after, &whole[5..]));
}

#[test]
fn passes_must_fit_the_device_and_their_sequences() {
    let mut model = reference(&target(), EXACT);
    let mut pool = pool_of(&model);
    let mut pages = SequencePages::new();
    pages.reserve(&mut pool, 600).expect("pages");
    let many = [1; 513];
    let cases: [(u32, &[u32], &[u32], &str); 6] = [
        (0, &many, &[], "a pass of 513 rows, expected at most 512"),
        (1, &[1], &[0], "sequence 1 is not one of the 1 of the pass"),
        (
            0,
            &[1, 2],
            &[2],
            "wanted row 2: expected indices into 2 rows, ascending, each once",
        ),
        (
            0,
            &[1, 2],
            &[0, u32::MAX],
            "wanted row 4294967295: expected indices into 2 rows, ascending, each once",
        ),
        (
            0,
            &[1, 2],
            &[1, 0],
            "wanted row 0: expected indices into 2 rows, ascending, each once",
        ),
        (
            0,
            &[1, 2],
            &[1, 1],
            "wanted row 1: expected indices into 2 rows, ascending, each once",
        ),
    ];
    for (seq, tokens, wanted, message) in cases {
        let mut batch = Batch::default();
        batch.push(seq, 0, tokens);
        batch.wanted = wanted.to_vec();
        let want = vec![Want::Argmax; wanted.len()];
        let error = model.pass(&batch, &[&pages], &want);
        assert_eq!(error.expect_err("a refused pass").to_string(), message);
    }
}

#[test]
fn drafting_refuses_what_cannot_be_proposed() {
    let mut model = attach(|_| {}).unwrap_or_else(|e| panic!("{e}"));
    let (mut pool, mut pages) = (pool_of(&model), SequencePages::new());
    append(&mut model, &mut pool, &mut pages, &TOKENS);
    let request = |seq, anchor, n_draft| DraftRequest {
        seq,
        anchor,
        n_draft,
    };
    let cases: [(&[DraftRequest], &str); 6] = [
        (
            &[request(0, 700, 2)],
            "token 700 is not in the vocabulary of 512",
        ),
        (&[request(0, 7, 0)], "a draft of 0 tokens, expected 1 to 7"),
        (&[request(0, 7, 8)], "a draft of 8 tokens, expected 1 to 7"),
        (
            &[request(2, 7, 1)],
            "sequence 2 is not one of the 2 of the pass",
        ),
        (
            &[request(0, 7, 2), request(1, 7, 2), request(0, 8, 2)],
            "sequence 0 has two requests in one drafting pass, expected one",
        ),
        (&[], ""),
    ];
    let empty = SequencePages::new();
    for (requests, message) in cases {
        let outcome = model.draft(requests, &[&pages, &empty], Want::Argmax);
        let found = outcome.err().map_or(String::new(), |e| e.to_string());
        assert_eq!(found, message);
    }
    // 65 blocks of 8 rows.
    let requests: Vec<DraftRequest> = (0..65).map(|seq| request(seq, 7, 7)).collect();
    let tables = vec![&empty; 65];
    let error = model.draft(&requests, &tables, Want::Argmax);
    let message = "a pass of 520 rows, expected at most 512";
    assert_eq!(error.expect_err("too many rows").to_string(), message);
    let drafts = model.draft(&requests[..64], &tables, Want::Argmax);
    assert_eq!(drafts.expect("512 rows").len(), 64);
}

#[test]
fn imported_pages_must_be_as_long_as_they_claim() {
    let mut model = reference(&target(), EXACT);
    // Two full layers, keys and values, two heads of 32, f32.
    let row_bytes = 2 * 2 * 64 * 4;
    let cases = [
        (
            3,
            3 * row_bytes - 1,
            "3071 bytes for 3 rows of a full page, expected 3072",
        ),
        (
            257,
            257 * row_bytes,
            "263168 bytes for 257 rows of a full page, expected 263168",
        ),
    ];
    for (rows, n_bytes, message) in cases {
        let bytes = vec![0; n_bytes];
        let data = PageData { rows, bytes };
        let error = model.import_page(PageClass::Full, PageId(0), &data);
        let error = error
            .expect_err("a page that is not what it says")
            .to_string();
        assert_eq!(error, format!("{message} and at most 256 rows"));
    }
}

#[test]
fn pages_must_be_the_models() {
    let mut model = reference(&target(), EXACT);
    let layout = model.capacity().layout;
    let slab_bytes = layout.slab_bytes();
    // One more than the slabs that fit the bytes given.
    let n_slabs = EXACT.kv_bytes as usize / slab_bytes;
    let stride = (0..).find(|&id| layout.locate(PageId(id)).0 == 1);
    let stride = stride.expect("a second slab");
    let beyond = PageId(n_slabs as u32 * stride);
    let last = PageId(beyond.0 - stride);
    // Sliding pages are the larger ones: the last id of a slab is none of them.
    let (full, sliding) = (PageClass::Full, PageClass::Sliding);
    let none = PageId(stride - 1);
    assert!(layout.pages_per_slab(sliding) < stride as usize);
    let no_page = |class: PageClass, page: PageId| {
        format!(
            "page {} is not one of the {class} pages that this model can have",
            page.0
        )
    };
    let row_bytes = |class| layout.page_bytes(class) / 256;
    for (class, page) in [
        (full, beyond),
        (full, PageId(u32::MAX)),
        (sliding, none),
        (PageClass::Drafter, PageId(0)),
    ] {
        let message = no_page(class, page);
        let exported = model.export_page(class, page, 1).map(drop);
        let data = PageData {
            rows: 1,
            bytes: vec![0; row_bytes(class)],
        };
        let imported = model.import_page(class, page, &data);
        let mut copy = |from, to| {
            let rows = 1;
            model.copy_pages(&[PageCopy {
                class,
                from,
                to,
                rows,
            }])
        };
        let copied = [copy(page, PageId(0)), copy(PageId(0), page)];
        for outcome in [exported, imported].into_iter().chain(copied) {
            assert_eq!(outcome.expect_err("no such page").to_string(), message);
        }
    }
    let error = model.export_page(full, last, 257).map(drop);
    let message = "257 rows of a full page, expected at most 256";
    assert_eq!(error.expect_err("too many rows").to_string(), message);
    let copy = PageCopy {
        class: full,
        from: PageId(0),
        to: PageId(1),
        rows: 257,
    };
    let error = model.copy_pages(&[copy]);
    assert_eq!(error.expect_err("too many rows").to_string(), message);
}
