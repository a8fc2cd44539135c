//! Everything that can be wrong with a file, by name.

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
}
