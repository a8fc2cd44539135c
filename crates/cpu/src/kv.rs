//! The memory of keys and values, as attention reads it.
//!
//! A page is `[layer][K, V]`; keys lie `[head][16 keys][dim]` with 16
//! neighbouring keys innermost, so that 16 scores are computed at once without
//! moving lanes; values lie `[head][row][dim]`. A head's dims are padded to a
//! multiple of 16; the pad of a stored key is 0. The canonical form of a page
//! ([`PageData`]) is another: export and import convert.

use crate::lanes::{Available, Kernel, LANES, Lanes};
use memmap2::MmapMut;
use model::backend::{KvLayer, PageData};
use model::kv::{ClassLayout, KvLayout};
use model::{DeviceError, KvType, PAGE_ROWS, PageClass, PageId};
use std::ops::Range;

/// Keys and values of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Keys = 0,
    Values = 1,
}

/// An element of a page.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    /// The element type as the layout names it.
    const TYPE: KvType;
    fn load<L: Lanes>(l: L, x: &[Self; LANES]) -> L::V;
    /// Rounded to the element type, ties to even.
    fn store<L: Lanes>(l: L, v: L::V, to: &mut [Self; LANES]);
    fn to_bytes(self, out: &mut Vec<u8>);
    fn from_bytes(bytes: &[u8]) -> Self;
}

impl Element for f32 {
    const TYPE: KvType = KvType::F32;

    #[inline(always)]
    fn load<L: Lanes>(l: L, x: &[f32; LANES]) -> L::V {
        l.load(x)
    }

    #[inline(always)]
    fn store<L: Lanes>(l: L, v: L::V, to: &mut [f32; LANES]) {
        l.store(v, to);
    }

    fn to_bytes(self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }

    fn from_bytes(bytes: &[u8]) -> f32 {
        f32::from_le_bytes(bytes.try_into().expect("four bytes"))
    }
}

/// The bits of a half.
impl Element for u16 {
    const TYPE: KvType = KvType::F16;

    #[inline(always)]
    fn load<L: Lanes>(l: L, x: &[u16; LANES]) -> L::V {
        l.load_f16(x)
    }

    #[inline(always)]
    fn store<L: Lanes>(l: L, v: L::V, to: &mut [u16; LANES]) {
        l.store_f16(v, to);
    }

    fn to_bytes(self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }

    fn from_bytes(bytes: &[u8]) -> u16 {
        u16::from_le_bytes(bytes.try_into().expect("two bytes"))
    }
}

/// Zeroed memory on a page's boundary. The system gives it when it is first
/// written, in large pages where it can: attention walks all of it.
struct Memory {
    map: MmapMut,
    /// Start of the map, for writing from several threads.
    start: *mut u8,
}

// SAFETY: `start` points to the map, which the value owns.
unsafe impl Send for Memory {}
// SAFETY: shared references only read, but for `Writer`, which says why it may.
unsafe impl Sync for Memory {}

impl Memory {
    fn zeroed(bytes: usize) -> Result<Memory, DeviceError> {
        let map = MmapMut::map_anon(bytes.max(1));
        let mut map = map.map_err(|_| DeviceError::OutOfMemory {
            what: "keys and values",
            wanted_bytes: bytes as u64,
        })?;
        #[cfg(target_os = "linux")]
        // Only a wish: without large pages it is slower, not wrong.
        map.advise(memmap2::Advice::HugePage).ok();
        let start = map.as_mut_ptr();
        Ok(Memory { map, start })
    }

    /// The memory as elements.
    fn elements<T: Element>(&self) -> &[T] {
        // SAFETY: every bit pattern is an element.
        let (before, elements, _) = unsafe { self.map.align_to::<T>() };
        assert!(before.is_empty(), "a map starts at a page");
        elements
    }

    fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: as above.
        let (before, elements, _) = unsafe { self.map.align_to_mut::<T>() };
        assert!(before.is_empty(), "a map starts at a page");
        elements
    }
}

/// Slabs of pages.
pub struct Kv {
    layout: KvLayout,
    slabs: Vec<Memory>,
}

/// Dims of a head with its pad.
pub(crate) fn padded_dim(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

/// Elements of the keys or values of one head in a page.
fn head_elements(class: &ClassLayout) -> usize {
    PAGE_ROWS * padded_dim(class.head_dim)
}

impl Kv {
    pub(crate) fn new(layout: &KvLayout) -> Kv {
        Kv {
            layout: *layout,
            slabs: Vec::new(),
        }
    }

    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub(crate) fn class(&self, class: PageClass) -> &ClassLayout {
        &self.layout.classes[class as usize]
    }

    /// Bytes of all slabs.
    pub(crate) fn bytes(&self) -> usize {
        self.slabs.iter().map(|s| s.map.len()).sum()
    }

    /// Makes sure that the first `n_slabs` slabs exist.
    pub(crate) fn grow(&mut self, n_slabs: usize) -> Result<(), DeviceError> {
        let class_elements = |class: PageClass| {
            let layout = self.class(class);
            let page = layout.n_layer * 2 * layout.n_head_kv * head_elements(layout);
            page * self.layout.pages_per_slab(class)
        };
        let elements = PageClass::ALL.map(class_elements).into_iter().max();
        let bytes = elements.unwrap_or(0) * self.layout.ty.bytes();
        while self.slabs.len() < n_slabs {
            self.slabs.push(Memory::zeroed(bytes)?);
        }
        Ok(())
    }

    /// Slab and elements of the keys or values of one head of a layer in a page.
    fn locate(
        &self,
        layer: KvLayer,
        half: Half,
        page: PageId,
        head: usize,
    ) -> (usize, Range<usize>) {
        let class = self.class(layer.class);
        assert!(
            head < class.n_head_kv && layer.index < class.n_layer,
            "head {head} of layer {} of the {} class",
            layer.index,
            layer.class
        );
        let (slab, index) = self.layout.locate(page);
        let n = head_elements(class);
        let half = ((index * class.n_layer + layer.index) * 2 + half as usize) * class.n_head_kv;
        let start = (half + head) * n;
        (slab, start..start + n)
    }

    /// The keys or values of one head of a layer in a page.
    pub(crate) fn head<T: Element>(
        &self,
        layer: KvLayer,
        half: Half,
        page: PageId,
        head: usize,
    ) -> &[T] {
        assert!(T::TYPE == self.layout.ty, "elements are {}", self.layout.ty);
        let (slab, range) = self.locate(layer, half, page, head);
        &self.slabs[slab].elements::<T>()[range]
    }

    fn head_mut<T: Element>(
        &mut self,
        layer: KvLayer,
        half: Half,
        page: PageId,
        head: usize,
    ) -> &mut [T] {
        assert!(T::TYPE == self.layout.ty, "elements are {}", self.layout.ty);
        let (slab, range) = self.locate(layer, half, page, head);
        &mut self.slabs[slab].elements_mut::<T>()[range]
    }

    /// For storing from several threads, each its own heads.
    pub(crate) fn writer(&mut self) -> Writer<'_> {
        Writer { kv: self }
    }

    /// The first `rows` rows of a page: `[layer][K, V][row][head][dim]`.
    pub(crate) fn export(&self, class: PageClass, page: PageId, rows: usize) -> PageData {
        let bytes = match self.layout.ty {
            KvType::F16 => self.export_elements::<u16>(class, page, rows),
            KvType::F32 => self.export_elements::<f32>(class, page, rows),
        };
        PageData { rows, bytes }
    }

    fn export_elements<T: Element>(&self, class: PageClass, page: PageId, rows: usize) -> Vec<u8> {
        let mut out = Vec::new();
        let ClassLayout {
            n_layer,
            n_head_kv,
            head_dim,
            ..
        } = *self.class(class);
        for index in 0..n_layer {
            let layer = KvLayer { class, index };
            for half in [Half::Keys, Half::Values] {
                for row in 0..rows {
                    for head in 0..n_head_kv {
                        let data = self.head::<T>(layer, half, page, head);
                        for dim in 0..head_dim {
                            data[place(half, head_dim, row, dim)].to_bytes(&mut out);
                        }
                    }
                }
            }
        }
        out
    }

    /// Fills the first rows of a page from the canonical form.
    ///
    /// # Panics
    /// If the data is not as long as its rows and the layout say.
    pub(crate) fn import(&mut self, class: PageClass, page: PageId, data: &PageData) {
        let wanted = self.layout.page_bytes(class) / PAGE_ROWS * data.rows;
        assert_eq!(data.bytes.len(), wanted, "bytes of {} rows", data.rows);
        assert!(data.rows <= PAGE_ROWS, "{} rows of a page", data.rows);
        match self.layout.ty {
            KvType::F16 => self.import_elements::<u16>(class, page, data),
            KvType::F32 => self.import_elements::<f32>(class, page, data),
        }
    }

    fn import_elements<T: Element>(&mut self, class: PageClass, page: PageId, data: &PageData) {
        let ClassLayout {
            n_layer,
            n_head_kv,
            head_dim,
            ..
        } = *self.class(class);
        let mut from = data.bytes.chunks_exact(size_of::<T>());
        for index in 0..n_layer {
            let layer = KvLayer { class, index };
            for half in [Half::Keys, Half::Values] {
                for row in 0..data.rows {
                    for head in 0..n_head_kv {
                        let to = self.head_mut::<T>(layer, half, page, head);
                        for (dim, bytes) in (0..head_dim).zip(&mut from) {
                            to[place(half, head_dim, row, dim)] = T::from_bytes(bytes);
                        }
                        zero_pad(to, half, head_dim, row);
                    }
                }
            }
        }
    }

    /// Copies the first `rows` rows of page `from` to page `to`.
    pub(crate) fn copy(&mut self, class: PageClass, from: PageId, to: PageId, rows: usize) {
        match self.layout.ty {
            KvType::F16 => self.copy_elements::<u16>(class, from, to, rows),
            KvType::F32 => self.copy_elements::<f32>(class, from, to, rows),
        }
    }

    fn copy_elements<T: Element>(
        &mut self,
        class: PageClass,
        from: PageId,
        to: PageId,
        rows: usize,
    ) {
        let ClassLayout {
            n_layer,
            n_head_kv,
            head_dim,
            ..
        } = *self.class(class);
        let dim = padded_dim(head_dim);
        let whole = rows / LANES * LANES;
        for index in 0..n_layer {
            let layer = KvLayer { class, index };
            for head in 0..n_head_kv {
                let keys = self.head::<T>(layer, Half::Keys, from, head).to_vec();
                let out = self.head_mut::<T>(layer, Half::Keys, to, head);
                out[..whole * dim].copy_from_slice(&keys[..whole * dim]);
                for row in whole..rows {
                    for d in 0..dim {
                        let at = place(Half::Keys, head_dim, row, d);
                        out[at] = keys[at];
                    }
                }
                let values = self.head::<T>(layer, Half::Values, from, head)[..rows * dim].to_vec();
                self.head_mut::<T>(layer, Half::Values, to, head)[..rows * dim]
                    .copy_from_slice(&values);
            }
        }
    }
}

/// Index of an element among the keys or values of a head in a page.
#[inline(always)]
pub(crate) fn place(half: Half, head_dim: usize, row: usize, dim: usize) -> usize {
    let padded = padded_dim(head_dim);
    match half {
        Half::Keys => (row / LANES * padded + dim) * LANES + row % LANES,
        Half::Values => row * padded + dim,
    }
}

/// The pad of a key may hold what another class left there, which must not
/// reach a score.
fn zero_pad<T: Element>(to: &mut [T], half: Half, head_dim: usize, row: usize) {
    if half == Half::Keys {
        for dim in head_dim..padded_dim(head_dim) {
            to[place(half, head_dim, row, dim)] = T::default();
        }
    }
}

/// Stores rows from several threads, each its own heads and halves.
pub(crate) struct Writer<'a> {
    kv: &'a mut Kv,
}

// SAFETY: through a shared `Writer` only `Writer::store` writes, whose callers
// promise that no two threads store to the same head and half.
unsafe impl Sync for Writer<'_> {}

impl Writer<'_> {
    /// Stores one head's keys or values of a row.
    ///
    /// # Safety
    /// No other thread stores to the same head and half meanwhile, whatever the
    /// page and row.
    pub(crate) unsafe fn store(
        &self,
        machine: Available,
        layer: KvLayer,
        half: Half,
        (page, slot): (PageId, usize),
        head: usize,
        x: &[f32],
    ) {
        let head_dim = self.kv.class(layer.class).head_dim;
        assert_eq!(x.len(), head_dim, "elements of a head");
        let (slab, range) = self.kv.locate(layer, half, page, head);
        let memory = &self.kv.slabs[slab];
        let element_bytes = self.kv.layout.ty.bytes();
        assert!(range.end * element_bytes <= memory.map.len() && slot < PAGE_ROWS);
        match self.kv.layout.ty {
            KvType::F16 => {
                // SAFETY: the range lies inside the slab, as just checked.
                let start = unsafe { memory.start.cast::<u16>().add(range.start) };
                // SAFETY: initialized; heads and halves are disjoint ranges, and
                // this thread alone has this one, as promised.
                let to = unsafe { std::slice::from_raw_parts_mut(start, range.len()) };
                store_row(machine, to, half, slot, x);
            }
            KvType::F32 => {
                // SAFETY: the range lies inside the slab, as checked above.
                let start = unsafe { memory.start.cast::<f32>().add(range.start) };
                // SAFETY: as for halves.
                let to = unsafe { std::slice::from_raw_parts_mut(start, range.len()) };
                store_row(machine, to, half, slot, x);
            }
        }
    }
}

/// Stores a row among the keys or values of its head.
pub(crate) fn store_row<T: Element>(
    machine: Available,
    to: &mut [T],
    half: Half,
    slot: usize,
    x: &[f32],
) {
    machine.run(StoreRow { to, half, slot, x });
}

struct StoreRow<'a, T> {
    to: &'a mut [T],
    half: Half,
    slot: usize,
    x: &'a [f32],
}

impl<T: Element> Kernel for StoreRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let StoreRow { to, half, slot, x } = self;
        let mut part = [T::default(); LANES];
        for first in (0..x.len()).step_by(LANES) {
            let n = LANES.min(x.len() - first);
            T::store(l, l.load_part(&x[first..first + n]), &mut part);
            match half {
                Half::Keys => {
                    for i in 0..LANES {
                        to[place(half, x.len(), slot, first + i)] = part[i];
                    }
                }
                Half::Values => {
                    let at = place(half, x.len(), slot, first);
                    to[at..at + LANES].copy_from_slice(&part);
                }
            }
        }
    }
}
