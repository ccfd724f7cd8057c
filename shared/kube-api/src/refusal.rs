//! Answers with an error status: their content, and whether the API server has sent them.
//!
//! An API server refuses with a `Status` object. A proxy in front of it, or another server in its place, answers with text or
//! HTML; so does an overloaded API server. `Retry-After` is a header in either case.

use std::fmt;
use std::pin::pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::RETRY_AFTER;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::client::Body;
use kube::core::Status;
use serde_json::Value;
use tower::BoxError;

/// The most bytes read of the body.
const MAX_BODY: usize = 256 << 10;
/// The most characters reported of a body that is no `Status`.
const MAX_EXCERPT: usize = 160;

/// An answer with an error status.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) code: StatusCode,
    /// The `Status` object; `None`: the body is something else.
    pub(crate) status: Option<Status>,
    /// The beginning of any other body, for people.
    pub(crate) excerpt: String,
    /// Seconds to wait before a retry (`Retry-After`); 0: not given.
    pub(crate) retry_after: u32,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the answer is {}", self.code)
    }
}

impl std::error::Error for Refusal {}

impl Refusal {
    fn of(code: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let seconds = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let is_status = |value: &Value| value["kind"] == "Status";
        let value = serde_json::from_slice::<Value>(body).ok().filter(is_status);
        let status: Option<Status> = value.and_then(|value| serde_json::from_value(value).ok());
        let details = status.as_ref().and_then(|status| status.details.as_ref());
        let in_status = details.map_or(0, |details| details.retry_after_seconds);
        let excerpt = if status.is_none() { excerpt_of(body) } else { String::new() };
        Self { code, status, excerpt, retry_after: seconds.unwrap_or(0).max(in_status) }
    }
}

/// The first words of a text, on one line.
fn excerpt_of(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(4 * MAX_EXCERPT)]).into_owned();
    let printable =
        text.split(|c: char| c.is_whitespace() || c.is_control() || c == char::REPLACEMENT_CHARACTER);
    let words: Vec<&str> = printable.filter(|word| !word.is_empty()).collect();
    words.join(" ").chars().take(MAX_EXCERPT).collect()
}

/// A client that turns every answer with an error status into a [`Refusal`] error.
#[derive(Debug, Clone)]
pub(crate) struct Refusals<S>(pub(crate) S);

impl<S, B> tower::Service<Request<Body>> for Refusals<S>
where
    S: tower::Service<Request<Body>, Response = Response<B>, Error = BoxError>,
    S::Future: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move {
            let (head, body) = answer.await?.into_parts();
            if head.status.is_success() {
                return Ok(Response::from_parts(head, body));
            }
            Err(Refusal::of(head.status, &head.headers, &read(body).await).into())
        })
    }
}

/// Reads a body up to its end, an error or [`MAX_BODY`].
async fn read<B: http_body::Body<Data = Bytes>>(body: B) -> Vec<u8> {
    let mut body = pin!(body);
    let mut bytes = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            bytes.extend_from_slice(&data);
        }
        if bytes.len() > MAX_BODY {
            break;
        }
    }
    bytes
}
