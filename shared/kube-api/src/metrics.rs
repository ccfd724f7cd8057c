//! Request metrics under the names of Kubernetes' own clients (node-and-api.md §15.2).

use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::{Request, Response};
use keelson_service_kit::Metrics;
use kube::client::Body;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of durations in seconds.
const SECONDS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];
/// Upper bounds of sizes in bytes.
const BYTES: [f64; 11] = [
    64.0,
    256.0,
    512.0,
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
];
/// The code label of a request without an answer.
const NO_ANSWER: &str = "<error>";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    code: String,
    method: String,
    host: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    verb: String,
    host: String,
}

type Histograms = Family<CallLabels, Histogram, fn() -> Histogram>;

/// Metrics of a service's requests to the API server. Connections may share them.
#[derive(Debug, Clone)]
pub struct RestMetrics {
    requests: Family<RequestLabels, Counter>,
    durations: Histograms,
    sent: Histograms,
    received: Histograms,
    waited: Histograms,
}

impl Default for RestMetrics {
    /// Unregistered metrics.
    fn default() -> Self {
        Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            sent: Family::new_with_constructor(|| Histogram::new(BYTES)),
            received: Family::new_with_constructor(|| Histogram::new(BYTES)),
            waited: Family::new_with_constructor(|| Histogram::new(SECONDS)),
        }
    }
}

impl RestMetrics {
    /// The metrics, registered with those of a service.
    pub fn registered(metrics: &Metrics) -> Self {
        let own = Self::default();
        let requests = "Requests to the API server, by status code, method and host";
        metrics.register("rest_client_requests", requests, own.requests.clone());
        for (name, help, histograms) in [
            (
                "rest_client_request_duration_seconds",
                "How long requests took, watches left out",
                &own.durations,
            ),
            ("rest_client_request_size_bytes", "What was sent with a request", &own.sent),
            ("rest_client_response_size_bytes", "What an answer had in it", &own.received),
            (
                "rest_client_rate_limiter_duration_seconds",
                "How long requests waited for their turn",
                &own.waited,
            ),
        ] {
            metrics.register(name, help, histograms.clone());
        }
        own
    }

    /// Counts a request by its status code; `None`: no answer.
    fn answered(&self, code: Option<u16>, method: &str, host: &str) {
        let code = code.map_or_else(|| NO_ANSWER.to_owned(), |code| code.to_string());
        let labels = RequestLabels { code, method: method.to_owned(), host: host.to_owned() };
        self.requests.get_or_create(&labels).inc();
    }

    /// Records how long a request waited for the rate limiter.
    pub(crate) fn limited(&self, verb: &str, host: &str, waited: Duration) {
        let labels = CallLabels { verb: verb.to_owned(), host: host.to_owned() };
        self.waited.get_or_create(&labels).observe(waited.as_secs_f64());
    }

    /// Records the duration of a call and the bytes sent and received; `received` is `None` without an answer.
    pub(crate) fn ended(&self, verb: &str, host: &str, took: Duration, sent: usize, received: Option<usize>) {
        let labels = CallLabels { verb: verb.to_owned(), host: host.to_owned() };
        #[allow(clippy::cast_precision_loss, reason = "no object has 2^52 bytes")]
        let bytes = |count: usize| count as f64;
        self.durations.get_or_create(&labels).observe(took.as_secs_f64());
        self.sent.get_or_create(&labels).observe(bytes(sent));
        if let Some(received) = received {
            self.received.get_or_create(&labels).observe(bytes(received));
        }
    }
}

/// A client whose requests are counted, including watches.
#[derive(Debug, Clone)]
pub(crate) struct CountedService<S> {
    pub(crate) inner: S,
    pub(crate) metrics: RestMetrics,
}

impl<S, B> tower::Service<Request<Body>> for CountedService<S>
where
    S: tower::Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: 'static,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut request_in_flight = InFlight {
            metrics: self.metrics.clone(),
            method: request.method().to_string(),
            host: host_of(request.uri()),
            code: None,
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            request_in_flight.code = answer.as_ref().ok().map(|response| response.status().as_u16());
            drop(request_in_flight);
            answer
        })
    }
}

/// The host label: the name or address, with the port if the server's URL has one.
pub(crate) fn host_of(uri: &http::Uri) -> String {
    uri.authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default()
}

/// A request in flight. An abandoned one is counted, too, as one without an answer.
struct InFlight {
    metrics: RestMetrics,
    method: String,
    host: String,
    code: Option<u16>,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.metrics.answered(self.code, &self.method, &self.host);
    }
}
