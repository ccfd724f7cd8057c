//! A private containerd; the machine's own is never used.

use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::cni::{bridge_name, conflist_path, network_name};
use crate::containerd_config::{Layout, Settings, render, usable_snapshotter};
use crate::packages::full_path;
use crate::process::ProcessId;
use crate::scratch::{remember, report};
use crate::{Component, Image, Network, Remains, standard_images, write_archive};

/// The namespace in which CRI keeps its images and containers.
const CRI_NAMESPACE: &str = "k8s.io";

/// A unix socket's path has 107 bytes and a zero (unix(7)).
const MAX_SOCKET_PATH: usize = 107;

/// On a busy machine containerd needs seconds to load its plugins.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How a [`PrivateContainerd`] differs from the usual one.
#[derive(Debug, Clone)]
pub struct Options {
    /// At most 13 letters and digits that name its bridge and network; `None`: made from its folder.
    pub id: Option<String>,
    /// A folder with another release's `containerd`, `ctr`, shim and perhaps `runc`; `None`: as installed.
    pub bin_dir: Option<PathBuf>,
    /// Whether runc is to use the systemd cgroup driver.
    pub systemd_cgroup: bool,
    /// Bytes after which CRI splits a log line.
    pub max_container_log_line_size: i64,
    /// Cgroup roots whose trees are removed with it, such as `/keelson-test-x`.
    pub cgroup_roots: Vec<String>,
    /// Whether it leads its own session and continues to run when the process that started it ends.
    pub detached: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            id: None,
            bin_dir: None,
            systemd_cgroup: false,
            max_container_log_line_size: 16 * 1024,
            cgroup_roots: Vec::new(),
            detached: false,
        }
    }
}

/// A running containerd with its own root, state, socket, network and images.
///
/// Dropping it ends it and all its containers and removes everything it made, unless it was detached.
#[derive(Debug)]
pub struct PrivateContainerd {
    layout: Layout,
    options: Options,
    binary: PathBuf,
    ctr: PathBuf,
    snapshotter: &'static str,
    network: Network,
    child: Option<Child>,
    /// Whether dropping it removes nothing.
    kept: bool,
}

impl PrivateContainerd {
    /// Starts one in the folder `dir`, which it makes, and waits until its CRI plugin is loaded.
    ///
    /// Blocks; `start` (with the feature `grpc`) is the asynchronous way, which also asks CRI itself.
    pub fn launch(dir: &Path, options: Options) -> anyhow::Result<Self> {
        let dir = std::path::absolute(dir)?;
        let layout = Layout::below(&dir);
        let length = layout.socket.as_os_str().len();
        ensure!(
            length <= MAX_SOCKET_PATH,
            "{} has {length} bytes, a socket's path may have {MAX_SOCKET_PATH}; use a shorter folder",
            layout.socket.display()
        );
        ensure!(rustix::process::geteuid().is_root(), "containerd needs root");
        let (binary, ctr) = binaries(options.bin_dir.as_deref())?;
        let cni_plugins = Component::CniPlugins.find()?;
        Component::Iproute.find()?;
        let runc = options.bin_dir.as_ref().map(|dir| dir.join("runc")).filter(|path| path.is_file());
        let runc = runc.map_or_else(|| Component::Runc.find(), Ok)?;

        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let id = options.id.clone().unwrap_or_else(|| id_of(&dir));
        let network = Network::choose(&id)?;
        let snapshotter = usable_snapshotter(&dir);
        network.write(&layout.cni_conf, &layout.cni_leases)?;
        let settings = Settings {
            runc: &runc,
            cni_plugins: &cni_plugins,
            snapshotter,
            systemd_cgroup: options.systemd_cgroup,
            max_log_line: options.max_container_log_line_size,
        };
        fs::write(&layout.config, render(&layout, &settings))
            .with_context(|| format!("cannot write {}", layout.config.display()))?;
        let mut containerd =
            Self { layout, options, binary, ctr, snapshotter, network, child: None, kept: false };
        remember(&dir, &containerd.remains())?;
        containerd.run()?;
        Ok(containerd)
    }

    /// The CRI endpoint: `unix://` and the socket.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.layout.socket.display())
    }

    /// The socket of CRI and of containerd's own services.
    pub fn socket(&self) -> &Path {
        &self.layout.socket
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.layout.dir
    }

    /// Its network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Takes its network's configuration away: CRI's condition NetworkReady becomes false, pods run on.
    pub fn remove_network(&self) -> anyhow::Result<()> {
        let path = conflist_path(&self.layout.cni_conf);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    /// Makes the network one of `plugin`, a name that no CNI plugin has: NetworkReady stays true, each pod fails.
    pub fn break_network(&self, plugin: &str) -> anyhow::Result<()> {
        self.network.write_broken(&self.layout.cni_conf, plugin)
    }

    /// Undoes [`remove_network`](Self::remove_network) and [`break_network`](Self::break_network).
    pub fn restore_network(&self) -> anyhow::Result<()> {
        self.network.write(&self.layout.cni_conf, &self.layout.cni_leases)
    }

    /// The pid of containerd; `None` after [`kill`](Self::kill).
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Its process, distinguishable from a later one with the same pid.
    pub fn process(&self) -> Option<ProcessId> {
        self.pid().and_then(ProcessId::of)
    }

    /// Kills only containerd (SIGKILL); its shims and containers continue to run.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only when it has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Kills containerd if it runs and starts it again on the same folders.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.kill();
        self.run()
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        tail(&self.layout.log, 30)
    }

    /// Imports [`standard_images`] and waits until CRI knows them.
    pub fn import_standard_images(&self) -> anyhow::Result<()> {
        self.import_images(&standard_images())
    }

    /// Makes `images` and imports them, and waits until CRI knows them.
    pub fn import_images(&self, images: &[Image]) -> anyhow::Result<()> {
        let names: Vec<String> = images.iter().map(|image| image.name.clone()).collect();
        let archive = self.layout.dir.join(format!("images-{:016x}.tar", fastrand::u64(..)));
        write_archive(&archive, images)?;
        let path = archive.to_string_lossy().into_owned();
        let result = self.ctr(&["images", "import", "--snapshotter", self.snapshotter, &path]);
        fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))?;
        result.context("cannot import the images")?;
        self.wait_for("CRI to list the imported images", || {
            // The label is set by CRI's own handler of containerd's image events.
            let listed = self.ctr(&["images", "list", "labels.\"io.cri-containerd.image\"==managed"])?;
            Ok(names.iter().all(|name| listed.lines().any(|line| line.starts_with(&format!("{name} ")))))
        })
    }

    /// Runs `ctr` in CRI's namespace; returns what it prints.
    pub fn ctr(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = Command::new(&self.ctr)
            .arg("--address")
            .arg(&self.layout.socket)
            .args(["--connect-timeout", "2s", "--namespace", CRI_NAMESPACE])
            .args(args)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", self.ctr.display()))?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ctr {}: {}", args.join(" "), error.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Everything that it leaves on the machine, for a clean-up by another process.
    pub fn remains(&self) -> Remains {
        let mut remains = remains_of(&self.layout, &self.network.bridge, &self.network.name);
        remains.processes.extend(self.process());
        remains.cgroup_roots.clone_from(&self.options.cgroup_roots);
        remains
    }

    /// Stops containerd and its containers and removes everything they created. An error names what could not be removed.
    pub fn stop(mut self) -> anyhow::Result<()> {
        let problems = self.clean_up();
        ensure!(problems.is_empty(), "left behind: {}", problems.join("; "));
        Ok(())
    }

    /// Keeps it running when this value is dropped; a later process removes it by its
    /// [`remains`](Self::remains).
    pub fn leave_running(&mut self) {
        self.kept = true;
    }

    fn clean_up(&mut self) -> Vec<String> {
        self.kept = true;
        let remains = self.remains();
        self.kill();
        remains.remove()
    }

    /// Starts the process and waits until its CRI plugin is loaded.
    fn run(&mut self) -> anyhow::Result<()> {
        let log = open_log(&self.layout.log)?;
        let mut command = Command::new(&self.binary);
        command
            .arg("--config")
            .arg(&self.layout.config)
            .env("PATH", full_path(self.options.bin_dir.as_deref())?)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if self.options.detached {
            detach(&mut command);
        }
        let child = command.spawn().with_context(|| format!("cannot run {}", self.binary.display()))?;
        self.child = Some(child);
        self.wait_for("containerd to load its CRI plugin", || self.cri_is_loaded())
    }

    fn cri_is_loaded(&self) -> anyhow::Result<bool> {
        // Not there yet is no error: the socket appears late.
        let Ok(plugins) = self.ctr(&["plugins", "list", "id==cri"]) else { return Ok(false) };
        let status = plugins.lines().filter(|line| line.starts_with("io.containerd.grpc")).find_map(|line| {
            let status = line.split_ascii_whitespace().last()?;
            Some(status.to_owned())
        });
        match status.as_deref() {
            Some("ok") => Ok(true),
            Some("error") => bail!("containerd's CRI plugin failed to load"),
            _ => Ok(false),
        }
    }

    /// Polls `done`; an error carries the tail of containerd's log.
    fn wait_for(&self, what: &str, mut done: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        let mut pause = Duration::from_millis(5);
        loop {
            let with_log = || format!("waited for {what}; the end of its log:\n{}", self.log_tail());
            if done().with_context(with_log)? {
                return Ok(());
            }
            if !self.process().is_some_and(ProcessId::is_alive) {
                bail!("containerd has ended; {}", with_log());
            }
            if Instant::now() >= deadline {
                bail!("not in {} s; {}", START_LIMIT.as_secs(), with_log());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }
}

impl Drop for PrivateContainerd {
    fn drop(&mut self) {
        if !self.kept {
            let problems = self.clean_up();
            report(&self.layout.dir, &problems);
        }
    }
}

/// `containerd` and `ctr`.
fn binaries(bin_dir: Option<&Path>) -> anyhow::Result<(PathBuf, PathBuf)> {
    let Some(dir) = bin_dir else {
        return Ok((Component::Containerd.find()?, crate::find_file("ctr")?));
    };
    for name in ["containerd", "ctr", "containerd-shim-runc-v2"] {
        ensure!(dir.join(name).is_file(), "{} has no {name}", dir.display());
    }
    Ok((dir.join("containerd"), dir.join("ctr")))
}

/// What a containerd leaves that was started in `dir` with the given [`Options::id`], whether or not it
/// still runs.
pub fn containerd_remains(dir: &Path, id: &str) -> Remains {
    remains_of(&Layout::below(dir), &bridge_name(id), &network_name(id))
}

fn remains_of(layout: &Layout, bridge: &str, network: &str) -> Remains {
    Remains {
        containerd_sockets: vec![layout.socket.clone()],
        containerd_states: vec![layout.state.clone()],
        bridges: vec![bridge.to_owned()],
        cni_networks: vec![network.to_owned()],
        dirs: vec![layout.dir.clone()],
        ..Remains::default()
    }
}

/// Eight hexadecimal digits that identify the folder.
fn id_of(dir: &Path) -> String {
    let mut hasher = DefaultHasher::new();
    dir.hash(&mut hasher);
    format!("{:08x}", hasher.finish() >> 32)
}

/// Opens a log for appending.
pub(crate) fn open_log(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

/// The last `count` lines of a file; empty if the file does not exist.
pub(crate) fn tail(path: &Path, count: usize) -> String {
    let text = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Makes `command` the leader of a session, so that it survives its starter's terminal.
pub fn detach(command: &mut Command) {
    // SAFETY: the closure runs between fork and exec and makes one async-signal-safe system call.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        });
    }
}
