//! What is counted of remembered tokens, under the names that a kubelet has for them (node-and-api.md §15.2).

use keelson_service_kit::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

/// Upper bounds in seconds.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

type Status = [(&'static str, &'static str); 1];

fn status(text: &'static str) -> Status {
    [("status", text)]
}

/// The four families.
#[derive(Debug, Clone)]
pub(super) struct TokenMetrics {
    durations: Family<Status, Histogram, fn() -> Histogram>,
    requests: Family<Status, Counter>,
    fetches: Family<Status, Counter>,
    fetching: Family<Status, Gauge>,
}

impl TokenMetrics {
    pub(super) fn registered(metrics: &Metrics) -> Self {
        let own = Self {
            durations: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            requests: Family::default(),
            fetches: Family::default(),
            fetching: Family::default(),
        };
        metrics.register(
            "authentication_token_cache_request_duration_seconds",
            "How long it took to know whose token it is, by whether it was remembered",
            own.durations.clone(),
        );
        metrics.register(
            "authentication_token_cache_request",
            "Tokens that were shown, by whether they were remembered",
            own.requests.clone(),
        );
        metrics.register(
            "authentication_token_cache_fetch",
            "Tokens that the API server was asked about, by whether it could say",
            own.fetches.clone(),
        );
        metrics.register(
            "authentication_token_cache_active_fetch_count",
            "Tokens that the API server is being asked about",
            own.fetching.clone(),
        );
        own
    }

    /// It was known, or had to be asked for, whose token it is that was shown at `began`.
    pub(super) fn known(&self, was_remembered: bool, began: Instant) {
        let labels = status(if was_remembered { "hit" } else { "miss" });
        self.requests.get_or_create(&labels).inc();
        self.durations.get_or_create(&labels).observe(began.elapsed().as_secs_f64());
    }

    /// A question begins; it has ended when this is dropped, as one without an answer unless [`Fetch::answered`] was called.
    pub(super) fn fetch(&self) -> Fetch<'_> {
        self.fetching.get_or_create(&status("in_flight")).inc();
        Fetch { metrics: self, outcome: "error" }
    }
}

/// A question that is on its way.
#[derive(Debug)]
pub(super) struct Fetch<'a> {
    metrics: &'a TokenMetrics,
    outcome: &'static str,
}

impl Fetch<'_> {
    /// The server could say whose token it is, or that it is nobody's.
    pub(super) fn answered(&mut self) {
        self.outcome = "ok";
    }
}

impl Drop for Fetch<'_> {
    fn drop(&mut self) {
        self.metrics.fetching.get_or_create(&status("in_flight")).dec();
        self.metrics.fetches.get_or_create(&status(self.outcome)).inc();
    }
}
