//! Starts the helper process and reads its answers.

use std::ffi::OsString;
use std::io;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::ChildStdout;
use tokio::time::timeout;

use super::helper::{ARGUMENT, Answer, Failure, Line, Request};
use super::runner::{HelperStart, Process, RunError, Runner};

/// This program, even if the file was replaced since the start.
const THIS_PROGRAM: &str = "/proc/self/exe";

fn no_pipe() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

/// Why the helper did not do its work.
#[derive(Debug)]
pub(super) enum HelperError {
    /// It did not run, or not to its end.
    Run(RunError),
    /// A system call failed.
    Failed(Failure),
}

impl From<io::Error> for HelperError {
    fn from(error: io::Error) -> Self {
        Self::Run(RunError::Start(error))
    }
}

/// Starts helpers. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Client {
    runner: Runner,
    program: OsString,
    /// The longest time without an answer or progress.
    pub(super) patience: Duration,
}

impl Client {
    pub(super) fn new(runner: Runner, patience: Duration) -> Self {
        Self { runner, program: THIS_PROGRAM.into(), patience }
    }

    /// The same client with another patience.
    pub(super) fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The same client with another program as the helper.
    pub(super) fn with_program(self, program: OsString) -> Self {
        Self { program, ..self }
    }

    /// Lets a helper carry out a request. Dropping the future ends the helper. `on_progress` gets the lines before the
    /// last one.
    pub(super) async fn ask(
        &self,
        request: &Request,
        mut on_progress: impl FnMut(Line) + Send,
    ) -> Result<Answer, HelperError> {
        let mut text = serde_json::to_vec(request).map_err(io::Error::from)?;
        text.push(b'\n');
        let (key, what) = (format!("helper {}", request.path().display()), request.describe());
        let (program, patience) = (&self.program, self.patience);
        let start = HelperStart { program, argument: ARGUMENT, key: &key, what: &what, patience };
        let mut process = self.runner.start_with_pipes(start).await.map_err(HelperError::Run)?;
        // The helper ends when stdin is closed, so it stays open until the last line.
        let mut stdin = process.child().and_then(|child| child.stdin.take()).ok_or_else(no_pipe)?;
        let stdout = process.child().and_then(|child| child.stdout.take()).ok_or_else(no_pipe)?;
        let mut lines = BufReader::new(stdout).lines();
        let written = self.within(async {
            match stdin.write_all(&text).await {
                // It has ended already; its exit status is read below.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                written => written,
            }
        });
        written.await?;
        loop {
            match self.within(lines.next_line()).await? {
                None => return Err(self.ended_early(process).await),
                Some(line) => match serde_json::from_str(&line).map_err(io::Error::from)? {
                    Line::Done(answer) => {
                        self.finish(process, lines.into_inner()).await;
                        return Ok(answer);
                    }
                    Line::Failed(failure) => {
                        self.finish(process, lines.into_inner()).await;
                        return Err(HelperError::Failed(failure));
                    }
                    progress @ (Line::Files(_) | Line::Warning(_)) => on_progress(progress),
                },
            }
        }
    }

    async fn within<T>(&self, work: impl Future<Output = io::Result<T>>) -> Result<T, HelperError> {
        match timeout(self.patience, work).await {
            Ok(result) => Ok(result?),
            Err(_) => {
                let output = String::new();
                Err(HelperError::Run(RunError::Deadline { after: self.patience, output }))
            }
        }
    }

    /// The helper has nothing to do any more and exits. One that does not is abandoned.
    async fn finish(&self, mut process: Process, _stdout: BufReader<ChildStdout>) {
        let _ = timeout(self.patience, process.wait()).await;
    }

    async fn ended_early(&self, mut process: Process) -> HelperError {
        let how = match timeout(self.patience, process.wait()).await {
            Ok(Ok(status)) => status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it closed its output".to_owned(),
        };
        io::Error::other(format!("the helper process gave no answer: {how}")).into()
    }
}
