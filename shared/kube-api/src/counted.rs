//! What is counted of calls, under the names of Kubernetes' own clients (node-and-api.md §15.2).

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
/// The code of a request that has no answer.
const NO_ANSWER: &str = "<error>";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    code: String,
    method: String,
    host: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    verb: String,
    host: String,
}

type Histograms = Family<Asked, Histogram, fn() -> Histogram>;

/// The requests of a service to the API server. Connections may share one.
#[derive(Debug, Clone)]
pub struct RestMetrics {
    requests: Family<Answered, Counter>,
    durations: Histograms,
    sent: Histograms,
    received: Histograms,
    waited: Histograms,
}

impl Default for RestMetrics {
    /// Ones that nobody reads.
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
    /// Ones of a service.
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

    /// A request has been answered with this status; none: it was not answered.
    fn answered(&self, code: Option<u16>, method: &str, host: &str) {
        let code = code.map_or_else(|| NO_ANSWER.to_owned(), |code| code.to_string());
        let labels = Answered { code, method: method.to_owned(), host: host.to_owned() };
        self.requests.get_or_create(&labels).inc();
    }

    /// A request has waited so long for its turn.
    pub(crate) fn limited(&self, verb: &str, host: &str, waited: Duration) {
        let labels = Asked { verb: verb.to_owned(), host: host.to_owned() };
        self.waited.get_or_create(&labels).observe(waited.as_secs_f64());
    }

    /// A call has ended after so long: bytes that were sent, and those of its answer where it has one.
    pub(crate) fn ended(&self, verb: &str, host: &str, took: Duration, sent: usize, received: Option<usize>) {
        let labels = Asked { verb: verb.to_owned(), host: host.to_owned() };
        #[allow(clippy::cast_precision_loss, reason = "no object has 2^52 bytes")]
        let bytes = |count: usize| count as f64;
        self.durations.get_or_create(&labels).observe(took.as_secs_f64());
        self.sent.get_or_create(&labels).observe(bytes(sent));
        if let Some(received) = received {
            self.received.get_or_create(&labels).observe(bytes(received));
        }
    }
}

/// A client whose requests are counted, watches among them.
#[derive(Debug, Clone)]
pub(crate) struct Counted<S> {
    pub(crate) inner: S,
    pub(crate) metrics: RestMetrics,
}

impl<S, B> tower::Service<Request<Body>> for Counted<S>
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
        let mut waiting = Waiting {
            metrics: self.metrics.clone(),
            method: request.method().to_string(),
            host: host_of(request.uri()),
            code: None,
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            waiting.code = answer.as_ref().ok().map(|response| response.status().as_u16());
            drop(waiting);
            answer
        })
    }
}

/// As labels have it: the name or the address, with the port where the address of the server has one.
pub(crate) fn host_of(uri: &http::Uri) -> String {
    uri.authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default()
}

/// A request that is on its way. One that nobody waits for any more counts too, as one without an answer.
struct Waiting {
    metrics: RestMetrics,
    method: String,
    host: String,
    code: Option<u16>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.metrics.answered(self.code, &self.method, &self.host);
    }
}
