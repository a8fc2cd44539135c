//! The machine's read bandwidth, as decode could see it: every thread walks its
//! own memory once, front to back, in large pages where the system has them.
//!
//! What a reader would get wrong: a mapped file often lies in small pages, whose
//! translation costs up to two thirds of this on virtual machines. That is part
//! of the gap, not of the limit: `--no-mmap` reads at this speed.

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

/// Bytes a second that `threads` threads read together.
///
/// # Errors
/// If there is no memory to walk.
pub fn measure(threads: usize) -> std::io::Result<f64> {
    let barrier = Barrier::new(threads);
    let bytes = MOST_BYTES_PER_THREAD.min(MOST_BYTES / threads);
    let memories = (0..threads).map(|_| MmapMut::map_anon(bytes));
    let memories = memories.collect::<Result<Vec<_>, _>>()?;
    let walks = std::thread::scope(|scope| {
        let workers: Vec<_> = memories
            .into_iter()
            .map(|memory| scope.spawn(|| walk_times(memory, &barrier)))
            .collect();
        let times = workers.into_iter().map(|w| w.join().expect("a walk ends"));
        times.collect::<Vec<_>>()
    });
    let slowest = |walk: usize| walks.iter().map(|times| times[walk]).fold(0.0, f64::max);
    let best = (0..WALKS).map(slowest).fold(f64::INFINITY, f64::min);
    Ok((threads * bytes) as f64 / best)
}

/// Seconds of each walk of one thread; all threads start a walk together.
fn walk_times(mut memory: MmapMut, barrier: &Barrier) -> [f64; WALKS] {
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
        start.elapsed().as_secs_f64()
    })
}
