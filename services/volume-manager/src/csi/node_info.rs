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
use tokio::time::timeout;
use tonic::{Code, Request, Status};

use crate::live_objects::{LiveObjects, ReadError};

/// The deadline of one call: a little longer than pod-config waits for the API server.
const TIMEOUT: Duration = Duration::from_secs(35);
/// How long an API server that does not answer delays the registration of a driver.
const ADD_WITHIN: Duration = Duration::from_secs(20);
/// How long it delays the end of one, and so the start of a driver that is restarted.
const REMOVE_WITHIN: Duration = Duration::from_secs(5);
/// How often the API server is asked until it answers at startup.
const POLL: Duration = Duration::from_secs(1);

/// How often a change is tried, with the pauses before the second attempt and the later ones.
#[derive(Debug, Clone, Copy)]
struct Attempts {
    number: u32,
    first_pause: Duration,
    factor: u32,
    /// The time for all.
    within: Duration,
}

impl Attempts {
    const fn usual(within: Duration) -> Self {
        Self { number: 4, first_pause: Duration::from_millis(10), factor: 5, within }
    }

    /// Of the first change after startup: about 140 s if each is refused at once.
    const INITIAL: Self = Self {
        number: 6,
        first_pause: Duration::from_millis(30),
        factor: 8,
        within: Duration::from_secs(600),
    };
}

/// The Ready condition until the CSINode is there (node-and-api.md §8).
pub(crate) const NOT_INITIALIZED: &str = "CSINode is not yet initialized";

/// Why the CSINode could not be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NodeInfoError {
    /// The control plane is none, or none with CSINodes.
    #[error("this node has no API server")]
    NoApiServer,
    /// pod-config cannot read a Node or CSINode before it is upgraded.
    #[error(transparent)]
    EarlierRelease(ReadError),
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
    live: LiveObjects,
    pod_config: Peer,
    node: Arc<str>,
    changes: Arc<Mutex<()>>,
    add_within: Duration,
    remove_within: Duration,
}

type Change<'a> = dyn Fn(&Value) -> Result<Option<Value>, CsiNodeError> + Send + Sync + 'a;

impl CsiNodes {
    /// The CSINode with the name of this node.
    pub(crate) fn new(pod_config: Peer, node: &str) -> Self {
        Self {
            live: LiveObjects::new(pod_config.clone()),
            pod_config,
            node: node.into(),
            changes: Arc::default(),
            add_within: ADD_WITHIN,
            remove_within: REMOVE_WITHIN,
        }
    }

    /// The same with other limits.
    #[cfg(test)]
    pub(super) fn within(self, add_within: Duration, remove_within: Duration) -> Self {
        Self { add_within, remove_within, ..self }
    }

    /// The Node as the API server has it.
    ///
    /// # Errors
    /// There is no API server, no Node, or no answer.
    pub(crate) async fn node(&self) -> Result<Value, NodeInfoError> {
        let read = timeout(self.add_within, self.read("Node")).await;
        let node = read.unwrap_or_else(|_| Err(self.no_answer("read", "Node", self.add_within)))?;
        node.ok_or_else(|| NodeInfoError::NoNode { node: self.node.to_string() })
    }

    /// Adds the entry of a driver. Creates the CSINode if it does not exist.
    ///
    /// # Errors
    /// The change failed several times, or the API server does not answer.
    pub(crate) async fn add(&self, entry: &DriverEntry) -> Result<(), NodeInfoError> {
        let attempts = Attempts::usual(self.add_within);
        self.retry(attempts, true, &|csi_node| with_driver(csi_node, entry)).await
    }

    /// Removes the entry of a driver, unless the driver `is_back` by then.
    ///
    /// # Errors
    /// The change failed several times, or the API server does not answer.
    pub(crate) async fn remove(
        &self,
        driver: &DriverName,
        is_back: &(dyn Fn() -> bool + Send + Sync),
    ) -> Result<(), NodeInfoError> {
        let without = |csi_node: &Value| if is_back() { Ok(None) } else { without_driver(csi_node, driver) };
        self.retry(Attempts::usual(self.remove_within), false, &without).await
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
            let change = self.retry(Attempts::INITIAL, true, &annotated);
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
                // In the middle of an upgrade. The node stays ready.
                Err(NodeInfoError::EarlierRelease(_)) => set(ready, Ok(())),
                Err(error) => set(ready, Err(format!("{NOT_INITIALIZED}: {error}"))),
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Tries a change several times, for a limited time. Without an API server it is done.
    async fn retry(
        &self,
        attempts: Attempts,
        creates: bool,
        change: &Change<'_>,
    ) -> Result<(), NodeInfoError> {
        // A change that is cut off may still be made. Later ones read the CSINode again.
        let tried = timeout(attempts.within, self.try_all(attempts, creates, change)).await;
        tried.unwrap_or_else(|_| Err(self.no_answer("update", "CSINode", attempts.within)))
    }

    async fn try_all(
        &self,
        attempts: Attempts,
        creates: bool,
        change: &Change<'_>,
    ) -> Result<(), NodeInfoError> {
        let mut pause = attempts.first_pause;
        let mut attempt = 1;
        loop {
            let result = {
                let _one_at_a_time = self.changes.lock().await;
                self.change_once(creates, change).await
            };
            match result {
                Ok(()) | Err(NodeInfoError::NoApiServer) => return Ok(()),
                Err(error @ NodeInfoError::Content(_)) => return Err(error),
                Err(error) if attempt == attempts.number => return Err(error),
                Err(error) => tracing::debug!(%error, attempt, "cannot change the CSINode; trying again"),
            }
            tokio::time::sleep(pause.mul_f64(1.0 + 0.1 * fastrand::f64())).await;
            pause *= attempts.factor;
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
        let read = self.live.read(kind, "", &self.node).await;
        read.map_err(|error| match error {
            ReadError::NoApiServer(_) => NodeInfoError::NoApiServer,
            ReadError::EarlierRelease => NodeInfoError::EarlierRelease(error),
            ReadError::NotVisible(message) | ReadError::Failed(message) => {
                NodeInfoError::Call { verb: "read", kind, node: self.node.to_string(), message }
            }
        })
    }

    fn no_answer(&self, verb: &'static str, kind: &'static str, within: Duration) -> NodeInfoError {
        let message = format!("the API server has not answered within {within:?}");
        NodeInfoError::Call { verb, kind, node: self.node.to_string(), message }
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
            Err(status) => Err(self.error(name, &status)),
        }
    }

    fn error(&self, verb: &'static str, status: &Status) -> NodeInfoError {
        let (node, message) = (self.node.to_string(), status.message().to_owned());
        match status.code() {
            Code::FailedPrecondition if reason(status).as_deref() == Some("NO_API_SERVER") => {
                NodeInfoError::NoApiServer
            }
            Code::Aborted => NodeInfoError::Conflict { node, message },
            _ => NodeInfoError::Call { verb, kind: "CSINode", node, message },
        }
    }
}

/// Sets the condition without waking anybody if it is the same.
fn set(ready: &watch::Sender<Result<(), String>>, state: Result<(), String>) {
    ready.send_if_modified(|old| {
        let is_new = *old != state;
        *old = state;
        is_new
    });
}

#[cfg(test)]
mod tests;
