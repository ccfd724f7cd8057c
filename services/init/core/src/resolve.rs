//! The resolved configuration, made of flags, files and facts about the host.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use keelson_config::{Config, ConfigExtras, FeatureGate, KUBELET_API_VERSION, KUBELET_KIND, ServiceName};
use keelson_kube_model::parse_go_duration;
use serde_json::{Map, Value};

use crate::api_access::listeners;
use crate::document::{ConfigError, Document, Sourced};
use crate::effective::effective;
use crate::flags::{FieldFlag, flag_for_field, parse_bool};
use crate::gates;
use crate::keelson_file::{self, KeelsonFile};
use crate::kubelet_file::{self, KubeletFile, absolute, is_kind};
use crate::origins::origins;
use crate::own_processes::last;
use crate::reserved::Capacity;
use crate::rules;

/// The maximum length of the run dir: the path of a unix socket has at most 107 bytes (unix(7)), and
/// `/resource-manager/resource-manager.` with a process ID takes 42.
const MAX_RUN_DIR: usize = 65;
/// The first user ID for services without a system user.
const UID_BASE: u32 = 64_200;
/// The limit for `serializeImagePulls: false` without `maxParallelImagePulls`.
const UNBOUNDED_PULLS: u32 = 1000;

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
        self.others.get(name).is_some_and(|uses| parse_bool(last(uses)) == Some(true))
    }
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
}

/// Everything that [`resolve`] depends on.
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

/// The severity of a note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Informational.
    Info,
    /// Probably a mistake.
    Warn,
    /// Needs an operator.
    Error,
}

/// A message about a valid configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The severity.
    pub level: Level,
    /// The message.
    pub text: String,
}

/// A resolved configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// The part that the services read.
    pub config: Config,
    /// The messages to log.
    pub notes: Vec<Note>,
    /// The whole KubeletConfiguration in force, without secrets.
    pub kubelet_configuration: Map<String, Value>,
    /// Every feature gate.
    pub feature_gates: Vec<FeatureGate>,
}

impl Resolved {
    /// What is stored in `config.json` in addition to the configuration of the services.
    pub fn config_extras(&self) -> ConfigExtras<'_> {
        ConfigExtras {
            kubelet_configuration: Some(&self.kubelet_configuration),
            feature_gates: &self.feature_gates,
            waiting: None,
        }
    }
}

/// Merges flags, the KubeletConfiguration, the keelson file and the defaults, in this order of precedence.
///
/// # Errors
/// All errors, each with field, value, origin and remedy.
pub fn resolve(inputs: Inputs<'_>) -> Result<Resolved, Vec<ConfigError>> {
    resolve_with(inputs, None)
}

/// Resolves with a KubeletConfiguration of the control plane, `assigned`, over the files and below the flags.
pub(crate) fn resolve_with(
    inputs: Inputs<'_>,
    assigned: Option<&Document>,
) -> Result<Resolved, Vec<ConfigError>> {
    let Inputs { flags, kubelet, keelson, host, .. } = inputs;
    let with_file = kubelet.or(assigned).is_some();
    let mut errors = Vec::new();
    let mut is_kubelet_config =
        |document: &Document| is_kind(document, KUBELET_API_VERSION, KUBELET_KIND, &mut errors);
    // A file of another kind is ignored, so that the errors of the other files are reported too.
    let kubelet = kubelet.filter(|document| is_kubelet_config(document));
    let drop_ins: Vec<Document> =
        inputs.drop_ins.iter().filter(|document| is_kubelet_config(document)).cloned().collect();
    let merged = Inputs { kubelet, drop_ins: &drop_ins, ..inputs }.merged_kubelet_config(assigned);
    let kubelet = merged.as_ref();
    let capacity = Capacity {
        memory: host.memory_bytes,
        nodefs: host.nodefs_bytes,
        reserves_thresholds: !flags.is_on("experimental-allocatable-ignore-eviction"),
    };
    let kubelet_file = kubelet.map(|document| kubelet_file::read(document, capacity, &mut errors));
    let keelson_file = keelson.map(|document| keelson_file::read(document, &mut errors));
    let kubelet_file = kubelet_file.unwrap_or_default();
    let (gates, wrong, notes) = gates::evaluate(&kubelet_file.gates);
    errors.extend(wrong);
    if let Some(document) = kubelet {
        rules::check(document, &gates, &mut errors);
    }
    let mut resolver = Resolver { config: Config::default(), errors, notes, flags, host, with_file };
    resolver.run(kubelet_file, keelson_file.unwrap_or_default());
    add_flags_to_origins(&mut resolver.errors, keelson);
    if resolver.errors.is_empty() {
        let kubelet_configuration = effective(kubelet, with_file, &resolver.config);
        let origins = origins(kubelet, &kubelet_configuration, &resolver.config);
        resolver.config.provenance.extend(origins);
        let feature_gates = gates.all();
        Ok(Resolved { config: resolver.config, notes: resolver.notes, kubelet_configuration, feature_gates })
    } else {
        Err(resolver.errors)
    }
}

/// Adds to each error of a KubeletConfiguration field the flag for that field (node-and-api.md §2.7).
fn add_flags_to_origins(errors: &mut [ConfigError], keelson: Option<&Document>) {
    for error in errors {
        let is_ours = keelson.is_some_and(|keelson| error.origin.starts_with(&keelson.file));
        if let Some(twin) =
            flag_for_field(&error.field).filter(|_| !is_ours && !error.origin.starts_with("--"))
        {
            error.origin = format!("{}; --{twin}", error.origin);
        }
    }
}

pub(crate) struct Resolver<'a> {
    pub(crate) config: Config,
    pub(crate) errors: Vec<ConfigError>,
    notes: Vec<Note>,
    pub(crate) flags: &'a Flags,
    pub(crate) host: &'a Host,
    pub(crate) with_file: bool,
}

impl Resolver<'_> {
    fn run(&mut self, mut kubelet: KubeletFile, mut keelson: KeelsonFile) {
        self.check_other_flags();
        self.node_name_and_labels();
        crate::node_ip::resolve(self);
        self.paths(&mut kubelet, &mut keelson);
        self.users(&keelson);
        self.sources(&mut kubelet);
        std::mem::take(&mut keelson.control_plane).resolve(self, &mut kubelet);
        crate::node_status::resolve(self, &mut kubelet);
        crate::own_processes::resolve(self, &mut kubelet);
        crate::system_cgroups::resolve(self, &mut kubelet);
        self.runtime(&mut kubelet, &mut keelson);
        self.images(&mut kubelet);
        crate::log_and_image_gc::resolve(self, &mut kubelet);
        std::mem::take(&mut kubelet.pod_settings).resolve(self);
        self.dns(&mut kubelet);
        std::mem::take(&mut kubelet.api_access).resolve(self, &mut kubelet.unsupported);
        listeners(self, &mut kubelet);
        crate::api_handlers::resolve(self, &mut kubelet);
        self.resources(&mut kubelet);
        crate::eviction::resolve(self, &mut kubelet);
        self.telemetry(&mut kubelet, &mut keelson);
        self.set("manageHost", keelson.manage_host.take(), |c, v| c.manage_host = v);
        self.set("api.strictVerbs", keelson.strict_verbs.take(), |c, v| c.api.strict_verbs = v);
        self.set("iptablesUtilChains", kubelet.iptables_util_chains.take(), |c, v| {
            c.iptables_util_chains = v
        });
        self.report_notes(&kubelet);
    }

    /// Applies a value to the configuration, and records its origin in the provenance.
    pub(crate) fn set<T>(
        &mut self,
        path: &str,
        value: Option<Sourced<T>>,
        apply: impl FnOnce(&mut Config, T),
    ) {
        if let Some(value) = value {
            if !value.origin.is_empty() {
                self.config.provenance.insert(path.to_owned(), value.origin);
            }
            apply(&mut self.config, value.value);
        }
    }

    pub(crate) fn refuse<T: std::fmt::Debug>(&mut self, value: &Sourced<T>, remedy: impl Into<String>) {
        self.errors.push(value.error(remedy));
    }

    pub(crate) fn note(&mut self, level: Level, text: impl Into<String>) {
        self.notes.push(Note { level, text: text.into() });
    }

    fn paths(&mut self, kubelet: &mut KubeletFile, keelson: &mut KeelsonFile) {
        let cwd = &self.host.cwd;
        let of = |name, text: Option<&String>| flag(name, text).map(|p| p.map(|p| absolute(cwd, &p)));
        let mut of_file = |path| keelson.folders.remove(path);
        let run = of("--run-dir", self.flags.run_dir.as_ref()).or(of_file("paths.runDir"));
        let state = of("--state-dir", self.flags.state_dir.as_ref()).or(of_file("paths.stateDir"));
        let root = of("--root-dir", self.flags.root_dir.as_ref());
        let links = of_file("paths.containerLinksDir");
        let bin = of_file("paths.binDir");
        let logs = kubelet.pod_logs_dir.take();

        for own in [&run, &state].into_iter().flatten() {
            if own.value.trim_matches('/').split('/').count() < 2 {
                self.refuse(
                    own,
                    "the agent changes the owner and mode of this folder; use a folder below it",
                );
            }
        }
        if let Some(run) = run.as_ref().filter(|run| run.value.len() > MAX_RUN_DIR) {
            self.refuse(
                run,
                format!(
                    "this path is {} bytes long, and socket paths below it leave {MAX_RUN_DIR}; use a shorter one",
                    run.value.len()
                ),
            );
        }
        if let Some(logs) = logs.as_ref().filter(|logs| !logs.value.is_ascii()) {
            self.refuse(logs, "the path of pod logs must be ASCII");
        }
        self.config.paths.bin_dir = PathBuf::from(&self.host.exe_dir);
        self.folder("paths.runDir", run, |c, v| c.paths.run_dir = v);
        self.folder("paths.stateDir", state, |c, v| c.paths.state_dir = v);
        self.folder("paths.rootDir", root, |c, v| c.paths.root_dir = v);
        self.folder("paths.containerLinksDir", links, |c, v| c.paths.container_links_dir = v);
        self.folder("paths.binDir", bin, |c, v| c.paths.bin_dir = v);
        self.folder("paths.podLogsDir", logs, |c, v| c.paths.pod_logs_dir = v);
    }

    fn folder(
        &mut self,
        path: &str,
        value: Option<Sourced<String>>,
        apply: impl FnOnce(&mut Config, PathBuf),
    ) {
        if let Some(value) = &value
            && !is_clean(&value.value)
        {
            self.refuse(value, "this must be an absolute path without '.', '..', '//' and a trailing '/'");
        }
        self.set(path, value.map(|v| v.map(PathBuf::from)), apply);
    }

    fn users(&mut self, keelson: &KeelsonFile) {
        if self.host.uid != 0 {
            self.config.users.operator_gid = self.host.gid;
            self.note(
                Level::Error,
                format!(
                    "the kubelet needs to run as uid 0, it is being run as {}: all services run as this user and without \
                     additional privileges",
                    self.host.uid
                ),
            );
            return;
        }
        let base = keelson.uid_base.as_ref().map_or(UID_BASE, |base| base.value);
        for (index, service) in (0u32..).zip(ServiceName::ALL) {
            if service.needs_root() {
                continue;
            }
            let system = self.host.service_users.get(&service).copied();
            let uid = system.unwrap_or(base + index);
            let origin = match (system, &keelson.uid_base) {
                (Some(_), _) => format!("user keelson-{service}"),
                (None, Some(base)) => base.origin.clone(),
                (None, None) => String::new(),
            };
            let uid = Sourced { value: uid, origin, field: String::new() };
            self.set(&format!("users.uids.{service}"), Some(uid), |c, v| {
                c.users.uids.insert(service.to_string(), v);
            });
        }
        let group = keelson.operator_gid.clone().unwrap_or_else(|| match self.host.operator_group {
            Some(gid) => Sourced { value: gid, origin: "group keelson".into(), field: String::new() },
            None => {
                let origin = keelson.uid_base.as_ref().map_or_else(String::new, |base| base.origin.clone());
                Sourced { value: base, origin, field: String::new() }
            }
        });
        self.set("users.operatorGid", Some(group), |c, v| c.users.operator_gid = v);
    }

    fn sources(&mut self, kubelet: &mut KubeletFile) {
        let manifests = kubelet.static_pod_path.take().filter(|path| !path.value.is_empty());
        self.set("sources.staticPodPath", manifests, |c, v| c.sources.static_pod_path = Some(v.into()));
        self.set("volumes.statsPeriodMs", kubelet.volume_stats_period.take(), |c, v| {
            c.volumes.stats_period_ms = millis(v);
        });
        self.set("sources.fileCheckMs", kubelet.file_check.take(), |c, v| {
            c.sources.file_check_ms = millis(v)
        });
        std::mem::take(&mut kubelet.manifest_url).resolve(self);
    }

    fn runtime(&mut self, kubelet: &mut KubeletFile, keelson: &mut KeelsonFile) {
        if let Some(endpoint) = kubelet.endpoint.take() {
            // A bare path is a unix socket, as in the kubelet.
            let socket = endpoint.value.strip_prefix("unix://").unwrap_or(&endpoint.value).to_owned();
            if !is_clean(&socket) {
                self.refuse(
                    &endpoint,
                    "this must be unix:// followed by the absolute path of a socket, such as unix:///run/containerd/containerd.sock",
                );
            }
            let endpoint = endpoint.map(|_| format!("unix://{socket}"));
            self.set("runtime.endpoint", Some(endpoint), |c, v| c.runtime.endpoint = v);
        }
        let root = kubelet.cgroup_root.take().filter(|root| !root.value.is_empty());
        if let Some(root) = root.as_ref().filter(|root| root.value != "/" && !is_clean(&root.value)) {
            self.refuse(root, "this must be / or an absolute path in the cgroup tree, such as /pods.slice");
        }
        self.set("runtime.cgroupRoot", root, |c, v| c.runtime.cgroup_root = v);
        self.set("runtime.cgroupDriver", kubelet.cgroup_driver.take(), |c, v| c.runtime.cgroup_driver = v);
        self.set("runtime.requestTimeoutMs", kubelet.request_timeout.take(), |c, v| {
            c.runtime.request_timeout_ms = millis(v);
        });
        self.set("runtime.sandboxImage", keelson.sandbox_image.take(), |c, v| {
            c.runtime.sandbox_image = Some(v).filter(|image| !image.is_empty());
        });
        self.set("imagePulls.progressTimeoutMs", keelson.pull_progress_timeout.take(), |c, v| {
            c.image_pulls.progress_timeout_ms = millis(v);
        });
        self.image_endpoint(kubelet);
        self.container_gc();
        std::mem::take(&mut keelson.source_limits).resolve(self);
        self.set("runtime.relistPeriodMs", keelson.relist_period.take(), |c, v| {
            c.runtime.relist_period_ms = millis(v);
        });
        self.set("runtime.startParallelism", keelson.start_parallelism.take(), |c, v| {
            c.runtime.start_parallelism = v;
        });
    }

    fn image_endpoint(&mut self, kubelet: &mut KubeletFile) {
        let endpoint = kubelet.image_endpoint.take().filter(|endpoint| !endpoint.value.is_empty());
        // A bare path is a unix socket here too.
        let named = |text: String| if text.starts_with('/') { format!("unix://{text}") } else { text };
        let endpoint = endpoint.map(|endpoint| endpoint.map(named));
        let socket = |text: &str| text.strip_prefix("unix://").is_some_and(|path| path.starts_with('/'));
        if let Some(endpoint) = endpoint.as_ref().filter(|endpoint| !socket(&endpoint.value)) {
            self.refuse(endpoint, "this must be unix:// followed by the absolute path of a socket");
        }
        self.set("runtime.imageEndpoint", endpoint, |c, v| {
            c.runtime.image_endpoint = Some(v).filter(|endpoint| *endpoint != c.runtime.endpoint);
        });
    }

    /// Applies the kubelet's flags for dead containers, which have no fields.
    fn container_gc(&mut self) {
        let name = "--minimum-container-ttl-duration";
        let age = flag(name, self.flags.minimum_container_ttl.as_ref());
        if let Some(age) = age {
            match parse_go_duration(&age.value) {
                Some(duration) => {
                    self.set("containerCollection.minimumAgeMs", Some(age.map(|_| duration)), |c, v| {
                        c.container_collection.minimum_age_ms = millis(v);
                    })
                }
                None => self.refuse(&age, "this is not a duration; write one such as 1m"),
            }
        }
        let number = |name: &str, value: Option<i32>| {
            value.map(|value| Sourced { value, origin: name.to_owned(), field: name.to_owned() })
        };
        let per = number("--maximum-dead-containers-per-container", self.flags.max_dead_per_container);
        self.set("containerCollection.maxPerContainer", per, |c, v| {
            c.container_collection.max_per_container = v
        });
        let total = number("--maximum-dead-containers", self.flags.max_dead_containers);
        self.set("containerCollection.maxTotal", total, |c, v| c.container_collection.max_total = v);
    }

    fn images(&mut self, kubelet: &mut KubeletFile) {
        let (max, serialize) = (kubelet.max_parallel_pulls.take(), kubelet.serialize_pulls.take());
        let pulls = match (max, serialize) {
            (Some(max), Some(serialize)) if serialize.value && max.value > 1 => {
                self.refuse(&max, "more than 1 needs serializeImagePulls: false");
                None
            }
            (Some(max), _) => Some(max),
            (None, Some(serialize)) => Some(serialize.map(|s| if s { 1 } else { UNBOUNDED_PULLS })),
            (None, None) => None,
        };
        self.set("runtime.maxParallelPulls", pulls, |c, v| c.runtime.max_parallel_pulls = v);
    }

    fn dns(&mut self, kubelet: &mut KubeletFile) {
        let servers = kubelet.cluster_dns.take().map(|servers| {
            let origin = servers.origin.clone();
            servers.map(|list| {
                let (good, bad): (Vec<_>, Vec<_>) =
                    list.into_iter().partition(|text| text.parse::<IpAddr>().is_ok());
                for text in bad {
                    self.note(
                        Level::Warn,
                        format!("clusterDNS {text:?} ({origin}) is not an IP address and is ignored"),
                    );
                }
                good
            })
        });
        self.set("runtime.clusterDns", servers, |c, v| c.runtime.cluster_dns = v);
        self.set("runtime.clusterDomain", kubelet.cluster_domain.take(), |c, v| c.runtime.cluster_domain = v);
        self.set("runtime.resolvConf", kubelet.resolv_conf.take(), |c, v| c.runtime.resolv_conf = v);
    }

    fn resources(&mut self, kubelet: &mut KubeletFile) {
        self.swap(kubelet.fail_swap_on.take());
        self.set("resources.maxPods", kubelet.max_pods.take(), |c, v| c.resources.max_pods = v);
        self.set("nodeStatus.maxImages", kubelet.max_images.take(), |c, v| c.node_status.max_images = v);
        self.set("resources.podPidsLimit", kubelet.pod_pids_limit.take(), |c, v| {
            c.resources.pod_pids_limit = if v <= 0 { -1 } else { v };
        });
        self.set("resources.cpuCfsQuota", kubelet.cpu_cfs_quota.take(), |c, v| c.resources.cpu_cfs_quota = v);
        self.set("resources.cpuCfsPeriodUs", kubelet.cpu_cfs_period.take(), |c, v| {
            c.resources.cpu_cfs_period_us = u64::try_from(v.as_micros()).unwrap_or(u64::MAX);
        });
    }

    fn report_notes(&mut self, kubelet: &KubeletFile) {
        if !kubelet.unsupported.is_empty() {
            let list = kubelet.unsupported.join(", ");
            self.note(
                Level::Info,
                format!("these fields of the KubeletConfiguration have no effect yet: {list}"),
            );
        }
        for text in &kubelet.ignored {
            self.note(Level::Warn, text);
        }
        match &kubelet.fail_cgroup_v1 {
            Some(fail) if self.host.cgroup_v1 && fail.value => self.refuse(
                fail,
                "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed \
                 in a future release: boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false"
                    .to_owned(),
            ),
            // The field is not set.
            None if self.host.cgroup_v1 => self.note(
                Level::Warn,
                "this machine has cgroup v1: a kubelet refuses to run on it unless failCgroupV1 is false, keelson runs on it; boot with \
                 systemd.unified_cgroup_hierarchy=1 for cgroup v2",
            ),
            _ => {}
        }
        if !self.with_file {
            self.note(
                Level::Info,
                "without --config no resources are reserved and no eviction threshold is set",
            );
        }
    }
}

impl Resolver<'_> {
    /// Refuses swap unless `failSwapOn` is false (node-and-api.md §12).
    fn swap(&mut self, fail: Option<Sourced<bool>>) {
        let default =
            || Sourced { value: true, origin: "default".to_owned(), field: "failSwapOn".to_owned() };
        let fail = fail.unwrap_or_else(default);
        if fail.value && !self.host.swap.is_empty() {
            let areas = self.host.swap.join(", ");
            self.refuse(
                &fail,
                format!(
                    "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false: this \
                     machine has swap ({areas}), which may write secrets and other memory of pods to the disk; turn \
                     it off (swapoff -a), or set failSwapOn: false in the file of --config"
                ),
            );
        }
    }
}

pub(crate) fn flag(name: &str, text: Option<&String>) -> Option<Sourced<String>> {
    text.map(|text| Sourced { value: text.clone(), origin: name.to_owned(), field: name.to_owned() })
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Whether this is an absolute path in its shortest form.
pub(crate) fn is_clean(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(|rest| {
        !rest.is_empty() && rest.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
    }) && !path.contains('\0')
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
pub(crate) mod tests;
