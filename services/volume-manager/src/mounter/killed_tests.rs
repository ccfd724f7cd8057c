//! The service is killed at each step of a mount and of an unmount, and completes it after its restart.
//!
//! The service is this test program, started once more. A step is a program that it starts: mount(8), the helper process and
//! so on. Wrappers of these programs count the steps, and the one at the fault point kills the service with SIGKILL before
//! it does its work.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use keelson_service_kit::EventRing;
use keelson_testkit::FuseServer;
use keelson_volume_manager_core::desire::FsGroupPolicy;
use keelson_volume_manager_core::world::MountLabel;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::mount_table;
use super::testing::{LoopDevice, TestFolder, mounter_in, request, volume};
use crate::block::{self, BlockPlace};
use crate::plugins::local::Local;
use crate::plugins::{DevicePlace, DeviceRequest, Plugin, PluginError, SetUpRequest, VolumePlace};
use crate::walks::FsGroupWalks;

/// The work of the service, for the test program that is started as one.
const WORK: &str = "KEELSON_TEST_SERVICE_WORK";
/// The programs of the node that are steps.
const PROGRAMS: [&str; 6] = ["mount", "umount", "losetup", "blkid", "mkfs.ext4", "fsck"];
const GROUP: u32 = 4711;
const UID: &str = "uid";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Act {
    SetUp,
    TearDown,
}

/// What the service does.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Work {
    folder: PathBuf,
    /// `spec.local.path`, or the device to map.
    path: PathBuf,
    is_block: bool,
    options: Vec<String>,
    read_only: bool,
    policy: String,
    act: Act,
}

impl Work {
    fn new(folder: &TestFolder, path: &Path) -> Self {
        Self {
            folder: folder.path().to_owned(),
            path: path.to_owned(),
            is_block: false,
            options: Vec::new(),
            read_only: false,
            policy: "Always".to_owned(),
            act: Act::SetUp,
        }
    }

    fn act(&self, act: Act) -> Self {
        Self { act, ..self.clone() }
    }

    fn target(&self) -> PathBuf {
        self.folder.join(format!("pods/{UID}/volumes/kubernetes.io~local-volume/pv"))
    }

    fn place(&self) -> VolumePlace {
        VolumePlace {
            volume: "kubernetes.io/local-volume/pv".into(),
            pod: UID.into(),
            plugin: "kubernetes.io/local-volume".into(),
            inner_name: "pv".into(),
            is_block: self.is_block,
        }
    }

    fn block_place(&self) -> BlockPlace {
        BlockPlace::new(&self.folder, &self.folder.join("maps/pv"), &self.place())
    }

    fn steps(&self) -> u32 {
        fs::read_to_string(self.folder.join("steps")).unwrap().trim().parse().unwrap()
    }

    /// Starts the service, which is killed before the step `fault`; 0: it is not.
    fn start(&self, fault: u32) -> Child {
        fs::write(self.folder.join("steps"), "0").unwrap();
        fs::write(self.folder.join("fault"), fault.to_string()).unwrap();
        let module = module_path!().split_once("::").unwrap().1;
        let test = format!("{module}::works_as_the_service_if_it_is_started_as_one");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &test, "--nocapture"]).env(WORK, json!(self).to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn run(&self, fault: u32) -> Output {
        self.start(fault).wait_with_output().unwrap()
    }

    fn complete(&self) {
        let output = self.run(0);
        assert!(output.status.success(), "{self:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Kills the service before each step of the work in turn, and completes it each time.
    fn kill_at_each_step(&self, at_least: u32, prepare: impl Fn(), check: impl Fn()) {
        prepare();
        self.complete();
        check();
        let steps = self.steps();
        assert!(steps >= at_least, "{steps} steps");
        for step in 1..=steps {
            prepare();
            let output = self.run(step);
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(9), "step {step} of {steps}: {text}");
            self.complete();
            check();
        }
    }

    /// Kills the service at each step of the set-up and of the teardown. Before each set-up the volume is torn down, and
    /// `reset` is called.
    fn kill_everywhere(&self, at_least: u32, reset: impl Fn(), check: impl Fn()) {
        let (set_up, tear_down) = (self.act(Act::SetUp), self.act(Act::TearDown));
        let prepare = || {
            tear_down.complete();
            reset();
        };
        set_up.kill_at_each_step(at_least, prepare, check);
        tear_down.kill_at_each_step(1, || set_up.complete(), || self.check_nothing_is_left());
    }

    fn check_nothing_is_left(&self) {
        let mounts = keelson_mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap());
        let left: Vec<_> = mounts.iter().filter(|mount| mount.point.starts_with(&self.folder)).collect();
        assert!(left.is_empty(), "{left:?}");
        assert!(!self.target().exists());
        assert!(!self.folder.join("maps/pv").exists());
    }

    /// What mountinfo shows for the volume.
    fn mounted_with(&self) -> String {
        let table = mount_table::read().unwrap();
        mount_table::options_at(&table, &self.target()).unwrap_or_default().to_owned()
    }
}

/// Makes the programs of the node and the helper steps.
fn count_steps(folder: &TestFolder) {
    let real_helper = folder.path().join("bin/real-helper");
    fs::rename(folder.helper(), &real_helper).unwrap();
    let path = |name: &str| {
        let folders = std::env::var("PATH").unwrap();
        std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.exists())
    };
    let programs = PROGRAMS.into_iter().filter_map(|name| Some((name, path(name)?)));
    for (name, real) in programs.chain([("helper", real_helper)]) {
        let (real, folder_path) = (real.display(), folder.path().display());
        let script = format!(
            "step=$(($(cat {folder_path}/steps) + 1))\necho $step > {folder_path}/steps\n\
             [ $step = $(cat {folder_path}/fault) ] && kill -9 $PPID && exit 1\nexec {real} \"$@\""
        );
        folder.program(name, &script);
    }
}

/// Not a test by itself: the test program started as the service.
#[tokio::test]
async fn works_as_the_service_if_it_is_started_as_one() {
    let Some(text) = std::env::var_os(WORK) else { return };
    let work: Work = serde_json::from_str(text.to_str().unwrap()).unwrap();
    let result = if work.is_block { map(&work).await } else { mount(&work).await };
    match result {
        Ok(()) => std::process::exit(0),
        Err(error) => panic!("{}", error.message),
    }
}

async fn mount(work: &Work) -> Result<(), PluginError> {
    let mounter = mounter_in(&work.folder);
    let plugin = Local::new(work.folder.clone(), work.folder.join("run"), mounter, EventRing::default());
    let mut spec = volume(UID, "local", json!({"path": work.path}));
    spec.read_only = work.read_only;
    spec.mount_options.clone_from(&work.options);
    spec.fs_group = Some(GROUP);
    spec.fs_group_policy =
        if work.policy == "Always" { FsGroupPolicy::Always } else { FsGroupPolicy::OnRootMismatch };
    let walks = FsGroupWalks::default();
    if work.act == Act::SetUp {
        let device = DeviceRequest { device_path: None, label: &MountLabel::Unlabelled };
        let learned = Plugin::mount_device(&plugin, &spec, device).await?;
        let device_mount_path = learned.device_mount_path.as_deref();
        let request = SetUpRequest { device_mount_path, ..request(&walks) };
        return Plugin::set_up(&plugin, &spec, request).await.map(drop);
    }
    plugin.tear_down(&work.place()).await?;
    let device = DevicePlace {
        volume: work.place().volume,
        inner_name: "pv".into(),
        is_block: false,
        device_path: None,
        device_mount_path: None,
    };
    Plugin::unmount_device(&plugin, &device).await
}

async fn map(work: &Work) -> Result<(), PluginError> {
    let (mounter, place) = (mounter_in(&work.folder), work.block_place());
    match work.act {
        Act::SetUp => block::map(&mounter, &place, &work.path).await.map(drop),
        Act::TearDown => {
            block::unmap(&mounter, &place).await?;
            block::remove_global_map(&work.folder.join("maps/pv")).await
        }
    }
}

#[test]
fn a_service_killed_at_any_step_of_a_read_only_bind_completes_it() {
    let folder = TestFolder::new();
    count_steps(&folder);
    let disk = folder.folder("disk");
    let work = Work { read_only: true, ..Work::new(&folder, &disk) };
    let check = || {
        let options = work.mounted_with();
        assert!(options.split(',').any(|option| option == "ro"), "{options:?}");
        assert!(fs::write(work.target().join("file"), "x").is_err());
    };
    work.kill_everywhere(6, || (), check);
}

#[test]
fn a_service_killed_at_any_step_of_a_bind_with_a_group_completes_it() {
    let folder = TestFolder::new();
    count_steps(&folder);
    let disk = folder.folder("disk");
    fs::create_dir(disk.join("sub")).unwrap();
    fs::write(disk.join("sub/file"), "x").unwrap();
    let options = ["nodev", "noexec"].map(str::to_owned).to_vec();
    let work = Work { options: options.clone(), ..Work::new(&folder, &disk) };
    let names = ["", "sub", "sub/file"].map(|name| disk.join(name));
    let reset = || names.iter().for_each(|name| std::os::unix::fs::chown(name, None, Some(0)).unwrap());
    let check = || {
        let shown = work.mounted_with();
        assert!(options.iter().all(|option| shown.split(',').any(|shown| shown == option)), "{shown:?}");
        assert!(names.iter().all(|name| fs::metadata(name).unwrap().gid() == GROUP));
    };
    work.kill_everywhere(7, reset, check);
}

#[test]
fn a_service_killed_at_any_step_of_a_device_mount_completes_it() {
    let folder = TestFolder::new();
    count_steps(&folder);
    let device = LoopDevice::new(&folder, "image", 16);
    let work = Work::new(&folder, &device.0);
    let global = folder.path().join("plugins/kubernetes.io/local-volume/mounts/pv");
    // Blank, so that mkfs is a step.
    let reset = || {
        let mut opened = fs::OpenOptions::new().write(true).open(&device.0).unwrap();
        opened.write_all(&vec![0; 1 << 20]).unwrap();
        opened.sync_all().unwrap();
    };
    let check = || {
        let (mounted, root) = (fs::metadata(work.target()).unwrap(), fs::metadata(&global).unwrap());
        assert_eq!((mounted.dev(), mounted.ino()), (root.dev(), root.ino()));
        assert_eq!(mounted.gid(), GROUP);
    };
    work.kill_everywhere(9, reset, check);
}

#[test]
fn a_service_killed_at_any_step_of_a_block_map_completes_it() {
    let folder = TestFolder::new();
    count_steps(&folder);
    let device = LoopDevice::new(&folder, "image", 4);
    let work = Work { is_block: true, ..Work::new(&folder, &device.0) };
    let place = work.block_place();
    let check = || {
        assert_eq!(fs::read_link(&place.link).unwrap(), device.0);
        assert_eq!(fs::metadata(&place.global).unwrap().rdev(), fs::metadata(&device.0).unwrap().rdev());
    };
    work.kill_everywhere(6, || (), check);
}

/// The walk hangs at one file, so the service is killed in its middle for certain.
#[test]
fn a_service_killed_in_the_middle_of_an_fsgroup_walk_walks_again() {
    for policy in ["Always", "OnRootMismatch"] {
        let folder = TestFolder::new();
        count_steps(&folder);
        let disk = folder.folder("disk");
        let server = FuseServer::over(&disk).unwrap();
        for name in ["a", "b", "c"] {
            fs::write(disk.join(name), "x").unwrap();
        }
        let work = Work { policy: policy.to_owned(), ..Work::new(&folder, &disk) };
        server.hang_on_changes_of("b");
        let mut service = work.start(0);
        server.until_something_hangs(Duration::from_secs(60)).unwrap();
        service.kill().unwrap();
        service.wait().unwrap();
        assert_ne!(server.groups()[""], GROUP, "the root is changed last");
        server.answer();
        work.complete();
        let groups = server.groups();
        assert!(groups.values().all(|group| *group == GROUP), "{groups:?}");
        work.act(Act::TearDown).complete();
        assert!(!work.target().exists());
    }
}
