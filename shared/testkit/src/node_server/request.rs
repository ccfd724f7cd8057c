//! What a request to the Kubernetes API asks for.

use std::collections::BTreeMap;

/// The object, or the collection, that a path names.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target {
    /// The API group; empty for the core one.
    pub(super) group: String,
    /// The plural, such as `pods`.
    pub(super) resource: String,
    /// Empty for what has no namespace, and for a collection over all of them.
    pub(super) namespace: String,
    /// Empty for a collection.
    pub(super) name: String,
    /// Such as `status`; empty for the object itself.
    pub(super) subresource: String,
}

impl Target {
    /// Of a path such as `/api/v1/namespaces/default/pods/web/status`; `None` where it is no path of a resource.
    pub(super) fn of(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (group, rest) = match parts.as_slice() {
            ["api", "v1", rest @ ..] => ("", rest),
            ["apis", group, _version, rest @ ..] => (*group, rest),
            _ => return None,
        };
        // `namespaces/default` is the namespace itself, `namespaces/default/pods` is in it.
        let (namespace, rest) = match rest {
            ["namespaces", namespace, below @ ..] if !below.is_empty() => (*namespace, below),
            _ => ("", rest),
        };
        let resource = rest.first().filter(|resource| !resource.is_empty())?;
        let part = |index: usize| rest.get(index).copied().unwrap_or_default().to_owned();
        (rest.len() <= 3).then(|| Self {
            group: group.to_owned(),
            resource: (*resource).to_owned(),
            namespace: namespace.to_owned(),
            name: part(1),
            subresource: part(2),
        })
    }

    /// Resource and subresource, such as `pods/status`.
    pub(super) fn whole_resource(&self) -> String {
        match self.subresource.as_str() {
            "" => self.resource.clone(),
            part => format!("{}/{part}", self.resource),
        }
    }
}

/// A request of one user.
#[derive(Debug, Clone, Default)]
pub(super) struct Request {
    /// As RBAC names it: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub(super) verb: &'static str,
    pub(super) target: Target,
    /// The fields that a collection is selected by.
    pub(super) fields: BTreeMap<String, String>,
    pub(super) body: serde_json::Value,
}

impl Request {
    /// The name that it is about: a collection that is selected by name is about one object.
    pub(super) fn name(&self) -> &str {
        let selected = self.fields.get("metadata.name").map(String::as_str);
        if self.target.name.is_empty() { selected.unwrap_or_default() } else { &self.target.name }
    }
}

/// A field selector of equalities, such as `spec.nodeName=n1`; `None` where it is of another form.
pub(super) fn fields(selector: &str) -> Option<BTreeMap<String, String>> {
    let one = |part: &str| {
        let (field, value) = part.split_once("==").or_else(|| part.split_once('='))?;
        (!field.ends_with('!')).then(|| (field.to_owned(), value.to_owned()))
    };
    selector.split(',').filter(|part| !part.is_empty()).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_an_object_a_part_of_it_or_a_collection() {
        let target = |group: &str, namespace: &str, resource: &str, name: &str, subresource: &str| Target {
            group: group.into(),
            resource: resource.into(),
            namespace: namespace.into(),
            name: name.into(),
            subresource: subresource.into(),
        };
        let cases = [
            ("/api/v1/pods", Some(target("", "", "pods", "", ""))),
            ("/api/v1/namespaces/a/pods/b", Some(target("", "a", "pods", "b", ""))),
            ("/api/v1/namespaces/a/pods/b/status", Some(target("", "a", "pods", "b", "status"))),
            ("/api/v1/namespaces/a", Some(target("", "", "namespaces", "a", ""))),
            (
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1",
                Some(target("coordination.k8s.io", "kube-node-lease", "leases", "n1", "")),
            ),
            (
                "/apis/node.k8s.io/v1/runtimeclasses",
                Some(target("node.k8s.io", "", "runtimeclasses", "", "")),
            ),
            ("/api/v1/namespaces/a/pods/b/proxy/x", None),
            ("/api/v1", None),
            ("/healthz", None),
        ];
        for (path, expected) in cases {
            assert_eq!(Target::of(path), expected, "{path}");
        }
    }

    #[test]
    fn an_unsupported_selector_is_none() {
        let both = fields("spec.nodeName=n1,metadata.name==a").unwrap();
        assert_eq!(both.len(), 2);
        assert_eq!(both["metadata.name"], "a");
        assert_eq!(fields(""), Some(BTreeMap::new()));
        assert_eq!(fields("status.phase!=Running"), None);
        assert_eq!(fields("status.phase"), None);
    }
}
