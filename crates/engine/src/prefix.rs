//! The prefix cache: pages of earlier sequences, found by their tokens.
//!
//! A tree over blocks of [`PAGE_ROWS`] tokens; a leaf may be shorter. Every
//! node holds a reference to the page of each class without a window. Pages of
//! classes with a window are held for **cuts** only: positions worth returning
//! to, each with the pages that the row after it sees. The cut is the unit of
//! use and of eviction: a node lives as long as a cut stands in it or below it.
//!
//! What a reader would get wrong: a sequence can go on at many positions that
//! are no cut, wherever the pages happen to be there, and cannot go on inside
//! matching tokens where they are not. [`PrefixCache::adopt`] finds the last
//! position where it can. Pages are shared, never copied, here; whoever writes into a
//! shared one gets a copy from `SequencePages::reserve`.

use model::kv::KvLayout;
use model::{PAGE_ROWS, PageClass, PageId, PagePool, SequencePages};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A cut is kept at every multiple of this; older ones are thinned.
pub const REGULAR_CUT_TOKENS: usize = 8192;
/// Regular cuts at the end of a path that are not thinned.
const DENSE_CUTS: usize = 4;

/// What must be equal, beside the tokens, for pages to be the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheKey {
    /// Digest of all that determines keys and values: weights, KV type, numerics.
    pub identity: [u8; 32],
    /// Keeps tenants apart.
    pub salt: Option<Arc<str>>,
}

/// Why a position is worth returning to; a later kind wins over an earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cut {
    /// So far a prefill has come: replaced by the next one.
    Frontier,
    /// A multiple of [`REGULAR_CUT_TOKENS`].
    Regular,
    /// Named by the text side, or the end of a sequence, or returned to.
    Named,
}

/// A page with its rows that belong to the node.
#[derive(Clone, Copy, Debug)]
struct Held {
    page: PageId,
    rows: usize,
}

/// A block of tokens; a root has none.
#[derive(Debug, Default)]
struct Node {
    parent: Option<usize>,
    /// Number of the block; of no meaning in a root.
    index: usize,
    tokens: Vec<u32>,
    children: Vec<usize>,
    /// By class.
    held: [Option<Held>; 3],
    /// By class: how many cuts need the page. Counted for classes with a window.
    n_needed: [usize; 3],
    /// By rows of this node: kind and stamp of the last use.
    cuts: BTreeMap<usize, (Cut, u64)>,
}

/// One block on the way to a cut.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// The node that has the block's tokens or a beginning of them.
    node: Option<usize>,
    /// Rows of the block that the sequence has.
    rows: usize,
    /// By class: does the node take the sequence's page?
    takes: [bool; 3],
}

/// The tree, over one page pool.
#[derive(Debug)]
pub struct PrefixCache {
    layout: KvLayout,
    limit_bytes: u64,
    /// Pages held, by class.
    n_pages: [usize; 3],
    nodes: Vec<Node>,
    /// Places in `nodes` that are not in use.
    vacant: Vec<usize>,
    roots: HashMap<CacheKey, usize>,
    /// Node and rows of every cut, by stamp of the last use.
    by_use: BTreeMap<u64, (usize, usize)>,
    clock: u64,
    n_evicted: u64,
}

impl PrefixCache {
    /// An empty cache whose pages may take `limit_bytes`; 0 keeps nothing.
    pub fn new(layout: KvLayout, limit_bytes: u64) -> PrefixCache {
        PrefixCache {
            layout,
            limit_bytes,
            n_pages: [0; 3],
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
            n_evicted: 0,
        }
    }

    /// Bytes of the pages it holds, also of those that sequences hold too.
    pub fn bytes(&self) -> u64 {
        let of = |class| self.n_pages[class as usize] * self.layout.page_bytes(class);
        PageClass::ALL.map(of).iter().sum::<usize>() as u64
    }

    /// Bytes it may hold.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Cuts evicted so far, for room in the limit or in the pool.
    pub fn n_evicted(&self) -> u64 {
        self.n_evicted
    }

    /// Pages it holds.
    pub fn n_pages(&self) -> usize {
        self.n_pages.iter().sum()
    }

    /// By class: pages that would be free if it held nothing.
    pub fn n_reclaimable(&self, pool: &PagePool) -> [usize; 3] {
        let is_free = |held: &&Held| pool.n_references(held.page) == 1;
        PageClass::ALL.map(|class| {
            let held = self
                .nodes
                .iter()
                .filter_map(|node| node.held[class as usize].as_ref());
            held.filter(is_free).count()
        })
    }

    /// The pages of the longest beginning of `tokens` that a sequence can go on
    /// from, if it is longer than `longer_than` rows. At least one token stays
    /// to be computed. The pages belong to the caller, as one more holder.
    pub fn adopt(
        &mut self,
        pool: &mut PagePool,
        key: &CacheKey,
        tokens: &[u32],
        longer_than: usize,
    ) -> Option<SequencePages> {
        let most = tokens.len().checked_sub(1)?;
        let mut node = *self.roots.get(key)?;
        let (mut best, mut path) = ((longer_than, Vec::new()), Vec::new());
        loop {
            let ahead = &tokens[path.len() * PAGE_ROWS..];
            let mut whole = None;
            for &child in &self.nodes[node].children {
                let n_common = n_common(&self.nodes[child].tokens, ahead);
                if n_common == PAGE_ROWS {
                    whole = Some(child);
                }
                let len = self.last_resumable(&path, child, n_common, most);
                if len > best.0 {
                    best = (len, [&path[..], &[child]].concat());
                }
            }
            let Some(child) = whole else {
                break;
            };
            path.push(child);
            node = child;
        }
        let (len, path) = best;
        let &last = path.last()?;
        self.used(last, len - (path.len() - 1) * PAGE_ROWS);
        let tables = PageClass::ALL.map(|class| self.table(class, &path, len));
        Some(SequencePages::adopt(pool, tables, len as u32))
    }

    /// The last position, at most `most`, within the first `n_common` rows of
    /// `child` at the end of `path` where a sequence can go on; 0 if there is none.
    fn last_resumable(&self, path: &[usize], child: usize, n_common: usize, most: usize) -> usize {
        let start = path.len() * PAGE_ROWS;
        let held =
            |node: usize, c: PageClass| self.nodes[node].held[c as usize].map_or(0, |h| h.rows);
        let mut len = most.min(start + n_common);
        for (class, _) in self.windows() {
            len = len.min(start + held(child, class));
        }
        if len <= start {
            return 0;
        }
        let sees_all = |(class, window): (PageClass, usize)| {
            let first = (len + 1).saturating_sub(window) / PAGE_ROWS;
            let mut before = path.iter().skip(first);
            before.all(|&node| held(node, class) == PAGE_ROWS)
        };
        match self.windows().all(sees_all) {
            true => len,
            false => 0,
        }
    }

    /// The table of `class` for a sequence that goes on after `len` rows of `path`.
    fn table(&self, class: PageClass, path: &[usize], len: usize) -> Vec<Option<PageId>> {
        let layout = &self.layout.classes[class as usize];
        if layout.n_layer == 0 {
            return Vec::new();
        }
        let window = layout.window.map_or(usize::MAX, |w| w as usize);
        let first = (len + 1).saturating_sub(window) / PAGE_ROWS;
        let page = |(index, &node): (usize, &usize)| {
            let held = self.nodes[node].held[class as usize];
            held.filter(|_| index >= first).map(|held| held.page)
        };
        path.iter().enumerate().map(page).collect()
    }

    /// Classes with a window, with its length.
    fn windows(&self) -> impl Iterator<Item = (PageClass, usize)> + use<> {
        let layout = self.layout;
        PageClass::ALL.into_iter().filter_map(move |class| {
            let layout = &layout.classes[class as usize];
            let window = layout.window.filter(|_| layout.n_layer > 0)?;
            Some((class, window as usize))
        })
    }

    /// Notes that somebody returned to row `rows` of `node`.
    fn used(&mut self, node: usize, rows: usize) {
        match self.nodes[node].cuts.range(rows..).next() {
            Some((&rows, &(kind, _))) => self.stamp(node, rows, kind),
            None => {
                self.need(node, rows, 1);
                self.stamp(node, rows, Cut::Named);
            }
        }
    }

    /// Sets kind and time of the last use of a cut.
    fn stamp(&mut self, node: usize, rows: usize, kind: Cut) {
        self.clock += 1;
        let before = self.nodes[node].cuts.insert(rows, (kind, self.clock));
        if let Some((_, stamp)) = before {
            self.by_use.remove(&stamp);
        }
        self.by_use.insert(self.clock, (node, rows));
    }

    /// Adds a cut after `at` rows of a sequence whose rows `tokens` are computed
    /// and lie in `pages`. Says whether it stands.
    ///
    /// It does not where a page that it needs is no longer held by anybody, or
    /// where it alone is over the limit. Less recently used cuts go to make room.
    ///
    /// # Panics
    /// If `at` is 0 or more than the tokens.
    pub fn insert(
        &mut self,
        pool: &mut PagePool,
        key: &CacheKey,
        tokens: &[u32],
        pages: &SequencePages,
        (at, kind): (usize, Cut),
    ) -> bool {
        assert!(
            0 < at && at <= tokens.len(),
            "a cut at row {at} of {}",
            tokens.len()
        );
        if self.cut_bytes(at) > self.limit_bytes {
            return false;
        }
        let steps = loop {
            let Some((steps, added_bytes)) = self.route(key, tokens, pages, at) else {
                return false;
            };
            if self.bytes() + added_bytes <= self.limit_bytes {
                break steps;
            }
            // What is evicted may lie on the way: look again.
            if !self.evict(pool) {
                return false;
            }
        };
        let node = self.build(pool, key, tokens, pages, &steps);
        let rows = at - (steps.len() - 1) * PAGE_ROWS;
        match self.nodes[node].cuts.get_mut(&rows) {
            Some((found, _)) => *found = kind.max(*found),
            None => {
                self.need(node, rows, 1);
                self.stamp(node, rows, kind);
            }
        }
        if kind == Cut::Regular {
            self.thin(pool, node);
        }
        true
    }

    /// Bytes of all pages on the way to a cut after `at` rows.
    fn cut_bytes(&self, at: usize) -> u64 {
        let bytes = PageClass::ALL.map(|class| {
            let window = self.layout.classes[class as usize].window;
            let first = window.map_or(0, |w| at.saturating_sub(w as usize) / PAGE_ROWS);
            (at.div_ceil(PAGE_ROWS) - first) * self.layout.page_bytes(class)
        });
        bytes.iter().sum::<usize>() as u64
    }

    /// The way to a cut after `at` rows, and the bytes it adds; `None` if a page
    /// is missing.
    fn route(
        &self,
        key: &CacheKey,
        tokens: &[u32],
        pages: &SequencePages,
        at: usize,
    ) -> Option<(Vec<Step>, u64)> {
        let mut parent = self.roots.get(key).copied();
        let (mut steps, mut added_bytes) = (Vec::new(), 0);
        for index in 0..at.div_ceil(PAGE_ROWS) {
            let start = index * PAGE_ROWS;
            let block = &tokens[start..tokens.len().min(start + PAGE_ROWS)];
            let node = parent.and_then(|parent| self.child(parent, block));
            let known = node.map_or(0, |node| self.nodes[node].tokens.len());
            let mut takes = [false; 3];
            for class in PageClass::ALL {
                let layout = &self.layout.classes[class as usize];
                if layout.n_layer == 0 {
                    continue;
                }
                let held = node.and_then(|node| self.nodes[node].held[class as usize]);
                let wanted_rows = match layout.window {
                    None => block.len(),
                    Some(w) if index < at.saturating_sub(w as usize) / PAGE_ROWS => 0,
                    Some(_) => block.len().min(at - start),
                };
                let held_rows = held.map_or(0, |held| held.rows);
                if wanted_rows <= held_rows {
                    // More rows of a page that is held anyway cost nothing.
                    takes[class as usize] =
                        0 < held_rows && held_rows < block.len() && known < block.len();
                } else {
                    takes[class as usize] = true;
                    added_bytes += match held {
                        Some(_) => 0,
                        None => self.layout.page_bytes(class) as u64,
                    };
                }
                let own = pages.table(class).get(index).copied().flatten();
                if takes[class as usize] && own.is_none() {
                    if wanted_rows > held_rows {
                        return None;
                    }
                    takes[class as usize] = false;
                }
            }
            let rows = block.len();
            steps.push(Step { node, rows, takes });
            parent = node;
        }
        Some((steps, added_bytes))
    }

    /// The child of `parent` that begins with `block`, else the longest that is
    /// a beginning of it.
    fn child(&self, parent: usize, block: &[u32]) -> Option<usize> {
        let fits = |child: &&usize| {
            let tokens = &self.nodes[**child].tokens;
            n_common(tokens, block) == tokens.len().min(block.len())
        };
        let fitting = self.nodes[parent].children.iter().filter(fits);
        fitting
            .max_by_key(|child| self.nodes[**child].tokens.len())
            .copied()
    }

    /// Makes the nodes of `steps`, gives them their pages; the last node.
    fn build(
        &mut self,
        pool: &mut PagePool,
        key: &CacheKey,
        tokens: &[u32],
        pages: &SequencePages,
        steps: &[Step],
    ) -> usize {
        let mut parent = match self.roots.get(key) {
            Some(&root) => root,
            None => {
                let root = self.add_node(Node::default());
                self.roots.insert(key.clone(), root);
                root
            }
        };
        for (index, step) in steps.iter().enumerate() {
            let node = step.node.unwrap_or_else(|| {
                let node = self.add_node(Node {
                    parent: Some(parent),
                    index,
                    ..Node::default()
                });
                self.nodes[parent].children.push(node);
                node
            });
            let known = self.nodes[node].tokens.len();
            if known < step.rows {
                let start = index * PAGE_ROWS;
                let more = &tokens[start + known..start + step.rows];
                self.nodes[node].tokens.extend_from_slice(more);
            }
            for class in PageClass::ALL
                .into_iter()
                .filter(|&c| step.takes[c as usize])
            {
                let page = pages.table(class)[index].expect("the route has seen it");
                pool.retain(page);
                self.release(pool, node, class);
                self.n_pages[class as usize] += 1;
                let rows = step.rows;
                self.nodes[node].held[class as usize] = Some(Held { page, rows });
            }
            parent = node;
        }
        parent
    }

    fn add_node(&mut self, node: Node) -> usize {
        match self.vacant.pop() {
            Some(place) => {
                self.nodes[place] = node;
                place
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    /// Lets go of a node's page of `class`, if it has one.
    fn release(&mut self, pool: &mut PagePool, node: usize, class: PageClass) {
        if let Some(held) = self.nodes[node].held[class as usize].take() {
            pool.release(held.page);
            self.n_pages[class as usize] -= 1;
        }
    }

    /// Counts a cut after `rows` rows of `node` in or out (`by` 1 or -1) where
    /// it needs pages. Gives back what nothing needs any more.
    fn need(&mut self, node: usize, rows: usize, by: isize) -> Vec<(usize, PageClass)> {
        let at = self.nodes[node].index * PAGE_ROWS + rows;
        let mut idle = Vec::new();
        for (class, window) in self.windows() {
            let first = at.saturating_sub(window) / PAGE_ROWS;
            let mut next = Some(node);
            while let Some(place) = next.filter(|&n| self.nodes[n].index >= first) {
                let node = &mut self.nodes[place];
                let n = &mut node.n_needed[class as usize];
                *n = n.checked_add_signed(by).expect("a cut that was counted");
                if *n == 0 {
                    idle.push((place, class));
                }
                // The parent of the first block is a root.
                next = node.parent.filter(|_| node.index > 0);
            }
        }
        idle
    }

    /// Removes a cut, the pages that only it needed, and the nodes that only it
    /// kept.
    fn remove_cut(&mut self, pool: &mut PagePool, node: usize, rows: usize) {
        let cut = self.nodes[node].cuts.remove(&rows);
        let (_, stamp) = cut.expect("a cut that stands");
        self.by_use.remove(&stamp);
        for (node, class) in self.need(node, rows, -1) {
            self.release(pool, node, class);
        }
        let mut next = Some(node);
        while let Some(node) = next {
            let Node { cuts, children, .. } = &self.nodes[node];
            if !cuts.is_empty() || !children.is_empty() {
                break;
            }
            next = self.remove_node(pool, node);
        }
    }

    /// Removes a node without children; its parent, if it has one.
    fn remove_node(&mut self, pool: &mut PagePool, node: usize) -> Option<usize> {
        for class in PageClass::ALL {
            self.release(pool, node, class);
        }
        let removed = std::mem::take(&mut self.nodes[node]);
        for (_, stamp) in removed.cuts.values() {
            self.by_use.remove(stamp);
        }
        self.vacant.push(node);
        match removed.parent {
            Some(parent) => self.nodes[parent].children.retain(|&child| child != node),
            None => self.roots.retain(|_, root| *root != node),
        }
        removed.parent
    }

    /// Removes the cut that was not used for longest; false if there is none.
    pub fn evict(&mut self, pool: &mut PagePool) -> bool {
        let Some((_, &(node, rows))) = self.by_use.first_key_value() else {
            return false;
        };
        self.remove_cut(pool, node, rows);
        self.n_evicted += 1;
        true
    }

    /// Removes the frontier after `at` rows of `tokens`, unless it has become
    /// more than that.
    pub fn drop_frontier(
        &mut self,
        pool: &mut PagePool,
        key: &CacheKey,
        tokens: &[u32],
        at: usize,
    ) {
        let mut node = self.roots.get(key).copied();
        for block in tokens[..at].chunks(PAGE_ROWS) {
            node = node.and_then(|node| self.child(node, block));
        }
        let rows = (at - 1) % PAGE_ROWS + 1;
        if let Some(node) = node
            && let Some((Cut::Frontier, _)) = self.nodes[node].cuts.get(&rows)
        {
            self.remove_cut(pool, node, rows);
        }
    }

    /// Removes the regular cuts before `node` that are too dense by now.
    fn thin(&mut self, pool: &mut PagePool, node: usize) {
        let newest = (self.nodes[node].index + 1) * PAGE_ROWS / REGULAR_CUT_TOKENS;
        let mut dense = Vec::new();
        let mut next = self.nodes[node].parent;
        while let Some(node) = next {
            let Node {
                parent,
                index,
                cuts,
                ..
            } = &self.nodes[node];
            let end = (index + 1) * PAGE_ROWS;
            let is_regular = matches!(cuts.get(&PAGE_ROWS), Some((Cut::Regular, _)));
            if is_regular && !is_kept(end / REGULAR_CUT_TOKENS, newest) {
                dense.push(node);
            }
            next = *parent;
        }
        // Each has a child on this path, so none takes its node along.
        for node in dense {
            self.remove_cut(pool, node, PAGE_ROWS);
        }
    }

    /// Removes everything that shares its first block with `tokens`: their rows
    /// turned out to be wrong.
    pub fn forget(&mut self, pool: &mut PagePool, key: &CacheKey, tokens: &[u32]) {
        let Some(&root) = self.roots.get(key) else {
            return;
        };
        let is_shared = |&child: &usize| n_common(&self.nodes[child].tokens, tokens) > 0;
        let children = &self.nodes[root].children;
        let wrong: Vec<usize> = children.iter().copied().filter(is_shared).collect();
        wrong
            .into_iter()
            .for_each(|node| self.remove_tree(pool, node));
        if self.nodes[root].children.is_empty() {
            self.remove_node(pool, root);
        }
    }

    /// Removes everything.
    pub fn clear(&mut self, pool: &mut PagePool) {
        let roots: Vec<usize> = self.roots.values().copied().collect();
        roots
            .into_iter()
            .for_each(|root| self.remove_tree(pool, root));
    }

    fn remove_tree(&mut self, pool: &mut PagePool, node: usize) {
        // Parents come before their children.
        let mut all = vec![node];
        let mut next = 0;
        while next < all.len() {
            all.extend_from_slice(&self.nodes[all[next]].children);
            next += 1;
        }
        for node in all.into_iter().rev() {
            self.remove_node(pool, node);
        }
    }
}

/// Length of the common beginning.
fn n_common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Is the regular cut number `k` kept on a path whose newest is `newest`? The
/// distance between those kept grows with their age, so that they are few.
fn is_kept(k: usize, newest: usize) -> bool {
    let age = (newest - k) / DENSE_CUTS;
    age == 0 || k.is_multiple_of(1 << (age.ilog2() + 1).min(31))
}
