//! Kills processes that a killed init left behind.
//!
//! Services end with init through the lifeline, but a stopped one does not, and a hanging one may not. So init records the
//! processes that it has started, and the next init kills those that still run before it starts its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_files::Replacement;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::host;

/// How long the kernel may take to end a killed process.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// A process that init has started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartedProcess {
    /// The name of the service.
    pub name: String,
    /// The process ID.
    pub pid: u32,
    /// The start time in clock ticks since boot, which tells it from a later process with the same pid.
    pub start_ticks: u64,
    /// The program.
    pub exe: PathBuf,
}

impl StartedProcess {
    /// The current process with `pid`; `None` if it has ended.
    pub fn of(name: &str, pid: u32) -> Option<Self> {
        Some(Self { name: name.to_owned(), pid, start_ticks: host::start_ticks(pid)?, exe: host::exe(pid)? })
    }

    /// Whether exactly this process still runs.
    fn is_running(&self) -> bool {
        host::start_ticks(self.pid) == Some(self.start_ticks)
            && host::exe(self.pid).as_ref() == Some(&self.exe)
    }
}

/// The file with the started processes.
pub fn file(run_dir: &Path) -> PathBuf {
    run_dir.join("services.json")
}

/// Replaces the file.
pub fn store(path: &Path, list: &[StartedProcess]) -> io::Result<()> {
    Replacement::new().write(path, &serde_json::to_vec(list)?)
}

/// Kills the processes in the file that still run; returns their names.
pub fn kill_all(path: &Path) -> Vec<String> {
    let list: Vec<StartedProcess> =
        fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let mut ended = Vec::new();
    let mut waiting = Vec::new();
    for process in list {
        let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { continue };
        // The descriptor pins the process, so the signal goes to the process that was checked.
        let Ok(pinned) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if process.is_running() && pidfd_send_signal(&pinned, Signal::KILL).is_ok() {
            ended.push(format!("{} (pid {})", process.name, process.pid));
            waiting.push(pinned);
        }
    }
    for pinned in &waiting {
        let limit = Timespec::try_from(KILL_TIMEOUT).ok();
        let _ = poll(&mut [PollFd::new(pinned, PollFlags::IN)], limit.as_ref());
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    struct Kill(Child);

    impl Drop for Kill {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn sleeper() -> Kill {
        Kill(Command::new("sleep").arg("600").spawn().unwrap())
    }

    #[test]
    fn a_leftover_process_is_killed_even_if_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(dir.path());
        let mut child = sleeper();
        let pid = Pid::from_child(&child.0);
        rustix::process::kill_process(pid, Signal::STOP).unwrap();
        store(&path, &[StartedProcess::of("pod-sync", child.0.id()).unwrap()]).unwrap();
        assert_eq!(kill_all(&path), [format!("pod-sync (pid {})", child.0.id())]);
        assert!(!child.0.wait().unwrap().success());
    }

    #[test]
    fn another_process_with_the_same_pid_is_spared() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(dir.path());
        let mut child = sleeper();
        let real = StartedProcess::of("pod-sync", child.0.id()).unwrap();
        let later = StartedProcess { start_ticks: real.start_ticks + 1, ..real.clone() };
        let other = StartedProcess { exe: "/usr/bin/other".into(), ..real };
        store(&path, &[later, other]).unwrap();
        assert!(kill_all(&path).is_empty());
        assert!(child.0.try_wait().unwrap().is_none());
    }

    #[test]
    fn a_missing_or_broken_process_list_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        assert!(kill_all(&file(dir.path())).is_empty());
        fs::write(file(dir.path()), "[{").unwrap();
        assert!(kill_all(&file(dir.path())).is_empty());
    }
}
