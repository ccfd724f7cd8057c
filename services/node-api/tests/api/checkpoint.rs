//! `/checkpoint`: archives of containers, written by the runtime.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::status::error;
use tonic::{Code, Status};

use crate::fake::{World, request};
use crate::secured_node::Secured;

const PATH: &str = "/checkpoint/default/web/c";

async fn node() -> Secured {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let path = "/var/lib/kubelet/checkpoints/checkpoint-web_default-c-2026.tar".to_owned();
    node.world.runtime.checkpoint_container.answer(rt::CheckpointContainerResponse { path });
    node
}

#[tokio::test]
async fn checkpoint_answers_with_the_path_of_the_archive() {
    let node = node().await;
    let (status, headers, text) = node.request_as_jane("POST", PATH, &[]).await;
    let expected = r#"{"items":["/var/lib/kubelet/checkpoints/checkpoint-web_default-c-2026.tar"]}"#;
    assert_eq!((status, text.as_str()), (200, expected));
    assert_eq!(headers["content-type"], "application/json");
    let asked = node.world.runtime.checkpoint_container.requests().last().unwrap();
    let expected = rt::CheckpointContainerRequest {
        pod_uid: "uid-of-web".into(),
        namespace: "default".into(),
        name: "web".into(),
        container: "c".into(),
        timeout_seconds: 0,
    };
    assert_eq!(asked, expected);
    node.request_as_jane("POST", &format!("{PATH}?timeout=x&timeout=7"), &[]).await;
    let asked = node.world.runtime.checkpoint_container.requests().last().unwrap();
    assert_eq!(asked.timeout_seconds, 7, "the last one counts");
}

#[tokio::test]
async fn checkpoint_may_take_the_runtimes_time_or_the_longer_timeout() {
    let node = node().await;
    for (query, seconds) in
        [("", 125), ("?timeout=7", 125), ("?timeout=300", 305), ("?timeout=9223372036854775807", 7_776_005)]
    {
        let (status, _, text) = node.request_as_jane("POST", &format!("{PATH}{query}"), &[]).await;
        assert_eq!(status, 200, "{text}");
        let deadline = node.world.runtime_deadlines.last().unwrap();
        assert_eq!(seconds_of(&deadline), seconds, "{query}: {deadline}");
    }
}

/// The seconds of a `grpc-timeout`.
fn seconds_of(deadline: &str) -> u64 {
    let (number, unit) = deadline.split_at(deadline.len() - 1);
    let per_second = match unit {
        "S" => 1,
        "m" => 1000,
        "u" => 1_000_000,
        unit => panic!("{unit}"),
    };
    number.parse::<u64>().unwrap() / per_second
}

#[tokio::test]
async fn checkpoint_errors_have_the_kubelets_status_and_text() {
    let node = node().await;
    for (path, status, text) in [
        ("/checkpoint/default/none/c", 404, "pod does not exist"),
        ("/checkpoint/default/web/x", 404, "container x does not exist"),
        ("/checkpoint/default/web/c?timeout=soon", 404, "cannot parse value of timeout parameter"),
        ("/checkpoint/default/web/c?timeout=1.5", 404, "cannot parse value of timeout parameter"),
    ] {
        let answer = node.request_as_jane("POST", path, &[]).await;
        assert_eq!((answer.0, answer.2.as_str()), (status, text), "{path}");
    }
    assert_eq!(node.world.runtime.checkpoint_container.requests().len(), 0);
    assert_eq!(node.request_as_jane("GET", PATH, &[]).await.0, 405);
    let runtime = "rpc error: code = Unimplemented desc = unknown method CheckpointContainer";
    node.world.runtime.checkpoint_container.fail(error(Code::FailedPrecondition, "RUNTIME_REFUSED", runtime));
    let (status, _, text) = node.request_as_jane("POST", PATH, &[]).await;
    assert_eq!((status, text), (500, format!("checkpointing of default/web/c failed ({runtime})")));
    node.world.runtime.checkpoint_container.fail(Status::unavailable("it does not answer"));
    let (status, _, text) = node.request_as_jane("POST", PATH, &[]).await;
    assert_eq!((status, text.as_str()), (503, "runtime-shim: it does not answer"));
}

#[tokio::test]
async fn without_its_gate_or_tls_there_is_no_checkpoint() {
    let off = Secured::start_with(|api| api.handlers.checkpoint = false).await;
    off.world.running_pod("web");
    assert_eq!(off.request_as_jane("POST", PATH, &[]).await.0, 404);
    let world = World::start().await;
    world.running_pod("web");
    assert_eq!(request(world.api().await, "POST", PATH).await.status, 401);
    assert_eq!(request(world.read_only().await, "POST", PATH).await.status, 404);
    assert_eq!(world.runtime.checkpoint_container.requests().len(), 0);
}
