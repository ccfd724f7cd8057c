//! The recording proxy between agent and containerd. It forwards every call unchanged, including streams and other services, and
//! records the calls that start a pod.

use std::error::Error;
use std::future::ready;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::capture::{Call, Recorder};

type ProxyError = Box<dyn Error + Send + Sync>;

/// A body that is forwarded as a stream, or one that was read completely.
type ForwardedBody = Either<Incoming, Full<Bytes>>;

/// A listening proxy. Dropping it closes all connections.
#[derive(Debug)]
pub struct Proxy {
    socket: PathBuf,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Listens on `socket` and forwards calls to `upstream`.
    pub fn start(socket: PathBuf, upstream: &Path, recorder: Recorder) -> anyhow::Result<Self> {
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let accepting = tokio::spawn(accept(listener, upstream.to_owned(), recorder));
        Ok(Self { socket, accepting })
    }

    /// The address of the proxy as a CRI endpoint.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        // An error does not matter: the folder of the socket is removed later.
        let _ = std::fs::remove_file(&self.socket);
    }
}

async fn accept(listener: UnixListener, upstream: PathBuf, recorder: Recorder) {
    // Dropped with this task, which closes the connections.
    let mut connections = JoinSet::new();
    loop {
        // Both arms are cancel-safe: neither accepting nor joining loses anything when it is dropped.
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(relay(stream, upstream.clone(), recorder.clone()));
                }
                Err(error) => {
                    eprintln!("the recording proxy cannot accept connections any more: {error}");
                    return;
                }
            },
            Some(ended) = connections.join_next() => {
                if let Ok(Err(error)) = ended {
                    eprintln!("the recording proxy cannot reach containerd: {error}");
                }
            }
        }
    }
}

/// Forwards one connection to a connection of its own to containerd until either side closes.
///
/// # Errors
/// containerd cannot be reached.
async fn relay(stream: UnixStream, upstream: PathBuf, recorder: Recorder) -> Result<(), ProxyError> {
    let to = UnixStream::connect(&upstream).await?;
    let (sender, driver) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(to)).await?;
    let service = service_fn(move |request| forward(sender.clone(), recorder.clone(), request));
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service);
    // When one side has closed, with or without an error, dropping the other loses nothing.
    tokio::select! {
        _ = server => {}
        _ = driver => {}
    }
    Ok(())
}

/// Forwards one call, and records it if it starts a pod.
async fn forward(
    mut upstream: SendRequest<ForwardedBody>,
    recorder: Recorder,
    request: Request<Incoming>,
) -> Result<Response<impl Body<Data = Bytes, Error = ProxyError>>, ProxyError> {
    let Some(call) = Call::from_path(request.uri().path()) else {
        let response = upstream.send_request(request.map(Either::Left)).await?;
        return Ok(response.map(Either::Left));
    };
    let (head, body) = request.into_parts();
    let request_body = body.collect().await?.to_bytes();
    let request = Request::from_parts(head, Either::Right(Full::new(request_body.clone())));
    let (head, body) = upstream.send_request(request).await?.into_parts();
    let body = body.collect().await?;
    let trailers = body.trailers().cloned();
    let response_body = body.to_bytes();
    // A response without a message is an error; its status is in the trailers.
    if !response_body.is_empty() {
        recorder.record(call, &request_body, &response_body);
    }
    let body = Full::new(response_body).with_trailers(ready(trailers.map(Ok)));
    Ok(Response::from_parts(head, Either::Right(body)))
}
