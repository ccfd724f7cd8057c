//! Fields of manifests that are left out.

use keelson_pod_config_core::FileContent;

/// Warns once of the fields that were left out of the pods of a manifest; `before` is what the manifest held when it was read
/// last.
pub(crate) fn warn_of_ignored(origin: &str, before: Option<&FileContent>, now: &FileContent) {
    for pod in now.pods.iter().filter(|pod| !pod.ignored.is_empty()) {
        let known = before.into_iter().flat_map(|before| &before.pods);
        if known.into_iter().any(|known| known.uid == pod.uid && known.ignored == pod.ignored) {
            continue;
        }
        tracing::warn!(
            event = "manifest_fields_ignored",
            pod = %pod.full_name(),
            origin,
            fields = pod.ignored.join(", "),
            "the manifest holds fields that only a control plane writes; they are ignored, and the pod runs without them"
        );
    }
}
