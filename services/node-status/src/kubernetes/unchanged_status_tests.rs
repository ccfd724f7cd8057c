//! Which statuses are written and which are skipped, with an API server that gives each write a new `resourceVersion`.

use keelson_config::{Config, Kubernetes};
use keelson_kube_model::annotations;
use keelson_node_status_core::{PodDocument, PodUpdate};
use keelson_testkit::NodeServer;
use serde_json::json;

use super::*;
use crate::writer::ControlPlaneWriter as _;

const PODS: &str = "/api/v1/namespaces/default/pods";
const POD: &str = "/api/v1/namespaces/default/pods/web";
const STATUS: &str = "/api/v1/namespaces/default/pods/web/status";

/// The pod `web` on the node n1, whose statuses are written only when the test says so.
struct Scene {
    server: NodeServer,
    writer: Arc<KubernetesWriter>,
    observed: ObservedPods,
    source: &'static str,
    /// The UID of the pod; the UID of its mirror pod is another.
    uid: String,
    /// The revision that pod-config has sent last.
    revision: u64,
    _folder: tempfile::TempDir,
}

impl Scene {
    /// With a pod of the API, or a static pod that has no mirror pod yet.
    fn new(source: &'static str) -> Self {
        let server = NodeServer::start().unwrap();
        let node = server.create("/api/v1/nodes", &json!({"metadata": {"name": "n1"}})).unwrap();
        let uid = if source == API {
            let pod = json!({"metadata": {"name": "web"}, "spec": {"nodeName": "n1", "containers": []}});
            text(&server.create(PODS, &pod).unwrap(), "uid")
        } else {
            "static".to_owned()
        };
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = server.node_kubeconfig(folder.path(), "n1", server.address()).unwrap();
        let config = Config { node_name: "n1".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        let writer = KubernetesWriter::new(&ctx, &Kubernetes::of(kubeconfig));
        writer.set_registered(&text(&node, "uid"), Value::Null);
        let observed = ObservedPods::default();
        Self { server, writer, observed, source, uid, revision: 0, _folder: folder }
    }

    /// Reports the pod in this phase, and carries the report out.
    async fn report(&self, phase: &str) {
        let pod = json!({
            "metadata": {"name": "web", "namespace": "default", "annotations": {(annotations::CONFIG_HASH): self.uid}},
            "spec": {"nodeName": "n1", "containers": []},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": "False"}]},
        });
        let json = pod.to_string();
        let document = PodDocument {
            uid: &self.uid,
            namespace: "default",
            name: "web",
            source: self.source,
            pod_json: json.as_bytes(),
            ..PodDocument::default()
        };
        let update = PodUpdate::first(&document, self.writer.writes_pods_of(self.source)).unwrap();
        self.writer.write_pod(update).await.unwrap();
        assert_eq!(self.carry_out_queued().await, 1, "{}", self.source);
    }

    /// Carries out what is queued; returns how many jobs that were.
    async fn carry_out_queued(&self) -> usize {
        let mut count = 0;
        while let Some(mut pending) = self.writer.next_job() {
            let status = pending.job.take_status();
            self.writer.carry_out(&pending.job, status).await.unwrap();
            count += 1;
        }
        count
    }

    /// Queues the reports from which the server was found to differ, and carries them out; returns how many those were.
    async fn carry_out_differing(&self) -> usize {
        self.writer.requeue_drifted();
        self.carry_out_queued().await
    }

    /// The server's pod.
    fn live(&self) -> Value {
        self.server.get(POD).unwrap()
    }

    /// The `resourceVersion` of the server's pod: another one after each write.
    fn version(&self) -> String {
        text(&self.live(), "resourceVersion")
    }

    /// Has pod-config send this state of the server's pod.
    fn observe(&mut self, live: &Value) {
        self.revision += 1;
        let pod = pc::DesiredPod {
            uid: text(live, "uid"),
            namespace: text(live, "namespace"),
            name: text(live, "name"),
            source: API.into(),
            pod_json: live.to_string().into_bytes().into(),
            revision: self.revision,
            ..pc::DesiredPod::default()
        };
        self.observed.observe(pod, &self.writer);
    }

    /// What is known of the server's status after pod-config has sent the current pod.
    fn observed_state(&mut self) -> ServerState {
        self.observe(&self.live());
        self.writer.cache().pods[&self.uid].server.clone()
    }
}

fn text(object: &Value, field: &str) -> String {
    object["metadata"][field].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_unchanged_status_is_not_written_a_second_time() {
    for source in [API, "file"] {
        let mut scene = Scene::new(source);
        scene.report("Pending").await;
        let before = scene.live();
        scene.report("Running").await;
        let version = scene.version();
        assert_ne!(text(&before, "resourceVersion"), version, "{source}: a changed status is written");
        assert_eq!(scene.live()["status"]["phase"], "Running");

        // As after a restart of pod-sync or of the agent.
        scene.report("Running").await;
        assert_eq!(scene.version(), version, "{source}: the report is that of before");
        scene.observe(&scene.live());
        assert_eq!(scene.carry_out_differing().await, 0, "{source}");
        // pod-config is late: what it sends is older than the last write.
        scene.observe(&before);
        assert_eq!(scene.carry_out_differing().await, 1, "{source}");
        assert_eq!(scene.version(), version, "{source}: the server has the report already");
        assert_eq!(scene.observed_state(), ServerState::Has(version.into()), "{source}");
    }
}

#[tokio::test]
async fn a_resource_version_of_another_client_has_the_status_compared_again() {
    for source in [API, "file"] {
        let mut scene = Scene::new(source);
        scene.report("Running").await;
        let version = scene.version();
        assert_eq!(scene.observed_state(), ServerState::Has(version.clone().into()), "{source}");

        scene.server.patch(STATUS, &json!({"status": {"phase": "Pending"}})).unwrap();
        assert_ne!(scene.version(), version);
        assert_eq!(scene.observed_state(), ServerState::Differs, "{source}");
        assert_eq!(scene.carry_out_differing().await, 1, "{source}");
        assert_eq!(scene.live()["status"]["phase"], "Running", "{source}: it is written again");
        let version = scene.version();
        assert_eq!(scene.observed_state(), ServerState::Has(version.clone().into()), "{source}");
        assert_eq!(scene.carry_out_differing().await, 0, "{source}: once");

        // What is not in the report is compared, and is no difference.
        scene.server.patch(POD, &json!({"metadata": {"labels": {"a": "b"}}})).unwrap();
        let changed = scene.version();
        assert_ne!(changed, version);
        assert_eq!(scene.observed_state(), ServerState::Unknown, "{source}");
        assert_eq!(scene.carry_out_differing().await, 0, "{source}");
        assert_eq!(scene.version(), changed, "{source}: nothing is written");
    }
}
