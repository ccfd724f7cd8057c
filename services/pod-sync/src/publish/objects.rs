//! Names of pods and containers in events and log lines.

use keelson_kube_model::{ContainerKind, Pod};
use keelson_service_kit::ObjectRef;

/// The object of a pod's events.
pub fn pod_object(pod: &Pod) -> ObjectRef {
    ObjectRef::pod(&pod.metadata.namespace, &pod.metadata.name, pod.uid().as_str())
}

/// `spec.containers{name}` of a container, as the events of its start name it.
pub fn container_object(pod: &Pod, kind: ContainerKind, name: &str) -> ObjectRef {
    pod_object(pod).container(kind.spec_field(), name)
}

/// Like [`container_object`], with the kind from the spec. A container that is not in the spec counts as a regular one.
pub fn named_container_object(pod: &Pod, name: &str) -> ObjectRef {
    container_object(pod, pod.container(name).map_or(ContainerKind::Regular, |(kind, _)| kind), name)
}

/// `namespace/name` of a pod, for log lines.
pub fn pod_name(pod: &Pod) -> String {
    format!("{}/{}", pod.metadata.namespace, pod.metadata.name)
}
