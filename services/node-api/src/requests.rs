//! Counts the requests of the kubelet API (node-and-api.md §8.12, §15.1).

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the buckets in seconds.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// First segments of the paths of a kubelet that have a label of their own.
const PATHS: [&str; 19] = [
    "attach",
    "checkpoint",
    "configz",
    "containerLogs",
    "debug",
    "exec",
    "flagz",
    "healthz",
    "logs",
    "metrics",
    "metrics/cadvisor",
    "metrics/probes",
    "metrics/resource",
    "metrics/slis",
    "pods",
    "run",
    "runningpods",
    "stats",
    "statusz",
];

/// A request that may last for hours; the label of port-forwards is as a kubelet has it.
const LONG_RUNNING: [&str; 3] = ["exec", "attach", "debug"];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    method: &'static str,
    path: &'static str,
    server_type: &'static str,
    long_running: &'static str,
}

impl Labels {
    fn of(method: &Method, path: &str, server_type: &'static str) -> Self {
        let path = path_label(path);
        let long_running = if LONG_RUNNING.contains(&path) { "true" } else { "false" };
        Self { method: method_label(method), path, server_type, long_running }
    }
}

fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::CONNECT => "CONNECT",
        Method::OPTIONS => "OPTIONS",
        Method::TRACE => "TRACE",
        _ => "other",
    }
}

/// The first segment of a path, two of one below `/metrics`; `other` for what a kubelet does not have.
fn path_label(path: &str) -> &'static str {
    let path = path.trim_start_matches('/');
    let mut segments = path.splitn(3, '/');
    let first = segments.next().unwrap_or_default();
    let label = match segments.next() {
        Some(second) if first == "metrics" && !second.is_empty() => &path[..first.len() + 1 + second.len()],
        _ => first,
    };
    PATHS.iter().find(|known| **known == label).copied().unwrap_or(match label {
        "portForward" => "portForward",
        _ => "other",
    })
}

/// What was asked of the kubelet API. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Requests {
    total: Family<Labels, Counter>,
    inflight: Family<Labels, Gauge>,
    seconds: Family<Labels, Histogram, fn() -> Histogram>,
    websockets: WebSockets,
}

/// The streams over WebSocket that end here (node-and-api.md §8.4). Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct WebSockets(Family<Subresource, Counter>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Subresource {
    subresource: &'static str,
}

impl WebSockets {
    /// Counts one of `exec`, `attach` or `portforward`.
    pub(crate) fn count(&self, subresource: &'static str) {
        self.0.get_or_create(&Subresource { subresource }).inc();
    }
}

impl Requests {
    /// Registers them.
    pub fn register(metrics: &Metrics) -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        let own = Self {
            total: Family::default(),
            inflight: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            websockets: WebSockets::default(),
        };
        let help = "Requests for streams of a container or a port over WebSocket that were taken";
        metrics.register("kubelet_websocket_streaming_requests", help, own.websockets.0.clone());
        let help = "Requests of the kubelet API that were received";
        metrics.register("kubelet_http_requests", help, own.total.clone());
        let help = "Requests of the kubelet API that are being answered";
        metrics.register("kubelet_http_inflight_requests", help, own.inflight.clone());
        let help = "Seconds from a request of the kubelet API to the end of its answer";
        metrics.register("kubelet_http_requests_duration_seconds", help, own.seconds.clone());
        own
    }

    /// Those that come in at one of the ports.
    pub(crate) fn of_server(&self, server_type: &'static str) -> OfServer {
        OfServer { requests: self.clone(), server_type }
    }

    fn begin(&self, labels: Labels) -> Running {
        self.total.get_or_create(&labels).inc();
        self.inflight.get_or_create(&labels).inc();
        Running { requests: self.clone(), labels, begun: Instant::now() }
    }
}

/// The requests of one port.
#[derive(Debug, Clone)]
pub(crate) struct OfServer {
    requests: Requests,
    server_type: &'static str,
}

impl OfServer {
    /// Those that become streams over WebSocket.
    pub(crate) fn websockets(&self) -> WebSockets {
        self.requests.websockets.clone()
    }
}

/// A request until its answer has ended, or its client has gone.
struct Running {
    requests: Requests,
    labels: Labels,
    begun: Instant,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.requests.inflight.get_or_create(&self.labels).dec();
        self.requests.seconds.get_or_create(&self.labels).observe(self.begun.elapsed().as_secs_f64());
    }
}

/// Answers a request and counts it.
pub(crate) async fn count(State(of): State<OfServer>, request: Request, next: Next) -> Response {
    let running = of.requests.begin(Labels::of(request.method(), request.uri().path(), of.server_type));
    let answer = next.run(request).await;
    answer.map(|inner| Body::new(Counted { inner, _running: running }))
}

/// The body of an answer, with the request that it belongs to.
struct Counted {
    inner: Body,
    _running: Running,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_the_label_of_their_first_segment_when_a_kubelet_has_it() {
        for (path, label) in [
            ("/pods", "pods"),
            ("/containerLogs/ns/pod/app", "containerLogs"),
            ("/metrics", "metrics"),
            ("/metrics/", "metrics"),
            ("/metrics/cadvisor", "metrics/cadvisor"),
            ("/metrics/none", "other"),
            ("/stats/summary", "stats"),
            ("/runningpods/", "runningpods"),
            ("/healthz/ping", "healthz"),
            ("/portForward/a/b", "portForward"),
            ("/", "other"),
            ("/wp-login.php", "other"),
        ] {
            assert_eq!(path_label(path), label, "{path}");
        }
        let labels = Labels::of(&Method::POST, "/exec/ns/pod/app", "readonly");
        assert_eq!((labels.method, labels.long_running, labels.server_type), ("POST", "true", "readonly"));
        assert_eq!(method_label(&Method::from_bytes(b"BREW").unwrap()), "other");
    }

    #[test]
    fn a_request_is_in_flight_until_its_answer_has_ended() {
        let metrics = Metrics::new();
        let requests = Requests::register(&metrics);
        let labels = || Labels::of(&Method::GET, "/pods", "readwrite");
        let series = "{method=\"GET\",path=\"pods\",server_type=\"readwrite\",long_running=\"false\"}";
        let has = |line: String| assert!(metrics.text().contains(&line), "{line}: {}", metrics.text());
        let running = requests.begin(labels());
        has(format!("kubelet_http_requests_total{series} 1\n"));
        has(format!("kubelet_http_inflight_requests{series} 1\n"));
        assert!(!metrics.text().contains("duration_seconds_count"), "{}", metrics.text());
        drop(running);
        has(format!("kubelet_http_inflight_requests{series} 0\n"));
        has(format!("kubelet_http_requests_duration_seconds_count{series} 1\n"));
    }
}
