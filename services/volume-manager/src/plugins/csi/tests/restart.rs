//! What is known after a restart, and measurements, which need only the disk, too.

use std::fs;

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::MountLabel;
use serde_json::json;

use super::world::{
    CONDITION, Call, DRIVER, STAGE, STATS, World, block, device_request, inline, measured, persistent, place,
};
use crate::measure::Usage;
use crate::plugins::csi::MeasureVolumes as _;
use crate::plugins::{FoundFolder, Plugin as _, SetUpRequest, VolumeSpec};

fn folder(spec: &VolumeSpec) -> FoundFolder {
    let place = place(spec);
    FoundFolder { pod: place.pod, inner_name: place.inner_name, is_block: place.is_block }
}

#[tokio::test]
async fn a_persistent_volume_is_found_again_without_driver_and_api_server() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    let label = MountLabel::Context("system_u:object_r:container_file_t:s0".to_owned());
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    world.csi.set_up(&spec, SetUpRequest { label: &label, ..world.set_up_request() }).await.unwrap();
    let staging = world.last_stage().staging_target_path;
    world.unregister();
    *world.api.driver_error.lock().unwrap() = Some("down".to_owned());
    let found = world.csi.reconstruct(&folder(&spec)).await.unwrap();
    assert_eq!(found.shared_name.unwrap().as_str(), "kubernetes.io/csi/csi.example.com^vol-1");
    assert_eq!((found.has_device, found.device_mount_path, found.label), (true, Some(staging), Some(label)));
}

#[tokio::test]
async fn an_inline_volume_is_found_again_without_a_device() {
    let world = World::new(&[STAGE]);
    world.set_driver(json!({"volumeLifecycleModes": ["Ephemeral"]}));
    let spec = inline("u", &json!({"driver": DRIVER}));
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    let found = world.csi.reconstruct(&folder(&spec)).await.unwrap();
    assert_eq!((found.shared_name, found.has_device, found.device_mount_path), (None, false, None));
    assert_eq!(found.label, Some(MountLabel::Unlabelled));
}

#[tokio::test]
async fn a_block_volume_is_found_again_with_its_map_folder() {
    let world = World::new(&[]);
    let spec = block("u");
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    let found = world.csi.reconstruct(&folder(&spec)).await.unwrap();
    assert_eq!(found.shared_name.unwrap().as_str(), "kubernetes.io/csi/csi.example.com^vol-1");
    let map = world.csi.global_map_path("pv1").await.unwrap().unwrap();
    assert_eq!(found.device_mount_path.as_deref(), map.to_str());
}

#[tokio::test]
async fn a_data_file_of_the_kubelet_is_read_and_the_volume_unpublished() {
    let world = World::new(&[]);
    let volume = world.root().join("pods/u/volumes/kubernetes.io~csi/pv1");
    fs::create_dir_all(volume.join("mount")).unwrap();
    world.mounts.add(&volume.join("mount"));
    let data = r#"{"attachmentID":"csi-1","driverName":"csi.example.com","nodeName":"n1","specVolID":"pv1","volumeHandle":"h","volumeLifecycleMode":"Persistent"}"#;
    fs::write(volume.join("vol_data.json"), data).unwrap();
    let spec = persistent("u", &json!({}));
    let found = world.csi.reconstruct(&folder(&spec)).await.unwrap();
    assert_eq!(found.shared_name.unwrap().as_str(), "kubernetes.io/csi/csi.example.com^h");
    world.csi.tear_down(&place(&spec)).await.unwrap();
    let Some(Call::Unpublish(request)) = world.calls().last().cloned() else { panic!("not unpublished") };
    assert_eq!(request.volume_id, "h");
    assert!(!volume.exists());
}

#[tokio::test]
async fn a_volume_without_a_readable_data_file_is_an_error_only_if_mounted() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    let volume = world.root().join("pods/u/volumes/kubernetes.io~csi/pv1");
    let data = volume.join("vol_data.json");
    for content in [None, Some(""), Some("{\"driverNa"), Some("7"), Some("{}"), Some("\0\0")] {
        world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
        match content {
            Some(content) => fs::write(&data, content).unwrap(),
            None => fs::remove_file(&data).unwrap(),
        }
        let errors = [
            world.csi.reconstruct(&folder(&spec)).await.unwrap_err(),
            world.csi.tear_down(&place(&spec)).await.unwrap_err(),
            world.csi.measure(&measured(&spec)).await.unwrap_err(),
        ];
        for error in errors {
            assert!(
                error.message.contains(data.to_str().unwrap()) && error.owner == WaitOwner::You,
                "{error}"
            );
        }
        // Nothing was published if nothing is mounted: the file is complete before the driver is called.
        world.mounts.remove(&volume.join("mount"));
        world.csi.tear_down(&place(&spec)).await.unwrap();
        assert!(!volume.exists(), "{content:?}");
    }
    assert!(!world.take_calls().contains(&"unpublish"));
}

#[tokio::test]
async fn data_that_a_broken_volume_contains_is_never_removed() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    let volume = world.root().join("pods/u/volumes/kubernetes.io~csi/pv1");
    fs::create_dir_all(volume.join("mount")).unwrap();
    fs::write(volume.join("mount/precious"), b"data").unwrap();
    world.csi.tear_down(&place(&spec)).await.unwrap_err();
    assert!(volume.join("mount/precious").exists());
}

/// The moments at which a service can be killed before it has written the data file of a staged volume.
#[tokio::test]
async fn what_is_left_of_a_volume_that_no_driver_was_called_for_is_removed() {
    let world = World::new(&[STAGE]);
    let drivers = world.root().join("plugins/kubernetes.io/csi").join(DRIVER);
    let folder = drivers.join("0a".repeat(32));
    for (has_staging, temporary) in [(false, None), (true, None), (true, Some("{\"driverNa"))] {
        fs::create_dir_all(&folder).unwrap();
        if has_staging {
            fs::create_dir(folder.join("globalmount")).unwrap();
        }
        if let Some(text) = temporary {
            fs::write(folder.join("vol_data.json.new"), text).unwrap();
        }
        assert_eq!(world.csi.found_devices().await.unwrap(), []);
        assert!(!folder.exists() && drivers.is_dir(), "{has_staging} {temporary:?}");
    }
    assert_eq!(world.take_calls(), Vec::<&str>::new());
}

#[tokio::test]
async fn a_folder_without_a_data_file_that_may_be_in_use_stays() {
    let world = World::new(&[STAGE]);
    let base = world.root().join("plugins/kubernetes.io/csi");
    let hash = "0a".repeat(32);
    let kept = [
        (format!("{DRIVER}/{hash}/globalmount/data"), true),
        (format!("{DRIVER}/{hash}/other/globalmount"), true),
        // Not the folder of a staged volume.
        (format!("{DRIVER}/pv1/globalmount"), true),
        (format!("volumeDevices/{hash}/globalmount"), true),
        (format!("{DRIVER}/{hash}/globalmount"), false),
    ];
    for (path, is_folder) in kept {
        let path = base.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        if is_folder {
            fs::create_dir(&path).unwrap()
        } else {
            fs::write(&path, "").unwrap()
        }
        assert_eq!(world.csi.found_devices().await.unwrap(), []);
        assert!(path.exists(), "{path:?}");
        fs::remove_dir_all(&base).unwrap();
    }
    let staging = base.join(DRIVER).join(hash).join("globalmount");
    fs::create_dir_all(&staging).unwrap();
    world.mounts.add(&staging);
    assert_eq!(world.csi.found_devices().await.unwrap(), []);
    assert!(staging.is_dir(), "something is mounted there");
}

#[tokio::test]
async fn usage_is_read_by_unit_and_the_condition_by_capability() {
    use pb::volume_usage::Unit;
    let world = World::new(&[STATS]);
    let spec = persistent("u", &json!({}));
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    let usage =
        |unit: Unit, (used, total, available)| pb::VolumeUsage { used, total, available, unit: unit as i32 };
    world.script.lock().unwrap().stats = pb::NodeGetVolumeStatsResponse {
        usage: vec![
            usage(Unit::Bytes, (1, 10, 9)),
            usage(Unit::Inodes, (2, 20, -1)),
            usage(Unit::Unknown, (5, 5, 5)),
        ],
        volume_condition: Some(pb::VolumeCondition { abnormal: true, message: "bad".to_owned() }),
    };
    let found = world.csi.measure(&measured(&spec)).await.unwrap().unwrap();
    let expected = Usage {
        used_bytes: 1,
        capacity_bytes: 10,
        available_bytes: 9,
        inodes_used: 2,
        inodes: 20,
        inodes_free: 0,
    };
    assert_eq!((found.usage, found.condition), (Some(expected), None), "the driver lacks VOLUME_CONDITION");
    let Some(Call::Stats(request)) = world.calls().last().cloned() else { panic!("not measured") };
    assert!(request.volume_path.ends_with("/pv1/mount") && request.volume_id == "vol-1", "{request:?}");

    world.script.lock().unwrap().capabilities.push(CONDITION);
    world.script.lock().unwrap().stats.usage.clear();
    world.unregister();
    world.register_again();
    let found = world.csi.measure(&measured(&spec)).await.unwrap().unwrap();
    assert!(found.usage.is_none() && found.condition.unwrap().is_abnormal);
}

#[tokio::test]
async fn a_driver_that_does_not_measure_is_no_error_and_no_usage_is_one() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    assert_eq!(world.csi.measure(&measured(&spec)).await.unwrap(), None);
    world.script.lock().unwrap().capabilities.push(STATS);
    world.unregister();
    world.register_again();
    let error = world.csi.measure(&measured(&spec)).await.unwrap_err();
    assert!(error.message.contains("has reported no usage"), "{error}");
    world.csi.set_up(&block("u"), world.set_up_request()).await.unwrap();
    world.csi.measure(&measured(&block("u"))).await.unwrap_err();
    let Some(Call::Stats(request)) = world.calls().last().cloned() else { panic!("not measured") };
    assert!(request.volume_path.ends_with("/volumeDevices/pv1/dev/u"), "{request:?}");
}
