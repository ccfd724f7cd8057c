//! `keelson config show`.

use keelson_config::{KUBELET_CONFIGURATION, WAITING, leaves};
use serde_json::{Map, Value, json};

use crate::error::CliError;
use crate::output;
use crate::session::Session;
use crate::table::Table;

/// The origin of a value that nothing sets.
const DEFAULT_ORIGIN: &str = "default";
/// The placeholder for a missing value.
const MISSING: &str = "-";
/// The fields of the file that are not values.
const NOT_VALUES: [&str; 6] =
    [KUBELET_CONFIGURATION, "featureGates", "provenance", "resolvedUnixNanos", "schemaVersion", WAITING];

/// Shows each value with its origin.
pub(crate) fn show(session: &Session, resolved: bool) -> Result<(), CliError> {
    let rows = rows(session.agent.resolved_configuration()?, resolved);
    if output::is_document(session.format()) {
        let items: Vec<Value> = rows
            .iter()
            .map(|row| {
                let mut item = json!({"field": row.field, "value": row.value, "from": row.from});
                if let (Some(waiting), Value::Object(item)) = (&row.waiting, &mut item) {
                    item.insert(WAITING.to_owned(), waiting.clone());
                }
                item
            })
            .collect();
        return output::print_document(session.format(), &json!({"items": items}));
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
    if rows.iter().all(|row| row.waiting.is_none()) {
        let mut table = Table::new(["FIELD", "VALUE", "FROM"]);
        for row in rows {
            table.row(vec![row.field, text(&row.value), row.from]);
        }
        return output::print(&table.render(0));
    }
    let mut table = Table::new(["FIELD", "VALUE", "FROM", "AFTER A RESTART"]);
    for row in rows {
        let waiting = row.waiting.as_ref().map(|waiting| match waiting {
            Value::Null => MISSING.to_owned(),
            waiting => text(waiting),
        });
        table.row(vec![row.field, text(&row.value), row.from, waiting.unwrap_or_default()]);
    }
    output::print(&table.render(0))
}

/// One value.
#[derive(Debug, PartialEq)]
struct Row {
    field: String,
    value: Value,
    from: String,
    /// The value in a changed file, which takes effect after a restart; `null`: no value.
    waiting: Option<Value>,
}

/// The values of a resolved configuration: those of the KubeletConfiguration, or those that the services read.
fn rows(mut document: Map<String, Value>, resolved: bool) -> Vec<Row> {
    let provenance = take_map(&mut document, "provenance");
    let waiting = take_map(&mut document, WAITING);
    let kubelet = take_map(&mut document, KUBELET_CONFIGURATION);
    document.retain(|name, _| !NOT_VALUES.contains(&name.as_str()));
    let (values, prefix) =
        if resolved { (document, String::new()) } else { (kubelet, format!("{KUBELET_CONFIGURATION}.")) };
    let row = |(names, value): (Vec<&str>, &Value)| {
        let field = names.join(".");
        let from = origin(&provenance, &format!("{prefix}{field}"));
        let waiting = waiting.get(&format!("{prefix}{field}")).cloned();
        Row { field, value: value.clone(), from, waiting }
    };
    let mut rows: Vec<Row> = leaves(&values).into_iter().map(row).collect();
    // Values that only a changed file has.
    for (path, value) in &waiting {
        let is_kubelet = path.starts_with(&format!("{KUBELET_CONFIGURATION}."));
        let Some(field) = path.strip_prefix(&prefix).filter(|_| is_kubelet != resolved) else { continue };
        if rows.iter().all(|row| row.field != field) {
            let (field, from) = (field.to_owned(), MISSING.to_owned());
            rows.push(Row { field, value: Value::Null, from, waiting: Some(value.clone()) });
        }
    }
    rows.sort_by(|a, b| a.field.cmp(&b.field));
    rows
}

fn take_map(document: &mut Map<String, Value>, name: &str) -> Map<String, Value> {
    match document.remove(name) {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

/// The origin of the value at a dotted path, or of the nearest enclosing one.
fn origin(provenance: &Map<String, Value>, path: &str) -> String {
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
    let found = ends.rev().find_map(|end| provenance.get(&path[..end])?.as_str());
    found.unwrap_or(DEFAULT_ORIGIN).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(resolved: bool) -> Vec<(String, String, String)> {
        let document = json!({
            "schemaVersion": 1, "resolvedUnixNanos": 5, "nodeName": "edge",
            "resources": {"reserved": {"memory": "1Gi"}, "maxPods": 7},
            "kubeletConfiguration": {"maxPods": 7, "evictionHard": {"memory.available": "1Gi"}, "clusterDNS": [], "logging": {}},
            "provenance": {
                "resources.reserved": "k.yaml:3", "kubeletConfiguration.maxPods": "--max-pods",
                "kubeletConfiguration.evictionHard.memory.available": "20.conf:4",
            },
        });
        let Value::Object(document) = document else { panic!("{document}") };
        let text = |row: Row| (row.field, row.value.to_string(), row.from);
        rows(document, resolved).into_iter().map(text).collect()
    }

    #[test]
    fn values_that_need_a_restart_are_shown_next_to_those_in_force() {
        let document = json!({
            "schemaVersion": 1, "resources": {"maxPods": 7}, "kubeletConfiguration": {"maxPods": 7, "clusterDNS": []},
            "featureGates": [], "provenance": {},
            "waiting": {
                "resources.maxPods": 8, "kubeletConfiguration.maxPods": 8, "kubeletConfiguration.clusterDNS": null,
                "kubeletConfiguration.evictionSoft.memory.available": "1Gi",
            },
        });
        let Value::Object(document) = document else { panic!("{document}") };
        let waits = |resolved| -> Vec<(String, String, Option<Value>)> {
            let rows = rows(document.clone(), resolved);
            rows.into_iter().map(|row| (row.field, row.value.to_string(), row.waiting)).collect()
        };
        let expected = [
            ("clusterDNS".to_owned(), "[]".to_owned(), Some(Value::Null)),
            ("evictionSoft.memory.available".to_owned(), "null".to_owned(), Some(json!("1Gi"))),
            ("maxPods".to_owned(), "7".to_owned(), Some(json!(8))),
        ];
        assert_eq!(waits(false), expected);
        assert_eq!(waits(true), [("resources.maxPods".to_owned(), "7".to_owned(), Some(json!(8)))]);
    }

    fn texts(rows: &[(&str, &str, &str)]) -> Vec<(String, String, String)> {
        rows.iter().map(|(a, b, c)| ((*a).to_owned(), (*b).to_owned(), (*c).to_owned())).collect()
    }

    #[test]
    fn kubelet_configuration_values_have_their_origin() {
        let expected = texts(&[
            ("clusterDNS", "[]", "default"),
            ("evictionHard.memory.available", "\"1Gi\"", "20.conf:4"),
            ("logging", "{}", "default"),
            ("maxPods", "7", "--max-pods"),
        ]);
        assert_eq!(shown(false), expected);
    }

    #[test]
    fn resolved_values_inherit_the_origin_of_the_enclosing_field() {
        let expected = texts(&[
            ("nodeName", "\"edge\"", "default"),
            ("resources.maxPods", "7", "default"),
            ("resources.reserved.memory", "\"1Gi\"", "k.yaml:3"),
        ]);
        assert_eq!(shown(true), expected);
    }
}
