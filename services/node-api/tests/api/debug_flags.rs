//! `/debug/flags/v`: the verbosity of the logs of all services.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use tonic::Code;

use crate::fake::{World, peer_error, request};
use crate::secured_node::Secured;

const PATH: &str = "/debug/flags/v";

/// A node all of whose services can be reached.
async fn node() -> Secured {
    let mut node = Secured::start(false).await;
    for service in [ServiceName::PodConfig, ServiceName::NodeStatus] {
        node.world.serve_admin(service).await;
    }
    node
}

#[tokio::test]
async fn put_changes_the_verbosity_of_every_service_with_the_kubelets_answer() {
    let node = node().await;
    node.world.admin.set_verbosity.answer(Default::default());
    let answer = node.put_as_jane(PATH, "6").await;
    assert_eq!(answer, (200, "successfully set klog.logging.verbosity to 6\n".to_owned()));
    let set: Vec<i32> = node.world.admin.set_verbosity.requests().all().iter().map(|r| r.verbosity).collect();
    assert_eq!(set, [6; 6], "each of the six services that node-api may call");
}

#[tokio::test]
async fn invalid_verbosity_is_refused_and_no_service_is_called() {
    let node = node().await;
    for body in ["", "x", "1.5", "4\n", "2147483648"] {
        let (status, text) = node.put_as_jane(PATH, body).await;
        assert_eq!(status, 400, "{body:?}");
        assert!(text.starts_with("failed set klog.logging.verbosity "), "{text}");
    }
    let (status, text) = node.put_as_jane(PATH, vec![b'1'; 2000]).await;
    assert!(status == 400 && text.starts_with("error reading request body: "), "{status} {text}");
    let (status, _) = node.put_as_jane(PATH, vec![0xff]).await;
    assert_eq!(status, 400);
    for method in ["GET", "POST", "DELETE"] {
        let (status, _, text) = node.request_as_jane(method, PATH, &[]).await;
        assert_eq!((status, text.as_str()), (406, "unsupported http method\n"), "{method}");
    }
    assert_eq!(node.world.admin.set_verbosity.requests().len(), 0);
}

#[tokio::test]
async fn service_that_does_not_take_the_verbosity_is_named() {
    let node = Secured::start(false).await;
    node.world.admin.set_verbosity.answer(Default::default());
    let (status, text) = node.put_as_jane(PATH, "4").await;
    assert_eq!(status, 503, "{text}");
    assert!(text.starts_with("failed set klog.logging.verbosity 4 in: "), "{text}");
    for (service, named) in [("pod-config", true), ("node-status", true), ("pod-sync", false)] {
        assert_eq!(text.contains(service), named, "{service}: {text}");
    }
    node.world.admin.set_verbosity.fail(peer_error(Code::Internal, "no log"));
    let (_, text) = node.put_as_jane(PATH, "4").await;
    assert!(text.contains("pod-sync: no log"), "{text}");
}

#[tokio::test]
async fn without_tls_nobody_changes_the_verbosity() {
    let world = World::start().await;
    assert_eq!(request(world.api().await, "PUT", PATH).await.status, 401);
    assert_eq!(world.admin.set_verbosity.requests().len(), 0);
}
