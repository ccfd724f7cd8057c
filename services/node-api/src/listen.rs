//! Listening sockets and their connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use keelson_service_kit::{Backoff, Context, LoopHandle};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// Connections per listener; one more waits.
const CONNECTIONS: usize = 256;
/// How long a connection may be without a request.
const IDLE: Duration = Duration::from_secs(90);
/// No connection lives longer, whatever it carries.
const LONGEST: Duration = Duration::from_secs(4 * 3600);
/// What open connections get at the shutdown.
const DRAIN: Duration = Duration::from_secs(1);

/// Binds `address` and serves `router` there until the shutdown. A port that is taken is tried again and shown
/// as a condition; it never ends the service.
pub async fn run(ctx: Context, name: &'static str, address: SocketAddr, router: Router) {
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
    serve(&ctx, &handle, listener, router).await;
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
pub async fn serve(ctx: &Context, handle: &LoopHandle, listener: TcpListener, router: Router) {
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
                let connection = connection(ctx.clone(), stream, router.clone());
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

async fn connection(ctx: Context, stream: TcpStream, router: Router) {
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(router);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(stream), service);
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
