//! The CPU, memory and topology managers. Their fields have no effect here yet and are only checked (node-and-api.md §2.5).

use std::collections::BTreeSet;

use keelson_kube_model::Quantity;
use serde_json::Value;

use crate::outcome::Outcome;
use crate::reader::Reader;
use crate::settings::{Files, Settings};

/// No field has an effect yet.
#[derive(Debug)]
pub(crate) struct Managers;

impl Settings for Managers {
    fn read(_files: &mut Files<'_>) -> Self {
        Self
    }

    fn check(kubelet: &mut Reader<'_>) {
        reserved_memory(kubelet);
        qos_reserved(kubelet);
        throttling(kubelet);
    }

    fn resolve(self, _out: &mut Outcome<'_>) {}
}

fn reserved_memory(reader: &mut Reader<'_>) {
    const FIELD: &str = "reservedMemory";
    reader.check_entries(FIELD, |node| {
        let limits = node.get("limits").and_then(Value::as_object).filter(|limits| !limits.is_empty());
        if node.get("numaNode").and_then(Value::as_i64).is_none_or(|node| node < 0) {
            return Err("numaNode must be the number of a NUMA node, from 0".to_owned());
        }
        let Some(limits) = limits else {
            return Err("limits must name memory or hugepages-<size>".to_owned());
        };
        for (kind, amount) in limits {
            let is_kind =
                kind == "memory" || kind.strip_prefix("hugepages-").is_some_and(|size| !size.is_empty());
            if !is_kind {
                return Err(format!(
                    "{kind} cannot be reserved; limits must name memory or hugepages-<size>"
                ));
            }
            let amount = amount.as_str().and_then(|text| Quantity::parse(text).ok());
            if amount.is_none_or(|amount| amount.is_zero() || amount.is_negative()) {
                return Err(format!("{kind} must be a quantity above 0, such as 1Gi"));
            }
        }
        Ok(())
    });
    let mut seen = BTreeSet::new();
    let nodes = reader.peek(FIELD).and_then(Value::as_array).cloned().unwrap_or_default();
    for (index, node) in nodes.iter().enumerate() {
        let number = node.get("numaNode").and_then(Value::as_i64);
        let kinds =
            node.get("limits").and_then(Value::as_object).into_iter().flat_map(|limits| limits.keys());
        for kind in kinds {
            if !seen.insert((number, kind.clone())) {
                let one = reader.list_entry(FIELD, index, node);
                reader.report_entry(&one, format!("{kind} of this node is listed twice"));
            }
        }
    }
}

/// `qosReserved`: the percentage of a QoS class's requests that lower classes cannot use.
fn qos_reserved(reader: &mut Reader<'_>) {
    let Some(map) = reader.map("qosReserved") else { return };
    for (key, text) in &map.value {
        let one = map.entry(key, text);
        let percent = text.strip_suffix('%').and_then(|text| text.parse::<u8>().ok());
        if key != "memory" {
            reader.refuse(&one, "only memory can be reserved by QoS class");
        } else if percent.is_none_or(|percent| percent > 100) {
            reader.refuse(&one, "this must be from 0% to 100%");
        }
    }
}

/// `memoryThrottlingFactor`.
fn throttling(reader: &mut Reader<'_>) {
    const FIELD: &str = "memoryThrottlingFactor";
    let Some(value) = reader.peek(FIELD) else { return };
    if value.as_f64().is_none_or(|factor| factor <= 0.0 || factor > 1.0) {
        reader.report(FIELD, value, "this must be a number above 0 and at most 1".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::{assert_refused, errors_of};

    #[test]
    fn invalid_entries_of_qos_reserved_are_refused_beside_the_field_itself() {
        for (entries, what, remedy) in [
            (json!({"cpu": "50%"}), "qosReserved.cpu = \"50%\"", "only memory"),
            (json!({"memory": "101%"}), "qosReserved.memory = \"101%\"", "from 0% to 100%"),
        ] {
            let errors = errors_of(json!({"featureGates": {"AllAlpha": true}, "qosReserved": entries}));
            assert!(errors.iter().any(|error| error.contains(what) && error.contains(remedy)), "{errors:?}");
            assert!(
                errors.iter().any(|error| error.contains("QOSReserved, which cannot be on")),
                "{errors:?}"
            );
        }
    }

    #[test]
    fn invalid_manager_fields_are_refused_with_a_remedy() {
        assert_refused(&[
            (json!({"memoryThrottlingFactor": 0}), "memoryThrottlingFactor = 0", "above 0 and at most 1"),
            (
                json!({"memoryThrottlingFactor": 1.01}),
                "memoryThrottlingFactor = 1.01",
                "above 0 and at most 1",
            ),
            (json!({"reservedMemory": [{"limits": {"memory": "1Gi"}}]}), "reservedMemory[0]", "numaNode"),
            (json!({"reservedMemory": [{"numaNode": 0}]}), "reservedMemory[0]", "must name memory"),
            (json!({"reservedMemory": [{"numaNode": 0, "limits": {"cpu": "1"}}]}), "[0]", "cpu cannot be"),
            (json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "0"}}]}), "[0]", "above 0"),
            (
                json!({"reservedMemory": [
                    {"numaNode": 0, "limits": {"memory": "1Gi"}}, {"numaNode": 1, "limits": {"memory": "1Gi"}},
                    {"numaNode": 0, "limits": {"hugepages-2Mi": "2Mi", "memory": "1Gi"}},
                ]}),
                "reservedMemory[2]",
                "memory of this node is listed twice",
            ),
        ]);
    }
}
