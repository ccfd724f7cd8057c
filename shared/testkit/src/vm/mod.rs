//! A virtual machine: Debian with its own kernel, systemd as process 1, cgroup v2 and containerd, emulated by qemu.
//!
//! The machine has no network. Commands go through a virtio port to a shell that systemd keeps there (`guest-shell`), and
//! come back with exit code, output and errors. What a test brings along is a second disk, read-only, at `/payload`.

mod disk;
mod initramfs;
mod shell;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::containerd::{open_log, tail};
use crate::process::ProcessId;
use crate::scratch::remember;
use crate::{Component, Remains};

pub use shell::Said;
use shell::Shell;

/// How long booting may take: everything is emulated.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// How long a command may take that says nothing else.
const COMMAND_LIMIT: Duration = Duration::from_secs(180);
/// Between two looks at something that has to happen.
const LOOK: Duration = Duration::from_millis(500);
/// The memory of the machine in MiB.
const MEMORY: &str = "2048";

/// A running machine; dropping it switches it off, and nothing of it is left.
#[derive(Debug)]
pub struct Vm {
    qemu: Child,
    shell: Shell,
    /// The file with the output of the serial console.
    console: PathBuf,
}

impl Vm {
    /// Boots a machine whose `/payload` has the content of `payload`. Its files are in `dir`. The first boot on a host creates
    /// the disk from Debian's mirror.
    pub fn boot(dir: &Path, payload: &Path) -> anyhow::Result<Self> {
        let program = Component::Qemu.find()?;
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let base = disk::base()?;
        let payload_disk = dir.join("payload.img");
        disk::make(&payload_disk, payload)?;
        let (socket, console, log) = (dir.join("port"), dir.join("console.log"), dir.join("qemu.log"));
        let output = open_log(&log)?;
        let mut command = Command::new(program);
        // Never kvm: where the machine is itself an emulated one, it may be there and hang.
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", MEMORY]);
        command.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-monitor",
            "none",
            "-nic",
            "none",
        ]);
        command.arg("-kernel").arg(&base.kernel).arg("-initrd").arg(&base.initramfs);
        command.args(["-append", "console=ttyS0 panic=-1 quiet systemd.show_status=0"]);
        // Written blocks go to a nameless file in TMPDIR, so the base stays as it is.
        command.arg("-drive").arg(drive(&base.disk, "snapshot=on")).env("TMPDIR", dir);
        command.arg("-drive").arg(drive(&payload_disk, "readonly=on"));
        command.arg("-chardev").arg(format!("socket,id=port,path={},server=on,wait=off", socket.display()));
        command.args(["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,name=keelson"]);
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let mut qemu = command.spawn().context("cannot run qemu")?;
        let processes = ProcessId::of(qemu.id()).into_iter().collect();
        let connected = remember(dir, &Remains { processes, ..Remains::default() })
            .and_then(|()| connect(&mut qemu, &socket).with_context(|| format!("qemu:\n{}", tail(&log, 30))));
        let shell = match connected {
            Ok(shell) => shell,
            Err(error) => {
                end(&mut qemu);
                return Err(error);
            }
        };
        let mut vm = Self { qemu, shell, console };
        vm.await_boot(None)?;
        Ok(vm)
    }

    /// Runs a line of bash as root and waits for its end.
    pub fn run(&mut self, line: &str) -> anyhow::Result<Said> {
        self.run_within(line, COMMAND_LIMIT)
    }

    /// [`Vm::run`] of what takes long.
    pub fn run_within(&mut self, line: &str, limit: Duration) -> anyhow::Result<Said> {
        let said = self.shell.run(line, limit);
        said.with_context(|| format!("in the machine: {line}\n{}", tail(&self.console, 30)))
    }

    /// The output of a line of bash that must succeed.
    pub fn sh(&mut self, line: &str) -> anyhow::Result<String> {
        let said = self.run(line)?;
        ensure!(said.code == 0, "`{line}` ended with {}: {}{}", said.code, said.stdout, said.stderr);
        Ok(said.stdout)
    }

    /// Runs a line of bash until `found` finds what it looks for in its output; fails with `what` and the last output.
    pub fn until<T>(
        &mut self,
        what: &str,
        limit: Duration,
        line: &str,
        mut found: impl FnMut(&Said) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            let said = self.run(line)?;
            if let Some(found) = found(&said) {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                bail!(
                    "{what}: not within {} s; `{line}` said: {}{}",
                    limit.as_secs(),
                    said.stdout,
                    said.stderr
                );
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Reboots it, as `systemctl reboot` does; its files persist.
    pub fn reboot(&mut self) -> anyhow::Result<()> {
        let before = self.sh("cat /proc/sys/kernel/random/boot_id")?.trim().to_owned();
        self.shell.tell("systemctl reboot")?;
        self.await_boot(Some(&before))
    }

    /// Waits for a boot that is not the one `before`, and until systemd has started what it starts.
    fn await_boot(&mut self, before: Option<&str>) -> anyhow::Result<()> {
        let booted = self.shell.await_boot(before, BOOT_LIMIT);
        booted.with_context(|| format!("the machine does not boot:\n{}", tail(&self.console, 60)))?;
        // The exit code is not checked here: it is not 0 if a unit has failed, which the caller may check.
        self.run_within("systemctl is-system-running --wait", BOOT_LIMIT)?;
        Ok(())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        end(&mut self.qemu);
    }
}

fn end(qemu: &mut Child) {
    // It may have ended by itself.
    let _ = qemu.kill();
    let _ = qemu.wait();
}

fn drive(file: &Path, option: &str) -> String {
    format!("file={},if=virtio,format=raw,{option}", file.display())
}

fn connect(qemu: &mut Child, socket: &Path) -> anyhow::Result<Shell> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(status) = qemu.try_wait()? {
            bail!("it has ended with {status}");
        }
        match Shell::connect(socket) {
            Err(error) if Instant::now() >= deadline => return Err(error).context("its port is not there"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            Ok(shell) => return Ok(shell),
        }
    }
}
