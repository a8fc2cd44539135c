//! Opens files and gives access to what they hold.
//!
//! The tensors of a split model are one list; only here and in `split` is it
//! visible that they lie in several files.

use crate::error::shown;
use crate::header::Header;
use crate::{Bytes, Error, Metadata, TensorView, split};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

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
    paths: Vec<PathBuf>,
    headers: Vec<Bytes>,
    file_bytes: u64,
    data_bytes: u64,
}

/// One file with its checked header.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) path: Option<PathBuf>,
    pub(crate) header: Header,
    pub(crate) bytes: Bytes,
}

impl Part {
    fn read(bytes: Bytes) -> Result<Part, Error> {
        Ok(Part {
            path: None,
            header: Header::read(&bytes)?,
            bytes,
        })
    }

    /// Maps and checks the file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Part, Error> {
        let mut part = Part::read(map(path)?).map_err(|e| e.in_file(path))?;
        part.path = Some(path.to_path_buf());
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
            paths: Vec::new(),
            headers: Vec::new(),
            file_bytes: 0,
            data_bytes: 0,
        };
        for part in parts {
            let header = part.header;
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
                    return Err(match &part.path {
                        Some(path) => error.in_file(path),
                        None => error,
                    });
                }
                gguf.data_bytes += entry.bytes;
                gguf.tensors.push(TensorView {
                    name,
                    ty: entry.info.ty,
                    shape: entry.info.shape,
                    data: part.bytes.slice(start..start + entry.bytes as usize),
                });
            }
            gguf.paths.extend(part.path);
        }
        Ok(gguf)
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

/// Maps the file at `path`.
fn map(path: &Path) -> Result<Bytes, Error> {
    let unreadable = |error| Error::Unreadable {
        path: path.to_path_buf(),
        error,
    };
    // Asked before opening: opening a FIFO waits for its other end.
    let about = match std::fs::metadata(path) {
        Ok(about) => about,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(Error::Missing {
                path: path.to_path_buf(),
            });
        }
        Err(e) => return Err(unreadable(e)),
    };
    if !about.is_file() {
        return Err(Error::NotAFile {
            path: path.to_path_buf(),
            found: kind(about.file_type()),
        });
    }
    if about.len() == 0 {
        return Err(Error::Empty {
            path: path.to_path_buf(),
        });
    }
    let file = File::open(path).map_err(unreadable)?;
    // SAFETY: the mapping is read-only and private to this process's view; that
    // nobody shortens the file meanwhile is required by the doc of `Gguf::open`.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(unreadable)?;
    Ok(Bytes::mapped(map))
}

/// What a path that is no regular file leads to.
pub(crate) fn kind(file_type: std::fs::FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if file_type.is_fifo() {
            return "FIFO";
        }
        if file_type.is_socket() {
            return "socket";
        }
        if file_type.is_char_device() || file_type.is_block_device() {
            return "device";
        }
    }
    if file_type.is_dir() {
        "directory"
    } else {
        "special file"
    }
}
