use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderName, HeaderValue, Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use keelson_config::ServiceName;
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower::Service;
use tower::retry::budget::{Budget as _, TpsBudget};

use crate::Backoff;
use crate::deadline::parse_timeout;
use crate::flow::{CONNECTION_WINDOW, STREAM_WINDOW};
use crate::status::{PEER_SILENT, PEER_UNAVAILABLE, error};

/// How long a peer may take to show that it is a live gRPC server, not only a socket with a backlog.
const SETTINGS_WITHIN: Duration = Duration::from_secs(1);
/// Deadline of a call that sets none.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);
/// Grace period after the callee's own deadline, for the response to arrive.
const SLACK: Duration = Duration::from_millis(500);
/// Maximum number of retries of a read: with the pauses between them about one second.
const REPEATS: usize = 5;
/// The retry budget (Finagle's rule): over the last 10 s, a fifth of the successful calls plus 2 per second.
const BUDGET_WINDOW: Duration = Duration::from_secs(10);
const BUDGET_PER_SECOND: u32 = 2;
const BUDGET_RATIO: f32 = 0.2;
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Another service of the agent. Cheap to clone; connects on the first call and reconnects after a loss.
#[derive(Debug, Clone)]
pub struct Peer {
    name: String,
    channel: PeerChannel,
}

impl Peer {
    /// The service at its socket below `run_dir`.
    pub fn service(run_dir: &Path, name: ServiceName) -> Self {
        let socket = keelson_config::Paths::socket_below(run_dir, name);
        Self { name: name.to_string(), channel: connect_unix(name.as_str(), &socket) }
    }

    /// Its name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The channel for generated clients.
    pub fn channel(&self) -> PeerChannel {
        self.channel.clone()
    }
}

/// The client stack: deadline, trace context, reconnect, a check that the peer is alive, and retries of reads that did not
/// reach the peer.
#[derive(Debug, Clone)]
pub struct PeerChannel {
    name: String,
    inner: Channel,
    budget: Arc<TpsBudget>,
}

/// A lazily connected channel to a gRPC server on a unix socket, by the name that errors show.
///
/// Every call has a deadline: `Request::set_timeout`, else 10 s. For a stream it bounds the time to the first headers; a
/// dead stream is detected by HTTP/2 pings.
///
/// A call of [`keelson_proto::REPEATABLE`] whose peer has just died or disconnected is retried for about a second, the time
/// in which a supervisor restarts the peer, within the retry budget of this channel.
pub fn connect_unix(name: &str, socket: &Path) -> PeerChannel {
    let endpoint = Endpoint::from_static("http://localhost")
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5));
    lazily(name, socket, endpoint)
}

/// As [`connect_unix`], for a server that is not ours and answers frequent HTTP/2 pings with GOAWAY, as
/// gRPC-Go does. The caller has to detect a hanging server by deadlines on its calls.
pub fn connect_foreign(name: &str, socket: &Path) -> PeerChannel {
    lazily(name, socket, Endpoint::from_static("http://localhost"))
}

/// A channel to a gRPC server in a pod, plaintext over TCP and connected at once: for its health probe. No call is retried
/// or has a deadline of its own; the caller sets the limits.
///
/// # Errors
/// Why there is no connection.
pub async fn connect_tcp(to: SocketAddr, user_agent: &str) -> Result<Channel, NoConnection> {
    let endpoint =
        Endpoint::from_shared(format!("http://{to}")).and_then(|e| e.user_agent(user_agent.to_owned()));
    let connected = match endpoint {
        Ok(endpoint) => endpoint.connect().await,
        Err(error) => Err(error),
    };
    connected.map_err(|error| no_connection(&error))
}

/// The innermost cause of an error; the layers above it only say "transport error".
fn innermost<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause
}

/// Why no connection to a server in a pod could be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoConnection {
    /// The connection was not accepted; holds the operating system's message.
    NotMade(String),
    /// The connection was made and broke before HTTP/2 was spoken on it. When this is noticed, and with which message, varies.
    Broken,
}

fn no_connection(error: &(dyn std::error::Error + 'static)) -> NoConnection {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    let cause = innermost(error);
    match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
        Some(BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof) | None => {
            NoConnection::Broken
        }
        Some(_) => NoConnection::NotMade(cause.to_string()),
    }
}

fn lazily(name: &str, socket: &Path, endpoint: Endpoint) -> PeerChannel {
    let path = socket.to_owned();
    let inner = endpoint
        .connect_timeout(Duration::from_secs(5))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .connect_with_connector_lazy(tower::service_fn(move |_: Uri| connect(path.clone())));
    let budget = Arc::new(TpsBudget::new(BUDGET_WINDOW, BUDGET_PER_SECOND, BUDGET_RATIO));
    PeerChannel { name: name.to_owned(), inner, budget }
}

/// Connects and waits until the server has sent its SETTINGS, the first thing that an HTTP/2 server does.
/// A stopped process accepts connections through its backlog but sends nothing.
async fn connect(path: PathBuf) -> io::Result<TokioIo<UnixStream>> {
    let stream = UnixStream::connect(&path).await.map_err(|source| {
        io::Error::new(source.kind(), format!("cannot connect to {}: {source}", path.display()))
    })?;
    match tokio::time::timeout(SETTINGS_WITHIN, stream.readable()).await {
        Ok(Ok(())) => Ok(TokioIo::new(stream)),
        Ok(Err(source)) => Err(source),
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!(
                "{} accepts connections but sends nothing; its process hangs or is stopped",
                path.display()
            ),
        )),
    }
}

impl Service<Request<Body>> for PeerChannel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.inner.poll_ready(cx).map_err(|e| unavailable(&self.name, &e))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let deadline =
            request.headers().get(&GRPC_TIMEOUT).and_then(|value| parse_timeout(value.to_str().ok()?));
        if deadline.is_none() {
            request.headers_mut().insert(GRPC_TIMEOUT, HeaderValue::from_static("10S"));
        }
        if let Some(value) =
            keelson_telemetry::current_traceparent().and_then(|v| HeaderValue::from_str(&v).ok())
        {
            request.headers_mut().insert(TRACEPARENT, value);
        }
        let bound = deadline.unwrap_or(DEFAULT_DEADLINE) + SLACK;
        let name = self.name.clone();
        let method = request.uri().path().to_owned();
        let repeatable = keelson_proto::REPEATABLE.binary_search(&method.as_str()).is_ok();
        // Uses the channel that was polled ready, and leaves the clone in its place.
        let behind = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, behind);
        let budget = Arc::clone(&self.budget);
        Box::pin(async move {
            let call = async {
                if repeatable { repeated(inner, request, &budget).await } else { inner.call(request).await }
            };
            match tokio::time::timeout(bound, call).await {
                Ok(Ok(response)) => Ok(response),
                Ok(Err(source)) => Err(unavailable(&name, &source)),
                Err(_) => Err(error(
                    Code::DeadlineExceeded,
                    PEER_SILENT,
                    format!("{name} did not answer {method} within {} ms", bound.as_millis()),
                )),
            }
        })
    }
}

/// Retries a call while the peer is away, within the budget and [`REPEATS`].
async fn repeated(
    mut channel: Channel,
    request: Request<Body>,
    budget: &TpsBudget,
) -> Result<Response<Body>, tonic::transport::Error> {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else {
        // A body that returns an error was aborted by the caller; the part read so far is not a request.
        return channel.call(Request::from_parts(head, Body::empty())).await;
    };
    let body = body.to_bytes();
    let mut pause = Backoff::new(Duration::from_millis(50), Duration::from_millis(400));
    for _ in 0..REPEATS {
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await?;
        let attempt = Request::from_parts(head.clone(), Body::new(Full::new(body.clone())));
        match channel.call(attempt).await {
            Err(source) if is_away(&source) && budget.withdraw() => {}
            Ok(response) => {
                budget.deposit();
                return Ok(response);
            }
            Err(source) => return Err(source),
        }
        tokio::time::sleep(pause.next_delay()).await;
    }
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await?;
    channel.call(Request::from_parts(head, Body::new(Full::new(body)))).await
}

/// Whether the peer was running and is gone now. A peer that was never started, refuses the connection or hangs will not be
/// back within a second.
fn is_away(source: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(source);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            use io::ErrorKind::{NotFound, PermissionDenied, TimedOut};
            return !matches!(io.kind(), NotFound | PermissionDenied | TimedOut);
        }
        cause = error.source();
    }
    true
}

fn unavailable(name: &str, source: &(dyn std::error::Error + 'static)) -> Status {
    error(Code::Unavailable, PEER_UNAVAILABLE, format!("{name} is not reachable: {}", innermost(source)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_without_a_listener_fails_fast_and_names_the_peer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("silent.sock");
        let _listener = tokio::net::UnixListener::bind(&path).unwrap();
        let mut client =
            keelson_proto::keelson::admin::v1::admin_client::AdminClient::new(connect_unix("silent", &path));
        let begun = std::time::Instant::now();
        let status =
            client.get_progress(keelson_proto::keelson::admin::v1::GetProgressRequest {}).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("silent"), "{}", status.message());
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    /// An events API whose only method answers, with one event of this message.
    async fn answering(listener: tokio::net::UnixListener, message: String) {
        use keelson_proto::keelson::events::v1 as pb;
        #[derive(Debug)]
        struct One(String);
        #[tonic::async_trait]
        impl pb::events_server::Events for One {
            async fn list_events(
                &self,
                request: tonic::Request<pb::ListEventsRequest>,
            ) -> Result<tonic::Response<pb::ListEventsResponse>, Status> {
                let event = pb::Event { message: self.0.clone(), ..Default::default() };
                let ring_id = request.into_inner().ring_id;
                Ok(tonic::Response::new(pb::ListEventsResponse {
                    ring_id,
                    events: vec![event],
                    ..Default::default()
                }))
            }
        }
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        tonic::transport::Server::builder()
            .add_service(pb::events_server::EventsServer::new(One(message)))
            .serve_with_incoming(incoming)
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn messages_of_five_megabytes_pass_both_ways_by_default() {
        use keelson_proto::keelson::events::v1 as pb;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large.sock");
        let large = "x".repeat(5 << 20);
        let server = tokio::spawn(answering(tokio::net::UnixListener::bind(&path).unwrap(), large.clone()));
        let mut client = pb::events_client::EventsClient::new(connect_unix("large", &path));
        let request = pb::ListEventsRequest { ring_id: large.clone(), after_sequence: 0 };
        let answer = client.list_events(request).await.unwrap().into_inner();
        assert!(answer.ring_id == large && answer.events[0].message == large);
        server.abort();
    }

    #[tokio::test]
    async fn reads_are_retried_across_a_peer_restart_and_writes_are_not() {
        use keelson_proto::keelson::events::v1 as pb;
        use keelson_proto::keelson::pod_sync::v1 as sync;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dead.sock");
        // A killed service leaves a socket without a listener.
        drop(tokio::net::UnixListener::bind(&path).unwrap());
        let channel = connect_unix("dead", &path);
        let mut change = sync::pod_sync_client::PodSyncClient::new(channel.clone());
        let status = change.retry_pod(sync::RetryPodRequest::default()).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);

        let mut read = pb::events_client::EventsClient::new(channel);
        let call = tokio::spawn(async move { read.list_events(pb::ListEventsRequest::default()).await });
        tokio::time::sleep(Duration::from_millis(120)).await;
        assert!(!call.is_finished());
        std::fs::remove_file(&path).unwrap();
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(answering(listener, String::new()));
        call.await.unwrap().unwrap();
        server.abort();
    }

    #[tokio::test]
    async fn retries_stop_at_the_retry_budget() {
        use keelson_proto::keelson::events::v1 as pb;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dead.sock");
        drop(tokio::net::UnixListener::bind(&path).unwrap());
        let channel = connect_unix("dead", &path);
        let calls = (0..100).map(|_| {
            let mut read = pb::events_client::EventsClient::new(channel.clone());
            async move {
                let begun = tokio::time::Instant::now();
                read.list_events(pb::ListEventsRequest::default()).await.unwrap_err();
                begun.elapsed()
            }
        });
        let took = futures_util::future::join_all(calls).await;
        // 20 repetitions are in the window, so at most 20 calls have paused at all.
        let paused = took.iter().filter(|t| **t >= Duration::from_millis(25)).count();
        assert!((1..=20).contains(&paused), "{paused}");
    }

    #[tokio::test]
    async fn a_peer_that_never_started_is_reported_at_once() {
        use keelson_proto::keelson::events::v1 as pb;
        let dir = tempfile::tempdir().unwrap();
        let source = UnixStream::connect(dir.path().join("none.sock")).await.unwrap_err();
        assert!(!is_away(&source));
        let mut read =
            pb::events_client::EventsClient::new(connect_unix("none", &dir.path().join("none.sock")));
        let status = read.list_events(pb::ListEventsRequest::default()).await.unwrap_err();
        assert!(status.message().contains("No such file"), "{}", status.message());
    }
}
