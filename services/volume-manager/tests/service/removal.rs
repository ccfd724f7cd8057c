//! When volumes are unmounted and removed, and when they stay.

use std::fs;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1::ContainerState;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::reason;

use crate::support::{LONG, Sync, World, desire, empty_dir, mount, mounts_below, unmount, until_some};

#[tokio::test]
async fn nothing_is_unmounted_while_a_container_runs() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    runtime.set_container("u1", ContainerState::Running);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    sync.pod(desire("u1", 2, Want::Unmount, vec![empty_dir("data", "", 0)])).await;
    let mut other = service.client();
    let waiting = tokio::spawn(async move { unmount(&mut other, "u1", LONG).await });
    runtime.api.get_pod.requests().until_len(3).await;
    assert!(world.empty_dir("u1", "data").exists());
    let status = unmount(&mut client, "u1", Duration::from_secs(2)).await.unwrap_err();
    assert!(status.message().contains("container main"), "{}", status.message());
    runtime.set_container("u1", ContainerState::Exited);
    waiting.await.unwrap().unwrap();
    assert!(!world.empty_dir("u1", "data").exists());
}

#[tokio::test]
async fn volumes_stay_mounted_and_a_condition_is_set_while_runtime_shim_is_down() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let volumes = vec![empty_dir("data", "", 0)];
    sync.pod(desire("u1", 1, Want::Run, volumes.clone())).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    sync.pod(desire("u1", 2, Want::Unmount, volumes)).await;
    let text = service.condition("runtime-shim", false).await;
    assert!(text.contains("runtime-shim"), "{text}");
    assert!(world.empty_dir("u1", "data").exists());
    let _runtime = world.start_runtime().await;
    unmount(&mut client, "u1", LONG).await.unwrap();
    assert!(!world.empty_dir("u1", "data").exists());
    service.condition("runtime-shim", true).await;
}

#[tokio::test]
async fn a_forgotten_pod_leaves_no_folder() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let volumes = vec![empty_dir("data", "", 0), empty_dir("shm", "Memory", 0)];
    sync.pod(desire("u1", 1, Want::Run, volumes.clone())).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    fs::create_dir_all(world.empty_dir("u1", "data").join("deep/er")).unwrap();
    fs::create_dir(world.pod("u1").join("containers/main")).unwrap();
    fs::write(world.pod("u1").join("containers/main/0badcafe"), "").unwrap();
    fs::write(world.pod("u1").join("etc-hosts"), "").unwrap();
    sync.pod(desire("u1", 2, Want::Forget, volumes)).await;
    until_some("the removal of the folder", || std::future::ready((!world.pod("u1").exists()).then_some(())))
        .await;
    unmount(&mut client, "u1", LONG).await.unwrap();
}

#[tokio::test]
async fn only_a_complete_set_with_ready_sources_removes_unnamed_pods() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    fs::create_dir_all(world.empty_dir("found", "data")).unwrap();
    fs::write(world.empty_dir("found", "data").join("file"), "x").unwrap();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("kept", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    sync.complete(1, false).await;
    mount(&mut client, "kept", 1).await.1.unwrap();
    assert!(world.empty_dir("found", "data/file").exists());
    sync.complete(2, true).await;
    until_some("the sweep", || std::future::ready((!world.pod("found").exists()).then_some(()))).await;
    assert!(world.empty_dir("kept", "data").exists());

    sync.send(pb::sync_request::Item::DroppedUid("kept".into())).await;
    until_some("the drop", || std::future::ready((!world.pod("kept").exists()).then_some(()))).await;
}

#[tokio::test]
async fn an_unnamed_pod_that_still_runs_keeps_its_volumes() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    runtime.set_container("found", ContainerState::Running);
    fs::create_dir_all(world.empty_dir("found", "data")).unwrap();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    runtime.api.get_pod.requests().until_len(3).await;
    assert!(world.empty_dir("found", "data").exists());
    // pod-sync names it after all.
    sync.pod(desire("found", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    mount(&mut client, "found", 1).await.1.unwrap();
    runtime.set_container("found", ContainerState::Exited);
    assert!(world.empty_dir("found", "data").exists());
}

#[tokio::test]
async fn a_closed_sync_stream_keeps_desires_and_a_later_stream_takes_over() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    let service = world.start().await;
    let mut client = service.client();
    let mut first = Sync::open(&mut client).await;
    first.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    first.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let second = Sync::open(&mut client).await;
    let status = first.acks.message().await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("SYNC_TAKEN_OVER"));
    drop(first);
    second.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    drop(second);
    let mut third = Sync::open(&mut client).await;
    third.complete(2, false).await;
    assert!(world.empty_dir("u1", "data").exists());
    assert!(runtime.api.get_pod.requests().is_empty());
}

#[tokio::test]
async fn a_restarted_service_finds_its_pods_and_keeps_their_data() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    let volumes = || vec![empty_dir("data", "", 0), empty_dir("shm", "Memory", 0)];
    let service = world.start().await;
    {
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(desire("u1", 1, Want::Run, volumes())).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
    }
    for name in ["data", "shm"] {
        fs::write(world.empty_dir("u1", name).join("file"), "kept").unwrap();
    }
    let mounts = mounts_below(&world.pod("u1")).len();
    service.stop().await;

    let service = world.start().await;
    let mut client = service.client();
    let mut watch = client.watch_pod_volumes(pb::WatchPodVolumesRequest {}).await.unwrap().into_inner();
    let pb::watch_pod_volumes_response::Item::Pod(pod) =
        watch.message().await.unwrap().unwrap().item.unwrap()
    else {
        panic!("the watch starts with the pod");
    };
    assert_eq!((pod.uid.as_str(), pod.state.as_str()), ("u1", "mounted"));
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, volumes())).await;
    sync.complete(1, true).await;
    let ready = mount(&mut client, "u1", 1).await.1.unwrap();
    assert_eq!(ready.volumes.len(), 2);
    for name in ["data", "shm"] {
        assert_eq!(fs::read(world.empty_dir("u1", name).join("file")).unwrap(), b"kept");
    }
    assert_eq!(mounts_below(&world.pod("u1")).len(), mounts, "nothing is mounted twice");
    assert!(runtime.api.get_pod.requests().is_empty());
}

#[tokio::test]
async fn removal_stops_at_a_foreign_mount_and_names_it() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let volumes = vec![empty_dir("data", "", 0)];
    sync.pod(desire("u1", 1, Want::Run, volumes.clone())).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let inner = world.empty_dir("u1", "data").join("inner");
    let elsewhere = world.config.paths.run_dir.join("elsewhere");
    fs::create_dir(&inner).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("precious"), "x").unwrap();
    // On the same filesystem, so that only the mount distinguishes it from a folder.
    rustix::mount::mount_bind(&elsewhere, &inner).unwrap();
    sync.pod(desire("u1", 2, Want::Forget, volumes)).await;
    let mut watch = client.watch_pod_volumes(pb::WatchPodVolumesRequest {}).await.unwrap().into_inner();
    let message = loop {
        if let Some(pb::watch_pod_volumes_response::Item::Pod(pod)) =
            watch.message().await.unwrap().unwrap().item
            && !pod.message.is_empty()
        {
            break pod.message;
        }
    };
    assert!(message.contains("inner is a mount point"), "{message}");
    assert!(elsewhere.join("precious").exists());
    rustix::mount::unmount(&inner, rustix::mount::UnmountFlags::empty()).unwrap();
    until_some("the removal of the folder", || std::future::ready((!world.pod("u1").exists()).then_some(())))
        .await;
    assert!(elsewhere.join("precious").exists());
}
