//! `GetLive` and `Mutate` of volume-manager, with the manifests and with an API server that has the rules for nodes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use common::{Node, Service};
use keelson_config::{ControlPlane, Kubernetes};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::mutate_request::Verb;
use keelson_service_kit::status::reason;
use keelson_testkit::NodeServer;
use serde_json::{Value, json};
use tonic::{Code, Status};

const PODS: &str = "/api/v1/namespaces/a/pods";
const CLAIMS: &str = "/api/v1/namespaces/a/persistentvolumeclaims";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";
const DRIVERS: &str = "/apis/storage.k8s.io/v1/csidrivers";
const CSI_NODES: &str = "/apis/storage.k8s.io/v1/csinodes";

/// pod-config of the node `n1` with an API server.
struct Scene {
    // Dropped, and thereby ended, before its server and folders.
    service: Service,
    server: NodeServer,
    _node: Node,
}

impl Scene {
    fn start() -> Self {
        let server = NodeServer::start().unwrap();
        for name in ["n1", "n2"] {
            server.create("/api/v1/nodes", &object("Node", name, json!({}))).unwrap();
        }
        let mut node = Node::new();
        let kubeconfig = server.node_kubeconfig(&node.path("run"), "n1", server.address()).unwrap();
        node.config.control_plane = ControlPlane::Kubernetes(Kubernetes::of(kubeconfig));
        node.config.sources.static_pod_path = None;
        Self { service: node.start(), server, _node: node }
    }

    /// Creates a claim, the PersistentVolume that it is bound to, and an attachment of it to `node`.
    fn create_volume(&self, claim: &str, node: &str) {
        let volume = format!("pv-{claim}");
        let spec = json!({"volumeName": volume});
        let conditions = json!([{"type": "FileSystemResizePending", "status": "True"}]);
        let mut bound = object("PersistentVolumeClaim", claim, spec);
        bound["status"] = json!({"phase": "Bound", "conditions": conditions});
        self.server.create(CLAIMS, &bound).unwrap();
        let reference = json!({"claimRef": {"namespace": "a", "name": claim}});
        self.server.create(VOLUMES, &object("PersistentVolume", &volume, reference)).unwrap();
        let attachment = object("VolumeAttachment", &format!("csi-{claim}"), json!({"nodeName": node}));
        self.server.create(ATTACHMENTS, &attachment).unwrap();
    }

    /// Creates a pod on a node that uses a claim.
    fn bind_pod(&self, name: &str, node: &str, claim: &str) {
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]);
        let spec = json!({"nodeName": node, "volumes": volumes, "containers": []});
        self.server.create(PODS, &object("Pod", name, spec)).unwrap();
    }
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"kind": kind, "metadata": {"name": name}, "spec": spec})
}

async fn get_live(service: &Service, kind: &str, namespace: &str, name: &str) -> Result<Value, Status> {
    let request = pb::GetLiveRequest { kind: kind.into(), namespace: namespace.into(), name: name.into() };
    let response = service.client().get_live(request).await?.into_inner();
    Ok(serde_json::from_slice(&response.object_json).unwrap())
}

async fn assert_refused(
    service: &Service,
    (kind, namespace, name): (&str, &str, &str),
    code: Code,
    why: &str,
) {
    let refused = get_live(service, kind, namespace, name).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused).as_deref()),
        (code, Some(why)),
        "{kind} {name}: {refused:?}"
    );
    assert!(refused.message().contains(name), "{refused:?}");
}

async fn mutate(
    service: &Service,
    (kind, subresource, namespace, name): (&str, &str, &str, &str),
    verb: Verb,
    body: &Value,
) -> Result<Value, Status> {
    let uid = body["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
    let request = pb::MutateRequest {
        kind: kind.into(),
        subresource: subresource.into(),
        namespace: namespace.into(),
        name: name.into(),
        verb: verb.into(),
        body_json: body.to_string().into_bytes(),
        uid,
    };
    let json = service.client().mutate(request).await?.into_inner().object_json;
    Ok(serde_json::from_slice(&json).unwrap_or_default())
}

#[tokio::test]
async fn live_objects_of_this_node_are_readable_and_those_of_others_are_refused() {
    let scene = Scene::start();
    let (service, server) = (&scene.service, &scene.server);
    scene.create_volume("data", "n1");
    scene.create_volume("other", "n2");
    scene.bind_pod("own", "n1", "data");
    scene.bind_pod("stranger", "n2", "other");
    server.create(DRIVERS, &object("CSIDriver", "d", json!({"attachRequired": true}))).unwrap();
    server.create(CSI_NODES, &object("CSINode", "n2", json!({"drivers": []}))).unwrap();

    let claim = get_live(service, "PersistentVolumeClaim", "a", "data").await.unwrap();
    assert_eq!(claim["spec"]["volumeName"], "pv-data");
    let volume = get_live(service, "PersistentVolume", "", "pv-data").await.unwrap();
    assert_eq!(volume["spec"]["claimRef"]["name"], "data");
    let attachment = get_live(service, "VolumeAttachment", "", "csi-data").await.unwrap();
    assert_eq!(attachment["spec"]["nodeName"], "n1");
    let driver = get_live(service, "CSIDriver", "", "d").await.unwrap();
    assert_eq!(driver["spec"]["attachRequired"], true);
    assert_eq!(get_live(service, "Node", "", "n1").await.unwrap()["metadata"]["name"], "n1");

    for wanted in [("CSIDriver", "", "none"), ("CSINode", "", "n1")] {
        assert_refused(service, wanted, Code::NotFound, "OBJECT_UNKNOWN").await;
    }
    for wanted in [
        ("PersistentVolumeClaim", "a", "other"),
        ("PersistentVolumeClaim", "a", "none"),
        ("PersistentVolume", "", "pv-other"),
        ("VolumeAttachment", "", "csi-other"),
        ("VolumeAttachment", "", "none"),
    ] {
        assert_refused(service, wanted, Code::FailedPrecondition, "OBJECT_NOT_VISIBLE").await;
    }
    server.take_refusals();
    for wanted in [("CSINode", "", "n2"), ("Node", "", "n2")] {
        assert_refused(service, wanted, Code::InvalidArgument, "BAD_FIELD").await;
    }
    assert_refused(service, ("Secret", "a", "Secret"), Code::InvalidArgument, "KIND_NOT_READ").await;
    assert_eq!(server.take_refusals(), [], "the API server is not asked");
}

#[tokio::test]
async fn a_live_read_shows_each_change_and_a_pod_that_has_just_been_bound() {
    let scene = Scene::start();
    let service = &scene.service;
    scene.create_volume("data", "n1");
    let wanted = ("PersistentVolume", "", "pv-data");
    assert_refused(service, wanted, Code::FailedPrecondition, "OBJECT_NOT_VISIBLE").await;
    scene.bind_pod("own", "n1", "data");
    get_live(service, "PersistentVolume", "", "pv-data").await.unwrap();

    for attached in [false, true, false] {
        let patch = json!({"status": {"attached": attached}});
        scene.server.patch(&format!("{ATTACHMENTS}/csi-data"), &patch).unwrap();
        let read = get_live(service, "VolumeAttachment", "", "csi-data").await.unwrap();
        assert_eq!(read["status"]["attached"], attached);
    }
    let Scene { service, server, _node } = scene;
    drop(server);
    assert_refused(&service, wanted, Code::Unavailable, "CONTROL_PLANE_AWAY").await;
}

#[tokio::test]
async fn volume_manager_maintains_its_csinode_at_the_api_server() {
    let scene = Scene::start();
    let (service, own) = (&scene.service, ("CSINode", "", "", "n1"));
    let node = object("CSINode", "n1", json!({"drivers": []}));
    let mut created = mutate(service, own, Verb::Create, &node).await.unwrap();
    assert_eq!(get_live(service, "CSINode", "", "n1").await.unwrap(), created);
    let exists = mutate(service, own, Verb::Create, &node).await.unwrap_err();
    assert_eq!((exists.code(), reason(&exists).as_deref()), (Code::Aborted, Some("CONFLICT")));

    let old = created.clone();
    created["spec"]["drivers"] = json!([{"name": "d", "nodeID": "1"}]);
    let updated = mutate(service, own, Verb::Update, &created).await.unwrap();
    assert_eq!(updated["spec"], created["spec"]);
    let stale = mutate(service, own, Verb::Update, &old).await.unwrap_err();
    assert_eq!((stale.code(), reason(&stale).as_deref()), (Code::Aborted, Some("CONFLICT")));
    let annotated = json!({"metadata": {"annotations": {"a": "b"}}});
    let patched = mutate(service, own, Verb::MergePatch, &annotated).await.unwrap();
    assert_eq!((&patched["metadata"]["annotations"]["a"], &patched["spec"]), (&json!("b"), &updated["spec"]));

    let other = mutate(service, ("CSINode", "", "", "n2"), Verb::MergePatch, &annotated).await.unwrap_err();
    assert_eq!(reason(&other).as_deref(), Some("MUTATION_NOT_ALLOWED"));
    mutate(service, own, Verb::Delete, &json!({"metadata": {"uid": patched["metadata"]["uid"]}}))
        .await
        .unwrap();
    assert_eq!(scene.server.list(CSI_NODES), Vec::<Value>::new());
}

#[tokio::test]
async fn a_strategic_patch_of_a_claims_status_merges_its_conditions() {
    let scene = Scene::start();
    let service = &scene.service;
    scene.create_volume("data", "n1");
    scene.create_volume("other", "n2");
    scene.bind_pod("own", "n1", "data");
    let types = |claim: &Value| -> Vec<String> {
        let conditions = claim["status"]["conditions"].as_array().unwrap();
        conditions.iter().map(|condition| condition["type"].as_str().unwrap().to_owned()).collect()
    };
    let data = ("PersistentVolumeClaim", "status", "a", "data");
    let resizing = json!({"status": {"capacity": {"storage": "2Gi"}, "conditions": [{"type": "Resizing"}]}});
    let patched = mutate(service, data, Verb::StrategicPatch, &resizing).await.unwrap();
    assert_eq!(types(&patched), ["FileSystemResizePending", "Resizing"]);
    assert_eq!(get_live(service, "PersistentVolumeClaim", "a", "data").await.unwrap(), patched);
    let patched = mutate(service, data, Verb::MergePatch, &resizing).await.unwrap();
    assert_eq!(types(&patched), ["Resizing"], "a merge patch replaces lists");

    let lost = json!({"status": {"phase": "Lost"}});
    for (claim, patch) in [("data", &lost), ("other", &resizing)] {
        let claim = ("PersistentVolumeClaim", "status", "a", claim);
        let refused = mutate(service, claim, Verb::StrategicPatch, patch).await.unwrap_err();
        assert_eq!(reason(&refused).as_deref(), Some("MUTATION_REFUSED"), "{refused:?}");
    }
}

#[tokio::test]
async fn with_an_api_server_claims_in_use_are_not_reported() {
    let scene = Scene::start();
    let requests = futures_util::stream::empty();
    let refused = scene.service.client().report_claims_in_use(requests).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused).as_deref()), (Code::FailedPrecondition, Some("API_SERVER")));
}

#[tokio::test]
async fn with_an_api_server_volumes_and_claims_are_neither_listed_nor_followed() {
    let scene = Scene::start();
    for kind in ["PersistentVolume", "PersistentVolumeClaim"] {
        let request = pb::WatchVolumeObjectsRequest { kind: kind.into() };
        let followed = scene.service.client().watch_volume_objects(request).await.unwrap_err();
        let listed = scene.service.volume_objects(kind).await.unwrap_err();
        for refused in [followed, listed] {
            let found = (refused.code(), reason(&refused));
            assert_eq!(found, (Code::FailedPrecondition, Some("API_SERVER".to_owned())), "{kind}");
        }
    }
}

#[tokio::test]
async fn without_an_api_server_live_claims_and_volumes_come_from_the_manifests() {
    let node = Node::new();
    let volume = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: pv-1}\nspec:\n  capacity: {storage: 1Gi}\n  \
                  accessModes: [ReadWriteOnce]\n  hostPath: {path: /data}\n";
    let claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data, namespace: a}\nspec:\n  \
                 accessModes: [ReadWriteOnce]\n  storageClassName: ''\n  resources: {requests: {storage: 1Gi}}\n";
    node.write_backdated("volume.yaml", volume);
    node.write_backdated("claim.yaml", claim);
    let mut service = node.start();
    // All sources have been read by then, and the binding is stored.
    service.watch().await.replay().await;
    service.wait_for_event("claim_bound");
    let claim = get_live(&service, "PersistentVolumeClaim", "a", "data").await.unwrap();
    assert_eq!(claim["spec"]["volumeName"], "pv-1");
    let volume = get_live(&service, "PersistentVolume", "", "pv-1").await.unwrap();
    assert_eq!(volume["spec"]["claimRef"]["name"], "data");
    let unknown = ("PersistentVolumeClaim", "a", "none");
    assert_refused(&service, unknown, Code::NotFound, "OBJECT_UNKNOWN").await;
    for wanted in [
        ("VolumeAttachment", "", "csi-0f"),
        ("CSIDriver", "", "d"),
        ("CSINode", "", "n1"),
        ("Node", "", "n1"),
    ] {
        assert_refused(&service, wanted, Code::FailedPrecondition, "NO_API_SERVER").await;
    }
}
