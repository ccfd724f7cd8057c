//! References to fields of the pod itself: in variables and in files.

use super::{Findings, names};
use crate::types::ObjectFieldSelector;

/// What both variables and files may show.
const OF_BOTH: [&str; 3] = ["metadata.name", "metadata.namespace", "metadata.uid"];
/// What variables alone may show.
const OF_VARIABLES: [&str; 6] = [
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
/// What files alone may show: all entries at once.
const OF_FILES: [&str; 2] = ["metadata.annotations", "metadata.labels"];

/// Where a field is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    InVariable,
    InFile,
}

pub(super) fn check_field(found: &mut Findings, field: &str, selector: &ObjectFieldSelector, shown: Shown) {
    if !["", "v1"].contains(&selector.api_version.as_str()) {
        found.unsupported(format!("{field}.apiVersion"), &selector.api_version, &["v1"]);
    }
    let at = format!("{field}.fieldPath");
    let path = selector.field_path.as_str();
    if path.is_empty() {
        return found.required(at, "");
    }
    if let Some((map, key)) = subscript(path) {
        if !OF_FILES.contains(&map) {
            return found.invalid(at, path, "does not support subscript");
        }
        let key = if map == "metadata.annotations" { key.to_ascii_lowercase() } else { key.to_owned() };
        return found.name(at, &key, names::qualified_name);
    }
    let further: &[&str] = match shown {
        Shown::InVariable => &OF_VARIABLES,
        Shown::InFile => &OF_FILES,
    };
    if !OF_BOTH.contains(&path) && !further.contains(&path) {
        let known: Vec<&str> = OF_BOTH.iter().chain(further).copied().collect();
        found.unsupported(at, path, &known);
    }
}

/// `map['key']` as its two parts.
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (map, rest) = path.split_once("['")?;
    Some((map, rest.strip_suffix("']")?))
}
