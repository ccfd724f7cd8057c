//! A command that runs while the test reads its output.

use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::command;

/// The timeout of a line of output, generous for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The command, killed when the test fails.
pub struct Running {
    child: Child,
    out: Receiver<String>,
    err: Receiver<String>,
    pub stdin: Option<ChildStdin>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines(from: impl Read + Send + 'static, to: Sender<String>) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines() {
            if line.is_err() || to.send(line.unwrap()).is_err() {
                return;
            }
        }
    });
}

impl Running {
    pub fn start(run_dir: &Path, args: &[&str]) -> Self {
        let mut command = command(run_dir, args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let ((to_out, out), (to_err, err)) = (channel(), channel());
        lines(child.stdout.take().unwrap(), to_out);
        lines(child.stderr.take().unwrap(), to_err);
        let stdin = child.stdin.take();
        Self { child, out, err, stdin }
    }

    /// The next line of standard output.
    #[track_caller]
    pub fn line(&self) -> String {
        self.out
            .recv_timeout(LIMIT)
            .unwrap_or_else(|e| panic!("no line was printed: {e}; {:?}", self.notices()))
    }

    /// The words of the next line of standard output, separated by single blanks.
    #[track_caller]
    pub fn words(&self) -> String {
        self.line().split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// The next line of standard error.
    #[track_caller]
    pub fn notice(&self) -> String {
        self.err.recv_timeout(LIMIT).unwrap()
    }

    fn notices(&self) -> Vec<String> {
        self.err.try_iter().collect()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap()
    }

    /// Sends SIGINT. Returns the signal that ended the command, and its unread standard output.
    #[track_caller]
    pub fn interrupt(mut self) -> (Option<i32>, Vec<String>) {
        kill_process(self.pid(), Signal::INT).unwrap();
        let status = self.child.wait().unwrap();
        (status.signal(), self.out.iter().collect())
    }

    /// Waits for the end of the command. Returns the exit code, and the unread lines of both outputs.
    pub fn end(mut self) -> (Option<i32>, Vec<String>, Vec<String>) {
        drop(self.stdin.take());
        let status = self.child.wait().unwrap();
        (status.code(), self.out.iter().collect(), self.err.iter().collect())
    }
}
