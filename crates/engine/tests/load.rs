//! Many jobs at once on few pages, with people who leave.

mod common;

use common::{Toy, alone, end, greedy, hear, hold, job, mix, prompt, seeded};
use engine::{Ending, Event, Job, Metrics, SamplerSettings, Service, Settings};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// What becomes of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Stays,
    /// Breaks off after so many events.
    Leaves(usize),
    IsCancelled,
    IsLate,
}

struct Case {
    tokens: Vec<u32>,
    sampling: SamplerSettings,
    n_answer: usize,
    uses_cache: bool,
    fate: Fate,
}

/// Jobs of many lengths; prompts of a family begin alike. The first twenty grow
/// together from a page to four: more than was there when they were admitted.
fn cases(seed: u64, n: usize) -> Vec<Case> {
    let case = |i: u64| {
        let random = |what: u64, most: u64| mix(mix(seed, i), what) % most;
        let mut tokens = prompt(random(1, 4), random(2, 300) as usize);
        tokens.extend(prompt(1000 + i, 1 + random(3, 150) as usize));
        if i < 20 {
            return Case {
                tokens: prompt(1000 + i, 10 + i as usize),
                sampling: seeded(i),
                n_answer: 900,
                uses_cache: true,
                fate: Fate::Stays,
            };
        }
        Case {
            tokens,
            sampling: match random(4, 2) {
                0 => greedy(),
                _ => seeded(i),
            },
            n_answer: 1 + random(5, 300) as usize,
            uses_cache: random(6, 5) > 0,
            fate: match random(7, 10) {
                0 => Fate::Leaves(1 + random(8, 60) as usize),
                1 => Fate::IsCancelled,
                2 => Fate::IsLate,
                _ => Fate::Stays,
            },
        }
    };
    (0..n as u64).map(case).collect()
}

fn job_of(case: &Case) -> (Job, std::sync::mpsc::Receiver<Event>) {
    let (mut job, events) = job(case.tokens.clone(), case.sampling.clone(), case.n_answer);
    job.cache.is_on = case.uses_cache;
    if case.fate == Fate::IsLate {
        job.deadline = Some(Instant::now() + Duration::from_millis(20));
    }
    if let Fate::Leaves(n_events) = case.fate {
        let mut left = n_events;
        let mut inner = job.receive;
        job.receive = Box::new(move |event| {
            left -= 1;
            match left {
                0 => ControlFlow::Break(()),
                _ => inner.event(event),
            }
        });
    }
    (job, events)
}

/// Whoever stays gets the answer that it gets alone, whatever the others do; all
/// pages return.
fn check(seed: u64, toy: fn(usize) -> Toy, max_slabs: usize, prefix_cache_bytes: u64) -> Metrics {
    let settings = Settings {
        queue: 1000,
        prefix_cache_bytes,
        ..Settings::default()
    };
    let service = Service::start(Box::new(toy(max_slabs)), settings).expect("a service");
    let handle = service.handle();
    let cases = cases(seed, 100);
    let held = hold(&handle);
    let submitted: Vec<_> = cases
        .iter()
        .map(|case| {
            let (job, events) = job_of(case);
            (handle.submit(job).expect("it is taken"), events)
        })
        .collect();
    for (case, (id, _)) in cases.iter().zip(&submitted) {
        if case.fate == Fate::IsCancelled {
            handle.cancel(*id);
        }
    }
    drop(held);
    let mut n_whole = 0;
    for (case, (_, events)) in cases.iter().zip(&submitted) {
        if let Fate::Leaves(_) = case.fate {
            continue;
        }
        let heard = hear(events);
        assert_eq!(heard.failure, None, "{:?}", case.fate);
        let expected = || {
            let (sampling, n) = (case.sampling.clone(), case.n_answer);
            alone(toy(1000), &case.tokens, sampling, n)
        };
        match heard.endings[0] {
            Some(Ending::MaxTokens) => {
                assert!(heard.answers[0] == expected(), "another answer than alone");
                n_whole += 1;
            }
            Some(Ending::Cancelled | Ending::Deadline) => {
                assert_ne!(case.fate, Fate::Stays, "somebody else's fate");
                let n = heard.answers[0].len();
                assert!(
                    heard.answers[0] == expected()[..n],
                    "another beginning than alone"
                );
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(n_whole > cases.len() / 2);
    let metrics = end(service, &handle);
    assert_eq!(metrics.requests, cases.len() as u64 + 1);
    let ended = metrics.completed + metrics.cancelled + metrics.expired + metrics.failed;
    assert_eq!((ended, metrics.failed), (metrics.requests, 0));
    assert!(metrics.preemptions > 0, "a test of nothing: {metrics:?}");
    metrics
}

#[test]
fn every_answer_is_its_own_under_load_without_a_cache() {
    let metrics = check(1, Toy::new, 6, 0);
    assert_eq!((metrics.cached_tokens, metrics.cache_lookups), (0, 0));
    let metrics = check(4, Toy::without_window, 16, 0);
    assert!(
        metrics.recomputed_tokens > 0,
        "a test of nothing: {metrics:?}"
    );
}

#[test]
fn every_answer_is_its_own_under_load_with_a_small_cache() {
    let metrics = check(2, Toy::new, 8, 1 << 18);
    assert!(
        metrics.cached_tokens > 0 && metrics.cache_evictions > 0,
        "a test of nothing: {metrics:?}"
    );
}

#[test]
fn every_answer_is_its_own_under_load_with_a_cache_as_large_as_the_pool() {
    for (seed, toy, max_slabs) in [
        (3, Toy::new as fn(usize) -> Toy, 6),
        (5, Toy::without_window, 16),
    ] {
        let metrics = check(seed, toy, max_slabs, u64::MAX);
        assert!(
            metrics.cached_tokens > 0 && metrics.cache_evictions > 0,
            "a test of nothing: {metrics:?}"
        );
    }
}
