//! Why a server could not start or go on.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// What ends a server. What goes wrong with one request is its client's to hear.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address could be reached by strangers.
    #[error(
        "{address} can be reached from other machines, expected a loopback address such as \
         127.0.0.1, an API key file, or the word that no key is wanted"
    )]
    OpenAddress {
        /// The address.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        reason: io::Error,
    },
    /// A file of the settings cannot be read.
    #[error("cannot read {what} {}: {reason}", path.display())]
    File {
        /// What it is.
        what: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// A PEM file does not hold what it should.
    #[error("{}: found {found}, expected {expected}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        found: String,
        /// What should be there.
        expected: &'static str,
    },
    /// Certificate and key are no pair that TLS can use.
    #[error("certificate {} and its key: {reason}", path.display())]
    Tls {
        /// The certificate's file.
        path: PathBuf,
        /// What the TLS library says.
        reason: String,
    },
    /// An API key file has no key.
    #[error("API key file {}: found no key, expected one a line", path.display())]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// An API key could not stand in a header.
    #[error(
        "API key file {}: line {line} holds a blank or a character outside of ASCII, expected a \
         key of visible ASCII characters",
        path.display()
    )]
    KeyCharacters {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// An origin could not stand in a header.
    #[error(
        "CORS origin: found \"{found}\", expected * or scheme, host and port alone, such as \
         https://example.org"
    )]
    CorsOrigin {
        /// The origin.
        found: String,
    },
    /// A model has no name to be asked for.
    #[error("model names: found none, expected at least one")]
    NoModelName,
    /// The text side refused the model.
    #[error(transparent)]
    Text(#[from] text::Error),
    /// The runtime could not start.
    #[error("cannot start the server's threads: {0}")]
    Runtime(io::Error),
    /// The engine failed while serving.
    #[error("the engine failed: {why}")]
    Unhealthy {
        /// What went wrong.
        why: String,
    },
}
