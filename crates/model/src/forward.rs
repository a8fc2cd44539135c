//! The seam between the generic model and everything above it.
//!
//! The backend's type does not leave this crate and the backends: above stands
//! `Box<dyn Forward>`, one dynamic call per pass. A model owns its target and
//! its drafter, so that the drafter uses the target's embedding and head in
//! place.

use crate::activations::Activations;
use crate::backend::{Backend, Caps, PageData};
use crate::batch::{Batch, Input, Outputs, Step, Tables, Want};
use crate::config::{Architecture, Config};
use crate::drafter::{DraftRequest, Drafter, DrafterConfig, WindowConvention, block_batch};
use crate::kv::{KvLayout, KvType, PAGE_ROWS, PageClass, PageCopy, PageId};
use crate::weights::Weights;
use crate::{Error, graph_llama, graph_muse_glimmer, vocabulary_digest};
use gguf::Gguf;

/// Settings of a model's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Element type of keys and values.
    pub kv: KvType,
    /// Bytes that all pages together may take.
    pub kv_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            kv: KvType::F16,
            kv_bytes: 1 << 30,
        }
    }
}

/// What the page pool above may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Sizes of pages and slabs.
    pub layout: KvLayout,
    /// Slabs that fit the bytes given.
    pub max_slabs: usize,
}

/// A loaded model, whatever its graph and device.
pub trait Forward: Send {
    /// The model's numbers.
    fn config(&self) -> &Config;

    /// What the device can do.
    fn caps(&self) -> Caps;

    /// What the page pool may use. Attach a drafter before asking.
    fn capacity(&self) -> Capacity;

    /// Computes the rows of `batch` over the sequences in `tables`, stores
    /// their keys and values, and reads back what `want` says of each wanted
    /// row (one entry each).
    ///
    /// # Errors
    /// [`Error::Discontinuity`] and [`Error::TokenUnknown`] before anything is
    /// computed; [`Error::Device`].
    fn pass(&mut self, batch: &Batch, tables: &Tables<'_>, want: &[Want])
    -> Result<Outputs, Error>;

    /// Loads a drafter beside the target; gives back its numbers.
    ///
    /// # Errors
    /// [`Error::DrafterMismatch`], [`Error::DrafterUnsupported`], and those of
    /// loading.
    fn attach_drafter(
        &mut self,
        file: &Gguf,
        convention: WindowConvention,
    ) -> Result<DrafterConfig, Error>;

    /// Proposes a block for each request; gives back what `want` says of each
    /// proposed position, request by request.
    ///
    /// # Panics
    /// If no drafter is attached, or a request proposes no token or more than
    /// a block holds.
    fn draft(
        &mut self,
        requests: &[DraftRequest],
        tables: &Tables<'_>,
        want: Want,
    ) -> Result<Vec<Outputs>, Error>;

    /// The first `rows` rows of a page, in canonical form.
    fn export_page(
        &mut self,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, Error>;

    /// Fills a page from its canonical form.
    ///
    /// # Errors
    /// [`Error::PageData`] if the data does not have the rows it claims.
    fn import_page(&mut self, class: PageClass, page: PageId, data: &PageData)
    -> Result<(), Error>;

    /// Carries out copies of partly filled pages.
    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Error>;
}

/// The target's weights, by graph.
enum Target<B: Backend> {
    MuseGlimmer(Weights<B>),
    Llama(graph_llama::Weights<B>),
}

impl<B: Backend> Target<B> {
    fn embd_and_head(&self) -> (&B::Weight, &B::Weight) {
        match self {
            Target::MuseGlimmer(w) => (&w.token_embd, &w.output),
            Target::Llama(w) => (&w.token_embd, w.head()),
        }
    }
}

/// A model on one backend.
pub struct Model<B: Backend> {
    config: Config,
    be: B,
    target: Target<B>,
    act: Activations<B>,
    kv: B::Kv,
    layout: KvLayout,
    options: Options,
    drafter: Option<Drafter<B>>,
    vocabulary: [u8; 32],
    /// Slabs made so far.
    n_slabs: usize,
}

impl<B: Backend> Model<B> {
    /// Loads a model file onto `be`.
    ///
    /// # Errors
    /// Those of [`Config::from_metadata`]; a missing, misshapen or unused tensor;
    /// those of the device.
    pub fn load(be: B, file: &Gguf, options: Options) -> Result<Model<B>, Error> {
        let config = Config::from_metadata(file.metadata())?;
        Model::load_as(be, file, config, options)
    }

    /// Loads a model file with a configuration of the caller's making.
    pub fn load_as(
        mut be: B,
        file: &Gguf,
        config: Config,
        options: Options,
    ) -> Result<Model<B>, Error> {
        let target = match config.architecture {
            Architecture::MuseGlimmer => {
                Target::MuseGlimmer(Weights::load(&mut be, file, &config)?)
            }
            Architecture::Llama => {
                Target::Llama(graph_llama::Weights::load(&mut be, file, &config)?)
            }
        };
        let act = Activations::new(&mut be, &config)?;
        let layout = config.kv_layout(options.kv);
        let kv = be.alloc_kv(&layout)?;
        Ok(Model {
            vocabulary: vocabulary_digest(file.metadata())?,
            config,
            be,
            target,
            act,
            kv,
            layout,
            options,
            drafter: None,
            n_slabs: 0,
        })
    }

    /// The device, for probes and measurements.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.be
    }

    /// Checks a batch against the sequences it extends.
    fn check(&self, batch: &Batch, tables: &Tables<'_>, want: &[Want]) -> Result<(), Error> {
        let (rows, max_rows) = (batch.rows.len(), self.be.caps().max_rows);
        assert!(
            rows <= max_rows,
            "a pass of {rows} rows, at most {max_rows}"
        );
        assert_eq!(batch.wanted.len(), want.len(), "one want per wanted row");
        let mut next: Vec<u32> = tables.iter().map(|s| s.len()).collect();
        let mut previous = None;
        for row in &batch.rows {
            let len = &mut next[row.seq as usize];
            let returns = *len > tables[row.seq as usize].len() && previous != Some(row.seq);
            if row.pos != *len || returns {
                return Err(Error::Discontinuity {
                    seq: row.seq,
                    found: row.pos,
                    len: *len,
                });
            }
            *len += 1;
            previous = Some(row.seq);
            let Input::Token(token) = row.input;
            self.check_token(token)?;
        }
        for (pages, &end) in tables.iter().zip(&next).filter(|(p, end)| p.len() < **end) {
            for class in PageClass::ALL {
                let reserved = pages.table(class).len() * PAGE_ROWS >= end as usize;
                let has_class = self.layout.classes[class as usize].n_layer > 0;
                assert!(
                    reserved || !has_class,
                    "{class} pages up to row {end} reserved"
                );
            }
        }
        Ok(())
    }

    fn check_token(&self, token: u32) -> Result<(), Error> {
        let n_vocab = self.config.n_vocab;
        if token as usize >= n_vocab {
            return Err(Error::TokenUnknown { token, n_vocab });
        }
        Ok(())
    }

    /// Makes memory for every page in `tables`.
    fn grow(&mut self, tables: &Tables<'_>) -> Result<(), Error> {
        let pages = tables
            .iter()
            .flat_map(|s| PageClass::ALL.map(|class| s.table(class)))
            .flatten()
            .flatten();
        let slabs = pages.map(|&page| self.layout.locate(page).0 + 1);
        self.grow_to(slabs.max().unwrap_or(0))
    }

    fn grow_to(&mut self, n_slabs: usize) -> Result<(), Error> {
        if n_slabs > self.n_slabs {
            self.be.grow_kv(&mut self.kv, n_slabs)?;
            self.n_slabs = n_slabs;
        }
        Ok(())
    }
}

impl<B: Backend> Forward for Model<B> {
    fn config(&self) -> &Config {
        &self.config
    }

    fn caps(&self) -> Caps {
        self.be.caps()
    }

    fn capacity(&self) -> Capacity {
        let slab_bytes = self.layout.slab_bytes().max(1) as u64;
        Capacity {
            layout: self.layout,
            max_slabs: (self.options.kv_bytes / slab_bytes) as usize,
        }
    }

    fn pass(
        &mut self,
        batch: &Batch,
        tables: &Tables<'_>,
        want: &[Want],
    ) -> Result<Outputs, Error> {
        self.check(batch, tables, want)?;
        self.grow(tables)?;
        self.be.step(&Step::new(batch, tables))?;
        let Model {
            config,
            be,
            target,
            act,
            kv,
            drafter,
            ..
        } = self;
        be.run(batch.shape(), |be| {
            let taps = drafter.as_mut().map(Drafter::taps);
            match target {
                Target::MuseGlimmer(w) => {
                    graph_muse_glimmer::forward(be, config, w, act, kv, taps);
                }
                Target::Llama(w) => graph_llama::forward(be, config, w, act, kv, taps),
            }
            if let Some(drafter) = drafter {
                drafter.store_context(be, kv);
            }
        })?;
        if want.is_empty() {
            return Ok(Outputs::new());
        }
        Ok(be.select(&act.logits, want)?)
    }

    fn attach_drafter(
        &mut self,
        file: &Gguf,
        convention: WindowConvention,
    ) -> Result<DrafterConfig, Error> {
        assert_eq!(self.n_slabs, 0, "attach the drafter before the first pass");
        let config = DrafterConfig::from_metadata(file.metadata(), convention)?;
        config.check_target(&self.config, file.metadata(), &self.vocabulary)?;
        let drafter = Drafter::load(&mut self.be, file, config.clone(), self.config.n_vocab)?;
        let mut layout = self.layout;
        layout.classes[PageClass::Drafter as usize] = config.class_layout();
        self.kv = self.be.alloc_kv(&layout)?;
        self.layout = layout;
        self.drafter = Some(drafter);
        Ok(config)
    }

    fn draft(
        &mut self,
        requests: &[DraftRequest],
        tables: &Tables<'_>,
        want: Want,
    ) -> Result<Vec<Outputs>, Error> {
        for request in requests {
            self.check_token(request.anchor)?;
        }
        let drafter = self.drafter.as_mut().expect("an attached drafter");
        let mask = drafter.config.mask_token;
        let block = 1..drafter.config.block_size;
        let fits = requests.iter().all(|r| block.contains(&r.n_draft));
        assert!(fits, "drafts of {block:?} tokens");
        let batch = block_batch(requests, |seq| tables[seq as usize].len(), mask);
        self.be.step(&Step::new(&batch, tables))?;
        let (embd, head) = self.target.embd_and_head();
        let kv = &self.kv;
        self.be
            .run(batch.shape(), |be| drafter.block(be, kv, embd, head))?;
        let want = vec![want; batch.wanted.len()];
        let mut outputs = self.be.select(drafter.logits(), &want)?.into_iter();
        let of = |r: &DraftRequest| outputs.by_ref().take(r.n_draft).collect();
        Ok(requests.iter().map(of).collect())
    }

    fn export_page(
        &mut self,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, Error> {
        Ok(self.be.export_page(&self.kv, class, page, rows)?)
    }

    fn import_page(
        &mut self,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), Error> {
        let row_bytes = self.layout.page_bytes(class) / PAGE_ROWS;
        if data.rows > PAGE_ROWS || data.bytes.len() != data.rows * row_bytes {
            return Err(Error::PageData {
                class,
                rows: data.rows,
                found: data.bytes.len(),
                expected: data.rows * row_bytes,
            });
        }
        self.grow_to(self.layout.locate(page).0 + 1)?;
        Ok(self.be.import_page(&mut self.kv, class, page, data)?)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Error> {
        for copy in copies {
            self.grow_to(self.layout.locate(copy.to).0 + 1)?;
            let PageCopy {
                class,
                from,
                to,
                rows,
            } = *copy;
            self.be.copy_page(&mut self.kv, class, from, to, rows)?;
        }
        Ok(())
    }
}
