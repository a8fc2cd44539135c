//! Two backends in step: equal ones do not differ, and of a wrong one the
//! operation is named that is wrong.

mod common;

use common::mutant::{Mutant, Mutation};
use model::paired::{Comparison, Difference, Limit};
use model::{
    Backend, DraftRequest, Forward, KvType, Model, Options, PageClass, Paired, Reference,
    SequencePages, Want, WindowConvention,
};
use testing::{EXACT, append, logits, open, pool_of, reference, same_bits, testdata};

/// Tokens of the oracle's vocabulary.
const TOKENS: [u32; 40] = [
    400, 17, 33, 250, 3, 99, 128, 7, 311, 42, 5, 61, 180, 200, 11, 399, 77, 1, 0, 25, 311, 9, 9, 9,
    54, 303, 222, 111, 8, 16, 32, 64, 128, 256, 81, 243, 36, 216, 125, 343,
];

/// Everything a model does, on the reference backend and on `other` in step.
fn compare<B: Backend>(other: B, limit: Limit, options: Options) -> Comparison {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let drafter = open(&testdata("oracle/dflash-nano-f32.gguf"));
    let pair = Paired::new(Reference::new(), other, limit);
    let mut model = Model::load(pair, &file, options).unwrap_or_else(|e| panic!("{e}"));
    model
        .attach_drafter(&drafter, WindowConvention::Below)
        .expect("a drafter that fits");
    let (mut pool, mut pages) = (pool_of(&model), SequencePages::new());
    for tokens in TOKENS.chunks(13) {
        append(&mut model, &mut pool, &mut pages, tokens);
    }
    let request = DraftRequest {
        seq: 0,
        anchor: 5,
        n_draft: 7,
    };
    model
        .draft(&[request], &[&pages], Want::Argmax)
        .expect("a draft");
    let page = pages.table(PageClass::Full)[0].expect("a page");
    let data = model
        .export_page(PageClass::Full, page, 40)
        .expect("an export");
    let other = pool.allocate(PageClass::Full).expect("a free page");
    model
        .import_page(PageClass::Full, other, &data)
        .expect("an import");
    let copied = model
        .export_page(PageClass::Full, other, 40)
        .expect("an export");
    assert_eq!(data, copied);
    model.backend_mut().take_found()
}

#[test]
fn equal_backends_do_not_differ() {
    for kv in [KvType::F16, KvType::F32] {
        let options = Options { kv, ..EXACT };
        let found = compare(Reference::new(), Limit::SAME_BITS, options);
        assert_eq!(found.first, None);
        assert!(
            found
                .worst
                .values()
                .all(|d| d.max_abs == 0.0 && d.relative_rms == 0.0)
        );
        let seen: Vec<&str> = found.worst.keys().copied().collect();
        let ops = [
            "add",
            "add_norm",
            "attend",
            "attend_block",
            "copy_columns",
            "embed",
            "export_page",
            "ffn_in",
            "head_norm",
            "head_norm_rope_store",
            "logits",
            "matmul",
            "mul_sigmoid",
            "qkv_gate",
            "rms_norm",
            "rope",
            "select",
            "store_kv",
        ];
        assert_eq!(seen, ops);
    }
}

#[test]
fn unmutated_mutant_does_not_differ() {
    let found = compare(Mutant::new(Mutation::None), Limit::SAME_BITS, EXACT);
    assert_eq!(found.first, None);
}

/// Where the first difference lies.
type Place = (
    &'static str,
    Option<(&'static str, usize)>,
    Option<(&'static str, usize)>,
);

fn place(difference: &Difference) -> Place {
    (difference.op, difference.after, difference.before)
}

#[test]
fn wrong_operation_is_named() {
    let gate: Place = (
        "mul_sigmoid",
        Some(("Kcur_rope", 0)),
        Some(("attn_gated", 0)),
    );
    let store = (
        "head_norm_rope_store",
        Some(("attn_gate", 0)),
        Some(("Qcur_rope", 0)),
    );
    let cases: [(Mutation, Place); 8] = [
        (
            Mutation::InputNormMissing,
            ("rms_norm", None, Some(("inp_embd", 0))),
        ),
        (Mutation::GateMissing, gate),
        (Mutation::GateIsSilu, gate),
        (Mutation::HeadNormMissing, store),
        (Mutation::ValuesTurn, store),
        (
            Mutation::AttentionScaleMissing,
            ("attend", Some(("Kcur_rope", 0)), Some(("attn_gated", 0))),
        ),
        (
            Mutation::UpAndGateSwapped,
            ("ffn_in", Some(("ffn_norm", 0)), Some(("ffn_out", 0))),
        ),
        (
            Mutation::HalvesAsNeighbours,
            ("rope", Some(("dflash_features", 0)), None),
        ),
    ];
    for (mutation, expected) in cases {
        let limit = Limit {
            max_abs: 1e-4,
            relative_rms: 1e-5,
        };
        let found = compare(Mutant::new(mutation), limit, EXACT);
        let first = found
            .first
            .unwrap_or_else(|| panic!("{mutation:?} is not seen"));
        let (op, after, before) = place(&first);
        assert_eq!(
            (op, after),
            (expected.0, expected.1),
            "{mutation:?}: {first}"
        );
        assert!(
            expected.2.is_none() || before == expected.2,
            "{mutation:?}: {first}"
        );
        assert!(first.max_abs > 1e-4, "{mutation:?}: {first}");
    }
}

#[test]
fn limit_lets_small_differences_pass() {
    let mutant = || Mutant::new(Mutation::RowsChangeSums);
    let strict = compare(mutant(), Limit::SAME_BITS, EXACT);
    assert_eq!(strict.first.map(|d| d.op), Some("qkv_gate"));
    let loose = Limit {
        max_abs: 1e-2,
        relative_rms: 1e-3,
    };
    let found = compare(mutant(), loose, EXACT);
    assert_eq!(found.first, None);
    assert!(found.worst["logits"].max_abs > 0.0);
}

#[test]
fn difference_says_what_and_where() {
    let difference = Difference {
        op: "matmul",
        call: 17,
        after: Some(("attn_gated", 2)),
        before: Some(("attn_out", 2)),
        max_abs: 0.25,
        relative_rms: 0.001,
    };
    assert_eq!(
        difference.to_string(),
        "matmul (call 17, after attn_gated of layer 2, before attn_out of layer 2): \
         max abs 2.50e-1, relative RMS 1.00e-3"
    );
}

#[test]
fn results_are_the_first_backends() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let right = logits(&mut reference(&file, EXACT), &TOKENS, 40);
    let wrong = Mutant::new(Mutation::GateMissing);
    let pair = Paired::new(Reference::new(), wrong, Limit::SAME_BITS);
    let mut model = Model::load(pair, &file, EXACT).unwrap_or_else(|e| panic!("{e}"));
    assert!(same_bits(&logits(&mut model, &TOKENS, 40), &right));
    assert!(model.backend_mut().found().first.is_some());
    let caps = model.caps();
    let single = reference(&file, EXACT).caps();
    assert_eq!(caps.device, format!("{0} against {0}", single.device));
    assert_eq!(caps.max_rows, single.max_rows);
}
