//! The engine's thread: takes commands, admits, runs passes, ends jobs.
//!
//! All state is here and nothing here is shared, so nothing is locked while the
//! model computes. What a reader would get wrong: a sequence that has been
//! planned still has to get its pages, in `pass`, and whoever is older takes
//! them from whoever is newer.

mod admission;
mod draft;
mod pass;

use crate::Error;
use crate::cost::CostModel;
use crate::engine::Ending;
use crate::job::{Event, Listen, Timings};
use crate::metrics::Metrics;
use crate::prefix::{CacheKey, Cut, PrefixCache, REGULAR_CUT_TOKENS};
use crate::sampler::Sampler;
use crate::scheduler::{JobId, Scheduler, SequenceId};
use crate::sequence::Sequence;
use crate::service::{Info, Shared, State, panic_text};
use crate::speculate::{Pace, Speculator};
use model::{Constraint, Forward, Guide, PAGE_ROWS, PagePool};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvError, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// What a handle tells the engine.
pub(crate) enum Command {
    Submit(JobId, Box<Live>),
    Cancel(JobId),
    Drain,
    Stop,
}

/// A job in the house.
pub(crate) struct Live {
    /// None once it broke off.
    pub receive: Option<Box<dyn Listen>>,
    /// None where the cache is not to be used.
    pub key: Option<CacheKey>,
    /// Ascending, the last is the end of the prompt.
    pub cuts: Vec<usize>,
    pub max_tokens: Option<usize>,
    pub logprobs: Option<usize>,
    pub deadline: Option<Instant>,
    pub n_prompt: usize,
    /// Until the prompt is computed, only the first has a sequence.
    pub choices: Vec<Choice>,
    pub is_branched: bool,
    pub submitted: Instant,
    pub admitted: Option<Instant>,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
    pub timings: Timings,
}

/// One choice of a job.
pub(crate) struct Choice {
    pub sequence: Sequence,
    sampler: Sampler,
    guide: Box<dyn Guide>,
    /// On the token after the newest one.
    constraint: Constraint,
    n_generated: usize,
    last_token: Option<Instant>,
    is_ended: bool,
    /// Rows up to which cuts have been offered to the cache.
    n_cut: usize,
    /// The cut that only says how far it has come.
    frontier: Option<usize>,
    /// Rows it once had: below this, nothing is computed for the first time.
    n_lost: usize,
    /// Rows it had when it last gave up its pages though it was alone.
    exhausted_at: Option<usize>,
    /// None until something may be drafted for it.
    pace: Option<Pace>,
}

impl Choice {
    pub fn new(guide: Box<dyn Guide>, sampler: Sampler, constraint: Constraint) -> Choice {
        Choice {
            sequence: Sequence::new(),
            sampler,
            guide,
            constraint,
            n_generated: 0,
            last_token: None,
            is_ended: false,
            n_cut: 0,
            frontier: None,
            n_lost: 0,
            exhausted_at: None,
            pace: None,
        }
    }
}

impl Live {
    fn choice(&mut self, id: SequenceId) -> &mut Choice {
        &mut self.choices[id.choice as usize]
    }

    /// Tells the listener. False once it has broken off.
    fn tell(&mut self, event: Event) -> bool {
        let Some(listener) = &mut self.receive else {
            return false;
        };
        if listener.event(event).is_break() {
            self.receive = None;
        }
        self.receive.is_some()
    }
}

/// The engine's state.
pub(crate) struct Worker {
    model: Box<dyn Forward>,
    pool: PagePool,
    cache: PrefixCache,
    scheduler: Scheduler,
    cost: CostModel,
    /// None where speculation is off.
    speculator: Option<Speculator>,
    jobs: BTreeMap<JobId, Live>,
    max_rows: usize,
    n_ctx: usize,
    n_vocab: usize,
    counts: Metrics,
    /// Places that have become free since the handles were told.
    n_left: usize,
    /// Is it to end when it has no jobs?
    is_draining: bool,
}

impl Worker {
    pub fn new(model: Box<dyn Forward>, info: &Info, speculator: Option<Speculator>) -> Worker {
        let capacity = model.capacity();
        Worker {
            pool: PagePool::new(capacity.layout, capacity.max_slabs),
            cache: PrefixCache::new(capacity.layout, info.prefix_cache_bytes),
            scheduler: Scheduler::new(info.max_rows, info.sequences),
            cost: CostModel::new(),
            speculator,
            jobs: BTreeMap::new(),
            max_rows: info.max_rows,
            n_ctx: info.n_ctx,
            n_vocab: info.n_vocab,
            counts: Metrics::default(),
            n_left: 0,
            is_draining: false,
            model,
        }
    }

    /// Sequences that run together.
    pub fn max_sequences(&self) -> usize {
        self.scheduler.max_sequences()
    }

    /// The thread's whole life.
    ///
    /// # Errors
    /// What the engine failed of. All jobs have been told.
    pub fn run(mut self, shared: &Shared, commands: &Receiver<Command>) -> Result<(), Arc<Error>> {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve(shared, commands)));
        let failure = match ended {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => Arc::new(error),
            Err(panic) => Arc::new(Error::Panicked(panic_text(&*panic))),
        };
        let why = failure.to_string();
        shared.close(State::Unhealthy { why });
        // Nothing is sent after the state has changed.
        let sent = commands.try_iter().filter_map(|command| match command {
            Command::Submit(_, live) => Some(*live),
            _ => None,
        });
        for mut live in std::mem::take(&mut self.jobs).into_values().chain(sent) {
            self.counts.failed += 1;
            // A listener whose panic brought the engine down may panic again.
            let tell = || live.tell(Event::Failed(Arc::clone(&failure)));
            catch_unwind(AssertUnwindSafe(tell)).ok();
        }
        self.publish(shared);
        Err(failure)
    }

    fn serve(&mut self, shared: &Shared, commands: &Receiver<Command>) -> Result<(), Error> {
        loop {
            if !self.take_commands(commands) {
                let all: Vec<JobId> = self.jobs.keys().copied().collect();
                all.into_iter()
                    .for_each(|job| self.finish(job, Ending::Cancelled));
            }
            if self.is_draining && self.jobs.is_empty() {
                self.cache.clear(&mut self.pool);
                self.publish(shared);
                return Ok(());
            }
            self.expire(Instant::now());
            self.admit();
            self.pass()?;
            self.publish(shared);
        }
    }

    /// Carries out the commands that have come; waits for one if there is
    /// nothing else to do. False if all jobs are to be cancelled.
    fn take_commands(&mut self, commands: &Receiver<Command>) -> bool {
        // Between commands that came together the handles are told nothing, so it
        // waits for the first one only.
        let mut may_wait = self.jobs.is_empty() && !self.is_draining;
        loop {
            let command = match std::mem::take(&mut may_wait) {
                true => commands
                    .recv()
                    .map_err(|RecvError| TryRecvError::Disconnected),
                false => commands.try_recv(),
            };
            match command {
                Ok(Command::Submit(job, live)) => self.arrive(job, *live),
                Ok(Command::Cancel(job)) => self.finish(job, Ending::Cancelled),
                // Nobody is left to send more.
                Ok(Command::Drain) | Err(TryRecvError::Disconnected) if !self.is_draining => {
                    self.is_draining = true;
                }
                Ok(Command::Drain) => {}
                Ok(Command::Stop) => {
                    self.is_draining = true;
                    // Whatever was sent before is cancelled too.
                    let sent = commands.try_iter().filter_map(|command| match command {
                        Command::Submit(job, live) => Some((job, live)),
                        _ => None,
                    });
                    sent.for_each(|(job, live)| self.arrive(job, *live));
                    return false;
                }
                Err(_) => return true,
            }
        }
    }

    fn arrive(&mut self, job: JobId, live: Live) {
        self.counts.requests += 1;
        let id = SequenceId { job, choice: 0 };
        self.scheduler.arrive(id, live.choices.len());
        self.jobs.insert(job, live);
    }

    /// Ends the jobs whose time is up.
    fn expire(&mut self, now: Instant) {
        let is_late = |live: &Live| live.deadline.is_some_and(|deadline| deadline <= now);
        let late = self.jobs.iter().filter(|(_, live)| is_late(live));
        let late: Vec<JobId> = late.map(|(&job, _)| job).collect();
        late.into_iter()
            .for_each(|job| self.finish(job, Ending::Deadline));
    }

    /// Ends all choices of a job that have not ended; one that is gone already
    /// is none.
    fn finish(&mut self, job: JobId, ending: Ending) {
        let n_choices = self.jobs.get(&job).map_or(0, |live| live.choices.len());
        for choice in 0..n_choices as u32 {
            self.end_choice(SequenceId { job, choice }, ending);
        }
    }

    /// Ends a choice, and its job if it was the last one.
    fn end_choice(&mut self, id: SequenceId, ending: Ending) {
        let Some(live) = self.jobs.get_mut(&id.job) else {
            return;
        };
        if std::mem::replace(&mut live.choice(id).is_ended, true) {
            return;
        }
        self.save_whole(id);
        self.release(id);
        let live = self.jobs.get_mut(&id.job).expect("it was there");
        live.tell(Event::ChoiceEnded {
            choice: id.choice as usize,
            ending,
        });
        if live.choices.iter().any(|choice| !choice.is_ended) {
            return;
        }
        *match ending {
            Ending::Cancelled => &mut self.counts.cancelled,
            Ending::Deadline => &mut self.counts.expired,
            Ending::Guide | Ending::MaxTokens | Ending::Context => &mut self.counts.completed,
        } += 1;
        live.timings.decode = match (live.first_token, live.last_token) {
            (Some(first), Some(last)) => last - first,
            _ => Default::default(),
        };
        let timings = live.timings;
        live.tell(Event::Ended(timings));
        self.remove(id.job);
    }

    /// Ends a job without an answer; nothing of it is kept.
    fn fail(&mut self, job: JobId, error: Error) {
        let Some(live) = self.jobs.get_mut(&job) else {
            return;
        };
        self.counts.failed += 1;
        live.tell(Event::Failed(Arc::new(error)));
        for choice in 0..live.choices.len() as u32 {
            self.release(SequenceId { job, choice });
        }
        self.remove(job);
    }

    /// Gives back what a sequence holds.
    fn release(&mut self, id: SequenceId) {
        self.scheduler.leave(id);
        let live = self.jobs.get_mut(&id.job).expect("a job in the house");
        live.choice(id).sequence.pages.clear(&mut self.pool);
    }

    fn remove(&mut self, job: JobId) {
        let live = self.jobs.remove(&job).expect("a job in the house");
        self.n_left += live.choices.len();
    }

    /// Offers the first `len` rows of a sequence, all computed, to the cache.
    /// Pages that the rows after it do not see must still be held. `is_end`:
    /// somebody may come back to just here.
    fn save(&mut self, id: SequenceId, len: usize, is_end: bool) {
        let live = self.jobs.get_mut(&id.job).expect("a job in the house");
        let Live {
            key: Some(key),
            cuts,
            choices,
            ..
        } = live
        else {
            return;
        };
        let choice = &mut choices[id.choice as usize];
        let Sequence { tokens, pages } = &choice.sequence;
        // What stands in a page that is still being filled is offered when it is full.
        let done = match is_end {
            true => len,
            false => len - len % PAGE_ROWS,
        };
        if !is_end && done <= choice.n_cut {
            return;
        }
        let new = choice.n_cut + 1..=done;
        let named = cuts.iter().copied().filter(|cut| new.contains(cut));
        let mut wanted: BTreeMap<usize, Cut> = named.map(|cut| (cut, Cut::Named)).collect();
        let regular = (choice.n_cut / REGULAR_CUT_TOKENS + 1..).map(|k| k * REGULAR_CUT_TOKENS);
        for cut in regular.take_while(|&cut| cut <= done) {
            wanted.entry(cut).or_insert(Cut::Regular);
        }
        if is_end {
            wanted.insert(done, Cut::Named);
        } else if len < tokens.len() {
            wanted.entry(done).or_insert(Cut::Frontier);
        }
        let computed = &tokens[..len];
        for cut in wanted {
            self.cache.insert(&mut self.pool, key, computed, pages, cut);
        }
        choice.n_cut = done;
        let frontier = (!is_end && len < tokens.len()).then_some(done);
        if let Some(before) = std::mem::replace(&mut choice.frontier, frontier) {
            self.cache
                .drop_frontier(&mut self.pool, key, tokens, before);
        }
    }

    /// Offers all computed rows of a sequence that goes.
    fn save_whole(&mut self, id: SequenceId) {
        let live = self.jobs.get_mut(&id.job).expect("a job in the house");
        let n_computed = live.choice(id).sequence.n_computed();
        if n_computed > 0 {
            self.save(id, n_computed, true);
        }
    }

    /// Lets the handles see how things stand.
    fn publish(&mut self, shared: &Shared) {
        let counts = &mut self.counts;
        if let Some(speculator) = &self.speculator {
            counts.speculation = speculator.counts();
            counts.speculation_stopped = speculator.stopped().map(str::to_string);
        }
        counts.running = self.scheduler.n_running();
        counts.waiting = self.scheduler.n_waiting();
        counts.cache_evictions = self.cache.n_evicted();
        counts.pages_used = self.pool.n_pages_used();
        counts.cache_pages = self.cache.n_pages();
        counts.cache_bytes = self.cache.bytes();
        let slab_bytes = self.pool.layout().slab_bytes();
        counts.kv_used_bytes = (self.pool.n_slabs_used() * slab_bytes) as u64;
        counts.kv_capacity_bytes = (self.pool.max_slabs() * slab_bytes) as u64;
        let mut metrics = shared
            .metrics
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        metrics.clone_from(counts);
        drop(metrics);
        let n_left = std::mem::take(&mut self.n_left);
        shared.n_choices.fetch_sub(n_left, Ordering::Relaxed);
    }
}
