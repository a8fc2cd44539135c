//! The machine's read bandwidth, as decode could see it: every thread walks its
//! own memory once, front to back, in large pages where the system has them.
//!
//! What a reader would get wrong: a walk lasts from the first thread's start to the
//! last one's end. Threads that run one after the other on one processor do not
//! read together, however fast each of them is. And a mapped file often lies in
//! small pages, whose translation costs up to two thirds of this on virtual
//! machines. That is part of the gap, not of the limit: `--no-mmap` reads at this
//! speed.

use memmap2::MmapMut;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Bytes of a thread's memory: far beyond its caches.
const MOST_BYTES_PER_THREAD: usize = 256 << 20;
/// Bytes of all threads' memory: a figure is not worth more.
const MOST_BYTES: usize = 2 << 30;
/// Walks; the best counts, since everything else on the machine only slows.
const WALKS: usize = 5;

/// Start and end of each walk of one thread.
type Times = [(Instant, Instant); WALKS];

/// Bytes a second that `threads` threads read together.
///
/// # Errors
/// If there is no memory to walk.
pub fn measure(threads: usize) -> std::io::Result<f64> {
    let barrier = Barrier::new(threads);
    let bytes = MOST_BYTES_PER_THREAD.min(MOST_BYTES / threads);
    let memories = (0..threads).map(|_| MmapMut::map_anon(bytes));
    let memories = memories.collect::<Result<Vec<_>, _>>()?;
    let times: Vec<Times> = std::thread::scope(|scope| {
        let workers: Vec<_> = memories
            .into_iter()
            .map(|memory| scope.spawn(|| walk_times(memory, &barrier)))
            .collect();
        let times = workers.into_iter().map(|w| w.join().expect("a walk ends"));
        times.collect()
    });
    Ok((threads * bytes) as f64 / best_walk(&times))
}

/// Seconds of the shortest walk of all threads together.
fn best_walk(times: &[Times]) -> f64 {
    let seconds = |walk: usize| {
        let start = times.iter().map(|t| t[walk].0).min();
        let end = times.iter().map(|t| t[walk].1).max();
        let span = start.zip(end).map(|(start, end)| end - start);
        span.map_or(f64::INFINITY, |span| span.as_secs_f64())
    };
    (0..WALKS).map(seconds).fold(f64::INFINITY, f64::min)
}

/// The walks of one thread; all threads begin a walk when the last is ready.
fn walk_times(mut memory: MmapMut, barrier: &Barrier) -> Times {
    #[cfg(target_os = "linux")]
    // Only a wish: the figure is what the system gives.
    memory.advise(memmap2::Advice::HugePage).ok();
    // Untouched pages would all be the same zero page.
    memory.fill(1);
    std::array::from_fn(|_| {
        barrier.wait();
        let start = Instant::now();
        let mut sums = [0u64; 8];
        for bytes in memory.as_chunks::<64>().0 {
            for (sum, word) in sums.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
            }
        }
        black_box(sums);
        (start, Instant::now())
    })
}

#[cfg(test)]
mod tests {
    use super::{WALKS, best_walk};
    use std::time::{Duration, Instant};

    /// Two threads of 1 s each that run in turn take 2 s.
    #[test]
    fn a_walk_lasts_from_the_first_start_to_the_last_end() {
        let zero = Instant::now();
        let at = |from: u64, to: u64| {
            let instant = |s| zero + Duration::from_secs(s);
            [(instant(from), instant(to)); WALKS]
        };
        assert_eq!(best_walk(&[at(0, 1), at(1, 2)]), 2.0);
        assert_eq!(best_walk(&[at(1, 4), at(0, 3)]), 4.0);
        let mut times = [at(0, 3), at(0, 2)];
        times[0][1].1 = zero + Duration::from_secs(1);
        assert_eq!(best_walk(&times), 2.0, "the best walk of both counts");
    }
}
