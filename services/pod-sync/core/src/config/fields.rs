//! `fieldRef` and `resourceFieldRef` (§3.4).

use std::collections::BTreeMap;

use keelson_kube_model::resources::effective_limit;
use keelson_kube_model::{Container, Pod, Quantity, ResourceFieldSelector};

use super::ConfigError;
use super::inputs::NodeInputs;

/// What fields depend on in addition to the pod.
#[derive(Clone, Copy)]
pub(super) struct FieldInputs<'a> {
    pub(super) pod_ips: &'a [String],
    pub(super) node: NodeInputs<'a>,
}

/// The value of a `fieldPath`; `None` for an unsupported path.
pub(super) fn field_value(pod: &Pod, path: &str, inputs: &FieldInputs<'_>) -> Option<String> {
    let meta = &pod.metadata;
    let ips =
        if pod.is_host_network() && inputs.pod_ips.is_empty() { inputs.node.ips } else { inputs.pod_ips };
    let first = |ips: &[String]| ips.first().cloned().unwrap_or_default();
    let value = match path {
        "metadata.name" => meta.name.clone(),
        "metadata.namespace" => meta.namespace.clone(),
        "metadata.uid" => meta.uid.clone(),
        "metadata.labels" => map_text(&meta.labels),
        "metadata.annotations" => map_text(&meta.annotations),
        "spec.nodeName" if pod.spec.node_name.is_empty() => inputs.node.name.to_owned(),
        "spec.nodeName" => pod.spec.node_name.clone(),
        "spec.serviceAccountName" => pod.spec.service_account_name.clone(),
        "status.hostIP" => first(inputs.node.ips),
        "status.hostIPs" => inputs.node.ips.join(","),
        "status.podIP" => first(ips),
        "status.podIPs" => ips.join(","),
        _ => {
            let (list, key) = subscript(path)?;
            let map = match list {
                "metadata.labels" => &meta.labels,
                "metadata.annotations" => &meta.annotations,
                _ => return None,
            };
            map.get(key).cloned().unwrap_or_default()
        }
    };
    Some(value)
}

/// `metadata.labels['key']` as list and key.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (list, rest) = path.split_once("['")?;
    Some((list, rest.strip_suffix("']")?))
}

/// One `key="value"` per line, sorted.
fn map_text(map: &BTreeMap<String, String>) -> String {
    let lines: Vec<String> = map.iter().map(|(key, value)| format!("{key}={}", quoted(value))).collect();
    lines.join("\n")
}

/// A string quoted as in Go.
fn quoted(text: &str) -> String {
    let mut result = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => result.push_str("\\\""),
            '\\' => result.push_str("\\\\"),
            '\n' => result.push_str("\\n"),
            '\r' => result.push_str("\\r"),
            '\t' => result.push_str("\\t"),
            '\u{7}' => result.push_str("\\a"),
            '\u{8}' => result.push_str("\\b"),
            '\u{b}' => result.push_str("\\v"),
            '\u{c}' => result.push_str("\\f"),
            c if c.is_ascii_control() => result.push_str(&format!("\\x{:02x}", u32::from(c))),
            c if !is_printable(c) => result.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => result.push(c),
        }
    }
    result.push('"');
    result
}

/// Whether Go prints the character unescaped: not a control or format character, and no space but the ordinary one.
fn is_printable(c: char) -> bool {
    let format = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || format)
}

/// `ceil(amount / divisor)` of a container's request or limit.
pub(super) fn resource_value(
    pod: &Pod,
    own: &Container,
    variable: &str,
    selector: &ResourceFieldSelector,
    inputs: &FieldInputs<'_>,
) -> Result<String, ConfigError> {
    let unknown = || ConfigError::Resource {
        variable: variable.to_owned(),
        container: selector.container_name.clone(),
        resource: selector.resource.clone(),
    };
    let container = match selector.container_name.as_str() {
        "" => own,
        name => pod.container(name).map(|(_, container)| container).ok_or_else(unknown)?,
    };
    let (list, name) = selector.resource.split_once('.').ok_or_else(unknown)?;
    let known = matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    if !known {
        return Err(unknown());
    }
    let amount = match list {
        "requests" => container.resources.requests.get(name).copied(),
        "limits" => effective_limit(pod, container, name)
            .or_else(|| container.resources.limits.get(name).copied())
            .filter(|limit| !limit.is_zero())
            .or_else(|| {
                inputs.node.allocatable.get(name).copied().filter(|_| !name.starts_with("hugepages-"))
            }),
        _ => return Err(unknown()),
    };
    let divisor = selector.divisor.filter(|divisor| !divisor.is_zero()).unwrap_or(Quantity::from_milli(1000));
    if divisor.is_negative() {
        return Err(ConfigError::Divisor { variable: variable.to_owned(), divisor });
    }
    let amount = amount.unwrap_or(Quantity::ZERO).nanos().max(0).unsigned_abs();
    Ok(amount.div_ceil(divisor.nanos().unsigned_abs()).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_kube_model::ResourceList;
    use serde_json::json;

    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1",
                "labels": {"b": "2", "a": "say \"hi\"\n"}, "annotations": {"x.io/y": "z"}},
            "spec": {"serviceAccountName": "sa", "containers": [
                {"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}},
                {"name": "d"}
            ]}
        }))
        .unwrap()
    }

    fn field(path: &str) -> Option<String> {
        let (pods, nodes) = (["10.1.0.2".to_owned(), "fd00::2".to_owned()], ["192.0.2.1".to_owned()]);
        let allocatable = ResourceList::new();
        let node = NodeInputs { name: "node-1", ips: &nodes, allocatable: &allocatable };
        let inputs = FieldInputs { pod_ips: &pods, node };
        field_value(&pod(), path, &inputs)
    }

    #[test]
    fn every_supported_field_path_has_a_value() {
        for (path, value) in [
            ("metadata.name", "web"),
            ("metadata.namespace", "shop"),
            ("metadata.uid", "u1"),
            ("metadata.labels", "a=\"say \\\"hi\\\"\\n\"\nb=\"2\""),
            ("metadata.labels['b']", "2"),
            ("metadata.labels['none']", ""),
            ("metadata.annotations", "x.io/y=\"z\""),
            ("metadata.annotations['x.io/y']", "z"),
            ("spec.nodeName", "node-1"),
            ("spec.serviceAccountName", "sa"),
            ("status.hostIP", "192.0.2.1"),
            ("status.hostIPs", "192.0.2.1"),
            ("status.podIP", "10.1.0.2"),
            ("status.podIPs", "10.1.0.2,fd00::2"),
        ] {
            assert_eq!(field(path).as_deref(), Some(value), "{path}");
        }
        assert_eq!(field("status.phase"), None);
        assert_eq!(field("spec.containers['x']"), None);
    }

    #[test]
    fn node_name_and_addresses_of_the_pod_override_those_of_the_node() {
        let (nodes, own) = (["192.0.2.1".to_owned()], ["10.1.0.2".to_owned()]);
        let allocatable = ResourceList::new();
        let value = |network: bool, pods: &[String], path: &str| {
            let node = NodeInputs { name: "node-1", ips: &nodes, allocatable: &allocatable };
            let inputs = FieldInputs { pod_ips: pods, node };
            let pod = serde_json::from_value(json!({"spec": {"nodeName": "other", "hostNetwork": network}}));
            field_value(&pod.unwrap(), path, &inputs).unwrap()
        };
        assert_eq!(value(false, &own, "spec.nodeName"), "other");
        for (network, pods, ip) in [
            (false, &[][..], ""),
            (false, &own, "10.1.0.2"),
            (true, &[], "192.0.2.1"),
            (true, &own, "10.1.0.2"),
        ] {
            assert_eq!(value(network, pods, "status.podIP"), ip, "{network} {pods:?}");
        }
    }

    #[test]
    fn unprintable_characters_are_escaped_by_number() {
        for (text, wants) in [
            ("\u{1f}\u{7f}\u{0}", r#""\x1f\x7f\x00""#),
            (" ~é\u{301}日", "\" ~é\u{301}日\""),
            ("\u{7}\u{8}\u{b}\u{c}\r\t\\", r#""\a\b\v\f\r\t\\""#),
            ("\u{85}\u{a0}\u{200b}\u{feff}\u{2028}", r#""\u0085\u00a0\u200b\ufeff\u2028""#),
        ] {
            assert_eq!(quoted(text), wants);
        }
    }

    fn resource(selector: serde_json::Value) -> Result<String, ConfigError> {
        let pod = pod();
        let allocatable: ResourceList =
            serde_json::from_value(json!({"cpu": "3500m", "memory": "1Gi"})).unwrap();
        let node = NodeInputs { name: "", ips: &[], allocatable: &allocatable };
        let inputs = FieldInputs { pod_ips: &[], node };
        let selector: ResourceFieldSelector = serde_json::from_value(selector).unwrap();
        resource_value(&pod, &pod.spec.containers[0], "V", &selector, &inputs)
    }

    #[test]
    fn resource_fields_are_divided_and_rounded_up() {
        for (selector, value) in [
            (json!({"resource": "requests.cpu"}), "1"),
            (json!({"resource": "requests.cpu", "divisor": "1m"}), "250"),
            (json!({"resource": "requests.memory", "divisor": "1Mi"}), "64"),
            (json!({"resource": "limits.memory"}), "134217728"),
            (json!({"resource": "limits.cpu"}), "4"),
            (json!({"resource": "limits.memory", "containerName": "d"}), "1073741824"),
            (json!({"resource": "requests.memory", "containerName": "d"}), "0"),
            (json!({"resource": "limits.hugepages-2Mi"}), "0"),
            (json!({"resource": "requests.cpu", "divisor": "0"}), "1"),
        ] {
            assert_eq!(resource(selector.clone()).as_deref(), Ok(value), "{selector}");
        }
    }

    #[test]
    fn an_unknown_resource_field_is_an_error_that_names_it() {
        for selector in [
            json!({"resource": "requests.gpu"}),
            json!({"resource": "cpu"}),
            json!({"resource": "usage.cpu"}),
            json!({"resource": "limits.cpu", "containerName": "none"}),
        ] {
            assert!(matches!(resource(selector), Err(ConfigError::Resource { .. })));
        }
    }
}
