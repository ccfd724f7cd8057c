//! The KubeletConfiguration assigned under the node's key, merged over the node's own.

use std::collections::BTreeMap;

use keelson_config::{Config, KUBELET_API_VERSION, KUBELET_KIND, kubelet_fields};
use serde_json::Value;

use crate::document::{ConfigError, Document, Sourced};
use crate::inputs::Inputs;
use crate::resolve::{Resolved, resolve_with};
use crate::strict;

/// The parts whose values errors name by their path, since no single field decides about them.
const NAMED_BY_PATH: [&str; 2] = ["api.tls", "controlPlane.kubernetes"];
/// What an assigned configuration cannot change, since init, its locks, the folders and the cgroups of everything running
/// depend on it: paths of the resolved configuration, including all paths below.
const IMMUTABLE: [&str; 11] = [
    // The files are copied for the services once, and the writer of the key must not decide which clients are authenticated.
    "api.tls",
    "controlPlane",
    "manageHost",
    "nodeName",
    "ownProcesses",
    "paths",
    "runtime.cgroupDriver",
    "runtime.cgroupRoot",
    "runtime.endpoint",
    "runtime.imageEndpoint",
    "users",
];

/// Resolves `inputs` with `assigned` merged over the KubeletConfiguration: maps are merged, other values replaced, and `null`
/// removes a field (RFC 7386, as node-and-api.md §2.4 has it for files of `--config-dir`). Flags win. Relative paths start
/// from the folder of the node's own file. `files` is the configuration that `inputs` resolve to without `assigned`.
///
/// # Errors
/// All errors of `assigned`, and each change of a value that cannot change while init runs.
pub fn resolve_assigned(
    inputs: Inputs<'_>,
    files: &Config,
    assigned: &Document,
) -> Result<Resolved, Vec<ConfigError>> {
    let mut errors = Vec::new();
    if !assigned.is_kind(KUBELET_API_VERSION, KUBELET_KIND, &mut errors) {
        return Err(errors);
    }
    // Nobody reads the log of a node after each write of the key, so what is only a warning in a file is an error here.
    errors.extend(strict::unknown(assigned).into_iter().map(Sourced::into_error));
    errors.extend(assigned.duplicates.iter().map(strict::duplicate_error));
    match resolve_with(inputs, Some(assigned)) {
        Ok(resolved) => {
            errors.extend(immutable_changes(files, &resolved.config, &assigned.file));
            if errors.is_empty() { Ok(resolved) } else { Err(errors) }
        }
        Err(more) => {
            errors.extend(more);
            Err(errors)
        }
    }
}

/// Whether services that run with one configuration need no restart for the other.
pub fn is_equivalent(one: &Config, other: &Config) -> bool {
    let comparable =
        |config: &Config| Config { provenance: BTreeMap::new(), resolved_unix_nanos: 0, ..config.clone() };
    comparable(one) == comparable(other)
}

fn immutable_changes(files: &Config, other: &Config, name: &str) -> Vec<ConfigError> {
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    for (config, values) in [(files, &mut before), (other, &mut after)] {
        leaf_values(String::new(), &serde_json::to_value(config).unwrap_or_default(), values);
    }
    let is_changed = |path: &&String| before.get(*path) != after.get(*path);
    let mut changed: Vec<&String> = before.keys().chain(after.keys()).filter(is_changed).collect();
    changed.sort_unstable();
    changed.dedup();
    let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), ToString::to_string);
    let error = |path: &String| {
        IMMUTABLE.iter().find(|part| is_in(part, path))?;
        Some(ConfigError {
            field: field_that_sets(path).unwrap_or(path).to_owned(),
            value: text(after.get(path)),
            origin: other.provenance.get(path).cloned().unwrap_or_else(|| name.to_owned()),
            remedy: format!(
                "this field cannot change while the agent runs, and by the files of the node it is {}; change it there, or \
                 remove it here",
                text(before.get(path))
            ),
            undecodable: false,
        })
    };
    changed.into_iter().filter_map(error).collect()
}

/// Whether a part of the resolved configuration contains the value at a path.
fn is_in(part: &str, path: &str) -> bool {
    path.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The field of a KubeletConfiguration that sets the value at a path of the resolved configuration.
fn field_that_sets(path: &str) -> Option<&'static str> {
    if NAMED_BY_PATH.iter().any(|part| is_in(part, path)) {
        return None;
    }
    kubelet_fields().iter().find(|field| field.sets.contains(&path)).map(|field| field.path)
}

/// Each value that is not a map, by its dotted path.
pub(crate) fn leaf_values(path: String, value: &Value, values: &mut BTreeMap<String, Value>) {
    let Value::Object(fields) = value else {
        values.insert(path, value.clone());
        return;
    };
    for (name, value) in fields {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        leaf_values(path, value, values);
    }
}

#[cfg(test)]
#[path = "assigned_config_tests.rs"]
mod tests;
