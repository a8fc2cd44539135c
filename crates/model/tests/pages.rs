//! The page pool and the sequences' tables, against a naive model that keeps
//! for every position of every sequence the page it was written to, and the
//! rules as sentences.

use model::kv::{ClassLayout, KvLayout, PageCopy};
use model::{Error, KvType, PAGE_ROWS, PageClass, PageId, PagePool, SequencePages};
use proptest::prelude::{Strategy, prop, prop_oneof};
use proptest::{prop_assert, prop_assert_eq, proptest};
use std::collections::HashMap;

const WINDOW: u32 = 300;
const DRAFTER_WINDOW: u32 = 90;
const N_SEQUENCES: usize = 4;

/// Classes of different page sizes: a slab holds 12 full, 4 sliding or 16
/// drafter pages.
fn layout() -> KvLayout {
    let class = |n_layer, head_dim, window| ClassLayout {
        n_layer,
        n_head_kv: 1,
        head_dim,
        window,
    };
    KvLayout {
        ty: KvType::F16,
        classes: [
            class(1, 8, None),
            class(3, 8, Some(WINDOW)),
            class(1, 6, Some(DRAFTER_WINDOW)),
        ],
    }
}

/// What a pool of this layout gives out.
#[test]
fn sizes() {
    let layout = layout();
    let bytes = PageClass::ALL.map(|c| layout.page_bytes(c));
    assert_eq!(bytes, [8192, 24576, 6144]);
    assert_eq!(layout.slab_bytes(), 4 * 24576);
    assert_eq!(
        PageClass::ALL.map(|c| layout.pages_per_slab(c)),
        [12, 4, 16]
    );
    assert_eq!(layout.locate(PageId(16 * 3 + 5)), (3, 5));
}

#[derive(Clone, Debug)]
enum Op {
    /// Reserve, compute and accept fewer rows than were reserved.
    Append {
        seq: usize,
        reserved: u32,
        accepted: u32,
    },
    /// Reserve, copy, perhaps reserve again, and give up.
    GiveUp {
        seq: usize,
        reserved: u32,
        again: u32,
    },
    Truncate {
        seq: usize,
        keep_percent: u32,
    },
    /// Forget the newest row and write another in its place.
    Recompute {
        seq: usize,
    },
    DropReserve {
        seq: usize,
    },
    Branch {
        from: usize,
        to: usize,
    },
    Clear {
        seq: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0..N_SEQUENCES;
    prop_oneof![
        8 => (seq.clone(), 0..400u32, 0..=100u32).prop_map(|(seq, reserved, percent)| Op::Append {
            seq,
            reserved,
            accepted: reserved * percent / 100,
        }),
        3 => (seq.clone(), 60..=100u32).prop_map(|(seq, keep_percent)| Op::Truncate {
            seq,
            keep_percent,
        }),
        2 => (seq.clone(), 1..400u32, 0..3u32).prop_map(|(seq, reserved, again)| Op::GiveUp {
            seq,
            reserved,
            again,
        }),
        2 => seq.clone().prop_map(|seq| Op::Recompute { seq }),
        1 => seq.clone().prop_map(|seq| Op::DropReserve { seq }),
        2 => (seq.clone(), seq.clone()).prop_map(|(from, to)| Op::Branch { from, to }),
        1 => seq.prop_map(|seq| Op::Clear { seq }),
    ]
}

/// What a row of a page holds: which history wrote it. Two sequences with the
/// same value at a position computed that row together.
type Stamp = u64;

/// The naive model: contents of pages, and what each sequence's rows must be.
#[derive(Default)]
struct Model {
    contents: HashMap<(PageClass, PageId, usize), Stamp>,
    rows: [Vec<Stamp>; N_SEQUENCES],
    next_stamp: Stamp,
}

/// Length, tables and reference counts of a sequence.
type Visible = (u32, Vec<Vec<Option<PageId>>>, Vec<u32>);

struct World {
    pool: PagePool,
    sequences: [SequencePages; N_SEQUENCES],
    model: Model,
}

fn window_of(class: PageClass) -> Option<u32> {
    layout().classes[class as usize].window
}

/// First position that the newest of `len` rows sees.
fn first_visible(class: PageClass, len: u32) -> u32 {
    window_of(class).map_or(0, |window| len.saturating_sub(window))
}

impl World {
    fn new(max_slabs: usize) -> World {
        World {
            pool: PagePool::new(layout(), max_slabs),
            sequences: Default::default(),
            model: Model::default(),
        }
    }

    fn apply(&mut self, op: &Op) -> Result<(), proptest::test_runner::TestCaseError> {
        match *op {
            Op::Append {
                seq,
                reserved,
                accepted,
            } => self.append(seq, reserved, accepted)?,
            Op::GiveUp {
                seq,
                reserved,
                again,
            } => self.give_up(seq, reserved, again)?,
            Op::Truncate { seq, keep_percent } => self.truncate(seq, keep_percent)?,
            Op::Recompute { seq } => self.recompute(seq)?,
            Op::DropReserve { seq } => self.sequences[seq].drop_reserve(&mut self.pool),
            Op::Branch { from, to } if from != to => {
                self.sequences[to].clear(&mut self.pool);
                self.sequences[to] = self.sequences[from].branch(&mut self.pool);
                self.model.rows[to] = self.model.rows[from].clone();
                let n_pages = self.model.rows[to].len().div_ceil(PAGE_ROWS);
                let tables = PageClass::ALL.map(|c| self.sequences[to].table(c).len());
                prop_assert_eq!(tables, [n_pages; 3], "a reserve is not shared");
            }
            Op::Branch { .. } => {}
            Op::Clear { seq } => {
                self.sequences[seq].clear(&mut self.pool);
                self.model.rows[seq].clear();
            }
        }
        self.check()
    }

    fn append(
        &mut self,
        seq: usize,
        reserved: u32,
        accepted: u32,
    ) -> Result<(), proptest::test_runner::TestCaseError> {
        // A reserve that was not used is as good as none.
        self.sequences[seq].drop_reserve(&mut self.pool);
        let before = self.state();
        let shared: Vec<Option<PageId>> = PageClass::ALL.map(|c| self.shared_tail(seq, c)).to_vec();
        let copies = match self.sequences[seq].reserve(&mut self.pool, reserved) {
            Ok(copies) => copies,
            Err(error) => {
                let is_exhausted = matches!(error, Error::PagesExhausted { .. });
                prop_assert!(is_exhausted, "{error}");
                prop_assert_eq!(self.state(), before, "a failed reserve changes nothing");
                return Ok(());
            }
        };
        // Copies are made for shared, partly filled pages and for no others.
        let sources: Vec<Option<PageId>> = PageClass::ALL
            .map(|class| copies.iter().find(|c| c.class == class).map(|c| c.from))
            .to_vec();
        let expected = if reserved > 0 { shared } else { vec![None; 3] };
        prop_assert_eq!(sources, expected);
        prop_assert!(copies.len() <= 3, "at most a copy for each class");
        for copy in &copies {
            self.copy(copy, seq)?;
        }
        // The pass writes all reserved rows, also those that are not accepted.
        let len = self.sequences[seq].len();
        for row in 0..reserved {
            let stamp = self.model.next_stamp;
            self.model.next_stamp += 1;
            for class in PageClass::ALL {
                let (page, slot) = self.place(seq, class, len + row)?;
                prop_assert_eq!(
                    self.pool.n_references(page),
                    1,
                    "a written page is not shared"
                );
                self.model.contents.insert((class, page, slot), stamp);
            }
            if row < accepted {
                self.model.rows[seq].push(stamp);
            }
        }
        self.sequences[seq].accept(&mut self.pool, accepted);
        Ok(())
    }

    /// The page that holds the last rows of `seq`, if it is partly filled and
    /// another sequence has it too.
    fn shared_tail(&self, seq: usize, class: PageClass) -> Option<PageId> {
        let len = self.sequences[seq].len() as usize;
        let page = self.sequences[seq]
            .table(class)
            .get(len / PAGE_ROWS)
            .copied()
            .flatten()?;
        let is_shared = self.pool.n_references(page) > 1;
        (is_shared && !len.is_multiple_of(PAGE_ROWS)).then_some(page)
    }

    fn copy(
        &mut self,
        copy: &PageCopy,
        seq: usize,
    ) -> Result<(), proptest::test_runner::TestCaseError> {
        prop_assert_eq!(copy.rows, self.sequences[seq].len() as usize % PAGE_ROWS);
        prop_assert!(
            self.pool.n_references(copy.from) > 0,
            "the source is still held"
        );
        for slot in 0..copy.rows {
            let stamp = self.model.contents[&(copy.class, copy.from, slot)];
            self.model
                .contents
                .insert((copy.class, copy.to, slot), stamp);
        }
        Ok(())
    }

    /// A copy that failed, or a pass that did: the reserved rows hold anything,
    /// and everything is as before.
    fn give_up(
        &mut self,
        seq: usize,
        reserved: u32,
        again: u32,
    ) -> Result<(), proptest::test_runner::TestCaseError> {
        self.sequences[seq].drop_reserve(&mut self.pool);
        let before = self.state();
        let len = self.sequences[seq].len();
        let tails = PageClass::ALL.map(|class| self.shared_tail(seq, class));
        let expected = if reserved > 0 { tails } else { [None; 3] };
        for _ in 0..=again {
            let Ok(copies) = self.sequences[seq].reserve(&mut self.pool, reserved) else {
                break;
            };
            let from = |class| copies.iter().find(|copy| copy.class == class);
            let sources = PageClass::ALL.map(|class| from(class).map(|copy| copy.from));
            prop_assert_eq!(
                sources,
                expected,
                "copies that may have failed are asked for again"
            );
            let first = copies.first().map(|copy| copy.class);
            let shared = PageClass::ALL.map(|class| self.shared_tail(seq, class));
            prop_assert_eq!(shared, [None; 3], "what is written is the sequence's own");
            for pos in len..len + reserved {
                for class in PageClass::ALL {
                    let (page, slot) = self.place(seq, class, pos)?;
                    self.model.contents.insert((class, page, slot), Stamp::MAX);
                }
            }
            // Of the copies, one was made.
            for copy in copies.iter().filter(|copy| Some(copy.class) == first) {
                self.copy(copy, seq)?;
            }
            let branch = self.sequences[seq].branch(&mut self.pool);
            let tables = PageClass::ALL.map(|class| branch.table(class).to_vec());
            let mut branch = branch;
            branch.clear(&mut self.pool);
            let kept = PageClass::ALL.map(|class| before[seq].1[class as usize].clone());
            prop_assert_eq!(tables, kept, "a branch has what was accepted");
        }
        self.sequences[seq].drop_reserve(&mut self.pool);
        prop_assert_eq!(self.state(), before);
        Ok(())
    }

    fn recompute(&mut self, seq: usize) -> Result<(), proptest::test_runner::TestCaseError> {
        if self.sequences[seq].is_empty() {
            return Ok(());
        }
        self.sequences[seq].reopen_newest(&mut self.pool);
        self.model.rows[seq].pop();
        let len = self.sequences[seq].len();
        prop_assert_eq!(len as usize, self.model.rows[seq].len());
        let tables = PageClass::ALL.map(|class| self.sequences[seq].table(class).len());
        let n_pages = (len as usize).div_ceil(PAGE_ROWS);
        prop_assert_eq!(tables, [n_pages; 3], "a page without rows is given back");
        self.append(seq, 1, 1)?;
        if self.sequences[seq].len() == len {
            // No page was free: the row before may see released keys, so that
            // the rules hold for an emptied sequence only.
            self.sequences[seq].clear(&mut self.pool);
            self.model.rows[seq].clear();
        }
        Ok(())
    }

    fn truncate(
        &mut self,
        seq: usize,
        keep_percent: u32,
    ) -> Result<(), proptest::test_runner::TestCaseError> {
        let len = self.sequences[seq].len();
        let wanted = len * keep_percent / 100;
        let is_held = PageClass::ALL.into_iter().all(|class| {
            let first = first_visible(class, wanted);
            (first..wanted).all(|pos| {
                let page = self.sequences[seq]
                    .table(class)
                    .get(pos as usize / PAGE_ROWS);
                page.copied().flatten().is_some()
            })
        });
        let before = self.state();
        let result = self.sequences[seq].truncate(&mut self.pool, wanted);
        match result {
            Ok(()) => {
                prop_assert!(is_held, "roll-back to {} of {} lacks keys", wanted, len);
                self.model.rows[seq].truncate(wanted as usize);
            }
            Err(error) => {
                let is_released = matches!(error, Error::WindowReleased { .. });
                prop_assert!(is_released, "{error}");
                prop_assert!(!is_held, "roll-back to {} of {} was possible", wanted, len);
                prop_assert_eq!(self.state(), before, "a failed roll-back changes nothing");
            }
        }
        Ok(())
    }

    fn place(
        &self,
        seq: usize,
        class: PageClass,
        pos: u32,
    ) -> Result<(PageId, usize), proptest::test_runner::TestCaseError> {
        let (index, slot) = (pos as usize / PAGE_ROWS, pos as usize % PAGE_ROWS);
        let page = self.sequences[seq]
            .table(class)
            .get(index)
            .copied()
            .flatten();
        prop_assert!(
            page.is_some(),
            "no {} page at {} of sequence {}",
            class,
            pos,
            seq
        );
        Ok((page.expect("just checked"), slot))
    }

    /// Everything a caller can see of the sequences.
    fn state(&self) -> Vec<Visible> {
        let of = |s: &SequencePages| {
            let tables: Vec<Vec<Option<PageId>>> =
                PageClass::ALL.map(|c| s.table(c).to_vec()).to_vec();
            let references = tables.iter().flatten().flatten();
            let references = references.map(|&p| self.pool.n_references(p)).collect();
            (s.len(), tables, references)
        };
        self.sequences.iter().map(of).collect()
    }

    fn check(&self) -> Result<(), proptest::test_runner::TestCaseError> {
        let mut references: HashMap<PageId, u32> = HashMap::new();
        let mut classes: HashMap<usize, PageClass> = HashMap::new();
        for (seq, pages) in self.sequences.iter().enumerate() {
            let rows = &self.model.rows[seq];
            prop_assert_eq!(pages.len() as usize, rows.len());
            prop_assert_eq!(pages.is_empty(), rows.is_empty());
            for class in PageClass::ALL {
                // What the newest row sees is what was computed for this history.
                for pos in first_visible(class, pages.len())..pages.len() {
                    let (page, slot) = self.place(seq, class, pos)?;
                    let found = self.model.contents[&(class, page, slot)];
                    prop_assert_eq!(found, rows[pos as usize], "{} row {}", class, pos);
                }
                for &page in pages.table(class).iter().flatten() {
                    *references.entry(page).or_default() += 1;
                    let slab = self.pool.layout().locate(page).0;
                    let holds = *classes.entry(slab).or_insert(class);
                    prop_assert_eq!(holds, class, "a slab holds one class");
                }
                self.check_released(pages, class)?;
            }
        }
        for (page, count) in &references {
            prop_assert_eq!(self.pool.n_references(*page), *count);
        }
        prop_assert_eq!(self.pool.n_pages_used(), references.len(), "no page leaks");
        prop_assert_eq!(self.pool.n_slabs_used(), classes.len());
        Ok(())
    }

    /// No page is held that lies wholly behind the window.
    fn check_released(
        &self,
        pages: &SequencePages,
        class: PageClass,
    ) -> Result<(), proptest::test_runner::TestCaseError> {
        let held = pages.table(class).iter().position(Option::is_some);
        if let (Some(first), Some(_)) = (held, window_of(class)) {
            let end = ((first + 1) * PAGE_ROWS) as u32;
            // After a roll-back older pages may be held than are needed.
            let newest = first_visible(class, pages.len());
            prop_assert!(
                end > newest || pages.is_empty(),
                "page {} of {}",
                first,
                class
            );
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(500))]

    #[test]
    fn any_history_keeps_the_rules(
        max_slabs in 3..9usize,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut world = World::new(max_slabs);
        for op in &ops {
            world.apply(op)?;
        }
        for seq in 0..N_SEQUENCES {
            world.sequences[seq].clear(&mut world.pool);
        }
        prop_assert_eq!(world.pool.n_pages_used(), 0);
        prop_assert_eq!(world.pool.n_slabs_used(), 0);
        // All slabs can serve any class again.
        for class in PageClass::ALL {
            let n = max_slabs * layout().pages_per_slab(class);
            let pages: Vec<PageId> = (0..n)
                .map(|_| world.pool.allocate(class).expect("a free page"))
                .collect();
            prop_assert!(world.pool.allocate(class).is_err());
            pages.into_iter().for_each(|page| world.pool.release(page));
        }
    }

    /// One sequence alone never needs more slabs than promised.
    #[test]
    fn promised_slabs_are_enough(n_rows in 1..5000u32, max_rows in 1..700u32) {
        let slabs = layout().slabs_for(n_rows as usize, max_rows as usize);
        let mut pool = PagePool::new(layout(), slabs);
        let mut pages = SequencePages::new();
        while pages.len() < n_rows {
            let n = max_rows.min(n_rows - pages.len());
            pages.reserve(&mut pool, n).expect("the promised slabs");
            pages.accept(&mut pool, n);
        }
    }
}

#[test]
fn exhausted_pool_says_what_is_used() {
    let mut pool = PagePool::new(layout(), 3);
    let mut pages = SequencePages::new();
    // 4 sliding pages fill a slab; two more slabs go to the other classes.
    pages.reserve(&mut pool, 1024).expect("three slabs");
    let error = pages.reserve(&mut pool, 1025).expect_err("no fourth slab");
    let message = "no free sliding page: 3 of 3 slabs are in use";
    assert_eq!(error.to_string(), message);
    assert_eq!(
        pool.n_pages_used(),
        12,
        "the full page that was free is given back"
    );
}

#[test]
fn slab_changes_class_when_it_is_empty() {
    let mut pool = PagePool::new(layout(), 1);
    let full = pool.allocate(PageClass::Full).expect("a page");
    assert!(
        pool.allocate(PageClass::Sliding).is_err(),
        "the slab holds full pages"
    );
    pool.release(full);
    let sliding: Vec<PageId> = (0..4)
        .map(|_| {
            pool.allocate(PageClass::Sliding)
                .expect("an empty slab changes")
        })
        .collect();
    assert!(pool.allocate(PageClass::Sliding).is_err());
    let error = pool
        .allocate(PageClass::Full)
        .expect_err("its free pages are gone");
    assert_eq!(
        error.to_string(),
        "no free full page: 1 of 1 slabs are in use"
    );
    assert_eq!(pool.n_slabs_used(), 1);
    sliding.into_iter().for_each(|page| pool.release(page));
    pool.allocate(PageClass::Full).expect("and back");
}

#[test]
fn roll_back_behind_the_released_window_is_refused() {
    let mut pool = PagePool::new(layout(), 8);
    let mut pages = SequencePages::new();
    for _ in 0..4 {
        pages.reserve(&mut pool, 256).expect("pages");
        pages.accept(&mut pool, 256);
    }
    // The row at 1023 sees the sliding keys from 724 on, so two pages remain;
    // the drafter's from 934 on, so one remains.
    assert_eq!(pages.oldest_held(), 768);
    let error = pages.truncate(&mut pool, 800).expect_err("released keys");
    let message = "cannot roll back to 800 rows: the sliding window's keys before position 768 \
                   are released";
    assert_eq!(error.to_string(), message);
    assert_eq!(pages.len(), 1024);
    pages
        .truncate(&mut pool, 860)
        .expect("the keys from 770 and 560 on are held");
    assert_eq!(pages.len(), 860);
}

/// At every place of a page: the newest row can be computed again, after it was
/// accepted and after a roll-back to it.
#[test]
fn the_keys_of_the_newest_row_are_held() {
    let newest_is_whole = |pages: &SequencePages| {
        let len = pages.len();
        PageClass::ALL.into_iter().all(|class| {
            let mut seen = first_visible(class, len)..len;
            seen.all(|pos| pages.table(class)[pos as usize / PAGE_ROWS].is_some())
        })
    };
    for len in 500..1300 {
        let mut pool = PagePool::new(layout(), 8);
        let mut pages = SequencePages::new();
        pages.reserve(&mut pool, len + 40).expect("pages");
        pages.accept(&mut pool, len);
        assert!(newest_is_whole(&pages), "{len} rows");
        pages.accept(&mut pool, 40);
        if pages.truncate(&mut pool, len).is_ok() {
            assert!(newest_is_whole(&pages), "rolled back to {len} rows");
        }
        pages.reopen_newest(&mut pool);
        let held = pages.len();
        pages.reserve(&mut pool, 1).expect("a page");
        pages.accept(&mut pool, 1);
        assert_eq!(pages.len(), held + 1);
        assert!(newest_is_whole(&pages), "{len} rows, the last one again");
    }
}

#[test]
#[should_panic(expected = "roll back 10 rows to 11")]
fn a_roll_back_to_more_rows_is_a_bug() {
    let mut pool = PagePool::new(layout(), 8);
    let mut pages = SequencePages::new();
    pages.reserve(&mut pool, 20).expect("pages");
    pages.accept(&mut pool, 10);
    let _ = pages.truncate(&mut pool, 11);
}

#[test]
fn a_shared_page_is_copied_once() {
    let mut pool = PagePool::new(layout(), 8);
    let mut first = SequencePages::new();
    first.reserve(&mut pool, 300).expect("pages");
    first.accept(&mut pool, 300);
    let mut second = first.branch(&mut pool);
    let tail = first.table(PageClass::Full)[1].expect("a page");
    assert_eq!(pool.n_references(tail), 2);
    assert_eq!(first.reserve(&mut pool, 0).expect("nothing to do"), []);
    let copies = first.reserve(&mut pool, 1).expect("pages");
    assert_eq!(copies.len(), 3, "a copy in each class");
    assert!(copies.iter().all(|c| c.rows == 44));
    assert_ne!(first.table(PageClass::Full)[1], Some(tail));
    // Until a row is accepted, the first can go back.
    assert_eq!(pool.n_references(tail), 2);
    first.drop_reserve(&mut pool);
    assert_eq!(first.table(PageClass::Full)[1], Some(tail));
    assert_eq!(pool.n_references(tail), 2);
    first.reserve(&mut pool, 1).expect("pages");
    first.accept(&mut pool, 1);
    assert_eq!(pool.n_references(tail), 1);
    let copies = second.reserve(&mut pool, 1).expect("pages");
    assert_eq!(copies, [], "the original is the second's own now");
    assert_eq!(second.table(PageClass::Full)[1], Some(tail));
}

/// Adopted pages are as good as computed ones: shared until they are written
/// to, released behind the window, returned at the end.
#[test]
fn a_sequence_goes_on_from_adopted_pages() {
    let mut pool = PagePool::new(layout(), 20);
    let mut first = SequencePages::new();
    first.reserve(&mut pool, 700).expect("room");
    // All pages are held before the rows are accepted.
    let len = 650;
    let tables = PageClass::ALL.map(|class| {
        let first_seen = window_of(class).map_or(0, |w| (len + 1 - w) as usize / PAGE_ROWS);
        let of_rows = first.table(class).iter().take(3).enumerate();
        of_rows
            .map(|(index, page)| page.filter(|_| index >= first_seen))
            .collect::<Vec<_>>()
    });
    let mut second = SequencePages::adopt(&mut pool, tables.clone(), len);
    first.accept(&mut pool, 700);
    first.clear(&mut pool);
    let held = tables.iter().flatten().flatten().count();
    assert_eq!((second.len(), pool.n_pages_used()), (len, held));
    let mut third = SequencePages::adopt(&mut pool, tables, len);
    // Each has rows of its own in the last page now.
    let copies = second.reserve(&mut pool, 5).expect("room");
    assert_eq!(copies.len(), 3);
    assert!(copies.iter().all(|copy| copy.rows == 650 - 2 * PAGE_ROWS));
    second.accept(&mut pool, 5);
    assert_eq!(third.reserve(&mut pool, 5).expect("room"), []);
    third.accept(&mut pool, 5);
    second.clear(&mut pool);
    third.clear(&mut pool);
    assert_eq!(pool.n_pages_used(), 0);
}

#[test]
#[should_panic(expected = "full pages for 650 rows")]
fn adopting_too_few_pages_is_a_bug() {
    let mut pool = PagePool::new(layout(), 20);
    SequencePages::adopt(&mut pool, Default::default(), 650);
}

/// What there is room for can be allocated, and no more: in slabs of the class,
/// in empty ones, in those not made yet.
#[test]
fn room_is_what_can_be_allocated() {
    let mut pool = PagePool::new(layout(), 4);
    let check = |pool: &PagePool, n_pages: [usize; 3], expected: bool| {
        assert_eq!(pool.has_room_for(n_pages), expected, "{n_pages:?}");
        let mut trial = pool.clone();
        let mut is_there = true;
        for class in PageClass::ALL {
            for _ in 0..n_pages[class as usize] {
                is_there &= trial.allocate(class).is_ok();
            }
        }
        assert_eq!(is_there, expected, "{n_pages:?} in truth");
    };
    check(&pool, [48, 0, 0], true);
    check(&pool, [49, 0, 0], false);
    check(&pool, [13, 4, 1], true);
    check(&pool, [25, 4, 1], false);
    let full = pool.allocate(PageClass::Full).expect("a page");
    let sliding = pool.allocate(PageClass::Sliding).expect("a page");
    check(&pool, [11, 3, 32], true);
    check(&pool, [12, 3, 32], false);
    check(&pool, [11, 7, 17], false);
    pool.release(full);
    check(&pool, [0, 3, 48], true);
    check(&pool, [0, 15, 0], true);
    pool.release(sliding);
    let mut no_drafter = layout();
    no_drafter.classes[PageClass::Drafter as usize] = ClassLayout::default();
    assert!(!PagePool::new(no_drafter, 4).has_room_for([0, 0, 1]));
}

#[test]
fn a_pool_that_shrinks_keeps_what_is_used() {
    let mut pool = PagePool::new(layout(), 9);
    let pages: Vec<PageId> = (0..20)
        .map(|_| pool.allocate(PageClass::Sliding).expect("a page"))
        .collect();
    // The second slab has three pages left; the first and the last three are empty.
    pages.iter().skip(8).for_each(|&page| pool.release(page));
    pages.iter().take(5).for_each(|&page| pool.release(page));
    pool.shrink_to_used();
    assert_eq!((pool.max_slabs(), pool.n_pages_used()), (2, 3));
    let rest: Vec<PageId> = std::iter::from_fn(|| pool.allocate(PageClass::Sliding).ok()).collect();
    assert_eq!(rest.len(), 5);
    assert!(rest.iter().all(|&page| layout().locate(page).0 < 2));
}
