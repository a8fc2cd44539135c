//! Speculation on a model whose logits show every wrong row: answers are those
//! of plain decode, whatever is drafted.

mod common;

use common::{
    ALL, Heard, N_VOCAB, Orders, PAGE, Script, Toy, end, greedy, hear, hold, job, prompt, run,
    seeded, settings,
};
use engine::{
    Drafts, Ending, Engine, Error, Event, GIVE_UP_ROUNDS, Generated, Generation, Handle, Metrics,
    Request, SamplerSettings, Sequence, Service, Settings, Speculation, choice_seed,
};
use model::{Constraint, DeviceError, Guide, TokenMask, Verdict};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Drafts of `length` tokens, whatever they cost.
fn fixed(length: usize) -> Speculation {
    Speculation {
        drafts: Drafts::Dflash,
        least: length,
        most: Some(length),
    }
}

const NGRAM: Speculation = Speculation {
    drafts: Drafts::NGram,
    least: 4,
    most: None,
};

/// A service that speculates.
fn speculating(
    max_slabs: usize,
    speculation: Speculation,
) -> (Service, Handle, Arc<Mutex<Orders>>) {
    let settings = Settings {
        speculation,
        ..settings(ALL)
    };
    common::service_of(Toy::with_drafter(max_slabs), settings)
}

/// Every stage of the chain that draws or looks back.
fn wild(seed: u64) -> SamplerSettings {
    SamplerSettings {
        temperature: 1.0,
        top_k: 12,
        min_p: 0.01,
        frequency_penalty: 0.2,
        presence_penalty: 0.1,
        repeat_penalty: 1.1,
        repeat_last_n: 64,
        dry_multiplier: 0.5,
        xtc_probability: 0.3,
        xtc_threshold: 0.05,
        seed,
        ..SamplerSettings::default()
    }
}

/// A nearly greedy setting: half of what is drafted is right.
fn cool(seed: u64) -> SamplerSettings {
    SamplerSettings {
        temperature: 0.3,
        seed,
        ..SamplerSettings::default()
    }
}

fn samplings(seed: u64) -> [SamplerSettings; 4] {
    [greedy(), seeded(seed), wild(seed), cool(seed)]
}

fn expected(tokens: &[u32], sampling: &SamplerSettings, n: usize) -> Vec<Generated> {
    common::alone(Toy::new(1000), tokens, sampling.clone(), n)
}

#[test]
fn answers_are_those_of_plain_decode_for_every_length() {
    let prompts = [(1, 30), (2, PAGE - 3), (3, 700)].map(|(salt, n)| prompt(salt, n));
    for tokens in &prompts {
        for sampling in samplings(7) {
            let expected = expected(tokens, &sampling, 60);
            for (length, wrong) in [(1, 0), (2, 3), (3, 0), (5, 7), (8, 2), (11, 1), (15, 0)] {
                let (service, handle, orders) = speculating(400, fixed(length));
                orders.lock().expect("no panic").wrong_drafts = wrong;
                // Cold, then from the cache.
                for round in 0..2 {
                    let heard = run(&handle, job(tokens.clone(), sampling.clone(), 60));
                    let case = format!("{length} drafted, one of {wrong} wrong, round {round}");
                    assert_eq!(heard.answers[0], expected, "{case}");
                    assert_eq!(heard.endings, [Some(Ending::MaxTokens)], "{case}");
                    assert!(heard.timings.drafted >= 59 / (length + 1), "{case}");
                    assert!(heard.timings.accepted <= heard.timings.drafted);
                }
                end(service, &handle);
            }
        }
    }
}

#[test]
fn right_drafts_save_passes_and_wrong_ones_only_cost_rows() {
    for (wrong, n_passes) in [(0, 1 + 64usize.div_ceil(8)), (1, 1 + 64)] {
        let (service, handle, orders) = speculating(400, fixed(7));
        orders.lock().expect("no panic").wrong_drafts = wrong;
        let heard = run(&handle, job(prompt(1, 100), greedy(), 65));
        assert_eq!(heard.answers[0], expected(&prompt(1, 100), &greedy(), 65));
        let metrics = end(service, &handle);
        assert_eq!(metrics.passes as usize, n_passes, "one of {wrong} wrong");
        let counts = metrics.speculation;
        assert_eq!(counts.drafted, heard.timings.drafted as u64);
        assert_eq!(counts.accepted, heard.timings.accepted as u64);
        assert_eq!(metrics.generated_tokens, 65);
        match wrong {
            0 => assert_eq!(counts.accepted, counts.drafted),
            _ => assert_eq!(counts.accepted, 0),
        }
        assert_eq!(metrics.draft_time.count(), counts.rounds);
    }
}

/// Drafts end where the answer must.
#[test]
fn budgets_and_the_context_cut_as_in_plain_decode() {
    for max_tokens in 1..=20 {
        let (service, handle, orders) = speculating(400, fixed(15));
        let heard = run(&handle, job(prompt(1, 50), greedy(), max_tokens));
        assert_eq!(
            heard.answers[0],
            expected(&prompt(1, 50), &greedy(), max_tokens)
        );
        assert_eq!(heard.endings, [Some(Ending::MaxTokens)]);
        let passes = &orders.lock().expect("no panic").passes;
        assert!(passes[1..].iter().all(|&n| n < max_tokens), "{passes:?}");
        end(service, &handle);
    }
    let settings = Settings {
        n_ctx: Some(70),
        speculation: fixed(15),
        ..settings(ALL)
    };
    let (service, handle, _) = common::service_of(Toy::with_drafter(400), settings);
    let heard = run(&handle, job(prompt(1, 50), greedy(), 1000));
    assert_eq!(heard.answers[0], expected(&prompt(1, 50), &greedy(), 20));
    assert_eq!(heard.endings, [Some(Ending::Context)]);
    end(service, &handle);
}

/// Stops at a token, allows some, forces some, all by place.
#[derive(Clone)]
struct Strict {
    stop: u32,
    n_taken: usize,
}

impl Guide for Strict {
    fn constraint(&mut self) -> Constraint {
        match self.n_taken % 7 {
            2 | 3 => Constraint::Forced((self.n_taken * 5 % N_VOCAB) as u32),
            4 | 5 => {
                let mut mask = TokenMask::none(N_VOCAB);
                (0..N_VOCAB as u32 / 2).for_each(|token| mask.allow(2 * token));
                Constraint::Masked(mask)
            }
            _ => Constraint::Free,
        }
    }

    fn accept(&mut self, token: u32) -> Verdict {
        self.n_taken += 1;
        match token == self.stop && self.n_taken > 20 {
            true => Verdict::Stop,
            false => Verdict::Continue,
        }
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

/// A job under a strict guide, with or without log-probabilities.
fn strict(
    sampling: &SamplerSettings,
    stop: u32,
    logprobs: Option<usize>,
) -> (engine::Job, std::sync::mpsc::Receiver<Event>) {
    let (mut job, events) = job(prompt(3, 80), sampling.clone(), 120);
    job.guides = vec![Box::new(Strict { stop, n_taken: 0 })];
    job.logprobs = logprobs;
    (job, events)
}

#[test]
fn guides_rule_every_drafted_token() {
    let mut n_stopped = 0;
    for sampling in samplings(3) {
        for stop in [5, 17, 40] {
            for logprobs in [None, Some(3)] {
                let (service, handle, _) = speculating(400, Speculation::default());
                let plain = run(&handle, strict(&sampling, stop, logprobs));
                end(service, &handle);
                n_stopped += usize::from(plain.endings == [Some(Ending::Guide)]);
                for speculation in [fixed(1), fixed(4), fixed(15), NGRAM] {
                    let (service, handle, _) = speculating(400, speculation);
                    let heard = run(&handle, strict(&sampling, stop, logprobs));
                    assert_eq!(heard.answers, plain.answers, "{speculation:?}");
                    assert_eq!(heard.endings, plain.endings, "{speculation:?}");
                    end(service, &handle);
                }
            }
        }
    }
    assert!(n_stopped >= 6, "{n_stopped} answers end at a stop token");
}

/// All answers of `cases`, in the house together.
fn together(
    handle: &Handle,
    cases: &[(Vec<u32>, SamplerSettings)],
    max_tokens: usize,
) -> Vec<Heard> {
    let release = hold(handle);
    let submitted = cases.iter().map(|(tokens, sampling)| {
        let (job, events) = job(tokens.clone(), sampling.clone(), max_tokens);
        handle.submit(job).expect("it is taken");
        events
    });
    let submitted: Vec<_> = submitted.collect();
    drop(release);
    submitted.iter().map(hear).collect()
}

#[test]
fn sequences_speculate_together() {
    let lengths = [5, 130, PAGE - 1, PAGE + 1, 300, 600, 40, 2 * PAGE];
    let cases: Vec<_> = (0..8)
        .map(|i| {
            (
                prompt(i as u64, lengths[i]),
                samplings(i as u64)[i % 4].clone(),
            )
        })
        .collect();
    for speculation in [fixed(3), fixed(15), NGRAM] {
        let (service, handle, orders) = speculating(400, speculation);
        orders.lock().expect("no panic").wrong_drafts = 5;
        let heard = together(&handle, &cases, 120);
        for (heard, (tokens, sampling)) in heard.iter().zip(&cases) {
            assert_eq!(heard.answers[0], expected(tokens, sampling, 120));
        }
        let metrics = end(service, &handle);
        assert!(metrics.speculation.accepted > 0 || speculation == NGRAM);
        // Several drafts in one pass.
        let most = orders
            .lock()
            .expect("no panic")
            .passes
            .iter()
            .copied()
            .max();
        assert!(most > Some(speculation.least * 4), "{most:?} rows");
    }
}

/// Drafts take no page from anybody, and a draft that was under way is gone
/// with the pages.
#[test]
fn sequences_that_lose_their_pages_go_on_with_the_same_bits() {
    let cases: Vec<_> = (0..24)
        .map(|i| (prompt(i, 20 + 9 * i as usize), cool(i)))
        .collect();
    let expected: Vec<_> = cases
        .iter()
        .map(|(tokens, sampling)| expected(tokens, sampling, 800))
        .collect();
    for speculation in [fixed(4), fixed(15)] {
        let (service, handle, _) = speculating(18, speculation);
        let heard = together(&handle, &cases, 800);
        for (heard, expected) in heard.iter().zip(&expected) {
            assert!(&heard.answers[0] == expected, "other bits");
        }
        let metrics = end(service, &handle);
        assert!(metrics.preemptions > 0, "a test of nothing: {metrics:?}");
        assert!(metrics.speculation.accepted > 1000);
        assert_eq!((metrics.completed, metrics.failed), (25, 0));
    }
}

/// The drafter's rows come with a hit: drafts after it are those of before.
#[test]
fn a_cache_hit_keeps_acceptance() {
    let (service, handle, orders) = speculating(400, fixed(6));
    orders.lock().expect("no panic").wrong_drafts = 9;
    let tokens = prompt(4, 900);
    let cold = run(&handle, job(tokens.clone(), greedy(), 80));
    let cached = run(&handle, job(tokens, greedy(), 80));
    assert_eq!(cached.timings.cached_tokens, 899);
    assert_eq!(cached.answers, cold.answers);
    let counts = |heard: &Heard| (heard.timings.drafted, heard.timings.accepted);
    assert_eq!(counts(&cached), counts(&cold));
    assert!(cold.timings.accepted > 40);
    end(service, &handle);
}

#[test]
fn choices_of_one_prompt_speculate_each_for_itself() {
    let (service, handle, _) = speculating(400, fixed(5));
    let tokens = prompt(1, 300);
    let (mut job, events) = job(tokens.clone(), cool(5), 50);
    job.guides = (0..3)
        .map(|_| Box::new(Script::default()) as Box<dyn Guide>)
        .collect();
    let heard = run(&handle, (job, events));
    for choice in 0..3 {
        let sampling = cool(choice_seed(5, choice as u32));
        assert_eq!(heard.answers[choice], expected(&tokens, &sampling, 50));
    }
    assert!(heard.timings.accepted > 0);
    end(service, &handle);
}

/// In the middle of a block that was accepted.
#[test]
fn a_listener_that_breaks_off_leaves_nothing_behind() {
    for n_heard in 1..=12 {
        let (service, handle, _) = speculating(400, fixed(7));
        let (mut job, events) = job(prompt(1, 100), greedy(), 1000);
        let mut forward = job.receive;
        let mut n_left = n_heard;
        job.receive = Box::new(move |event: Event| {
            n_left -= usize::from(matches!(event, Event::Token { .. }));
            forward.event(event).is_break();
            match n_left {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        });
        handle.submit(job).expect("it is taken");
        let mut tokens = Vec::new();
        while let Ok(event) = events.recv_timeout(Duration::from_secs(60)) {
            if let Event::Token { generated, .. } = event {
                tokens.push(generated);
            }
        }
        assert_eq!(tokens, expected(&prompt(1, 100), &greedy(), n_heard));
        let metrics = end(service, &handle);
        assert_eq!((metrics.cancelled, metrics.completed), (1, 0));
    }
}

/// A row that is not finite fails a request only if plain decode comes to it.
#[test]
fn a_broken_row_counts_only_once_it_is_accepted() {
    let tokens = prompt(1, 100);
    let answer = expected(&tokens, &greedy(), 40);
    let poison = answer[20].token;
    let first = answer.iter().position(|g| g.token == poison).expect("it");
    let failure = |speculation, wrong_drafts| {
        let (service, handle, orders) = speculating(400, speculation);
        {
            let mut orders = orders.lock().expect("no panic");
            orders.poison = Some(poison);
            orders.wrong_drafts = wrong_drafts;
        }
        let heard = run(&handle, job(tokens.clone(), greedy(), 40));
        assert_eq!(heard.answers[0], answer[..=first]);
        end(service, &handle);
        heard.failure.expect("a failure")
    };
    let plain = failure(Speculation::default(), 0);
    assert!(plain.contains("not finite"), "{plain}");
    for length in [1, 4, 15] {
        assert_eq!(failure(fixed(length), 0), plain);
        assert_eq!(failure(fixed(length), 3), plain);
    }
}

#[test]
fn a_drafter_without_memory_is_given_up_and_one_that_fails_is_the_devices_failure() {
    let (service, handle, orders) = speculating(400, fixed(4));
    orders.lock().expect("no panic").draft_fails = Some(DeviceError::OutOfMemory {
        what: "drafts",
        wanted_bytes: 5,
    });
    let heard = run(&handle, job(prompt(1, 100), greedy(), 40));
    assert_eq!(heard.answers[0], expected(&prompt(1, 100), &greedy(), 40));
    assert_eq!(heard.timings.drafted, 0);
    let metrics = end(service, &handle);
    let why = metrics.speculation_stopped.expect("it is off");
    assert!(why.contains("drafts"), "{why}");

    let (service, handle, orders) = speculating(400, fixed(4));
    orders.lock().expect("no panic").draft_fails = Some(DeviceError::Lost("unplugged".into()));
    let heard = run(&handle, job(prompt(1, 100), greedy(), 40));
    let failure = heard.failure.expect("a failure");
    assert!(failure.contains("unplugged"), "{failure}");
    service.join().expect_err("a failure");
}

/// Drafts that are never right are given up for good, whatever they cost.
#[test]
fn useless_drafts_are_given_up() {
    let (service, handle, orders) = speculating(400, fixed(1));
    orders.lock().expect("no panic").wrong_drafts = 1;
    let n = GIVE_UP_ROUNDS as usize + 50;
    let heard = run(&handle, job(prompt(1, 100), greedy(), n));
    assert_eq!(heard.answers[0], expected(&prompt(1, 100), &greedy(), n));
    assert_eq!(heard.timings.drafted, GIVE_UP_ROUNDS as usize);
    let Metrics {
        speculation,
        speculation_stopped,
        ..
    } = end(service, &handle);
    assert_eq!(speculation.rounds, GIVE_UP_ROUNDS);
    assert_eq!(
        speculation_stopped.as_deref(),
        Some("200 rounds gave 1.00 tokens each, expected at least 1.2")
    );
}

/// With lengths left to the model of cost, whatever it decides.
#[test]
fn lengths_that_adapt_change_no_answer() {
    for drafts in [Drafts::Dflash, Drafts::NGram] {
        let speculation = Speculation {
            drafts,
            ..Speculation::default()
        };
        let (service, handle, _) = speculating(400, speculation);
        for salt in 0..4 {
            let sampling = samplings(salt)[salt as usize].clone();
            let heard = run(&handle, job(prompt(salt, 60), sampling.clone(), 150));
            assert_eq!(
                heard.answers[0],
                expected(&prompt(salt, 60), &sampling, 150)
            );
        }
        end(service, &handle);
    }
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let start = |toy: Toy, speculation| {
        let settings = Settings {
            speculation,
            ..settings(ALL)
        };
        Service::start(Box::new(toy), settings)
            .err()
            .map(|e| e.to_string())
    };
    let refusal = start(Toy::new(100), fixed(3));
    let expected = "drafts are to come from a drafter, but none is attached to the model";
    assert_eq!(refusal.as_deref(), Some(expected));
    for most in [0, 16] {
        let speculation = Speculation {
            most: Some(most),
            ..fixed(3)
        };
        let refusal = start(Toy::with_drafter(100), speculation);
        let expected = format!("drafts of up to {most} tokens, expected 1 to 15");
        assert_eq!(refusal, Some(expected));
    }
    let mut engine = Engine::new(Box::new(Toy::new(100)), None).expect("an engine");
    assert!(matches!(engine.speculate(fixed(3)), Err(Error::NoDrafter)));
}

/// What the loop of one sequence answers with speculation, and its rows then.
fn in_the_loop(
    tokens: &[u32],
    request: &Request,
    speculation: Speculation,
    guide: &mut dyn Guide,
) -> (Vec<Generated>, Generation, usize) {
    let toy = Toy::with_drafter(400);
    toy.orders.lock().expect("no panic").wrong_drafts = 4;
    let mut engine = Engine::new(Box::new(toy), None).expect("an engine");
    engine.speculate(speculation).expect("a drafter");
    let mut sequence = Sequence::new();
    sequence.push(tokens);
    let mut found = Vec::new();
    let mut receive = |g: &Generated| {
        found.push(g.clone());
        ControlFlow::Continue(())
    };
    let done = engine
        .generate(&mut sequence, request, guide, &mut receive)
        .expect("an answer");
    assert_eq!(sequence.len(), tokens.len() + found.len());
    let n_computed = sequence.n_computed();
    engine.free(sequence);
    assert_eq!(engine.pool().n_pages_used(), 0, "all pages return");
    (found, done, n_computed)
}

#[test]
fn the_loop_of_one_sequence_speculates_by_the_same_rule() {
    for sampling in samplings(11) {
        for logprobs in [None, Some(2)] {
            let request = Request {
                sampling: sampling.clone(),
                max_tokens: Some(90),
                logprobs,
            };
            let strict = || Strict {
                stop: 17,
                n_taken: 0,
            };
            let off = Speculation::default();
            for tokens in [prompt(1, 40), prompt(2, PAGE - 20)] {
                let (plain, _, n_rows) =
                    in_the_loop(&tokens, &request, off, &mut Script::default());
                let (ruled, _, _) = in_the_loop(&tokens, &request, off, &mut strict());
                for speculation in [fixed(1), fixed(6), fixed(15), NGRAM] {
                    let (found, done, n) =
                        in_the_loop(&tokens, &request, speculation, &mut Script::default());
                    assert_eq!((found, n), (plain.clone(), n_rows), "{speculation:?}");
                    let counts = done.speculation;
                    assert!(counts.accepted <= counts.drafted);
                    assert!(counts.rounds > 0, "{speculation:?}");
                    let (found, _, _) = in_the_loop(&tokens, &request, speculation, &mut strict());
                    assert_eq!(found, ruled, "{speculation:?}");
                }
            }
        }
    }
}
