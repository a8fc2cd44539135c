//! The machine's read bandwidth, as decode sees it: every thread walks its own
//! memory once, front to back.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Bytes of a thread's memory: far beyond any cache.
const BYTES_PER_THREAD: usize = 256 << 20;
/// Walks; the best counts, since everything else on the machine only slows.
const WALKS: usize = 5;

/// Bytes a second that `threads` threads read together.
pub fn measure(threads: usize) -> f64 {
    let barrier = Barrier::new(threads);
    let walks = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| walk_times(&barrier)))
            .collect();
        let times = workers.into_iter().map(|w| w.join().expect("a walk ends"));
        times.collect::<Vec<_>>()
    });
    let slowest = |walk: usize| walks.iter().map(|times| times[walk]).fold(0.0, f64::max);
    let best = (0..WALKS).map(slowest).fold(f64::INFINITY, f64::min);
    (threads * BYTES_PER_THREAD) as f64 / best
}

/// Seconds of each walk of one thread; all threads start a walk together.
fn walk_times(barrier: &Barrier) -> [f64; WALKS] {
    // Filled with something: untouched pages would all be the same zero page.
    let memory: Vec<u64> = (0..BYTES_PER_THREAD as u64 / 8).collect();
    std::array::from_fn(|_| {
        barrier.wait();
        let start = Instant::now();
        let mut sums = [0u64; 8];
        for words in memory.as_chunks::<8>().0 {
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum = sum.wrapping_add(*word);
            }
        }
        black_box(sums);
        start.elapsed().as_secs_f64()
    })
}
