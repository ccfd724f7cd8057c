//! A KubeletConfiguration that stands under a key, laid over the node's own.

use std::collections::BTreeMap;

use keelson_config::{Config, KUBELET_API_VERSION, KUBELET_KIND};
use serde_json::Value;

use crate::document::{ConfigProblem, Document, Sourced};
use crate::kubelet_file::is_kind;
use crate::resolve::{Inputs, Resolved, resolve_with};
use crate::strict;

/// What no key changes: init, the locks, the folders and the cgroups of all that runs hang on it. The paths of the
/// resolved configuration, what lies below included, each with the field that sets it, where there is one.
const FIXED: [(&str, &str); 13] = [
    // The files are handed over once, and who writes the key is not to say who is let in.
    ("api.tls", ""),
    ("controlPlane.etcd.leaseSeconds", "nodeLeaseDurationSeconds"),
    ("controlPlane", ""),
    ("manageHost", ""),
    ("nodeName", ""),
    ("ownProcesses.maxOpenFiles", "maxOpenFiles"),
    ("ownProcesses.oomScoreAdj", "oomScoreAdj"),
    ("paths", "podLogsDir"),
    ("runtime.cgroupDriver", "cgroupDriver"),
    ("runtime.cgroupRoot", "cgroupRoot"),
    ("runtime.endpoint", "containerRuntimeEndpoint"),
    ("runtime.imageEndpoint", "imageServiceEndpoint"),
    ("users", ""),
];

/// Resolves `inputs` with `assigned` over the KubeletConfiguration: maps are merged, all else is replaced, `null` removes
/// (RFC 7386, as node-and-api.md §2.4 has it for files of `--config-dir`). Flags win. Relative paths start where those of
/// the node's own file do. `files` is what `inputs` resolve to without it.
///
/// # Errors
/// Everything that is wrong with it, and every change of what cannot change while init runs.
pub fn resolve_over(
    inputs: Inputs<'_>,
    files: &Config,
    assigned: &Document,
) -> Result<Resolved, Vec<ConfigProblem>> {
    let mut problems = Vec::new();
    if !is_kind(assigned, KUBELET_API_VERSION, KUBELET_KIND, &mut problems) {
        return Err(problems);
    }
    // Nobody looks at the log of a node for each key that is written: what would be passed over in a file is refused.
    problems.extend(strict::unknown(assigned).into_iter().map(Sourced::refusal));
    problems.extend(assigned.duplicates.iter().map(strict::duplicate_refusal));
    match resolve_with(inputs, Some(assigned)) {
        Ok(resolved) => {
            problems.extend(changes_of_the_fixed(files, &resolved.config, &assigned.file));
            if problems.is_empty() { Ok(resolved) } else { Err(problems) }
        }
        Err(more) => {
            problems.extend(more);
            Err(problems)
        }
    }
}

/// Whether services that run with the one need not be started again for the other.
pub fn means_the_same(one: &Config, other: &Config) -> bool {
    let bare =
        |config: &Config| Config { provenance: BTreeMap::new(), resolved_unix_nanos: 0, ..config.clone() };
    bare(one) == bare(other)
}

fn changes_of_the_fixed(files: &Config, other: &Config, name: &str) -> Vec<ConfigProblem> {
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    for (config, leaves) in [(files, &mut before), (other, &mut after)] {
        flatten(String::new(), &serde_json::to_value(config).unwrap_or_default(), leaves);
    }
    let differ = |path: &&String| before.get(*path) != after.get(*path);
    let mut changed: Vec<&String> = before.keys().chain(after.keys()).filter(differ).collect();
    changed.sort_unstable();
    changed.dedup();
    let field_of = |path: &str| {
        let below = |fixed: &str| {
            path.strip_prefix(fixed).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        FIXED.iter().find(|(fixed, _)| below(fixed)).map(|(_, field)| *field)
    };
    let text = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), ToString::to_string);
    let problem = |path: &String| {
        let field = field_of(path)?;
        Some(ConfigProblem {
            field: if field.is_empty() { path.clone() } else { field.to_owned() },
            value: text(after.get(path)),
            origin: other.provenance.get(path).cloned().unwrap_or_else(|| name.to_owned()),
            way_out: format!(
                "this cannot change while the agent runs, and by the files of the node it is {}; change it there, or \
                 leave it out",
                text(before.get(path))
            ),
            undecodable: false,
        })
    };
    changed.into_iter().filter_map(problem).collect()
}

/// Each value that is no map, by its dotted path.
pub(crate) fn flatten(path: String, value: &Value, leaves: &mut BTreeMap<String, Value>) {
    let Value::Object(fields) = value else {
        leaves.insert(path, value.clone());
        return;
    };
    for (name, value) in fields {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        flatten(path, value, leaves);
    }
}

#[cfg(test)]
#[path = "under_key_tests.rs"]
mod tests;
