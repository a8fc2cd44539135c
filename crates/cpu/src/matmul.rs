//! Products of activations with a weight matrix that stays in the mapped file.
//!
//! `out[r][j] = sum_k w[j][k] * x[r][k]`, in the canonical arithmetic: the bits
//! of an output depend on its weight row and its activation row alone, not on
//! the instruction set, on other rows or on how the work is split.

use crate::activation::{ActivationKind, Activations};
use crate::isa::Isa;
use crate::lanes::Available;
use crate::quant::{Rows, Scratch};
use crate::{dot, quant};
use gguf::quant::decoder;
use gguf::{Bytes, TensorType, TensorView};
use model::DeviceError;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

/// Output rows are computed in tiles of this many; split work at multiples.
pub const TILE_ROWS: usize = 16;

/// Where products write: `[n_rows, stride]` f32 that several threads fill, each
/// its own columns.
#[derive(Clone, Copy)]
pub struct OutColumns<'a> {
    start: *mut f32,
    len: usize,
    stride: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: writing through it is unsafe, and callers promise disjoint columns.
unsafe impl Send for OutColumns<'_> {}
// SAFETY: as above.
unsafe impl Sync for OutColumns<'_> {}

impl<'a> OutColumns<'a> {
    /// All of `out`, in rows of `stride` elements.
    pub fn new(out: &'a mut [f32], stride: usize) -> OutColumns<'a> {
        OutColumns {
            start: out.as_mut_ptr(),
            len: out.len(),
            stride,
            lifetime: PhantomData,
        }
    }

    /// Writes `values` at column `col` of row `row`.
    ///
    /// # Safety
    /// No other thread reads or writes these elements meanwhile.
    pub(crate) unsafe fn write(&self, row: usize, col: usize, values: &[f32]) {
        let at = row * self.stride + col;
        assert!(col + values.len() <= self.stride && at + values.len() <= self.len);
        // SAFETY: inside the buffer, as just checked.
        let to = unsafe { self.start.add(at) };
        // SAFETY: `values` is initialized and does not overlap the buffer, which
        // the caller keeps to itself.
        unsafe { to.copy_from_nonoverlapping(values.as_ptr(), values.len()) }
    }

    /// As [`OutColumns::write`], for a whole line of 16: without a call.
    ///
    /// # Safety
    /// As for [`OutColumns::write`].
    #[inline(always)]
    pub(crate) unsafe fn write_line(&self, row: usize, col: usize, values: &[f32; 16]) {
        let at = row * self.stride + col;
        assert!(col + 16 <= self.stride && at + 16 <= self.len);
        // SAFETY: inside the buffer, as just checked.
        let to = unsafe { self.start.add(at) };
        // SAFETY: nobody else uses these elements, as promised.
        unsafe { to.cast::<[f32; 16]>().write_unaligned(*values) }
    }

    /// The elements `cols` of row `row`.
    ///
    /// # Safety
    /// No other thread reads or writes them meanwhile, and no other part that
    /// is in use overlaps this one.
    #[allow(clippy::mut_from_ref)] // that is what the caller's promise is about
    pub(crate) unsafe fn part(&self, row: usize, cols: Range<usize>) -> &mut [f32] {
        let at = row * self.stride + cols.start;
        assert!(cols.end <= self.stride && at + cols.len() <= self.len);
        // SAFETY: inside the buffer, as just checked.
        let start = unsafe { self.start.add(at) };
        // SAFETY: initialized, and the caller keeps it to itself.
        unsafe { std::slice::from_raw_parts_mut(start, cols.len()) }
    }
}

/// A weight matrix, `[n_rows, cols]`, as it lies in the file.
pub struct Matrix {
    ty: TensorType,
    n_rows: usize,
    cols: usize,
    row_bytes: usize,
    isa: Available,
    /// The rows in the file.
    data: Bytes,
    /// A matrix of fewer rows than a tile, filled up with zeros.
    padded: Option<Vec<u8>>,
}

thread_local! {
    /// Every thread's own buffers: they grow to the largest product and stay.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Matrix {
    /// The matrix of a tensor; dimensions beyond the first are its rows.
    ///
    /// # Errors
    /// [`DeviceError::UnsupportedType`] for integer tensors and for rows of 128
    /// MiB and more.
    ///
    /// # Panics
    /// If the machine has not `isa`.
    pub fn new(view: &TensorView, isa: Isa) -> Result<Matrix, DeviceError> {
        use TensorType::{I8, I16, I32, I64};
        let ty = view.ty;
        let cols = view.shape.first().copied().unwrap_or(1);
        let row_bytes = ty.row_bytes(cols).unwrap_or(0) as usize;
        let is_integer = matches!(ty, I8 | I16 | I32 | I64);
        if is_integer || row_bytes == 0 || row_bytes > Rows::MAX_ROW_BYTES {
            return Err(DeviceError::UnsupportedType {
                name: view.name.clone(),
                ty,
            });
        }
        let n_rows = view.data.len() / row_bytes;
        let padded = (n_rows < TILE_ROWS && quant::has_kernel(ty)).then(|| {
            let mut rows = view.data.to_vec();
            rows.resize(TILE_ROWS * row_bytes, 0);
            rows
        });
        let isa = Available::new(isa);
        Ok(Matrix {
            ty,
            n_rows,
            cols: cols as usize,
            row_bytes,
            isa: isa.expect("an instruction set of this machine"),
            data: view.data.clone(),
            padded,
        })
    }

    /// Output rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The encoding.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// The form in which it wants its activations.
    pub fn activation_kind(&self) -> ActivationKind {
        match self.ty.block_len() {
            256 if quant::has_kernel(self.ty) => ActivationKind::Int8Per256,
            32 if quant::has_kernel(self.ty) => ActivationKind::Int8Per32,
            _ => ActivationKind::F32,
        }
    }

    /// Bytes that one product reads.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Decodes row `index` to `out`, `[cols]` f32.
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    pub fn decode_row(&self, index: usize, out: &mut [f32]) {
        let bytes = &self.data[index * self.row_bytes..][..self.row_bytes];
        decoder(self.ty)(bytes, out);
    }

    /// `out[r][j] = sum_k w[j][k] * x[r][k]` for the output rows `j` in `rows`
    /// and all rows `r` of `x`. Fast if `rows` starts and ends at a multiple of
    /// [`TILE_ROWS`] or at the end. Allocates only while a thread's buffers grow.
    ///
    /// # Panics
    /// If `x` has another kind or row length than the matrix wants.
    ///
    /// # Safety
    /// No other thread reads or writes the columns `rows` of `out` meanwhile.
    pub unsafe fn multiply(&self, x: &Activations, rows: Range<usize>, out: &OutColumns<'_>) {
        assert_eq!(x.kind(), self.activation_kind(), "{} activations", self.ty);
        assert_eq!(x.cols(), self.cols, "columns of a product");
        assert!(rows.end <= self.n_rows, "rows {rows:?} of {}", self.n_rows);
        if rows.is_empty() || x.n_rows() == 0 {
            return;
        }
        SCRATCH.with_borrow_mut(|scratch| {
            if x.kind() == ActivationKind::F32 {
                let job = dot::Job {
                    ty: self.ty,
                    weights: &self.data,
                    row_bytes: self.row_bytes,
                    cols: self.cols,
                    rows,
                    x: x.rows(),
                    out: *out,
                };
                return dot::multiply(self.isa, &job, scratch);
            }
            let job = quant::Job {
                weights: self.padded.as_deref().unwrap_or(&self.data),
                row_bytes: self.row_bytes,
                rows,
                x,
                out: *out,
            };
            quant::multiply(self.isa, self.ty, &job, scratch);
        });
    }

    /// The whole product on this thread; `out` is `[x.n_rows(), n_rows]`.
    pub fn multiply_all(&self, x: &Activations, out: &mut [f32]) {
        let out = OutColumns::new(out, self.n_rows);
        // SAFETY: `out` is borrowed mutably by this call.
        unsafe { self.multiply(x, 0..self.n_rows, &out) }
    }
}
