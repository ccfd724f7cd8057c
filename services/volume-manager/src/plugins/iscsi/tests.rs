mod chap;
mod release;

use std::fs;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::MountLabel;
use serde_json::{Value, json};

use super::*;
use crate::mounter::CommandOutput;
use crate::plugins::fake::{
    FakeNode, UNLABELLED, device_place, ended, found, inline, persistent, place, set_up_request,
};
use crate::plugins::{DeviceRequest, Plugin as _, SetUpRequest};
use crate::walks::FsGroupWalks;

const IQN: &str = "iqn.2020-01.example:disks";
const NAME: &str = "kubernetes.io/iscsi/10.0.0.1:iqn.2020-01.example:disks:3";
const GLOBAL: &str =
    "plugins/kubernetes.io/iscsi/iface-default/10.0.0.1:3260-iqn.2020-01.example:disks-lun-3";
const MAPS: &str =
    "plugins/kubernetes.io/iscsi/volumeDevices/iface-default/10.0.0.1:3260-iqn.2020-01.example:disks-lun-3";

fn source(portals: &[&str]) -> Value {
    json!({"targetPortal": "10.0.0.1", "portals": portals, "iqn": IQN, "lun": 3, "fsType": "xfs"})
}

/// A session, with its SCSI host, as the kernel shows it.
fn session(node: &FakeNode, host: u32, address: &str) {
    let device = format!("/sys/class/iscsi_host/host{host}/device/session{host}");
    node.write(&format!("{device}/iscsi_session/session{host}/targetname"), &format!("{IQN}\n"));
    let connection = format!("{device}/connection{host}:0/iscsi_connection/connection{host}:0");
    for (file, text) in
        [("address", address), ("port", "3260"), ("persistent_address", address), ("persistent_port", "3260")]
    {
        node.write(&format!("{connection}/{file}"), &format!("{text}\n"));
    }
    node.write(&format!("/sys/class/scsi_host/host{host}/scan"), "");
}

/// The disk that a session with a host has.
fn disk_of(node: &FakeNode, host: u32, address: &str, name: &str) {
    node.disk(&format!("/dev/disk/by-path/ip-{address}:3260-iscsi-{IQN}-lun-3"), name);
    let session = format!("/sys/class/iscsi_host/host{host}/device/session{host}");
    node.write(&format!("{session}/target{host}:0:0/{host}:0:0:3/block/{name}/x"), "");
}

/// An initiator whose login at the portals in `served` makes a session and a disk.
fn initiator(node: &FakeNode, served: &'static [(&'static str, u32, &'static str)]) {
    let inside = node.clone();
    node.program("iscsiadm", move |arguments| {
        if arguments.contains(&"show") {
            return ended(0, "iface.iscsi_ifacename = default\niface.transport_name = tcp\n");
        }
        if arguments.contains(&"--login") {
            let hit =
                served.iter().find(|(address, ..)| arguments.contains(&format!("{address}:3260").as_str()));
            let Some((address, host, name)) = hit else { return ended(8, "") };
            session(&inside, *host, address);
            disk_of(&inside, *host, address, name);
        }
        ended(0, "")
    });
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn plugin(node: &FakeNode) -> Iscsi {
    Iscsi::new(node.host(), Arc::new(node.clone()))
}

async fn mounted(node: &FakeNode, volume: &VolumeSpec) -> Iscsi {
    initiator(node, &[("10.0.0.1", 5, "sda")]);
    let plugin = plugin(node);
    plugin.mount_device(volume, UNLABELLED).await.unwrap();
    plugin
}

#[tokio::test]
async fn identity_has_the_name_as_written_and_refuses_wrong_sources() {
    let node = FakeNode::new();
    let plugin = plugin(&node);
    let identity = plugin.identify(&inline("iscsi", source(&[]))).await.unwrap();
    assert_eq!(identity.shared_name, Some(NAME.into()));
    assert!(identity.supports_label && !identity.can_expand && identity.shape.is_attachable());
    for (change, text) in [
        (json!({"targetPortal": ""}), "targetPortal"),
        (json!({"iqn": "disks"}), "iqn"),
        (json!({"lun": 256}), "lun"),
        (json!({"lun": "x"}), "cannot read iscsi"),
        (json!({"chapAuthSession": true}), "secretRef"),
        (json!({"chapAuthDiscovery": true, "secretRef": {"name": ""}}), "secretRef"),
    ] {
        let mut wrong = source(&[]);
        wrong.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let error = plugin.identify(&inline("iscsi", wrong)).await.unwrap_err();
        assert!(error.message.contains(text), "{text}: {error}");
        assert_eq!(error.owner, WaitOwner::You);
    }
}

#[tokio::test]
async fn the_claim_says_whether_a_persistent_volume_is_read_only() {
    let node = FakeNode::new();
    let plugin = plugin(&node);
    let mut written = source(&[]);
    written["readOnly"] = true.into();
    assert!(plugin.identify(&inline("iscsi", written.clone())).await.unwrap().read_only);
    let mut volume = persistent("iscsi", written);
    assert!(!plugin.identify(&volume).await.unwrap().read_only);
    volume.read_only = true;
    assert!(plugin.identify(&volume).await.unwrap().read_only);
}

#[tokio::test]
async fn a_device_is_logged_in_recorded_scanned_and_mounted() {
    let node = FakeNode::new();
    initiator(&node, &[("10.0.0.1", 5, "sda")]);
    let mut volume = persistent("iscsi", source(&[]));
    volume.mount_options = vec!["noatime".into()];
    let label = MountLabel::Context("u:r:t:s0:c1,c2".into());
    let request = DeviceRequest { device_path: Some(""), label: &label };
    let learned = plugin(&node).mount_device(&volume, request).await.unwrap();
    let link = format!("/dev/disk/by-path/ip-10.0.0.1:3260-iscsi-{IQN}-lun-3");
    assert_eq!(learned.device_path.as_deref(), Some(link.as_str()));
    let path = node.root().join(GLOBAL);
    assert_eq!(learned.device_mount_path, Some(shown(&path)));
    assert_eq!(node.read("/sys/class/scsi_host/host5/scan"), "0 0 3");
    let log = node.take_log();
    let mount = format!("mount {link} {GLOBAL} xfs context=\"u:r:t:s0:c1,c2\",noatime");
    assert_eq!(log.last(), Some(&mount), "{log:?}");
    let steps = ["iface", "discoverydb", "--discover", "node.session.scan", "--login", "node.startup"];
    let at = steps.map(|step| log.iter().position(|line| line.contains(step)).expect(step));
    assert!(at.is_sorted(), "{log:?}");
    let record: Value = serde_json::from_str(&fs::read_to_string(path.join(FILE)).unwrap()).unwrap();
    assert_eq!((&record["Iqn"], &record["VolName"]), (&json!(IQN), &json!("pv1")));
    assert_eq!(VolumeFile::read(&path).unwrap().volume, NAME);
}

#[tokio::test]
async fn a_device_that_is_mounted_or_logged_in_is_not_logged_in_again() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    node.take_log();
    plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    assert_eq!(node.take_log(), Vec::<String>::new());
    node.state().mounts.clear();
    plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    let log = node.take_log();
    assert!(!log.iter().any(|line| line.contains("--login")), "{log:?}");
    assert!(log.last().unwrap().starts_with("mount "), "{log:?}");
}

#[tokio::test(start_paused = true)]
async fn a_multipath_device_over_several_portals_is_mounted() {
    let node = FakeNode::new();
    initiator(&node, &[("10.0.0.1", 5, "sda"), ("10.0.0.2", 6, "sdb")]);
    node.multipath("dm-0", &["sda", "sdb"]);
    let volume = inline("iscsi", source(&["10.0.0.2"]));
    let learned = plugin(&node).mount_device(&volume, UNLABELLED).await.unwrap();
    assert_eq!(learned.device_path.as_deref(), Some("/dev/dm-0"));
    assert_eq!(node.take_calls("mount /dev/dm-0").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn one_path_is_enough_after_the_last_round_and_without_multipath() {
    let node = FakeNode::new();
    initiator(&node, &[("10.0.0.2", 6, "sdb")]);
    let volume = inline("iscsi", source(&["10.0.0.2"]));
    let learned = plugin(&node).mount_device(&volume, UNLABELLED).await.unwrap();
    assert!(learned.device_path.unwrap().contains("10.0.0.2"));
    let logins = node
        .take_log()
        .into_iter()
        .filter(|line| line.contains("-p 10.0.0.1:3260 -T") && line.ends_with("--login"));
    assert_eq!(logins.count(), 5);
}

#[tokio::test(start_paused = true)]
async fn no_path_is_an_uncertain_error_with_the_cause_of_the_last_portal() {
    for (served, text) in [(&[][..], "exit code 8"), (&[("10.0.0.9", 9, "sdz")][..], "exit code 8")] {
        let node = FakeNode::new();
        initiator(&node, served);
        let error = plugin(&node).mount_device(&inline("iscsi", source(&[])), UNLABELLED).await.unwrap_err();
        assert!(error.message.contains("none of the portals") && error.message.contains(text), "{error}");
        assert_eq!(error.class, FailureClass::Uncertain);
        let log = node.take_log();
        assert!(log.last().unwrap().ends_with("-o delete"), "{log:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_without_a_link_of_the_disk_fails_after_its_wait() {
    let node = FakeNode::new();
    session(&node, 5, "10.0.0.1");
    node.program("iscsiadm", |_| ended(0, "iface.transport_name = tcp\n"));
    let error = plugin(&node).mount_device(&inline("iscsi", source(&[])), UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("no link of LUN 3"), "{error}");
}

#[tokio::test]
async fn a_missing_program_and_an_unknown_interface_are_reported() {
    let node = FakeNode::new();
    node.fail("iscsiadm", FailureClass::Final);
    let volume = inline("iscsi", source(&[]));
    let error = plugin(&node).mount_device(&volume, UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("iscsiadm fails"), "{error}");
    node.mend();
    node.program("iscsiadm", |_| ended(0, "nothing\n"));
    let error = plugin(&node).mount_device(&volume, UNLABELLED).await.unwrap_err();
    assert!(error.message.contains("iface.transport_name"), "{error}");
    assert_eq!(error.owner, WaitOwner::You);
}

#[tokio::test]
async fn an_initiator_name_gets_an_interface_of_its_own() {
    let node = FakeNode::new();
    initiator(&node, &[("10.0.0.1", 5, "sda")]);
    let mut own = source(&[]);
    own["initiatorName"] = "iqn.2020-01.example:node".into();
    let volume = inline("iscsi", own);
    let plugin = plugin(&node);
    let learned = plugin.mount_device(&volume, UNLABELLED).await.unwrap();
    assert!(learned.device_mount_path.unwrap().contains("iface-10.0.0.1:3260:data/"));
    let log = node.take_log();
    assert!(log.contains(&"iscsiadm -m iface -I 10.0.0.1:3260:data -o new".to_owned()), "{log:?}");
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    let log = node.take_log();
    assert!(log.contains(&"iscsiadm -m iface -I 10.0.0.1:3260:data -o delete".to_owned()), "{log:?}");
}

#[tokio::test]
async fn a_failed_mount_is_uncertain_and_leaves_the_record() {
    let node = FakeNode::new();
    initiator(&node, &[("10.0.0.1", 5, "sda")]);
    node.fail("mount", FailureClass::Final);
    let error = plugin(&node).mount_device(&inline("iscsi", source(&[])), UNLABELLED).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(node.root().join(GLOBAL).join(FILE).exists());
}

#[tokio::test]
async fn a_pod_gets_a_bind_mount_with_its_fs_group() {
    for (read_only, options, owned) in [(false, "noatime", 1), (true, "noatime,ro", 0)] {
        let node = FakeNode::new();
        let mut volume = persistent("iscsi", source(&[]));
        (volume.read_only, volume.fs_group) = (read_only, Some(7));
        volume.mount_options = vec!["noatime".into()];
        let plugin = mounted(&node, &volume).await;
        node.take_log();
        let walks = FsGroupWalks::default();
        let set_up = plugin.set_up(&volume, set_up_request(&walks)).await.unwrap();
        let target = "pods/u1/volumes/kubernetes.io~iscsi/pv1";
        assert_eq!(set_up.host_path, node.root().join(target));
        let log = node.take_log();
        assert_eq!(log[0], format!("bind {GLOBAL} {target} {options}"));
        assert_eq!(log.iter().filter(|line| **line == format!("own {target} 7")).count(), owned);
        plugin.set_up(&volume, set_up_request(&walks)).await.unwrap();
        assert_eq!(node.take_log(), Vec::<String>::new(), "a mounted volume stays as it is");
        plugin.tear_down(&place(PLUGIN, &volume)).await.unwrap();
        assert_eq!(node.take_log(), [format!("clean {target}")]);
        plugin.tear_down(&place(PLUGIN, &volume)).await.unwrap();
    }
}

#[tokio::test]
async fn an_fs_group_that_cannot_be_applied_does_not_hold_up_the_pod() {
    let node = FakeNode::new();
    let mut volume = persistent("iscsi", source(&[]));
    volume.fs_group = Some(7);
    let plugin = mounted(&node, &volume).await;
    node.fail("own", FailureClass::Final);
    plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.unwrap();
}

#[tokio::test]
async fn a_device_mount_that_is_gone_is_mounted_again_before_a_pod_gets_it() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    node.state().mounts.clear();
    node.take_log();
    plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.unwrap();
    let log = node.take_log();
    let at = |start: &str| log.iter().position(|line| line.starts_with(start));
    assert!(at("mount /dev/disk/by-path").is_some_and(|mount| Some(mount) < at("bind")), "{log:?}");
}

#[tokio::test]
async fn a_pod_gets_nothing_while_the_device_cannot_be_mounted() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    node.state().mounts.clear();
    node.fail("mount", FailureClass::Final);
    node.take_log();
    assert!(plugin.set_up(&volume, set_up_request(&FsGroupWalks::default())).await.is_err());
    assert_eq!(node.take_calls("bind"), Vec::<String>::new());
}

#[tokio::test]
async fn an_fs_group_is_applied_again_after_a_restart_that_may_have_interrupted_it() {
    let node = FakeNode::new();
    let mut volume = persistent("iscsi", source(&[]));
    volume.fs_group = Some(7);
    let plugin = mounted(&node, &volume).await;
    let walks = FsGroupWalks::default();
    plugin.set_up(&volume, set_up_request(&walks)).await.unwrap();
    node.take_log();
    let request = SetUpRequest { is_reconstructed: true, ..set_up_request(&walks) };
    plugin.set_up(&volume, request).await.unwrap();
    assert_eq!(node.take_log(), ["own pods/u1/volumes/kubernetes.io~iscsi/pv1 7"]);
}

#[tokio::test]
async fn a_failed_bind_is_undone_unless_it_is_uncertain_or_reconstructed() {
    let node = FakeNode::new();
    let volume = persistent("iscsi", source(&[]));
    let plugin = mounted(&node, &volume).await;
    let walks = FsGroupWalks::default();
    for (class, is_reconstructed, cleans) in
        [(FailureClass::Final, false, 1), (FailureClass::Final, true, 0), (FailureClass::Uncertain, false, 0)]
    {
        node.fail("bind", class);
        let request = SetUpRequest { is_reconstructed, ..set_up_request(&walks) };
        let error = plugin.set_up(&volume, request).await.unwrap_err();
        assert_eq!(error.class, class);
        assert_eq!(node.take_calls("clean").len(), cleans, "{class:?} {is_reconstructed}");
    }
}

fn block() -> VolumeSpec {
    VolumeSpec { mode: VolumeMode::Block, ..persistent("iscsi", source(&[])) }
}

#[tokio::test]
async fn a_block_volume_is_the_device_and_is_not_mounted() {
    let node = FakeNode::new();
    let volume = block();
    let plugin = mounted(&node, &volume).await;
    assert_eq!(node.take_calls("mount"), Vec::<String>::new());
    let walks = FsGroupWalks::default();
    let set_up = plugin.set_up(&volume, set_up_request(&walks)).await.unwrap();
    assert!(set_up.host_path.starts_with("/dev/disk/by-path"), "{set_up:?}");
    assert_eq!(plugin.global_map_path("pv1").await.unwrap(), Some(node.root().join(MAPS)));
    assert_eq!(plugin.global_map_path("pv2").await.unwrap(), None);
    fs::write(node.root().join(MAPS).join("u1"), "").unwrap();
    let read = plugin.reconstruct(&found(&volume)).await.unwrap();
    assert_eq!((read.shared_name, read.has_device), (Some(NAME.into()), true));
    let error = plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap_err();
    assert!(error.message.contains("still referenced by the pods u1"), "{error}");
    fs::remove_file(node.root().join(MAPS).join("u1")).unwrap();
    plugin.tear_down(&place(PLUGIN, &volume)).await.unwrap();
    plugin.unmount_device(&device_place(NAME, &volume)).await.unwrap();
    assert!(!node.root().join(MAPS).exists());
    assert!(node.take_calls("iscsiadm").iter().any(|line| line.ends_with("--logout")));
    assert!(plugin.reconstruct(&found(&volume)).await.is_err());
}

#[tokio::test]
async fn a_target_that_hangs_holds_up_no_other_target() {
    let node = FakeNode::new();
    initiator(&node, &[("10.0.0.1", 5, "sda")]);
    let plugin = plugin(&node);
    let _hanging = plugin.locks.lock("iqn.2020-01.example:other").await;
    plugin.mount_device(&inline("iscsi", source(&[])), UNLABELLED).await.unwrap();
}
