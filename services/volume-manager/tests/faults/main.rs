//! Faults of disks and objects: each holds up its own volume only, is named, and heals without a restart.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod csi;
mod node;
#[path = "../support/mod.rs"]
mod support;
mod trees;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::volume_manager::v1 as pb;
use rustix::mount::MountFlags;
use support::api::{FakeApi, config_map, secret};
use support::{
    Client, LONG, Service, Sync, World, desire, empty_dir, mount, mounts_below, unmount, until_some, within,
};

/// The first progress of `MountPod` whose message contains `text`.
async fn until_progress(client: &mut Client, uid: &str, text: &str) -> pb::MountProgress {
    let request = pb::MountPodRequest { uid: uid.into(), revision: 1 };
    let mut stream = client.mount_pod(within(request, LONG)).await.unwrap().into_inner();
    let mut seen = Vec::new();
    loop {
        let answer = stream.message().await.unwrap_or_else(|error| panic!("{error}: {seen:?}"));
        let Some(pb::mount_pod_response::Item::Progress(progress)) = answer.unwrap().item else {
            panic!("the volumes are ready: {seen:?}")
        };
        if progress.waiting_for.contains(text) {
            return progress;
        }
        seen.push(progress.waiting_for);
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    until_some(what, || std::future::ready(is_so().then_some(()))).await;
}

/// Waits for an event with this text.
async fn until_event(service: &Service, text: &str) {
    until_some(text, || {
        let request = tonic::Request::new(ListEventsRequest::default());
        async move {
            let events = service.ctx.events.list_events(request).await.unwrap().into_inner().events;
            events.iter().any(|event| event.message.contains(text)).then_some(())
        }
    })
    .await;
}

fn has_text(path: &Path, text: &str) -> bool {
    fs::read_to_string(path).is_ok_and(|found| found == text)
}

#[tokio::test]
async fn five_hundred_volumes_of_a_pod_are_mounted_kept_over_a_restart_and_removed() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let medium = |index: usize| if index.is_multiple_of(25) { "Memory" } else { "" };
    let volumes =
        || (0..500).map(|index| empty_dir(&format!("v{index}"), medium(index), 0)).collect::<Vec<_>>();
    for _ in 0..2 {
        let service = world.start().await;
        let mut client = service.client();
        let mut sync = Sync::open(&mut client).await;
        sync.pod(desire("u1", 1, Want::Run, volumes())).await;
        sync.complete(1, true).await;
        let ready = mount(&mut client, "u1", 1).await.1.unwrap();
        assert_eq!((ready.volumes.len(), mounts_below(&world.pod("u1")).len()), (500, 20));
        drop(sync);
        service.stop().await;
    }
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 2, Want::Unmount, volumes())).await;
    unmount(&mut client, "u1", LONG).await.unwrap();
    assert!(mounts_below(&world.pod("u1")).is_empty());
}

#[tokio::test]
async fn a_full_disk_keeps_the_old_files_and_is_named_and_heals_when_there_is_room() {
    let (world, api) = (World::new(), FakeApi::default());
    let root = &world.config.paths.root_dir;
    fs::create_dir_all(root).unwrap();
    rustix::mount::mount("tmpfs", root, "tmpfs", MountFlags::empty(), Some(c"size=256k")).unwrap();
    let _server = api.serve(&world).await;
    let big = format!("{{\"a\": \"{}\"}}", "x".repeat(512 << 10));
    api.config_map("conf", r#"{"a": "old"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![config_map("conf")])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let file = world.volume("u1", "configmap", "conf").join("a");
    for name in ["conf", "other"] {
        api.config_map(name, &big);
    }
    until_event(&service, "No space left on device").await;
    assert!(has_text(&file, "old"), "a failed update changes nothing");
    sync.pod(desire("u2", 1, Want::Run, vec![config_map("other")])).await;
    let progress = until_progress(&mut client, "u2", "No space left on device").await;
    assert!(progress.waiting_for.contains("other"), "{}", progress.waiting_for);
    sync.pod(desire("u3", 1, Want::Run, vec![empty_dir("data", "", 0)])).await;
    mount(&mut client, "u3", 1).await.1.unwrap();
    for name in ["conf", "other"] {
        api.config_map(name, r#"{"a": "new"}"#);
    }
    let other = world.volume("u2", "configmap", "other").join("a");
    until("the new files of both pods", || has_text(&file, "new") && has_text(&other, "new")).await;
}

#[tokio::test]
async fn a_file_where_a_folder_should_be_is_named_until_it_is_removed() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let folder = world.empty_dir("u1", "data");
    fs::create_dir_all(folder.parent().unwrap()).unwrap();
    fs::write(&folder, "not a folder").unwrap();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("data", "", 0), empty_dir("other", "", 0)])).await;
    let progress = until_progress(&mut client, "u1", "volume \"data\"").await;
    assert!(!progress.waiting_for.contains("volume \"other\""), "{}", progress.waiting_for);
    assert!(has_text(&folder, "not a folder"), "nothing foreign is removed");
    fs::remove_file(&folder).unwrap();
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert!(folder.is_dir());
}

#[tokio::test]
async fn what_a_killed_writer_has_left_is_replaced_by_the_next_write() {
    let (world, api) = (World::new(), FakeApi::default());
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"a": "1"}"#);
    let folder = world.volume("u1", "configmap", "conf");
    // Killed before the rename: the new folder is half written, and `..data` is the old one.
    for name in ["..2026_01_01_00_00_00.1", "..2026_01_01_00_00_01.2"] {
        fs::create_dir_all(folder.join(name)).unwrap();
    }
    fs::write(folder.join("..2026_01_01_00_00_00.1/a"), "0").unwrap();
    symlink("..2026_01_01_00_00_00.1", folder.join("..data")).unwrap();
    symlink("..2026_01_01_00_00_01.2", folder.join("..data_tmp")).unwrap();
    symlink("..data/a", folder.join("a")).unwrap();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![config_map("conf")])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    assert!(has_text(&folder.join("a"), "1"));
    let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
    let dotted: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with("..")).collect();
    assert_eq!(dotted.len(), 2, "`..data` and its folder: {dotted:?}");
}

#[tokio::test]
async fn after_a_reboot_memory_volumes_are_mounted_again_and_those_of_gone_pods_removed() {
    let (world, api) = (World::new(), FakeApi::default());
    let (_runtime, _server) = (world.start_runtime().await, api.serve(&world).await);
    api.secret("key", r#"{"token": "aHVudGVyMg=="}"#);
    for uid in ["u1", "gone"] {
        // Folders and markers say that everything is set up, and nothing is mounted.
        for folder in
            [world.empty_dir(uid, "shm"), world.empty_dir(uid, "data"), world.volume(uid, "secret", "key")]
        {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(world.empty_dir(uid, "data").join("file"), "kept").unwrap();
        for marker in ["shm", "data", "wrapped_key"] {
            let folder = world.pod(uid).join("plugins/kubernetes.io~empty-dir").join(marker);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("ready"), "").unwrap();
        }
    }
    let service = world.start().await;
    let mut client = service.client();
    let mut sync = Sync::open(&mut client).await;
    let volumes = vec![empty_dir("shm", "Memory", 1 << 20), empty_dir("data", "", 0), secret("key")];
    sync.pod(desire("u1", 1, Want::Run, volumes)).await;
    sync.complete(1, true).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let mounted = mounts_below(&world.pod("u1"));
    for folder in [world.empty_dir("u1", "shm"), world.volume("u1", "secret", "key")] {
        assert!(mounted.contains(&folder), "{mounted:?}");
    }
    assert!(has_text(&world.volume("u1", "secret", "key").join("token"), "hunter2"));
    assert!(has_text(&world.empty_dir("u1", "data").join("file"), "kept"));
    until("the removal of the pod that is gone", || !world.pod("gone").exists()).await;
}
