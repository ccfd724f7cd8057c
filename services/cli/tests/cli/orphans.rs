//! `keelson orphans`.

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::volume_manager::v1::orphaned_path::Kind;
use keelson_proto::keelson::volume_manager::v1::{OrphanedPath, OrphanedPod};
use serde_json::json;

use crate::fake::{Fake, World};
use crate::{keelson, world};

/// Three orphaned pods: the fake volume-manager leaves the mount of `u8`, removes `u9`, and does not find `gone` any more.
pub(crate) fn world_with_orphans() -> World {
    let path = |path: &str, kind: Kind| OrphanedPath { path: path.into(), kind: kind.into() };
    let orphan = |uid: &str, paths: Vec<OrphanedPath>, message: &str| OrphanedPod {
        uid: uid.into(),
        path: format!("/var/lib/kubelet/pods/{uid}"),
        paths,
        message: message.into(),
    };
    let nfs = "volumes/kubernetes.io~nfs/data";
    let orphans = vec![
        orphan("gone", vec![], ""),
        orphan(
            "u8",
            vec![path(nfs, Kind::Mount), path("volumes/kubernetes.io~empty-dir/tmp", Kind::Volume)],
            "volumes/kubernetes.io~nfs/data is mounted",
        ),
        orphan("u9", vec![path("etc-hosts", Kind::File), path("plugins", Kind::Unspecified)], ""),
    ];
    World { orphans, ..world() }
}

#[test]
fn orphans_list_shows_what_is_left_and_why() {
    let fake = Fake::start(world_with_orphans());
    assert_eq!(
        keelson(&fake.run_dir, &["orphans", "list"]).ok(),
        "UID    MOUNTS   VOLUMES   FILES   MESSAGE\n\
         gone   0        0         0       -\n\
         u8     1        1         0       volumes/kubernetes.io~nfs/data is mounted\n\
         u9     0        0         1       -\n"
    );
    let wide = keelson(&fake.run_dir, &["orphans", "list", "-o", "wide"]).ok();
    assert!(wide.lines().next().unwrap().ends_with("   DIRECTORY"), "{wide}");
    assert!(wide.lines().last().unwrap().ends_with("   /var/lib/kubelet/pods/u9"), "{wide}");
    let list = keelson(&fake.run_dir, &["orphans", "list", "-o", "json"]).json();
    assert_eq!(
        list["items"][2],
        json!({"uid": "u9", "path": "/var/lib/kubelet/pods/u9", "message": "",
               "paths": [{"path": "etc-hosts", "kind": "file"}, {"path": "plugins", "kind": "unknown"}]})
    );
    assert!(fake.world.calls.is_empty());
}

#[test]
fn orphans_without_orphaned_pods_print_a_notice_or_an_empty_list() {
    let fake = Fake::start(world());
    for args in [&["orphans", "list"][..], &["orphans", "clean", "--all"]] {
        let result = keelson(&fake.run_dir, args);
        let shown = (result.out.as_str(), result.err.as_str(), result.code);
        assert_eq!(shown, ("", "No orphaned pods found.\n", Some(0)), "{args:?}");
        let list = keelson(&fake.run_dir, &[args, &["-o", "json"]].concat()).json();
        assert_eq!(list, json!({"items": []}), "{args:?}");
    }
}

#[test]
fn orphans_clean_shows_what_is_removed_and_fails_if_something_is_left() {
    let fake = Fake::start(world_with_orphans());
    assert_eq!(
        keelson(&fake.run_dir, &["orphans", "clean", "u9"]).ok(),
        "UID   RESULT    KIND      PATH\n\
         u9    removed   file      etc-hosts\n\
         u9    removed   unknown   plugins\n"
    );
    let result = keelson(&fake.run_dir, &["orphans", "clean", "--all"]);
    assert_eq!(
        result.out,
        "UID   RESULT    KIND     PATH\n\
         u8    removed   volume   volumes/kubernetes.io~empty-dir/tmp\n\
         u8    left      mount    volumes/kubernetes.io~nfs/data\n\
         u9    removed   file      etc-hosts\n\
         u9    removed   unknown   plugins\n"
    );
    let (error, hint) = result.failed(1);
    assert_eq!(error, "1 of 2 paths of the pod u8 are left: they are in use, or not safe to remove");
    assert!(hint.contains("`keelson orphans list`"), "{hint}");
    assert_eq!(
        fake.world.calls.all(),
        [
            "clean u9 dry_run=false",
            "clean gone dry_run=false",
            "clean u8 dry_run=false",
            "clean u9 dry_run=false"
        ]
    );
}

#[test]
fn orphans_clean_with_dry_run_removes_nothing_and_succeeds() {
    let fake = Fake::start(world_with_orphans());
    let args = ["orphans", "clean", "u8", "--dry-run"];
    let shown = keelson(&fake.run_dir, &args).ok();
    assert!(shown.contains("u8    would be removed   volume   volumes/"), "{shown}");
    assert!(shown.contains("u8    would stay         mount    volumes/"), "{shown}");
    let list = keelson(&fake.run_dir, &[&args[..], &["-o", "json"]].concat()).json();
    assert_eq!(
        list["items"],
        json!([{"uid": "u8", "dry_run": true,
                "removed": [{"path": "volumes/kubernetes.io~empty-dir/tmp", "kind": "volume"}],
                "left": [{"path": "volumes/kubernetes.io~nfs/data", "kind": "mount"}]}])
    );
    assert_eq!(fake.world.calls.all(), ["clean u8 dry_run=true", "clean u8 dry_run=true"]);
}

#[test]
fn orphans_clean_refuses_pods_that_are_not_orphaned_and_does_the_others() {
    let fake = Fake::start(world_with_orphans());
    let result = keelson(&fake.run_dir, &["orphans", "clean", "u1"]);
    let (error, hint) = result.failed(1);
    assert_eq!(error, "the pod u1 is not orphaned: the source file names it");
    assert!(hint.contains("`keelson get pods -A`"), "{hint}");
    let result = keelson(&fake.run_dir, &["orphans", "clean", "nope"]);
    assert!(result.failed(1).1.contains("`keelson orphans list`"), "{result:?}");
    let result = keelson(&fake.run_dir, &["orphans", "clean", "u1", "nope", "u9"]);
    assert_eq!(result.failed(1).0, "2 of 3 failed");
    assert!(result.out.contains("u9    removed   file"), "{result:?}");
}

#[test]
fn orphans_clean_needs_either_uids_or_all() {
    let fake = Fake::start(world_with_orphans());
    for args in [&["orphans", "clean"][..], &["orphans", "clean", "u9", "--all"], &["orphans"]] {
        assert_eq!(keelson(&fake.run_dir, args).code, Some(64), "{args:?}");
    }
    let result = keelson(&fake.run_dir, &["orphans", "list", "--etcd", "http://127.0.0.1:1"]);
    assert!(result.failed(64).0.contains("`keelson orphans` calls the agent of this machine"), "{result:?}");
    assert!(fake.world.calls.is_empty());
}

#[test]
fn orphans_name_volume_manager_while_it_is_down() {
    let fake = Fake::start_some(world_with_orphans(), &[ServiceName::PodSync], &Config::default());
    for args in [&["orphans", "list"][..], &["orphans", "clean", "u9", "u8"]] {
        let result = keelson(&fake.run_dir, args);
        assert!(result.failed(69).0.starts_with("volume-manager is not running"), "{result:?}");
    }
}
