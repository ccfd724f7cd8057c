//! Devices of pods that are gone, after the service was killed in the middle of an operation: the real program mounts a loop
//! device, with scripts in place of iscsiadm, blockdev and a flexVolume driver.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod node;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use keelson_proto::keelson::common::v1::Want;
use node::{Kind, Node};
use support::{Sync, desire, mount, until_some};

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
