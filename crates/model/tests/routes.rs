//! The bits of a row's logits do not depend on the route that computed them:
//! chunking, company in the pass, roll-back, branches, where pages lie, and
//! where the rows before it were computed.
//!
//! Every route is a function that gives the logits of the same rows; they are
//! compared with the whole sequence in as few passes as possible. Two backends
//! that break the rule on purpose show that the comparison notices.

mod common;

use common::mutant::{Mutant, Mutation};
use gguf::Gguf;
use model::{
    Backend, Batch, DraftRequest, Forward, KvType, Model, Options, PAGE_ROWS, PageClass, PagePool,
    Reference, SequencePages, Want, WindowConvention,
};
use testing::{EXACT, append, bundled, full, open, pool_of, read_to_string, same_bits, testdata};

type Logits = Vec<Vec<f32>>;

/// What every route computes: the rows of `tokens` from `start` on. The rows
/// before are computed once and shared by branching.
struct Plan {
    tokens: Vec<u32>,
    start: usize,
}

/// A model with its pool and the rows before the plan's start.
struct Lab<'a, B: Backend> {
    load: &'a dyn Fn() -> Model<B>,
    model: Model<B>,
    pool: PagePool,
    origin: SequencePages,
}

impl<'a, B: Backend> Lab<'a, B> {
    fn new(load: &'a dyn Fn() -> Model<B>, plan: &Plan) -> Lab<'a, B> {
        let model = load();
        let pool = pool_of(&model);
        let mut lab = Lab {
            load,
            model,
            pool,
            origin: SequencePages::new(),
        };
        let mut origin = SequencePages::new();
        for tokens in plan.tokens[..plan.start].chunks(200) {
            lab.extend(&mut origin, tokens);
        }
        lab.origin = origin;
        lab
    }

    fn begin(&mut self) -> SequencePages {
        self.origin.branch(&mut self.pool)
    }

    fn append(&mut self, pages: &mut SequencePages, tokens: &[u32]) -> Logits {
        append(&mut self.model, &mut self.pool, pages, tokens)
    }

    /// Like append, without logits.
    fn extend(&mut self, pages: &mut SequencePages, tokens: &[u32]) {
        self.reserve(pages, tokens.len());
        let mut batch = Batch::default();
        batch.push(0, pages.len(), tokens);
        self.model.pass(&batch, &[pages], &[]).expect("a pass");
        pages.accept(&mut self.pool, tokens.len() as u32);
    }

    fn reserve(&mut self, pages: &mut SequencePages, n_rows: usize) {
        let copies = pages
            .reserve(&mut self.pool, n_rows as u32)
            .expect("free pages");
        self.model.copy_pages(&copies).expect("copies");
    }

    fn classes(&self) -> Vec<PageClass> {
        let layout = *self.pool.layout();
        let has_layers = |c: &PageClass| layout.classes[*c as usize].n_layer > 0;
        PageClass::ALL.into_iter().filter(has_layers).collect()
    }
}

/// Tokens that are not the plan's.
fn wrong(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().map(|t| (t * 7 + 3) % 390).collect()
}

fn in_chunks<B: Backend>(lab: &mut Lab<'_, B>, plan: &Plan, chunk: usize) -> Logits {
    let mut pages = lab.begin();
    let chunks = plan.tokens[plan.start..].chunks(chunk);
    let logits = chunks
        .flat_map(|tokens| lab.append(&mut pages, tokens))
        .collect();
    pages.clear(&mut lab.pool);
    logits
}

/// Passes that also hold rows of two other sequences, in changing order.
fn packed<B: Backend>(lab: &mut Lab<'_, B>, plan: &Plan) -> Logits {
    let mut sequences = [SequencePages::new(), lab.begin(), SequencePages::new()];
    let other = wrong(&plan.tokens);
    let mut logits = Logits::new();
    let (mut at, mut pass) = (plan.start, 0);
    while at < plan.tokens.len() {
        let n = (1 + pass * 5 % 11).min(plan.tokens.len() - at);
        let n_other = [pass % 3, 0, (pass + 1) % 2 * 4];
        let mut batch = Batch::default();
        let mut want = Vec::new();
        let mut of_main = Vec::new();
        for turn in 0..3 {
            let seq = (turn + pass) % 3;
            let start = sequences[seq].len();
            let tokens = match seq {
                1 => &plan.tokens[at..at + n],
                _ => &other[start as usize % 50..][..n_other[seq]],
            };
            lab.reserve(&mut sequences[seq], tokens.len());
            for i in 0..tokens.len() {
                batch.push(seq as u32, start + i as u32, &tokens[i..=i]);
                if seq == 1 || i % 2 == 0 {
                    batch.want_last();
                    want.push(Want::Full);
                    of_main.push(seq == 1);
                }
            }
        }
        let tables: Vec<&SequencePages> = sequences.iter().collect();
        let outputs = lab.model.pass(&batch, &tables, &want).expect("a pass");
        let main = outputs
            .into_iter()
            .zip(of_main)
            .filter(|(_, is_main)| *is_main);
        logits.extend(main.map(|(output, _)| full(output)));
        sequences[1].accept(&mut lab.pool, n as u32);
        for seq in [0, 2] {
            sequences[seq].accept(&mut lab.pool, n_other[seq] as u32);
        }
        (at, pass) = (at + n, pass + 1);
    }
    sequences.iter_mut().for_each(|s| s.clear(&mut lab.pool));
    logits
}

/// Blocks whose last rows are wrong drafts, which are never accepted.
fn verified<B: Backend>(lab: &mut Lab<'_, B>, plan: &Plan) -> Logits {
    let mut pages = lab.begin();
    let mut logits = Logits::new();
    let (mut at, mut pass) = (plan.start, 0);
    while at < plan.tokens.len() {
        let kept = (1 + pass % 5).min(plan.tokens.len() - at);
        let mut rows = plan.tokens[at..at + kept].to_vec();
        rows.extend(wrong(&plan.tokens[..pass % 7]));
        lab.reserve(&mut pages, rows.len());
        let batch = Batch::span(0, pages.len(), &rows);
        let want = vec![Want::Full; rows.len()];
        let outputs = lab.model.pass(&batch, &[&pages], &want).expect("a pass");
        logits.extend(outputs.into_iter().take(kept).map(full));
        pages.accept(&mut lab.pool, kept as u32);
        if pass % 2 == 0 {
            pages.drop_reserve(&mut lab.pool);
        }
        (at, pass) = (at + kept, pass + 1);
    }
    pages.clear(&mut lab.pool);
    logits
}

/// Wrong rows that are accepted and then rolled back.
fn rolled_back<B: Backend>(lab: &mut Lab<'_, B>, plan: &Plan) -> Logits {
    const WRONG_ROWS: u32 = 9;
    let classes = lab.pool.layout().classes;
    // Would the wrong rows release a page that the roll-back needs?
    let is_safe = |len: u32| {
        let live = |len: u32, window: u32| len.saturating_sub(window) as usize / PAGE_ROWS;
        let mut windows = classes.iter().filter_map(|c| c.window);
        windows.all(|w| live(len, w) == live(len + WRONG_ROWS, w))
    };
    let mut pages = lab.begin();
    let mut logits = Logits::new();
    for tokens in plan.tokens[plan.start..].chunks(5) {
        let len = pages.len();
        if is_safe(len) {
            lab.append(&mut pages, &wrong(&plan.tokens[..WRONG_ROWS as usize]));
            pages.truncate(&mut lab.pool, len).expect("held keys");
        }
        logits.extend(lab.append(&mut pages, tokens));
    }
    pages.clear(&mut lab.pool);
    logits
}

/// Half of the plan, then a branch; both go on, one of them with other tokens.
fn branched<B: Backend>(lab: &mut Lab<'_, B>, plan: &Plan, is_branch_right: bool) -> Logits {
    let middle = (plan.start + plan.tokens.len()) / 2 + 3;
    assert!(
        !middle.is_multiple_of(PAGE_ROWS),
        "the shared page is partly filled"
    );
    let mut pages = lab.begin();
    let mut logits = lab.append(&mut pages, &plan.tokens[plan.start..middle]);
    let mut branch = pages.branch(&mut lab.pool);
    let (right, other) = match is_branch_right {
        true => (&mut branch, &mut pages),
        false => (&mut pages, &mut branch),
    };
    let rest = &plan.tokens[middle..];
    lab.append(other, &wrong(&rest[..rest.len().min(20)]));
    logits.extend(lab.append(right, rest));
    lab.append(other, &wrong(&rest[..5]));
    pages.clear(&mut lab.pool);
    branch.clear(&mut lab.pool);
    logits
}

/// Pages of a pool in which others lie between and the free ones are not in
/// order.
fn shuffled<B: Backend>(lab: &mut Lab<'_, B>, plan: &Plan) -> Logits {
    let mut held = Vec::new();
    for class in lab.classes() {
        let taken: Vec<_> = (0..9)
            .map(|_| lab.pool.allocate(class).expect("free pages"))
            .collect();
        for i in [6, 1, 4, 2, 8] {
            lab.pool.release(taken[i]);
        }
        held.extend([0, 3, 5, 7].map(|i| taken[i]));
    }
    let mut pages = lab.begin();
    let mut logits = Logits::new();
    for tokens in plan.tokens[plan.start..].chunks(64) {
        logits.extend(lab.append(&mut pages, tokens));
    }
    let table = pages.table(PageClass::Full);
    assert!(
        plan.start > 0 || !table.is_sorted(),
        "pages in order: {table:?}"
    );
    pages.clear(&mut lab.pool);
    held.into_iter().for_each(|page| lab.pool.release(page));
    logits
}

/// The state after the first half goes to another model, then into other pages
/// of that one, and each time the plan goes on there.
fn handed_over<B: Backend>(lab: &mut Lab<'_, B>, plan: &Plan) -> Logits {
    let first = plan.start + (plan.tokens.len() - plan.start) / 3;
    let second = plan.start + (plan.tokens.len() - plan.start) * 2 / 3 + 1;
    let mut pages = lab.begin();
    let mut logits = lab.append(&mut pages, &plan.tokens[plan.start..first]);

    let model = (lab.load)();
    let pool = pool_of(&model);
    let mut other = Lab {
        load: lab.load,
        model,
        pool,
        origin: SequencePages::new(),
    };
    // The page ids of the two models are not the same.
    let dummy = other.pool.allocate(PageClass::Full).expect("free pages");
    let mut there = SequencePages::new();
    let exported = export(lab, &pages);
    import(&mut other, &mut there, pages.len(), &exported);
    logits.extend(other.append(&mut there, &plan.tokens[first..second]));

    let exported = export(&mut other, &there);
    let len = there.len();
    let mut again = SequencePages::new();
    import(&mut other, &mut again, len, &exported);
    there.clear(&mut other.pool);
    logits.extend(other.append(&mut again, &plan.tokens[second..]));

    again.clear(&mut other.pool);
    other.pool.release(dummy);
    assert_eq!(other.pool.n_pages_used(), 0, "every page returns");
    pages.clear(&mut lab.pool);
    logits
}

type Exported = Vec<(PageClass, usize, model::backend::PageData)>;

fn export<B: Backend>(lab: &mut Lab<'_, B>, pages: &SequencePages) -> Exported {
    let mut exported = Vec::new();
    for class in lab.classes() {
        for (index, page) in pages.table(class).iter().enumerate() {
            let rows = (pages.len() as usize)
                .saturating_sub(index * PAGE_ROWS)
                .min(PAGE_ROWS);
            if let (Some(page), true) = (page, rows > 0) {
                let data = lab
                    .model
                    .export_page(class, *page, rows)
                    .expect("an export");
                exported.push((class, index, data));
            }
        }
    }
    exported
}

fn import<B: Backend>(
    lab: &mut Lab<'_, B>,
    pages: &mut SequencePages,
    len: u32,
    exported: &Exported,
) {
    lab.reserve(pages, len as usize);
    for (class, index, data) in exported {
        let page = pages.table(*class)[*index].expect("a reserved page");
        lab.model
            .import_page(*class, page, data)
            .expect("an import");
    }
    pages.accept(&mut lab.pool, len);
}

type Route<B> = (&'static str, fn(&mut Lab<'_, B>, &Plan) -> Logits);

fn routes<B: Backend>() -> Vec<Route<B>> {
    vec![
        ("one row at a time", |lab, plan| in_chunks(lab, plan, 1)),
        ("chunks of 3", |lab, plan| in_chunks(lab, plan, 3)),
        ("chunks of 7", |lab, plan| in_chunks(lab, plan, 7)),
        ("chunks of 64", |lab, plan| in_chunks(lab, plan, 64)),
        ("packed", packed),
        ("verified", verified),
        ("rolled back", rolled_back),
        ("branched, the first goes on", |lab, plan| {
            branched(lab, plan, false)
        }),
        ("branched, the second goes on", |lab, plan| {
            branched(lab, plan, true)
        }),
        ("shuffled pages", shuffled),
        ("handed over", handed_over),
    ]
}

/// The routes whose logits have other bits than the whole sequence's.
fn differing<B: Backend>(load: &dyn Fn() -> Model<B>, plan: &Plan) -> Vec<&'static str> {
    differing_of(routes(), load, plan)
}

fn differing_of<B: Backend>(
    routes: Vec<Route<B>>,
    load: &dyn Fn() -> Model<B>,
    plan: &Plan,
) -> Vec<&'static str> {
    let mut lab = Lab::new(load, plan);
    let max_rows = lab.model.caps().max_rows;
    let whole = in_chunks(&mut lab, plan, max_rows);
    assert_eq!(whole.len(), plan.tokens.len() - plan.start);
    let mut differing = Vec::new();
    for (name, route) in routes {
        let logits = route(&mut lab, plan);
        if !same_bits(&logits, &whole) {
            differing.push(name);
        }
    }
    lab.origin.clear(&mut lab.pool);
    assert_eq!(lab.pool.n_pages_used(), 0, "every page returns");
    differing
}

fn loaded<B: Backend>(be: B, file: &Gguf, kv: KvType) -> Model<B> {
    let options = Options { kv, ..EXACT };
    Model::load(be, file, options).unwrap_or_else(|e| panic!("{e}"))
}

/// Made-up tokens; the window of 24 wraps many times.
fn nano_plan(n_tokens: u32) -> Plan {
    let token = |i: u32| (i * i * 31 + i * 17 + 5) % 397;
    Plan {
        tokens: (0..n_tokens).map(token).collect(),
        start: 0,
    }
}

/// Real text over four pages and six windows; the rows around the last page
/// boundary are computed by every route.
fn nano_glimmer_plan() -> Plan {
    let golden = read_to_string(&testdata("nano-glimmer/golden.json"));
    let golden: serde_json::Value = serde_json::from_str(&golden).expect("JSON");
    let prompts = golden["prompts"].as_array().expect("prompts");
    let ids = prompts
        .iter()
        .flat_map(|p| p["prompt_ids"].as_array().expect("ids"));
    let tokens: Vec<u32> = ids.map(|id| id.as_u64().expect("an id") as u32).collect();
    Plan {
        tokens: tokens[..780].to_vec(),
        start: 744,
    }
}

#[test]
fn nano_f32() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let load = || loaded(Reference::new(), &file, KvType::F32);
    assert_eq!(differing(&load, &nano_plan(530)), [""; 0]);
}

#[test]
fn nano_f16() {
    let file = open(&testdata("oracle/text-nano-q8_0.gguf"));
    let load = || loaded(Reference::new(), &file, KvType::F16);
    assert_eq!(differing(&load, &nano_plan(300)), [""; 0]);
}

#[test]
fn nano_glimmer() {
    let file = open(&bundled("nano-glimmer-q8_0.gguf"));
    let plan = nano_glimmer_plan();
    let load = || loaded(Reference::new(), &file, KvType::F16);
    assert_eq!(differing(&load, &plan), [""; 0]);
    // The element type matters to the routes that move or copy pages.
    let load = || loaded(Reference::new(), &file, KvType::F32);
    let moving: Vec<Route<Reference>> = vec![
        ("verified", verified),
        ("branched", |lab, plan| branched(lab, plan, true)),
        ("shuffled pages", shuffled),
        ("handed over", handed_over),
    ];
    assert_eq!(differing_of(moving, &load, &plan), [""; 0]);
}

/// The chunks of a long prompt, from its first row on.
#[test]
fn nano_glimmer_prompt() {
    let file = open(&bundled("nano-glimmer-q8_0.gguf"));
    let mut plan = nano_glimmer_plan();
    plan.start = 0;
    let load = || loaded(Reference::new(), &file, KvType::F16);
    let last = |lab: &mut Lab<'_, Reference>, chunk: usize| {
        let mut pages = SequencePages::new();
        let mut logits = Logits::new();
        for tokens in plan.tokens[..400].chunks(chunk) {
            lab.extend(&mut pages, tokens);
        }
        logits.extend(lab.append(&mut pages, &plan.tokens[400..404]));
        pages.clear(&mut lab.pool);
        logits
    };
    let mut lab = Lab::new(&load, &plan);
    let whole = last(&mut lab, 512);
    assert!(same_bits(&last(&mut lab, 77), &whole));
}

#[test]
fn kernel_that_depends_on_the_number_of_rows_is_noticed() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let load = || loaded(Mutant::new(Mutation::RowsChangeSums), &file, KvType::F32);
    let found = differing(&load, &nano_plan(300));
    for route in [
        "one row at a time",
        "chunks of 3",
        "chunks of 7",
        "packed",
        "verified",
    ] {
        assert!(found.contains(&route), "{route} is not in {found:?}");
    }
    assert!(!found.contains(&"chunks of 64"), "the large passes agree");
}

#[test]
fn kernel_that_depends_on_where_pages_lie_is_noticed() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let load = || {
        loaded(
            Mutant::new(Mutation::PlaceChangesAttention),
            &file,
            KvType::F32,
        )
    };
    let found = differing(&load, &nano_plan(300));
    assert!(found.contains(&"shuffled pages"), "{found:?}");
}

/// Logits of the last rows and a draft after them, computed in chunks.
fn with_drafter<B: Backend>(
    lab: &mut Lab<'_, B>,
    tokens: &[u32],
    chunk: usize,
) -> (Logits, Logits) {
    let mut pages = lab.begin();
    let chunks = tokens.chunks(chunk);
    let logits = chunks
        .flat_map(|tokens| lab.append(&mut pages, tokens))
        .collect();
    let request = DraftRequest {
        seq: 0,
        anchor: 7,
        n_draft: 5,
    };
    let drafts = lab
        .model
        .draft(&[request], &[&pages], Want::Full)
        .expect("a draft");
    pages.clear(&mut lab.pool);
    (logits, drafts.into_iter().flatten().map(full).collect())
}

#[test]
fn drafter_changes_no_logits_and_no_route_changes_its_drafts() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let drafter = open(&testdata("oracle/dflash-nano-f32.gguf"));
    let plan = nano_plan(300);
    let without = || loaded(Reference::new(), &file, KvType::F16);
    let plain = in_chunks(&mut Lab::new(&without, &plan), &plan, 512);
    let load = || {
        let mut model = without();
        model
            .attach_drafter(&drafter, WindowConvention::Below)
            .expect("a drafter that fits");
        model
    };
    assert_eq!(differing(&load, &plan), [""; 0]);
    let mut lab = Lab::new(&load, &plan);
    let (logits, drafts) = with_drafter(&mut lab, &plan.tokens, 512);
    assert!(same_bits(&logits, &plain), "logits beside a drafter");
    for chunk in [1, 3, 7, 64] {
        let (_, again) = with_drafter(&mut lab, &plan.tokens, chunk);
        assert!(same_bits(&again, &drafts), "drafts after chunks of {chunk}");
    }
}

#[test]
fn packed_drafts_equal_single_ones() {
    let file = open(&testdata("oracle/text-nano-f32.gguf"));
    let drafter = open(&testdata("oracle/dflash-nano-f32.gguf"));
    let load = || {
        let mut model = loaded(Reference::new(), &file, KvType::F16);
        model
            .attach_drafter(&drafter, WindowConvention::Below)
            .expect("a drafter that fits");
        model
    };
    let plan = nano_plan(300);
    let mut lab = Lab::new(&load, &plan);
    let mut sequences = [SequencePages::new(), SequencePages::new()];
    lab.append(&mut sequences[0], &plan.tokens[..270]);
    lab.append(&mut sequences[1], &plan.tokens[100..150]);
    let tables = [&sequences[0], &sequences[1]];
    let requests = [(0, 9, 7), (1, 11, 3)].map(|(seq, anchor, n_draft)| DraftRequest {
        seq,
        anchor,
        n_draft,
    });
    let together = lab
        .model
        .draft(&requests, &tables, Want::Full)
        .expect("drafts");
    for (request, packed) in requests.iter().zip(together) {
        let alone = lab
            .model
            .draft(&[*request], &tables, Want::Full)
            .expect("a draft");
        let [alone, packed] = [alone.concat(), packed]
            .map(|outputs| outputs.into_iter().map(full).collect::<Logits>());
        assert_eq!(packed.len(), request.n_draft);
        assert!(
            same_bits(&alone, &packed),
            "drafts of sequence {}",
            request.seq
        );
    }
}
