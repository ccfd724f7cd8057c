use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_volume_manager_core::desire::FsGroupPolicy;
use keelson_volume_manager_core::wait_owner::WaitOwner;
use keelson_volume_manager_core::world::FailureClass;

use super::testing::{LoopDevice, TestFolder, mode, until_ended};
use super::{MountRequest, Mounter};
use crate::walks::FsGroupWalks;

/// A deadline that a program which hangs reaches soon.
const SHORT: Duration = Duration::from_millis(200);

fn options(list: &[&str]) -> Vec<String> {
    list.iter().map(|option| (*option).to_owned()).collect()
}

fn request<'a>(source: &'a str, target: &'a Path, fs_type: &'a str) -> MountRequest<'a> {
    MountRequest { source, target, fs_type, options: &[], sensitive: &[] }
}

/// Creates a pipe and lets the function write to it once it is read.
fn fifo(folder: &TestFolder, name: &str) -> PathBuf {
    let path = folder.path().join(name);
    let status = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(status.success());
    path
}

#[tokio::test]
async fn a_bind_mount_gets_its_options_and_leaves_its_source_as_it_is() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    let (source, target) = (folder.tmpfs("source"), folder.folder("target"));
    mounter.bind(&source, &target, &options(&["ro"])).await.unwrap();
    fs::write(source.join("file"), "x").unwrap();
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "x");
    let error = fs::write(target.join("file"), "y").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert!(mounter.is_mount_point(&target).unwrap());
    assert_eq!(mounter.mount_references(&source).unwrap(), std::slice::from_ref(&target));
    mounter.clean_mount_point(&target, false).await.unwrap();
    assert!(!target.exists() && source.join("file").exists());
}

#[tokio::test]
async fn a_bind_mount_without_its_options_is_not_complete_and_gets_them() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    let (source, target) = (folder.tmpfs("source"), folder.folder("target"));
    let restricted = options(&["ro", "noexec"]);
    assert!(!mounter.is_bound(&target, &[]).unwrap(), "nothing is mounted");
    rustix::mount::mount_bind(&source, &target).unwrap();
    assert!(mounter.is_bound(&target, &[]).unwrap());
    assert!(!mounter.is_bound(&target, &restricted).unwrap());
    mounter.bind(&source, &target, &restricted).await.unwrap();
    assert!(mounter.is_bound(&target, &restricted).unwrap());
    assert!(fs::write(target.join("file"), "x").is_err());
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
    assert!(!mounter.is_mount_point(&target).unwrap(), "it was mounted once");
}

#[tokio::test]
async fn many_helpers_for_the_same_path_at_once_all_get_their_turn() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    let path = folder.path();
    let asked = (0..12).map(|_| mounter.inspect(path));
    for found in futures_util::future::join_all(asked).await {
        assert_eq!(found.unwrap().unwrap().path, path);
    }
}

#[tokio::test]
async fn a_bind_mount_of_a_missing_path_names_it_and_mounts_nothing() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    let target = folder.folder("target");
    let missing = folder.path().join("missing");
    let error = mounter.bind(&missing, &target, &[]).await.unwrap_err();
    assert!(error.message.contains("missing: No such file"), "{}", error.message);
    assert_eq!(error.class, FailureClass::Transient, "nothing was tried");
    assert!(!mounter.is_mount_point(&target).unwrap());
}

#[tokio::test]
async fn a_bind_mount_without_its_options_is_taken_back() {
    let folder = TestFolder::new();
    folder.program(
        "mount",
        "case \"$*\" in *remount*) echo no >&2; exit 32;; esac\nexec /usr/bin/mount \"$@\"",
    );
    let mounter = folder.mounter();
    let (source, target) = (folder.tmpfs("source"), folder.folder("target"));
    let error = mounter.bind(&source, &target, &options(&["ro"])).await.unwrap_err();
    assert!(error.message.contains("mount exited with 32: no"), "{}", error.message);
    assert_eq!(error.class, FailureClass::Final);
    assert!(!mounter.is_mount_point(&target).unwrap());
}

#[tokio::test]
async fn a_failed_mount_is_described_without_its_secrets() {
    let folder = TestFolder::new();
    folder.program("mount", "echo \"bad options: $*\" >&2; exit 32");
    let (mounter, target) = (folder.mounter(), folder.folder("target"));
    let (shown, secret) = (options(&["vers=3.0"]), options(&["username=joe,password=hunter2"]));
    let request =
        MountRequest { options: &shown, sensitive: &secret, ..request("//srv/share", &target, "ext4") };
    let error = mounter.mount(request).await.unwrap_err();
    let expected = format!(
        "cannot mount //srv/share on {target} as ext4 with the options vers=3.0,<masked>,<masked>: \
         mount exited with 32: bad options: -t ext4 -o vers=3.0,<masked>,<masked> -- //srv/share {target}",
        target = target.display()
    );
    assert_eq!(error.message, expected);
    assert_eq!((error.class, error.owner), (FailureClass::Final, WaitOwner::VolumeManager));
    folder.program("mount", "exit 64");
    assert_eq!(mounter.mount(request).await.unwrap_err().class, FailureClass::Uncertain);
    folder.program("mount", "kill -9 $$");
    assert_eq!(mounter.mount(request).await.unwrap_err().class, FailureClass::Uncertain);
}

#[tokio::test]
async fn a_mount_that_hangs_is_killed_at_its_deadline_with_what_it_started() {
    let folder = TestFolder::new();
    let pid = folder.path().join("pid");
    folder.program("mount", &format!("echo waiting >&2\nsleep 1000 &\necho $! > {}\nwait", pid.display()));
    let target = folder.folder("target");
    let mounter = Mounter { deadline: Duration::from_secs(6), ..folder.mounter() };
    let error = mounter.mount(request("srv:/a", &target, "nfs")).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(error.message.contains("mount has not ended after 6 s: waiting"), "{}", error.message);
    until_ended(pid).await;
    // The next attempt is not refused.
    folder.program("mount", "exit 0");
    mounter.mount(request("srv:/a", &target, "nfs")).await.unwrap();
}

#[tokio::test]
async fn a_program_that_is_not_killed_keeps_the_next_one_from_starting() {
    let folder = TestFolder::new();
    let (go, done) = (fifo(&folder, "go"), fifo(&folder, "done"));
    folder.program("blkid", "exit 2");
    let script = format!("read x < {}\necho x > {}", go.display(), done.display());
    folder.program("mkfs.ext4", &script);
    folder.program("mount", "exit 0");
    let target = folder.folder("target");
    let mounter = Mounter { device_deadline: SHORT, ..folder.mounter() };
    let device = folder.path().join("device").display().to_string();
    let error = mounter.format_and_mount(request(&device, &target, ""), &[]).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(error.message.contains("mkfs.ext4 has not ended after 0.2 s"), "{}", error.message);
    let error = mounter.format_and_mount(request(&device, &target, ""), &[]).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Transient);
    let text = format!("the earlier attempt to run mkfs.ext4 for the device {device} (process ");
    assert!(error.message.contains(&text), "{}", error.message);
    // mkfs was not killed: it runs to its end.
    let ended = tokio::task::spawn_blocking(move || {
        fs::write(go, "x\n").unwrap();
        fs::read_to_string(done).unwrap()
    });
    assert_eq!(ended.await.unwrap(), "x\n");
    folder.program("mkfs.ext4", "exit 0");
    let mounter = Mounter { device_deadline: Duration::from_secs(20), ..mounter };
    let formatted = async {
        while let Err(error) = mounter.format_and_mount(request(&device, &target, ""), &[]).await {
            // Until the end of mkfs is known.
            assert_eq!(error.class, FailureClass::Transient, "{}", error.message);
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), formatted).await.unwrap();
}

#[tokio::test]
async fn a_helper_that_hangs_is_abandoned() {
    let folder = TestFolder::new();
    let pid = folder.path().join("pid");
    let mut mounter = folder.mounter();
    folder.program("helper", &format!("echo $$ > {}\nexec sleep 1000", pid.display()));
    mounter.client.patience = Duration::from_secs(6);
    let error = mounter.inspect(Path::new("/foreign")).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(error.message.contains("cannot look at /foreign: the helper process has not ended after 6 s"));
    until_ended(pid).await;
    folder.program("helper", "exit 3");
    let error = mounter.inspect(Path::new("/foreign")).await.unwrap_err();
    assert!(error.message.contains("the helper process gave no answer: exit status: 3"), "{}", error.message);
}

#[tokio::test]
async fn a_missing_program_is_reported_with_its_package() {
    let folder = TestFolder::new();
    let target = folder.folder("target");
    let mounter = folder.mounter().with_search_path(folder.path().join("bin").into_os_string());
    let error = mounter.mount(request("/dev/x", &target, "ext4")).await.unwrap_err();
    assert!(error.message.ends_with("mount is not on this node; install it (package util-linux)"));
    assert_eq!(error.owner, WaitOwner::You);
    folder.program("blkid", "exit 2");
    folder.program("helper", "read request; echo '{\"done\":{\"busy\":false}}'");
    let error = mounter.format_and_mount(request("/dev/x", &target, "xfs"), &[]).await.unwrap_err();
    assert!(error.message.ends_with("; install it (package xfsprogs)"), "{}", error.message);
}

#[tokio::test]
async fn a_wrong_option_is_for_a_person_to_correct() {
    let folder = TestFolder::new();
    let target = folder.folder("target");
    let wrong = options(&["a=\""]);
    let request = MountRequest { options: &wrong, ..request("x", &target, "ext4") };
    assert_eq!(folder.mounter().mount(request).await.unwrap_err().owner, WaitOwner::You);
}

#[tokio::test]
async fn a_blank_device_is_formatted_once() {
    let folder = TestFolder::new();
    let device = LoopDevice::new(&folder, "disk", 32);
    let (mounter, target) = (folder.mounter(), folder.folder("target"));
    let read_only = options(&["ro"]);
    let blank = MountRequest { options: &read_only, ..request(device.path(), &target, "") };
    let error = mounter.format_and_mount(blank, &[]).await.unwrap_err();
    assert!(error.message.contains("unformatted"), "{}", error.message);
    assert_eq!(error.owner, WaitOwner::You);

    mounter.format_and_mount(request(device.path(), &target, ""), &[]).await.unwrap();
    assert!(mounter.is_busy(Path::new(device.path())).await.unwrap());
    fs::write(target.join("file"), "x").unwrap();
    mounter.unmount(&target, false).await.unwrap();
    assert!(!mounter.is_busy(Path::new(device.path())).await.unwrap());
    let error = mounter.format_and_mount(request(device.path(), &target, "xfs"), &[]).await.unwrap_err();
    assert!(error.message.contains("as xfs, because it contains the file system ext4"), "{}", error.message);
    mounter.format_and_mount(request(device.path(), &target, "ext4"), &[]).await.unwrap();
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "x");
    mounter.unmount(&target, false).await.unwrap();
}

#[tokio::test]
#[ignore = "needs CAP_SYS_RESOURCE, which root in a container may lack; cargo xtask test --long runs it"]
async fn a_mounted_file_system_grows_with_its_device() {
    let folder = TestFolder::new();
    let device = LoopDevice::new(&folder, "disk", 32);
    let (mounter, target) = (folder.mounter(), folder.folder("target"));
    mounter.format_and_mount(request(device.path(), &target, ""), &[]).await.unwrap();
    let size = || rustix::fs::statvfs(&target).unwrap().f_blocks;
    let before = size();
    fs::OpenOptions::new().write(true).open(folder.path().join("disk")).unwrap().set_len(64 << 20).unwrap();
    let status = std::process::Command::new("losetup").args(["-c", device.path()]).status().unwrap();
    assert!(status.success());
    mounter.grow(Path::new(device.path()), &target).await.expect("run this with CAP_SYS_RESOURCE");
    assert!(size() > before);
    mounter.unmount(&target, false).await.unwrap();
}

#[tokio::test]
async fn a_blank_device_that_is_in_use_is_not_formatted() {
    let folder = TestFolder::new();
    let target = folder.folder("target");
    let mounter = folder.mounter();
    folder.program("blkid", "exit 2");
    folder.program("mkfs.ext4", "exit 3");
    folder.program("helper", "read request; echo '{\"done\":{\"busy\":true}}'");
    let error = mounter.format_and_mount(request("/dev/x", &target, ""), &[]).await.unwrap_err();
    assert!(error.message.contains("in use"), "{}", error.message);
    assert_eq!(error.class, FailureClass::Transient);
}

#[tokio::test]
async fn cleaning_a_mount_point_unmounts_all_of_it_and_removes_only_an_empty_folder() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    mounter.clean_mount_point(&folder.path().join("missing/deep"), true).await.unwrap();
    let target = folder.tmpfs("target");
    folder.tmpfs("target");
    mounter.clean_mount_point(&target, false).await.unwrap();
    assert!(!target.exists());
    let full = folder.folder("full");
    fs::write(full.join("file"), "x").unwrap();
    let error = mounter.clean_mount_point(&full, false).await.unwrap_err();
    assert!(error.message.contains("not empty") && full.join("file").exists(), "{}", error.message);
}

#[tokio::test]
async fn an_unmount_of_a_volume_with_mounts_below_names_them() {
    let folder = TestFolder::new();
    let (target, below) = (folder.tmpfs("target"), folder.tmpfs("target/below"));
    let error = folder.mounter().clean_mount_point(&target, false).await.unwrap_err();
    let expected = format!("below it are mounted {}", below.display());
    assert!(error.message.contains(&expected), "{}", error.message);
}

#[tokio::test]
async fn an_unmount_that_hangs_is_forced() {
    let folder = TestFolder::new();
    let script = "case \"$*\" in *-f*) exec /usr/bin/umount \"$@\";; esac\nexec sleep 1000";
    folder.program("umount", script);
    let target = folder.tmpfs("target");
    let mounter = Mounter { force_after: SHORT, deadline: Duration::from_secs(20), ..folder.mounter() };
    mounter.clean_mount_point(&target, true).await.unwrap();
    assert!(!target.exists());
    let target = folder.tmpfs("target");
    let mounter = Mounter { deadline: SHORT, ..mounter };
    let error = mounter.clean_mount_point(&target, false).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    assert!(mounter.is_mount_point(&target).unwrap());
}

#[tokio::test]
async fn only_a_mount_that_may_start_a_daemon_gets_a_scope() {
    let folder = TestFolder::new();
    let log = folder.path().join("log");
    let record = |name: &str| format!("echo {name} \"$*\" >> {}", log.display());
    folder.program("systemd-run", &format!("{}\nshift 3\nexec \"$@\"", record("systemd-run")));
    folder.program("mount", &record("mount"));
    let (mounter, target) = (folder.mounter(), folder.folder("target"));
    let secret = options(&["password=hunter2"]);
    let lines = |fs_type| {
        let (mounter, target, secret, log) = (&mounter, &target, &secret, &log);
        async move {
            fs::write(log, "").unwrap();
            let request = MountRequest { sensitive: secret, ..request("src", target, fs_type) };
            mounter.mount(request).await.unwrap();
            fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
        }
    };
    assert_eq!(lines("nfs").await.len(), 1);
    assert_eq!(lines("tmpfs").await.len(), 1);
    // The first one finds out whether systemd starts scopes.
    assert!(lines("cifs").await[0].ends_with("--scope -- true"));
    let fuse = lines("fuse.sshfs").await;
    assert_eq!(fuse.len(), 2);
    assert!(fuse[0].starts_with("systemd-run --description=Mount of a volume on /"), "{}", fuse[0]);
    assert!(!fuse[0].split(" --scope ").next().unwrap().contains("hunter2"));
    assert!(fuse[1].starts_with("mount -t fuse.sshfs -o password=hunter2 -- src "), "{}", fuse[1]);
}

#[tokio::test]
async fn a_walk_in_the_helper_is_recorded_with_the_number_of_its_files() {
    let folder = TestFolder::new();
    let (mounter, volume) = (folder.mounter(), folder.folder("volume"));
    fs::write(volume.join("file"), "x").unwrap();
    let walks = FsGroupWalks::default();
    mounter.apply_fs_group(&volume, 4711, false, FsGroupPolicy::Always, &walks).await.unwrap();
    let ended = walks.take_ended();
    assert_eq!((ended.len(), ended[0].succeeded, ended[0].files), (1, true, 2));
    assert_eq!(mode(&volume) & 0o2770, 0o2770);
    let again = FsGroupPolicy::OnRootMismatch;
    mounter.apply_fs_group(&volume, 4711, false, again, &walks).await.unwrap();
    assert_eq!(walks.take_ended()[0].files, 0);
    let missing = folder.path().join("missing");
    let error = mounter.apply_fs_group(&missing, 1, false, again, &walks).await.unwrap_err();
    assert!(error.message.contains("cannot apply the pod's fsGroup to"), "{}", error.message);
    assert!(!walks.take_ended()[0].succeeded);
}

#[tokio::test]
async fn a_walk_that_nobody_waits_for_ends() {
    let folder = TestFolder::new();
    let (pid, started) = (folder.path().join("pid"), fifo(&folder, "started"));
    let mounter = folder.mounter();
    let script = format!("echo $$ > {}\necho > {}\nexec sleep 1000", pid.display(), started.display());
    folder.program("helper", &script);
    let walks = FsGroupWalks::default();
    let always = FsGroupPolicy::Always;
    let walk = mounter.apply_fs_group(Path::new("/volume"), 1, false, always, &walks);
    let begun = tokio::task::spawn_blocking(move || fs::read(started));
    tokio::select! {
        _ = walk => panic!("the helper hangs"),
        begun = begun => drop(begun.unwrap().unwrap()),
    }
    until_ended(pid).await;
    assert!(walks.current().is_none() && !walks.take_ended()[0].succeeded);
}

#[tokio::test]
async fn folders_are_created_by_the_helper_with_their_mode() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    let deep = folder.path().join("a/b");
    mounter.create_folders(&deep, 0o750).await.unwrap();
    mounter.create_folders(&deep, 0o700).await.unwrap();
    assert_eq!((mode(&deep), mode(deep.parent().unwrap())), (0o750, 0o750));
    fs::write(folder.path().join("file"), "").unwrap();
    let error = mounter.create_folders(&folder.path().join("file/x"), 0o750).await.unwrap_err();
    assert!(error.message.contains("cannot create the folder /"), "{}", error.message);
}

#[tokio::test]
async fn the_helper_unmounts_subpaths_of_one_volume_and_of_all() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    let pod = folder.folder("pod");
    mounter.remove_subpaths(&pod, None).await.unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.tmpfs(&format!("pod/volume-subpaths/{name}/main/0")));
    mounter.remove_subpaths(&pod, Some("one")).await.unwrap();
    assert!(!one.exists() && mounter.is_mount_point(&two).unwrap());
    let held = fs::File::open(&two).unwrap();
    let error = mounter.remove_subpaths(&pod, None).await.unwrap_err();
    assert!(error.message.contains("cannot unmount the subPath: "), "{}", error.message);
    drop(held);
    mounter.remove_subpaths(&pod, None).await.unwrap();
    assert!(!pod.join("volume-subpaths").exists());
}

#[tokio::test]
async fn an_unmount_of_subpaths_that_hangs_is_abandoned_and_holds_up_no_other_volume() {
    let folder = TestFolder::new();
    let mounter = folder.mounter();
    let pod = folder.folder("pod");
    folder.folder("pod/volume-subpaths/hanging");
    let pid = folder.path().join("pid");
    folder.program("helper", &format!("echo $$ > {}\nexec sleep 1000", pid.display()));
    let hasty = mounter.clone().with_patience(Duration::from_secs(3));
    let error = hasty.remove_subpaths(&pod, Some("hanging")).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Uncertain);
    let volume = pod.join("volume-subpaths/hanging");
    assert!(error.message.contains(volume.to_str().unwrap()), "{}", error.message);
    until_ended(pid).await;
    folder.helper();
    mounter.remove_subpaths(&pod, Some("other")).await.unwrap();
}

#[tokio::test]
async fn a_subpath_of_a_volume_that_hangs_is_abandoned_without_a_path_in_its_error() {
    let folder = TestFolder::new();
    let (mounter, pod, volume) = (folder.mounter(), folder.folder("pod"), folder.folder("volume"));
    let subpath = |path: &str| crate::subpath::SubPath {
        index: 0,
        volume: "data".into(),
        path: path.into(),
        read_only: true,
    };
    let prepared = mounter.prepare_subpath(&pod, "main", &volume, &subpath("sub")).await.unwrap();
    assert_eq!(prepared, pod.join("volume-subpaths/data/main/0"));
    assert!(fs::write(prepared.join("file"), "x").is_err() && volume.join("sub").is_dir());
    let error = mounter.prepare_subpath(&pod, "main", &volume, &subpath("../x")).await.unwrap_err();
    assert!(error.to_string().starts_with("the path leads out of the volume"), "{error}");
    let pid = folder.path().join("pid");
    folder.program("helper", &format!("echo $$ > {}\nexec sleep 1000", pid.display()));
    let hasty = mounter.clone().with_patience(Duration::from_secs(3));
    let error = hasty.prepare_subpath(&pod, "main", &volume, &subpath("sub")).await.unwrap_err();
    assert_eq!(error.to_string(), "the volume does not answer; it is retried");
    until_ended(pid).await;
    folder.helper();
    mounter.remove_subpaths(&pod, None).await.unwrap();
}
