//! The request for a sandbox (§2.1 to §2.5).

use std::collections::{BTreeMap, BTreeSet};

use keelson_kube_model::{ContainerPort, Pod};

use super::{
    ConfigError, DnsInputs, MachineInputs, PortMapping, Protocol, SandboxSpec, dns_for, host_names, keys,
    resources, security,
};

/// Uid and gid 0 of the pod are this id on the node, and so on for `length` ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserNamespace {
    /// First id on the node.
    pub host_id: u32,
    /// How many ids.
    pub length: u32,
}

/// What a sandbox depends on in addition to its pod.
#[derive(Clone, Copy, Debug, Default)]
pub struct SandboxInputs<'a> {
    /// CRI `metadata.attempt`.
    pub attempt: u32,
    /// cgroup of the pod in path form.
    pub cgroup_parent: &'a str,
    /// `podLogsDir`.
    pub pod_logs_dir: &'a str,
    /// DNS of the node and the cluster.
    pub dns: DnsInputs<'a>,
    /// Handler of the pod's runtime class; empty for the default.
    pub runtime_handler: &'a str,
    /// Machine and configuration.
    pub machine: MachineInputs<'a>,
    /// The pod has exclusive CPUs.
    pub exclusive_cpus: bool,
    /// Groups of the pod's volumes.
    pub volume_groups: &'a [i64],
    /// Id mapping of the pod; `None` if it has none or the runtime does not support it.
    pub users: Option<UserNamespace>,
}

/// The user namespace of a pod; an error if it requests one and there is none.
pub(super) fn users_of(
    pod: &Pod,
    given: Option<UserNamespace>,
) -> Result<Option<UserNamespace>, ConfigError> {
    if pod.spec.host_users != Some(false) {
        return Ok(None);
    }
    given.map(Some).ok_or(ConfigError::UserNamespaces)
}

/// `<podLogsDir>/<namespace>_<name>_<uid>`.
pub(super) fn log_directory(pod: &Pod, pod_logs_dir: &str) -> String {
    let meta = &pod.metadata;
    format!("{}/{}_{}_{}", pod_logs_dir.trim_end_matches('/'), meta.namespace, meta.name, meta.uid)
}

/// The labels that identify the pod on the runtime's records.
pub(super) fn identity(pod: &Pod) -> [(String, String); 3] {
    let meta = &pod.metadata;
    [
        (keys::POD_NAME.to_owned(), meta.name.clone()),
        (keys::POD_NAMESPACE.to_owned(), meta.namespace.clone()),
        (keys::POD_UID.to_owned(), meta.uid.clone()),
    ]
}

/// What a person can do about an error of the runtime that does not say so itself.
pub fn remedy(answer: &str) -> Option<&'static str> {
    // The error of runc with the systemd driver if the cgroup is not a slice.
    answer.contains("expected cgroupsPath to be of format").then_some(
        "the container runtime has the systemd cgroup driver and this node cgroupfs: set cgroupDriver to systemd here, or \
         SystemdCgroup to false there",
    )
}

/// Builds the request.
pub fn sandbox_plan(pod: &Pod, inputs: &SandboxInputs<'_>) -> Result<SandboxSpec, ConfigError> {
    security::refuse_unsafe(pod)?;
    let users = users_of(pod, inputs.users)?;
    let names = host_names(pod, inputs.dns.cluster_domain)?;
    let (dns, warnings) = dns_for(pod, &inputs.dns);
    let mut labels = pod.metadata.labels.clone();
    labels.extend(identity(pod));
    Ok(SandboxSpec {
        name: pod.metadata.name.clone(),
        namespace: pod.metadata.namespace.clone(),
        uid: pod.metadata.uid.clone(),
        attempt: inputs.attempt,
        hostname: if pod.is_host_network() { String::new() } else { names.kernel_name },
        log_directory: log_directory(pod, inputs.pod_logs_dir),
        dns,
        port_mappings: port_mappings(pod),
        labels,
        annotations: pod.metadata.annotations.clone(),
        cgroup_parent: inputs.cgroup_parent.to_owned(),
        sysctls: sysctls(pod),
        security: security::of_sandbox(pod, inputs.volume_groups, users),
        resources: resources::of_sandbox(pod, inputs.exclusive_cpus, &inputs.machine),
        overhead: resources::of_overhead(pod, &inputs.machine),
        runtime_handler: inputs.runtime_handler.to_owned(),
        warnings,
    })
}

fn sysctls(pod: &Pod) -> BTreeMap<String, String> {
    let context = pod.spec.security_context.iter();
    let list = context.flat_map(|context| &context.sysctls);
    list.map(|sysctl| (sysctl.name.replace('/', "."), sysctl.value.clone())).collect()
}

/// Ports of the regular containers, without duplicates.
fn port_mappings(pod: &Pod) -> Vec<PortMapping> {
    let mut seen = BTreeSet::new();
    let ports = pod.spec.containers.iter().flat_map(|container| &container.ports);
    ports.filter(|port| seen.insert(port_key(port))).map(port_mapping).collect()
}

fn port_key(port: &ContainerPort) -> String {
    if !port.name.is_empty() {
        return format!("name:{}", port.name);
    }
    let family = if port.host_ip.contains(':') { "v6" } else { "v4" };
    format!(
        "{family}-{:?}-{}-{}-{}",
        protocol(port),
        port.host_ip,
        port.container_port,
        port.host_port.unwrap_or(0)
    )
}

fn protocol(port: &ContainerPort) -> Protocol {
    match port.protocol.as_str() {
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        _ => Protocol::Tcp,
    }
}

fn port_mapping(port: &ContainerPort) -> PortMapping {
    PortMapping {
        protocol: protocol(port),
        container_port: port.container_port,
        host_port: port.host_port.unwrap_or(0),
        host_ip: port.host_ip.clone(),
    }
}
