//! Mounts and bind mounts.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use keelson_volume_manager_core::mount_options::{self, MountOptions};
use keelson_volume_manager_core::world::FailureClass;

use super::helper::{Answer, Request};
use super::output::{CommandOutput, helper_advice, run_error};
use super::runner::{Abandonment, Run};
use super::state::Mounter;
use crate::plugin_error::PluginError;

/// Filesystems whose mount starts no daemon: those of the kernel, and nfs. An empty one is a bind mount.
const WITHOUT_DAEMON: [&str; 9] = ["", "tmpfs", "nfs", "nfs4", "ext2", "ext3", "ext4", "xfs", "btrfs"];
/// The deadline of the question whether systemd starts scopes.
const SCOPE_DEADLINE: Duration = Duration::from_secs(10);
/// Exit codes of mount(8) after which something may be mounted: mtab problems, and a partial success.
const PARTIAL_CODES: [i32; 2] = [16, 64];

/// What is mounted where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MountRequest<'a> {
    /// The device, the export of a server, or for a bind mount the path.
    pub(crate) source: &'a str,
    /// The mount point, which exists.
    pub(crate) target: &'a Path,
    /// The filesystem; empty: the kernel finds out, or none for a bind mount.
    pub(crate) fs_type: &'a str,
    /// The options, sorted.
    pub(crate) options: &'a [String],
    /// Options that are never shown.
    pub(crate) sensitive: &'a [String],
}

impl MountRequest<'_> {
    /// The options as one set.
    pub(super) fn all_options(&self) -> Result<MountOptions, PluginError> {
        let options = MountOptions::default().with(self.options);
        options
            .and_then(|options| options.with_sensitive(self.sensitive))
            .map_err(|error| PluginError::new(error.to_string()).for_you())
    }

    pub(super) fn describe(&self) -> String {
        format!("mount {} on {}", self.source, self.target.display())
    }
}

/// A mount(8) that did not mount.
#[derive(Debug)]
pub(super) struct MountFailure {
    /// What mount(8) said, without secrets.
    pub(super) cause: String,
    /// Whether something may be mounted.
    pub(super) class: FailureClass,
}

impl Mounter {
    /// Mounts with mount(8), so that helpers such as mount.nfs are found. The plugins have variants of it.
    ///
    /// # Errors
    /// What mount(8) said. The class is `Uncertain` if it has not ended in time, or was killed.
    #[cfg(test)]
    pub(crate) async fn mount(&self, request: MountRequest<'_>) -> Result<(), PluginError> {
        let options = request.all_options()?;
        self.try_mount(&request, request.fs_type, &options).await?.map_err(|failure| {
            let fs_type = match request.fs_type {
                "" => String::new(),
                fs_type => format!(" as {fs_type}"),
            };
            let options =
                if options.is_empty() { String::new() } else { format!(" with the options {options}") };
            let message = format!("cannot {}{fs_type}{options}: {}", request.describe(), failure.cause);
            PluginError::new(message).of_class(failure.class)
        })
    }

    /// Mounts as nfs volumes do it, and returns how mount(8) ended.
    ///
    /// # Errors
    /// mount(8) did not end by itself.
    pub(crate) async fn mount_for_output(
        &self,
        request: MountRequest<'_>,
    ) -> Result<CommandOutput, PluginError> {
        let options = request.all_options()?;
        let run = self.mount_command(&request, request.fs_type, &options).await;
        self.run_mount(&request, &run).await
    }

    /// Runs mount(8). The outer error says that it did not end by itself.
    pub(super) async fn try_mount(
        &self,
        request: &MountRequest<'_>,
        fs_type: &str,
        options: &MountOptions,
    ) -> Result<Result<(), MountFailure>, PluginError> {
        let run = self.mount_command(request, fs_type, options).await;
        let output = self.run_mount(request, &run).await?;
        if output.is_success() {
            return Ok(Ok(()));
        }
        let is_certain = output.code.is_some_and(|code| !PARTIAL_CODES.contains(&code));
        let advice = helper_advice(fs_type, &output.text());
        let cause = format!("{}{advice}", output.describe("mount", request.sensitive));
        let class = if is_certain { FailureClass::Final } else { FailureClass::Uncertain };
        Ok(Err(MountFailure { cause, class }))
    }

    async fn run_mount(&self, request: &MountRequest<'_>, run: &Run) -> Result<CommandOutput, PluginError> {
        let result = self.runner.run(run).await;
        result.map_err(|error| run_error(&run.what, "mount", error, request.sensitive))
    }

    async fn mount_command(&self, request: &MountRequest<'_>, fs_type: &str, options: &MountOptions) -> Run {
        let mut arguments: Vec<OsString> = Vec::new();
        let mut program = "mount";
        if !WITHOUT_DAEMON.contains(&fs_type) && self.has_scopes().await {
            // A description, because systemd would log the command with its secrets.
            let description = format!("--description=Mount of a volume on {}", request.target.display());
            arguments.extend(
                [description, "--scope".to_owned(), "--".to_owned(), program.to_owned()].map(Into::into),
            );
            program = "systemd-run";
        }
        if !fs_type.is_empty() {
            arguments.extend(["-t", fs_type].map(Into::into));
        }
        if !options.is_empty() {
            arguments.extend(["-o".into(), options.argument().into()]);
        }
        arguments.extend(["--".into(), request.source.into(), request.target.into()]);
        Run {
            program: program.to_owned(),
            arguments,
            key: format!("mount {}", request.target.display()),
            what: request.describe(),
            deadline: self.deadline,
            abandonment: Abandonment::Kill,
        }
    }

    /// Whether systemd starts scopes, in which daemons of mounts outlive this service. Found out once (volumes.md §7).
    async fn has_scopes(&self) -> bool {
        let found_out = self.has_scopes.get_or_init(|| async {
            let arguments = ["--description=Test whether mounts can run in scopes", "--scope", "--", "true"];
            let result = self.run("systemd-run", &arguments, SCOPE_DEADLINE).await;
            let has_scopes = result.is_ok_and(|output| output.is_success());
            tracing::info!(has_scopes, "found out whether daemons of mounts get a scope of systemd");
            has_scopes
        });
        *found_out.await
    }

    /// Bind-mounts `source` on `target`, then applies the options (volumes.md §7). If that fails, nothing is left mounted,
    /// or the class is `Uncertain`. A mount that is there already was left by a service that was killed between the two
    /// steps: it gets its options.
    pub(crate) async fn bind(
        &self,
        source: &Path,
        target: &Path,
        options: &[String],
    ) -> Result<(), PluginError> {
        let flags = match self.ask(&Request::Flags { path: source.to_owned() }, |_| ()).await? {
            Answer::Flags(flags) => flags,
            other => return Err(PluginError::new(format!("the helper gave a wrong answer: {other:?}"))),
        };
        let text = source.to_str().ok_or_else(|| {
            PluginError::new(format!("the path {} is not UTF-8", source.display())).for_you()
        })?;
        let request = MountRequest { source: text, target, fs_type: "", options, sensitive: &[] };
        let steps = mount_options::bind_steps(&request.all_options()?, flags);
        let failed = |failure: MountFailure| {
            PluginError::new(format!("cannot bind-{}: {}", request.describe(), failure.cause))
                .of_class(failure.class)
        };
        if !self.is_mount_point_now(target).await? {
            self.try_mount(&request, "", &steps.bind).await?.map_err(failed)?;
        }
        let remounted = match self.try_mount(&request, "", &steps.remount).await {
            Ok(result) => result.map_err(failed),
            Err(error) => Err(error),
        };
        let Err(error) = remounted else { return Ok(()) };
        // Without its options the mount would allow too much.
        let class = match self.unmount(target, false).await {
            Ok(()) => FailureClass::Final,
            Err(_) => FailureClass::Uncertain,
        };
        Err(error.of_class(class))
    }
}
