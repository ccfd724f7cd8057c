//! The configuration of a container or sandbox as containerd shows it in the details of its status: CRI's messages as JSON, with the names
//! of the protocol's fields. Only what is compared.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The details of a status.
#[derive(Deserialize)]
struct Details<T> {
    config: Option<T>,
}

fn of_details<'a, T: Deserialize<'a>>(details: &'a str) -> Option<T> {
    serde_json::from_str::<Details<T>>(details).ok()?.config
}

/// CRI `PodSandboxConfig`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RunningSandboxConfig {
    pub(super) linux: RunningSandboxLinux,
}

impl RunningSandboxConfig {
    /// Reads it from the details of a sandbox's status. `None`: the runtime does not show it.
    pub fn of_details(details: &str) -> Option<Self> {
        of_details(details)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningSandboxLinux {
    pub(super) sysctls: BTreeMap<String, String>,
}

/// CRI `ContainerConfig`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RunningConfig {
    pub(super) command: Vec<String>,
    pub(super) args: Vec<String>,
    pub(super) working_dir: String,
    pub(super) envs: Vec<RunningVariable>,
    pub(super) mounts: Vec<RunningMount>,
    pub(super) devices: Vec<serde_json::Value>,
    pub(super) stdin: bool,
    pub(super) stdin_once: bool,
    pub(super) tty: bool,
    pub(super) linux: RunningLinux,
}

impl RunningConfig {
    /// Reads it from the details of a container's status. `None`: the runtime does not show it.
    pub fn of_details(details: &str) -> Option<Self> {
        of_details(details)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningVariable {
    pub(super) key: String,
    pub(super) value: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningMount {
    pub(super) container_path: String,
    pub(super) host_path: String,
    pub(super) readonly: bool,
    pub(super) propagation: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningLinux {
    pub(super) resources: RunningResources,
    pub(super) security_context: RunningSecurity,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningResources {
    pub(super) cpu_period: i64,
    pub(super) cpu_quota: i64,
    pub(super) cpu_shares: i64,
    pub(super) memory_limit_in_bytes: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningSecurity {
    pub(super) capabilities: RunningCapabilities,
    pub(super) privileged: bool,
    pub(super) namespace_options: RunningNamespaces,
    pub(super) run_as_user: Option<RunningId>,
    pub(super) run_as_group: Option<RunningId>,
    pub(super) run_as_username: String,
    pub(super) readonly_rootfs: bool,
    pub(super) supplemental_groups: Vec<i64>,
    pub(super) no_new_privs: bool,
    pub(super) seccomp: Option<RunningProfile>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningCapabilities {
    pub(super) add_capabilities: Vec<String>,
    pub(super) drop_capabilities: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningNamespaces {
    pub(super) network: i32,
    pub(super) pid: i32,
    pub(super) ipc: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningId {
    pub(super) value: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct RunningProfile {
    pub(super) profile_type: i32,
    pub(super) localhost_ref: String,
}
