//! `metadata` of a pod.

use super::{Findings, names};
use crate::types::ObjectMeta;

/// Most bytes that keys and values of all annotations may have together.
const MAX_ANNOTATION_BYTES: usize = 256 * 1024;

pub(super) fn check_metadata(found: &mut Findings, metadata: &ObjectMeta) {
    if metadata.name.is_empty() {
        found.required("metadata.name", "name or generateName is required");
    } else {
        found.name("metadata.name", &metadata.name, names::dns_subdomain);
    }
    if metadata.namespace.is_empty() {
        found.required("metadata.namespace", "");
    } else {
        found.name("metadata.namespace", &metadata.namespace, names::dns_label);
    }
    for (key, value) in &metadata.labels {
        found.name("metadata.labels", key, names::qualified_name);
        found.name("metadata.labels", value, names::label_value);
    }
    let mut bytes = 0;
    for (key, value) in &metadata.annotations {
        // Annotation keys are compared without regard to case, unlike those of labels.
        found.name("metadata.annotations", &key.to_ascii_lowercase(), names::qualified_name);
        bytes += key.len() + value.len();
    }
    if bytes > MAX_ANNOTATION_BYTES {
        found.push(
            "metadata.annotations",
            format!("Too long: may not be more than {MAX_ANNOTATION_BYTES} bytes"),
        );
    }
}
