//! Labels and annotations that tie runtime objects to pods (runtime-and-resources.md §3.2).

pub(crate) const UID: &str = "io.kubernetes.pod.uid";
pub(crate) const NAME: &str = "io.kubernetes.pod.name";
pub(crate) const NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub(crate) const CONTAINER: &str = "io.kubernetes.container.name";
pub(crate) const HASH: &str = "io.kubernetes.container.hash";
pub(crate) const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
pub(crate) const GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
pub(crate) const MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
pub(crate) const MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
