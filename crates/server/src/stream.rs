//! Answers as server-sent events: the way from pieces to the wire that all
//! formats share.

use crate::turn::{Piece, Turns};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// Silence after which a comment is sent: proxies close what is silent for a
/// minute, and a long prompt takes longer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How one wire format writes a stream.
pub trait Format: Send + 'static {
    /// What comes before anything is known.
    fn open(&mut self) -> Vec<Event>;

    /// What a piece is on the wire.
    fn piece(&mut self, piece: Piece) -> Vec<Event>;
}

/// The stream of `turns` in a format. It ends with them; dropping it cancels
/// them.
pub fn respond(turns: Turns, mut format: impl Format) -> Response {
    let waiting = VecDeque::from(format.open());
    let events = stream::unfold(
        (turns, format, waiting),
        |(mut turns, mut format, mut waiting)| async {
            loop {
                if let Some(event) = waiting.pop_front() {
                    return Some((Ok::<_, Infallible>(event), (turns, format, waiting)));
                }
                let piece = turns.next().await?;
                waiting.extend(format.piece(piece));
            }
        },
    );
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    // Proxies such as nginx collect an answer unless they are told not to.
    let no = http::HeaderValue::from_static("no");
    response.headers_mut().insert("x-accel-buffering", no);
    response
}
