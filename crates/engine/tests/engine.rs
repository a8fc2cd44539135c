//! The loop from tokens to tokens, on the bundled model.

use engine::{
    Ending, Engine, Error, Generated, Generation, Receive, Request, SampleError, Sampler,
    SamplerSettings, Sequence,
};
use gguf::Gguf;
use model::{
    Constraint, Guide, KvType, Model, Options, Reference, RowOutput, TokenMask, Verdict, Want,
};
use std::ops::ControlFlow;
use std::path::Path;

const PROMPT: [u32; 6] = [3968, 3990, 1643, 3991, 469, 451];

fn engine_of(n_ctx: usize, kv_bytes: u64) -> Engine {
    let path = "../../models/nano-glimmer-q8_0.gguf";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let file = Gguf::open(&path).unwrap_or_else(|e| panic!("{e}"));
    let options = Options {
        kv: KvType::F16,
        kv_bytes,
    };
    let model = Model::load(Reference::new(), &file, options).unwrap_or_else(|e| panic!("{e}"));
    Engine::new(Box::new(model), Some(n_ctx)).unwrap_or_else(|e| panic!("{e}"))
}

fn engine() -> Engine {
    engine_of(2048, 256 << 20)
}

/// Stops at one token, and may constrain each place.
#[derive(Clone, Default)]
struct Script {
    stop: Option<u32>,
    constraints: Vec<Constraint>,
    place: usize,
}

impl Guide for Script {
    fn constraint(&mut self) -> Constraint {
        let constraint = self.constraints.get(self.place);
        constraint.cloned().unwrap_or(Constraint::Free)
    }

    fn accept(&mut self, token: u32) -> Verdict {
        self.place += 1;
        match Some(token) == self.stop {
            true => Verdict::Stop,
            false => Verdict::Continue,
        }
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

fn greedy(max_tokens: usize) -> Request {
    Request {
        sampling: SamplerSettings {
            temperature: 0.0,
            ..SamplerSettings::default()
        },
        max_tokens: Some(max_tokens),
        logprobs: None,
    }
}

fn sampled(seed: u64, max_tokens: usize) -> Request {
    Request {
        sampling: SamplerSettings {
            top_k: 64,
            top_p: 0.95,
            seed,
            ..SamplerSettings::default()
        },
        ..greedy(max_tokens)
    }
}

/// A sequence of `tokens` and what `request` makes of it.
fn answer(
    engine: &mut Engine,
    tokens: &[u32],
    request: &Request,
    mut guide: Script,
) -> (Vec<u32>, Generation) {
    let mut sequence = Sequence::new();
    sequence.push(tokens);
    let mut found = Vec::new();
    let mut receive = |g: &Generated| {
        found.push(g.token);
        ControlFlow::Continue(())
    };
    let done = engine
        .generate(&mut sequence, request, &mut guide, &mut receive)
        .unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(sequence.tokens()[tokens.len()..], found);
    engine.free(sequence);
    assert_eq!(engine.pool().n_pages_used(), 0, "every page returns");
    (found, done)
}

#[test]
fn a_seeded_answer_is_the_same_whole_continued_and_after_a_roll_back() {
    let mut engine = engine();
    let (whole, done) = answer(&mut engine, &PROMPT, &sampled(7, 40), Script::default());
    assert_eq!(done.ending, Ending::MaxTokens);
    assert_eq!((done.n_prefill, done.n_generated), (PROMPT.len(), 40));

    // In two calls: the draw belongs to the position, not to the call.
    let mut sequence = Sequence::new();
    sequence.push(&PROMPT);
    let mut ignore = |_: &Generated| ControlFlow::Continue(());
    for n in [13, 27] {
        let request = sampled(7, n);
        let mut guide = Script::default();
        engine
            .generate(&mut sequence, &request, &mut guide, &mut ignore)
            .expect("an answer");
    }
    assert_eq!(sequence.tokens()[PROMPT.len()..], whole);

    // Regenerated: rolled back to the prompt, which is computed already.
    engine
        .roll_back(&mut sequence, PROMPT.len())
        .expect("a roll-back");
    let request = sampled(7, 40);
    let again = engine.generate(&mut sequence, &request, &mut Script::default(), &mut ignore);
    assert_eq!(again.expect("an answer").n_prefill, 0);
    assert_eq!(sequence.tokens()[PROMPT.len()..], whole);

    // On a branch: the sequence it came from is untouched.
    engine
        .roll_back(&mut sequence, PROMPT.len() + 20)
        .expect("a roll-back");
    let mut branch = engine.branch(&sequence);
    let request = sampled(7, 20);
    engine
        .generate(&mut branch, &request, &mut Script::default(), &mut ignore)
        .expect("an answer");
    assert_eq!(branch.tokens()[PROMPT.len()..], whole);
    assert_eq!(sequence.tokens()[PROMPT.len()..], whole[..20]);
    engine.free(branch);
    engine.free(sequence);
    assert_eq!(engine.pool().n_pages_used(), 0);

    let (other, _) = answer(&mut engine, &PROMPT, &sampled(8, 40), Script::default());
    assert_ne!(other, whole, "another seed, another answer");
}

#[test]
fn what_is_read_back_does_not_change_the_answer() {
    let mut engine = engine();
    let (from_top, _) = answer(&mut engine, &PROMPT, &sampled(3, 30), Script::default());
    // Log-probabilities need the whole row.
    let request = Request {
        logprobs: Some(2),
        ..sampled(3, 30)
    };
    let (from_row, _) = answer(&mut engine, &PROMPT, &request, Script::default());
    assert_eq!(from_top, from_row);
}

#[test]
fn the_guide_stops_forces_and_masks() {
    let mut engine = engine();
    let (free, _) = answer(&mut engine, &PROMPT, &greedy(12), Script::default());
    let stop = Script {
        stop: Some(free[4]),
        ..Script::default()
    };
    let first = free
        .iter()
        .position(|&t| t == free[4])
        .expect("it is there");
    let (stopped, done) = answer(&mut engine, &PROMPT, &greedy(12), stop);
    assert_eq!(done.ending, Ending::Guide);
    assert_eq!(stopped, free[..=first], "the stopping token is the last");

    let mut mask = TokenMask::none(4096);
    mask.allow(77);
    mask.allow(78);
    let guide = Script {
        constraints: vec![Constraint::Forced(99), Constraint::Masked(mask)],
        ..Script::default()
    };
    let (found, _) = answer(&mut engine, &PROMPT, &greedy(3), guide);
    assert_eq!(found[0], 99);
    assert!([77, 78].contains(&found[1]), "{found:?}");
    let mut prompt = PROMPT.to_vec();
    prompt.extend_from_slice(&found[..2]);
    let (next, _) = answer(&mut engine, &prompt, &greedy(1), Script::default());
    assert_eq!(found[2], next[0], "a forced token is a row as any other");
}

#[test]
fn log_probabilities_come_with_alternatives() {
    let mut engine = engine();
    let request = Request {
        logprobs: Some(3),
        ..greedy(2)
    };
    let mut sequence = Sequence::new();
    sequence.push(&PROMPT);
    let mut all = Vec::new();
    let mut receive = |g: &Generated| {
        all.push(g.clone());
        ControlFlow::Continue(())
    };
    engine
        .generate(
            &mut sequence,
            &request,
            &mut Script::default(),
            &mut receive,
        )
        .expect("an answer");
    engine.free(sequence);
    assert_eq!(all.len(), 2);
    for generated in all {
        assert_eq!(generated.top.len(), 3);
        assert_eq!(generated.top[0].0, generated.token, "greedy");
        assert_eq!(generated.logprob, Some(generated.top[0].1));
        assert!(generated.top[0].1 > generated.top[1].1 && generated.top[0].1 <= 0.0);
    }
}

/// Counts progress and breaks off at a token.
struct Watcher {
    seen: Vec<(usize, usize)>,
    left: usize,
}

impl Receive for Watcher {
    fn prefilled(&mut self, done: usize, total: usize) {
        self.seen.push((done, total));
    }

    fn token(&mut self, _generated: &Generated) -> ControlFlow<()> {
        self.left -= 1;
        match self.left {
            0 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }
}

#[test]
fn a_long_prompt_reports_its_passes_and_a_receiver_can_break_off() {
    let mut engine = engine();
    let prompt: Vec<u32> = (0..600).map(|i| (i * 37 + 11) % 3900).collect();
    let mut sequence = Sequence::new();
    sequence.push(&prompt);
    let mut watcher = Watcher {
        seen: Vec::new(),
        left: 3,
    };
    let done = engine
        .generate(
            &mut sequence,
            &greedy(50),
            &mut Script::default(),
            &mut watcher,
        )
        .expect("an answer");
    assert_eq!(watcher.seen, [(512, 600), (600, 600)]);
    assert_eq!((done.ending, done.n_generated), (Ending::Cancelled, 3));
    // The last token is known, but not computed.
    assert_eq!((sequence.len(), sequence.n_computed()), (603, 602));
    engine.free(sequence);
}

#[test]
fn the_context_ends_an_answer_and_refuses_a_prompt() {
    let mut engine = engine_of(10, 256 << 20);
    let request = Request {
        max_tokens: None,
        ..greedy(0)
    };
    let (found, done) = answer(&mut engine, &PROMPT, &request, Script::default());
    assert_eq!((found.len(), done.ending), (4, Ending::Context));

    let mut sequence = Sequence::new();
    let mut ignore = |_: &Generated| ControlFlow::Continue(());
    let mut refused = |engine: &mut Engine, sequence: &mut Sequence, request: &Request| {
        let outcome = engine.generate(sequence, request, &mut Script::default(), &mut ignore);
        outcome.expect_err("a refusal").to_string()
    };
    assert_eq!(
        refused(&mut engine, &mut sequence, &greedy(1)),
        "the prompt has no tokens; at least one is needed to continue from"
    );
    sequence.push(&[1; 10]);
    assert_eq!(
        refused(&mut engine, &mut sequence, &greedy(1)),
        "the prompt has 10 tokens, but the context holds 10 and one place must be left for the \
         answer"
    );
    engine.roll_back(&mut sequence, 0).expect("a roll-back");
    sequence.push(&[1, 4096]);
    assert_eq!(
        refused(&mut engine, &mut sequence, &greedy(1)),
        "token 4096 is not in the vocabulary of 4096"
    );
    assert_eq!(
        engine.pool().n_pages_used(),
        0,
        "a refused pass keeps no page"
    );
    engine.roll_back(&mut sequence, 1).expect("a roll-back");
    let wrong = Request {
        sampling: SamplerSettings {
            top_p: 1.5,
            ..SamplerSettings::default()
        },
        ..greedy(1)
    };
    assert_eq!(
        refused(&mut engine, &mut sequence, &wrong),
        "sampler setting top_p: found 1.5, allowed is 0 to 1"
    );
    engine.free(sequence);
}

#[test]
fn a_context_outside_the_model_is_refused() {
    let path = "../../models/nano-glimmer-q8_0.gguf";
    let file = Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("the model");
    for n_ctx in [0, 1, 2049] {
        let model = Model::load(Reference::new(), &file, Options::default()).expect("a model");
        let error = Engine::new(Box::new(model), Some(n_ctx))
            .err()
            .expect("a refusal");
        assert_eq!(
            error.to_string(),
            format!("a context of {n_ctx} tokens is outside what this model can hold: 2 to 2048")
        );
    }
}

#[test]
fn exhausted_pages_are_a_value_and_the_engine_lives() {
    // nano-glimmer's slab holds 4 sliding pages; two slabs serve one short sequence.
    let slab_bytes = engine().pool().layout().slab_bytes() as u64;
    let mut engine = engine_of(2048, 2 * slab_bytes);
    let prompt: Vec<u32> = (0..300).map(|i| (i * 31 + 5) % 3900).collect();
    let mut first = Sequence::new();
    first.push(&PROMPT);
    let nothing = |_| None::<Want>;
    let ignore = |_, _: RowOutput| ();
    engine
        .compute(&mut first, nothing, ignore)
        .expect("one short sequence");
    let mut others = Vec::new();
    let error = loop {
        let mut sequence = Sequence::new();
        sequence.push(&prompt);
        match engine.compute(&mut sequence, nothing, ignore) {
            Ok(()) => others.push(sequence),
            Err(error) => break (error, others.push(sequence)).0,
        }
    };
    let Error::Model(model::Error::PagesExhausted { total: 2, .. }) = error else {
        panic!("{error}");
    };
    let request = greedy(5);
    let mut receive = |_: &Generated| ControlFlow::Continue(());
    engine
        .generate(&mut first, &request, &mut Script::default(), &mut receive)
        .expect("the first sequence goes on");
    others.into_iter().for_each(|s| engine.free(s));
    engine.free(first);
    assert_eq!(engine.pool().n_pages_used(), 0);
    let (alone, _) = answer(&mut engine, &PROMPT, &request, Script::default());
    assert_eq!(alone.len(), 5);
}

#[test]
fn an_empty_mask_is_an_error_with_a_name() {
    let mut engine = engine();
    let mut sequence = Sequence::new();
    sequence.push(&PROMPT);
    let mut guide = Script {
        constraints: vec![Constraint::Masked(TokenMask::none(4096))],
        ..Script::default()
    };
    let mut receive = |_: &Generated| ControlFlow::Continue(());
    let outcome = engine.generate(&mut sequence, &greedy(1), &mut guide, &mut receive);
    let Err(Error::Sample(SampleError::EmptyMask { n_vocab: 4096 })) = outcome else {
        panic!("{outcome:?}");
    };
    engine.free(sequence);
}

#[test]
fn the_sampler_sees_the_position_and_the_whole_history() {
    let mut engine = engine();
    let n_vocab = engine.model().config().n_vocab;
    let mut sequence = Sequence::new();
    sequence.push(&PROMPT);
    let mut logits = Vec::new();
    let last = PROMPT.len() - 1;
    let want = |pos| (pos == last).then_some(Want::Full);
    let keep = |_, row: RowOutput| {
        if let RowOutput::Full(row) = row {
            logits = row;
        }
    };
    engine.compute(&mut sequence, want, keep).expect("a pass");
    engine.free(sequence);
    // Bias towards the prompt's own tokens, so that a penalty on them decides.
    let settings = |seed| SamplerSettings {
        repeat_penalty: 3.0,
        repeat_last_n: -1,
        logit_bias: PROMPT.iter().map(|&token| (token, 25.0)).collect(),
        seed,
        ..SamplerSettings::default()
    };
    let (mut n_elsewhere, mut n_forgetful) = (0, 0);
    for seed in 0..40 {
        let mut sampler = Sampler::new(settings(seed), n_vocab).expect("a sampler");
        let position = PROMPT.len() as u64;
        let mut sample = |position, history: &[u32]| {
            let sampled = sampler.sample(&logits, position, history, None);
            sampled.expect("a token").token
        };
        let expected = sample(position, &PROMPT);
        n_elsewhere += usize::from(sample(position + 1, &PROMPT) != expected);
        n_forgetful += usize::from(sample(position, &[]) != expected);
        let request = Request {
            sampling: settings(seed),
            max_tokens: Some(1),
            logprobs: None,
        };
        let (found, _) = answer(&mut engine, &PROMPT, &request, Script::default());
        assert_eq!(found, [expected], "seed {seed}");
    }
    assert!(
        n_elsewhere > 0 && n_forgetful > 0,
        "{n_elsewhere}, {n_forgetful}: a test of nothing"
    );
}
