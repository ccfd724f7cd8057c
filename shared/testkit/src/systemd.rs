//! A private systemd: the first process of its own namespaces, with only a message bus.
//!
//! It has the real one's cgroup code and D-Bus interface. It sees the machine's files, but its own `/run`, network,
//! processes and cgroups, and none of the machine's units.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use keelson_mountinfo::Mount;

use crate::containerd::{open_log, tail};
use crate::process::ProcessId;
use crate::scratch::remember;
use crate::system::mounts_of;
use crate::{Component, Remains, find_file};

/// How long systemd may take until its message bus is there.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Moves itself into the cgroups given as arguments, and executes the command after `--`.
const ENTER: &str =
    "while [ \"$1\" != -- ]; do echo 0 > \"$1/cgroup.procs\" || exit; shift; done; shift; exec \"$@\"";

/// Mounts the cgroup hierarchies again, so that each starts at the current cgroup, hides the machine's units and executes
/// systemd. The arguments are a type, options and a place for each hierarchy.
const BOOT: &str = r#"
set -e
hide() { mount -t tmpfs -o mode=755 tmpfs "$1"; }
while [ $# -gt 0 ]; do
  umount "$3"
  mount -t "$1" -o "$2" "$1" "$3"
  shift 3
done
ip link set lo up
hide /run
units=/usr/lib/systemd/system
for dir in /etc/systemd/system $units /usr/lib/systemd/system-generators /usr/lib/systemd/system-environment-generators; do
  if [ -d $dir ]; then hide $dir; fi
done
cat > $units/idle.target <<END
[Unit]
DefaultDependencies=no
Wants=dbus.socket dbus.service
END
cat > $units/dbus.socket <<END
[Unit]
DefaultDependencies=no
[Socket]
ListenStream=/run/dbus/system_bus_socket
END
cat > $units/dbus.service <<END
[Unit]
DefaultDependencies=no
Requires=dbus.socket
[Service]
Type=notify
NotifyAccess=main
ExecStart=/usr/bin/dbus-daemon --system --address=systemd: --nofork --nopidfile --systemd-activation
StandardOutput=null
StandardError=null
END
export container=keelson SYSTEMD_LOG_TARGET=console SYSTEMD_LOG_LEVEL=info
exec /lib/systemd/systemd --system --unit=idle.target
"#;

/// A running systemd; dropping it ends it with everything in its namespaces.
#[derive(Debug)]
pub struct Systemd {
    unshare: Option<Child>,
    /// Its pid as seen from here.
    pid: u32,
    /// The cgroup that is the top of its tree.
    cgroup: String,
}

impl Systemd {
    /// Boots one, with its log in `dir`, and waits until its message bus is there.
    pub fn boot(dir: &Path) -> anyhow::Result<Self> {
        Component::Systemd.find()?;
        Component::Dbus.find()?;
        Component::Iproute.find()?;
        let unshare = find_file("unshare")?;
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let cgroup = format!("/keelson-systemd-{:08x}", fastrand::u32(..));
        let hierarchies = hierarchies();
        // Before there is anything: this process may be killed at any time.
        remember(dir, &Remains { cgroup_roots: vec![cgroup.clone()], ..Remains::default() })?;
        let mut systemd = Self { unshare: None, pid: 0, cgroup };
        let folders = make_all(&hierarchies, &systemd.cgroup)?;
        let log = dir.join("systemd.log");
        let output = open_log(&log)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", ENTER, "enter"]).args(&folders).arg("--").arg(unshare);
        command.args(["--cgroup", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net"]);
        command.args(["--propagation", "private", "/bin/sh", "-c", BOOT, "boot"]);
        for mount in &hierarchies {
            command.arg(&mount.fs_type).arg(options(mount)).arg(&mount.point);
        }
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let mut unshare = command.spawn().context("cannot run unshare")?;
        let processes = ProcessId::of(unshare.id()).into_iter().collect();
        remember(dir, &Remains { processes, ..Remains::default() })?;
        let booted = await_bus(&mut unshare);
        let own = unshare.id();
        systemd.unshare = Some(unshare);
        systemd.pid = booted.with_context(|| format!("systemd does not boot:\n{}", tail(&log, 30)))?;
        // On v2 a cgroup with processes of its own gives its children no controllers (cgroups(7)).
        for mount in &hierarchies {
            inhabit(&mount.point, &systemd.commands_cgroup(), own)?;
        }
        Ok(systemd)
    }

    /// A command that runs next to it, in its own cgroup.
    pub fn command(&self, program: &Path) -> anyhow::Result<Command> {
        let nsenter = find_file("nsenter")?;
        let folders = make_all(&hierarchies(), &self.commands_cgroup())?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", ENTER, "enter"]).args(&folders).arg("--").arg(nsenter);
        command.args(["--target", &self.pid.to_string(), "--cgroup", "--pid", "--mount", "--net", "--"]);
        command.arg(program);
        Ok(command)
    }

    /// The cgroup of commands that run next to systemd.
    fn commands_cgroup(&self) -> String {
        format!("{}/commands", self.cgroup)
    }
}

/// Waits for the bus; the pid of systemd.
fn await_bus(unshare: &mut Child) -> anyhow::Result<u32> {
    let own = unshare.id();
    let children = format!("/proc/{own}/task/{own}/children");
    let deadline = Instant::now() + START_LIMIT;
    loop {
        if let Some(status) = unshare.try_wait()? {
            bail!("it has ended with {status}");
        }
        let text = fs::read_to_string(&children).unwrap_or_default();
        if let Some(pid) = text.split_whitespace().next().and_then(|pid| pid.parse::<u32>().ok()) {
            let proc = PathBuf::from(format!("/proc/{pid}"));
            // Before it is systemd it may still see the machine's own bus.
            let is_systemd = fs::read_to_string(proc.join("comm")).is_ok_and(|name| name.trim() == "systemd");
            if is_systemd && proc.join("root/run/dbus/system_bus_socket").exists() {
                return Ok(pid);
            }
        }
        if Instant::now() >= deadline {
            bail!("its message bus was not there within {} s", START_LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        if let Some(unshare) = &mut self.unshare {
            // It may have ended by itself.
            let _ = unshare.kill();
            let _ = unshare.wait();
        }
        let remains = Remains { cgroup_roots: vec![self.cgroup.clone()], ..Remains::default() };
        crate::scratch::report(Path::new("systemd"), &remains.remove());
    }
}

/// The cgroup hierarchies, each once.
fn hierarchies() -> Vec<Mount> {
    let mut found: Vec<Mount> = Vec::new();
    for mount in mounts_of("self") {
        let is_cgroup =
            matches!(mount.fs_type.as_str(), "cgroup" | "cgroup2") && mount.root == Path::new("/");
        if is_cgroup && found.iter().all(|other| other.point != mount.point) {
            found.push(mount);
        }
    }
    found
}

/// The mount options for mounting the same hierarchy again.
fn options(mount: &Mount) -> String {
    if mount.fs_type == "cgroup2" {
        return "rw".to_owned();
    }
    let controllers = mount.super_options.split(',').filter(|option| {
        !matches!(*option, "rw" | "ro" | "xattr" | "clone_children" | "noprefix" | "cpuset_v2_mode")
            && !option.starts_with("release_agent=")
    });
    let list: Vec<&str> = controllers.collect();
    let named = list.iter().any(|option| option.starts_with("name="));
    if named { format!("none,{}", list.join(",")) } else { list.join(",") }
}

/// Makes a cgroup and puts a process into it. systemd removes empty ones while it starts, also between the two.
fn inhabit(mount: &Path, cgroup: &str, pid: u32) -> anyhow::Result<()> {
    let attempt = || {
        let procs = make(mount, cgroup)?.join("cgroup.procs");
        fs::write(&procs, pid.to_string()).with_context(|| format!("cannot write {}", procs.display()))
    };
    let deadline = Instant::now() + START_LIMIT;
    loop {
        match attempt() {
            Err(error) if is_missing(&error) && Instant::now() < deadline => {}
            other => return other,
        }
    }
}

/// A cgroup that is removed while its file is open answers ENODEV.
fn is_missing(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|e| e.kind() == ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENODEV))
}

/// Makes a cgroup in each hierarchy, so that processes can be put into it.
fn make_all(hierarchies: &[Mount], cgroup: &str) -> anyhow::Result<Vec<PathBuf>> {
    hierarchies.iter().map(|mount| make(&mount.point, cgroup)).collect()
}

/// Makes a cgroup that processes can be put into.
fn make(mount: &Path, cgroup: &str) -> anyhow::Result<PathBuf> {
    let mut dir = mount.to_owned();
    for part in cgroup.split('/').filter(|part| !part.is_empty()) {
        let above = dir.clone();
        dir.push(part);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        // On v2 the controllers come from above; one that cannot be had is missed by who needs it.
        for controller in
            fs::read_to_string(above.join("cgroup.controllers")).unwrap_or_default().split_whitespace()
        {
            let _ = fs::write(above.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        // A v1 cpuset takes no process before it has CPUs and memory nodes (cpuset(7)).
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let Ok(value) = fs::read_to_string(above.join(file)) else { continue };
            if fs::read_to_string(dir.join(file)).is_ok_and(|own| own.trim().is_empty())
                && !value.trim().is_empty()
            {
                fs::write(dir.join(file), value.trim())
                    .with_context(|| format!("cannot write {file} of {}", dir.display()))?;
            }
        }
    }
    Ok(dir)
}
