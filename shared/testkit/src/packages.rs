//! The programs of Debian's packages that the kit runs.

use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// Folders searched after `PATH`: a root shell without a login often lacks the `sbin` ones.
const SYSTEM_BIN_DIRS: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The folders of CNI plugins: Debian's, then upstream's.
const CNI_BIN_DIRS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// The plugins that the kit's network needs.
const CNI_PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];

/// The folders in which packages install the plugin for `docker compose`.
const COMPOSE_PLUGINS: [&str; 2] =
    ["/usr/libexec/docker/cli-plugins/docker-compose", "/usr/lib/docker/cli-plugins/docker-compose"];

/// Something that is not ours and must be installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// `containerd` with `ctr` and `containerd-shim-runc-v2`.
    Containerd,
    /// `runc`.
    Runc,
    /// The CNI plugins bridge, host-local and loopback.
    CniPlugins,
    /// A busybox without shared libraries.
    Busybox,
    /// `ip`.
    Iproute,
    /// `iptables`.
    Iptables,
    /// `protoc`.
    Protoc,
    /// protoc's well-known types.
    ProtobufTypes,
    /// A registry for images.
    DockerRegistry,
    /// systemd.
    Systemd,
    /// `dbus-daemon`.
    Dbus,
    /// `etcd`.
    EtcdServer,
    /// `dockerd` and `docker`.
    Docker,
    /// `docker-compose`, or Docker's plugin.
    DockerCompose,
    /// `debootstrap`.
    Debootstrap,
    /// `qemu-system-x86_64`.
    Qemu,
    /// `mkfs.ext4`.
    Ext4,
    /// `promtool`.
    Prometheus,
    /// The release of `go` that builds the API server.
    Go,
    /// `jq`.
    Jq,
    /// `rsync`.
    Rsync,
    /// `dpkg-source`, with `make` and `patch`.
    DpkgDev,
    /// `kubectl`.
    Kubectl,
    /// `patchelf`.
    Patchelf,
}

impl Component {
    /// The components that building and running need on a clean Debian 12.
    pub const TO_RUN: [Self; 8] = [
        Self::Containerd,
        Self::Runc,
        Self::CniPlugins,
        Self::Busybox,
        Self::Iproute,
        Self::Iptables,
        Self::Protoc,
        Self::ProtobufTypes,
    ];

    /// The components that only tests need.
    pub const TO_TEST: [Self; 4] = [Self::DockerRegistry, Self::Systemd, Self::Dbus, Self::EtcdServer];

    /// The components that only the tests that take minutes need.
    pub const TO_TEST_LONG: [Self; 12] = [
        Self::Docker,
        Self::DockerCompose,
        Self::Debootstrap,
        Self::Qemu,
        Self::Ext4,
        Self::Prometheus,
        Self::Go,
        Self::Jq,
        Self::Rsync,
        Self::DpkgDev,
        Self::Kubectl,
        Self::Patchelf,
    ];

    /// The Debian package that has it.
    pub const fn package(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Runc => "runc",
            Self::CniPlugins => "containernetworking-plugins",
            Self::Busybox => "busybox-static",
            Self::Iproute => "iproute2",
            Self::Iptables => "iptables",
            Self::Protoc => "protobuf-compiler",
            Self::ProtobufTypes => "libprotobuf-dev",
            Self::DockerRegistry => "docker-registry",
            Self::Systemd => "systemd",
            Self::Dbus => "dbus",
            Self::EtcdServer => "etcd-server",
            Self::Docker => "docker.io",
            Self::DockerCompose => "docker-compose",
            Self::Debootstrap => "debootstrap",
            Self::Qemu => "qemu-system-x86",
            Self::Ext4 => "e2fsprogs",
            Self::Prometheus => "prometheus",
            Self::Go => "golang-1.19-go",
            Self::Jq => "jq",
            Self::Rsync => "rsync",
            Self::DpkgDev => "dpkg-dev",
            Self::Kubectl => "kubernetes-client",
            Self::Patchelf => "patchelf",
        }
    }

    /// The path of the component: its file, or for [`Component::CniPlugins`] its folder.
    ///
    /// The error names the package and the command that installs it.
    pub fn find(self) -> anyhow::Result<PathBuf> {
        self.search().with_context(|| {
            let package = self.package();
            format!("{} is missing; install it with: apt-get install -y {package}", self.what())
        })
    }

    fn search(self) -> anyhow::Result<PathBuf> {
        match self {
            Self::Containerd => {
                find_file("ctr")?;
                find_file("containerd-shim-runc-v2")?;
                find_file("containerd")
            }
            Self::Runc => find_file("runc"),
            Self::CniPlugins => find_cni_plugins(),
            Self::Busybox => find_static_busybox(),
            Self::Iproute => find_file("ip"),
            Self::Iptables => find_file("iptables"),
            Self::Protoc => find_file("protoc"),
            Self::DockerRegistry => find_file("docker-registry"),
            Self::Systemd => {
                let path = PathBuf::from("/lib/systemd/systemd");
                if path.is_file() { Ok(path) } else { bail!("{} does not exist", path.display()) }
            }
            Self::Dbus => find_file("dbus-daemon"),
            Self::EtcdServer => find_file("etcd"),
            Self::Docker => find_file("docker").and_then(|_| find_file("dockerd")),
            Self::DockerCompose => find_file("docker-compose").or_else(|missing| {
                let found = COMPOSE_PLUGINS.iter().map(PathBuf::from).find(|path| path.is_file());
                found.ok_or(missing)
            }),
            Self::Debootstrap => find_file("debootstrap"),
            Self::Qemu => find_file("qemu-system-x86_64"),
            Self::Ext4 => find_file("mkfs.ext4"),
            Self::Prometheus => find_file("promtool"),
            Self::Go => {
                // Another installed release comes first in PATH.
                let path = PathBuf::from("/usr/lib/go-1.19/bin/go");
                if path.is_file() { Ok(path) } else { bail!("{} does not exist", path.display()) }
            }
            Self::Jq => find_file("jq"),
            Self::Rsync => find_file("rsync"),
            Self::DpkgDev => find_file("make").and_then(|_| find_file("dpkg-source")),
            Self::Kubectl => find_file("kubectl"),
            Self::Patchelf => find_file("patchelf"),
            Self::ProtobufTypes => {
                let path = PathBuf::from("/usr/include/google/protobuf/timestamp.proto");
                if path.is_file() { Ok(path) } else { bail!("{} does not exist", path.display()) }
            }
        }
    }

    const fn what(self) -> &'static str {
        match self {
            Self::Containerd => "containerd (with ctr and containerd-shim-runc-v2)",
            Self::Runc => "runc",
            Self::CniPlugins => "the set of CNI plugins (bridge, host-local, loopback)",
            Self::Busybox => "a statically linked busybox",
            Self::Iproute => "the command ip",
            Self::Iptables => "the command iptables",
            Self::Protoc => "the protobuf compiler protoc",
            Self::ProtobufTypes => "the set of protobuf's well-known types",
            Self::DockerRegistry => "the registry docker-registry",
            Self::Systemd => "systemd",
            Self::Dbus => "the message bus dbus-daemon",
            Self::EtcdServer => "the server etcd",
            Self::Docker => "Docker (dockerd and docker)",
            Self::DockerCompose => "docker-compose",
            Self::Debootstrap => "the command debootstrap",
            Self::Qemu => "qemu (qemu-system-x86_64)",
            Self::Ext4 => "the command mkfs.ext4",
            Self::Prometheus => "the command promtool",
            Self::Go => "go 1.19",
            Self::Jq => "the command jq",
            Self::Rsync => "the command rsync",
            Self::DpkgDev => "the command dpkg-source (with make)",
            Self::Kubectl => "the command kubectl",
            Self::Patchelf => "the command patchelf",
        }
    }
}

/// The program `name` from `PATH` or a system folder.
pub fn find_file(name: &str) -> anyhow::Result<PathBuf> {
    search_path()
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("no {name} in PATH, {}", SYSTEM_BIN_DIRS.join(", ")))
}

/// The `PATH` for programs that run others: the caller's with the system folders behind it.
pub(crate) fn full_path(first: Option<&Path>) -> anyhow::Result<OsString> {
    let folders = first.map(Path::to_owned).into_iter().chain(search_path());
    std::env::join_paths(folders).context("PATH has a folder with a colon in its name")
}

fn search_path() -> impl Iterator<Item = PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own: Vec<PathBuf> = std::env::split_paths(&path).filter(|p| p.is_absolute()).collect();
    own.into_iter().chain(SYSTEM_BIN_DIRS.iter().map(PathBuf::from))
}

fn find_cni_plugins() -> anyhow::Result<PathBuf> {
    CNI_BIN_DIRS
        .iter()
        .map(PathBuf::from)
        .find(|folder| CNI_PLUGINS.iter().all(|plugin| folder.join(plugin).is_file()))
        .with_context(|| format!("{} are not all in {}", CNI_PLUGINS.join(", "), CNI_BIN_DIRS.join(" or ")))
}

fn find_static_busybox() -> anyhow::Result<PathBuf> {
    let path = find_file("busybox")?;
    let mut head = Vec::new();
    std::fs::File::open(&path)
        .and_then(|file| file.take(4096).read_to_end(&mut head))
        .with_context(|| format!("cannot read {}", path.display()))?;
    if needs_interpreter(&head)? {
        bail!("{} needs shared libraries, which an image of it alone lacks", path.display());
    }
    Ok(path)
}

/// Whether the ELF file that starts with `head` names a dynamic linker (a `PT_INTERP` header; elf(5)).
fn needs_interpreter(head: &[u8]) -> anyhow::Result<bool> {
    const PT_INTERP: u32 = 3;
    let number = |at: usize, len: usize| -> anyhow::Result<u64> {
        let bytes = head.get(at..at + len).context("the ELF headers are cut off")?;
        Ok(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    if !head.starts_with(b"\x7fELF\x02\x01") {
        bail!("not a 64-bit little-endian ELF file");
    }
    let (table, entry_size, entries) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for entry in 0..entries {
        let at = usize::try_from(table + entry * entry_size)?;
        if number(at, 4)? == u64::from(PT_INTERP) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF header with one program header of `kind`.
    fn elf(kind: u8) -> Vec<u8> {
        let mut head = vec![0; 64 + 56];
        head[..6].copy_from_slice(b"\x7fELF\x02\x01");
        head[32] = 64;
        head[54] = 56;
        head[56] = 1;
        head[64] = kind;
        head
    }

    #[test]
    fn tells_a_static_program_from_a_dynamic_one() {
        assert!(!needs_interpreter(&elf(1)).unwrap());
        assert!(needs_interpreter(&elf(3)).unwrap());
        assert!(needs_interpreter(b"#!/bin/sh").is_err());
        assert!(needs_interpreter(&elf(3)[..66]).is_err());
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = find_file("keelson-no-such-program").unwrap_err();
        assert!(error.to_string().contains("keelson-no-such-program"), "{error}");
    }
}
