//! Few pages, small devices, short passes: capacity is a value, never a wrong bit.

mod common;

use common::{
    ALL, PAGE, Script, Toy, end, expected, greedy, hear, hold, job, prompt, run, seeded, service,
    service_of, settings,
};
use engine::{Event, Service, Settings, choice_seed};
use model::{DeviceError, Guide};
use std::sync::Arc;

#[test]
fn sequences_that_lose_their_pages_go_on_with_the_same_bits() {
    // Each needs a page of each class at first, and four of both in the end.
    for prefix_cache_bytes in [0, ALL] {
        let (service, handle) = service(18, prefix_cache_bytes);
        let held = hold(&handle);
        let cases: Vec<_> = (0..24)
            .map(|i| (prompt(i, 20 + 9 * i as usize), seeded(i)))
            .collect();
        let submitted = cases.iter().map(|(tokens, sampling)| {
            let (job, events) = job(tokens.clone(), sampling.clone(), 800);
            handle.submit(job).expect("it is taken");
            events
        });
        let submitted: Vec<_> = submitted.collect();
        drop(held);
        for ((tokens, sampling), events) in cases.iter().zip(&submitted) {
            let heard = hear(events);
            assert_eq!(heard.answers.len(), 1, "{:?}", heard.failure);
            assert!(
                heard.answers[0] == expected(tokens, sampling, 800),
                "other bits"
            );
            // Others begin alike by chance, for a token or two.
            let cached_tokens = heard.timings.cached_tokens;
            assert!(
                cached_tokens < 8,
                "{cached_tokens}: its own rows are no hit"
            );
        }
        let metrics = end(service, &handle);
        assert!(metrics.preemptions > 0, "a test of nothing: {metrics:?}");
        assert_eq!((metrics.completed, metrics.failed), (25, 0));
    }
}

/// Choices of an old job come after newer jobs in turn, and before them by age.
#[test]
fn choices_that_lose_their_pages_go_on_with_the_same_bits() {
    const N_CHOICES: u32 = 4;
    let (service, handle) = service(12, ALL);
    let held = hold(&handle);
    let submitted = (0..6).map(|i| {
        let (mut job, events) = job(prompt(i, 30), seeded(i), 500);
        let guide = || Box::new(Script::default()) as Box<dyn Guide>;
        job.guides = (0..N_CHOICES).map(|_| guide()).collect();
        handle.submit(job).expect("it is taken");
        events
    });
    let submitted: Vec<_> = submitted.collect();
    drop(held);
    for (i, events) in (0..).zip(&submitted) {
        let heard = hear(events);
        assert_eq!(heard.failure, None);
        for choice in 0..N_CHOICES {
            let sampling = seeded(choice_seed(i, choice));
            let expected = expected(&prompt(i, 30), &sampling, 500);
            assert!(heard.answers[choice as usize] == expected, "other bits");
        }
    }
    let metrics = end(service, &handle);
    assert!(metrics.preemptions > 0, "a test of nothing: {metrics:?}");
}

#[test]
fn a_device_with_less_memory_than_it_said_is_a_matter_of_capacity() {
    let (service, handle, orders) = service_of(Toy::new(400), settings(ALL));
    orders.lock().expect("no panic").n_real_slabs = Some(4);
    let held = hold(&handle);
    let cases: Vec<_> = (0..6).map(|i| (prompt(i, 600), seeded(i))).collect();
    let submitted = cases.iter().map(|(tokens, sampling)| {
        let (job, events) = job(tokens.clone(), sampling.clone(), 20);
        handle.submit(job).expect("it is taken");
        events
    });
    let submitted: Vec<_> = submitted.collect();
    drop(held);
    for ((tokens, sampling), events) in cases.iter().zip(&submitted) {
        let heard = hear(events);
        assert_eq!(heard.failure, None);
        assert_eq!(heard.answers[0], expected(tokens, sampling, 20));
    }
    let metrics = end(service, &handle);
    assert!(metrics.preemptions > 0, "a test of nothing");
}

#[test]
fn the_context_is_what_the_pages_hold() {
    let start = |max_slabs, n_ctx| {
        let settings = Settings {
            n_ctx,
            ..settings(0)
        };
        Service::start(Box::new(Toy::new(max_slabs)), settings)
    };
    let service = start(400, None).expect("a service");
    assert_eq!(service.handle().info().n_ctx, 20_000, "the model's own");
    // Two slabs are for the window; the third holds twelve full pages.
    let service = start(3, None).expect("a service");
    assert_eq!(service.handle().info().n_ctx, 12 * PAGE);
    let refused = |max_slabs, n_ctx| match start(max_slabs, n_ctx) {
        Ok(_) => panic!("it starts"),
        Err(error) => error.to_string(),
    };
    assert_eq!(
        refused(3, Some(12 * PAGE + 1)),
        "a context of 3073 tokens needs 4 slabs of pages, but the memory for keys and values \
         holds 3"
    );
    assert_eq!(
        refused(1, None),
        "a context of 2 tokens needs 2 slabs of pages, but the memory for keys and values holds 1"
    );
    assert_eq!(
        refused(3, Some(1)),
        "a context of 1 tokens is outside what this model can hold: 2 to 20000"
    );
}

/// One sequence that fills every slab, after others have spread over them.
#[test]
fn a_sequence_that_fits_alone_always_ends() {
    let (service, handle) = service(3, ALL);
    let others = (10..16).map(|salt| {
        let (job, events) = job(prompt(salt, 260), seeded(salt), 30);
        handle.submit(job).expect("it is taken");
        (salt, events)
    });
    let others: Vec<_> = others.collect();
    let (long, events) = job(prompt(1, 2000), seeded(1), 1072);
    handle.submit(long).expect("it is taken");
    for (salt, events) in &others {
        let heard = hear(events);
        assert_eq!(
            heard.answers[0],
            expected(&prompt(*salt, 260), &seeded(*salt), 30)
        );
    }
    let heard = hear(&events);
    assert_eq!(heard.failure, None);
    assert!(heard.answers[0] == expected(&prompt(1, 2000), &seeded(1), 1072));
    end(service, &handle);
}

/// Without room for even one sequence in the device, what there was is given up
/// and computed again; once. A device that has room for none is no device.
#[test]
fn a_sequence_that_is_alone_starts_again_once() {
    let out_of_memory = || DeviceError::OutOfMemory {
        what: "slabs",
        wanted_bytes: 1,
    };
    let (service, handle, orders) = service_of(Toy::new(400), settings(ALL));
    let (alone, events) = job(prompt(1, 50), seeded(1), 200);
    let order = Arc::clone(&orders);
    let (mut alone, mut n_tokens) = (alone, 0);
    let mut inner = alone.receive;
    alone.receive = Box::new(move |event| {
        n_tokens += usize::from(matches!(event, Event::Token { .. }));
        if n_tokens == 9 && matches!(event, Event::Token { .. }) {
            order.lock().expect("no panic").pass_fails = Some(out_of_memory());
        }
        inner.event(event)
    });
    let heard = run(&handle, (alone, events));
    assert_eq!((heard.timings.preempted, heard.failure), (1, None));
    assert_eq!(heard.answers[0], expected(&prompt(1, 50), &seeded(1), 200));
    // The two slabs that were in use are all there is from now on.
    let heard = run(&handle, job(prompt(2, 13 * PAGE), greedy(), 1));
    let failure = heard.failure.expect("it does not fit");
    assert_eq!(failure, "no free full page: 2 of 2 slabs are in use");
    let heard = run(&handle, job(prompt(3, 100), greedy(), 10));
    assert_eq!(heard.answers[0], expected(&prompt(3, 100), &greedy(), 10));
    end(service, &handle);

    let (service, handle, orders) = service_of(Toy::new(400), settings(ALL));
    orders.lock().expect("no panic").n_real_slabs = Some(1);
    let failure = run(&handle, job(prompt(2, 10), greedy(), 1)).failure;
    let message = "the device has no memory for 1 bytes of slabs";
    assert_eq!(failure.as_deref(), Some(message));
    assert_eq!(service.join().expect_err("it failed").to_string(), message);
}

/// Prompts wait for their pages instead of taking them from each other.
#[test]
fn a_prompt_waits_until_its_pages_are_there() {
    let (service, handle) = service(4, 0);
    let jobs: Vec<_> = (0..4)
        .map(|salt| {
            let (job, events) = job(prompt(salt, 2900), greedy(), 30);
            handle.submit(job).expect("it is taken");
            events
        })
        .collect();
    for (salt, events) in (0..).zip(&jobs) {
        let heard = hear(events);
        assert_eq!(
            heard.answers[0],
            expected(&prompt(salt, 2900), &greedy(), 30)
        );
        assert_eq!(heard.timings.preempted, 0);
    }
    assert_eq!(end(service, &handle).preemptions, 0);
}

#[test]
fn passes_stay_within_the_rows_whose_bits_hold() {
    let mut toy = Toy::new(400);
    toy.max_rows = 16;
    let (service, handle, orders) = service_of(toy, settings(ALL));
    assert_eq!(handle.info().sequences, 8, "and eight rows for a prefill");
    let jobs = (0..12).map(|salt| {
        let (job, events) = job(prompt(salt, 90), seeded(salt), 20);
        handle.submit(job).expect("it is taken");
        events
    });
    let jobs: Vec<_> = jobs.collect();
    for (salt, events) in (0..).zip(&jobs) {
        assert_eq!(
            hear(events).answers[0],
            expected(&prompt(salt, 90), &seeded(salt), 20)
        );
    }
    assert!(
        orders
            .lock()
            .expect("no panic")
            .passes
            .iter()
            .all(|&n| n <= 16)
    );
    end(service, &handle);
}
