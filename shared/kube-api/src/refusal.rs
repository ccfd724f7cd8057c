//! Answers that are no success: what they say, and who has said it.
//!
//! An API server refuses with a `Status`. Whoever stands before it, or sits there in its place, has words and pages of its own;
//! so has the server itself while it has too much to do. `Retry-After` is a header in either case.

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

/// Bytes that are read of it.
const LONGEST: usize = 256 << 10;
/// Characters that are told of one that is no `Status`.
const TOLD: usize = 160;

/// An answer that is no success.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) code: StatusCode,
    /// What an API server says; none: it has said something else.
    pub(crate) status: Option<Status>,
    /// The beginning of what was said instead, for people.
    pub(crate) words: String,
    /// Seconds after which it may be tried again; 0: it has not said.
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
        let said = status.as_ref().and_then(|status| status.details.as_ref());
        let said = said.map_or(0, |details| details.retry_after_seconds);
        let words = if status.is_none() { beginning(body) } else { String::new() };
        Self { code, status, words, retry_after: seconds.unwrap_or(0).max(said) }
    }
}

/// The first words of a text, on one line.
fn beginning(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(4 * TOLD)]).into_owned();
    let printable =
        text.split(|c: char| c.is_whitespace() || c.is_control() || c == char::REPLACEMENT_CHARACTER);
    let words: Vec<&str> = printable.filter(|word| !word.is_empty()).collect();
    words.join(" ").chars().take(TOLD).collect()
}

/// A client whose answers that are no success are errors, each a [`Refusal`].
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

/// As much of a body as comes, and as is wanted.
async fn read<B: http_body::Body<Data = Bytes>>(body: B) -> Vec<u8> {
    let mut body = pin!(body);
    let mut bytes = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            bytes.extend_from_slice(&data);
        }
        if bytes.len() > LONGEST {
            break;
        }
    }
    bytes
}
