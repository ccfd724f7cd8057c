//! The registered CSI drivers (volumes.md §11.1).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::csi::access_mode::NodeCapabilities;
use keelson_volume_manager_core::csi::csi_node::{
    AnnotationChange, CsiNodeError, DriverEntry, NODE_ID_ANNOTATION, add_node_id, missing_labels, node_patch,
    remove_node_id,
};
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::csi::registration::{RegistrationError, Version};
use keelson_volume_manager_core::objects::Strings;
use serde_json::Value;
use tokio::sync::watch;

use super::client::{CallError, Client, CsiMetrics, Operation};

/// No driver of that name is registered. The next attempt may succeed: `FailureClass::Transient`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "driver name {name} not found in the list of registered CSI drivers; install the driver on this node, it registers \
     with a socket in {}", .registry.display()
)]
pub(crate) struct DriverNotFound {
    /// The name.
    pub(crate) name: String,
    /// The folder that drivers register in.
    pub(crate) registry: PathBuf,
}

/// A registered driver. Cheap to clone. It can be called also after it has been unregistered or replaced; the calls then
/// fail if nobody serves its socket.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    name: DriverName,
    version: Version,
    /// The socket that it has registered on.
    registration_socket: PathBuf,
    client: Client,
    capabilities: Arc<Mutex<Option<CachedCapabilities>>>,
    info: Arc<NodeInfo>,
}

/// What the driver says about this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeInfo {
    /// Its entry in the CSINode.
    pub(crate) entry: DriverEntry,
    /// Where the node is: labels of the Node.
    pub(crate) topology: Strings,
}

#[derive(Debug)]
struct CachedCapabilities {
    /// The process that has given them: a new one has another socket.
    socket: Option<SocketId>,
    capabilities: NodeCapabilities,
}

/// Device, inode and time of change of a socket.
type SocketId = (u64, u64, i64, i64);

impl Driver {
    /// A driver that is to be registered.
    pub(crate) fn new(
        name: DriverName,
        version: Version,
        registration_socket: PathBuf,
        client: Client,
        info: NodeInfo,
    ) -> Self {
        let capabilities = Arc::default();
        Self { name, version, registration_socket, client, capabilities, info: Arc::new(info) }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &DriverName {
        &self.name
    }

    /// The socket that it is called on.
    pub(crate) fn endpoint(&self) -> &Path {
        self.client.endpoint()
    }

    /// The highest version of CSI that it and the agent support.
    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    /// What it says about this node.
    pub(crate) fn info(&self) -> &NodeInfo {
        &self.info
    }

    /// Its client.
    pub(super) const fn client(&self) -> &Client {
        &self.client
    }

    /// What it can do. It is asked once per registration, and again after its socket was replaced (volumes.md §11.3).
    ///
    /// # Errors
    /// It does not answer, or with an error.
    pub(crate) async fn capabilities(&self, operation: &Operation) -> Result<NodeCapabilities, CallError> {
        let socket = socket_id(self.endpoint()).await;
        let cached = || self.capabilities.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cached().as_ref().filter(|known| known.socket == socket) {
            return Ok(known.capabilities);
        }
        let answer = self.client.node_get_capabilities(operation).await?;
        let types = answer.capabilities.iter().filter_map(|capability| capability.r#type.as_ref());
        let numbers = types.map(|pb::node_service_capability::Type::Rpc(rpc)| rpc.r#type);
        let capabilities = NodeCapabilities::from_numbers(numbers);
        *cached() = Some(CachedCapabilities { socket, capabilities });
        Ok(capabilities)
    }

    /// Prepares a volume for all pods of this node.
    ///
    /// # Errors
    /// It does not answer, or with an error. [`CallError::class`] says whether it may have done something.
    pub(crate) async fn node_stage(
        &self,
        operation: &Operation,
        request: pb::NodeStageVolumeRequest,
    ) -> Result<(), CallError> {
        self.client.node_stage_volume(operation, request).await
    }

    /// Undoes [`Self::node_stage`].
    ///
    /// # Errors
    /// As [`Self::node_stage`].
    pub(crate) async fn node_unstage(
        &self,
        operation: &Operation,
        request: pb::NodeUnstageVolumeRequest,
    ) -> Result<(), CallError> {
        self.client.node_unstage_volume(operation, request).await
    }

    /// Mounts a volume for a pod.
    ///
    /// # Errors
    /// As [`Self::node_stage`].
    pub(crate) async fn node_publish(
        &self,
        operation: &Operation,
        request: pb::NodePublishVolumeRequest,
    ) -> Result<(), CallError> {
        self.client.node_publish_volume(operation, request).await
    }

    /// Undoes [`Self::node_publish`].
    ///
    /// # Errors
    /// As [`Self::node_stage`].
    pub(crate) async fn node_unpublish(
        &self,
        operation: &Operation,
        request: pb::NodeUnpublishVolumeRequest,
    ) -> Result<(), CallError> {
        self.client.node_unpublish_volume(operation, request).await
    }

    /// The usage of a volume. Measurements have a limit of their own, so that they never hold up a mount.
    ///
    /// # Errors
    /// As [`Self::node_stage`].
    pub(crate) async fn node_get_volume_stats(
        &self,
        operation: &Operation,
        request: pb::NodeGetVolumeStatsRequest,
    ) -> Result<pb::NodeGetVolumeStatsResponse, CallError> {
        self.client.node_get_volume_stats(operation, request).await
    }

    /// Expands a volume on this node. The new size in bytes; 0: the driver does not say.
    ///
    /// # Errors
    /// As [`Self::node_stage`]; [`CallError::code`] says whether the volume is in use or the size infeasible
    /// (volumes.md §11.7).
    pub(crate) async fn node_expand(
        &self,
        operation: &Operation,
        request: pb::NodeExpandVolumeRequest,
    ) -> Result<i64, CallError> {
        self.client.node_expand_volume(operation, request).await
    }
}

/// The identity of a socket; `None` if it does not exist.
async fn socket_id(path: &Path) -> Option<SocketId> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = tokio::fs::metadata(path).await.ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.mtime(), metadata.mtime_nsec()))
}

/// The registrations of each driver, by ascending version. Volumes use the last one; an earlier one is there while a newer
/// driver runs next to it.
pub(crate) type DriverSet = BTreeMap<DriverName, Vec<Driver>>;

/// The registered drivers. Cheap to clone; all clones share the drivers.
#[derive(Debug, Clone)]
pub(crate) struct Drivers {
    registered: watch::Sender<DriverSet>,
    node: watch::Sender<NodeUpdate>,
    metrics: CsiMetrics,
    registry: Arc<Path>,
}

impl Drivers {
    /// No drivers. `registry` is the folder that they register in.
    pub(crate) fn new(metrics: CsiMetrics, registry: &Path) -> Self {
        Self {
            registered: watch::Sender::default(),
            node: watch::Sender::default(),
            metrics,
            registry: registry.into(),
        }
    }

    /// A driver by its name.
    ///
    /// # Errors
    /// It is not registered.
    pub(crate) fn get(&self, name: &str) -> Result<Driver, DriverNotFound> {
        let registered = self.registered.borrow();
        let found = registered.iter().find(|(driver, _)| driver.as_str() == name);
        let driver = found.and_then(|(_, registrations)| registrations.last());
        driver.cloned().ok_or_else(|| self.not_found(name))
    }

    fn not_found(&self, name: &str) -> DriverNotFound {
        DriverNotFound { name: name.to_owned(), registry: self.registry.to_path_buf() }
    }

    /// Changes when a driver comes or goes, and when it says something new about this node.
    pub(crate) fn subscribe(&self) -> watch::Receiver<DriverSet> {
        self.registered.subscribe()
    }

    /// What the Node has to say about the drivers. volume-manager does not write the Node.
    pub(crate) fn node_update(&self) -> watch::Receiver<NodeUpdate> {
        self.node.subscribe()
    }

    /// The metrics of calls.
    pub(crate) fn metrics(&self) -> &CsiMetrics {
        &self.metrics
    }

    /// The version of the driver that a registration on `socket` competes with.
    pub(crate) fn version_elsewhere(&self, name: &str, socket: &Path) -> Option<Version> {
        let registered = self.registered.borrow();
        let (_, registrations) = registered.iter().find(|(driver, _)| driver.as_str() == name)?;
        let elsewhere = registrations.iter().filter(|driver| driver.registration_socket != socket);
        elsewhere.map(|driver| driver.version.clone()).max()
    }

    /// Adds a driver, in place of what was registered on the same socket.
    ///
    /// # Errors
    /// A driver with the same or a higher version has registered on another socket meanwhile.
    pub(crate) fn add(&self, driver: &Driver) -> Result<(), RegistrationError> {
        let mut result = Ok(());
        self.registered.send_if_modified(|set| {
            let registrations = set.entry(driver.name.clone()).or_default();
            let is_other = |other: &&Driver| other.registration_socket != driver.registration_socket;
            let highest = registrations.iter().filter(is_other).map(|other| &other.version).max();
            if let Some(registered) = highest.filter(|registered| **registered >= driver.version) {
                result = Err(RegistrationError::AlreadyRegistered {
                    driver: driver.name.clone(),
                    registered: registered.clone(),
                    offered: driver.version.clone(),
                });
                return false;
            }
            registrations.retain(|other| is_other(&other));
            registrations.push(driver.clone());
            true
        });
        result
    }

    /// Replaces what a driver says about this node.
    ///
    /// # Errors
    /// It is not registered any longer.
    pub(crate) fn update_info(&self, driver: &Driver, info: &NodeInfo) -> Result<(), DriverNotFound> {
        let mut is_registered = false;
        self.registered.send_if_modified(|set| {
            let mut registrations = set.get_mut(&driver.name).into_iter().flatten();
            let own = registrations.find(|other| other.registration_socket == driver.registration_socket);
            is_registered = own.is_some();
            own.filter(|own| *own.info != *info).map(|own| own.info = Arc::new(info.clone())).is_some()
        });
        if is_registered { Ok(()) } else { Err(self.not_found(driver.name.as_str())) }
    }

    /// Forgets the driver that has registered on `socket`. Whether it was registered.
    pub(crate) fn remove(&self, name: &DriverName, socket: &Path) -> bool {
        self.registered.send_if_modified(|set| {
            let Some(registrations) = set.get_mut(name) else { return false };
            let before = registrations.len();
            registrations.retain(|driver| driver.registration_socket != socket);
            let is_changed = registrations.len() < before;
            if registrations.is_empty() {
                set.remove(name);
            }
            is_changed
        })
    }

    /// Publishes what the Node has to say about a driver.
    pub(crate) fn publish(&self, info: &NodeInfo) {
        self.node.send_if_modified(|node| {
            let name = info.entry.name.clone();
            let is_new_id = node.node_ids.insert(name.clone(), Some(info.entry.node_id.clone()))
                != Some(Some(info.entry.node_id.clone()));
            let is_new_topology =
                node.topologies.insert(name, info.topology.clone()).as_ref() != Some(&info.topology);
            is_new_id || is_new_topology
        });
    }

    /// Publishes that a driver is gone.
    pub(crate) fn unpublish(&self, name: &DriverName) {
        self.node.send_if_modified(|node| {
            node.topologies.remove(name);
            node.node_ids.insert(name.clone(), None) != Some(None)
        });
    }
}

/// What the Node has to say about CSI drivers: the annotation `csi.volume.kubernetes.io/nodeid` and labels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeUpdate {
    /// The node id of each driver. `None`: the driver is gone, and the annotation must not have it. Drivers that are not
    /// listed stay in the annotation: after a restart they register again.
    pub(crate) node_ids: BTreeMap<DriverName, Option<String>>,
    /// The labels of each driver. Labels stay when a driver goes.
    pub(crate) topologies: BTreeMap<DriverName, Strings>,
}

impl NodeUpdate {
    /// The merge patch for a Node with these labels and this value of the annotation. `None`: it is up to date.
    ///
    /// # Errors
    /// The annotation cannot be read, or the topology of a driver contradicts a label.
    pub(crate) fn patch(
        &self,
        labels: &Strings,
        annotation: Option<&str>,
    ) -> Result<Option<Value>, CsiNodeError> {
        let mut current = annotation.map(ToOwned::to_owned);
        for (driver, node_id) in &self.node_ids {
            let change = match node_id {
                Some(node_id) => add_node_id(current.as_deref(), driver, node_id)?,
                None => remove_node_id(current.as_deref(), driver)?,
            };
            match change {
                AnnotationChange::Unchanged => {}
                AnnotationChange::Set(text) => current = Some(text),
                AnnotationChange::Remove => current = None,
            }
        }
        let change = match current {
            same if same.as_deref() == annotation => AnnotationChange::Unchanged,
            Some(text) => AnnotationChange::Set(text),
            None => AnnotationChange::Remove,
        };
        let mut missing = Strings::new();
        for (driver, topology) in &self.topologies {
            missing.extend(missing_labels(labels, topology, driver)?);
        }
        Ok(node_patch(&change, &missing))
    }
}

/// The value of the annotation with node ids, of a Node as JSON.
pub(crate) fn node_id_annotation(node: &Value) -> Option<&str> {
    node["metadata"]["annotations"][NODE_ID_ANNOTATION].as_str()
}

#[cfg(test)]
mod tests;
