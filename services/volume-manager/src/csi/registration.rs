//! Registers and unregisters CSI drivers (volumes.md §11.1, §11.2).
//!
//! A driver is usable from the moment that its entry is published: it is in memory before it is in the CSINode, and out of
//! memory before it is out of the CSINode. Volumes that are mounted stay mounted when their driver goes; they are unmounted
//! when it is back.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use keelson_plugin_watcher::{Plugin, PluginHandler};
use keelson_service_kit::{Backoff, spawn};
use keelson_volume_manager_core::csi::csi_node::{
    Allocatable, CsiNodeError, DriverEntry, check_labels, check_other_driver,
};
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::csi::registration::{RegistrationError, check_driver, check_node_id};
use keelson_volume_manager_core::objects::Strings;
use keelson_volume_manager_core::world::FailureClass;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::client::{CallError, Client, Operation};
use super::drivers::{Driver, DriverNotFound, Drivers, NodeInfo};
use super::node_info::{CsiNodes, NodeInfoError};

/// The kind of plugins that are CSI drivers.
pub(crate) const KIND: &str = "CSIPlugin";
/// The time for `NodeGetInfo` with all attempts.
const NODE_INFO_WITHIN: Duration = Duration::from_secs(120);
/// How often `NodeGetInfo` is called when the driver cannot be reached: it may start after the container that registers it.
const NODE_INFO_ATTEMPTS: u32 = 4;

/// Why a driver is not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// The rules of registration.
    #[error(transparent)]
    Rule(#[from] RegistrationError),
    /// `NodeGetInfo` has failed.
    #[error(transparent)]
    NodeInfo(#[from] CallError),
    /// The driver contradicts the Node.
    #[error(transparent)]
    Node(#[from] CsiNodeError),
    /// The CSINode cannot be changed.
    #[error("the CSI driver {driver} cannot be published: {source}")]
    Publish {
        /// The driver.
        driver: DriverName,
        /// Why.
        source: NodeInfoError,
    },
    /// It is not registered any longer.
    #[error(transparent)]
    NotFound(#[from] DriverNotFound),
}

/// Registers CSI drivers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct CsiRegistration {
    drivers: Drivers,
    csi_nodes: CsiNodes,
}

impl CsiRegistration {
    /// Registers drivers in `drivers`, and in the CSINode of this node.
    pub(crate) const fn new(drivers: Drivers, csi_nodes: CsiNodes) -> Self {
        Self { drivers, csi_nodes }
    }

    /// The handler for a plugin watcher.
    pub(crate) fn handler(&self) -> Arc<dyn PluginHandler> {
        Arc::new(self.clone())
    }

    /// Asks a registered driver again about this node, and updates the CSINode: when an attach fails since the node has no
    /// room (volumes.md §3.14), and with the period of the CSIDriver.
    ///
    /// # Errors
    /// The driver is not registered, or does not answer, or the CSINode cannot be changed.
    pub(crate) async fn refresh(&self, name: &str) -> Result<(), RegisterError> {
        let driver = self.drivers.get(name)?;
        let info = node_info(driver.name(), driver.client()).await?;
        self.check_topology(&info).await?;
        self.drivers.update_info(&driver, &info)?;
        self.publish(&info).await
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), RegisterError> {
        let registered = self.drivers.version_elsewhere(&plugin.name, &plugin.socket);
        let accepted = check_driver(&plugin.name, &plugin.supported_versions, registered.as_ref())?;
        let client = Client::new(accepted.name.clone(), &plugin.endpoint, self.drivers.metrics().clone());
        let info = node_info(&accepted.name, &client).await?;
        self.check_topology(&info).await?;
        let driver =
            Driver::new(accepted.name, accepted.version, plugin.socket.clone(), client, info.clone());
        self.drivers.add(&driver)?;
        let published = self.publish(&info).await;
        if published.is_err() {
            self.forget(driver.name(), &plugin.socket).await;
        }
        published
    }

    /// Checks the topology against the other drivers and the labels of the Node.
    async fn check_topology(&self, info: &NodeInfo) -> Result<(), RegisterError> {
        if info.topology.is_empty() {
            return Ok(());
        }
        let name = &info.entry.name;
        for (other, shown) in &self.drivers.node_update().borrow().registered {
            check_other_driver((other, &shown.topology), &info.topology, name)?;
        }
        match self.csi_nodes.node().await {
            Ok(node) => {
                check_labels(&labels(&node), &info.topology, name)?;
                Ok(())
            }
            Err(NodeInfoError::NoApiServer) => Ok(()),
            Err(source) => Err(RegisterError::Publish { driver: name.clone(), source }),
        }
    }

    /// The Node, then the CSINode.
    async fn publish(&self, info: &NodeInfo) -> Result<(), RegisterError> {
        self.drivers.publish(info);
        let added = self.csi_nodes.add(&info.entry).await;
        added.map_err(|source| RegisterError::Publish { driver: info.entry.name.clone(), source })
    }

    /// Removes a driver from memory, the CSINode and the Node. If another one of its name is registered, that one is
    /// published instead.
    async fn forget(&self, name: &DriverName, socket: &Path) {
        if !self.drivers.remove(name, socket) {
            return;
        }
        if let Ok(other) = self.drivers.get(name.as_str()) {
            if let Err(error) = self.publish(other.info()).await {
                tracing::warn!(event = "csi_driver_not_published", driver = %name, %error, "cannot publish a CSI driver");
            }
            return;
        }
        if let Err(error) = self.remove_from_csi_node(name).await {
            tracing::warn!(
                event = "csi_driver_not_unpublished",
                driver = %name,
                %error,
                "cannot remove a CSI driver from the CSINode; this is retried until the driver registers again"
            );
            // The driver may be restarted meanwhile: it must not wait for the API server.
            spawn("CSINode without a driver", self.clone().remove_later(name.clone()));
        }
        self.drivers.unpublish(name);
    }

    async fn remove_from_csi_node(&self, name: &DriverName) -> Result<(), NodeInfoError> {
        self.csi_nodes.remove(name, &|| self.drivers.get(name.as_str()).is_ok()).await
    }

    /// Removes a driver from the CSINode once the API server answers, unless it has registered again.
    async fn remove_later(self, name: DriverName) {
        let mut pause = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        loop {
            sleep(pause.next_delay()).await;
            if self.remove_from_csi_node(&name).await.is_ok() {
                return;
            }
        }
    }
}

impl PluginHandler for CsiRegistration {
    fn register<'a>(&'a self, plugin: &'a Plugin) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move { self.register(plugin).await.map_err(|error| error.to_string()) })
    }

    fn unregister<'a>(&'a self, plugin: &'a Plugin) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            if let Ok(name) = DriverName::parse(&plugin.name) {
                self.forget(&name, &plugin.socket).await;
            }
        })
    }
}

/// Asks the driver about this node.
async fn node_info(name: &DriverName, client: &Client) -> Result<NodeInfo, RegisterError> {
    let operation = Operation::until(Instant::now() + NODE_INFO_WITHIN, false);
    let mut pause = Backoff::new(Duration::from_millis(200), Duration::from_secs(2));
    let mut attempt = 1;
    let answer = loop {
        match client.node_get_info(&operation).await {
            Err(error) if error.class() == FailureClass::Uncertain && attempt < NODE_INFO_ATTEMPTS => {
                tracing::debug!(driver = %name, %error, attempt, "NodeGetInfo has failed; trying again");
            }
            result => break result?,
        }
        sleep(pause.next_delay()).await;
        attempt += 1;
    };
    let node_id = check_node_id(name, &answer.node_id)?.to_owned();
    let topology: Strings = answer.accessible_topology.unwrap_or_default().segments.into_iter().collect();
    let allocatable = Allocatable::from_max_volumes(answer.max_volumes_per_node);
    if let Allocatable::Negative(max_volumes) = allocatable {
        tracing::warn!(
            event = "csi_driver_negative_limit",
            driver = %name,
            max_volumes,
            "a CSI driver gives a negative number of volumes for this node; it counts as no limit"
        );
    }
    let topology_keys = topology.keys().cloned().collect();
    Ok(NodeInfo { entry: DriverEntry { name: name.clone(), node_id, topology_keys, allocatable }, topology })
}

/// The labels of a Node as JSON.
fn labels(node: &Value) -> Strings {
    let labels = node["metadata"]["labels"].as_object().into_iter().flatten();
    labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

#[cfg(test)]
mod tests;
