//! CSI drivers that register.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use keelson_volume_manager_core::csi::csi_node::{Allocatable, DriverEntry};
use keelson_volume_manager_core::csi::registration::Version;
use tokio::time::Instant;

use super::*;
use crate::csi::client::{Client, CsiMetrics};
use crate::csi::drivers::{Driver, NodeInfo};

/// Registers a driver that nobody serves.
fn register(drivers: &Drivers, name: &str) {
    let name = DriverName::parse(name).unwrap();
    let entry = DriverEntry {
        name: name.clone(),
        node_id: "n".into(),
        topology_keys: BTreeSet::new(),
        allocatable: Allocatable::Unlimited,
    };
    let client = Client::new(name.clone(), Path::new("/driver.sock"), drivers.metrics().clone());
    let info = NodeInfo { entry, topology: BTreeMap::new() };
    let version = Version::parse("1.0.0").unwrap();
    drivers.add(&Driver::new(name, version, "/registration.sock".into(), client, info)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_has_failed_without_its_driver_is_tried_at_once_when_that_registers() {
    let plugin = FakePlugin::new(Shape::Device);
    // Each error doubles the back-off: the last one is 16 s.
    for _ in 0..6 {
        plugin.on("mount device data", failed(FailureClass::Transient));
    }
    let world = start(&plugin, &[]).await;
    let identity = Identity {
        shared_name: Some("kubernetes.io/csi/d.io^handle".into()),
        shape: Shape::Device,
        is_set_up_each_sync: false,
        supports_label: false,
        can_expand: false,
        read_only: false,
    };
    let spec = Arc::new(spec("a", "data"));
    let (plugin_of_spec, labels) = (Arc::clone(&plugin) as Arc<dyn Plugin>, VolumeLabels::default());
    world.shared.want(ResolvedSpec { plugin: plugin_of_spec, identity, spec, labels });
    plugin.until_called("mount device data", 6).await;
    world.until("a", |status| status.waits.values().any(|wait| wait.next_try_unix_nanos > 0)).await;

    let drivers = Drivers::new(CsiMetrics::register(&Metrics::new()), Path::new("/registry"));
    tokio::spawn(world.shared.clone().follow_drivers(drivers.clone(), world.shutdown.clone()));
    let started = Instant::now();
    register(&drivers, "other.io");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(plugin.count("mount device data"), 6);
    register(&drivers, "d.io");
    world.until_mounted("a", "data").await;
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}
