use std::fs;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::MountLabel;
use serde_json::{Value, json};

use super::*;
use crate::plugins::fake::{
    FakeNode, UNLABELLED, device_place, ended, found, inline, persistent, place, set_up_request,
};
use crate::plugins::{DeviceRequest, FoundDevice, Plugin as _};
use crate::walks::FsGroupWalks;

const NAME: &str = "kubernetes.io/fc/[50060e801049cfd1 50060e801049cfd2]:0";
const GLOBAL: &str = "plugins/kubernetes.io/fc/50060e801049cfd1-50060e801049cfd2-lun-0";
const MAPS: &str = "plugins/kubernetes.io/fc/volumeDevices/50060e801049cfd1-50060e801049cfd2-lun-0";
const LINK: &str = "/dev/disk/by-path/pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-0";

fn source() -> Value {
    json!({"targetWWNs": ["50060e801049cfd1", "50060e801049cfd2"], "lun": 0, "fsType": "ext4"})
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
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
async fn a_mount_with_a_label_is_found_with_it_with_and_without_a_pod() {
    let node = node();
    node.disk(LINK, "sda");
    let (volume, plugin) = (inline("fc", source()), Fc::new(node.host()));
    let label = MountLabel::Context("system_u:object_r:container_file_t:s0:c1,c2".into());
    plugin.mount_device(&volume, DeviceRequest { device_path: None, label: &label }).await.unwrap();
    plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.unwrap();
    assert_eq!(plugin.reconstruct(&found(&volume)).await.unwrap().label, Some(label.clone()));
    assert_eq!(plugin.found_devices().await.unwrap()[0].label, Some(label));
    // After a reboot nothing is mounted.
    node.state().mounts.clear();
    assert_eq!(plugin.found_devices().await.unwrap()[0].label, None);
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
    assert_eq!(plugin.global_map_path("pv1").await.unwrap(), Some(node.root().join(MAPS)));
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

/// Disks as udev and sysfs show them, with the device that is mounted and the disks that are removed with it.
struct Layout {
    name: &'static str,
    source: Value,
    links: &'static [(&'static str, &'static str)],
    /// Names, UUIDs and slaves of device-mapper devices.
    mappings: &'static [(&'static str, &'static str, &'static [&'static str])],
    device: &'static str,
    removed: &'static [&'static str],
}

const FIRST: &str = "/dev/disk/by-path/fc-0x50060e801049cfd1-lun-0";
const SECOND: &str = "/dev/disk/by-path/fc-0x50060e801049cfd2-lun-0";
const BY_ID: &str = "/dev/disk/by-id/scsi-3600_a";
const DISKS: [&str; 5] = ["sda", "sdb", "sdc", "sdd", "sdf"];

impl Layout {
    fn new(
        name: &'static str,
        links: &'static [(&'static str, &'static str)],
        mappings: &'static [(&'static str, &'static str, &'static [&'static str])],
        device: &'static str,
        removed: &'static [&'static str],
    ) -> Self {
        let is_identified = links.iter().any(|(link, _)| *link == BY_ID);
        let source = if is_identified { json!({"wwids": ["3600 a"]}) } else { source() };
        Self { name, source, links, mappings, device, removed }
    }

    fn all() -> [Self; 8] {
        [
            Self::new("one path", &[(FIRST, "sda")], &[], "/dev/sda", &["sda"]),
            Self::new("the second target only", &[(SECOND, "sdb")], &[], "/dev/sdb", &["sdb"]),
            Self::new("an adapter's link", &[(LINK, "sda")], &[], "/dev/sda", &["sda"]),
            Self::new(
                "a multipath device over both",
                &[(FIRST, "sda"), (SECOND, "sdb")],
                &[("dm-0", "mpath-3600a", &["sda", "sdb"])],
                "/dev/dm-0",
                &["sda", "sdb"],
            ),
            Self::new(
                "a multipath device over more than the named paths",
                &[(SECOND, "sdb")],
                &[("dm-3", "mpath-3600a", &["sda", "sdb", "sdc", "sdd"])],
                "/dev/dm-3",
                &["sda", "sdb", "sdc", "sdd"],
            ),
            Self::new(
                "an LVM volume is no multipath device",
                &[(FIRST, "sda")],
                &[("dm-0", "LVM-x", &["sda"]), ("dm-1", "mpath-y", &["sdx"])],
                "/dev/sda",
                &["sda"],
            ),
            Self::new("an identifier with a space", &[(BY_ID, "sdc")], &[], "/dev/sdc", &["sdc"]),
            Self::new(
                "a multipath device over an identified disk",
                &[(BY_ID, "sdc")],
                &[("dm-7", "mpath-3600a", &["sdc", "sdf"])],
                "/dev/dm-7",
                &["sdc", "sdf"],
            ),
        ]
    }

    fn node(&self) -> FakeNode {
        let node = node();
        for (link, disk) in self.links {
            node.disk(link, disk);
        }
        for (dm, uuid, slaves) in self.mappings {
            node.multipath(dm, slaves);
            node.write(&format!("/sys/block/{dm}/dm/uuid"), uuid);
        }
        for disk in DISKS {
            node.write(&format!("/sys/block/{disk}/device/delete"), "");
        }
        node
    }
}

#[tokio::test]
async fn each_layout_of_paths_has_its_device_and_its_removal() {
    for layout in Layout::all() {
        let (node, name, device) = (layout.node(), layout.name, layout.device);
        let volume = inline("fc", layout.source);
        let plugin = Fc::new(node.host());
        let unique = plugin.identify(&volume).await.unwrap().shared_name.unwrap();
        let learned = plugin.mount_device(&volume, UNLABELLED).await.unwrap();
        assert_eq!(learned.device_path.as_deref(), Some(device), "{name}");
        node.take_log();
        plugin.unmount_device(&device_place(unique.as_str(), &volume)).await.unwrap();
        let flushed = node.take_calls("multipath");
        let expected = device.starts_with("/dev/dm-").then(|| format!("multipath -f {device}"));
        assert_eq!(flushed, Vec::from_iter(expected), "{name}");
        for disk in DISKS {
            let deleted = node.read(&format!("/sys/block/{disk}/device/delete"));
            assert_eq!(deleted == "1", layout.removed.contains(&disk), "{name}: {disk}");
        }
        assert_eq!(plugin.found_devices().await.unwrap(), [], "{name}");
    }
}

#[tokio::test]
async fn devices_without_a_pod_are_found_after_a_restart_by_their_folders() {
    let node = node();
    assert_eq!(Fc::new(node.host()).found_devices().await.unwrap(), []);
    let volume = persistent("fc", source());
    mounted(&node, &volume).await;
    let device = |inner_name: &str, folder: &str| FoundDevice {
        volume: NAME.into(),
        inner_name: inner_name.into(),
        is_block: folder == MAPS,
        device_mount_path: shown(&node.root().join(folder)),
        label: (folder == GLOBAL).then_some(MountLabel::Unlabelled),
    };
    let base = node.root().join("plugins/kubernetes.io/fc");
    fs::create_dir_all(base.join("a-lun-999")).unwrap();
    assert_eq!(Fc::new(node.host()).found_devices().await.unwrap(), [device("pv1", GLOBAL)]);
    // As another agent leaves it.
    fs::remove_file(VolumeFile::file(&node.root().join(GLOBAL))).unwrap();
    fs::create_dir_all(node.root().join(MAPS)).unwrap();
    let expected = [device("", GLOBAL), device("", MAPS)];
    assert_eq!(Fc::new(node.host()).found_devices().await.unwrap(), expected);
}

/// What the killed service has left.
type Kill = fn(&FakeNode);

/// The service is killed after each step of an unmount: the next one finds the device by what is left, and removes the disk.
#[tokio::test]
async fn an_unmount_that_was_killed_in_any_step_is_completed_after_a_restart() {
    let kills: [(&str, Kill, bool); 4] = [
        ("before umount", |_| {}, true),
        ("after umount", |node| node.state().mounts.clear(), true),
        (
            "after the disk was removed",
            |node| {
                node.state().mounts.clear();
                fs::remove_dir_all(node.machine("/dev/disk")).unwrap();
            },
            false,
        ),
        (
            "after the folder was removed",
            |node| {
                node.state().mounts.clear();
                fs::remove_dir(node.root().join(GLOBAL)).unwrap();
            },
            false,
        ),
    ];
    for (when, kill, is_deleted) in kills {
        let node = node();
        let volume = persistent("fc", source());
        mounted(&node, &volume).await;
        kill(&node);
        let plugin = Fc::new(node.host());
        for device in plugin.found_devices().await.unwrap() {
            let mut place = device_place(NAME, &volume);
            (place.volume, place.device_mount_path) = (device.volume, Some(device.device_mount_path));
            plugin.unmount_device(&place).await.unwrap();
        }
        assert_eq!(node.read("/sys/block/sda/device/delete") == "1", is_deleted, "{when}");
        assert_eq!(plugin.found_devices().await.unwrap(), [], "{when}");
        // By its name alone, as a running service unmounts it.
        plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
        assert!(!node.root().join(GLOBAL).exists(), "{when}");
    }
}

#[tokio::test]
async fn a_device_that_is_mounted_elsewhere_too_is_not_unmounted() {
    let node = node();
    let volume = persistent("fc", source());
    let plugin = mounted(&node, &volume).await;
    node.state().mounts.insert(PathBuf::from("/host").join(GLOBAL), "/dev/sda".into());
    node.state().mounts.insert("/mnt/backup".into(), "/dev/sda".into());
    node.take_log();
    let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
    assert!(error.message.ends_with("is still mounted on /mnt/backup"), "{error}");
    assert_eq!(node.take_log(), Vec::<String>::new());
    assert_eq!(node.read("/sys/block/sda/device/delete"), "");
    node.state().mounts.remove(Path::new("/mnt/backup"));
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
}

/// Also in a mount namespace that this service does not see, or by a volume that names the same disk in another way.
#[tokio::test]
async fn a_disk_that_something_holds_is_not_removed() {
    for (dm, busy) in [(None, "/dev/sda"), (Some("dm-1"), "/dev/dm-1")] {
        let node = node();
        let volume = persistent("fc", source());
        let plugin = mounted(&node, &volume).await;
        if let Some(dm) = dm {
            node.multipath(dm, &["sda"]);
        }
        node.state().busy.insert(busy.into());
        node.take_log();
        for _ in ["at first", "again, after it was unmounted"] {
            let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
            assert!(error.message.contains(busy), "{error}");
            assert_eq!(error.class, FailureClass::Uncertain);
        }
        let log = node.take_log();
        assert!(log.len() == 1 && log[0].starts_with("umount "), "{log:?}");
        assert!(node.root().join(GLOBAL).exists(), "it is found again after a restart");
        node.state().busy.clear();
        plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
        assert_eq!(node.read("/sys/block/sda/device/delete"), "1");
    }
}
