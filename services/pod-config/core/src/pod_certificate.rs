//! The request for a certificate of a pod (volumes.md §9.6).

use std::collections::BTreeMap;

use keelson_kube_model::base64;
use serde_json::{Value, json};

/// A requested certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateRequest {
    /// Namespace of the pod and of its service account.
    pub namespace: String,
    /// Name of the pod.
    pub pod_name: String,
    /// Its UID.
    pub pod_uid: String,
    /// Name of its service account.
    pub service_account: String,
    /// The signer.
    pub signer_name: String,
    /// The longest lifetime in seconds; the API server has a default.
    pub max_expiration_seconds: Option<i32>,
    /// A PKCS #10 request with an empty subject, in DER, signed with the new key.
    pub stub_pkcs10: Vec<u8>,
    /// What the pod tells the signer.
    pub user_annotations: BTreeMap<String, String>,
}

/// What only the API server knows of the objects that a request names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identities {
    /// Name of this node.
    pub node_name: String,
    /// UID of its Node.
    pub node_uid: String,
    /// UID of the service account.
    pub service_account_uid: String,
}

/// Builds the `PodCertificateRequest` object (`certificates.k8s.io/v1beta1`), which the pod owns.
pub fn request_object(wanted: &CertificateRequest, identities: &Identities) -> Value {
    let Identities { node_name, node_uid, service_account_uid } = identities;
    let CertificateRequest { namespace, pod_name, pod_uid, service_account, signer_name, .. } = wanted;
    let mut object = json!({
        "apiVersion": "certificates.k8s.io/v1beta1",
        "kind": "PodCertificateRequest",
        "metadata": {
            "namespace": namespace,
            "generateName": "req-",
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod_uid}],
        },
        "spec": {
            "signerName": signer_name,
            "podName": pod_name,
            "podUID": pod_uid,
            "serviceAccountName": service_account,
            "serviceAccountUID": service_account_uid,
            "nodeName": node_name,
            "nodeUID": node_uid,
            "stubPKCS10Request": base64::encode(&wanted.stub_pkcs10),
        },
    });
    let spec = &mut object["spec"];
    if let Some(seconds) = wanted.max_expiration_seconds {
        spec["maxExpirationSeconds"] = seconds.into();
    }
    if !wanted.user_annotations.is_empty() {
        spec["unverifiedUserAnnotations"] = json!(wanted.user_annotations);
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_pod_account_and_node_with_their_uids_and_belongs_to_the_pod() {
        let wanted = CertificateRequest {
            namespace: "a".to_owned(),
            pod_name: "web".to_owned(),
            pod_uid: "u".to_owned(),
            service_account: "default".to_owned(),
            signer_name: "example.com/ca".to_owned(),
            max_expiration_seconds: None,
            stub_pkcs10: b"request".to_vec(),
            user_annotations: BTreeMap::new(),
        };
        let identities = Identities {
            node_name: "n1".to_owned(),
            node_uid: "n".to_owned(),
            service_account_uid: "s".to_owned(),
        };
        let object = request_object(&wanted, &identities);
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u"});
        let metadata = json!({"namespace": "a", "generateName": "req-", "ownerReferences": [owner]});
        assert_eq!(object["metadata"], metadata);
        let spec = json!({
            "signerName": "example.com/ca",
            "podName": "web",
            "podUID": "u",
            "serviceAccountName": "default",
            "serviceAccountUID": "s",
            "nodeName": "n1",
            "nodeUID": "n",
            "stubPKCS10Request": "cmVxdWVzdA==",
        });
        assert_eq!(object["spec"], spec);
        let annotations = [("example.com/dns".to_owned(), "a.b".to_owned())].into();
        let more = CertificateRequest {
            max_expiration_seconds: Some(3600),
            user_annotations: annotations,
            ..wanted
        };
        let spec = &request_object(&more, &identities)["spec"];
        assert_eq!(spec["maxExpirationSeconds"], json!(3600));
        assert_eq!(spec["unverifiedUserAnnotations"], json!({"example.com/dns": "a.b"}));
    }
}
