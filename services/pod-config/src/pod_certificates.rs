//! Creates requests for certificates of pods at the API server (volumes.md §9.6). Their keys never leave volume-manager.

use std::time::Duration;

use keelson_kube_api::{KubeApi, KubeError, Object, Resource};
use keelson_pod_config_core::mutation::is_object_name;
use keelson_pod_config_core::pod_certificate::{CertificateRequest, Identities, request_object};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::{chain, error};
use serde_json::Value;
use tonic::{Code, Status};

use crate::cluster::POD_UNSEEN_DELAYS_MS;
use crate::control_plane::NodeState;

/// The requests, as the API has them.
pub const REQUESTS: Resource = Resource {
    group: "certificates.k8s.io",
    version: "v1beta1",
    plural: "podcertificaterequests",
    namespaced: true,
};

/// Why no request was created.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// There is no API server.
    #[error("certificates of pods need an API server, and the control plane of this node is {0}")]
    NoApiServer(&'static str),
    /// The Node is not registered, so it has no UID yet.
    #[error(
        "this node has not been registered at the API server yet; the certificate is requested after that"
    )]
    NotRegistered,
    /// The service account does not exist.
    #[error(
        "the service account {namespace}/{name} does not exist; create it, or name another one in the pod"
    )]
    NoServiceAccount {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The service account cannot be read.
    #[error("cannot read the service account {namespace}/{name}")]
    ServiceAccount {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The cause.
        #[source]
        source: Box<KubeError>,
    },
    /// The server does not create the request.
    #[error("cannot create a PodCertificateRequest for the signer {signer}{}", hint(.source))]
    Server {
        /// The signer.
        signer: String,
        /// The cause.
        #[source]
        source: Box<KubeError>,
    },
    /// The server's answer has no name.
    #[error("the API server's answer to a new PodCertificateRequest has no name")]
    NoName,
}

/// What to do about an error of the server.
fn hint(error: &KubeError) -> &'static str {
    match error.code() {
        Some(404) => {
            "; the API server has no certificates.k8s.io/v1beta1 podcertificaterequests: it needs Kubernetes 1.36, the feature gate \
             PodCertificateRequest and --runtime-config=certificates.k8s.io/v1beta1=true"
        }
        Some(422) => {
            "; this agent sends stubPKCS10Request, which API servers know from Kubernetes 1.36 on: older ones expect other fields"
        }
        Some(403) => {
            "; a node requests certificates only for pods that are bound to it, from signers that a volume of the pod names"
        }
        _ => "",
    }
}

/// Creates a request and returns its name.
///
/// # Errors
/// The request cannot be created, for now or at all.
pub async fn request(
    (api, control_plane): (Option<&KubeApi>, &'static str),
    (node_name, node): (&str, Option<&NodeState>),
    wanted: &CertificateRequest,
) -> Result<String, CertificateError> {
    let Some(api) = api else { return Err(CertificateError::NoApiServer(control_plane)) };
    let node_uid = node.filter(|node| node.registered).and_then(|node| uid_of(&node.json));
    let identities = Identities {
        node_name: node_name.to_owned(),
        node_uid: node_uid.ok_or(CertificateError::NotRegistered)?,
        service_account_uid: service_account_uid(api, wanted).await?,
    };
    let body = request_object(wanted, &identities);
    let created = api.create(REQUESTS, Some(&wanted.namespace), &body).await.map_err(|source| {
        CertificateError::Server { signer: wanted.signer_name.clone(), source: Box::new(source) }
    })?;
    let name = created.name();
    if name.is_empty() {
        return Err(CertificateError::NoName);
    }
    tracing::debug!(
        namespace = wanted.namespace,
        pod = wanted.pod_name,
        signer = wanted.signer_name,
        request = name,
        "requested a certificate"
    );
    Ok(name.to_owned())
}

fn uid_of(json: &[u8]) -> Option<String> {
    let object = Object(serde_json::from_slice::<Value>(json).ok()?);
    Some(object.uid().to_owned()).filter(|uid| !uid.is_empty())
}

async fn service_account_uid(api: &KubeApi, wanted: &CertificateRequest) -> Result<String, CertificateError> {
    let (namespace, name) = (&wanted.namespace, &wanted.service_account);
    let mut delays = POD_UNSEEN_DELAYS_MS.into_iter();
    let found = loop {
        match api.get(Resource::SERVICE_ACCOUNT, Some(namespace), name).await {
            Ok(found) => break found,
            Err(error) => match delays.next() {
                Some(delay) if error.is_unrelated() => tokio::time::sleep(Duration::from_millis(delay)).await,
                _ => {
                    let (namespace, name) = (namespace.clone(), name.clone());
                    return Err(CertificateError::ServiceAccount {
                        namespace,
                        name,
                        source: Box::new(error),
                    });
                }
            },
        }
    };
    let missing = || CertificateError::NoServiceAccount { namespace: namespace.clone(), name: name.clone() };
    found.map(|account| account.uid().to_owned()).filter(|uid| !uid.is_empty()).ok_or_else(missing)
}

/// Reads a request of the RPC.
///
/// # Errors
/// A field is missing or not valid.
pub fn from_wire(message: pb::RequestPodCertificateRequest) -> Result<CertificateRequest, Status> {
    let invalid = |text: String| error(Code::InvalidArgument, "BAD_FIELD", text);
    let fields = [
        ("namespace", &message.namespace),
        ("pod_name", &message.pod_name),
        ("pod_uid", &message.pod_uid),
        ("service_account", &message.service_account),
    ];
    // Each is part of a URL path or names an object.
    if let Some((field, value)) = fields.iter().find(|(_, value)| !is_object_name(value)) {
        return Err(invalid(format!("{field} {value:?} is not a valid name")));
    }
    for (field, is_missing) in [
        ("signer_name", message.signer_name.is_empty()),
        ("stub_pkcs10_request", message.stub_pkcs10_request.is_empty()),
    ] {
        if is_missing {
            return Err(invalid(format!("{field} is missing")));
        }
    }
    Ok(CertificateRequest {
        namespace: message.namespace,
        pod_name: message.pod_name,
        pod_uid: message.pod_uid,
        service_account: message.service_account,
        signer_name: message.signer_name,
        max_expiration_seconds: message.max_expiration_seconds,
        stub_pkcs10: message.stub_pkcs10_request,
        user_annotations: message.user_annotations.into_iter().collect(),
    })
}

/// The status of an error.
pub fn status(cause: &CertificateError) -> Status {
    let (code, reason) = match cause {
        CertificateError::NoApiServer(_) => (Code::FailedPrecondition, "NO_API_SERVER"),
        CertificateError::NotRegistered => (Code::Unavailable, "NODE_NOT_REGISTERED"),
        CertificateError::NoServiceAccount { .. } => (Code::NotFound, "SERVICE_ACCOUNT_UNKNOWN"),
        CertificateError::ServiceAccount { source, .. } if source.is_retryable() => {
            (Code::Unavailable, "CONTROL_PLANE_AWAY")
        }
        CertificateError::Server { source, .. } => match source.code() {
            Some(404) => (Code::FailedPrecondition, "API_NOT_SERVED"),
            // The server has generated a name that another request has.
            Some(409) => (Code::Aborted, "NAME_TAKEN"),
            None | Some(408 | 429 | 500..) => (Code::Unavailable, "CONTROL_PLANE_AWAY"),
            Some(_) => (Code::FailedPrecondition, "CERTIFICATE_REFUSED"),
        },
        CertificateError::ServiceAccount { .. } | CertificateError::NoName => {
            (Code::FailedPrecondition, "CERTIFICATE_REFUSED")
        }
    };
    error(code, reason, chain(cause))
}

#[cfg(test)]
#[path = "pod_certificates_tests.rs"]
mod tests;
