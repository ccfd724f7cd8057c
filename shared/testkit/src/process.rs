//! Processes as /proc shows them (proc(5)), and signals that cannot hit a reused pid.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use rustix::process::Signal;
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process, distinguished by its start time from a later one with the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessId {
    /// The pid.
    pub pid: u32,
    /// Start time in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: u64,
}

/// A process as described by /proc/PID/stat and cmdline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Which process.
    pub id: ProcessId,
    /// The pid of its parent.
    pub parent: u32,
    /// `comm`: at most 15 bytes of the program's name.
    pub name: String,
    /// The arguments, the program's name first; empty for kernel threads.
    pub args: Vec<String>,
}

impl ProcessId {
    /// The process that has `pid` now; `None` if there is none or it is a zombie.
    pub fn of(pid: u32) -> Option<Self> {
        read(pid).map(|process| process.id)
    }

    /// Whether it is still there and no zombie.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Sends `signal`; `false` when the process is gone.
    pub fn signal(self, signal: Signal) -> bool {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return false };
        // The descriptor pins the process, so the check after it holds for the signal too.
        let Ok(pinned) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
        self.is_alive() && pidfd_send_signal(pinned, signal).is_ok()
    }

    /// Waits until it is gone or a zombie; `false` when it is still there after `limit`.
    pub fn wait_gone(self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.is_alive() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Process {
    /// The program that it runs; `None` for kernel threads.
    pub fn exe(&self) -> Option<PathBuf> {
        fs::read_link(format!("/proc/{}/exe", self.id.pid)).ok()
    }

    /// The file name of its program, also when the file was replaced since.
    pub fn exe_name(&self) -> Option<String> {
        let exe = self.exe()?;
        let name = exe.file_name()?.to_str()?;
        Some(name.strip_suffix(" (deleted)").unwrap_or(name).to_owned())
    }

    /// Whether an argument names `path` or something below it, alone or behind `=` or `unix://`.
    pub fn mentions(&self, path: &Path) -> bool {
        let Some(wanted) = path.to_str() else { return false };
        self.args.iter().skip(1).any(|arg| {
            arg.match_indices(wanted).any(|(at, _)| {
                let before = arg[..at].chars().next_back();
                let after = arg[at + wanted.len()..].chars().next();
                matches!(before, None | Some('=' | ':' | '/' | ','))
                    && matches!(after, None | Some('/' | ','))
            })
        })
    }
}

/// The process with `pid`; `None` if there is none or it is a zombie.
pub fn read(pid: u32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, parent, start_time) = parse_stat(&stat)?;
    let args = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let args = args
        .split(|byte| *byte == 0)
        .filter(|arg| !arg.is_empty())
        .map(|arg| String::from_utf8_lossy(arg).into_owned())
        .collect();
    Some(Process { id: ProcessId { pid, start_time }, parent, name, args })
}

/// All processes except zombies.
pub fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter_map(read).collect()
}

/// The processes of `all` that have one of `roots` as an ancestor.
pub fn descendants(all: &[Process], roots: &[u32]) -> Vec<ProcessId> {
    let mut family: Vec<u32> = roots.to_vec();
    let mut found = Vec::new();
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        next += 1;
        for child in all.iter().filter(|p| p.parent == parent && !family.contains(&p.id.pid)) {
            found.push(child.id);
        }
        family.extend(found.iter().skip(family.len() - roots.len()).map(|id| id.pid));
    }
    found
}

/// Name, parent and start time of a line of /proc/PID/stat; `None` for a zombie or a dead process.
fn parse_stat(stat: &str) -> Option<(String, u32, u64)> {
    // The name is in brackets and may hold brackets and blanks itself.
    let (open, close) = (stat.find('(')?, stat.rfind(')')?);
    let name = stat.get(open + 1..close)?.to_owned();
    let fields: Vec<&str> = stat.get(close + 1..)?.split_ascii_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    Some((name, fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32, args: &[&str]) -> Process {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Process { id: ProcessId { pid, start_time: 1 }, parent, name: String::new(), args }
    }

    #[test]
    fn a_name_with_brackets_and_blanks_is_read() {
        let stat = "7 (a ) (b) S 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        assert_eq!(parse_stat(stat), Some(("a ) (b".to_owned(), 3, 4242)));
        assert_eq!(parse_stat(&stat.replace(" S ", " Z ")), None);
    }

    #[test]
    fn descendants_are_found_over_generations() {
        let all = [
            process(1, 0, &[]),
            process(5, 4, &[]),
            process(4, 2, &[]),
            process(2, 1, &[]),
            process(3, 1, &[]),
            process(6, 3, &[]),
            process(7, 5, &[]),
        ];
        let mut pids: Vec<u32> = descendants(&all, &[2, 3]).iter().map(|id| id.pid).collect();
        pids.sort_unstable();
        assert_eq!(pids, [4, 5, 6, 7]);
    }

    #[test]
    fn a_path_is_mentioned_whole_or_not_at_all() {
        let found = |arg: &str| process(1, 0, &["x", arg]).mentions(Path::new("/tmp/k-1"));
        assert!(found("/tmp/k-1"));
        assert!(found("/tmp/k-1/run/config.json"));
        assert!(found("--config=/tmp/k-1/c.yaml"));
        assert!(found("unix:///tmp/k-1/c.sock"));
        assert!(!found("/tmp/k-12/run"));
        assert!(!found("/other/tmp/k-1x"));
    }

    #[test]
    fn this_process_is_alive_and_a_wrong_start_time_is_not() {
        let me = ProcessId::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!ProcessId { start_time: me.start_time + 1, ..me }.is_alive());
        assert!(!ProcessId { start_time: me.start_time + 1, ..me }.signal(Signal::KILL));
    }
}
