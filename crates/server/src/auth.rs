//! Who may ask: API keys and the host a request names.
//!
//! What one would get wrong: keys are kept and compared as digests of one
//! length, all of them each time, so that the time of an answer tells nothing
//! about how much of a guess was right.

use crate::Error;
use crate::api_error::ApiError;
use axum::http::{HeaderMap, header};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq};

/// The keys that are let in.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<[blake3::Hash]>);

impl ApiKeys {
    /// Keys given as texts.
    pub fn new<'k>(keys: impl IntoIterator<Item = &'k str>) -> ApiKeys {
        let digests = keys.into_iter().map(|key| blake3::hash(key.as_bytes()));
        ApiKeys(digests.collect())
    }

    /// The keys of a file: one a line; empty lines and lines that begin with
    /// `#` are none.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::NoKey`], [`Error::KeyCharacters`].
    pub fn read(path: &Path) -> Result<ApiKeys, Error> {
        let text = std::fs::read_to_string(path).map_err(|reason| Error::File {
            what: "the API key file",
            path: path.into(),
            reason,
        })?;
        let lines = (1..).zip(text.lines().map(str::trim));
        let keys: Vec<(usize, &str)> = lines
            .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
            .collect();
        if keys.is_empty() {
            return Err(Error::NoKey { path: path.into() });
        }
        let is_sound = |key: &str| key.bytes().all(|byte| byte.is_ascii_graphic());
        if let Some(&(line, _)) = keys.iter().find(|(_, key)| !is_sound(key)) {
            return Err(Error::KeyCharacters {
                path: path.into(),
                line,
            });
        }
        Ok(ApiKeys::new(keys.into_iter().map(|(_, key)| key)))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Are there none, so that no key is asked for?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks the key that a request brings as `Authorization: Bearer KEY`.
    ///
    /// # Errors
    /// 401, without a word about what was wrong with the key.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_empty() {
            return Ok(());
        }
        let value = headers.get(header::AUTHORIZATION);
        let Some(key) = value.and_then(|value| bearer(value.as_bytes())) else {
            return Err(ApiError::unauthorized(
                "found no API key, expected a header \"Authorization: Bearer KEY\"",
            ));
        };
        match self.admits(key) {
            true => Ok(()),
            false => Err(ApiError::unauthorized(
                "the API key is none of this server's keys",
            )),
        }
    }

    fn admits(&self, key: &[u8]) -> bool {
        let digest = blake3::hash(key);
        let equals = |known: &blake3::Hash| known.as_bytes().ct_eq(digest.as_bytes());
        let none = Choice::from(0);
        self.0
            .iter()
            .fold(none, |found, known| found | equals(known))
            .into()
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// The key behind the scheme, whose case does not matter (RFC 9110, 11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key)
}

/// Checks that a request without a key names this very machine as its host.
///
/// # Errors
/// 403 naming the host.
pub(crate) fn check_local_host(host: Option<&str>) -> Result<(), ApiError> {
    let name = host.map(|host| match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    });
    let is_local = |name: &str| {
        let is_loopback = |ip: std::net::IpAddr| ip.is_loopback();
        name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(is_loopback)
    };
    match name {
        Some(name) if !is_local(name) => Err(ApiError::forbidden(format!(
            "found the host {}, expected localhost or a loopback address: other names are \
             served only with an API key",
            gguf::shown(name)
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_let_in_and_nothing_that_looks_like_it() {
        let keys = ApiKeys::new(["alpha", "beta"]);
        for (value, is_let_in) in [
            ("Bearer alpha", true),
            ("bearer beta", true),
            ("Bearer  beta ", true),
            ("Bearer alph", false),
            ("Bearer alphabeta", false),
            ("Bearer ", false),
            ("Bearer", false),
            ("Basic alpha", false),
            ("alpha", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().expect("a value"));
            assert_eq!(keys.check(&headers).is_ok(), is_let_in, "{value:?}");
        }
        assert!(keys.check(&HeaderMap::new()).is_err());
        assert!(ApiKeys::default().check(&HeaderMap::new()).is_ok());
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
    }

    #[test]
    fn hosts_that_are_this_machine() {
        for (host, is_local) in [
            (Some("localhost"), true),
            (Some("LOCALHOST:8080"), true),
            (Some("127.0.0.1:8080"), true),
            (Some("127.1.2.3"), true),
            (Some("[::1]:8080"), true),
            (None, true),
            (Some("evil.example:8080"), false),
            (Some("localhost.evil.example"), false),
            (Some("10.0.0.1"), false),
            (Some("[fe80::1]"), false),
        ] {
            assert_eq!(check_local_host(host).is_ok(), is_local, "{host:?}");
        }
    }
}
