//! Detects new processes by reading /proc repeatedly, in the same way for agent and floor.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use keelson_testkit::process::ProcessId;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom, open, seek};
use tokio::sync::mpsc;

/// The interval between two scans of /proc. With a thousand processes, a scan takes a third of a millisecond.
const POLL: Duration = Duration::from_millis(4);

/// The time after which a process is assumed to execute no other program. Processes of runc are excepted: they wait for the call
/// that starts the container.
const SETTLED_AFTER: Duration = Duration::from_millis(500);

/// The buffer for directory entries. It has room for a thousand processes, so that one system call reads them all.
const LIST_BYTES: usize = 64 * 1024;

/// A process with one of the markers.
#[derive(Debug, Clone)]
pub struct SeenProcess {
    /// The argument that identifies the process.
    pub marker: String,
    /// The process.
    pub process: ProcessId,
    /// The time at which it was first seen.
    pub at: Instant,
}

/// A thread that searches for processes.
#[derive(Debug)]
pub struct Watch {
    wanted: usize,
    // Dropping the receiver ends the thread.
    seen: mpsc::Receiver<SeenProcess>,
}

impl Watch {
    /// Starts the search for one process per marker. Returns after the first scan of all running processes.
    ///
    /// # Errors
    /// A process with one of the markers is already running.
    pub fn start(markers: Vec<String>) -> anyhow::Result<Self> {
        let wanted = markers.len();
        // There is one message per marker, so sending never waits.
        let (sender, seen) = mpsc::channel(wanted.max(1));
        let mut scanner = Scanner::new(markers)?;
        let early = scanner.scan();
        ensure!(early.is_empty(), "a process with the marker {} is already running", early[0].marker);
        let search = move || {
            while !scanner.wanted.is_empty() && !sender.is_closed() {
                for seen in scanner.scan() {
                    // If the receiver is closed, the loop ends at its next condition.
                    let _ = sender.try_send(seen);
                }
                std::thread::sleep(POLL);
            }
        };
        std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(search)
            .context("cannot start a thread")?;
        Ok(Self { wanted, seen })
    }

    /// Waits until all processes were seen, or until `deadline`. Returns the seen processes in the order in which they appeared.
    pub async fn until(mut self, deadline: Instant) -> Vec<SeenProcess> {
        let mut all = Vec::new();
        while all.len() < self.wanted {
            match tokio::time::timeout_at(deadline.into(), self.seen.recv()).await {
                Ok(Some(seen)) => all.push(seen),
                Ok(None) | Err(_) => break,
            }
        }
        all
    }
}

/// Scans /proc and skips the processes that it knows and that will not execute another program.
#[derive(Debug)]
struct Scanner {
    wanted: HashSet<Vec<u8>>,
    known: HashMap<u32, KnownProcess>,
    scan_number: u64,
    /// /proc, kept open.
    proc: OwnedFd,
    list: Vec<MaybeUninit<u8>>,
}

#[derive(Debug)]
struct KnownProcess {
    /// The time at which it was first seen.
    since: Instant,
    /// Whether it is assumed to execute no other program.
    settled: bool,
    /// Whether it ever had arguments.
    had_arguments: bool,
    /// The number of the last scan that found it.
    scan_number: u64,
}

impl Scanner {
    fn new(wanted: Vec<String>) -> anyhow::Result<Self> {
        let wanted = wanted.into_iter().map(String::into_bytes).collect();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = open("/proc", flags, Mode::empty()).context("cannot open /proc")?;
        let list = vec![MaybeUninit::uninit(); LIST_BYTES];
        Ok(Self { wanted, known: HashMap::new(), scan_number: 0, proc, list })
    }

    /// The pids of all processes.
    fn pids(&mut self) -> Vec<u32> {
        let mut pids = Vec::with_capacity(self.known.len() + 16);
        // After an error, the next scan finds the processes that are missing now.
        if seek(&self.proc, SeekFrom::Start(0)).is_ok() {
            let mut entries = RawDir::new(&self.proc, &mut self.list);
            while let Some(Ok(entry)) = entries.next() {
                pids.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()));
            }
        }
        pids
    }

    /// Reads the processes that are new or may still execute another program. Returns those with a marker.
    fn scan(&mut self) -> Vec<SeenProcess> {
        self.scan_number += 1;
        let mut found = Vec::new();
        for pid in self.pids() {
            let now = Instant::now();
            let new = KnownProcess { since: now, settled: false, had_arguments: false, scan_number: 0 };
            let known = self.known.entry(pid).or_insert(new);
            known.scan_number = self.scan_number;
            if known.settled {
                continue;
            }
            let cmdline = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            known.had_arguments |= !cmdline.is_empty();
            known.settled = known.is_settled(&cmdline, now);
            let Some(marker) = wanted_argument(&cmdline, &self.wanted) else { continue };
            // If the process has ended meanwhile, its marker stays wanted: the container may be restarted.
            let Some(process) = ProcessId::of(pid) else { continue };
            self.wanted.remove(&marker);
            found.push(SeenProcess {
                marker: String::from_utf8_lossy(&marker).into_owned(),
                process,
                at: now,
            });
        }
        // Forget ended processes, because the kernel reuses pids.
        self.known.retain(|_, known| known.scan_number == self.scan_number);
        found
    }
}

/// The first argument that is in `wanted`.
fn wanted_argument(cmdline: &[u8], wanted: &HashSet<Vec<u8>>) -> Option<Vec<u8>> {
    cmdline.split(|byte| *byte == 0).find(|argument| wanted.contains(*argument)).map(<[u8]>::to_vec)
}

impl KnownProcess {
    /// Whether a process with this command line is assumed to execute no other program.
    fn is_settled(&self, cmdline: &[u8], now: Instant) -> bool {
        // During execve(2) the command line is empty. That of a kernel thread is always empty.
        let executing = cmdline.is_empty() && self.had_arguments;
        let program = cmdline.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = program.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        now.duration_since(self.since) >= SETTLED_AFTER && !executing && name != b"runc"
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that is killed at the end of the test, also if the test fails.
    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn run(script: &str) -> Running {
        Running(Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap())
    }

    #[test]
    fn a_marker_must_match_a_whole_argument() {
        let wanted = HashSet::from([b"1234".to_vec()]);
        assert_eq!(wanted_argument(b"/bin/sleep\x001234\0", &wanted), Some(b"1234".to_vec()));
        assert_eq!(wanted_argument(b"/bin/sleep\x0012345\0", &wanted), None);
        assert_eq!(wanted_argument(b"", &wanted), None);
    }

    #[test]
    fn new_processes_and_those_of_runc_are_not_settled() {
        let since = Instant::now();
        let (young, old) = (since, since + Duration::from_secs(60));
        let settled = |cmdline: &[u8], had_arguments, now| {
            KnownProcess { since, settled: false, had_arguments, scan_number: 0 }.is_settled(cmdline, now)
        };
        assert!(!settled(b"runc\0init\0", true, old), "it waits for the start of its container");
        assert!(!settled(b"/usr/sbin/runc\0init\0", true, old));
        assert!(!settled(b"", true, old), "it is executing");
        assert!(!settled(b"/bin/sleep\x001\0", true, young));
        assert!(settled(b"/bin/sleep\x001\0", true, old));
        assert!(settled(b"", false, old), "a kernel thread");
    }

    #[tokio::test]
    async fn a_process_is_seen_once_it_executes_a_program_with_the_marker() {
        let marker = (3_000_000_000_u64 + fastrand::u64(..1_000_000_000)).to_string();
        let watch = Watch::start(vec![marker.clone()]).unwrap();
        // The shell has the marker only inside an argument; it waits for a line before it executes sleep.
        let mut running = run(&format!("read line; exec sleep {marker}"));
        let before = Instant::now();
        drop(running.0.stdin.take());
        let seen = watch.until(Instant::now() + Duration::from_secs(30)).await;
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].process.pid, running.0.id());
        assert!(seen[0].at >= before);
    }

    #[tokio::test]
    async fn waiting_for_a_missing_process_ends_at_the_deadline() {
        let watch = Watch::start(vec!["no process has this".to_owned()]).unwrap();
        assert!(watch.until(Instant::now() + Duration::from_millis(10)).await.is_empty());
    }
}
