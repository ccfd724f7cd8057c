//! The filesystems of devices: formats, checks, mounts and grows them.
//!
//! mkfs, fsck and the programs that grow a filesystem are never killed, because that could damage the filesystem: neither
//! at their deadline, nor if nobody waits for them any more, nor with this service. Until such a program has ended,
//! nothing else is started for its device. A program that is left from an earlier start of this service holds the device
//! exclusively, so a blank device is formatted only if nothing holds it.

use std::ffi::OsString;
use std::path::Path;

use keelson_volume_manager_core::filesystem::{
    self, Checked, Command, Content, FilesystemError, Plan, Preparation,
};
use keelson_volume_manager_core::world::FailureClass;

use super::helper::{Answer, Request};
use super::mount::MountRequest;
use super::output::{CommandOutput, ended, missing_advice, run_error};
use super::runner::{Abandonment, Run, RunError};
use super::state::Mounter;
use crate::plugin_error::PluginError;

impl Mounter {
    /// Formats the device if it is blank, checks its filesystem, and mounts it (volumes.md §7). An empty `fs_type` is ext4.
    ///
    /// # Errors
    /// Those of [`FilesystemError`], or a program is missing or has not ended.
    pub(crate) async fn format_and_mount(
        &self,
        request: MountRequest<'_>,
        mkfs_options: &[String],
    ) -> Result<(), PluginError> {
        let options = request.all_options()?;
        let device = request.source;
        let content = self.probe(device).await?;
        let format_options: Vec<&str> = mkfs_options.iter().map(String::as_str).collect();
        let wanted = filesystem::Request {
            device,
            fs_type: request.fs_type,
            options: &options,
            format_options: &format_options,
        };
        let plan = filesystem::plan(&wanted, &content).map_err(|error| filesystem_error(&error))?;
        self.prepare(device, &plan).await?;
        let mounted = self.try_mount(&request, &plan.fs_type, &plan.options).await?;
        mounted.map_err(|failure| {
            let error = filesystem::mount_error(device, &plan, failure.cause);
            filesystem_error(&error).of_class(failure.class)
        })
    }

    /// Grows the filesystem on `device` that is mounted on `mount_point` to the size of the device.
    ///
    /// # Errors
    /// Those of [`FilesystemError`], or a program is missing or has not ended.
    pub(crate) async fn grow(&self, device: &Path, mount_point: &Path) -> Result<(), PluginError> {
        let (device, mount_point) = (text(device)?, text(mount_point)?);
        let content = self.probe(device).await?;
        let command =
            filesystem::grow(device, mount_point, &content).map_err(|error| filesystem_error(&error))?;
        let Some(command) = command else { return Ok(()) };
        let result = self.run_on_device(device, &command, Abandonment::LeaveRunning).await;
        judge(device, &command, result, |ended| filesystem::grow_result(device, &command, ended))
    }

    /// Whether something holds a block device, such as a mount. A missing device is not busy.
    pub(crate) async fn is_busy(&self, device: &Path) -> Result<bool, PluginError> {
        match self.ask(&Request::IsBusy { path: device.to_owned() }, |_| ()).await? {
            Answer::Busy(is_busy) => Ok(is_busy),
            other => Err(PluginError::new(format!("the helper gave a wrong answer: {other:?}"))),
        }
    }

    async fn probe(&self, device: &str) -> Result<Content, PluginError> {
        let command = filesystem::probe(device);
        let result = self.run_on_device(device, &command, Abandonment::Kill).await;
        judge(device, &command, result, |ended| filesystem::content(device, ended))
    }

    async fn prepare(&self, device: &str, plan: &Plan) -> Result<(), PluginError> {
        match &plan.preparation {
            Preparation::None => Ok(()),
            Preparation::Format(command) => {
                if self.is_busy(Path::new(device)).await? {
                    let message = format!(
                        "the device {device} has no filesystem but is in use, perhaps by mkfs, so it is not formatted; it is retried"
                    );
                    return Err(PluginError::new(message).of_class(FailureClass::Transient));
                }
                tracing::info!(device, fs_type = plan.fs_type, "formatting a blank device");
                let result = self.run_on_device(device, command, Abandonment::LeaveRunning).await;
                judge(device, command, result, |ended| {
                    filesystem::format_result(device, &plan.fs_type, ended)
                })
            }
            Preparation::Check(command) => {
                let result = self.run_on_device(device, command, Abandonment::LeaveRunning).await;
                let checked =
                    judge(device, command, result, |ended| filesystem::check_result(device, ended))?;
                match checked {
                    Checked::Clean | Checked::NotInstalled => {}
                    Checked::Corrected => {
                        tracing::warn!(device, "fsck has corrected the filesystem of a device")
                    }
                    Checked::Incomplete(why) => tracing::warn!(device, why, "fsck did not check a device"),
                }
                Ok(())
            }
        }
    }

    async fn run_on_device(
        &self,
        device: &str,
        command: &Command,
        abandonment: Abandonment,
    ) -> Result<CommandOutput, RunError> {
        let deadline = match abandonment {
            Abandonment::Kill => self.deadline,
            Abandonment::LeaveRunning => self.device_deadline,
        };
        let run = Run {
            program: command.program.clone(),
            arguments: command.arguments.iter().map(OsString::from).collect(),
            key: format!("device {device}"),
            what: format!("run {} for the device {device}", command.program),
            deadline,
            abandonment,
        };
        self.runner.run(&run).await
    }
}

/// What the end of a command means.
fn judge<T>(
    device: &str,
    command: &Command,
    result: Result<CommandOutput, RunError>,
    rule: impl FnOnce(filesystem::Ended<'_>) -> Result<T, FilesystemError>,
) -> Result<T, PluginError> {
    let program = &command.program;
    let mut output = String::new();
    match ended(&result, &mut output) {
        Some(ended) => rule(ended).map_err(|error| {
            let mut error = filesystem_error(&error);
            if ended == filesystem::Ended::Missing {
                error = error.for_you();
                error.message.push_str(&missing_advice(program));
            }
            error
        }),
        None => {
            let what = format!("prepare the device {device}");
            let error = result.err().unwrap_or(RunError::Missing);
            Err(run_error(&what, program, error, &[]))
        }
    }
}

fn text(path: &Path) -> Result<&str, PluginError> {
    path.to_str()
        .ok_or_else(|| PluginError::new(format!("the path {} is not UTF-8", path.display())).for_you())
}

fn filesystem_error(error: &FilesystemError) -> PluginError {
    let message = PluginError::new(error.to_string());
    match error {
        FilesystemError::InvalidType { .. }
        | FilesystemError::BlankReadOnly { .. }
        | FilesystemError::Damaged { .. } => message.for_you(),
        FilesystemError::Mismatch { .. } => message.for_you().of_filesystem_mismatch(),
        FilesystemError::CannotGrow { .. } => message.for_you().of_class(FailureClass::Final),
        // The program has ended, so nothing is left in progress.
        FilesystemError::Grow { .. } => message.of_class(FailureClass::Final),
        FilesystemError::Probe { .. } | FilesystemError::Format { .. } | FilesystemError::Mount { .. } => {
            message
        }
    }
}
