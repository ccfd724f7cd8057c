//! What the Node shows of the CSI drivers of this node: their node IDs in an annotation, and their topology as labels
//! (volumes.md §11.1).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

/// The annotation with the node IDs of all drivers: a JSON object, driver → node ID.
pub const NODE_ID_ANNOTATION: &str = "csi.volume.kubernetes.io/nodeid";

/// The drivers of this node. Drivers that are in neither set keep what the Node has of them: after a restart of volume-manager
/// they register one after another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsiDrivers {
    /// The registered ones, by name.
    pub registered: BTreeMap<String, CsiDriver>,
    /// The names of those that were unregistered.
    pub unregistered: BTreeSet<String>,
}

/// What a driver says about this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsiDriver {
    /// The node's ID for the driver.
    pub node_id: String,
    /// Where the node is: labels.
    pub topology: BTreeMap<String, String>,
}

/// Why a driver is not shown by the Node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CsiDriverError {
    /// The annotation is not a JSON object of strings.
    #[error(
        "the CSI driver {driver} is not shown by the Node: its annotation {NODE_ID_ANNOTATION} is not a JSON object of \
         strings: {text:?}; remove the annotation, and it is written again"
    )]
    Annotation {
        /// The driver.
        driver: String,
        /// The annotation.
        text: String,
    },
    /// The Node has a label with another value.
    #[error(
        "the CSI driver {driver} is not shown by the Node: it reports the topology {key}={reported}, but the Node has the \
         label {key}={existing}; correct the label or the driver's configuration"
    )]
    TopologyConflict {
        /// The driver.
        driver: String,
        /// The label.
        key: String,
        /// Its value by the driver.
        reported: String,
        /// Its value at the Node.
        existing: String,
    },
}

/// One driver that came or went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverChange<'a> {
    name: &'a str,
    /// `None`: it was unregistered.
    driver: Option<&'a CsiDriver>,
}

impl CsiDrivers {
    /// Each driver on its own, so that one which the Node cannot show keeps no other from it. Those that went come first.
    pub fn changes(&self) -> impl Iterator<Item = DriverChange<'_>> {
        let gone = self.unregistered.iter().map(|name| DriverChange { name, driver: None });
        gone.chain(self.registered.iter().map(|(name, driver)| DriverChange { name, driver: Some(driver) }))
    }

    /// Whether the server's Node lacks something that can be written.
    pub fn differ_from(&self, live: &Value) -> bool {
        self.changes().any(|change| matches!(change.patch(live), Ok(Some(_))))
    }
}

impl DriverChange<'_> {
    /// The driver's name.
    pub fn name(&self) -> &str {
        self.name
    }

    /// The patch of the server's Node; `None` if it shows the driver already, or no longer. The labels of a driver stay when it
    /// goes.
    ///
    /// # Errors
    /// The Node cannot show the driver. It is left as it is then, as a kubelet leaves it.
    pub fn patch(&self, live: &Value) -> Result<Option<Value>, CsiDriverError> {
        let existing = live["metadata"]["annotations"][NODE_ID_ANNOTATION].as_str();
        let mut ids = self.node_ids(existing)?;
        let mut metadata = Map::new();
        let is_changed = match self.driver {
            Some(driver) => {
                let labels = self.missing_labels(&live["metadata"]["labels"], &driver.topology)?;
                if !labels.is_empty() {
                    metadata.insert("labels".to_owned(), json!(labels));
                }
                ids.insert(self.name.to_owned(), driver.node_id.clone()).as_ref() != Some(&driver.node_id)
            }
            None => ids.remove(self.name).is_some() || (ids.is_empty() && existing.is_some()),
        };
        if is_changed {
            let value = if ids.is_empty() { Value::Null } else { json!(ids).to_string().into() };
            metadata.insert("annotations".to_owned(), json!({NODE_ID_ANNOTATION: value}));
        }
        Ok((!metadata.is_empty()).then(|| json!({"metadata": metadata})))
    }

    /// Node IDs by driver.
    fn node_ids(&self, annotation: Option<&str>) -> Result<BTreeMap<String, String>, CsiDriverError> {
        match annotation {
            None | Some("") => Ok(BTreeMap::new()),
            Some(text) => serde_json::from_str(text).map_err(|_| CsiDriverError::Annotation {
                driver: self.name.to_owned(),
                text: text.to_owned(),
            }),
        }
    }

    /// The labels that the Node lacks. One with another value is an error: two drivers, or a driver and an operator, disagree on
    /// where the node is.
    fn missing_labels<'t>(
        &self,
        labels: &Value,
        topology: &'t BTreeMap<String, String>,
    ) -> Result<BTreeMap<&'t str, &'t str>, CsiDriverError> {
        let mut missing = BTreeMap::new();
        for (key, reported) in topology {
            match labels[key].as_str() {
                None => drop(missing.insert(key.as_str(), reported.as_str())),
                Some(existing) if existing == reported => {}
                Some(existing) => {
                    return Err(CsiDriverError::TopologyConflict {
                        driver: self.name.to_owned(),
                        key: key.clone(),
                        reported: reported.clone(),
                        existing: existing.to_owned(),
                    });
                }
            }
        }
        Ok(missing)
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    fn strings(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn driver(node_id: &str, topology: &[(&str, &str)]) -> CsiDriver {
        CsiDriver { node_id: node_id.to_owned(), topology: strings(topology) }
    }

    fn node(annotation: Option<&str>, labels: &[(&str, &str)]) -> Value {
        let mut node = json!({"metadata": {"name": "n1", "labels": strings(labels)}});
        if let Some(text) = annotation {
            node["metadata"]["annotations"] = json!({"other": "x", NODE_ID_ANNOTATION: text});
        }
        node
    }

    /// The value of the annotation in the patch when the driver `d` comes with the ID `id`, or goes.
    fn annotation(comes: bool, existing: Option<&str>) -> Option<Value> {
        let id = driver("id", &[]);
        let change = DriverChange { name: "d", driver: comes.then_some(&id) };
        let patch = change.patch(&node(existing, &[])).unwrap()?;
        Some(patch["metadata"]["annotations"][NODE_ID_ANNOTATION].clone())
    }

    #[test]
    fn node_ids_are_merged_into_the_annotation_and_the_last_removal_drops_it() {
        for (comes, existing, expected) in [
            (true, None, Some(json!("{\"d\":\"id\"}"))),
            (true, Some(""), Some(json!("{\"d\":\"id\"}"))),
            (true, Some("{}"), Some(json!("{\"d\":\"id\"}"))),
            (true, Some("{\"z\":\"1\"}"), Some(json!("{\"d\":\"id\",\"z\":\"1\"}"))),
            (true, Some("{\"d\":\"old\"}"), Some(json!("{\"d\":\"id\"}"))),
            (true, Some(" {\"d\": \"id\"} "), None),
            (false, Some("{\"d\":\"id\"}"), Some(Value::Null)),
            (false, Some("{\"d\":\"id\",\"z\":\"1\"}"), Some(json!("{\"z\":\"1\"}"))),
            (false, Some("{\"z\":\"1\"}"), None),
            (false, Some("{}"), Some(Value::Null)),
            (false, Some(""), Some(Value::Null)),
            (false, None, None),
        ] {
            assert_eq!(annotation(comes, existing), expected, "{comes} {existing:?}");
        }
    }

    #[test]
    fn an_annotation_that_is_no_json_object_of_strings_is_refused() {
        let id = driver("id", &[("rack", "7")]);
        for text in ["id", "[]", "null", "{\"d\":1}", "{\"d\":\"id\"", "\"d\""] {
            for driver in [Some(&id), None] {
                let error = DriverChange { name: "d", driver }.patch(&node(Some(text), &[])).unwrap_err();
                let expected = CsiDriverError::Annotation { driver: "d".into(), text: text.into() };
                assert_eq!(error, expected);
                assert!(error.to_string().contains("remove the annotation"), "{error}");
            }
        }
    }

    #[test]
    fn topology_labels_are_added_and_a_different_value_is_a_conflict() {
        let live = node(Some("{\"d\":\"id\"}"), &[("zone", "a"), ("arch", "arm64")]);
        let patch = |topology: &[(&str, &str)]| {
            let driver = driver("id", topology);
            DriverChange { name: "d", driver: Some(&driver) }.patch(&live)
        };
        assert_eq!(patch(&[]), Ok(None));
        assert_eq!(patch(&[("zone", "a")]), Ok(None));
        for (key, value) in [("rack", "7"), ("rack", "")] {
            let expected = json!({"metadata": {"labels": {(key): value}}});
            assert_eq!(patch(&[("zone", "a"), (key, value)]), Ok(Some(expected)));
        }
        for other in ["", "A", "a "] {
            let result = patch(&[("zone", other)]);
            assert!(matches!(result, Err(CsiDriverError::TopologyConflict { .. })), "{other:?}: {result:?}");
        }
        let text = patch(&[("rack", "7"), ("zone", "b")]).unwrap_err().to_string();
        assert!(text.contains("zone=b") && text.contains("label zone=a; correct the label"), "{text}");
    }

    #[test]
    fn drivers_that_are_not_named_stay_and_one_in_conflict_keeps_no_other_back() {
        let drivers = CsiDrivers {
            registered: [
                ("bad".to_owned(), driver("b", &[("zone", "z")])),
                ("good".to_owned(), driver("g", &[])),
            ]
            .into(),
            unregistered: ["gone".to_owned()].into(),
        };
        let live = node(Some("{\"gone\":\"1\",\"other\":\"2\"}"), &[("zone", "a")]);
        let results: Vec<_> =
            drivers.changes().map(|change| (change.name().to_owned(), change.patch(&live).is_ok())).collect();
        assert_eq!(results, [("gone".into(), true), ("bad".into(), false), ("good".into(), true)]);
        assert!(drivers.differ_from(&live));
        let done = node(Some("{\"good\":\"g\",\"other\":\"2\"}"), &[("zone", "a")]);
        assert!(!drivers.differ_from(&done), "what cannot be written is no difference");
        let corrected = node(Some("{\"good\":\"g\"}"), &[("zone", "z")]);
        assert!(drivers.differ_from(&corrected));
    }

    /// A Node after a strategic merge of the metadata.
    fn apply(live: &mut Value, patch: &Value) {
        for field in ["labels", "annotations"] {
            for (key, value) in patch["metadata"][field].as_object().into_iter().flatten() {
                if value.is_null() {
                    live["metadata"][field].as_object_mut().unwrap().shift_remove(key);
                } else {
                    live["metadata"][field][key] = value.clone();
                }
            }
        }
    }

    #[test]
    fn drivers_that_come_and_go_leave_exactly_those_that_are_there() {
        let reached = &Reached::default();
        let step = ("[a-c]", prop::option::weighted(0.7, "[xy]"));
        proptest!(|(steps in prop::collection::vec(step, 0..12))| {
            let mut live = node(None, &[]);
            let mut expected = BTreeMap::new();
            let (mut is_removed, mut is_replaced) = (false, false);
            for (name, node_id) in steps {
                let id = node_id.as_ref().map(|node_id| driver(node_id, &[(&name, "here")]));
                let change = DriverChange { name: &name, driver: id.as_ref() };
                if let Some(patch) = change.patch(&live).unwrap() {
                    apply(&mut live, &patch);
                }
                prop_assert_eq!(change.patch(&live), Ok(None));
                match node_id {
                    Some(node_id) => is_replaced |= expected.insert(name, node_id).is_some(),
                    None => is_removed |= expected.remove(&name).is_some(),
                }
            }
            let text = live["metadata"]["annotations"][NODE_ID_ANNOTATION].as_str();
            let ids: BTreeMap<String, String> = serde_json::from_str(text.unwrap_or("{}")).unwrap();
            prop_assert_eq!(text.is_none(), expected.is_empty());
            prop_assert_eq!(ids, expected.clone());
            reached.case([
                ("removed", is_removed),
                ("replaced", is_replaced),
                ("several left", expected.len() > 1),
                ("none left", expected.is_empty()),
            ]);
        });
        reached.assert_each();
    }
}
