//! Routes to the logits of the same rows, for any backend: chunks, company in the
//! pass, wrong drafts, shuffled pages, other models.

use crate::{Golden, append, distance, first_difference, full, loaded, open, pool_of, testdata};
use gguf::Gguf;
use model::{
    Backend, Batch, DraftRequest, Forward, KvType, Model, Options, PageClass, PagePool,
    SequencePages, Want, WindowConvention,
};

pub type Logits = Vec<Vec<f32>>;

/// A model with its pages.
pub struct Lab<B: Backend> {
    pub model: Model<B>,
    pub pool: PagePool,
}

impl<B: Backend> Lab<B> {
    pub fn new(be: B, file: &Gguf, kv: KvType) -> Lab<B> {
        let kv_bytes = 512 << 20;
        let model = loaded(be, file, Options { kv, kv_bytes });
        let pool = pool_of(&model);
        Lab { model, pool }
    }

    pub fn reserve(&mut self, pages: &mut SequencePages, n_rows: usize) {
        let copies = pages.reserve(&mut self.pool, n_rows as u32);
        let copies = copies.expect("free pages");
        self.model.copy_pages(&copies).expect("copies");
    }

    pub fn append(&mut self, pages: &mut SequencePages, tokens: &[u32]) -> Logits {
        append(&mut self.model, &mut self.pool, pages, tokens)
    }

    pub fn in_chunks(&mut self, tokens: &[u32], chunk: usize) -> Logits {
        let mut pages = SequencePages::new();
        let mut logits = Logits::new();
        for tokens in tokens.chunks(chunk) {
            logits.extend(self.append(&mut pages, tokens));
        }
        self.finish(&mut [pages]);
        logits
    }

    pub fn finish(&mut self, sequences: &mut [SequencePages]) {
        sequences.iter_mut().for_each(|s| s.clear(&mut self.pool));
        assert_eq!(self.pool.n_pages_used(), 0, "every page returns");
    }
}

/// Tokens that are not the text's.
fn wrong(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().map(|t| (t * 7 + 3) % 390).collect()
}

/// Passes that also hold rows of `n_others` other sequences, in changing order.
fn packed<B: Backend>(lab: &mut Lab<B>, tokens: &[u32], n_others: usize) -> Logits {
    let mut sequences: Vec<_> = (0..=n_others).map(|_| SequencePages::new()).collect();
    let other = wrong(tokens);
    let mut logits = Logits::new();
    let (mut at, mut pass) = (0, 0);
    while at < tokens.len() {
        let mut batch = Batch::default();
        let mut counts = vec![0; n_others + 1];
        let mut is_main = Vec::new();
        for turn in 0..=n_others {
            let seq = (turn + pass) % (n_others + 1);
            let start = sequences[seq].len();
            let rows = match seq {
                0 => &tokens[at..tokens.len().min(at + 1 + pass * 5 % 23)],
                _ => &other[start as usize % 50..][..(pass + seq) % 4],
            };
            counts[seq] = rows.len() as u32;
            lab.reserve(&mut sequences[seq], rows.len());
            for i in 0..rows.len() {
                batch.push(seq as u32, start + i as u32, &rows[i..=i]);
                if seq == 0 || i % 2 == 0 {
                    batch.want_last();
                    is_main.push(seq == 0);
                }
            }
        }
        let tables: Vec<&SequencePages> = sequences.iter().collect();
        let want = vec![Want::Full; is_main.len()];
        let outputs = lab.model.pass(&batch, &tables, &want).expect("a pass");
        let of_main = outputs.into_iter().zip(is_main).filter(|o| o.1);
        logits.extend(of_main.map(|(output, _)| full(output)));
        for (sequence, &n) in sequences.iter_mut().zip(&counts) {
            sequence.accept(&mut lab.pool, n);
        }
        (at, pass) = (at + counts[0] as usize, pass + 1);
    }
    lab.finish(&mut sequences);
    logits
}

/// Blocks of 2 to 16 rows whose last ones are wrong drafts: now computed and
/// not accepted, now accepted and rolled back.
fn verified<B: Backend>(lab: &mut Lab<B>, tokens: &[u32]) -> Logits {
    let mut pages = SequencePages::new();
    let mut logits = Logits::new();
    let (mut at, mut pass) = (0, 0);
    while at < tokens.len() {
        let block = 2 + pass % 15;
        let kept = (1 + pass * 3 % block).min(tokens.len() - at);
        let mut rows = tokens[at..at + kept].to_vec();
        rows.extend(wrong(&tokens[pass..pass + block - kept]));
        lab.reserve(&mut pages, rows.len());
        let batch = Batch::span(0, pages.len(), &rows);
        let want = vec![Want::Full; rows.len()];
        let outputs = lab.model.pass(&batch, &[&pages], &want).expect("a pass");
        logits.extend(outputs.into_iter().take(kept).map(full));
        let len = pages.len() + kept as u32;
        // Accepting all may release a page that a roll-back needs: then not.
        if pass % 2 == 0 && len % 256 > 160 {
            pages.accept(&mut lab.pool, rows.len() as u32);
            pages.truncate(&mut lab.pool, len).expect("held keys");
        } else {
            pages.accept(&mut lab.pool, kept as u32);
        }
        (at, pass) = (at + kept, pass + 1);
    }
    lab.finish(&mut [pages]);
    logits
}

/// Pages of a pool in which others lie between, and the free ones are not in
/// order.
fn shuffled<B: Backend>(lab: &mut Lab<B>, tokens: &[u32]) -> Logits {
    let layout = *lab.pool.layout();
    let mut held = Vec::new();
    for class in PageClass::ALL {
        if layout.classes[class as usize].n_layer == 0 {
            continue;
        }
        let mut taken: Vec<_> = (0..9)
            .map(|_| lab.pool.allocate(class).expect("free pages"))
            .collect();
        // The page released last is the first to be taken again.
        taken.sort();
        for i in [1, 2, 4, 6, 8] {
            lab.pool.release(taken[i]);
        }
        held.extend([0, 3, 5, 7].map(|i| taken[i]));
    }
    let mut pages = SequencePages::new();
    let mut logits = Logits::new();
    for tokens in tokens.chunks(64) {
        logits.extend(lab.append(&mut pages, tokens));
    }
    let table = pages.table(PageClass::Full);
    assert!(!table.is_sorted(), "pages in order: {table:?}");
    pages.clear(&mut lab.pool);
    held.into_iter().for_each(|page| lab.pool.release(page));
    lab.finish(&mut []);
    logits
}

/// Half of the text, then a branch that shares the partly filled page; the
/// state of the branch goes through the canonical form into another model.
pub fn moved<B: Backend>(lab: &mut Lab<B>, other: &mut Lab<B>, tokens: &[u32]) -> Logits {
    let middle = tokens.len() / 2 + 3;
    let mut pages = SequencePages::new();
    let mut logits = lab.append(&mut pages, &tokens[..middle]);
    let mut branch = pages.branch(&mut lab.pool);
    lab.append(&mut pages, &wrong(&tokens[..20]));
    let end = middle + 30;
    logits.extend(lab.append(&mut branch, &tokens[middle..end]));

    let mut there = SequencePages::new();
    other.reserve(&mut there, end);
    for class in PageClass::ALL {
        for (index, page) in branch.table(class).iter().enumerate() {
            let Some(page) = page else { continue };
            let rows = (end - index * 256).min(256);
            let data = lab.model.export_page(class, *page, rows);
            let data = data.expect("an export");
            let to = there.table(class)[index].expect("a reserved page");
            other
                .model
                .import_page(class, to, &data)
                .expect("an import");
            let again = other.model.export_page(class, to, rows);
            assert_eq!(again.expect("an export"), data, "{class} page {index}");
        }
    }
    there.accept(&mut other.pool, end as u32);
    logits.extend(other.append(&mut there, &tokens[end..]));
    other.finish(&mut [there]);
    lab.finish(&mut [pages, branch]);
    logits
}

pub type Route<B> = (&'static str, fn(&mut Lab<B>, &[u32]) -> Logits);

pub fn routes<B: Backend>() -> Vec<Route<B>> {
    vec![
        ("one row at a time", |lab, tokens| lab.in_chunks(tokens, 1)),
        ("chunks of 7", |lab, tokens| lab.in_chunks(tokens, 7)),
        ("chunks of 64", |lab, tokens| lab.in_chunks(tokens, 64)),
        ("chunks of 256", |lab, tokens| lab.in_chunks(tokens, 256)),
        ("one chunk", |lab, tokens| lab.in_chunks(tokens, 512)),
        ("packed with 1", |lab, tokens| packed(lab, tokens, 1)),
        ("packed with 3", |lab, tokens| packed(lab, tokens, 3)),
        ("packed with 15", |lab, tokens| packed(lab, tokens, 15)),
        ("verified", verified),
        ("shuffled pages", shuffled),
    ]
}

/// The routes, of those named, whose logits are not `expected`.
pub fn differing<B: Backend>(
    be: B,
    (file, kv): (&Gguf, KvType),
    (tokens, expected): (&[u32], &Logits),
    names: Option<&[&str]>,
) -> Vec<String> {
    let device = be.caps().device;
    let mut lab = Lab::new(be, file, kv);
    let mut differing = Vec::new();
    for (name, route) in routes() {
        if names.is_some_and(|names| !names.contains(&name)) {
            continue;
        }
        let found = route(&mut lab, tokens);
        if let Some((row, col)) = first_difference(&found, expected) {
            differing.push(format!("{device}: {name}: row {row}, token {col}"));
        }
    }
    differing
}

/// Made-up tokens.
pub fn made_up(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 + i * 17 + 5) % 397).collect()
}

/// Real text: the window of 128 wraps three times.
pub fn text() -> Vec<u32> {
    let golden = std::fs::read_to_string(testdata("nano-glimmer/golden.json")).expect("a golden");
    let golden: serde_json::Value = serde_json::from_str(&golden).expect("JSON");
    let prompts = golden["prompts"].as_array().expect("prompts");
    let ids = prompts
        .iter()
        .flat_map(|p| p["prompt_ids"].as_array().expect("ids"));
    ids.map(|id| id.as_u64().expect("an id") as u32)
        .take(400)
        .collect()
}

/// Logits of the last rows and a draft after them.
pub fn with_drafter(
    be: impl Backend,
    (file, drafter): (&Gguf, &Gguf),
    chunk: usize,
) -> (Logits, Logits) {
    let mut lab = Lab::new(be, file, KvType::F16);
    let attached = lab.model.attach_drafter(drafter, WindowConvention::Below);
    attached.expect("a drafter that fits");
    lab.pool = pool_of(&lab.model);
    let mut pages = SequencePages::new();
    let mut logits = Logits::new();
    for tokens in made_up(300).chunks(chunk) {
        logits.extend(lab.append(&mut pages, tokens));
    }
    let request = DraftRequest {
        seq: 0,
        anchor: 7,
        n_draft: 5,
    };
    let drafts = lab.model.draft(&[request], &[&pages], Want::Full);
    let drafts = drafts.expect("a draft").into_iter().flatten();
    (logits, drafts.map(full).collect())
}

/// The golden arrays of an oracle file against a backend.
pub fn check_golden(be: impl Backend, (name, kind): (&str, &str), max_abs: f64, relative_rms: f64) {
    let file = open(&testdata(&format!("oracle/text-{name}-{kind}.gguf")));
    let mut golden = Golden::open(&format!("oracle/golden-text-{name}-{kind}.npz"));
    let mut lab = Lab::new(be, &file, KvType::F32);
    for (sequence, key) in [("short", "logits_short"), ("long", "logits_long")] {
        let tokens = golden.tokens(&format!("tokens_{sequence}"));
        let last = format!("{key}_last8");
        let key = match golden.has(&last) {
            true => &last,
            false => key,
        };
        let (_, expected) = golden.floats(key);
        let found = lab.in_chunks(&tokens, 64).concat();
        let (max, rms) = distance(&found[found.len() - expected.len()..], &expected);
        assert!(
            max <= max_abs && rms <= relative_rms,
            "{name} {kind} {key}: max abs {max:.2e}, relative RMS {rms:.2e}"
        );
    }
}
