//! What all requests share.

use crate::api_error::ApiError;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::settings::Settings;
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// Settings, the model once it is loaded, counters.
#[derive(Debug)]
pub struct App {
    /// What the server was told.
    pub settings: Settings,
    /// What `/metrics` shows beside the engine's own.
    pub metrics: Metrics,
    model: OnceLock<Arc<ServedModel>>,
    n_in_flight: watch::Sender<usize>,
}

impl App {
    pub(crate) fn new(settings: Settings) -> App {
        App {
            settings,
            metrics: Metrics::new(),
            model: OnceLock::new(),
            n_in_flight: watch::Sender::new(0),
        }
    }

    /// The model.
    ///
    /// # Errors
    /// 503 while it is loading.
    pub fn model(&self) -> Result<&Arc<ServedModel>, ApiError> {
        self.loaded()
            .ok_or_else(|| ApiError::unavailable("starting", "the model is loading"))
    }

    /// The model, if it is loaded.
    pub fn loaded(&self) -> Option<&Arc<ServedModel>> {
        self.model.get()
    }

    pub(crate) fn set_model(&self, model: ServedModel) {
        let is_first = self.model.set(Arc::new(model)).is_ok();
        assert!(is_first, "a server has one model");
    }

    /// Counts a request as being answered.
    pub fn enter(self: &Arc<Self>) -> InFlight {
        self.n_in_flight.send_modify(|n| *n += 1);
        InFlight(Arc::clone(self))
    }

    /// Waits until no request is being answered.
    pub(crate) async fn idle(&self) {
        let mut n = self.n_in_flight.subscribe();
        // The sender lives as long as `self`.
        let _ = n.wait_for(|&n| n == 0).await;
    }
}

/// A request that is being answered, as long as it lives.
#[derive(Debug)]
pub struct InFlight(Arc<App>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.n_in_flight.send_modify(|n| *n -= 1);
    }
}
