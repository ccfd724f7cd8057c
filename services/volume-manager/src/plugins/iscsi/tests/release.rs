//! The end of a device: unmounts, logouts, and what a restart finds.

use super::*;
use crate::plugins::FoundDevice;

#[tokio::test]
async fn the_last_volume_of_a_target_logs_out_and_removes_its_disk() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    node.take_log();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    let log = node.take_log();
    let node_args = format!("iscsiadm -m node -p 10.0.0.1:3260 -T {IQN} -I default");
    assert!(log[0].starts_with("umount "), "{log:?}");
    assert_eq!(log[1..], [format!("{node_args} --logout"), format!("{node_args} -o delete")]);
    assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
    assert!(!node.root().join("plugins/kubernetes.io/iscsi/iface-default").exists());
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(node.take_log(), Vec::<String>::new(), "a repeated call has nothing to do");
}

#[tokio::test]
async fn sessions_stay_while_another_lun_of_the_target_is_used() {
    for other in [
        "iface-default/10.0.0.1:3260-iqn.2020-01.example:disks-lun-4",
        "volumeDevices/iface-default/10.0.0.1:3260-iqn.2020-01.example:disks-lun-4",
    ] {
        let node = FakeNode::new();
        let volume = persistent("iscsi", source(&[]));
        let plugin = mounted(&node, &volume).await;
        let other = node.root().join("plugins/kubernetes.io/iscsi").join(other);
        fs::create_dir_all(&other).unwrap();
        node.take_log();
        plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
        assert_eq!(node.take_calls("iscsiadm"), Vec::<String>::new());
        assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
        assert!(other.exists() && !node.root().join(GLOBAL).exists());
    }
}

#[tokio::test]
async fn a_disk_that_is_used_in_the_other_mode_stays() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    fs::create_dir_all(node.root().join(MAPS)).unwrap();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(node.read("/sys/block/sda/device/delete"), "");
}

#[tokio::test]
async fn logouts_that_fail_are_retried_and_those_without_a_session_succeed() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    node.program("iscsiadm", |_| ended(1, ""));
    let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(error.message.contains("--logout"), "{error}");
    assert!(node.root().join(GLOBAL).join(FILE).exists(), "the record stays for the next attempt");
    for code in [2, 21] {
        fs::create_dir_all(node.root().join(GLOBAL)).unwrap();
        node.program("iscsiadm", move |_| ended(code, ""));
        plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
        assert!(!node.root().join(GLOBAL).exists());
    }
}

#[tokio::test]
async fn a_missing_or_broken_record_falls_back_to_the_name_of_the_folder() {
    for text in [None, Some("{"), Some("{\"Portals\": [\"10.9.9.9\"]}")] {
        let node = FakeNode::new();
        let volume = persistent("iscsi", source(&[]));
        let plugin = mounted(&node, &volume).await;
        let record = node.root().join(GLOBAL).join(FILE);
        match text {
            Some(text) => fs::write(record, text).unwrap(),
            None => fs::remove_file(record).unwrap(),
        }
        node.take_log();
        plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
        let log = node.take_calls("iscsiadm");
        assert!(log[0].contains("-p 10.0.0.1:3260") && log.len() == 2, "{text:?}: {log:?}");
    }
}

#[tokio::test]
async fn a_folder_outside_of_the_plugin_is_never_unmounted() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    for path in ["/mnt".to_owned(), format!("/mnt/{GLOBAL}")] {
        let mut place = device_place(NAME, &volume);
        place.device_mount_path = Some(path.clone());
        assert!(plugin(&node).unmount_device(&place).await.is_err(), "{path}");
        assert_eq!(node.take_log(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_mount_is_reconstructed_from_its_references_with_the_name_as_written() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.unwrap();
    let read = plugin.reconstruct(&found(&volume)).await.unwrap();
    assert_eq!(read.shared_name, Some(NAME.into()));
    assert_eq!((read.has_device, read.device_mount_path), (true, Some(shown(&node.root().join(GLOBAL)))));
    assert_eq!(read.label, Some(MountLabel::Unlabelled));
    // Another agent has not stored the name.
    fs::remove_file(VolumeFile::file(&node.root().join(GLOBAL))).unwrap();
    let read = plugin.reconstruct(&found(&volume)).await.unwrap();
    assert_eq!(read.shared_name, Some(format!("kubernetes.io/iscsi/10.0.0.1:3260:{IQN}:3").as_str().into()));
    node.state().mounts.clear();
    assert!(plugin.reconstruct(&found(&volume)).await.is_err());
}

#[tokio::test]
async fn a_mount_with_a_label_is_found_with_it_with_and_without_a_pod() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let label = MountLabel::Context("system_u:object_r:container_file_t:s0:c1,c2".into());
    initiator(&node, &[("10.0.0.1", 5, "sda")]);
    let plugin = plugin(&node);
    plugin.mount_device(&volume, DeviceRequest { device_path: None, label: &label }).await.unwrap();
    plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.unwrap();
    assert_eq!(plugin.reconstruct(&found(&volume)).await.unwrap().label, Some(label.clone()));
    assert_eq!(plugin.found_devices().await.unwrap()[0].label, Some(label));
    // After a reboot nothing is mounted.
    node.state().mounts.clear();
    assert_eq!(plugin.found_devices().await.unwrap()[0].label, None);
}

/// What a restart finds: the device, as the file next to its folder or the folder itself names it.
fn found_device(node: &FakeNode, volume: &str, inner_name: &str, folder: &str) -> FoundDevice {
    FoundDevice {
        volume: volume.into(),
        inner_name: inner_name.into(),
        is_block: folder == MAPS,
        device_mount_path: shown(&node.root().join(folder)),
        label: (folder == GLOBAL).then_some(MountLabel::Unlabelled),
    }
}

#[tokio::test]
async fn devices_without_a_pod_are_found_after_a_restart_by_their_folders() {
    let node = FakeNode::new();
    assert_eq!(plugin(&node).found_devices().await.unwrap(), []);
    let volume = persistent("iscsi", source(&[]));
    mounted(&node, &volume).await;
    let base = node.root().join("plugins/kubernetes.io/iscsi");
    fs::create_dir_all(base.join("iface-default/not a disk")).unwrap();
    assert_eq!(plugin(&node).found_devices().await.unwrap(), [found_device(&node, NAME, "pv1", GLOBAL)]);
    // Those of another agent have the name with the port.
    fs::remove_file(VolumeFile::file(&node.root().join(GLOBAL))).unwrap();
    fs::create_dir_all(node.root().join(MAPS)).unwrap();
    let with_port = format!("kubernetes.io/iscsi/10.0.0.1:3260:{IQN}:3");
    let expected = [GLOBAL, MAPS].map(|folder| found_device(&node, &with_port, "", folder));
    assert_eq!(plugin(&node).found_devices().await.unwrap(), expected);
    // A file that names another disk says nothing.
    let foreign =
        VolumeFile { volume: "kubernetes.io/iscsi/10.0.0.9:iqn.x:1".into(), inner_name: "x".into() };
    foreign.write(&node.root().join(GLOBAL)).unwrap();
    assert_eq!(plugin(&node).found_devices().await.unwrap()[0].volume, with_port.as_str().into());
}

/// What the killed service has left.
type Kill = fn(&FakeNode);

/// The service is killed after each step of an unmount: the next one finds the device by what is left, and ends the session.
#[tokio::test]
async fn an_unmount_that_was_killed_in_any_step_is_completed_after_a_restart() {
    let kills: [(&str, Kill); 5] = [
        ("before umount", |_| {}),
        ("after umount", |node| node.state().mounts.clear()),
        ("after the disk was removed", |node| {
            node.state().mounts.clear();
            fs::remove_dir_all(node.machine("/sys/class/iscsi_host/host5/device/session5/target5:0:0"))
                .unwrap();
            fs::remove_dir_all(node.machine("/dev/disk")).unwrap();
        }),
        ("after the logout", |node| {
            node.state().mounts.clear();
            fs::remove_dir_all(node.machine("/sys/class/iscsi_host")).unwrap();
        }),
        ("after the record was removed", |node| {
            node.state().mounts.clear();
            fs::remove_file(node.root().join(GLOBAL).join(FILE)).unwrap();
        }),
    ];
    for (when, kill) in kills {
        let node = FakeNode::new();
        let volume = persistent("iscsi", source(&[]));
        mounted(&node, &volume).await;
        kill(&node);
        node.take_log();
        let plugin = plugin(&node);
        let [device] = <[FoundDevice; 1]>::try_from(plugin.found_devices().await.unwrap()).unwrap();
        let mut place = device_place(NAME, &volume);
        (place.volume, place.device_mount_path) = (device.volume, Some(device.device_mount_path));
        plugin.unmount_device(&place).await.unwrap();
        let log = node.take_log();
        assert!(log.iter().any(|line| line.ends_with("--logout")), "{when}: {log:?}");
        assert_eq!(plugin.found_devices().await.unwrap(), [], "{when}");
        assert!(!node.root().join("plugins/kubernetes.io/iscsi/iface-default").exists(), "{when}");
    }
}

#[tokio::test]
async fn a_device_that_is_mounted_elsewhere_too_is_not_unmounted() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    let device = node.state().mounts.values().next().unwrap().clone();
    // The same mount, seen through another prefix, does not count.
    node.state().mounts.insert(PathBuf::from("/host").join(GLOBAL), device.clone());
    node.state().mounts.insert("/mnt/backup".into(), device);
    node.take_log();
    let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
    assert!(error.message.ends_with("is still mounted on /mnt/backup"), "{error}");
    assert_eq!(node.take_log(), Vec::<String>::new());
    node.state().mounts.remove(Path::new("/mnt/backup"));
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert!(!node.root().join(GLOBAL).exists());
}

#[tokio::test]
async fn sessions_stay_while_something_holds_the_disk() {
    for (dm, busy) in [(None, "/dev/sda"), (Some("dm-1"), "/dev/dm-1")] {
        let node = FakeNode::new();
        let volume = persistent("iscsi", source(&[]));
        let plugin = mounted(&node, &volume).await;
        if let Some(dm) = dm {
            node.multipath(dm, &["sda"]);
            // A disk below a multipath device is always in use.
            node.state().busy.insert("/dev/sda".into());
        }
        node.state().busy.insert(busy.into());
        node.take_log();
        for _ in ["at first", "again, after it was unmounted"] {
            let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
            let text = format!("the device {busy} is in use when it was no longer expected to be in use");
            assert!(error.message.starts_with(&text), "{error}");
            assert_eq!(error.class, FailureClass::Uncertain);
        }
        let log = node.take_log();
        assert!(log.len() == 1 && log[0].starts_with("umount "), "{log:?}");
        assert_eq!(node.read("/sys/block/sda/device/delete"), "");
        assert!(node.root().join(GLOBAL).join(FILE).exists(), "it is found again after a restart");
        node.state().busy.remove(busy);
        plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
        assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
        assert!(node.take_log().iter().any(|line| line.ends_with("--logout")));
    }
}

/// A kubelet left the device, and the API writes the portal without its port.
#[tokio::test]
async fn a_device_that_was_found_under_another_spelling_stays_for_the_volume_that_uses_it() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    fs::remove_file(VolumeFile::file(&node.root().join(GLOBAL))).unwrap();
    let [device] = <[FoundDevice; 1]>::try_from(plugin.found_devices().await.unwrap()).unwrap();
    assert_ne!(device.volume, NAME.into());
    plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    node.take_log();
    let mut place = device_place(NAME, &volume);
    (place.volume, place.device_mount_path) = (device.volume, Some(device.device_mount_path));
    plugin.unmount_device(&place).await.unwrap();
    assert_eq!(node.take_log(), Vec::<String>::new());
    assert!(node.root().join(GLOBAL).join(FILE).exists());
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert!(!node.root().join(GLOBAL).exists());
}
