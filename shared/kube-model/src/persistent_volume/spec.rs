//! The fields of PersistentVolumes and PersistentVolumeClaims that their validation and the binder read.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::quantity::Quantity;

/// Labels and the like.
pub type Strings = BTreeMap<String, String>;

/// `spec` of a PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSpec {
    /// Amounts by resource; `storage` is its size.
    pub capacity: BTreeMap<String, Quantity>,
    /// How it can be used.
    pub access_modes: Vec<AccessMode>,
    /// How containers see it.
    pub volume_mode: VolumeMode,
    /// Its storage class; empty: none.
    pub storage_class_name: String,
    /// Its class of attributes; empty: none.
    pub volume_attributes_class_name: String,
    /// What happens when its claim has gone.
    pub persistent_volume_reclaim_policy: ReclaimPolicy,
    /// Options of its mount.
    pub mount_options: Vec<String>,
    /// The claim for which it is reserved.
    pub claim_ref: Option<ClaimReference>,
    /// The nodes that can use it.
    pub node_affinity: Option<VolumeNodeAffinity>,
    /// A disk or directory of one node.
    pub local: Option<LocalSource>,
    /// A path of one node.
    pub host_path: Option<HostPathSource>,
    /// A volume of a CSI driver.
    pub csi: Option<CsiSource>,
}

/// `spec` of a PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimSpec {
    /// How it is to be used.
    pub access_modes: Vec<AccessMode>,
    /// How containers are to see it.
    pub volume_mode: VolumeMode,
    /// Its storage class; empty or absent: none.
    pub storage_class_name: String,
    /// The requested class of attributes; empty: none.
    pub volume_attributes_class_name: String,
    /// What its volume is to be filled with.
    pub data_source: Option<Value>,
    /// As `data_source`, of any kind.
    pub data_source_ref: Option<Value>,
    /// The labels of the PersistentVolume.
    pub selector: Option<LabelSelector>,
    /// The PersistentVolume that it asks for; empty: any.
    pub volume_name: String,
    /// What it asks for.
    pub resources: ClaimResources,
}

/// `spec.resources` of a PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ClaimResources {
    /// Amounts by resource; `storage` is the requested size.
    pub requests: BTreeMap<String, Quantity>,
    /// The greatest amounts by resource.
    pub limits: BTreeMap<String, Quantity>,
}

/// One of the `accessModes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum AccessMode {
    /// Read by the pods of any node.
    ReadOnlyMany,
    /// Read and written by the pods of any node.
    ReadWriteMany,
    /// Read and written by the pods of one node.
    ReadWriteOnce,
    /// Read and written by one pod.
    ReadWriteOncePod,
}

/// `volumeMode`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum VolumeMode {
    /// A mounted filesystem.
    #[default]
    Filesystem,
    /// A block device.
    Block,
}

/// `persistentVolumeReclaimPolicy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum ReclaimPolicy {
    /// The data stays.
    #[default]
    Retain,
    /// The control plane deletes the volume.
    Delete,
    /// The control plane deletes the data.
    Recycle,
}

impl fmt::Display for AccessMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl fmt::Display for VolumeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// `spec.claimRef` of a PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimReference {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim; empty: any.
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
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// Requirements that all have to hold. A term without requirements matches no node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// Requirements of the node's labels.
    pub match_expressions: Vec<Requirement>,
    /// Requirements of the node's fields; only `metadata.name` exists.
    pub match_fields: Vec<Requirement>,
}

/// `spec.selector` of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    /// Labels with exactly these values.
    pub match_labels: Strings,
    /// Requirements of labels.
    pub match_expressions: Vec<Requirement>,
}

/// A requirement of a label or field.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Requirement {
    /// The label or field.
    #[serde(default)]
    pub key: String,
    /// How it is compared.
    pub operator: Operator,
    /// What it is compared with.
    #[serde(default)]
    pub values: Vec<String>,
}

/// The operator of a [`Requirement`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Operator {
    /// The value is among the values.
    In,
    /// There is no value, or it is not among the values.
    NotIn,
    /// There is a value.
    Exists,
    /// There is no value.
    DoesNotExist,
    /// The value is a greater number.
    Gt,
    /// The value is a smaller number.
    Lt,
}

/// `spec.local`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct LocalSource {
    /// A directory or block device of the node.
    pub path: String,
}

/// `spec.hostPath`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HostPathSource {
    /// A path of the node.
    pub path: String,
    /// What has to be there; empty: anything.
    #[serde(rename = "type")]
    pub kind: String,
}

/// `spec.csi`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CsiSource {
    /// Name of the driver.
    pub driver: String,
    /// The driver's name of the volume.
    pub volume_handle: String,
}

impl fmt::Display for ClaimReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Requirement {
    /// Whether the requirement holds for a label or field with this value, `None` if there is none.
    pub fn holds(&self, value: Option<&str>) -> bool {
        let is_listed = || value.is_some_and(|value| self.values.iter().any(|listed| listed == value));
        let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
        let numbers = || number(value).zip(number(self.values.first().map(String::as_str)));
        match self.operator {
            Operator::In => is_listed(),
            Operator::NotIn => !is_listed(),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::Gt => numbers().is_some_and(|(value, bound)| value > bound),
            Operator::Lt => numbers().is_some_and(|(value, bound)| value < bound),
        }
    }
}

impl LabelSelector {
    /// Whether the selector selects an object with these labels.
    pub fn matches(&self, labels: &Strings) -> bool {
        let value = |key: &str| labels.get(key).map(String::as_str);
        self.match_labels.iter().all(|(key, expected)| value(key) == Some(expected))
            && self.match_expressions.iter().all(|requirement| requirement.holds(value(&requirement.key)))
    }
}

impl NodeSelector {
    /// Whether the selector selects the node of this name with these labels.
    pub fn matches(&self, node: &str, labels: &Strings) -> bool {
        let matches = |term: &NodeSelectorTerm| {
            let label = |r: &Requirement| r.holds(labels.get(&r.key).map(String::as_str));
            let has_any = !term.match_expressions.is_empty() || !term.match_fields.is_empty();
            has_any
                && term.match_expressions.iter().all(label)
                && term.match_fields.iter().all(|r| r.holds(Some(node)))
        };
        self.node_selector_terms.iter().any(matches)
    }
}

/// Decodes a `spec` without nulls.
///
/// # Errors
/// The path of the field within `spec` and what is wrong with it.
pub fn decode<T: for<'de> Deserialize<'de>>(spec: &Value) -> Result<T, (String, String)> {
    serde_path_to_error::deserialize(spec).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { "spec".to_owned() } else { format!("spec.{path}") };
        (field, decode_message(&error.inner().to_string()))
    })
}

/// serde's message in the API server's wording.
fn decode_message(message: &str) -> String {
    let unknown = message.strip_prefix("unknown variant `").and_then(|rest| rest.split_once("`, expected "));
    match unknown {
        Some((value, known)) => {
            let known =
                known.strip_prefix("one of ").unwrap_or(known).replace('`', "\"").replace(" or ", ", ");
            format!("Unsupported value: {value:?}: supported values: {known}")
        }
        None => format!("Invalid value: {message}"),
    }
}

/// Removes fields that are null, which are absent ones to the API.
pub fn remove_null_fields(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(remove_null_fields);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_null_fields),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Writes the amounts at `pointer` as the API returns them. The caller has checked them.
pub fn write_canonical_amounts(spec: &mut Value, pointer: &str) {
    let amounts = spec.pointer_mut(pointer).and_then(Value::as_object_mut);
    for amount in amounts.into_iter().flat_map(Map::values_mut) {
        if let Ok(quantity) = serde_json::from_value::<Quantity>(amount.clone()) {
            *amount = Value::String(quantity.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn requirement(operator: &str, values: &[&str]) -> Requirement {
        serde_json::from_value(json!({"key": "k", "operator": operator, "values": values})).unwrap()
    }

    #[test]
    fn unknown_values_are_refused_with_those_that_are_supported() {
        for (spec, expected) in [
            (
                json!({"volumeMode": "Tape"}),
                ("spec.volumeMode", "\"Tape\": supported values: \"Filesystem\", \"Block\""),
            ),
            (
                json!({"accessModes": ["often"]}),
                (
                    "spec.accessModes[0]",
                    "\"often\": supported values: \"ReadOnlyMany\", \"ReadWriteMany\", \"ReadWriteOnce\", \"ReadWriteOncePod\"",
                ),
            ),
        ] {
            let (field, message) = decode::<VolumeSpec>(&spec).unwrap_err();
            assert_eq!((field.as_str(), message), (expected.0, format!("Unsupported value: {}", expected.1)));
        }
        let (_, message) = decode::<VolumeSpec>(&json!({"mountOptions": "ro"})).unwrap_err();
        assert!(message.starts_with("Invalid value: invalid type"), "{message}");
    }

    #[test]
    fn requirements_hold_as_in_the_api() {
        for (operator, values, value, holds) in [
            ("In", &["a", "b"][..], Some("b"), true),
            ("In", &["a"], Some("b"), false),
            ("In", &["a"], None, false),
            ("NotIn", &["a"], Some("b"), true),
            ("NotIn", &["a"], Some("a"), false),
            ("NotIn", &["a"], None, true),
            ("Exists", &[], Some(""), true),
            ("Exists", &[], None, false),
            ("DoesNotExist", &[], None, true),
            ("DoesNotExist", &[], Some("a"), false),
            ("Gt", &["4"], Some("5"), true),
            ("Gt", &["5"], Some("5"), false),
            ("Gt", &["5"], Some("x"), false),
            ("Lt", &["5"], Some("4"), true),
            ("Lt", &["5"], None, false),
        ] {
            assert_eq!(requirement(operator, values).holds(value), holds, "{operator} {values:?} {value:?}");
        }
    }

    #[test]
    fn a_node_selector_term_needs_requirements_and_terms_are_alternatives() {
        let selector = |terms: Value| -> NodeSelector {
            serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap()
        };
        let labels = Strings::from([("disk".to_owned(), "ssd".to_owned())]);
        let by_label = json!({"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]});
        let by_name = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]});
        assert!(selector(json!([by_name, by_label])).matches("n1", &labels));
        assert!(!selector(json!([by_name])).matches("n1", &labels));
        assert!(selector(json!([by_name])).matches("n2", &labels));
        assert!(!selector(json!([{}])).matches("n1", &labels));
        assert!(!selector(json!([])).matches("n1", &labels));
    }
}
