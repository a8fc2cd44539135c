//! The memory of keys and values: slabs of pages, each page in its canonical form,
//! `[layer][K, V][row][head][dim]`.
//!
//! What a reader would get wrong: kernels find a page by its id through a table of
//! the slabs' addresses that lies on the device, so new slabs change no recorded
//! launch.

use crate::driver::{Context, Memory, Pinned, Stream};
use model::backend::{KvLayer, PageData};
use model::kv::KvLayout;
use model::{DeviceError, KvType, PAGE_ROWS, PageClass, PageId};
use std::sync::Arc;

/// Slabs that a new table has room for.
const FIRST_ROOM: usize = 1024;

/// Slabs of pages.
pub struct Kv {
    pub(crate) layout: KvLayout,
    slabs: Vec<Memory>,
    /// Addresses of the slabs, on the device and as uploaded last.
    table: Option<(Memory, Pinned)>,
}

/// What a kernel needs to find a layer's keys and values; kernels/common.cuh has the same.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    slabs: u64,
    pages: u64,
    page_bytes: u64,
    per_slab: u32,
    class_index: u32,
    layer: u32,
    n_kv: u32,
}

impl Kv {
    pub(crate) fn new(layout: &KvLayout) -> Kv {
        Kv {
            layout: *layout,
            slabs: Vec::new(),
            table: None,
        }
    }

    /// Makes sure that `n_slabs` slabs exist. Gives whether the table of slabs moved. The stream must have passed
    /// everything before.
    pub(crate) fn grow(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        n_slabs: usize,
    ) -> Result<bool, DeviceError> {
        if n_slabs <= self.slabs.len() {
            return Ok(false);
        }
        let bytes = self.layout.slab_bytes();
        let mut grown = Ok(());
        while self.slabs.len() < n_slabs && grown.is_ok() {
            grown = Memory::new(context, "keys and values", bytes).and_then(|slab| {
                stream.clear(slab.address(), bytes)?;
                self.slabs.push(slab);
                Ok(())
            });
        }
        let room = self
            .table
            .as_ref()
            .map_or(0, |(memory, _)| memory.bytes() / 8);
        let has_moved = self.slabs.len() > room;
        if has_moved {
            let bytes = 8 * self.slabs.len().next_power_of_two().max(FIRST_ROOM);
            self.table = None;
            let memory = Memory::new(context, "the table of slabs", bytes)?;
            self.table = Some((memory, Pinned::new(context, bytes)?));
        }
        if let Some((memory, pinned)) = &mut self.table {
            let entries = pinned.as_mut_slice().as_chunks_mut::<8>().0.iter_mut();
            for (entry, slab) in entries.zip(&self.slabs) {
                *entry = slab.address().to_le_bytes();
            }
            stream.upload(memory.address(), pinned, 8 * self.slabs.len())?;
        }
        grown?;
        Ok(has_moved)
    }

    /// How a kernel finds `layer`; `pages` are the page ids of the step.
    pub(crate) fn place(&self, layer: KvLayer, pages: u64) -> Place {
        let class = self.layout.classes[layer.class as usize];
        Place {
            slabs: self
                .table
                .as_ref()
                .map_or(0, |(memory, _)| memory.address()),
            pages,
            page_bytes: self.layout.page_bytes(layer.class) as u64,
            per_slab: self.per_slab() as u32,
            class_index: layer.class as u32,
            layer: layer.index as u32,
            n_kv: (class.n_head_kv * class.head_dim) as u32,
        }
    }

    /// Is an element stored as f16?
    pub(crate) fn is_half(&self) -> bool {
        self.layout.ty == KvType::F16
    }

    /// Page ids of a slab.
    fn per_slab(&self) -> usize {
        let pages = PageClass::ALL.map(|class| self.layout.pages_per_slab(class));
        pages.into_iter().max().unwrap_or(0).max(1)
    }

    /// Address and length of the first `rows` rows of each half of each layer of a page, in canonical order.
    fn stretches(
        &self,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> impl Iterator<Item = (u64, usize)> + use<> {
        let layout = self.layout.classes[class as usize];
        let (slab, index) = self.layout.locate(page);
        let start = self.slabs[slab].address() + (index * self.layout.page_bytes(class)) as u64;
        let row_bytes = layout.n_head_kv * layout.head_dim * self.layout.ty.bytes();
        let stretch = move |half| {
            (
                start + (half * PAGE_ROWS * row_bytes) as u64,
                rows * row_bytes,
            )
        };
        (0..2 * layout.n_layer).map(stretch)
    }

    pub(crate) fn export(
        &self,
        stream: &Stream,
        class: PageClass,
        page: PageId,
        rows: usize,
    ) -> Result<PageData, DeviceError> {
        let mut bytes = Vec::new();
        for (from, len) in self.stretches(class, page, rows) {
            bytes.extend(stream.download(from, len)?);
        }
        Ok(PageData { rows, bytes })
    }

    pub(crate) fn import(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        class: PageClass,
        page: PageId,
        data: &PageData,
    ) -> Result<(), DeviceError> {
        let wanted = self.layout.page_bytes(class) / PAGE_ROWS * data.rows;
        assert_eq!(data.bytes.len(), wanted, "bytes of {} rows", data.rows);
        let mut pinned = Pinned::new(context, data.bytes.len())?;
        pinned.as_mut_slice().copy_from_slice(&data.bytes);
        let staging = Memory::new(context, "a page on its way", data.bytes.len())?;
        stream.upload(staging.address(), &pinned, data.bytes.len())?;
        let mut at = staging.address();
        for (to, len) in self.stretches(class, page, data.rows) {
            stream.copy(to, at, len)?;
            at += len as u64;
        }
        // The staging memory ends here.
        Ok(stream.finish()?)
    }

    pub(crate) fn copy(
        &mut self,
        stream: &Stream,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let pairs = self
            .stretches(class, from, rows)
            .zip(self.stretches(class, to, rows));
        for ((from, len), (to, _)) in pairs {
            stream.copy(to, from, len)?;
        }
        Ok(())
    }
}
