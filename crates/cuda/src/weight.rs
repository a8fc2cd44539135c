//! Weights on the device: block-encoded ones in tiles (kernels/quant), others as
//! they lie in the file.
//!
//! Encodings without kernels are decoded to F32 on the way. What a reader would
//! get wrong: the rows of a tiled matrix are padded with zeros to whole pairs of
//! tiles, which are computed and never stored.

use crate::compile::{self, Element};
use crate::device::Cuda;
use crate::device::arguments;
use crate::driver::{Grid, Memory, Pinned};
use gguf::{TensorType, TensorView, quant};
use model::DeviceError;

/// Rows of a padded matrix come in multiples of this: two tiles, which one warp may take together.
pub(crate) const PADDED_ROWS: usize = 32;

/// Bytes that are on their way at a time.
const STAGING_BYTES: usize = 16 << 20;

/// How a matrix lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Tiles of 16 rows of blocks of this encoding.
    Tiles(TensorType),
    /// Row after row.
    Rows(Element),
}

/// A loaded tensor.
pub struct Weight {
    pub(crate) layout: Layout,
    pub(crate) n_rows: usize,
    pub(crate) cols: usize,
    pub(crate) memory: Memory,
    /// The elements of a one-row tensor (norms and biases) as f32.
    vector: Option<Memory>,
}

impl Weight {
    /// Blocks of a row of a tiled matrix.
    pub(crate) fn n_blocks(&self, ty: TensorType) -> usize {
        self.cols / ty.block_len()
    }

    /// Where the elements of a one-row tensor lie.
    ///
    /// # Panics
    /// If it has several rows.
    pub(crate) fn vector(&self) -> u64 {
        self.vector.as_ref().expect("a tensor of one row").address()
    }
}

/// Memory on the way to the device.
pub(crate) struct Staging {
    pinned: Pinned,
    memory: Memory,
}

/// How a tensor of this encoding lies on the device; `None` for integers.
pub(crate) fn layout_of(ty: TensorType) -> Option<Layout> {
    use TensorType::{BF16, F16, I8, I16, I32, I64};
    match ty {
        I8 | I16 | I32 | I64 => None,
        F16 => Some(Layout::Rows(Element::F16)),
        BF16 => Some(Layout::Rows(Element::BF16)),
        ty if compile::has_format(ty) => Some(Layout::Tiles(ty)),
        _ => Some(Layout::Rows(Element::F32)),
    }
}

impl Cuda {
    /// Loads a tensor.
    pub(crate) fn load_weight(&mut self, tensor: &TensorView) -> Result<Weight, DeviceError> {
        let unsupported = || DeviceError::UnsupportedType {
            name: tensor.name.clone(),
            ty: tensor.ty,
        };
        let layout = layout_of(tensor.ty).ok_or_else(unsupported)?;
        let cols = tensor.shape.first().copied().unwrap_or(1);
        let row_bytes = tensor.ty.row_bytes(cols).unwrap_or(0) as usize;
        if row_bytes == 0 || cols > u64::from(u32::MAX) {
            return Err(unsupported());
        }
        let (cols, n_rows) = (cols as usize, tensor.data.len() / row_bytes);
        if n_rows > u32::MAX as usize - PADDED_ROWS {
            return Err(unsupported());
        }
        let memory = match layout {
            Layout::Tiles(ty) => self.upload_tiles(ty, cols, n_rows, &tensor.data)?,
            Layout::Rows(Element::F32) if tensor.ty != TensorType::F32 => {
                self.upload_decoded(tensor.ty, cols, n_rows, &tensor.data)?
            }
            Layout::Rows(_) => {
                let memory = Memory::new(&self.context, "weights", tensor.data.len())?;
                self.upload(memory.address(), &tensor.data)?;
                memory
            }
        };
        if let Layout::Rows(element) = layout {
            self.float_kernels(element)?;
        }
        let vector = match n_rows {
            1 => Some(self.upload_decoded(tensor.ty, cols, 1, &tensor.data)?),
            _ => None,
        };
        Ok(Weight {
            layout,
            n_rows,
            cols,
            memory,
            vector,
        })
    }

    /// Rows of blocks, laid out anew on the device.
    fn upload_tiles(
        &mut self,
        ty: TensorType,
        cols: usize,
        n_rows: usize,
        data: &[u8],
    ) -> Result<Memory, DeviceError> {
        let pack = self.product_kernels(ty)?.pack_tiles;
        let n_blocks = cols / ty.block_len();
        let row_bytes = n_blocks * ty.block_bytes();
        let padded = n_rows.next_multiple_of(PADDED_ROWS);
        let memory = Memory::new(&self.context, "weights", padded * row_bytes)?;
        let rows_at_once = (STAGING_BYTES / row_bytes).max(1);
        let mut first = 0;
        while first < padded {
            let end = padded.min(first + rows_at_once);
            let real = n_rows.clamp(first, end) - first;
            let staged = self.stage(&data[first * row_bytes..(first + real) * row_bytes])?;
            let threads = (end - first) * n_blocks;
            let grid = Grid {
                blocks: [threads.div_ceil(128) as u32, 1, 1],
                threads: 128,
                shared: 0,
            };
            let sizes = [first as u32, n_rows as u32, n_blocks as u32, end as u32];
            let [first_row, n_rows, n_blocks, end_row] = sizes;
            self.launch_alone(
                pack,
                grid,
                arguments![
                    memory.address(),
                    staged,
                    first_row,
                    n_rows,
                    n_blocks,
                    end_row
                ],
            );
            self.stream.finish()?;
            first = end;
        }
        self.take_failure()?;
        Ok(memory)
    }

    /// Rows of any encoding, decoded to f32 here.
    fn upload_decoded(
        &mut self,
        ty: TensorType,
        cols: usize,
        n_rows: usize,
        data: &[u8],
    ) -> Result<Memory, DeviceError> {
        let decode = quant::decoder(ty);
        let memory = Memory::new(&self.context, "weights", n_rows * cols * 4)?;
        let row_bytes = data.len() / n_rows.max(1);
        let rows_at_once = (STAGING_BYTES / (4 * cols)).max(1);
        let mut values = vec![0f32; rows_at_once.min(n_rows) * cols];
        let mut bytes = Vec::new();
        let mut to = memory.address();
        for rows in data.chunks(rows_at_once * row_bytes) {
            let values = &mut values[..rows.len() / row_bytes * cols];
            for (row, values) in rows.chunks(row_bytes).zip(values.chunks_mut(cols)) {
                decode(row, values);
            }
            bytes.clear();
            bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            self.upload(to, &bytes)?;
            to += bytes.len() as u64;
        }
        Ok(memory)
    }

    /// Copies bytes to the device.
    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        for (i, part) in bytes.chunks(STAGING_BYTES).enumerate() {
            let staged = self.stage(part)?;
            self.stream
                .copy(to + (i * STAGING_BYTES) as u64, staged, part.len())?;
            self.stream.finish()?;
        }
        Ok(())
    }

    /// Copies bytes to the staging memory of the device; gives its address. The stream must have passed the last use.
    fn stage(&mut self, bytes: &[u8]) -> Result<u64, DeviceError> {
        let room = self.staging.as_ref().map_or(0, |s| s.pinned.bytes());
        if room < bytes.len().max(1) {
            let bytes = bytes.len().max(STAGING_BYTES);
            self.staging = None;
            self.staging = Some(Staging {
                pinned: Pinned::new(&self.context, bytes)?,
                memory: Memory::new(&self.context, "weights on their way", bytes)?,
            });
        }
        let staging = self.staging.as_mut().expect("just made");
        staging.pinned.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        self.stream
            .upload(staging.memory.address(), &staging.pinned, bytes.len())?;
        Ok(staging.memory.address())
    }
}
