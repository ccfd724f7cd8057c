//! The task of a socket: registers its plugin, retries, and unregisters it when the socket is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::pluginregistration as pb;
use keelson_proto::pluginregistration::registration_client::RegistrationClient;
use keelson_service_kit::{CancellationToken, PeerChannel, connect_foreign};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::Request;

use crate::metrics::PluginMetrics;
use crate::plugin::{Plugin, PluginHandler};

/// The time for `GetInfo`: 10 s to connect and 1 s to answer.
const INFO_WITHIN: Duration = Duration::from_secs(11);
/// The time for `NotifyRegistrationStatus`.
const NOTIFY_WITHIN: Duration = Duration::from_secs(5);
/// The pauses between attempts: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(122);
/// The longest answer of a plugin in bytes.
const LONGEST_MESSAGE: usize = 1 << 20;

/// What the tasks of all sockets share.
pub(crate) struct Shared {
    /// By the kind of plugin.
    pub(crate) handlers: BTreeMap<String, Arc<dyn PluginHandler>>,
    /// Kinds that other watchers of the folder register.
    pub(crate) others: BTreeSet<String>,
    pub(crate) metrics: PluginMetrics,
    /// Changes when a plugin was unregistered: a refused one may be accepted now.
    pub(crate) unregistered: watch::Sender<u64>,
    /// Cancelled when the service ends. The plugins stay registered then.
    pub(crate) shutdown: CancellationToken,
}

/// Why a plugin is not registered.
#[derive(Debug, thiserror::Error)]
enum RegisterError {
    /// It does not say who it is.
    #[error("{0}")]
    GetInfo(String),
    /// Its kind has no handler.
    #[error("unknown plugin type {kind:?}: this agent registers {known}")]
    UnknownKind { kind: String, known: String },
    /// The handler has refused it.
    #[error("{0}")]
    Refused(String),
}

/// The task of one socket.
pub(crate) struct SocketTask {
    socket: PathBuf,
    channel: PeerChannel,
    shared: Arc<Shared>,
    /// The plugin and its handler, once a registration was begun.
    begun: Option<(Plugin, Arc<dyn PluginHandler>)>,
}

impl SocketTask {
    pub(crate) fn new(socket: PathBuf, shared: Arc<Shared>) -> Self {
        let channel = connect_foreign("the plugin", &socket);
        Self { socket, channel, shared, begun: None }
    }

    /// Registers the plugin until `gone`, then unregisters it.
    pub(crate) async fn run(mut self, gone: CancellationToken) {
        let shutdown = self.shared.shutdown.clone();
        // Handlers expect that a registration is dropped; see `PluginHandler`.
        let is_gone = tokio::select! {
            () = self.register() => {
                tokio::select! {
                    () = gone.cancelled() => true,
                    () = shutdown.cancelled() => false,
                }
            }
            () = gone.cancelled() => true,
            () = shutdown.cancelled() => false,
        };
        if is_gone {
            self.unregister().await;
        }
    }

    /// Tries until the plugin is registered.
    async fn register(&mut self) {
        let mut unregistered = self.shared.unregistered.subscribe();
        let mut pause = FIRST_PAUSE;
        loop {
            unregistered.mark_unchanged();
            let Err(error) = self.attempt().await else { return };
            tracing::warn!(
                event = "plugin_not_registered",
                socket = %self.socket.display(),
                retry_ms = pause.as_millis(),
                %error,
                "a plugin is not registered"
            );
            // A plugin of the same name may have left.
            let _ = timeout(pause, unregistered.changed()).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    async fn attempt(&mut self) -> Result<(), RegisterError> {
        let plugin = self.info().await?;
        if self.shared.others.contains(&plugin.kind) {
            tracing::debug!(socket = %self.socket.display(), kind = plugin.kind, "left the plugin to another service");
            return Ok(());
        }
        let result = self.handle(&plugin).await;
        self.notify(&result).await;
        result?;
        self.shared.metrics.registered(&self.socket, true);
        tracing::info!(
            event = "plugin_registered",
            kind = plugin.kind,
            name = plugin.name,
            endpoint = %plugin.endpoint.display(),
            "registered a plugin"
        );
        Ok(())
    }

    async fn handle(&mut self, plugin: &Plugin) -> Result<(), RegisterError> {
        let Some(handler) = self.shared.handlers.get(&plugin.kind).cloned() else {
            let known = self
                .shared
                .handlers
                .keys()
                .chain(&self.shared.others)
                .cloned()
                .collect::<Vec<_>>()
                .join(", ");
            return Err(RegisterError::UnknownKind { kind: plugin.kind.clone(), known });
        };
        // A plugin that answers with another name than before has no registration under the old one any longer.
        if self.begun.as_ref().is_some_and(|(earlier, _)| earlier != plugin) {
            self.unregister().await;
        }
        self.begun = Some((plugin.clone(), Arc::clone(&handler)));
        handler.register(plugin).await.map_err(RegisterError::Refused)
    }

    async fn info(&self) -> Result<Plugin, RegisterError> {
        let mut request = Request::new(pb::InfoRequest {});
        request.set_timeout(INFO_WITHIN);
        let mut client = self.client();
        let socket = self.socket.display();
        let info = match timeout(INFO_WITHIN, client.get_info(request)).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => {
                let text = format!("GetInfo of the plugin at {socket} has failed: {}", status.message());
                return Err(RegisterError::GetInfo(text));
            }
            Err(_) => {
                let text = format!("the plugin at {socket} has not answered GetInfo within {INFO_WITHIN:?}");
                return Err(RegisterError::GetInfo(text));
            }
        };
        let endpoint = if info.endpoint.is_empty() { self.socket.clone() } else { path(&info.endpoint) };
        Ok(Plugin {
            kind: info.r#type,
            name: info.name,
            endpoint,
            supported_versions: info.supported_versions,
            socket: self.socket.clone(),
        })
    }

    /// Tells the plugin the result. A plugin that does not listen stays registered.
    async fn notify(&self, result: &Result<(), RegisterError>) {
        let error = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let mut request = Request::new(pb::RegistrationStatus { plugin_registered: result.is_ok(), error });
        request.set_timeout(NOTIFY_WITHIN);
        let mut client = self.client();
        let why = match timeout(NOTIFY_WITHIN, client.notify_registration_status(request)).await {
            Ok(Ok(_)) => return,
            Ok(Err(status)) => status.message().to_owned(),
            Err(_) => format!("no answer within {NOTIFY_WITHIN:?}"),
        };
        tracing::warn!(
            event = "plugin_not_notified",
            socket = %self.socket.display(),
            error = why,
            "cannot tell a plugin whether it is registered"
        );
    }

    async fn unregister(&mut self) {
        let Some((plugin, handler)) = self.begun.take() else { return };
        handler.unregister(&plugin).await;
        self.shared.metrics.registered(&self.socket, false);
        tracing::info!(
            event = "plugin_unregistered",
            kind = plugin.kind,
            name = plugin.name,
            "unregistered a plugin"
        );
        self.shared.unregistered.send_modify(|count| *count += 1);
    }

    fn client(&self) -> RegistrationClient<PeerChannel> {
        RegistrationClient::new(self.channel.clone()).max_decoding_message_size(LONGEST_MESSAGE)
    }
}

/// The path in an endpoint, which may be written as a URL: `unix:///csi/csi.sock`.
fn path(endpoint: &str) -> PathBuf {
    let path =
        endpoint.strip_prefix("unix://").or_else(|| endpoint.strip_prefix("unix:")).unwrap_or(endpoint);
    Path::new(path).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_path_or_a_url_of_a_unix_socket() {
        for endpoint in ["/csi/csi.sock", "unix:///csi/csi.sock", "unix:/csi/csi.sock"] {
            assert_eq!(path(endpoint), Path::new("/csi/csi.sock"), "{endpoint}");
        }
    }
}
