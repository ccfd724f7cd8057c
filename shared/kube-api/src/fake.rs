//! A fake API server with scripted answers, over HTTP or HTTPS.

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// A scripted answer.
pub(crate) enum Answer {
    /// A status and a body.
    Whole(u16, String),
    /// A status, a body that is not from an API server, and the value of `Retry-After`.
    Page(u16, &'static str, &'static str),
    /// Lines, after which the answer ends.
    Lines(Vec<Value>),
    /// Lines, after which the answer hangs.
    Open(Vec<Value>),
    /// Nothing at all.
    Nothing,
}

impl Answer {
    pub(crate) fn json(value: &Value) -> Self {
        Self::Whole(200, value.to_string())
    }

    pub(crate) fn refusal(code: u16, reason: &str, message: &str) -> Self {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "code": code, "reason": reason, "message": message});
        Self::Whole(code, status.to_string())
    }

    fn response(self) -> Option<Response<BoxBody<Bytes, Infallible>>> {
        let line = |value: Value| Ok(Frame::data(Bytes::from(format!("{value}\n"))));
        let mut retry_after = "";
        let (code, body) = match self {
            Self::Whole(code, text) => (code, Full::new(Bytes::from(text)).boxed()),
            Self::Page(code, text, later) => {
                retry_after = later;
                (code, Full::new(Bytes::from(text)).boxed())
            }
            Self::Lines(lines) => (200, StreamBody::new(stream::iter(lines.into_iter().map(line))).boxed()),
            Self::Open(lines) => {
                let lines = lines.into_iter().map(line).collect::<Vec<_>>();
                use futures_util::StreamExt as _;
                (200, BodyExt::boxed(StreamBody::new(stream::iter(lines).chain(stream::pending()))))
            }
            Self::Nothing => return None,
        };
        let mut response = Response::new(body);
        *response.status_mut() = StatusCode::from_u16(code).unwrap();
        if !retry_after.is_empty() {
            response.headers_mut().insert(http::header::RETRY_AFTER, HeaderValue::from_static(retry_after));
        }
        Some(response)
    }
}

/// A received request: method, path with query, HTTP version, body, user agent.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) version: http::Version,
    pub(crate) content_type: String,
    pub(crate) body: String,
}

type Answers = Arc<Mutex<Box<dyn FnMut(&Asked) -> Answer + Send>>>;

/// A server on loopback; it ends when this is dropped.
pub(crate) struct FakeApi {
    pub(crate) url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    task: JoinHandle<()>,
}

impl FakeApi {
    pub(crate) async fn start(answer: impl FnMut(&Asked) -> Answer + Send + 'static) -> Self {
        Self::serve(None, u32::MAX, answer).await
    }

    pub(crate) async fn with_tls(
        tls: rustls::ServerConfig,
        answer: impl FnMut(&Asked) -> Answer + Send + 'static,
    ) -> Self {
        Self::with_few_streams(tls, u32::MAX, answer).await
    }

    /// A server that allows at most `streams` concurrent requests per connection.
    pub(crate) async fn with_few_streams(
        tls: rustls::ServerConfig,
        streams: u32,
        answer: impl FnMut(&Asked) -> Answer + Send + 'static,
    ) -> Self {
        Self::serve(Some(TlsAcceptor::from(Arc::new(tls))), streams, answer).await
    }

    async fn serve(
        tls: Option<TlsAcceptor>,
        streams: u32,
        answer: impl FnMut(&Asked) -> Answer + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answers: Answers = Arc::new(Mutex::new(Box::new(answer)));
        let kept = Arc::clone(&asked);
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (kept, answers, tls) = (Arc::clone(&kept), Arc::clone(&answers), tls.clone());
                tokio::spawn(async move {
                    let service = service_fn(move |request: Request<Incoming>| {
                        respond(request, Arc::clone(&kept), Arc::clone(&answers))
                    });
                    let mut builder = auto::Builder::new(TokioExecutor::new());
                    builder.http2().max_concurrent_streams(streams);
                    // It fails when the client disconnects.
                    let _ = match tls {
                        None => builder.serve_connection(TokioIo::new(stream), service).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => builder.serve_connection(TokioIo::new(stream), service).await,
                            Err(_) => return,
                        },
                    };
                });
            }
        });
        Self { url, asked, task }
    }

    /// The requests so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// Writes a kubeconfig for it.
    pub(crate) fn kubeconfig(&self, folder: &Path, cluster: &Value, user: &Value) -> PathBuf {
        let path = folder.join("kubeconfig");
        let mut cluster = cluster.clone();
        cluster["server"] = json!(self.url);
        let file = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]});
        let temporary = folder.join("kubeconfig.new");
        fs::write(&temporary, file.to_string()).unwrap();
        fs::rename(temporary, &path).unwrap();
        path
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn respond(
    request: Request<Incoming>,
    kept: Arc<Mutex<Vec<Asked>>>,
    answers: Answers,
) -> Result<Response<BoxBody<Bytes, Infallible>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let header = |name: &str| {
        parts.headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    };
    let asked = Asked {
        method: parts.method.to_string(),
        path: parts.uri.path_and_query().unwrap().to_string(),
        version: parts.version,
        content_type: header("content-type"),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    kept.lock().unwrap().push(asked.clone());
    let answer = (answers.lock().unwrap())(&asked);
    match answer.response() {
        Some(response) => Ok(response),
        None => std::future::pending().await,
    }
}
