//! A socket between agent and containerd: every call passes through as it is, streams and foreign services
//! too, and the calls that make a pod are written down.

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

type Failure = Box<dyn Error + Send + Sync>;

/// A body that is passed on as it comes, or one that was read whole.
type Passed = Either<Incoming, Full<Bytes>>;

/// A listening proxy; it ends, with all connections, when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    socket: PathBuf,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Listens on `socket` and passes calls on to `upstream`.
    pub fn start(socket: PathBuf, upstream: &Path, recorder: Recorder) -> anyhow::Result<Self> {
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let accepting = tokio::spawn(accept(listener, upstream.to_owned(), recorder));
        Ok(Self { socket, accepting })
    }

    /// As CRI's endpoint is written.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket.display())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        // It is in a folder that is removed anyway.
        let _ = std::fs::remove_file(&self.socket);
    }
}

async fn accept(listener: UnixListener, upstream: PathBuf, recorder: Recorder) {
    // Dropped with this task, which ends the connections.
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

/// Serves one connection with one connection to containerd, until either ends; fails without the latter.
async fn relay(stream: UnixStream, upstream: PathBuf, recorder: Recorder) -> Result<(), Failure> {
    let to = UnixStream::connect(&upstream).await?;
    let (sender, driver) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(to)).await?;
    let service = service_fn(move |request| forward(sender.clone(), recorder.clone(), request));
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(stream), service);
    // When one side has ended, with or without an error, the other has no peer any more.
    tokio::select! {
        _ = server => {}
        _ = driver => {}
    }
    Ok(())
}

async fn forward(
    mut upstream: SendRequest<Passed>,
    recorder: Recorder,
    request: Request<Incoming>,
) -> Result<Response<impl Body<Data = Bytes, Error = Failure>>, Failure> {
    let Some(call) = Call::of(request.uri().path()) else {
        let response = upstream.send_request(request.map(Either::Left)).await?;
        return Ok(response.map(Either::Left));
    };
    let (head, body) = request.into_parts();
    let asked = body.collect().await?.to_bytes();
    let request = Request::from_parts(head, Either::Right(Full::new(asked.clone())));
    let (head, body) = upstream.send_request(request).await?.into_parts();
    let body = body.collect().await?;
    let trailers = body.trailers().cloned();
    let answered = body.to_bytes();
    // Without a message there was an error, which the trailers tell.
    if !answered.is_empty() {
        recorder.note(call, &asked, &answered);
    }
    let body = Full::new(answered).with_trailers(ready(trailers.map(Ok)));
    Ok(Response::from_parts(head, Either::Right(body)))
}
