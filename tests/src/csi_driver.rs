//! A CSI driver in a process of its own, for tests: see `src/bin/csi-test-driver/main.rs`.
//!
//! ```no_run
//! # async fn example(folder: &std::path::Path) -> anyhow::Result<()> {
//! use keelson_tests::csi_driver::{CsiDriver, CsiDriverSpec};
//!
//! let binary = "csi-test-driver"; // env!("CARGO_BIN_EXE_csi-test-driver") in a test
//! let spec = CsiDriverSpec::new(binary, "csi.example.com", folder, &folder.join("plugins_registry"));
//! let driver = CsiDriver::start(spec.with(&["--stage"])).await?;
//! driver.set_faults(&serde_json::json!({"NodeStageVolume": {"fail": {"code": 14, "times": 2}}}))?;
//! driver.until_call("NodeStageVolume", "OK").await?;
//! # Ok(())
//! # }
//! ```

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use keelson_testkit::eventually;
use rustix::mount::UnmountFlags;
use serde_json::Value;

use crate::LIMIT;

/// How a driver is started.
#[derive(Debug, Clone)]
pub struct CsiDriverSpec {
    /// The program.
    pub binary: PathBuf,
    /// The driver's name.
    pub name: String,
    /// The folder of its socket, its volumes, its log of calls and its faults.
    pub folder: PathBuf,
    /// The folder of its registration socket.
    pub registration_folder: PathBuf,
    /// Further arguments.
    pub arguments: Vec<String>,
}

impl CsiDriverSpec {
    /// A driver with its files in `folder`.
    pub fn new(binary: impl Into<PathBuf>, name: &str, folder: &Path, registration_folder: &Path) -> Self {
        Self {
            binary: binary.into(),
            name: name.to_owned(),
            folder: folder.to_owned(),
            registration_folder: registration_folder.to_owned(),
            arguments: Vec::new(),
        }
    }

    /// The same with further arguments.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// The driver's socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("csi.sock")
    }

    /// The socket that it registers with.
    pub fn registration_socket(&self) -> PathBuf {
        self.registration_folder.join(format!("{}-reg.sock", self.name))
    }

    fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    fn faults(&self) -> PathBuf {
        self.folder.join("faults.json")
    }
}

/// A running driver. Dropping it ends the process, and removes its mounts and loop devices.
#[derive(Debug)]
pub struct CsiDriver {
    spec: CsiDriverSpec,
    process: Child,
}

impl Drop for CsiDriver {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_file(self.spec.registration_socket());
        clean_up(&self.spec.state());
    }
}

impl CsiDriver {
    /// Starts a driver and waits until it serves.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start(spec: CsiDriverSpec) -> anyhow::Result<Self> {
        tokio::task::spawn_blocking(move || {
            let process = spawn(&spec)?;
            Ok(Self { spec, process })
        })
        .await?
    }

    /// How it was started.
    pub const fn spec(&self) -> &CsiDriverSpec {
        &self.spec
    }

    /// Kills the driver. Its mounts and sockets stay, as after a crash.
    ///
    /// # Errors
    /// The process cannot be killed.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Starts it again, after it was killed or has ended by itself.
    ///
    /// # Errors
    /// It does not start.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        // So that the old process does not stay as a zombie.
        self.kill()?;
        let spec = self.spec.clone();
        self.process = tokio::task::spawn_blocking(move || spawn(&spec)).await??;
        Ok(())
    }

    /// Replaces the faults: a JSON object, method → fault.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_faults(&self, faults: &Value) -> anyhow::Result<()> {
        let new = self.spec.folder.join("faults.json.new");
        fs::write(&new, faults.to_string())?;
        fs::rename(new, self.spec.faults()).context("cannot replace the faults")
    }

    /// The calls so far, each with `method`, `request`, `pod` and `result`.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn calls(&self) -> anyhow::Result<Vec<Value>> {
        let text = fs::read_to_string(self.spec.state().join("calls.jsonl"))?;
        // The last line may be written right now.
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        complete.lines().map(|line| serde_json::from_str(line).context(line.to_owned())).collect()
    }

    /// Waits for a call of `method` with this result: `OK`, the name of a gRPC code, or the name of a fault.
    ///
    /// # Errors
    /// There is none within [`LIMIT`]; the error shows all calls.
    pub async fn until_call(&self, method: &str, result: &str) -> anyhow::Result<Value> {
        let mut last = Vec::new();
        let find = |calls: &[Value]| {
            calls.iter().find(|call| call["method"] == method && call["result"] == result).cloned()
        };
        let waited = eventually(LIMIT, format!("a call of {method} with the result {result}"), async || {
            last = self.calls().unwrap_or_default();
            find(&last).is_some()
        });
        waited.await.with_context(|| format!("{last:#?}"))?;
        find(&last).context("found before")
    }
}

fn spawn(spec: &CsiDriverSpec) -> anyhow::Result<Child> {
    let mut command = Command::new(&spec.binary);
    command.arg("--name").arg(&spec.name);
    command.arg("--endpoint").arg(format!("unix://{}", spec.socket().display()));
    command.arg("--registration-dir").arg(&spec.registration_folder);
    command.arg("--state").arg(spec.state());
    command.arg("--faults").arg(spec.faults());
    command.args(&spec.arguments);
    // It cleans up and ends when this process ends, however that happens.
    command.arg("--end-with-stdin").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.spawn().with_context(|| format!("cannot start {}", spec.binary.display()))?;
    let stdout = process.stdout.take().context("stdout is a pipe")?;
    let mut line = String::new();
    let read = BufReader::new(stdout).read_line(&mut line);
    if read.is_err() || line.trim() != "ready" {
        let _ = process.kill();
        let _ = process.wait();
    }
    ensure!(line.trim() == "ready", "the CSI driver {} has not started: {line:?}", spec.name);
    Ok(process)
}

/// The mount points of this mount namespace, in the order of mounting.
///
/// # Errors
/// They cannot be read.
pub fn mount_points() -> std::io::Result<Vec<PathBuf>> {
    let text = fs::read("/proc/self/mountinfo")?;
    let points = text.split(|byte| *byte == b'\n').filter_map(|line| line.split(|byte| *byte == b' ').nth(4));
    Ok(points.map(|point| OsString::from_vec(unescape(point)).into()).collect())
}

/// Replaces a backslash and three octal digits by their byte (proc_pid_mountinfo(5)).
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let escaped = after
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &after[3..] } else { after };
    }
    bytes
}

/// Removes the mounts and loop devices of a driver whose process has ended.
pub fn clean_up(state: &Path) {
    let recorded = fs::read_to_string(state.join("mounts")).unwrap_or_default();
    for path in recorded.lines().rev() {
        // A path may be mounted several times.
        while mount_points().is_ok_and(|points| points.iter().any(|point| point.as_os_str() == path)) {
            if rustix::mount::unmount(path, UnmountFlags::DETACH).is_err() {
                break;
            }
        }
    }
    for volume in fs::read_dir(state.join("volumes")).into_iter().flatten().flatten() {
        let disk = volume.path().join("disk.img");
        if disk.exists() {
            for device in loop_devices(&disk) {
                let _ = Command::new("losetup").arg("--detach").arg(device).status();
            }
        }
    }
}

/// The loop devices of a file.
pub fn loop_devices(file: &Path) -> Vec<PathBuf> {
    let listed = Command::new("losetup")
        .arg("--associated")
        .arg(file)
        .args(["--output", "NAME", "--noheadings"])
        .output();
    let text = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.split_whitespace().map(PathBuf::from).collect()
}
