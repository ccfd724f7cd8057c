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

use crate::access::ClientCertificates;
use crate::access::certificates::CertificateRefusal;
use crate::connection_limits::{
    ConnectionLimiter, ConnectionLimits, ConnectionSlot, LastReport, too_many_connections,
};
use crate::serving::Serving;
use crate::unauthorized_slots::SourceAddress;

/// How long a client may take for its first request, up to the end of its head.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may be idle between requests.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// How long a connection may last.
const MAX_DURATION: Duration = Duration::from_secs(4 * 3600);
/// How long open connections may take to end at shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a client may take for the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Binds `address` and serves `router` on it until shutdown, over TLS if `tls` is given. While the port is in use, binding is
/// retried and a condition reports it; the service does not end.
pub async fn run(
    ctx: Context,
    name: &'static str,
    address: SocketAddr,
    router: Router,
    tls: Option<Serving>,
) {
    let handle = ctx.progress.register(name);
    let condition = format!("port {}", address.port());
    let mut backoff = Backoff::new(Duration::from_millis(200), LoopHandle::HEARTBEAT);
    let listener = loop {
        handle.tick();
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => ctx.progress.condition(&condition, Err(bind_error_text(name, address, &error))),
        }
        // Cancel-safe: neither arm holds anything.
        tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(backoff.next_delay()) => {}
        }
    };
    ctx.progress.condition(&condition, Ok(()));
    tracing::info!(%address, "the {name} is listening");
    let limiter = ConnectionLimiter::new(name, ConnectionLimits::for_this_process());
    serve(&ctx, &handle, listener, router, tls, &limiter).await;
}

fn bind_error_text(name: &str, address: SocketAddr, error: &io::Error) -> String {
    let port = address.port();
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "the {name} cannot listen on {address}: port {port} is taken, perhaps by a kubelet or another agent \
             (`ss -ltnp 'sport = :{port}'` shows the process); stop it or configure another port; retrying"
        ),
        io::ErrorKind::PermissionDenied => format!(
            "the {name} cannot listen on {address}: this user may not bind port {port}; configure one above 1023; \
             retrying"
        ),
        _ => format!("the {name} cannot listen on {address}: {error}; retrying"),
    }
}

/// Serves `router` on a bound listener until the shutdown.
pub async fn serve(
    ctx: &Context,
    handle: &LoopHandle,
    listener: TcpListener,
    router: Router,
    tls: Option<Serving>,
    limiter: &ConnectionLimiter,
) {
    let mut report = LastReport::default();
    loop {
        handle.tick();
        report = limiter.report(&ctx.progress, report);
        // Cancel-safe: an accept that is dropped takes nothing.
        let accepted = tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let slot = limiter.acquire(peer.ip());
                keelson_service_kit::spawn(
                    "connection",
                    serve_connection(ctx.clone(), stream, router.clone(), tls.clone(), slot),
                );
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_connection(
    ctx: Context,
    stream: TcpStream,
    router: Router,
    tls: Option<Serving>,
    slot: ConnectionSlot,
) {
    let _ = stream.set_nodelay(true);
    let peer = stream.peer_addr().ok();
    let slot = Arc::new(slot);
    let Some(serving) = tls else {
        return serve_requests(&ctx, stream, RequestHandler { router, slot, certificates: None }).await;
    };
    let Some(config) = serving.config() else {
        tracing::warn!(
            event = "no_serving_certificate",
            "closed a connection: no serving certificate available for the kubelet"
        );
        return;
    };
    // Cancel-safe: a displaced connection is closed.
    let handshake = tokio::select! {
        handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream)) => handshake,
        () = slot.displaced() => return,
    };
    match handshake {
        Ok(Ok(stream)) => {
            let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
            let certificates = Some(ClientCertificates(chain));
            serve_requests(&ctx, stream, RequestHandler { router, slot, certificates }).await;
        }
        Ok(Err(error)) => log_handshake_error(&serving, peer, &error),
        Err(_) => tracing::debug!("a TLS handshake timed out"),
    }
}

/// Logs and counts a handshake that failed because of the client's certificate; other errors, such as those of port scanners, are
/// at debug level.
fn log_handshake_error(serving: &Serving, peer: Option<SocketAddr>, error: &io::Error) {
    let tls_error = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls_error.and_then(CertificateRefusal::from_tls_error) {
        Some(refusal) => {
            serving.refused_certificates.count(refusal);
            let source = peer.map(|peer| SourceAddress::new(peer.ip()));
            // 401 is what a request on this connection would have got.
            if let Some(suppressed) = serving.refusal_log.count(source, 401) {
                let peer = peer.map(|peer| peer.to_string());
                tracing::info!(
                    event = "connection_refused",
                    peer,
                    error = refusal.text,
                    suppressed,
                    "refused a connection because of its client certificate"
                );
            }
        }
        None => tracing::debug!(%error, "a TLS handshake failed"),
    }
}

/// Handles the requests of one connection.
#[derive(Clone)]
struct RequestHandler {
    router: Router,
    slot: Arc<ConnectionSlot>,
    /// The client's certificates; `None` without TLS, where every request is authorized.
    certificates: Option<ClientCertificates>,
}

impl RequestHandler {
    async fn handle(self, mut request: Request<Incoming>) -> Result<Response, Infallible> {
        let Self { router, slot, certificates } = self;
        slot.notify_request();
        let response = match certificates {
            Some(certificates) => {
                request.extensions_mut().insert(certificates);
                request.extensions_mut().insert(Arc::clone(&slot));
                router.oneshot(request).await
            }
            None => match slot.authorize(None) {
                Ok(()) => router.oneshot(request).await,
                Err(error) => Ok(too_many_connections(&error)),
            },
        };
        let Ok(mut response) = response;
        // An unauthorized connection frees its slot for the next one.
        if !slot.is_authorized() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    }
}

/// Serves the requests of one connection.
async fn serve_requests(
    ctx: &Context,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    handler: RequestHandler,
) {
    let slot = Arc::clone(&handler.slot);
    let first_request_timeout = async {
        if tokio::time::timeout(FIRST_REQUEST_TIMEOUT, slot.first_request()).await.is_ok() {
            std::future::pending().await
        }
    };
    let service = tower::service_fn(move |request| handler.clone().handle(request));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
        .with_upgrades();
    tokio::pin!(served);
    // Cancel-safe: `served` is pinned outside; at a timeout it is dropped, together with the calls to other
    // services that it waits for.
    let result = tokio::select! {
        result = &mut served => result,
        () = first_request_timeout => {
            tracing::debug!("closed a connection: its first request timed out");
            return;
        }
        () = slot.displaced() => {
            tracing::debug!("closed an unauthorized connection to accept a newer one");
            return;
        }
        () = tokio::time::sleep(MAX_DURATION) => return,
        () = ctx.shutdown.cancelled() => {
            served.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, served).await;
            return;
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
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

    const REQUEST: &str = "GET / HTTP/1.1\r\nhost: node\r\n\r\n";

    /// Serves a connection on which the client sends `input`: the seconds until it ends, and the response.
    async fn serve_one(input: &str, certificates: Option<ClientCertificates>) -> (u64, String) {
        let ctx = Context::detached(ServiceName::NodeApi, Config::default());
        let limiter = ConnectionLimiter::new("port", ConnectionLimits { unauthorized: 1, authorized: 1 });
        let router = Router::new().route("/", get(|| async { "this is the response" }));
        let slot = Arc::new(limiter.acquire(Ipv4Addr::LOCALHOST.into()));
        let (mut client, server) = tokio::io::duplex(4096);
        client.write_all(input.as_bytes()).await.unwrap();
        let started = Instant::now();
        serve_requests(&ctx, server, RequestHandler { router, slot, certificates }).await;
        let seconds = started.elapsed().as_secs();
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        (seconds, response)
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_a_complete_request_is_closed_after_ten_seconds() {
        for input in ["", "GET / HTTP/1.1\r\nhost: no"] {
            assert_eq!(serve_one(input, None).await, (10, String::new()), "{input:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn authorized_connection_may_be_idle_for_ninety_seconds() {
        let (seconds, response) = serve_one(REQUEST, None).await;
        assert_eq!(seconds, 90, "{response}");
        assert!(
            response.ends_with("this is the response") && !response.contains("connection:"),
            "{response}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn unauthorized_connection_is_closed_after_the_response() {
        let (seconds, response) = serve_one(REQUEST, Some(ClientCertificates::default())).await;
        assert_eq!(seconds, 0, "{response}");
        assert!(
            response.ends_with("this is the response") && response.contains("connection: close"),
            "{response}"
        );
    }
}
