//! Events of volumes of the mode `Block`, and of devices with another filesystem.

use super::*;

/// A volume of the mode `Block` with a PersistentVolume of the same name.
fn block(uid: &str, name: &str) -> VolumeSpec {
    let volume = json!({"metadata": {"name": name, "uid": "volume-uid"}, "spec": {"volumeMode": "Block"}});
    VolumeSpec {
        persistent: Some(Arc::new(serde_json::from_value(volume).unwrap())),
        claim: Some("claim".into()),
        mode: VolumeMode::Block,
        ..spec(uid, name)
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_map_is_the_event_failed_map_volume_with_its_step() {
    let plugin = FakePlugin::new(Shape::Device);
    plugin.on("mount device disk", failed(FailureClass::Final));
    plugin.on("set up disk for a", failed(FailureClass::Final));
    let world = start(&plugin, &[]).await;
    world.want_spec(block("a", "disk"), false);
    // The fake plugin has no folder for the device, so mapping it fails, too.
    plugin.until_called("set up disk for a", 3).await;
    let events = world.events().await;
    for text in [
        "FailedMapVolume MapVolume.SetUpDevice failed for volume \"disk\" : the server says no",
        "FailedMapVolume MapVolume.MapPodDevice failed for volume \"disk\" : the server says no",
        "FailedMapVolume MapVolume.MapBlockVolume failed for volume \"disk\" : example.org/fake has no block volumes, but \
         disk is one",
    ] {
        assert!(events.iter().any(|event| event == text), "{text}\n{events:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_volume_of_another_node_is_the_event_failed_mount() {
    let world = start(&FakePlugin::new(Shape::Device), &[]).await;
    let mut spec = block("a", "disk");
    let expression = json!({"key": "zone", "operator": "In", "values": ["elsewhere"]});
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}});
    let volume = json!({"metadata": {"name": "disk"}, "spec": {"nodeAffinity": affinity}});
    spec.persistent = Some(Arc::new(serde_json::from_value(volume).unwrap()));
    world.want_spec(spec, false);
    world.until("a", |status| status.waits.values().any(|wait| wait.is_error)).await;
    let events = world.events().await;
    let start = "FailedMount MapVolume.NodeAffinity check failed for volume \"disk\" : ";
    assert!(events[0].starts_with(start), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_disk_with_another_filesystem_is_also_an_event_of_its_persistent_volume() {
    let plugin = FakePlugin::new(Shape::Device);
    let mismatch = PluginError::new("it has xfs, not ext4").of_filesystem_mismatch();
    plugin.on("mount device disk", End::Fail(mismatch));
    let world = start(&plugin, &[]).await;
    world.want_spec(VolumeSpec { mode: VolumeMode::Filesystem, ..block("a", "disk") }, false);
    world.until_mounted("a", "disk").await;
    let request = tonic::Request::new(ListEventsRequest::default());
    let events = world.ctx.events.list_events(request).await.unwrap().into_inner().events;
    let shown: Vec<_> = events.iter().map(|e| (e.reason.as_str(), e.kind.as_str(), e.uid.as_str())).collect();
    let expected =
        [("FailedMountOnFilesystemMismatch", "PersistentVolume", "volume-uid"), ("FailedMount", "Pod", "a")];
    assert_eq!(shown, expected);
    assert!(events.iter().all(|event| event.message.ends_with("it has xfs, not ext4")));
}
