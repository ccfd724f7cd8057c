use keelson_service_kit::status::error as status;
use keelson_volume_manager_core::csi::csi_node::{Allocatable, MIGRATED_PLUGINS_ANNOTATION};
use serde_json::json;

use super::*;
use crate::csi::fake_api::{FakeApi, NODE};

fn entry(name: &str, node_id: &str) -> DriverEntry {
    DriverEntry {
        name: DriverName::parse(name).unwrap(),
        node_id: node_id.into(),
        topology_keys: BTreeSet::from(["zone".to_owned()]),
        allocatable: Allocatable::Count(7),
    }
}

fn conflict() -> Status {
    status(Code::Aborted, "CONFLICT", "changed")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_driver_creates_the_csi_node_and_others_join_it() {
    let api = FakeApi::start().await;
    api.nodes.add(&entry("a", "n1")).await.unwrap();
    let csi_node = api.csi_node().unwrap();
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid"}]);
    assert_eq!(csi_node["metadata"]["ownerReferences"], owner);
    let driver = json!({"name": "a", "nodeID": "n1", "topologyKeys": ["zone"], "allocatable": {"count": 7}});
    assert_eq!(csi_node["spec"]["drivers"], json!([driver]));
    api.nodes.add(&entry("b", "n2")).await.unwrap();
    api.nodes.add(&entry("a", "n3")).await.unwrap();
    assert_eq!(api.drivers(), ["a n3", "b n2"]);
    let changes = api.pod_config.mutate.requests().len();
    api.nodes.add(&entry("a", "n3")).await.unwrap();
    assert_eq!(api.pod_config.mutate.requests().len(), changes, "an unchanged entry is not written");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_is_removed_and_a_missing_csi_node_is_not_created_for_that() {
    let api = FakeApi::start().await;
    let name = DriverName::parse("a").unwrap();
    api.nodes.remove(&name, &|| false).await.unwrap();
    assert_eq!(api.csi_node(), None);
    api.nodes.add(&entry("a", "n1")).await.unwrap();
    api.nodes.add(&entry("b", "n1")).await.unwrap();
    api.nodes.remove(&name, &|| false).await.unwrap();
    assert_eq!(api.drivers(), ["b n1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn drivers_that_register_at_the_same_time_are_all_in_the_csi_node() {
    let api = FakeApi::start().await;
    let entries: Vec<DriverEntry> = (0..8).map(|number| entry(&format!("d{number}"), "n")).collect();
    let added = futures_util::future::join_all(entries.iter().map(|entry| api.nodes.add(entry))).await;
    assert!(added.iter().all(Result::is_ok), "{added:?}");
    assert_eq!(api.drivers().len(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_is_tried_again_and_the_fourth_is_an_error() {
    let api = FakeApi::start().await;
    api.objects.lock().unwrap().refusals = vec![conflict(); 3];
    api.nodes.add(&entry("a", "n1")).await.unwrap();
    assert_eq!(api.drivers(), ["a n1"]);
    api.objects.lock().unwrap().refusals = vec![conflict(); 4];
    let error = api.nodes.add(&entry("b", "n1")).await.unwrap_err();
    assert!(matches!(error, NodeInfoError::Conflict { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_csi_node_of_an_earlier_node_is_replaced() {
    let api = FakeApi::start().await;
    let old = json!({
        "metadata": {"name": NODE, "uid": "old", "resourceVersion": "5",
            "ownerReferences": [{"kind": "Node", "name": NODE, "uid": "earlier-node"}]},
        "spec": {"drivers": [{"name": "gone", "nodeID": "x"}]},
    });
    api.objects.lock().unwrap().csi_node = Some(old.clone());
    api.nodes.add(&entry("a", "n1")).await.unwrap();
    assert_eq!(api.drivers(), ["a n1"]);
    assert_eq!(api.csi_node().unwrap()["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    api.objects.lock().unwrap().csi_node = Some(old);
    api.nodes.remove(&DriverName::parse("a").unwrap(), &|| false).await.unwrap();
    assert_eq!(api.csi_node(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_csi_node_is_an_error_at_once() {
    let api = FakeApi::start().await;
    api.objects.lock().unwrap().csi_node = Some(json!({"metadata": {"name": NODE}, "spec": {"drivers": 5}}));
    let error = api.nodes.add(&entry("a", "n1")).await.unwrap_err();
    assert!(matches!(error, NodeInfoError::Content(_)), "{error}");
    assert_eq!(api.pod_config.get_live.requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_api_server_there_is_nothing_to_write_and_the_storage_is_ready() {
    let api = FakeApi::standalone().await;
    api.nodes.add(&entry("a", "n1")).await.unwrap();
    api.nodes.remove(&DriverName::parse("a").unwrap(), &|| false).await.unwrap();
    let ready = watch::Sender::new(Ok(()));
    api.nodes.initialize(&ready, &CancellationToken::new()).await.unwrap();
    assert_eq!(*ready.borrow(), Ok(()));
    assert!(api.pod_config.mutate.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_storage_is_not_ready_until_the_csi_node_has_its_annotation() {
    let api = FakeApi::start().await;
    let unreachable = status(Code::Unavailable, "CONTROL_PLANE_AWAY", "connection refused");
    api.objects.lock().unwrap().unreadable = Some(unreachable);
    let ready = watch::Sender::new(Ok(()));
    let mut seen = ready.subscribe();
    let shutdown = CancellationToken::new();
    let initialized = api.nodes.initialize(&ready, &shutdown);
    let recovered = async {
        let refused = |state: &Result<(), String>| {
            state.as_ref().is_err_and(|text| text.starts_with(NOT_INITIALIZED) && text.contains("refused"))
        };
        drop(seen.wait_for(refused).await.unwrap());
        let mut objects = api.objects.lock().unwrap();
        objects.unreadable = None;
        objects.refusals = vec![conflict(); 2];
    };
    let (initialized, ()) = tokio::join!(initialized, recovered);
    initialized.unwrap();
    assert_eq!(*ready.borrow(), Ok(()));
    let annotations = &api.csi_node().unwrap()["metadata"]["annotations"];
    assert_eq!(annotations[MIGRATED_PLUGINS_ANNOTATION], migrated_plugins_annotation());
    // After a restart nothing has to be written.
    let changes = api.pod_config.mutate.requests().len();
    api.nodes.initialize(&ready, &shutdown).await.unwrap();
    assert_eq!(api.pod_config.mutate.requests().len(), changes);
}

#[tokio::test(flavor = "multi_thread")]
async fn storage_is_ready_with_an_old_pod_config_and_registers_after_its_upgrade() {
    let api = FakeApi::start().await;
    api.objects.lock().unwrap().unreadable = Some(tonic::Status::unimplemented(""));
    // An error from the start: a watch does not show every state in between.
    let ready = watch::Sender::new(Err("not initialized yet".to_owned()));
    let mut seen = ready.subscribe();
    let shutdown = CancellationToken::new();
    let initialized = api.nodes.initialize(&ready, &shutdown);
    let upgraded = async {
        drop(seen.wait_for(Result::is_ok).await.unwrap());
        assert!(api.csi_node().is_none());
        api.objects.lock().unwrap().unreadable = None;
    };
    let (initialized, ()) = tokio::join!(initialized, upgraded);
    initialized.unwrap();
    let annotations = &api.csi_node().unwrap()["metadata"]["annotations"];
    assert_eq!(annotations[MIGRATED_PLUGINS_ANNOTATION], migrated_plugins_annotation());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_ends_the_wait_for_the_api_server() {
    let api = FakeApi::start().await;
    api.objects.lock().unwrap().node = None;
    let ready = watch::Sender::new(Ok(()));
    let shutdown = CancellationToken::new();
    shutdown.cancel();
    api.nodes.initialize(&ready, &shutdown).await.unwrap();
    assert!(ready.borrow().is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_does_not_answer_delays_a_change_for_a_limited_time() {
    let api = FakeApi::start().await;
    api.nodes.add(&entry("a", "n1")).await.unwrap();
    let limit = Duration::from_millis(200);
    let nodes = api.nodes.clone().within(limit, limit);
    let gate = api.pod_config.get_live.hold();
    let name = DriverName::parse("a").unwrap();
    let errors = [
        nodes.add(&entry("b", "n1")).await.unwrap_err(),
        nodes.remove(&name, &|| false).await.unwrap_err(),
        nodes.node().await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains("has not answered within 200ms"), "{error}");
    }
    gate.open();
    // Nothing is held up any more, and a driver that is back stays.
    api.nodes.remove(&name, &|| true).await.unwrap();
    api.nodes.add(&entry("b", "n1")).await.unwrap();
    assert_eq!(api.drivers(), ["a n1", "b n1"]);
}
