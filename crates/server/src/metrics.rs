//! `GET /metrics`: what Prometheus reads, the engine's numbers and our own.
//!
//! What one would get wrong: the engine's numbers are not kept here a second
//! time. A collector copies its snapshot at the moment of the scrape.

use crate::api_error::ApiError;
use crate::app::App;
use crate::model::ServedModel;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use engine::{BUCKET_SECONDS, Handle, Histogram};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use text::GuideFactory;

/// The content type of the text format.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The registry and the counters of HTTP.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    requests: Family<Labels, Counter>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    route: String,
    status: u32,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::with_prefix("muser");
        let requests = Family::<Labels, Counter>::default();
        registry.register("http_requests", "Answered requests", requests.clone());
        Metrics {
            registry: Mutex::new(registry),
            requests,
        }
    }

    /// Also shows the numbers of the engine and of the grammars.
    pub(crate) fn add_model(&self, model: &ServedModel) {
        let engine = Engine(model.handle.clone());
        let grammars = Grammars(model.completions.clone());
        let mut registry = self.registry();
        registry.register_collector(Box::new(engine));
        registry.register_collector(Box::new(grammars));
    }

    /// Counts an answer.
    pub(crate) fn count(&self, route: &str, status: u16) {
        let labels = Labels {
            route: route.to_string(),
            status: status.into(),
        };
        self.requests.get_or_create(&labels).inc();
    }

    fn registry(&self) -> std::sync::MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The numbers for Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "operation",
    responses(
        (status = 200, body = String, content_type = "application/openmetrics-text"),
        crate::openapi::NotLetIn
    )
)]
pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let mut text = String::new();
    encode(&mut text, &app.metrics.registry()).map_err(ApiError::internal)?;
    Ok(([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response())
}

/// Copies the engine's numbers.
struct Engine(Handle);

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Engine")
    }
}

impl Collector for Engine {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let metrics = self.0.metrics();
        encode_counters(&mut encoder, &metrics)?;
        encode_gauges(&mut encoder, &metrics)?;
        for (name, help, histogram) in [
            (
                "first_token",
                "From submission to the first token",
                &metrics.first_token,
            ),
            (
                "token_interval",
                "Between two tokens of one answer",
                &metrics.token_interval,
            ),
            ("pass_time", "Passes of the model", &metrics.pass_time),
            (
                "draft_time",
                "Making the drafts of a pass",
                &metrics.draft_time,
            ),
        ] {
            encode_times(&mut encoder, name, help, histogram)?;
        }
        Ok(())
    }
}

/// Copies the numbers of the grammars.
struct Grammars(GuideFactory);

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammars")
    }
}

impl Collector for Grammars {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = self.0.grammar_counts();
        let counters = [
            (
                "grammars_compiled",
                "Grammars that were compiled",
                counts.n_compiled,
            ),
            (
                "grammars_found",
                "Grammars that were kept from earlier requests",
                counts.n_found,
            ),
        ];
        counters
            .into_iter()
            .try_for_each(|counter| encode_counter(&mut encoder, counter))?;
        let bytes = Some(&Unit::Bytes);
        let held = (
            "grammars",
            "Grammars that are kept",
            bytes,
            counts.n_bytes as u64,
        );
        encode_gauge(&mut encoder, held)
    }
}

fn encode_counter(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, value): (&str, &str, u64),
) -> Result<(), fmt::Error> {
    let counter = ConstCounter::new(value);
    let to = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
    counter.encode(to)
}

fn encode_gauge(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit, value): (&str, &str, Option<&Unit>, u64),
) -> Result<(), fmt::Error> {
    let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
    let to = encoder.encode_descriptor(name, help, unit, gauge.metric_type())?;
    gauge.encode(to)
}

fn encode_counters(
    encoder: &mut DescriptorEncoder<'_>,
    m: &engine::Metrics,
) -> Result<(), fmt::Error> {
    [
        ("jobs", "Jobs taken", m.requests),
        ("jobs_refused", "Jobs not taken", m.refused),
        (
            "jobs_completed",
            "Jobs that ended by themselves",
            m.completed,
        ),
        ("jobs_cancelled", "Jobs whose client went away", m.cancelled),
        ("jobs_expired", "Jobs that ran out of time", m.expired),
        ("jobs_failed", "Jobs that failed", m.failed),
        ("prompt_tokens", "Tokens of prompts", m.prompt_tokens),
        (
            "cached_tokens",
            "Prompt tokens taken over from the cache",
            m.cached_tokens,
        ),
        ("generated_tokens", "Tokens made", m.generated_tokens),
        (
            "cache_lookups",
            "Prompts looked up in the cache",
            m.cache_lookups,
        ),
        ("cache_hits", "Prompts found there in part", m.cache_hits),
        (
            "cache_evictions",
            "Positions that the cache gave up",
            m.cache_evictions,
        ),
        (
            "preemptions",
            "Sequences that gave up their pages",
            m.preemptions,
        ),
        (
            "recomputed_tokens",
            "Rows computed anew after that",
            m.recomputed_tokens,
        ),
        (
            "draft_rounds",
            "Drafts that were verified",
            m.speculation.rounds,
        ),
        (
            "drafted_tokens",
            "Tokens of these drafts",
            m.speculation.drafted,
        ),
        (
            "accepted_tokens",
            "Those of them that were right",
            m.speculation.accepted,
        ),
        ("passes", "Passes of the model", m.passes),
        ("rows", "Rows of all passes", m.rows),
    ]
    .into_iter()
    .try_for_each(|counter| encode_counter(encoder, counter))
}

fn encode_gauges(
    encoder: &mut DescriptorEncoder<'_>,
    m: &engine::Metrics,
) -> Result<(), fmt::Error> {
    let bytes = Some(&Unit::Bytes);
    [
        (
            "sequences_running",
            "Sequences that run",
            None,
            m.running as u64,
        ),
        (
            "sequences_waiting",
            "Sequences that wait",
            None,
            m.waiting as u64,
        ),
        (
            "speculation_stopped",
            "Was speculation given up for good?",
            None,
            m.speculation_stopped.is_some().into(),
        ),
        ("pages_used", "Pages in use", None, m.pages_used as u64),
        (
            "cache_pages",
            "Pages that the cache holds",
            None,
            m.cache_pages as u64,
        ),
        ("cache", "What the cache holds", bytes, m.cache_bytes),
        ("kv_used", "Keys and values in use", bytes, m.kv_used_bytes),
        (
            "kv_capacity",
            "Room for keys and values",
            bytes,
            m.kv_capacity_bytes,
        ),
    ]
    .into_iter()
    .try_for_each(|gauge| encode_gauge(encoder, gauge))
}

fn encode_times(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    histogram: &Histogram,
) -> Result<(), fmt::Error> {
    let bounds = BUCKET_SECONDS.into_iter().chain([f64::MAX]);
    let buckets: Vec<(f64, u64)> = bounds.zip(histogram.counts).collect();
    let unit = Some(&Unit::Seconds);
    let mut to = encoder.encode_descriptor(name, help, unit, MetricType::Histogram)?;
    to.encode_histogram::<NoLabelSet>(histogram.sum_seconds, histogram.count(), &buckets, None)
}
