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

/// Maximum length of a response in bytes, unless the caller sets another one.
const MOST_BYTES: usize = 1 << 20;
/// Bytes of the end of standard error that errors quote.
const TOLD_BYTES: usize = 1024;
/// How long pipes are read after the program has exited while another process holds them open.
const READ_AFTER: Duration = Duration::from_secs(1);

/// A program with its arguments and environment.
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

/// Why a program gave no response.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be started.
    #[error("cannot start {}", path.display())]
    Start {
        /// The executable.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It did not finish within the time limit.
    #[error("it has not answered within {limit:?} and was ended{said}")]
    Silent {
        /// The time limit.
        limit: Duration,
        /// The end of its standard error.
        said: Said,
    },
    /// It exited with an error.
    #[error("it has ended with {status}{said}")]
    Failed {
        /// Its exit status.
        status: ExitStatus,
        /// The end of its standard error.
        said: Said,
    },
    /// Its response is too long.
    #[error("its answer is longer than {} MiB", .0 >> 20)]
    TooLong(
        /// The maximum in bytes.
        usize,
    ),
    /// Its standard output could not be read.
    #[error("cannot read its answer")]
    Read {
        /// Why.
        source: io::Error,
    },
}

/// The last part of a program's standard error.
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
    /// Reads to the end and keeps the last part.
    async fn take_in(&mut self, mut from: impl AsyncRead + Unpin) {
        let mut buffer = [0; 512];
        // A read error counts as the end of the text: no decision depends on it.
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            self.0.extend_from_slice(&buffer[..count]);
            self.0.drain(..self.0.len().saturating_sub(TOLD_BYTES));
        }
    }
}

/// The process group of a program that was not waited for yet; dropping this kills it.
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

/// Resets the `oom_score_adj` of a program that was just started: it has inherited this service's value
/// (proc_pid_oom_score_adj(5)), which init has lowered. The program was not waited for yet, so its pid cannot have been
/// reused.
pub fn end_oom_protection(child: &Child) {
    if let Some(id) = child.id() {
        // It may have ended already.
        let _ = fs::write(format!("/proc/{id}/oom_score_adj"), "0");
    }
}

impl Program {
    /// Writes `input` to the program and returns its standard output once it has exited with 0. After `limit`, or when the
    /// future is dropped, the program is killed with its process group. Processes that it leaves behind when it exits by
    /// itself are not killed or waited for, even if they hold the program's pipes.
    ///
    /// # Errors
    /// The program cannot be started, takes too long, writes too much, or does not exit with 0.
    pub async fn run(&self, input: &[u8], limit: Duration) -> Result<Vec<u8>, RunError> {
        self.run_up_to(MOST_BYTES, input, limit).await
    }

    /// The same with another maximum of the length of the response in bytes, instead of 1 MiB.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub async fn run_up_to(
        &self,
        most_bytes: usize,
        input: &[u8],
        limit: Duration,
    ) -> Result<Vec<u8>, RunError> {
        let mut said = Said::default();
        match tokio::time::timeout(limit, self.run_to_end(most_bytes, input, &mut said)).await {
            Ok(Ok((status, answer))) if status.success() => Ok(answer),
            Ok(Ok((status, _))) => Err(RunError::Failed { status, said }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(RunError::Silent { limit, said }),
        }
    }

    async fn run_to_end(
        &self,
        most_bytes: usize,
        input: &[u8],
        said: &mut Said,
    ) -> Result<(ExitStatus, Vec<u8>), RunError> {
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
            // A program may respond without reading its input.
            let _ = stdin.write_all(input).await;
            Ok(())
        };
        let take_in = async {
            said.take_in(stderr).await;
            Ok(())
        };
        let mut answer = Vec::new();
        let status = {
            let all =
                async { tokio::try_join!(write, take_answer(stdout, most_bytes, &mut answer), take_in) };
            let mut pipes = pin!(all);
            // Cancel-safe: the pipes are read on below, and a program that has ended is waited for again.
            let closed = tokio::select! {
                read = &mut pipes => read.map(|_| true)?,
                _ = child.wait() => false,
            };
            let status = child.wait().await.map_err(|source| RunError::Read { source })?;
            // It has been waited for, so its pid may be reused from here on.
            group.0 = None;
            if !closed && let Ok(read) = tokio::time::timeout(READ_AFTER, pipes).await {
                read?;
            }
            status
        };
        Ok((status, answer))
    }
}

async fn take_answer(
    from: impl AsyncRead + Unpin,
    most_bytes: usize,
    answer: &mut Vec<u8>,
) -> Result<(), RunError> {
    let mut from = from.take(most_bytes as u64 + 1);
    while from.read_buf(answer).await.map_err(|source| RunError::Read { source })? > 0 {}
    if answer.len() > most_bytes { Err(RunError::TooLong(most_bytes)) } else { Ok(()) }
}
