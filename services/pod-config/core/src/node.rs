//! The Node object until a control plane has one.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// The Node of a standalone agent. Its name is also its UID.
///
/// `arch` is Rust's name of the architecture (`x86_64`); it is translated to Kubernetes' (`amd64`).
pub fn standalone_node(name: &str, labels: &BTreeMap<String, String>, arch: &str) -> Value {
    let arch = match arch {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    };
    let mut all = BTreeMap::from([("kubernetes.io/hostname".to_owned(), name.to_owned())]);
    // The deprecated labels, too: pods still select by them.
    for prefix in ["kubernetes.io", "beta.kubernetes.io"] {
        all.insert(format!("{prefix}/os"), "linux".to_owned());
        all.insert(format!("{prefix}/arch"), arch.to_owned());
    }
    all.extend(labels.iter().map(|(key, value)| (key.clone(), value.clone())));
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": name, "labels": all},
        "spec": {},
        "status": {},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_has_its_own_labels_and_the_configured_ones() {
        let labels = BTreeMap::from([("disk".to_owned(), "ssd".to_owned())]);
        let node = standalone_node("edge-1", &labels, "aarch64");
        assert_eq!(node["metadata"]["uid"], "edge-1");
        assert_eq!(
            node["metadata"]["labels"],
            json!({
                "beta.kubernetes.io/arch": "arm64",
                "beta.kubernetes.io/os": "linux",
                "disk": "ssd",
                "kubernetes.io/arch": "arm64",
                "kubernetes.io/hostname": "edge-1",
                "kubernetes.io/os": "linux",
            })
        );
    }
}
