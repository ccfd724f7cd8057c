//! Accessors of a pod.

use std::fmt;

use crate::ids::{PodFullName, PodUid};
use crate::types::{Container, Pod, PodSpec, RestartPolicy};

/// Annotation keys that the kubelet sets on pods from its sources, and those of this agent.
pub mod annotations {
    /// Source a pod came from: `file`, `http`, `api`; in Keelson also `manifest` and `etcd`.
    pub const CONFIG_SOURCE: &str = "kubernetes.io/config.source";
    /// On a mirror pod: the hash of the static pod it mirrors.
    pub const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";
    /// On a static pod: its UID as computed from the manifest.
    pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
    /// On a Node: the serving certificate of its kubelet API, PEM.
    pub const SERVING_CERTIFICATE: &str = "keelson.dev/serving-certificate";
    /// On a deleted claim of a manifest: what still uses it, for people.
    pub const HELD_BY: &str = "keelson.dev/held-by";
    /// When this agent first saw the pod, RFC 3339 with nanoseconds.
    pub const CONFIG_SEEN: &str = "kubernetes.io/config.seen";
}

/// The source that is a Kubernetes API server.
pub const API: &str = "api";
/// The source that is etcd.
pub const ETCD: &str = "etcd";

/// Priority from which on a pod is critical (`system-cluster-critical`).
pub const SYSTEM_CRITICAL_PRIORITY: i32 = 2_000_000_000;
/// Priority class of pods that a node needs; they have the lowest OOM score.
pub const NODE_CRITICAL_CLASS: &str = "system-node-critical";
/// Grace period in seconds when the spec has none (API default).
pub const DEFAULT_TERMINATION_GRACE_SECONDS: i64 = 30;

/// True for the resources that `spec.resources` of a pod may name: CPU, memory and huge pages.
pub fn is_pod_level_resource(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

/// The role of a container in its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Runs to completion before the regular containers start.
    Init,
    /// An init container with restart policy `Always`: runs alongside the regular ones.
    Sidecar,
    /// An entry of `spec.containers`.
    Regular,
    /// Added to a running pod for debugging.
    Ephemeral,
}

impl ContainerKind {
    /// The kind of an entry of `spec.initContainers`.
    pub fn of_init(container: &Container) -> Self {
        if container.is_restartable_init() { Self::Sidecar } else { Self::Init }
    }

    /// The list in the spec that holds containers of this kind, by wire name.
    pub fn spec_field(self) -> &'static str {
        match self {
            Self::Init | Self::Sidecar => "initContainers",
            Self::Regular => "containers",
            Self::Ephemeral => "ephemeralContainers",
        }
    }

    /// True for the kinds that run as long as the pod does.
    pub fn is_long_running(self) -> bool {
        matches!(self, Self::Sidecar | Self::Regular)
    }
}

impl fmt::Display for ContainerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Init => "init",
            Self::Sidecar => "sidecar",
            Self::Regular => "regular",
            Self::Ephemeral => "ephemeral",
        })
    }
}

impl Container {
    /// True for restart policy `Always`, which makes a sidecar of an init container.
    pub fn is_restartable_init(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }
}

impl Pod {
    /// Name and namespace.
    pub fn full_name(&self) -> PodFullName {
        PodFullName::new(&self.metadata.name, &self.metadata.namespace)
    }

    /// `metadata.uid`.
    pub fn uid(&self) -> PodUid {
        PodUid::from(self.metadata.uid.as_str())
    }

    /// The value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.get(key).map(String::as_str)
    }

    /// The source the pod came from (`file`, `http`, `api`), once the merge step has set it.
    pub fn source(&self) -> Option<&str> {
        self.annotation(annotations::CONFIG_SOURCE)
    }

    /// True when the pod came from a manifest, not from a control plane.
    pub fn is_static(&self) -> bool {
        self.source().is_some_and(|source| !matches!(source, API | ETCD))
    }

    /// True when another pod of the same name may still be ending: only the API keeps a name until its pod is gone.
    pub fn starts_in_turn(&self) -> bool {
        self.source().is_some_and(|source| source != API)
    }

    /// True when the pod is the API's picture of a static pod.
    pub fn is_mirror(&self) -> bool {
        self.metadata.annotations.contains_key(annotations::CONFIG_MIRROR)
    }

    /// True for pods that are neither evicted nor preempted: static, mirror, or of system priority.
    pub fn is_critical(&self) -> bool {
        self.is_static()
            || self.is_mirror()
            || self.spec.priority.is_some_and(|priority| priority >= SYSTEM_CRITICAL_PRIORITY)
    }

    /// True for a critical pod of the class `system-node-critical`.
    pub fn is_node_critical(&self) -> bool {
        self.is_critical() && self.spec.priority_class_name == NODE_CRITICAL_CLASS
    }

    /// True once somebody asked for the pod's deletion.
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// True when the pod shares the node's network namespace.
    pub fn is_host_network(&self) -> bool {
        self.spec.host_network.unwrap_or(false)
    }

    /// Grace period in seconds: that of a deletion in progress, else of the spec, else 30.
    pub fn termination_grace(&self) -> i64 {
        self.metadata
            .deletion_grace_period_seconds
            .or(self.spec.termination_grace_period_seconds)
            .unwrap_or(DEFAULT_TERMINATION_GRACE_SECONDS)
    }

    /// Every container: init containers and sidecars in the order of the spec, then regular, then ephemeral ones.
    pub fn containers(&self) -> impl Iterator<Item = (ContainerKind, &Container)> {
        let init = self.spec.init_containers.iter().map(|c| (ContainerKind::of_init(c), c));
        let regular = self.spec.containers.iter().map(|c| (ContainerKind::Regular, c));
        let ephemeral = self.spec.ephemeral_containers.iter().map(|c| (ContainerKind::Ephemeral, c));
        init.chain(regular).chain(ephemeral)
    }

    /// Frees the excess capacity of lists, which was allocated while they were read entry by entry: most have one entry and
    /// capacity for four. For code that keeps many pods.
    pub fn shrink_to_fit(&mut self) {
        let PodSpec { volumes, tolerations, init_containers, containers, ephemeral_containers, .. } =
            &mut self.spec;
        volumes.shrink_to_fit();
        tolerations.shrink_to_fit();
        for list in [init_containers, containers, ephemeral_containers] {
            list.shrink_to_fit();
            for Container { command, args, ports, env_from, env, volume_mounts, .. } in list {
                command.shrink_to_fit();
                args.shrink_to_fit();
                ports.shrink_to_fit();
                env_from.shrink_to_fit();
                env.shrink_to_fit();
                volume_mounts.shrink_to_fit();
            }
        }
        self.status.shrink_to_fit();
    }

    /// The container with this name, of any kind.
    pub fn container(&self, name: &str) -> Option<(ContainerKind, &Container)> {
        self.containers().find(|(_, container)| container.name == name)
    }

    /// The pod's restart policy; unknown text counts as `Always`.
    pub fn restart_policy(&self) -> RestartPolicy {
        RestartPolicy::parse(&self.spec.restart_policy).unwrap_or_default()
    }

    /// The effective restart policy of a container: its own, else the pod's. `restartPolicyRules` are ignored. An init
    /// container without a policy of its own is retried on failure only, even when the pod
    /// says `Always`; an ephemeral container never restarts.
    pub fn restart_policy_of(&self, kind: ContainerKind, container: &Container) -> RestartPolicy {
        let own = container.restart_policy.as_deref().and_then(RestartPolicy::parse);
        match (kind, own, self.restart_policy()) {
            (ContainerKind::Ephemeral, _, _) => RestartPolicy::Never,
            (_, Some(own), _) => own,
            (ContainerKind::Init, None, RestartPolicy::Always) => RestartPolicy::OnFailure,
            (_, None, pod) => pod,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(value: serde_json::Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    fn annotated(key: &str, value: &str) -> Pod {
        pod(json!({"metadata": {"annotations": {key: value}}}))
    }

    #[test]
    fn a_pod_is_static_when_its_source_is_not_the_api() {
        assert!(annotated(annotations::CONFIG_SOURCE, "file").is_static());
        assert!(annotated(annotations::CONFIG_SOURCE, "http").is_static());
        assert!(!annotated(annotations::CONFIG_SOURCE, "api").is_static());
        assert!(!annotated(annotations::CONFIG_SOURCE, "etcd").is_static());
        assert!(!Pod::default().is_static());
        assert!(!annotated(annotations::CONFIG_SOURCE, "etcd").is_critical());
    }

    #[test]
    fn only_an_api_pod_finds_its_name_free() {
        for (source, in_turn) in [("file", true), ("manifest", true), ("etcd", true), ("api", false)] {
            assert_eq!(annotated(annotations::CONFIG_SOURCE, source).starts_in_turn(), in_turn, "{source}");
        }
        assert!(!Pod::default().starts_in_turn());
    }

    #[test]
    fn shrinking_lists_frees_excess_capacity_only() {
        let container =
            json!({"name": "c", "env": [{"name": "A"}], "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let read = pod(json!({"spec": {
            "volumes": [{"name": "v"}], "tolerations": [{"key": "k"}], "containers": [container], "initContainers": [container],
        }}));
        let mut shrunk = read.clone();
        shrunk.spec.volumes.reserve(3);
        shrunk.spec.init_containers[0].env.reserve(3);
        shrunk.shrink_to_fit();
        assert_eq!(shrunk, read);
        let Container { env, volume_mounts, .. } = &shrunk.spec.init_containers[0];
        let rooms = [shrunk.spec.volumes.capacity(), env.capacity(), volume_mounts.capacity()];
        assert_eq!(rooms, [1; 3]);
    }

    #[test]
    fn static_mirror_and_system_pods_are_critical() {
        assert!(annotated(annotations::CONFIG_SOURCE, "file").is_critical());
        assert!(annotated(annotations::CONFIG_MIRROR, "").is_critical());
        assert!(pod(json!({"spec": {"priority": 2_000_000_000}})).is_critical());
        assert!(!pod(json!({"spec": {"priority": 1_999_999_999}})).is_critical());
    }

    #[test]
    fn only_a_critical_pod_of_the_class_is_critical_to_the_node() {
        for (priority, class, critical) in [
            (SYSTEM_CRITICAL_PRIORITY, NODE_CRITICAL_CLASS, true),
            (SYSTEM_CRITICAL_PRIORITY, "system-cluster-critical", false),
            (0, NODE_CRITICAL_CLASS, false),
        ] {
            let pod = pod(json!({"spec": {"priority": priority, "priorityClassName": class}}));
            assert_eq!(pod.is_node_critical(), critical, "{priority} {class}");
        }
    }

    #[test]
    fn pod_identity_and_lifecycle_accessors() {
        let plain = pod(json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u"}}));
        assert_eq!(plain.full_name(), PodFullName::new("web", "shop"));
        assert_eq!(plain.uid(), PodUid::from("u"));
        assert!(!plain.is_deleting() && !plain.is_host_network());
        let other = pod(json!({
            "metadata": {"deletionTimestamp": "2026-01-02T03:04:05Z"},
            "spec": {"hostNetwork": true, "restartPolicy": "OnFailure"},
        }));
        assert!(other.is_deleting() && other.is_host_network());
        assert_eq!(other.restart_policy(), RestartPolicy::OnFailure);
        assert_eq!(plain.restart_policy(), RestartPolicy::Always);
    }

    #[test]
    fn only_regular_containers_and_sidecars_run_as_long_as_the_pod() {
        for (kind, long) in [
            (ContainerKind::Init, false),
            (ContainerKind::Sidecar, true),
            (ContainerKind::Regular, true),
            (ContainerKind::Ephemeral, false),
        ] {
            assert_eq!(kind.is_long_running(), long, "{kind}");
        }
    }

    #[test]
    fn deletion_grace_period_precedes_that_of_the_spec() {
        let asked = json!({"metadata": {"deletionGracePeriodSeconds": 0}, "spec": {"terminationGracePeriodSeconds": 9}});
        assert_eq!(pod(asked).termination_grace(), 0);
        assert_eq!(pod(json!({"spec": {"terminationGracePeriodSeconds": 9}})).termination_grace(), 9);
        assert_eq!(Pod::default().termination_grace(), 30);
    }

    #[test]
    fn containers_come_in_start_order_with_their_kind() {
        let pod = pod(json!({"spec": {
            "initContainers": [{"name": "a"}, {"name": "b", "restartPolicy": "Always"}],
            "containers": [{"name": "c"}],
            "ephemeralContainers": [{"name": "d", "targetContainerName": "c"}],
        }}));
        let kinds: Vec<_> = pod.containers().map(|(kind, c)| format!("{}:{kind}", c.name)).collect();
        assert_eq!(kinds, ["a:init", "b:sidecar", "c:regular", "d:ephemeral"]);
        assert_eq!(pod.container("b").unwrap().0, ContainerKind::Sidecar);
    }

    #[test]
    fn container_restart_policy_precedes_that_of_the_pod() {
        let pod = pod(json!({"spec": {"restartPolicy": "Always"}}));
        let own = Container { restart_policy: Some("Never".into()), ..Container::default() };
        let none = Container::default();
        assert_eq!(pod.restart_policy_of(ContainerKind::Regular, &own), RestartPolicy::Never);
        assert_eq!(pod.restart_policy_of(ContainerKind::Regular, &none), RestartPolicy::Always);
        assert_eq!(pod.restart_policy_of(ContainerKind::Init, &none), RestartPolicy::OnFailure);
        assert_eq!(pod.restart_policy_of(ContainerKind::Ephemeral, &none), RestartPolicy::Never);
    }
}
