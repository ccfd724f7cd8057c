//! Serves fakes at the socket of a service.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use keelson_config::{Config, ServiceName};
use keelson_service_kit::CancellationToken;
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::service::Routes;

use super::cut_off::break_marked;

/// Fakes that listen at the socket of a service, with the server stack of the real one. Killed when dropped.
///
/// The server has a runtime of its own, so that its connections break with it, as those of a process do.
#[derive(Debug)]
pub struct FakeServer {
    socket: PathBuf,
    stop: CancellationToken,
    task: Option<JoinHandle<anyhow::Result<()>>>,
    runtime: Option<Runtime>,
}

impl FakeServer {
    /// Serves `routes` at the socket of `service` in the run folder of `config`, whose users may call. Returns when it
    /// is bound.
    ///
    /// # Errors
    /// The folder of the socket cannot be created, or the socket cannot be bound.
    pub async fn start(config: &Config, service: ServiceName, routes: Routes) -> anyhow::Result<Self> {
        let socket = config.paths.socket(service);
        let folder = config.paths.socket_dir(service);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Self::bind(config, socket, routes).await
    }

    /// Serves `routes` at a socket of no service, such as that of a container runtime. Returns when it is bound.
    ///
    /// # Errors
    /// The socket cannot be bound.
    pub async fn at(socket: &Path, routes: Routes) -> anyhow::Result<Self> {
        Self::bind(&Config::default(), socket.to_owned(), routes).await
    }

    async fn bind(config: &Config, socket: PathBuf, routes: Routes) -> anyhow::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let stack = StackLayer::new(CallerPolicy::new(config), Default::default());
        let routes = break_marked(routes);
        let stop = CancellationToken::new();
        let (bound, is_bound) = oneshot::channel();
        let task = runtime.spawn({
            let (socket, stop) = (socket.clone(), stop.clone());
            async move {
                let on_bound = || {
                    // An error means that the caller is gone.
                    let _ = bound.send(());
                };
                serve(&socket, routes, stack, stop, on_bound).await
            }
        });
        let mut server = Self { socket, stop, task: Some(task), runtime: Some(runtime) };
        if is_bound.await.is_err() {
            server.ended().await?;
            anyhow::bail!("the server at {} has ended before it was bound", server.socket.display());
        }
        Ok(server)
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Stops the server gracefully: calls in progress get some time to end.
    ///
    /// # Errors
    /// The server has failed.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.ended().await
    }

    /// Ends it as a service that is killed: connections break, and the socket remains without a listener. Nothing is accepted or
    /// answered any more when this returns.
    pub fn kill(mut self) {
        if let Some(runtime) = self.runtime.take() {
            // On a thread of its own, because a runtime must not wait in async code.
            let ended = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(60))).join();
            ended.expect("the runtime of a fake server has ended");
        }
    }

    async fn ended(&mut self) -> anyhow::Result<()> {
        match self.task.take() {
            Some(task) => task.await?,
            None => Ok(()),
        }
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Does not block, so that it can be dropped in an async test.
            runtime.shutdown_background();
        }
    }
}
