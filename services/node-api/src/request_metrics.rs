//! Request metrics of the kubelet API (node-and-api.md §8.12, §15.1).

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

/// The values of the label `path`: the first segments of the paths of a kubelet.
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

/// Values of `path` with `long_running="true"`; as in a kubelet, port-forwards are not among them.
const LONG_RUNNING: [&str; 3] = ["exec", "attach", "debug"];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    method: &'static str,
    path: &'static str,
    server_type: &'static str,
    long_running: &'static str,
}

impl Labels {
    fn new(method: &Method, path: &str, server_type: &'static str) -> Self {
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

/// The first segment of a path, or the first two below `/metrics`; `other` for paths that a kubelet does not have.
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

/// The request metrics. Cheap to clone.
#[derive(Debug, Clone)]
pub struct RequestMetrics {
    total: Family<Labels, Counter>,
    inflight: Family<Labels, Gauge>,
    seconds: Family<Labels, Histogram, fn() -> Histogram>,
    websockets: WebSocketMetrics,
}

/// Counts the streams over WebSocket that are terminated here (node-and-api.md §8.4). Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct WebSocketMetrics(Family<Subresource, Counter>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Subresource {
    subresource: &'static str,
}

impl WebSocketMetrics {
    /// Counts a stream; `subresource` is `exec`, `attach` or `portforward`.
    pub(crate) fn count(&self, subresource: &'static str) {
        self.0.get_or_create(&Subresource { subresource }).inc();
    }
}

impl RequestMetrics {
    /// Registers the metrics; call it once.
    pub fn register(metrics: &Metrics) -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        let families = Self {
            total: Family::default(),
            inflight: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            websockets: WebSocketMetrics::default(),
        };
        let help = "Requests for streams of a container or a port over WebSocket";
        metrics.register("kubelet_websocket_streaming_requests", help, families.websockets.0.clone());
        let help = "Requests that the kubelet API has received";
        metrics.register("kubelet_http_requests", help, families.total.clone());
        let help = "Requests that the kubelet API is answering";
        metrics.register("kubelet_http_inflight_requests", help, families.inflight.clone());
        let help = "Seconds from a request to the kubelet API until the end of the response";
        metrics.register("kubelet_http_requests_duration_seconds", help, families.seconds.clone());
        families
    }

    /// The metrics of one port.
    pub(crate) fn for_server(&self, server_type: &'static str) -> ServerMetrics {
        ServerMetrics { requests: self.clone(), server_type }
    }

    fn begin(&self, labels: Labels) -> InFlightRequest {
        self.total.get_or_create(&labels).inc();
        self.inflight.get_or_create(&labels).inc();
        InFlightRequest { requests: self.clone(), labels, started: Instant::now() }
    }
}

/// The request metrics of one port.
#[derive(Debug, Clone)]
pub(crate) struct ServerMetrics {
    requests: RequestMetrics,
    server_type: &'static str,
}

impl ServerMetrics {
    /// The counter of streams over WebSocket.
    pub(crate) fn websockets(&self) -> WebSocketMetrics {
        self.requests.websockets.clone()
    }
}

/// A request in flight, until its response has ended or its client has disconnected.
struct InFlightRequest {
    requests: RequestMetrics,
    labels: Labels,
    started: Instant,
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.requests.inflight.get_or_create(&self.labels).dec();
        self.requests.seconds.get_or_create(&self.labels).observe(self.started.elapsed().as_secs_f64());
    }
}

/// Middleware that counts requests.
pub(crate) async fn count(State(metrics): State<ServerMetrics>, request: Request, next: Next) -> Response {
    let labels = Labels::new(request.method(), request.uri().path(), metrics.server_type);
    let in_flight = metrics.requests.begin(labels);
    let response = next.run(request).await;
    response.map(|inner| Body::new(CountedBody { inner, _in_flight: in_flight }))
}

/// A response body, with the request that it answers.
struct CountedBody {
    inner: Body,
    _in_flight: InFlightRequest,
}

impl HttpBody for CountedBody {
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
    fn path_label_is_the_first_segment_or_other() {
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
        let labels = Labels::new(&Method::POST, "/exec/ns/pod/app", "readonly");
        assert_eq!((labels.method, labels.long_running, labels.server_type), ("POST", "true", "readonly"));
        assert_eq!(method_label(&Method::from_bytes(b"BREW").unwrap()), "other");
    }

    #[test]
    fn request_is_in_flight_until_its_response_body_ends() {
        let metrics = Metrics::new();
        let requests = RequestMetrics::register(&metrics);
        let labels = || Labels::new(&Method::GET, "/pods", "readwrite");
        let series = "{method=\"GET\",path=\"pods\",server_type=\"readwrite\",long_running=\"false\"}";
        let has = |line: String| assert!(metrics.text().contains(&line), "{line}: {}", metrics.text());
        let in_flight = requests.begin(labels());
        has(format!("kubelet_http_requests_total{series} 1\n"));
        has(format!("kubelet_http_inflight_requests{series} 1\n"));
        assert!(!metrics.text().contains("duration_seconds_count"), "{}", metrics.text());
        drop(in_flight);
        has(format!("kubelet_http_inflight_requests{series} 0\n"));
        has(format!("kubelet_http_requests_duration_seconds_count{series} 1\n"));
    }
}
