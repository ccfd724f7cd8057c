//! Runs a service in the process of its test, at its real socket.

use std::time::Duration;

use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_service_kit::{Context, Peer, PeerChannel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Request;
use tonic::service::Routes;

/// How long a test waits for a state before it fails.
const LIMIT: Duration = Duration::from_secs(20);

/// Polls `look` until it returns a value; for state without an event of its own.
///
/// # Panics
/// Nothing was returned within 20 s; the message names `what`.
pub async fn until_some<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let wait = async {
        loop {
            if let Some(value) = look().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("{what} never came"))
}

/// A request with a deadline.
pub fn within<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

/// A service that runs in the process of its test, with the client type `C`.
#[derive(Debug)]
pub struct RunningService<C> {
    /// The context that it was built from.
    pub ctx: Context,
    server: JoinHandle<()>,
    client: fn(PeerChannel) -> C,
}

impl<C> RunningService<C> {
    /// Serves `routes` at the service's socket, whose folder must exist. Returns when it is bound.
    ///
    /// # Panics
    /// It cannot be bound.
    pub async fn start(ctx: Context, routes: Routes, client: fn(PeerChannel) -> C) -> Self {
        let stack = StackLayer::new(CallerPolicy::new(&ctx.config), Default::default());
        let (socket, stop) = (ctx.config.paths.socket(ctx.service), ctx.shutdown.clone());
        let (bound, is_bound) = oneshot::channel();
        let server = tokio::spawn(async move {
            let on_bound = || {
                // An error means that the test is gone.
                let _ = bound.send(());
            };
            serve(&socket, routes, stack, stop, on_bound).await.expect("the server of the service");
        });
        is_bound.await.expect("the socket of the service is bound");
        Self { ctx, server, client }
    }

    /// A client with a connection of its own.
    pub fn client(&self) -> C {
        (self.client)(Peer::service(&self.ctx.config.paths.run_dir, self.ctx.service).channel())
    }

    /// Stops it without any cleanup of its pods.
    ///
    /// # Panics
    /// Its server has failed.
    pub async fn stop(self) {
        self.ctx.shutdown.cancel();
        self.server.await.expect("the server of the service");
    }

    /// Waits until the condition `name` has the status `ok`. Returns its text.
    ///
    /// # Panics
    /// The condition does not reach that status within 20 s.
    pub async fn condition(&self, name: &str, ok: bool) -> String {
        until_some(name, || {
            let report = self.ctx.progress.report("");
            let found = report.conditions.into_iter().find(|c| c.name == name && c.ok == ok);
            std::future::ready(found.map(|c| c.message))
        })
        .await
    }
}
