//! API resources and ranges of their objects.

use serde_json::Value;

/// An API resource as in the API's paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Resource {
    /// Empty: the core group.
    pub group: &'static str,
    /// `v1`…
    pub version: &'static str,
    /// `pods`…
    pub plural: &'static str,
    /// Whether its objects are in namespaces.
    pub namespaced: bool,
}

impl Resource {
    /// `v1` Pod.
    pub const POD: Self = Self::core("pods", true);
    /// `v1` Node.
    pub const NODE: Self = Self::core("nodes", false);
    /// `v1` Secret.
    pub const SECRET: Self = Self::core("secrets", true);
    /// `v1` ConfigMap.
    pub const CONFIG_MAP: Self = Self::core("configmaps", true);
    /// `v1` Service.
    pub const SERVICE: Self = Self::core("services", true);
    /// `v1` ServiceAccount.
    pub const SERVICE_ACCOUNT: Self = Self::core("serviceaccounts", true);
    /// `v1` Event.
    pub const EVENT: Self = Self::core("events", true);
    /// `coordination.k8s.io/v1` Lease.
    pub const LEASE: Self =
        Self { group: "coordination.k8s.io", version: "v1", plural: "leases", namespaced: true };
    /// `certificates.k8s.io/v1` CertificateSigningRequest.
    pub const CERTIFICATE_SIGNING_REQUEST: Self = Self {
        group: "certificates.k8s.io",
        version: "v1",
        plural: "certificatesigningrequests",
        namespaced: false,
    };
    /// `node.k8s.io/v1` RuntimeClass.
    pub const RUNTIME_CLASS: Self =
        Self { group: "node.k8s.io", version: "v1", plural: "runtimeclasses", namespaced: false };

    const fn core(plural: &'static str, namespaced: bool) -> Self {
        Self { group: "", version: "v1", plural, namespaced }
    }

    /// The path of the collection, of all namespaces or of one.
    pub fn path(&self, namespace: Option<&str>) -> String {
        let root = if self.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", self.group) };
        match namespace.filter(|_| self.namespaced) {
            Some(namespace) => format!("{root}/{}/namespaces/{namespace}/{}", self.version, self.plural),
            None => format!("{root}/{}/{}", self.version, self.plural),
        }
    }

    /// An object of this resource, for messages: `pods default/web`.
    pub(crate) fn named(&self, namespace: Option<&str>, name: &str) -> String {
        match namespace {
            Some(namespace) => format!("{} {namespace}/{name}", self.plural),
            None => format!("{} {name}", self.plural),
        }
    }
}

/// The objects of a resource to list and watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Range {
    /// Their kind.
    pub resource: Resource,
    /// Only of this namespace.
    pub namespace: Option<String>,
    /// A field selector, such as `spec.nodeName=n1`.
    pub fields: Option<String>,
}

impl Range {
    /// Every object of a resource in all namespaces.
    pub fn all(resource: Resource) -> Self {
        Self { resource, namespace: None, fields: None }
    }

    /// The objects that a field selector chooses.
    pub fn of_fields(resource: Resource, fields: String) -> Self {
        Self { resource, namespace: None, fields: Some(fields) }
    }

    /// One object.
    pub fn one(resource: Resource, namespace: Option<&str>, name: &str) -> Self {
        let fields = Some(format!("metadata.name={name}"));
        Self { resource, namespace: namespace.map(str::to_owned), fields }
    }
}

/// An object as the API returns it, with every field.
#[derive(Debug, Clone, PartialEq)]
pub struct Object(pub Value);

impl Object {
    fn metadata(&self, field: &str) -> &str {
        self.0["metadata"][field].as_str().unwrap_or_default()
    }

    /// `metadata.name`.
    pub fn name(&self) -> &str {
        self.metadata("name")
    }

    /// `metadata.namespace`; empty for a cluster-scoped object.
    pub fn namespace(&self) -> &str {
        self.metadata("namespace")
    }

    /// `metadata.uid`.
    pub fn uid(&self) -> &str {
        self.metadata("uid")
    }

    /// `metadata.resourceVersion`.
    pub fn version(&self) -> &str {
        self.metadata("resourceVersion")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        for (resource, namespace, path) in [
            (Resource::POD, None, "/api/v1/pods"),
            (Resource::POD, Some("a"), "/api/v1/namespaces/a/pods"),
            (Resource::NODE, Some("a"), "/api/v1/nodes"),
            (
                Resource::LEASE,
                Some("kube-node-lease"),
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
            ),
            (Resource::RUNTIME_CLASS, None, "/apis/node.k8s.io/v1/runtimeclasses"),
        ] {
            assert_eq!(resource.path(namespace), path);
        }
    }
}
