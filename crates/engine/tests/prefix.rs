//! The prefix cache over random sequences: never a page of other tokens, never
//! over its limit, never a page lost.

mod common;

use common::{PAGE, WINDOW, layout, mix, prompt};
use engine::{CacheKey, Cut, PrefixCache, REGULAR_CUT_TOKENS};
use model::{PageClass, PageId, PagePool, SequencePages};
use proptest::prelude::*;
use std::collections::HashMap;

const CLASSES: [PageClass; 2] = [PageClass::Full, PageClass::Sliding];

/// A sequence, and a hash of its first `i` tokens at place `i`.
struct Sequence {
    key: CacheKey,
    tokens: Vec<u32>,
    hashes: Vec<u64>,
    pages: SequencePages,
    n_cut: usize,
    frontier: Option<usize>,
}

/// A pool, a cache, sequences, and what lies in the pages.
struct World {
    pool: PagePool,
    cache: PrefixCache,
    stored: HashMap<(PageClass, PageId, usize), u64>,
    sequences: Vec<Sequence>,
    n_adopted: usize,
}

impl World {
    fn new(max_slabs: usize, limit_bytes: u64) -> World {
        World {
            pool: PagePool::new(layout(), max_slabs),
            cache: PrefixCache::new(layout(), limit_bytes),
            stored: HashMap::new(),
            sequences: Vec::new(),
            n_adopted: 0,
        }
    }

    /// A new sequence with what the cache has of it; how much that is.
    fn start(&mut self, key: CacheKey, tokens: Vec<u32>) -> usize {
        let mut hashes = vec![7 + key.identity[0] as u64];
        for &token in &tokens {
            hashes.push(mix(hashes[hashes.len() - 1], u64::from(token)));
        }
        let pages = self.cache.adopt(&mut self.pool, &key, &tokens, 0);
        let pages = pages.unwrap_or_default();
        let n_adopted = pages.len() as usize;
        self.n_adopted += n_adopted;
        assert!(n_adopted < tokens.len(), "a row is left to compute");
        self.sequences.push(Sequence {
            key,
            tokens,
            hashes,
            pages,
            n_cut: n_adopted,
            frontier: None,
        });
        self.check_seen(self.sequences.len() - 1);
        n_adopted
    }

    /// Every row that the next row of a sequence sees is its own.
    fn check_seen(&self, which: usize) {
        let sequence = &self.sequences[which];
        let len = sequence.pages.len() as usize;
        for class in CLASSES {
            let window = self.pool.layout().classes[class as usize].window;
            let first = window.map_or(0, |w| (len + 1).saturating_sub(w as usize));
            for pos in first..len {
                let page = sequence.pages.table(class)[pos / PAGE].expect("a page in sight");
                let found = self.stored.get(&(class, page, pos % PAGE));
                assert_eq!(found, Some(&sequence.hashes[pos + 1]), "{class} row {pos}");
            }
        }
    }

    /// Computes the next rows of a sequence, as far as there are pages, and
    /// offers them to the cache.
    fn compute(&mut self, which: usize, n_rows: usize, cuts: &[usize]) -> bool {
        let sequence = &mut self.sequences[which];
        let start = sequence.pages.len() as usize;
        let len = sequence.tokens.len().min(start + n_rows);
        if len == start {
            return true;
        }
        let n_rows = (len - start) as u32;
        let copies = loop {
            match sequence.pages.reserve(&mut self.pool, n_rows) {
                Ok(copies) => break copies,
                Err(_) if self.cache.evict(&mut self.pool) => {}
                Err(_) => return false,
            }
        };
        for copy in copies {
            for slot in 0..copy.rows {
                if let Some(&row) = self.stored.get(&(copy.class, copy.from, slot)) {
                    self.stored.insert((copy.class, copy.to, slot), row);
                }
            }
        }
        for class in CLASSES {
            for pos in start..len {
                let page = sequence.pages.table(class)[pos / PAGE].expect("it is reserved");
                self.stored
                    .insert((class, page, pos % PAGE), sequence.hashes[pos + 1]);
            }
        }
        self.offer(which, len, cuts);
        let sequence = &mut self.sequences[which];
        sequence.pages.accept(&mut self.pool, n_rows);
        self.check_seen(which);
        true
    }

    fn offer(&mut self, which: usize, len: usize, cuts: &[usize]) {
        let Sequence {
            key,
            tokens,
            pages,
            n_cut,
            frontier,
            ..
        } = &mut self.sequences[which];
        let is_whole = len == tokens.len();
        let done = if is_whole { len } else { len - len % PAGE };
        let mut wanted: Vec<(usize, Cut)> = cuts.iter().map(|&cut| (cut, Cut::Named)).collect();
        wanted.push((done, if is_whole { Cut::Named } else { Cut::Frontier }));
        for (at, kind) in wanted {
            if *n_cut < at && at <= done {
                let computed = &tokens[..len];
                self.cache
                    .insert(&mut self.pool, key, computed, pages, (at, kind));
                assert!(self.cache.bytes() <= self.cache.limit_bytes());
            }
        }
        *n_cut = done.max(*n_cut);
        let next = (!is_whole && done > 0).then_some(done);
        if let Some(before) = std::mem::replace(frontier, next) {
            self.cache
                .drop_frontier(&mut self.pool, key, tokens, before);
        }
    }

    fn end(&mut self, which: usize) {
        let mut sequence = self.sequences.swap_remove(which);
        sequence.pages.clear(&mut self.pool);
    }

    /// Each page has as many references as holders.
    fn check_books(&self) {
        let mut held: HashMap<PageId, usize> = HashMap::new();
        for sequence in &self.sequences {
            for class in CLASSES {
                for page in sequence.pages.table(class).iter().flatten() {
                    *held.entry(*page).or_default() += 1;
                }
            }
        }
        let n_references: usize = held
            .keys()
            .map(|&p| self.pool.n_references(p) as usize)
            .sum();
        let n_alone: usize = self.cache.n_reclaimable(&self.pool).iter().sum();
        let n_shared = n_references - held.values().sum::<usize>();
        assert_eq!(
            n_shared + n_alone,
            self.cache.n_pages(),
            "a page is lost or held twice"
        );
        assert_eq!(self.pool.n_pages_used(), held.len() + n_alone);
        assert!(self.cache.bytes() <= self.cache.limit_bytes());
    }

    fn whole(&mut self, tokens: &[u32]) -> usize {
        self.whole_with(CacheKey::default(), tokens, &[])
    }

    /// One sequence from start to end; how much of it was there.
    fn whole_with(&mut self, key: CacheKey, tokens: &[u32], cuts: &[usize]) -> usize {
        let n_adopted = self.start(key, tokens.to_vec());
        let which = self.sequences.len() - 1;
        while (self.sequences[which].pages.len() as usize) < tokens.len() {
            assert!(self.compute(which, 512, cuts), "pages for one");
        }
        self.end(which);
        self.check_books();
        n_adopted
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Tokens like those of a family up to a row, then others; cuts on the way.
    Start {
        family: u64,
        shared: usize,
        rest: usize,
        branch: u64,
        salt: u8,
    },
    Compute {
        which: usize,
        n_rows: usize,
        cuts: Vec<usize>,
    },
    End(usize),
    Evict,
    Forget {
        family: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let start = (0u64..2, 0usize..1400, 1usize..500, 0u64..3, 0u8..6);
    let compute = (
        0usize..6,
        1usize..600,
        proptest::collection::vec(1usize..1800, 0..4),
    );
    prop_oneof![
        3 => start.prop_map(|(family, shared, rest, branch, salt)| Step::Start {
            family, shared, rest, branch, salt: salt / 5,
        }),
        8 => compute.prop_map(|(which, n_rows, mut cuts)| {
            cuts.sort_unstable();
            Step::Compute { which, n_rows, cuts }
        }),
        2 => (0usize..6).prop_map(Step::End),
        1 => Just(Step::Evict),
        1 => (0u64..2).prop_map(|family| Step::Forget { family }),
    ]
}

fn key_of(salt: u8) -> CacheKey {
    CacheKey {
        identity: [salt; 32],
        salt: None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn rows_are_those_of_the_tokens_and_no_page_is_lost(
        max_slabs in 8usize..60,
        limit_pages in 0u64..60,
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut world = World::new(max_slabs, limit_pages * 5000);
        for step in steps {
            let n = world.sequences.len();
            match step {
                Step::Start { family, shared, rest, branch, salt } if n < 6 => {
                    let mut tokens = prompt(family, shared);
                    tokens.extend(prompt(10 + branch, rest));
                    world.start(key_of(salt), tokens);
                }
                Step::Compute { which, n_rows, cuts } if n > 0 => {
                    world.compute(which % n, n_rows, &cuts);
                }
                Step::End(which) if n > 0 => world.end(which % n),
                Step::Evict => { world.cache.evict(&mut world.pool); }
                Step::Forget { family } => {
                    world.cache.forget(&mut world.pool, &key_of(0), &prompt(family, 1));
                    let again = world.cache.adopt(&mut world.pool, &key_of(0), &prompt(family, 2000), 0);
                    prop_assert!(again.is_none(), "it was forgotten");
                }
                _ => {}
            }
            world.check_books();
        }
        while !world.sequences.is_empty() {
            world.end(0);
        }
        world.check_books();
        world.cache.clear(&mut world.pool);
        prop_assert_eq!((world.cache.bytes(), world.pool.n_pages_used()), (0, 0));
    }
}

/// Every length, around the borders of pages and of the window: the same prompt
/// again computes one row.
#[test]
fn the_same_prompt_again_computes_its_last_row_only() {
    let window = WINDOW as usize;
    let lengths = [
        1,
        2,
        3,
        PAGE - 1,
        PAGE,
        PAGE + 1,
        window,
        window + 1,
        PAGE + window - 1,
    ];
    let longer = [
        PAGE + window,
        PAGE + window + 1,
        2 * PAGE,
        1000,
        2000,
        4 * PAGE + window,
    ];
    for n_tokens in lengths.into_iter().chain(longer) {
        let mut world = World::new(200, u64::MAX);
        let tokens = prompt(1, n_tokens);
        assert_eq!(world.whole(&tokens), 0);
        for again in 0..3 {
            assert_eq!(
                world.whole(&tokens),
                n_tokens - 1,
                "{n_tokens} tokens, {again}"
            );
        }
        let mut longer = tokens.clone();
        longer.extend(prompt(2, 50));
        assert_eq!(
            world.whole(&longer),
            n_tokens,
            "all of {n_tokens} tokens, and more"
        );
    }
}

/// What is read again is the distance to the nearest cut that is kept.
#[test]
fn an_edited_turn_goes_on_at_the_nearest_cut_before_it() {
    let tokens = prompt(1, 3000);
    let cuts = [700, 1500, 2300];
    // Where it is edited; where it goes on. Of a page that a cut keeps all rows
    // serve, so that it may also be a little behind the cut.
    for (edited, expected) in [
        (2999, 2999),
        (2900, 2900),
        (2400, 9 * PAGE),
        (2299, 2299),
        (2000, 6 * PAGE),
        (1500, 1500),
        (1499, 1499),
        (1100, 3 * PAGE),
        (650, 650),
        // The first cut keeps the window before it only.
        (400, 0),
        (10, 0),
    ] {
        let mut world = World::new(200, u64::MAX);
        world.whole_with(CacheKey::default(), &tokens, &cuts);
        let mut other = tokens[..edited].to_vec();
        other.extend(prompt(2, 40).iter().map(|token| token + 64));
        let found = world.whole(&other);
        assert_eq!(found, expected, "edited at {edited}");
    }
}

#[test]
fn other_salts_and_identities_share_nothing() {
    let mut world = World::new(200, u64::MAX);
    let tokens = prompt(1, 600);
    let salted = |salt: &str| CacheKey {
        identity: [0; 32],
        salt: Some(salt.into()),
    };
    let keys = [
        CacheKey::default(),
        salted("a"),
        salted("b"),
        salted(""),
        key_of(9),
    ];
    for key in &keys {
        assert_eq!(world.whole_with(key.clone(), &tokens, &[]), 0, "{key:?}");
    }
    for key in &keys {
        assert_eq!(world.whole_with(key.clone(), &tokens, &[]), 599, "{key:?}");
    }
}

#[test]
fn the_least_recently_used_goes_first_and_the_limit_holds() {
    // Room for the cuts of about four prompts of two pages.
    let bytes = |n: usize| {
        let page = PageClass::ALL
            .map(|class| layout().page_bytes(class))
            .iter()
            .sum::<usize>();
        (n * page) as u64
    };
    let mut world = World::new(200, bytes(8));
    for family in 0..4 {
        assert_eq!(world.whole(&prompt(family, 400)), 0);
    }
    assert_eq!(world.cache.bytes(), bytes(8));
    assert_eq!(world.whole(&prompt(0, 400)), 399, "used again");
    assert_eq!(world.whole(&prompt(4, 400)), 0);
    assert_eq!(world.cache.n_evicted(), 1);
    assert_eq!(world.whole(&prompt(0, 400)), 399);
    assert_eq!(world.whole(&prompt(2, 400)), 399);
    assert_eq!(
        world.whole(&prompt(1, 400)),
        0,
        "it had not been used for longest"
    );
    // What never fits pushes nothing out.
    let n_evicted = world.cache.n_evicted();
    let n_pages = world.cache.n_pages();
    let mut pages = SequencePages::new();
    pages
        .reserve(&mut world.pool, 10_000)
        .expect("a large pool");
    let long = prompt(9, 10_000);
    let key = CacheKey::default();
    assert!(
        !world
            .cache
            .insert(&mut world.pool, &key, &long, &pages, (10_000, Cut::Named))
    );
    pages.drop_reserve(&mut world.pool);
    assert_eq!(
        (world.cache.n_evicted(), world.cache.n_pages()),
        (n_evicted, n_pages)
    );
}

#[test]
fn a_cache_without_room_keeps_nothing() {
    let mut world = World::new(200, 0);
    let tokens = prompt(1, 600);
    assert_eq!((world.whole(&tokens), world.whole(&tokens)), (0, 0));
    assert_eq!((world.cache.n_pages(), world.pool.n_pages_used()), (0, 0));
}

/// Two sequences with one beginning hold its pages once.
#[test]
fn whole_pages_are_shared_and_only_a_partial_one_is_copied() {
    let mut world = World::new(200, u64::MAX);
    let tokens = prompt(1, 4 * PAGE + 10);
    world.whole(&tokens);
    let n_cached = world.pool.n_pages_used();
    for branch in 2..6 {
        let mut longer = tokens.clone();
        longer.extend(prompt(branch, 20));
        assert_eq!(world.start(CacheKey::default(), longer), tokens.len());
    }
    assert_eq!(
        world.pool.n_pages_used(),
        n_cached,
        "nothing was copied yet"
    );
    for which in 0..4 {
        world.compute(which, 5, &[]);
    }
    // A page of each class for each of them.
    assert_eq!(world.pool.n_pages_used(), n_cached + 4 * CLASSES.len());
    world.check_books();
}

/// Cuts at every 8192 tokens; the farther back, the fewer.
#[test]
fn regular_cuts_are_thinned_as_they_age() {
    let mut world = World::new(4000, u64::MAX);
    let n_cuts = 14;
    let tokens = prompt(1, n_cuts * REGULAR_CUT_TOKENS + 1);
    let key = CacheKey::default();
    world.start(key.clone(), tokens.clone());
    for cut in 1..=n_cuts {
        for _ in 0..REGULAR_CUT_TOKENS / 512 {
            assert!(world.compute(0, 512, &[]));
        }
        let sequence = &world.sequences[0];
        let at = cut * REGULAR_CUT_TOKENS;
        let kind = (at, Cut::Regular);
        let computed = &sequence.tokens[..at];
        assert!(
            world
                .cache
                .insert(&mut world.pool, &key, computed, &sequence.pages, kind)
        );
    }
    world.end(0);
    let kept = |world: &mut World, cut: usize| {
        // Different just behind the cut.
        let mut other = tokens[..cut * REGULAR_CUT_TOKENS].to_vec();
        other.extend([63, 62, 61].map(|token| token + 64));
        let found = world.cache.adopt(&mut world.pool, &key, &other, 0);
        found.is_some_and(|mut pages| {
            let is_whole = pages.len() as usize == cut * REGULAR_CUT_TOKENS;
            pages.clear(&mut world.pool);
            is_whole
        })
    };
    let found: Vec<usize> = (1..=n_cuts).filter(|&cut| kept(&mut world, cut)).collect();
    assert_eq!(found, [4, 8, 10, 11, 12, 13, 14]);
    world.check_books();
}
