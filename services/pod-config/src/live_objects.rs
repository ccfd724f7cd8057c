//! Objects as they are now, for decisions that a cached one would make wrong (volumes.md §15).
//!
//! With an API server each read is one GET there, without a resource version, so that the server reads its store and not its own
//! cache. Nothing is cached or retried here: the caller asks again. Without an API server, claims and PersistentVolumes come from
//! the manifests ([`VolumeObjects`]), bound to each other.

use std::time::Duration;

use keelson_kube_api::{CALL_ENDS_WITHIN, KubeApi, KubeError, Object, Resource};
use keelson_pod_config_core::mutation::is_object_name;
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::{chain, error};
use tonic::{Code, Status};

use crate::volume_objects::{ObjectLookup, VolumeObjects};

/// How long a read may take, including the wait for the rate limiter.
const READ_ENDS_WITHIN: Duration = CALL_ENDS_WITHIN;

/// The objects of a kind that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// Any of a namespace.
    Namespace,
    /// Any of the cluster.
    Cluster,
    /// Only the one with the name of this node.
    OwnNode,
}

/// A kind that can be read.
#[derive(Debug)]
struct LiveKind {
    kind: &'static str,
    resource: Resource,
    scope: Scope,
    /// Without an API server, it comes from the manifests.
    in_manifests: bool,
}

const KINDS: [LiveKind; 6] = [
    LiveKind {
        kind: "PersistentVolumeClaim",
        resource: Resource { group: "", version: "v1", plural: "persistentvolumeclaims", namespaced: true },
        scope: Scope::Namespace,
        in_manifests: true,
    },
    LiveKind {
        kind: "PersistentVolume",
        resource: Resource { group: "", version: "v1", plural: "persistentvolumes", namespaced: false },
        scope: Scope::Cluster,
        in_manifests: true,
    },
    LiveKind {
        kind: "VolumeAttachment",
        resource: Resource {
            group: "storage.k8s.io",
            version: "v1",
            plural: "volumeattachments",
            namespaced: false,
        },
        scope: Scope::Cluster,
        in_manifests: false,
    },
    LiveKind {
        kind: "CSIDriver",
        resource: Resource {
            group: "storage.k8s.io",
            version: "v1",
            plural: "csidrivers",
            namespaced: false,
        },
        scope: Scope::Cluster,
        in_manifests: false,
    },
    LiveKind {
        kind: "CSINode",
        resource: Resource { group: "storage.k8s.io", version: "v1", plural: "csinodes", namespaced: false },
        scope: Scope::OwnNode,
        in_manifests: false,
    },
    LiveKind { kind: "Node", resource: Resource::NODE, scope: Scope::OwnNode, in_manifests: false },
];

/// Why an object could not be read. `what` is the kind with the name, such as `PersistentVolume pv-1`.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// The kind cannot be read.
    #[error("{kind:?} is not a kind that GetLive reads; it reads {}", KINDS.map(|known| known.kind).join(", "))]
    KindNotRead {
        /// The requested kind.
        kind: String,
    },
    /// The name or namespace is not valid for the kind.
    #[error("{field} {value:?} is not valid for a {kind}: {expected}")]
    InvalidName {
        /// `name` or `namespace`.
        field: &'static str,
        /// The given value.
        value: String,
        /// The kind.
        kind: &'static str,
        /// What is valid.
        expected: String,
    },
    /// There is no source for the kind.
    #[error(
        "cannot read the {what}: it is read from an API server, and the control plane of this node is {control_plane}"
    )]
    NoApiServer {
        /// The object.
        what: String,
        /// The name of the control plane.
        control_plane: &'static str,
    },
    /// The object does not exist.
    #[error("the {what} does not exist{hint}")]
    Unknown {
        /// The object.
        what: String,
        /// What to do; empty if the API server says so.
        hint: &'static str,
    },
    /// No manifest has the object so far, and some sources have not been read.
    #[error("the sources have not been read yet; the {what} may be in one of them")]
    SourcesNotRead {
        /// The object.
        what: String,
    },
    /// The API server refuses the read.
    #[error("cannot read the {what}; {hint}")]
    Refused {
        /// The object.
        what: String,
        /// What to do.
        hint: String,
        /// The refusal.
        #[source]
        source: Box<KubeError>,
    },
    /// The API server does not answer, or is overloaded or failing.
    #[error("cannot read the {what}")]
    Unavailable {
        /// The object.
        what: String,
        /// The cause.
        #[source]
        source: Box<KubeError>,
    },
    /// The time is over before the API server has answered.
    #[error("cannot read the {what}: the API server has not answered within {} s", READ_ENDS_WITHIN.as_secs())]
    TimedOut {
        /// The object.
        what: String,
    },
    /// The API server answers with something else.
    #[error("cannot read the {what}: the API server answers with {answer:?}")]
    OtherObject {
        /// The object.
        what: String,
        /// The kind, namespace and name in the answer.
        answer: String,
    },
}

/// Reads objects for one node.
#[derive(Debug, Clone)]
pub struct LiveObjects<'a> {
    /// The API server; `None` without one.
    pub api: Option<&'a KubeApi>,
    /// The name of the control plane, for messages.
    pub control_plane: &'static str,
    /// Name of this node.
    pub node_name: &'a str,
    /// The claims and PersistentVolumes of the manifests.
    pub manifests: VolumeObjects,
}

impl LiveObjects<'_> {
    /// Reads an object. Returns it as JSON.
    ///
    /// # Errors
    /// The object cannot be read, does not exist, or the API server refuses or does not answer.
    pub async fn read(&self, request: &pb::GetLiveRequest) -> Result<Vec<u8>, LiveError> {
        let pb::GetLiveRequest { kind, namespace, name } = request;
        let Some(known) = KINDS.iter().find(|known| known.kind == kind) else {
            return Err(LiveError::KindNotRead { kind: kind.clone() });
        };
        self.check(known, namespace, name)?;
        let what = match known.scope {
            Scope::Namespace => format!("{kind} {namespace}/{name}"),
            Scope::Cluster | Scope::OwnNode => format!("{kind} {name}"),
        };
        match self.api {
            Some(api) => self.read_at_server(api, known, request, what).await,
            None if known.in_manifests => self.read_in_manifests(request, what),
            None => Err(LiveError::NoApiServer { what, control_plane: self.control_plane }),
        }
    }

    /// Checks the parts of a URL path.
    fn check(&self, known: &LiveKind, namespace: &str, name: &str) -> Result<(), LiveError> {
        let invalid = |field, value: &str, expected: String| {
            Err(LiveError::InvalidName { field, value: value.to_owned(), kind: known.kind, expected })
        };
        let expected = || "it must be the name of an object".to_owned();
        // The name of a CSIDriver may have capital letters.
        if !is_object_name(&name.to_ascii_lowercase()) {
            return invalid("name", name, expected());
        }
        match known.scope {
            Scope::Namespace if !is_object_name(namespace) => invalid("namespace", namespace, expected()),
            Scope::Cluster | Scope::OwnNode if !namespace.is_empty() => {
                invalid("namespace", namespace, "it must be empty".to_owned())
            }
            Scope::OwnNode if name != self.node_name => {
                invalid("name", name, format!("only that of this node, {}, is read", self.node_name))
            }
            Scope::Namespace | Scope::Cluster | Scope::OwnNode => Ok(()),
        }
    }

    async fn read_at_server(
        &self,
        api: &KubeApi,
        known: &LiveKind,
        request: &pb::GetLiveRequest,
        what: String,
    ) -> Result<Vec<u8>, LiveError> {
        let namespace = known.resource.namespaced.then_some(request.namespace.as_str());
        let call = api.get(known.resource, namespace, &request.name);
        match tokio::time::timeout(READ_ENDS_WITHIN, call).await {
            Err(_) => Err(LiveError::TimedOut { what }),
            Ok(Ok(None)) => Err(LiveError::Unknown { what, hint: "" }),
            Ok(Ok(Some(object))) if is_of(&object, request) => Ok(object.0.to_string().into_bytes()),
            Ok(Ok(Some(object))) => {
                let kind = object.0["kind"].as_str().unwrap_or_default();
                let answer = format!("{kind} {}/{}", object.namespace(), object.name());
                Err(LiveError::OtherObject { what, answer })
            }
            Ok(Err(source)) => Err(match source.code() {
                // A timeout, too many requests, or a server error.
                None | Some(408 | 429 | 500..) => LiveError::Unavailable { what, source: Box::new(source) },
                Some(code) => {
                    let hint = self.hint(code, source.is_unrelated());
                    LiveError::Refused { what, hint, source: Box::new(source) }
                }
            }),
        }
    }

    /// What to do about a refusal.
    fn hint(&self, code: u16, unrelated: bool) -> String {
        match code {
            403 if unrelated => {
                "the Node authorizer allows it once it has seen that the object belongs to this node or to a pod \
                 bound to it, which takes a moment after the binding"
                    .to_owned()
            }
            403 => format!(
                "the user of the kubeconfig may not get it; the Node authorizer allows it to system:node:{}",
                self.node_name
            ),
            401 => "the credential in the kubeconfig is not valid".to_owned(),
            _ => "the API server does not accept the request".to_owned(),
        }
    }

    /// Reads a claim or PersistentVolume from the manifests.
    fn read_in_manifests(&self, request: &pb::GetLiveRequest, what: String) -> Result<Vec<u8>, LiveError> {
        match self.manifests.get(&request.kind, &request.namespace, &request.name) {
            ObjectLookup::Object(json) => Ok(json.to_vec()),
            ObjectLookup::NotFound => Err(LiveError::Unknown { what, hint: "; add it to the manifests" }),
            ObjectLookup::SourcesNotRead => Err(LiveError::SourcesNotRead { what }),
        }
    }
}

/// Whether it is the requested object.
fn is_of(object: &Object, request: &pb::GetLiveRequest) -> bool {
    object.0["kind"] == request.kind.as_str()
        && object.namespace() == request.namespace
        && object.name() == request.name
}

/// The gRPC status of an error.
pub fn status(cause: &LiveError) -> Status {
    let (code, reason) = match cause {
        LiveError::KindNotRead { .. } => (Code::InvalidArgument, "KIND_NOT_READ"),
        LiveError::InvalidName { .. } => (Code::InvalidArgument, "BAD_FIELD"),
        LiveError::NoApiServer { .. } => (Code::FailedPrecondition, "NO_API_SERVER"),
        LiveError::Unknown { .. } => (Code::NotFound, "OBJECT_UNKNOWN"),
        LiveError::SourcesNotRead { .. } => (Code::Unavailable, "SOURCES_NOT_READ"),
        LiveError::Refused { source, .. } if source.is_unrelated() => {
            (Code::FailedPrecondition, "OBJECT_NOT_VISIBLE")
        }
        LiveError::Refused { .. } => (Code::FailedPrecondition, "READ_REFUSED"),
        LiveError::Unavailable { .. } | LiveError::TimedOut { .. } | LiveError::OtherObject { .. } => {
            (Code::Unavailable, "CONTROL_PLANE_AWAY")
        }
    };
    error(code, reason, chain(cause))
}

#[cfg(test)]
#[path = "live_objects_tests.rs"]
mod tests;
