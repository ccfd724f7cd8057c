//! Counts what is asked of the container runtime, by runtime-shim itself and by those whose calls it passes on, as the
//! kubelet counts its calls (node-and-api.md §15.1, runtime-and-resources.md §1.4).
//!
//! A call counts when it has ended: an answer with any status but OK is an error, and so is a call that its caller gives
//! up. The stream of events counts when it begins and has no duration.

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

/// Upper bounds of the buckets of a sandbox's making in seconds: Prometheus' usual ones.
const SANDBOX_SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Upper bounds of the buckets of all calls in seconds, 5 ms to 12 min. Each is the one before times 2.5, multiplied
/// step by step, so that the label `le` has the digits that the kubelet's has.
fn call_seconds() -> impl Iterator<Item = f64> {
    std::iter::successors(Some(0.005), |bound| Some(bound * 2.5)).take(14)
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    operation_type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Handler {
    runtime_handler: String,
}

/// The counters and durations. A series is there from its first call on, but for the errors of pulls.
#[derive(Debug)]
pub(crate) struct Operations {
    calls: Family<Kind, Counter>,
    errors: Family<Kind, Counter>,
    seconds: Family<Kind, Histogram, fn() -> Histogram>,
    sandbox_errors: Family<Handler, Counter>,
    sandbox_seconds: Family<Handler, Histogram, fn() -> Histogram>,
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
        // Pulls that fail are alerted of by how many more they have become, so this series does not wait for the first one.
        self.errors.get_or_create(&Kind { operation_type: "pull_image" }).inc_by(0);
        let help = "Seconds that a call of the container runtime took";
        metrics.register("kubelet_runtime_operations_duration_seconds", help, self.seconds.clone());
        let help = "Sandboxes that the container runtime could not make";
        metrics.register("kubelet_run_podsandbox_errors", help, self.sandbox_errors.clone());
        let help = "Seconds that the container runtime took to make a sandbox or to fail to";
        metrics.register("kubelet_run_podsandbox_duration_seconds", help, self.sandbox_seconds.clone());
    }
}

/// A channel to the container runtime or its image service that counts the calls of CRI over it.
#[derive(Debug, Clone)]
pub struct CriChannel {
    inner: PeerChannel,
    operations: Arc<Operations>,
    handler: Option<Handler>,
}

impl CriChannel {
    pub(crate) fn new(inner: PeerChannel, operations: Arc<Operations>) -> Self {
        Self { inner, operations, handler: None }
    }

    /// The next call makes a sandbox with this handler, which its bytes do not show; `None`: it is another call.
    pub(crate) fn making_a_sandbox(mut self, runtime_handler: Option<String>) -> Self {
        self.handler = runtime_handler.map(|runtime_handler| Handler { runtime_handler });
        self
    }
}

impl Service<Request<Body>> for CriChannel {
    type Response = Response<Counted>;
    type Error = Status;
    type Future = Answer;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Answer {
        let call = Call::begin(&self.operations, request.uri().path(), self.handler.take());
        Answer { inner: self.inner.call(request), call }
    }
}

/// A call on its way. It is counted when it is dropped.
#[derive(Debug)]
struct Call {
    operations: Arc<Operations>,
    operation: Operation,
    handler: Option<Handler>,
    begun: Instant,
    /// Whether it went well; `None` as long as the runtime has not said so.
    well: Option<bool>,
}

impl Call {
    /// `None` for a call that is not of CRI.
    fn begin(operations: &Arc<Operations>, path: &str, handler: Option<Handler>) -> Option<Self> {
        let operation = Operation::of(path)?;
        if operation.is_endless() {
            operations.calls.get_or_create(&Kind { operation_type: operation.name() }).inc();
        }
        let operations = Arc::clone(operations);
        Some(Self { operations, operation, handler, begun: Instant::now(), well: None })
    }

    fn ends(mut self, well: bool) {
        self.well = Some(well);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let kind = Kind { operation_type: self.operation.name() };
        let endless = self.operation.is_endless();
        // Whoever leaves the stream of events ends it; whoever leaves another call gives it up.
        if !self.well.unwrap_or(endless) {
            self.operations.errors.get_or_create(&kind).inc();
            if let Some(handler) = &self.handler {
                self.operations.sandbox_errors.get_or_create(handler).inc();
            }
        }
        if endless {
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

/// The answer to a call, to be waited for.
pub struct Answer {
    inner: <PeerChannel as Service<Request<Body>>>::Future,
    call: Option<Call>,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("call", &self.call).finish_non_exhaustive()
    }
}

impl Future for Answer {
    type Output = Result<Response<Counted>, Status>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(self.inner.as_mut().poll(cx));
        let call = self.call.take();
        Poll::Ready(match answer {
            Ok(response) => Ok(counted(response, call)),
            Err(status) => {
                if let Some(call) = call {
                    call.ends(false);
                }
                Err(status)
            }
        })
    }
}

/// Ends the call if the beginning of its answer says how; else the rest of the answer does.
fn counted(response: Response<Body>, call: Option<Call>) -> Response<Counted> {
    let (head, inner) = response.into_parts();
    let said = if head.status == StatusCode::OK { said(&head.headers) } else { Some(false) };
    let call = call.and_then(|call| match said {
        Some(well) => {
            call.ends(well);
            None
        }
        None => Some(call),
    });
    Response::from_parts(head, Counted { inner, call })
}

/// Whether these headers or trailers say that a call went well; `None` when they do not say how it went.
fn said(headers: &HeaderMap) -> Option<bool> {
    headers.get(Status::GRPC_STATUS).map(|status| status.as_bytes() == b"0")
}

/// What comes after the headers of an answer. Its end is the end of the call.
#[derive(Debug)]
pub struct Counted {
    inner: Body,
    call: Option<Call>,
}

impl Counted {
    /// As it is passed on.
    pub fn into_body(self) -> Body {
        if self.call.is_none() { self.inner } else { Body::new(self) }
    }
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let well = match &frame {
            Some(Ok(frame)) => frame.trailers_ref().map(|trailers| said(trailers).unwrap_or(false)),
            // It breaks, or it ends without a status, which no server that works does.
            Some(Err(_)) | None => Some(false),
        };
        if let Some(well) = well
            && let Some(call) = self.call.take()
        {
            call.ends(well);
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
