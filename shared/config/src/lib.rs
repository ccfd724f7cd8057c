//! The resolved configuration: what init writes to `<run-dir>/config.json` and every service reads.
//!
//! Only init parses and merges flags, the KubeletConfiguration and the keelson file; the services use the result as it is.
//! The file is replaced by rename and holds no secrets.

mod api;
mod certificates;
mod change;
mod control_plane;
mod credential_refusal;
mod kubelet_document;
mod kubelet_fields;
mod lock_name;
mod machine;
mod names;
mod node_configuration;
mod node_status;
mod offline;
mod own_processes;
mod paths;
mod pods;
mod source_limits;
mod sources;
mod takes;
mod tls;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use api::{Api, ApiFile, ApiHandlers, ApiTls};
pub use certificates::{CertificateKind, Certificates};
pub use change::{PARTS, Part, part_containing, takes_of_field};
pub use control_plane::{
    ControlPlane, Endpoint as EtcdEndpoint, Etcd, EtcdFile, Kubernetes, ObjectsBy, Taint,
};
pub use credential_refusal::CredentialRefusal;
pub use kubelet_document::{KUBELET_API_VERSION, KUBELET_CONFIGURATION, KUBELET_KIND, leaves};
pub use kubelet_fields::{
    DEFAULT_THRESHOLDS, DefaultValue, EmptyValue, FieldEffect, FieldKind, Gate, GateCondition,
    KUBELET_FIELDS, KubeletField, KubeletFlag, enclosing_fields, kubelet_field, kubelet_fields,
};
pub use lock_name::endpoint_lock_name;
pub use machine::{
    Eviction, IdentityFiles, NodeAllocatable, NodeShutdown, PriorityGracePeriod, SystemBus, SystemCgroups,
};
pub use names::{ServiceName, UnknownService};
pub use node_configuration::{
    AssignedConfiguration, ConfigurationState, ConfigurationStatus, NodeConfiguration, Revision,
};
pub use node_status::NodeStatus;
pub use offline::{Offline, StartAfterReboot};
pub use own_processes::OwnProcesses;
pub use paths::Paths;
pub use pods::Pods;
pub use source_limits::{LIMITED_SOURCES, SourceLimit, SourceLimits};
pub use sources::{Sources, UrlHeaders};
pub use takes::Takes;
pub use tls::{CipherSuite, KeyExchange};

/// The version of the file format; a service refuses a newer one than it knows.
pub const SCHEMA_VERSION: u32 = 1;

/// A manifest of this many bytes or more is refused, from whichever source, and by the command (pod-lifecycle.md §1).
pub const MANIFEST_LIMIT: usize = 10 << 20;

/// The reported kubelet version: the kubelet release that Keelson corresponds to, with Keelson's own name.
pub const KUBELET_VERSION: &str = concat!("v1.36.2+keelson.", env!("CARGO_PKG_VERSION"));

/// Everything that a service needs to know before it binds its socket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Config {
    /// See [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// When init resolved it, in unix nanoseconds, which identifies a start of the agent; 0: unknown.
    #[serde(default)]
    pub resolved_unix_nanos: i64,
    /// The name of this node, lower case.
    pub node_name: String,
    /// Folders.
    pub paths: Paths,
    /// The users that the services run as.
    pub users: Users,
    /// The container runtime.
    pub runtime: Runtime,
    /// Where desired pods come from.
    pub sources: Sources,
    /// The control plane of this node.
    #[serde(default)]
    pub control_plane: ControlPlane,
    /// How a configuration under this node's key is put on trial.
    #[serde(default)]
    pub node_configuration: NodeConfiguration,
    /// Which pods start after a reboot while the control plane does not answer.
    #[serde(default)]
    pub offline: Offline,
    /// The HTTP ports.
    pub api: Api,
    /// What pods may use of the machine.
    pub resources: Resources,
    /// Rotation of container logs.
    #[serde(default)]
    pub container_logs: ContainerLogs,
    /// Collection of unused images.
    #[serde(default)]
    pub image_collection: ImageCollection,
    /// Pulls of images.
    #[serde(default)]
    pub image_pulls: ImagePulls,
    /// Collection of dead containers.
    #[serde(default)]
    pub container_collection: ContainerCollection,
    /// Volumes of pods.
    #[serde(default)]
    pub volumes: Volumes,
    /// How pods are kept running, and what they may set.
    #[serde(default)]
    pub pods: Pods,
    /// Settings of the Node object.
    #[serde(default)]
    pub node_status: NodeStatus,
    /// Process settings of the agent.
    #[serde(default)]
    pub own_processes: OwnProcesses,
    /// Log output.
    pub logging: Logging,
    /// Traces over OTLP; absent: off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracing: Option<Tracing>,
    /// Whether this agent manages what exists once per machine: kernel tunables, iptables hints, kmsg.
    pub manage_host: bool,
    /// Whether the agent that manages the host maintains a kubelet's iptables chains (`makeIPTablesUtilChains`).
    #[serde(default = "control_plane::yes")]
    pub iptables_util_chains: bool,
    /// The provenance of each value that was set, keyed by its dotted path.
    #[serde(default)]
    pub provenance: BTreeMap<String, String>,
}

/// Users of the services. A service without an entry runs as the user that init runs as.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Users {
    /// User id per service name.
    pub uids: BTreeMap<String, u32>,
    /// The operator group: its members may use the `keelson` command.
    pub operator_gid: u32,
}

/// The container runtime and how pods' cgroups are named for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// `unix://` and a path.
    pub endpoint: String,
    /// Endpoint of the image service (`imageServiceEndpoint`); absent: `endpoint`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_endpoint: Option<String>,
    /// Timeout of most CRI calls in milliseconds (`runtimeRequestTimeout`).
    pub request_timeout_ms: u64,
    /// `cgroupfs` or `systemd`.
    pub cgroup_driver: String,
    /// Prefix of the pods' cgroup tree, `/` for none.
    pub cgroup_root: String,
    /// Pulls at the same time; 1 is the kubelet's `serializeImagePulls`.
    pub max_parallel_pulls: u32,
    /// Image that is never garbage-collected, although no container uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_image: Option<String>,
    /// Milliseconds between two full relists while events flow.
    pub relist_period_ms: u64,
    /// Maximum number of concurrent pod starts.
    pub start_parallelism: u32,
    /// DNS servers of `ClusterFirst` pods.
    #[serde(default)]
    pub cluster_dns: Vec<String>,
    /// Domain of `ClusterFirst` pods.
    #[serde(default)]
    pub cluster_domain: String,
    /// The node's resolv.conf that pods inherit; empty: none.
    pub resolv_conf: String,
}

/// What pods may use of the machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// `maxPods`.
    pub max_pods: u32,
    /// `podPidsLimit`; -1: none.
    pub pod_pids_limit: i64,
    /// `cpuCFSQuota`.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod` in microseconds.
    pub cpu_cfs_period_us: u64,
    /// `kubeReserved` + `systemReserved` + hard eviction, as quantities per resource name.
    #[serde(default)]
    pub reserved: BTreeMap<String, String>,
    /// `podsPerCore`; 0: no bound.
    #[serde(default)]
    pub pods_per_core: u32,
    /// Reservations and how they are enforced.
    #[serde(default)]
    pub node_allocatable: NodeAllocatable,
    /// When pods are evicted.
    #[serde(default)]
    pub eviction: Eviction,
    /// The time that pods have to end before the machine shuts down.
    #[serde(default)]
    pub node_shutdown: NodeShutdown,
    /// The machine's message bus.
    #[serde(default)]
    pub system_bus: SystemBus,
    /// Cgroups other than those of pods that have their own statistics.
    #[serde(default)]
    pub system_cgroups: SystemCgroups,
    /// Files with the machine's ids.
    #[serde(default)]
    pub identity_files: IdentityFiles,
    /// Labels of the Node object (`--node-labels`).
    #[serde(default)]
    pub node_labels: BTreeMap<String, String>,
}

/// Rotation of container logs (runtime-and-resources.md §7.5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerLogs {
    /// Bytes at which a log is rotated (`containerLogMaxSize`); absent: never.
    pub max_size_bytes: Option<u64>,
    /// Files that are kept of a container, the current one included, at least 2 (`containerLogMaxFiles`).
    pub max_files: u32,
    /// Logs that are rotated at the same time, at least 1 (`containerLogMaxWorkers`).
    pub max_workers: u32,
    /// Milliseconds between two checks of the size of each log (`containerLogMonitorInterval`).
    pub monitor_interval_ms: u64,
}

impl Default for ContainerLogs {
    fn default() -> Self {
        Self { max_size_bytes: Some(10 << 20), max_files: 5, max_workers: 1, monitor_interval_ms: 10_000 }
    }
}

/// Collection of unused images (runtime-and-resources.md §6.7).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageCollection {
    /// Usage of the file system of images at which removal begins (`imageGCHighThresholdPercent`); 100: never.
    pub high_threshold_percent: u32,
    /// Usage down to which images are removed (`imageGCLowThresholdPercent`).
    pub low_threshold_percent: u32,
    /// Milliseconds for which a new image is kept regardless of disk usage (`imageMinimumGCAge`).
    pub minimum_age_ms: u64,
    /// Milliseconds without use after which an image is removed regardless of disk usage (`imageMaximumGCAge`); 0: never.
    pub maximum_age_ms: u64,
}

impl Default for ImageCollection {
    fn default() -> Self {
        Self {
            high_threshold_percent: 85,
            low_threshold_percent: 80,
            minimum_age_ms: 120_000,
            maximum_age_ms: 0,
        }
    }
}

/// Pulls of images (runtime-and-resources.md §6.2, §6.5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImagePulls {
    /// Pulls that may begin per second (`registryPullQPS`); 0: no limit.
    pub registry_qps: u32,
    /// Pulls that may begin at once (`registryBurst`).
    pub registry_burst: u32,
    /// Milliseconds without progress after which a pull is cancelled.
    pub progress_timeout_ms: u64,
    /// `imagePullCredentialsVerificationPolicy`.
    pub credentials_verification: String,
    /// `preloadedImagesVerificationAllowlist`.
    #[serde(default)]
    pub preloaded_allowlist: Vec<String>,
}

impl Default for ImagePulls {
    fn default() -> Self {
        Self {
            registry_qps: 5,
            registry_burst: 10,
            // As containerd's own `image_pull_progress_timeout` since 2.0.
            progress_timeout_ms: 300_000,
            credentials_verification: "NeverVerifyPreloadedImages".into(),
            preloaded_allowlist: Vec::new(),
        }
    }
}

/// Collection of dead containers (pod-lifecycle.md §9.12).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerCollection {
    /// Milliseconds for which a container is kept after its creation (`--minimum-container-ttl-duration`).
    pub minimum_age_ms: u64,
    /// Dead containers that are kept of each name in a pod (`--maximum-dead-containers-per-container`); below 0: all.
    pub max_per_container: i32,
    /// Dead containers that are kept in all (`--maximum-dead-containers`); below 0: any number.
    pub max_total: i32,
}

impl Default for ContainerCollection {
    fn default() -> Self {
        Self { minimum_age_ms: 0, max_per_container: 1, max_total: -1 }
    }
}

/// Volumes of pods (volumes.md §13).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volumes {
    /// Milliseconds between two measurements of a pod's volumes (`volumeStatsAggPeriod`), extended at random up to twice
    /// that; 0: never.
    pub stats_period_ms: u64,
    /// The folder of flexVolume drivers (`volumePluginDir`).
    #[serde(default = "default_plugin_dir")]
    pub plugin_dir: PathBuf,
    /// Whether the health of volumes is reported, as CSI drivers measure it (gate `CSIVolumeHealth`).
    #[serde(default)]
    pub csi_volume_health: bool,
    /// Whether volumes of every access mode are mounted with the SELinux label of their pod, not only those for one pod
    /// (gate `SELinuxMount`).
    #[serde(default)]
    pub selinux_mount: bool,
    /// Whether projected volumes may have trust anchors of ClusterTrustBundles (gate `ClusterTrustBundleProjection`).
    #[serde(default)]
    pub cluster_trust_bundles: bool,
    /// Whether projected volumes may have certificates of their pod (gate `PodCertificateRequest`).
    #[serde(default)]
    pub pod_certificates: bool,
}

/// Where a kubelet looks for flexVolume drivers; a configuration of an earlier release names no folder.
fn default_plugin_dir() -> PathBuf {
    "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/".into()
}

impl Default for Volumes {
    fn default() -> Self {
        Self {
            stats_period_ms: 60_000,
            plugin_dir: default_plugin_dir(),
            csi_volume_health: false,
            selinux_mount: false,
            cluster_trust_bundles: false,
            pod_certificates: false,
        }
    }
}

/// Log output of every service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Logging {
    /// `text` or `json`.
    pub format: String,
    /// A level or a filter such as `info,keelson_pod_sync=debug`.
    pub level: String,
    /// Files with a higher verbosity (`logging.vmodule`).
    #[serde(default)]
    pub vmodule: Vec<VModule>,
    /// Where lines go.
    #[serde(default)]
    pub output: LogOutput,
}

impl Logging {
    /// The log level for a kubelet's verbosity: details from 4 on, every step from 6 on.
    pub fn level_of_verbosity(verbosity: i32) -> &'static str {
        match verbosity {
            ..4 => "info",
            4..6 => "debug",
            6.. => "trace",
        }
    }
}

/// The verbosity of the source files whose names match a pattern (node-and-api.md §2.6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VModule {
    /// Matches the name of a file without its suffix, or with a `/` its path; `*`, `?` and `[…]` are wildcards.
    pub file_pattern: String,
    /// The verbosity, as that of `logging.verbosity`.
    pub verbosity: i32,
}

/// Where lines go (`logging.options` of the format in use, `logging.flushFrequency`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LogOutput {
    /// Whether all lines but errors go to standard output; otherwise all go to standard error.
    pub split_stream: bool,
    /// How many bytes for standard output are buffered; 0: none.
    pub info_buffer_bytes: u64,
    /// How long lines stay in that buffer at most.
    pub flush_ms: u64,
}

impl Default for LogOutput {
    fn default() -> Self {
        Self { split_stream: false, info_buffer_bytes: 0, flush_ms: 5000 }
    }
}

/// Traces over OTLP/gRPC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tracing {
    /// `http://host:port` or `unix:///path` of the collector.
    pub endpoint: String,
    /// Samples per million traces (`samplingRatePerMillion`).
    pub sampling_rate_per_million: u32,
}

impl Default for Runtime {
    fn default() -> Self {
        Self {
            endpoint: "unix:///run/containerd/containerd.sock".into(),
            image_endpoint: None,
            request_timeout_ms: 120_000,
            cgroup_driver: "cgroupfs".into(),
            cgroup_root: "/".into(),
            max_parallel_pulls: 1,
            sandbox_image: None,
            relist_period_ms: 60_000,
            start_parallelism: 8,
            cluster_dns: Vec::new(),
            cluster_domain: String::new(),
            resolv_conf: "/etc/resolv.conf".into(),
        }
    }
}

impl Default for Logging {
    fn default() -> Self {
        Self {
            format: "text".into(),
            level: "info".into(),
            vmodule: Vec::new(),
            output: LogOutput::default(),
        }
    }
}

impl Default for Config {
    /// The kubelet's defaults (node-and-api.md §2.5), no source of pods and no node name.
    fn default() -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            resolved_unix_nanos: 0,
            node_name: String::new(),
            paths: Paths::default(),
            users: Users::default(),
            runtime: Runtime::default(),
            sources: Sources::none(),
            control_plane: ControlPlane::None,
            node_configuration: NodeConfiguration::default(),
            offline: Offline::default(),
            api: Api::default(),
            resources: Resources {
                max_pods: 110,
                pod_pids_limit: -1,
                cpu_cfs_quota: true,
                cpu_cfs_period_us: 100_000,
                ..Resources::default()
            },
            container_logs: ContainerLogs::default(),
            image_collection: ImageCollection::default(),
            volumes: Volumes::default(),
            pods: Pods::default(),
            node_status: NodeStatus::default(),
            own_processes: OwnProcesses::default(),
            image_pulls: ImagePulls::default(),
            container_collection: ContainerCollection::default(),
            logging: Logging::default(),
            tracing: None,
            manage_host: true,
            iptables_util_chains: true,
            provenance: BTreeMap::new(),
        }
    }
}

/// Why the resolved configuration could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the resolved configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not what init writes.
    #[error("{} is not a resolved configuration; keelson-init --resolve-only writes one", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// The file was written by a newer keelson.
    #[error("{} has schema version {found}, this binary knows {SCHEMA_VERSION}; use the binaries of one release", path.display())]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The file cannot be written.
    #[error("cannot write the resolved configuration {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// What the file holds.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Stored<'a> {
    #[serde(flatten)]
    config: &'a Config,
    #[serde(flatten)]
    extras: ConfigExtras<'a>,
}

/// Additional content of the file. It is not part of [`Config`] because no service needs it in memory.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigExtras<'a> {
    /// The complete effective KubeletConfiguration, for [`kubelet_configuration`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubelet_configuration: Option<&'a Map<String, Value>>,
    /// Every feature gate, for [`feature_gates`].
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub feature_gates: &'a [FeatureGate],
    /// Values of changed files that are not in effect yet, by the same dotted paths as in the provenance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<&'a Map<String, Value>>,
}

/// The field of `config.json` with values of changed files that are not in effect yet, by dotted path.
pub const WAITING: &str = "waiting";

/// A feature gate, and whether it is on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureGate {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Stage of the feature: `ALPHA`, `BETA`, `DEPRECATED`, or empty for GA.
    pub stage: Cow<'static, str>,
    /// Whether it is on.
    pub enabled: bool,
}

/// The effective KubeletConfiguration, from the file at `path`; `None` when the file has none.
///
/// # Errors
/// The file cannot be read or is not what init writes.
pub fn kubelet_configuration(path: &Path) -> Result<Option<Map<String, Value>>, ConfigError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct File {
        kubelet_configuration: Option<Map<String, Value>>,
    }
    part_of(path).map(|file: File| file.kubelet_configuration)
}

/// The feature gates, from the file at `path`; empty when the file has none.
///
/// # Errors
/// As [`kubelet_configuration`].
pub fn feature_gates(path: &Path) -> Result<Vec<FeatureGate>, ConfigError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct File {
        #[serde(default)]
        feature_gates: Vec<FeatureGate>,
    }
    part_of(path).map(|file: File| file.feature_gates)
}

/// A part of the file.
fn part_of<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    let bytes = fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| ConfigError::Decode { path: path.to_owned(), source })
}

impl Config {
    /// Reads and checks the file at `path`.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let bytes = fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let config: Self = serde_json::from_slice(&bytes)
            .map_err(|source| ConfigError::Decode { path: path.to_owned(), source })?;
        if config.schema_version > SCHEMA_VERSION {
            return Err(ConfigError::TooNew { path: path.to_owned(), found: config.schema_version });
        }
        Ok(config)
    }

    /// The content of the file, with what it holds in addition.
    ///
    /// # Errors
    /// A value cannot be written as JSON.
    pub fn encode(&self, extras: ConfigExtras<'_>) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = serde_json::to_vec_pretty(&Stored { config: self, extras })?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// The user id that `service` runs as, when the configuration sets one.
    pub fn uid_of(&self, service: ServiceName) -> Option<u32> {
        self.users.uids.get(service.as_str()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_config_round_trips() {
        let path = std::env::temp_dir().join(format!("keelson-config-{}.json", std::process::id()));
        let mut config = Config { node_name: "edge".into(), ..Config::default() };
        config.provenance.insert("nodeName".into(), "--hostname-override".into());
        fs::write(&path, config.encode(ConfigExtras::default()).unwrap()).unwrap();
        assert_eq!(Config::load(&path).unwrap(), config);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn kubelet_configuration_and_feature_gates_are_in_the_same_file() {
        let path = std::env::temp_dir().join(format!("keelson-config-kubelet-{}.json", std::process::id()));
        let config = Config::default();
        let document = Map::from_iter([("maxPods".to_owned(), Value::from(7))]);
        let gates = [FeatureGate { name: "A".into(), stage: "BETA".into(), enabled: true }];
        let extras =
            ConfigExtras { kubelet_configuration: Some(&document), feature_gates: &gates, waiting: None };
        fs::write(&path, config.encode(extras).unwrap()).unwrap();
        assert_eq!(Config::load(&path).unwrap(), config);
        assert_eq!(kubelet_configuration(&path).unwrap(), Some(document));
        assert_eq!(feature_gates(&path).unwrap(), gates);
        fs::write(&path, config.encode(ConfigExtras::default()).unwrap()).unwrap();
        assert_eq!(kubelet_configuration(&path).unwrap(), None);
        assert_eq!(feature_gates(&path).unwrap(), []);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_newer_schema_is_refused_by_name() {
        let path = std::env::temp_dir().join(format!("keelson-config-new-{}.json", std::process::id()));
        let config = Config { schema_version: SCHEMA_VERSION + 1, ..Config::default() };
        fs::write(&path, config.encode(ConfigExtras::default()).unwrap()).unwrap();
        let error = Config::load(&path).unwrap_err();
        assert!(matches!(error, ConfigError::TooNew { found, .. } if found == SCHEMA_VERSION + 1));
        fs::remove_file(&path).unwrap();
    }
}
