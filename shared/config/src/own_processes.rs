//! How the processes of the agent run, and what they give themselves out for.

use serde::{Deserialize, Serialize};

use crate::KUBELET_VERSION;

/// What holds for all processes of the agent. init sets it on itself, and the services that it starts inherit it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnProcesses {
    /// Their `oom_score_adj`, from -1000 to 1000 (`oomScoreAdj`).
    pub oom_score_adj: i32,
    /// How many files each may have open, at least 1 (`maxOpenFiles`).
    pub max_open_files: u64,
    /// The version that the node shows as its kubelet's (`--version=`).
    pub kubelet_version: String,
}

impl Default for OwnProcesses {
    fn default() -> Self {
        Self { oom_score_adj: -999, max_open_files: 1_000_000, kubelet_version: KUBELET_VERSION.to_owned() }
    }
}
