//! What the configuration is resolved from: the command line, the files and facts about the host.

use std::collections::BTreeMap;

use keelson_config::ServiceName;

use crate::document::{Document, Sourced};
use crate::flags::{FieldFlag, parse_bool};

/// The command line; `None`: the flag is not given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// `--root-dir`.
    pub root_dir: Option<String>,
    /// `--hostname-override`.
    pub hostname_override: Option<String>,
    /// `--node-labels`, once per use.
    pub node_labels: Vec<String>,
    /// `--run-dir`.
    pub run_dir: Option<String>,
    /// `--state-dir`.
    pub state_dir: Option<String>,
    /// `--log-level`.
    pub log_level: Option<String>,
    /// `--log-format`.
    pub log_format: Option<String>,
    /// `--minimum-container-ttl-duration`.
    pub minimum_container_ttl: Option<String>,
    /// `--maximum-dead-containers-per-container`.
    pub max_dead_per_container: Option<i32>,
    /// `--maximum-dead-containers`.
    pub max_dead_containers: Option<i32>,
    /// `--runtime-cgroups`.
    pub runtime_cgroups: Option<String>,
    /// The flags that set fields of the KubeletConfiguration.
    pub fields: Vec<FieldFlag>,
    /// The text of flags that are not supported yet or only checked here, by name without dashes.
    pub others: BTreeMap<&'static str, String>,
}

impl Flags {
    /// Whether one of the other flags is on; the last use wins.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.others.get(name).is_some_and(|uses| parse_bool(last_use(uses)) == Some(true))
    }

    /// Whether a cloud controller manages the node (`--cloud-provider=external`).
    pub(crate) fn has_external_cloud_provider(&self) -> bool {
        self.others.get("cloud-provider").is_some_and(|name| name == "external")
    }

    /// The text of one of the other flags, repeated uses joined by commas; `None` if it is not given or empty.
    pub(crate) fn other(&self, name: &str) -> Option<Sourced<String>> {
        let uses = self.others.get(name).filter(|uses| !uses.is_empty())?;
        given(&format!("--{name}"), Some(uses))
    }
}

/// The value of a flag, with the flag as its origin.
pub(crate) fn given(flag: &str, text: Option<&String>) -> Option<Sourced<String>> {
    text.map(|text| Sourced { value: text.clone(), origin: flag.to_owned(), field: flag.to_owned() })
}

/// The last of repeated uses.
pub(crate) fn last_use(uses: &str) -> &str {
    uses.rsplit(',').next().unwrap_or_default()
}

/// The facts about the host that the configuration depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// The host name.
    pub hostname: String,
    /// The effective user ID of init.
    pub uid: u32,
    /// The effective group ID of init.
    pub gid: u32,
    /// The folder of init's executable.
    pub exe_dir: String,
    /// The working directory.
    pub cwd: String,
    /// The IDs of the system users `keelson-<service>`.
    pub service_users: BTreeMap<ServiceName, u32>,
    /// The ID of the group `keelson`.
    pub operator_group: Option<u32>,
    /// Whether the cgroups of pods are cgroup v1.
    pub cgroup_v1: bool,
    /// The swap areas that any process may be swapped to, as named in `/proc/swaps`.
    pub swap: Vec<String>,
    /// The online CPUs in the kernel's format; empty if unknown.
    pub online_cpus: String,
    /// Memory of the machine, in bytes.
    pub memory_bytes: u64,
    /// Size of the file system of the root dir, in bytes.
    pub nodefs_bytes: u64,
    /// `DBUS_SYSTEM_BUS_ADDRESS` in the environment of init; empty: not set.
    pub system_bus_address: String,
}

/// Everything that [`crate::resolve()`] depends on.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The command line.
    pub flags: &'a Flags,
    /// `--config`.
    pub kubelet: Option<&'a Document>,
    /// The files of `--config-dir`, in the order in which they are merged over it.
    pub drop_ins: &'a [Document],
    /// `--keelson-config`.
    pub keelson: Option<&'a Document>,
    /// The machine.
    pub host: &'a Host,
}
