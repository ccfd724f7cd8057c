//! Runs programs of the node with a deadline. A process that does not end holds up nothing: at the deadline it is killed
//! and left alone, and a task collects it whenever it ends.

use std::ffi::OsString;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};

use super::captured::{Captured, TRIM_PERIOD};
use super::gates::{Gates, Pass, Refusal};
use super::output::CommandOutput;

/// What happens to a process that nobody waits for any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Abandonment {
    /// It is killed, with the processes that it has started.
    Kill,
    /// It ends by itself, because a kill could damage a filesystem.
    LeaveRunning,
}

/// A program to run.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) program: String,
    pub(super) arguments: Vec<OsString>,
    /// What it works on, such as a path. It is never shown.
    pub(super) key: String,
    /// What it does, without secrets.
    pub(super) what: String,
    /// The longest time that it may take, and that it may wait for its start.
    pub(super) deadline: Duration,
    pub(super) abandonment: Abandonment,
}

/// A helper to start.
#[derive(Debug, Clone, Copy)]
pub(super) struct HelperStart<'a> {
    pub(super) program: &'a OsString,
    pub(super) argument: &'a str,
    /// What it works on. It is never shown.
    pub(super) key: &'a str,
    /// What it does, without secrets.
    pub(super) what: &'a str,
    /// How long it may wait for its start.
    pub(super) patience: Duration,
}

/// Why there is no exit code of a program.
#[derive(Debug)]
pub(super) enum RunError {
    /// The program is not installed.
    Missing,
    /// It could not be started.
    Start(io::Error),
    /// It may not start.
    Refused(Refusal),
    /// It has not ended within its deadline.
    Deadline {
        /// The deadline.
        after: Duration,
        /// What it has written until then.
        output: String,
    },
}

/// Runs programs. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Runner {
    gates: Gates,
    /// `PATH` of the programs, if it is not that of this service.
    search_path: Option<OsString>,
}

impl Runner {
    /// The same runner for programs of other folders.
    #[cfg(test)]
    pub(super) fn with_search_path(self, search_path: OsString) -> Self {
        Self { search_path: Some(search_path), ..self }
    }

    /// Runs a program and waits for its end.
    pub(super) async fn run(&self, run: &Run) -> Result<CommandOutput, RunError> {
        let pass = self.gates.enter(&run.key, run.deadline).await.map_err(RunError::Refused)?;
        let stdout = Captured::new().map_err(RunError::Start)?;
        let stderr = Captured::new().map_err(RunError::Start)?;
        let mut command = self.command(&run.program).map_err(RunError::Start)?;
        command.args(&run.arguments).stdin(Stdio::null());
        command.stdout(stdout.for_program().map_err(RunError::Start)?);
        command.stderr(stderr.for_program().map_err(RunError::Start)?);
        let mut process = Process::start(command, pass, &run.what, run.abandonment)?;
        let outputs = [&stdout, &stderr];
        match timeout(run.deadline, until_end(&mut process, outputs)).await {
            Ok(Ok(status)) => {
                outputs.iter().for_each(|output| output.close());
                Ok(CommandOutput { code: status.code(), stdout: stdout.text(), stderr: stderr.text() })
            }
            Ok(Err(error)) => Err(RunError::Start(error)),
            Err(_) => {
                let output = format!("{}{}", stdout.text(), stderr.text());
                Err(RunError::Deadline { after: run.deadline, output })
            }
        }
    }

    /// Starts a helper with pipes to its stdin and stdout.
    pub(super) async fn start_with_pipes(&self, start: HelperStart<'_>) -> Result<Process, RunError> {
        let pass = self.gates.enter(start.key, start.patience).await.map_err(RunError::Refused)?;
        let mut command = self.command(start.program).map_err(RunError::Start)?;
        command.arg(start.argument).stdin(Stdio::piped()).stdout(Stdio::piped());
        Process::start(command, pass, start.what, Abandonment::Kill)
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> io::Result<Command> {
        let mut command = Command::new(program);
        // Error messages are read by people in the events of their pods.
        command.env("LC_ALL", "C").current_dir("/").process_group(0);
        if let Some(path) = &self.search_path {
            command.env("PATH", path);
        }
        Ok(command)
    }
}

/// Waits for the end of a process, and meanwhile drops what it writes too much.
async fn until_end(process: &mut Process, outputs: [&Captured; 2]) -> io::Result<std::process::ExitStatus> {
    loop {
        match timeout(TRIM_PERIOD, process.wait()).await {
            Ok(ended) => return ended,
            Err(_) => outputs.iter().for_each(|output| output.trim()),
        }
    }
}

/// A process. If it is dropped before the process has ended, the process is abandoned.
#[derive(Debug)]
pub(super) struct Process {
    child: Option<Child>,
    pid: i32,
    pass: Option<Pass>,
    what: String,
    started: Instant,
    abandonment: Abandonment,
}

impl Process {
    fn start(
        mut command: Command,
        pass: Pass,
        what: &str,
        abandonment: Abandonment,
    ) -> Result<Self, RunError> {
        let child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => RunError::Missing,
            _ => RunError::Start(error),
        })?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok()).unwrap_or_default();
        let what = what.to_owned();
        Ok(Self { child: Some(child), pid, pass: Some(pass), what, started: Instant::now(), abandonment })
    }

    /// The process itself, until it has ended.
    pub(super) fn child(&mut self) -> Option<&mut Child> {
        self.child.as_mut()
    }

    /// Waits for the end. Cancel-safe.
    pub(super) async fn wait(&mut self) -> io::Result<std::process::ExitStatus> {
        let child = self.child.as_mut().ok_or_else(|| io::Error::other("the process has ended before"))?;
        let status = child.wait().await?;
        self.child = None;
        self.pass = None;
        Ok(status)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let (Some(mut child), Some(mut pass)) = (self.child.take(), self.pass.take()) else { return };
        // The number still belongs to the process, because nobody has waited for it yet.
        if self.abandonment == Abandonment::Kill
            && let Some(group) = Pid::from_raw(self.pid)
        {
            let _ = kill_process_group(group, Signal::KILL);
        }
        pass.abandon(std::mem::take(&mut self.what), Some(self.pid), self.started);
        if tokio::runtime::Handle::try_current().is_ok() {
            keelson_service_kit::spawn("end of an abandoned process", async move {
                let _ = child.wait().await;
                drop(pass);
            });
        }
    }
}
