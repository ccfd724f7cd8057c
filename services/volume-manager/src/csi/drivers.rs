//! The registered CSI drivers (volumes.md §11.1).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::csi::access_mode::NodeCapabilities;
use keelson_volume_manager_core::csi::csi_node::DriverEntry;
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::csi::registration::{RegistrationError, Version};
use keelson_volume_manager_core::objects::Strings;
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

    /// Mounts a volume for a pod. `tokens` are part of the request, and no error shows them.
    ///
    /// # Errors
    /// As [`Self::node_stage`].
    pub(crate) async fn node_publish(
        &self,
        operation: &Operation,
        request: pb::NodePublishVolumeRequest,
        tokens: &[String],
    ) -> Result<(), CallError> {
        self.client.node_publish_volume(operation, request, tokens).await
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

/// How often something has happened, by driver.
pub(crate) type Counts = BTreeMap<DriverName, u64>;

fn count(counts: &watch::Sender<Counts>, driver: &DriverName) {
    counts.send_modify(|counts| *counts.entry(driver.clone()).or_default() += 1);
}

/// The registered drivers. Cheap to clone; all clones share the drivers.
#[derive(Debug, Clone)]
pub(crate) struct Drivers {
    registered: watch::Sender<DriverSet>,
    node: watch::Sender<NodeUpdate>,
    registrations: watch::Sender<Counts>,
    exhaustions: watch::Sender<Counts>,
    metrics: CsiMetrics,
    registry: Arc<Path>,
}

impl Drivers {
    /// No drivers. `registry` is the folder that they register in.
    pub(crate) fn new(metrics: CsiMetrics, registry: &Path) -> Self {
        Self {
            registered: watch::Sender::default(),
            node: watch::Sender::default(),
            registrations: watch::Sender::default(),
            exhaustions: watch::Sender::default(),
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

    /// What the Node has to show of the drivers; node-status writes it.
    pub(crate) fn node_update(&self) -> watch::Receiver<NodeUpdate> {
        self.node.subscribe()
    }

    /// Counts the registrations of each driver: waiting operations may succeed now.
    pub(crate) fn registrations(&self) -> watch::Receiver<Counts> {
        self.registrations.subscribe()
    }

    /// Counts how often the node had no room for another volume of a driver (volumes.md §3.14).
    pub(crate) fn exhaustions(&self) -> watch::Receiver<Counts> {
        self.exhaustions.subscribe()
    }

    /// The node has no room for another volume of a driver, as it or its attacher has said.
    pub(crate) fn note_exhausted(&self, name: &DriverName) {
        count(&self.exhaustions, name);
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
        if result.is_ok() {
            count(&self.registrations, &driver.name);
        }
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

    /// Publishes what the Node has to show of a driver.
    pub(crate) fn publish(&self, info: &NodeInfo) {
        self.node.send_if_modified(|node| {
            let (name, shown) = (info.entry.name.clone(), NodeDriver::from(info));
            let was_gone = node.unregistered.remove(&name);
            node.registered.insert(name, shown.clone()).as_ref() != Some(&shown) || was_gone
        });
    }

    /// Publishes that a driver is gone.
    pub(crate) fn unpublish(&self, name: &DriverName) {
        self.node.send_if_modified(|node| {
            let was_there = node.registered.remove(name).is_some();
            node.unregistered.insert(name.clone()) || was_there
        });
    }
}

/// What the Node has to show of CSI drivers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeUpdate {
    /// The registered drivers.
    pub(crate) registered: BTreeMap<DriverName, NodeDriver>,
    /// The drivers that were unregistered. What the Node has of others stays: after a restart they register again.
    pub(crate) unregistered: BTreeSet<DriverName>,
}

/// What the Node has to show of one driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeDriver {
    /// The node's ID for the driver.
    pub(crate) node_id: String,
    /// Labels.
    pub(crate) topology: Strings,
}

impl From<&NodeInfo> for NodeDriver {
    fn from(info: &NodeInfo) -> Self {
        Self { node_id: info.entry.node_id.clone(), topology: info.topology.clone() }
    }
}

#[cfg(test)]
mod tests;
