//! Labels and annotations that tie runtime objects to pods (runtime-and-resources.md §3.2).

use std::collections::HashMap;

/// Label: the pod's UID.
pub const UID: &str = "io.kubernetes.pod.uid";
/// Label: the pod's name.
pub const NAME: &str = "io.kubernetes.pod.name";
/// Label: the pod's namespace.
pub const NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label: the container's name in the spec.
pub const CONTAINER: &str = "io.kubernetes.container.name";
/// Annotation: the hash of the container's spec.
pub const HASH: &str = "io.kubernetes.container.hash";
/// Annotation: how often the container was restarted.
pub const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
/// Annotation: the pod's termination grace period in seconds.
pub const GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
/// Annotation: where the termination file is in the container.
pub const MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
/// Annotation: the `terminationMessagePolicy`.
pub const MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";

/// The labels that select a pod's objects in the runtime; empty values are ignored.
pub fn selector(uid: &str, namespace: &str, name: &str) -> HashMap<String, String> {
    let pairs = [(UID, uid), (NAMESPACE, namespace), (NAME, name)];
    let given = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    given.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}
