//! Opens files and gives access to what they hold.
//!
//! The tensors of a split model are one list; only here and in `split` is it
//! visible that they lie in several files.

use crate::header::Header;
use crate::mapping::{Files, Mapping, Progress};
use crate::shown;
use crate::{Bytes, Error, Metadata, TensorView, split};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A checked GGUF file, or all parts of a split one.
///
/// Cloning it copies metadata and directory, not the tensor data.
#[derive(Clone, Debug)]
pub struct Gguf {
    version: u32,
    alignment: u64,
    metadata: Metadata,
    tensors: Vec<TensorView>,
    by_name: HashMap<String, usize>,
    files: Files,
    paths: Vec<PathBuf>,
    headers: Vec<Bytes>,
    file_bytes: u64,
    data_bytes: u64,
}

/// One file with its checked header.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) mapping: Option<Arc<Mapping>>,
    pub(crate) header: Header,
    pub(crate) bytes: Bytes,
}

impl Part {
    fn read(bytes: Bytes) -> Result<Part, Error> {
        Ok(Part {
            mapping: None,
            header: Header::read(&bytes)?,
            bytes,
        })
    }

    /// Maps and checks the file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Part, Error> {
        let mapping = Arc::new(Mapping::open(path)?);
        let mut part = Part::read(Bytes::mapped(&mapping)).map_err(|e| e.in_file(path))?;
        part.mapping = Some(mapping);
        Ok(part)
    }
}

impl Gguf {
    /// Maps and checks the file at `path`, with all other parts if it is named
    /// `NAME-00001-of-0000N.gguf` (any part's name will do).
    ///
    /// The mapping lives as long as any [`Bytes`] into it. Whoever shortens the
    /// file in place meanwhile ends the process: replace files by renaming.
    ///
    /// # Errors
    /// If a file cannot be opened, is no regular file (devices and FIFOs are
    /// not opened) or anything in its header is wrong; the message starts with
    /// its path.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        Gguf::join(split::open(path)?)
    }

    /// Checks a whole, unsplit file that lies in memory; it need not be aligned.
    ///
    /// # Errors
    /// If anything in the header is wrong, or it is one part of a split model.
    pub fn from_bytes(bytes: Bytes) -> Result<Gguf, Error> {
        let part = Part::read(bytes)?;
        split::check_whole(&part.header.metadata)?;
        Gguf::join(vec![part])
    }

    /// Makes one list of the tensors of all parts; the first part's metadata
    /// counts.
    fn join(parts: Vec<Part>) -> Result<Gguf, Error> {
        let mut gguf = Gguf {
            version: 0,
            alignment: 0,
            metadata: Metadata::default(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            files: Files::default(),
            paths: Vec::new(),
            headers: Vec::new(),
            file_bytes: 0,
            data_bytes: 0,
        };
        let mut files = Vec::new();
        for part in parts {
            let header = part.header;
            let mut ends = Vec::new();
            if gguf.headers.is_empty() {
                gguf.version = header.version;
                gguf.alignment = header.alignment;
                gguf.metadata = header.metadata;
            }
            gguf.headers.push(part.bytes.slice(0..header.header_bytes));
            gguf.file_bytes += part.bytes.len() as u64;
            for entry in header.entries {
                // Inside the file, so inside the address space too.
                let start = (header.data_start + entry.offset) as usize;
                let name = entry.info.name;
                if gguf
                    .by_name
                    .insert(name.clone(), gguf.tensors.len())
                    .is_some()
                {
                    let error = Error::DuplicateTensor { name: shown(&name) };
                    return Err(match &part.mapping {
                        Some(mapping) => error.in_file(&mapping.path),
                        None => error,
                    });
                }
                ends.push((name.clone(), start as u64 + entry.bytes));
                gguf.data_bytes += entry.bytes;
                gguf.tensors.push(TensorView {
                    name,
                    ty: entry.info.ty,
                    shape: entry.info.shape,
                    data: part.bytes.slice(start..start + entry.bytes as usize),
                });
            }
            if let Some(mapping) = part.mapping {
                gguf.paths.push(mapping.path.clone());
                files.push((mapping, ends));
            }
        }
        gguf.files = Files::new(files);
        Ok(gguf)
    }

    /// Reads all files into memory of the process's own, so that they can be
    /// cut, replaced or unmounted; `progress` is called with the bytes read since
    /// the last call. Views taken before go on showing the mapped files.
    ///
    /// # Errors
    /// [`Error::NoMemoryForFile`], [`Error::Unreadable`].
    pub fn read_into_memory(&mut self, progress: Progress<'_>) -> Result<(), Error> {
        let views = self.tensors.iter_mut().map(|tensor| &mut tensor.data);
        self.files
            .read_into_memory(views.chain(&mut self.headers), progress)
    }

    /// The files as they lie in memory; none for [`Gguf::from_bytes`].
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor data in bytes; of a split model, the first part's.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The key-value section; of a split model, the first part's.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors in the order of the directory, part after part.
    pub fn tensors(&self) -> &[TensorView] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorView> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Bytes of all tensors together, without padding.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// The files in the order of their parts; none for [`Gguf::from_bytes`].
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Magic, metadata and tensor directory of each file, as stored: what an
    /// identity digest covers beside the tensor data.
    pub fn headers(&self) -> &[Bytes] {
        &self.headers
    }
}
