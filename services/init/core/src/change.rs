//! What becomes of changed files while the agent runs: which values are taken at once, and which wait for a start of whom.
//!
//! [`keelson_config::PARTS`] is the table; here it is applied to two configurations.

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::{
    Config, FeatureGate, KUBELET_CONFIGURATION, PARTS, Part, ServiceName, Takes, leaves, takes_of_field,
};
use serde_json::{Map, Value};

use crate::resolve::Resolved;
use crate::under_key::flatten;

/// What services are started with.
#[derive(Debug, Clone, PartialEq)]
pub struct InForce {
    /// What they read.
    pub config: Config,
    /// The whole KubeletConfiguration.
    pub kubelet_configuration: Map<String, Value>,
    /// Every feature gate.
    pub feature_gates: Vec<FeatureGate>,
}

/// What files say and is not in force.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Waiting {
    /// Each value by its dotted path, as the provenance has it: below `kubeletConfiguration`, or of what services read. `null`:
    /// the value goes.
    pub values: Map<String, Value>,
    /// What people call them that a start of services takes.
    pub fields: Vec<String>,
    /// Who has to be started again for these, all of them together.
    pub services: BTreeSet<ServiceName>,
    /// What people call them that a start of the agent takes. While there are any, all the others wait for that too: they may
    /// be meant to go together.
    pub of_agent: Vec<String>,
}

/// What is in force once services have taken what they take while they run. All else stays: who is started again for another
/// reason meanwhile has of every other value the one that its neighbours have, and never half of a changed file.
pub fn with_live(in_force: &InForce, new: &Resolved) -> InForce {
    let mut config = in_force.config.clone();
    config.take_live(&new.config);
    config.provenance = provenance(&in_force.config, &new.config);
    let (before, after) = (&in_force.kubelet_configuration, &new.kubelet_configuration);
    let kubelet_configuration = merged_document("", Some(before), Some(after));
    InForce { config, kubelet_configuration, feature_gates: in_force.feature_gates.clone() }
}

/// Where values are from of which some are from another file than the others.
fn provenance(before: &Config, after: &Config) -> BTreeMap<String, String> {
    let kept = before.provenance.iter().filter(|(path, _)| takes_of_origin(path) != Takes::Live);
    let taken = after.provenance.iter().filter(|(path, _)| takes_of_origin(path) == Takes::Live);
    kept.chain(taken).map(|(path, origin)| (path.clone(), origin.clone())).collect()
}

fn takes_of_origin(path: &str) -> Takes {
    match path.strip_prefix(KUBELET_CONFIGURATION).and_then(|rest| rest.strip_prefix('.')) {
        Some(field) => takes_of_field(field),
        None => part_of(path).map_or(Takes::Agent, |part| part.takes),
    }
}

/// The part that a value is in.
fn part_of(path: &str) -> Option<&'static Part> {
    let holds = |part: &&Part| {
        path.strip_prefix(part.path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    PARTS.iter().find(holds)
}

/// The fields below `at` of two KubeletConfigurations: those that services take while they run from the second.
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
        let is_split = PARTS
            .iter()
            .flat_map(|part| part.fields)
            .any(|field| field.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('.')));
        let value = if is_split {
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

/// What `new` has that is not in force. Origins that begin with `ours` are those of the KeelsonConfiguration, whose values people
/// know by what services read.
pub fn waiting(in_force: &InForce, new: &Resolved, ours: Option<&str>) -> Waiting {
    let mut waiting = Waiting::default();
    for (field, value) in differing(&in_force.kubelet_configuration, &new.kubelet_configuration) {
        waiting.note(&field, takes_of_field(&field));
        waiting.values.insert(format!("{KUBELET_CONFIGURATION}.{field}"), value);
    }
    let by_kubelet = waiting.names_any();
    if !waiting.fields.is_empty() || in_force.feature_gates != new.feature_gates {
        // It shows the document, and tells the gates.
        waiting.services.insert(ServiceName::NodeApi);
    }
    for (path, value) in differing_leaves(&in_force.config, &new.config) {
        let Some(part) = part_of(&path).filter(|part| part.takes > Takes::Live) else { continue };
        if part.takes == Takes::Services {
            waiting.services.extend(part.readers);
        }
        let is_ours = |config: &Config| {
            let origin = origin(config, &path);
            ours.zip(origin).is_some_and(|(ours, origin)| origin.starts_with(ours))
        };
        if is_ours(&in_force.config) || is_ours(&new.config) || !by_kubelet {
            waiting.note(&path, part.takes);
        }
        waiting.values.insert(path, value);
    }
    waiting
}

/// Where the value at a path is from, or else what it lies in.
fn origin<'a>(config: &'a Config, path: &str) -> Option<&'a String> {
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
    ends.rev().find_map(|end| config.provenance.get(&path[..end]))
}

/// Each field of a KubeletConfiguration that is not taken live and differs, with its new value.
fn differing(before: &Map<String, Value>, after: &Map<String, Value>) -> BTreeMap<String, Value> {
    let of = |map: &Map<String, Value>| -> BTreeMap<String, Value> {
        leaves(map).into_iter().map(|(names, value)| (names.join("."), value.clone())).collect()
    };
    let mut all = changed(&of(before), of(after));
    all.retain(|field, _| takes_of_field(field) > Takes::Live);
    all
}

fn differing_leaves(before: &Config, after: &Config) -> BTreeMap<String, Value> {
    let of = |config: &Config| {
        let bare = Config { provenance: BTreeMap::new(), resolved_unix_nanos: 0, ..config.clone() };
        let mut leaves = BTreeMap::new();
        flatten(String::new(), &serde_json::to_value(bare).unwrap_or_default(), &mut leaves);
        leaves
    };
    changed(&of(before), of(after))
}

/// What differs in `after`, and as `null` what is missing in it.
fn changed(before: &BTreeMap<String, Value>, mut after: BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    let gone: Vec<String> = before.keys().filter(|path| !after.contains_key(*path)).cloned().collect();
    after.retain(|path, value| before.get(path) != Some(value));
    after.extend(gone.into_iter().map(|path| (path, Value::Null)));
    after
}

impl Waiting {
    fn note(&mut self, field: &str, takes: Takes) {
        let fields = if takes == Takes::Agent { &mut self.of_agent } else { &mut self.fields };
        fields.push(field.to_owned());
    }

    fn names_any(&self) -> bool {
        !(self.fields.is_empty() && self.of_agent.is_empty())
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty() && self.services.is_empty()
    }

    /// What people are told; none when nothing waits.
    pub fn text(&self) -> Option<String> {
        if self.is_empty() {
            return None;
        }
        let fields = [&self.of_agent[..], &self.fields[..]].concat().join(", ");
        let what = if self.of_agent.is_empty() {
            let names: Vec<&str> = self.services.iter().map(|service| service.as_str()).collect();
            let first = names.first().copied().unwrap_or_default();
            format!("of {}, which `keelson services restart {first}` does", names.join(", "))
        } else {
            "of the agent".to_owned()
        };
        Some(format!("changed files wait for a restart {what}: {fields}"))
    }

    /// Whether a restart of this service puts the files in force, with a restart of the others.
    pub fn goes_with(&self, service: ServiceName) -> bool {
        self.of_agent.is_empty() && self.services.contains(&service)
    }
}

#[cfg(test)]
#[path = "change_tests.rs"]
mod tests;
