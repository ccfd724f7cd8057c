use std::collections::{BTreeMap, BTreeSet};

use keelson_config::Config;
use keelson_kube_api::Limiter;
use keelson_pod_config_core::parse_file;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_service_kit::status::reason;
use serde_json::{Value, json};

use super::*;
use crate::binding_store::Opened;
use crate::fake_api::{FakeApi, RecordedRequest, refusal};
use crate::volume_objects::Unstored;

const CONTROL_PLANES: [&str; 2] = ["none", "etcd"];

fn request(kind: &str, namespace: &str, name: &str) -> pb::GetLiveRequest {
    pb::GetLiveRequest { kind: kind.into(), namespace: namespace.into(), name: name.into() }
}

/// A request for each kind, with its path at the API server.
fn requests() -> Vec<(pb::GetLiveRequest, &'static str)> {
    vec![
        (request("PersistentVolumeClaim", "a", "data"), "/api/v1/namespaces/a/persistentvolumeclaims/data"),
        (request("PersistentVolume", "", "pv-1"), "/api/v1/persistentvolumes/pv-1"),
        (request("VolumeAttachment", "", "csi-0f"), "/apis/storage.k8s.io/v1/volumeattachments/csi-0f"),
        (request("CSIDriver", "", "Disk.example"), "/apis/storage.k8s.io/v1/csidrivers/Disk.example"),
        (request("CSINode", "", "n1"), "/apis/storage.k8s.io/v1/csinodes/n1"),
        (request("Node", "", "n1"), "/api/v1/nodes/n1"),
    ]
}

fn object(wanted: &pb::GetLiveRequest, version: &str) -> Value {
    let mut metadata = json!({"name": wanted.name, "resourceVersion": version});
    if !wanted.namespace.is_empty() {
        metadata["namespace"] = wanted.namespace.clone().into();
    }
    json!({"kind": wanted.kind, "metadata": metadata})
}

fn manifests() -> VolumeObjects {
    let config = Config { node_name: "n1".into(), ..Config::default() };
    VolumeObjects::new(&config, Ok(Opened::default()))
}

fn live(api: Option<&KubeApi>) -> LiveObjects<'_> {
    let control_plane = if api.is_some() { "api" } else { "none" };
    LiveObjects { api, control_plane, node_name: "n1", manifests: manifests() }
}

async fn read(api: Option<&KubeApi>, wanted: &pb::GetLiveRequest) -> Result<Value, Status> {
    let read = live(api).read(wanted).await.map_err(|cause| status(&cause))?;
    Ok(serde_json::from_slice(&read).unwrap())
}

fn code_and_reason(refused: &Status) -> (Code, String) {
    (refused.code(), reason(refused).unwrap_or_default())
}

#[tokio::test]
async fn each_live_kind_is_one_get_at_the_api_server_for_each_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut reads = 0;
    let server = FakeApi::start(folder.path(), move |asked: &RecordedRequest| {
        let (wanted, _) = requests().into_iter().find(|(_, path)| *path == asked.path)?;
        reads += 1;
        Some((200, object(&wanted, &reads.to_string())))
    })
    .await;
    let mut expected = Vec::new();
    for (index, (wanted, path)) in requests().into_iter().enumerate() {
        for version in [2 * index + 1, 2 * index + 2] {
            let found = read(Some(&server.api), &wanted).await.unwrap();
            assert_eq!(found, object(&wanted, &version.to_string()), "no read is from a cache");
            // The exact path has no resource version, which would allow an old object.
            expected.push(("GET".to_owned(), path.to_owned()));
        }
    }
    let sent: Vec<_> = server.requests().into_iter().map(|asked| (asked.method, asked.path)).collect();
    assert_eq!(sent, expected);
}

#[tokio::test]
async fn a_live_read_of_another_kind_is_refused_and_names_the_readable_ones() {
    for kind in ["Secret", "Pod", "StorageClass", "persistentvolume", ""] {
        let refused = read(None, &request(kind, "", "x")).await.unwrap_err();
        assert_eq!(code_and_reason(&refused), (Code::InvalidArgument, "KIND_NOT_READ".into()), "{kind}");
        assert!(refused.message().contains(&format!("{kind:?}")), "{refused:?}");
        assert!(refused.message().contains("VolumeAttachment, CSIDriver"), "{refused:?}");
    }
}

#[tokio::test]
async fn a_live_read_with_an_invalid_name_is_rejected_before_any_api_request() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(folder.path(), |_| Some((200, json!({})))).await;
    for (wanted, part) in [
        (request("PersistentVolumeClaim", "", "data"), "namespace \"\""),
        (request("PersistentVolumeClaim", "a/b", "data"), "namespace \"a/b\""),
        (request("PersistentVolumeClaim", "a", "data/status"), "name \"data/status\""),
        (request("PersistentVolume", "a", "pv-1"), "namespace \"a\" is not valid for a PersistentVolume"),
        (request("PersistentVolume", "", ""), "name \"\""),
        (request("PersistentVolume", "", ".."), "name \"..\""),
        (request("VolumeAttachment", "", "a?watch=1"), "name \"a?watch=1\""),
        (request("CSIDriver", "", "a%2fb"), "name"),
        (request("CSIDriver", "a", "b"), "it must be empty"),
        (request("CSINode", "", "n2"), "only that of this node, n1"),
        (request("Node", "", "n2"), "only that of this node, n1"),
        (request("Node", "", "N1"), "only that of this node, n1"),
    ] {
        let refused = read(Some(&server.api), &wanted).await.unwrap_err();
        assert_eq!(code_and_reason(&refused), (Code::InvalidArgument, "BAD_FIELD".into()), "{wanted:?}");
        assert!(refused.message().contains(part), "{part}: {refused:?}");
    }
    assert!(server.requests().is_empty());
}

#[tokio::test]
async fn refusals_of_a_live_read_map_to_codes_and_keep_the_servers_words() {
    for (answer, expected, reason) in [
        (refusal(404), Code::NotFound, "OBJECT_UNKNOWN"),
        (refusal(400), Code::FailedPrecondition, "READ_REFUSED"),
        (refusal(401), Code::FailedPrecondition, "READ_REFUSED"),
        (refusal(403), Code::FailedPrecondition, "READ_REFUSED"),
        (refusal(408), Code::Unavailable, "CONTROL_PLANE_AWAY"),
        (refusal(429), Code::Unavailable, "CONTROL_PLANE_AWAY"),
        (refusal(500), Code::Unavailable, "CONTROL_PLANE_AWAY"),
        (refusal(503), Code::Unavailable, "CONTROL_PLANE_AWAY"),
    ] {
        let http = answer.0;
        let folder = tempfile::tempdir().unwrap();
        let server = FakeApi::start(folder.path(), move |_| Some(answer.clone())).await;
        for (wanted, _) in requests() {
            let refused = read(Some(&server.api), &wanted).await.unwrap_err();
            assert_eq!(code_and_reason(&refused), (expected, reason.into()), "{http} {wanted:?}");
            let what = format!("{} {}", wanted.kind, if wanted.namespace.is_empty() { "" } else { "a/" });
            assert!(refused.message().contains(&(what + &wanted.name)), "{refused:?}");
            assert!(http == 404 || refused.message().contains("in its words"), "{refused:?}");
        }
        assert_eq!(server.requests().len(), requests().len(), "{http}: nothing is retried");
    }
}

#[tokio::test]
async fn a_forbidden_live_read_says_whether_waiting_helps() {
    let unrelated =
        "persistentvolumes \"pv-1\" is forbidden: no relationship found between node 'n1' and this object";
    for (message, reason, hint) in [
        (unrelated, "OBJECT_NOT_VISIBLE", "takes a moment after the binding"),
        ("RBAC: clusterrole not found", "READ_REFUSED", "the Node authorizer allows it to system:node:n1"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let refusal = json!({"kind": "Status", "code": 403, "reason": "Forbidden", "message": message});
        let server = FakeApi::start(folder.path(), move |_| Some((403, refusal.clone()))).await;
        let refused = read(Some(&server.api), &request("PersistentVolume", "", "pv-1")).await.unwrap_err();
        assert_eq!(code_and_reason(&refused), (Code::FailedPrecondition, reason.into()));
        assert!(refused.message().contains(message), "{refused:?}");
        assert!(refused.message().contains(hint), "{refused:?}");
    }
}

#[tokio::test]
async fn an_answer_about_another_object_is_no_live_object() {
    let wanted = request("PersistentVolumeClaim", "a", "data");
    let other_name = object(&request("PersistentVolumeClaim", "a", "other"), "1");
    let other_namespace = object(&request("PersistentVolumeClaim", "b", "data"), "1");
    let other_kind = object(&request("PersistentVolume", "a", "data"), "1");
    for answer in [json!({}), other_name, other_namespace, other_kind] {
        let folder = tempfile::tempdir().unwrap();
        let served = answer.clone();
        let server = FakeApi::start(folder.path(), move |_| Some((200, served.clone()))).await;
        let refused = read(Some(&server.api), &wanted).await.unwrap_err();
        assert_eq!(code_and_reason(&refused), (Code::Unavailable, "CONTROL_PLANE_AWAY".into()), "{answer}");
        assert!(refused.message().contains("PersistentVolumeClaim a/data"), "{refused:?}");
    }
}

#[tokio::test]
async fn an_unreachable_api_server_makes_a_live_read_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let absent = KubeApi::new(folder.path().join("absent"), "test");
    let server = FakeApi::start(folder.path(), |_| None).await;
    let gone = server.api.clone();
    drop(server);
    for api in [absent, gone] {
        let refused = read(Some(&api), &request("CSIDriver", "", "d")).await.unwrap_err();
        assert_eq!(code_and_reason(&refused), (Code::Unavailable, "CONTROL_PLANE_AWAY".into()));
        assert!(refused.message().contains("CSIDriver d"), "{refused:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_live_read_ends_within_30_s_also_when_it_waits_for_its_turn() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(folder.path(), |_| None).await;
    let limiter = Limiter::new(1, 1);
    // So many calls wait before this one.
    for _ in 0..1000 {
        let _ = limiter.take();
    }
    for api in [server.api.clone(), server.api.clone().limited(limiter)] {
        let started_at = tokio::time::Instant::now();
        let refused = read(Some(&api), &request("CSINode", "", "n1")).await.unwrap_err();
        assert_eq!(code_and_reason(&refused), (Code::Unavailable, "CONTROL_PLANE_AWAY".into()));
        assert!(started_at.elapsed() <= Duration::from_millis(30_010), "{:?}", started_at.elapsed());
    }
}

#[tokio::test]
async fn kinds_without_manifests_need_an_api_server() {
    for (wanted, _) in requests().into_iter().skip(2) {
        for control_plane in CONTROL_PLANES {
            let objects = LiveObjects { control_plane, ..live(None) };
            let refused = status(&objects.read(&wanted).await.unwrap_err());
            assert_eq!(code_and_reason(&refused), (Code::FailedPrecondition, "NO_API_SERVER".into()));
            assert!(refused.message().contains(&wanted.kind), "{refused:?}");
            assert!(refused.message().contains(control_plane), "{refused:?}");
        }
    }
}

const VOLUME_AND_CLAIM: &str = "
apiVersion: v1
kind: PersistentVolume
metadata: {name: pv-1}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  hostPath: {path: /data}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: a}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: ''
  resources: {requests: {storage: 1Gi}}
";

#[tokio::test]
async fn claims_and_volumes_of_manifests_are_read_bound_without_an_api_server() {
    let file = parse_file(VOLUME_AND_CLAIM.as_bytes(), "a.yaml", &StaticRules::new("n1", false)).unwrap();
    let stored: BTreeMap<_, _> =
        file.objects.into_iter().map(|object| (object.key.clone(), object)).collect();
    let objects = live(None);
    let (claim, volume) =
        (request("PersistentVolumeClaim", "a", "data"), request("PersistentVolume", "", "pv-1"));
    for wanted in [&claim, &volume] {
        let refused = status(&objects.read(wanted).await.unwrap_err());
        assert_eq!(code_and_reason(&refused), (Code::Unavailable, "SOURCES_NOT_READ".into()));
        assert!(refused.message().contains(&wanted.name), "{refused:?}");
    }
    objects.manifests.update(stored, BTreeSet::new(), true);
    let value = |json: Vec<u8>| -> Value { serde_json::from_slice(&json).unwrap() };
    let Unstored::Records(records) = objects.manifests.unstored() else { panic!("nothing to store") };
    assert_eq!(records.bindings["pv-1"].claim.name, "data");
    let unseen = value(objects.read(&claim).await.unwrap());
    assert_eq!(
        (&unseen["status"]["phase"], &unseen["spec"]["volumeName"]),
        (&json!("Pending"), &Value::Null)
    );
    assert_eq!(value(objects.read(&volume).await.unwrap())["spec"]["claimRef"], Value::Null);
    objects.manifests.stored(records);
    assert!(matches!(objects.manifests.unstored(), Unstored::Nothing));
    assert_eq!(value(objects.read(&claim).await.unwrap())["spec"]["volumeName"], "pv-1");
    assert_eq!(value(objects.read(&volume).await.unwrap())["spec"]["claimRef"]["name"], "data");
    for wanted in [request("PersistentVolumeClaim", "b", "data"), request("PersistentVolume", "", "pv-2")] {
        let refused = status(&objects.read(&wanted).await.unwrap_err());
        assert_eq!(code_and_reason(&refused), (Code::NotFound, "OBJECT_UNKNOWN".into()));
        assert!(refused.message().contains("add it to the manifests"), "{refused:?}");
    }
}

#[tokio::test]
async fn with_an_api_server_no_claim_is_read_from_the_manifests() {
    let file = parse_file(VOLUME_AND_CLAIM.as_bytes(), "a.yaml", &StaticRules::new("n1", false)).unwrap();
    let stored = file.objects.into_iter().map(|object| (object.key.clone(), object)).collect();
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(folder.path(), |_| Some(refusal(404))).await;
    let objects = live(Some(&server.api));
    objects.manifests.update(stored, BTreeSet::new(), true);
    let refused = status(&objects.read(&request("PersistentVolumeClaim", "a", "data")).await.unwrap_err());
    assert_eq!(code_and_reason(&refused), (Code::NotFound, "OBJECT_UNKNOWN".into()));
    assert!(!refused.message().contains("manifests"), "{refused:?}");
}
