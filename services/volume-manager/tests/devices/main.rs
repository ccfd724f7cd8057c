//! Devices of pods that are gone, after the service was killed in the middle of an operation: the real program mounts a loop
//! device, with scripts in place of iscsiadm, blockdev and a flexVolume driver.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod node;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use keelson_config::ServiceName;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_client::EventsClient;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::Peer;
use keelson_testkit::fakes::FakeRuntimeShim;
use node::{Kind, Node};
use serde_json::{Value, json};
use support::api::FakeApi;
use support::{Sync, desire, mount, until_some, volume};

/// Brings a pod with the volume to the moment in which `command` hangs, kills the service, and starts it again without the
/// pod. Returns when nothing is left.
async fn kill_in(kind: Kind, command: &str, moment: &str) {
    let mut node = Node::new(kind);
    let _runtime = node.world.start_runtime().await;
    node.hang(command, moment);
    node.start().await;
    let mut client = node.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![node.volume()])).await;
    sync.complete(1, true).await;
    if ["umount", "unmountdevice", "detach", "blockdev", "iscsiadm"].contains(&command) {
        mount(&mut client, "u1", 1).await.1.unwrap();
        sync.pod(desire("u1", 2, Want::Unmount, vec![node.volume()])).await;
    }
    node.until_hanging().await;
    node.kill();
    drop(sync);
    node.unhang();
    node.start().await;
    let mut client = node.client();
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    node.until_released(&format!("{command} {moment}")).await;
}

#[tokio::test]
async fn a_flex_volume_is_detached_after_sigkill_in_any_command_although_its_pod_is_gone() {
    for (command, moment) in [
        ("attach", "after"),
        ("mountdevice", "before"),
        ("mountdevice", "after"),
        ("unmountdevice", "before"),
        ("unmountdevice", "after"),
        ("detach", "before"),
        ("detach", "after"),
    ] {
        kill_in(Kind::Flex, command, moment).await;
    }
}

#[tokio::test]
async fn an_fc_disk_is_unmounted_and_removed_after_sigkill_although_its_pod_is_gone() {
    for (command, moment) in [("umount", "before"), ("umount", "after"), ("blockdev", "before")] {
        kill_in(Kind::Fc, command, moment).await;
    }
}

#[tokio::test]
async fn an_iscsi_target_is_logged_out_after_sigkill_although_its_pod_is_gone() {
    for (command, moment) in [("umount", "after"), ("iscsiadm", "before"), ("iscsiadm", "after")] {
        kill_in(Kind::Iscsi, command, moment).await;
    }
}

/// Brings a pod with the volume up, and kills the service. Nothing is mounted any more when it starts again.
async fn reboot(kind: Kind) -> (Node, FakeRuntimeShim) {
    reboot_with(kind, |_| {}).await
}

/// As [`reboot`], with what else the reboot changes.
async fn reboot_with(kind: Kind, change: impl FnOnce(&mut Node)) -> (Node, FakeRuntimeShim) {
    let mut node = Node::new(kind);
    let runtime = node.world.start_runtime().await;
    node.start().await;
    let mut client = node.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![node.volume()])).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    node.kill();
    node.unmount_all();
    change(&mut node);
    node.start().await;
    (node, runtime)
}

#[tokio::test]
async fn after_a_reboot_a_disk_is_mounted_again_for_its_pod_and_then_released() {
    for kind in [Kind::Flex, Kind::Fc, Kind::Iscsi] {
        let (node, _runtime) = reboot(kind).await;
        let mut client = node.client();
        let mut sync = Sync::open(&mut client).await;
        sync.pod(desire("u1", 1, Want::Run, vec![node.volume()])).await;
        sync.complete(1, true).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
        assert!(node.is_mounted(), "{kind:?}");
        sync.pod(desire("u1", 2, Want::Unmount, vec![node.volume()])).await;
        node.until_released("unmount after a reboot").await;
    }
}

#[tokio::test]
async fn after_a_reboot_a_disk_of_a_gone_pod_is_released() {
    for kind in [Kind::Flex, Kind::Fc, Kind::Iscsi] {
        let (node, _runtime) = reboot(kind).await;
        let mut client = node.client();
        let mut sync = Sync::open(&mut client).await;
        sync.complete(1, true).await;
        node.until_released("gone after a reboot").await;
        let pod = node.world.pod("u1");
        until_some("the pod", || std::future::ready((!pod.exists()).then_some(()))).await;
    }
}

#[tokio::test]
async fn after_a_reboot_a_disk_with_another_device_name_is_mounted_again_and_released() {
    for kind in [Kind::Fc, Kind::Iscsi] {
        let (node, _runtime) = reboot_with(kind, Node::rename_device).await;
        let mut client = node.client();
        let mut sync = Sync::open(&mut client).await;
        sync.pod(desire("u1", 1, Want::Run, vec![node.volume()])).await;
        sync.complete(1, true).await;
        let ready = mount(&mut client, "u1", 1).await.1.unwrap();
        let number = fs::metadata(node.device.path()).unwrap().rdev();
        assert_eq!(fs::metadata(&ready.volumes[0].host_path).unwrap().dev(), number, "{kind:?}");
        sync.pod(desire("u1", 2, Want::Unmount, vec![node.volume()])).await;
        node.until_released("another name after a reboot").await;
    }
}

#[tokio::test]
async fn after_a_reboot_without_the_disk_nothing_of_a_gone_pod_is_left() {
    for kind in [Kind::Fc, Kind::Iscsi] {
        let (node, _runtime) = reboot_with(kind, Node::lose_disk).await;
        let mut client = node.client();
        let mut sync = Sync::open(&mut client).await;
        sync.complete(1, true).await;
        node.until_nothing_is_left("without the disk").await;
        let pod = node.world.pod("u1");
        until_some("the pod", || std::future::ready((!pod.exists()).then_some(()))).await;
    }
}

#[tokio::test]
async fn after_a_reboot_a_pod_waits_for_its_disk_and_gets_it_when_the_node_sees_it() {
    let (mut node, _runtime) = reboot_with(Kind::Iscsi, Node::lose_disk).await;
    let mut client = node.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![node.volume()])).await;
    sync.complete(1, true).await;
    node.until_log("has a path to LUN 1").await;
    assert!(!node.is_mounted());
    node.find_disk();
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert!(node.is_mounted());
    sync.pod(desire("u1", 2, Want::Unmount, vec![node.volume()])).await;
    node.until_released("seen again").await;
}

#[tokio::test]
async fn a_disk_that_a_kubelet_has_mounted_stays_for_its_running_pod_and_is_then_released() {
    for kind in [Kind::Fc, Kind::Iscsi] {
        let mut node = Node::new(kind);
        let _runtime = node.world.start_runtime().await;
        let own = node.mount_as_kubelet();
        fs::write(own.join("file"), "kubelet").unwrap();
        let mounts = support::mounts_below(&node.world.config.paths.root_dir);
        node.start().await;
        let mut client = node.client();
        let mut sync = Sync::open(&mut client).await;
        sync.pod(desire("u1", 1, Want::Run, vec![node.volume()])).await;
        sync.complete(1, true).await;
        let ready = mount(&mut client, "u1", 1).await.1.unwrap();
        assert_eq!(Path::new(&ready.volumes[0].host_path), own);
        assert_eq!(fs::read_to_string(own.join("file")).unwrap(), "kubelet");
        assert_eq!(support::mounts_below(&node.world.config.paths.root_dir), mounts, "{kind:?}");
        assert_eq!(node.calls("umount"), 0, "{kind:?}");
        sync.pod(desire("u1", 2, Want::Unmount, vec![node.volume()])).await;
        node.until_released("taken over from a kubelet").await;
    }
}

#[tokio::test]
async fn a_block_map_of_a_kubelet_stays_for_its_running_pod_and_is_removed_for_a_gone_one() {
    for (kind, is_wanted) in [(Kind::Fc, true), (Kind::Fc, false), (Kind::Iscsi, true), (Kind::Iscsi, false)]
    {
        let mut node = Node::new(kind);
        let api = FakeApi::default();
        let _servers = (node.world.start_runtime().await, api.serve(&node.world).await);
        let (maps, link) = node.map_as_kubelet();
        add_block_volume(&api, "disk", node.source());
        node.start().await;
        let mut client = node.client();
        let mut sync = Sync::open(&mut client).await;
        let claim = pb::ClaimVolume { claim_name: "disk".into(), ephemeral: false, read_only: false };
        let disk = pb::Volume { device: true, ..volume("disk", pb::volume::Source::Claim(claim)) };
        if is_wanted {
            sync.pod(desire("u1", 1, Want::Run, vec![disk.clone()])).await;
        }
        sync.complete(1, true).await;
        if is_wanted {
            let ready = mount(&mut client, "u1", 1).await.1.unwrap();
            assert_eq!(Path::new(&ready.volumes[0].host_path), link, "{kind:?}");
            assert_eq!(fs::read_link(&link).unwrap(), Path::new(node.device.path()), "{kind:?}");
            assert_eq!(support::mounts_below(&maps), [maps.join("u1")], "{kind:?}");
            sync.pod(desire("u1", 2, Want::Unmount, vec![disk])).await;
        }
        node.until_nothing_is_left("block map of a kubelet").await;
        until_some("the link", || std::future::ready((!link.is_symlink()).then_some(()))).await;
    }
}

#[tokio::test]
async fn a_disk_that_a_kubelet_has_mounted_is_released_by_what_is_on_disk() {
    for kind in [Kind::Fc, Kind::Iscsi] {
        let mut node = Node::new(kind);
        let _runtime = node.world.start_runtime().await;
        node.mount_as_kubelet();
        node.start().await;
        let mut client = node.client();
        let mut sync = Sync::open(&mut client).await;
        sync.complete(1, true).await;
        node.until_released("mounted by a kubelet").await;
        let pod = node.world.pod("u1");
        until_some("the pod", || std::future::ready((!pod.exists()).then_some(()))).await;
    }
}

/// A mount of a person, and one in a mount namespace that the service does not see.
#[tokio::test]
async fn a_disk_that_is_mounted_elsewhere_stays_until_it_is_not() {
    let mut node = Node::new(Kind::Fc);
    let _runtime = node.world.start_runtime().await;
    node.start().await;
    let mut client = node.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![node.volume()])).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let elsewhere = node.folder("elsewhere");
    let device = node.device.path().to_owned();
    assert!(Command::new("mount").arg(&device).arg(&elsewhere).status().unwrap().success());
    let mut holder = Command::new("unshare");
    holder.args(["-m", "--propagation", "private", "sh", "-c", "echo ready; exec sleep 600"]);
    let mut holder = node::Reaped(holder.stdout(Stdio::piped()).spawn().unwrap());
    holder.until_ready();
    sync.pod(desire("u1", 2, Want::Unmount, vec![node.volume()])).await;
    node.until_log("is still mounted on").await;
    assert!(node.is_mounted(), "a mount elsewhere");
    assert!(Command::new("umount").arg(&elsewhere).status().unwrap().success());
    node.until_log("is in use when it was no longer expected to be in use").await;
    assert!(!node.is_mounted());
    assert_eq!(node.calls("blockdev"), 0, "the other namespace has it still");
    drop(holder);
    node.until_released("elsewhere").await;
    until_some("blockdev", || std::future::ready((node.calls("blockdev") == 1).then_some(()))).await;
    assert!(Path::new(&device).exists() && fs::read_dir(elsewhere).unwrap().next().is_none());
}

/// Creates a bound claim with a PersistentVolume of the mode `Block`, with this field and value as its source.
fn add_block_volume(api: &FakeApi, name: &str, (field, source): (&str, Value)) {
    let volume = json!({
        "metadata": {"name": name, "uid": "volume-uid"},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": "Block",
            "claimRef": {"namespace": "default", "name": name, "uid": "claim-uid"}, field: source,
        },
    });
    let claim = json!({
        "metadata": {"name": name, "namespace": "default", "uid": "claim-uid"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "volumeName": name},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
    });
    api.live("PersistentVolume", name, volume.to_string());
    api.live("PersistentVolumeClaim", name, claim.to_string());
}

#[tokio::test]
async fn a_mapped_block_volume_is_two_events_with_its_global_and_its_pod_path() {
    let mut node = Node::new(Kind::Fc);
    let api = FakeApi::default();
    let _servers = (node.world.start_runtime().await, api.serve(&node.world).await);
    add_block_volume(&api, "disk", ("local", json!({"path": node.device.path()})));
    node.start().await;
    let mut client = node.client();
    let mut sync = Sync::open(&mut client).await;
    let claim = pb::ClaimVolume { claim_name: "disk".into(), ephemeral: false, read_only: false };
    let disk = pb::Volume { device: true, ..volume("disk", pb::volume::Source::Claim(claim)) };
    sync.pod(desire("u1", 1, Want::Run, vec![disk.clone()])).await;
    sync.complete(1, true).await;
    let ready = mount(&mut client, "u1", 1).await.1.unwrap();
    let root = node.world.config.paths.root_dir.display().to_string();
    let links = format!("{root}/pods/u1/volumeDevices/kubernetes.io~local-volume");
    assert_eq!(ready.volumes[0].host_path, format!("{links}/disk"));

    let channel = Peer::service(&node.world.config.paths.run_dir, ServiceName::VolumeManager).channel();
    let listed = EventsClient::new(channel).list_events(ListEventsRequest::default()).await.unwrap();
    let events = listed.into_inner().events;
    let shown: Vec<_> =
        events.iter().map(|e| (e.reason.as_str(), e.uid.as_str(), e.message.as_str())).collect();
    let start = "MapVolume.MapPodDevice succeeded for volume \"disk\"";
    let maps = format!("{root}/plugins/kubernetes.io~local-volume/volumeDevices/disk");
    let global = format!("{start} globalMapPath \"{maps}\"");
    let own = format!("{start} volumeMapPath \"{links}\"");
    let expected = [("SuccessfulMountVolume", "u1", &*global), ("SuccessfulMountVolume", "u1", &*own)];
    assert_eq!(shown, expected);

    sync.pod(desire("u1", 2, Want::Unmount, vec![disk])).await;
    support::unmount(&mut client, "u1", support::LONG).await.unwrap();
    until_some("the maps", || std::future::ready((!Path::new(&maps).exists()).then_some(()))).await;
}
