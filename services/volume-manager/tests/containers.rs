//! `PrepareContainer` over the socket: subPaths and values of environment files.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1::ContainerState;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_service_kit::status::reason;
use support::api::{FakeApi, config_map};
use support::{Client, Sync, World, desire, empty_dir, mount, mounts_below, unmount, volume, within};
use tonic::{Code, Status};

const LONG: Duration = Duration::from_secs(20);

fn subpath(index: u32, volume: &str, path: &str) -> pb::SubPath {
    pb::SubPath { index, volume: volume.into(), path: path.into(), read_only: false }
}

async fn prepare(
    client: &mut Client,
    container: &str,
    subpaths: Vec<pb::SubPath>,
) -> Result<Vec<String>, Status> {
    prepare_within(LONG, client, container, subpaths).await
}

async fn prepare_within(
    deadline: Duration,
    client: &mut Client,
    container: &str,
    subpaths: Vec<pb::SubPath>,
) -> Result<Vec<String>, Status> {
    let request = pb::PrepareContainerRequest {
        uid: "u1".into(),
        container: container.into(),
        subpaths,
        keys: Vec::new(),
    };
    let prepared = client.prepare_container(within(request, deadline)).await?.into_inner().subpaths;
    Ok(prepared.into_iter().map(|prepared| prepared.host_path).collect())
}

fn subpath_mounts(world: &World) -> usize {
    mounts_below(&world.pod("u1").join("volume-subpaths")).len()
}

fn ino(path: impl AsRef<Path>) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[tokio::test]
async fn subpaths_are_shared_by_containers_and_removed_before_the_volumes() {
    let (world, api) = (World::new(), FakeApi::default());
    let _runtime = world.start_runtime().await;
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"app.conf": "x=1"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    let host = world.config.paths.run_dir.join("host");
    fs::create_dir_all(host.join("sub")).unwrap();
    let host_path = pb::HostPath { path: host.to_string_lossy().into_owned(), r#type: String::new() };
    let volumes = vec![
        empty_dir("disk", "", 0),
        empty_dir("shm", "Memory", 1 << 20),
        config_map("conf"),
        volume("host", pb::volume::Source::HostPath(host_path)),
    ];
    let desired = desire("u1", 1, Want::Run, volumes);
    sync.pod(desired.clone()).await;
    // The call itself waits for the volumes.
    let subpaths = vec![
        subpath(0, "disk", "shared/logs"),
        subpath(1, "shm", "a"),
        subpath(3, "conf", "app.conf"),
        subpath(4, "host", "sub"),
    ];
    let one = prepare(&mut client, "one", subpaths).await.unwrap();
    let two = prepare(&mut client, "two", vec![subpath(0, "disk", "shared/logs")]).await.unwrap();
    let folder = world.pod("u1").join("volume-subpaths");
    assert_eq!(Path::new(&one[0]), folder.join("disk/one/0"));
    assert_eq!(Path::new(&one[2]), folder.join("conf/one/3"));
    fs::write(Path::new(&one[0]).join("x"), "of one").unwrap();
    assert_eq!(fs::read_to_string(Path::new(&two[0]).join("x")).unwrap(), "of one");
    assert_eq!(fs::read_to_string(&one[2]).unwrap(), "x=1");
    assert_eq!(ino(&one[3]), ino(host.join("sub")));
    assert_eq!(subpath_mounts(&world), 5);

    sync.pod(pb::PodDesire { want: Want::Unmount.into(), revision: 2, ..desired }).await;
    unmount(&mut client, "u1", LONG).await.unwrap();
    assert!(mounts_below(&world.pod("u1")).is_empty() && !folder.exists());
    assert!(host.join("sub").exists(), "the host's folder stays");
    let late =
        prepare_within(Duration::from_secs(1), &mut client, "one", vec![subpath(0, "disk", "a")]).await;
    let late = late.unwrap_err();
    assert_eq!(reason(&late).as_deref(), Some("NOT_MOUNTED"), "nothing is prepared: {late:?}");
    assert!(!folder.exists());
}

#[tokio::test]
async fn a_restarted_service_keeps_valid_subpaths_and_repairs_the_others() {
    let world = World::new();
    let runtime = world.start_runtime().await;
    runtime.set_container("u1", ContainerState::Running);
    let desired = desire("u1", 1, Want::Run, vec![empty_dir("disk", "", 0)]);
    let first = world.start().await;
    let mut client = first.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desired.clone()).await;
    let subpaths = || vec![subpath(0, "disk", "a"), subpath(1, "disk", "b")];
    let before = prepare(&mut client, "main", subpaths()).await.unwrap();
    let inodes: Vec<u64> = before.iter().map(ino).collect();
    // As if killed between the creation of the mount point and the mount.
    rustix::mount::unmount(before[1].as_str(), rustix::mount::UnmountFlags::NOFOLLOW).unwrap();
    drop(sync);
    first.stop().await;
    assert_eq!(subpath_mounts(&world), 1, "mounts stay");

    let second = world.start().await;
    let mut client = second.client();
    let mut sync = Sync::open(&mut client).await;
    sync.pod(desired.clone()).await;
    assert_eq!(prepare(&mut client, "main", subpaths()).await.unwrap(), before);
    assert_eq!(before.iter().map(ino).collect::<Vec<_>>(), inodes);
    assert_eq!(subpath_mounts(&world), 2);
    drop(sync);
    second.stop().await;

    // The pod was removed while the service was down. The third instance finds the subPaths and waits for the container
    // to end.
    let third = world.start().await;
    let mut client = third.client();
    sync = Sync::open(&mut client).await;
    sync.complete(1, true).await;
    runtime.api.get_pod.requests().until_len(1).await;
    assert_eq!(subpath_mounts(&world), 2);
    runtime.set_container("u1", ContainerState::Exited);
    unmount(&mut client, "u1", LONG).await.unwrap();
    support::until_some("the removal of its folder", || {
        std::future::ready((!world.pod("u1").exists()).then_some(()))
    })
    .await;
    assert_eq!(subpath_mounts(&world), 0);
}

/// Uses a prepared subPath like a runtime: bind-mounts it once more and reads it.
fn read_like_a_runtime(world: &World, prepared: &str) -> String {
    let target = world.config.paths.run_dir.join("of-the-container");
    fs::write(&target, "").unwrap();
    rustix::mount::mount_bind(prepared, &target).unwrap();
    let text = fs::read_to_string(&target).unwrap();
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::NOFOLLOW).unwrap();
    text
}

fn dated_folders(volume: &Path) -> usize {
    let names = fs::read_dir(volume).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("..2")).count()
}

#[tokio::test]
async fn a_config_map_edit_does_not_change_a_subpath_that_is_already_prepared() {
    let (world, api) = (World::new(), FakeApi::default());
    let _runtime = world.start_runtime().await;
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"app.conf": "x=0"}"#);
    let first = world.start().await;
    let mut client = first.client();
    let mut sync = Sync::open(&mut client).await;
    let desired = desire("u1", 1, Want::Run, vec![config_map("conf")]);
    sync.pod(desired.clone()).await;
    let prepared =
        prepare(&mut client, "main", vec![subpath(0, "conf", "app.conf")]).await.unwrap().remove(0);
    let volume = world.pod("u1").join("volumes/kubernetes.io~configmap/conf");
    let shows = async |text: &str| {
        support::until_some("the edit to show", || {
            let shown = fs::read_to_string(volume.join("app.conf")).is_ok_and(|shown| shown == text);
            std::future::ready(shown.then_some(()))
        })
        .await;
    };
    for edit in 1..=20 {
        api.config_map("conf", &format!(r#"{{"app.conf": "x={edit}"}}"#));
        shows(&format!("x={edit}")).await;
        assert_eq!(read_like_a_runtime(&world, &prepared), "x=0", "after {edit} edits");
    }
    assert_eq!(dated_folders(&volume), 2, "the bound folder and the current one");

    // A service that was killed meanwhile detects again which subPaths are bind-mounted.
    drop(sync);
    first.stop().await;
    let second = world.start().await;
    let mut client = second.client();
    sync = Sync::open(&mut client).await;
    sync.pod(desired).await;
    api.config_map("conf", r#"{"app.conf": "x=21"}"#);
    shows("x=21").await;
    assert_eq!(read_like_a_runtime(&world, &prepared), "x=0");
    // The next start of the container gets the current files, and the next edit removes the old ones.
    assert_eq!(
        prepare(&mut client, "main", vec![subpath(0, "conf", "app.conf")]).await.unwrap(),
        [&*prepared]
    );
    assert_eq!(read_like_a_runtime(&world, &prepared), "x=21");
    api.config_map("conf", r#"{"app.conf": "x=22"}"#);
    shows("x=22").await;
    support::until_some("the removal of the old files", || {
        std::future::ready((dated_folders(&volume) == 2).then_some(()))
    })
    .await;
    drop(sync);
}

#[tokio::test]
async fn subpaths_are_prepared_while_their_volume_is_edited_constantly() {
    let (world, api) = (World::new(), FakeApi::default());
    let _runtime = world.start_runtime().await;
    let _server = api.serve(&world).await;
    api.config_map("conf", r#"{"app.conf": "x=0"}"#);
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![config_map("conf")])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    for round in 0..200 {
        api.config_map("conf", &format!(r#"{{"app.conf": "x={round}"}}"#));
        let subpaths = vec![subpath(0, "conf", "app.conf")];
        let prepared = prepare(&mut client, &format!("c{}", round % 3), subpaths).await.unwrap().remove(0);
        assert!(read_like_a_runtime(&world, &prepared).starts_with("x="), "round {round}");
    }
    drop(sync);
}

#[tokio::test]
async fn subpath_errors_contain_no_path_of_the_node() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("disk", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let disk = world.empty_dir("u1", "disk");
    fs::write(disk.join("file"), "").unwrap();
    symlink("/etc", disk.join("etc")).unwrap();
    let prefix = "failed to prepare subPath for volumeMount \"disk\" of container \"main\": ";
    for (path, text) in
        [("etc", "out of the volume"), ("file/x", "not a directory"), ("../x", "out of the volume")]
    {
        let status = prepare(&mut client, "main", vec![subpath(0, "disk", path)]).await.unwrap_err();
        assert_eq!(
            (status.code(), reason(&status).as_deref()),
            (Code::FailedPrecondition, Some("SUBPATH_NOT_USABLE"))
        );
        let message = status.message();
        assert!(message.starts_with(prefix) && message.contains(text), "{path}: {message}");
        assert!(!message.contains(&*world.config.paths.root_dir.to_string_lossy()), "{path}: {message}");
    }
    let status = prepare(&mut client, "main", vec![subpath(0, "none", "a")]).await.unwrap_err();
    assert_eq!(status.message(), "cannot find volume \"none\" to mount into container \"main\"");
    for (container, volume) in [("..", "disk"), ("a/b", "disk"), ("main", "..")] {
        let status = prepare(&mut client, container, vec![subpath(0, volume, "a")]).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{container} {volume}");
    }
    assert_eq!(subpath_mounts(&world), 0);
}

#[tokio::test]
async fn file_key_values_are_read_beneath_the_volume() {
    let world = World::new();
    let service = world.start().await;
    let mut client = service.client();
    let sync = Sync::open(&mut client).await;
    sync.pod(desire("u1", 1, Want::Run, vec![empty_dir("disk", "", 0)])).await;
    mount(&mut client, "u1", 1).await.1.unwrap();
    let disk = world.empty_dir("u1", "disk");
    fs::write(disk.join("app.env"), "# made by init\nNAME='keel son'\n").unwrap();
    symlink("/etc/passwd", disk.join("out")).unwrap();
    let key =
        |path: &str, key: &str| pb::FileKey { volume: "disk".into(), path: path.into(), key: key.into() };
    let request = pb::PrepareContainerRequest {
        uid: "u1".into(),
        container: "main".into(),
        subpaths: Vec::new(),
        keys: vec![key("app.env", "NAME"), key("app.env", "OTHER"), key("none", "NAME"), key("out", "root")],
    };
    let values = client.prepare_container(within(request, LONG)).await.unwrap().into_inner().values;
    let found: Vec<_> = values.into_iter().map(|value| value.found.unwrap()).collect();
    use pb::file_key_value::Found;
    assert_eq!(found[..3], [Found::Value("keel son".into()), Found::Missing(true), Found::Missing(true)]);
    assert!(matches!(&found[3], Found::Error(why) if why.contains("out of the volume")), "{found:?}");
    assert!(!world.pod("u1").join("volume-subpaths").exists());
}
