//! Counts the calls to the container runtime, runtime-shim's own and those that are passed through, in the kubelet's
//! metrics (node-and-api.md §15.1, runtime-and-resources.md §1.4).
//!
//! A call is counted when it has ended. A response with any status but OK is an error, and so is a call that its caller
//! cancels. The event stream is counted when it begins and has no duration.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use keelson_runtime_shim_core::operation::Operation;
use keelson_service_kit::{Metrics, PeerChannel};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tower::Service;

/// Upper bounds of the buckets for the creation of a sandbox, in seconds: Prometheus' defaults.
const SANDBOX_SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Upper bounds of the buckets of all calls in seconds, 5 ms to 12 min. Each bound is the previous one times 2.5,
/// multiplied step by step, so that the label `le` has the same digits as the kubelet's.
fn call_seconds() -> impl Iterator<Item = f64> {
    std::iter::successors(Some(0.005), |bound| Some(bound * 2.5)).take(14)
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation_type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandlerLabels {
    runtime_handler: String,
}

/// The counters and durations. A series exists from its first call on, except the errors of pulls, which exist at once.
#[derive(Debug)]
pub(crate) struct Operations {
    calls: Family<OperationLabels, Counter>,
    errors: Family<OperationLabels, Counter>,
    seconds: Family<OperationLabels, Histogram, fn() -> Histogram>,
    sandbox_errors: Family<HandlerLabels, Counter>,
    sandbox_seconds: Family<HandlerLabels, Histogram, fn() -> Histogram>,
}

impl Operations {
    pub(crate) fn new() -> Self {
        Self {
            calls: Family::default(),
            errors: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(call_seconds())),
            sandbox_errors: Family::default(),
            sandbox_seconds: Family::new_with_constructor(|| Histogram::new(SANDBOX_SECONDS)),
        }
    }

    pub(crate) fn register(&self, metrics: &Metrics) {
        let help = "Calls of the container runtime";
        metrics.register("kubelet_runtime_operations", help, self.calls.clone());
        let help = "Calls of the container runtime that failed";
        metrics.register("kubelet_runtime_operations_errors", help, self.errors.clone());
        // Alerts on failed pulls use the increase of this series, so it has to exist before the first failure.
        self.errors.get_or_create(&OperationLabels { operation_type: "pull_image" }).inc_by(0);
        let help = "Seconds that a call of the container runtime took";
        metrics.register("kubelet_runtime_operations_duration_seconds", help, self.seconds.clone());
        let help = "Sandboxes that the container runtime could not create";
        metrics.register("kubelet_run_podsandbox_errors", help, self.sandbox_errors.clone());
        let help = "Seconds that the container runtime took to create a sandbox, successfully or not";
        metrics.register("kubelet_run_podsandbox_duration_seconds", help, self.sandbox_seconds.clone());
    }
}

/// A channel to the container runtime or its image service that counts the CRI calls over it.
#[derive(Debug, Clone)]
pub struct CriChannel {
    inner: PeerChannel,
    operations: Arc<Operations>,
    handler: Option<HandlerLabels>,
}

impl CriChannel {
    pub(crate) fn new(inner: PeerChannel, operations: Arc<Operations>) -> Self {
        Self { inner, operations, handler: None }
    }

    /// Sets the runtime handler of the next call, which creates a sandbox; `None` for any other call. The channel cannot
    /// see it, because it does not decode the request.
    pub(crate) fn with_sandbox_handler(mut self, runtime_handler: Option<String>) -> Self {
        self.handler = runtime_handler.map(|runtime_handler| HandlerLabels { runtime_handler });
        self
    }
}

impl Service<Request<Body>> for CriChannel {
    type Response = Response<CountedBody>;
    type Error = Status;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        let call = Call::begin(&self.operations, request.uri().path(), self.handler.take());
        ResponseFuture { inner: self.inner.call(request), call }
    }
}

/// A running call. It is counted when it is dropped.
#[derive(Debug)]
struct Call {
    operations: Arc<Operations>,
    operation: Operation,
    handler: Option<HandlerLabels>,
    begun: Instant,
    /// Whether it succeeded; `None` while unknown.
    succeeded: Option<bool>,
}

impl Call {
    /// Begins a call; `None` if it is not a CRI call.
    fn begin(operations: &Arc<Operations>, path: &str, handler: Option<HandlerLabels>) -> Option<Self> {
        let operation = Operation::from_path(path)?;
        if operation.is_endless() {
            operations.calls.get_or_create(&OperationLabels { operation_type: operation.name() }).inc();
        }
        let operations = Arc::clone(operations);
        Some(Self { operations, operation, handler, begun: Instant::now(), succeeded: None })
    }

    fn finish(mut self, succeeded: bool) {
        self.succeeded = Some(succeeded);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let kind = OperationLabels { operation_type: self.operation.name() };
        let is_endless = self.operation.is_endless();
        // A caller that leaves the event stream ends it normally; a caller that leaves any other call cancels it.
        if !self.succeeded.unwrap_or(is_endless) {
            self.operations.errors.get_or_create(&kind).inc();
            if let Some(handler) = &self.handler {
                self.operations.sandbox_errors.get_or_create(handler).inc();
            }
        }
        if is_endless {
            return;
        }
        let took = self.begun.elapsed().as_secs_f64();
        self.operations.calls.get_or_create(&kind).inc();
        self.operations.seconds.get_or_create(&kind).observe(took);
        if let Some(handler) = &self.handler {
            self.operations.sandbox_seconds.get_or_create(handler).observe(took);
        }
    }
}

/// The future of a response.
pub struct ResponseFuture {
    inner: <PeerChannel as Service<Request<Body>>>::Future,
    call: Option<Call>,
}

impl std::fmt::Debug for ResponseFuture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseFuture").field("call", &self.call).finish_non_exhaustive()
    }
}

impl Future for ResponseFuture {
    type Output = Result<Response<CountedBody>, Status>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = ready!(self.inner.as_mut().poll(cx));
        let call = self.call.take();
        Poll::Ready(match response {
            Ok(response) => Ok(count_response(response, call)),
            Err(status) => {
                if let Some(call) = call {
                    call.finish(false);
                }
                Err(status)
            }
        })
    }
}

/// Ends the call if the response head has its status; otherwise the body ends it.
fn count_response(response: Response<Body>, call: Option<Call>) -> Response<CountedBody> {
    let (head, inner) = response.into_parts();
    let succeeded = if head.status == StatusCode::OK { status_is_ok(&head.headers) } else { Some(false) };
    let call = call.and_then(|call| match succeeded {
        Some(succeeded) => {
            call.finish(succeeded);
            None
        }
        None => Some(call),
    });
    Response::from_parts(head, CountedBody { inner, call })
}

/// Whether the gRPC status in these headers or trailers is OK; `None` if they have no status.
fn status_is_ok(headers: &HeaderMap) -> Option<bool> {
    headers.get(Status::GRPC_STATUS).map(|status| status.as_bytes() == b"0")
}

/// The body of a response. Its end is the end of the call.
#[derive(Debug)]
pub struct CountedBody {
    inner: Body,
    call: Option<Call>,
}

impl CountedBody {
    /// The body to pass on.
    pub fn into_body(self) -> Body {
        if self.call.is_none() { self.inner } else { Body::new(self) }
    }
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let succeeded = match &frame {
            Some(Ok(frame)) => frame.trailers_ref().map(|trailers| status_is_ok(trailers).unwrap_or(false)),
            // The body breaks, or it ends without a status, which a working server never does.
            Some(Err(_)) | None => Some(false),
        };
        if let Some(succeeded) = succeeded
            && let Some(call) = self.call.take()
        {
            call.finish(succeeded);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests;
