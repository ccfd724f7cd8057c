//! Whether a pod may run on this node, from its spec and the Node object (§15). resource-manager decides about the resources
//! of the machine.
//!
//! [`before_fit`] has the handlers that the kubelet runs before the fit, [`after_fit`] those that it runs after it; the first
//! denial wins.
//!
//! In a kubelet every denial is final. Here a denial that another pod causes ([`Denial::is_temporary`]) is final only for API
//! pods, whose controllers create others: see [`waits_for_admission`].
//!
//! Parity: as the kubelet, except that these checks come before those for pressure and shutdown, and that of the
//! declared node features only UserNamespacesHostNetworkSupport is checked.

mod affinity;
mod identity;
mod ports;
mod source;
mod sysctls;

use std::path::Path;

use keelson_config::SourceLimits;
use keelson_kube_model::{Container, ContainerKind, Node, Pod, PodPhase, Taint, unsafe_fields};

use crate::runtime_version::major_and_minor;

pub use identity::AgentIds;
pub use ports::{held_ports, placeholder_pod};
pub use sysctls::KernelVersion;

/// What the handlers depend on in addition to the pod.
#[derive(Clone, Copy, Debug)]
pub struct NodeFacts<'a> {
    /// The Node object.
    pub node: &'a Node,
    /// The name of this node.
    pub node_name: &'a str,
    /// `allowedUnsafeSysctls`: names, or prefixes with a trailing `*`.
    pub unsafe_sysctls: &'a [String],
    /// The running kernel.
    pub kernel: KernelVersion,
    /// The runtime supports `supplementalGroupsPolicy: Strict`, which ignores the groups of the image.
    pub strict_groups: bool,
    /// AppArmor can be enforced.
    pub apparmor: bool,
    /// What pods of a source may use of the host.
    pub source_limits: &'a SourceLimits,
    /// The ids that no pod may use.
    pub agent_ids: &'a AgentIds,
    /// The directory of the agent's sockets.
    pub run_dir: &'a Path,
}

/// Why a pod is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// `status.reason` and the reason of the event.
    pub reason: &'static str,
    /// The message of the event.
    pub message: String,
    /// The cause is another pod, so the denial may be lifted later.
    pub is_temporary: bool,
}

impl Denial {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), is_temporary: false }
    }

    fn predicate(reason: &'static str, why: &str) -> Self {
        Self::new(reason, format!("Predicate {reason} failed: {why}"))
    }
}

/// Reasons that `admission_rejections_total` keeps; see [`counted_reason`].
const COUNTED_REASONS: [&str; 23] = [
    "AgentIdentityForbidden",
    "AppArmor",
    "Evicted",
    "InitContainerRestartPolicyForbidden",
    "InvalidNodeInfo",
    "InvalidPodSpec",
    "NodeShutdown",
    "OutOfcpu",
    "OutOfephemeral-storage",
    "OutOfmemory",
    "OutOfpods",
    "PodFeatureUnsupported",
    "PodLevelResourcesNotSupported",
    "PodOSNotSupported",
    "PodOSSelectorNodeLabelDoesNotMatch",
    "SourceForbidden",
    "SupplementalGroupsPolicyNotSupported",
    "SysctlForbidden",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
    "UnexpectedPredicateFailureType",
    "UnknownReason",
    "VolumeAttachmentLimitExceeded",
];

/// The label of all other resources.
const EXTENDED_RESOURCES: &str = "OutOfExtendedResources";
/// The label of all other reasons.
const OTHER_REASONS: &str = "Other";

/// The label of a rejection in `admission_rejections_total` (§15.3). It has few values, also with the resources of device
/// plugins.
pub fn counted_reason(reason: &str) -> &'static str {
    match COUNTED_REASONS.iter().find(|counted| **counted == reason) {
        Some(counted) => counted,
        None if reason.starts_with("OutOf") => EXTENDED_RESOURCES,
        None => OTHER_REASONS,
    }
}

/// Every value that [`counted_reason`] returns.
pub fn counted_reasons() -> impl Iterator<Item = &'static str> {
    COUNTED_REASONS.into_iter().chain([EXTENDED_RESOURCES, OTHER_REASONS])
}

/// Whether a pod with a temporary denial waits instead of failing: no controller would replace a pod that is not from the API.
pub fn waits_for_admission(pod: &Pod) -> bool {
    pod.starts_in_turn()
}

/// The limits of the pod's source, which come first as in the kubelet, then handlers 3 and 6 to 8: sysctls, operating system,
/// groups.
pub fn before_fit(pod: &Pod, facts: &NodeFacts<'_>) -> Option<Denial> {
    source::check(pod, facts.source_limits)
        .or_else(|| identity::check(pod, facts))
        .or_else(|| sysctls::check(pod, facts))
        .or_else(|| operating_system(pod))
        .or_else(|| groups(pod, facts))
        .or_else(|| undeclared_features(pod))
        .or_else(|| unsafe_values(pod))
}

/// Handler 17: features that a pod needs and that this node does not declare.
fn undeclared_features(pod: &Pod) -> Option<Denial> {
    let needs_users_of_host_network = pod.is_host_network() && pod.spec.host_users == Some(false);
    needs_users_of_host_network.then(|| {
        let text = "Pod requires node features that are not available: UserNamespacesHostNetworkSupport";
        Denial::new("PodFeatureUnsupported", text)
    })
}

/// Values that a current API server refuses and an older one may have accepted, such as an unknown kind of seccomp profile,
/// which would otherwise become the weaker choice. A kubelet has no such handler; it fails later or runs the pod.
fn unsafe_values(pod: &Pod) -> Option<Denial> {
    let first = unsafe_fields(pod).into_iter().next()?;
    Some(Denial::new("InvalidPodSpec", first.to_string()))
}

/// Handlers 11 to 15: affinity, node name, host ports, taints, AppArmor. `others` are the pods that have been admitted
/// and have not terminated.
pub fn after_fit<'a>(
    pod: &Pod,
    facts: &NodeFacts<'_>,
    others: impl Iterator<Item = &'a Pod>,
) -> Option<Denial> {
    if !affinity::matches(pod, facts.node) {
        let why = "node(s) didn't match Pod's node affinity/selector";
        return Some(Denial::predicate("NodeAffinity", why));
    }
    if !pod.spec.node_name.is_empty() && pod.spec.node_name != facts.node_name {
        return Some(Denial::predicate("NodeName", "node(s) didn't match the requested node name"));
    }
    if ports::conflict(pod, others) {
        let why = "node(s) didn't have free ports for the requested pod ports";
        return Some(Denial { is_temporary: true, ..Denial::predicate("NodePorts", why) });
    }
    if !pod.is_static() && !tolerates_no_execute(pod, &facts.node.spec.taints) {
        let why = "node(s) had taints that the pod didn't tolerate";
        return Some(Denial::predicate("TaintToleration", why));
    }
    apparmor(pod, facts)
}

fn operating_system(pod: &Pod) -> Option<Denial> {
    if pod.metadata.labels.get("kubernetes.io/os").is_some_and(|os| os != "linux") {
        let text = "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label";
        return Some(Denial::new("PodOSSelectorNodeLabelDoesNotMatch", text));
    }
    let other = pod.spec.os.as_ref().is_some_and(|os| os.name != "linux");
    other.then(|| {
        Denial::new("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS")
    })
}

fn groups(pod: &Pod, facts: &NodeFacts<'_>) -> Option<Denial> {
    let context = pod.spec.security_context.as_ref();
    let strict = context.and_then(|c| c.supplemental_groups_policy.as_deref()) == Some("Strict");
    (strict && !facts.strict_groups).then(|| {
        let text = "SupplementalGroupsPolicy=Strict is not supported in this node";
        Denial::new("SupplementalGroupsPolicyNotSupported", text)
    })
}

fn tolerates_no_execute(pod: &Pod, taints: &[Taint]) -> bool {
    taints.iter().filter(|taint| taint.effect == "NoExecute").all(|taint| {
        pod.spec.tolerations.iter().any(|toleration| {
            let effect = toleration.effect.is_empty() || toleration.effect == taint.effect;
            let key = toleration.key.is_empty() || toleration.key == taint.key;
            let value = match toleration.operator.as_str() {
                "Exists" => true,
                "" | "Equal" => !toleration.key.is_empty() && toleration.value == taint.value,
                _ => false,
            };
            effect && key && value
        })
    })
}

/// Annotation prefix of AppArmor profiles, from before there was a field.
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Only while the pod is Pending: a pod that has started keeps its profile.
fn apparmor(pod: &Pod, facts: &NodeFacts<'_>) -> Option<Denial> {
    let started = !matches!(pod.status.phase(), PodPhase::Pending) && !pod.status.phase.is_empty();
    if facts.apparmor || started {
        return None;
    }
    let needs_apparmor = |kind: &str| kind == "RuntimeDefault" || kind == "Localhost";
    let context = pod.spec.security_context.as_ref();
    let of_pod = context.and_then(|c| c.app_armor_profile.as_ref()).map(|p| p.type_.as_str());
    let required =
        pod.containers().filter(|(kind, _)| *kind != ContainerKind::Ephemeral).any(|(_, container)| {
            let own = container.security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref());
            let annotated = pod.annotation(&format!("{APPARMOR_ANNOTATION}{}", container.name));
            match (own.map(|profile| profile.type_.as_str()).or(of_pod), annotated) {
                (Some(kind), _) => needs_apparmor(kind),
                (None, Some(text)) => text != "unconfined" && !text.is_empty(),
                (None, None) => false,
            }
        });
    required.then(|| Denial::new("AppArmor", "Cannot enforce AppArmor: AppArmor is not enabled on the host"))
}

/// Whether a runtime of this name and version supports `supplementalGroupsPolicy: Strict`. The runtime itself is not asked.
pub fn supports_strict_groups(name: &str, version: &str) -> bool {
    let version = major_and_minor(version);
    match name {
        "containerd" => version >= (2, 0),
        "cri-o" => version >= (1, 31),
        _ => false,
    }
}

/// Containers whose host ports are in use while the pod runs: regular ones and sidecars.
fn long_running(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.containers().filter(|(kind, _)| kind.is_long_running()).map(|(_, container)| container)
}

#[cfg(test)]
mod tests;
