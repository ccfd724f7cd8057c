//! The resolved configuration, from flags, files and what the host is.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use keelson_config::{Beside, Config, FeatureGate, KUBELET_API_VERSION, KUBELET_KIND, ServiceName};
use keelson_kube_model::parse_go_duration;
use serde_json::{Map, Value};

use crate::api_access::listeners;
use crate::document::{ConfigProblem, Document, Sourced};
use crate::effective::effective;
use crate::flags::{FieldFlag, truth, twin_of};
use crate::gates;
use crate::keelson_file::{self, KeelsonFile};
use crate::kubelet_file::{self, KubeletFile, absolute, is_kind};
use crate::origins::origins;
use crate::own_processes::last;
use crate::reserved::Capacity;
use crate::rules;

/// The longest run dir: a unix socket's path has at most 107 bytes (unix(7)), and
/// `/resource-manager/resource-manager.` with a process id takes 42.
const MAX_RUN_DIR: usize = 65;
/// User ids of services without a system user start here.
const UID_BASE: u32 = 64_200;
/// `serializeImagePulls: false` without a bound of its own.
const UNBOUNDED_PULLS: u32 = 1000;

/// The command line, as text; absent: not given.
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
    /// What sets fields of the KubeletConfiguration.
    pub fields: Vec<FieldFlag>,
    /// What was given for the flags that nothing acts on yet or that are only checked here, by name without dashes.
    pub others: BTreeMap<&'static str, String>,
}

impl Flags {
    /// Whether one of the other flags is on, by its last use.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.others.get(name).is_some_and(|uses| truth(last(uses)) == Some(true))
    }
}

/// What the configuration depends on besides flags and files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// The name of the machine.
    pub hostname: String,
    /// Effective user of init.
    pub uid: u32,
    /// Effective group of init.
    pub gid: u32,
    /// The folder of init's executable.
    pub exe_dir: String,
    /// The working directory.
    pub cwd: String,
    /// System users `keelson-<service>`.
    pub service_users: BTreeMap<ServiceName, u32>,
    /// The group `keelson`.
    pub operator_group: Option<u32>,
    /// Whether pods' cgroups are of version 1.
    pub cgroup_v1: bool,
    /// Areas of swap that pages of any process may go to, as `/proc/swaps` names them.
    pub swap: Vec<String>,
    /// The CPUs that are online, as the kernel lists them; empty: not known.
    pub online_cpus: String,
    /// Memory of the machine in bytes.
    pub memory_bytes: u64,
    /// Size of the file system below the root dir in bytes.
    pub nodefs_bytes: u64,
}

/// Everything that [`resolve`] depends on.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The command line.
    pub flags: &'a Flags,
    /// `--config`.
    pub kubelet: Option<&'a Document>,
    /// The files of `--config-dir`, in the order in which they are laid over it.
    pub drop_ins: &'a [Document],
    /// `--keelson-config`.
    pub keelson: Option<&'a Document>,
    /// The machine.
    pub host: &'a Host,
}

/// How loud a note is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Worth knowing.
    Info,
    /// Probably not what was meant.
    Warn,
    /// Somebody should see to it.
    Error,
}

/// Something to say about a configuration that is good enough to start with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// How loud.
    pub level: Level,
    /// The sentence.
    pub text: String,
}

/// A resolved configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// What the services read.
    pub config: Config,
    /// What to log.
    pub notes: Vec<Note>,
    /// The whole KubeletConfiguration in force, without secrets.
    pub kubelet_configuration: Map<String, Value>,
    /// Every feature gate.
    pub feature_gates: Vec<FeatureGate>,
}

impl Resolved {
    /// What stands beside the configuration of the services.
    pub fn beside(&self) -> Beside<'_> {
        Beside {
            kubelet_configuration: Some(&self.kubelet_configuration),
            feature_gates: &self.feature_gates,
            waiting: None,
        }
    }
}

/// Merges flags, the KubeletConfiguration, the keelson file and the defaults, in this order of precedence.
///
/// # Errors
/// Everything that is wrong, each with field, value, where it stands and the way out.
pub fn resolve(inputs: Inputs<'_>) -> Result<Resolved, Vec<ConfigProblem>> {
    resolve_with(inputs, None)
}

/// The same with a KubeletConfiguration of the control plane, `assigned`, over the files and below the flags.
pub(crate) fn resolve_with(
    inputs: Inputs<'_>,
    assigned: Option<&Document>,
) -> Result<Resolved, Vec<ConfigProblem>> {
    let Inputs { flags, kubelet, keelson, host, .. } = inputs;
    let with_file = kubelet.or(assigned).is_some();
    let mut problems = Vec::new();
    let mut is_one =
        |document: &Document| is_kind(document, KUBELET_API_VERSION, KUBELET_KIND, &mut problems);
    // A file of another kind has nothing to say; what is wrong with the others is told all the same.
    let kubelet = kubelet.filter(|document| is_one(document));
    let drop_ins: Vec<Document> =
        inputs.drop_ins.iter().filter(|document| is_one(document)).cloned().collect();
    let laid = Inputs { kubelet, drop_ins: &drop_ins, ..inputs }.laid(assigned);
    let kubelet = laid.as_ref();
    let capacity = Capacity {
        memory: host.memory_bytes,
        nodefs: host.nodefs_bytes,
        keeps_thresholds: !flags.is_on("experimental-allocatable-ignore-eviction"),
    };
    let kubelet_file = kubelet.map(|document| kubelet_file::read(document, capacity, &mut problems));
    let keelson_file = keelson.map(|document| keelson_file::read(document, &mut problems));
    let kubelet_file = kubelet_file.unwrap_or_default();
    let (gates, wrong, notes) = gates::judge(&kubelet_file.gates);
    problems.extend(wrong);
    if let Some(document) = kubelet {
        rules::check(document, &gates, &mut problems);
    }
    let mut resolver = Resolver { config: Config::default(), problems, notes, flags, host, with_file };
    resolver.run(kubelet_file, keelson_file.unwrap_or_default());
    name_flags(&mut resolver.problems, keelson);
    if resolver.problems.is_empty() {
        let kubelet_configuration = effective(kubelet, with_file, &resolver.config);
        let origins = origins(kubelet, &kubelet_configuration, &resolver.config);
        resolver.config.provenance.extend(origins);
        let feature_gates = gates.all();
        Ok(Resolved { config: resolver.config, notes: resolver.notes, kubelet_configuration, feature_gates })
    } else {
        Err(resolver.problems)
    }
}

/// Adds to each problem with a field of the KubeletConfiguration the flag that is its twin (node-and-api.md §2.7).
fn name_flags(problems: &mut [ConfigProblem], keelson: Option<&Document>) {
    for problem in problems {
        let is_ours = keelson.is_some_and(|keelson| problem.origin.starts_with(&keelson.file));
        if let Some(twin) = twin_of(&problem.field).filter(|_| !is_ours && !problem.origin.starts_with("--"))
        {
            problem.origin = format!("{}; --{twin}", problem.origin);
        }
    }
}

pub(crate) struct Resolver<'a> {
    pub(crate) config: Config,
    pub(crate) problems: Vec<ConfigProblem>,
    notes: Vec<Note>,
    pub(crate) flags: &'a Flags,
    pub(crate) host: &'a Host,
    pub(crate) with_file: bool,
}

impl Resolver<'_> {
    fn run(&mut self, mut kubelet: KubeletFile, mut keelson: KeelsonFile) {
        self.own_flags();
        self.node();
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
        crate::leftovers::resolve(self, &mut kubelet);
        std::mem::take(&mut kubelet.running_pods).resolve(self);
        self.dns(&mut kubelet);
        std::mem::take(&mut kubelet.api_access).resolve(self, &mut kubelet.not_acted_on);
        listeners(self, &mut kubelet);
        crate::api_handlers::resolve(self, &mut kubelet);
        self.resources(&mut kubelet);
        crate::pressure::resolve(self, &mut kubelet);
        self.telemetry(&mut kubelet, &mut keelson);
        self.set("manageHost", keelson.manage_host.take(), |c, v| c.manage_host = v);
        self.set("api.strictVerbs", keelson.strict_verbs.take(), |c, v| c.api.strict_verbs = v);
        self.set("iptablesUtilChains", kubelet.iptables_util_chains.take(), |c, v| {
            c.iptables_util_chains = v
        });
        self.notes_on(&kubelet);
    }

    /// Takes a value into the configuration and its origin into the provenance.
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

    pub(crate) fn refuse<T: std::fmt::Debug>(&mut self, value: &Sourced<T>, way_out: impl Into<String>) {
        self.problems.push(value.problem(way_out));
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
                self.refuse(own, "this folder gets an owner and a mode of its own; name a folder in it");
            }
        }
        if let Some(run) = run.as_ref().filter(|run| run.value.len() > MAX_RUN_DIR) {
            self.refuse(
                run,
                format!(
                    "it is {} bytes long, and sockets below it allow for {MAX_RUN_DIR}; take a shorter one",
                    run.value.len()
                ),
            );
        }
        if let Some(logs) = logs.as_ref().filter(|logs| !logs.value.is_ascii()) {
            self.refuse(logs, "paths of logs are ASCII only");
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
            self.refuse(value, "this must be an absolute path without '.', '..', '//' and a '/' at its end");
        }
        self.set(path, value.map(|v| v.map(PathBuf::from)), apply);
    }

    fn users(&mut self, keelson: &KeelsonFile) {
        if self.host.uid != 0 {
            self.config.users.operator_gid = self.host.gid;
            self.note(
                Level::Error,
                format!(
                    "the kubelet needs to run as uid 0, it is being run as {}: all services run as this user, none with \
                     privileges of its own",
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
            // A bare path stands for a unix socket, as in the kubelet.
            let socket = endpoint.value.strip_prefix("unix://").unwrap_or(&endpoint.value).to_owned();
            if !is_clean(&socket) {
                self.refuse(
                    &endpoint,
                    "this must be unix:// and the absolute path of a socket, such as unix:///run/containerd/containerd.sock",
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
        self.container_collection();
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
        // A bare path stands for a unix socket here, too.
        let named = |text: String| if text.starts_with('/') { format!("unix://{text}") } else { text };
        let endpoint = endpoint.map(|endpoint| endpoint.map(named));
        let socket = |text: &str| text.strip_prefix("unix://").is_some_and(|path| path.starts_with('/'));
        if let Some(endpoint) = endpoint.as_ref().filter(|endpoint| !socket(&endpoint.value)) {
            self.refuse(endpoint, "this must be unix:// and the absolute path of a socket");
        }
        self.set("runtime.imageEndpoint", endpoint, |c, v| {
            c.runtime.image_endpoint = Some(v).filter(|endpoint| *endpoint != c.runtime.endpoint);
        });
    }

    /// The kubelet's flags for dead containers, which no file has.
    fn container_collection(&mut self) {
        let name = "--minimum-container-ttl-duration";
        let age = flag(name, self.flags.minimum_container_ttl.as_ref());
        if let Some(age) = age {
            match parse_go_duration(&age.value) {
                Some(duration) => {
                    self.set("containerCollection.minimumAgeMs", Some(age.map(|_| duration)), |c, v| {
                        c.container_collection.minimum_age_ms = millis(v);
                    })
                }
                None => self.refuse(&age, "this is no duration; write one such as 1m"),
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
                        format!("clusterDNS {text:?} ({origin}) is no IP address and left out"),
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

    fn notes_on(&mut self, kubelet: &KubeletFile) {
        if !kubelet.not_acted_on.is_empty() {
            let list = kubelet.not_acted_on.join(", ");
            self.note(
                Level::Info,
                format!("these fields of the KubeletConfiguration are not acted on yet: {list}"),
            );
        }
        for text in &kubelet.passed_over {
            self.note(Level::Warn, text);
        }
        match &kubelet.fail_cgroup_v1 {
            Some(fail) if self.host.cgroup_v1 && fail.value => self.refuse(
                fail,
                "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed \
                 in a future release: boot with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false"
                    .to_owned(),
            ),
            // Nobody has said anything.
            None if self.host.cgroup_v1 => self.note(
                Level::Warn,
                "this machine has cgroup v1: a kubelet refuses it unless failCgroupV1 is false, keelson runs on it; boot with \
                 systemd.unified_cgroup_hierarchy=1 for cgroup v2",
            ),
            _ => {}
        }
        if !self.with_file {
            self.note(
                Level::Info,
                "without --config nothing of the machine is reserved and no eviction threshold is set",
            );
        }
    }
}

impl Resolver<'_> {
    /// A kubelet does not run on a machine with swap unless it is told to (node-and-api.md §12).
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
                     machine has swap ({areas}), where secrets and other memory of pods may end on the disk; turn \
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

/// An absolute path in its shortest form.
pub(crate) fn is_clean(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(|rest| {
        !rest.is_empty() && rest.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
    }) && !path.contains('\0')
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
pub(crate) mod tests;
