//! The bounds of the scheduler, over random lives of random sequences.

use engine::{
    CostModel, JobId, MAX_PREFILL_ROWS, MIN_PREFILL_ROWS, PASS_TIME, Scheduler, SequenceId, Span,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

fn id(job: u64) -> SequenceId {
    SequenceId {
        job: JobId(job),
        choice: 0,
    }
}

/// A device whose pass takes `base` and `row` for each row, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Device {
    base: u64,
    row: u64,
}

impl Device {
    fn time(self, n_rows: usize) -> Duration {
        Duration::from_micros(self.base + self.row * model::padded(n_rows) as u64)
    }
}

/// What happens between two passes.
#[derive(Clone, Debug)]
enum Step {
    Arrive { n_prompt: usize, n_answer: usize },
    Leave(usize),
    Preempt,
    Pass,
    ForcedTokens(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1usize..1500, 1usize..30)
            .prop_map(|(n_prompt, n_answer)| Step::Arrive { n_prompt, n_answer }),
        1 => (0usize..64).prop_map(Step::Leave),
        1 => Just(Step::Preempt),
        8 => Just(Step::Pass),
        1 => (0usize..64, 1usize..40).prop_map(|(of, n)| Step::ForcedTokens(of, n)),
    ]
}

/// A sequence as the caller of the scheduler sees it.
#[derive(Clone, Debug)]
struct Life {
    known: usize,
    computed: usize,
    left_to_answer: usize,
    is_decoding: bool,
    /// Passes since it last had a row, while it was running.
    n_passed_over: usize,
}

/// The scheduler in use, with its caller's books beside it.
struct World {
    scheduler: Scheduler,
    cost: CostModel,
    device: Device,
    max_rows: usize,
    lives: BTreeMap<SequenceId, Life>,
    n_jobs: u64,
    n_asked: usize,
}

impl World {
    fn new(max_rows: usize, max_sequences: usize, device: Device) -> World {
        World {
            scheduler: Scheduler::new(max_rows, max_sequences),
            cost: CostModel::new(),
            device,
            max_rows,
            lives: BTreeMap::new(),
            n_jobs: 0,
            n_asked: 0,
        }
    }

    fn act(&mut self, step: &Step) {
        match *step {
            Step::Arrive { n_prompt, n_answer } => {
                let id = id(self.n_jobs);
                self.n_jobs += 1;
                self.scheduler.arrive(id, 1);
                self.lives.insert(
                    id,
                    Life {
                        known: n_prompt,
                        computed: 0,
                        left_to_answer: n_answer,
                        is_decoding: false,
                        n_passed_over: 0,
                    },
                );
            }
            Step::Leave(of) => {
                let id = self.lives.keys().nth(of).copied();
                if let Some(id) = id {
                    self.lives.remove(&id);
                    self.scheduler.leave(id);
                }
            }
            Step::Preempt => {
                if let Some(id) = self.scheduler.newest() {
                    assert_eq!(Some(id), self.scheduler.running().max());
                    self.scheduler.preempt(id);
                    let life = self.lives.get_mut(&id).expect("it runs");
                    life.computed = 0;
                    life.is_decoding = false;
                    life.n_passed_over = 0;
                }
            }
            Step::ForcedTokens(of, n) => {
                let mut decoding = self.lives.iter_mut().filter(|(_, life)| life.is_decoding);
                if let Some((&id, life)) = decoding.nth(of) {
                    life.known += n;
                    self.scheduler.sampled(id, n);
                }
            }
            Step::Pass => self.pass(),
        }
    }

    fn pass(&mut self) {
        let mut oldest_waiting = None;
        while let Some(id) = self.scheduler.next_waiting() {
            assert!(oldest_waiting < Some(id), "by age");
            oldest_waiting = Some(id);
            let life = &self.lives[&id];
            self.scheduler.admit(id, life.known - life.computed);
        }
        for (place, id) in self
            .scheduler
            .running()
            .collect::<Vec<_>>()
            .iter()
            .enumerate()
        {
            // Some ask for drafts, also those that have nothing to draft behind.
            self.n_asked = (self.n_asked + place) % 23;
            self.scheduler.draft(*id, self.n_asked.saturating_sub(7));
        }
        let spans = self.scheduler.plan(&self.cost);
        self.check(&spans);
        let n_rows: usize = spans.iter().map(|span| span.n_rows + span.n_drafts).sum();
        if n_rows > 0 {
            self.cost.measured(n_rows, self.device.time(n_rows));
        }
        for span in spans {
            self.scheduler.computed(span.id, span.n_rows);
            let life = self.lives.get_mut(&span.id).expect("it runs");
            life.computed += span.n_rows;
            life.n_passed_over = 0;
            if !span.is_last {
                continue;
            }
            life.is_decoding = true;
            life.left_to_answer = life.left_to_answer.saturating_sub(1);
            if life.left_to_answer == 0 {
                self.lives.remove(&span.id);
                self.scheduler.leave(span.id);
            } else {
                life.known += 1;
                self.scheduler.sampled(span.id, 1);
            }
        }
    }

    /// Every bound, for one planned pass.
    fn check(&mut self, spans: &[Span]) {
        let min_rows = self.scheduler.min_prefill_rows();
        let mut rows: BTreeMap<SequenceId, &Span> = BTreeMap::new();
        for span in spans {
            assert!(rows.insert(span.id, span).is_none(), "planned twice");
            let life = &self.lives[&span.id];
            let n_left = life.known - life.computed;
            assert!(
                0 < span.n_rows && span.n_rows <= n_left,
                "rows that are not there"
            );
            assert_eq!(span.is_last, span.n_rows == n_left);
            assert!(self.scheduler.is_running(span.id), "it waits");
            let may_draft = life.is_decoding && n_left == 1;
            assert!(span.n_drafts == 0 || may_draft, "a draft of nothing");
        }
        let n_drafts: usize = spans.iter().map(|span| span.n_drafts).sum();
        let n_rows: usize = spans.iter().map(|span| span.n_rows).sum::<usize>() + n_drafts;
        assert!(n_rows <= self.max_rows, "{n_rows} rows");
        let running: Vec<_> = self.scheduler.running().collect();
        assert!(running.len() <= self.scheduler.max_sequences());
        let is_decode = |id: &SequenceId| self.lives[id].is_decoding;
        let n_decodes = running.iter().filter(|id| is_decode(id)).count();
        for id in running.iter().filter(|id| is_decode(id)) {
            assert!(rows.contains_key(id), "a decode waits");
        }
        let prefills: Vec<_> = running.iter().filter(|id| !is_decode(id)).collect();
        let left: usize = prefills
            .iter()
            .map(|id| self.lives[id].known - self.lives[id].computed)
            .sum();
        let advanced: usize = prefills
            .iter()
            .filter_map(|id| rows.get(id))
            .map(|s| s.n_rows)
            .sum();
        assert!(
            advanced >= left.min(min_rows),
            "{advanced} of {left} rows of prefills"
        );
        if n_decodes == 0 {
            assert_eq!(
                advanced,
                left.min(self.max_rows),
                "an idle machine holds back"
            );
        } else {
            let beside = n_rows - n_decodes - n_drafts;
            assert!(beside <= MAX_PREFILL_ROWS.max(min_rows));
            if beside > min_rows {
                let decode = self
                    .cost
                    .predicted(n_decodes + n_drafts)
                    .expect("it was measured");
                let pass = self.cost.predicted(n_rows).expect("it was measured");
                assert!(
                    pass <= PASS_TIME.max(2 * decode),
                    "{pass:?} beside {decode:?}"
                );
            }
        }
        // Nobody of a class is served twice while another of it is not at all.
        let n_running = running.len();
        for id in running {
            let life = self.lives.get_mut(&id).expect("it runs");
            life.n_passed_over += 1;
            assert!(life.n_passed_over <= n_running.max(self.scheduler.max_sequences()) + 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_bound_holds_in_every_pass(
        max_rows in 1usize..700,
        max_sequences in 1usize..80,
        base in 0u64..60_000,
        row in 0u64..3_000,
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let mut world = World::new(max_rows, max_sequences, Device { base, row });
        for step in &steps {
            world.act(step);
        }
        // Whatever happened: all end, each row computed exactly as often as asked for.
        let mut n_passes = 0;
        while !world.lives.is_empty() {
            world.pass();
            n_passes += 1;
            prop_assert!(n_passes < 400_000, "somebody starves");
        }
        prop_assert_eq!(world.scheduler.n_running() + world.scheduler.n_waiting(), 0);
    }
}

/// Admits jobs of so many rows; the first `n_decodes` have a token each.
fn running(scheduler: &mut Scheduler, n_rows: &[usize], n_decodes: usize) {
    for (job, &n) in (0..).zip(n_rows) {
        scheduler.arrive(id(job), 1);
        scheduler.admit(id(job), n);
    }
    for job in 0..n_decodes as u64 {
        scheduler.computed(id(job), n_rows[job as usize]);
        scheduler.sampled(id(job), 1);
    }
}

fn rows_of(spans: &[Span]) -> Vec<(u64, usize)> {
    spans
        .iter()
        .map(|span| (span.id.job.0, span.n_rows))
        .collect()
}

#[test]
fn prefills_take_turns_and_a_newcomer_takes_no_turn_of_another() {
    let mut scheduler = Scheduler::new(100, 8);
    running(&mut scheduler, &[150, 150, 20], 0);
    let cost = CostModel::new();
    let mut all = Vec::new();
    for pass in 0..4 {
        let spans = scheduler.plan(&cost);
        all.push(rows_of(&spans));
        for span in &spans {
            scheduler.computed(span.id, span.n_rows);
        }
        if pass == 1 {
            scheduler.arrive(id(9), 1);
            scheduler.admit(id(9), 70);
        }
    }
    assert_eq!(
        all,
        [
            vec![(0, 100)],
            vec![(1, 100)],
            vec![(2, 20), (0, 50), (1, 30)],
            vec![(9, 70), (1, 20)],
        ]
    );
}

#[test]
fn the_prefill_beside_decodes_is_as_long_as_the_time_allows() {
    // Microseconds of a pass and of a row in it; rows beside one decode.
    for (base, row, expected) in [
        // 100 ms hold (100 - 20) rows of 1 ms: the largest shape within is 64.
        (20_000, 1_000, 63),
        // One decode pass takes 201 ms: two of them hold 192 rows.
        (200_000, 1_000, 191),
        // Even 8 rows are too many: they advance all the same.
        (1_000, 90_000, 8),
        (1, 1, 512),
    ] {
        let device = Device { base, row };
        let mut cost = CostModel::new();
        for n_rows in [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128] {
            cost.measured(n_rows, device.time(n_rows));
        }
        for n_rows in (192..=576).step_by(64) {
            cost.measured(n_rows, device.time(n_rows));
        }
        let mut scheduler = Scheduler::new(1024, 8);
        running(&mut scheduler, &[10, 5000], 1);
        let found = rows_of(&scheduler.plan(&cost));
        assert_eq!(found, [(0, 1), (1, expected)], "base {base}, row {row}");
    }
}

#[test]
fn forced_tokens_go_before_prefills_but_leave_them_their_least() {
    let mut scheduler = Scheduler::new(64, 8);
    running(&mut scheduler, &[10, 12, 500], 2);
    scheduler.sampled(id(0), 30);
    let spans = scheduler.plan(&CostModel::new());
    // Nothing is measured: eight rows beside the decodes, all for the prefill.
    assert_eq!(rows_of(&spans), [(0, 1), (1, 1), (2, MIN_PREFILL_ROWS)]);
    let mut cost = CostModel::new();
    cost.measured(64, Duration::from_millis(1));
    let spans = scheduler.plan(&cost);
    assert_eq!(rows_of(&spans), [(0, 31), (1, 1), (2, 32)]);
    assert!(spans[0].is_last && !spans[2].is_last);
}

#[test]
fn drafts_take_the_rows_that_nobody_needs_and_are_asked_for_each_time() {
    let mut scheduler = Scheduler::new(32, 8);
    running(&mut scheduler, &[10, 12, 500], 2);
    for (asked, expected) in [([4, 3], [4, 3]), ([15, 15], [15, 7]), ([0, 2], [0, 2])] {
        (0..2).for_each(|job| scheduler.draft(id(job), asked[job as usize]));
        let spans = scheduler.plan(&CostModel::new());
        let drafts: Vec<usize> = spans.iter().map(|span| span.n_drafts).collect();
        // Eight rows stay for the prefill, a row for each decode.
        assert_eq!(drafts, [expected[0], expected[1], 0], "{asked:?}");
        assert_eq!(rows_of(&spans), [(0, 1), (1, 1), (2, MIN_PREFILL_ROWS)]);
    }
    let spans = scheduler.plan(&CostModel::new());
    assert!(spans.iter().all(|span| span.n_drafts == 0), "nobody asked");
    // With forced tokens known, there is nothing to draft behind.
    scheduler.sampled(id(1), 1);
    scheduler.draft(id(1), 5);
    let spans = scheduler.plan(&CostModel::new());
    assert!(spans.iter().all(|span| span.n_drafts == 0));
}

#[test]
fn a_prompt_with_choices_waits_for_all_their_places() {
    let mut scheduler = Scheduler::new(512, 4);
    running(&mut scheduler, &[10, 10], 0);
    scheduler.arrive(id(2), 3);
    scheduler.arrive(id(3), 1);
    assert_eq!(
        scheduler.next_waiting(),
        None,
        "the newer one does not pass it by"
    );
    scheduler.leave(id(0));
    assert_eq!(scheduler.next_waiting(), Some(id(2)));
    scheduler.admit(id(2), 7);
    assert_eq!((scheduler.n_running(), scheduler.next_waiting()), (2, None));
    scheduler.computed(id(2), 7);
    scheduler.branch(id(2));
    assert_eq!(scheduler.n_running(), 4);
    let last = SequenceId { choice: 2, ..id(2) };
    assert_eq!(scheduler.newest(), Some(last));
    scheduler.leave(last);
    assert_eq!(scheduler.next_waiting(), Some(id(3)));
}

#[test]
fn small_passes_keep_rows_for_decodes_and_a_prefill() {
    for (max_rows, asked, sequences, min_rows) in [
        (512, 64, 64, 8),
        (64, 64, 56, 8),
        (16, 64, 8, 8),
        (8, 64, 4, 4),
        (1, 64, 1, 1),
    ] {
        let scheduler = Scheduler::new(max_rows, asked);
        let found = (scheduler.max_sequences(), scheduler.min_prefill_rows());
        assert_eq!(found, (sequences, min_rows), "{max_rows} rows");
    }
}

#[test]
fn a_cost_is_between_its_neighbours_and_an_outlier_is_not_believed_for_ever() {
    let ms = Duration::from_millis;
    let mut cost = CostModel::new();
    assert_eq!(cost.predicted(1), None);
    cost.measured(64, ms(64));
    assert_eq!(cost.predicted(1), Some(ms(64)), "no less is known");
    assert_eq!(cost.predicted(128), Some(ms(128)));
    cost.measured(1, ms(10));
    cost.measured(32, ms(40));
    assert_eq!(cost.predicted(48), Some(ms(52)));
    // 128 rows never take more than two passes of 64.
    cost.measured(128, ms(9000));
    assert_eq!(cost.predicted(128), Some(ms(128)));
    // Nor do more rows take less time.
    cost.measured(256, ms(1));
    assert_eq!(cost.predicted(256), Some(ms(128)));
}
