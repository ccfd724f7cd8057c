//! The service over its socket, on the real cgroup tree.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod admission;
mod cgroup_driver;
mod desired_set;
mod resize;
mod shared;
#[path = "../support/mod.rs"]
mod support;

use std::fs;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::runtime::v1::ContainerState;

use crate::shared::{LONG, SHORT, admitted, machine, requesting, synced};
use crate::support::{Process, World, admit, desire, prepare, release, until_some};

#[tokio::test]
async fn an_admitted_pod_gets_its_cgroup_and_a_forgotten_pod_loses_it() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let mut wanted = requesting("u1", 100);
    wanted.cgroup = Some(pb::PodCgroup {
        cpu_shares: 102,
        cpu_quota_us: 20_000,
        cpu_period_us: 100_000,
        memory_limit_bytes: 64 << 20,
        ..Default::default()
    });
    sync.pod(wanted.clone()).await;
    assert_eq!(admit(&mut client, "u1", LONG).await, admitted());
    let parent = prepare(&mut client, "u1", 1, LONG).await.unwrap();
    assert_eq!(parent, format!("{}/kubepods/burstable/podu1", world.config.runtime.cgroup_root));

    let pod = "kubepods/burstable/podu1";
    if machine(&service).await.cgroup_version == "v1" {
        let unified = world.dirs(pod).into_iter().filter(|d| d.starts_with("/sys/fs/cgroup/unified")).count();
        assert_eq!(world.existing(pod).len(), support::hierarchies().len() - unified);
        assert_eq!(world.value(pod, "cpu.shares"), "102");
        assert_eq!(world.value(pod, "cpu.cfs_quota_us"), "20000");
        assert_eq!(world.value(pod, "memory.limit_in_bytes"), (64 << 20).to_string());
        assert!(!world.value(pod, "cpuset.cpus").is_empty());
        assert_eq!(world.value("kubepods/besteffort", "cpu.shares"), "2");
    } else {
        assert_eq!(world.value(pod, "cpu.weight"), "4");
        assert_eq!(world.value(pod, "cpu.max"), "20000 100000");
        assert_eq!(world.value(pod, "memory.max"), (64 << 20).to_string());
    }

    wanted.want = Want::Forget.into();
    wanted.revision = 2;
    sync.pod(wanted).await;
    release(&mut client, "u1", LONG).await.unwrap();
    assert_eq!(world.existing(pod), Vec::<std::path::PathBuf>::new());
}

#[tokio::test]
async fn changed_resources_are_written_to_the_pod_cgroup() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let mut wanted = requesting("u1", 100);
    wanted.cgroup =
        Some(pb::PodCgroup { cpu_shares: 102, memory_limit_bytes: 64 << 20, ..Default::default() });
    sync.pod(wanted.clone()).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    wanted.revision = 2;
    wanted.cgroup = Some(pb::PodCgroup { cpu_shares: 512, ..Default::default() });
    sync.pod(wanted).await;
    prepare(&mut client, "u1", 2, LONG).await.unwrap();
    let pod = "kubepods/burstable/podu1";
    if machine(&service).await.cgroup_version == "v1" {
        assert_eq!(world.value(pod, "cpu.shares"), "512");
        assert!(world.value(pod, "memory.limit_in_bytes").len() > 15, "no limit");
    } else {
        assert_eq!(world.value(pod, "cpu.weight"), "20");
        assert_eq!(world.value(pod, "memory.max"), "max");
    }
}

#[tokio::test]
async fn leftover_processes_are_killed_before_the_pod_cgroup_is_removed() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "BestEffort")).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    let pod = "kubepods/besteffort/podu1";
    let mut process = Process::start(&world.existing(pod));
    sync.pod(desire("u1", 2, Want::Forget, "BestEffort")).await;
    release(&mut client, "u1", LONG).await.unwrap();
    assert!(world.existing(pod).is_empty());
    assert_eq!(process.killed_by(), Some(9));
}

#[tokio::test]
async fn a_pod_cgroup_is_not_removed_while_a_container_runs() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    runtime.set_container("u1", ContainerState::Running);
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "Guaranteed")).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    let mut process = Process::start(&world.existing("kubepods/podu1"));
    sync.pod(desire("u1", 2, Want::Forget, "Guaranteed")).await;
    runtime.api.get_pod.requests().until_len(3).await;
    let status = release(&mut client, "u1", SHORT).await.unwrap_err();
    assert!(status.message().contains("container main"), "{}", status.message());
    assert_eq!(process.killed_by(), None);
    runtime.set_container("u1", ContainerState::Exited);
    release(&mut client, "u1", LONG).await.unwrap();
    assert_eq!(process.killed_by(), Some(9));
}

#[tokio::test]
async fn pod_cgroups_stay_and_a_condition_is_set_while_runtime_shim_is_down() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "Guaranteed")).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    sync.pod(desire("u1", 2, Want::Forget, "Guaranteed")).await;
    assert!(service.condition("runtime-shim", false).await.contains("runtime-shim"));
    assert!(!world.existing("kubepods/podu1").is_empty());
    let _runtime = world.start_runtime().await;
    release(&mut client, "u1", LONG).await.unwrap();
    service.condition("runtime-shim", true).await;
}

#[tokio::test]
async fn a_pod_cgroup_outlives_stop_and_unmount_but_its_resources_are_freed_after_stop() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let whole = machine(&service).await.allocatable["cpu"];
    let mut first = requesting("u1", whole);
    sync.pod(first.clone()).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    sync.pod(requesting("u2", 1)).await;
    for (revision, want, fits) in [(2, Want::Stop, false), (3, Want::Unmount, true)] {
        first.revision = revision;
        first.want = want.into();
        sync.pod(first.clone()).await;
        // The stream is handled in order, so a later pod shows that this one was received.
        sync.pod(desire("mark", revision, Want::Run, "BestEffort")).await;
        prepare(&mut client, "mark", revision, LONG).await.unwrap();
        assert_eq!(admit(&mut client, "u2", LONG).await == admitted(), fits, "{want:?}");
        assert!(!world.existing("kubepods/burstable/podu1").is_empty());
    }
    let status = release(&mut client, "u1", SHORT).await.unwrap_err();
    assert!(status.message().contains("not to be forgotten yet"), "{}", status.message());
}

#[tokio::test]
async fn the_burstable_cgroup_gets_the_cpu_shares_of_its_pods_requests() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let (file, values) = if machine(&service).await.cgroup_version == "v1" {
        ("cpu.shares", ["307", "204"])
    } else {
        ("cpu.weight", ["12", "8"])
    };
    let becomes = async |value: &str| {
        until_some(value, || {
            let is = world.value("kubepods/burstable", file) == value;
            std::future::ready(is.then_some(()))
        })
        .await;
    };
    for (uid, milli) in [("u1", 100), ("u2", 200)] {
        sync.pod(requesting(uid, milli)).await;
        prepare(&mut client, uid, 1, LONG).await.unwrap();
    }
    becomes(values[0]).await;
    let mut first = requesting("u1", 100);
    first.want = Want::Unmount.into();
    sync.pod(first).await;
    becomes(values[1]).await;
}

#[tokio::test]
async fn watch_machine_sends_capacity_and_identity_at_once() {
    let mut world = World::new();
    world.config.resources.max_pods = 42;
    world.config.resources.reserved = [("memory".to_owned(), "100Mi".to_owned())].into();
    let service = world.start().await;
    let machine = machine(&service).await;
    assert_eq!(machine.capacity["pods"], 42);
    assert!(machine.capacity["cpu"] >= 1000 && machine.capacity["ephemeral-storage"] > 0);
    let huge: i64 =
        machine.capacity.iter().filter(|(k, _)| k.starts_with("hugepages-")).map(|(_, v)| v).sum();
    assert_eq!(machine.capacity["memory"] - machine.allocatable["memory"], (100 << 20) + huge);
    assert_eq!(machine.boot_id, fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim());
    assert_eq!(machine.cgroup_driver, "cgroupfs");
    assert!(["v1", "v2"].contains(&machine.cgroup_version.as_str()));
    assert!(!machine.kernel_version.is_empty() && !machine.os_image.is_empty());
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    assert_eq!(machine.swap_bytes > 0, swaps.lines().count() > 1, "{} of {swaps}", machine.swap_bytes);
}
