//! Everything that can be wrong with a file, by name.
//!
//! Messages about the inside of a file do not name the file: [`Error::InFile`]
//! puts its path in front when it was opened by path. Names that come from a
//! file are shown by [`crate::shown`].

use crate::TensorType;
use std::io;
use std::path::{Path, PathBuf};

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A metadata key holds a value of another type than the reader needs.
    #[error("metadata key {key}: found {found}, expected {wanted}")]
    KeyType {
        /// The key.
        key: String,
        /// Type (and value, if short) that the file has.
        found: String,
        /// Type the reader needs.
        wanted: &'static str,
    },

    /// Something is wrong inside the file at `path`.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        error: Box<Error>,
    },
    /// There is nothing at the path.
    #[error("{}: no such file", path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// The path leads to a directory, FIFO, socket or device.
    #[error("{}: found a {found}, expected a file", path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// The file has no bytes.
    #[error("{}: the file is empty, expected a GGUF file", path.display())]
    Empty {
        /// The path as given.
        path: PathBuf,
    },
    /// The operating system refuses to open, map or inspect the file.
    #[error("{}: cannot be read: {error}", path.display())]
    Unreadable {
        /// The path as given.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },

    /// A mapped file became shorter.
    #[error(
        "{}: the file was cut to {found_bytes} bytes while in use, expected {expected_bytes}: \
         tensor {tensor} is no longer whole",
        path.display()
    )]
    FileCut {
        /// The path as given.
        path: PathBuf,
        /// The first tensor that has lost bytes.
        tensor: String,
        /// Bytes of the file now.
        found_bytes: u64,
        /// Bytes when it was opened.
        expected_bytes: u64,
    },
    /// There is no memory for a copy of the file.
    #[error("{}: no memory for its {wanted_bytes} bytes; mapped, it needs none of its own", path.display())]
    NoMemoryForFile {
        /// The path as given.
        path: PathBuf,
        /// Bytes of the file.
        wanted_bytes: u64,
    },
    /// The system does not let the file be locked in memory.
    #[error(
        "{}: cannot lock {wanted_bytes} bytes in memory: {error} (the limit is RLIMIT_MEMLOCK, \
         `ulimit -l`)",
        path.display()
    )]
    LockRefused {
        /// The path as given.
        path: PathBuf,
        /// Bytes to lock.
        wanted_bytes: u64,
        /// The system's reason.
        error: io::Error,
    },

    /// The first four bytes are not `GGUF`.
    #[error("not a GGUF file: found {found} at the start, expected \"GGUF\"")]
    NotGguf {
        /// The bytes, printable ones as text.
        found: String,
    },
    /// The version is only sensible with its bytes swapped.
    #[error("big-endian GGUF version {version}: found big-endian, expected little-endian")]
    BigEndian {
        /// The version after swapping.
        version: u32,
    },
    /// A version that is not read.
    #[error("GGUF version: found {found}, expected 2 or 3")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// The file ends inside something.
    #[error("{section}: cut off at byte {at}: found {found_bytes} bytes, expected {wanted_bytes}")]
    Truncated {
        /// What the file ends in.
        section: String,
        /// Where in the file the missing thing starts.
        at: u64,
        /// Bytes that are left from there.
        found_bytes: u64,
        /// Bytes that it needs.
        wanted_bytes: u64,
    },
    /// A count that the rest of the file cannot hold.
    #[error(
        "{section}: found a count of {count} {items}, expected at most {most} in the remaining {left_bytes} bytes"
    )]
    Count {
        /// What announces the count.
        section: String,
        /// What is counted.
        items: &'static str,
        /// The count.
        count: u64,
        /// What fits.
        most: u64,
        /// Bytes that are left.
        left_bytes: u64,
    },
    /// More entries than is read, whatever the file could hold.
    #[error("{section}: found {count} {items}, expected at most {most}")]
    TooMany {
        /// What announces or holds them.
        section: String,
        /// What is counted.
        items: &'static str,
        /// How many, as far as they were counted.
        count: u64,
        /// The most that is read.
        most: u64,
    },
    /// Header, metadata and tensor directory are longer than is read.
    #[error("{section}: found a header of more than {limit_bytes} bytes, expected at most that")]
    HeaderTooLong {
        /// What reaches over the limit.
        section: String,
        /// The limit.
        limit_bytes: u64,
    },

    /// A key of no bytes or too many.
    #[error("{section}: found a key of {found_bytes} bytes, expected 1 to {limit_bytes}")]
    KeyLength {
        /// Which key, by position.
        section: String,
        /// Its length.
        found_bytes: u64,
        /// The longest allowed.
        limit_bytes: u64,
    },
    /// A key, string or name that is no valid UTF-8.
    #[error("{section}: found invalid UTF-8 at byte {at}, expected UTF-8 text")]
    NotUtf8 {
        /// Where the text belongs.
        section: String,
        /// Where in the file the first wrong byte lies.
        at: u64,
    },
    /// A key that occurs twice.
    #[error("metadata key {key}: found twice, expected once")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A number of a value type that does not exist.
    #[error("metadata key {key}: found unknown value type {found}, expected 0 to 12")]
    ValueType {
        /// The key.
        key: String,
        /// The number.
        found: u32,
    },
    /// A truth value that is neither.
    #[error("metadata key {key}: found a bool of byte {found}, expected 0 or 1")]
    BoolByte {
        /// The key.
        key: String,
        /// The byte.
        found: u8,
    },
    /// Arrays in arrays, too many levels of them.
    #[error("metadata key {key}: found arrays nested deeper than {limit} levels")]
    ArrayDepth {
        /// The key.
        key: String,
        /// The deepest allowed.
        limit: usize,
    },
    /// An alignment that cannot be used.
    #[error(
        "metadata key general.alignment: found {found}, expected a power of two from {least} to {most}"
    )]
    Alignment {
        /// The value.
        found: u64,
        /// The smallest allowed.
        least: u64,
        /// The largest allowed.
        most: u64,
    },

    /// A tensor name of no bytes or too many.
    #[error("{section}: found a tensor name of {found_bytes} bytes, expected 1 to {limit_bytes}")]
    TensorNameLength {
        /// Which entry, by position.
        section: String,
        /// Its length.
        found_bytes: u64,
        /// The longest allowed.
        limit_bytes: u64,
    },
    /// A tensor name that occurs twice.
    #[error("tensor {name}: found twice, expected once")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A number of dimensions that is not supported.
    #[error("tensor {name}: found {found} dimensions, expected 1 to {most}")]
    Dimensions {
        /// The tensor.
        name: String,
        /// Its number of dimensions.
        found: u64,
        /// The most allowed.
        most: u64,
    },
    /// A dimension of length zero.
    #[error("tensor {name}: found shape {shape:?}, expected no dimension of 0")]
    ZeroDimension {
        /// The tensor.
        name: String,
        /// Its shape, row length first.
        shape: Vec<u64>,
    },
    /// A number of a tensor type that is not known.
    #[error("tensor {name}: found unknown tensor type {found}")]
    UnknownTensorType {
        /// The tensor.
        name: String,
        /// The number.
        found: u32,
    },
    /// Rows that are no whole number of blocks.
    #[error("tensor {name}: found rows of {found} elements, expected a multiple of {} for {ty}", ty.block_len())]
    PartialBlock {
        /// The tensor.
        name: String,
        /// Its encoding.
        ty: TensorType,
        /// Its row length.
        found: u64,
    },
    /// More elements or bytes than can be addressed.
    #[error("tensor {name}: found shape {shape:?}, expected less than 2^63 elements and bytes")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its shape, row length first.
        shape: Vec<u64>,
    },
    /// An offset that is no multiple of the file's alignment.
    #[error("tensor {name}: found offset {found}, expected a multiple of {alignment}")]
    Misaligned {
        /// The tensor.
        name: String,
        /// Its offset in the tensor data.
        found: u64,
        /// The alignment in bytes.
        alignment: u64,
    },
    /// Tensor data that the file does not hold in full.
    #[error("tensor data of {name}: found {file_bytes} bytes in the file, expected at least {end}")]
    OutsideFile {
        /// The tensor.
        name: String,
        /// First byte of the file after the tensor.
        end: u128,
        /// The file's length.
        file_bytes: u64,
    },
    /// Two tensors that share bytes.
    #[error(
        "tensor data of {second}: found at offset {second_offset}, expected at or after {first_end}, the end of {first}"
    )]
    Overlap {
        /// The tensor that starts first.
        first: String,
        /// The one that starts inside it.
        second: String,
        /// Where the second starts in the tensor data.
        second_offset: u64,
        /// Where the first ends.
        first_end: u64,
    },

    /// A part of a split model under a name that does not say which.
    #[error(
        "found one part of a split model of {count} parts, expected its name to end in -0000x-of-{count:05}.gguf"
    )]
    SplitName {
        /// The number of parts by the key `split.count`.
        count: u64,
    },
    /// A part of a split model that is not there.
    #[error("{}: part {part} of {count} of the split model is missing", path.display())]
    SplitPartMissing {
        /// Where it should lie.
        path: PathBuf,
        /// Its number, the first is 1.
        part: u32,
        /// The number of parts.
        count: u32,
    },
    /// A `split.*` key that contradicts the names or the parts.
    #[error("metadata key {key}: found {found}, expected {expected}")]
    SplitKey {
        /// The key.
        key: &'static str,
        /// Its value, or `nothing`.
        found: String,
        /// What names and parts say.
        expected: u64,
    },

    /// A tensor is written before its turn, or is not planned at all.
    #[error("tensor {found}: cannot be written now, expected {expected}")]
    TensorOrder {
        /// The tensor that was given.
        found: String,
        /// The one whose turn it is, or `the end of the file`.
        expected: String,
    },
    /// A tensor got more or fewer bytes than its type and shape say.
    #[error("tensor data of {name}: found {found_bytes} bytes to write, expected {expected_bytes}")]
    TensorBytes {
        /// The tensor.
        name: String,
        /// Bytes that were given.
        found_bytes: u64,
        /// Bytes that type and shape say.
        expected_bytes: u64,
    },
    /// The file could not be written; nothing is left under its name.
    #[error("{}: cannot be written: {error}", path.display())]
    Write {
        /// The final path.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
}

impl Error {
    /// This error about the inside of the file at `path`.
    pub(crate) fn in_file(self, path: &Path) -> Error {
        Error::InFile {
            path: path.to_path_buf(),
            error: Box::new(self),
        }
    }
}
