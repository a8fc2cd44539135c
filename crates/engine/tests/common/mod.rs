//! A model for exact tests, guides, listeners.
//!
//! [`Toy`] stores a number for each row and class; the logits of a row are a
//! hash of every number that it sees through its page tables. So one row that
//! is missing, stale, of another sequence or at another place changes them.
#![allow(dead_code)] // each test file uses its part

use engine::{
    CacheUse, Ending, Engine, Event, Generated, Handle, Job, Metrics, Request, SamplerSettings,
    Sequence, Service, Settings, Timings,
};
use gguf::Gguf;
use model::backend::PageData;
use model::kv::{ClassLayout, KvLayout, PageCopy};
use model::{
    Batch, Capacity, Caps, Config, Constraint, DeviceError, DraftRequest, DrafterConfig, Error,
    Forward, Guide, Input, KvType, Outputs, PAGE_ROWS, PageClass, PageId, RowOutput, Step, Tables,
    Verdict, Want, WindowConvention, select,
};
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const N_VOCAB: usize = 64;
pub const WINDOW: u32 = 300;
pub const DRAFTER_WINDOW: u32 = 200;
/// A prefix cache without a limit.
pub const ALL: u64 = u64::MAX;

/// What a [`Toy`] does wrongly, and what it has seen.
#[derive(Default)]
pub struct Orders {
    /// The next pass fails.
    pub pass_fails: Option<DeviceError>,
    /// Rows of this token have logits that are not finite.
    pub poison: Option<u32>,
    /// Copies of pages leave out the last row.
    pub copies_are_short: bool,
    /// Slabs that there really are.
    pub n_real_slabs: Option<usize>,
    /// Every so many drafted tokens, one is not what a greedy answer goes on with;
    /// 0 for none.
    pub wrong_drafts: usize,
    /// The next draft fails.
    pub draft_fails: Option<DeviceError>,
    /// Rows of each pass.
    pub passes: Vec<usize>,
    /// Tokens asked for in each draft.
    pub drafts: Vec<usize>,
}

/// A model that is a hash.
pub struct Toy {
    config: Config,
    layout: KvLayout,
    max_slabs: usize,
    pub max_rows: usize,
    drafter: Option<DrafterConfig>,
    /// By class, page and slot; 0 where nothing was stored.
    rows: [Vec<u64>; 3],
    pub orders: Arc<Mutex<Orders>>,
}

/// Two classes, as Muse Glimmer has them: most layers are behind a window.
pub fn layout() -> KvLayout {
    let class = |n_layer, window| ClassLayout {
        n_layer,
        n_head_kv: 1,
        head_dim: 4,
        window,
    };
    KvLayout {
        ty: KvType::F16,
        classes: [
            class(1, None),
            class(3, Some(WINDOW)),
            ClassLayout::default(),
        ],
    }
}

pub fn nano_file() -> Gguf {
    testing::open(&testing::bundled("nano-glimmer-q8_0.gguf"))
}

impl Toy {
    /// A model whose pages fill `max_slabs` slabs.
    pub fn new(max_slabs: usize) -> Toy {
        let config = Config::from_metadata(nano_file().metadata()).expect("its numbers");
        Toy {
            config: Config {
                n_vocab: N_VOCAB,
                n_ctx: 20_000,
                ..config
            },
            layout: layout(),
            max_slabs,
            max_rows: 512,
            drafter: None,
            rows: Default::default(),
            orders: Arc::default(),
        }
    }

    /// As [`Toy::new`], and every row sees all before it.
    pub fn without_window(max_slabs: usize) -> Toy {
        let mut toy = Toy::new(max_slabs);
        toy.layout.classes[PageClass::Sliding as usize] = ClassLayout::default();
        toy
    }

    /// As [`Toy::new`], with a drafter: it goes on as a greedy answer does.
    pub fn with_drafter(max_slabs: usize) -> Toy {
        let mut toy = Toy::new(max_slabs);
        let file = testing::open(&testing::bundled("nano-glimmer-dflash-q8_0.gguf"));
        let config = DrafterConfig::from_metadata(file.metadata(), WindowConvention::Below);
        toy.drafter = Some(config.expect("its numbers"));
        let layout = &mut toy.layout.classes;
        layout[PageClass::Drafter as usize] = ClassLayout {
            n_layer: 1,
            n_head_kv: 1,
            head_dim: 4,
            window: Some(DRAFTER_WINDOW),
        };
        toy
    }

    fn store(&mut self, class: PageClass, page: PageId, slot: usize, value: u64) {
        let rows = &mut self.rows[class as usize];
        let place = place_of(page, slot);
        if rows.len() <= place {
            rows.resize(place + 1, 0);
        }
        rows[place] = value;
    }

    /// All that row `pos` of `seq` sees before itself, as one number; the states
    /// of the rows from `drafted.0` on are in `drafted.1`.
    fn seen(&self, step: &Step, seq: u32, pos: u32, drafted: (u32, &[u64])) -> u64 {
        // Not a fixed point of the hash: no row is stored as 0.
        let mut seen = 1;
        for class in [PageClass::Full, PageClass::Sliding] {
            let layout = self.layout.classes[class as usize];
            if layout.n_layer == 0 {
                continue;
            }
            let first = layout.window.map_or(0, |w| (pos + 1).saturating_sub(w));
            for before in first..pos {
                let row = match before.checked_sub(drafted.0) {
                    Some(place) => mix(drafted.1[place as usize], class as u64),
                    None => self.stored(step, class, seq, before),
                };
                seen = mix(seen, row);
            }
        }
        seen
    }

    fn stored(&self, step: &Step, class: PageClass, seq: u32, pos: u32) -> u64 {
        let (page, slot) = step.place(class, seq, pos);
        let row = self.rows[class as usize].get(place_of(page, slot));
        let row = row.copied().unwrap_or(0);
        assert_ne!(row, 0, "{class} row {pos} was never stored");
        row
    }

    /// A greedy continuation. Every row of the context that a drafter looks at
    /// must be stored, and be that of the sequence.
    fn continued(&self, step: &Step, request: DraftRequest, start: u32) -> Vec<u32> {
        let DraftRequest {
            seq,
            anchor,
            n_draft,
        } = request;
        for pos in (start + 1).saturating_sub(DRAFTER_WINDOW)..start {
            let of = |class| self.stored(step, class, seq, pos);
            let is_same = of(PageClass::Drafter) == of(PageClass::Full);
            assert!(is_same, "drafter row {pos} is another one's");
        }
        let (mut states, mut token, mut tokens) = (Vec::new(), anchor, Vec::new());
        for pos in start..start + n_draft as u32 {
            let seen = self.seen(step, seq, pos, (start, &states));
            let state = mix(mix(seen, u64::from(token)), u64::from(pos));
            states.push(state);
            let RowOutput::Argmax { token: best, .. } = select(&logits(state), Want::Argmax) else {
                panic!("the best token");
            };
            token = best;
            tokens.push(token);
        }
        tokens
    }
}

fn place_of(page: PageId, slot: usize) -> usize {
    page.0 as usize * PAGE_ROWS + slot
}

/// One step of a hash.
pub fn mix(state: u64, value: u64) -> u64 {
    let mut x = state ^ value.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ x >> 32
}

/// The logits after a row that is `state`: from -8 to 8, all distinct enough.
fn logits(state: u64) -> Vec<f32> {
    let logit = |token| (mix(state, token) >> 40) as f32 / (1 << 20) as f32 - 8.0;
    (1..=N_VOCAB as u64).map(logit).collect()
}

impl Forward for Toy {
    fn config(&self) -> &Config {
        &self.config
    }

    fn caps(&self) -> Caps {
        Caps {
            device: "a hash".into(),
            max_rows: self.max_rows,
            same_bits_rows: self.max_rows,
        }
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            layout: self.layout,
            max_slabs: self.max_slabs,
            activation_bytes: 0,
        }
    }

    fn pass(
        &mut self,
        batch: &Batch,
        tables: &Tables<'_>,
        want: &[Want],
    ) -> Result<Outputs, Error> {
        let orders = Arc::clone(&self.orders);
        let mut orders = orders.lock().expect("no panic");
        orders.passes.push(batch.rows.len());
        assert!(batch.rows.len() <= self.max_rows);
        if let Some(error) = orders.pass_fails.take() {
            return Err(error.into());
        }
        let step = Step::new(batch, tables);
        let mut states = Vec::new();
        for row in &batch.rows {
            let Input::Token(token) = row.input;
            let seen = self.seen(&step, row.seq, row.pos, (u32::MAX, &[]));
            let own = mix(mix(seen, u64::from(token)), u64::from(row.pos));
            for class in PageClass::ALL {
                if self.layout.classes[class as usize].n_layer > 0 {
                    let (page, slot) = step.place(class, row.seq, row.pos);
                    let (slab, _) = self.layout.locate(page);
                    if orders.n_real_slabs.is_some_and(|n| slab >= n) {
                        return Err(DeviceError::OutOfMemory {
                            what: "slabs",
                            wanted_bytes: 1,
                        }
                        .into());
                    }
                    let of_class = match class {
                        PageClass::Drafter => PageClass::Full,
                        class => class,
                    };
                    self.store(class, page, slot, mix(own, of_class as u64));
                }
            }
            states.push((token, own));
        }
        let output = |(&row, &want): (&u32, &Want)| {
            let (token, state) = states[row as usize];
            match orders.poison == Some(token) {
                true => RowOutput::NonFinite { token: 5 },
                false => select(&logits(state), want),
            }
        };
        Ok(batch.wanted.iter().zip(want).map(output).collect())
    }

    fn attach_drafter(&mut self, _: &Gguf, _: WindowConvention) -> Result<DrafterConfig, Error> {
        Err(Error::DrafterUnsupported("a hash has no drafter".into()))
    }

    fn drafter(&self) -> Option<&DrafterConfig> {
        self.drafter.as_ref()
    }

    fn draft(
        &mut self,
        requests: &[DraftRequest],
        tables: &Tables<'_>,
        want: Want,
    ) -> Result<Vec<Outputs>, Error> {
        assert!(self.drafter.is_some() && want == Want::Argmax);
        let n_rows: usize = requests.iter().map(|r| 1 + r.n_draft).sum();
        assert!(n_rows <= self.max_rows, "{n_rows} rows of drafts");
        let orders = Arc::clone(&self.orders);
        let mut orders = orders.lock().expect("no panic");
        if let Some(error) = orders.draft_fails.take() {
            return Err(error.into());
        }
        let step = Step::new(&Batch::default(), tables);
        let mut outputs = Vec::new();
        for &request in requests {
            orders.drafts.push(request.n_draft);
            let start = tables[request.seq as usize].len();
            let mut tokens = self.continued(&step, request, start);
            for (token, pos) in tokens.iter_mut().zip(start as usize..) {
                if orders.wrong_drafts > 0 && pos % orders.wrong_drafts == 0 {
                    *token = (*token + 1) % N_VOCAB as u32;
                }
            }
            let output = |token| RowOutput::Argmax { token, logit: 0.0 };
            outputs.push(tokens.into_iter().map(output).collect());
        }
        Ok(outputs)
    }

    fn export_page(&mut self, class: PageClass, page: PageId, _: usize) -> Result<PageData, Error> {
        Err(Error::PageUnknown { class, page })
    }

    fn import_page(&mut self, class: PageClass, page: PageId, _: &PageData) -> Result<(), Error> {
        Err(Error::PageUnknown { class, page })
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Error> {
        let is_short = self.orders.lock().expect("no panic").copies_are_short;
        for copy in copies {
            for slot in 0..copy.rows {
                let from = place_of(copy.from, slot);
                let row = self.rows[copy.class as usize][from];
                let is_missing = is_short && slot + 1 == copy.rows;
                self.store(copy.class, copy.to, slot, if is_missing { 1 } else { row });
            }
        }
        Ok(())
    }
}

/// A guide that stops at a token and follows a script of constraints.
#[derive(Clone, Default)]
pub struct Script {
    pub stop: Option<u32>,
    /// By place; free after the last.
    pub constraints: Vec<Constraint>,
    pub place: usize,
}

impl Guide for Script {
    fn constraint(&mut self) -> Constraint {
        let constraint = self.constraints.get(self.place);
        constraint.cloned().unwrap_or(Constraint::Free)
    }

    fn accept(&mut self, token: u32) -> Verdict {
        self.place += 1;
        match Some(token) == self.stop {
            true => Verdict::Stop,
            false => Verdict::Continue,
        }
    }

    fn fork(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

pub fn greedy() -> SamplerSettings {
    SamplerSettings {
        temperature: 0.0,
        ..SamplerSettings::default()
    }
}

/// Every stage of the chain that looks at the history, and a draw.
pub fn seeded(seed: u64) -> SamplerSettings {
    SamplerSettings {
        top_k: 20,
        top_p: 0.95,
        repeat_penalty: 1.2,
        repeat_last_n: -1,
        seed,
        ..SamplerSettings::default()
    }
}

/// Tokens that differ from `salt` to `salt`, below the vocabulary of a [`Toy`].
pub fn prompt(salt: u64, n_tokens: usize) -> Vec<u32> {
    let token = |i| (mix(salt + 1, i) % N_VOCAB as u64) as u32;
    (0..n_tokens as u64).map(token).collect()
}

/// A job with one free guide whose events go to the receiver.
pub fn job(
    tokens: Vec<u32>,
    sampling: SamplerSettings,
    max_tokens: usize,
) -> (Job, Receiver<Event>) {
    let (sender, events) = channel();
    let job = Job {
        tokens,
        guides: vec![Box::new(Script::default())],
        sampling,
        max_tokens: Some(max_tokens),
        logprobs: Some(2),
        cuts: Vec::new(),
        cache: CacheUse::default(),
        deadline: None,
        receive: Box::new(listener(sender)),
    };
    (job, events)
}

/// Sends events on; breaks off when nobody takes them.
pub fn listener(sender: Sender<Event>) -> impl FnMut(Event) -> ControlFlow<()> + Send {
    move |event| match sender.send(event) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    }
}

/// What a job heard, choice by choice.
#[derive(Debug, Default)]
pub struct Heard {
    pub answers: Vec<Vec<Generated>>,
    pub endings: Vec<Option<Ending>>,
    pub timings: Timings,
    pub failure: Option<String>,
    pub prefilled: Vec<(usize, usize)>,
    pub started_with: Option<usize>,
}

impl Heard {
    pub fn tokens(&self, choice: usize) -> Vec<u32> {
        self.answers[choice].iter().map(|g| g.token).collect()
    }
}

/// All events of a job up to its end.
pub fn hear(events: &Receiver<Event>) -> Heard {
    let mut heard = Heard::default();
    let grow = |heard: &mut Heard, choice: usize| {
        let n = heard.answers.len().max(choice + 1);
        heard.answers.resize(n, Vec::new());
        heard.endings.resize(n, None);
    };
    loop {
        // Far beyond what any test takes: a hang fails instead of hanging.
        let event = events.recv_timeout(Duration::from_secs(300));
        match event.expect("a job that ends") {
            Event::Started { cached_tokens, .. } => heard.started_with = Some(cached_tokens),
            Event::Prefilled { done, total } => heard.prefilled.push((done, total)),
            Event::Token { choice, generated } => {
                grow(&mut heard, choice);
                assert_eq!(heard.endings[choice], None, "a token after the end");
                heard.answers[choice].push(generated);
            }
            Event::ChoiceEnded { choice, ending } => {
                grow(&mut heard, choice);
                assert_eq!(heard.endings[choice].replace(ending), None, "two ends");
            }
            Event::Ended(timings) => {
                heard.timings = timings;
                return heard;
            }
            Event::Failed(error) => {
                heard.failure = Some(error.to_string());
                return heard;
            }
        }
    }
}

pub fn run(handle: &Handle, (job, events): (Job, Receiver<Event>)) -> Heard {
    handle.submit(job).expect("it is taken");
    hear(&events)
}

/// Keeps the engine in its first job until the sender is dropped, so that what
/// is submitted meanwhile comes together.
pub fn hold(handle: &Handle) -> Sender<()> {
    let (release, held) = channel::<()>();
    let (mut first, _) = job(vec![1], greedy(), 1);
    first.receive = Box::new(move |_| {
        held.recv().ok();
        ControlFlow::Continue(())
    });
    handle.submit(first).expect("it is taken");
    release
}

/// Ends a service; its last counts. Not a page is left.
pub fn end(service: Service, handle: &Handle) -> Metrics {
    handle.drain();
    service.join().expect("no failure");
    let metrics = handle.metrics();
    assert_eq!(
        (metrics.pages_used, metrics.cache_pages),
        (0, 0),
        "all pages return"
    );
    assert_eq!((metrics.running, metrics.waiting), (0, 0));
    metrics
}

/// The same answer from the loop of one sequence, alone, on a model of its own.
pub fn alone(
    model: impl Forward + 'static,
    tokens: &[u32],
    sampling: SamplerSettings,
    max_tokens: usize,
) -> Vec<Generated> {
    let mut engine = Engine::new(Box::new(model), None).expect("an engine");
    let mut sequence = Sequence::new();
    sequence.push(tokens);
    let request = Request {
        sampling,
        max_tokens: Some(max_tokens),
        logprobs: Some(2),
    };
    let mut found = Vec::new();
    let mut receive = |g: &Generated| {
        found.push(g.clone());
        ControlFlow::Continue(())
    };
    let mut guide = Script::default();
    engine
        .generate(&mut sequence, &request, &mut guide, &mut receive)
        .expect("an answer");
    found
}

/// Rows of a page, for tests that speak of its borders.
pub const PAGE: usize = PAGE_ROWS;

pub fn settings(prefix_cache_bytes: u64) -> Settings {
    Settings {
        prefix_cache_bytes,
        ..Settings::default()
    }
}

pub fn service_of(toy: Toy, settings: Settings) -> (Service, Handle, Arc<Mutex<Orders>>) {
    let orders = Arc::clone(&toy.orders);
    let service = Service::start(Box::new(toy), settings).expect("a service");
    let handle = service.handle();
    (service, handle, orders)
}

pub fn service(max_slabs: usize, prefix_cache_bytes: u64) -> (Service, Handle) {
    let (service, handle, _) = service_of(Toy::new(max_slabs), settings(prefix_cache_bytes));
    (service, handle)
}

/// What the loop of one sequence answers, from a model of its own.
pub fn expected(tokens: &[u32], sampling: &SamplerSettings, n: usize) -> Vec<Generated> {
    alone(Toy::new(1000), tokens, sampling.clone(), n)
}
