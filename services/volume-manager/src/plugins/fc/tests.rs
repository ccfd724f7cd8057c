use std::fs;

use keelson_volume_manager_core::wait_owner::WaitOwner;
use serde_json::{Value, json};

use super::*;
use crate::plugins::fake::{
    FakeNode, UNLABELLED, device_place, ended, found, inline, persistent, place, set_up_request,
};
use crate::walks::FsGroupWalks;

const NAME: &str = "kubernetes.io/fc/[50060e801049cfd1 50060e801049cfd2]:0";
const GLOBAL: &str = "plugins/kubernetes.io/fc/50060e801049cfd1-50060e801049cfd2-lun-0";
const MAPS: &str = "plugins/kubernetes.io/fc/volumeDevices/50060e801049cfd1-50060e801049cfd2-lun-0";
const LINK: &str = "/dev/disk/by-path/pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-0";

fn source() -> Value {
    json!({"targetWWNs": ["50060e801049cfd1", "50060e801049cfd2"], "lun": 0, "fsType": "ext4"})
}

/// A node with two SCSI hosts.
fn node() -> FakeNode {
    let node = FakeNode::new();
    for host in ["host1", "host2"] {
        node.write(&format!("{SCSI_HOSTS}/{host}/scan"), "");
    }
    node
}

fn scans(node: &FakeNode) -> [String; 2] {
    ["host1", "host2"].map(|host| node.read(&format!("{SCSI_HOSTS}/{host}/scan")))
}

async fn mounted(node: &FakeNode, volume: &VolumeSpec) -> Fc {
    node.disk(LINK, "sda");
    let plugin = Fc::new(node.host());
    plugin.mount_device(volume, UNLABELLED).await.unwrap();
    plugin
}

#[tokio::test]
async fn identity_has_the_identifiers_as_written_and_refuses_wrong_sources() {
    let plugin = Fc::new(node().host());
    for (source, name) in
        [(source(), NAME), (json!({"wwids": ["3600 a", "b"]}), "kubernetes.io/fc/[3600 a b]")]
    {
        let identity = plugin.identify(&inline("fc", source)).await.unwrap();
        assert_eq!(identity.shared_name, Some(name.into()));
        assert!(identity.supports_label && !identity.can_expand && identity.shape.is_attachable());
    }
    for (source, text) in [
        (json!({}), "neither targetWWNs with lun nor wwids"),
        (json!({"targetWWNs": ["a"], "lun": 256}), "lun 256"),
        (json!({"wwids": ["a/b"]}), "cannot be the name of a folder"),
        (json!({"lun": "x"}), "cannot read fc"),
    ] {
        let error = plugin.identify(&inline("fc", source)).await.unwrap_err();
        assert!(error.message.contains(text), "{text}: {error}");
        assert_eq!(error.owner, WaitOwner::You);
    }
}

#[tokio::test]
async fn a_multipath_device_is_mounted_without_a_scan() {
    let node = node();
    node.disk(LINK, "sda");
    node.multipath("dm-1", &["sda", "sdb"]);
    let mut volume = persistent("fc", source());
    volume.read_only = true;
    let label = MountLabel::Context("u:r:t:s0".into());
    let request = DeviceRequest { device_path: None, label: &label };
    let learned = Fc::new(node.host()).mount_device(&volume, request).await.unwrap();
    assert_eq!(learned.device_path.as_deref(), Some("/dev/dm-1"));
    assert_eq!(learned.device_mount_path, Some(shown(&node.root().join(GLOBAL))));
    assert_eq!(node.take_log(), [format!("mount /dev/dm-1 {GLOBAL} ext4 context=\"u:r:t:s0\",ro")]);
    assert_eq!(scans(&node), ["", ""]);
    assert_eq!(VolumeFile::read(&node.root().join(GLOBAL)).unwrap().volume, NAME);
}

#[tokio::test]
async fn a_single_disk_is_mounted_after_every_host_was_scanned() {
    let node = node();
    let volume = inline("fc", source());
    let plugin = mounted(&node, &volume).await;
    assert_eq!(scans(&node), ["- - -", "- - -"]);
    assert_eq!(node.take_log(), [format!("mount /dev/sda {GLOBAL} ext4 ")]);
    plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    assert_eq!(node.take_log(), Vec::<String>::new(), "a mounted device stays as it is");
}

#[tokio::test]
async fn a_disk_is_found_by_its_own_identifier() {
    let node = node();
    node.disk("/dev/disk/by-id/scsi-3600_a", "sdc");
    let volume = inline("fc", json!({"wwids": ["3600 a"]}));
    let learned = Fc::new(node.host()).mount_device(&volume, UNLABELLED).await.unwrap();
    assert_eq!(learned.device_path.as_deref(), Some("/dev/sdc"));
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_no_host_sees_is_an_error_after_a_scan() {
    let node = node();
    let error = Fc::new(node.host()).mount_device(&inline("fc", source()), UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("no fc disk found"), "{error}");
    assert_eq!((error.class, scans(&node)), (FailureClass::Transient, ["- - -".into(), "- - -".into()]));
    assert!(!node.root().join(GLOBAL).exists());
}

#[tokio::test]
async fn a_failed_mount_is_undone_unless_it_is_uncertain() {
    for (class, is_left) in [(FailureClass::Final, false), (FailureClass::Uncertain, true)] {
        let node = node();
        node.disk(LINK, "sda");
        node.fail("mount", class);
        let error = Fc::new(node.host()).mount_device(&inline("fc", source()), UNLABELLED).await.unwrap_err();
        assert_eq!((error.class, node.root().join(GLOBAL).exists()), (class, is_left));
        assert_eq!(VolumeFile::read(&node.root().join(GLOBAL)).is_some(), is_left);
    }
}

#[tokio::test]
async fn a_pod_gets_a_bind_mount_and_a_failing_fs_group_is_ignored() {
    let node = node();
    let mut volume = inline("fc", source());
    volume.fs_group = Some(7);
    let plugin = mounted(&node, &volume).await;
    node.take_log();
    node.fail("own", FailureClass::Final);
    let walks = FsGroupWalks::default();
    plugin.set_up(&volume, set_up_request(&walks)).await.unwrap();
    let target = "pods/u1/volumes/kubernetes.io~fc/data";
    assert_eq!(node.take_log(), [format!("bind {GLOBAL} {target} "), format!("own {target} 7")]);
    plugin.tear_down(&place(PLUGIN, &volume)).await.unwrap();
    assert_eq!(node.take_log(), [format!("clean {target}")]);
}

/// What mountinfo says about the global mount, with the number of sda.
fn mountinfo(node: &FakeNode) {
    let point = node.root().join(GLOBAL);
    let line = format!("40 27 8:0 / {} rw - ext4 /dev/sda rw\n", point.display());
    node.write("/proc/self/mountinfo", &line);
    let link = node.machine("/sys/dev/block/8:0");
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("../../devices/pci/block/sda", link).unwrap();
}

#[tokio::test]
async fn an_unmounted_disk_is_flushed_and_removed_from_the_node() {
    let node = node();
    let volume = inline("fc", source());
    let plugin = mounted(&node, &volume).await;
    mountinfo(&node);
    // The mount says which device it is, even if udev has removed the link.
    fs::remove_file(node.machine(LINK)).unwrap();
    node.take_log();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    let log = node.take_log();
    assert!(log[0].starts_with("umount "), "{log:?}");
    assert_eq!(log[1..], ["blockdev --flushbufs /dev/sda"]);
    assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
    assert!(!node.root().join(GLOBAL).exists());
    assert!(VolumeFile::read(&node.root().join(GLOBAL)).is_none());
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(node.take_log(), Vec::<String>::new(), "a repeated call has nothing to do");
}

#[tokio::test]
async fn a_detach_that_was_interrupted_finds_the_disk_by_its_links() {
    let node = node();
    let volume = inline("fc", source());
    let plugin = mounted(&node, &volume).await;
    node.multipath("dm-1", &["sda"]);
    node.state().mounts.clear();
    node.take_log();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(node.take_log(), ["multipath -f /dev/dm-1", "blockdev --flushbufs /dev/sda"]);
    assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
}

#[tokio::test(start_paused = true)]
async fn a_map_that_is_in_use_is_retried_and_then_an_uncertain_error() {
    let node = node();
    let volume = inline("fc", source());
    let plugin = mounted(&node, &volume).await;
    node.multipath("dm-1", &["sda"]);
    node.program("multipath", |_| ended(1, ""));
    let started = tokio::time::Instant::now();
    let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert_eq!(started.elapsed().as_secs(), 120);
    assert_eq!(node.take_calls("multipath").len(), 13);
    assert_eq!(node.read("/sys/block/sda/device/delete"), "", "a disk below a map stays");
    let mut left = 2;
    node.program("multipath", move |_| {
        left -= 1;
        ended(left, "")
    });
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(node.take_calls("multipath").len(), 2);
    assert!(!node.root().join(GLOBAL).exists());
}

#[tokio::test]
async fn a_disk_that_is_used_in_the_other_mode_stays() {
    let node = node();
    let volume = inline("fc", source());
    let plugin = mounted(&node, &volume).await;
    fs::create_dir_all(node.root().join(MAPS)).unwrap();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(node.read("/sys/block/sda/device/delete"), "");
    assert!(!node.root().join(GLOBAL).exists());
}

#[tokio::test]
async fn a_folder_outside_of_the_plugin_is_never_unmounted() {
    let node = node();
    let volume = inline("fc", source());
    let elsewhere = node.root().join("mnt").join(GLOBAL);
    fs::create_dir_all(&elsewhere).unwrap();
    let mut place = device_place(NAME, &volume);
    place.device_mount_path = Some(shown(&elsewhere));
    assert!(Fc::new(node.host()).unmount_device(&place).await.is_err());
    assert!(elsewhere.exists());
    assert_eq!(node.take_log(), Vec::<String>::new());
}

#[tokio::test]
async fn a_mount_is_reconstructed_from_its_references() {
    let node = node();
    let volume = inline("fc", source());
    let plugin = mounted(&node, &volume).await;
    plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.unwrap();
    let file = VolumeFile::file(&node.root().join(GLOBAL));
    for _ in ["with the stored name", "as another agent leaves it"] {
        let read = plugin.reconstruct(&found(&volume)).await.unwrap();
        assert_eq!((read.shared_name, read.has_device), (Some(NAME.into()), true));
        assert_eq!(read.device_mount_path, Some(shown(&node.root().join(GLOBAL))));
        let _ = fs::remove_file(&file);
    }
    node.state().mounts.clear();
    assert!(plugin.reconstruct(&found(&volume)).await.is_err());
}

#[tokio::test]
async fn a_name_with_separators_is_reconstructed_as_written() {
    let node = node();
    node.disk("/dev/disk/by-id/scsi-3600_a-b", "sdc");
    let volume = inline("fc", json!({"wwids": ["3600 a-b"]}));
    let plugin = Fc::new(node.host());
    plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.unwrap();
    let read = plugin.reconstruct(&found(&volume)).await.unwrap();
    assert_eq!(read.shared_name, Some("kubernetes.io/fc/[3600 a-b]".into()));
}

#[tokio::test]
async fn a_block_volume_is_the_device_and_is_not_mounted() {
    let node = node();
    let volume = VolumeSpec { mode: VolumeMode::Block, ..persistent("fc", source()) };
    let plugin = mounted(&node, &volume).await;
    assert_eq!(node.take_log(), Vec::<String>::new());
    let walks = FsGroupWalks::default();
    let set_up = plugin.set_up(&volume, set_up_request(&walks)).await.unwrap();
    assert_eq!(set_up.host_path, Path::new("/dev/sda"));
    assert_eq!(plugin.global_map_path("pv1"), Some(node.root().join(MAPS)));
    fs::write(node.root().join(MAPS).join("u1"), "").unwrap();
    let read = plugin.reconstruct(&found(&volume)).await.unwrap();
    assert_eq!(read.shared_name, Some(NAME.into()));
    let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
    assert!(error.message.contains("still referenced by the pods u1"), "{error}");
    fs::remove_file(node.root().join(MAPS).join("u1")).unwrap();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert!(!node.root().join(MAPS).exists());
    assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
}

#[tokio::test]
async fn growing_rescans_each_path_and_then_grows_the_filesystem() {
    let node = node();
    let volume = persistent("fc", source());
    let plugin = mounted(&node, &volume).await;
    node.disk("/dev/disk/by-path/fc-0x50060e801049cfd2-lun-0", "sdb");
    node.multipath("dm-1", &["sda", "sdb"]);
    node.take_log();
    plugin.expand(&volume, set_up_request(&FsGroupWalks::default()), 9).await.unwrap();
    for name in ["sda", "sdb"] {
        assert_eq!(node.read(&format!("/sys/block/{name}/device/rescan")), "1");
    }
    assert_eq!(
        node.take_log(),
        ["multipathd resize map dm-1".to_owned(), format!("grow /dev/dm-1 {GLOBAL}")]
    );
}
