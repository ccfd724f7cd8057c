//! Pods that want one volume with different SELinux labels.

use keelson_volume_manager_core::selinux::{FileLabel, Labels, NodeSupport};

use super::*;

fn label(level: &str) -> FileLabel {
    FileLabel::parse(&format!("system_u:object_r:container_file_t:{level}")).unwrap()
}

/// The volume `data` for one pod at a time, as the resolver hands it over.
fn want(world: &World, uid: &str, label: &FileLabel, mode: &str) {
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
        read_only: false,
    };
    let mounted = (mode == "ReadWriteOncePod").then(|| label.clone());
    let labels = Labels { wanted: Some(label.clone()), mounted };
    let node = NodeSupport { is_enabled: true, labels_all_modes: false };
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
