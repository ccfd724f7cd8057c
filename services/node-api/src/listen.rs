//! Listening sockets and their connections.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, StatusCode};
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use keelson_service_kit::{Backoff, Context, LoopHandle};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;

use crate::access::Shown;
use crate::access::certificates::Refusal;
use crate::places::{Limits, Place, Places, Reported, no_place};
use crate::serving::Serving;
use crate::strangers::Source;

/// How long a client may take for its first request, to the end of its head.
const FIRST: Duration = Duration::from_secs(10);
/// How long a connection may be without a further request.
const IDLE: Duration = Duration::from_secs(90);
/// No connection lives longer, whatever it carries.
const LONGEST: Duration = Duration::from_secs(4 * 3600);
/// What open connections get at the shutdown.
const DRAIN: Duration = Duration::from_secs(1);

/// How long a client may take for the handshake of TLS.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Binds `address` and serves `router` there until the shutdown, with TLS if there is any. A port that is taken is tried again and shown
/// as a condition; it never ends the service.
pub async fn run(
    ctx: Context,
    name: &'static str,
    address: SocketAddr,
    router: Router,
    tls: Option<Serving>,
) {
    let handle = ctx.progress.register(name);
    let condition = format!("port {}", address.port());
    let mut again = Backoff::new(Duration::from_millis(200), LoopHandle::HEARTBEAT);
    let listener = loop {
        handle.tick();
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => ctx.progress.condition(&condition, Err(bind_problem(name, address, &error))),
        }
        // Cancel-safe: neither arm holds anything.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(again.next_delay()) => {}
        }
    };
    ctx.progress.condition(&condition, Ok(()));
    tracing::info!(%address, "the {name} listens");
    let places = Places::new(name, Limits::of_this_process());
    serve(&ctx, &handle, listener, router, tls, &places).await;
}

fn bind_problem(name: &str, address: SocketAddr, error: &io::Error) -> String {
    let port = address.port();
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "the {name} cannot listen on {address}: port {port} is taken, perhaps by a kubelet or another agent \
             (ss -ltnp 'sport = :{port}' shows by whom); stop it or choose another port; trying again"
        ),
        io::ErrorKind::PermissionDenied => format!(
            "the {name} cannot listen on {address}: this user may not take port {port}; choose one above 1023; \
             trying again"
        ),
        _ => format!("the {name} cannot listen on {address}: {error}; trying again"),
    }
}

/// Serves `router` on a bound listener until the shutdown.
pub async fn serve(
    ctx: &Context,
    handle: &LoopHandle,
    listener: TcpListener,
    router: Router,
    tls: Option<Serving>,
    places: &Places,
) {
    let mut reported = Reported::default();
    loop {
        handle.tick();
        reported = places.report(&ctx.progress, reported);
        // Cancel-safe: an accept that is dropped takes nothing.
        let accepted = tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let place = places.take(peer.ip());
                tokio::spawn(connection(ctx.clone(), stream, router.clone(), tls.clone(), place));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(ctx: Context, stream: TcpStream, router: Router, tls: Option<Serving>, place: Place) {
    let _ = stream.set_nodelay(true);
    let peer = stream.peer_addr().ok();
    let place = Arc::new(place);
    let Some(serving) = tls else {
        return requests(&ctx, stream, Answers { router, place, shown: None }).await;
    };
    let Some(config) = serving.config() else {
        tracing::warn!("closed a connection: no serving certificate available for the kubelet");
        return;
    };
    // Cancel-safe: who makes room for another one loses the connection.
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)) => shaken,
        () = place.left() => return,
    };
    match shaken {
        Ok(Ok(stream)) => {
            let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let shown = Shown(shown.iter().map(|certificate| certificate.clone().into_owned()).collect());
            requests(&ctx, stream, Answers { router, place, shown: Some(shown) }).await;
        }
        Ok(Err(error)) => handshake_failed(&serving, peer, &error),
        Err(_) => tracing::debug!("a TLS handshake has taken too long"),
    }
}

/// A handshake has failed: about the client's certificate, or about anything else that a scanner of ports may send.
fn handshake_failed(serving: &Serving, peer: Option<SocketAddr>, error: &io::Error) {
    let error_of_tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match error_of_tls.and_then(Refusal::of) {
        Some(refusal) => {
            serving.refused.count(refusal);
            let source = peer.map(|peer| Source::of(peer.ip()));
            // The code that a request on it would have got.
            if let Some(left_out) = serving.refusals.count(source, 401) {
                let peer = peer.map(|peer| peer.to_string());
                tracing::info!(
                    peer,
                    why = refusal.text,
                    left_out,
                    "refused a connection for its client's certificate"
                );
            }
        }
        None => tracing::debug!(%error, "a TLS handshake has failed"),
    }
}

/// What answers the requests of one connection.
#[derive(Clone)]
struct Answers {
    router: Router,
    place: Arc<Place>,
    /// What the client has shown at the handshake; none: there was none, and whoever comes is let in.
    shown: Option<Shown>,
}

impl Answers {
    async fn answer(self, mut request: Request<Incoming>) -> Result<Response, Infallible> {
        let Self { router, place, shown } = self;
        place.hear();
        let answer = match shown {
            Some(shown) => {
                request.extensions_mut().insert(shown);
                request.extensions_mut().insert(Arc::clone(&place));
                router.oneshot(request).await
            }
            None => match place.settle(None) {
                Ok(()) => router.oneshot(request).await,
                Err(why) => Ok(no_place(&why)),
            },
        };
        let Ok(mut answer) = answer;
        // Who was not let in leaves the place to another one.
        if !place.is_settled() && answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(answer)
    }
}

/// Serves the requests of one connection.
async fn requests(
    ctx: &Context,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    answers: Answers,
) {
    let place = Arc::clone(&answers.place);
    let silence = async {
        if tokio::time::timeout(FIRST, place.heard()).await.is_ok() {
            std::future::pending().await
        }
    };
    let service = tower::service_fn(move |request| answers.clone().answer(request));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
        .with_upgrades();
    tokio::pin!(served);
    // Cancel-safe: `served` is pinned outside; when the time is up it is dropped, and with it the calls to
    // neighbours that it was waiting for.
    let end = tokio::select! {
        end = &mut served => end,
        () = silence => {
            tracing::debug!("a client has taken too long for its first request");
            return;
        }
        () = place.left() => {
            tracing::debug!("a client that was not let in has made room for another one");
            return;
        }
        () = tokio::time::sleep(LONGEST) => return,
        () = ctx.shutdown.cancelled() => {
            served.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(DRAIN, served).await;
            return;
        }
    };
    if let Err(error) = end {
        tracing::debug!(%error, "a connection has ended early");
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::routing::get;
    use keelson_config::{Config, ServiceName};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::Instant;

    use super::*;

    const WHOLE: &str = "GET / HTTP/1.1\r\nhost: node\r\n\r\n";

    /// Serves a connection on which this is said, until it ends: for how long, and what was answered.
    async fn serve_one(said: &str, shown: Option<Shown>) -> (u64, String) {
        let ctx = Context::detached(ServiceName::NodeApi, Config::default());
        let places = Places::new("port", Limits { strangers: 1, known: 1 });
        let router = Router::new().route("/", get(|| async { "this is the answer" }));
        let answers = Answers { router, place: Arc::new(places.take(Ipv4Addr::LOCALHOST.into())), shown };
        let (mut client, server) = tokio::io::duplex(4096);
        client.write_all(said.as_bytes()).await.unwrap();
        let begun = Instant::now();
        requests(&ctx, server, answers).await;
        let took = begun.elapsed().as_secs();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        (took, answer)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_without_a_whole_request_is_left_after_ten_seconds() {
        for said in ["", "GET / HTTP/1.1\r\nhost: no"] {
            assert_eq!(serve_one(said, None).await, (10, String::new()), "{said:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_let_in_may_be_silent_for_ninety_seconds_after_it() {
        let (took, answer) = serve_one(WHOLE, None).await;
        assert_eq!(took, 90, "{answer}");
        assert!(answer.ends_with("this is the answer") && !answer.contains("connection:"), "{answer}");
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_not_let_in_is_answered_and_left_at_once() {
        let (took, answer) = serve_one(WHOLE, Some(Shown::default())).await;
        assert_eq!(took, 0, "{answer}");
        assert!(answer.ends_with("this is the answer") && answer.contains("connection: close"), "{answer}");
    }
}
