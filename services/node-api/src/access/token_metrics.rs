//! Metrics of the token cache, under the kubelet's names (node-and-api.md §15.2).

use keelson_service_kit::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

/// Upper bounds of the buckets in seconds.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

type Status = [(&'static str, &'static str); 1];

fn status(text: &'static str) -> Status {
    [("status", text)]
}

/// The four metric families.
#[derive(Debug, Clone)]
pub(super) struct TokenMetrics {
    durations: Family<Status, Histogram, fn() -> Histogram>,
    requests: Family<Status, Counter>,
    fetches: Family<Status, Counter>,
    fetching: Family<Status, Gauge>,
}

impl TokenMetrics {
    pub(super) fn register(metrics: &Metrics) -> Self {
        let families = Self {
            durations: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            requests: Family::default(),
            fetches: Family::default(),
            fetching: Family::default(),
        };
        metrics.register(
            "authentication_token_cache_request_duration_seconds",
            "Seconds to authenticate a token, by whether it was cached",
            families.durations.clone(),
        );
        metrics.register(
            "authentication_token_cache_request",
            "Tokens of requests, by whether they were cached",
            families.requests.clone(),
        );
        metrics.register(
            "authentication_token_cache_fetch",
            "Token reviews by the API server, by whether it answered",
            families.fetches.clone(),
        );
        metrics.register(
            "authentication_token_cache_active_fetch_count",
            "Token reviews in progress",
            families.fetching.clone(),
        );
        families
    }

    /// Counts a token of a request that began at `started`.
    pub(super) fn count(&self, was_cached: bool, started: Instant) {
        let labels = status(if was_cached { "hit" } else { "miss" });
        self.requests.get_or_create(&labels).inc();
        self.durations.get_or_create(&labels).observe(started.elapsed().as_secs_f64());
    }

    /// A review begins. It ends when the value is dropped: as an error, unless [`Fetch::set_answered`] was called.
    pub(super) fn fetch(&self) -> Fetch<'_> {
        self.fetching.get_or_create(&status("in_flight")).inc();
        Fetch { metrics: self, outcome: "error" }
    }
}

/// A token review in progress.
#[derive(Debug)]
pub(super) struct Fetch<'a> {
    metrics: &'a TokenMetrics,
    outcome: &'static str,
}

impl Fetch<'_> {
    /// The API server authenticated or rejected the token.
    pub(super) fn set_answered(&mut self) {
        self.outcome = "ok";
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        self.metrics.fetching.get_or_create(&status("in_flight")).dec();
        self.metrics.fetches.get_or_create(&status(self.outcome)).inc();
    }
}
