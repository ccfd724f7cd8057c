//! A node with a loop device, and the service as a process of its own.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use keelson_config::{ConfigExtras, ServiceName};
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_service_kit::{Peer, store_config};
use rustix::mount::MountPropagationFlags;
use serde_json::{Value, json};

use crate::support::{Client, World, mounts_below, until_some, volume};

/// Who provides the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Flex,
    Fc,
    Iscsi,
}

/// What each script begins with. The file `hang` says which command hangs, and when; `hanging` has the process that does.
const SCRIPT: &str = r#"#!/bin/sh
state=STATE
echo "$name" >> $state/calls
hang() {
    if [ "$(cat $state/hang 2>/dev/null)" = "$name $1" ]; then
        echo $$ > $state/hanging.new
        mv $state/hanging.new $state/hanging
        exec sleep 600
    fi
}
"#;

const DRIVER: &str = r#"hang before
case $name in
init) answer='"capabilities": {"attach": true}' ;;
attach) answer="\"device\": \"DEVICE\"" ;;
mountdevice) mkfs.ext4 -q -F DEVICE && mount DEVICE "$2" || exit 1 ;;
unmountdevice) umount "$2" || exit 1 ;;
mount | unmount | expandfs | waitforattach) echo '{"status": "Not supported"}'; exit 0 ;;
esac
hang after
echo "{\"status\": \"Success\"${answer:+, $answer}}"
"#;

/// In place of iscsiadm. Only the logout hangs.
const ISCSIADM: &str = r#"case "$*" in
*show) echo "iface.transport_name = tcp" ;;
*--logout) hang before; hang after ;;
esac
"#;

/// A process that is killed at the end of the test.
pub struct Reaped(pub Child);

impl Reaped {
    /// Waits for a line of its output.
    pub fn until_ready(&mut self) {
        let mut line = String::new();
        BufReader::new(self.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A loop device that is detached with the test.
pub struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path) -> Self {
        fs::File::create(file).unwrap().set_len(32 << 20).unwrap();
        Self::over(file)
    }

    /// Over a file that exists, which another loop device may have, too.
    fn over(file: &Path) -> Self {
        let output = Command::new("losetup").args(["-f", "--show"]).arg(file).output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "losetup: {why}; load the kernel module loop");
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    pub fn path(&self) -> &str {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).stderr(Stdio::null()).status();
    }
}

/// A link in /dev/disk, which is removed with the test.
struct Link(PathBuf);

impl Drop for Link {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
        for folder in self.0.ancestors().skip(1).take(2) {
            // Only what has become empty.
            let _ = fs::remove_dir(folder);
        }
    }
}

pub struct Node {
    service: Option<Reaped>,
    kind: Kind,
    link: Option<Link>,
    /// Unmounts before the device goes.
    pub world: World,
    pub device: LoopDevice,
}

impl Node {
    pub fn new(kind: Kind) -> Self {
        let mut world = World::new();
        let base = world.config.paths.root_dir.parent().unwrap().to_owned();
        for name in ["state", "bin", "drivers/example.com~disk"] {
            fs::create_dir_all(base.join(name)).unwrap();
        }
        world.config.volumes.plugin_dir = base.join("drivers");
        let device = LoopDevice::new(&base.join("disk"));
        let link = match kind {
            Kind::Flex => None,
            Kind::Fc => Some(format!("fc-0x{}-lun-0", wwn())),
            Kind::Iscsi => Some(format!("ip-127.0.0.1:3260-iscsi-{}-lun-1", iqn())),
        };
        let link = link.map(|name| {
            let link = Path::new("/dev/disk/by-path").join(name);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            let _ = fs::remove_file(&link);
            symlink(device.path(), &link).unwrap();
            Link(link)
        });
        let node = Self { service: None, kind, link, world, device };
        node.script("drivers/example.com~disk/disk", "name=$1", DRIVER);
        node.script("bin/iscsiadm", "name=iscsiadm", ISCSIADM);
        node.script("bin/blockdev", "name=blockdev", "hang before\n");
        node.script("bin/umount", "name=umount", "hang before\n/bin/umount \"$@\" || exit 1\nhang after\n");
        node
    }

    fn base(&self) -> &Path {
        self.world.config.paths.root_dir.parent().unwrap()
    }

    fn state(&self, file: &str) -> PathBuf {
        self.base().join("state").join(file)
    }

    /// A new folder.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.base().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn script(&self, file: &str, name: &str, rest: &str) {
        let state = self.state("");
        let start = SCRIPT.replace("state=STATE\n", &format!("state={}\n{name}\n", state.display()));
        let text = start + &rest.replace("DEVICE", self.device.path());
        let path = self.base().join(file);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The source of the pod's volume.
    pub fn volume(&self) -> pb::Volume {
        let (kind, source) = self.source();
        let source = pb::PluginVolume { kind: kind.into(), source_json: source.to_string().into_bytes() };
        pb::Volume { mounted: true, ..volume("data", pb::volume::Source::Plugin(source)) }
    }

    /// Starts the service, and waits until it serves.
    pub async fn start(&mut self) {
        let file = self.base().join("config.json");
        store_config(&file, &self.world.config, ConfigExtras::default()).unwrap();
        let path = format!("{}:{}", self.base().join("bin").display(), std::env::var("PATH").unwrap());
        let log = fs::OpenOptions::new().create(true).append(true).open(self.state("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_keelson-volume-manager"));
        command.arg("--config").arg(file).env("PATH", path).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.service = Some(Reaped(command.spawn().unwrap()));
        let socket = self.world.config.paths.socket(ServiceName::VolumeManager);
        until_some("the service", || std::future::ready(UnixStream::connect(&socket).ok())).await;
    }

    pub fn client(&self) -> Client {
        let run_dir = &self.world.config.paths.run_dir;
        VolumeManagerClient::new(Peer::service(run_dir, ServiceName::VolumeManager).channel())
    }

    /// Lets a command hang before or after its work.
    pub fn hang(&self, command: &str, moment: &str) {
        fs::write(self.state("hang"), format!("{command} {moment}")).unwrap();
    }

    pub async fn until_hanging(&self) {
        let file = self.state("hanging");
        until_some("the command that hangs", || std::future::ready(file.exists().then_some(()))).await;
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let mut service = self.service.take().unwrap();
        service.0.kill().unwrap();
        service.0.wait().unwrap();
    }

    /// The disk, which is not in use, becomes another device of the node.
    pub fn rename_device(&mut self) {
        self.device = LoopDevice::over(&self.base().join("disk"));
        self.find_disk();
    }

    /// The node does not see the disk any more. Not of a flexVolume.
    pub fn lose_disk(&mut self) {
        fs::remove_file(&self.link.as_ref().unwrap().0).unwrap();
    }

    /// The node sees the disk again. Not of a flexVolume.
    pub fn find_disk(&mut self) {
        let link = &self.link.as_ref().unwrap().0;
        let _ = fs::remove_file(link);
        symlink(self.device.path(), link).unwrap();
    }

    /// Plugin and folder of the disk, below `plugins/kubernetes.io` of the agent's root folder. Not of a flexVolume.
    fn disk(&self) -> (&'static str, String) {
        match self.kind {
            Kind::Flex => unreachable!("its driver mounts"),
            Kind::Fc => ("fc", format!("{}-lun-0", wwn())),
            Kind::Iscsi => ("iscsi", format!("iface-default/127.0.0.1:3260-{}-lun-1", iqn())),
        }
    }

    /// The agent's root folder on a shared mount, as a kubelet has it.
    fn shared_root(&self) -> &Path {
        let root = &self.world.config.paths.root_dir;
        fs::create_dir_all(root).unwrap();
        rustix::mount::mount_bind(root, root).unwrap();
        for kind in [MountPropagationFlags::PRIVATE, MountPropagationFlags::SHARED] {
            rustix::mount::mount_change(root, kind).unwrap();
        }
        root
    }

    /// The record of an iSCSI disk in its folder, as a kubelet writes it.
    fn record_as_kubelet(&self, folder: &Path, name: &str) {
        if self.kind == Kind::Iscsi {
            let record = json!({
                "VolName": name, "Portals": ["127.0.0.1:3260"], "Iqn": iqn(), "Lun": "1", "InitIface": "default",
                "Iface": "default", "InitiatorName": "",
            });
            fs::write(folder.join("iscsi.json"), format!("{record}\n")).unwrap();
        }
    }

    /// Maps the device as the block volume `disk` of the pod `u1`, as a kubelet does, without a lock. Not of a flexVolume. Returns the
    /// folder of maps and the pod's link.
    pub fn map_as_kubelet(&self) -> (PathBuf, PathBuf) {
        let (root, (plugin, name)) = (self.shared_root(), self.disk());
        let maps = root.join(format!("plugins/kubernetes.io/{plugin}/volumeDevices")).join(name);
        let links = self.world.pod("u1").join(format!("volumeDevices/kubernetes.io~{plugin}"));
        for folder in [&maps, &links] {
            fs::create_dir_all(folder).unwrap();
        }
        self.record_as_kubelet(&maps, "disk");
        let map = maps.join("u1");
        fs::write(&map, "").unwrap();
        rustix::mount::mount_bind(self.device.path(), &map).unwrap();
        symlink(self.device.path(), links.join("disk")).unwrap();
        (maps, links.join("disk"))
    }

    /// The source of a PersistentVolume with the disk.
    pub fn source(&self) -> (&'static str, Value) {
        match self.kind {
            Kind::Flex => ("flexVolume", json!({"driver": "example.com/disk"})),
            Kind::Fc => ("fc", json!({"targetWWNs": [wwn()], "lun": 0})),
            Kind::Iscsi => ("iscsi", json!({"targetPortal": "127.0.0.1", "iqn": iqn(), "lun": 1})),
        }
    }

    /// Mounts the device for the pod `u1` as a kubelet does: once for all pods, and bound into the pod's folder, which is
    /// returned. Not of a flexVolume.
    pub fn mount_as_kubelet(&self) -> PathBuf {
        let (root, (plugin, name)) = (self.shared_root(), self.disk());
        let global = root.join(format!("plugins/kubernetes.io/{plugin}")).join(name);
        let own = self.world.volume("u1", plugin, "data");
        for folder in [&global, &own] {
            fs::create_dir_all(folder).unwrap();
        }
        self.record_as_kubelet(&global, "data");
        let mut format = Command::new("mkfs.ext4");
        assert!(format.args(["-q", "-F", self.device.path()]).status().unwrap().success());
        assert!(Command::new("mount").arg(self.device.path()).arg(&global).status().unwrap().success());
        rustix::mount::mount_bind(&global, &own).unwrap();
        own
    }

    /// Unmounts everything below the root folder, as a reboot does. Folders stay.
    pub fn unmount_all(&self) {
        let root = &self.world.config.paths.root_dir;
        for point in mounts_below(root).into_iter().rev().filter(|point| point != root) {
            rustix::mount::unmount(&point, rustix::mount::UnmountFlags::empty()).unwrap();
        }
    }

    /// Ends the command that hangs, without its answer.
    pub fn unhang(&self) {
        let _ = fs::remove_file(self.state("hang"));
        let pid = fs::read_to_string(self.state("hanging")).ok().and_then(|pid| pid.trim().parse().ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let _ = fs::remove_file(self.state("hanging"));
    }

    /// How often a command was called.
    pub fn calls(&self, command: &str) -> usize {
        let calls = fs::read_to_string(self.state("calls")).unwrap_or_default();
        calls.lines().filter(|call| *call == command).count()
    }

    /// Waits for a text in the service's log.
    pub async fn until_log(&self, text: &str) {
        let log = self.state("log");
        let look = || std::future::ready(fs::read_to_string(&log).unwrap().contains(text).then_some(()));
        until_some(text, look).await;
    }

    /// Whether the device is mounted for the agent.
    pub fn is_mounted(&self) -> bool {
        !mounts_below(&self.world.config.paths.root_dir.join("plugins")).is_empty()
    }

    /// The folder of the plugin's global mounts.
    fn plugin_folder(&self) -> PathBuf {
        self.world.config.paths.root_dir.join("plugins/kubernetes.io").join(match self.kind {
            Kind::Flex => "flexvolume/example.com/disk/mounts",
            Kind::Fc => "fc",
            Kind::Iscsi => "iscsi",
        })
    }

    /// Waits until nothing of the volume is left: no mount and no folder, except the empty ones of block maps.
    pub async fn until_nothing_is_left(&self, when: &str) {
        let (root, base) = (&self.world.config.paths.root_dir, self.plugin_folder());
        let is_left = || {
            let has_mounts = mounts_below(root).iter().any(|point| point != root);
            has_mounts || has_files(&base)
        };
        let what = format!("{when}: what is left: {:?}", self.kind);
        until_some(&what, || std::future::ready((!is_left()).then_some(()))).await;
    }

    /// Waits until nothing of the volume is left: no mount, no folder, no session, and no attachment.
    pub async fn until_released(&self, when: &str) {
        let root = &self.world.config.paths.root_dir;
        let base = self.plugin_folder();
        let last = match self.kind {
            Kind::Flex => "detach",
            Kind::Fc => "blockdev",
            Kind::Iscsi => "iscsiadm",
        };
        let left = || {
            let entries = fs::read_dir(&base).into_iter().flatten().flatten().map(|entry| entry.path());
            let mounts = mounts_below(root).into_iter().filter(|point| point != root);
            mounts.chain(entries).collect::<Vec<_>>()
        };
        let what = format!("{when}: what is left: {:?}", self.kind);
        until_some(&what, || std::future::ready((left().is_empty() && self.calls(last) > 0).then_some(())))
            .await;
    }
}

/// Whether a folder has anything below it except the folder of block maps and what is above the folders of disks.
fn has_files(folder: &Path) -> bool {
    let mut entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.any(|path| {
        let is_parent =
            path.file_name().is_some_and(|name| name == "volumeDevices" || name == "iface-default");
        !is_parent || has_files(&path)
    })
}

impl Drop for Node {
    fn drop(&mut self) {
        self.service = None;
        self.unhang();
        if std::thread::panicking() {
            println!("{}", fs::read_to_string(self.state("log")).unwrap_or_default());
            println!("calls: {}", fs::read_to_string(self.state("calls")).unwrap_or_default());
        }
    }
}

/// Of this test process only.
fn wwn() -> String {
    format!("5{:015x}", std::process::id())
}

fn iqn() -> String {
    format!("iqn.2020-01.example:keelson-test-{}", std::process::id())
}
