//! A node for tests: folders instead of sysfs and /dev, and mounts and commands that are only recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::desire::{FsGroupPolicy, PodRef};
use keelson_volume_manager_core::world::{FailureClass, MountLabel};
use serde_json::Value;

use super::host::{Commands, Host, Machine, Mounts, Ownership};
use super::secrets::{Secret, Secrets};
use super::{
    Answer, DevicePlace, DeviceRequest, FoundFolder, PluginError, SetUpRequest, VolumePlace, VolumeSpec,
};
use crate::mounter::{CommandOutput, MountRequest};
use crate::walks::FsGroupWalks;

/// What a command does to the node, and how it ends.
type Program = Box<dyn FnMut(&[&str]) -> CommandOutput + Send>;

/// The recorded state.
#[derive(Default)]
pub(super) struct State {
    /// Every call, in order.
    pub(super) log: Vec<String>,
    /// Mount points, each with the device.
    pub(super) mounts: BTreeMap<PathBuf, String>,
    /// The options of filesystems, by device.
    options: BTreeMap<String, String>,
    /// Devices that something holds.
    pub(super) busy: BTreeSet<String>,
    programs: BTreeMap<String, Program>,
    /// The calls that fail, by the first word of their line in the log.
    failures: BTreeMap<String, PluginError>,
    pub(super) secrets: BTreeMap<String, Secret>,
}

/// The node of one test.
#[derive(Clone)]
pub(super) struct FakeNode {
    state: Arc<Mutex<State>>,
    dir: Arc<tempfile::TempDir>,
}

impl std::fmt::Debug for FakeNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeNode")
    }
}

/// A command that ends with `code` and this output.
pub(super) fn ended(code: i32, stdout: &str) -> CommandOutput {
    CommandOutput { code: Some(code), stdout: stdout.into(), stderr: format!("error {code}") }
}

impl FakeNode {
    pub(super) fn new() -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let node = Self { state: Arc::default(), dir };
        fs::create_dir_all(node.root()).unwrap();
        fs::create_dir_all(node.machine("/dev")).unwrap();
        node
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The agent's root folder.
    pub(super) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// A path of the node, such as one in sysfs.
    pub(super) fn machine(&self, path: &str) -> PathBuf {
        self.dir.path().join("machine").join(path.trim_start_matches('/'))
    }

    pub(super) fn host(&self) -> Host {
        Host {
            root: self.root(),
            commands: Arc::new(self.clone()),
            mounts: Arc::new(self.clone()),
            machine: Machine { root: self.machine("").canonicalize().unwrap() },
        }
    }

    /// Says what a program does; without that it succeeds without output.
    pub(super) fn program(&self, name: &str, program: impl FnMut(&[&str]) -> CommandOutput + Send + 'static) {
        self.state().programs.insert(name.to_owned(), Box::new(program));
    }

    /// Lets calls fail: `bind`, `mount`, `clean`, `own`, or the name of a program.
    pub(super) fn fail(&self, call: &str, class: FailureClass) {
        self.state()
            .failures
            .insert(call.to_owned(), PluginError::new(format!("{call} fails")).of_class(class));
    }

    pub(super) fn mend(&self) {
        self.state().failures.clear();
    }

    /// The calls since the last time.
    pub(super) fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.state().log)
    }

    /// The calls since the last time that begin with `word`.
    pub(super) fn take_calls(&self, word: &str) -> Vec<String> {
        self.take_log().into_iter().filter(|line| line.starts_with(word)).collect()
    }

    /// Writes a file of the node.
    pub(super) fn write(&self, file: &str, text: &str) {
        let path = self.machine(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(super) fn read(&self, file: &str) -> String {
        fs::read_to_string(self.machine(file)).unwrap()
    }

    /// Makes a disk, with a link to it.
    pub(super) fn disk(&self, link: &str, name: &str) {
        self.write(&format!("/dev/{name}"), "");
        let link = self.machine(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(self.machine(&format!("/dev/{name}")), link).unwrap();
        for file in ["delete", "rescan"] {
            self.write(&format!("/sys/block/{name}/device/{file}"), "");
        }
    }

    /// Makes a multipath device over disks.
    pub(super) fn multipath(&self, name: &str, slaves: &[&str]) {
        self.write(&format!("/sys/block/{name}/dm/uuid"), "mpath-1\n");
        self.write(&format!("/dev/{name}"), "");
        for slave in slaves {
            self.write(&format!("/sys/block/{name}/slaves/{slave}/x"), "");
        }
    }

    fn call(&self, word: &str, line: String) -> Result<MutexGuard<'_, State>, PluginError> {
        let mut state = self.state();
        state.log.push(line);
        match state.failures.get(word) {
            Some(error) => Err(error.clone()),
            None => Ok(state),
        }
    }

    /// A path as the log shows it.
    fn short(&self, path: &Path) -> String {
        path.strip_prefix(self.root()).unwrap_or(path).display().to_string()
    }
}

impl Commands for FakeNode {
    fn run<'a>(
        &'a self,
        program: &'a str,
        arguments: &'a [&'a str],
        _: Duration,
    ) -> Answer<'a, CommandOutput> {
        Box::pin(async move {
            let mut state = self.call(program, format!("{program} {}", arguments.join(" ")))?;
            if program == "umount" {
                state.mounts.remove(Path::new(arguments[0]));
            }
            let program = state.programs.get_mut(program);
            Ok(program.map_or_else(|| ended(0, ""), |program| program(arguments)))
        })
    }

    fn grow<'a>(&'a self, device: &'a Path, mount_point: &'a Path) -> Answer<'a, ()> {
        let line = format!("grow {} {}", device.display(), self.short(mount_point));
        Box::pin(async move { self.call("grow", line).map(drop) })
    }

    fn is_busy<'a>(&'a self, device: &'a Path) -> Answer<'a, bool> {
        let device = device.display().to_string();
        Box::pin(async move { Ok(self.state().busy.contains(&device)) })
    }
}

impl Mounts for FakeNode {
    fn format_and_mount<'a>(&'a self, request: MountRequest<'a>) -> Answer<'a, ()> {
        let MountRequest { source, target, fs_type, options, .. } = request;
        let line = format!("mount {source} {} {fs_type} {}", self.short(target), options.join(","));
        Box::pin(async move {
            assert!(target.is_dir(), "{}", target.display());
            let mut state = self.call("mount", line)?;
            state.mounts.insert(target.to_owned(), source.to_owned());
            state.options.insert(source.to_owned(), options.join(","));
            Ok(())
        })
    }

    fn bind<'a>(&'a self, source: &'a Path, target: &'a Path, options: &'a [String]) -> Answer<'a, ()> {
        let line = format!("bind {} {} {}", self.short(source), self.short(target), options.join(","));
        Box::pin(async move {
            assert!(target.is_dir(), "{}", target.display());
            let mut state = self.call("bind", line)?;
            let device = state.mounts[source].clone();
            state.mounts.insert(target.to_owned(), device);
            Ok(())
        })
    }

    fn is_mount_point(&self, path: &Path) -> Result<bool, PluginError> {
        Ok(self.state().mounts.contains_key(path))
    }

    fn filesystem_options(&self, path: &Path) -> Result<String, PluginError> {
        let state = self.state();
        let device = state.mounts.get(path);
        Ok(device.and_then(|device| state.options.get(device)).cloned().unwrap_or_default())
    }

    fn exists<'a>(&'a self, path: &'a Path) -> Answer<'a, bool> {
        Box::pin(async move { path.try_exists().map_err(|error| PluginError::new(error.to_string())) })
    }

    fn clean_mount_point<'a>(&'a self, path: &'a Path) -> Answer<'a, ()> {
        let line = format!("clean {}", self.short(path));
        Box::pin(async move {
            self.call("clean", line)?.mounts.remove(path);
            super::host::remove(fs::remove_dir(path)).map_err(|error| PluginError::new(error.to_string()))
        })
    }

    fn mount_references(&self, path: &Path) -> Result<Vec<PathBuf>, PluginError> {
        let state = self.state();
        let device = state.mounts.get(path);
        let others = state.mounts.iter().filter(|(point, other)| *point != path && Some(*other) == device);
        Ok(others.map(|(point, _)| point.clone()).collect())
    }

    fn create_folders<'a>(&'a self, path: &'a Path) -> Answer<'a, ()> {
        Box::pin(async move { fs::create_dir_all(path).map_err(|error| PluginError::new(error.to_string())) })
    }

    fn apply_fs_group<'a>(&'a self, path: &'a Path, ownership: Ownership<'a>) -> Answer<'a, ()> {
        let line = format!("own {} {}", self.short(path), ownership.group);
        Box::pin(async move { self.call("own", line).map(drop) })
    }
}

impl Secrets for FakeNode {
    fn read<'a>(&'a self, namespace: &'a str, name: &'a str) -> Answer<'a, Secret> {
        Box::pin(async move {
            let secret = self.state().secrets.get(&format!("{namespace}/{name}")).cloned();
            secret.ok_or_else(|| PluginError::new(format!("no Secret {namespace}/{name}")))
        })
    }
}

/// A volume in a pod itself.
pub(crate) fn inline(field: &str, source: Value) -> VolumeSpec {
    VolumeSpec {
        pod: PodRef { uid: "u1".into(), namespace: "shop".into(), name: "web".into() },
        service_account: "sa".into(),
        outer_name: "data".into(),
        inner_name: "data".into(),
        field: field.into(),
        source,
        persistent: None,
        claim: None,
        claim_size: None,
        mode: VolumeMode::Filesystem,
        read_only: false,
        is_migrated: false,
        mount_options: Vec::new(),
        fs_group: None,
        fs_group_policy: FsGroupPolicy::Always,
    }
}

/// A volume through a claim.
pub(super) fn persistent(field: &str, source: Value) -> VolumeSpec {
    VolumeSpec {
        inner_name: "pv1".into(),
        persistent: Some(Arc::default()),
        claim: Some("claim".into()),
        ..inline(field, source)
    }
}

pub(super) const UNLABELLED: DeviceRequest<'static> =
    DeviceRequest { device_path: None, label: &MountLabel::Unlabelled };

/// A first set-up.
pub(super) fn set_up_request(walks: &FsGroupWalks) -> SetUpRequest<'_> {
    SetUpRequest {
        device_path: None,
        device_mount_path: None,
        label: &MountLabel::Unlabelled,
        is_remount: false,
        is_reconstructed: false,
        walks,
    }
}

/// The place of a volume in its pod.
pub(super) fn place(plugin: &str, volume: &VolumeSpec) -> VolumePlace {
    VolumePlace {
        volume: "any".into(),
        pod: volume.pod.uid.as_str().into(),
        plugin: plugin.into(),
        inner_name: volume.inner_name.clone(),
        is_block: volume.mode == VolumeMode::Block,
    }
}

/// The place of a device of which only the name is known.
pub(super) fn device_place(name: &str, volume: &VolumeSpec) -> DevicePlace {
    DevicePlace {
        volume: name.into(),
        inner_name: volume.inner_name.clone(),
        is_block: volume.mode == VolumeMode::Block,
        device_path: None,
        device_mount_path: None,
    }
}

/// The folder of a volume in its pod.
pub(super) fn found(volume: &VolumeSpec) -> FoundFolder {
    FoundFolder {
        pod: volume.pod.uid.as_str().into(),
        inner_name: volume.inner_name.clone(),
        is_block: volume.mode == VolumeMode::Block,
    }
}
