//! Pods that want one volume with different SELinux labels.

use keelson_volume_manager_core::selinux::{FileLabel, Labels, NodeSupport};

use super::*;

fn label(level: &str) -> FileLabel {
    FileLabel::parse(&format!("system_u:object_r:container_file_t:{level}")).unwrap()
}

/// The volume `data`, as the resolver hands it over.
fn want(world: &World, uid: &str, label: &FileLabel, mode: &str) {
    let node = NodeSupport { is_enabled: true, labels_all_modes: false };
    want_on(world, uid, node, (Some(label), mode, false));
}

/// The volume `data` on a node with this support, with a label, an access mode, and whether it is read-only.
fn want_on(
    world: &World,
    uid: &str,
    node: NodeSupport,
    (label, mode, read_only): (Option<&FileLabel>, &str, bool),
) {
    let volume = json!({"metadata": {"name": "data"}, "spec": {"accessModes": [mode]}});
    let spec = VolumeSpec {
        persistent: Some(Arc::new(serde_json::from_value(volume).unwrap())),
        ..spec(uid, "data")
    };
    let identity = Identity {
        shared_name: Some("example.org/fake/data".into()),
        shape: Shape::Device,
        is_set_up_each_sync: false,
        supports_label: true,
        can_expand: false,
        read_only,
    };
    let mounted = label.filter(|_| mode == "ReadWriteOncePod").cloned();
    let labels = Labels { wanted: label.cloned(), mounted };
    world.shared.want(ResolvedSpec {
        plugin: Arc::clone(&world.plugin) as Arc<dyn Plugin>,
        identity,
        spec: Arc::new(spec),
        labels: VolumeLabels { node, labels },
    });
}

#[tokio::test(start_paused = true)]
async fn a_second_label_waits_until_the_first_pod_has_ended_and_its_device_is_unmounted() {
    let world = start(&FakePlugin::new(Shape::Device), &[]).await;
    world.shared.set_populated();
    want(&world, "a", &label("s0:c1"), "ReadWriteOncePod");
    world.until_mounted("a", "data").await;
    want(&world, "b", &label("s0:c2"), "ReadWriteOncePod");
    let status = world.until("b", |status| status.waits.contains_key("data")).await;
    let wait = &status.waits["data"];
    let text = "conflicting SELinux labels of volume data: \"system_u:object_r:container_file_t:s0:c1\" and \
                \"system_u:object_r:container_file_t:s0:c2\"";
    assert!(wait.is_error && wait.wait.message.starts_with(text), "{wait:?}");
    assert_eq!(wait.wait.owner, WaitOwner::You);
    world.shared.release("a").await;
    world.until_mounted("b", "data").await;
    let calls = world.plugin.calls.borrow().clone();
    assert_eq!(
        calls,
        [
            "mount device data",
            "set up data for a",
            "tear down data for a",
            "unmount device data",
            "mount device data",
            "set up data for b",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_waits_for_a_label_leaves_nothing_when_it_ends() {
    let world = start(&FakePlugin::new(Shape::Device), &[]).await;
    world.shared.set_populated();
    want(&world, "a", &label("s0:c1"), "ReadWriteOncePod");
    world.until_mounted("a", "data").await;
    want(&world, "b", &label("s0:c2"), "ReadWriteOncePod");
    world.until("b", |status| status.waits.contains_key("data")).await;
    world.shared.release("b").await;
    world.until_gone("b").await;
    assert_eq!(world.plugin.count("set up data for b"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_shared_volume_that_is_not_labelled_by_mount_is_used_with_two_labels() {
    let world = start(&FakePlugin::new(Shape::Device), &[]).await;
    want(&world, "a", &label("s0:c1"), "ReadWriteMany");
    world.until_mounted("a", "data").await;
    want(&world, "b", &label("s0:c2"), "ReadWriteMany");
    world.until_mounted("b", "data").await;
}

#[tokio::test(start_paused = true)]
async fn the_runtime_labels_files_of_writable_volumes_that_are_mounted_without_a_label() {
    let enabled = NodeSupport { is_enabled: true, labels_all_modes: false };
    let label = label("s0:c1");
    let look = "look at the labels of data at /volumes/a/data";
    for (node, label, read_only, is_asked, expected) in [
        (enabled, None, false, true, true),
        (enabled, None, true, true, false),
        (enabled, Some(&label), false, false, false),
        (NodeSupport::default(), None, false, false, false),
    ] {
        let world = start(&FakePlugin::new(Shape::Device), &[]).await;
        want_on(&world, "a", node, (label, "ReadWriteOncePod", read_only));
        let status = world.until_mounted("a", "data").await;
        assert_eq!(status.mounted["data"].selinux_relabel, expected, "{node:?} {label:?} {read_only}");
        assert_eq!(world.plugin.count(look), usize::from(is_asked), "{node:?} {label:?} {read_only}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_labels_cannot_be_read_is_not_ready_and_is_set_up_again() {
    let plugin = FakePlugin::new(Shape::Device);
    plugin.on("look at the labels of data at /volumes/a/data", End::Fail(PluginError::new("no mountinfo")));
    let world = start(&plugin, &[]).await;
    world.shared.set_populated();
    let enabled = NodeSupport { is_enabled: true, labels_all_modes: false };
    want_on(&world, "a", enabled, (None, "ReadWriteOnce", false));
    let status = world.until("a", |status| status.waits.values().any(|wait| wait.is_error)).await;
    assert!(status.waits["data"].wait.message.contains("no mountinfo"), "{status:?}");
    assert!(world.until_mounted("a", "data").await.mounted["data"].selinux_relabel);
    world.shared.release("a").await;
    world.until_gone("a").await;
    assert_eq!((plugin.count("set up data for a"), plugin.count("tear down data for a")), (2, 1));
}
