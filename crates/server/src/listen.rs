//! Connections: accepting, TLS, HTTP/1 and HTTP/2, closing in order.
//!
//! What one would get wrong: a client that does not read blocks nobody but its
//! own connection, and that one is cut when a write has waited too long; so is
//! one that connects and asks for nothing.

use crate::Error;
use crate::settings::{Limits, TlsFiles};
use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tower::ServiceExt;

/// Requests that one HTTP/2 connection may have at a time.
const STREAMS: u32 = 128;
/// Rest after the system refused a connection: it has no files left, and to ask
/// again at once would only burn time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The TLS side of a server.
#[derive(Clone)]
pub(crate) struct Tls(TlsAcceptor);

impl Tls {
    /// Reads certificate and key.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Pem`], [`Error::Tls`].
    pub(crate) fn read(files: &TlsFiles) -> Result<Tls, Error> {
        let (path, pem) = (
            &files.certificate,
            read(&files.certificate, "the certificate")?,
        );
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let chain = chain.map_err(|error| wrong_pem(path, &error, "certificates"))?;
        if chain.is_empty() {
            return Err(Error::Pem {
                path: path.clone(),
                found: "no certificate".to_string(),
                expected: "a chain of them",
            });
        }
        let pem = read(&files.key, "the private key")?;
        let key = PrivateKeyDer::from_pem_slice(&pem)
            .map_err(|error| wrong_pem(&files.key, &error, "a private key"))?;
        let refused = |error: rustls::Error| Error::Tls {
            path: path.clone(),
            reason: error.to_string(),
        };
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(refused)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(refused)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Tls(TlsAcceptor::from(Arc::new(config))))
    }
}

fn read(path: &Path, what: &'static str) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|reason| Error::File {
        what,
        path: path.into(),
        reason,
    })
}

fn wrong_pem(path: &Path, error: &impl std::fmt::Display, expected: &'static str) -> Error {
    Error::Pem {
        path: path.into(),
        found: error.to_string(),
        expected,
    }
}

/// Takes connections.
pub(crate) struct Listener {
    pub(crate) socket: TcpListener,
    pub(crate) tls: Option<Tls>,
    pub(crate) limits: Limits,
    pub(crate) router: Router,
}

impl Listener {
    /// Takes connections until `closing`; then the open ones get `last_words` to
    /// end.
    pub(crate) async fn run(self, mut closing: watch::Receiver<bool>, last_words: Duration) {
        let graceful = GracefulShutdown::new();
        let places = Arc::new(Semaphore::new(self.limits.connections));
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&places) => accepted,
                _ = closing.wait_for(|is_closing| *is_closing) => break,
            };
            let Some((stream, place)) = accepted else {
                continue;
            };
            let (tls, limits) = (self.tls.clone(), self.limits);
            let (router, watcher) = (self.router.clone(), graceful.watcher());
            tokio::spawn(async move {
                connect(stream, tls, limits, router, watcher).await;
                drop(place);
            });
        }
        drop(self.socket);
        tokio::select! {
            () = graceful.shutdown() => {}
            () = tokio::time::sleep(last_words) => tracing::debug!("connections were cut"),
        }
    }

    async fn accept(
        &self,
        places: &Arc<Semaphore>,
    ) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
        let place = Arc::clone(places).acquire_owned().await.ok()?;
        match self.socket.accept().await {
            Ok((stream, _)) => Some((stream, place)),
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                None
            }
        }
    }
}

async fn connect(
    stream: TcpStream,
    tls: Option<Tls>,
    limits: Limits,
    router: Router,
    watcher: Watcher,
) {
    // Tokens are small and shall not wait for each other.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.reader_grace));
    let stream = Box::pin(stream);
    let Some(Tls(acceptor)) = tls else {
        return talk(stream, limits, router, watcher).await;
    };
    match tokio::time::timeout(limits.header_timeout, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => talk(stream, limits, router, watcher).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS"),
        Err(_) => tracing::debug!("no TLS in time"),
    }
}

async fn talk(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    limits: Limits,
    router: Router,
    watcher: Watcher,
) {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .keep_alive_interval(limits.header_timeout);
    let first = Arc::new(Notify::new());
    let arrived = Arc::clone(&first);
    let router = router.map_request(move |request: Request<Incoming>| {
        arrived.notify_one();
        request
    });
    let connection =
        builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let connection = watcher.watch(connection.into_owned());
    tokio::pin!(connection);
    // Until the first bytes say which version of HTTP it is, no other clock runs.
    let ended = tokio::select! {
        biased;
        ended = &mut connection => ended,
        () = first.notified() => connection.await,
        () = tokio::time::sleep(limits.header_timeout) => {
            return tracing::debug!("a connection asked for nothing in time");
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error, "a connection broke");
    }
}
