//! Turns: the engine's events as what the answers say, for every wire format.
//!
//! A request is one job or several (one for each prompt), each with one choice
//! or several. Dropping a [`Turns`] cancels its jobs, so a client that goes
//! away takes its work along. What one would get wrong: the engine never waits
//! for a client. What a client does not read piles up here, and one that leaves
//! too much unread for too long is given up.

use crate::api_error::ApiError;
use crate::app::InFlight;
use crate::generation::Deadline;
use crate::model::ServedModel;
use engine::{
    CacheUse, Ending, Event, Generated, Handle, Job, JobId, Listen, SamplerSettings, Timings,
};
use model::Guide;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use text::{FinishReason, Memo, Place, Reader, Tokenizer, TurnEnd, TurnEvent};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Unread events from which a client counts as slow. A client that reads at
/// all is never behind by as much: an event is a few bytes.
const SLOW_EVENTS: usize = 256;

/// What of the turns is known next.
#[derive(Debug)]
pub enum Piece {
    /// One of the answers goes on, or is over.
    Choice {
        /// Which of them, from 0, prompt by prompt.
        choice: usize,
        /// What it says.
        events: Vec<TurnEvent>,
        /// The tokens of the answer's text, if they were asked for.
        logprobs: Vec<TokenLogprob>,
        /// Why it is over.
        finish: Option<FinishReason>,
    },
    /// All answers are complete.
    Ended(Totals),
    /// There is no answer, or no end to it.
    Failed(ApiError),
}

/// A token of an answer with its log-probability.
#[derive(Clone, Debug)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Under the model's own distribution.
    pub logprob: f64,
    /// The likeliest tokens there.
    pub top: Vec<(u32, f64)>,
}

/// Counts and times of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Those whose keys and values were already there.
    pub cached_tokens: usize,
    /// Tokens of all answers, reasoning included.
    pub completion_tokens: usize,
    /// Those of the reasoning.
    pub reasoning_tokens: usize,
    /// Prompt tokens that were computed.
    pub prefill_tokens: usize,
    /// Tokens that speculation proposed.
    pub drafted: usize,
    /// Those that were right.
    pub accepted: usize,
    /// Times that an answer had to give up its place.
    pub preempted: usize,
    /// The longest wait for a place.
    pub queue: Duration,
    /// The longest time until the first token.
    pub prefill: Duration,
    /// The longest time from the first token to the last.
    pub decode: Duration,
}

/// Where answers go to: what a job's events are sent through.
struct Listener {
    job: usize,
    to: UnboundedSender<(usize, Event)>,
    flow: Arc<Flow>,
    grace: Duration,
    slow_since: Option<Instant>,
}

/// What the two ends of the way to a client know of each other.
#[derive(Default)]
struct Flow {
    unread: AtomicUsize,
    is_given_up: AtomicBool,
}

impl Listen for Listener {
    fn event(&mut self, event: Event) -> ControlFlow<()> {
        if self.flow.unread.fetch_add(1, Ordering::Relaxed) < SLOW_EVENTS {
            self.slow_since = None;
        } else if self.slow_since.get_or_insert_with(Instant::now).elapsed() > self.grace {
            self.flow.is_given_up.store(true, Ordering::Relaxed);
            return ControlFlow::Break(());
        }
        match self.to.send((self.job, event)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }
}

/// Cancels what it knows of when it goes.
struct Jobs {
    handle: Handle,
    ids: Vec<JobId>,
}

impl Drop for Jobs {
    fn drop(&mut self) {
        for &id in &self.ids {
            self.handle.cancel(id);
        }
    }
}

/// A prompt that is ready for the engine.
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Lengths of beginnings of it that other prompts may share.
    pub cuts: Vec<usize>,
    /// Guides the engine; each answer gets a fork.
    pub guide: Box<dyn Guide>,
    /// Reads the answer; each gets a clone.
    pub reader: Reader,
    /// Where the tokens of its answers are kept, so that they come back in the
    /// next prompt as they were.
    pub memo: Option<Arc<Memo>>,
}

/// What is asked of all prompts of a request.
pub struct Terms {
    /// Answers to each prompt.
    pub n_choices: usize,
    /// The sampler chain.
    pub sampling: SamplerSettings,
    /// Tokens of an answer at most.
    pub max_tokens: Option<usize>,
    /// Report log-probabilities, with so many alternatives.
    pub logprobs: Option<usize>,
    /// Use of the prefix cache.
    pub cache: CacheUse,
    /// When the request is to be over.
    pub deadline: Option<Deadline>,
}

/// The answers to a request, as they are made.
pub struct Turns {
    events: UnboundedReceiver<(usize, Event)>,
    flow: Arc<Flow>,
    choices: Vec<Choice>,
    n_choices: usize,
    n_running: usize,
    totals: Totals,
    deadline: Option<Deadline>,
    is_over: bool,
    /// The request's, for the log: a stream outlives its handler.
    span: tracing::Span,
    jobs: Jobs,
    _in_flight: InFlight,
}

impl Turns {
    /// Hands the prompts to the engine, all of them or none. A client may leave
    /// its answer unread for `grace`.
    ///
    /// # Errors
    /// The engine's refusal of any of them.
    pub fn start(
        model: &ServedModel,
        prompts: Vec<Prompt>,
        terms: &Terms,
        grace: Duration,
        in_flight: InFlight,
    ) -> Result<Turns, ApiError> {
        let (to, events) = unbounded_channel();
        let mut turns = Turns {
            events,
            flow: Arc::new(Flow::default()),
            choices: Vec::new(),
            n_choices: terms.n_choices,
            n_running: prompts.len(),
            totals: Totals::default(),
            deadline: terms.deadline,
            is_over: false,
            span: tracing::Span::current(),
            jobs: Jobs {
                handle: model.handle.clone(),
                ids: Vec::new(),
            },
            _in_flight: in_flight,
        };
        for (job, prompt) in prompts.into_iter().enumerate() {
            let memory = prompt.memo.map(|memo| Memory {
                memo,
                prompt: prompt.tokens.as_slice().into(),
            });
            let choice = Choice::new(prompt.reader, Arc::clone(&model.tokenizer), memory);
            let choices = std::iter::repeat_n(choice, terms.n_choices);
            turns.choices.extend(choices);
            let guide = prompt.guide;
            let guides = std::iter::repeat_with(|| guide.fork());
            let listener = Listener {
                job,
                to: to.clone(),
                flow: Arc::clone(&turns.flow),
                grace,
                slow_since: None,
            };
            let id = model.handle.submit(Job {
                tokens: prompt.tokens,
                guides: guides.take(terms.n_choices).collect(),
                sampling: terms.sampling.clone(),
                max_tokens: terms.max_tokens,
                logprobs: terms.logprobs,
                cuts: prompt.cuts,
                cache: terms.cache.clone(),
                deadline: terms.deadline.map(|deadline| deadline.at),
                receive: Box::new(listener),
            })?;
            turns.jobs.ids.push(id);
        }
        Ok(turns)
    }

    /// Number of answers, those to all prompts.
    pub fn n_choices(&self) -> usize {
        self.choices.len()
    }

    /// What is known next; `None` after the end.
    pub async fn next(&mut self) -> Option<Piece> {
        while !self.is_over {
            let Some((job, event)) = self.events.recv().await else {
                return Some(self.fail(self.lost()));
            };
            self.flow.unread.fetch_sub(1, Ordering::Relaxed);
            if let Some(piece) = self.take(job, event) {
                return Some(piece);
            }
        }
        None
    }

    fn take(&mut self, job: usize, event: Event) -> Option<Piece> {
        match event {
            Event::Started { .. } | Event::Prefilled { .. } => None,
            Event::Token { choice, generated } => {
                let choice = job * self.n_choices + choice;
                let (events, logprobs) = self.choices[choice].push(generated);
                let is_silent = events.is_empty() && logprobs.is_empty();
                (!is_silent).then_some(Piece::Choice {
                    choice,
                    events,
                    logprobs,
                    finish: None,
                })
            }
            Event::ChoiceEnded { choice, ending } => {
                Some(self.end_choice(job * self.n_choices + choice, ending))
            }
            Event::Ended(timings) => {
                self.totals.add(&timings);
                self.n_running -= 1;
                if self.n_running > 0 {
                    return None;
                }
                self.is_over = true;
                for choice in &self.choices {
                    self.totals.completion_tokens += choice.tokens.len();
                    self.totals.reasoning_tokens += choice.n_reasoning;
                }
                self.span.in_scope(|| self.totals.log());
                Some(Piece::Ended(self.totals))
            }
            Event::Failed(error) => Some(self.fail(ApiError::from(&*error))),
        }
    }

    fn end_choice(&mut self, choice: usize, ending: Ending) -> Piece {
        match ending {
            Ending::Guide | Ending::MaxTokens | Ending::Context => {
                let (events, logprobs, finish) = self.choices[choice].finish();
                Piece::Choice {
                    choice,
                    events,
                    logprobs,
                    finish: Some(finish),
                }
            }
            Ending::Deadline => {
                let after = self
                    .deadline
                    .map_or(Duration::ZERO, |deadline| deadline.after);
                self.fail(ApiError::deadline(after.as_millis()))
            }
            Ending::Cancelled => self.fail(self.lost()),
        }
    }

    fn fail(&mut self, error: ApiError) -> Piece {
        self.is_over = true;
        let why = error.message();
        // What a client brought about is no trouble of the server's.
        self.span.in_scope(|| match error.is_ours() {
            true => tracing::error!(why, "no answer"),
            false => tracing::info!(why, "no answer"),
        });
        Piece::Failed(error)
    }

    /// Why there is no more of a job that had not ended.
    fn lost(&self) -> ApiError {
        if self.flow.is_given_up.load(Ordering::Relaxed) {
            let message = "the answer was not read for too long and was given up";
            return ApiError::unavailable("slow_reader", message);
        }
        ApiError::unavailable(
            "stopping",
            "the server was stopped before the answer was complete",
        )
    }
}

impl Totals {
    fn log(&self) {
        tracing::info!(
            prompt_tokens = self.prompt_tokens,
            cached_tokens = self.cached_tokens,
            completion_tokens = self.completion_tokens,
            queue_ms = self.queue.as_millis(),
            prefill_ms = self.prefill.as_millis(),
            decode_ms = self.decode.as_millis(),
            "complete"
        );
    }

    fn add(&mut self, timings: &Timings) {
        self.prompt_tokens += timings.prompt_tokens;
        self.cached_tokens += timings.cached_tokens;
        self.prefill_tokens += timings.prefill_tokens;
        self.drafted += timings.drafted;
        self.accepted += timings.accepted;
        self.preempted += timings.preempted;
        self.queue = self.queue.max(timings.queue);
        self.prefill = self.prefill.max(timings.prefill);
        self.decode = self.decode.max(timings.decode);
    }
}

/// Where the tokens of an answer are kept, and behind what.
#[derive(Clone)]
struct Memory {
    memo: Arc<Memo>,
    prompt: Arc<[u32]>,
}

/// One answer: its tokens read as a turn.
#[derive(Clone)]
struct Choice {
    reader: Reader,
    tokenizer: Arc<Tokenizer>,
    memory: Option<Memory>,
    tokens: Vec<u32>,
    n_reasoning: usize,
    /// Bytes of the answer's text that were given out.
    n_delivered: usize,
    /// Tokens whose text is not given out yet, each with the answer's bytes up to
    /// its end: of a stop string's text nothing may be told.
    held: VecDeque<(usize, TokenLogprob)>,
}

impl Choice {
    fn new(reader: Reader, tokenizer: Arc<Tokenizer>, memory: Option<Memory>) -> Choice {
        Choice {
            reader,
            tokenizer,
            memory,
            tokens: Vec::new(),
            n_reasoning: 0,
            n_delivered: 0,
            held: VecDeque::new(),
        }
    }

    fn push(&mut self, generated: Generated) -> (Vec<TurnEvent>, Vec<TokenLogprob>) {
        let Generated {
            token,
            logprob,
            top,
        } = generated;
        let place = self.reader.place();
        let n_bytes = self.tokenizer.token_bytes(token).map_or(0, <[u8]>::len);
        self.tokens.push(token);
        if n_bytes > 0 && place == Place::Reasoning {
            self.n_reasoning += 1;
        }
        let events = self.reader.push(token);
        if n_bytes > 0
            && place == Place::Answer
            && let Some(logprob) = logprob
        {
            let entry = TokenLogprob {
                token,
                logprob,
                top,
            };
            self.held.push_back((self.reader.answer_bytes(), entry));
        }
        let logprobs = self.release(&events);
        (events, logprobs)
    }

    fn finish(&mut self) -> (Vec<TurnEvent>, Vec<TokenLogprob>, FinishReason) {
        if let Some(Memory { memo, prompt }) = &self.memory {
            memo.remember(prompt, &self.tokens);
        }
        let (events, end) = self.reader.finish();
        let logprobs = match end {
            TurnEnd::StopString => Vec::new(),
            _ => self.held.drain(..).map(|(_, entry)| entry).collect(),
        };
        (events, logprobs, end.finish_reason(self.reader.n_calls()))
    }

    /// The tokens whose whole text is given out with `events`.
    fn release(&mut self, events: &[TurnEvent]) -> Vec<TokenLogprob> {
        for event in events {
            if let TurnEvent::Content(text) = event {
                self.n_delivered += text.len();
            }
        }
        let is_out = |&(end, _): &(usize, TokenLogprob)| end <= self.n_delivered;
        let n_out = self.held.iter().take_while(|entry| is_out(entry)).count();
        self.held.drain(..n_out).map(|(_, entry)| entry).collect()
    }
}
