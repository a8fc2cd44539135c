//! The pool: every task once, panics reach the caller, threads come and go.

use cpu::pool::{MAX_THREADS, Pool, available_threads};
use cpu::{Cpu, CpuOptions, Error, Isa};
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn pool(threads: usize) -> Pool {
    Pool::new(threads).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_task_runs_once() {
    for threads in [1, 2, 3, 8] {
        let mut pool = pool(threads);
        assert_eq!(pool.threads(), threads);
        for n_tasks in [0, 1, 2, 3, 7, 64, 1000] {
            let counts: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(n_tasks, &|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            let counts: Vec<usize> = counts.into_iter().map(AtomicUsize::into_inner).collect();
            assert_eq!(counts, vec![1; n_tasks], "{threads} threads");
        }
    }
}

/// What a run has written is there when the run returns, run after run, without
/// pause and with workers asleep.
#[test]
fn runs_follow_each_other() {
    for threads in [2, 3, 8] {
        let mut pool = pool(threads);
        let mut data = vec![0u64; 96];
        for round in 0..2000u64 {
            pool.for_chunks(&mut data, 8, &|_, part| {
                part.iter_mut().for_each(|v| *v = *v * 3 + round);
            });
            if round % 500 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert!(data.iter().all(|v| *v == data[0]), "round {round}");
            data.iter_mut().for_each(|v| *v %= 1000);
        }
    }
}

/// All threads take part: tasks that wait for each other end.
#[test]
fn tasks_run_at_the_same_time() {
    for threads in [2, 3, 8] {
        let barrier = Barrier::new(threads);
        pool(threads).run(threads, &|_| {
            barrier.wait();
        });
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives() {
    for threads in [1, 2, 8] {
        let mut pool = pool(threads);
        let ended = AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(16, &|i| {
                assert!(i != 11, "task eleven");
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let panic = caught.expect_err("the panic of a task");
        let message = panic.downcast_ref::<&str>().copied();
        assert_eq!(message, Some("task eleven"));
        // On one thread the tasks behind it do not run.
        assert_eq!(ended.into_inner(), if threads == 1 { 11 } else { 15 });
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45, "the next run");
    }
}

#[test]
fn parts_are_the_ones_named() {
    let mut pool = pool(3);
    let mut data: Vec<usize> = vec![0; 20];
    pool.for_parts(&mut data, &[3, 3, 10, 19], &|index, part| {
        part.fill(index + 1);
    });
    let mut expected = [[1; 3].as_slice(), &[3; 7], &[4; 9], &[0]].concat();
    assert_eq!(data, expected);
    let mut other = vec![0u8; 7];
    pool.for_pairs((&mut data, 3), (&mut other, 1), &|index, left, right| {
        left.fill(index * 10);
        right.fill(index as u8);
    });
    expected = (0..20).map(|i| i / 3 * 10).collect();
    assert_eq!((data, other), (expected, vec![0, 1, 2, 3, 4, 5, 6]));
}

#[test]
fn parts_outside_of_the_data_are_refused() {
    for ends in [&[3, 2][..], &[5, 9]] {
        let refused = catch_unwind(|| {
            pool(2).for_parts(&mut [0u8; 8], ends, &|_, part| part.fill(1));
        });
        assert!(refused.is_err(), "{ends:?}");
    }
}

#[test]
fn thread_counts_that_make_no_sense() {
    for found in [0, MAX_THREADS + 1, usize::MAX] {
        let error = Pool::new(found).err().expect("an error");
        assert!(matches!(error, Error::ThreadCount { found: f } if f == found));
        let options = CpuOptions {
            threads: Some(found),
            isa: None,
        };
        let error = Cpu::new(options).err().expect("an error").to_string();
        assert_eq!(error, format!("threads: found {found}, expected 1 to 256"));
    }
    let threads = available_threads();
    assert!((1..=MAX_THREADS).contains(&threads));
    let cpu = Cpu::new(CpuOptions::default()).expect("the machine's own settings");
    assert_eq!((cpu.threads(), cpu.isa()), (threads, Isa::detect()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn chunks_cover_the_data(threads in 1usize..5, len in 1usize..40, n in 0usize..300) {
        let mut data = vec![usize::MAX; n];
        pool(threads).for_chunks(&mut data, len, &|index, part| part.fill(index));
        let expected: Vec<usize> = (0..n).map(|i| i / len).collect();
        prop_assert_eq!(data, expected);
    }
}
