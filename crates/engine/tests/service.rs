//! The service on a model whose logits show every wrong row.

mod common;

use common::{
    ALL, Heard, N_VOCAB, PAGE, Script, Toy, end, expected, greedy, hear, job, prompt, run, seeded,
    service, service_of, settings,
};
use engine::{
    CacheUse, Ending, Event, Handle, REGULAR_CUT_TOKENS, Refusal, Settings, State, choice_seed,
};
use model::{Constraint, DeviceError, Guide, TokenMask};
use std::ops::ControlFlow;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

#[test]
fn an_answer_is_the_same_alone_packed_cached_and_with_the_cache_off() {
    let cases: Vec<_> = [(1, 30), (2, 255), (3, 700), (4, 1300), (5, 1), (6, 512)]
        .into_iter()
        .flat_map(|(salt, n)| [(prompt(salt, n), greedy()), (prompt(salt, n), seeded(salt))])
        .collect();
    let (service, handle) = service(400, ALL);
    // Three rounds: all together on an empty cache, again from it, then without it.
    for round in 0..3 {
        let submitted = cases.iter().map(|(tokens, sampling)| {
            let (mut job, events) = job(tokens.clone(), sampling.clone(), 40);
            job.cache.is_on = round < 2;
            handle.submit(job).expect("it is taken");
            events
        });
        let submitted: Vec<_> = submitted.collect();
        for ((tokens, sampling), events) in cases.iter().zip(submitted) {
            let heard = hear(&events);
            let found = &heard.answers[0];
            assert_eq!(found, &expected(tokens, sampling, 40), "round {round}");
            assert_eq!(heard.endings, [Some(Ending::MaxTokens)]);
            let timings = heard.timings;
            assert_eq!(
                (timings.prompt_tokens, timings.decode_tokens),
                (tokens.len(), 40)
            );
            assert_eq!(timings.prefill_tokens + timings.cached_tokens, tokens.len());
            match round {
                0 => assert!(timings.cached_tokens < tokens.len()),
                1 => assert_eq!(timings.cached_tokens, tokens.len() - 1),
                _ => assert_eq!(timings.cached_tokens, 0),
            }
        }
    }
    let metrics = end(service, &handle);
    assert!(
        metrics.rows > metrics.passes * 2,
        "they ran together: {metrics:?}"
    );
    assert_eq!(metrics.completed, 3 * cases.len() as u64);
    assert!(metrics.cache_hits >= cases.len() as u64);
}

/// A copy that lacks a row is what the tests above must be able to see.
#[test]
fn a_wrong_cached_row_changes_the_answer() {
    let (service, handle, orders) = service_of(Toy::new(400), settings(ALL));
    let tokens = prompt(1, 300);
    let right = run(&handle, job(tokens.clone(), greedy(), 20));
    assert_eq!(right.answers[0], expected(&tokens, &greedy(), 20));
    orders.lock().expect("no panic").copies_are_short = true;
    let wrong = run(&handle, job(tokens, greedy(), 20));
    assert_eq!(wrong.timings.cached_tokens, 299);
    assert_ne!(wrong.answers, right.answers);
    end(service, &handle);
}

/// They may come from the cache as well, but are no tokens of the prompt.
#[test]
fn cached_tokens_are_those_of_the_prompt() {
    let (service, handle) = service(400, ALL);
    let forced = Script {
        constraints: [9, 10, 11, 12].map(Constraint::Forced).to_vec(),
        ..Script::default()
    };
    let mut answers = Vec::new();
    for cached_tokens in [0, 299] {
        let (mut job, events) = job(prompt(1, 300), greedy(), 20);
        job.guides = vec![forced.fork()];
        let heard = run(&handle, (job, events));
        assert_eq!(heard.timings.cached_tokens, cached_tokens);
        assert_eq!(heard.timings.prefill_tokens, 300 - cached_tokens);
        answers.push(heard.answers);
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(handle.metrics().cached_tokens, 299);
    end(service, &handle);
}

#[test]
fn a_conversation_reads_again_only_what_is_new() {
    let (service, handle) = service(400, ALL);
    let mut tokens = prompt(1, 400);
    let first = run(&handle, job(tokens.clone(), seeded(1), 60));
    assert_eq!(first.timings.cached_tokens, 0);
    tokens.extend(first.tokens(0));
    tokens.extend(prompt(2, 30));
    let second = run(&handle, job(tokens.clone(), seeded(2), 5));
    // The last token of an answer has no row yet.
    assert_eq!(second.timings.cached_tokens, 400 + 60 - 1);
    assert_eq!(second.answers[0], expected(&tokens, &seeded(2), 5));
    // The client that drops the answer's reasoning goes on at the end of its prompt.
    let mut other = prompt(1, 400);
    other.extend(prompt(3, 100));
    let third = run(&handle, job(other.clone(), seeded(3), 5));
    assert_eq!(third.timings.cached_tokens, 400);
    assert_eq!(third.answers[0], expected(&other, &seeded(3), 5));
    end(service, &handle);
}

/// A page that was kept half full, while decoding had filled it and let go of
/// the rest, is replaced by a whole one when somebody computes it again.
#[test]
fn a_prompt_that_ends_inside_an_answer_is_kept_as_well() {
    let (service, handle) = service(400, ALL);
    let mut tokens = prompt(1, PAGE + 44);
    let first = run(&handle, job(tokens.clone(), greedy(), 700));
    tokens.extend(first.tokens(0));
    tokens.truncate(PAGE + 200);
    for cached in [PAGE + 44, PAGE + 199] {
        let heard = run(&handle, job(tokens.clone(), greedy(), 3));
        assert_eq!(heard.timings.cached_tokens, cached);
        assert_eq!(heard.answers[0], expected(&tokens, &greedy(), 3));
    }
    end(service, &handle);
}

#[test]
fn named_cuts_are_returned_to() {
    let (service, handle) = service(400, ALL);
    let tokens = prompt(1, 2000);
    let edited = |at: usize| {
        let mut edited = tokens[..at].to_vec();
        edited.extend(prompt(77, 50));
        edited
    };
    let cached = |cuts: Vec<usize>, salt: &str| {
        let of = |tokens: Vec<u32>| {
            let (mut job, events) = job(tokens, greedy(), 3);
            job.cuts = cuts.clone();
            job.cache.salt = Some(salt.into());
            run(&handle, (job, events))
        };
        of(tokens.clone());
        let heard = of(edited(1000));
        assert_eq!(heard.answers[0], expected(&edited(1000), &greedy(), 3));
        heard.timings.cached_tokens
    };
    let unnamed = cached(Vec::new(), "a");
    // 50 is out of order, 5000 is none of the prompt's.
    let named = cached(vec![1000, 50, 5000], "b");
    assert!(
        unnamed <= 3 * PAGE && (1000..1005).contains(&named),
        "{unnamed}, {named}"
    );
    end(service, &handle);
}

/// Where nobody names a cut, one is kept all the same every so many tokens.
#[test]
fn a_long_prompt_is_returned_to_at_its_regular_cuts() {
    let (service, handle) = service(400, ALL);
    let tokens = prompt(1, REGULAR_CUT_TOKENS + 800);
    run(&handle, job(tokens.clone(), greedy(), 1));
    let mut edited = tokens[..REGULAR_CUT_TOKENS + 100].to_vec();
    edited.extend(prompt(77, 50));
    let heard = run(&handle, job(edited, greedy(), 1));
    let cached_tokens = heard.timings.cached_tokens;
    assert!(cached_tokens >= REGULAR_CUT_TOKENS, "{cached_tokens}");
    end(service, &handle);
}

#[test]
fn equal_prompts_that_come_together_share_their_rows() {
    let (service, handle) = service(400, ALL);
    let tokens = prompt(1, 5000);
    let jobs: Vec<_> = (0..4)
        .map(|seed| job(tokens.clone(), seeded(seed), 8))
        .collect();
    let events = jobs.into_iter().map(|(job, events)| {
        handle.submit(job).expect("it is taken");
        events
    });
    let events: Vec<_> = events.collect();
    for (seed, events) in (0..).zip(&events) {
        assert_eq!(hear(events).answers[0], expected(&tokens, &seeded(seed), 8));
    }
    let metrics = end(service, &handle);
    assert!(
        metrics.rows < 2 * 5000,
        "{} rows for 4 times 5000",
        metrics.rows
    );
}

#[test]
fn choices_share_one_prefill_and_draw_differently() {
    let (service, handle) = service(400, ALL);
    let tokens = prompt(1, 700);
    let (mut job, events) = job(tokens.clone(), seeded(5), 30);
    job.guides = (0..4)
        .map(|_| Box::new(Script::default()) as Box<dyn Guide>)
        .collect();
    let heard = run(&handle, (job, events));
    for choice in 0..4 {
        let seed = choice_seed(5, choice as u32);
        assert_eq!(
            heard.answers[choice],
            expected(&tokens, &seeded(seed), 30),
            "{choice}"
        );
        assert_eq!(heard.endings[choice], Some(Ending::MaxTokens));
    }
    assert_ne!(heard.answers[1], heard.answers[2]);
    assert_eq!(
        choice_seed(5, 0),
        5,
        "the first is the answer without the others"
    );
    let timings = heard.timings;
    assert_eq!((timings.prefill_tokens, timings.decode_tokens), (700, 120));
    let metrics = end(service, &handle);
    assert_eq!(metrics.rows, 700 + 4 * 29, "each row once");
}

/// Constraints of one job's choices: none, a mask, a forced token, a stop.
#[test]
fn each_choice_has_its_own_guide() {
    let (service, handle) = service(400, 0);
    let tokens = prompt(1, 20);
    let free = expected(&tokens, &greedy(), 12);
    let mut mask = TokenMask::none(N_VOCAB);
    mask.allow(7);
    let guides = [
        Script::default(),
        Script {
            constraints: vec![Constraint::Masked(mask)],
            ..Script::default()
        },
        Script {
            constraints: [9, 10, 11].map(Constraint::Forced).to_vec(),
            ..Script::default()
        },
        Script {
            stop: Some(free[3].token),
            ..Script::default()
        },
    ];
    for logprobs in [None, Some(2)] {
        let (mut job, events) = job(tokens.clone(), greedy(), 12);
        job.logprobs = logprobs;
        let guides = guides.iter().map(|guide| guide.fork());
        job.guides = guides.collect();
        let heard = run(&handle, (job, events));
        let free: Vec<u32> = free.iter().map(|g| g.token).collect();
        assert_eq!(heard.tokens(0), free);
        assert_eq!(heard.tokens(1)[0], 7);
        assert_eq!(heard.tokens(2)[..3], [9, 10, 11]);
        let stop = free
            .iter()
            .position(|t| *t == free[3])
            .expect("it is there");
        assert_eq!(heard.tokens(3), free[..=stop]);
        assert_eq!(heard.endings[3], Some(Ending::Guide));
        for (choice, begin) in [(1, vec![7]), (2, vec![9, 10, 11])] {
            let tokens = [&tokens[..], &begin].concat();
            let rest = expected(&tokens, &greedy(), 12 - begin.len());
            let rest: Vec<u32> = rest.iter().map(|g| g.token).collect();
            assert_eq!(
                heard.tokens(choice)[begin.len()..],
                rest,
                "a forced token is a row"
            );
        }
    }
    end(service, &handle);
}

#[test]
fn a_job_that_breaks_off_is_gone_within_a_pass() {
    let (service, handle) = service(400, ALL);
    let (sender, others) = channel();
    let mut n_left = 5;
    let (mut cancelled, _) = job(prompt(1, 300), greedy(), 10_000);
    cancelled.receive = Box::new(move |event| {
        n_left -= usize::from(matches!(event, Event::Token { .. }));
        sender.send(event).expect("it is held");
        match n_left {
            0 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    handle.submit(cancelled).expect("it is taken");
    let heard = run(&handle, job(prompt(2, 300), greedy(), 50));
    assert_eq!(heard.answers[0], expected(&prompt(2, 300), &greedy(), 50));
    let metrics = end(service, &handle);
    assert_eq!((metrics.cancelled, metrics.completed), (1, 1));
    let events: Vec<Event> = others.iter().collect();
    assert!(
        matches!(events.last(), Some(Event::Token { .. })),
        "nothing after the break"
    );
    assert_eq!(metrics.generated_tokens, 5 + 50);
}

/// A listener whose job goes on until the test lets it end.
fn endless(handle: &Handle, salt: u64) -> (engine::JobId, std::sync::mpsc::Receiver<Event>) {
    let (job, events) = job(prompt(salt, 50), greedy(), 15_000);
    let id = handle.submit(job).expect("it is taken");
    (id, events)
}

#[test]
fn cancelled_jobs_say_so_whether_they_run_or_wait() {
    let settings = Settings {
        sequences: 1,
        queue: 2,
        ..settings(0)
    };
    let (service, handle, _) = service_of(Toy::new(400), settings);
    let (running, heard_running) = endless(&handle, 1);
    let started = heard_running.recv().expect("it runs");
    assert!(matches!(
        started,
        Event::Started {
            cached_tokens: 0,
            ..
        }
    ));
    let (waiting, heard_waiting) = endless(&handle, 2);
    let (last, heard_last) = endless(&handle, 3);
    let (fourth, _) = job(prompt(4, 10), greedy(), 1);
    let refused = handle.submit(fourth).expect_err("the house is full");
    assert!(
        matches!(refused, Refusal::QueueFull { queue: 2 }),
        "{refused}"
    );
    handle.cancel(waiting);
    let heard = hear(&heard_waiting);
    assert_eq!(
        (heard.endings, heard.started_with),
        (vec![Some(Ending::Cancelled)], None)
    );
    handle.cancel(running);
    assert_eq!(hear(&heard_running).endings, [Some(Ending::Cancelled)]);
    handle.cancel(last);
    assert_eq!(hear(&heard_last).endings, [Some(Ending::Cancelled)]);
    handle.cancel(last);
    let metrics = end(service, &handle);
    assert_eq!(
        (metrics.cancelled, metrics.refused, metrics.requests),
        (3, 1, 3)
    );
}

#[test]
fn a_full_house_has_room_again_when_somebody_leaves() {
    let settings = Settings {
        sequences: 2,
        queue: 0,
        ..settings(0)
    };
    let (service, handle, _) = service_of(Toy::new(400), settings);
    for round in 0..20 {
        let events: Vec<_> = (0..2)
            .map(|i| {
                // The engine says that a job has ended, then that its place is free.
                let since = Instant::now();
                loop {
                    let (job, events) = job(prompt(i, 10), greedy(), 3);
                    match handle.submit(job) {
                        Ok(_) => break events,
                        Err(Refusal::QueueFull { .. }) => std::thread::yield_now(),
                        Err(refused) => panic!("round {round}: {refused}"),
                    }
                    assert!(
                        since.elapsed() < Duration::from_secs(300),
                        "no place is free"
                    );
                }
            })
            .collect();
        events
            .iter()
            .for_each(|events| assert_eq!(hear(events).answers[0].len(), 3));
    }
    end(service, &handle);
}

#[test]
fn deadlines_end_running_and_waiting_jobs() {
    let settings = Settings {
        sequences: 1,
        ..settings(0)
    };
    let (service, handle, _) = service_of(Toy::new(400), settings);
    let (running, heard_running) = endless(&handle, 1);
    heard_running.recv().expect("it runs");
    let (mut waiting, heard_waiting) = job(prompt(2, 10), greedy(), 5);
    waiting.deadline = Some(Instant::now());
    handle.submit(waiting).expect("it is taken");
    let heard = hear(&heard_waiting);
    assert_eq!(
        (heard.endings, heard.started_with),
        (vec![Some(Ending::Deadline)], None)
    );
    handle.cancel(running);
    hear(&heard_running);
    let metrics = end(service, &handle);
    assert_eq!((metrics.expired, metrics.cancelled), (1, 1));
}

#[test]
fn a_drain_finishes_what_is_there_and_a_stop_does_not() {
    for is_stop in [false, true] {
        let (service, handle) = service(400, ALL);
        let (first, heard) = job(prompt(1, 3000), greedy(), 200);
        handle.submit(first).expect("it is taken");
        match is_stop {
            true => handle.stop(),
            false => handle.drain(),
        }
        assert_eq!(handle.state(), State::Draining);
        let (late, _) = job(prompt(2, 10), greedy(), 1);
        assert!(matches!(handle.submit(late), Err(Refusal::Draining)));
        let ending = match is_stop {
            true => Ending::Cancelled,
            false => Ending::MaxTokens,
        };
        assert_eq!(hear(&heard).endings, [Some(ending)]);
        end(service, &handle);
    }
}

#[test]
fn without_handles_the_engine_finishes_and_ends() {
    let (service, handle) = service(400, 0);
    let (job, heard) = job(prompt(1, 100), greedy(), 20);
    handle.submit(job).expect("it is taken");
    drop(handle);
    service.join().expect("no failure");
    assert_eq!(hear(&heard).endings, [Some(Ending::MaxTokens)]);
}

#[test]
fn rows_that_are_not_finite_fail_their_own_job_only() {
    let (service, handle, orders) = service_of(Toy::new(400), settings(ALL));
    let clean = |salt, n| -> Vec<u32> { prompt(salt, n).iter().map(|t| t % 60).collect() };
    orders.lock().expect("no panic").poison = Some(63);
    let mut poisoned = clean(1, 900);
    poisoned.push(63);
    let (bad, heard_bad) = job(poisoned.clone(), greedy(), 5);
    let mut mask = TokenMask::none(N_VOCAB);
    (0..60).for_each(|token| mask.allow(token));
    let (mut good, heard_good) = job(clean(2, 700), greedy(), 40);
    good.guides = vec![Box::new(Script {
        constraints: vec![Constraint::Masked(mask); 41],
        ..Script::default()
    })];
    handle.submit(bad).expect("it is taken");
    handle.submit(good).expect("it is taken");
    let failure = hear(&heard_bad).failure.expect("it fails");
    assert!(
        failure.starts_with("the logits after position 900 are not finite"),
        "{failure}"
    );
    let heard = hear(&heard_good);
    assert_eq!((heard.answers[0].len(), heard.failure), (40, None));
    // What came before the bad row is not trusted either.
    orders.lock().expect("no panic").poison = None;
    let again = run(&handle, job(poisoned.clone(), greedy(), 5));
    assert_eq!(again.timings.cached_tokens, 0);
    assert_eq!(again.answers[0], expected(&poisoned, &greedy(), 5));
    let metrics = end(service, &handle);
    assert_eq!((metrics.failed, metrics.completed), (1, 2));
}

#[test]
fn a_lost_device_fails_every_job_by_its_name() {
    let (service, handle, orders) = service_of(Toy::new(400), settings(ALL));
    let jobs: Vec<_> = (0..3).map(|salt| endless(&handle, salt)).collect();
    for (_, heard) in &jobs {
        heard.recv().expect("it runs");
    }
    orders.lock().expect("no panic").pass_fails = Some(DeviceError::Lost("fell off".into()));
    for (_, heard) in &jobs {
        let failure = hear(heard).failure;
        assert_eq!(failure.as_deref(), Some("the device failed: fell off"));
    }
    let error = service.join().expect_err("it failed");
    assert_eq!(error.to_string(), "the device failed: fell off");
    assert!(matches!(handle.state(), State::Unhealthy { .. }));
    let (late, _) = job(prompt(2, 10), greedy(), 1);
    let refused = handle.submit(late).expect_err("no engine").to_string();
    assert_eq!(
        refused,
        "the engine has failed: the device failed: fell off"
    );
    handle.drain();
    assert!(
        matches!(handle.state(), State::Unhealthy { .. }),
        "it stays so"
    );
    assert_eq!(handle.metrics().failed, 3);
}

#[test]
fn a_panic_on_the_engine_s_thread_is_told_to_all() {
    let (service, handle) = service(400, ALL);
    let (_, heard) = endless(&handle, 1);
    let (mut bad, _) = job(prompt(2, 10), greedy(), 3);
    bad.receive = Box::new(|_: Event| -> ControlFlow<()> { panic!("a listener") });
    handle.submit(bad).expect("it is taken");
    let failure = hear(&heard).failure;
    assert_eq!(
        failure.as_deref(),
        Some("the engine's thread panicked: a listener")
    );
    service.join().expect_err("it failed");
}

#[test]
fn what_cannot_be_computed_is_refused_before_it_waits() {
    let (service, handle) = service(400, 0);
    let check = |tokens: Vec<u32>, edit: fn(&mut engine::Job), expected: &str| {
        let (mut job, events) = job(tokens, greedy(), 3);
        edit(&mut job);
        let refused = handle.submit(job).expect_err(expected);
        assert_eq!(refused.to_string(), expected);
        assert_eq!(events.iter().count(), 0, "nothing is heard");
    };
    let nothing: fn(&mut engine::Job) = |_| {};
    check(
        Vec::new(),
        nothing,
        "the prompt has no tokens; at least one is needed to continue from",
    );
    check(
        vec![1; 20_000],
        nothing,
        "the prompt has 20000 tokens, but the context holds 20000 and one place must be left for \
         the answer",
    );
    check(
        vec![1, 64],
        nothing,
        "token 64 is not in the vocabulary of 64",
    );
    check(
        vec![1],
        |job| job.guides.clear(),
        "0 choices, expected 1 to 64",
    );
    check(
        vec![1],
        |job| {
            let script = || Box::new(Script::default()) as Box<dyn Guide>;
            job.guides = (0..65).map(|_| script()).collect();
        },
        "65 choices, expected 1 to 64",
    );
    check(
        vec![1],
        |job| job.sampling.top_p = 1.5,
        "sampler setting top_p: found 1.5, allowed is 0 to 1",
    );
    check(
        vec![1],
        |job| {
            job.guides = vec![Box::new(Script {
                constraints: vec![Constraint::Forced(70)],
                ..Script::default()
            })];
        },
        "token 70 is not in the vocabulary of 64",
    );
    assert_eq!(end(service, &handle).refused, 7);
}

#[test]
fn a_guide_that_turns_wrong_fails_its_job() {
    let (service, handle) = service(400, ALL);
    let check = |constraint: Constraint, expected: &str| {
        let (mut job, events) = job(prompt(1, 20), greedy(), 9);
        job.guides = vec![Box::new(Script {
            constraints: vec![Constraint::Free, Constraint::Free, constraint],
            ..Script::default()
        })];
        let heard: Heard = run(&handle, (job, events));
        assert_eq!(heard.failure.as_deref(), Some(expected));
        assert_eq!(heard.answers[0].len(), 2);
    };
    check(
        Constraint::Forced(64),
        "token 64 is not in the vocabulary of 64",
    );
    check(
        Constraint::Masked(TokenMask::none(N_VOCAB)),
        "token mask: it allows none of 64 tokens, expected at least one",
    );
    assert_eq!(end(service, &handle).failed, 2);
}

/// Forced tokens need no pass to be known, but whoever is beside them does.
#[test]
fn a_long_text_that_is_forced_stops_nobody() {
    const N_FORCED: usize = 5000;
    let (service, handle) = service(400, 0);
    let (sender, events) = channel();
    let listen = |who: &'static str| {
        let sender = sender.clone();
        move |event: Event| {
            if matches!(event, Event::Token { .. }) {
                sender.send(who).ok();
            }
            ControlFlow::Continue(())
        }
    };
    let (mut other, _) = job(prompt(2, 10), greedy(), 5000);
    other.receive = Box::new(listen("other"));
    handle.submit(other).expect("it is taken");
    let (mut forced, _) = job(prompt(1, 10), greedy(), N_FORCED);
    forced.logprobs = None;
    forced.guides = vec![Box::new(Script {
        constraints: vec![Constraint::Forced(7); N_FORCED],
        ..Script::default()
    })];
    forced.receive = Box::new(listen("forced"));
    handle.submit(forced).expect("it is taken");
    handle.drain();
    service.join().expect("no failure");
    drop(sender);
    let (mut n_at_once, mut most, mut n_forced) = (0, 0, 0);
    for who in events.iter() {
        n_at_once = if who == "forced" { n_at_once + 1 } else { 0 };
        n_forced += usize::from(who == "forced");
        most = most.max(n_at_once);
    }
    assert_eq!(n_forced, N_FORCED);
    assert!(most <= 512, "{most} tokens between two of another answer");
}

#[test]
fn a_guide_that_fails_says_why() {
    #[derive(Clone)]
    struct Failing;
    impl Guide for Failing {
        fn constraint(&mut self) -> Constraint {
            Constraint::Masked(TokenMask::none(N_VOCAB))
        }
        fn accept(&mut self, _: u32) -> model::Verdict {
            model::Verdict::Continue
        }
        fn failure(&self) -> Option<String> {
            Some("no word rhymes".into())
        }
        fn fork(&self) -> Box<dyn Guide> {
            Box::new(self.clone())
        }
    }
    let (service, handle) = service(400, ALL);
    let (mut job, events) = job(prompt(1, 20), greedy(), 9);
    job.guides = vec![Box::new(Failing)];
    let heard: Heard = run(&handle, (job, events));
    let expected = "the answer cannot go on: no word rhymes";
    assert_eq!(heard.failure.as_deref(), Some(expected));
    end(service, &handle);
}

#[test]
fn budgets_and_the_context_end_an_answer() {
    let settings = Settings {
        n_ctx: Some(700),
        ..settings(ALL)
    };
    let (service, handle, _) = service_of(Toy::new(400), settings);
    let (mut unlimited, events) = job(prompt(1, 690), greedy(), 0);
    unlimited.max_tokens = None;
    let heard = run(&handle, (unlimited, events));
    assert_eq!(
        (heard.answers[0].len(), heard.endings[0]),
        (10, Some(Ending::Context))
    );
    assert_eq!(heard.prefilled, [(512, 690), (690, 690)]);
    // No token at all: the prompt is read, for those that come later.
    let heard = run(&handle, job(prompt(2, 300), greedy(), 0));
    assert_eq!(heard.endings, [Some(Ending::MaxTokens)]);
    assert_eq!((heard.answers[0].len(), heard.prefilled.len()), (0, 1));
    let heard = run(&handle, job(prompt(2, 300), greedy(), 4));
    assert_eq!(
        (heard.timings.cached_tokens, heard.started_with),
        (299, Some(299))
    );
    assert_eq!(heard.answers[0], expected(&prompt(2, 300), &greedy(), 4));
    end(service, &handle);
}

#[test]
fn counts_and_times_are_kept() {
    let (service, handle) = service(400, ALL);
    let (job, events) = job(prompt(1, 600), greedy(), 10);
    let heard = run(&handle, (job, events));
    let metrics = end(service, &handle);
    assert_eq!(
        (
            metrics.requests,
            metrics.prompt_tokens,
            metrics.generated_tokens
        ),
        (1, 600, 10)
    );
    assert_eq!(
        (
            metrics.cache_lookups,
            metrics.cache_hits,
            metrics.cached_tokens
        ),
        (1, 0, 0)
    );
    assert_eq!((metrics.passes, metrics.rows), (2 + 9, 600 + 9));
    assert_eq!(metrics.pass_time.count(), metrics.passes);
    assert_eq!(
        (metrics.first_token.count(), metrics.token_interval.count()),
        (1, 9)
    );
    assert!(metrics.first_token.sum_seconds > 0.0);
    assert_eq!((heard.timings.drafted, heard.timings.preempted), (0, 0));
    assert!(heard.timings.prefill > Duration::ZERO);
    let default = CacheUse::default();
    assert!(default.is_on && default.salt.is_none());
}
