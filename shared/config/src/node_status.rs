//! Settings of the Node object: its content, and how often it is reported.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Content of the Node object, how often it is reported, and the rate limits of events (node-and-api.md §5, §9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// Maximum number of listed images, the largest first (`nodeStatusMaxImages`); -1: all of them.
    pub max_images: i64,
    /// Addresses of the node: none, one, or one of each family, the primary one first (`--node-ip`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub node_ips: Vec<IpAddr>,
    /// A cloud controller sets the addresses (`--cloud-provider=external`).
    pub external_cloud: bool,
    /// Milliseconds between two checks of the node's status, at least 1 (`nodeStatusUpdateFrequency`).
    pub status_update_ms: u64,
    /// Milliseconds after which an unchanged status is reported again, at least 1
    /// (`nodeStatusReportFrequency`).
    pub status_report_ms: u64,
    /// Events that may be reported to the API server per second, at least 1 (`eventRecordQPS`, where 0 means 5).
    pub event_qps: u32,
    /// Burst of reported events, at least 1 (`eventBurst`).
    pub event_burst: u32,
    /// The control plane attaches volumes to the node (`enableControllerAttachDetach`).
    pub controller_attach_detach: bool,
    /// The features that the Node declares, sorted: those of [`Self::DECLARABLE_FEATURES`] whose gates are on.
    pub declared_features: Vec<String>,
}

impl NodeStatus {
    /// The features that the agent has and a Node can declare (node-and-api.md §9.7), sorted. The gate of each has its name.
    ///
    /// With the first one the API server passes WebSockets of exec, attach and port-forward through. Without it the server
    /// speaks SPDY to the node, and prepends `Internal error occurred:` to the node's message about a container that has ended.
    pub const DECLARABLE_FEATURES: [&str; 2] =
        ["ExtendWebSocketsToKubelet", "RestartAllContainersOnContainerExits"];
}

impl Default for NodeStatus {
    fn default() -> Self {
        Self {
            max_images: 50,
            node_ips: Vec::new(),
            external_cloud: false,
            status_update_ms: 10_000,
            status_report_ms: 300_000,
            event_qps: 50,
            event_burst: 100,
            controller_attach_detach: true,
            declared_features: Self::DECLARABLE_FEATURES.map(str::to_owned).into(),
        }
    }
}
