//! Every convention of the model, got wrong on purpose: the golden comparison
//! must notice. The comparison is one function for the right model and for
//! every wrong one.

mod common;

use common::mutant::{Mutant, Mutation};
use gguf::{Array, Gguf, Value};
use model::{
    Config, DraftRequest, Forward, LayerConfig, Model, PageClass, Pairing, Rope, RopeScaling,
    SequencePages, Want, WindowConvention,
};
use testing::{
    DRAFT_LIMITS, EXACT, Golden, Parts, TEXT_LIMITS, append, changed, distance, full, logits, open,
    pool_of, testdata,
};

/// A mistake moves the logits at least this many limits away.
const CLEARLY: f64 = 20.0;

/// A wrong (or right) model of `golden-text-nano-f32.npz`.
struct Case {
    file: Gguf,
    config: Config,
    mutation: Mutation,
}

impl Case {
    fn right() -> Case {
        let file = open(&testdata("oracle/text-nano-f32.gguf"));
        let config = Config::from_metadata(file.metadata()).expect("a valid file");
        Case {
            file,
            config,
            mutation: Mutation::None,
        }
    }

    /// Loads the case and compares it with the golden values: relative RMS and
    /// the verdict of the limits.
    fn compare(&self) -> (f64, Result<(), String>) {
        let be = Mutant::new(self.mutation);
        let model = Model::load_as(be, &self.file, self.config.clone(), EXACT);
        let mut model = model.unwrap_or_else(|e| panic!("{e}"));
        let mut golden = Golden::open("oracle/golden-text-nano-f32.npz");
        let tokens = golden.tokens("tokens_long");
        let (_, expected) = golden.floats("logits_long");
        let found = logits(&mut model, &tokens, 64).concat();
        let verdict = TEXT_LIMITS.check("long", &found, &expected);
        (distance(&found, &expected).1, verdict)
    }
}

/// Asserts that the case is outside of the limits, clearly.
#[track_caller]
fn detected(what: &str, case: &Case) {
    let (relative_rms, verdict) = case.compare();
    let least = CLEARLY * TEXT_LIMITS.relative_rms;
    assert!(
        verdict.is_err() && (relative_rms.is_nan() || relative_rms > least),
        "{what}: relative RMS {relative_rms:.2e}"
    );
}

fn wrong_config(what: &str, change: impl FnOnce(&mut Config)) {
    let mut case = Case::right();
    change(&mut case.config);
    assert_ne!(
        case.config,
        Case::right().config,
        "{what}: nothing was changed"
    );
    detected(what, &case);
}

fn wrong_file(what: &str, change: impl FnOnce(&mut Parts)) {
    let mut case = Case::right();
    case.file = changed(&case.file, change);
    detected(what, &case);
}

/// The layers with another choice of which slide.
fn layers(slides: impl Fn(usize) -> bool, window: u32) -> Vec<LayerConfig> {
    let mut counts = [0; 2];
    let layer = |il: usize| {
        let class = match slides(il) {
            true => PageClass::Sliding,
            false => PageClass::Full,
        };
        counts[class as usize] += 1;
        LayerConfig {
            class,
            index: counts[class as usize] - 1,
            window: slides(il).then_some(window),
            rope: slides(il),
        }
    };
    (0..8).map(layer).collect()
}

#[test]
fn right_passes() {
    let (_, verdict) = Case::right().compare();
    assert_eq!(verdict, Ok(()));
    // The tools of the wrong cases change nothing by themselves.
    let mut case = Case::right();
    case.file = changed(&case.file, |_| {});
    case.config.layers = layers(|il| il % 4 != 3, 24);
    assert_eq!(case.config, Case::right().config);
    assert_eq!(case.compare().1, Ok(()));
}

#[test]
fn rope() {
    wrong_config("pairs are halves", |c| c.rope.pairing = Pairing::Halves);
    wrong_config("base 1 % off", |c| {
        c.rope = Rope::new(Pairing::Neighbours, 32, 10_100.0, RopeScaling::None);
    });
    wrong_config("full layers turn", |c| {
        c.layers.iter_mut().for_each(|l| l.rope = true);
    });
    wrong_config("no layer turns", |c| {
        c.layers.iter_mut().for_each(|l| l.rope = false);
    });
    let mut case = Case::right();
    case.mutation = Mutation::ValuesTurn;
    detected("values turn", &case);
}

#[test]
fn layer_pattern() {
    wrong_config("pattern shifted by one", |c| {
        c.layers = layers(|il| il % 4 != 0, 24)
    });
    wrong_config("pattern from the other end", |c| {
        c.layers = layers(|il| il % 4 != 2, 24)
    });
    wrong_config("all layers slide", |c| c.layers = layers(|_| true, 24));
    for window in [23, 25] {
        wrong_config("window off by one", |c| {
            c.layers = layers(|il| il % 4 != 3, window)
        });
    }
}

#[test]
fn norms() {
    for eps in [1e-5, 1e-6] {
        wrong_config("epsilon of the post norms", |c| c.post_norm_eps = eps);
    }
    wrong_config("epsilon of the other norms", |c| c.norm_eps = 1e-6);
    for mutation in [
        Mutation::InputNormMissing,
        Mutation::HeadNormMissing,
        Mutation::NormOfSum,
    ] {
        let mut case = Case::right();
        case.mutation = mutation;
        detected(&format!("{mutation:?}"), &case);
    }
}

#[test]
fn folded_one() {
    let norms = [
        "attn_norm",
        "post_attention_norm",
        "ffn_norm",
        "post_ffw_norm",
    ];
    for norm in norms {
        let suffix = format!(".{norm}.weight");
        wrong_file(&format!("{norm}: +1 twice"), |p| {
            p.map_all(&suffix, |w| w + 1.0)
        });
        wrong_file(&format!("{norm}: +1 missing"), |p| {
            p.map_all(&suffix, |w| w - 1.0)
        });
    }
    wrong_file("output_norm: +1", |p| {
        p.map_all("output_norm.weight", |w| w + 1.0)
    });
    wrong_file("post_attention_norm and ffn_norm swapped", |p| {
        for il in 0..8 {
            let names = ["post_attention_norm", "ffn_norm"];
            let [a, b] = names.map(|n| format!("blk.{il}.{n}.weight"));
            let (from_a, from_b) = (p.tensor(&a).data.clone(), p.tensor(&b).data.clone());
            p.tensor(&a).data = from_b;
            p.tensor(&b).data = from_a;
        }
    });
}

#[test]
fn attention() {
    wrong_file("query factor missing", |p| {
        p.map_all("attn_q_norm.weight", |_| 1.0)
    });
    wrong_file("query factor on keys too", |p| {
        p.map_all("attn_k_norm.weight", |_| 3.87)
    });
    let mut case = Case::right();
    case.mutation = Mutation::AttentionScaleMissing;
    detected("scores not scaled", &case);
}

#[test]
fn gate_and_feed_forward() {
    for mutation in [
        Mutation::GateMissing,
        Mutation::GateBeforeAttention,
        Mutation::GateIsSilu,
        Mutation::UpAndGateSwapped,
    ] {
        let mut case = Case::right();
        case.mutation = mutation;
        detected(&format!("{mutation:?}"), &case);
    }
}

/// Needs a model whose attention output is as wide as the residual stream.
#[test]
fn gate_after_the_output_projection() {
    let file = open(&testdata("oracle/text-kq-q4km.gguf"));
    let mut golden = Golden::open("oracle/golden-text-kq-q4km.npz");
    let tokens = golden.tokens("tokens_short");
    let (_, expected) = golden.floats("logits_short");
    let compare = |mutation| {
        let model = Model::load(Mutant::new(mutation), &file, EXACT);
        let mut model = model.unwrap_or_else(|e| panic!("{e}"));
        distance(&logits(&mut model, &tokens, 64).concat(), &expected).1
    };
    assert!(compare(Mutation::None) <= TEXT_LIMITS.relative_rms);
    assert!(compare(Mutation::GateAfterOutput) > CLEARLY * TEXT_LIMITS.relative_rms);
}

#[test]
fn logits_scale_and_cap() {
    let mut case = Case::right();
    case.mutation = Mutation::ScaleAfterCap;
    detected("scale after cap", &case);
    wrong_config("cap missing", |c| c.logit_cap = None);
    wrong_config("cap of 30", |c| c.logit_cap = Some(30.0));
    wrong_config("scale missing", |c| c.logit_scale = 1.0);
}

/// A wrong (or right) drafter of `golden-draft-nano.npz`: relative RMS of the
/// block's logits over the long context.
fn draft_distance(
    mutation: Mutation,
    convention: WindowConvention,
    golden_key: &str,
    change: impl FnOnce(&mut Parts),
) -> f64 {
    let target = open(&testdata("oracle/text-nano-f32.gguf"));
    let drafter = open(&testdata("oracle/dflash-nano-f32.gguf"));
    let drafter = changed(&drafter, change);
    let mut golden = Golden::open("oracle/golden-draft-nano.npz");
    let (shape, expected) = golden.floats(golden_key);
    let model = Model::load(Mutant::new(mutation), &target, EXACT);
    let mut model = model.unwrap_or_else(|e| panic!("{e}"));
    let config = model
        .attach_drafter(&drafter, convention)
        .expect("a drafter that fits");
    let (mut pool, mut pages) = (pool_of(&model), SequencePages::new());
    append(
        &mut model,
        &mut pool,
        &mut pages,
        &golden.tokens("context_tokens"),
    );
    let request = DraftRequest {
        seq: 0,
        anchor: golden.number("anchor") as u32,
        n_draft: config.block_size - 1,
    };
    let drafts = model
        .draft(&[request], &[&pages], Want::Full)
        .expect("a draft");
    let found: Vec<f32> = drafts.into_iter().flatten().flat_map(full).collect();
    distance(&found, &expected[shape[1] as usize..]).1
}

const BELOW: (WindowConvention, &str) = (WindowConvention::Below, "logits_long_llamacpp_window");
const WITHIN: (WindowConvention, &str) = (WindowConvention::Within, "logits_long");

#[test]
fn drafter_right_passes() {
    for (convention, key) in [BELOW, WITHIN] {
        let found = draft_distance(Mutation::None, convention, key, |_| {});
        assert!(found <= DRAFT_LIMITS.relative_rms, "{key}: {found:.2e}");
    }
}

#[test]
fn drafter_graph() {
    for mutation in [
        Mutation::HalvesAsNeighbours,
        Mutation::ContextNormed,
        Mutation::BlockInputNormed,
        Mutation::BlockRowsShifted,
        Mutation::BlockWindowOff,
    ] {
        let found = draft_distance(mutation, BELOW.0, BELOW.1, |_| {});
        assert!(
            found > CLEARLY * DRAFT_LIMITS.relative_rms,
            "{mutation:?}: {found:.2e}"
        );
    }
}

#[test]
fn drafter_windows() {
    for (convention, key) in [(BELOW.0, WITHIN.1), (WITHIN.0, BELOW.1)] {
        let found = draft_distance(Mutation::None, convention, key, |_| {});
        assert!(
            found > CLEARLY * DRAFT_LIMITS.relative_rms,
            "{key}: {found:.2e}"
        );
    }
}

#[test]
fn drafter_file() {
    let far = |what: &str, change: &dyn Fn(&mut Parts)| {
        let found = draft_distance(Mutation::None, BELOW.0, BELOW.1, change);
        assert!(
            found > CLEARLY * DRAFT_LIMITS.relative_rms,
            "{what}: {found:.2e}"
        );
    };
    for by in [-1, 1] {
        far("target layers off by one", &|p| {
            let layers = [1, 3, 6].map(|l| l + by).to_vec();
            let layers = Value::Array(Array::I32(layers));
            p.metadata.insert("dflash.target_layers", layers);
        });
    }
    far("norm weights of heads ignored", &|p| {
        p.map_all("attn_k_norm.weight", |_| 1.0)
    });
    far("the target's scale", &|p| {
        p.metadata.insert("dflash.logit_scale", Value::F32(0.196));
    });
    far("the target's cap", &|p| {
        p.metadata
            .insert("dflash.final_logit_softcapping", Value::F32(20.0));
    });
}
