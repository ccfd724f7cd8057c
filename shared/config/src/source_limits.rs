//! Limits on what pods of a source may use of the host.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The sources that can be limited, as named in the annotation `kubernetes.io/config.source`; `manifest` is `keelson apply`.
pub const LIMITED_SOURCES: [&str; 5] = ["file", "http", "manifest", "api", "etcd"];

/// Limits by source; a source without an entry has no limits.
pub type SourceLimits = BTreeMap<String, SourceLimit>;

/// What the pods of one source may use; by default everything except the agent's own folder, as with a kubelet since 1.16,
/// which removed the flags `--host-network-sources`, `--host-pid-sources`, `--host-ipc-sources` and `--allow-privileged`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceLimit {
    /// The host's network.
    pub host_network: bool,
    /// The host's processes.
    #[serde(rename = "hostPID")]
    pub host_pid: bool,
    /// The host's System V IPC and POSIX queues.
    #[serde(rename = "hostIPC")]
    pub host_ipc: bool,
    /// Privileged containers.
    pub privileged: bool,
    /// The folder of the agent's sockets, as a `hostPath` volume: none by default.
    #[serde(default)]
    pub agent_run_folder: bool,
}

impl Default for SourceLimit {
    fn default() -> Self {
        Self { host_network: true, host_pid: true, host_ipc: true, privileged: true, agent_run_folder: false }
    }
}

impl SourceLimit {
    /// The limit of this name in the configuration.
    pub fn of(&mut self, name: &str) -> Option<&mut bool> {
        match name {
            "hostNetwork" => Some(&mut self.host_network),
            "hostPID" => Some(&mut self.host_pid),
            "hostIPC" => Some(&mut self.host_ipc),
            "privileged" => Some(&mut self.privileged),
            "agentRunFolder" => Some(&mut self.agent_run_folder),
            _ => None,
        }
    }
}
