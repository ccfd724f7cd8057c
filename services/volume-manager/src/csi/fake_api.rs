//! A fake pod-config with the Node and the CSINode of a test.

use std::sync::{Arc, Mutex};

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::mutate_request::Verb;
use keelson_service_kit::Context;
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{FakePodConfig, FakeServer};
use serde_json::{Value, json};
use tonic::service::Routes;
use tonic::{Code, Status};

use super::node_info::CsiNodes;
use crate::live_objects::LiveObjects;

/// The name of the node.
pub(super) const NODE: &str = "node";

/// The objects of the API server, served until it is dropped.
pub(super) struct FakeApi {
    pub(super) pod_config: FakePodConfig,
    pub(super) objects: Arc<Mutex<Objects>>,
    pub(super) nodes: CsiNodes,
    pub(super) live: LiveObjects,
    _server: FakeServer,
    _run_folder: tempfile::TempDir,
}

/// The objects, and what goes wrong.
#[derive(Default)]
pub(super) struct Objects {
    pub(super) node: Option<Value>,
    pub(super) csi_node: Option<Value>,
    pub(super) csi_driver: Option<Value>,
    /// Errors of the next changes.
    pub(super) refusals: Vec<Status>,
    /// The error of every read.
    pub(super) unreadable: Option<Status>,
    version: u64,
}

impl FakeApi {
    /// An API server with a Node and no CSINode.
    pub(super) async fn start() -> Self {
        let run_folder = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: NODE.into(), ..Config::default() };
        config.paths.run_dir = run_folder.path().join("run");
        config.paths.root_dir = run_folder.path().join("root");
        let pod_config = FakePodConfig::default();
        let node = json!({"metadata": {"name": NODE, "uid": "node-uid", "labels": {"zone": "z1"}}});
        let objects = Arc::new(Mutex::new(Objects { node: Some(node), ..Objects::default() }));
        let shared = Arc::clone(&objects);
        pod_config.get_live.answer_with(move |request| shared.lock().unwrap().get(&request));
        let shared = Arc::clone(&objects);
        pod_config.mutate.answer_with(move |request| shared.lock().unwrap().change(&request));
        let routes = Routes::new(pod_config.server());
        let server = FakeServer::start(&config, ServiceName::PodConfig, routes).await.unwrap();
        let context = Context::detached(ServiceName::VolumeManager, config);
        let nodes = CsiNodes::new(context.peer(ServiceName::PodConfig), NODE);
        let live = LiveObjects::new(context.peer(ServiceName::PodConfig));
        Self { pod_config, objects, nodes, live, _server: server, _run_folder: run_folder }
    }

    /// As a node without an API server.
    pub(super) async fn standalone() -> Self {
        let api = Self::start().await;
        let refusal = error(Code::FailedPrecondition, "NO_API_SERVER", "no API server");
        api.objects.lock().unwrap().unreadable = Some(refusal);
        api
    }

    /// The CSINode now.
    pub(super) fn csi_node(&self) -> Option<Value> {
        self.objects.lock().unwrap().csi_node.clone()
    }

    /// The drivers of the CSINode: name and node id.
    pub(super) fn drivers(&self) -> Vec<String> {
        let csi_node = self.csi_node().unwrap_or_default();
        let entries = csi_node["spec"]["drivers"].as_array().cloned().unwrap_or_default();
        let text = |entry: &Value, field: &str| entry[field].as_str().unwrap().to_owned();
        entries.iter().map(|entry| format!("{} {}", text(entry, "name"), text(entry, "nodeID"))).collect()
    }
}

impl Objects {
    fn get(&self, request: &pb::GetLiveRequest) -> Result<pb::GetLiveResponse, Status> {
        if let Some(status) = &self.unreadable {
            return Err(status.clone());
        }
        assert_eq!(request.namespace, "");
        assert!(request.kind == "CSIDriver" || request.name == NODE, "{request:?}");
        let object = match request.kind.as_str() {
            "Node" => &self.node,
            "CSINode" => &self.csi_node,
            "CSIDriver" => &self.csi_driver,
            other => panic!("{other} is not read"),
        };
        let object =
            object.as_ref().ok_or_else(|| error(Code::NotFound, "OBJECT_UNKNOWN", "there is none"))?;
        Ok(pb::GetLiveResponse { object_json: object.to_string().into_bytes() })
    }

    fn change(&mut self, request: &pb::MutateRequest) -> Result<pb::MutateResponse, Status> {
        assert_eq!((request.kind.as_str(), request.name.as_str()), ("CSINode", NODE));
        if let Some(refusal) = self.refusals.pop() {
            return Err(refusal);
        }
        let conflict = |text: &str| Err(error(Code::Aborted, "CONFLICT", text));
        if request.verb() == Verb::Delete {
            let uid = self.csi_node.as_ref().map(|object| object["metadata"]["uid"].clone());
            if uid != Some(Value::from(request.uid.as_str())) {
                return conflict("another UID");
            }
            self.csi_node = None;
            return Ok(pb::MutateResponse::default());
        }
        let mut body: Value = serde_json::from_slice(&request.body_json).unwrap();
        match (request.verb(), &self.csi_node) {
            (Verb::Create, None) => body["metadata"]["uid"] = "csi-node-uid".into(),
            (Verb::Create, Some(_)) => return conflict("it exists"),
            (Verb::Update, Some(old))
                if old["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"] => {}
            (Verb::Update, _) => return conflict("another version"),
            (other, _) => panic!("{other:?} is not used"),
        }
        self.version += 1;
        body["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.csi_node = Some(body.clone());
        Ok(pb::MutateResponse { object_json: body.to_string().into_bytes() })
    }
}
