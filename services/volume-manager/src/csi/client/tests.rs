use std::collections::HashMap;
use std::path::PathBuf;

use keelson_testkit::fakes::{FakeCsiNode, FakeServer};
use keelson_volume_manager_core::csi::error_class::{FailedStep, error_class};
use keelson_volume_manager_core::world::FailureClass;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;
use tonic::service::Routes;

use super::*;

/// A driver at a socket of its own, and a client.
struct World {
    dir: tempfile::TempDir,
    node: FakeCsiNode,
    metrics: Metrics,
    client: Client,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let metrics = Metrics::new();
        let name = DriverName::parse("d.example.com").unwrap();
        let client = Client::new(name, &dir.path().join("csi.sock"), CsiMetrics::register(&metrics));
        Self { dir, node: FakeCsiNode::default(), metrics, client }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("csi.sock")
    }

    async fn serve(&self) -> FakeServer {
        FakeServer::at(&self.socket(), Routes::new(self.node.server())).await.unwrap()
    }

    async fn stage(&self) -> Result<(), CallError> {
        self.client.node_stage_volume(&Operation::new(false), pb::NodeStageVolumeRequest::default()).await
    }

    fn count(&self, method: &str, code: &str, migrated: bool) -> usize {
        let line = format!(
            "csi_operations_seconds_count{{driver_name=\"d.example.com\",method_name=\"/csi.v1.Node/{method}\",\
             grpc_status_code=\"{code}\",migrated=\"{migrated}\"}} "
        );
        let text = self.metrics.text();
        text.lines().find_map(|l| l.strip_prefix(&line)?.parse().ok()).unwrap_or(0)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_passes_the_request_and_counts_in_the_metric() {
    let world = World::new();
    let _server = world.serve().await;
    world.node.node_expand_volume.answer(pb::NodeExpandVolumeResponse { capacity_bytes: 5 });
    let request = pb::NodeExpandVolumeRequest {
        volume_id: "v".into(),
        secrets: HashMap::from([("key".into(), "value".into())]),
        ..Default::default()
    };
    let size = world.client.node_expand_volume(&Operation::new(true), request.clone()).await.unwrap();
    assert_eq!(size, 5);
    assert_eq!(world.node.node_expand_volume.requests().all(), [request]);
    assert_eq!(world.count("NodeExpandVolume", "OK", true), 1, "{}", world.metrics.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_driver_has_its_class_code_and_text() {
    let world = World::new();
    let _server = world.serve().await;
    for code in &Code::ALL[1..] {
        let status = Status::new(tonic::Code::from_i32(code.number()), "no space");
        world.node.node_stage_volume.fail(status);
        let error = world.stage().await.unwrap_err();
        assert_eq!(error.code(), Some(*code));
        assert_eq!(error.class(), error_class(FailedStep::Status(*code)), "{code:?}");
        let text = format!(
            "NodeStageVolume of the CSI driver d.example.com has failed: {}: no space",
            code.as_str()
        );
        assert_eq!(error.to_string(), text);
        assert_eq!(world.count("NodeStageVolume", code.as_str(), false), 1, "{}", world.metrics.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_removed_from_the_errors_of_a_driver() {
    let world = World::new();
    let _server = world.serve().await;
    world.node.node_publish_volume.fail(Status::internal("login with hunter22 and hunter22-2 failed: ab"));
    let secrets = [("a", "hunter22"), ("b", "hunter22-2"), ("c", "ab")];
    let secrets = secrets.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let request = pb::NodePublishVolumeRequest { secrets, ..Default::default() };
    let error = world.client.node_publish_volume(&Operation::new(false), request, &[]).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.contains("login with ***stripped*** and ***stripped*** failed: ab"), "{text}");
    assert!(!text.contains("hunter22"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_error_of_a_driver_is_cut() {
    let world = World::new();
    let _server = world.serve().await;
    world.node.node_stage_volume.fail(Status::internal("é".repeat(LONGEST_ERROR + 1)));
    let text = world.stage().await.unwrap_err().to_string();
    assert!(text.ends_with("é…") && text.chars().count() < LONGEST_ERROR + 100, "{}", text.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_error_that_is_cut_within_a_token_shows_no_part_of_it() {
    let world = World::new();
    let _server = world.serve().await;
    let token = "eyJhbGciOiJSUzI1NiJ9".to_owned();
    for shown in 0..=token.len() {
        let message = format!("{}{token}", "x".repeat(LONGEST_ERROR - shown));
        world.node.node_publish_volume.fail(Status::internal(message));
        let request = pb::NodePublishVolumeRequest::default();
        let tokens = [token.clone()];
        let error =
            world.client.node_publish_volume(&Operation::new(false), request, &tokens).await.unwrap_err();
        let text = format!("{error} {:?}", error.failure);
        assert!(!text.contains("ey") && text.contains("xxxx"), "{shown}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_not_there_is_an_uncertain_error_with_its_socket() {
    let world = World::new();
    let error = world.stage().await.unwrap_err();
    assert!(matches!(error.failure, Failure::NotReachable(_)), "{error:?}");
    assert_eq!((error.class(), error.code()), (FailureClass::Uncertain, None));
    let text = error.to_string();
    let socket = world.socket().display().to_string();
    assert!(
        text.contains(&socket) && text.contains("d.example.com") && text.contains("No such file"),
        "{text}"
    );
    assert_eq!(world.count("NodeStageVolume", "Unavailable", false), 1, "{}", world.metrics.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_killed_during_a_call_leaves_it_uncertain_and_can_return() {
    let world = World::new();
    let server = world.serve().await;
    world.node.node_stage_volume.answer(pb::NodeStageVolumeResponse {});
    let gate = world.node.node_stage_volume.hold();
    let staged = world.stage();
    let killed = async {
        world.node.node_stage_volume.requests().until_len(1).await;
        server.kill();
    };
    let (staged, ()) = tokio::join!(staged, killed);
    let error = staged.unwrap_err();
    assert_eq!((error.class(), error.code()), (FailureClass::Uncertain, None), "{error:?}");
    gate.open();
    std::fs::remove_file(world.socket()).unwrap();
    let _server = world.serve().await;
    world.stage().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_hangs_ends_the_operation_at_its_deadline() {
    let world = World::new();
    let _server = world.serve().await;
    let _gate = world.node.node_stage_volume.hold();
    // Long enough for a busy machine to send the call.
    let operation = Operation::until(Instant::now() + Duration::from_secs(5), false);
    let error =
        world.client.node_stage_volume(&operation, pb::NodeStageVolumeRequest::default()).await.unwrap_err();
    assert_eq!((&error.failure, error.class()), (&Failure::NoAnswer, FailureClass::Uncertain));
    assert!(error.to_string().contains("has not answered in time"), "{error}");
    assert_eq!(world.count("NodeStageVolume", "DeadlineExceeded", false), 1, "{}", world.metrics.text());
    // The deadline is that of the operation: nothing is left of it for the next call.
    let error = world.client.node_get_capabilities(&operation).await.unwrap_err();
    assert_eq!(error.failure, Failure::NoAnswer, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_has_two_minutes() {
    let operation = Operation::new(false);
    let left = operation.deadline.duration_since(Instant::now());
    assert!(left <= Duration::from_secs(120) && left > Duration::from_secs(110), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_a_hanging_driver_are_limited_and_measurements_are_not_in_the_limit() {
    let world = World::new();
    let _server = world.serve().await;
    let gate = world.node.node_stage_volume.hold();
    world.node.node_stage_volume.answer(pb::NodeStageVolumeResponse {});
    let calls: Vec<_> = (0..CONCURRENT_CALLS)
        .map(|_| {
            let client = world.client.clone();
            tokio::spawn(async move {
                client.node_stage_volume(&Operation::new(false), pb::NodeStageVolumeRequest::default()).await
            })
        })
        .collect();
    world.node.node_stage_volume.requests().until_len(CONCURRENT_CALLS).await;
    let soon = Operation::until(Instant::now() + Duration::from_millis(100), false);
    let error =
        world.client.node_unstage_volume(&soon, pb::NodeUnstageVolumeRequest::default()).await.unwrap_err();
    assert_eq!((&error.failure, error.class()), (&Failure::Busy, FailureClass::Transient));
    assert!(world.node.node_unstage_volume.requests().is_empty());
    world.node.node_get_volume_stats.answer(pb::NodeGetVolumeStatsResponse::default());
    let stats = pb::NodeGetVolumeStatsRequest::default();
    world.client.node_get_volume_stats(&Operation::new(false), stats).await.unwrap();
    gate.open();
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_that_a_driver_does_not_measure_hold_up_none_of_its_other_volumes() {
    let world = World::new();
    let _server = world.serve().await;
    let gate = world.node.node_get_volume_stats.hold();
    world.node.node_get_volume_stats.answer(pb::NodeGetVolumeStatsResponse::default());
    let measure = |path: &str, operation: Operation| {
        let (client, volume_path) = (world.client.clone(), path.to_owned());
        let request = pb::NodeGetVolumeStatsRequest { volume_path, ..Default::default() };
        tokio::spawn(async move { client.node_get_volume_stats(&operation, request).await })
    };
    let hanging: Vec<String> = (0..CONCURRENT_MEASUREMENTS).map(|number| format!("/{number}")).collect();
    for path in &hanging {
        let soon = Operation::until(Instant::now() + Duration::from_millis(100), false);
        let error = measure(path, soon).await.unwrap().unwrap_err();
        assert_eq!(error.failure, Failure::NoAnswer, "{error}");
    }
    let mut running: Vec<_> = hanging.iter().map(|path| measure(path, Operation::new(false))).collect();
    let requests = world.node.node_get_volume_stats.requests();
    requests.until_len(2 * CONCURRENT_MEASUREMENTS).await;
    running.push(measure("/healthy", Operation::new(false)));
    requests.until_len(2 * CONCURRENT_MEASUREMENTS + 1).await;
    gate.open();
    for call in running {
        call.await.unwrap().unwrap();
    }
    assert!(hanging.iter().all(|path| world.client.silent.limit(path).is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_long_is_uncertain() {
    let world = World::new();
    let _server = world.serve().await;
    let condition = pb::VolumeCondition { abnormal: false, message: "x".repeat(LONGEST_MESSAGE) };
    let answer = pb::NodeGetVolumeStatsResponse { usage: vec![], volume_condition: Some(condition) };
    world.node.node_get_volume_stats.answer(answer);
    let stats = pb::NodeGetVolumeStatsRequest::default();
    let error = world.client.node_get_volume_stats(&Operation::new(false), stats).await.unwrap_err();
    assert!(matches!(error.failure, Failure::Invalid(_)), "{error:?}");
    assert_eq!((error.class(), error.code()), (FailureClass::Uncertain, None));
    assert_eq!(world.count("NodeGetVolumeStats", "unknown-non-grpc", false), 1, "{}", world.metrics.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_the_api_of_a_driver_is_an_error() {
    let world = World::new();
    let other = keelson_testkit::fakes::FakePluginRegistration::default();
    let _server = FakeServer::at(&world.socket(), Routes::new(other.server())).await.unwrap();
    let error = world.stage().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (FailureClass::Final, Some(Code::Unimplemented)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_that_answers_garbage_is_an_uncertain_error_with_the_driver_and_socket() {
    let world = World::new();
    let listener = UnixListener::bind(world.socket()).unwrap();
    let server = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(b"SSH-2.0-garbage\r\n".repeat(100).as_slice()).await;
            let _ = stream.read(&mut [0; 64]).await;
        }
    });
    let error = world.stage().await.unwrap_err();
    server.abort();
    assert_eq!((error.class(), error.code()), (FailureClass::Uncertain, None), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("d.example.com") && text.contains(&world.socket().display().to_string()), "{text}");
}
