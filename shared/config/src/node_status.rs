//! What the Node object shows.

use serde::{Deserialize, Serialize};

/// What the Node object shows (node-and-api.md §9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Images of the runtime that are listed, the largest first (`nodeStatusMaxImages`); -1: all of them.
    pub max_images: i64,
}

impl Default for NodeStatus {
    fn default() -> Self {
        Self { max_images: 50 }
    }
}
