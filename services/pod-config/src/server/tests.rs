//! Errors of token requests.

use keelson_service_kit::status::reason;
use serde_json::json;

use super::*;
use crate::checkpoint::Checkpoint;
use crate::fake_api::{FakeApi, refusal};

fn request_for(pod: &str) -> TokenRequest {
    TokenRequest {
        namespace: "a".into(),
        service_account: "builder".into(),
        pod_name: pod.into(),
        pod_uid: "u".into(),
        audiences: Vec::new(),
        expiration_seconds: 600,
    }
}

async fn failed_token_status(answer: Option<(u16, serde_json::Value)>) -> Status {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(folder.path(), move |_| answer.clone()).await;
    let cluster = Cluster::new(server.api.clone(), Checkpoint::default(), &mut BTreeMap::new());
    let status = token_status(&cluster.create_token(&request_for("p")).await.unwrap_err());
    let requests = server.requests();
    assert_eq!(requests.len(), 1, "a token is requested once: {requests:?}");
    assert_eq!(requests[0].path, "/api/v1/namespaces/a/serviceaccounts/builder/token");
    status
}

#[tokio::test]
async fn token_request_errors_map_to_grpc_codes_by_whether_a_retry_can_help() {
    for (answer, code, expected) in [
        (refusal(404), Code::NotFound, "SERVICE_ACCOUNT_UNKNOWN"),
        (refusal(400), Code::FailedPrecondition, "TOKEN_REFUSED"),
        (refusal(401), Code::FailedPrecondition, "TOKEN_REFUSED"),
        (refusal(403), Code::FailedPrecondition, "TOKEN_REFUSED"),
        (refusal(422), Code::FailedPrecondition, "TOKEN_REFUSED"),
        (refusal(408), Code::Unavailable, "CONTROL_PLANE_AWAY"),
        (refusal(429), Code::Unavailable, "CONTROL_PLANE_AWAY"),
        (refusal(500), Code::Unavailable, "CONTROL_PLANE_AWAY"),
        (refusal(503), Code::Unavailable, "CONTROL_PLANE_AWAY"),
        ((201, json!({"kind": "TokenRequest", "status": {}})), Code::FailedPrecondition, "TOKEN_REFUSED"),
    ] {
        let http = answer.0;
        let status = failed_token_status(Some(answer)).await;
        assert_eq!((status.code(), reason(&status).as_deref()), (code, Some(expected)), "{http}");
        let words = if http == 201 { "has no token" } else { "in its words" };
        assert!(status.message().contains(words), "{http}: {status:?}");
    }
}

#[tokio::test]
async fn a_token_request_is_retried_while_the_server_has_not_seen_the_pod() {
    let unseen = [
        (403, "Forbidden", "node requested token bound to a pod scheduled on a different node"),
        (403, "Forbidden", "no relationship found between node 'n1' and this object"),
        (404, "NotFound", "pods \"p\" not found"),
        (409, "Conflict", "the UID in the bound object reference (u) does not match the UID in record"),
    ];
    let others = [(403, "Forbidden", "RBAC"), (404, "NotFound", "serviceaccounts \"builder\" not found")];
    for ((code, cause, message), is_unseen) in
        unseen.into_iter().map(|row| (row, true)).chain(others.into_iter().map(|row| (row, false)))
    {
        for refusals in [1, 99] {
            let folder = tempfile::tempdir().unwrap();
            let status = json!({"kind": "Status", "code": code, "reason": cause, "message": message});
            let token = json!({"kind": "TokenRequest",
                "status": {"token": "t", "expirationTimestamp": "2100-01-01T00:00:00Z"}});
            let mut requests = 0;
            let server = FakeApi::start(folder.path(), move |_| {
                requests += 1;
                Some(if requests > refusals { (201, token.clone()) } else { (code, status.clone()) })
            })
            .await;
            let cluster = Cluster::new(server.api.clone(), Checkpoint::default(), &mut BTreeMap::new());
            let token = cluster.create_token(&request_for("p")).await;
            let (expected, tries) = match (is_unseen, refusals) {
                (true, 1) => (true, 2),
                (true, _) => (false, 6),
                (false, _) => (false, 1),
            };
            assert_eq!((token.is_ok(), server.requests().len()), (expected, tries), "{message}");
        }
    }
}

#[test]
fn a_token_request_without_a_response_is_unavailable() {
    let unreachable =
        KubeError::Unreachable { server: "s".into(), what: "w".into(), message: "m".into(), retry_after: 0 };
    let kubeconfig = KubeError::Kubeconfig { path: "k".into(), message: "m".into() };
    for cause in [unreachable, kubeconfig] {
        let status = token_status(&TokenError::Server(cause));
        assert_eq!(reason(&status).as_deref(), Some("CONTROL_PLANE_AWAY"), "{status:?}");
    }
}
