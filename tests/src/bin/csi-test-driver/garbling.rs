//! Answers that are no answers.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;

/// An answer that no driver gives. It travels from the handler to [`Garbling`] as an extension of the response.
#[derive(Debug, Clone, Copy)]
pub(super) enum Garbage {
    Empty,
    Broken,
    Large,
}

/// A service whose answers may be replaced by [`Garbage`].
#[derive(Debug, Clone)]
pub(super) struct Garbling<S>(pub(super) S);

impl<S: NamedService> NamedService for Garbling<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Garbling<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move {
            let response = answer.await?;
            let garbage = response.extensions().get::<Garbage>().copied();
            Ok(garbage.map_or(response, answer_with))
        })
    }
}

fn answer_with(garbage: Garbage) -> http::Response<Body> {
    // Each message of gRPC begins with a zero byte and its length.
    let message = |length: u32, byte: u8| {
        let mut bytes = vec![0];
        bytes.extend(length.to_be_bytes());
        bytes.resize(bytes.len() + length as usize, byte);
        Body::new(http_body_util::Full::new(bytes::Bytes::from(bytes)))
    };
    let body = match garbage {
        Garbage::Empty => Body::empty(),
        Garbage::Broken => message(16, 0xff),
        Garbage::Large => message(8 << 20, 0),
    };
    let mut response = http::Response::new(body);
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/grpc"));
    response
}
