//! Requests for certificates of pods, at an API server that has the rules for nodes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod common;

use common::{Node, Service};
use keelson_config::{ControlPlane, Kubernetes};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_objects_response::Item;
use keelson_service_kit::status::reason;
use keelson_testkit::NodeServer;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

const REQUESTS: &str = "/apis/certificates.k8s.io/v1beta1/namespaces/a/podcertificaterequests";

/// pod-config of the node `n1` with an API server that has a pod with a certificate.
struct Scene {
    // Dropped, and thereby ended, before its server and folders.
    service: Service,
    server: NodeServer,
    pod_uid: String,
    _node: Node,
}

impl Scene {
    fn start() -> Self {
        let server = NodeServer::start().unwrap();
        server.create("/api/v1/nodes", &json!({"kind": "Node", "metadata": {"name": "n1"}})).unwrap();
        let account = json!({"kind": "ServiceAccount", "metadata": {"name": "web"}});
        server.create("/api/v1/namespaces/a/serviceaccounts", &account).unwrap();
        let sources = json!([{"podCertificate": {"signerName": "example.com/ca", "keyType": "ED25519"}}]);
        let volumes = json!([{"name": "tls", "projected": {"sources": sources}}]);
        let spec =
            json!({"nodeName": "n1", "serviceAccountName": "web", "volumes": volumes, "containers": []});
        let pod = json!({"kind": "Pod", "metadata": {"name": "web"}, "spec": spec});
        let pod = server.create("/api/v1/namespaces/a/pods", &pod).unwrap();
        let pod_uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let mut node = Node::new();
        let kubeconfig = server.node_kubeconfig(&node.path("run"), "n1", server.address()).unwrap();
        node.config.control_plane = ControlPlane::Kubernetes(Kubernetes::of(kubeconfig));
        node.config.sources.static_pod_path = None;
        Self { service: node.start(), server, pod_uid, _node: node }
    }

    /// Requests a certificate, once the Node is known.
    async fn request(&self, signer: &str) -> Result<String, Status> {
        let message = pb::RequestPodCertificateRequest {
            namespace: "a".into(),
            pod_name: "web".into(),
            pod_uid: self.pod_uid.clone(),
            service_account: "web".into(),
            signer_name: signer.into(),
            stub_pkcs10_request: b"request".to_vec(),
            ..Default::default()
        };
        let mut nodes = self.service.client().watch_node(pb::WatchNodeRequest {}).await.unwrap().into_inner();
        while !nodes.message().await.unwrap().unwrap().registered {}
        let created = self.service.client().request_pod_certificate(message).await?;
        Ok(created.into_inner().name)
    }

    /// Follows the request with this name. It is followed as long as the sender exists.
    async fn follow(
        &self,
        name: &str,
    ) -> (mpsc::Sender<pb::WatchObjectsRequest>, Streaming<pb::WatchObjectsResponse>) {
        let (sender, mut receiver) = mpsc::channel(1);
        let reference = pb::ObjectReference {
            kind: "PodCertificateRequest".into(),
            namespace: "a".into(),
            name: name.into(),
        };
        let first = pb::WatchObjectsRequest { watch: vec![reference], unwatch: vec![] };
        sender.send(first).await.unwrap();
        let requests = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
        let stream = self.service.client().watch_objects(requests).await.unwrap();
        (sender, stream.into_inner())
    }
}

/// The next state of the followed request; `None` once it does not exist.
async fn next(stream: &mut Streaming<pb::WatchObjectsResponse>) -> Option<Value> {
    loop {
        if let Some(Item::Object(state)) = stream.message().await.unwrap().unwrap().item {
            return state.object_json.map(|json| serde_json::from_slice(&json).unwrap());
        }
    }
}

#[tokio::test]
async fn a_certificate_request_is_created_with_the_nodes_rights_and_followed_to_its_end() {
    let scene = Scene::start();
    let name = scene.request("example.com/ca").await.unwrap();
    let (_watched, mut stream) = scene.follow(&name).await;
    let created = next(&mut stream).await.unwrap();
    assert_eq!(created["metadata"]["ownerReferences"][0]["uid"], scene.pod_uid);
    assert_eq!(
        (&created["kind"], &created["apiVersion"]),
        (&json!("PodCertificateRequest"), &json!("certificates.k8s.io/v1beta1"))
    );
    let path = format!("{REQUESTS}/{name}");
    let condition = json!({"type": "Issued", "status": "True"});
    scene.server.patch(&path, &json!({"status": {"conditions": [condition]}})).unwrap();
    assert_eq!(next(&mut stream).await.unwrap()["status"]["conditions"][0]["type"], "Issued");
    scene.server.delete(&path, &json!({})).unwrap();
    assert_eq!(next(&mut stream).await, None);
}

#[tokio::test]
async fn a_certificate_that_no_volume_of_the_pod_names_is_refused_with_the_servers_words() {
    let scene = Scene::start();
    let refused = scene.request("example.com/other").await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(reason(&refused).as_deref(), Some("CERTIFICATE_REFUSED"));
    for part in ["example.com/other", "from signers that a volume of the pod names", "no volume of the pod"] {
        assert!(refused.message().contains(part), "{part}: {refused:?}");
    }
}
