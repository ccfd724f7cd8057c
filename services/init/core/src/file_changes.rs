//! How changed files are handled while the agent runs: which values are applied at once, and which wait for a restart, and of
//! what.
//!
//! [`keelson_config::PARTS`] is the table; this module applies it to two configurations.

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::{
    Config, FeatureGate, KUBELET_CONFIGURATION, ServiceName, Takes, kubelet_fields, leaves, part_containing,
    takes_of_field,
};
use serde_json::{Map, Value};

use crate::assigned_config::leaf_values;
use crate::resolve::Resolved;

/// The configuration that services are started with.
#[derive(Debug, Clone, PartialEq)]
pub struct ActiveConfig {
    /// The part that services read.
    pub config: Config,
    /// The whole KubeletConfiguration.
    pub kubelet_configuration: Map<String, Value>,
    /// Every feature gate.
    pub feature_gates: Vec<FeatureGate>,
}

/// The values of the files that are not in force.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PendingChanges {
    /// Each value by its dotted path, as in the provenance: below `kubeletConfiguration`, or of the resolved configuration.
    /// `null` means that the value is removed.
    pub values: Map<String, Value>,
    /// The names, as operators write them, of the fields that a restart of services applies.
    pub fields: Vec<String>,
    /// The services that have to be restarted together to apply `fields`.
    pub services: BTreeSet<ServiceName>,
    /// The names, as operators write them, of the fields that only a restart of the agent applies. While there are any,
    /// `fields` wait for that restart too, since they may be meant to change together.
    pub agent_fields: Vec<String>,
}

/// The configuration in force once running services have applied the live values. All other values stay as they are, so that
/// a service restarted for another reason agrees with the others and never applies half of a changed file.
pub fn apply_live(in_force: &ActiveConfig, new: &Resolved) -> ActiveConfig {
    let mut config = in_force.config.clone();
    config.take_live(&new.config);
    config.provenance = provenance(&in_force.config, &new.config);
    let (before, after) = (&in_force.kubelet_configuration, &new.kubelet_configuration);
    let kubelet_configuration = merged_document("", Some(before), Some(after));
    ActiveConfig { config, kubelet_configuration, feature_gates: in_force.feature_gates.clone() }
}

/// The provenance of the values in force: live ones from `after`, the others from `before`.
fn provenance(before: &Config, after: &Config) -> BTreeMap<String, String> {
    let kept = before.provenance.iter().filter(|(path, _)| takes_of_origin(path) != Takes::Live);
    let taken = after.provenance.iter().filter(|(path, _)| takes_of_origin(path) == Takes::Live);
    kept.chain(taken).map(|(path, origin)| (path.clone(), origin.clone())).collect()
}

fn takes_of_origin(path: &str) -> Takes {
    match path.strip_prefix(KUBELET_CONFIGURATION).and_then(|rest| rest.strip_prefix('.')) {
        Some(field) => takes_of_field(field),
        None => part_containing(path).map_or(Takes::Agent, |part| part.takes),
    }
}

/// The fields below `at` of two KubeletConfigurations: live ones from `after`, the others from `before`.
fn merged_document(
    at: &str,
    before: Option<&Map<String, Value>>,
    after: Option<&Map<String, Value>>,
) -> Map<String, Value> {
    let names = |map: Option<&Map<String, Value>>| -> Vec<String> {
        map.into_iter().flat_map(|map| map.keys().cloned()).collect()
    };
    let mut all = names(before);
    all.extend(
        names(after).into_iter().filter(|name| before.is_none_or(|before| !before.contains_key(name))),
    );
    let mut merged = Map::new();
    for name in all {
        let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
        let (old, new) = (before.and_then(|map| map.get(&name)), after.and_then(|map| map.get(&name)));
        let value = if is_live_in_part(&path) {
            let below = |value: Option<&Value>| value.and_then(Value::as_object).cloned();
            let (old, new) = (below(old), below(new));
            Some(Value::Object(merged_document(&path, old.as_ref(), new.as_ref())))
        } else if takes_of_field(&path) == Takes::Live {
            new.cloned()
        } else {
            old.cloned()
        };
        merged.extend(value.map(|value| (name, value)));
    }
    merged
}

/// Whether some fields of an object, but not the whole object, are applied live.
fn is_live_in_part(object: &str) -> bool {
    kubelet_fields().iter().any(|field| {
        let is_below = field.path.strip_prefix(object).is_some_and(|rest| rest.starts_with('.'));
        is_below && takes_of_field(field.path) == Takes::Live
    })
}

/// The values of `new` that are not in force. Origins that begin with `ours` are in the KeelsonConfiguration, whose values
/// operators know by the path in the resolved configuration.
pub fn pending_changes(in_force: &ActiveConfig, new: &Resolved, ours: Option<&str>) -> PendingChanges {
    let mut pending = PendingChanges::default();
    for (field, value) in changed_fields(&in_force.kubelet_configuration, &new.kubelet_configuration) {
        pending.add_field(&field, takes_of_field(&field));
        pending.values.insert(format!("{KUBELET_CONFIGURATION}.{field}"), value);
    }
    let by_kubelet = pending.has_fields();
    if !pending.fields.is_empty() || in_force.feature_gates != new.feature_gates {
        // node-api shows the document, and exports the gates as a metric.
        pending.services.insert(ServiceName::NodeApi);
    }
    for (path, value) in changed_values(&in_force.config, &new.config) {
        let Some(part) = part_containing(&path).filter(|part| part.takes > Takes::Live) else { continue };
        if part.takes == Takes::Services {
            pending.services.extend(part.readers);
        }
        let is_ours = |config: &Config| {
            let origin = origin(config, &path);
            ours.zip(origin).is_some_and(|(ours, origin)| origin.starts_with(ours))
        };
        if is_ours(&in_force.config) || is_ours(&new.config) || !by_kubelet {
            pending.add_field(&path, part.takes);
        }
        pending.values.insert(path, value);
    }
    pending
}

/// The origin of the value at a path, or else of the nearest value that contains it.
fn origin<'a>(config: &'a Config, path: &str) -> Option<&'a String> {
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
    ends.rev().find_map(|end| config.provenance.get(&path[..end]))
}

/// Each field of a KubeletConfiguration that differs and is not applied live, with its new value.
fn changed_fields(before: &Map<String, Value>, after: &Map<String, Value>) -> BTreeMap<String, Value> {
    let of = |map: &Map<String, Value>| -> BTreeMap<String, Value> {
        leaves(map).into_iter().map(|(names, value)| (names.join("."), value.clone())).collect()
    };
    let mut all = changed(&of(before), of(after));
    all.retain(|field, _| takes_of_field(field) > Takes::Live);
    all
}

fn changed_values(before: &Config, after: &Config) -> BTreeMap<String, Value> {
    let of = |config: &Config| {
        let bare = Config { provenance: BTreeMap::new(), resolved_unix_nanos: 0, ..config.clone() };
        let mut leaves = BTreeMap::new();
        leaf_values(String::new(), &serde_json::to_value(bare).unwrap_or_default(), &mut leaves);
        leaves
    };
    changed(&of(before), of(after))
}

/// The values of `after` that differ, and `null` for those that it does not have.
fn changed(before: &BTreeMap<String, Value>, mut after: BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    let gone: Vec<String> = before.keys().filter(|path| !after.contains_key(*path)).cloned().collect();
    after.retain(|path, value| before.get(path) != Some(value));
    after.extend(gone.into_iter().map(|path| (path, Value::Null)));
    after
}

impl PendingChanges {
    fn add_field(&mut self, field: &str, takes: Takes) {
        let fields = if takes == Takes::Agent { &mut self.agent_fields } else { &mut self.fields };
        fields.push(field.to_owned());
    }

    fn has_fields(&self) -> bool {
        !(self.fields.is_empty() && self.agent_fields.is_empty())
    }

    /// Whether there is no pending change.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty() && self.services.is_empty()
    }

    /// The message for operators; `None` without a pending change.
    pub fn text(&self) -> Option<String> {
        if self.is_empty() {
            return None;
        }
        let fields = [&self.agent_fields[..], &self.fields[..]].concat().join(", ");
        let what = if self.agent_fields.is_empty() {
            let names: Vec<&str> = self.services.iter().map(|service| service.as_str()).collect();
            let first = names.first().copied().unwrap_or_default();
            format!("of {}, which `keelson services restart {first}` does", names.join(", "))
        } else {
            "of the agent".to_owned()
        };
        Some(format!("changed files wait for a restart {what}: {fields}"))
    }

    /// Whether a restart of this service, with that of the others, puts the files in force.
    pub fn applies_on_restart_of(&self, service: ServiceName) -> bool {
        self.agent_fields.is_empty() && self.services.contains(&service)
    }
}

#[cfg(test)]
#[path = "file_changes_tests.rs"]
mod tests;
