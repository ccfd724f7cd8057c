//! A channel that tells what a driver itself has answered from what was made of a broken connection.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::task::{Context, Poll};

use keelson_service_kit::PeerChannel;
use keelson_volume_manager_core::csi::error_class::Code;
use tonic::Status;
use tonic::body::Body as RequestBody;
use tonic::codegen::{Body, Bytes, Service, http};

/// The status that a driver has sent. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Answered(Arc<AtomicI32>);

impl Default for Answered {
    fn default() -> Self {
        Self(Arc::new(AtomicI32::new(Self::NOTHING)))
    }
}

impl Answered {
    const NOTHING: i32 = i32::MIN;

    fn read(&self, headers: &http::HeaderMap) {
        if let Some(status) = headers.get("grpc-status") {
            let number = status.to_str().ok().and_then(|text| text.parse().ok());
            self.0.store(number.unwrap_or(Code::Unknown.number()), Ordering::Relaxed);
        }
    }

    pub(super) fn code(&self) -> Option<i32> {
        Some(self.0.load(Ordering::Relaxed)).filter(|code| *code != Self::NOTHING)
    }
}

/// A channel that takes note of the status of its call.
#[derive(Debug, Clone)]
pub(super) struct WatchedChannel {
    pub(super) inner: PeerChannel,
    pub(super) answered: Answered,
}

impl Service<http::Request<RequestBody>> for WatchedChannel {
    type Response = http::Response<WatchedBody>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<RequestBody>) -> Self::Future {
        let response = self.inner.call(request);
        let answered = self.answered.clone();
        Box::pin(async move {
            let response = response.await?;
            answered.read(response.headers());
            Ok(response.map(|inner| WatchedBody { inner, answered }))
        })
    }
}

/// A body that takes note of the status in its trailers.
pub(super) struct WatchedBody {
    inner: RequestBody,
    answered: Answered,
}

impl Body for WatchedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(trailers) = frame.trailers_ref()
        {
            self.answered.read(trailers);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}
