//! The [`Mounter`], and the commands that it runs.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

use super::client::{Client, HelperError};
use super::helper::{Answer, Line, Request};
use super::output::{CommandOutput, run_error};
use super::runner::{Abandonment, Run, RunError, Runner};
use crate::plugin_error::PluginError;

/// The deadline of a mount, an unmount, or another access to a foreign filesystem.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
/// The time before an unmount is forced (volumes.md §7).
const FORCE_AFTER: Duration = Duration::from_secs(60);
/// The deadline of mkfs, fsck and the growth of a filesystem, which take long on a large device.
const DEVICE_DEADLINE: Duration = Duration::from_secs(1800);

/// Access to mounts. Cheap to clone: clones share what they know about processes that hang.
#[derive(Debug, Clone)]
pub(crate) struct Mounter {
    pub(super) runner: Runner,
    pub(super) client: Client,
    /// The deadline of a mount or an unmount.
    pub(super) deadline: Duration,
    /// The time before an unmount is forced.
    pub(super) force_after: Duration,
    /// The deadline of work on a whole device.
    pub(super) device_deadline: Duration,
    /// Whether systemd starts scopes.
    pub(super) has_scopes: Arc<OnceCell<bool>>,
}

impl Default for Mounter {
    fn default() -> Self {
        let runner = Runner::default();
        Self {
            client: Client::new(runner.clone(), DEADLINE),
            runner,
            deadline: DEADLINE,
            force_after: FORCE_AFTER,
            device_deadline: DEVICE_DEADLINE,
            has_scopes: Arc::default(),
        }
    }
}

impl Mounter {
    /// A mounter whose helper process is the program `helper`.
    pub(crate) fn with_helper(helper: OsString) -> Self {
        let mounter = Self::default();
        Self { client: mounter.client.clone().with_program(helper), ..mounter }
    }

    /// The same mounter with another deadline of mounts and unmounts.
    #[cfg(test)]
    pub(crate) fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// The same mounter with the programs of other folders, in the form of `PATH`.
    #[cfg(test)]
    pub(crate) fn with_search_path(self, search_path: OsString) -> Self {
        Self { runner: self.runner.with_search_path(search_path), ..self }
    }

    /// Runs a command of the host with a deadline and returns its output. Its arguments are never shown. The same command is
    /// not started again while an earlier one hangs.
    ///
    /// # Errors
    /// The program is missing, or has not ended within the deadline.
    pub(crate) async fn run(
        &self,
        program: &str,
        arguments: &[&str],
        deadline: Duration,
    ) -> Result<CommandOutput, PluginError> {
        let run = Run {
            program: program.to_owned(),
            arguments: arguments.iter().map(OsString::from).collect(),
            key: format!("{program} {}", arguments.join(" ")),
            what: format!("run {program}"),
            deadline,
            abandonment: Abandonment::Kill,
        };
        self.runner.run(&run).await.map_err(|error| run_error(&run.what, program, error, &[]))
    }

    /// Lets a helper process carry out a request.
    pub(super) async fn ask(
        &self,
        request: &Request,
        on_progress: impl FnMut(Line) + Send,
    ) -> Result<Answer, PluginError> {
        let what = request.describe();
        self.client.ask(request, on_progress).await.map_err(|error| match error {
            HelperError::Failed(failure) => PluginError::new(format!("cannot {what}: {}", failure.message)),
            HelperError::Run(RunError::Missing) => {
                PluginError::new(format!("cannot {what}: the helper program does not exist"))
            }
            HelperError::Run(error) => run_error(&what, "the helper process", error, &[]),
        })
    }
}
