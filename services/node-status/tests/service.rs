//! node-status over real unix sockets, with fake services.

#![allow(clippy::unwrap_used)]

mod fake;

use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_kube_model::Node;
use keelson_node_status::{GonePods, build_with};
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::node_status::v1 as pb;
use keelson_proto::keelson::node_status::v1::node_status_client::NodeStatusClient;
use keelson_service_kit::{Context, ObjectRef, Peer};

use fake::{FakePeers, RecordingWriter, eventually, pod_document};

struct Service {
    ctx: Context,
    writer: Arc<RecordingWriter>,
}

async fn start(peers: &FakePeers) -> Service {
    start_with(peers.context(ServiceName::NodeStatus)).await
}

async fn start_with(ctx: Context) -> Service {
    let writer = Arc::new(RecordingWriter::default());
    let routes = build_with(ctx.clone(), writer.clone()).await.unwrap();
    fake::serve(&ctx, routes);
    Service { ctx, writer }
}

impl Service {
    fn client(&self) -> NodeStatusClient<keelson_service_kit::PeerChannel> {
        let peer = Peer::service(&self.ctx.config.paths.run_dir, ServiceName::NodeStatus);
        NodeStatusClient::new(peer.channel())
    }

    async fn node(&self) -> Node {
        let bytes = self.client().get_node(pb::GetNodeRequest {}).await.unwrap().into_inner().node_json;
        serde_json::from_slice(&bytes).unwrap()
    }

    async fn ready(&self) -> (String, String) {
        let condition = self.node().await.status.conditions.pop().unwrap();
        (condition.status, condition.message)
    }

    async fn ready_is(&self, status: &str) -> String {
        eventually(async || {
            let (is, message) = self.ready().await;
            (is == status).then_some(message)
        })
        .await
    }
}

#[tokio::test]
async fn the_node_is_ready_once_all_services_have_reported_and_follows_the_runtime() {
    let peers = FakePeers::start().await;
    let service = start(&peers).await;
    peers.machine();
    peers.runtime(true, "");
    service.ready_is("True").await;
    let node = service.node().await;
    assert_eq!(node.status.capacity["cpu"].to_string(), "2");
    assert_eq!(node.status.node_info.container_runtime_version, "containerd://1.6.20");

    peers.runtime(false, "container runtime not ready: X");
    assert_eq!(service.ready_is("False").await, "container runtime not ready: X");
    peers.runtime(true, "");
    service.ready_is("True").await;
    let state = service.client().get_report_state(pb::GetReportStateRequest {}).await.unwrap().into_inner();
    assert_eq!((state.control_plane.as_str(), state.queued), ("recording", 0));
    service.ctx.shutdown.cancel();
}

#[tokio::test]
async fn the_creation_timestamp_of_the_node_survives_restarts() {
    for (name, is_kept) in [("n1", true), ("another", false)] {
        let peers = FakePeers::start().await;
        let ctx = peers.context(ServiceName::NodeStatus);
        let file = ctx.config.paths.state(ServiceName::NodeStatus).join("report.json");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let kept = format!(r#"{{"nodeName":"{name}","nodeCreated":1700000000}}"#);
        std::fs::write(&file, kept).unwrap();
        peers.machine();
        peers.runtime(true, "");
        let service = start_with(ctx).await;
        service.ready_is("True").await;
        let created = service.node().await.metadata.creation_timestamp.unwrap();
        assert_eq!(created == "2023-11-14T22:13:20Z", is_kept, "{name}: {created}");
        let own = "\"nodeName\":\"n1\"";
        let read = || std::fs::read_to_string(&file).ok().filter(|text| text.contains("conditions"));
        let text = eventually(async || read().filter(|text| text.contains(own))).await;
        assert_eq!(text.contains("\"nodeCreated\":1700000000"), is_kept, "{name}: {text}");
        service.ctx.shutdown.cancel();
    }
}

#[tokio::test]
async fn the_largest_images_and_the_swap_are_in_the_node() {
    let peers = FakePeers::start().await;
    peers.images.add("small:1", "small@sha256:1", 10);
    peers.images.add("large:1", "large@sha256:2", 30);
    peers.images.add("middle:1", "middle@sha256:3", 20);
    peers.machine();
    peers.runtime(true, "");
    let mut ctx = peers.context(ServiceName::NodeStatus);
    let mut config = (*ctx.config).clone();
    config.node_status.max_images = 2;
    assert!(ctx.live.take(&config));
    ctx.config = Arc::new(config);
    let service = start_with(ctx).await;
    service.ready_is("True").await;
    let status = service.node().await.status;
    let listed: Vec<_> = status.images.iter().map(|i| (i.names.join(" "), i.size_bytes)).collect();
    let expected = [("large@sha256:2 large:1", 30), ("middle@sha256:3 middle:1", 20)];
    assert_eq!(listed, expected.map(|(names, size)| (names.to_owned(), Some(size))));
    assert_eq!(status.node_info.swap.unwrap().capacity, Some(1 << 20));
    service.ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_runtime_that_does_not_list_its_images_leaves_the_node_ready() {
    let peers = FakePeers::start().await;
    peers.machine();
    peers.runtime(true, "");
    let service = start(&peers).await;
    service.ready_is("True").await;
    let report = || service.ctx.progress.report("");
    let images = eventually(async || report().conditions.into_iter().find(|c| c.name == "images")).await;
    assert!(!images.ok && images.message.contains("the runtime does not list"), "{}", images.message);
    assert_eq!(service.ready().await.0, "True");
    assert!(service.node().await.status.images.is_empty());
    service.ctx.shutdown.cancel();
}

#[tokio::test]
async fn the_ready_condition_names_a_stuck_loop_and_a_missing_service() {
    let peers = FakePeers::start().await;
    peers.machine();
    peers.runtime(true, "");
    peers.stuck(ServiceName::VolumeManager, true);
    peers.kill(ServiceName::PodSync);
    let service = start(&peers).await;
    let message = service.ready_is("False").await;
    assert!(message.contains("pod-sync has not answered yet"), "{message}");
    assert!(message.contains("volume-manager makes no progress: its loop \"work\""), "{message}");
    service.ctx.shutdown.cancel();
}

#[tokio::test]
async fn each_changed_pod_status_is_reported_once_over_stream_restarts() {
    let peers = FakePeers::start().await;
    peers.pods.set("u1".into(), pod_document("u1", "Pending", false, 1));
    let service = start(&peers).await;
    let writer = &service.writer;
    eventually(async || (writer.pods() == [("u1".to_owned(), true)]).then_some(())).await;

    peers.pods.set("u1".into(), pod_document("u1", "Running", true, 2));
    eventually(async || (writer.pods().len() == 2).then_some(())).await;

    // pod-sync restarts with the same document under a version that starts again, and one new pod.
    peers.kill(ServiceName::PodSync);
    peers.pods.set("u1".into(), pod_document("u1", "Running", true, 1));
    peers.pods.set("u2".into(), pod_document("u2", "Running", true, 1));
    peers.restart(ServiceName::PodSync).await;
    eventually(async || (writer.pods().len() == 3).then_some(())).await;
    assert_eq!(writer.pods()[2], ("u2".to_owned(), true));
    service.ctx.shutdown.cancel();
}

#[tokio::test]
async fn removed_pods_are_dropped_from_the_writer() {
    let peers = FakePeers::start().await;
    for uid in ["u1", "u2"] {
        peers.pods.set(uid.into(), pod_document(uid, "Running", true, 1));
    }
    let service = start(&peers).await;
    let writer = &service.writer;
    let all = GonePods::AllBut(["u1".to_owned(), "u2".to_owned()].into());
    eventually(async || (writer.gone() == [all.clone()]).then_some(())).await;
    peers.pods.remove(&"u1".to_owned());
    eventually(async || (writer.gone().last() == Some(&GonePods::One("u1".into()))).then_some(())).await;
    service.ctx.shutdown.cancel();
}

#[tokio::test]
async fn the_starting_event_is_per_agent_start_and_not_per_service_restart() {
    let peers = FakePeers::start().await;
    let start = async |resolved_unix_nanos| {
        let mut ctx = peers.context(ServiceName::NodeStatus);
        let mut config = (*ctx.config).clone();
        config.resolved_unix_nanos = resolved_unix_nanos;
        ctx.config = Arc::new(config);
        start_with(ctx).await
    };
    for (resolved, is_recorded) in [(7, true), (7, false), (9, true)] {
        let service = start(resolved).await;
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = service.ctx.events.list_events(request).await.unwrap().into_inner().events;
        let starts = events.iter().filter(|e| (&*e.kind, &*e.name, &*e.reason) == ("Node", "n1", "Starting"));
        assert_eq!(starts.count(), usize::from(is_recorded), "{resolved}: {events:#?}");
        if is_recorded {
            let is_written = || service.writer.events().contains(&"node-status Starting".to_owned());
            eventually(async || is_written().then_some(())).await;
            let file = service.ctx.config.paths.state(ServiceName::NodeStatus).join("report.json");
            let start = format!("\"agentStart\":{resolved}");
            eventually(async || std::fs::read_to_string(&file).ok().filter(|t| t.contains(&start))).await;
        }
        service.ctx.shutdown.cancel();
    }
}

#[tokio::test]
async fn events_are_drained_once_across_a_restart() {
    let peers = FakePeers::start().await;
    let ring = peers.events(ServiceName::PodSync);
    ring.normal(ObjectRef::pod("default", "web", "u1"), "Started", "Started container c");
    let service = start(&peers).await;
    let written = |service: &Service| service.writer.events();
    eventually(async || written(&service).contains(&"pod-sync Started".to_owned()).then_some(())).await;
    let file = service.ctx.config.paths.state(ServiceName::NodeStatus).join("report.json");
    eventually(async || std::fs::read_to_string(&file).ok().filter(|t| t.contains("pod-sync"))).await;
    service.ctx.shutdown.cancel();

    ring.warning(ObjectRef::pod("default", "web", "u1"), "BackOff", "waits");
    let again = start(&peers).await;
    eventually(async || written(&again).contains(&"pod-sync BackOff".to_owned()).then_some(())).await;
    assert!(!written(&again).contains(&"pod-sync Started".to_owned()));
    again.ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_node_that_shuts_down_is_not_ready() {
    let peers = FakePeers::start().await;
    let service = start(&peers).await;
    peers.machine();
    peers.runtime(true, "");
    service.ready_is("True").await;
    peers.shutting_down();
    assert_eq!(service.ready_is("False").await, "node is shutting down");
    // The shutdown was cancelled.
    peers.machine();
    service.ready_is("True").await;
    service.ctx.shutdown.cancel();
}
