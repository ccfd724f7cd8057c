//! The service over its socket, on the real cgroup tree.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;
use keelson_proto::keelson::runtime::v1::ContainerState;
use keelson_service_kit::status::reason;
use support::{Process, Service, Sync, World, admit, desire, eventually, prepare, release, within};
use tonic::Code;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_secs(2);

fn admitted() -> Verdict {
    Verdict::Admitted(pb::Admitted {})
}

fn requesting(uid: &str, milli: i64) -> pb::PodDesire {
    let mut wanted = desire(uid, 1, Want::Run, "Burstable");
    wanted.requests.insert("cpu".into(), milli);
    wanted
}

async fn machine(service: &Service) -> pb::Machine {
    let mut stream = service.client().watch_machine(pb::WatchMachineRequest {}).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap()
}

/// A service with an open stream whose set is complete.
async fn synced(service: &Service) -> Sync {
    let mut sync = Sync::open(&mut service.client()).await;
    sync.complete(1, true).await;
    sync
}

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
    runtime.container("u1", ContainerState::Running);
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "Guaranteed")).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    let mut process = Process::start(&world.existing("kubepods/podu1"));
    sync.pod(desire("u1", 2, Want::Forget, "Guaranteed")).await;
    runtime.read_at_least(3).await;
    let status = release(&mut client, "u1", SHORT).await.unwrap_err();
    assert!(status.message().contains("container main"), "{}", status.message());
    assert_eq!(process.killed_by(), None);
    runtime.container("u1", ContainerState::Exited);
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
async fn admission_rejects_a_pod_that_does_not_fit_in_the_kubelets_words() {
    let mut world = World::new();
    world.config.resources.max_pods = 3;
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let whole = machine(&service).await.allocatable["cpu"];
    sync.pod(requesting("u1", whole - 100)).await;
    assert_eq!(admit(&mut client, "u1", LONG).await, admitted());
    assert_eq!(
        admit(&mut client, "u1", LONG).await,
        admitted(),
        "the answer to a second request is the same"
    );
    sync.pod(requesting("u2", 101)).await;
    let Verdict::Rejected(rejected) = admit(&mut client, "u2", LONG).await else { panic!("it fits") };
    assert_eq!(rejected.reason, "OutOfcpu");
    assert_eq!(
        rejected.message,
        format!(
            "Node didn't have enough resource: cpu, requested: 101, used: {}, capacity: {whole}",
            whole - 100
        )
    );
    let status = prepare(&mut client, "u2", 1, LONG).await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("NOT_ADMITTED"));
    assert!(world.existing("kubepods/burstable/podu2").is_empty());

    let mut adopted = requesting("u3", whole);
    adopted.adopted = true;
    sync.pod(adopted).await;
    assert_eq!(admit(&mut client, "u3", LONG).await, admitted());
    for uid in ["u4", "u5"] {
        sync.pod(desire(uid, 1, Want::Run, "BestEffort")).await;
    }
    assert_eq!(admit(&mut client, "u4", LONG).await, admitted());
    let Verdict::Rejected(rejected) = admit(&mut client, "u5", LONG).await else { panic!("it fits") };
    assert_eq!(rejected.reason, "OutOfpods");
}

#[tokio::test]
async fn a_deferred_pod_yields_its_resources_and_its_turn() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let whole = machine(&service).await.allocatable["cpu"];
    let created = |uid: &str, at: i64| pb::PodDesire { created_unix_nanos: at, ..requesting(uid, whole) };
    let defer = async |uid: &str, deadline| {
        let request = within(pb::DeferPodRequest { uid: uid.into(), revision: 1 }, deadline);
        service.client().defer_pod(request).await
    };
    for (uid, at) in [("first", 1), ("second", 2)] {
        sync.pod(created(uid, at)).await;
    }
    let Verdict::NotYet(not_yet) = admit(&mut client, "second", SHORT).await else {
        panic!("the older pod comes first")
    };
    assert_eq!(not_yet.reason, "OlderPodsFirst");
    // Deferred before a decision: a pod that waits for its turn is decided on.
    let mut other = service.client();
    let waiting = tokio::spawn(async move { admit(&mut other, "second", LONG).await });
    defer("first", LONG).await.unwrap();
    assert_eq!(waiting.await.unwrap(), admitted());
    assert!(
        matches!(admit(&mut client, "first", LONG).await, Verdict::Rejected(rejected) if rejected.passing)
    );

    // Deferred after its admission.
    defer("second", LONG).await.unwrap();
    assert_eq!(admit(&mut client, "first", LONG).await, admitted());
    assert!(
        matches!(admit(&mut client, "second", LONG).await, Verdict::Rejected(rejected) if rejected.passing)
    );

    // A running pod keeps its resources.
    let running = pb::PodDesire { adopted: true, ..created("running", 3) };
    sync.pod(running).await;
    assert_eq!(admit(&mut client, "running", LONG).await, admitted());
    defer("running", LONG).await.unwrap();
    defer("first", LONG).await.unwrap();
    assert!(matches!(admit(&mut client, "second", LONG).await, Verdict::Rejected(_)));
    assert_eq!(defer("nobody", SHORT).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(defer("../x", SHORT).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn admission_waits_for_the_complete_set_except_for_adopted_pods() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, "BestEffort")).await;
    let Verdict::NotYet(not_yet) = admit(&mut client, "u1", SHORT).await else { panic!("decided too early") };
    assert_eq!(not_yet.reason, "SetNotComplete");
    let mut adopted = desire("u2", 1, Want::Run, "BestEffort");
    adopted.adopted = true;
    sync.pod(adopted).await;
    prepare(&mut client, "u2", 1, LONG).await.unwrap();
    let mut other = service.client();
    let waiting = tokio::spawn(async move { admit(&mut other, "u1", LONG).await });
    sync.complete(1, false).await;
    assert_eq!(waiting.await.unwrap(), admitted());
}

#[tokio::test]
async fn preparing_an_unknown_pod_is_not_found_and_a_stopping_pod_is_refused() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = synced(&service).await;
    let status = prepare(&mut client, "nobody", 1, SHORT).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_deref()), (Code::NotFound, Some("POD_NOT_NAMED")));
    release(&mut client, "nobody", LONG).await.unwrap();
    sync.pod(desire("u1", 1, Want::Stop, "BestEffort")).await;
    let status = prepare(&mut client, "u1", 1, LONG).await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("NOT_WANTED"));
    let request = within(pb::AdmitPodRequest { uid: "../x".into(), revision: 1 }, LONG);
    assert_eq!(client.admit_pod(request).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_restarted_service_restores_its_pods_and_their_reservations() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    let whole = machine(&service).await.allocatable["cpu"];
    {
        let sync = synced(&service).await;
        sync.pod(requesting("u1", whole)).await;
        prepare(&mut service.client(), "u1", 1, LONG).await.unwrap();
    }
    let pod = "kubepods/burstable/podu1";
    let mut process = Process::start(&world.existing(pod));
    let before = world.existing(pod);
    service.stop().await;

    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    // A slow source: the running pod is not named yet, so its requests are unknown.
    sync.pod(requesting("u2", 1)).await;
    sync.complete(1, false).await;
    let Verdict::NotYet(not_yet) = admit(&mut client, "u2", SHORT).await else { panic!("decided too early") };
    assert!(not_yet.message.contains("no source has named yet: 1"), "{}", not_yet.message);
    sync.pod(requesting("u1", whole)).await;
    sync.complete(2, true).await;
    let Verdict::Rejected(rejected) = admit(&mut client, "u2", LONG).await else { panic!("it fits") };
    assert_eq!(rejected.reason, "OutOfcpu");
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    assert_eq!(world.existing(pod), before);
    assert_eq!(process.killed_by(), None);
}

#[tokio::test]
async fn only_a_complete_set_with_ready_sources_removes_unlisted_pods() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    {
        let sync = synced(&service).await;
        for uid in ["gone", "kept"] {
            sync.pod(desire(uid, 1, Want::Run, "BestEffort")).await;
            prepare(&mut service.client(), uid, 1, LONG).await.unwrap();
        }
    }
    service.stop().await;

    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("kept", 1, Want::Run, "BestEffort")).await;
    sync.complete(1, false).await;
    prepare(&mut client, "kept", 1, LONG).await.unwrap();
    assert!(!world.existing("kubepods/besteffort/podgone").is_empty());
    sync.complete(2, true).await;
    release(&mut client, "gone", LONG).await.unwrap();
    assert!(world.existing("kubepods/besteffort/podgone").is_empty());
    assert!(!world.existing("kubepods/besteffort/podkept").is_empty());
    sync.send(pb::sync_request::Item::DroppedUid("kept".into())).await;
    release(&mut client, "kept", LONG).await.unwrap();
    assert!(world.existing("kubepods/besteffort/podkept").is_empty());
}

#[tokio::test]
async fn pod_cgroups_of_another_agent_are_left_alone_until_desired() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    {
        let sync = synced(&service).await;
        sync.pod(requesting("gone", 1)).await;
        prepare(&mut service.client(), "gone", 1, LONG).await.unwrap();
    }
    service.stop().await;
    // A kubelet next to this agent, with the same cgroup root, does not mark its cgroups.
    let pods = ["kubepods/burstable/podneighbours", "kubepods/burstable/podtaken"];
    for dir in
        pods.iter().flat_map(|pod| world.dirs(pod)).filter(|dir| dir.parent().is_some_and(Path::exists))
    {
        fs::create_dir(dir).unwrap();
    }
    // A v1 cpuset accepts no process before it has CPUs.
    let takes = |dir: &PathBuf| !dir.to_string_lossy().contains("cpuset");
    let mut neighbours =
        Process::start(&world.existing(pods[0]).into_iter().filter(takes).collect::<Vec<_>>());

    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(requesting("taken", 1)).await;
    sync.complete(1, true).await;
    release(&mut client, "gone", LONG).await.unwrap();
    assert!(world.existing("kubepods/burstable/podgone").is_empty());
    assert!(neighbours.killed_by().is_none() && !world.existing(pods[0]).is_empty());
    // The cgroup of a pod that this agent takes over becomes its own.
    prepare(&mut client, "taken", 1, LONG).await.unwrap();
    let forgotten = pb::PodDesire { revision: 2, want: Want::Forget.into(), ..requesting("taken", 1) };
    sync.pod(forgotten).await;
    release(&mut client, "taken", LONG).await.unwrap();
    assert!(world.existing(pods[1]).is_empty());
    assert!(neighbours.killed_by().is_none());
}

#[tokio::test]
async fn a_new_sync_stream_takes_over_and_a_closed_one_keeps_its_pods() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    let service = world.start().await;
    let mut client = service.client();
    let mut first = synced(&service).await;
    first.pod(desire("u1", 1, Want::Run, "BestEffort")).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    let mut second = Sync::open(&mut client).await;
    let status = first.acks.message().await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("SYNC_TAKEN_OVER"));
    second.complete(1, false).await;
    assert!(!world.existing("kubepods/besteffort/podu1").is_empty());
    assert_eq!(runtime.reads(), 0);
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
        eventually(value, || {
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

#[tokio::test]
async fn the_first_start_waits_for_the_runtimes_cgroup_driver_and_later_starts_restore_it() {
    let mut world = World::new();
    world.store_driver(None);
    // The configured driver is invalid: every cgroup is created with the runtime's driver.
    world.config.runtime.cgroup_driver = "slices".into();
    let service = world.start().await;
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "Guaranteed")).await;
    let mut client = service.client();
    let Verdict::NotYet(not_yet) = admit(&mut client, "u1", SHORT).await else { panic!("it was decided on") };
    assert!(not_yet.message.contains("has not reported its cgroup driver yet"), "{not_yet:?}");
    assert_eq!(machine(&service).await.cgroup_driver, "");
    assert!(world.existing("").is_empty());
    let waiting = tokio::spawn(async move { admit(&mut client, "u1", LONG).await });
    let runtime = world.start_runtime().await;
    runtime.drives_cgroups(Some("cgroupfs"));
    waiting.await.unwrap();
    let mut client = service.client();
    assert_eq!(
        prepare(&mut client, "u1", 1, LONG).await.unwrap(),
        format!("{}/kubepods/podu1", world.config.runtime.cgroup_root)
    );
    assert_eq!(machine(&service).await.cgroup_driver, "cgroupfs");
    drop(sync);
    service.stop().await;

    // The next run finds its pod while the runtime is down.
    runtime.drives_cgroups(None);
    let service = world.start().await;
    assert_eq!(machine(&service).await.cgroup_driver, "cgroupfs");
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "Guaranteed")).await;
    let mut client = service.client();
    assert_eq!(admit(&mut client, "u1", LONG).await, admitted());

    // The runtime comes back with another configuration: its driver is used, and existing cgroups stay.
    runtime.drives_cgroups(Some(""));
    service.condition("cgroups", false).await;
    let no_driver = async || (machine(&service).await.cgroup_driver == *"").then_some(());
    eventually("no driver is used", no_driver).await;
    assert!(!world.existing("kubepods/podu1").is_empty());
    runtime.drives_cgroups(Some("cgroupfs"));
    service.condition("cgroups", true).await;
    prepare(&mut client, "u1", 1, LONG).await.unwrap();
    sync.pod(desire("u1", 2, Want::Forget, "Guaranteed")).await;
    release(&mut client, "u1", LONG).await.unwrap();
    assert!(world.existing("kubepods/podu1").is_empty());
}

#[tokio::test]
async fn the_configured_cgroup_driver_is_used_when_the_runtime_does_not_answer() {
    let world = World::new();
    world.store_driver(None);
    let service = world.start().await;
    assert_eq!(machine(&service).await.cgroup_driver, "");
    let configured = async || (machine(&service).await.cgroup_driver == "cgroupfs").then_some(());
    eventually("the configured driver", configured).await;
    assert!(!world.existing("kubepods").is_empty());
}

#[tokio::test]
async fn an_unknown_cgroup_driver_is_refused_with_a_remedy() {
    let mut world = World::new();
    world.config.runtime.cgroup_driver = "slices".into();
    let service = world.start().await;
    let mut client = service.client();
    let text = service.condition("cgroups", false).await;
    assert!(text.contains("\"slices\"") && text.contains("cgroupfs or systemd"), "{text}");
    let sync = synced(&service).await;
    sync.pod(desire("u1", 1, Want::Run, "BestEffort")).await;
    let Verdict::NotYet(not_yet) = admit(&mut client, "u1", LONG).await else { panic!("it was decided on") };
    assert_eq!(not_yet.reason, "CgroupDriverNotSupported");
    let status = prepare(&mut client, "u1", 1, LONG).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    sync.pod(desire("u1", 2, Want::Forget, "BestEffort")).await;
    release(&mut client, "u1", LONG).await.unwrap();
    assert!(world.existing("").is_empty());
}

#[tokio::test]
async fn an_invalid_cgroup_root_is_a_condition_and_does_not_stop_the_service() {
    let mut world = World::new();
    world.config.runtime.cgroup_root = "/a/../b".into();
    let service = world.start().await;
    let text = service.condition("cgroups", false).await;
    assert!(text.contains("/a/../b"), "{text}");
    world.config.runtime.cgroup_root = "/keelson-rm-none".into();
}
