use std::path::PathBuf;

use keelson_plugin_watcher::PluginWatcher;
use keelson_proto::csi::v1 as pb;
use keelson_proto::pluginregistration as plugin;
use keelson_service_kit::{CancellationToken, Metrics, Progress};
use keelson_testkit::fakes::{FakeCsiNode, FakePluginRegistration, FakeServer, Gate};
use tonic::Status;
use tonic::service::Routes;

use super::*;
use crate::csi::client::CsiMetrics;
use crate::csi::fake_api::FakeApi;

/// A node with drivers.
struct World {
    dir: tempfile::TempDir,
    api: FakeApi,
    drivers: Drivers,
    registration: CsiRegistration,
}

impl World {
    fn new(api: FakeApi) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let drivers =
            Drivers::new(CsiMetrics::register(&Metrics::new()), &dir.path().join("plugins_registry"));
        let registration = CsiRegistration::new(drivers.clone(), api.nodes.clone());
        Self { dir, api, drivers, registration }
    }

    /// A driver that serves its API at `<name>.sock`.
    async fn driver(&self, name: &str) -> FakeDriver {
        let endpoint = self.dir.path().join(format!("{name}.sock"));
        let node = FakeCsiNode::default();
        node.node_get_info.answer(node_info("id", 3, &[("zone", "z1")]));
        let server = FakeServer::at(&endpoint, Routes::new(node.server())).await.unwrap();
        FakeDriver { node, endpoint, _server: server }
    }

    fn node_ids(&self) -> Vec<(String, Option<String>)> {
        let update = self.drivers.node_update().borrow().clone();
        let registered = update.registered.into_iter().map(|(name, driver)| (name, Some(driver.node_id)));
        let gone = update.unregistered.into_iter().map(|name| (name, None));
        registered.chain(gone).map(|(name, id)| (name.to_string(), id)).collect()
    }
}

struct FakeDriver {
    node: FakeCsiNode,
    endpoint: PathBuf,
    _server: FakeServer,
}

impl FakeDriver {
    fn plugin(&self, name: &str, version: &str, socket: &str) -> Plugin {
        Plugin {
            kind: KIND.into(),
            name: name.into(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec![version.into()],
            socket: socket.into(),
        }
    }
}

fn node_info(node_id: &str, max_volumes: i64, topology: &[(&str, &str)]) -> pb::NodeGetInfoResponse {
    let segments = topology.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    pb::NodeGetInfoResponse {
        node_id: node_id.into(),
        max_volumes_per_node: max_volumes,
        accessible_topology: Some(pb::Topology { segments }),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_is_registered_in_memory_the_csi_node_and_the_node_update() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    let plugin = driver.plugin("d", "1.5.0", "/s1");
    let handler = world.registration.handler();
    handler.register(&plugin).await.unwrap();
    assert_eq!(world.drivers.get("d").unwrap().endpoint(), driver.endpoint);
    assert_eq!(world.api.drivers(), ["d id"]);
    let entry = &world.api.csi_node().unwrap()["spec"]["drivers"][0];
    assert_eq!((&entry["allocatable"]["count"], &entry["topologyKeys"][0]), (&3.into(), &"zone".into()));
    assert_eq!(world.node_ids(), [("d".into(), Some("id".into()))]);

    handler.unregister(&plugin).await;
    assert!(world.drivers.get("d").is_err());
    assert_eq!(world.api.drivers(), [""; 0]);
    assert_eq!(world.node_ids(), [("d".into(), None)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_left_while_the_service_was_down_stays_in_the_csi_node() {
    let world = World::new(FakeApi::start().await);
    let (first, second) = (world.driver("d").await, world.driver("e").await);
    world.registration.handler().register(&first.plugin("d", "1.0.0", "/s1")).await.unwrap();
    // The service starts again, and the socket of the first driver is gone.
    let registry = world.dir.path().join("plugins_registry");
    let drivers = Drivers::new(CsiMetrics::register(&Metrics::new()), &registry);
    let restarted = CsiRegistration::new(drivers.clone(), world.api.nodes.clone());
    restarted.handler().register(&second.plugin("e", "1.0.0", "/s2")).await.unwrap();
    assert!(drivers.get("d").is_err() && drivers.get("e").is_ok());
    assert_eq!(world.api.drivers(), ["d id", "e id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_api_server_a_driver_is_registered_without_a_csi_node() {
    let world = World::new(FakeApi::standalone().await);
    let plugin = world.driver("d").await;
    world.registration.handler().register(&plugin.plugin("d", "1.0.0", "/s1")).await.unwrap();
    assert!(world.drivers.get("d").is_ok());
    assert!(world.api.pod_config.mutate.requests().is_empty());
    world.registration.handler().unregister(&plugin.plugin("d", "1.0.0", "/s1")).await;
    assert!(world.drivers.get("d").is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_with_a_bad_name_version_or_node_id_is_refused_with_the_reason() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    let handler = world.registration.handler();
    for (name, version, part) in [
        ("a/b", "1.0.0", "invalid CSI driver name"),
        ("d", "2.0.0", "must list one of 1.x"),
        ("d", "0.3.0", "install a newer driver"),
    ] {
        let error = handler.register(&driver.plugin(name, version, "/s1")).await.unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    assert!(driver.node.node_get_info.requests().is_empty());
    driver.node.node_get_info.answer(node_info("", 0, &[]));
    let error = handler.register(&driver.plugin("d", "1.0.0", "/s1")).await.unwrap_err();
    assert!(error.contains("empty node_id"), "{error}");
    assert!(world.drivers.get("d").is_err() && world.api.csi_node().is_none() && world.node_ids().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topology_that_contradicts_a_label_is_refused() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    driver.node.node_get_info.answer(node_info("id", 0, &[("zone", "z2")]));
    let error = world.registration.handler().register(&driver.plugin("d", "1.0.0", "/s1")).await.unwrap_err();
    assert!(error.contains("zone=z2") && error.contains("zone=z1"), "{error}");
    assert!(world.drivers.get("d").is_err() && world.api.csi_node().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn node_get_info_is_retried_while_the_driver_starts_and_not_after_a_refusal() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    let handler = world.registration.handler();
    for _ in 0..2 {
        driver.node.node_get_info.answer_once(Err(Status::unavailable("starting")));
    }
    handler.register(&driver.plugin("d", "1.0.0", "/s1")).await.unwrap();
    assert_eq!(driver.node.node_get_info.requests().len(), 3);
    let other = world.driver("e").await;
    other.node.node_get_info.fail(Status::internal("broken"));
    let error = handler.register(&other.plugin("e", "1.0.0", "/s2")).await.unwrap_err();
    assert!(error.contains("NodeGetInfo of the CSI driver e has failed: Internal: broken"), "{error}");
    assert_eq!(other.node.node_get_info.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_publication_rolls_back_and_the_next_attempt_succeeds() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    let handler = world.registration.handler();
    let plugin = driver.plugin("d", "1.0.0", "/s1");
    let refused =
        keelson_service_kit::status::error(tonic::Code::FailedPrecondition, "MUTATION_REFUSED", "forbidden");
    world.api.objects.lock().unwrap().refusals = vec![refused; 4];
    let error = handler.register(&plugin).await.unwrap_err();
    assert!(error.contains("the CSI driver d cannot be published") && error.contains("forbidden"), "{error}");
    assert!(world.drivers.get("d").is_err());
    assert_eq!(world.node_ids(), [("d".into(), None)]);
    handler.register(&plugin).await.unwrap();
    assert!(world.drivers.get("d").is_ok());
    assert_eq!(world.node_ids(), [("d".into(), Some("id".into()))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_name_on_two_sockets_is_refused_unless_its_version_is_higher() {
    let world = World::new(FakeApi::start().await);
    let (old, new) = (world.driver("old").await, world.driver("new").await);
    new.node.node_get_info.answer(node_info("new-id", 0, &[]));
    let handler = world.registration.handler();
    handler.register(&old.plugin("d", "1.2.0", "/s1")).await.unwrap();
    let same = new.plugin("d", "1.2.0", "/s2");
    let error = handler.register(&same).await.unwrap_err();
    assert!(error.contains("is registered already"), "{error}");
    // The refused one leaves: that is nothing to the registered one.
    handler.unregister(&same).await;
    assert_eq!(world.drivers.get("d").unwrap().endpoint(), old.endpoint);

    let higher = new.plugin("d", "1.3.0", "/s2");
    handler.register(&higher).await.unwrap();
    assert_eq!(world.drivers.get("d").unwrap().endpoint(), new.endpoint);
    assert_eq!(world.api.drivers(), ["d new-id"]);
    // The old one leaves first, as in an upgrade, and the new one stays.
    handler.unregister(&old.plugin("d", "1.2.0", "/s1")).await;
    assert_eq!(world.drivers.get("d").unwrap().endpoint(), new.endpoint);
    assert_eq!(world.api.drivers(), ["d new-id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_newer_of_two_drivers_leaves_the_older_one_is_published_again() {
    let world = World::new(FakeApi::start().await);
    let (old, new) = (world.driver("old").await, world.driver("new").await);
    new.node.node_get_info.answer(node_info("new-id", 0, &[]));
    let handler = world.registration.handler();
    handler.register(&old.plugin("d", "1.2.0", "/s1")).await.unwrap();
    let higher = new.plugin("d", "1.3.0", "/s2");
    handler.register(&higher).await.unwrap();
    handler.unregister(&higher).await;
    assert_eq!(world.drivers.get("d").unwrap().endpoint(), old.endpoint);
    assert_eq!(world.api.drivers(), ["d id"]);
    assert_eq!(world.node_ids(), [("d".into(), Some("id".into()))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_was_replaced_can_still_be_called_by_who_holds_it() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    driver.node.node_unpublish_volume.answer(pb::NodeUnpublishVolumeResponse {});
    let plugin = driver.plugin("d", "1.0.0", "/s1");
    let handler = world.registration.handler();
    handler.register(&plugin).await.unwrap();
    let held = world.drivers.get("d").unwrap();
    handler.unregister(&plugin).await;
    let request = pb::NodeUnpublishVolumeRequest::default();
    held.node_unpublish(&Operation::new(false), request.clone()).await.unwrap();
    handler.register(&plugin).await.unwrap();
    world.drivers.get("d").unwrap().node_unpublish(&Operation::new(false), request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refresh_updates_the_limit_in_the_csi_node() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    world.registration.handler().register(&driver.plugin("d", "1.0.0", "/s1")).await.unwrap();
    driver.node.node_get_info.answer(node_info("id", 2, &[("zone", "z1")]));
    world.registration.refresh("d").await.unwrap();
    assert_eq!(world.api.csi_node().unwrap()["spec"]["drivers"][0]["allocatable"]["count"], 2);
    assert_eq!(world.drivers.get("d").unwrap().info().entry.allocatable, Allocatable::Count(2));
    driver.node.node_get_info.answer(node_info("id", -1, &[("zone", "z1")]));
    world.registration.refresh("d").await.unwrap();
    assert!(world.api.csi_node().unwrap()["spec"]["drivers"][0]["allocatable"].is_null());
    let error = world.registration.refresh("e").await.unwrap_err();
    assert!(matches!(error, RegisterError::NotFound(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_hangs_in_node_get_info_holds_up_no_other_driver() {
    let world = World::new(FakeApi::start().await);
    let (hanging, good) = (world.driver("hanging").await, world.driver("good").await);
    let _gate = hanging.node.node_get_info.hold();
    let handler = world.registration.handler();
    let plugin = hanging.plugin("hanging", "1.0.0", "/s1");
    let stuck = handler.register(&plugin);
    let other = async {
        hanging.node.node_get_info.requests().until_len(1).await;
        handler.register(&good.plugin("good", "1.0.0", "/s2")).await.unwrap();
    };
    // Cancel-safe: the registration that hangs is dropped, as when its socket disappears.
    tokio::select! {
        _ = stuck => panic!("the driver does not answer"),
        () = other => {}
    }
    handler.unregister(&plugin).await;
    assert_eq!(world.api.drivers(), ["good id"]);
}

/// A driver that registers on a socket in the folder of plugins.
async fn registering(world: &World, driver: &FakeDriver) -> (FakePluginRegistration, FakeServer) {
    let folder = world.dir.path().join("plugins_registry");
    std::fs::create_dir_all(&folder).unwrap();
    let api = FakePluginRegistration::default();
    api.notify_registration_status.answer(plugin::RegistrationStatusResponse {});
    api.get_info.answer(plugin::PluginInfo {
        r#type: KIND.into(),
        name: "d".into(),
        endpoint: driver.endpoint.display().to_string(),
        supported_versions: vec!["1.0.0".into()],
    });
    let server = FakeServer::at(&folder.join("d-reg.sock"), Routes::new(api.server())).await.unwrap();
    (api, server)
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_of_the_service_drivers_register_again() {
    let world = World::new(FakeApi::start().await);
    let driver = world.driver("d").await;
    let (api, _server) = registering(&world, &driver).await;
    for restarts in 1..=2 {
        let drivers = Drivers::new(world.drivers.metrics().clone(), world.dir.path());
        let handler = CsiRegistration::new(drivers.clone(), world.api.nodes.clone()).handler();
        let shutdown = CancellationToken::new();
        let folder = world.dir.path().join("plugins_registry");
        let watcher = PluginWatcher::new(&folder, &Metrics::new()).with(KIND, handler);
        let watching = tokio::spawn(watcher.run(shutdown.clone(), Progress::default().register("plugins")));
        let answers = api.notify_registration_status.requests().until_len(restarts).await;
        assert!(answers.iter().all(|status| status.plugin_registered), "{answers:?}");
        assert_eq!(drivers.get("d").unwrap().endpoint(), driver.endpoint);
        assert_eq!(world.api.drivers(), ["d id"]);
        shutdown.cancel();
        watching.await.unwrap();
        assert_eq!(world.api.drivers(), ["d id"], "a shutdown unregisters nothing");
    }
}

/// A node with a registered driver whose API server does not answer any more, until the gate opens.
struct BlackHole {
    world: World,
    /// Registers drivers of the node, and does not wait long for the API server.
    impatient: CsiRegistration,
    plugin: Plugin,
    gate: Gate,
    _driver: FakeDriver,
}

impl BlackHole {
    async fn start() -> Self {
        let world = World::new(FakeApi::start().await);
        let driver = world.driver("d").await;
        let plugin = driver.plugin("d", "1.0.0", "/s1");
        world.registration.handler().register(&plugin).await.unwrap();
        let gate = world.api.pod_config.get_live.hold();
        let limit = Duration::from_millis(200);
        let nodes = world.api.nodes.clone().within(limit, limit);
        let impatient = CsiRegistration::new(world.drivers.clone(), nodes);
        Self { world, impatient, plugin, gate, _driver: driver }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_does_not_answer_holds_up_no_restart_of_a_driver() {
    let node = BlackHole::start().await;
    let handler = node.impatient.handler();
    handler.unregister(&node.plugin).await;
    assert!(node.world.drivers.get("d").is_err());
    let refused = handler.register(&node.plugin).await.unwrap_err();
    assert!(refused.contains("the API server has not answered within"), "{refused}");
    node.gate.open();
    node.world.registration.handler().register(&node.plugin).await.unwrap();
    assert_eq!(node.world.api.drivers(), ["d id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_has_left_during_an_outage_leaves_the_csi_node_afterwards() {
    let node = BlackHole::start().await;
    node.impatient.handler().unregister(&node.plugin).await;
    assert_eq!(node.world.api.drivers(), ["d id"]);
    node.gate.open();
    node.world.api.pod_config.mutate.answered().until_len(2).await;
    assert_eq!(node.world.api.drivers(), [""; 0]);
}
