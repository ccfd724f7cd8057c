//! Block volumes.

use std::fs;

use keelson_volume_manager_core::world::FailureClass;
use serde_json::json;

use super::world::{CLASSES, STAGE, World, block, device, device_request, place};
use crate::plugins::Plugin as _;

const DATA: &str = "plugins/kubernetes.io/csi/volumeDevices/pv1/data/vol_data.json";

#[tokio::test]
async fn a_block_volume_is_staged_and_published_at_the_paths_of_the_specification() {
    let world = World::new(&[STAGE]);
    let (first, second) = (block("u1"), block("u2"));
    let learned = world.csi.mount_device(&first, device_request()).await.unwrap();
    let devices = world.root().join("plugins/kubernetes.io/csi/volumeDevices");
    assert_eq!(learned.device_mount_path.as_deref(), devices.join("pv1/dev").to_str());
    assert_eq!(world.csi.global_map_path("pv1").await.unwrap(), Some(devices.join("pv1/dev")));
    assert_eq!(world.last_stage().staging_target_path, devices.join("staging/pv1").to_str().unwrap());
    for spec in [&first, &second] {
        let ready = world.csi.set_up(spec, world.set_up_request()).await.unwrap();
        assert_eq!(ready.host_path, devices.join("publish/pv1").join(&spec.pod.uid));
        let request = world.last_publish();
        assert_eq!(request.staging_target_path, devices.join("staging/pv1").to_str().unwrap());
        let capability = format!("{:?}", request.volume_capability);
        assert!(capability.contains("Block") && !capability.contains("Mount("), "{capability}");
    }
    let data: serde_json::Value =
        serde_json::from_slice(&fs::read(world.root().join(DATA)).unwrap()).unwrap();
    assert_eq!((&data["specVolID"], &data["volumeHandle"]), (&json!("pv1"), &json!("vol-1")));
    for spec in [&first, &second] {
        world.csi.tear_down(&place(spec)).await.unwrap();
    }
    assert!(world.root().join(DATA).exists(), "needed to unstage");
    world.csi.unmount_device(&device(&first)).await.unwrap();
    assert_eq!(world.take_calls(), ["stage", "publish", "publish", "unpublish", "unpublish", "unstage"]);
    assert!(!world.files().iter().any(|path| path.contains("pv1")), "{:?}", world.files());
}

#[tokio::test]
async fn a_block_volume_of_a_driver_without_stage_has_no_staging_path() {
    let world = World::new(&[]);
    let spec = block("u");
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    assert_eq!(world.last_publish().staging_target_path, "");
    world.csi.tear_down(&place(&spec)).await.unwrap();
    world.csi.unmount_device(&device(&spec)).await.unwrap();
    assert_eq!(world.take_calls(), ["publish", "unpublish"]);
    assert!(!world.files().iter().any(|path| path.contains("pv1")), "{:?}", world.files());
}

#[tokio::test]
async fn a_final_error_of_one_pod_leaves_the_block_volume_of_another() {
    let world = World::new(&[STAGE]);
    let (first, second) = (block("u1"), block("u2"));
    world.csi.mount_device(&first, device_request()).await.unwrap();
    world.csi.set_up(&first, world.set_up_request()).await.unwrap();
    let files = world.files();
    for (code, class) in CLASSES {
        world.fail("publish", code);
        let error = world.csi.set_up(&second, world.set_up_request()).await.unwrap_err();
        assert_eq!(error.class, class, "{error}");
    }
    assert_eq!(world.files(), files);
    world.fail("stage", 13);
    world.csi.mount_device(&first, device_request()).await.unwrap_err();
    assert_eq!(world.files(), files);
}

#[tokio::test]
async fn fs_group_is_never_applied_to_a_block_volume() {
    let world = World::new(&[]);
    world.set_driver(json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    let mut spec = block("u");
    spec.fs_group = Some(77);
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    assert!(world.mounts.walks.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_block_volume_is_unpublished_even_if_its_path_is_missing() {
    let world = World::new(&[STAGE]);
    let spec = block("u");
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    world.csi.tear_down(&place(&spec)).await.unwrap();
    assert_eq!(world.take_calls(), ["stage", "unpublish"]);
}

#[tokio::test]
async fn a_block_volume_that_is_mapped_for_a_pod_is_not_unstaged() {
    let world = World::new(&[STAGE]);
    let spec = block("u");
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    let devices = world.csi.global_map_path("pv1").await.unwrap().unwrap();
    fs::create_dir_all(&devices).unwrap();
    fs::write(devices.join("u"), b"").unwrap();
    let error = world.csi.unmount_device(&device(&spec)).await.unwrap_err();
    assert!(error.message.ends_with("is still mapped for the pods u"), "{error}");
    fs::remove_file(devices.join("u")).unwrap();
    world.fail("unstage", 14);
    let error = world.csi.unmount_device(&device(&spec)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(world.root().join(DATA).exists());
    world.succeed();
    world.csi.unmount_device(&device(&spec)).await.unwrap();
}

#[tokio::test]
async fn a_published_block_volume_without_a_readable_data_file_is_an_error() {
    let world = World::new(&[]);
    let spec = block("u");
    for content in [None, Some("{")] {
        world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
        let data = world.root().join(DATA);
        match content {
            Some(content) => fs::write(&data, content).unwrap(),
            None => fs::remove_file(&data).unwrap(),
        }
        let error = world.csi.tear_down(&place(&spec)).await.unwrap_err();
        assert!(error.message.contains(data.to_str().unwrap()), "{error}");
    }
    let target = world.root().join("plugins/kubernetes.io/csi/volumeDevices/publish/pv1/u");
    world.mounts.remove(&target);
    fs::remove_file(&target).unwrap();
    world.csi.tear_down(&place(&spec)).await.unwrap();
}
