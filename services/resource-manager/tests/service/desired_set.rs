//! What a complete set of desired pods, a restart and a later stream do to pods and cgroups.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;
use keelson_service_kit::status::reason;

use crate::shared::{LONG, SHORT, machine, requesting, synced};
use crate::support::{Process, Sync, World, admit, desire, prepare, release};

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
    assert!(runtime.api.get_pod.requests().is_empty());
}
