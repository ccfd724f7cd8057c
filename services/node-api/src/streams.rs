//! `/exec`, `/attach`, `/portForward` and `/run`: the ways into a container (node-and-api.md §8.4 to §8.6).
//!
//! A stream has the rights of the container's user, which is often root. So only authenticated users get one ([`crate::access`]).
//! Plain HTTP has no authentication, and loopback is no substitute: every request gets 401, regardless of its method, parameters
//! and pod.
//!
//! The streams are not parsed: after the response of the runtime's streaming server, bytes are forwarded unchanged in both
//! directions. Two protocols over WebSocket are the exception and are terminated here ([`websocket`]): the streams of a command
//! as channels ([`channels`]), and a port-forward in a tunnel ([`tunnel`]). Towards the runtime both are SPDY.

mod channels;
mod options;
mod pump;
mod run;
mod tunnel;
mod websocket;

use std::sync::LazyLock;

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Path, Query, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use futures_util::StreamExt as _;
use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_service_kit::status::reason;
use keelson_spdy::session::Wanted;
use keelson_spdy::{PROTOCOL, STREAMS_HEADER};
use pb::stream_request::Item as RequestItem;
use pb::stream_response::Item as ResponseItem;
use pb::stream_start::What;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::App;
use crate::access::{User, unauthorized_response};
use crate::api_error::ApiError;
use crate::pods;
use crate::refusal_log::{RefusalLog, Sanitized};
use options::{StreamOptions, attach_options, ports};

/// The query of a request.
type QueryPairs = Query<Vec<(String, String)>>;
/// The authenticated user; `None` over plain HTTP.
pub(crate) type MaybeUser = Option<Extension<User>>;

/// Pieces of input that are buffered for the runtime.
const INPUT_BUFFER: usize = 4;

pub(crate) fn router() -> Router<App> {
    Router::new()
        .route("/exec/{namespace}/{pod}/{container}", any(exec))
        .route("/exec/{namespace}/{pod}/{uid}/{container}", any(exec))
        .route("/attach/{namespace}/{pod}/{container}", any(attach))
        .route("/attach/{namespace}/{pod}/{uid}/{container}", any(attach))
        .route("/portForward/{namespace}/{pod}", any(port_forward))
        .route("/portForward/{namespace}/{pod}/{uid}", any(port_forward))
        .route("/run/{namespace}/{pod}/{container}", any(run::run))
        .route("/run/{namespace}/{pod}/{uid}/{container}", any(run::run))
}

/// The segments of a request path.
#[derive(Debug, Clone, serde::Deserialize)]
pub(crate) struct Target {
    namespace: String,
    pod: String,
    #[serde(default)]
    uid: Option<String>,
    #[serde(default)]
    container: String,
}

/// Limits log lines about requests over HTTP, which every local process and every pod with the node's network can send.
static HTTP_REFUSAL_LOG: LazyLock<RefusalLog> = LazyLock::new(RefusalLog::unregistered);

/// The user of a request with one of `methods`. Without a user the error is 401, with another method 405.
#[allow(clippy::result_large_err)]
fn require_user(user: MaybeUser, request: &Request, methods: &[Method]) -> Result<User, Response> {
    let user = authenticated(user, request)?;
    if methods.contains(request.method()) {
        return Ok(user);
    }
    Err((StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed").into_response())
}

/// The user of a request that not every local process may send; the error is 401.
#[allow(clippy::result_large_err)]
pub(crate) fn authenticated(user: MaybeUser, request: &Request) -> Result<User, Response> {
    let Some(Extension(user)) = user else {
        if let Some(suppressed) = HTTP_REFUSAL_LOG.count(None, 401) {
            tracing::warn!(
                event = "stream_refused",
                path = %Sanitized(request.uri().path()),
                suppressed,
                "refused a request that needs an authenticated user: HTTP has no authentication; set \
                 authentication.x509.clientCAFile or tlsCertFile to enable TLS"
            );
        }
        return Err(unauthorized_response());
    };
    Ok(user)
}

async fn exec(
    State(app): State<App>,
    user: MaybeUser,
    Path(target): Path<Target>,
    Query(pairs): QueryPairs,
    request: Request,
) -> Result<Response, Response> {
    let user = require_user(user, &request, &[Method::GET, Method::POST])?;
    let StreamOptions { stdin, stdout, stderr, tty } = StreamOptions::parse(&pairs).map_err(bad_request)?;
    let command = pairs.into_iter().filter(|(key, _)| key == "command").map(|(_, value)| value).collect();
    let pod = find(&app, &target).await.map_err(ApiError::into_response)?;
    let container = target.container.clone();
    let what = What::Exec(pb::StreamExec { container, command, stdin, stdout, stderr, tty });
    let path = request.uri().path().to_owned();
    let connector = Connector { app: &app, user: &user, target: &target, pod_uid: pod.uid, path };
    match websocket::Handshake::parse(&request, channels::is_supported) {
        Some(handshake) => {
            app.websockets().count("exec");
            let wanted = Wanted { stdin, stdout, stderr, tty };
            channels::connect(connector, what, wanted, handshake?, request).await
        }
        None => connector.connect(what, request).await,
    }
}

async fn attach(
    State(app): State<App>,
    user: MaybeUser,
    Path(target): Path<Target>,
    Query(pairs): QueryPairs,
    request: Request,
) -> Result<Response, Response> {
    let user = require_user(user, &request, &[Method::GET, Method::POST])?;
    let requested = StreamOptions::parse(&pairs).map_err(bad_request)?;
    let pod = find(&app, &target).await.map_err(ApiError::into_response)?;
    let StreamOptions { stdin, stdout, stderr, tty } =
        attach_options(requested, &pod.pod_json, &target.container);
    let container = target.container.clone();
    let what = What::Attach(pb::StreamAttach { container, stdin, stdout, stderr, tty });
    let path = request.uri().path().to_owned();
    let connector = Connector { app: &app, user: &user, target: &target, pod_uid: pod.uid, path };
    match websocket::Handshake::parse(&request, channels::is_supported) {
        Some(handshake) => {
            app.websockets().count("attach");
            let wanted = Wanted { stdin, stdout, stderr, tty };
            channels::connect(connector, what, wanted, handshake?, request).await
        }
        None => connector.connect(what, request).await,
    }
}

async fn port_forward(
    State(app): State<App>,
    user: MaybeUser,
    Path(target): Path<Target>,
    Query(pairs): QueryPairs,
    request: Request,
) -> Result<Response, Response> {
    let user = require_user(user, &request, &[Method::GET, Method::POST])?;
    let handshake = websocket::Handshake::parse(&request, tunnel::is_supported);
    // In a tunnel the ports are named later, as with SPDY.
    let is_websocket = handshake.is_none() && has_word(request.headers(), header::UPGRADE, "websocket");
    let ports = ports(&pairs, is_websocket).map_err(bad_request)?;
    let pod = find(&app, &target).await.map_err(ApiError::into_response)?;
    let what = What::PortForward(pb::StreamPortForward { ports });
    let path = request.uri().path().to_owned();
    let connector = Connector { app: &app, user: &user, target: &target, pod_uid: pod.uid, path };
    match handshake {
        Some(handshake) => {
            app.websockets().count("portforward");
            tunnel::connect(connector, what, handshake?, request).await
        }
        None => connector.connect(what, request).await,
    }
}

fn bad_request(error: impl std::fmt::Display) -> Response {
    (StatusCode::BAD_REQUEST, error.to_string()).into_response()
}

/// The pod of `target`; 404 if there is none, or if its UID differs.
async fn find(app: &App, target: &Target) -> Result<pods::FoundPod, ApiError> {
    let found = pods::find(app, &target.namespace, &target.pod).await?;
    let not_found = |text: &str| ApiError::new(StatusCode::NOT_FOUND, text);
    let found = found.ok_or_else(|| not_found("pod does not exist"))?;
    match &target.uid {
        Some(uid) if *uid != found.uid => Err(not_found("pod not found")),
        _ => Ok(found),
    }
}

/// Whether a value of a header contains a word.
fn has_word(headers: &HeaderMap, name: header::HeaderName, word: &str) -> bool {
    let all = headers.get_all(name);
    all.iter().any(|value| value.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains(word)))
}

/// An open stream to the runtime, with the head of its response.
struct RuntimeStream {
    head: pb::StreamHead,
    from_runtime: Streaming<pb::StreamResponse>,
    to_runtime: mpsc::Sender<pb::StreamRequest>,
}

/// Connects the client of one request with the runtime.
struct Connector<'a> {
    app: &'a App,
    user: &'a User,
    target: &'a Target,
    pod_uid: String,
    /// The path of the request.
    path: String,
}

impl Connector<'_> {
    /// Connects the client of `request` with the stream that `what` names.
    async fn connect(self, what: What, mut request: Request) -> Result<Response, Response> {
        if !has_word(request.headers(), header::CONNECTION, "upgrade") {
            // The code of the kubelet, although it is an error of the client.
            return Err((StatusCode::INTERNAL_SERVER_ERROR, "Upgrade request required").into_response());
        }
        let (method, headers) = (request.method().to_string(), headers_of(request.headers()));
        let client = hyper::upgrade::on(&mut request);
        let RuntimeStream { head, from_runtime, to_runtime } =
            self.open_stream(what, method, headers).await?;
        if head.status != 101 {
            return failed_upgrade_response(&head, from_runtime);
        }
        keelson_service_kit::spawn(
            "stream",
            pump::run(self.app.shutdown(), client, from_runtime, to_runtime),
        );
        Ok(forward_response(&head, Body::empty()))
    }

    /// Opens a SPDY stream with one of these stream protocol versions, regardless of the protocol of the client.
    async fn connect_in_spdy(&self, what: What, versions: &[&str]) -> Result<RuntimeStream, Response> {
        let header = |name: &str, value: &str| pb::HttpHeader { name: name.into(), value: value.into() };
        let mut headers = vec![
            header("User-Agent", "keelson-node-api"),
            header("Connection", "Upgrade"),
            header("Upgrade", PROTOCOL),
            header("Content-Length", "0"),
        ];
        headers.extend(versions.iter().map(|version| header(STREAMS_HEADER, version)));
        let stream = self.open_stream(what, Method::POST.to_string(), headers).await?;
        if stream.head.status != 101 {
            let response = failed_upgrade_response(&stream.head, stream.from_runtime);
            return Err(response.unwrap_or_else(|error| error));
        }
        let protocol = response_header(&stream.head, "Upgrade");
        if protocol.is_some_and(|protocol| protocol.eq_ignore_ascii_case(PROTOCOL)) {
            return Ok(stream);
        }
        let text = "the container runtime does not speak SPDY/3.1 for streams";
        Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
    }

    /// Opens the stream through runtime-shim and waits for the head of the response.
    async fn open_stream(
        &self,
        what: What,
        method: String,
        headers: Vec<pb::HttpHeader>,
    ) -> Result<RuntimeStream, Response> {
        let Self { app, user, target, pod_uid, path } = self;
        tracing::info!(
            user = user.name,
            namespace = target.namespace,
            pod = target.pod,
            container = target.container,
            path = %Sanitized(path),
            "opening a stream into a pod"
        );
        let start = pb::StreamStart {
            pod_uid: pod_uid.clone(),
            namespace: target.namespace.clone(),
            name: target.pod.clone(),
            what: Some(what),
            method,
            headers,
            user: user.name.clone(),
        };
        let (to_runtime, requests) = mpsc::channel(INPUT_BUFFER);
        // The channel is empty, so the first message always fits.
        let _ = to_runtime.try_send(pb::StreamRequest { item: Some(RequestItem::Start(start)) });
        let error = |status: Status| error_response(&target.container, &status);
        let peer = app.peer(ServiceName::RuntimeShim);
        let response = RuntimeClient::new(peer.channel()).stream(ReceiverStream::new(requests)).await;
        let mut from_runtime = response.map_err(error)?.into_inner();
        match from_runtime.message().await.map_err(error)? {
            Some(pb::StreamResponse { item: Some(ResponseItem::Head(head)) }) => {
                Ok(RuntimeStream { head, from_runtime, to_runtime })
            }
            _ => Err(error(Status::internal("runtime-shim ended the stream without a response"))),
        }
    }
}

fn headers_of(headers: &HeaderMap) -> Vec<pb::HttpHeader> {
    let text = headers.iter().filter_map(|(name, value)| {
        Some(pb::HttpHeader { name: name.to_string(), value: value.to_str().ok()?.to_owned() })
    });
    text.collect()
}

/// The first value of a header in the runtime's response.
fn response_header<'a>(head: &'a pb::StreamHead, name: &str) -> Option<&'a str> {
    let found = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
    found.map(|header| header.value.as_str())
}

/// The response when the runtime did not upgrade the connection.
#[allow(clippy::result_large_err, reason = "both are responses")]
fn failed_upgrade_response(
    head: &pb::StreamHead,
    from_runtime: Streaming<pb::StreamResponse>,
) -> Result<Response, Response> {
    match head.status {
        400.. => Ok(forward_response(head, body(from_runtime))),
        other => {
            let text = format!("invalid upgrade response: status code {other}");
            Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
        }
    }
}

/// The runtime's response, without the headers that describe the framing of its body.
fn forward_response(head: &pb::StreamHead, body: Body) -> Response {
    const BODY_HEADERS: [&str; 3] = ["content-length", "transfer-encoding", "date"];
    let status = u16::try_from(head.status).unwrap_or(500);
    let forwarded = head.headers.iter().filter(|header| {
        !BODY_HEADERS.iter().any(|name| header.name.eq_ignore_ascii_case(name))
            && (status == 101 || !header.name.eq_ignore_ascii_case("connection"))
    });
    let builder = forwarded.fold(Response::builder().status(status), |builder, header| {
        builder.header(header.name.as_str(), header.value.as_str())
    });
    builder.body(body).unwrap_or_else(|error| {
        let text = format!("cannot forward the response of the container runtime: {error}");
        (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
    })
}

fn body(from_runtime: Streaming<pb::StreamResponse>) -> Body {
    Body::from_stream(from_runtime.filter_map(async |message| match message {
        Ok(pb::StreamResponse { item: Some(ResponseItem::Data(bytes)) }) => Some(Ok(bytes)),
        Ok(_) => None,
        Err(status) => Some(Err(status)),
    }))
}

/// The response to an error of runtime-shim (node-and-api.md §8.4).
fn error_response(container: &str, status: &Status) -> Response {
    let text = status.message().to_owned();
    match (reason(status).as_deref(), status.code()) {
        (Some("POD_NOT_FOUND"), _) => (StatusCode::NOT_FOUND, "pod does not exist").into_response(),
        (Some("CONTAINER_NOT_FOUND"), _) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("container not found ({container:?})"))
                .into_response()
        }
        (_, Code::ResourceExhausted) => {
            (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "1")], text).into_response()
        }
        (_, Code::NotFound) => (StatusCode::NOT_FOUND, text).into_response(),
        (_, Code::InvalidArgument) => (StatusCode::BAD_REQUEST, text).into_response(),
        (_, Code::Unavailable | Code::DeadlineExceeded) => {
            ApiError::from_peer("runtime-shim", status).into_response()
        }
        _ => (StatusCode::INTERNAL_SERVER_ERROR, text).into_response(),
    }
}
