use std::fs;
use std::os::unix::fs::MetadataExt as _;

use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_volume_manager_core::operations::PodUid;
use serde_json::json;

use super::*;
use crate::mounter::testing::{LoopDevice, TestFolder, request, volume};
use crate::walks::FsGroupWalks;

fn local(folder: &TestFolder) -> Local {
    Local::new(folder.path().to_owned(), folder.path().join("run"), folder.mounter(), EventRing::default())
}

fn spec(uid: &str, path: &Path) -> VolumeSpec {
    volume(uid, "local", json!({ "path": path }))
}

fn target(folder: &TestFolder, uid: &str) -> PathBuf {
    folder.path().join(format!("pods/{uid}/volumes/kubernetes.io~local-volume/pv"))
}

fn place(uid: &str) -> VolumePlace {
    VolumePlace {
        volume: Local::shared_name("pv"),
        pod: PodUid::from(uid),
        plugin: NAME.into(),
        inner_name: "pv".into(),
        is_block: false,
    }
}

fn device_place(is_block: bool) -> DevicePlace {
    DevicePlace {
        volume: Local::shared_name("pv"),
        inner_name: "pv".into(),
        is_block,
        device_path: None,
        device_mount_path: None,
    }
}

fn device_request() -> DeviceRequest<'static> {
    DeviceRequest { device_path: None, label: &MountLabel::Unlabelled }
}

#[tokio::test]
async fn a_directory_is_bind_mounted_for_each_pod_and_stays_when_they_end() {
    let folder = TestFolder::new();
    let disk = folder.folder("disk");
    fs::write(disk.join("file"), "x").unwrap();
    let plugin = local(&folder);
    let walks = FsGroupWalks::default();
    let learned = Plugin::mount_device(&plugin, &spec("a", &disk), device_request()).await.unwrap();
    assert_eq!(learned.device_mount_path.as_deref(), disk.to_str());
    let mut reader = spec("b", &disk);
    reader.read_only = true;
    for spec in [&spec("a", &disk), &reader, &reader] {
        let ready = Plugin::set_up(&plugin, spec, request(&walks)).await.unwrap();
        assert_eq!(ready.host_path, target(&folder, &spec.pod.uid));
    }
    fs::write(target(&folder, "a").join("new"), "y").unwrap();
    assert!(fs::write(target(&folder, "b").join("new"), "z").is_err());
    for uid in ["a", "b", "a"] {
        plugin.tear_down(&place(uid)).await.unwrap();
        assert!(!target(&folder, uid).exists());
    }
    Plugin::unmount_device(&plugin, &device_place(false)).await.unwrap();
    assert_eq!(fs::read_to_string(disk.join("new")).unwrap(), "y");
}

#[tokio::test]
async fn only_the_first_pod_of_a_local_volume_changes_its_group() {
    let folder = TestFolder::new();
    let disk = folder.folder("disk");
    fs::write(disk.join("file"), "x").unwrap();
    let plugin = local(&folder);
    let walks = FsGroupWalks::default();
    let (mut first, mut second) = (spec("a", &disk), spec("b", &disk));
    (first.fs_group, second.fs_group) = (Some(4711), Some(4712));
    Plugin::set_up(&plugin, &first, request(&walks)).await.unwrap();
    assert_eq!(fs::metadata(disk.join("file")).unwrap().gid(), 4711);
    Plugin::set_up(&plugin, &second, request(&walks)).await.unwrap();
    assert_eq!(fs::metadata(disk.join("file")).unwrap().gid(), 4711);
    assert_eq!(walks.take_ended().len(), 1);
    let events = plugin.events.list_events(tonic::Request::new(ListEventsRequest::default())).await;
    let events = events.unwrap().into_inner().events;
    assert_eq!((events.len(), events[0].reason.as_str()), (1, "AlreadyMountedVolume"));
    assert!(events[0].message.contains("requested fsGroup is 4712"), "{}", events[0].message);
    for uid in ["a", "b"] {
        plugin.tear_down(&place(uid)).await.unwrap();
    }
}

#[tokio::test]
async fn a_block_device_is_formatted_and_mounted_once_for_all_pods() {
    let folder = TestFolder::new();
    let device = LoopDevice::new(&folder, "disk", 32);
    let plugin = local(&folder);
    let walks = FsGroupWalks::default();
    let spec = spec("a", &device.0);
    let global = folder.path().join("plugins/kubernetes.io/local-volume/mounts/pv");
    for _ in 0..2 {
        let learned = Plugin::mount_device(&plugin, &spec, device_request()).await.unwrap();
        assert_eq!(learned.device_mount_path.as_deref(), global.to_str());
    }
    Plugin::set_up(&plugin, &spec, request(&walks)).await.unwrap();
    fs::write(target(&folder, "a").join("file"), "x").unwrap();
    assert!(global.join("file").exists());
    assert_eq!(Plugin::expand(&plugin, &spec, request(&walks), 7).await.unwrap(), 7);
    let error = Plugin::unmount_device(&plugin, &device_place(false)).await.unwrap_err();
    assert!(error.message.contains("is still mounted on"), "{}", error.message);
    let found = FoundFolder { pod: PodUid::from("a"), inner_name: "pv".into(), is_block: false };
    let found = plugin.reconstruct(&found).await.unwrap();
    assert_eq!(found.device_mount_path.as_deref(), global.to_str());
    plugin.tear_down(&place("a")).await.unwrap();
    for _ in 0..2 {
        Plugin::unmount_device(&plugin, &device_place(false)).await.unwrap();
    }
    assert!(!global.exists());
}

#[tokio::test]
async fn a_device_mount_that_is_gone_is_mounted_again_before_a_pod_gets_it() {
    let folder = TestFolder::new();
    let device = LoopDevice::new(&folder, "disk", 32);
    let plugin = local(&folder);
    let walks = FsGroupWalks::default();
    let spec = spec("a", &device.0);
    let learned = Plugin::mount_device(&plugin, &spec, device_request()).await.unwrap();
    let global = PathBuf::from(learned.device_mount_path.unwrap());
    fs::write(global.join("file"), "x").unwrap();
    rustix::mount::unmount(&global, rustix::mount::UnmountFlags::empty()).unwrap();
    let path = global.display().to_string();
    let request = SetUpRequest { device_mount_path: Some(&path), ..request(&walks) };
    Plugin::set_up(&plugin, &spec, request).await.unwrap();
    assert_eq!(
        fs::read_to_string(target(&folder, "a").join("file")).unwrap(),
        "x",
        "not the node's own disk"
    );
    plugin.tear_down(&place("a")).await.unwrap();
    Plugin::unmount_device(&plugin, &device_place(false)).await.unwrap();
    // A device that is gone as well: the pod gets nothing.
    drop(device);
    assert!(Plugin::set_up(&plugin, &spec, request).await.is_err());
    assert!(!target(&folder, "a").exists());
}

#[tokio::test]
async fn devices_without_a_pod_are_found_after_a_restart_by_their_folders() {
    let folder = TestFolder::new();
    assert_eq!(local(&folder).found_devices().await.unwrap(), []);
    let mount = folder.folder("plugins/kubernetes.io/local-volume/mounts/pv");
    let maps = folder.folder("plugins/kubernetes.io~local-volume/volumeDevices/raw");
    let device = |inner_name: &str, path: &Path, is_block| FoundDevice {
        volume: Local::shared_name(inner_name),
        inner_name: inner_name.into(),
        is_block,
        device_mount_path: path.display().to_string(),
        label: None,
    };
    let expected = [device("pv", &mount, false), device("raw", &maps, true)];
    assert_eq!(local(&folder).found_devices().await.unwrap(), expected);
    Plugin::unmount_device(&local(&folder), &device_place(false)).await.unwrap();
    assert_eq!(local(&folder).found_devices().await.unwrap(), [device("raw", &maps, true)]);
}

#[tokio::test]
async fn a_block_device_in_mode_block_is_handed_over_as_it_is() {
    let folder = TestFolder::new();
    let device = LoopDevice::new(&folder, "disk", 4);
    let plugin = local(&folder);
    let walks = FsGroupWalks::default();
    let mut spec = spec("a", &device.0);
    spec.mode = VolumeMode::Block;
    let learned = Plugin::mount_device(&plugin, &spec, device_request()).await.unwrap();
    assert_eq!(learned.device_path.as_deref(), device.0.to_str());
    assert_eq!(Plugin::set_up(&plugin, &spec, request(&walks)).await.unwrap().host_path, device.0);
    assert!(!target(&folder, "a").exists());
    let maps = folder.path().join("plugins/kubernetes.io~local-volume/volumeDevices/pv");
    assert_eq!(plugin.global_map_path("pv").await.unwrap(), Some(maps));
    Plugin::unmount_device(&plugin, &device_place(true)).await.unwrap();
}

#[tokio::test]
async fn a_path_that_is_no_local_volume_is_refused() {
    let folder = TestFolder::new();
    let plugin = local(&folder);
    for (path, expected) in [("/a/../b", "must not contain '..'"), ("b", "must be absolute")] {
        let error = plugin.identify(&spec("a", Path::new(path))).await.unwrap_err();
        assert!(error.message.contains(expected), "{}", error.message);
    }
    let missing = folder.path().join("missing");
    let error = Plugin::mount_device(&plugin, &spec("a", &missing), device_request()).await.unwrap_err();
    assert!(error.message.contains("does not exist on this node"), "{}", error.message);
    // The agent's sockets, by name and through a link.
    let run = folder.folder("run");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&run, &link).unwrap();
    for path in [run, link] {
        let error = Plugin::mount_device(&plugin, &spec("a", &path), device_request()).await.unwrap_err();
        assert!(error.message.contains("the agent's sockets"), "{}", error.message);
    }
}
