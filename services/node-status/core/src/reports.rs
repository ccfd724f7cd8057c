//! What other services report: the machine and the container runtime.

use std::collections::BTreeMap;

/// The machine, as resource-manager reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// Amounts by resource name: `cpu` in millicores, everything else in bytes or counts.
    pub capacity: BTreeMap<String, i64>,
    /// What pods may use, in the same units.
    pub allocatable: BTreeMap<String, i64>,
    /// Memory is short.
    pub memory_pressure: bool,
    /// A filesystem is short.
    pub disk_pressure: bool,
    /// Process ids are short.
    pub pid_pressure: bool,
    /// The machine shuts down, and pods are being ended or have been.
    pub shutting_down: bool,
    /// An operator has drained the node.
    pub drained: bool,
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// The firmware's UUID of the machine.
    pub system_uuid: String,
    /// Changes with each boot.
    pub boot_id: String,
    /// `uname -r`.
    pub kernel_version: String,
    /// `PRETTY_NAME` of os-release.
    pub os_image: String,
    /// As Go or the kernel names it.
    pub architecture: String,
    /// Bytes of all swap areas; 0 without any.
    pub swap: i64,
}

/// The container runtime, as runtime-shim reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeState {
    /// `containerd`, `cri-o`…; empty before its first answer.
    pub name: String,
    /// As the runtime reports it.
    pub version: String,
    /// It can run containers.
    pub ready: bool,
    /// Pods get networks.
    pub network_ready: bool,
    /// Why `ready` or `network_ready` is false, as a whole sentence.
    pub message: String,
    /// It does not answer, so whether it is ready is unknown.
    pub unreachable: bool,
    /// Its runtime handlers, by name; empty if it does not list them.
    pub handlers: Vec<RuntimeHandler>,
    /// Whether it supports `supplementalGroupsPolicy: Strict`; `None` if it does not report that.
    pub supplemental_groups_policy: Option<bool>,
}

/// A runtime handler and its features.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeHandler {
    /// Empty for the default one.
    pub name: String,
    /// `recursiveReadOnly` of a mount.
    pub recursive_read_only_mounts: bool,
    /// `hostUsers: false`.
    pub user_namespaces: bool,
}
