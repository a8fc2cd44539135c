//! Pages of keys and values: who holds which page, as plain host data.
//!
//! A page holds [`PAGE_ROWS`] positions of all layers of one class, K and V.
//! Its layout and memory are the backend's own affair; here are page ids,
//! reference counts and the tables of sequences. All classes draw from one
//! pool of equal slabs that change class when they are empty, so no split
//! between classes is fixed at start.
//!
//! Nothing is overwritten when a sequence grows: rolling back is forgetting
//! rows. A page that two sequences share is copied when one of them writes into
//! it, and only then; until the rows written to the copy are accepted, the
//! sequence keeps the shared page beside it and can go back to it.

use crate::{DrafterConfig, Error};
use std::fmt;

/// Positions in a page.
pub const PAGE_ROWS: usize = 256;

/// What the layers of a page have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageClass {
    /// Layers that see every earlier position: the table only grows.
    Full = 0,
    /// Layers with a sliding window: pages behind it are released.
    Sliding = 1,
    /// The drafter's layers over the context features.
    Drafter = 2,
}

impl PageClass {
    /// All classes, in the order of their numbers.
    pub const ALL: [PageClass; 3] = [PageClass::Full, PageClass::Sliding, PageClass::Drafter];
}

impl fmt::Display for PageClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PageClass::Full => "full",
            PageClass::Sliding => "sliding",
            PageClass::Drafter => "drafter",
        })
    }
}

/// Element type of the stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Rounded to half precision (the default).
    F16,
    /// As computed; used for comparisons with exact values.
    F32,
}

impl KvType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
        })
    }
}

/// The layers of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassLayout {
    /// Number of layers; 0 if the model has no such class.
    pub n_layer: usize,
    /// Key/value heads of a layer.
    pub n_head_kv: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Keys a row sees, itself included; `None` if all earlier ones. Pages
    /// wholly behind every window are released.
    pub window: Option<u32>,
}

impl ClassLayout {
    /// Elements of a page: `[layer][K, V][row][head][dim]`.
    pub fn page_elements(&self) -> usize {
        self.n_layer * 2 * PAGE_ROWS * self.n_head_kv * self.head_dim
    }
}

/// Sizes of pages and slabs of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Element type of every page.
    pub ty: KvType,
    /// The classes, by number.
    pub classes: [ClassLayout; 3],
}

impl KvLayout {
    /// The same with pages for a drafter beside the model.
    pub fn with_drafter(mut self, drafter: &DrafterConfig) -> KvLayout {
        self.classes[PageClass::Drafter as usize] = drafter.class_layout();
        self
    }

    /// Bytes of a page of `class`.
    pub fn page_bytes(&self, class: PageClass) -> usize {
        self.classes[class as usize].page_elements() * self.ty.bytes()
    }

    /// Bytes of a slab: four pages of the largest class, so that little is
    /// lost at its end whatever class it holds.
    pub fn slab_bytes(&self) -> usize {
        let largest = PageClass::ALL.map(|c| self.page_bytes(c));
        4 * largest.into_iter().max().unwrap_or(0)
    }

    /// Pages of `class` in a slab; 0 if the model has no such class.
    pub fn pages_per_slab(&self, class: PageClass) -> usize {
        match self.page_bytes(class) {
            0 => 0,
            page_bytes => self.slab_bytes() / page_bytes,
        }
    }

    /// Page ids of a slab; the ids beyond its class's pages are not used.
    fn stride(&self) -> usize {
        let pages = PageClass::ALL.map(|c| self.pages_per_slab(c));
        pages.into_iter().max().unwrap_or(0).max(1)
    }

    /// Slab and place inside it of a page.
    pub fn locate(&self, page: PageId) -> (usize, usize) {
        let id = page.0 as usize;
        (id / self.stride(), id % self.stride())
    }

    /// Slabs that a sequence of `n_rows` rows needs at most, if it is computed
    /// in passes of `max_rows`.
    pub fn slabs_for(&self, n_rows: usize, max_rows: usize) -> usize {
        let mut slabs = 0;
        for class in PageClass::ALL {
            let layout = &self.classes[class as usize];
            if layout.n_layer == 0 {
                continue;
            }
            let mut pages = n_rows.div_ceil(PAGE_ROWS);
            if let Some(window) = layout.window {
                pages = pages.min((window as usize + max_rows).div_ceil(PAGE_ROWS) + 1);
            }
            slabs += pages.div_ceil(self.pages_per_slab(class));
        }
        slabs
    }
}

/// A page: its slab and its place there, in one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// An order to the backend: copy the first `rows` rows of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Class of both pages.
    pub class: PageClass,
    /// Page to read.
    pub from: PageId,
    /// Page to write.
    pub to: PageId,
    /// Leading rows to copy.
    pub rows: usize,
}

#[derive(Clone, Debug, Default)]
struct Slab {
    class: Option<PageClass>,
    n_used: usize,
}

/// Reference counts and free pages of every class.
#[derive(Clone, Debug)]
pub struct PagePool {
    layout: KvLayout,
    slabs: Vec<Slab>,
    max_slabs: usize,
    /// References of each page id.
    references: Vec<u32>,
    /// Free pages of slabs that have a class already.
    free: [Vec<PageId>; 3],
}

impl PagePool {
    /// An empty pool that may grow to `max_slabs` slabs, or to as many as page
    /// ids can number.
    pub fn new(layout: KvLayout, max_slabs: usize) -> PagePool {
        PagePool {
            layout,
            slabs: Vec::new(),
            max_slabs: max_slabs.min(u32::MAX as usize / layout.stride()),
            references: Vec::new(),
            free: Default::default(),
        }
    }

    /// Sizes of pages and slabs.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Slabs that hold at least one page in use.
    pub fn n_slabs_used(&self) -> usize {
        self.slabs.iter().filter(|s| s.n_used > 0).count()
    }

    /// Pages in use.
    pub fn n_pages_used(&self) -> usize {
        self.slabs.iter().map(|s| s.n_used).sum()
    }

    /// Slabs that the pool may have.
    pub fn max_slabs(&self) -> usize {
        self.max_slabs
    }

    /// Gives up all slabs behind the last one with a page in use: the device
    /// turned out to have no memory for more.
    pub fn shrink_to_used(&mut self) {
        let last = self.slabs.iter().rposition(|slab| slab.n_used > 0);
        self.max_slabs = last.map_or(0, |last| last + 1);
        for slab in self.max_slabs..self.slabs.len() {
            self.close_slab(slab);
        }
        self.slabs.truncate(self.max_slabs);
        self.references
            .truncate(self.max_slabs * self.layout.stride());
    }

    /// Can so many pages of each class, by number, be allocated now?
    pub fn has_room_for(&self, n_pages: [usize; 3]) -> bool {
        let mut n_empty = self.max_slabs - self.slabs.len();
        let mut n_free = [0; 3];
        for slab in &self.slabs {
            match slab.class {
                Some(class) if slab.n_used > 0 => {
                    n_free[class as usize] += self.layout.pages_per_slab(class) - slab.n_used;
                }
                _ => n_empty += 1,
            }
        }
        let slabs = PageClass::ALL.map(|class| {
            let beyond = n_pages[class as usize].saturating_sub(n_free[class as usize]);
            match (beyond, self.layout.pages_per_slab(class)) {
                (0, _) => Some(0),
                // No number of slabs holds pages of a class that the model lacks.
                (_, 0) => None,
                (_, per_slab) => Some(beyond.div_ceil(per_slab)),
            }
        });
        let wanted: Option<usize> = slabs.into_iter().sum();
        wanted.is_some_and(|wanted| wanted <= n_empty)
    }

    /// References to `page`.
    pub fn n_references(&self, page: PageId) -> u32 {
        self.references.get(page.0 as usize).copied().unwrap_or(0)
    }

    /// Takes a free page of `class`, with one reference.
    ///
    /// # Errors
    /// [`Error::PagesExhausted`] if no slab is left: a value to act on.
    pub fn allocate(&mut self, class: PageClass) -> Result<PageId, Error> {
        if self.free[class as usize].is_empty() {
            self.open_slab(class)?;
        }
        let page = self.free[class as usize].pop().expect("a slab was opened");
        self.references[page.0 as usize] = 1;
        let (slab, _) = self.layout.locate(page);
        self.slabs[slab].n_used += 1;
        Ok(page)
    }

    /// Gives an empty slab to `class`, or grows the pool by one.
    fn open_slab(&mut self, class: PageClass) -> Result<(), Error> {
        let n_pages = self.layout.pages_per_slab(class);
        assert!(n_pages > 0, "the model has no {class} pages");
        let stride = self.layout.stride();
        let empty = self.slabs.iter().position(|s| s.n_used == 0);
        let slab = match empty {
            Some(slab) => {
                self.close_slab(slab);
                slab
            }
            None if self.slabs.len() < self.max_slabs => {
                self.slabs.push(Slab::default());
                self.references.resize(self.slabs.len() * stride, 0);
                self.slabs.len() - 1
            }
            None => {
                return Err(Error::PagesExhausted {
                    class,
                    used: self.n_slabs_used(),
                    total: self.max_slabs,
                });
            }
        };
        self.slabs[slab].class = Some(class);
        let first = slab * stride;
        let pages = (first..first + n_pages).rev();
        self.free[class as usize].extend(pages.map(|id| PageId(id as u32)));
        Ok(())
    }

    /// Takes an empty slab's pages out of its class's free list.
    fn close_slab(&mut self, slab: usize) {
        if let Some(class) = self.slabs[slab].class.take() {
            let layout = self.layout;
            self.free[class as usize].retain(|&p| layout.locate(p).0 != slab);
        }
    }

    /// Adds a reference to a page in use.
    pub fn retain(&mut self, page: PageId) {
        let count = &mut self.references[page.0 as usize];
        assert!(*count > 0, "page {} is not in use", page.0);
        *count += 1;
    }

    /// Drops a reference; the last one frees the page.
    pub fn release(&mut self, page: PageId) {
        let count = &mut self.references[page.0 as usize];
        assert!(*count > 0, "page {} is not in use", page.0);
        *count -= 1;
        if *count == 0 {
            let (slab, _) = self.layout.locate(page);
            self.slabs[slab].n_used -= 1;
            let class = self.slabs[slab].class.expect("a used slab has a class");
            self.free[class as usize].push(page);
        }
    }
}

/// The pages of one sequence.
///
/// The keys that the newest row sees are always held, so that it can be
/// computed again when its logits are gone.
#[derive(Debug, Default)]
pub struct SequencePages {
    tables: [Vec<Option<PageId>>; 3],
    len: u32,
    /// Pages that a reserve has replaced in the tables, still held: class,
    /// index in the table, page.
    replaced: Vec<(PageClass, usize, PageId)>,
}

impl SequencePages {
    /// A sequence without rows.
    pub fn new() -> SequencePages {
        SequencePages::default()
    }

    /// A sequence whose `len` rows were computed for another one: `tables` by
    /// class, one entry per 256 positions, `None` where the next row does not
    /// see the page. Every page is shared.
    ///
    /// # Panics
    /// If a table of a class that the model has does not reach row `len`, or
    /// holds more, or a page is not in use.
    pub fn adopt(pool: &mut PagePool, tables: [Vec<Option<PageId>>; 3], len: u32) -> SequencePages {
        for class in PageClass::ALL {
            let expected = match pool.layout.classes[class as usize].n_layer {
                0 => 0,
                _ => (len as usize).div_ceil(PAGE_ROWS),
            };
            let found = tables[class as usize].len();
            assert_eq!(found, expected, "{class} pages for {len} rows");
        }
        let pages = tables.iter().flatten().flatten();
        pages.for_each(|&page| pool.retain(page));
        SequencePages {
            tables,
            len,
            replaced: Vec::new(),
        }
    }

    /// Accepted rows.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Has the sequence no row?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Pages of `class`, one entry per 256 positions.
    pub fn table(&self, class: PageClass) -> &[Option<PageId>] {
        &self.tables[class as usize]
    }

    /// Makes room for `n_rows` rows after the accepted ones, in every class.
    /// Gives back the copies to make before those rows are computed: a shared,
    /// partly filled page is replaced by an own copy. The replacement lasts
    /// when rows are accepted, and is undone by [`SequencePages::drop_reserve`]
    /// or by another reserve.
    ///
    /// # Errors
    /// [`Error::PagesExhausted`]; nothing has changed then but that an earlier
    /// replacement is undone.
    pub fn reserve(&mut self, pool: &mut PagePool, n_rows: u32) -> Result<Vec<PageCopy>, Error> {
        self.undo_replacements(pool);
        let mut fresh: Vec<(PageClass, usize, PageId)> = Vec::new();
        let mut copies = Vec::new();
        if n_rows == 0 {
            return Ok(copies);
        }
        let first = self.len as usize / PAGE_ROWS;
        let end = (self.len as usize + n_rows as usize).div_ceil(PAGE_ROWS);
        for class in PageClass::ALL {
            if pool.layout.classes[class as usize].n_layer == 0 {
                continue;
            }
            for index in first..end {
                let held = self.table(class).get(index).copied().flatten();
                if held.is_some_and(|page| pool.n_references(page) == 1) {
                    continue;
                }
                let page = match pool.allocate(class) {
                    Ok(page) => page,
                    Err(error) => {
                        fresh.iter().for_each(|&(_, _, page)| pool.release(page));
                        return Err(error);
                    }
                };
                fresh.push((class, index, page));
                let rows = self.len as usize % PAGE_ROWS;
                if let (Some(from), true) = (held, index == first && rows > 0) {
                    copies.push(PageCopy {
                        class,
                        from,
                        to: page,
                        rows,
                    });
                }
            }
        }
        for (class, index, page) in fresh {
            let table = &mut self.tables[class as usize];
            if table.len() <= index {
                table.resize(index + 1, None);
            }
            let shared = table[index].replace(page);
            self.replaced
                .extend(shared.map(|page| (class, index, page)));
        }
        Ok(copies)
    }

    /// Puts the pages back that a reserve has replaced.
    fn undo_replacements(&mut self, pool: &mut PagePool) {
        for (class, index, shared) in self.replaced.drain(..) {
            let copy = self.tables[class as usize][index].replace(shared);
            pool.release(copy.expect("a replaced page has its copy"));
        }
    }

    /// Accepts the next `n_rows` computed rows, and releases the pages that
    /// neither the newest nor any later row can see.
    pub fn accept(&mut self, pool: &mut PagePool, n_rows: u32) {
        self.len += n_rows;
        for (_, _, shared) in self.replaced.drain(..) {
            pool.release(shared);
        }
        for class in PageClass::ALL {
            let layout = pool.layout.classes[class as usize];
            let Some(window) = layout.window else {
                continue;
            };
            let table = &mut self.tables[class as usize];
            assert!(
                layout.n_layer == 0 || table.len() * PAGE_ROWS >= self.len as usize,
                "rows were accepted that were never reserved"
            );
            let live = first_seen(self.len, window) / PAGE_ROWS;
            let behind = live.min(table.len());
            for page in table[..behind].iter_mut().filter_map(Option::take) {
                pool.release(page);
            }
        }
    }

    /// First position whose keys are still held in every class.
    pub fn oldest_held(&self) -> u32 {
        let oldest = |table: &Vec<Option<PageId>>| {
            let held = table.iter().rposition(Option::is_none);
            held.map_or(0, |i| (i + 1) * PAGE_ROWS)
        };
        self.tables.iter().map(oldest).max().unwrap_or(0) as u32
    }

    /// Rolls back to the first `len` rows; pages beyond them are released.
    ///
    /// # Errors
    /// [`Error::WindowReleased`] if the last of them, computed again, would see
    /// keys that are no longer held; nothing has changed then.
    ///
    /// # Panics
    /// If the sequence has fewer rows.
    pub fn truncate(&mut self, pool: &mut PagePool, len: u32) -> Result<(), Error> {
        assert!(len <= self.len, "roll back {} rows to {len}", self.len);
        for class in PageClass::ALL {
            let Some(window) = pool.layout.classes[class as usize].window else {
                continue;
            };
            let table = self.table(class);
            let first = first_seen(len, window) / PAGE_ROWS;
            let end = (len as usize).div_ceil(PAGE_ROWS).min(table.len());
            if first < end && table[first..end].iter().any(Option::is_none) {
                return Err(Error::WindowReleased {
                    wanted: len,
                    oldest: self.oldest_held(),
                });
            }
        }
        self.len = len;
        self.drop_reserve(pool);
        Ok(())
    }

    /// Forgets the newest row, to compute it again: the keys it sees are held.
    ///
    /// Once only: the row before it may see keys that have been released.
    ///
    /// # Panics
    /// If there is no row.
    pub fn reopen_newest(&mut self, pool: &mut PagePool) {
        self.len = self.len.checked_sub(1).expect("a sequence with a row");
        self.drop_reserve(pool);
    }

    /// Releases pages that hold no accepted row, and takes back shared pages
    /// that the last reserve has replaced.
    pub fn drop_reserve(&mut self, pool: &mut PagePool) {
        self.undo_replacements(pool);
        let keep = (self.len as usize).div_ceil(PAGE_ROWS);
        for table in &mut self.tables {
            for page in table.drain(keep.min(table.len())..).flatten() {
                pool.release(page);
            }
        }
    }

    /// Another sequence with the same rows, sharing every page.
    pub fn branch(&self, pool: &mut PagePool) -> SequencePages {
        let keep = (self.len as usize).div_ceil(PAGE_ROWS);
        let mut tables = self.tables.clone();
        for &(class, index, shared) in &self.replaced {
            tables[class as usize][index] = Some(shared);
        }
        for table in &mut tables {
            table.truncate(keep);
            table.iter().flatten().for_each(|&page| pool.retain(page));
        }
        SequencePages {
            tables,
            len: self.len,
            replaced: Vec::new(),
        }
    }

    /// Releases every page; the sequence is empty afterwards.
    pub fn clear(&mut self, pool: &mut PagePool) {
        self.len = 0;
        self.drop_reserve(pool);
    }
}

/// First position that the newest of `len` rows sees through `window`.
fn first_seen(len: u32, window: u32) -> usize {
    len.saturating_sub(window) as usize
}
