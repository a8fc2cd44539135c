//! The engine as a service: one thread that owns the model, handles that any
//! thread may hold.
//!
//! A handle checks a job, counts it into the house and sends it over; nothing
//! here waits for the engine. What a reader would get wrong: jobs are refused by
//! how many choices are in the house, running ones included, so a burst may
//! fill the places that are free before the engine has looked at it.

use crate::choice::checked;
use crate::engine::n_ctx_of;
use crate::job::{Job, Refusal};
use crate::metrics::Metrics;
use crate::prefix::CacheKey;
use crate::sampler::{Sampler, choice_seed};
use crate::sequence::Sequence;
use crate::speculate::{Speculation, SpeculationInfo, Speculator};
use crate::worker::{Choice, Command, Live, Worker};
use crate::{Error, JobId, PromptError};
use model::{Architecture, Forward, KvType};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Instant;

/// Settings of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Tokens a sequence may have; `None` for as many as the model was trained
    /// for, or as the pages hold if that is less.
    pub n_ctx: Option<usize>,
    /// Sequences that run together.
    pub sequences: usize,
    /// Choices that may wait beside those that run.
    pub queue: usize,
    /// Bytes that the prefix cache may hold; 0 for no cache.
    pub prefix_cache_bytes: u64,
    /// Digest of all that determines keys and values; keys the prefix cache.
    pub identity: [u8; 32],
    /// Drafts.
    pub speculation: Speculation,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            n_ctx: None,
            sequences: 64,
            queue: 64,
            prefix_cache_bytes: 0,
            identity: [0; 32],
            speculation: Speculation::default(),
        }
    }
}

/// What a service runs with, for start lines and error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Tokens a sequence may have.
    pub n_ctx: usize,
    /// Size of the vocabulary.
    pub n_vocab: usize,
    /// The model's graph.
    pub architecture: Architecture,
    /// The device in words, with its instruction set.
    pub device: String,
    /// Element type of keys and values.
    pub kv: KvType,
    /// Rows of a pass at most.
    pub max_rows: usize,
    /// Rows of a pass within which the bits of a row do not depend on the
    /// others; `max_rows` is kept inside it.
    pub same_bits_rows: usize,
    /// Sequences that run together.
    pub sequences: usize,
    /// Choices that may wait beside those that run.
    pub queue: usize,
    /// Bytes that the prefix cache may hold.
    pub prefix_cache_bytes: u64,
    /// Bytes of all pages.
    pub kv_capacity_bytes: u64,
    /// Drafts; `None` where speculation is off.
    pub speculation: Option<SpeculationInfo>,
}

/// Does the service take jobs?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It does.
    Ready,
    /// No more; those it has are finished or, after a stop, cancelled.
    Draining,
    /// The engine has failed.
    Unhealthy {
        /// What happened.
        why: String,
    },
}

/// What handles and the engine's thread share.
pub(crate) struct Shared {
    info: Info,
    /// Held for reading while a job is sent, so that none is sent to an engine
    /// that has ended.
    pub(crate) state: RwLock<State>,
    pub(crate) metrics: Mutex<Metrics>,
    /// Choices in the house, running and waiting.
    pub(crate) n_choices: AtomicUsize,
    n_refused: AtomicU64,
    next_job: AtomicU64,
    identity: [u8; 32],
}

/// A running engine.
pub struct Service {
    handle: Handle,
    thread: JoinHandle<Result<(), Arc<Error>>>,
}

/// Reaches a service from any thread.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

impl Service {
    /// Starts the engine's thread.
    ///
    /// # Errors
    /// [`Error::Context`], [`Error::PoolTooSmall`], [`Error::NoDrafter`],
    /// [`Error::DraftLength`], [`Error::Thread`].
    ///
    /// # Panics
    /// If the settings have no sequence.
    pub fn start(model: Box<dyn Forward>, settings: Settings) -> Result<Service, Error> {
        let (caps, capacity, config) = (model.caps(), model.capacity(), model.config());
        let max_rows = caps.max_rows.min(caps.same_bits_rows);
        let n_ctx = fitting_n_ctx(&*model, settings.n_ctx, max_rows)?;
        let speculator = Speculator::new(&*model, settings.speculation)?;
        let mut info = Info {
            n_ctx,
            n_vocab: config.n_vocab,
            architecture: config.architecture,
            kv: capacity.layout.ty,
            max_rows,
            same_bits_rows: caps.same_bits_rows,
            device: caps.device,
            sequences: settings.sequences,
            queue: settings.queue,
            prefix_cache_bytes: settings.prefix_cache_bytes,
            kv_capacity_bytes: (capacity.max_slabs * capacity.layout.slab_bytes()) as u64,
            speculation: speculator.as_ref().map(Speculator::info),
        };
        let worker = Worker::new(model, &info, speculator);
        info.sequences = worker.max_sequences();
        let shared = Arc::new(Shared {
            info,
            state: RwLock::new(State::Ready),
            metrics: Mutex::default(),
            n_choices: AtomicUsize::new(0),
            n_refused: AtomicU64::new(0),
            next_job: AtomicU64::new(0),
            identity: settings.identity,
        });
        let (commands, received) = channel();
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || worker.run(&of_thread, &received))
            .map_err(Error::Thread)?;
        let handle = Handle { shared, commands };
        Ok(Service { handle, thread })
    }

    /// A handle to this service.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Waits for the engine's thread: until a drain is done, a stop has been
    /// carried out, the engine has failed, or no other handle is left.
    ///
    /// # Errors
    /// What the engine failed of.
    pub fn join(self) -> Result<(), Arc<Error>> {
        let Service { handle, thread } = self;
        drop(handle);
        let ended = thread.join();
        ended.unwrap_or_else(|panic| Err(Arc::new(Error::Panicked(panic_text(&*panic)))))
    }
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "it did not say why".into())
}

/// The context of a service: what was asked for, if one such sequence fits the
/// pages when it is alone. Then no running sequence is ever given up for want of pages.
fn fitting_n_ctx(
    model: &dyn Forward,
    asked: Option<usize>,
    max_rows: usize,
) -> Result<usize, Error> {
    let wanted = n_ctx_of(model, asked)?;
    let capacity = model.capacity();
    let slabs = |n_ctx| capacity.layout.slabs_for(n_ctx, max_rows);
    if slabs(wanted) <= capacity.max_slabs {
        return Ok(wanted);
    }
    let too_small = |n_ctx| Error::PoolTooSmall {
        n_ctx,
        wanted: slabs(n_ctx),
        total: capacity.max_slabs,
    };
    if asked.is_some() {
        return Err(too_small(wanted));
    }
    // The slabs never fall with the context.
    let (mut fits, mut too_long) = (0, wanted);
    while too_long - fits > 1 {
        let middle = fits.midpoint(too_long);
        match slabs(middle) <= capacity.max_slabs {
            true => fits = middle,
            false => too_long = middle,
        }
    }
    match fits {
        0 | 1 => Err(too_small(2)),
        n_ctx => Ok(n_ctx),
    }
}

impl Handle {
    /// Hands a job over. Never waits.
    ///
    /// # Errors
    /// Why it was not taken; the listener has heard nothing then.
    pub fn submit(&self, job: Job) -> Result<JobId, Refusal> {
        let taken = self.check(job).and_then(|live| self.send(live));
        if taken.is_err() {
            self.shared.n_refused.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }

    /// The job as the engine keeps it, if it can be computed at all.
    fn check(&self, job: Job) -> Result<Live, Refusal> {
        let Info {
            n_ctx,
            n_vocab,
            sequences,
            ..
        } = self.shared.info;
        let n_tokens = job.tokens.len();
        PromptError::check(n_tokens, n_ctx)?;
        if let Some(&token) = job.tokens.iter().find(|&&t| t as usize >= n_vocab) {
            return Err(Refusal::TokenUnknown { token, n_vocab });
        }
        let n_choices = job.guides.len();
        if n_choices == 0 || n_choices > sequences {
            return Err(Refusal::Choices {
                found: n_choices,
                most: sequences,
            });
        }
        let seed = job.sampling.seed;
        let mut sampler = Sampler::new(job.sampling, n_vocab)?;
        let mut choices = Vec::with_capacity(n_choices);
        for (index, mut guide) in (0..).zip(job.guides) {
            sampler.reseed(choice_seed(seed, index));
            let constraint = checked(guide.constraint(), n_vocab);
            let constraint =
                constraint.map_err(|token| Refusal::TokenUnknown { token, n_vocab })?;
            choices.push(Choice::new(guide, sampler.clone(), constraint));
        }
        let key = job.cache.is_on.then(|| CacheKey {
            identity: self.shared.identity,
            salt: job.cache.salt.clone(),
        });
        let mut cuts = job.cuts;
        cuts.push(n_tokens);
        cuts.retain(|cut| (1..=n_tokens).contains(cut));
        cuts.sort_unstable();
        cuts.dedup();
        choices[0].sequence = Sequence::of(job.tokens);
        Ok(Live {
            receive: Some(job.receive),
            key,
            cuts,
            max_tokens: job.max_tokens,
            logprobs: job.logprobs,
            deadline: job.deadline,
            n_prompt: n_tokens,
            choices,
            is_branched: false,
            submitted: Instant::now(),
            admitted: None,
            first_token: None,
            last_token: None,
            timings: crate::Timings {
                prompt_tokens: n_tokens,
                ..crate::Timings::default()
            },
        })
    }

    fn send(&self, live: Live) -> Result<JobId, Refusal> {
        let Shared { info, .. } = &*self.shared;
        let state = self.shared.state.read();
        match &*state.unwrap_or_else(PoisonError::into_inner) {
            State::Ready => {}
            State::Draining => return Err(Refusal::Draining),
            State::Unhealthy { why } => return Err(Refusal::Unhealthy { why: why.clone() }),
        }
        let (most, n) = (info.sequences + info.queue, live.choices.len());
        let count = &self.shared.n_choices;
        let enter = |inside: usize| (inside + n <= most).then_some(inside + n);
        count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, enter)
            .map_err(|_| Refusal::QueueFull { queue: info.queue })?;
        let job = JobId(self.shared.next_job.fetch_add(1, Ordering::Relaxed));
        let command = Command::Submit(job, Box::new(live));
        self.commands.send(command).map_err(|_| Refusal::Draining)?;
        Ok(job)
    }

    /// Cancels a job within a pass; one that has ended already is no error.
    pub fn cancel(&self, job: JobId) {
        self.tell(Command::Cancel(job));
    }

    /// What the service runs with.
    pub fn info(&self) -> &Info {
        &self.shared.info
    }

    /// Does it take jobs?
    pub fn state(&self) -> State {
        let state = self.shared.state.read();
        state.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The counts as of the last pass.
    pub fn metrics(&self) -> Metrics {
        let metrics = self.shared.metrics.lock();
        let mut metrics = metrics.unwrap_or_else(PoisonError::into_inner).clone();
        metrics.refused = self.shared.n_refused.load(Ordering::Relaxed);
        metrics
    }

    /// Takes no more jobs; the engine ends when those it has are done.
    pub fn drain(&self) {
        self.shared.close(State::Draining);
        self.tell(Command::Drain);
    }

    /// Takes no more jobs and cancels those it has; the engine ends.
    pub fn stop(&self) {
        self.shared.close(State::Draining);
        self.tell(Command::Stop);
    }

    fn tell(&self, command: Command) {
        // An engine that has ended needs to be told nothing.
        self.commands.send(command).ok();
    }
}

impl Shared {
    /// Takes no more jobs, because of `state`; a failure is never taken back.
    pub(crate) fn close(&self, state: State) {
        let mut found = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*found, State::Unhealthy { .. }) {
            *found = state;
        }
    }
}
