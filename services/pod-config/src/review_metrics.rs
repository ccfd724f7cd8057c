//! What is counted of reviews, under the names that a kubelet has for them (node-and-api.md §15.2).

use std::time::Duration;

use keelson_kube_api::KubeError;
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds in seconds.
const SECONDS: [f64; 8] = [0.25, 0.5, 0.7, 1.0, 1.5, 3.0, 5.0, 10.0];
/// What the server says of a review that it has made; it creates one.
const MADE: &str = "201";
/// The code of a question that has no answer.
const NO_ANSWER: &str = "<error>";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: String,
}

/// One of the two kinds.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    requests: Family<Code, Counter>,
    durations: Family<Code, Histogram, fn() -> Histogram>,
}

impl Asked {
    fn registered(metrics: &Metrics, name: &str, what: &str) -> Self {
        let durations: Family<Code, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(SECONDS));
        let own = Self { requests: Family::default(), durations };
        let requests = format!("Questions to the API server {what}, by status code");
        metrics.register(&format!("{name}_request"), &requests, own.requests.clone());
        let durations = format!("How long the API server took to say {what}, by status code");
        metrics.register(&format!("{name}_request_duration_seconds"), &durations, own.durations.clone());
        own
    }

    /// A question was answered, or was not.
    pub(crate) fn ended<T>(&self, answer: &Result<T, KubeError>, took: Duration) {
        let code = match answer {
            Ok(_) => MADE.to_owned(),
            Err(error) => error.code().map_or_else(|| NO_ANSWER.to_owned(), |code| code.to_string()),
        };
        let labels = Code { code };
        self.requests.get_or_create(&labels).inc();
        self.durations.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

/// Both kinds.
#[derive(Debug, Clone)]
pub(crate) struct ReviewMetrics {
    /// Whose token it is.
    pub(crate) tokens: Asked,
    /// Whether somebody may do something.
    pub(crate) access: Asked,
}

impl ReviewMetrics {
    pub(crate) fn registered(metrics: &Metrics) -> Self {
        Self {
            tokens: Asked::registered(metrics, "apiserver_delegated_authn", "whose token it is"),
            access: Asked::registered(metrics, "apiserver_delegated_authz", "what somebody may do"),
        }
    }
}
