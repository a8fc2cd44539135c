//! Threads that live as long as the backend and share the tasks of one
//! operation at a time.
//!
//! Tasks are numbered; each thread, the caller included, takes the next number
//! until none is left, so a thread that the system holds back delays at most
//! the task it has begun. What a task computes must not depend on who takes it:
//! then the number of threads changes no bit. Nothing is allocated per run.
//!
//! A worker without a task spins for a short time, because the next operation
//! usually follows within microseconds, then sleeps.

use crate::Error;
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads that may be asked for.
pub const MAX_THREADS: usize = 256;

/// How long a worker without a task polls before it sleeps. Waking one costs
/// the caller a system call and the worker some 50 us; polling longer takes the
/// processor from others between two requests.
const POLLING: Duration = Duration::from_micros(100);

/// Polls that only pause; after them each poll also yields the processor, since
/// machines are shared. About 10 us.
const PAUSES: u32 = 300;

/// Processors that this process may use: affinity and the CPU quota of its
/// control group counted in.
pub fn available_threads() -> usize {
    // The standard library reads sched_getaffinity and the cgroup files.
    std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS))
}

/// One operation's tasks: called with each number below `n`.
type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// Tasks over two stretches of data.
type PairTask<'a, T, U> = &'a (dyn Fn(usize, &mut [T], &mut [U]) + Sync);

/// What caller and workers share.
struct Shared {
    /// Number of tasks in the upper half, next task in the lower.
    ticket: AtomicU64,
    /// Tasks done.
    done: AtomicUsize,
    /// The tasks of the current run. Written by the caller while no task is
    /// claimed; read by whoever has claimed one.
    task: UnsafeCell<Task<'static>>,
    /// The first panic of a run.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    is_closed: AtomicBool,
    n_asleep: AtomicUsize,
    bed: Mutex<()>,
    alarm: Condvar,
    /// Do the threads fit the processors, so that polling costs nobody?
    may_poll: bool,
}

// SAFETY: `task` is the one field that is not Sync by itself. It is written only
// in `Pool::run`, which has `&mut Pool`, before the ticket is published, and
// only after every claimed task of the run before was counted in `done`; it is
// read only after a claim from the published ticket.
unsafe impl Sync for Shared {}

impl Shared {
    /// Is there a task to take?
    fn has_task(&self) -> bool {
        let (n, next) = parts(self.ticket.load(Ordering::SeqCst));
        next < n
    }

    /// Takes tasks until none is left.
    fn work(&self) {
        let mut ticket = self.ticket.load(Ordering::Acquire);
        loop {
            let (n, next) = parts(ticket);
            if next >= n {
                return;
            }
            let claim = self.ticket.compare_exchange_weak(
                ticket,
                ticket + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            if let Err(now) = claim {
                ticket = now;
                continue;
            }
            self.perform(next as usize);
            ticket = self.ticket.load(Ordering::Acquire);
        }
    }

    /// Performs the claimed task `index`.
    fn perform(&self, index: usize) {
        // SAFETY: a task of the current run is claimed and not yet counted, so
        // the caller neither replaces the reference nor ends its borrow.
        let task = unsafe { *self.task.get() };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(index))) {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(panic);
        }
        self.done.fetch_add(1, Ordering::Release);
    }

    /// The life of a worker.
    fn serve(&self) {
        loop {
            self.work();
            if self.is_closed.load(Ordering::Acquire) {
                return;
            }
            self.wait();
        }
    }

    /// Polls, then sleeps, until there may be a task.
    fn wait(&self) {
        if self.may_poll {
            let start = Instant::now();
            let mut n_polls = 0u32;
            loop {
                if self.has_task() || self.is_closed.load(Ordering::Relaxed) {
                    return;
                }
                n_polls += 1;
                if n_polls <= PAUSES {
                    std::hint::spin_loop();
                } else if start.elapsed() < POLLING {
                    std::thread::yield_now();
                } else {
                    break;
                }
            }
        }
        let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        // Counted before looking again: either the caller sees the count, or
        // this sees the caller's tasks.
        self.n_asleep.fetch_add(1, Ordering::SeqCst);
        while !self.has_task() && !self.is_closed.load(Ordering::SeqCst) {
            let woken = self.alarm.wait(bed);
            bed = woken.unwrap_or_else(PoisonError::into_inner);
        }
        self.n_asleep.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_sleepers(&self) {
        if self.n_asleep.load(Ordering::SeqCst) > 0 {
            // Whoever is between looking and waiting holds the lock.
            drop(self.bed.lock().unwrap_or_else(PoisonError::into_inner));
            self.alarm.notify_all();
        }
    }
}

/// Number of tasks and next task of a ticket.
fn parts(ticket: u64) -> (u64, u64) {
    (ticket >> 32, ticket & u64::from(u32::MAX))
}

/// The threads of a backend.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller included.
    ///
    /// # Errors
    /// [`Error::ThreadCount`], [`Error::ThreadRefused`].
    pub fn new(threads: usize) -> Result<Pool, Error> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(Error::ThreadCount { found: threads });
        }
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            task: UnsafeCell::new(&|_| {}),
            panic: Mutex::new(None),
            is_closed: AtomicBool::new(false),
            n_asleep: AtomicUsize::new(0),
            bed: Mutex::new(()),
            alarm: Condvar::new(),
            may_poll: threads <= available_threads(),
        });
        let mut pool = Pool {
            shared,
            workers: Vec::with_capacity(threads - 1),
        };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("cpu-{index}"));
            let worker = builder.spawn(move || shared.serve());
            // On an error the pool so far is dropped, which joins its workers.
            pool.workers
                .push(worker.map_err(|error| Error::ThreadRefused {
                    index,
                    threads,
                    error,
                })?);
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` once with each number below `n_tasks`, on all threads, and
    /// returns when all calls have.
    ///
    /// # Panics
    /// With the first panic of a task, after all have ended; the pool lives.
    pub fn run(&mut self, n_tasks: usize, task: Task<'_>) {
        if n_tasks <= 1 || self.workers.is_empty() {
            (0..n_tasks).for_each(task);
            return;
        }
        assert!(n_tasks < u32::MAX as usize, "{n_tasks} tasks");
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The reference is used by claimed
        // tasks alone, and this function does not return before all are done.
        let task = unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(task) };
        // SAFETY: the run before has ended, so no task is claimed: nobody reads.
        unsafe { *shared.task.get() = task };
        shared.done.store(0, Ordering::Relaxed);
        let ticket = (n_tasks as u64) << 32;
        shared.ticket.store(ticket, Ordering::SeqCst);
        shared.wake_sleepers();
        shared.work();
        let mut n_polls = 0u32;
        while shared.done.load(Ordering::Acquire) < n_tasks {
            n_polls += 1;
            if n_polls <= PAUSES && shared.may_poll {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let mut panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(panic) = panic.take() {
            resume_unwind(panic);
        }
    }

    /// Calls `task` with the index and the elements of each of the parts
    /// `ends[i - 1] .. ends[i]` of `data`, the first from 0.
    ///
    /// # Panics
    /// If the ends do not ascend inside `data`, and as [`Pool::run`] does.
    pub fn for_parts<T: Send>(
        &mut self,
        data: &mut [T],
        ends: &[usize],
        task: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let is_inside = ends.last().is_none_or(|&end| end <= data.len());
        assert!(ends.is_sorted() && is_inside, "parts of the data");
        let data = Parts(data.as_mut_ptr());
        self.run(ends.len(), &|index| {
            let start = if index == 0 { 0 } else { ends[index - 1] };
            // SAFETY: the ends ascend and lie inside, so parts are disjoint and
            // inside; each index is called once; the borrow outlives the run.
            let part = unsafe { data.part(start, ends[index] - start) };
            task(index, part);
        });
    }

    /// Calls `task` with the index and the elements of each stretch of `len`
    /// elements of `data`; the last may be shorter.
    ///
    /// # Panics
    /// If `len` is 0, and as [`Pool::run`] does.
    pub fn for_chunks<T: Send>(
        &mut self,
        data: &mut [T],
        len: usize,
        task: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        assert!(len > 0, "chunks with elements");
        let n = data.len();
        let data = Parts(data.as_mut_ptr());
        self.run(n.div_ceil(len), &|index| {
            let start = index * len;
            // SAFETY: chunks are disjoint and inside; each index is called once;
            // the borrow outlives the run.
            let part = unsafe { data.part(start, len.min(n - start)) };
            task(index, part);
        });
    }

    /// Like [`Pool::for_chunks`] over two stretches of data at once, each with
    /// its own length of a chunk; both have the same number of chunks.
    ///
    /// # Panics
    /// If they have not, or a length is 0, and as [`Pool::run`] does.
    pub fn for_pairs<T: Send, U: Send>(
        &mut self,
        (left, left_len): (&mut [T], usize),
        (right, right_len): (&mut [U], usize),
        task: PairTask<'_, T, U>,
    ) {
        assert!(left_len > 0 && right_len > 0, "chunks with elements");
        let (n_left, n_right) = (left.len(), right.len());
        let n_chunks = n_left.div_ceil(left_len);
        assert_eq!(n_chunks, n_right.div_ceil(right_len), "chunks of both");
        let (left, right) = (Parts(left.as_mut_ptr()), Parts(right.as_mut_ptr()));
        self.run(n_chunks, &|index| {
            let (l, r) = (index * left_len, index * right_len);
            // SAFETY: chunks are disjoint and inside; each index is called once;
            // the borrow outlives the run.
            let left = unsafe { left.part(l, left_len.min(n_left - l)) };
            // SAFETY: likewise.
            let right = unsafe { right.part(r, right_len.min(n_right - r)) };
            task(index, left, right);
        });
    }
}

/// The start of elements that tasks divide among themselves.
struct Parts<T>(*mut T);

// SAFETY: tasks get disjoint parts, as if each were sent its own.
unsafe impl<T: Send> Sync for Parts<T> {}

impl<T> Parts<T> {
    /// # Safety
    /// `start .. start + len` lies inside the data, which is borrowed for as
    /// long as the part is used, and no other part overlaps it.
    #[allow(clippy::mut_from_ref)] // the caller promises that parts are disjoint
    unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        // SAFETY: inside the data, as promised.
        let first = unsafe { self.0.add(start) };
        // SAFETY: inside the data and not shared, as promised.
        unsafe { std::slice::from_raw_parts_mut(first, len) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        drop(
            self.shared
                .bed
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        self.shared.alarm.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks and has none of its own.
            worker.join().expect("a worker that ends");
        }
    }
}
