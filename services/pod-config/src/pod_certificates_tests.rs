use std::collections::BTreeMap;

use keelson_service_kit::status::reason;
use serde_json::json;

use super::*;
use crate::fake_api::{FakeApi, RecordedRequest, refusal};

const ACCOUNT: &str = "/api/v1/namespaces/a/serviceaccounts/web";
const COLLECTION: &str = "/apis/certificates.k8s.io/v1beta1/namespaces/a/podcertificaterequests";

fn message() -> pb::RequestPodCertificateRequest {
    pb::RequestPodCertificateRequest {
        namespace: "a".into(),
        pod_name: "web-1".into(),
        pod_uid: "u1".into(),
        service_account: "web".into(),
        signer_name: "example.com/ca".into(),
        max_expiration_seconds: Some(3600),
        stub_pkcs10_request: b"request".to_vec(),
        user_annotations: BTreeMap::new().into_iter().collect(),
    }
}

fn node(registered: bool) -> NodeState {
    NodeState { json: br#"{"metadata": {"uid": "n-uid"}}"#.to_vec(), registered }
}

/// Calls a server that answers reads of the service account with `account` and a new request with `created`.
async fn requested(
    account: (u16, Value),
    created: (u16, Value),
) -> (Result<String, CertificateError>, Vec<RecordedRequest>) {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(folder.path(), move |request| {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", ACCOUNT) => Some(account.clone()),
            ("POST", COLLECTION) => Some(created.clone()),
            other => panic!("{other:?}"),
        }
    })
    .await;
    let wanted = from_wire(message()).unwrap();
    let result = request((Some(&server.api), "api"), ("n1", Some(&node(true))), &wanted).await;
    let requests = server.requests();
    (result, requests)
}

fn account() -> (u16, Value) {
    (200, json!({"metadata": {"name": "web", "uid": "s-uid"}}))
}

fn created() -> (u16, Value) {
    (201, json!({"metadata": {"name": "req-x1"}}))
}

fn code_and_reason(cause: &CertificateError) -> (Code, String) {
    let status = status(cause);
    (status.code(), reason(&status).unwrap_or_default())
}

#[tokio::test]
async fn a_certificate_request_has_the_uids_of_node_and_service_account() {
    let (result, requests) = requested(account(), created()).await;
    assert_eq!(result.unwrap(), "req-x1");
    let spec = &requests[1].body["spec"];
    let fields = ["nodeName", "nodeUID", "serviceAccountName", "serviceAccountUID", "podName", "podUID"];
    let values: Vec<&str> = fields.iter().filter_map(|field| spec[*field].as_str()).collect();
    assert_eq!(values, ["n1", "n-uid", "web", "s-uid", "web-1", "u1"]);
    assert_eq!(requests[1].body["metadata"]["ownerReferences"][0]["uid"], "u1");
}

#[tokio::test]
async fn each_refusal_of_a_certificate_request_says_what_to_do() {
    let refused = |code, reason: &str, text: &str| (code, reason.to_owned(), text.to_owned());
    for (answer, (code, reason, text)) in [
        (
            404,
            refused(
                Code::FailedPrecondition,
                "API_NOT_SERVED",
                "--runtime-config=certificates.k8s.io/v1beta1",
            ),
        ),
        (422, refused(Code::FailedPrecondition, "CERTIFICATE_REFUSED", "from Kubernetes 1.36 on")),
        (403, refused(Code::FailedPrecondition, "CERTIFICATE_REFUSED", "bound to it")),
        (409, refused(Code::Aborted, "NAME_TAKEN", "example.com/ca")),
        (503, refused(Code::Unavailable, "CONTROL_PLANE_AWAY", "example.com/ca")),
    ] {
        let cause = requested(account(), refusal(answer)).await.0.unwrap_err();
        assert_eq!(code_and_reason(&cause), (code, reason), "{answer}");
        let message = status(&cause).message().to_owned();
        assert!(message.contains(&text) && message.contains("in its words"), "{message}");
    }
    let cause = requested(account(), (201, json!({"metadata": {}}))).await.0.unwrap_err();
    assert!(matches!(cause, CertificateError::NoName), "{cause:?}");
}

#[tokio::test]
async fn a_service_account_that_cannot_be_read_is_named() {
    for (answer, code, reason) in [
        (404, Code::NotFound, "SERVICE_ACCOUNT_UNKNOWN"),
        (403, Code::FailedPrecondition, "CERTIFICATE_REFUSED"),
        (500, Code::Unavailable, "CONTROL_PLANE_AWAY"),
    ] {
        let (result, requests) = requested(refusal(answer), created()).await;
        let cause = result.unwrap_err();
        assert_eq!(code_and_reason(&cause), (code, reason.to_owned()), "{answer}");
        assert!(status(&cause).message().contains("service account a/web"), "{cause}");
        assert!(requests.iter().all(|request| request.method == "GET"), "{requests:?}");
    }
}

#[tokio::test]
async fn certificates_need_an_api_server_and_a_registered_node() {
    let wanted = from_wire(message()).unwrap();
    let cause = request((None, "etcd"), ("n1", None), &wanted).await.unwrap_err();
    assert_eq!(code_and_reason(&cause), (Code::FailedPrecondition, "NO_API_SERVER".to_owned()));
    assert!(cause.to_string().contains("etcd"));
    let api = KubeApi::new("/none".into(), "test");
    for node in [None, Some(node(false))] {
        let cause = request((Some(&api), "api"), ("n1", node.as_ref()), &wanted).await.unwrap_err();
        assert_eq!(code_and_reason(&cause), (Code::Unavailable, "NODE_NOT_REGISTERED".to_owned()));
    }
}

#[test]
fn an_invalid_certificate_request_names_its_field() {
    for (field, message) in [
        ("namespace", pb::RequestPodCertificateRequest { namespace: "../a".into(), ..message() }),
        ("pod_name", pb::RequestPodCertificateRequest { pod_name: String::new(), ..message() }),
        ("service_account", pb::RequestPodCertificateRequest { service_account: "a/b".into(), ..message() }),
        ("signer_name", pb::RequestPodCertificateRequest { signer_name: String::new(), ..message() }),
        (
            "stub_pkcs10_request",
            pb::RequestPodCertificateRequest { stub_pkcs10_request: Vec::new(), ..message() },
        ),
    ] {
        let refused = from_wire(message).unwrap_err();
        assert_eq!((refused.code(), reason(&refused).as_deref()), (Code::InvalidArgument, Some("BAD_FIELD")));
        assert!(refused.message().contains(field), "{refused:?}");
    }
}
