//! The loop from tokens to tokens, on the bundled model.

mod common;

use common::{Script, nano_file};
use engine::{
    Ending, Engine, Error, Generated, Generation, Receive, Request, SampleError, Sampler,
    SamplerSettings, Sequence,
};
use gguf::Gguf;
use model::backend::PageData;
use model::kv::PageCopy;
use model::{
    Batch, Capacity, Caps, Config, Constraint, DeviceError, DraftRequest, DrafterConfig, Forward,
    KvType, Model, Options, Outputs, PageClass, PageId, Reference, RowOutput, Tables, TokenMask,
    Want, WindowConvention,
};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

const PROMPT: [u32; 6] = [3968, 3990, 1643, 3991, 469, 451];

fn model_of(kv_bytes: u64) -> Model<Reference> {
    let options = Options {
        kv: KvType::F16,
        kv_bytes,
    };
    testing::reference(&nano_file(), options)
}

fn engine_of(n_ctx: usize, kv_bytes: u64) -> Engine {
    let model = Box::new(model_of(kv_bytes));
    Engine::new(model, Some(n_ctx)).unwrap_or_else(|e| panic!("{e}"))
}

fn engine() -> Engine {
    engine_of(2048, 256 << 20)
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
    let file = nano_file();
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

/// What a model does wrongly next.
#[derive(Default)]
struct Faults {
    /// The copies of pages fail.
    copies: bool,
    /// The pass computes, then the device is gone.
    pass: bool,
    /// The pass computes, and the output of this wanted row is not finite.
    non_finite: Option<usize>,
}

/// A model that fails on order.
struct Faulty {
    model: Model<Reference>,
    faults: Arc<Mutex<Faults>>,
}

impl Forward for Faulty {
    fn config(&self) -> &Config {
        self.model.config()
    }

    fn caps(&self) -> Caps {
        self.model.caps()
    }

    fn capacity(&self) -> Capacity {
        self.model.capacity()
    }

    fn pass(
        &mut self,
        batch: &Batch,
        tables: &Tables<'_>,
        want: &[Want],
    ) -> Result<Outputs, model::Error> {
        let mut outputs = self.model.pass(batch, tables, want)?;
        let mut faults = self.faults.lock().expect("no panic");
        if std::mem::take(&mut faults.pass) {
            return Err(DeviceError::Lost("pass".into()).into());
        }
        if let Some(row) = faults.non_finite.take() {
            outputs[row] = RowOutput::NonFinite { token: 9 };
        }
        Ok(outputs)
    }

    fn attach_drafter(
        &mut self,
        file: &Gguf,
        convention: WindowConvention,
    ) -> Result<DrafterConfig, model::Error> {
        self.model.attach_drafter(file, convention)
    }

    fn draft(
        &mut self,
        requests: &[DraftRequest],
        tables: &Tables<'_>,
        want: Want,
    ) -> Result<Vec<Outputs>, model::Error> {
        self.model.draft(requests, tables, want)
    }

    fn export_page(
        &mut self,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, model::Error> {
        self.model.export_page(class, page, rows)
    }

    fn import_page(
        &mut self,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), model::Error> {
        self.model.import_page(class, page, data)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), model::Error> {
        let mut faults = self.faults.lock().expect("no panic");
        if !copies.is_empty() && std::mem::take(&mut faults.copies) {
            return Err(DeviceError::Lost("copy".into()).into());
        }
        self.model.copy_pages(copies)
    }
}

fn long_prompt(n_tokens: u32) -> Vec<u32> {
    (0..n_tokens).map(|i| (i * 37 + 11) % 3900).collect()
}

/// The greedy continuation of `sequence` by `n` tokens.
fn continued(engine: &mut Engine, sequence: &mut Sequence, n: usize) -> Result<Vec<u32>, Error> {
    let len = sequence.len();
    let mut receive = |_: &Generated| ControlFlow::Continue(());
    engine.generate(sequence, &greedy(n), &mut Script::default(), &mut receive)?;
    Ok(sequence.tokens()[len..].to_vec())
}

/// Whatever fails in a pass: it is as if it had not been asked for.
#[test]
fn a_failed_pass_installs_nothing() {
    type Order = fn(&mut Faults);
    let orders: [(Order, &str); 3] = [
        (|f| f.copies = true, "the device failed: copy"),
        (|f| f.pass = true, "the device failed: pass"),
        (
            |f| f.non_finite = Some(0),
            "the logits after position 299 are not finite (first at token 9): the file is \
             damaged, or the prompt drives the model out of its range",
        ),
    ];
    let faults = Arc::new(Mutex::new(Faults::default()));
    let faulty = Faulty {
        model: model_of(256 << 20),
        faults: Arc::clone(&faults),
    };
    let mut engine = Engine::new(Box::new(faulty), Some(2048)).expect("an engine");
    let prompt = long_prompt(300);
    let (expected, _) = answer(&mut engine, &prompt, &greedy(6), Script::default());
    for (order, message) in orders {
        let mut first = Sequence::new();
        first.push(&prompt[..290]);
        let nothing = |_| None::<Want>;
        engine
            .compute(&mut first, nothing, |_, _| ())
            .expect("a prefill");
        let mut branch = engine.branch(&first);
        first.push(&prompt[290..]);
        branch.push(&prompt[290..]);
        let n_pages = engine.pool().n_pages_used();
        // The branch and what it shares its pages with, in both orders.
        for sequence in [&mut branch, &mut first] {
            order(&mut faults.lock().expect("no panic"));
            let error = continued(&mut engine, sequence, 6).expect_err("an ordered fault");
            assert_eq!(error.to_string(), message);
            assert_eq!((sequence.len(), sequence.n_computed()), (300, 290));
            assert_eq!(engine.pool().n_pages_used(), n_pages, "{message}");
        }
        for mut sequence in [first, branch] {
            let found = continued(&mut engine, &mut sequence, 6).expect("an answer");
            assert_eq!(found, expected, "after: {message}");
            engine.free(sequence);
        }
        assert_eq!(engine.pool().n_pages_used(), 0);
    }
}

#[test]
fn rows_that_are_not_finite_reach_nobody() {
    let faults = Arc::new(Mutex::new(Faults::default()));
    let faulty = Faulty {
        model: model_of(256 << 20),
        faults: Arc::clone(&faults),
    };
    let mut engine = Engine::new(Box::new(faulty), Some(2048)).expect("an engine");
    let mut sequence = Sequence::new();
    sequence.push(&long_prompt(20));
    let every_second = |pos: usize| (pos % 2 == 1).then_some(Want::Argmax);
    let mut seen = Vec::new();
    faults.lock().expect("no panic").non_finite = Some(4);
    let error = engine.compute(&mut sequence, every_second, |pos, _| seen.push(pos));
    let Err(Error::NonFiniteLogits {
        position: 9,
        token: 9,
    }) = error
    else {
        panic!("{error:?}");
    };
    assert_eq!(seen, [0; 0]);
    assert_eq!(
        (sequence.n_computed(), engine.pool().n_pages_used()),
        (0, 0)
    );
    engine
        .compute(&mut sequence, every_second, |pos, _| seen.push(pos))
        .expect("finite rows");
    assert_eq!(seen, [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]);
    engine.free(sequence);
}

/// At every place of a page and of the window: a sequence goes on whose newest
/// token is computed already, and one that was rolled back to such a token.
#[test]
fn a_computed_sequence_goes_on_at_every_length() {
    let mut engine = engine();
    let window = engine.pool().layout().classes[PageClass::Sliding as usize].window;
    let window = window.expect("sliding layers") as usize;
    // Around the row from which on the window's first key starts a page.
    let released = 256 + window - 1;
    let prompt = long_prompt(released as u32 + 12);
    let base_len = released - 8;
    let mut base = Sequence::new();
    base.push(&prompt);
    let mut expected = Vec::new();
    let argmax = |pos| (pos + 1 >= base_len).then_some(Want::Argmax);
    engine
        .compute(&mut base, argmax, |_, row| match row {
            RowOutput::Argmax { token, .. } => expected.push(token),
            other => panic!("{other:?}"),
        })
        .expect("a prefill");
    engine.free(base);
    let nothing = |_| None::<Want>;
    let mut base = Sequence::new();
    base.push(&prompt[..base_len]);
    engine
        .compute(&mut base, nothing, |_, _| ())
        .expect("a prefill");
    let mut n_refused = 0;
    for (len, &expected) in (base_len..).zip(&expected).take(17) {
        for rolled_back in [0, 3] {
            let mut sequence = engine.branch(&base);
            sequence.push(&prompt[base_len..len + rolled_back]);
            engine
                .compute(&mut sequence, nothing, |_, _| ())
                .expect("rows");
            if let Err(error) = engine.roll_back(&mut sequence, len) {
                let error = error.to_string();
                assert!(error.starts_with("cannot roll back to"), "{error}");
                n_refused += 1;
            } else {
                let found = continued(&mut engine, &mut sequence, 1);
                let found = found.unwrap_or_else(|e| panic!("{len} rows: {e}"));
                assert_eq!(found, [expected], "{len} rows, {rolled_back} more before");
            }
            engine.free(sequence);
        }
    }
    assert_eq!(n_refused, 3, "where the three rows released a page");
    engine.free(base);
    assert_eq!(engine.pool().n_pages_used(), 0);
}

#[test]
fn a_forced_token_must_be_in_the_vocabulary() {
    let mut engine = engine();
    let mut sequence = Sequence::new();
    sequence.push(&PROMPT);
    for request in [
        greedy(2),
        Request {
            logprobs: Some(1),
            ..greedy(2)
        },
    ] {
        for token in [4096, u32::MAX] {
            let mut guide = Script {
                constraints: vec![Constraint::Forced(token)],
                ..Script::default()
            };
            let mut receive = |_: &Generated| ControlFlow::Continue(());
            let error = engine.generate(&mut sequence, &request, &mut guide, &mut receive);
            assert_eq!(
                error.expect_err("no such token").to_string(),
                format!("token {token} is not in the vocabulary of 4096")
            );
            assert_eq!(sequence.tokens(), PROMPT);
        }
    }
    engine.free(sequence);
}

/// Of a sequence whose newest row was to be computed again, in vain, the row
/// before may lack its keys: then that is said.
#[test]
fn a_row_that_cannot_be_computed_again_is_refused() {
    let faults = Arc::new(Mutex::new(Faults::default()));
    let faulty = Faulty {
        model: model_of(256 << 20),
        faults: Arc::clone(&faults),
    };
    let mut engine = Engine::new(Box::new(faulty), Some(2048)).expect("an engine");
    let window = engine.pool().layout().classes[PageClass::Sliding as usize].window;
    let len = 256 + window.expect("sliding layers");
    let mut sequence = Sequence::new();
    sequence.push(&long_prompt(len));
    let nothing = |_| None::<Want>;
    engine
        .compute(&mut sequence, nothing, |_, _| ())
        .expect("a prefill");
    faults.lock().expect("no panic").pass = true;
    continued(&mut engine, &mut sequence, 1).expect_err("an ordered fault");
    let len = len as usize;
    assert_eq!((sequence.len(), sequence.n_computed()), (len, len - 1));
    let error = engine.roll_back(&mut sequence, len - 1);
    let message = format!(
        "cannot roll back to {} rows: the sliding window's keys before position 256 are released",
        len - 1
    );
    assert_eq!(error.expect_err("released keys").to_string(), message);
    let found = continued(&mut engine, &mut sequence, 1).expect("the newest row has its keys");
    assert_eq!(found.len(), 1);
    engine.free(sequence);
}
