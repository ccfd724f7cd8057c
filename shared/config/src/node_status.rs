//! What the Node object shows.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// What the Node object shows (node-and-api.md §9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Images of the runtime that are listed, the largest first (`nodeStatusMaxImages`); -1: all of them.
    pub max_images: i64,
    /// Addresses of the node: none, one, or one of each family, the primary one first (`--node-ip`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_ips: Vec<IpAddr>,
    /// A controller of a cloud sees to the addresses (`--cloud-provider=external`).
    #[serde(default)]
    pub external_cloud: bool,
}

impl Default for NodeStatus {
    fn default() -> Self {
        Self { max_images: 50, node_ips: Vec::new(), external_cloud: false }
    }
}
