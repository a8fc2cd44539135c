//! The files of a model in memory: mapped, or read into memory of the
//! process's own.
//!
//! What a reader would get wrong: a mapped file that somebody cuts short ends
//! the process at the next access. [`Files::check`] finds that out beforehand,
//! not with certainty but nearly always: a model is read for far longer than a
//! file takes to be cut.

use crate::bytes::{Bytes, Owner};
use crate::{Error, shown};
use memmap2::{Mmap, MmapMut};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes between two reports of progress.
const REPORTED_BYTES: usize = 32 << 20;

/// One file in memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) path: PathBuf,
    file: File,
    map: Mmap,
    /// Does `map` hold the file's own pages, not a copy?
    is_mapped: bool,
}

impl Owner for Mapping {
    fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// Called with the bytes that were read since the last call.
pub type Progress<'a> = &'a mut dyn FnMut(u64);

impl Mapping {
    /// Maps the file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Mapping, Error> {
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
        let map = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
        #[cfg(target_os = "linux")]
        // Only a wish: with large pages a walk over the weights misses the
        // translation buffer 512 times less often.
        map.advise(memmap2::Advice::HugePage).ok();
        Ok(Mapping {
            path: path.to_path_buf(),
            file,
            map,
            is_mapped: true,
        })
    }

    /// A copy of the file in memory of the process's own.
    fn read(&self, progress: Progress<'_>) -> Result<Mapping, Error> {
        let unreadable = |error| Error::Unreadable {
            path: self.path.clone(),
            error,
        };
        // The very file that was checked, also if another has taken its name.
        let mut file = self.file.try_clone().map_err(unreadable)?;
        file.seek(io::SeekFrom::Start(0)).map_err(unreadable)?;
        let refused = |_| Error::NoMemoryForFile {
            path: self.path.clone(),
            wanted_bytes: self.map.len() as u64,
        };
        let mut copy = MmapMut::map_anon(self.map.len()).map_err(refused)?;
        #[cfg(target_os = "linux")]
        // Only a wish, as above.
        copy.advise(memmap2::Advice::HugePage).ok();
        for part in copy.chunks_mut(REPORTED_BYTES) {
            file.read_exact(part).map_err(unreadable)?;
            progress(part.len() as u64);
        }
        Ok(Mapping {
            path: self.path.clone(),
            file,
            map: copy.make_read_only().map_err(unreadable)?,
            is_mapped: false,
        })
    }

    /// Brings all of it into memory.
    fn prefetch(&self, progress: Progress<'_>) {
        let mut start = 0;
        while start < self.map.len() {
            let len = REPORTED_BYTES.min(self.map.len() - start);
            #[cfg(target_os = "linux")]
            let is_done = (self.map)
                .advise_range(memmap2::Advice::PopulateRead, start, len)
                .is_ok();
            #[cfg(not(target_os = "linux"))]
            let is_done = false;
            if !is_done {
                // Systems without that advice: one access a page does the same.
                let pages = self.map[start..start + len].iter().step_by(4096);
                std::hint::black_box(pages.fold(0u8, |sum, byte| sum.wrapping_add(*byte)));
            }
            progress(len as u64);
            start += len;
        }
    }

    /// Keeps all of it in memory.
    fn lock(&self) -> Result<(), Error> {
        #[cfg(unix)]
        let locked = self.map.lock();
        #[cfg(not(unix))]
        let locked = Err(io::Error::from(io::ErrorKind::Unsupported));
        locked.map_err(|error| Error::LockRefused {
            path: self.path.clone(),
            wanted_bytes: self.map.len() as u64,
            error,
        })
    }
}

/// The files of a model, and where its tensors end in them. Cloning copies a
/// pointer.
#[derive(Clone, Debug, Default)]
pub struct Files {
    parts: Arc<[Part]>,
}

/// Name and end of each tensor of a file, in its order.
pub(crate) type Ends = Vec<(String, u64)>;

#[derive(Debug)]
struct Part {
    mapping: Arc<Mapping>,
    ends: Ends,
}

impl Files {
    /// The files, each with name and end of its tensors.
    pub(crate) fn new(parts: Vec<(Arc<Mapping>, Ends)>) -> Files {
        let part = |(mapping, ends)| Part { mapping, ends };
        Files {
            parts: parts.into_iter().map(part).collect(),
        }
    }

    /// Are the weights pages of the files themselves, not a copy?
    pub fn are_mapped(&self) -> bool {
        self.parts.iter().any(|part| part.mapping.is_mapped)
    }

    /// Checks that no mapped file has become shorter: reading what is gone
    /// would end the process. Takes about a microsecond a file.
    ///
    /// # Errors
    /// [`Error::FileCut`] with the first tensor that is no longer whole.
    pub fn check(&self) -> Result<(), Error> {
        for Part { mapping, ends } in self.parts.iter().filter(|part| part.mapping.is_mapped) {
            let expected_bytes = mapping.map.len() as u64;
            // A file system that cannot say it has not cut the file either.
            let found_bytes = (mapping.file.metadata()).map_or(expected_bytes, |about| about.len());
            if found_bytes >= expected_bytes {
                continue;
            }
            let lost = ends.iter().filter(|(_, end)| *end > found_bytes);
            let first = lost.min_by_key(|(_, end)| *end);
            return Err(Error::FileCut {
                path: mapping.path.clone(),
                tensor: first.map_or("none".to_string(), |(name, _)| shown(name)),
                found_bytes,
                expected_bytes,
            });
        }
        Ok(())
    }

    /// Brings all bytes into memory, from the disk if need be.
    pub fn prefetch(&self, progress: Progress<'_>) {
        for part in self.parts.iter() {
            part.mapping.prefetch(progress);
        }
    }

    /// Brings all bytes into memory and keeps them there (`mlock(2)`).
    ///
    /// # Errors
    /// [`Error::LockRefused`], above all by the limit on locked memory.
    pub fn lock(&self) -> Result<(), Error> {
        self.parts.iter().try_for_each(|part| part.mapping.lock())
    }

    /// Reads each file into memory of the process's own. Each of `views` then
    /// shows the copy instead of the file.
    pub(crate) fn read_into_memory<'a>(
        &mut self,
        views: impl IntoIterator<Item = &'a mut Bytes>,
        progress: Progress<'_>,
    ) -> Result<(), Error> {
        let mut copies = Vec::with_capacity(self.parts.len());
        for part in self.parts.iter() {
            copies.push(Part {
                mapping: Arc::new(part.mapping.read(progress)?),
                ends: part.ends.clone(),
            });
        }
        for view in views {
            let shows = |part: &Part| view.is_of(&part.mapping);
            if let Some(index) = self.parts.iter().position(shows) {
                view.move_to(&copies[index].mapping);
            }
        }
        self.parts = copies.into();
        Ok(())
    }
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
