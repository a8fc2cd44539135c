//! Who may run, with which pages: admission, the cache, pre-emption.
//!
//! What a reader would get wrong: a prompt is looked up again before each of
//! its prefill passes, because another sequence with the same beginning may be
//! ahead of it by now.

use super::Worker;
use crate::Error;
use crate::job::Event;
use crate::scheduler::{SequenceId, Span};
use crate::sequence::Sequence;
use model::kv::PageCopy;
use model::{PAGE_ROWS, PageClass, PagePool};
use std::time::Instant;

impl Worker {
    /// Lets waiting sequences run, the oldest first, as long as their pages fit
    /// beside what the running ones will need next. One always runs.
    pub(super) fn admit(&mut self) {
        while let Some(id) = self.scheduler.next_waiting() {
            let n_adopted = self.adopt(id);
            if self.scheduler.n_running() > 0 && !self.make_room(id) {
                let live = self.jobs.get_mut(&id.job).expect("a waiting job");
                live.choice(id).sequence.pages.clear(&mut self.pool);
                return;
            }
            let live = self.jobs.get_mut(&id.job).expect("a waiting job");
            let choice = live.choice(id);
            choice.n_cut = n_adopted;
            choice.frontier = None;
            let n_left = choice.sequence.len() - n_adopted;
            self.scheduler.admit(id, n_left);
            self.commit_adopted(id, n_adopted);
            self.start(id, n_adopted);
        }
    }

    /// Tells a job that runs for the first time.
    fn start(&mut self, id: SequenceId, n_adopted: usize) {
        let live = self.jobs.get_mut(&id.job).expect("an admitted job");
        if live.admitted.is_some() {
            return;
        }
        let now = Instant::now();
        live.admitted = Some(now);
        let queue = now - live.submitted;
        live.timings.queue = queue;
        self.counts.prompt_tokens += live.n_prompt as u64;
        let event = Event::Started {
            cached_tokens: n_adopted,
            queue,
        };
        // One that breaks off here is found out at its next event, within a pass.
        live.tell(event);
    }

    /// Gives a sequence the cached pages of its beginning, if they go farther
    /// than its own; the rows it gains.
    fn adopt(&mut self, id: SequenceId) -> usize {
        let live = self.jobs.get_mut(&id.job).expect("a job in the house");
        let Some(key) = live.key.clone() else {
            return 0;
        };
        let sequence = &mut live.choice(id).sequence;
        let n_computed = sequence.n_computed();
        let adopted = self
            .cache
            .adopt(&mut self.pool, &key, &sequence.tokens, n_computed);
        let Some(adopted) = adopted else {
            return 0;
        };
        let mut own = std::mem::replace(&mut sequence.pages, adopted);
        own.clear(&mut self.pool);
        sequence.n_computed() - n_computed
    }

    /// Counts rows that a running sequence took over.
    fn commit_adopted(&mut self, id: SequenceId, n_adopted: usize) {
        let live = self.jobs.get_mut(&id.job).expect("an admitted job");
        let is_on = live.key.is_some() && self.cache.limit_bytes() > 0;
        if is_on && live.admitted.is_none() {
            self.counts.cache_lookups += 1;
        }
        let n_prompt = live.n_prompt;
        let choice = live.choice(id);
        // Forced tokens of the answer may have come along.
        let n_computed = choice.sequence.n_computed();
        let n_adopted = n_computed.min(n_prompt) - (n_computed - n_adopted).min(n_prompt);
        // What it had once is no hit.
        if n_adopted == 0 || choice.n_lost > 0 {
            return;
        }
        if live.timings.cached_tokens == 0 {
            self.counts.cache_hits += 1;
        }
        live.timings.cached_tokens += n_adopted;
        self.counts.cached_tokens += n_adopted as u64;
    }

    /// Takes over what others have computed of a planned prefill meanwhile.
    pub(super) fn catch_up(&mut self, span: &mut Span) {
        let live = self.jobs.get_mut(&span.id.job).expect("a running job");
        let sequence = &live.choice(span.id).sequence;
        let n_left = sequence.len() - sequence.n_computed();
        if n_left < 2 {
            return;
        }
        let n_adopted = self.adopt(span.id);
        if n_adopted > 0 {
            self.scheduler.computed(span.id, n_adopted);
            self.commit_adopted(span.id, n_adopted);
            let n_left = n_left - n_adopted;
            span.n_rows = span.n_rows.min(n_left);
            span.is_last = span.n_rows == n_left;
        }
    }

    /// Is there room for the known rows of `id`, beside those of the running
    /// sequences and a page more for each? The cache gives way.
    fn make_room(&mut self, id: SequenceId) -> bool {
        let mut n_pages = [0; 3];
        for id in self.scheduler.running().chain([id]) {
            let sequence = &self.jobs[&id.job].choices[id.choice as usize].sequence;
            let missing = missing_pages(sequence, &self.pool, self.max_rows);
            for class in PageClass::ALL {
                n_pages[class as usize] += missing[class as usize];
            }
        }
        if self.pool.has_room_for(n_pages) {
            return true;
        }
        let mut beyond = self.cache.n_reclaimable(&self.pool);
        for (beyond, n) in beyond.iter_mut().zip(n_pages) {
            *beyond = n.saturating_sub(*beyond);
        }
        if !self.pool.has_room_for(beyond) {
            return false;
        }
        while !self.pool.has_room_for(n_pages) {
            if !self.cache.evict(&mut self.pool) {
                return false;
            }
        }
        true
    }

    /// Room for the rows of a span: the copies to make first. Where no page is
    /// left the cache gives way, then the newest sequence; `None` if that was
    /// this one. For drafts nobody gives way: they are cut to the pages there are.
    pub(super) fn reserve(&mut self, span: &mut Span) -> Option<Vec<PageCopy>> {
        loop {
            let live = self.jobs.get_mut(&span.id.job).expect("a running job");
            let pages = &mut live.choice(span.id).sequence.pages;
            let end = pages.len() as usize + span.n_rows;
            if let Ok(copies) = pages.reserve(&mut self.pool, (span.n_rows + span.n_drafts) as u32)
            {
                return Some(copies);
            }
            span.n_drafts = span.n_drafts.min(end.next_multiple_of(PAGE_ROWS) - end);
            let n_rows = span.n_rows + span.n_drafts;
            let error = match pages.reserve(&mut self.pool, n_rows as u32) {
                Ok(copies) => return Some(copies),
                Err(error) => error,
            };
            if self.cache.evict(&mut self.pool) {
                continue;
            }
            let newest = self.scheduler.newest().expect("this one runs");
            if newest != span.id {
                self.preempt(newest);
                continue;
            }
            if self.scheduler.n_running() > 1 {
                self.preempt(newest);
            } else {
                self.start_again(newest, error.into());
            }
            return None;
        }
    }

    /// Takes a sequence's pages away; it waits for its turn to go on. Its rows
    /// go to the cache, where they last as long as nobody needs the room.
    pub(super) fn preempt(&mut self, id: SequenceId) {
        self.save_whole(id);
        self.give_up_pages(id);
    }

    fn give_up_pages(&mut self, id: SequenceId) {
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        live.timings.preempted += 1;
        self.counts.preemptions += 1;
        let choice = live.choice(id);
        choice.n_lost = choice.n_lost.max(choice.sequence.n_computed());
        choice.sequence.pages.clear(&mut self.pool);
        self.scheduler.preempt(id);
    }

    /// Lets a sequence that is alone start from an empty pool: its own pages
    /// may lie in more slabs than they fill. If it has come no farther since it
    /// last did, it fails.
    pub(super) fn start_again(&mut self, id: SequenceId, error: Error) {
        let live = self.jobs.get_mut(&id.job).expect("a running job");
        let choice = live.choice(id);
        let n_computed = choice.sequence.n_computed();
        if choice
            .exhausted_at
            .is_some_and(|before| n_computed <= before)
        {
            self.fail(id.job, error);
            return;
        }
        choice.exhausted_at = Some(n_computed);
        self.give_up_pages(id);
    }
}

/// By class: pages that a sequence lacks for its known rows and one more, for
/// its copy of a page that others hold too, and one more to grow.
fn missing_pages(sequence: &Sequence, pool: &PagePool, max_rows: usize) -> [usize; 3] {
    PageClass::ALL.map(|class| {
        let layout = pool.layout().classes[class as usize];
        if layout.n_layer == 0 {
            return 0;
        }
        let n_computed = sequence.n_computed();
        let next = sequence.pages.table(class).get(n_computed / PAGE_ROWS);
        let is_shared = |page| pool.n_references(page) > 1;
        let is_copied = next.copied().flatten().is_some_and(is_shared);
        let beyond = (sequence.len() + 1).div_ceil(PAGE_ROWS) - n_computed.div_ceil(PAGE_ROWS);
        // So many at once; those behind the window come back.
        let most = layout.window.map_or(usize::MAX, |window| {
            (window as usize + max_rows).div_ceil(PAGE_ROWS) + 1
        });
        beyond.min(most) + usize::from(is_copied) + 1
    })
}
