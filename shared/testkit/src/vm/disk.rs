//! The disk of the machine: made once from Debian's mirror, and kept below the target folder.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};

use super::initramfs;
use crate::build_cache::{cache_dir, execute, remove};
use crate::{Component, PAUSE_IMAGE, Remains, find_file, mounts_below};

/// The release of the machine.
const SUITE: &str = "bookworm";
/// The Debian mirror, unless the variable `MIRROR` names another one.
const MIRROR: &str = "http://deb.debian.org/debian";
/// Packages in addition to Debian's base system.
const PACKAGES: &str = "containerd,containernetworking-plugins,dbus,iproute2,iptables,kmod,nfs-kernel-server,open-iscsi,\
    procps,runc,systemd,systemd-sysv,tgt,udev";
/// The package whose only purpose is to name the one with the kernel.
const KERNEL: &str = "linux-image-amd64";
/// The size of the disk in MiB; what is not written takes no room.
const SIZE_MIB: u64 = 8192;
/// Drivers of hardware that the machine does not have, below the folder of modules.
const USELESS: [&str; 12] = [
    "kernel/sound",
    "kernel/net/wireless",
    "kernel/drivers/gpu",
    "kernel/drivers/hwmon",
    "kernel/drivers/iio",
    "kernel/drivers/infiniband",
    "kernel/drivers/input",
    "kernel/drivers/media",
    "kernel/drivers/net",
    "kernel/drivers/scsi",
    "kernel/drivers/staging",
    "kernel/drivers/usb",
];
/// Of those, what is needed all the same.
const USEFUL: [&str; 9] = [
    "kernel/drivers/net/veth.ko",
    "kernel/drivers/scsi/iscsi_boot_sysfs.ko",
    "kernel/drivers/scsi/iscsi_tcp.ko",
    "kernel/drivers/scsi/libiscsi.ko",
    "kernel/drivers/scsi/libiscsi_tcp.ko",
    "kernel/drivers/scsi/scsi_common.ko",
    "kernel/drivers/scsi/scsi_mod.ko",
    "kernel/drivers/scsi/scsi_transport_iscsi.ko",
    "kernel/drivers/scsi/sd_mod.ko",
];
/// Units of storage servers and their clients. A test that needs one starts it.
const DISABLED: [&str; 8] = [
    "iscsid.socket",
    "nfs-blkmap.service",
    "nfs-client.target",
    "nfs-server.service",
    "open-iscsi.service",
    "rpcbind.service",
    "rpcbind.socket",
    "tgt.service",
];
/// Units of Debian's that have nothing to do here.
const MASKED: [&str; 6] = [
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
];

const GUEST_SHELL: &str = include_str!("guest-shell");
const SHELL_UNIT: &str = "[Unit]\nDescription=Runs what comes through the port\n\
    [Service]\nExecStart=/usr/local/sbin/guest-shell\nKillMode=process\n\
    [Install]\nWantedBy=multi-user.target\n";
const FSTAB: &str = "/dev/vda / ext4 defaults 0 0\n/dev/vdb /payload ext4 ro 0 0\n";
/// Pods in a network of the machine's own.
const NETWORK: &str = r#"{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0",
 "isGateway": true, "hairpinMode": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]],
 "routes": [{"dst": "0.0.0.0/0"}]}}]}
"#;

/// containerd as a node with systemd and cgroup v2 has it.
fn containerd_config() -> String {
    format!(
        r#"version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"#
    )
}

/// The disk from which machines start. Nothing writes to it after its creation.
pub(super) struct Base {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    /// A whole disk with one ext4.
    pub(super) disk: PathBuf,
}

/// The base of this recipe, which is made the first time.
pub(super) fn base() -> anyhow::Result<Base> {
    let folder = cache_dir()?.join(format!("vm-{}", recipe()));
    let base = Base {
        kernel: folder.join("vmlinuz"),
        initramfs: folder.join("initramfs"),
        disk: folder.join("disk.img"),
    };
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // Another test may be at it.
    let lock = File::create(folder.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    // The disk has its name last.
    if !base.disk.exists() {
        let work = folder.join("work");
        // debootstrap mounts below this folder, and unmounts nothing when it is killed.
        let remains = Remains { dirs: vec![work.clone()], ..Remains::default() };
        let remove = || {
            let problems = remains.remove();
            ensure!(problems.is_empty(), "{}", problems.join("; "));
            Ok(())
        };
        remove()?;
        let built = build(&work, &base);
        let removed = remove();
        built.context("cannot make the disk of the machine")?;
        removed?;
    }
    Ok(base)
}

/// Names what the base is made of.
fn recipe() -> String {
    let parts = [SUITE, PACKAGES, KERNEL, GUEST_SHELL, SHELL_UNIT, FSTAB, NETWORK];
    let parts = parts.into_iter().chain(USELESS).chain(USEFUL).chain(MASKED).chain(DISABLED);
    let mut digest = Sha256::new();
    for part in parts.map(ToOwned::to_owned).chain([containerd_config(), SIZE_MIB.to_string()]) {
        digest.update(part.as_bytes());
        digest.update([0]);
    }
    digest.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

fn build(work: &Path, base: &Base) -> anyhow::Result<()> {
    let (root, unpacked) = (work.join("root"), work.join("kernel"));
    fs::create_dir_all(&unpacked)?;
    let mirror = std::env::var("MIRROR").unwrap_or_else(|_| MIRROR.to_owned());
    let debootstrap = Component::Debootstrap.find()?;
    let include = format!("--include={PACKAGES}");
    execute(Command::new(debootstrap).args(["--variant=minbase", &include, SUITE]).arg(&root).arg(mirror))?;
    unpack_kernel(&unpacked)?;
    let version = only_entry(&unpacked.join("lib/modules"))?;
    fs::copy(unpacked.join("boot").join(format!("vmlinuz-{version}")), &base.kernel)?;
    let modules = root.join("usr/lib/modules").join(&version);
    fs::create_dir_all(root.join("usr/lib/modules"))?;
    fs::rename(unpacked.join("lib/modules").join(&version), &modules)?;
    prune(&modules, &work.join("useful"))?;
    execute(Command::new(find_file("chroot")?).arg(&root).args(["depmod", "-a", &version]))?;
    initramfs::write(&base.initramfs, &modules)?;
    furnish(&root)?;
    ensure!(mounts_below(&root).is_empty(), "something is mounted below {}", root.display());
    let unfinished = work.join("disk.img");
    make(&unfinished, &root)?;
    fs::rename(unfinished, &base.disk)?;
    Ok(())
}

/// Fetches the package with the kernel and unpacks it.
fn unpack_kernel(folder: &Path) -> anyhow::Result<()> {
    let depends = execute(Command::new(find_file("apt-cache")?).args(["depends", "--important", KERNEL]))?;
    // Its own name comes first.
    let name = depends.split_whitespace().filter(|word| word.starts_with("linux-image-")).nth(1);
    let name = name.with_context(|| format!("no kernel in: {depends}; run: apt-get update"))?;
    execute(Command::new(find_file("apt-get")?).args(["download", name]).current_dir(folder))?;
    let package = only_entry(folder)?;
    execute(Command::new(find_file("dpkg")?).args(["-x", &package, "."]).current_dir(folder))?;
    Ok(())
}

/// Removes the drivers of what the machine does not have.
fn prune(modules: &Path, moved: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(moved)?;
    let kept_modules = USEFUL.map(|file| (modules.join(file), moved.join(file.replace('/', "-"))));
    for (file, moved) in &kept_modules {
        fs::rename(file, moved).with_context(|| format!("no module {}", file.display()))?;
    }
    for folder in USELESS {
        remove(&modules.join(folder))?;
    }
    for (file, moved) in &kept_modules {
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::rename(moved, file)?;
    }
    Ok(())
}

/// Puts in what Debian does not have.
fn furnish(root: &Path) -> anyhow::Result<()> {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        let folder = path.parent().unwrap_or(root);
        let written = fs::create_dir_all(folder).and_then(|()| fs::write(&path, text));
        written.with_context(|| format!("cannot write {}", path.display()))
    };
    write("etc/hostname", "vm\n")?;
    write("etc/hosts", "127.0.0.1 localhost vm\n")?;
    // Not what debootstrap has taken from here.
    write("etc/resolv.conf", "nameserver 127.0.0.1\n")?;
    // Each machine makes one of its own.
    write("etc/machine-id", "")?;
    write("etc/fstab", FSTAB)?;
    write("etc/containerd/config.toml", &containerd_config())?;
    write("etc/cni/net.d/10-pods.conflist", NETWORK)?;
    // As process 1 of its container, a pod's program takes no SIGTERM.
    write("etc/systemd/system.conf.d/vm.conf", "[Manager]\nDefaultTimeoutStopSec=10s\n")?;
    write("etc/modules-load.d/vm.conf", "virtio_console\noverlay\n")?;
    write("etc/systemd/system/guest-shell.service", SHELL_UNIT)?;
    write("usr/local/sbin/guest-shell", GUEST_SHELL)?;
    fs::set_permissions(root.join("usr/local/sbin/guest-shell"), fs::Permissions::from_mode(0o755))?;
    fs::create_dir_all(root.join("payload"))?;
    let systemctl = |verb: &str, units: &[&str]| {
        execute(Command::new(find_file("chroot")?).arg(root).args(["systemctl", verb]).args(units))
    };
    systemctl("enable", &["containerd.service", "guest-shell.service"])?;
    systemctl("mask", &MASKED)?;
    systemctl("disable", &DISABLED)?;
    for folder in ["var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"] {
        remove(&root.join(folder))?;
    }
    Ok(())
}

/// Makes an ext4 with what is in `folder`.
pub(super) fn make(disk: &Path, folder: &Path) -> anyhow::Result<()> {
    let file = File::create(disk).with_context(|| format!("cannot make {}", disk.display()))?;
    file.set_len(SIZE_MIB << 20)?;
    let mkfs = Component::Ext4.find()?;
    execute(Command::new(mkfs).args(["-q", "-F", "-E", "root_owner=0:0", "-d"]).arg(folder).arg(disk))?;
    Ok(())
}

/// The name of the only entry of a folder.
fn only_entry(folder: &Path) -> anyhow::Result<String> {
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    let [name] = &names[..] else { bail!("{} has not one entry, but {names:?}", folder.display()) };
    Ok(name.clone())
}
