//! Listening sockets and their connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use keelson_service_kit::{Backoff, Context, LoopHandle};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::access::Shown;
use crate::serving::Serving;

/// Connections per listener; one more waits.
const CONNECTIONS: usize = 256;
/// How long a connection may be without a request.
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
    serve(&ctx, &handle, listener, router, tls).await;
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
) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        handle.tick();
        let next = async {
            let permit = Arc::clone(&permits).acquire_owned().await;
            (permit, listener.accept().await)
        };
        // Cancel-safe: a permit that is dropped is free again, an accept that is dropped takes nothing.
        let (permit, accepted) = tokio::select! {
            () = ctx.shutdown.cancelled() => return,
            () = tokio::time::sleep(LoopHandle::HEARTBEAT) => continue,
            next = next => next,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = connection(ctx.clone(), stream, router.clone(), tls.clone());
                tokio::spawn(async move {
                    connection.await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(ctx: Context, stream: TcpStream, router: Router, tls: Option<Serving>) {
    let _ = stream.set_nodelay(true);
    let Some(serving) = tls else { return requests(&ctx, stream, router, Shown::default()).await };
    let Some(config) = serving.config() else {
        tracing::warn!("closed a connection: no serving certificate available for the kubelet");
        return;
    };
    match tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await {
        Ok(Ok(stream)) => {
            let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let shown = Shown(shown.iter().map(|certificate| certificate.clone().into_owned()).collect());
            requests(&ctx, stream, router, shown).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake has failed"),
        Err(_) => tracing::debug!("a TLS handshake has taken too long"),
    }
}

/// Serves the requests of one connection, whose client has shown what `shown` holds.
async fn requests(
    ctx: &Context,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    shown: Shown,
) {
    let router =
        ServiceExt::<Request<Incoming>>::map_request(router, move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(shown.clone());
            request
        });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .with_upgrades();
    tokio::pin!(served);
    // Cancel-safe: `served` is pinned outside; when the time is up it is dropped, and with it the calls to
    // neighbours that it was waiting for.
    let end = tokio::select! {
        end = &mut served => end,
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
