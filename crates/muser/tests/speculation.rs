//! Speculation on the bundled model and its trained drafter.
//!
//! `cargo xtask speculation` runs the whole product of requests, lengths and
//! ways; here is a part of it.

mod drafts;

use cpu::{Cpu, CpuOptions};
use drafts::{Answer, Case, answers, cases, check_equal, end, hear, service, submit};
use engine::{
    Drafts, Engine, Generated, Generation, Request, SamplerSettings, Sequence, Speculation,
};
use gguf::{Gguf, Value};
use model::backend::PageData;
use model::kv::PageCopy;
use model::{
    Backend, Batch, Capacity, Caps, Config, Constraint, DraftRequest, DrafterConfig, Error,
    Forward, Guide, Model, Outputs, PageClass, PageId, RowOutput, Tables, Verdict, Want,
    WindowConvention,
};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use testing::{EXACT, Parts, Tensor, bundled, changed, open, read_to_string, testdata};

const IS_WHOLE: bool = cfg!(feature = "whole-product");

fn target() -> Gguf {
    open(&bundled("nano-glimmer-q8_0.gguf"))
}

fn drafter() -> Gguf {
    open(&bundled("nano-glimmer-dflash-q8_0.gguf"))
}

fn fixed(drafts: Drafts, length: usize) -> Speculation {
    Speculation {
        drafts,
        least: length,
        most: Some(length),
    }
}

/// Plain answers, each alone.
fn plain(file: &Gguf, cases: &[&Case], max_tokens: usize) -> Vec<Answer> {
    let (service, handle) = service(file, None, Speculation::default());
    let found = answers(&handle, cases, max_tokens, 1, None);
    end(service, &handle);
    found.into_iter().map(|(answer, _)| answer).collect()
}

#[test]
fn answers_are_those_of_plain_decode() {
    let (file, drafter) = (target(), drafter());
    let (n, max_tokens) = if IS_WHOLE { (50, 256) } else { (8, 32) };
    let cases = cases(&file, n);
    let cases: Vec<&Case> = cases.iter().collect();
    let expected = plain(&file, &cases, max_tokens);
    assert!(expected.iter().all(|answer| answer.failure.is_none()));
    let lengths = match IS_WHOLE {
        true => (1..=15).collect(),
        false => vec![1, 6, 15],
    };
    for length in lengths {
        for drafts in [Drafts::Dflash, Drafts::NGram] {
            if drafts == Drafts::NGram && !IS_WHOLE && length != 6 {
                continue;
            }
            let with = (drafts == Drafts::Dflash).then_some(&drafter);
            let speculation = fixed(drafts, length);
            let metrics = check_equal((&file, with), speculation, &cases, (max_tokens, &expected));
            assert!(metrics.speculation.accepted > 0, "{speculation:?}");
        }
    }
    let adaptive = Speculation {
        drafts: Drafts::Dflash,
        ..Speculation::default()
    };
    check_equal(
        (&file, Some(&drafter)),
        adaptive,
        &cases,
        (max_tokens, &expected),
    );
}

/// Drafters that are wrong in ways that load well.
fn mutants() -> Vec<(&'static str, Gguf)> {
    let reversed = |tensor: &mut Tensor| {
        let width = tensor.info.shape[0] as usize;
        let values = tensor.values();
        let rows = values.chunks(width).rev().flatten().copied();
        let shape: Vec<usize> = tensor.info.shape.iter().map(|&n| n as usize).collect();
        let rows: Vec<f32> = rows.collect();
        *tensor = Tensor::floats(&tensor.info.name, &shape, &rows);
    };
    let of = |change: &dyn Fn(&mut Parts)| changed(&drafter(), |parts| change(parts));
    vec![
        (
            "a window of 16",
            of(&|parts| {
                parts
                    .metadata
                    .insert("dflash.attention.sliding_window", Value::U32(16));
            }),
        ),
        (
            "features of the layer before",
            of(&|parts| {
                let places = gguf::Array::I32(vec![1, 4, 6]);
                parts
                    .metadata
                    .insert("dflash.target_layers", Value::Array(places));
            }),
        ),
        (
            "a shuffled projection",
            of(&|parts| reversed(parts.tensor("fc.weight"))),
        ),
    ]
}

/// A draft of a round: position of the newest token, proposed tokens.
type Round = (usize, Vec<u32>);

/// The model, which also writes down what it drafts.
struct Recorder {
    model: Box<dyn Forward>,
    rounds: Arc<Mutex<Vec<Round>>>,
}

impl Forward for Recorder {
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
    ) -> Result<Outputs, Error> {
        self.model.pass(batch, tables, want)
    }

    fn attach_drafter(
        &mut self,
        file: &Gguf,
        convention: WindowConvention,
    ) -> Result<DrafterConfig, Error> {
        self.model.attach_drafter(file, convention)
    }

    fn drafter(&self) -> Option<&DrafterConfig> {
        self.model.drafter()
    }

    fn draft(
        &mut self,
        requests: &[DraftRequest],
        tables: &Tables<'_>,
        want: Want,
    ) -> Result<Vec<Outputs>, Error> {
        let outputs = self.model.draft(requests, tables, want)?;
        let mut rounds = self.rounds.lock().expect("no panic");
        for (request, outputs) in requests.iter().zip(&outputs) {
            let token = |output: &RowOutput| match *output {
                RowOutput::Argmax { token, .. } => token,
                _ => panic!("the best token, not {output:?}"),
            };
            let anchor = tables[request.seq as usize].len() as usize;
            rounds.push((anchor, outputs.iter().map(token).collect()));
        }
        Ok(outputs)
    }

    fn export_page(&mut self, class: PageClass, id: PageId, n: usize) -> Result<PageData, Error> {
        self.model.export_page(class, id, n)
    }

    fn import_page(&mut self, class: PageClass, id: PageId, data: &PageData) -> Result<(), Error> {
        self.model.import_page(class, id, data)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Error> {
        self.model.copy_pages(copies)
    }
}

/// Says nothing and never stops.
struct Free;

impl Guide for Free {
    fn constraint(&mut self) -> Constraint {
        Constraint::Free
    }

    fn accept(&mut self, _: u32) -> Verdict {
        Verdict::Continue
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(Free)
    }
}

/// An engine that drafts as far as it can, and its rounds.
fn recorded<B: Backend + 'static>(
    mut model: Model<B>,
    drafter: &Gguf,
) -> (Engine, Arc<Mutex<Vec<Round>>>) {
    let attached = model.attach_drafter(drafter, WindowConvention::Below);
    attached.expect("a drafter that fits");
    let rounds = Arc::default();
    let recorder = Recorder {
        model: Box::new(model),
        rounds: Arc::clone(&rounds),
    };
    let mut engine = Engine::new(Box::new(recorder), None).expect("an engine");
    engine
        .speculate(fixed(Drafts::Dflash, 15))
        .expect("a drafter");
    (engine, rounds)
}

fn generate(
    engine: &mut Engine,
    prompt: &[u32],
    request: &Request,
) -> (Vec<Generated>, Generation) {
    let mut sequence = Sequence::new();
    sequence.push(prompt);
    let mut found = Vec::new();
    let mut receive = |g: &Generated| {
        found.push(g.clone());
        ControlFlow::Continue(())
    };
    let done = engine
        .generate(&mut sequence, request, &mut Free, &mut receive)
        .expect("an answer");
    engine.free(sequence);
    (found, done)
}

/// A prompt of the golden file: tokens, greedy answer, rounds.
struct Golden {
    name: String,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    rounds: Vec<Round>,
}

fn goldens() -> Vec<Golden> {
    let golden = read_to_string(&testdata("nano-glimmer/golden.json"));
    let golden: serde_json::Value = serde_json::from_str(&golden).expect("JSON");
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        let ids = value.as_array().expect("ids").iter();
        ids.map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let round = |r: &serde_json::Value| {
        let anchor = r["anchor"].as_u64().expect("a position") as usize;
        (anchor, ids(&r["draft"]))
    };
    let prompts = golden["prompts"].as_array().expect("prompts").iter();
    prompts
        .map(|p| Golden {
            name: p["name"].as_str().expect("a name").to_string(),
            prompt: ids(&p["prompt_ids"]),
            greedy: ids(&p["greedy_ids"]),
            rounds: p["draft"]
                .as_array()
                .expect("rounds")
                .iter()
                .map(round)
                .collect(),
        })
        .collect()
}

/// Rounds of the golden prompts whose draft is not the golden one, of how many.
fn wrong_rounds(drafter: &Gguf, goldens: &[Golden]) -> (usize, usize) {
    let (mut engine, rounds) = recorded(testing::reference(&target(), EXACT), drafter);
    let (mut n_wrong, mut n) = (0, 0);
    for golden in goldens {
        // Long enough for a whole draft in the last round.
        let request = Request {
            sampling: drafts::sampling(0),
            max_tokens: Some(golden.greedy.len() + 16),
            logprobs: None,
        };
        let (found, _) = generate(&mut engine, &golden.prompt, &request);
        let found: Vec<u32> = found.iter().map(|g| g.token).collect();
        assert_eq!(
            found[..golden.greedy.len()],
            golden.greedy,
            "{}",
            golden.name
        );
        let rounds = std::mem::take(&mut *rounds.lock().expect("no panic"));
        for (place, golden) in golden.rounds.iter().enumerate() {
            n_wrong += usize::from(rounds.get(place) != Some(golden));
            n += 1;
        }
    }
    (n_wrong, n)
}

/// Drafts are golden, and so is how many of each are accepted: the next round
/// begins behind them.
#[test]
fn rounds_are_the_golden_ones_draft_by_draft() {
    let (n_wrong, n) = wrong_rounds(&drafter(), &goldens());
    assert_eq!(n, 135);
    // Near ties, in drafted tokens that are never accepted.
    assert!(
        n_wrong <= 3,
        "{n_wrong} of {n} rounds are not the golden ones"
    );
}

#[test]
fn a_wrong_drafter_changes_its_rounds_and_no_answer() {
    let file = target();
    let cases = cases(&file, 4);
    let cases: Vec<&Case> = cases.iter().collect();
    let expected = plain(&file, &cases, 32);
    let goldens: Vec<Golden> = goldens().into_iter().take(1).collect();
    for (what, mutant) in mutants() {
        let speculation = fixed(Drafts::Dflash, 7);
        let metrics = check_equal((&file, Some(&mutant)), speculation, &cases, (32, &expected));
        assert!(metrics.speculation.drafted > 0);
        let (n_wrong, n) = wrong_rounds(&mutant, &goldens);
        assert!(n_wrong * 2 > n, "{what}: {n_wrong} of {n} rounds differ");
    }
}

/// The tokens a round gives, greedily, on the default device: 3.07 were measured.
#[test]
fn acceptance_keeps_its_baseline() {
    let (file, drafter) = (target(), drafter());
    let (service, handle) = service(&file, Some(&drafter), fixed(Drafts::Dflash, 15));
    for golden in goldens().iter().take(4) {
        let case = Case {
            tokens: golden.prompt.clone(),
            sampling: drafts::sampling(0),
            guide: Box::new(Free),
            logprobs: None,
        };
        hear(&submit(&handle, &case, 128, None));
    }
    let speculation = end(service, &handle).speculation;
    let tokens = speculation.tokens_per_round();
    assert!(tokens >= 2.8, "{tokens:.2} tokens a round: {speculation:?}");
}

/// The share of drafted tokens that are accepted is the sum of their
/// probabilities, as with rejection sampling.
#[test]
fn sampled_acceptance_is_the_expected_one() {
    let (n_prompts, max_tokens) = if IS_WHOLE { (9, 256) } else { (3, 100) };
    for temperature in [1.0, 0.6] {
        let be = Cpu::new(CpuOptions::default()).expect("a processor");
        let (mut engine, rounds) = recorded(testing::loaded(be, &target(), EXACT), &drafter());
        let n_vocab = engine.model().config().n_vocab;
        let (mut expected, mut variance, mut accepted, mut tried) = (0.0, 0.0, 0, 0);
        for (seed, golden) in (1..).zip(goldens().iter().take(n_prompts)) {
            let request = Request {
                sampling: SamplerSettings {
                    temperature,
                    seed,
                    ..SamplerSettings::default()
                },
                max_tokens: Some(max_tokens),
                logprobs: Some(n_vocab),
            };
            let (found, done) = generate(&mut engine, &golden.prompt, &request);
            let rounds = std::mem::take(&mut *rounds.lock().expect("no panic"));
            let mut n_accepted = 0;
            for (anchor, draft) in rounds {
                // The token at the place behind the anchor comes first.
                let places = found[anchor + 1 - golden.prompt.len()..].iter();
                for (generated, &token) in places.zip(&draft) {
                    let p = probability(&generated.top, token, f64::from(temperature));
                    expected += p;
                    variance += p * (1.0 - p);
                    tried += 1;
                    if generated.token != token {
                        break;
                    }
                    n_accepted += 1;
                }
            }
            assert_eq!(done.speculation.accepted, n_accepted);
            accepted += n_accepted;
        }
        let off = accepted as f64 - expected;
        assert!(
            off.abs() <= 4.0 * variance.sqrt(),
            "temperature {temperature}: {accepted} of {tried} accepted, expected {expected:.1} \
             +- {:.1}",
            variance.sqrt()
        );
        assert!(tried > 100 && accepted > 30, "{accepted} of {tried}");
    }
}

/// The probability of `token` at a temperature, from all log-probabilities at 1.
fn probability(all: &[(u32, f64)], token: u32, temperature: f64) -> f64 {
    let weight = |&(_, logprob): &(u32, f64)| (logprob / temperature).exp();
    let sum: f64 = all.iter().map(weight).sum();
    let of = all.iter().find(|(id, _)| *id == token);
    of.map_or(0.0, weight) / sum
}
