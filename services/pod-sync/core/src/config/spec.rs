//! The requests, with the field names of CRI.

use std::collections::BTreeMap;

use keelson_kube_model::SeLinuxOptions;

use super::{ConfigWarning, DnsSpec, UserNamespace};

/// The namespace that a sandbox or container uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NamespaceMode {
    /// That of the pod.
    #[default]
    Pod,
    /// One of its own.
    Container,
    /// That of the node.
    Node,
    /// That of another container.
    Target,
}

/// CRI `NamespaceOption`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// Network.
    pub network: NamespaceMode,
    /// Process ids.
    pub pid: NamespaceMode,
    /// System V IPC.
    pub ipc: NamespaceMode,
    /// Container id for the mode [`NamespaceMode::Target`].
    pub target_id: String,
    /// User namespace of the pod; `None` is the node's.
    pub users: Option<UserNamespace>,
}

/// CRI `SecurityProfile`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SecurityProfile {
    /// The runtime's own.
    RuntimeDefault,
    /// None.
    #[default]
    Unconfined,
    /// A file or a loaded profile by name.
    Localhost(String),
}

impl SecurityProfile {
    /// The string form of an AppArmor profile that older runtimes read.
    pub fn apparmor_text(&self) -> String {
        match self {
            Self::RuntimeDefault => "runtime/default".to_owned(),
            Self::Unconfined => "unconfined".to_owned(),
            Self::Localhost(name) => format!("localhost/{name}"),
        }
    }
}

/// CRI `PortMapping.protocol`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP, and any unknown protocol.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// CRI `PortMapping`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortMapping {
    /// Protocol.
    pub protocol: Protocol,
    /// Port in the pod.
    pub container_port: i32,
    /// Port of the node; 0 for none.
    pub host_port: i32,
    /// Address of the node; empty for all.
    pub host_ip: String,
}

/// CRI `LinuxContainerResources`. Zero means "not set", except for the quota -1, which is "no limit at all".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinuxResources {
    /// CFS period, microseconds.
    pub cpu_period: i64,
    /// CFS quota, microseconds.
    pub cpu_quota: i64,
    /// CPU shares, 2 to 262144.
    pub cpu_shares: i64,
    /// Bytes.
    pub memory_limit_in_bytes: i64,
    /// Bytes, memory and swap together; cgroup v1 only.
    pub memory_swap_limit_in_bytes: i64,
    /// -1000 to 1000.
    pub oom_score_adj: i64,
    /// CPUs in list form; empty for all.
    pub cpuset_cpus: String,
    /// Memory nodes in list form; empty for all.
    pub cpuset_mems: String,
    /// Page size as the kernel writes it (`2MB`) and bytes.
    pub hugepage_limits: Vec<(String, u64)>,
    /// cgroup v2 files and their content.
    pub unified: BTreeMap<String, String>,
}

/// CRI `LinuxSandboxSecurityContext`. The seccomp profile of a sandbox is always `RuntimeDefault`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SandboxSecurity {
    /// Namespaces.
    pub namespaces: Namespaces,
    /// Some container of the pod is privileged.
    pub privileged: bool,
    /// Numeric user.
    pub run_as_user: Option<i64>,
    /// Numeric group; only together with a user.
    pub run_as_group: Option<i64>,
    /// fsGroup, then the pod's supplemental groups.
    pub supplemental_groups: Vec<i64>,
    /// Only these groups apply, not those of the image.
    pub strict_groups: bool,
    /// SELinux label.
    pub selinux: Option<SeLinuxOptions>,
}

/// CRI `PodSandboxConfig`, the runtime handler and warnings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SandboxSpec {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// Hostname in the pod; empty with the host network.
    pub hostname: String,
    /// Directory of the pod's logs.
    pub log_directory: String,
    /// DNS configuration.
    pub dns: DnsSpec,
    /// Ports of the regular containers.
    pub port_mappings: Vec<PortMapping>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// cgroup of the pod, in path form.
    pub cgroup_parent: String,
    /// Kernel parameters, with dots.
    pub sysctls: BTreeMap<String, String>,
    /// Security context.
    pub security: SandboxSecurity,
    /// Sum over the containers.
    pub resources: LinuxResources,
    /// Overhead of the pod; `None` without `spec.overhead`.
    pub overhead: Option<LinuxResources>,
    /// Handler of the runtime class; empty for the default.
    pub runtime_handler: String,
    /// Warning events to record.
    pub warnings: Vec<ConfigWarning>,
}

/// CRI `MountPropagation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Propagation {
    /// Neither way.
    #[default]
    Private,
    /// Mounts of the node appear in the container.
    HostToContainer,
    /// Also mounts of the container appear on the node.
    Bidirectional,
}

/// CRI `ImageSpec` of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageMount {
    /// The runtime's reference of the image.
    pub reference: String,
    /// The image in the spec.
    pub user_specified_image: String,
    /// The pod's runtime handler; empty: the runtime's default.
    pub runtime_handler: String,
    /// The pod's annotations.
    pub annotations: BTreeMap<String, String>,
}

/// CRI `Mount`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountSpec {
    /// Path in the container.
    pub container_path: String,
    /// Path on the node; empty for an image.
    pub host_path: String,
    /// No writes.
    pub readonly: bool,
    /// No writes in mounts below it either.
    pub recursive_read_only: bool,
    /// Mount propagation.
    pub propagation: Propagation,
    /// The runtime relabels the files.
    pub selinux_relabel: bool,
    /// Image to mount.
    pub image: Option<ImageMount>,
    /// Directory in that image.
    pub image_sub_path: String,
    /// User namespace of the pod.
    pub users: Option<UserNamespace>,
}

/// CRI `Device`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceSpec {
    /// Path in the container.
    pub container_path: String,
    /// Path on the node.
    pub host_path: String,
    /// Some of `m`, `r`, `w`.
    pub permissions: String,
}

/// CRI `LinuxContainerSecurityContext`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerSecurity {
    /// Capabilities to add, as typed.
    pub capabilities_add: Vec<String>,
    /// Capabilities to drop, as typed.
    pub capabilities_drop: Vec<String>,
    /// Everything is allowed.
    pub privileged: bool,
    /// Namespaces.
    pub namespaces: Namespaces,
    /// SELinux label.
    pub selinux: Option<SeLinuxOptions>,
    /// Numeric user.
    pub run_as_user: Option<i64>,
    /// Named user; only without a numeric one.
    pub run_as_username: String,
    /// Numeric group.
    pub run_as_group: Option<i64>,
    /// The root file system is read-only.
    pub readonly_rootfs: bool,
    /// fsGroup, then the pod's supplemental groups, then those of its volumes.
    pub supplemental_groups: Vec<i64>,
    /// Only these groups apply, not those of the image.
    pub strict_groups: bool,
    /// No process gains more privileges than its parent.
    pub no_new_privs: bool,
    /// Masked paths.
    pub masked_paths: Vec<String>,
    /// Paths that are read-only.
    pub readonly_paths: Vec<String>,
    /// seccomp profile.
    pub seccomp: SecurityProfile,
    /// AppArmor profile; `None` leaves it to the runtime.
    pub apparmor: Option<SecurityProfile>,
}

/// CRI `ContainerConfig`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerSpec {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// The resolved image.
    pub image_ref: String,
    /// The image in the spec.
    pub user_specified_image: String,
    /// Entry point; empty keeps the image's.
    pub command: Vec<String>,
    /// Arguments; empty keeps the image's.
    pub args: Vec<String>,
    /// Working directory; empty keeps the image's.
    pub working_dir: String,
    /// Environment in order.
    pub envs: Vec<(String, String)>,
    /// Mounts in order.
    pub mounts: Vec<MountSpec>,
    /// Devices in order.
    pub devices: Vec<DeviceSpec>,
    /// CDI names in order.
    pub cdi_devices: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// Path of the log below the pod's log directory.
    pub log_path: String,
    /// Standard input stays open.
    pub stdin: bool,
    /// Standard input closes after the first attach session.
    pub stdin_once: bool,
    /// A terminal is allocated.
    pub tty: bool,
    /// Resources.
    pub resources: LinuxResources,
    /// Security context.
    pub security: ContainerSecurity,
}
