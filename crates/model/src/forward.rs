//! The seam between the generic model and everything above it.
//!
//! The backend's type does not leave this crate and the backends: above stands
//! `Box<dyn Forward>`, one dynamic call per pass. A model owns its target and
//! its drafter, so that the drafter uses the target's embedding and head in
//! place.

use crate::activations::{Activations, activation_bytes};
use crate::backend::{Backend, Caps, PageData};
use crate::batch::{Batch, Input, Outputs, Row, Step, Tables, Want};
use crate::config::{Architecture, Config};
use crate::drafter::{DraftRequest, Drafter, DrafterConfig, WindowConvention, block_batch};
use crate::kv::{KvLayout, KvType, PAGE_ROWS, PageClass, PageCopy, PageId};
use crate::weights::Weights;
use crate::{Error, graph_llama, graph_muse_glimmer, vocabulary_digest};
use gguf::{Files, Gguf};

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
    /// Bytes of activations once a prompt was computed in passes as large as the
    /// device takes.
    pub activation_bytes: u64,
}

impl Capacity {
    /// Bytes beside the weights, once all pages are in use.
    pub fn bytes(&self) -> u64 {
        (self.max_slabs * self.layout.slab_bytes()) as u64 + self.activation_bytes
    }
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
    /// Before anything is computed: [`Error::Gguf`] if a mapped file was cut,
    /// [`Error::TooManyRows`], [`Error::SequenceUnknown`], [`Error::Discontinuity`],
    /// [`Error::TokenUnknown`], [`Error::WantedRow`]. Then [`Error::Device`].
    ///
    /// # Panics
    /// If there is not one want for each wanted row, or a sequence has no pages
    /// for its rows.
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

    /// The numbers of the attached drafter, if there is one.
    fn drafter(&self) -> Option<&DrafterConfig> {
        None
    }

    /// Proposes a block for each request; gives back what `want` says of each
    /// proposed position, request by request.
    ///
    /// # Errors
    /// Before anything is computed: [`Error::Gguf`] as above, [`Error::DraftLength`],
    /// [`Error::DraftedTwice`], [`Error::TooManyRows`],
    /// [`Error::SequenceUnknown`], [`Error::TokenUnknown`]. Then
    /// [`Error::Device`].
    ///
    /// # Panics
    /// If no drafter is attached.
    fn draft(
        &mut self,
        requests: &[DraftRequest],
        tables: &Tables<'_>,
        want: Want,
    ) -> Result<Vec<Outputs>, Error>;

    /// The first `rows` rows of a page, in canonical form. Rows that no pass
    /// has written hold anything.
    ///
    /// # Errors
    /// [`Error::PageUnknown`], [`Error::PageRows`], [`Error::Device`].
    fn export_page(
        &mut self,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, Error>;

    /// Fills a page from its canonical form.
    ///
    /// # Errors
    /// [`Error::PageUnknown`]; [`Error::PageData`] if the data does not have the
    /// rows it claims; [`Error::Device`].
    fn import_page(&mut self, class: PageClass, page: PageId, data: &PageData)
    -> Result<(), Error>;

    /// Carries out copies of partly filled pages.
    ///
    /// # Errors
    /// [`Error::PageUnknown`], [`Error::PageRows`], [`Error::Device`]; the target
    /// pages hold anything then.
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
    /// Where the weights lie: of the target, then of the drafter.
    files: Vec<Files>,
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
            files: vec![file.files().clone()],
            n_slabs: 0,
        })
    }

    /// The device, for probes and measurements.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.be
    }

    /// Checks a batch against the sequences it extends.
    fn check(&self, batch: &Batch, tables: &Tables<'_>, want: &[Want]) -> Result<(), Error> {
        assert_eq!(batch.wanted.len(), want.len(), "one want per wanted row");
        self.check_rows(batch, tables)?;
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

    /// Checks that the weights are still all there.
    fn check_files(&self) -> Result<(), Error> {
        Ok(self.files.iter().try_for_each(Files::check)?)
    }

    /// Checks what holds for the rows of any pass.
    fn check_rows(&self, batch: &Batch, tables: &Tables<'_>) -> Result<(), Error> {
        let (n_vocab, n_sequences) = (self.config.n_vocab, tables.len());
        let (rows, most) = (batch.rows.len(), self.be.caps().max_rows);
        if rows > most {
            return Err(Error::TooManyRows { found: rows, most });
        }
        for &Row { input, seq, .. } in &batch.rows {
            if seq as usize >= n_sequences {
                return Err(Error::SequenceUnknown { seq, n_sequences });
            }
            let Input::Token(token) = input;
            if token as usize >= n_vocab {
                return Err(Error::TokenUnknown { token, n_vocab });
            }
        }
        let mut least = 0;
        for &found in &batch.wanted {
            if found < least || found as usize >= rows {
                return Err(Error::WantedRow { found, rows });
            }
            least = found + 1;
        }
        Ok(())
    }

    /// Refuses a page that no pool over this model's capacity gives out.
    fn check_page(&self, class: PageClass, page: PageId) -> Result<(), Error> {
        let (slab, place) = self.layout.locate(page);
        let is_page = place < self.layout.pages_per_slab(class);
        if is_page && slab < self.capacity().max_slabs {
            return Ok(());
        }
        Err(Error::PageUnknown { class, page })
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
        let drafter = self.drafter.as_ref().map(|drafter| &drafter.config);
        Capacity {
            layout: self.layout,
            max_slabs: (self.options.kv_bytes / slab_bytes) as usize,
            activation_bytes: activation_bytes(&self.config, self.be.caps().max_rows, 1)
                + drafter.map_or(0, |d| d.activation_bytes(self.be.caps().max_rows)),
        }
    }

    fn pass(
        &mut self,
        batch: &Batch,
        tables: &Tables<'_>,
        want: &[Want],
    ) -> Result<Outputs, Error> {
        self.check_files()?;
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
        let layout = self.layout.with_drafter(&config);
        self.kv = self.be.alloc_kv(&layout)?;
        self.layout = layout;
        self.drafter = Some(drafter);
        self.files.push(file.files().clone());
        Ok(config)
    }

    fn drafter(&self) -> Option<&DrafterConfig> {
        self.drafter.as_ref().map(|drafter| &drafter.config)
    }

    fn draft(
        &mut self,
        requests: &[DraftRequest],
        tables: &Tables<'_>,
        want: Want,
    ) -> Result<Vec<Outputs>, Error> {
        let drafter = self.drafter.as_ref().expect("an attached drafter");
        let batch = block_batch(requests, tables, &drafter.config)?;
        self.check_rows(&batch, tables)?;
        self.check_files()?;
        self.be.step(&Step::new(&batch, tables))?;
        let (embd, head) = self.target.embd_and_head();
        let (kv, drafter) = (
            &self.kv,
            self.drafter.as_mut().expect("an attached drafter"),
        );
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
        self.check_page(class, page)?;
        if rows > PAGE_ROWS {
            return Err(Error::PageRows { class, rows });
        }
        self.grow_to(self.layout.locate(page).0 + 1)?;
        Ok(self.be.export_page(&self.kv, class, page, rows)?)
    }

    fn import_page(
        &mut self,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), Error> {
        self.check_page(class, page)?;
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
        for &PageCopy {
            class,
            from,
            to,
            rows,
        } in copies
        {
            self.check_page(class, from)?;
            self.check_page(class, to)?;
            if rows > PAGE_ROWS {
                return Err(Error::PageRows { class, rows });
            }
            self.grow_to(self.layout.locate(from.max(to)).0 + 1)?;
            self.be.copy_page(&mut self.kv, class, from, to, rows)?;
        }
        Ok(())
    }
}
