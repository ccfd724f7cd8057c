//! Identity, staging, unstaging, expansion.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use keelson_volume_manager_core::expansion::ErrorClass;
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::{FailureClass, MountLabel, Shape};
use serde_json::json;

use super::world::{
    CLASSES, Call, DRIVER, EXPAND, MOUNT_GROUP, MULTI_WRITER, STAGE, World, block, device, device_request,
    inline, map, persistent, place,
};
use crate::plugins::{DeviceRequest, Plugin as _, VolumeSpec};

/// The folder of the staged volume.
fn global(world: &World) -> std::path::PathBuf {
    let drivers = world.root().join("plugins/kubernetes.io/csi/csi.example.com");
    let mut folders = fs::read_dir(drivers).unwrap();
    let folder = folders.next().unwrap().unwrap().path();
    assert!(folders.next().is_none(), "one volume");
    folder
}

#[tokio::test]
async fn a_persistent_volume_is_shared_and_attached_as_its_csi_driver_says() {
    for (spec, shape) in [
        (json!({}), Shape::AttachableDevice),
        (json!({"attachRequired": true}), Shape::AttachableDevice),
        (json!({"attachRequired": false}), Shape::Device),
    ] {
        let world = World::new(&[]);
        world.set_driver(spec);
        let found = world.csi.identify(&persistent("u", &json!({}))).await.unwrap();
        assert_eq!(found.shape, shape);
        assert_eq!(found.shared_name.unwrap().as_str(), "kubernetes.io/csi/csi.example.com^vol-1");
        assert!(found.can_expand && !found.read_only && !found.is_set_up_each_sync && !found.supports_label);
    }
    let world = World::new(&[]);
    *world.api.driver.lock().unwrap() = None;
    let found = world.csi.identify(&persistent("u", &json!({}))).await.unwrap();
    assert_eq!(found.shape, Shape::AttachableDevice, "without a CSIDriver");
}

#[tokio::test]
async fn an_inline_volume_belongs_to_its_pod() {
    let world = World::new(&[]);
    world.set_driver(json!({"requiresRepublish": true, "seLinuxMount": true}));
    let source = json!({"driver": "csi.example.com", "readOnly": true});
    let found = world.csi.identify(&inline("u", &source)).await.unwrap();
    assert_eq!((found.shared_name, found.shape), (None, Shape::PerPod));
    assert!(found.read_only && found.is_set_up_each_sync && !found.supports_label && !found.can_expand);
}

#[tokio::test]
async fn republishing_and_labels_follow_the_csi_driver() {
    let world = World::new(&[]);
    world.set_driver(json!({"requiresRepublish": true, "seLinuxMount": true}));
    let mut spec = persistent("u", &json!({"readOnly": true}));
    let found = world.csi.identify(&spec).await.unwrap();
    assert!(found.is_set_up_each_sync && found.supports_label);
    assert!(!found.read_only, "the claim's field counts");
    spec.read_only = true;
    assert!(world.csi.identify(&spec).await.unwrap().read_only);
}

#[tokio::test]
async fn a_source_that_is_not_valid_is_refused_for_a_person() {
    let world = World::new(&[]);
    for (csi, text) in [
        (json!({"driver": "../x"}), "invalid CSI driver name"),
        (json!({"volumeHandle": ""}), "volumeHandle"),
        (json!({"readOnly": "yes"}), "cannot read the field csi of the volume pv1"),
    ] {
        let error = world.csi.identify(&persistent("u", &csi)).await.unwrap_err();
        assert!(error.message.contains(text) && error.owner == WaitOwner::You, "{error}");
    }
}

#[tokio::test]
async fn a_csi_driver_that_cannot_be_read_is_a_transient_error() {
    let world = World::new(&[]);
    *world.api.driver_error.lock().unwrap() = Some("forbidden".to_owned());
    let error = world.csi.identify(&persistent("u", &json!({}))).await.unwrap_err();
    assert_eq!((error.class, &error.owner), (FailureClass::Transient, &WaitOwner::ApiServer));
    assert_eq!(error.message, "cannot read the CSIDriver csi.example.com: forbidden");
}

#[tokio::test(start_paused = true)]
async fn a_csi_driver_is_read_again_after_a_minute_and_a_missing_one_sooner() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    let reads = || *world.api.driver_reads.lock().unwrap();
    for (seconds, expected) in [(0, 1), (59, 1), (2, 2)] {
        tokio::time::advance(std::time::Duration::from_secs(seconds)).await;
        world.csi.identify(&spec).await.unwrap();
        assert_eq!(reads(), expected, "after {seconds} s");
    }
    *world.api.driver.lock().unwrap() = None;
    for (seconds, expected) in [(61, 3), (4, 3), (2, 4)] {
        tokio::time::advance(std::time::Duration::from_secs(seconds)).await;
        world.csi.identify(&spec).await.unwrap();
        assert_eq!(reads(), expected, "missing, after {seconds} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_csi_driver_that_cannot_be_read_any_more_stays_in_effect() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    let reads = || *world.api.driver_reads.lock().unwrap();
    let is_attachable = async || {
        let shape = world.csi.identify(&spec).await.unwrap().shape;
        shape == Shape::AttachableDevice
    };
    assert!(!is_attachable().await);
    world.set_driver(json!({"attachRequired": true}));
    *world.api.driver_error.lock().unwrap() = Some("down".to_owned());
    for (seconds, expected) in [(3600, 2), (9, 2), (2, 3)] {
        tokio::time::advance(std::time::Duration::from_secs(seconds)).await;
        assert!(!is_attachable().await);
        assert_eq!(reads(), expected, "after {seconds} s");
    }
    // An API server that does not answer delays a volume only for a moment.
    *world.api.driver_hangs.lock().unwrap() = true;
    tokio::time::advance(std::time::Duration::from_secs(11)).await;
    let started = tokio::time::Instant::now();
    assert!(!is_attachable().await);
    assert!(started.elapsed() < std::time::Duration::from_secs(6), "{:?}", started.elapsed());
    *world.api.driver_hangs.lock().unwrap() = false;
    *world.api.driver_error.lock().unwrap() = None;
    tokio::time::advance(std::time::Duration::from_secs(11)).await;
    assert!(is_attachable().await);
}

#[tokio::test]
async fn staging_passes_context_secrets_attributes_and_capability() {
    let world = World::new(&[STAGE]);
    world.set_driver(json!({}));
    world.set_attachment("vol-1", json!({"status": {"attached": true, "attachmentMetadata": {"lun": "7"}}}));
    world.set_secret("sec/stage", "key", "aHVudGVyMg==");
    let reference = json!({"name": "stage", "namespace": "sec"});
    let csi = json!({"fsType": "xfs", "volumeAttributes": {"a": "b"}, "nodeStageSecretRef": reference});
    let mut spec = persistent("u", &csi);
    spec.mount_options = vec!["noatime".to_owned(), "discard".to_owned()];
    spec.fs_group = Some(77);
    let learned = world.csi.mount_device(&spec, device_request()).await.unwrap();
    let staging = global(&world).join("globalmount");
    assert_eq!(learned.device_mount_path.as_deref(), staging.to_str());
    let request = world.last_stage();
    assert_eq!(request.volume_id, "vol-1");
    assert_eq!(request.staging_target_path, staging.to_str().unwrap());
    assert_eq!(request.publish_context, map(&[("lun", "7")]));
    assert_eq!(request.secrets, map(&[("key", "hunter2")]));
    assert_eq!(request.volume_context, map(&[("a", "b")]));
    let capability = format!("{:?}", request.volume_capability.unwrap());
    assert!(capability.contains("xfs") && capability.contains(r#"["noatime", "discard"]"#), "{capability}");
    assert!(
        capability.contains(r#"volume_mount_group: """#),
        "the driver lacks VOLUME_MOUNT_GROUP: {capability}"
    );
    assert_eq!(fs::metadata(&staging).unwrap().permissions().mode() & 0o777, 0o750);
    let data = world.script.lock().unwrap().data_at_call[0].clone().expect("written before the call");
    assert_eq!(data, json!({"volumeHandle": "vol-1", "driverName": "csi.example.com"}));
}

#[tokio::test]
async fn the_capability_has_the_mount_group_and_access_mode_that_the_driver_knows() {
    for (capabilities, modes, mode, group) in [
        (vec![STAGE], "ReadWriteOnce", 1, ""),
        (vec![STAGE, MULTI_WRITER], "ReadWriteOnce", 7, ""),
        (vec![STAGE, MULTI_WRITER], "ReadWriteOncePod", 6, ""),
        (vec![STAGE, MOUNT_GROUP], "ReadOnlyMany", 3, "77"),
        (vec![STAGE], "ReadWriteMany", 5, ""),
    ] {
        let world = World::new(&capabilities);
        let mut spec = persistent("u", &json!({}));
        let mut volume = (**spec.persistent.as_ref().unwrap()).clone();
        volume.spec.access_modes = vec![modes.to_owned()];
        spec.persistent = Some(volume.into());
        spec.fs_group = Some(77);
        world.csi.mount_device(&spec, device_request()).await.unwrap();
        let capability = world.last_stage().volume_capability.unwrap();
        assert_eq!(capability.access_mode.unwrap().mode, mode, "{modes}");
        let access = format!("{:?}", capability.access_type);
        assert!(access.contains(&format!("volume_mount_group: {group:?}")), "{modes}: {access}");
    }
}

#[tokio::test]
async fn an_selinux_label_is_a_mount_flag_and_is_saved() {
    let world = World::new(&[STAGE]);
    let label = MountLabel::Context("system_u:object_r:container_file_t:s0:c1,c2".to_owned());
    let request = DeviceRequest { device_path: None, label: &label };
    world.csi.mount_device(&persistent("u", &json!({})), request).await.unwrap();
    let capability = format!("{:?}", world.last_stage().volume_capability.unwrap());
    assert!(
        capability.contains(r#"context=\"system_u:object_r:container_file_t:s0:c1,c2\""#),
        "{capability}"
    );
    let data = world.script.lock().unwrap().data_at_call[0].clone().unwrap();
    assert_eq!(data["seLinuxMountContext"], "system_u:object_r:container_file_t:s0:c1,c2");
}

#[tokio::test]
async fn a_driver_without_stage_has_nothing_staged_and_nothing_left() {
    let world = World::new(&[]);
    let spec = persistent("u", &json!({}));
    let learned = world.csi.mount_device(&spec, device_request()).await.unwrap();
    assert!(learned.device_mount_path.unwrap().ends_with("/globalmount"));
    assert!(world.calls().is_empty() && world.files().is_empty(), "{:?}", world.files());
    world.csi.unmount_device(&device(&spec)).await.unwrap();
    assert!(world.calls().is_empty());
}

#[tokio::test]
async fn each_code_of_a_failed_staging_has_its_class_and_only_final_ones_clean_up() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    for (code, class) in CLASSES {
        world.fail("stage", code);
        let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
        assert_eq!(error.class, class, "{code}: {error}");
        assert!(error.message.contains("made to fail"), "{error}");
        let is_left = !world.data_files().is_empty();
        assert_eq!(is_left, class == FailureClass::Uncertain, "{code}: {:?}", world.files());
        if is_left {
            fs::remove_dir_all(world.root().join("plugins")).unwrap();
        }
    }
}

#[tokio::test]
async fn a_final_error_leaves_a_volume_that_is_already_staged() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    world.fail("stage", 13);
    world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert_eq!(world.data_files().len(), 1);
    world.succeed();
    world.csi.unmount_device(&device(&spec)).await.unwrap();
    assert_eq!(world.take_calls(), ["stage", "stage", "unstage"]);
}

#[tokio::test]
async fn staging_without_driver_secret_or_attachment_is_transient_and_starts_nothing() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({"nodeStageSecretRef": {"name": "s", "namespace": "sec"}}));
    let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert!(error.message.contains("sec/s") && error.class == FailureClass::Transient, "{error}");
    world.set_secret("sec/s", "key", "/w==");
    let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert!(error.message.contains("the value of key is not UTF-8"), "{error}");
    assert_eq!((error.class, error.owner), (FailureClass::Transient, WaitOwner::You));

    world.unregister();
    let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert!(error.message.contains("not found in the list of registered CSI drivers"), "{error}");
    assert_eq!(error.class, FailureClass::Transient);
    world.register_again();
    assert!(world.calls().is_empty() && world.files().is_empty());
}

#[tokio::test]
async fn a_secret_reference_without_a_namespace_is_refused() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({"nodeStageSecretRef": {"name": "s"}}));
    let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert!(error.message.contains("nodeStageSecretRef of the volume pv1 lacks"), "{error}");
    assert_eq!(error.owner, WaitOwner::You);
}

#[tokio::test]
async fn a_volume_that_is_not_attached_is_not_staged() {
    let world = World::new(&[STAGE]);
    world.set_driver(json!({"attachRequired": true}));
    let spec = persistent("u", &json!({}));
    let status = |json| json!({"status": json});
    for (object, text) in [
        (None, "is missing"),
        (Some(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})), "is being deleted"),
        (Some(status(json!({"attached": false}))), "has not finished"),
        (
            Some(status(json!({"attached": false, "attachError": {"message": "no slot", "errorCode": 8}}))),
            "no slot",
        ),
    ] {
        if let Some(object) = object {
            world.set_attachment("vol-1", object);
        }
        let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
        assert!(error.message.contains(text), "{error}");
        assert_eq!((error.class, error.owner), (FailureClass::Transient, WaitOwner::AttachDetachController));
    }
    *world.api.attachment_error.lock().unwrap() = Some("forbidden".to_owned());
    let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert_eq!((error.class, error.owner), (FailureClass::Transient, WaitOwner::ApiServer));
    assert!(world.calls().is_empty() && world.files().is_empty());
}

#[tokio::test]
async fn a_file_in_place_of_the_staging_folder_is_refused() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    let staging = global(&world).join("globalmount");
    world.mounts.remove(&staging);
    fs::remove_dir(&staging).unwrap();
    fs::write(&staging, b"").unwrap();
    let error = world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert!(error.message.contains("is not a folder; remove it") && error.owner == WaitOwner::You, "{error}");
}

#[tokio::test]
async fn unstaging_calls_the_driver_of_the_data_file_and_removes_everything() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    let staging = world.last_stage().staging_target_path;
    world.csi.unmount_device(&device(&spec)).await.unwrap();
    let Some(Call::Unstage(request)) = world.calls().last().cloned() else { panic!("not unstaged") };
    assert_eq!((request.volume_id.as_str(), request.staging_target_path), ("vol-1", staging));
    assert!(world.data_files().is_empty() && !world.files().iter().any(|path| path.contains("globalmount")));
    world.csi.unmount_device(&device(&spec)).await.unwrap();
    assert_eq!(world.take_calls(), ["stage", "unstage"], "a device that is not there is no error");
}

#[tokio::test]
async fn unstaging_is_refused_while_the_volume_is_mounted_elsewhere() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    let seen_elsewhere = format!("/host{}", world.last_stage().staging_target_path);
    *world.mounts.references.lock().unwrap() = vec!["/mnt/x".into(), seen_elsewhere.clone().into()];
    let error = world.csi.unmount_device(&device(&spec)).await.unwrap_err();
    assert!(error.message.ends_with("mounted elsewhere too: /mnt/x"), "{error}");
    *world.mounts.references.lock().unwrap() = vec![seen_elsewhere.into()];
    world.csi.unmount_device(&device(&spec)).await.unwrap();
}

#[tokio::test]
async fn a_failed_unstage_keeps_the_data_file_for_the_next_attempt() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    for (code, class) in CLASSES {
        world.fail("unstage", code);
        let error = world.csi.unmount_device(&device(&spec)).await.unwrap_err();
        assert_eq!(error.class, class, "{error}");
        assert_eq!(world.data_files().len(), 1);
    }
    world.succeed();
    world.unregister();
    let error = world.csi.unmount_device(&device(&spec)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Transient, "{error}");
    world.register_again();
    world.script.lock().unwrap().lies = true;
    let error = world.csi.unmount_device(&device(&spec)).await.unwrap_err();
    assert!(error.message.contains("is still mounted") && error.class == FailureClass::Uncertain, "{error}");
    world.script.lock().unwrap().lies = false;
    world.csi.unmount_device(&device(&spec)).await.unwrap();
    assert!(world.data_files().is_empty());
}

#[tokio::test]
async fn a_staged_volume_without_a_readable_data_file_is_an_error_only_if_mounted() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    for content in [None, Some(""), Some("{\"volumeHan"), Some("[]")] {
        world.csi.mount_device(&spec, device_request()).await.unwrap();
        let folder = global(&world);
        let data = folder.join("vol_data.json");
        match content {
            Some(content) => fs::write(&data, content).unwrap(),
            None => fs::remove_file(&data).unwrap(),
        }
        let error = world.csi.unmount_device(&device(&spec)).await.unwrap_err();
        assert!(error.message.contains(data.to_str().unwrap()) && error.owner == WaitOwner::You, "{error}");
        world.mounts.remove(&folder.join("globalmount"));
        world.csi.unmount_device(&device(&spec)).await.unwrap();
        assert!(world.data_files().is_empty() && !folder.exists());
    }
    assert!(!world.take_calls().contains(&"unstage"));
}

#[tokio::test]
async fn expansion_passes_paths_size_and_secret() {
    let world = World::new(&[STAGE, EXPAND]);
    world.set_secret("sec/e", "key", "aHVudGVyMg==");
    let spec = persistent("u", &json!({"nodeExpandSecretRef": {"name": "e", "namespace": "sec"}}));
    for (reported, size) in [(0, 100), (50, 100), (200, 200)] {
        world.script.lock().unwrap().expanded_to = reported;
        assert_eq!(world.csi.expand(&spec, world.set_up_request(), 100).await.unwrap(), size);
    }
    let Some(Call::Expand(request)) = world.calls().last().cloned() else { panic!("not expanded") };
    assert_eq!((request.volume_id.as_str(), request.capacity_range.unwrap().required_bytes), ("vol-1", 100));
    assert!(request.volume_path.ends_with("/pods/u/volumes/kubernetes.io~csi/pv1/mount"), "{request:?}");
    assert!(request.staging_target_path.ends_with("/globalmount"), "{request:?}");
    assert_eq!(request.secrets, map(&[("key", "hunter2")]));

    world.csi.expand(&block("u"), world.set_up_request(), 100).await.unwrap();
    let Some(Call::Expand(request)) = world.calls().last().cloned() else { panic!("not expanded") };
    assert!(request.volume_path.ends_with("/volumeDevices/publish/pv1/u"), "{request:?}");
    assert!(request.staging_target_path.ends_with("/volumeDevices/staging/pv1"), "{request:?}");
}

#[tokio::test]
async fn each_code_of_a_failed_expansion_says_what_follows_for_the_claim() {
    let world = World::new(&[EXPAND]);
    let spec = persistent("u", &json!({}));
    for (code, class) in [
        (1, ErrorClass::Unfinished),
        (2, ErrorClass::Final),
        (3, ErrorClass::Infeasible),
        (4, ErrorClass::Unfinished),
        (5, ErrorClass::Infeasible),
        (6, ErrorClass::Final),
        (7, ErrorClass::Final),
        (8, ErrorClass::Unfinished),
        (9, ErrorClass::InUse),
        (10, ErrorClass::Unfinished),
        (11, ErrorClass::Infeasible),
        (12, ErrorClass::Final),
        (13, ErrorClass::Final),
        (14, ErrorClass::Unfinished),
        (15, ErrorClass::Final),
        (16, ErrorClass::Final),
    ] {
        world.fail("expand", code);
        let failure = world.csi.expand_volume(&spec, world.set_up_request(), 100).await.unwrap_err();
        assert_eq!(failure.class, class, "{code}: {failure}");
    }
    world.script.lock().unwrap().capabilities.clear();
    world.unregister();
    let failure = world.csi.expand_volume(&spec, world.set_up_request(), 100).await.unwrap_err();
    assert_eq!((failure.class, failure.error.class), (ErrorClass::Unfinished, FailureClass::Transient));
    world.register_again();
    let failure = world.csi.expand_volume(&spec, world.set_up_request(), 100).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::NotSupported, "{failure}");
}

#[tokio::test]
async fn a_driver_without_room_for_a_volume_is_to_be_asked_for_its_limit() {
    let world = World::new(&[STAGE]);
    let spec = persistent("u", &json!({}));
    world.fail("stage", 8);
    world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert_eq!(world.exhaustions(), 1);
    world.fail("stage", 13);
    world.csi.mount_device(&spec, device_request()).await.unwrap_err();
    assert_eq!(world.exhaustions(), 1, "another error");
    world.succeed();
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    world.fail("publish", 8);
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap_err();
    assert_eq!(world.exhaustions(), 2);
}

#[tokio::test]
async fn a_pod_does_not_fit_if_the_attachment_has_no_room_and_the_limit_may_change() {
    let name: VolumeName = format!("kubernetes.io/csi/{DRIVER}^vol-1").into();
    let full = json!({"status": {"attached": false, "attachError": {"errorCode": 8, "message": "no slot"}}});
    let other = json!({"status": {"attached": false, "attachError": {"errorCode": 13, "message": "broken"}}});
    let changing = json!({"nodeAllocatableUpdatePeriodSeconds": 60});
    for (driver, attachment, fits) in [
        (changing.clone(), Some(full.clone()), false),
        (json!({}), Some(full), true),
        (changing.clone(), Some(other), true),
        (changing.clone(), Some(json!({"status": {"attached": true}})), true),
        (changing, None, true),
    ] {
        let world = World::new(&[]);
        world.set_driver(driver.clone());
        if let Some(attachment) = &attachment {
            world.set_attachment("vol-1", attachment.clone());
        }
        let why = world.csi.attach_limit(&["kubernetes.io/nfs/u-a".into(), name.clone()]).await;
        assert_eq!(why.is_none(), fits, "{driver} {attachment:?}: {why:?}");
        assert_eq!(world.exhaustions(), u64::from(!fits));
        assert!(why.is_none_or(|why| why.contains("vol-1") && why.contains("no slot")));
    }
}

#[tokio::test]
async fn calls_that_set_up_a_volume_with_a_legacy_source_count_as_migrated() {
    let world = World::new(&[STAGE, EXPAND]);
    let spec = VolumeSpec { is_migrated: true, ..persistent("u", &json!({})) };
    world.csi.mount_device(&spec, device_request()).await.unwrap();
    world.csi.set_up(&spec, world.set_up_request()).await.unwrap();
    world.csi.expand(&spec, world.set_up_request(), 7).await.unwrap();
    for method in ["NodeStageVolume", "NodePublishVolume", "NodeExpandVolume"] {
        assert_eq!(world.migrated(method), ["true"], "{method}");
    }
    // What is on disk does not say so.
    world.csi.tear_down(&place(&spec)).await.unwrap();
    assert_eq!(world.migrated("NodeUnpublishVolume"), ["false"]);
    let native = persistent("v", &json!({}));
    world.csi.set_up(&native, world.set_up_request()).await.unwrap();
    assert_eq!(world.migrated("NodePublishVolume").len(), 2);
}
