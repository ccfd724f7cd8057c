use super::*;
use crate::fake_api::{FakeApi, RecordedRequest, refusal};

const CALLER: [&str; 1] = ["volume-manager"];

fn csinode_request(verb: WireVerb, body: &Value) -> pb::MutateRequest {
    pb::MutateRequest {
        kind: "CSINode".into(),
        name: "n1".into(),
        verb: verb.into(),
        body_json: body.to_string().into_bytes(),
        uid: if verb == WireVerb::Delete { "u1".into() } else { String::new() },
        ..pb::MutateRequest::default()
    }
}

fn claim_request(verb: WireVerb, body: &Value) -> pb::MutateRequest {
    pb::MutateRequest {
        kind: "PersistentVolumeClaim".into(),
        subresource: "status".into(),
        namespace: "default".into(),
        name: "data".into(),
        verb: verb.into(),
        body_json: body.to_string().into_bytes(),
        ..pb::MutateRequest::default()
    }
}

fn node() -> Value {
    json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": {"name": "n1", "resourceVersion": "7"},
        "spec": {"drivers": []}})
}

#[tokio::test]
async fn allowed_mutations_use_the_api_method_and_path() {
    let folder = tempfile::tempdir().unwrap();
    let now = json!({"kind": "X", "metadata": {"name": "now"}});
    let server = FakeApi::start(folder.path(), move |_| Some((200, now.clone()))).await;
    let patch = json!({"metadata": {"resourceVersion": "3"}, "status": {"capacity": {"storage": "2Gi"}}});
    let requests = [
        csinode_request(WireVerb::Create, &node()),
        csinode_request(WireVerb::Update, &node()),
        csinode_request(WireVerb::MergePatch, &patch),
        csinode_request(WireVerb::Delete, &json!(null)),
        claim_request(WireVerb::StrategicPatch, &patch),
    ];
    let mut names = Vec::new();
    for request in requests {
        let changed = mutate(Some(&server.api), "api", &CALLER, "n1", request).await.unwrap();
        names.push(changed.map(|object| object.name().to_owned()));
    }
    let now = || Some("now".to_owned());
    assert_eq!(names, [now(), now(), now(), None, now()]);
    let root = "/apis/storage.k8s.io/v1/csinodes";
    let claim = "/api/v1/namespaces/default/persistentvolumeclaims/data/status";
    let json_of = |kind: &str| format!("application/{kind}");
    let expected = [
        ("POST", root.to_owned(), json_of("json"), node()),
        ("PUT", format!("{root}/n1"), json_of("json"), node()),
        ("PATCH", format!("{root}/n1"), json_of("merge-patch+json"), patch.clone()),
        ("DELETE", format!("{root}/n1"), json_of("json"), json!({"preconditions": {"uid": "u1"}})),
        ("PATCH", claim.to_owned(), json_of("strategic-merge-patch+json"), patch),
    ];
    let requests = expected.map(|(method, path, content_type, body)| RecordedRequest {
        method: method.to_owned(),
        path,
        content_type,
        body,
    });
    assert_eq!(server.requests(), requests);
}

#[tokio::test]
async fn mutations_that_are_not_listed_are_denied_before_any_api_request() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(folder.path(), |_| Some((200, json!({})))).await;
    let other = |change: fn(&mut pb::MutateRequest)| {
        let mut request = claim_request(WireVerb::MergePatch, &json!({}));
        change(&mut request);
        request
    };
    for (callers, request) in [
        (&["node-api"][..], csinode_request(WireVerb::Create, &node())),
        (&[][..], csinode_request(WireVerb::Create, &node())),
        (&CALLER[..], other(|r| r.kind = "Secret".into())),
        (&CALLER[..], other(|r| r.subresource = String::new())),
        (&CALLER[..], other(|r| r.verb = WireVerb::Update.into())),
        (
            &CALLER[..],
            pb::MutateRequest { name: "n2".into(), ..csinode_request(WireVerb::MergePatch, &json!({})) },
        ),
    ] {
        let description = format!("{request:?}");
        let refused = mutate(Some(&server.api), "api", callers, "n1", request).await.unwrap_err();
        assert_eq!(status(&refused).code(), Code::PermissionDenied, "{description}");
    }
    assert!(server.requests().is_empty());
}

#[tokio::test]
async fn a_mutation_body_for_another_object_is_rejected_by_field() {
    let with = |pointer: &str, value: Value| {
        let mut node = node();
        *node.pointer_mut(pointer).unwrap() = value;
        node
    };
    let bare = json!({"metadata": {}});
    for (request, field) in [
        (csinode_request(WireVerb::Unspecified, &node()), "verb"),
        (csinode_request(WireVerb::Create, &json!([])), "body_json is not an object"),
        (
            pb::MutateRequest { body_json: b"{".to_vec(), ..csinode_request(WireVerb::Create, &node()) },
            "not JSON",
        ),
        (csinode_request(WireVerb::Create, &with("/kind", json!("Secret"))), "kind"),
        (csinode_request(WireVerb::Create, &with("/metadata/name", json!("n2"))), "metadata.name"),
        (
            csinode_request(WireVerb::Update, &with("/metadata/resourceVersion", json!(""))),
            "metadata.resourceVersion",
        ),
        (csinode_request(WireVerb::Create, &bare), "kind"),
        (csinode_request(WireVerb::MergePatch, &json!({"metadata": {"name": "n2"}})), "metadata.name"),
        (claim_request(WireVerb::MergePatch, &json!({"metadata": {"namespace": "b"}})), "metadata.namespace"),
        (pb::MutateRequest { uid: String::new(), ..csinode_request(WireVerb::Delete, &bare) }, "uid"),
        (
            pb::MutateRequest { namespace: "a".into(), ..csinode_request(WireVerb::Create, &node()) },
            "namespace",
        ),
    ] {
        let refused = status(&mutate(None, "none", &CALLER, "n1", request).await.unwrap_err());
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        assert!(refused.message().contains(field), "{field}: {refused:?}");
    }
}

#[tokio::test]
async fn mutation_errors_map_to_grpc_codes_and_a_missing_api_server_is_reported() {
    for (code, expected, reason) in [
        (403, Code::FailedPrecondition, "MUTATION_REFUSED"),
        (404, Code::NotFound, "OBJECT_UNKNOWN"),
        (409, Code::Aborted, "CONFLICT"),
        (422, Code::FailedPrecondition, "MUTATION_REFUSED"),
        (429, Code::Unavailable, "CONTROL_PLANE_AWAY"),
        (500, Code::Unavailable, "CONTROL_PLANE_AWAY"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let server = FakeApi::start(folder.path(), move |_| Some(refusal(code))).await;
        let request = claim_request(WireVerb::MergePatch, &json!({}));
        let refused = status(&mutate(Some(&server.api), "api", &CALLER, "n1", request).await.unwrap_err());
        assert_eq!(
            (refused.code(), keelson_service_kit::status::reason(&refused).as_deref()),
            (expected, Some(reason))
        );
        assert!(refused.message().contains("in its words"), "{refused:?}");
    }
    for control_plane in ["none", "etcd"] {
        let refused = status(
            &mutate(None, control_plane, &CALLER, "n1", csinode_request(WireVerb::Create, &node()))
                .await
                .unwrap_err(),
        );
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert_eq!(keelson_service_kit::status::reason(&refused).as_deref(), Some("NO_API_SERVER"));
        assert!(refused.message().contains(control_plane), "{refused:?}");
    }
}
