//! What a server is told: address, security, limits.
//!
//! What one would get wrong: an address that others can reach is refused
//! unless there is an API key or somebody said that none is wanted.

use crate::Error;
use crate::auth::ApiKeys;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Everything that is decided before the first request.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where to listen; port 0 takes a free one.
    pub address: SocketAddr,
    /// Certificate and key; `None` serves plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Keys of which a request must bring one; none asks for none.
    pub keys: ApiKeys,
    /// May everybody who reaches the address use it without a key?
    pub is_insecure: bool,
    /// Origins whose web pages may read answers; `*` for all.
    pub cors_origins: Vec<String>,
    /// Sizes and times.
    pub limits: Limits,
    /// Are prompts and answers written to the log?
    pub logs_prompts: bool,
}

/// PEM files of a TLS server.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The chain, the server's own certificate first.
    pub certificate: PathBuf,
    /// The private key.
    pub key: PathBuf,
}

/// Sizes and times that bound what one client can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// From the beginning of a connection, or the end of the last answer, to
    /// the end of a request's headers.
    pub header_timeout: Duration,
    /// To receive a body.
    pub body_timeout: Duration,
    /// How long a client may leave a stream unread before it is given up.
    pub reader_grace: Duration,
    /// From a request's arrival to the end of its answer; `None` for no limit.
    pub deadline: Option<Duration>,
    /// Connections at a time; more wait to be accepted.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body_bytes: 64 << 20,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            reader_grace: Duration::from_secs(30),
            deadline: None,
            connections: 1024,
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            tls: None,
            keys: ApiKeys::default(),
            is_insecure: false,
            cors_origins: Vec::new(),
            limits: Limits::default(),
            logs_prompts: false,
        }
    }
}

impl Settings {
    /// Checks that the address is not open to strangers by accident.
    ///
    /// # Errors
    /// [`Error::OpenAddress`].
    pub fn check(&self) -> Result<(), Error> {
        let is_closed = self.address.ip().is_loopback() || !self.keys.is_empty();
        match is_closed || self.is_insecure {
            true => Ok(()),
            false => Err(Error::OpenAddress {
                address: self.address,
            }),
        }
    }

    /// Must a request name this very machine as its host? Without a key, a web
    /// page whose name was made to resolve to 127.0.0.1 would be served as if
    /// its reader had asked (DNS rebinding).
    pub(crate) fn wants_local_host(&self) -> bool {
        self.keys.is_empty() && !self.is_insecure
    }
}
