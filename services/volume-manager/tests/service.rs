//! The service over its socket: exactly what pod-sync requests happens on disk.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1::ContainerState;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::reason;
use support::{Sync, World, desire, empty_dir, eventually, mount, mounts_below, unmount, volume, within};
use tonic::Code;

const LONG: Duration = Duration::from_secs(20);

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[tokio::test]
async fn pod_folders_and_empty_dir_have_the_kubelets_modes() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    sync.complete(1, true).await;
    let (_, ready) = mount(&mut client, "u1", 1).await;
    let ready = ready.unwrap();
    let path = world.empty_dir("u1", "data");
    assert_eq!(Path::new(&ready.pod_dir), world.pod("u1"));
    assert_eq!((ready.volumes[0].name.as_str(), Path::new(&ready.volumes[0].host_path)), ("data", &*path));
    assert_eq!(mode(&path), 0o777);
    for folder in ["", "volumes", "plugins", "containers"] {
        assert_eq!(mode(&world.pod("u1").join(folder)), 0o750, "{folder}");
    }
    let marker = world.pod("u1").join("plugins/kubernetes.io~empty-dir/data");
    assert_eq!(mode(&marker), 0o750);
    assert_eq!(fs::read(marker.join("ready")).unwrap(), b"");
    assert!(keelson_service_kit::is_spread(world.pod("u1").parent().unwrap()));
}

#[tokio::test]
async fn a_memory_empty_dir_is_a_tmpfs_of_the_smallest_limit_and_is_unmounted() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    let mut desired = desire("u1", 1, Want::Run, vec![empty_dir("shm", "Memory", 64 << 20)]);
    desired.memory_limit_bytes = 8 << 20;
    desired.fs_group = Some(4711);
    sync.pod(desired.clone()).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let path = world.empty_dir("u1", "shm");
    let stat = rustix::fs::statvfs(&path).unwrap();
    assert_eq!(stat.f_blocks * stat.f_frsize, 8 << 20);
    assert_eq!(mode(&path), 0o3777);
    assert_eq!(fs::metadata(&path).unwrap().gid(), 4711);
    fs::write(path.join("file"), "x").unwrap();

    desired.want = Want::Unmount.into();
    desired.revision = 2;
    sync.pod(desired).await;
    unmount(&mut client, "u1", LONG).await.unwrap();
    assert!(!path.exists());
    assert!(!mounts_below(&world.pod("u1")).contains(&path));
    assert!(world.pod("u1").join("containers").exists(), "the folder stays until the pod is forgotten");
}

/// A huge page size that the kernel supports, in bytes. A volume needs no reserved huge pages.
fn smallest_page_size() -> u64 {
    let sizes = fs::read_dir("/sys/kernel/mm/hugepages").unwrap().map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.trim_start_matches("hugepages-").trim_end_matches("kB").parse::<u64>().unwrap() << 10
    });
    sizes.min().unwrap()
}

#[tokio::test]
async fn a_huge_page_volume_has_the_requested_page_size_and_is_unmounted() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let size = smallest_page_size();
    let mut desired = desire("u1", 1, Want::Run, vec![empty_dir("huge", "HugePages", 0)]);
    desired.huge_page_sizes = vec![size.try_into().unwrap()];
    for _ in 0..2 {
        // The second instance finds it mounted.
        let service = world.start().await;
        let mut client = service.client();
        let sync = Sync::open(&mut client).await;
        sync.pod(desired.clone()).await;
        mount(&mut client, "u1", 1).await.1.unwrap();
        let stat = rustix::fs::statfs(world.empty_dir("u1", "huge")).unwrap();
        assert_eq!((u64::try_from(stat.f_bsize).unwrap(), stat.f_type), (size, 0x9584_58f6));
        assert_eq!(mounts_below(&world.pod("u1")).len(), 1);
        drop(sync);
        service.stop().await;
    }
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let mut other = desired.clone();
    other.huge_page_sizes = vec![1 << 40];
    sync.pod(other).await;
    let request = within(pb::MountPodRequest { uid: "u1".into(), revision: 1 }, Duration::from_secs(1));
    let mut stream = client.mount_pod(request).await.unwrap().into_inner();
    let mut progress = String::new();
    while let Ok(Some(message)) = stream.message().await {
        progress += &format!("{message:?}");
    }
    assert!(
        progress.contains(&format!("has huge pages of {size} bytes, not of {}", 1_u64 << 40)),
        "{progress}"
    );
    sync.pod(pb::PodDesire { want: Want::Unmount.into(), revision: 2, ..desired }).await;
    unmount(&mut client, "u1", LONG).await.unwrap();
    assert!(mounts_below(&world.pod("u1")).is_empty() && !world.empty_dir("u1", "huge").exists());
}

#[tokio::test]
async fn fsgroup_owns_the_empty_dir() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let mut desired = desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)]);
    desired.fs_group = Some(4711);
    sync.pod(desired).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let path = world.empty_dir("u1", "data");
    assert_eq!((mode(&path), fs::metadata(&path).unwrap().gid()), (0o2777, 4711));
}

#[tokio::test]
async fn mount_pod_returns_not_found_for_a_pod_that_was_never_named() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let (waits, end) = mount(&mut client, "nobody", 1).await;
    let status = end.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_deref()), (Code::NotFound, Some("POD_NOT_NAMED")));
    assert!(status.message().contains("nobody"));
    assert_eq!(waits, ["pod-sync to name the pod"]);
    unmount(&mut client, "nobody", LONG).await.unwrap();
}

#[tokio::test]
async fn mount_pod_waits_for_the_requested_revision() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let mut other = service.client();
    let waiting = tokio::spawn(async move { mount(&mut other, "u1", 2).await });
    sync.pod(desire("u1", 2, Want::Run, vec![empty_dir("late", "", 0)])).await;
    let ready = waiting.await.unwrap().1.unwrap();
    assert_eq!(ready.volumes.len(), 1);
}

#[tokio::test]
async fn a_host_path_of_the_wrong_type_is_refused_and_mounted_after_it_is_fixed() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let host_path = world.config.paths.run_dir.join("wanted");
    let source = |kind: &str| {
        let path = host_path.to_string_lossy().into_owned();
        volume("host", pb::volume::Source::HostPath(pb::HostPath { path, r#type: kind.into() }))
    };
    sync.pod(desire("u1", 1, Want::Run, vec![source("Directory"), empty_dir("data", "", 0)])).await;
    let status = mount(&mut client, "u1", 1).await.1.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("hostPath type check failed"), "{}", status.message());
    assert!(status.message().contains("MountVolume.SetUp failed for volume \"host\" : "));
    assert!(world.empty_dir("u1", "data").exists(), "another volume is not held up");
    // An error that can be fixed on the node: the mount is retried without a new desire.
    fs::create_dir(&host_path).unwrap();
    let ready = eventually("the volume", || {
        let mut client = service.client();
        async move { mount(&mut client, "u1", 1).await.1.ok() }
    })
    .await;
    assert!(ready.volumes.iter().any(|v| Path::new(&v.host_path) == host_path));

    sync.pod(desire("u2", 1, Want::Run, vec![source("DirectoryOrCreate")])).await;
    mount(&mut client, "u2", 1).await.1.unwrap();
    sync.pod(desire("u3", 1, Want::Run, vec![source("Socket")])).await;
    mount(&mut client, "u3", 1).await.1.unwrap_err();
}

#[tokio::test]
async fn a_host_path_link_to_the_agents_sockets_is_refused() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let links = tempfile::tempdir().unwrap();
    let run_dir = fs::canonicalize(&world.config.paths.run_dir).unwrap();
    for (uid, name, target) in
        [("u1", "folder", run_dir.clone()), ("u2", "below", run_dir.join("volume-manager"))]
    {
        let link = links.path().join(name);
        std::os::unix::fs::symlink(target, &link).unwrap();
        let source = pb::HostPath { path: link.to_string_lossy().into_owned(), r#type: String::new() };
        sync.pod(desire(uid, 1, Want::Run, vec![volume("host", pb::volume::Source::HostPath(source))])).await;
        let status = mount(&mut client, uid, 1).await.1.unwrap_err();
        assert!(
            status.message().contains("leads through a symlink into the folder of the agent's sockets"),
            "{status:?}"
        );
    }
}

#[tokio::test]
async fn an_unsupported_volume_kind_is_named_with_its_volume() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    for (uid, volume, text) in [
        ("u1", volume("conf", pb::volume::Source::Unsupported("configMap".into())), "configMap"),
        ("u2", empty_dir("huge", "HugePages-2Mi", 0), "HugePages-2Mi"),
        ("u3", empty_dir("odd", "Floppy", 0), "unknown storage medium"),
    ] {
        let name = volume.name.clone();
        sync.pod(desire(uid, 1, Want::Run, vec![volume])).await;
        let status = mount(&mut client, uid, 1).await.1.unwrap_err();
        assert!(status.message().contains(text) && status.message().contains(&name), "{}", status.message());
    }
}

#[tokio::test]
async fn nothing_is_unmounted_while_a_container_runs() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    runtime.container("u1", ContainerState::Running);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    sync.pod(desire("u1", 2, Want::Unmount, vec![empty_dir("data", "", 0)])).await;
    let mut other = service.client();
    let waiting = tokio::spawn(async move { unmount(&mut other, "u1", LONG).await });
    runtime.read_at_least(3).await;
    assert!(world.empty_dir("u1", "data").exists());
    let status = unmount(&mut client, "u1", Duration::from_secs(2)).await.unwrap_err();
    assert!(status.message().contains("container main"), "{}", status.message());
    runtime.container("u1", ContainerState::Exited);
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
    eventually("the removal of the folder", || std::future::ready((!world.pod("u1").exists()).then_some(())))
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
    eventually("the sweep", || std::future::ready((!world.pod("found").exists()).then_some(()))).await;
    assert!(world.empty_dir("kept", "data").exists());

    sync.send(pb::sync_request::Item::DroppedUid("kept".into())).await;
    eventually("the drop", || std::future::ready((!world.pod("kept").exists()).then_some(()))).await;
}

#[tokio::test]
async fn an_unnamed_pod_that_still_runs_keeps_its_volumes() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    runtime.container("found", ContainerState::Running);
    fs::create_dir_all(world.empty_dir("found", "data")).unwrap();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    runtime.read_at_least(3).await;
    assert!(world.empty_dir("found", "data").exists());
    // pod-sync names it after all.
    sync.pod(desire("found", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    mount(&mut client, "found", 1).await.1.unwrap();
    runtime.container("found", ContainerState::Exited);
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
    assert_eq!(runtime.reads(), 0);
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
    assert_eq!(runtime.reads(), 0);
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
    eventually("the removal of the folder", || std::future::ready((!world.pod("u1").exists()).then_some(())))
        .await;
    assert!(elsewhere.join("precious").exists());
}

#[tokio::test]
async fn an_invalid_pod_does_not_block_other_pods() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desire("../escape", 1, Want::Run, vec![])).await;
    sync.pod(desire("u1", 1, Want::Run, vec![])).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert!(service.condition("sync", false).await.contains("../escape"));
}

#[tokio::test]
async fn a_stopping_pod_gets_no_new_volumes() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Stop, vec![empty_dir("data", "", 0)])).await;
    let status = mount(&mut client, "u1", 1).await.1.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("NOT_WANTED"));
    assert!(!world.pod("u1").exists());
}

#[tokio::test]
async fn the_root_folder_is_a_shared_mount_after_startup() {
    let world = World::new();
    for _ in 0..2 {
        let service = world.start().await;
        service.condition("root-mount", true).await;
        service.stop().await;
    }
    let root = world.config.paths.root_dir.to_string_lossy().into_owned();
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = text.lines().rfind(|l| l.split(' ').nth(4).is_some_and(|p| root.starts_with(p))).unwrap();
    assert!(line.contains("shared:"), "{line}");
    assert!(mounts_below(&world.config.paths.root_dir).len() <= 1);
}

#[tokio::test]
async fn a_root_folder_path_that_is_not_canonical_is_refused() {
    let mut world = World::new();
    world.config.paths.root_dir = world.config.paths.root_dir.join("../other");
    let ctx = keelson_service_kit::Context::detached(
        keelson_config::ServiceName::VolumeManager,
        world.config.clone(),
    );
    let error = keelson_volume_manager::build(ctx).await.unwrap_err();
    assert!(format!("{error:#}").contains("../other"), "{error:#}");
}

#[tokio::test]
async fn mount_pod_ends_at_its_deadline_and_says_what_it_waits_for() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    // The pod's folder cannot be created, because there is a file at its path.
    fs::write(world.pod("u1"), "").unwrap();
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    let mut request = tonic::Request::new(pb::MountPodRequest { uid: "u1".into(), revision: 1 });
    request.set_timeout(Duration::from_millis(400));
    let mut stream = client.mount_pod(request).await.unwrap().into_inner();
    let status = loop {
        match stream.message().await {
            Ok(answer) => assert!(answer.is_some(), "it ended without an error"),
            Err(status) => break status,
        }
    };
    assert_eq!(reason(&status).as_deref(), Some("NOT_MOUNTED"));
    assert!(status.message().contains("error making pod data directories"), "{}", status.message());
    fs::remove_file(world.pod("u1")).unwrap();
    mount(&mut client, "u1", 1).await.1.unwrap();
}
