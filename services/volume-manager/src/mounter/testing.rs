//! What tests need to mount: a helper process, folders that are unmounted, loop devices that are detached, and programs that
//! behave as a test wants.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::desire::{FsGroupPolicy, PodRef};
use keelson_volume_manager_core::objects::PersistentVolume;
use keelson_volume_manager_core::world::MountLabel;
use rustix::mount::UnmountFlags;

use super::helper;
use super::state::Mounter;
use crate::plugins::{SetUpRequest, VolumeSpec};
use crate::walks::FsGroupWalks;

/// Set for the test program if it is the helper.
const IS_HELPER: &str = "KEELSON_TEST_IS_VOLUME_HELPER";

/// Not a test by itself: the test program started as the helper. It answers on descriptor 3, since the test harness writes
/// to stdout.
#[test]
fn answers_as_the_helper_if_it_is_started_as_one() {
    if std::env::var_os(IS_HELPER).is_some() {
        let output = fs::OpenOptions::new().write(true).open("/proc/self/fd/3").unwrap();
        helper::serve(Box::new(output)).unwrap();
        std::process::exit(0);
    }
}

/// A folder of a test. What is mounted in it is unmounted with it.
pub(crate) struct TestFolder {
    dir: tempfile::TempDir,
    path: PathBuf,
}

impl TestFolder {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        fs::create_dir(path.join("bin")).unwrap();
        Self { dir, path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a folder.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// Writes a shell script that is found instead of the program with its name.
    pub(crate) fn program(&self, name: &str, script: &str) -> PathBuf {
        let path = self.path.join("bin").join(name);
        // Written by another process: a file that is open for writing in one that forks cannot be executed.
        let status = Command::new("sh")
            .args(["-c", "printf '%s\\n' \"$2\" > \"$1\" && chmod 755 \"$1\"", "sh"])
            .arg(&path)
            .arg(format!("#!/bin/sh\n{script}"))
            .status();
        assert!(status.unwrap().success());
        path
    }

    /// A mounter that finds the programs of this folder first, and whose helper is this test program.
    pub(crate) fn mounter(&self) -> Mounter {
        self.helper();
        mounter_in(&self.path)
    }

    /// The program that starts this test program as the helper.
    pub(crate) fn helper(&self) -> PathBuf {
        let test = std::env::current_exe().unwrap();
        let module = module_path!().split_once("::").unwrap().1;
        let name = format!("{module}::answers_as_the_helper_if_it_is_started_as_one");
        let script = format!("exec 3>&1 1>/dev/null\n{IS_HELPER}=1 exec '{}' --exact {name}", test.display());
        self.program("helper", &script)
    }

    /// Mounts a tmpfs.
    pub(crate) fn tmpfs(&self, name: &str) -> PathBuf {
        let path = self.folder(name);
        rustix::mount::mount("tmpfs", &path, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
        path
    }
}

/// A mounter that finds the programs of this folder first, and whose helper is one of them.
pub(crate) fn mounter_in(folder: &Path) -> Mounter {
    let own = folder.join("bin");
    let search_path: OsString = format!("{}:{}", own.display(), std::env::var("PATH").unwrap()).into();
    Mounter::with_helper(own.join("helper").into_os_string()).with_search_path(search_path)
}

impl TestFolder {
    /// Detaches the loop devices over what is in the folder.
    fn detach_loop_devices(&self) {
        for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
            let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if Path::new(backing.trim()).starts_with(&self.path) {
                let _ =
                    Command::new("losetup").arg("-d").arg(Path::new("/dev").join(entry.file_name())).status();
            }
        }
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        self.detach_loop_devices();
        let table = keelson_mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap_or_default());
        let below: Vec<_> = keelson_mountinfo::below(&table, &self.path).collect();
        for mount in below.iter().rev() {
            let _ = rustix::mount::unmount(&mount.point, UnmountFlags::DETACH);
        }
        // Keeps it until everything is unmounted.
        let _ = &self.dir;
    }
}

/// A loop device over a file. It is detached when this is dropped.
pub(crate) struct LoopDevice(pub(crate) PathBuf);

impl LoopDevice {
    /// A blank one of `megabytes`.
    pub(crate) fn new(folder: &TestFolder, name: &str, megabytes: u64) -> Self {
        let file = folder.path().join(name);
        fs::File::create(&file).unwrap().set_len(megabytes << 20).unwrap();
        let output = Command::new("losetup").args(["-f", "--show"]).arg(&file).output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "losetup: {why}; `modprobe loop` loads the module of loop devices");
        Self(String::from_utf8(output.stdout).unwrap().trim().into())
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// The permissions of a file.
pub(crate) fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// The volume `pv` of the pod `uid`, with a PersistentVolume that has this source.
pub(crate) fn volume(uid: &str, field: &str, source: serde_json::Value) -> VolumeSpec {
    VolumeSpec {
        pod: PodRef { uid: uid.into(), namespace: "ns".into(), name: "pod".into() },
        service_account: "default".into(),
        outer_name: "data".into(),
        inner_name: "pv".into(),
        field: field.into(),
        source,
        persistent: Some(Arc::new(PersistentVolume::default())),
        claim: Some("claim".into()),
        claim_size: None,
        mode: VolumeMode::Filesystem,
        read_only: false,
        is_migrated: false,
        mount_options: Vec::new(),
        fs_group: None,
        fs_group_policy: FsGroupPolicy::Always,
    }
}

/// A first request to set a volume up.
pub(crate) fn request<'a>(walks: &'a FsGroupWalks) -> SetUpRequest<'a> {
    SetUpRequest {
        device_path: None,
        device_mount_path: None,
        label: &MountLabel::Unlabelled,
        is_remount: false,
        is_reconstructed: false,
        walks,
    }
}

/// Waits until the process whose id a script has written to a file has ended.
pub(crate) async fn until_ended(pid_file: PathBuf) {
    let text = fs::read_to_string(&pid_file).unwrap();
    let pid = rustix::process::Pid::from_raw(text.trim().parse().unwrap()).unwrap();
    let Ok(process) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else { return };
    let waited = tokio::task::spawn_blocking(move || {
        let mut files = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        rustix::event::poll(&mut files, Some(&timeout))
    });
    assert_eq!(waited.await.unwrap().unwrap(), 1, "the process is still there");
}
