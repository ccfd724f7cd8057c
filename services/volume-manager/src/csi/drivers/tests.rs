use std::collections::BTreeSet;
use std::time::Duration;

use keelson_service_kit::Metrics;
use keelson_testkit::fakes::{FakeCsiNode, FakeServer};
use keelson_volume_manager_core::csi::csi_node::Allocatable;
use tonic::Status;
use tonic::service::Routes;

use super::*;
use crate::csi::client::Failure;

fn drivers() -> Drivers {
    Drivers::new(CsiMetrics::register(&Metrics::new()), Path::new("/root/plugins_registry"))
}

fn name(name: &str) -> DriverName {
    DriverName::parse(name).unwrap()
}

fn info(driver: &str, node_id: &str, topology: &[(&str, &str)]) -> NodeInfo {
    let topology: Strings =
        topology.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    let entry = DriverEntry {
        name: name(driver),
        node_id: node_id.into(),
        topology_keys: BTreeSet::new(),
        allocatable: Allocatable::Unlimited,
    };
    NodeInfo { entry, topology }
}

fn driver_at(drivers: &Drivers, driver: &str, version: &str, socket: &str, endpoint: &Path) -> Driver {
    let client = Client::new(name(driver), endpoint, drivers.metrics().clone());
    let version = Version::parse(version).unwrap();
    Driver::new(name(driver), version, socket.into(), client, info(driver, "n1", &[]))
}

fn driver(drivers: &Drivers, driver: &str, version: &str, socket: &str) -> Driver {
    driver_at(drivers, driver, version, socket, Path::new("/csi.sock"))
}

#[test]
fn an_unknown_driver_is_named_with_the_way_out() {
    let error = drivers().get("d.example.com").unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("driver name d.example.com not found in the list of registered CSI drivers"),
        "{text}"
    );
    assert!(text.contains("/root/plugins_registry"), "{text}");
}

#[tokio::test]
async fn a_driver_is_found_until_it_is_removed_and_subscribers_see_both() {
    let drivers = drivers();
    let mut changes = drivers.subscribe();
    let added = driver(&drivers, "d", "1.0", "/s1");
    drivers.add(&added).unwrap();
    assert!(changes.has_changed().unwrap());
    changes.mark_unchanged();
    let found = drivers.get("d").unwrap();
    assert_eq!((found.name(), found.endpoint()), (&name("d"), Path::new("/csi.sock")));
    assert!(!drivers.remove(&name("d"), Path::new("/other")), "another socket does not remove it");
    assert!(!changes.has_changed().unwrap());
    assert!(drivers.remove(&name("d"), Path::new("/s1")));
    assert!(changes.has_changed().unwrap());
    assert!(drivers.get("d").is_err());
    assert!(!drivers.remove(&name("d"), Path::new("/s1")));
}

#[tokio::test]
async fn the_same_name_at_two_sockets_needs_a_higher_version() {
    let drivers = drivers();
    drivers.add(&driver(&drivers, "d", "1.2", "/s1")).unwrap();
    assert_eq!(drivers.version_elsewhere("d", Path::new("/s2")), Version::parse("1.2"));
    assert_eq!(drivers.version_elsewhere("d", Path::new("/s1")), None);
    assert_eq!(drivers.version_elsewhere("e", Path::new("/s2")), None);
    for version in ["1.1", "1.2", "1.2.0"] {
        let error = drivers.add(&driver(&drivers, "d", version, "/s2")).unwrap_err();
        assert!(matches!(error, RegistrationError::AlreadyRegistered { .. }), "{version}");
    }
    drivers.add(&driver(&drivers, "d", "1.3", "/s2")).unwrap();
    assert_eq!(Some(drivers.get("d").unwrap().version.clone()), Version::parse("1.3"));
    // The newer one leaves: the older one is used again.
    assert!(drivers.remove(&name("d"), Path::new("/s2")));
    assert_eq!(Some(drivers.get("d").unwrap().version.clone()), Version::parse("1.2"));
}

#[tokio::test]
async fn a_driver_may_register_again_on_its_own_socket_with_any_version() {
    let drivers = drivers();
    for version in ["1.2", "1.2", "1.1", "1.3"] {
        drivers.add(&driver(&drivers, "d", version, "/s1")).unwrap();
        assert_eq!(Some(drivers.get("d").unwrap().version.clone()), Version::parse(version));
    }
    assert!(drivers.remove(&name("d"), Path::new("/s1")));
    assert!(drivers.get("d").is_err());
}

fn capability(number: i32) -> pb::NodeServiceCapability {
    let rpc = pb::node_service_capability::Rpc { r#type: number };
    pb::NodeServiceCapability { r#type: Some(pb::node_service_capability::Type::Rpc(rpc)) }
}

#[tokio::test(flavor = "multi_thread")]
async fn capabilities_are_asked_once_and_again_after_the_driver_has_restarted() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = dir.path().join("csi.sock");
    let node = FakeCsiNode::default();
    // An entry without a type and one of a later version of CSI are ignored.
    let none = pb::NodeServiceCapability { r#type: None };
    let capabilities = vec![none, capability(1), capability(99)];
    node.node_get_capabilities.answer(pb::NodeGetCapabilitiesResponse { capabilities });
    node.node_get_capabilities.answer_once(Err(Status::unavailable("starting")));
    let server = FakeServer::at(&endpoint, Routes::new(node.server())).await.unwrap();
    let drivers = drivers();
    let driver = driver_at(&drivers, "d", "1.0", "/s1", &endpoint);
    let operation = Operation::new(false);
    driver.capabilities(&operation).await.unwrap_err();
    let expected = NodeCapabilities { stage: true, ..NodeCapabilities::default() };
    for _ in 0..3 {
        assert_eq!(driver.clone().capabilities(&operation).await.unwrap(), expected);
    }
    assert_eq!(node.node_get_capabilities.requests().len(), 2, "an error is not cached, an answer is");

    server.kill();
    std::fs::remove_file(&endpoint).unwrap();
    node.node_get_capabilities.answer(pb::NodeGetCapabilitiesResponse { capabilities: vec![capability(3)] });
    let other = dir.path().join("other.sock");
    let _server = FakeServer::at(&other, Routes::new(node.server())).await.unwrap();
    std::fs::rename(&other, &endpoint).unwrap();
    let expected = NodeCapabilities { expand: true, ..NodeCapabilities::default() };
    // Until the connection to the old server is known to be closed, a call on it fails.
    let asked = async {
        loop {
            match driver.capabilities(&operation).await {
                Err(CallError { failure: Failure::NotReachable(_), .. }) => tokio::task::yield_now().await,
                answer => return answer,
            }
        }
    };
    assert_eq!(tokio::time::timeout(Duration::from_secs(60), asked).await.unwrap().unwrap(), expected);
}

#[test]
fn the_node_update_names_drivers_that_came_and_went_once() {
    let drivers = drivers();
    let mut update = drivers.node_update();
    drivers.publish(&info("b", "nb", &[("zone", "z1")]));
    drivers.publish(&info("c", "nc", &[]));
    drivers.unpublish(&name("c"));
    drivers.unpublish(&name("never-there"));
    assert!(update.has_changed().unwrap());
    let current = update.borrow_and_update().clone();
    let topology = Strings::from([("zone".to_owned(), "z1".to_owned())]);
    assert_eq!(current.registered, [(name("b"), NodeDriver { node_id: "nb".into(), topology })].into());
    assert_eq!(current.unregistered, [name("c"), name("never-there")].into());
    // The same again changes nothing.
    drivers.publish(&info("b", "nb", &[("zone", "z1")]));
    drivers.unpublish(&name("c"));
    assert!(!update.has_changed().unwrap());
    // A driver that comes back is not gone any more.
    drivers.publish(&info("c", "nc", &[]));
    let current = update.borrow_and_update().clone();
    assert!(current.registered.contains_key(&name("c")) && !current.unregistered.contains(&name("c")));
}
