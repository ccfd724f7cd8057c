//! A private Docker engine; the machine's own is never used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::containerd::{open_log, tail};
use crate::packages::full_path;
use crate::process::{ProcessId, Signal};
use crate::scratch::{remember, report};
use crate::{Component, Remains};

/// It starts a containerd of its own first.
const START_LIMIT: Duration = Duration::from_secs(60);
/// It ends every container first.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// A running dockerd with everything below one folder and in its own network namespace, so that its bridges, addresses and
/// packet filters are private. It pulls no images. Dropping it ends it and its containers and removes what
/// it made.
#[derive(Debug)]
pub struct PrivateDocker {
    dir: PathBuf,
    cgroup_root: String,
    child: Option<Child>,
}

impl PrivateDocker {
    /// Starts one in the folder `dir`; its containers' cgroups are below `cgroup_root`, such as `/keelson-docker-x`.
    pub fn start(dir: &Path, cgroup_root: &str) -> anyhow::Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "dockerd needs root");
        let program = Component::Docker.find()?;
        Component::Iproute.find()?;
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mut docker = Self { dir: dir.to_owned(), cgroup_root: cgroup_root.to_owned(), child: None };
        remember(dir, &docker.remains())?;
        let log = open_log(&docker.log())?;
        // The machine's file may set what is set here, which dockerd refuses.
        let settings = dir.join("daemon.json");
        fs::write(&settings, "{}").with_context(|| format!("cannot write {}", settings.display()))?;
        // If dockerd uses the machine's containerd, it does so in a namespace of its own.
        let namespace = cgroup_root.trim_start_matches('/');
        let child = Command::new("unshare")
            .args(["--net", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"])
            .arg(program)
            .arg("--config-file")
            .arg(&settings)
            .arg("--data-root")
            .arg(dir.join("data"))
            .arg("--exec-root")
            .arg(docker.exec_root())
            .arg("--pidfile")
            .arg(dir.join("docker.pid"))
            .args(["--host", &docker.host(), "--cgroup-parent", cgroup_root])
            .args(["--containerd-namespace", namespace])
            .args(["--containerd-plugins-namespace", &format!("{namespace}-plugins")])
            .env("PATH", full_path(None)?)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot run dockerd")?;
        docker.child = Some(child);
        remember(dir, &docker.remains())?;
        docker.wait_until_it_answers()?;
        Ok(docker)
    }

    /// The value of `DOCKER_HOST` for clients.
    pub fn host(&self) -> String {
        format!("unix://{}", self.dir.join("docker.sock").display())
    }

    /// A command that runs `program` in the network namespace of the daemon, which has the published ports.
    pub fn command_in_network(&self, program: &Path) -> anyhow::Result<Command> {
        let pid = self.child.as_ref().map(Child::id).context("dockerd has been stopped")?;
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{pid}/ns/net")).arg(program).env("DOCKER_HOST", self.host());
        Ok(command)
    }

    fn exec_root(&self) -> PathBuf {
        self.dir.join("exec")
    }

    fn log(&self) -> PathBuf {
        self.dir.join("dockerd.log")
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        tail(&self.log(), 30)
    }

    fn wait_until_it_answers(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        let host = self.host();
        loop {
            let mut version = Command::new("docker");
            version.args(["--host", &host, "version"]).stdin(Stdio::null());
            if version.output().is_ok_and(|output| output.status.success()) {
                return Ok(());
            }
            if let Some(child) = &mut self.child
                && let Some(status) = child.try_wait()?
            {
                bail!("dockerd has ended with {status}:\n{}", self.log_tail());
            }
            if Instant::now() >= deadline {
                bail!("dockerd does not answer:\n{}", self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn remains(&self) -> Remains {
        Remains {
            processes: self.child.as_ref().and_then(|child| ProcessId::of(child.id())).into_iter().collect(),
            containerd_sockets: vec![self.exec_root().join("containerd/containerd.sock")],
            containerd_states: vec![self.exec_root().join("containerd/daemon")],
            cgroup_roots: vec![self.cgroup_root.clone()],
            dirs: vec![self.dir.clone()],
            ..Remains::default()
        }
    }

    /// Stops the daemon and removes everything it created. An error names what could not be removed.
    pub fn stop(mut self) -> anyhow::Result<()> {
        let problems = self.clean_up();
        ensure!(problems.is_empty(), "left behind: {}", problems.join("; "));
        Ok(())
    }

    fn clean_up(&mut self) -> Vec<String> {
        let remains = self.remains();
        if let Some(mut child) = self.child.take() {
            if let Some(id) = ProcessId::of(child.id()) {
                id.signal(Signal::TERM);
                id.wait_gone(STOP_LIMIT);
            }
            // Both fail only when it has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
        remains.remove()
    }
}

impl Drop for PrivateDocker {
    fn drop(&mut self) {
        if self.child.is_some() {
            let problems = self.clean_up();
            report(&self.dir, &problems);
        }
    }
}
