//! What can be wrong with a model file, a page table or a device.

use crate::kv::PageClass;

/// Why a model could not be loaded or a sequence not be changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file itself is at fault.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// The file's architecture has no graph here.
    #[error("architecture {found:?} is not supported; supported: {supported}")]
    ArchitectureUnknown {
        /// `general.architecture` of the file.
        found: String,
        /// The supported names, separated by commas.
        supported: &'static str,
    },
    /// The file is a drafter, which only works beside its target.
    #[error(
        "this file is a drafter (architecture dflash), not a model: it has no embedding and no \
         head of its own and works beside its target only"
    )]
    IsDrafter,
    /// A required metadata key is missing.
    #[error("metadata key {key} is missing: {why}")]
    KeyMissing {
        /// The key.
        key: String,
        /// What it is needed for.
        why: &'static str,
    },
    /// A metadata value is outside what the model can mean.
    #[error("metadata key {key}: found {found}, expected {expected}")]
    KeyValue {
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A tensor that the graph needs is not in the file.
    #[error("tensor {name} is missing; expected shape {expected:?}")]
    TensorMissing {
        /// The tensor's name.
        name: String,
        /// Shape in ggml's order.
        expected: Vec<u64>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor {name}: found shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor's name.
        name: String,
        /// Shape found, in ggml's order.
        found: Vec<u64>,
        /// Shape expected, in ggml's order.
        expected: Vec<u64>,
    },
    /// A tensor's encoding does not serve its purpose.
    #[error("tensor {name}: found type {found}, expected {expected}")]
    TensorType {
        /// The tensor's name.
        name: String,
        /// Encoding found.
        found: gguf::TensorType,
        /// What would be right.
        expected: &'static str,
    },
    /// A tensor holds a number that cannot be right.
    #[error("tensor {name}: found the value {found}, expected {expected}")]
    TensorValue {
        /// The tensor's name.
        name: String,
        /// The value found.
        found: f32,
        /// What would be right.
        expected: &'static str,
    },
    /// The file has tensors that the graph does not use.
    #[error(
        "{count} tensor(s) of the file are not part of a {architecture} model, first: {first}; \
         a model that needs them would be computed wrongly"
    )]
    TensorsUnused {
        /// How many.
        count: usize,
        /// Name of the first.
        first: String,
        /// The model's architecture.
        architecture: &'static str,
    },
    /// Target and drafter do not belong together.
    #[error(
        "the drafter does not fit the model: {what} is {drafter} in the drafter, {target} in the model"
    )]
    DrafterMismatch {
        /// The quantity.
        what: &'static str,
        /// The drafter's value.
        drafter: String,
        /// The target's value.
        target: String,
    },
    /// The drafter needs something Muser does not have.
    #[error("this drafter is not supported: {0}")]
    DrafterUnsupported(String),
    /// Rows were appended at another position than the next one.
    #[error("position {found} of sequence {seq} does not follow its {len} rows")]
    Discontinuity {
        /// Index of the sequence in the pass.
        seq: u32,
        /// Position given.
        found: u32,
        /// Rows the sequence has, that is the position expected.
        len: u32,
    },
    /// A row's token is not in the vocabulary.
    #[error("token {token} is not in the vocabulary of {n_vocab}")]
    TokenUnknown {
        /// The token id.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A page from outside is not what it says.
    #[error(
        "{found} bytes for {rows} rows of a {class} page, expected {expected} and at most 256 rows"
    )]
    PageData {
        /// Class of the page.
        class: PageClass,
        /// Rows it claims to have.
        rows: usize,
        /// Its length in bytes.
        found: usize,
        /// The length its rows should have.
        expected: usize,
    },
    /// No page of a class is left.
    #[error("no free {class} page: {used} of {total} slabs are in use")]
    PagesExhausted {
        /// The class that needs a page.
        class: PageClass,
        /// Slabs in use.
        used: usize,
        /// Slabs the pool may have.
        total: usize,
    },
    /// A roll-back would need keys that have left the window already.
    #[error(
        "cannot roll back to {wanted} rows: the sliding window's keys before position {oldest} are released"
    )]
    WindowReleased {
        /// Length asked for.
        wanted: u32,
        /// First position still held.
        oldest: u32,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Why a device did not do what it was told.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// The device has no room left. A capacity value, not a crash: the caller
    /// frees something or refuses the request.
    #[error("the device has no memory for {wanted_bytes} bytes of {what}")]
    OutOfMemory {
        /// What was to be allocated.
        what: &'static str,
        /// Its size.
        wanted_bytes: u64,
    },
    /// The backend has no kernel for a tensor's encoding.
    #[error("tensor {name} has type {ty}, which this device cannot compute with")]
    UnsupportedType {
        /// The tensor's name.
        name: String,
        /// Its encoding.
        ty: gguf::TensorType,
    },
    /// The device is gone; the engine must stop.
    #[error("the device failed: {0}")]
    Lost(String),
}
