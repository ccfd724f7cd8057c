//! The entries of a kubeconfig that its current context uses.

use serde_json::{Map, Value};

/// An error in a kubeconfig: the field and a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct KubeconfigError {
    /// The field, such as `users[1].user.client-key`.
    pub field: String,
    /// The message, which follows the field.
    pub message: String,
}

/// The content of an extension of the current cluster.
pub(crate) fn cluster_extension<'a>(root: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    let (_, cluster) = current_cluster(root).ok()?;
    let mut extensions = cluster.get("extensions")?.as_array()?.iter();
    extensions.find(|extension| extension["name"] == name).map(|found| &found["extension"])
}

pub(crate) fn current_context(
    root: &Map<String, Value>,
) -> Result<(String, &Map<String, Value>), KubeconfigError> {
    let name = text(root, "current-context")
        .ok_or_else(|| kubeconfig_error("current-context", "is missing; it names one of the contexts"))?;
    entry(root, "contexts", "context", name)
}

/// The cluster of the current context, and its path in the file.
pub(crate) fn current_cluster(
    root: &Map<String, Value>,
) -> Result<(String, &Map<String, Value>), KubeconfigError> {
    let (location, context) = current_context(root)?;
    let name = text(context, "cluster").ok_or_else(|| {
        kubeconfig_error(&format!("{location}.cluster"), "is missing; it names one of the clusters")
    })?;
    let (location, cluster) = entry(root, "clusters", "cluster", name)?;
    if text(cluster, "server").is_none() {
        return Err(kubeconfig_error(
            &format!("{location}.server"),
            "is missing; set it to the URL of the API server, such as https://10.0.0.1:6443",
        ));
    }
    Ok((location, cluster))
}

pub(crate) fn kubeconfig_error(field: &str, message: &str) -> KubeconfigError {
    KubeconfigError { field: field.to_owned(), message: message.to_owned() }
}

pub(crate) fn text<'a>(map: &'a Map<String, Value>, field: &str) -> Option<&'a str> {
    map.get(field).and_then(Value::as_str).filter(|text| !text.is_empty())
}

pub(crate) fn copied_fields(from: &Map<String, Value>, fields: &[&str]) -> Map<String, Value> {
    let found = fields.iter().filter_map(|field| Some(((*field).to_owned(), from.get(*field)?.clone())));
    found.filter(|(_, value)| !value.is_null()).collect()
}

/// The map in a named list entry, and its path in the file.
pub(crate) fn entry<'a>(
    root: &'a Map<String, Value>,
    list: &str,
    inner: &str,
    name: &str,
) -> Result<(String, &'a Map<String, Value>), KubeconfigError> {
    let entries = root.get(list).and_then(Value::as_array).into_iter().flatten();
    for (index, entry) in entries.enumerate() {
        if entry["name"] == name {
            let location = format!("{list}[{index}].{inner}");
            return match entry[inner].as_object() {
                Some(found) => Ok((location, found)),
                None => Err(kubeconfig_error(&location, "is missing")),
            };
        }
    }
    Err(kubeconfig_error(list, &format!("there is no entry named {name:?}")))
}
