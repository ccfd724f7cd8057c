//! Seeing processes appear, from outside: /proc is read over and over, the same way for agent and floor.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use keelson_testkit::process::ProcessId;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom, open, seek};
use tokio::sync::mpsc;

/// Between two looks at /proc. With a thousand processes a look takes a third of a millisecond.
const POLL: Duration = Duration::from_millis(4);

/// A process executes its last program within this time after it was forked, unless it is runc's, which
/// waits for the call to start the container.
const YOUNG: Duration = Duration::from_millis(500);

/// Room for the names of a thousand processes, which the kernel then hands out in one go.
const LIST_BYTES: usize = 64 * 1024;

/// A process that was looked for.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The argument by which it was known.
    pub marker: String,
    /// The process.
    pub process: ProcessId,
    /// When it was first seen.
    pub at: Instant,
}

/// A thread that looks for processes.
#[derive(Debug)]
pub struct Watch {
    wanted: usize,
    // Its end, when this is dropped, ends the thread.
    seen: mpsc::Receiver<Seen>,
}

impl Watch {
    /// Starts to look for one process per marker. All processes that run now have been read when this returns.
    pub fn start(markers: Vec<String>) -> anyhow::Result<Self> {
        let wanted = markers.len();
        // As many places as messages: sending never waits.
        let (sender, seen) = mpsc::channel(wanted.max(1));
        let mut scanner = Scanner::new(markers)?;
        let early = scanner.scan();
        ensure!(early.is_empty(), "a process with the marker {} is there already", early[0].marker);
        let look = move || {
            while !scanner.wanted.is_empty() && !sender.is_closed() {
                for seen in scanner.scan() {
                    // Nobody listens any more: the next turn ends the thread.
                    let _ = sender.try_send(seen);
                }
                std::thread::sleep(POLL);
            }
        };
        std::thread::Builder::new().name("watch".to_owned()).spawn(look).context("cannot start a thread")?;
        Ok(Self { wanted, seen })
    }

    /// Waits until all are seen or `deadline`; returns those that were seen, in the order of their coming.
    pub async fn until(mut self, deadline: Instant) -> Vec<Seen> {
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

/// What is known of /proc.
#[derive(Debug)]
struct Scanner {
    wanted: HashSet<Vec<u8>>,
    known: HashMap<u32, Known>,
    turn: u64,
    /// /proc, kept open.
    proc: OwnedFd,
    list: Vec<MaybeUninit<u8>>,
}

#[derive(Debug)]
struct Known {
    since: Instant,
    /// Whether it will not execute another program.
    settled: bool,
    /// Whether it ever had arguments.
    had_arguments: bool,
    turn: u64,
}

impl Scanner {
    fn new(wanted: Vec<String>) -> anyhow::Result<Self> {
        let wanted = wanted.into_iter().map(String::into_bytes).collect();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = open("/proc", flags, Mode::empty()).context("cannot open /proc")?;
        let list = vec![MaybeUninit::uninit(); LIST_BYTES];
        Ok(Self { wanted, known: HashMap::new(), turn: 0, proc, list })
    }

    /// The processes that there are.
    fn pids(&mut self) -> Vec<u32> {
        let mut pids = Vec::with_capacity(self.known.len() + 16);
        // A look that fails is made up for by the next one.
        if seek(&self.proc, SeekFrom::Start(0)).is_ok() {
            let mut entries = RawDir::new(&self.proc, &mut self.list);
            while let Some(Ok(entry)) = entries.next() {
                pids.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()));
            }
        }
        pids
    }

    /// Reads the processes that are new or may still execute another program.
    fn scan(&mut self) -> Vec<Seen> {
        self.turn += 1;
        let mut found = Vec::new();
        for pid in self.pids() {
            let now = Instant::now();
            let new = Known { since: now, settled: false, had_arguments: false, turn: 0 };
            let known = self.known.entry(pid).or_insert(new);
            known.turn = self.turn;
            if known.settled {
                continue;
            }
            let cmdline = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            known.had_arguments |= !cmdline.is_empty();
            known.settled = known.is_settled(&cmdline, now);
            let Some(marker) = wanted_argument(&cmdline, &self.wanted) else { continue };
            // A process that has ended since is still looked for: its container may be restarted.
            let Some(process) = ProcessId::of(pid) else { continue };
            self.wanted.remove(&marker);
            found.push(Seen { marker: String::from_utf8_lossy(&marker).into_owned(), process, at: now });
        }
        // A pid may be used again.
        self.known.retain(|_, known| known.turn == self.turn);
        found
    }
}

/// The argument that is one of `wanted`.
fn wanted_argument(cmdline: &[u8], wanted: &HashSet<Vec<u8>>) -> Option<Vec<u8>> {
    cmdline.split(|byte| *byte == 0).find(|argument| wanted.contains(*argument)).map(<[u8]>::to_vec)
}

impl Known {
    /// Whether a process with this command line keeps running its program.
    fn is_settled(&self, cmdline: &[u8], now: Instant) -> bool {
        // In the middle of execve(2) there are no arguments; kernel threads never have any.
        let executing = cmdline.is_empty() && self.had_arguments;
        let program = cmdline.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = program.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        now.duration_since(self.since) >= YOUNG && !executing && name != b"runc"
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Ends with the test, also when that fails.
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
    fn only_a_whole_argument_is_a_marker() {
        let wanted = HashSet::from([b"1234".to_vec()]);
        assert_eq!(wanted_argument(b"/bin/sleep\x001234\0", &wanted), Some(b"1234".to_vec()));
        assert_eq!(wanted_argument(b"/bin/sleep\x0012345\0", &wanted), None);
        assert_eq!(wanted_argument(b"", &wanted), None);
    }

    #[test]
    fn who_may_still_execute_another_program_is_not_settled() {
        let since = Instant::now();
        let (young, old) = (since, since + Duration::from_secs(60));
        let settled = |cmdline: &[u8], had_arguments, now| {
            Known { since, settled: false, had_arguments, turn: 0 }.is_settled(cmdline, now)
        };
        assert!(!settled(b"runc\0init\0", true, old), "it waits for the start of its container");
        assert!(!settled(b"/usr/sbin/runc\0init\0", true, old));
        assert!(!settled(b"", true, old), "it is executing");
        assert!(!settled(b"/bin/sleep\x001\0", true, young));
        assert!(settled(b"/bin/sleep\x001\0", true, old));
        assert!(settled(b"", false, old), "a kernel thread");
    }

    #[tokio::test]
    async fn a_process_is_seen_when_it_executes_what_is_looked_for() {
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
    async fn what_does_not_come_is_not_waited_for_longer_than_allowed() {
        let watch = Watch::start(vec!["no process has this".to_owned()]).unwrap();
        assert!(watch.until(Instant::now() + Duration::from_millis(10)).await.is_empty());
    }
}
