//! The CSINode of this node, written through pod-config (volumes.md §11.2).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::mutate_request::Verb;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_service_kit::status::reason;
use keelson_service_kit::{CancellationToken, Peer};
use keelson_volume_manager_core::csi::csi_node::{
    CsiNodeError, DriverEntry, is_of_another_node, new_csi_node, with_driver, with_migrated_plugins,
    without_driver,
};
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::legacy::migrated_plugins_annotation;
use serde_json::Value;
use tokio::sync::{Mutex, watch};
use tonic::{Code, Request, Status};

/// The deadline of one call: a little longer than pod-config waits for the API server.
const TIMEOUT: Duration = Duration::from_secs(35);
/// How often a change is tried, with the pauses before the second attempt and the later ones.
const ATTEMPTS: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const PAUSE_FACTOR: u32 = 5;
/// The same for the first change after startup: about 140 s in total.
const INITIAL_ATTEMPTS: u32 = 6;
const INITIAL_PAUSE: Duration = Duration::from_millis(30);
const INITIAL_FACTOR: u32 = 8;
/// How often the API server is asked until it answers at startup.
const POLL: Duration = Duration::from_secs(1);

/// The Ready condition until the CSINode is there (node-and-api.md §8).
pub(crate) const NOT_INITIALIZED: &str = "CSINode is not yet initialized";

/// Why the CSINode could not be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NodeInfoError {
    /// The control plane is none, or none with CSINodes.
    #[error("this node has no API server")]
    NoApiServer,
    /// The Node does not exist yet.
    #[error("the node {node} is not registered at the API server yet")]
    NoNode {
        /// The node.
        node: String,
    },
    /// It was changed by somebody else meanwhile.
    #[error("the CSINode {node} was changed at the same time: {message}")]
    Conflict {
        /// The node.
        node: String,
        /// What the API server says.
        message: String,
    },
    /// The API server or pod-config does not answer, or refuses.
    #[error("cannot {verb} the {kind} {node}: {message}")]
    Call {
        /// `read`, `create`…
        verb: &'static str,
        /// `CSINode` or `Node`.
        kind: &'static str,
        /// The node.
        node: String,
        /// What is wrong.
        message: String,
    },
    /// What the Node or the CSINode contains.
    #[error(transparent)]
    Content(#[from] CsiNodeError),
}

/// Access to the CSINode and the Node of this node. Cheap to clone; clones make their changes one after another.
#[derive(Debug, Clone)]
pub(crate) struct CsiNodes {
    pod_config: Peer,
    node: Arc<str>,
    changes: Arc<Mutex<()>>,
}

type Change<'a> = dyn Fn(&Value) -> Result<Option<Value>, CsiNodeError> + Send + Sync + 'a;

impl CsiNodes {
    /// The CSINode with the name of this node.
    pub(crate) fn new(pod_config: Peer, node: &str) -> Self {
        Self { pod_config, node: node.into(), changes: Arc::default() }
    }

    /// The Node as the API server has it.
    ///
    /// # Errors
    /// There is no API server, no Node, or no answer.
    pub(crate) async fn node(&self) -> Result<Value, NodeInfoError> {
        self.read("Node").await?.ok_or_else(|| NodeInfoError::NoNode { node: self.node.to_string() })
    }

    /// Adds the entry of a driver. Creates the CSINode if it does not exist.
    ///
    /// # Errors
    /// The change failed several times.
    pub(crate) async fn add(&self, entry: &DriverEntry) -> Result<(), NodeInfoError> {
        self.retry((ATTEMPTS, FIRST_PAUSE, PAUSE_FACTOR), true, &|csi_node| with_driver(csi_node, entry))
            .await
    }

    /// Removes the entry of a driver.
    ///
    /// # Errors
    /// The change failed several times.
    pub(crate) async fn remove(&self, driver: &DriverName) -> Result<(), NodeInfoError> {
        let without = |csi_node: &Value| without_driver(csi_node, driver);
        self.retry((ATTEMPTS, FIRST_PAUSE, PAUSE_FACTOR), false, &without).await
    }

    /// Creates the CSINode or updates its annotation of migrated plugins, as soon as the API server answers. `ready` then
    /// becomes `Ok`; until then it has the text for the Ready condition of the node. Without an API server there is
    /// nothing to do.
    ///
    /// # Errors
    /// The change was refused for more than two minutes: the service has to be restarted.
    pub(crate) async fn initialize(
        &self,
        ready: &watch::Sender<Result<(), String>>,
        shutdown: &CancellationToken,
    ) -> Result<(), NodeInfoError> {
        drop(ready.send_replace(Err(NOT_INITIALIZED.to_owned())));
        // Cancel-safe: the reads change nothing.
        let answers = tokio::select! {
            answers = self.until_readable(ready) => answers,
            () = shutdown.cancelled() => return Ok(()),
        };
        if answers {
            let list = migrated_plugins_annotation();
            let plugins: BTreeSet<&str> = list.split(',').filter(|plugin| !plugin.is_empty()).collect();
            let annotated = |csi_node: &Value| with_migrated_plugins(csi_node, &plugins);
            let change = self.retry((INITIAL_ATTEMPTS, INITIAL_PAUSE, INITIAL_FACTOR), true, &annotated);
            // A change that is cut off here is made again after the restart.
            let result = tokio::select! {
                result = change => result,
                () = shutdown.cancelled() => return Ok(()),
            };
            if let Err(error) = result {
                drop(ready.send_replace(Err(format!("failed to initialize CSINode: {error}"))));
                return Err(error);
            }
        }
        drop(ready.send_replace(Ok(())));
        Ok(())
    }

    /// Waits until both the Node and the CSINode can be read. `false`: there is no API server.
    async fn until_readable(&self, ready: &watch::Sender<Result<(), String>>) -> bool {
        loop {
            let readable = match self.node().await {
                Ok(_) => self.read("CSINode").await.map(drop),
                Err(error) => Err(error),
            };
            match readable {
                Ok(()) => return true,
                Err(NodeInfoError::NoApiServer) => return false,
                Err(error) => {
                    let text = Err(format!("{NOT_INITIALIZED}: {error}"));
                    ready.send_if_modified(|old| {
                        let is_new = *old != text;
                        old.clone_from(&text);
                        is_new
                    });
                }
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Tries a change several times. Without an API server it is done.
    async fn retry(
        &self,
        (attempts, first_pause, factor): (u32, Duration, u32),
        creates: bool,
        change: &Change<'_>,
    ) -> Result<(), NodeInfoError> {
        let mut pause = first_pause;
        let mut attempt = 1;
        loop {
            let result = {
                let _one_at_a_time = self.changes.lock().await;
                self.change_once(creates, change).await
            };
            match result {
                Ok(()) | Err(NodeInfoError::NoApiServer) => return Ok(()),
                Err(error @ NodeInfoError::Content(_)) => return Err(error),
                Err(error) if attempt == attempts => return Err(error),
                Err(error) => tracing::debug!(%error, attempt, "cannot change the CSINode; trying again"),
            }
            tokio::time::sleep(pause.mul_f64(1.0 + 0.1 * fastrand::f64())).await;
            pause *= factor;
            attempt += 1;
        }
    }

    async fn change_once(&self, creates: bool, change: &Change<'_>) -> Result<(), NodeInfoError> {
        let mut existing = self.read("CSINode").await?;
        if existing.is_none() && !creates {
            return Ok(());
        }
        let node = self.node().await?;
        let node_uid = node["metadata"]["uid"].as_str().unwrap_or_default();
        if let Some(csi_node) = existing.take_if(|csi_node| is_of_another_node(csi_node, node_uid)) {
            let uid = csi_node["metadata"]["uid"].as_str().unwrap_or_default();
            self.mutate(Verb::Delete, None, uid).await?;
            if !creates {
                return Ok(());
            }
        }
        match existing {
            Some(csi_node) => match change(&csi_node)? {
                Some(changed) => self.mutate(Verb::Update, Some(&changed), "").await,
                None => Ok(()),
            },
            None => {
                let new = new_csi_node(&self.node, node_uid);
                let changed = change(&new)?.unwrap_or(new);
                self.mutate(Verb::Create, Some(&changed), "").await
            }
        }
    }

    async fn read(&self, kind: &'static str) -> Result<Option<Value>, NodeInfoError> {
        let message = pb::GetLiveRequest {
            kind: kind.to_owned(),
            namespace: String::new(),
            name: self.node.to_string(),
        };
        let mut request = Request::new(message);
        request.set_timeout(TIMEOUT);
        match PodConfigClient::new(self.pod_config.channel()).get_live(request).await {
            Ok(response) => {
                serde_json::from_slice(&response.into_inner().object_json).map(Some).map_err(|error| {
                    NodeInfoError::Call {
                        verb: "read",
                        kind,
                        node: self.node.to_string(),
                        message: error.to_string(),
                    }
                })
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(self.error("read", kind, &status)),
        }
    }

    async fn mutate(&self, verb: Verb, body: Option<&Value>, uid: &str) -> Result<(), NodeInfoError> {
        let message = pb::MutateRequest {
            kind: "CSINode".to_owned(),
            subresource: String::new(),
            namespace: String::new(),
            name: self.node.to_string(),
            verb: verb.into(),
            body_json: body.map(|body| body.to_string().into_bytes()).unwrap_or_default(),
            uid: uid.to_owned(),
        };
        let mut request = Request::new(message);
        request.set_timeout(TIMEOUT);
        let name = match verb {
            Verb::Create => "create",
            Verb::Delete => "delete",
            Verb::Update | Verb::StrategicPatch | Verb::MergePatch | Verb::Unspecified => "update",
        };
        match PodConfigClient::new(self.pod_config.channel()).mutate(request).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound && verb == Verb::Delete => Ok(()),
            Err(status) => Err(self.error(name, "CSINode", &status)),
        }
    }

    fn error(&self, verb: &'static str, kind: &'static str, status: &Status) -> NodeInfoError {
        let (node, message) = (self.node.to_string(), status.message().to_owned());
        match status.code() {
            Code::FailedPrecondition if reason(status).as_deref() == Some("NO_API_SERVER") => {
                NodeInfoError::NoApiServer
            }
            Code::Aborted => NodeInfoError::Conflict { node, message },
            _ => NodeInfoError::Call { verb, kind, node, message },
        }
    }
}

#[cfg(test)]
mod tests;
