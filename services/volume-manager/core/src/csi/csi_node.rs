//! How the CSINode changes when a driver comes or goes, and which topology it may report (volumes.md §11.1, §11.2).
//!
//! Objects are JSON as the API server has it. Fields that are not ours stay as they are.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::paths::DriverName;
use crate::objects::Strings;

/// The CSINode's annotation with the legacy plugins whose volumes CSI drivers serve.
pub const MIGRATED_PLUGINS_ANNOTATION: &str = "storage.alpha.kubernetes.io/migrated-plugins";

/// Why the CSINode cannot be changed, or a driver is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CsiNodeError {
    /// The CSINode is not what the API describes.
    #[error("the CSINode {name} cannot be read: {field} is {wrong}; delete it, and it is created again")]
    Malformed {
        /// The CSINode.
        name: String,
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        wrong: &'static str,
    },
    /// The node has the label with another value.
    #[error(
        "the CSI driver {driver} reports the topology {key}={reported}, but the node has the label {key}={existing}; \
         correct the label or the driver's configuration"
    )]
    TopologyConflict {
        /// The driver.
        driver: DriverName,
        /// The label.
        key: String,
        /// Its value by the driver.
        reported: String,
        /// Its value on the node.
        existing: String,
    },
    /// Another driver reports the label with another value.
    #[error(
        "the CSI driver {driver} reports the topology {key}={reported}, but the CSI driver {other} reports {key}={existing}; \
         correct the configuration of one of them"
    )]
    DriversDisagree {
        /// The driver.
        driver: DriverName,
        /// The label.
        key: String,
        /// Its value by the driver.
        reported: String,
        /// The other driver.
        other: DriverName,
        /// Its value by the other driver.
        existing: String,
    },
}

/// What a CSINode says about a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverEntry {
    /// The driver.
    pub name: DriverName,
    /// The node's id for the driver; not empty.
    pub node_id: String,
    /// The keys of the topology that the driver reports.
    pub topology_keys: BTreeSet<String>,
    /// How many volumes of the driver the node can have.
    pub allocatable: Allocatable,
}

/// How many volumes of a driver a node can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocatable {
    /// At most so many; positive.
    Count(i32),
    /// The driver gives no limit.
    Unlimited,
    /// The driver gives a negative number, which is logged and counts as no limit.
    Negative(i64),
}

impl Allocatable {
    /// From `max_volumes_per_node` of `NodeGetInfo`; a larger number than the API has counts as the largest.
    pub fn from_max_volumes(max_volumes: i64) -> Self {
        match max_volumes {
            0 => Self::Unlimited,
            1.. => Self::Count(i32::try_from(max_volumes).unwrap_or(i32::MAX)),
            _ => Self::Negative(max_volumes),
        }
    }

    const fn count(self) -> Option<i32> {
        match self {
            Self::Count(count) => Some(count),
            Self::Unlimited | Self::Negative(_) => None,
        }
    }
}

impl DriverEntry {
    fn to_json(&self) -> Value {
        let mut entry = json!({
            "name": self.name.as_str(),
            "nodeID": self.node_id,
            "topologyKeys": self.topology_keys,
        });
        if let Some(count) = self.allocatable.count() {
            entry["allocatable"] = json!({"count": count});
        }
        entry
    }

    /// Whether an entry of a CSINode says the same. The order of topology keys does not matter.
    fn equals(&self, entry: &Value) -> bool {
        let keys: Option<BTreeSet<&str>> = match &entry["topologyKeys"] {
            Value::Null => Some(BTreeSet::new()),
            Value::Array(keys) => keys.iter().map(Value::as_str).collect(),
            _ => None,
        };
        let count = &entry["allocatable"]["count"];
        entry["nodeID"].as_str() == Some(&self.node_id)
            && keys.is_some_and(|keys| keys.into_iter().eq(self.topology_keys.iter().map(String::as_str)))
            && *count == self.allocatable.count().map_or(Value::Null, Value::from)
    }
}

/// A CSINode without drivers, which belongs to its Node.
pub fn new_csi_node(node: &str, node_uid: &str) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSINode",
        "metadata": {
            "name": node,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}],
        },
        "spec": {"drivers": []},
    })
}

/// Whether a CSINode belongs to an earlier Node of the same name, so that it has to be deleted and created again.
pub fn is_of_another_node(csi_node: &Value, node_uid: &str) -> bool {
    let owners = csi_node["metadata"]["ownerReferences"].as_array();
    let mut nodes = owners.into_iter().flatten().filter(|owner| owner["kind"] == "Node").peekable();
    nodes.peek().is_some() && !nodes.any(|owner| owner["uid"] == node_uid)
}

/// The CSINode with this entry for the driver; `None` if it has it already. The entries of other drivers stay.
pub fn with_driver(csi_node: &Value, entry: &DriverEntry) -> Result<Option<Value>, CsiNodeError> {
    let mut drivers = drivers(csi_node)?;
    let is_driver = |other: &Value| other["name"] == entry.name.as_str();
    let mut own = (0..drivers.len()).filter(|index| is_driver(&drivers[*index]));
    match (own.next(), own.next()) {
        (Some(index), None) if entry.equals(&drivers[index]) => return Ok(None),
        (Some(index), None) => drivers[index] = entry.to_json(),
        (None, _) => drivers.push(entry.to_json()),
        (Some(_), Some(_)) => {
            drivers.retain(|other| !is_driver(other));
            drivers.push(entry.to_json());
        }
    }
    Ok(Some(with_drivers(csi_node, drivers)))
}

/// The CSINode without the driver; `None` if it does not have it.
pub fn without_driver(csi_node: &Value, driver: &DriverName) -> Result<Option<Value>, CsiNodeError> {
    let before = drivers(csi_node)?;
    let mut after = before.clone();
    after.retain(|entry| entry["name"] != driver.as_str());
    Ok((after.len() < before.len()).then(|| with_drivers(csi_node, after)))
}

fn drivers(csi_node: &Value) -> Result<Vec<Value>, CsiNodeError> {
    let malformed = |field, wrong| malformed(csi_node, field, wrong);
    if !csi_node.is_object() {
        return Err(malformed("the whole", "not an object"));
    }
    if !matches!(csi_node["spec"], Value::Null | Value::Object(_)) {
        return Err(malformed("spec", "not an object"));
    }
    match &csi_node["spec"]["drivers"] {
        Value::Null => Ok(Vec::new()),
        Value::Array(entries) if entries.iter().all(Value::is_object) => Ok(entries.clone()),
        Value::Array(_) => Err(malformed("spec.drivers", "not a list of objects")),
        _ => Err(malformed("spec.drivers", "not a list")),
    }
}

fn malformed(csi_node: &Value, field: &'static str, wrong: &'static str) -> CsiNodeError {
    let name = csi_node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    CsiNodeError::Malformed { name, field, wrong }
}

fn with_drivers(csi_node: &Value, drivers: Vec<Value>) -> Value {
    let mut changed = csi_node.clone();
    changed["spec"]["drivers"] = Value::Array(drivers);
    changed
}

/// The CSINode with the annotation that lists these legacy plugins, sorted; `None` if it has it already. Without plugins
/// the annotation is removed.
pub fn with_migrated_plugins(
    csi_node: &Value,
    plugins: &BTreeSet<&str>,
) -> Result<Option<Value>, CsiNodeError> {
    for (field, value) in [
        ("the whole", csi_node),
        ("metadata", &csi_node["metadata"]),
        ("metadata.annotations", &csi_node["metadata"]["annotations"]),
    ] {
        if !matches!(value, Value::Null | Value::Object(_)) {
            return Err(malformed(csi_node, field, "not an object"));
        }
    }
    let list: Vec<&str> = plugins.iter().copied().collect();
    let wanted = (!list.is_empty()).then(|| list.join(","));
    let existing = csi_node["metadata"]["annotations"][MIGRATED_PLUGINS_ANNOTATION].as_str();
    if existing == wanted.as_deref() {
        return Ok(None);
    }
    let mut changed = csi_node.clone();
    match wanted {
        Some(list) => changed["metadata"]["annotations"][MIGRATED_PLUGINS_ANNOTATION] = Value::from(list),
        None => {
            if let Some(annotations) = changed["metadata"]["annotations"].as_object_mut() {
                annotations.shift_remove(MIGRATED_PLUGINS_ANNOTATION);
            }
        }
    }
    Ok(Some(changed))
}

/// Checks the topology that a driver reports against the labels of the Node. A label with another value is an error: two
/// drivers, or a driver and an operator, disagree on where the node is.
pub fn check_labels(labels: &Strings, topology: &Strings, driver: &DriverName) -> Result<(), CsiNodeError> {
    match first_conflict(labels, topology) {
        None => Ok(()),
        Some((key, reported, existing)) => Err(CsiNodeError::TopologyConflict {
            driver: driver.clone(),
            key: key.to_owned(),
            reported: reported.to_owned(),
            existing: existing.to_owned(),
        }),
    }
}

/// The same for what another driver reports, which may not be a label of the Node yet.
pub fn check_other_driver(
    (other, theirs): (&DriverName, &Strings),
    topology: &Strings,
    driver: &DriverName,
) -> Result<(), CsiNodeError> {
    match first_conflict(theirs, topology).filter(|_| other != driver) {
        None => Ok(()),
        Some((key, reported, existing)) => Err(CsiNodeError::DriversDisagree {
            driver: driver.clone(),
            key: key.to_owned(),
            reported: reported.to_owned(),
            other: other.clone(),
            existing: existing.to_owned(),
        }),
    }
}

/// The first label that exists with another value: its key, the reported and the existing value.
fn first_conflict<'a>(labels: &'a Strings, topology: &'a Strings) -> Option<(&'a str, &'a str, &'a str)> {
    topology.iter().find_map(|(key, reported)| {
        let existing = labels.get(key).filter(|existing| *existing != reported)?;
        Some((key.as_str(), reported.as_str(), existing.as_str()))
    })
}

#[cfg(test)]
mod tests;
