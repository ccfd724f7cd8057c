//! `/exec`, `/attach`, `/portForward` and `/run`: the ways into a container (node-and-api.md §8.4 to §8.6).
//!
//! Whoever gets through one of them may do in the container what its user may, and mostly that is root. So they are for those
//! whose certificate says who they are ([`crate::access`]); over plain HTTP nobody is known, loopback is no substitute, and
//! each request is answered as one without an identity: 401, whatever its method, parameters and pod.
//!
//! The streams themselves are not looked at: once runtime-shim has told what the runtime's streaming server answers, bytes go
//! both ways as they are. But for two protocols over WebSocket that end here ([`websocket`]): the streams of a command in channels
//! ([`channels`]), and a port-forward in a tunnel ([`tunnel`]). To the runtime both are SPDY.

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
use pb::stream_request::Item as Ask;
use pb::stream_response::Item as Told;
use pb::stream_start::What;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::App;
use crate::access::{User, unauthorized};
use crate::failure::Failure;
use crate::pods;
use crate::refusals::{Cut, Refusals};
use options::{StreamOptions, attach_options, ports};

/// The query of a request.
type Pairs = Query<Vec<(String, String)>>;
/// Who asks; nobody over plain HTTP.
type Who = Option<Extension<User>>;

/// Pieces of input that wait for the runtime.
const WAITING: usize = 4;

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

/// The segments of a path.
#[derive(Debug, Clone, serde::Deserialize)]
pub(crate) struct Target {
    namespace: String,
    pod: String,
    #[serde(default)]
    uid: Option<String>,
    #[serde(default)]
    container: String,
}

/// Who was refused over HTTP, where every local process and every pod of the node's network may ask.
static REFUSED: LazyLock<Refusals> = LazyLock::new(Refusals::uncounted);

/// Who asks, by one of `methods`; an answer for nobody, whatever the method.
#[allow(clippy::result_large_err)]
fn known(who: Who, request: &Request, methods: &[Method]) -> Result<User, Response> {
    let Some(Extension(user)) = who else {
        if let Some(left_out) = REFUSED.count(None, 401) {
            tracing::warn!(
                path = %Cut(request.uri().path()),
                left_out,
                "refused a way into a container: over HTTP nobody is known; authentication.x509.clientCAFile or tlsCertFile \
                 turns TLS on"
            );
        }
        return Err(unauthorized());
    };
    if methods.contains(request.method()) {
        return Ok(user);
    }
    Err((StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed").into_response())
}

async fn exec(
    State(app): State<App>,
    who: Who,
    Path(target): Path<Target>,
    Query(pairs): Pairs,
    request: Request,
) -> Result<Response, Response> {
    let user = known(who, &request, &[Method::GET, Method::POST])?;
    let StreamOptions { stdin, stdout, stderr, tty } = StreamOptions::parse(&pairs).map_err(bad)?;
    let command = pairs.into_iter().filter(|(key, _)| key == "command").map(|(_, value)| value).collect();
    let pod = find(&app, &target).await.map_err(Failure::into_response)?;
    let container = target.container.clone();
    let what = What::Exec(pb::StreamExec { container, command, stdin, stdout, stderr, tty });
    let path = request.uri().path().to_owned();
    let caller = Caller { app: &app, user: &user, target: &target, pod_uid: pod.uid, path };
    match websocket::Handshake::of(&request, channels::is_spoken) {
        Some(handshake) => {
            app.websockets().count("exec");
            let wanted = Wanted { stdin, stdout, stderr, tty };
            channels::connect(caller, what, wanted, handshake?, request).await
        }
        None => caller.connect(what, request).await,
    }
}

async fn attach(
    State(app): State<App>,
    who: Who,
    Path(target): Path<Target>,
    Query(pairs): Pairs,
    request: Request,
) -> Result<Response, Response> {
    let user = known(who, &request, &[Method::GET, Method::POST])?;
    let asked = StreamOptions::parse(&pairs).map_err(bad)?;
    let pod = find(&app, &target).await.map_err(Failure::into_response)?;
    let StreamOptions { stdin, stdout, stderr, tty } =
        attach_options(asked, &pod.pod_json, &target.container);
    let container = target.container.clone();
    let what = What::Attach(pb::StreamAttach { container, stdin, stdout, stderr, tty });
    let path = request.uri().path().to_owned();
    let caller = Caller { app: &app, user: &user, target: &target, pod_uid: pod.uid, path };
    match websocket::Handshake::of(&request, channels::is_spoken) {
        Some(handshake) => {
            app.websockets().count("attach");
            let wanted = Wanted { stdin, stdout, stderr, tty };
            channels::connect(caller, what, wanted, handshake?, request).await
        }
        None => caller.connect(what, request).await,
    }
}

async fn port_forward(
    State(app): State<App>,
    who: Who,
    Path(target): Path<Target>,
    Query(pairs): Pairs,
    request: Request,
) -> Result<Response, Response> {
    let user = known(who, &request, &[Method::GET, Method::POST])?;
    let handshake = websocket::Handshake::of(&request, tunnel::is_spoken);
    // In a tunnel they are named later, as with SPDY.
    let is_websocket = handshake.is_none() && has(request.headers(), header::UPGRADE, "websocket");
    let ports = ports(&pairs, is_websocket).map_err(bad)?;
    let pod = find(&app, &target).await.map_err(Failure::into_response)?;
    let what = What::PortForward(pb::StreamPortForward { ports });
    let path = request.uri().path().to_owned();
    let caller = Caller { app: &app, user: &user, target: &target, pod_uid: pod.uid, path };
    match handshake {
        Some(handshake) => {
            app.websockets().count("portforward");
            tunnel::connect(caller, what, handshake?, request).await
        }
        None => caller.connect(what, request).await,
    }
}

fn bad(error: impl std::fmt::Display) -> Response {
    (StatusCode::BAD_REQUEST, error.to_string()).into_response()
}

/// The pod that is meant; not one whose UID is another.
async fn find(app: &App, target: &Target) -> Result<pods::Found, Failure> {
    let found = pods::find(app, &target.namespace, &target.pod).await?;
    let missing = |text: &str| Failure::new(StatusCode::NOT_FOUND, text);
    let found = found.ok_or_else(|| missing("pod does not exist"))?;
    match &target.uid {
        Some(uid) if *uid != found.uid => Err(missing("pod not found")),
        _ => Ok(found),
    }
}

/// Whether one of the values of a header has a word.
fn has(headers: &HeaderMap, name: header::HeaderName, word: &str) -> bool {
    let all = headers.get_all(name);
    all.iter().any(|value| value.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains(word)))
}

/// What the runtime has answered, and the way to it.
struct Answered {
    head: pb::StreamHead,
    from_runtime: Streaming<pb::StreamResponse>,
    to_runtime: mpsc::Sender<pb::StreamRequest>,
}

/// Whoever asks for something in a pod.
struct Caller<'a> {
    app: &'a App,
    user: &'a User,
    target: &'a Target,
    pod_uid: String,
    /// That of the request.
    path: String,
}

impl Caller<'_> {
    /// Connects whoever has sent `request` with what `what` names.
    async fn connect(self, what: What, mut request: Request) -> Result<Response, Response> {
        if !has(request.headers(), header::CONNECTION, "upgrade") {
            // The kubelet's code for it, although the fault is the client's.
            return Err((StatusCode::INTERNAL_SERVER_ERROR, "Upgrade request required").into_response());
        }
        let (method, headers) = (request.method().to_string(), headers_of(request.headers()));
        let client = hyper::upgrade::on(&mut request);
        let Answered { head, from_runtime, to_runtime } = self.ask(what, method, headers).await?;
        if head.status != 101 {
            return no_change(&head, from_runtime);
        }
        tokio::spawn(pump::run(self.app.shutdown(), client, from_runtime, to_runtime));
        Ok(answer_of(&head, Body::empty()))
    }

    /// The same in SPDY, whatever the client speaks: with one of these versions of the streams.
    async fn connect_in_spdy(&self, what: What, versions: &[&str]) -> Result<Answered, Response> {
        let header = |name: &str, value: &str| pb::HttpHeader { name: name.into(), value: value.into() };
        let mut headers = vec![
            header("User-Agent", "keelson-node-api"),
            header("Connection", "Upgrade"),
            header("Upgrade", PROTOCOL),
            header("Content-Length", "0"),
        ];
        headers.extend(versions.iter().map(|version| header(STREAMS_HEADER, version)));
        let answered = self.ask(what, Method::POST.to_string(), headers).await?;
        if answered.head.status != 101 {
            return Err(no_change(&answered.head, answered.from_runtime).unwrap_or_else(|refused| refused));
        }
        if told(&answered.head, "Upgrade").is_some_and(|protocol| protocol.eq_ignore_ascii_case(PROTOCOL)) {
            return Ok(answered);
        }
        let text = "the container runtime does not speak SPDY/3.1 for streams";
        Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
    }

    async fn ask(
        &self,
        what: What,
        method: String,
        headers: Vec<pb::HttpHeader>,
    ) -> Result<Answered, Response> {
        let Self { app, user, target, pod_uid, path } = self;
        tracing::info!(
            user = user.name,
            namespace = target.namespace,
            pod = target.pod,
            container = target.container,
            path = %Cut(path),
            "somebody is let into a pod"
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
        let (to_runtime, asked) = mpsc::channel(WAITING);
        // There is room: it is the first.
        let _ = to_runtime.try_send(pb::StreamRequest { item: Some(Ask::Start(start)) });
        let refused = |status: Status| refusal(&target.container, &status);
        let peer = app.peer(ServiceName::RuntimeShim);
        let answer = RuntimeClient::new(peer.channel()).stream(ReceiverStream::new(asked)).await;
        let mut from_runtime = answer.map_err(refused)?.into_inner();
        match from_runtime.message().await.map_err(refused)? {
            Some(pb::StreamResponse { item: Some(Told::Head(head)) }) => {
                Ok(Answered { head, from_runtime, to_runtime })
            }
            _ => Err(refused(Status::internal("runtime-shim has ended the stream without an answer"))),
        }
    }
}

fn headers_of(headers: &HeaderMap) -> Vec<pb::HttpHeader> {
    let text = headers.iter().filter_map(|(name, value)| {
        Some(pb::HttpHeader { name: name.to_string(), value: value.to_str().ok()?.to_owned() })
    });
    text.collect()
}

/// The first value of a header in the runtime's answer.
fn told<'a>(head: &'a pb::StreamHead, name: &str) -> Option<&'a str> {
    let found = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
    found.map(|header| header.value.as_str())
}

/// What is answered when the runtime has not changed the protocol.
#[allow(clippy::result_large_err, reason = "both are answers")]
fn no_change(
    head: &pb::StreamHead,
    from_runtime: Streaming<pb::StreamResponse>,
) -> Result<Response, Response> {
    match head.status {
        400.. => Ok(answer_of(head, body(from_runtime))),
        odd => {
            let text = format!("invalid upgrade response: status code {odd}");
            Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
        }
    }
}

/// The runtime's own answer, with its headers but those that describe a body which is framed anew.
fn answer_of(head: &pb::StreamHead, body: Body) -> Response {
    const OF_THE_BODY: [&str; 3] = ["content-length", "transfer-encoding", "date"];
    let status = u16::try_from(head.status).unwrap_or(500);
    let kept = head.headers.iter().filter(|header| {
        !OF_THE_BODY.iter().any(|name| header.name.eq_ignore_ascii_case(name))
            && (status == 101 || !header.name.eq_ignore_ascii_case("connection"))
    });
    let builder = kept.fold(Response::builder().status(status), |builder, header| {
        builder.header(header.name.as_str(), header.value.as_str())
    });
    builder.body(body).unwrap_or_else(|error| {
        let text = format!("the container runtime's answer cannot be handed on: {error}");
        (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
    })
}

fn body(from_runtime: Streaming<pb::StreamResponse>) -> Body {
    Body::from_stream(from_runtime.filter_map(async |message| match message {
        Ok(pb::StreamResponse { item: Some(Told::Data(bytes)) }) => Some(Ok(bytes)),
        Ok(_) => None,
        Err(status) => Some(Err(status)),
    }))
}

/// What is answered when there is no connection (node-and-api.md §8.4).
fn refusal(container: &str, status: &Status) -> Response {
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
            Failure::of_peer("runtime-shim", status).into_response()
        }
        _ => (StatusCode::INTERNAL_SERVER_ERROR, text).into_response(),
    }
}
