//! The running server: listens, drains, stops.
//!
//! It listens before the model is loaded, so that `/health` can say so. What
//! one would get wrong: draining is not closing. New work is refused, but
//! connections are still taken, since a load balancer must hear that the
//! server drains; they close when the last answer is complete.

use crate::Error;
use crate::app::App;
use crate::listen::{Listener, Tls};
use crate::model::{ModelParts, ServedModel};
use crate::router::router;
use crate::settings::Settings;
use engine::State;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Threads that serve: waiting is all they do.
const THREADS: usize = 2;
/// Threads that prepare requests: rendering and tokenizing are work.
const BLOCKING_THREADS: usize = 16;
/// How often the engine's health is looked at.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);
/// What connections get to send the ends of their answers after a stop.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How far a server has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Running,
    Draining,
    Stopping,
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    runtime: Runtime,
    app: Arc<App>,
    address: SocketAddr,
    phase: watch::Sender<Phase>,
    close: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

/// Ends a server, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(watch::Sender<Phase>);

impl Stopper {
    /// The first call lets running answers end and refuses new ones; the second
    /// one cuts them.
    pub fn stop(&self) {
        self.0.send_modify(|phase| {
            *phase = match phase {
                Phase::Running => Phase::Draining,
                _ => Phase::Stopping,
            }
        });
    }
}

impl Server {
    /// Begins to listen. Until [`Server::serve`] everything but `/health` is
    /// answered with 503.
    ///
    /// # Errors
    /// [`Error::OpenAddress`], [`Error::CorsOrigin`], the files of TLS, and what
    /// the system says about the address.
    pub fn start(settings: Settings) -> Result<Server, Error> {
        settings.check()?;
        let tls = settings.tls.as_ref().map(Tls::read).transpose()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(Error::Runtime)?;
        let app = Arc::new(App::new(settings));
        let router = router(&app)?;
        let address = app.settings.address;
        let refused = |reason| Error::Listen { address, reason };
        let bound = runtime.block_on(tokio::net::TcpListener::bind(address));
        let socket = bound.map_err(refused)?;
        let address = socket.local_addr().map_err(refused)?;
        let (close, closing) = watch::channel(false);
        let listener = Listener {
            socket,
            tls,
            limits: app.settings.limits,
            router,
        };
        let accepting = runtime.spawn(listener.run(closing, LAST_WORDS));
        Ok(Server {
            runtime,
            app,
            address,
            phase: watch::Sender::new(Phase::Running),
            close,
            accepting,
        })
    }

    /// The address that clients reach, with its real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends the server from elsewhere.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.phase.clone())
    }

    /// From now on SIGTERM and Ctrl-C stop the server as [`Stopper::stop`] does.
    ///
    /// # Errors
    /// [`Error::Runtime`] if the system does not let us hear them.
    pub fn stop_on_signals(&self) -> Result<(), Error> {
        let _entered = self.runtime.enter();
        let stopper = self.stopper();
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let kinds = [SignalKind::terminate(), SignalKind::interrupt()];
            for mut signal in kinds
                .map(signal)
                .into_iter()
                .collect::<Result<Vec<_>, _>>()
                .map_err(Error::Runtime)?
            {
                let stopper = stopper.clone();
                self.runtime.spawn(async move {
                    while signal.recv().await.is_some() {
                        tracing::info!("told to stop");
                        stopper.stop();
                    }
                });
            }
        }
        #[cfg(not(unix))]
        self.runtime.spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                stopper.stop();
            }
        });
        Ok(())
    }

    /// The model is loaded: requests are answered.
    ///
    /// # Errors
    /// [`Error::NoModelName`], and [`Error::Text`] for a vocabulary that no
    /// guide can be made for.
    ///
    /// # Panics
    /// If there is a model already.
    pub fn serve(&self, parts: ModelParts) -> Result<(), Error> {
        let model = ServedModel::new(parts)?;
        self.app.metrics.add_model(&model);
        self.app.set_model(model);
        Ok(())
    }

    /// Serves until somebody stops it and the last answer is sent.
    ///
    /// # Errors
    /// [`Error::Unhealthy`] if the engine failed.
    pub fn wait(self) -> Result<(), Error> {
        let Server {
            runtime,
            app,
            phase,
            close,
            accepting,
            ..
        } = self;
        let outcome = runtime.block_on(async {
            let outcome = run(&app, &mut phase.subscribe()).await;
            close.send_replace(true);
            // A task of ours that panicked is as over as one that returned.
            let _ = accepting.await;
            outcome
        });
        runtime.shutdown_background();
        outcome
    }
}

/// Waits for the end, whatever brings it.
async fn run(app: &Arc<App>, phase: &mut watch::Receiver<Phase>) -> Result<(), Error> {
    let health = async {
        loop {
            tokio::time::sleep(HEALTH_INTERVAL).await;
            if let Some(State::Unhealthy { why }) = app.loaded().map(|m| m.handle.state()) {
                return why;
            }
        }
    };
    let ended = async {
        // The sender lives in `wait`.
        let _ = phase.wait_for(|phase| *phase >= Phase::Draining).await;
        tracing::info!("draining");
        if let Some(model) = app.loaded() {
            model.handle.drain();
        }
        tokio::select! {
            () = app.idle() => {}
            _ = phase.wait_for(|phase| *phase == Phase::Stopping) => tracing::info!("stopping"),
        }
    };
    let outcome = tokio::select! {
        why = health => Err(Error::Unhealthy { why }),
        () = ended => Ok(()),
    };
    if let Some(model) = app.loaded() {
        model.handle.stop();
    }
    outcome
}
