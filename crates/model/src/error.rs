//! What can be wrong with a model file, a page table or a device.

use crate::kv::{PageClass, PageId};

/// Why a model could not be loaded or a sequence not be changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file itself is at fault.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// The file's architecture has no graph here.
    #[error("architecture \"{found}\" is not supported; supported: {supported}")]
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
    /// A pass has more rows than the device takes.
    #[error("a pass of {found} rows, expected at most {most}")]
    TooManyRows {
        /// Rows of the pass.
        found: usize,
        /// Rows of the largest pass.
        most: usize,
    },
    /// A row or a request names a sequence that the pass does not have.
    #[error("sequence {seq} is not one of the {n_sequences} of the pass")]
    SequenceUnknown {
        /// The index given.
        seq: u32,
        /// Sequences of the pass.
        n_sequences: usize,
    },
    /// The wanted rows of a pass are not ascending, or not all there.
    #[error("wanted row {found}: expected indices into {rows} rows, ascending, each once")]
    WantedRow {
        /// The first index that is wrong.
        found: u32,
        /// Rows of the pass.
        rows: usize,
    },
    /// One sequence has two blocks in a drafting pass: their rows would see
    /// each other.
    #[error("sequence {seq} has two requests in one drafting pass, expected one")]
    DraftedTwice {
        /// Index of the sequence in the pass.
        seq: u32,
    },
    /// A block of another length than the drafter can propose.
    #[error("a draft of {found} tokens, expected 1 to {most}")]
    DraftLength {
        /// Tokens asked for.
        found: usize,
        /// Tokens of the longest draft.
        most: usize,
    },
    /// A page id that the pool of this model cannot have given out.
    #[error("page {} is not one of the {class} pages that this model can have", page.0)]
    PageUnknown {
        /// Class asked for.
        class: PageClass,
        /// The id.
        page: PageId,
    },
    /// More rows of a page than it holds.
    #[error("{rows} rows of a {class} page, expected at most 256")]
    PageRows {
        /// Class of the page.
        class: PageClass,
        /// Rows asked for.
        rows: usize,
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
    /// The device cannot do something that the model needs.
    #[error("this device has no {what}")]
    Unsupported {
        /// What it would have to do.
        what: String,
    },
    /// The device is gone; the engine must stop.
    #[error("the device failed: {0}")]
    Lost(String),
}
