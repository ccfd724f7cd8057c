use super::*;
use crate::fake_api::{Asked, FakeApi, refusal};

const CALLER: [&str; 1] = ["volume-manager"];

fn of_node(verb: WireVerb, body: &Value) -> pb::MutateRequest {
    pb::MutateRequest {
        kind: "CSINode".into(),
        name: "n1".into(),
        verb: verb.into(),
        body_json: body.to_string().into_bytes(),
        uid: if verb == WireVerb::Delete { "u1".into() } else { String::new() },
        ..pb::MutateRequest::default()
    }
}

fn of_claim(verb: WireVerb, body: &Value) -> pb::MutateRequest {
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
async fn what_is_listed_is_done_with_the_method_and_the_path_of_the_api() {
    let folder = tempfile::tempdir().unwrap();
    let now = json!({"kind": "X", "metadata": {"name": "now"}});
    let server = FakeApi::start(folder.path(), move |_| Some((200, now.clone()))).await;
    let patch = json!({"metadata": {"resourceVersion": "3"}, "status": {"capacity": {"storage": "2Gi"}}});
    let requests = [
        of_node(WireVerb::Create, &node()),
        of_node(WireVerb::Update, &node()),
        of_node(WireVerb::MergePatch, &patch),
        of_node(WireVerb::Delete, &json!(null)),
        of_claim(WireVerb::StrategicPatch, &patch),
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
    let asked = expected.map(|(method, path, content_type, body)| Asked {
        method: method.to_owned(),
        path,
        content_type,
        body,
    });
    assert_eq!(server.asked(), asked);
}

#[tokio::test]
async fn what_is_not_listed_is_refused_before_anything_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(folder.path(), |_| Some((200, json!({})))).await;
    let other = |change: fn(&mut pb::MutateRequest)| {
        let mut request = of_claim(WireVerb::MergePatch, &json!({}));
        change(&mut request);
        request
    };
    for (callers, request) in [
        (&["node-api"][..], of_node(WireVerb::Create, &node())),
        (&[][..], of_node(WireVerb::Create, &node())),
        (&CALLER[..], other(|r| r.kind = "Secret".into())),
        (&CALLER[..], other(|r| r.subresource = String::new())),
        (&CALLER[..], other(|r| r.verb = WireVerb::Update.into())),
        (&CALLER[..], pb::MutateRequest { name: "n2".into(), ..of_node(WireVerb::MergePatch, &json!({})) }),
    ] {
        let told = format!("{request:?}");
        let refused = mutate(Some(&server.api), "api", callers, "n1", request).await.unwrap_err();
        assert_eq!(status(&refused).code(), Code::PermissionDenied, "{told}");
    }
    assert!(server.asked().is_empty());
}

#[tokio::test]
async fn a_body_about_something_else_is_refused_by_its_field() {
    let with = |pointer: &str, value: Value| {
        let mut node = node();
        *node.pointer_mut(pointer).unwrap() = value;
        node
    };
    let bare = json!({"metadata": {}});
    for (request, field) in [
        (of_node(WireVerb::Unspecified, &node()), "verb"),
        (of_node(WireVerb::Create, &json!([])), "body_json is no object"),
        (pb::MutateRequest { body_json: b"{".to_vec(), ..of_node(WireVerb::Create, &node()) }, "no JSON"),
        (of_node(WireVerb::Create, &with("/kind", json!("Secret"))), "kind"),
        (of_node(WireVerb::Create, &with("/metadata/name", json!("n2"))), "metadata.name"),
        (
            of_node(WireVerb::Update, &with("/metadata/resourceVersion", json!(""))),
            "metadata.resourceVersion",
        ),
        (of_node(WireVerb::Create, &bare), "kind"),
        (of_node(WireVerb::MergePatch, &json!({"metadata": {"name": "n2"}})), "metadata.name"),
        (of_claim(WireVerb::MergePatch, &json!({"metadata": {"namespace": "b"}})), "metadata.namespace"),
        (pb::MutateRequest { uid: String::new(), ..of_node(WireVerb::Delete, &bare) }, "uid"),
        (pb::MutateRequest { namespace: "a".into(), ..of_node(WireVerb::Create, &node()) }, "namespace"),
    ] {
        let refused = status(&mutate(None, "none", &CALLER, "n1", request).await.unwrap_err());
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        assert!(refused.message().contains(field), "{field}: {refused:?}");
    }
}

#[tokio::test]
async fn each_answer_of_the_server_has_a_code_of_its_own_and_no_server_is_said() {
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
        let request = of_claim(WireVerb::MergePatch, &json!({}));
        let told = status(&mutate(Some(&server.api), "api", &CALLER, "n1", request).await.unwrap_err());
        assert_eq!(
            (told.code(), keelson_service_kit::status::reason(&told).as_deref()),
            (expected, Some(reason))
        );
        assert!(told.message().contains("in its words"), "{told:?}");
    }
    for plane in ["none", "etcd"] {
        let told = status(
            &mutate(None, plane, &CALLER, "n1", of_node(WireVerb::Create, &node())).await.unwrap_err(),
        );
        assert_eq!(told.code(), Code::FailedPrecondition);
        assert_eq!(keelson_service_kit::status::reason(&told).as_deref(), Some("NO_API_SERVER"));
        assert!(told.message().contains(plane), "{told:?}");
    }
}
