//! Process settings of the agent, and the version that it reports.

use serde::{Deserialize, Serialize};

use crate::KUBELET_VERSION;

/// Settings of all processes of the agent. init applies them to itself, and its services inherit them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnProcesses {
    /// Their `oom_score_adj`, from -1000 to 1000 (`oomScoreAdj`).
    pub oom_score_adj: i32,
    /// Maximum number of open files of each process, at least 1 (`maxOpenFiles`).
    pub max_open_files: u64,
    /// The kubelet version that the node reports (`--version=`).
    pub kubelet_version: String,
}

impl Default for OwnProcesses {
    fn default() -> Self {
        Self { oom_score_adj: -999, max_open_files: 1_000_000, kubelet_version: KUBELET_VERSION.to_owned() }
    }
}
