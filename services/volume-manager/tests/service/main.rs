//! The service over its socket: exactly what pod-sync requests happens on disk.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod removal;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::reason;
use support::{
    LONG, Sync, World, desire, empty_dir, mount, mounts, mounts_below, unmount, until_some, volume, within,
};
use tonic::Code;

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
async fn a_pod_without_volumes_waits_with_the_reason_if_it_gets_no_id_range() {
    let world = World::new();
    // Of a pod of an earlier agent.
    let broken = world.pod("broken");
    fs::create_dir_all(&broken).unwrap();
    fs::write(broken.join("userns"), "{").unwrap();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let desired = |uid| pb::PodDesire { user_namespace: true, ..desire(uid, 1, Want::Run, Vec::new()) };
    sync.pod(desired("u1")).await;
    // No set is complete: the folder of the other pod stays.
    let request = within(pb::MountPodRequest { uid: "u1".into(), revision: 1 }, LONG);
    let mut stream = client.mount_pod(request).await.unwrap().into_inner();
    loop {
        let item = stream.message().await.unwrap().unwrap().item.unwrap();
        let pb::mount_pod_response::Item::Progress(progress) = item else { panic!("{item:?}") };
        if progress.waiting_for.contains("that of pod broken is unusable") {
            break;
        }
    }
    drop(stream);
    // The operator restores the record, and the service reads it at its next start.
    fs::remove_file(broken.join("userns")).unwrap();
    drop(sync);
    service.stop().await;
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desired("u1")).await;
    let (_, ready) = mount(&mut client, "u1", 1).await;
    let range = ready.unwrap().user_namespace.unwrap();
    assert_eq!((range.host_id, range.length), (65_536, 65_536));
    assert!(world.pod("u1").join("userns").is_file());
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
    let ready = until_some("the volume", || {
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
    let mounts = mounts();
    let holding = mounts.iter().rfind(|m| world.config.paths.root_dir.starts_with(&m.point)).unwrap();
    assert!(holding.shared, "{holding:?}");
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
