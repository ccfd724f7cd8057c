//! A driver that is a shell script and mounts real folders, killed in each of its commands.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_testkit::service::until_some;
use rustix::mount::UnmountFlags;

use super::{DRIVER, NAME, install, source};
use crate::mounter::{CommandOutput, MountRequest};
use crate::plugins::fake::{FakeNode, device_place, inline, place, set_up_request};
use crate::plugins::flexvolume::{FlexSettings, FlexVolume};
use crate::plugins::host::{Commands, Host, Mounts, Ownership};
use crate::plugins::{Answer, DeviceRequest, Plugin as _, PluginError, VolumeSpec};
use crate::walks::FsGroupWalks;
use keelson_volume_manager_core::world::{FailureClass, MountLabel};

/// Runs commands and mounts for real. Mounts and folders are removed with it.
#[derive(Debug)]
struct RealNode {
    dir: tempfile::TempDir,
}

impl Drop for RealNode {
    fn drop(&mut self) {
        for point in self.mounts().into_iter().rev() {
            let _ = rustix::mount::unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
}

impl RealNode {
    fn mounts(&self) -> Vec<PathBuf> {
        let mounts = crate::mounts::read_mounts().unwrap().into_iter().map(|mount| mount.point);
        mounts.filter(|point| point.starts_with(self.dir.path())).collect()
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.state().join("log")).unwrap_or_default()
    }
}

fn io<T>(result: std::io::Result<T>) -> Result<T, PluginError> {
    result.map_err(|error| PluginError::new(error.to_string()))
}

impl Commands for RealNode {
    fn run<'a>(
        &'a self,
        program: &'a str,
        arguments: &'a [&'a str],
        deadline: Duration,
    ) -> Answer<'a, CommandOutput> {
        Box::pin(async move {
            let output = tokio::process::Command::new(program).args(arguments).kill_on_drop(true).output();
            let ended = tokio::time::timeout(deadline, output).await;
            let ended = io(ended.map_err(|_| PluginError::new("it hangs"))?)?;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            Ok(CommandOutput {
                code: ended.status.code(),
                stdout: text(&ended.stdout),
                stderr: text(&ended.stderr),
            })
        })
    }

    fn grow<'a>(&'a self, _: &'a Path, _: &'a Path) -> Answer<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn is_busy<'a>(&'a self, _: &'a Path) -> Answer<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}

impl Mounts for RealNode {
    fn format_and_mount<'a>(&'a self, request: MountRequest<'a>) -> Answer<'a, ()> {
        Box::pin(
            async move { io(rustix::mount::mount_bind(request.source, request.target).map_err(Into::into)) },
        )
    }

    fn bind<'a>(&'a self, source: &'a Path, target: &'a Path, _: &'a [String]) -> Answer<'a, ()> {
        Box::pin(async move { io(rustix::mount::mount_bind(source, target).map_err(Into::into)) })
    }

    fn is_mount_point(&self, path: &Path) -> Result<bool, PluginError> {
        Ok(self.mounts().iter().any(|point| point == path))
    }

    fn filesystem_options(&self, _: &Path) -> Result<String, PluginError> {
        unreachable!("the driver says whether its files have labels")
    }

    fn exists<'a>(&'a self, path: &'a Path) -> Answer<'a, bool> {
        Box::pin(async move { path.try_exists().map_err(|error| PluginError::new(error.to_string())) })
    }

    fn clean_mount_point<'a>(&'a self, path: &'a Path) -> Answer<'a, ()> {
        Box::pin(async move {
            if self.is_mount_point(path)? {
                io(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW).map_err(Into::into))?;
            }
            io(crate::plugins::host::remove(fs::remove_dir(path)))
        })
    }

    fn mount_references(&self, _: &Path) -> Result<Vec<PathBuf>, PluginError> {
        Ok(Vec::new())
    }

    fn create_folders<'a>(&'a self, path: &'a Path) -> Answer<'a, ()> {
        Box::pin(async move { io(fs::create_dir_all(path)) })
    }

    fn apply_fs_group<'a>(&'a self, _: &'a Path, _: Ownership<'a>) -> Answer<'a, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// The file `fault` says which command fails, and how: `<command> before`, `<command> after` or `<command> hang`.
const SCRIPT: &str = r#"#!/bin/sh
state=STATE
command=$1
echo "$command" >> $state/log
at() { [ "$(cat $state/fault 2>/dev/null)" = "$command $1" ]; }
at before && kill -9 $$
at hang && exec cat $state/fifo
case $command in
init) answer='"capabilities": {"attach": true}' ;;
attach) answer="\"device\": \"$state/disk\"" ;;
mountdevice) mount --bind "$3" "$2" || exit 1 ;;
mount) mount --bind $state/disk "$2" || exit 1 ;;
unmount | unmountdevice) if mountpoint -q "$2"; then umount "$2" || exit 1; fi ;;
esac
at after && kill -9 $$
echo "{\"status\": \"Success\"${answer:+, $answer}}"
"#;

struct Fixture {
    node: Arc<RealNode>,
    plugin: FlexVolume,
    volume: VolumeSpec,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let node = Arc::new(RealNode { dir });
        let state = node.state();
        fs::create_dir_all(state.join("disk")).unwrap();
        fs::write(state.join("disk/file"), "data").unwrap();
        let drivers = node.dir.path().join("drivers");
        for name in ["example.com~disk/disk", "example.com~other/other"] {
            install(&drivers.join(name), &SCRIPT.replace("STATE", &state.display().to_string()));
        }
        let host = Host {
            root: node.dir.path().join("root"),
            commands: Arc::clone(&node) as Arc<dyn Commands>,
            mounts: Arc::clone(&node) as Arc<dyn Mounts>,
            ..FakeNode::new().host()
        };
        let settings = FlexSettings::new(drivers, "node1".into());
        let plugin = FlexVolume::new(host, Arc::new(FakeNode::new()), settings);
        Self { node, plugin, volume: inline("flexVolume", source()) }
    }

    fn fault(&self, fault: &str) {
        fs::write(self.node.state().join("fault"), fault).unwrap();
    }

    async fn step(&self, step: &str) -> Result<(), PluginError> {
        let (plugin, volume) = (&self.plugin, &self.volume);
        let device = self.node.state().join("disk").display().to_string();
        let walks = FsGroupWalks::default();
        let request = set_up_request(&walks);
        match step {
            "identify" => plugin.identify(volume).await.map(drop),
            "attach" => plugin.attach(volume).await.map(drop),
            "mount device" => {
                let request = DeviceRequest { device_path: Some(&device), label: &MountLabel::Unlabelled };
                plugin.mount_device(volume, request).await.map(drop)
            }
            "set up" => {
                let set_up = plugin.set_up(volume, request).await?;
                assert_eq!(fs::read_to_string(set_up.host_path.join("file")).unwrap(), "data");
                Ok(())
            }
            "expand" => plugin.expand(volume, request, 9).await.map(drop),
            "tear down" => plugin.tear_down(&place(DRIVER, volume)).await,
            "unmount device" => plugin.unmount_device(&device_place(NAME, volume)).await,
            _ => plugin.detach(&device_place(NAME, volume)).await,
        }
    }
}

const STEPS: [&str; 8] =
    ["identify", "attach", "mount device", "set up", "expand", "tear down", "unmount device", "detach"];

#[tokio::test]
async fn a_driver_that_is_killed_in_any_command_leaves_nothing_after_a_retry() {
    for command in [
        "init",
        "getvolumename",
        "attach",
        "waitforattach",
        "mountdevice",
        "mount",
        "expandfs",
        "unmount",
        "unmountdevice",
        "detach",
    ] {
        for when in ["before", "after"] {
            let fixture = Fixture::new();
            fixture.fault(&format!("{command} {when}"));
            let mut failures = Vec::new();
            for step in STEPS {
                if let Err(error) = fixture.step(step).await {
                    failures.push((step, error.class));
                    assert!(error.message.contains(command), "{command} {when}: {error}");
                    fixture.fault("");
                    fixture.step(step).await.unwrap();
                }
            }
            let class = if command == "init" { FailureClass::Transient } else { FailureClass::Uncertain };
            assert!(matches!(failures[..], [(_, found)] if found == class), "{command} {when}: {failures:?}");
            assert_eq!(fixture.node.mounts(), Vec::<PathBuf>::new(), "{command} {when}");
            let root = fixture.node.dir.path().join("root");
            for path in [super::GLOBAL, super::TARGET] {
                assert!(!root.join(path).exists(), "{command} {when}: {path}");
            }
            assert_eq!(fs::read_to_string(fixture.node.state().join("disk/file")).unwrap(), "data");
        }
    }
}

#[tokio::test]
async fn a_driver_that_hangs_holds_up_neither_other_drivers_nor_its_own_next_call() {
    let fixture = Fixture::new();
    let fifo = fixture.node.state().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    fixture.step("identify").await.unwrap();
    fixture.fault("mountdevice hang");
    let hanging = {
        let (plugin, volume) = (fixture.plugin.clone(), fixture.volume.clone());
        let device = fixture.node.state().join("disk").display().to_string();
        tokio::spawn(async move {
            let request = DeviceRequest { device_path: Some(&device), label: &MountLabel::Unlabelled };
            plugin.mount_device(&volume, request).await
        })
    };
    until_some("the call that hangs", || {
        std::future::ready(fixture.node.log().contains("mountdevice").then_some(()))
    })
    .await;
    let mut other = fixture.volume.clone();
    other.source["driver"] = "example.com/other".into();
    fixture.plugin.identify(&other).await.unwrap();
    fixture.step("attach").await.unwrap();
    assert!(!hanging.is_finished());
    hanging.abort();
    assert!(hanging.await.unwrap_err().is_cancelled());
    fixture.fault("");
    for step in &STEPS[2..] {
        fixture.step(step).await.unwrap();
    }
    assert_eq!(fixture.node.mounts(), Vec::<PathBuf>::new());
}

/// Run as the service runs it.
#[tokio::test]
async fn a_driver_that_writes_without_end_gets_an_error_that_says_so() {
    let fixture = Fixture::new();
    let script = r#"#!/bin/sh
case $1 in
init) head -c 300000 /dev/zero | tr '\0' x >&2; echo '{"status": "Success", "capabilities": {"attach": true}}' ;;
getvolumename) echo '{"status": "Success"}' ;;
attach) head -c 300000 /dev/zero | tr '\0' x ;;
esac
"#;
    install(&fixture.node.dir.path().join("drivers/example.com~disk/disk"), script);
    let host = Host {
        root: fixture.node.dir.path().join("root"),
        commands: Arc::new(crate::mounter::Mounter::default()),
        mounts: Arc::clone(&fixture.node) as Arc<dyn Mounts>,
        ..FakeNode::new().host()
    };
    let settings = FlexSettings::new(fixture.node.dir.path().join("drivers"), "node1".into());
    let plugin = FlexVolume::new(host, Arc::new(FakeNode::new()), settings);
    plugin.identify(&fixture.volume).await.unwrap();
    let error = plugin.attach(&fixture.volume).await.unwrap_err();
    assert!(error.message.contains("to its command attach is truncated"), "{error}");
    assert_eq!(error.class, FailureClass::Uncertain);
}
