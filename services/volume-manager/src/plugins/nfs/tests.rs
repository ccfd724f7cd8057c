use std::fs;
use std::path::Path;
use std::time::Duration;

use keelson_volume_manager_core::operations::PodUid;
use serde_json::json;

use super::*;
use crate::mounter::testing::{TestFolder, mode, request, until_ended, volume};
use crate::walks::FsGroupWalks;

/// A mount(8) that logs its arguments and mounts a tmpfs instead.
fn log_mounts(folder: &TestFolder) {
    let log = folder.path().join("log");
    let script = format!(
        "echo \"$*\" >> {}\nfor last; do :; done\nexec /usr/bin/mount -t tmpfs tmpfs \"$last\"",
        log.display()
    );
    folder.program("mount", &script);
}

fn logged(folder: &TestFolder) -> Vec<String> {
    let text = fs::read_to_string(folder.path().join("log")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn nfs(folder: &TestFolder) -> Nfs {
    Nfs::new(folder.path().to_owned(), folder.mounter())
}

fn target(folder: &TestFolder) -> PathBuf {
    folder.path().join("pods/uid/volumes/kubernetes.io~nfs/pv")
}

fn spec() -> VolumeSpec {
    volume("uid", "nfs", json!({"server": "fd00::1", "path": "/export", "readOnly": true}))
}

fn place() -> VolumePlace {
    VolumePlace {
        volume: "nfs".into(),
        pod: PodUid::from("uid"),
        plugin: NAME.into(),
        inner_name: "pv".into(),
        is_block: false,
    }
}

#[tokio::test]
async fn an_nfs_volume_is_mounted_once_and_unmounted_with_its_folder() {
    let folder = TestFolder::new();
    log_mounts(&folder);
    let plugin = nfs(&folder);
    let mut spec = spec();
    spec.mount_options = vec!["nfsvers=4.1".into(), "hard".into(), "hard".into()];
    let walks = FsGroupWalks::default();
    for _ in 0..2 {
        let ready = plugin.set_up(&spec, request(&walks)).await.unwrap();
        assert_eq!(ready.host_path, target(&folder));
    }
    let expected = format!("-t nfs -o hard,nfsvers=4.1 -- [fd00::1]:/export {}", target(&folder).display());
    assert_eq!(logged(&folder), [expected]);
    assert_eq!(mode(target(&folder).parent().unwrap()), 0o750);
    for _ in 0..2 {
        plugin.tear_down(&place()).await.unwrap();
    }
    assert!(!target(&folder).exists());
}

#[tokio::test]
async fn read_only_is_that_of_the_claim_or_without_one_that_of_the_source() {
    let folder = TestFolder::new();
    log_mounts(&folder);
    let plugin = nfs(&folder);
    let walks = FsGroupWalks::default();
    let mut inline = spec();
    inline.persistent = None;
    let mut claimed = spec();
    claimed.read_only = true;
    for (spec, expected) in [(&inline, true), (&claimed, true), (&spec(), false)] {
        assert_eq!(plugin.identify(spec).await.unwrap().read_only, expected);
        plugin.set_up(spec, request(&walks)).await.unwrap();
        plugin.tear_down(&place()).await.unwrap();
        assert_eq!(logged(&folder).last().unwrap().contains("-o ro "), expected);
    }
}

#[tokio::test]
async fn a_failed_nfs_mount_leaves_no_folder_and_says_what_the_helper_wrote() {
    let folder = TestFolder::new();
    folder.program("mount", "echo 'mount.nfs: access denied by server' >&2; exit 32");
    let walks = FsGroupWalks::default();
    let error = nfs(&folder).set_up(&spec(), request(&walks)).await.unwrap_err();
    let expected = "mount of [fd00::1]:/export failed with exit code 32: mount.nfs: access denied by server";
    assert!(error.message.contains(expected), "{}", error.message);
    assert_eq!(error.class, FailureClass::Final);
    assert!(!target(&folder).exists());
    // One found at startup keeps its folder, so that it is found again.
    let found = SetUpRequest { is_reconstructed: true, ..request(&walks) };
    nfs(&folder).set_up(&spec(), found).await.unwrap_err();
    assert!(target(&folder).exists());
}

#[tokio::test]
async fn an_nfs_server_that_hangs_makes_the_volume_uncertain() {
    let folder = TestFolder::new();
    let pid = folder.path().join("pid");
    folder.program("mount", &format!("echo $$ > {}\nexec sleep 1000", pid.display()));
    let mounter = folder.mounter().with_deadline(Duration::from_secs(6));
    let plugin = Nfs::new(folder.path().to_owned(), mounter);
    let walks = FsGroupWalks::default();
    let error = plugin.set_up(&spec(), request(&walks)).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    until_ended(pid).await;
}

#[tokio::test]
async fn a_source_that_cannot_be_mounted_is_refused_before_anything_is_done() {
    let folder = TestFolder::new();
    for source in [json!({"server": "", "path": "/x"}), json!({"server": "s", "path": "x"}), json!([])] {
        let error = nfs(&folder).identify(&volume("uid", "nfs", source)).await.unwrap_err();
        assert_eq!(error.owner, keelson_volume_manager_core::wait_owner::WaitOwner::You);
    }
    assert!(!nfs(&folder).abilities().block, "the resolver refuses such volumes");
    assert!(!Path::new(&folder.path().join("pods")).exists());
}
