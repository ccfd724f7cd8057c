//! Runs a program that answers a request: bytes to its standard input, bytes from its standard output, within a time limit.
//!
//! Used for the plugins that hand out credentials: those of image registries and those of a kubeconfig.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

/// An answer that is longer is none.
const MOST_BYTES: usize = 1 << 20;
/// As much of the end of its standard error is told.
const TOLD_BYTES: usize = 1024;
/// How long pipes are read that something holds open after the end of the program.
const READ_AFTER: Duration = Duration::from_secs(1);

/// A program with everything that it is started with.
pub struct Program {
    /// The executable.
    pub path: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its whole environment; nothing else is inherited.
    pub env: BTreeMap<OsString, OsString>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({:?}, …)", self.path)
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The system does not start it.
    #[error("cannot start {}", path.display())]
    Start {
        /// The executable.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It took too long.
    #[error("it has not answered within {limit:?} and was ended{said}")]
    Silent {
        /// How long it was waited for.
        limit: Duration,
        /// The end of its standard error.
        said: Said,
    },
    /// It reported an error.
    #[error("it has ended with {status}{said}")]
    Failed {
        /// Its exit status.
        status: ExitStatus,
        /// The end of its standard error.
        said: Said,
    },
    /// It wrote too much.
    #[error("its answer is longer than 1 MiB")]
    TooLong,
    /// Its standard output could not be read.
    #[error("cannot read its answer")]
    Read {
        /// Why.
        source: io::Error,
    },
}

/// The end of what a program has written to its standard error.
#[derive(Debug, Default)]
pub struct Said(Vec<u8>);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = String::from_utf8_lossy(&self.0);
        match text.trim() {
            "" => Ok(()),
            text => write!(f, ": {text:?}"),
        }
    }
}

impl Said {
    /// Reads to the end and keeps the last of it.
    async fn take_in(&mut self, mut from: impl AsyncRead + Unpin) {
        let mut buffer = [0; 512];
        // An error is an end like any other: nobody depends on this text.
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            self.0.extend_from_slice(&buffer[..count]);
            self.0.drain(..self.0.len().saturating_sub(TOLD_BYTES));
        }
    }
}

/// The process group of a program that has not been waited for; ended when this is dropped.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may just have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Makes a program that was just started a victim of the out-of-memory killer like any other: it has inherited this
/// service's `oom_score_adj` (proc_pid_oom_score_adj(5)), which init has lowered. Nobody has waited for it, so its number
/// is its own.
fn end_oom_protection(child: &Child) {
    if let Some(id) = child.id() {
        // It may have ended already.
        let _ = fs::write(format!("/proc/{id}/oom_score_adj"), "0");
    }
}

impl Program {
    /// Writes `input` to the program and gives what it writes, once it has ended well. When that is not within `limit`,
    /// or nobody waits for it any more, it is killed with whatever it has started. What it leaves behind when it ends by
    /// itself is left alone and not waited for, even when it holds the program's pipes.
    ///
    /// # Errors
    /// It cannot be started, takes too long, writes too much, or ends otherwise than with 0.
    pub async fn run(&self, input: &[u8], limit: Duration) -> Result<Vec<u8>, RunError> {
        let mut said = Said::default();
        match tokio::time::timeout(limit, self.run_to_end(input, &mut said)).await {
            Ok(Ok((status, answer))) if status.success() => Ok(answer),
            Ok(Ok((status, _))) => Err(RunError::Failed { status, said }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(RunError::Silent { limit, said }),
        }
    }

    async fn run_to_end(&self, input: &[u8], said: &mut Said) -> Result<(ExitStatus, Vec<u8>), RunError> {
        let mut command = Command::new(&self.path);
        command.args(&self.args).env_clear().envs(&self.env).process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = |source| RunError::Start { path: self.path.clone(), source };
        let mut child = command.spawn().map_err(start)?;
        let mut group = Group::of(&child);
        end_oom_protection(&child);
        let lost = || start(io::Error::other("it has no pipes"));
        let (mut stdin, stdout, stderr) = (
            child.stdin.take().ok_or_else(lost)?,
            child.stdout.take().ok_or_else(lost)?,
            child.stderr.take().ok_or_else(lost)?,
        );
        let write = async move {
            // A program may answer without having read.
            let _ = stdin.write_all(input).await;
            Ok(())
        };
        let take_in = async {
            said.take_in(stderr).await;
            Ok(())
        };
        let mut answer = Vec::new();
        let status = {
            let all = async { tokio::try_join!(write, take_answer(stdout, &mut answer), take_in) };
            let mut pipes = pin!(all);
            // Cancel-safe: the pipes are read on below, and a program that has ended is waited for again.
            let closed = tokio::select! {
                read = &mut pipes => read.map(|_| true)?,
                _ = child.wait() => false,
            };
            let status = child.wait().await.map_err(|source| RunError::Read { source })?;
            // It has been waited for: its number may be another's from here on.
            group.0 = None;
            if !closed && let Ok(read) = tokio::time::timeout(READ_AFTER, pipes).await {
                read?;
            }
            status
        };
        Ok((status, answer))
    }
}

async fn take_answer(from: impl AsyncRead + Unpin, answer: &mut Vec<u8>) -> Result<(), RunError> {
    let mut from = from.take(MOST_BYTES as u64 + 1);
    while from.read_buf(answer).await.map_err(|source| RunError::Read { source })? > 0 {}
    if answer.len() > MOST_BYTES { Err(RunError::TooLong) } else { Ok(()) }
}
