//! Whether a static pod runs already, under the UID that a kubelet gave it (docs/adr/0022).
//!
//! A kubelet computes the UID of a static pod by a hash that cannot be recomputed. Instead, what the runtime has is compared with what the
//! manifest asks of the runtime. The pod keeps its UID, and nothing restarts, if they are equal. Every value that cannot be compared counts
//! as a difference.

mod running;

use std::collections::{BTreeMap, BTreeSet};

use keelson_kube_model::{Container, ContainerKind, Pod, ResourceList, Volume, VolumeMount};
use serde_json::Value;

use crate::config::{
    AssignedResources, ConfigError, ContainerInputs, ContainerSpec, EnvSources, ImageUser, MachineInputs,
    MountSpec, NamespaceMode, NoObjects, NodeInputs, PodInputs, Propagation, ResolvedImage, RuntimeFeatures,
    SecurityProfile, SecuritySettings, VolumeInputs, VolumePath, container_plan, keys,
};
use crate::container_hash;

pub use running::{RunningConfig, RunningSandboxConfig};
use running::{RunningMount, RunningSecurity};

/// The sources whose pods a kubelet also starts as static pods.
pub const SOURCES: [&str; 2] = ["file", "http"];

/// Annotations of static pods that are not in their manifests.
const LOCAL_ANNOTATIONS: [&str; 4] = [
    "kubernetes.io/config.hash",
    "kubernetes.io/config.mirror",
    "kubernetes.io/config.seen",
    "kubernetes.io/config.source",
];
/// The source, on a sandbox.
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
/// The UID of a static pod, on its sandbox.
const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// The begin of labels that are not in manifests.
const LOCAL_LABELS: &str = "io.kubernetes.";

/// A sandbox as the runtime has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunningSandbox {
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// The configuration that it was created with.
    pub config: RunningSandboxConfig,
}

/// The newest record of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunningContainer {
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// The configuration that it was created with.
    pub config: RunningConfig,
    /// The numeric user of its image, if the image has one.
    pub image_uid: Option<i64>,
    /// The named user of its image, or empty.
    pub image_username: String,
}

/// All that the runtime has of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunningPod {
    /// Its ready sandbox.
    pub sandbox: RunningSandbox,
    /// Addresses of the sandbox, primary first.
    pub ips: Vec<String>,
    /// The newest record of each container, by name.
    pub containers: BTreeMap<String, RunningContainer>,
}

/// The facts about the node that the request for a container depends on.
#[derive(Clone, Copy, Debug)]
pub struct NodeFacts<'a> {
    /// The name of the node.
    pub name: &'a str,
    /// Its addresses.
    pub ips: &'a [String],
    /// What pods may use of it.
    pub allocatable: &'a ResourceList,
    /// The machine.
    pub machine: MachineInputs<'a>,
    /// Security settings.
    pub security: SecuritySettings<'a>,
    /// What the runtime supports.
    pub runtime: RuntimeFeatures<'a>,
}

/// The first difference between a pod, with the UID of the sandbox, and what runs. `None`: all of it is what the manifest asks for.
pub fn difference(pod: &Pod, source: &str, running: &RunningPod, node: &NodeFacts<'_>) -> Option<String> {
    sandbox_difference(pod, source, &running.sandbox).or_else(|| {
        let unknown = running.containers.keys().find(|name| pod.container(name).is_none());
        if let Some(name) = unknown {
            return Some(format!("container {name} is not in the manifest"));
        }
        pod.containers().find_map(|(kind, container)| {
            let name = &container.name;
            let Some(found) = running.containers.get(name) else {
                return Some(format!("container {name} does not run"));
            };
            container_difference(pod, (kind, container), found, running, node)
                .map(|text| format!("{text} of container {name} differs"))
        })
    })
}

fn sandbox_difference(pod: &Pod, source: &str, sandbox: &RunningSandbox) -> Option<String> {
    let annotation = |key: &str| sandbox.annotations.get(key).map(String::as_str);
    if annotation(CONFIG_SOURCE) != Some(source) || annotation(CONFIG_HASH) != Some(&pod.metadata.uid) {
        return Some(format!("the sandbox is not that of a static pod of the source {source}"));
    }
    let labels = sandbox.labels.iter().filter(|(key, _)| !key.starts_with(LOCAL_LABELS));
    if !labels.eq(pod.metadata.labels.iter().filter(|(key, _)| !key.starts_with(LOCAL_LABELS))) {
        return Some("the labels differ".to_owned());
    }
    let own = |all: &BTreeMap<String, String>| {
        let own = all.iter().filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(&key.as_str()));
        own.map(|(key, value)| (key.clone(), value.clone())).collect::<BTreeMap<_, _>>()
    };
    if own(&sandbox.annotations) != own(&pod.metadata.annotations) {
        return Some("the annotations differ".to_owned());
    }
    let sysctls = pod.spec.security_context.as_ref().map(|context| &context.sysctls);
    let sysctls =
        sysctls.into_iter().flatten().map(|sysctl| (sysctl.name.replace('/', "."), sysctl.value.clone()));
    (sandbox.config.linux.sysctls != sysctls.collect()).then(|| "the sysctls differ".to_owned())
}

/// What differs of a container, in words of its spec.
fn container_difference(
    pod: &Pod,
    (kind, container): (ContainerKind, &Container),
    found: &RunningContainer,
    running: &RunningPod,
    node: &NodeFacts<'_>,
) -> Option<&'static str> {
    if kind == ContainerKind::Ephemeral || annotations_differ(container, &found.annotations) {
        return Some("an annotation");
    }
    let Some(paths) = volume_paths(pod, container) else { return Some("a volume that cannot be compared") };
    let Ok(plan) = plan(pod, container, found, running, node, &paths) else {
        return Some("a value that cannot be compared");
    };
    let config = &found.config;
    [
        ("command", plan.command != config.command),
        ("args", plan.args != config.args),
        ("workingDir", plan.working_dir != config.working_dir),
        ("env", !environment_matches(&plan, config)),
        ("volumeMounts", !mounts_match(pod, container, &plan, config)),
        ("volumeDevices", plan.devices.len() != config.devices.len()),
        ("stdin", (plan.stdin, plan.stdin_once) != (config.stdin, config.stdin_once)),
        ("tty", plan.tty != config.tty),
        ("resources", !resources_match(&plan, config)),
        ("securityContext", !security_matches(&plan, &config.linux.security_context)),
    ]
    .into_iter()
    .find_map(|(field, differs)| differs.then_some(field))
}

fn annotations_differ(container: &Container, found: &BTreeMap<String, String>) -> bool {
    let found = |key: &str| found.get(key).map(String::as_str).unwrap_or_default();
    let ports = serde_json::to_value(&container.ports).unwrap_or_default();
    let found_ports: Value = match found(keys::PORTS) {
        "" => Value::Array(Vec::new()),
        text => serde_json::from_str(text).unwrap_or_default(),
    };
    found(keys::CONTAINER_HASH) != container_hash(container)
        || found(keys::TERMINATION_MESSAGE_PATH) != container.termination_message_path
        || found(keys::TERMINATION_MESSAGE_POLICY) != container.termination_message_policy
        || ports != found_ports
}

fn plan(
    pod: &Pod,
    container: &Container,
    found: &RunningContainer,
    running: &RunningPod,
    node: &NodeFacts<'_>,
    paths: &BTreeMap<String, VolumePath>,
) -> Result<ContainerSpec, ConfigError> {
    let inputs = ContainerInputs {
        attempt: 0,
        target_id: None,
        image: ResolvedImage {
            reference: "",
            user: ImageUser { uid: found.image_uid, username: &found.image_username },
        },
        pod: PodInputs { ips: &running.ips, volume_groups: &[], users: None },
        node: NodeInputs { name: node.name, ips: node.ips, allocatable: node.allocatable },
        env: EnvSources { objects: &NoObjects, files: &NoObjects, services: &BTreeMap::new() },
        volumes: VolumeInputs {
            paths,
            subpaths: &BTreeMap::new(),
            images: &BTreeMap::new(),
            runtime_handler: "",
            files: &[],
        },
        machine: node.machine,
        security: node.security,
        runtime: node.runtime,
        assigned: &AssignedResources::default(),
    };
    container_plan(pod, container, &inputs)
}

/// Where the volumes of a container are. `None`: the place of one does not tell what it is.
fn volume_paths(pod: &Pod, container: &Container) -> Option<BTreeMap<String, VolumePath>> {
    let is_part = |mount: &VolumeMount| !(mount.sub_path.is_empty() && mount.sub_path_expr.is_empty());
    if container.volume_mounts.iter().any(is_part) {
        return None;
    }
    let is_used = |volume: &&Volume| container.volume_mounts.iter().any(|mount| mount.name == volume.name);
    let path = |volume: &Volume| Some((volume.name.clone(), volume_path(volume)?));
    pod.spec.volumes.iter().filter(is_used).map(path).collect()
}

fn volume_path(volume: &Volume) -> Option<VolumePath> {
    let kinds = volume.source_kinds();
    let (folder, read_only) = match kinds.as_slice() {
        ["hostPath"] => {
            let host_path = volume.host_path.as_ref()?.path.clone();
            return Some(VolumePath { host_path, ..VolumePath::default() });
        }
        ["emptyDir"] => ("kubernetes.io~empty-dir", false),
        ["downwardAPI"] => ("kubernetes.io~downward-api", true),
        ["projected"] => ("kubernetes.io~projected", true),
        _ => return None,
    };
    let host_path = format!("{folder}/{}", volume.name);
    Some(VolumePath { host_path, read_only, ..VolumePath::default() })
}

fn environment_matches(plan: &ContainerSpec, config: &RunningConfig) -> bool {
    let found: BTreeMap<&str, &str> =
        config.envs.iter().map(|env| (env.key.as_str(), env.value.as_str())).collect();
    let wanted: BTreeMap<&str, &str> =
        plan.envs.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let services = services(&found);
    let is_of_service = |name: &str| {
        services.iter().any(|service| {
            let rest = name.strip_prefix(service);
            rest.is_some_and(|rest| rest.starts_with("_SERVICE_") || rest.starts_with("_PORT"))
        })
    };
    wanted.iter().all(|(key, value)| found.get(key) == Some(value))
        && found.keys().all(|key| wanted.contains_key(key) || is_of_service(key))
}

/// The names of the services that an agent has added variables for, as they begin the variables' names.
fn services<'a>(variables: &BTreeMap<&'a str, &str>) -> Vec<&'a str> {
    let has = |name: String| variables.contains_key(name.as_str());
    let names = variables.keys().filter_map(|name| name.strip_suffix("_SERVICE_HOST"));
    names.filter(|name| has(format!("{name}_SERVICE_PORT")) && has(format!("{name}_PORT"))).collect()
}

/// A mount, as far as it can be compared: path in the container, path on the node, no writes, propagation.
type ComparedMount = (String, String, bool, i32);

fn mounts_match(pod: &Pod, container: &Container, plan: &ContainerSpec, config: &RunningConfig) -> bool {
    let wanted: BTreeSet<ComparedMount> = plan.mounts.iter().map(planned_mount).collect();
    let own_folder = format!("/pods/{}/", pod.metadata.uid);
    let is_file = |mount: &RunningMount| {
        let path = mount.container_path.as_str();
        mount.host_path.contains(&own_folder)
            && (path == "/etc/hosts" || path == container.termination_message_path)
    };
    let found = config.mounts.iter().filter(|mount| !is_file(mount));
    wanted == found.map(|mount| running_mount(mount, &own_folder)).collect()
}

fn planned_mount(mount: &MountSpec) -> ComparedMount {
    let propagation = match mount.propagation {
        Propagation::Private => 0,
        Propagation::HostToContainer => 1,
        Propagation::Bidirectional => 2,
    };
    (mount.container_path.clone(), clean(&mount.host_path), mount.readonly, propagation)
}

fn running_mount(mount: &RunningMount, own_folder: &str) -> ComparedMount {
    let in_volumes =
        mount.host_path.split_once(own_folder).and_then(|(_, rest)| rest.strip_prefix("volumes/"));
    let host_path = in_volumes.unwrap_or(&mount.host_path);
    (mount.container_path.clone(), clean(host_path), mount.readonly, mount.propagation)
}

/// A path without a slash at its end.
fn clean(path: &str) -> String {
    let trimmed = path.trim_end_matches('/');
    if trimmed.is_empty() { path.to_owned() } else { trimmed.to_owned() }
}

fn resources_match(plan: &ContainerSpec, config: &RunningConfig) -> bool {
    let (wanted, found) = (&plan.resources, &config.linux.resources);
    let quota = |quota: i64, period: i64| (quota > 0).then_some((quota, period));
    wanted.cpu_shares == found.cpu_shares
        && wanted.memory_limit_in_bytes == found.memory_limit_in_bytes
        && quota(wanted.cpu_quota, wanted.cpu_period) == quota(found.cpu_quota, found.cpu_period)
}

fn security_matches(plan: &ContainerSpec, found: &RunningSecurity) -> bool {
    let wanted = &plan.security;
    let set = |list: &[String]| list.iter().cloned().collect::<BTreeSet<_>>();
    let namespaces = &wanted.namespaces;
    let modes = [namespaces.network, namespaces.pid, namespaces.ipc].map(mode);
    let seccomp = match &wanted.seccomp {
        SecurityProfile::RuntimeDefault => (0, String::new()),
        SecurityProfile::Unconfined => (1, String::new()),
        SecurityProfile::Localhost(path) => (2, path.clone()),
    };
    let options = &found.namespace_options;
    let profile = found.seccomp.as_ref().map(|profile| (profile.profile_type, profile.localhost_ref.clone()));
    wanted.privileged == found.privileged
        && wanted.run_as_user == found.run_as_user.as_ref().map(|id| id.value)
        && wanted.run_as_group == found.run_as_group.as_ref().map(|id| id.value)
        && wanted.run_as_username == found.run_as_username
        && wanted.readonly_rootfs == found.readonly_rootfs
        && wanted.no_new_privs == found.no_new_privs
        && set(&wanted.capabilities_add) == set(&found.capabilities.add_capabilities)
        && set(&wanted.capabilities_drop) == set(&found.capabilities.drop_capabilities)
        && wanted.supplemental_groups.iter().collect::<BTreeSet<_>>()
            == found.supplemental_groups.iter().collect()
        && modes == [options.network, options.pid, options.ipc]
        && profile.is_none_or(|profile| profile == seccomp)
}

/// CRI's number of a namespace mode.
fn mode(mode: NamespaceMode) -> i32 {
    match mode {
        NamespaceMode::Pod => 0,
        NamespaceMode::Container => 1,
        NamespaceMode::Node => 2,
        NamespaceMode::Target => 3,
    }
}

#[cfg(test)]
mod tests;
