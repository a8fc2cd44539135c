//! From the bytes of a request to what is ready for the engine: what the wire
//! formats have in common.
//!
//! What one would get wrong: rendering, tokenizing and compiling grammars are
//! work, so none of it happens on the threads that serve connections.

use crate::api_error::ApiError;
use crate::app::{App, InFlight};
use crate::body::announce;
use crate::fields::{Ignored, OwnFields, parse_both};
use crate::generation::Deadline;
use crate::generation_fields::GenerationFields;
use crate::model::ServedModel;
use crate::request::{Arrival, blocking};
use crate::turn::{Prompt, Terms, Turns};
use axum::body::Bytes;
use axum::response::Response;
use std::sync::Arc;

/// The fields of a wire format, beside those of every generation.
pub trait Fields: OwnFields + Send + 'static {
    /// What is kept beside the prompts.
    type Extra: Send + 'static;

    /// The name of the model that is asked for.
    fn model(&self) -> Option<&str>;

    /// Makes prompts of the fields.
    ///
    /// # Errors
    /// 400 for what is wrong with them, by name.
    fn prepare(self, context: &mut Context<'_>) -> Result<Prepared<Self::Extra>, ApiError>;
}

/// What fields are prepared with.
pub struct Context<'a> {
    /// The fields of every generation.
    pub generation: &'a GenerationFields,
    /// The model.
    pub model: &'a ServedModel,
    /// When the request is to be over.
    pub deadline: Option<Deadline>,
    /// Fields without effect.
    pub ignored: &'a mut Ignored,
}

/// What fields become.
pub struct Prepared<E> {
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// What is asked of each of them.
    pub terms: Terms,
    /// What the wire format keeps.
    pub extra: E,
}

/// A request that is ready for the engine.
pub struct Admitted<E> {
    /// The model.
    pub model: Arc<ServedModel>,
    /// Prompts and what is asked of them.
    pub prepared: Prepared<E>,
    /// Is the answer sent as it is made?
    pub is_stream: bool,
    /// Does the stream end with the token counts?
    pub includes_usage: bool,
    app: Arc<App>,
    ignored: Ignored,
    in_flight: InFlight,
}

/// Reads and prepares a request.
///
/// # Errors
/// 400 by the field that is wrong, 404 for another model, 503 while starting.
pub async fn admit<F: Fields>(
    app: Arc<App>,
    arrival: Arrival,
    bytes: Bytes,
) -> Result<Admitted<F::Extra>, ApiError> {
    let in_flight = app.enter();
    let model = Arc::clone(app.model()?);
    blocking(move || {
        arrival.log_prompt(&app.settings, &bytes);
        let (fields, generation, mut ignored) = parse_both::<F>(&bytes)?;
        model.check_name(fields.model())?;
        generation.check_stream()?;
        let deadline = generation.deadline(arrival.at, app.settings.limits.deadline)?;
        let prepared = fields.prepare(&mut Context {
            generation: &generation,
            model: &model,
            deadline,
            ignored: &mut ignored,
        })?;
        Ok(Admitted {
            model,
            prepared,
            is_stream: generation.is_stream(),
            includes_usage: generation.includes_usage(),
            app,
            ignored,
            in_flight,
        })
    })
    .await
}

impl<E> Admitted<E> {
    /// Hands it to the engine.
    ///
    /// # Errors
    /// The engine's refusal.
    pub fn start(self) -> Result<(Turns, E, Notes), ApiError> {
        let Prepared {
            prompts,
            terms,
            extra,
        } = self.prepared;
        let grace = self.app.settings.limits.reader_grace;
        let turns = Turns::start(&self.model, prompts, &terms, grace, self.in_flight)?;
        Ok((turns, extra, Notes(self.ignored)))
    }

    /// What is said beside the answer, for a request that gets none.
    pub fn notes(self) -> Notes {
        Notes(self.ignored)
    }
}

/// What is said beside an answer.
pub struct Notes(Ignored);

impl Notes {
    /// The answer with them.
    pub fn on(&self, mut response: Response) -> Response {
        announce(&self.0, response.headers_mut());
        response
    }
}
