//! Metrics of reviews, under the kubelet's names (node-and-api.md §15.2).

use std::time::Duration;

use keelson_kube_api::KubeError;
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the buckets, in seconds.
const SECONDS: [f64; 8] = [0.25, 0.5, 0.7, 1.0, 1.5, 3.0, 5.0, 10.0];
/// The status code of a created review.
const CREATED: &str = "201";
/// The label of a request without a response.
const NO_RESPONSE: &str = "<error>";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: String,
}

/// Metrics of one kind of review.
#[derive(Debug, Clone)]
pub(crate) struct ReviewCounters {
    requests: Family<Code, Counter>,
    durations: Family<Code, Histogram, fn() -> Histogram>,
}

impl ReviewCounters {
    fn registered(metrics: &Metrics, name: &str, what: &str) -> Self {
        let durations: Family<Code, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(SECONDS));
        let own = Self { requests: Family::default(), durations };
        let requests = format!("{what} by the API server, by status code");
        metrics.register(&format!("{name}_request"), &requests, own.requests.clone());
        let durations = format!("Duration of {what} by the API server, by status code");
        metrics.register(&format!("{name}_request_duration_seconds"), &durations, own.durations.clone());
        own
    }

    /// Records the result of a request.
    pub(crate) fn record<T>(&self, answer: &Result<T, KubeError>, took: Duration) {
        let code = match answer {
            Ok(_) => CREATED.to_owned(),
            Err(error) => error.code().map_or_else(|| NO_RESPONSE.to_owned(), |code| code.to_string()),
        };
        let labels = Code { code };
        self.requests.get_or_create(&labels).inc();
        self.durations.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

/// Metrics of both kinds.
#[derive(Debug, Clone)]
pub(crate) struct ReviewMetrics {
    /// Token reviews.
    pub(crate) tokens: ReviewCounters,
    /// Access reviews.
    pub(crate) access: ReviewCounters,
}

impl ReviewMetrics {
    pub(crate) fn registered(metrics: &Metrics) -> Self {
        Self {
            tokens: ReviewCounters::registered(metrics, "apiserver_delegated_authn", "Token reviews"),
            access: ReviewCounters::registered(metrics, "apiserver_delegated_authz", "Access reviews"),
        }
    }
}
