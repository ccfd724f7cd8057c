//! PersistentVolume and PersistentVolumeClaim, as far as a node reads them. Unknown fields are ignored; a null is a missing
//! field.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// Annotations and labels.
pub type Strings = BTreeMap<String, String>;

/// What a node reads of an object's metadata.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    /// Its name.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Empty for an object of the cluster.
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
    /// Its UID.
    #[serde(deserialize_with = "or_default")]
    pub uid: String,
    /// The version of the object in the control plane.
    #[serde(deserialize_with = "or_default")]
    pub resource_version: String,
    /// When its deletion was requested.
    pub deletion_timestamp: Option<String>,
    /// What has to happen before it is removed.
    #[serde(deserialize_with = "or_default")]
    pub finalizers: Vec<String>,
    /// Labels.
    #[serde(deserialize_with = "or_default")]
    pub labels: Strings,
    /// Annotations.
    #[serde(deserialize_with = "or_default")]
    pub annotations: Strings,
    /// The objects that it belongs to.
    #[serde(deserialize_with = "or_default")]
    pub owner_references: Vec<OwnerReference>,
}

/// An object that another one belongs to.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnerReference {
    /// Its kind.
    #[serde(deserialize_with = "or_default")]
    pub kind: String,
    /// Its name.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Its UID.
    #[serde(deserialize_with = "or_default")]
    pub uid: String,
    /// It is the one that manages the object.
    pub controller: Option<bool>,
}

/// A PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PersistentVolume {
    /// Name, UID, annotations and so on.
    pub metadata: Metadata,
    /// What it is.
    pub spec: PersistentVolumeSpec,
}

/// `spec` of a PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PersistentVolumeSpec {
    /// `ReadWriteOnce`, `ReadOnlyMany`, `ReadWriteMany` or `ReadWriteOncePod`.
    #[serde(deserialize_with = "or_default")]
    pub access_modes: Vec<String>,
    /// Quantities by resource; `storage` is its size.
    #[serde(deserialize_with = "or_default")]
    pub capacity: Strings,
    /// The claim that it is bound to.
    pub claim_ref: Option<ObjectReference>,
    /// Options of its mount.
    #[serde(deserialize_with = "or_default")]
    pub mount_options: Vec<String>,
    /// The nodes that can reach it.
    pub node_affinity: Option<VolumeNodeAffinity>,
    /// `Delete`, `Retain` or `Recycle`.
    #[serde(deserialize_with = "or_default")]
    pub persistent_volume_reclaim_policy: String,
    /// Its storage class; empty: none.
    #[serde(deserialize_with = "or_default")]
    pub storage_class_name: String,
    /// `Filesystem` or `Block`.
    pub volume_mode: Option<String>,
    /// Every other field, by wire name. One of them is the source, such as `csi` or `nfs`.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A reference to an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectReference {
    /// Its namespace.
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
    /// Its name.
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    /// Its UID; empty: any.
    #[serde(deserialize_with = "or_default")]
    pub uid: String,
}

/// `spec.nodeAffinity` of a PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct VolumeNodeAffinity {
    /// The node has to match this.
    pub required: Option<NodeSelector>,
}

/// Terms of which one has to match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelector {
    /// The terms.
    #[serde(deserialize_with = "or_default")]
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// Requirements of which each has to hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// Requirements of the node's labels.
    #[serde(deserialize_with = "or_default")]
    pub match_expressions: Vec<NodeSelectorRequirement>,
    /// Requirements of the node's fields; only `metadata.name` exists.
    #[serde(deserialize_with = "or_default")]
    pub match_fields: Vec<NodeSelectorRequirement>,
}

/// A requirement of a label or field.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeSelectorRequirement {
    /// The label or field.
    #[serde(deserialize_with = "or_default")]
    pub key: String,
    /// `In`, `NotIn`, `Exists`, `DoesNotExist`, `Gt` or `Lt`.
    #[serde(deserialize_with = "or_default")]
    pub operator: String,
    /// The values that the operator compares with.
    #[serde(deserialize_with = "or_default")]
    pub values: Vec<String>,
}

/// A PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PersistentVolumeClaim {
    /// Name, UID, annotations and so on.
    pub metadata: Metadata,
    /// What it asks for.
    pub spec: ClaimSpec,
    /// What it has.
    #[serde(deserialize_with = "or_default")]
    pub status: ClaimStatus,
}

/// `spec` of a PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimSpec {
    /// As in [`PersistentVolumeSpec::access_modes`].
    #[serde(deserialize_with = "or_default")]
    pub access_modes: Vec<String>,
    /// What it asks for.
    #[serde(deserialize_with = "or_default")]
    pub resources: ClaimResources,
    /// Its storage class; empty: none; absent: the default one.
    pub storage_class_name: Option<String>,
    /// `Filesystem` or `Block`; absent: `Filesystem`.
    pub volume_mode: Option<String>,
    /// The PersistentVolume that it is bound to.
    #[serde(deserialize_with = "or_default")]
    pub volume_name: String,
}

/// `spec.resources` of a PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ClaimResources {
    /// Quantities by resource; `storage` is the requested size.
    #[serde(deserialize_with = "or_default")]
    pub requests: Strings,
}

/// `status` of a PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimStatus {
    /// `Pending`, `Bound` or `Lost`.
    #[serde(deserialize_with = "or_default")]
    pub phase: String,
    /// Quantities by resource; `storage` is the size that the claim has.
    #[serde(deserialize_with = "or_default")]
    pub capacity: Strings,
    /// The size that an expansion has reserved.
    #[serde(deserialize_with = "or_default")]
    pub allocated_resources: Strings,
    /// How far an expansion has come, by resource.
    #[serde(deserialize_with = "or_default")]
    pub allocated_resource_statuses: Strings,
    /// Conditions, as JSON objects.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<Value>,
}

/// Reads a null as a missing field.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_persistent_volume_keeps_its_source_and_ignores_unknown_fields() {
        let text = json!({
            "metadata": {"name": "pv", "uid": "u", "annotations": null, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": "Filesystem",
                "claimRef": {"namespace": "ns", "name": "claim", "uid": "c"}, "mountOptions": null,
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "zone", "operator": "In", "values": ["a"]}]}]}},
                "nfs": {"server": "s", "path": "/p"},
            },
        });
        let volume: PersistentVolume = serde_json::from_value(text).unwrap();
        assert_eq!(volume.spec.other["nfs"]["server"], "s");
        assert_eq!(volume.spec.claim_ref.unwrap().uid, "c");
        assert!(volume.metadata.annotations.is_empty() && volume.spec.mount_options.is_empty());
        let required = volume.spec.node_affinity.unwrap().required.unwrap();
        assert_eq!(required.node_selector_terms[0].match_expressions[0].values, ["a"]);
    }

    #[test]
    fn a_claim_without_status_is_pending_of_nothing() {
        let text = json!({"metadata": {"name": "c"}, "spec": {"volumeName": null}, "status": null});
        let claim: PersistentVolumeClaim = serde_json::from_value(text).unwrap();
        assert_eq!((claim.status.phase.as_str(), claim.spec.volume_name.as_str()), ("", ""));
        assert_eq!(claim.spec.storage_class_name, None);
    }

    #[test]
    fn a_field_of_a_wrong_type_is_an_error_that_says_so() {
        let text = json!({"metadata": {"name": 7}, "spec": {}});
        let error = serde_json::from_value::<PersistentVolumeClaim>(text).unwrap_err().to_string();
        assert!(error.contains("expected a string"), "{error}");
    }
}
