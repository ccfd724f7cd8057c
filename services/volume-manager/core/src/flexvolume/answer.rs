//! Answers of flexVolume drivers (volumes.md §10.8).

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::flexvolume::call::Command;

/// How much of an output that cannot be read is shown, in characters.
const SHOWN: usize = 200;

/// Why a call of a driver failed.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The driver says so.
    #[error("{command} command failed, status: {status}, reason: {message}", command = command.name())]
    Failed {
        /// The command.
        command: Command,
        /// Its status.
        status: String,
        /// Its message.
        message: String,
    },
    /// The output is not a JSON object with a status.
    #[error("{command} command failed: the driver's output {output:?} is not an answer", command = command.name())]
    Unparsable {
        /// The command.
        command: Command,
        /// The beginning of the output.
        output: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The answer and the exit code contradict each other.
    #[error(
        "{command} command failed: the driver ended with {exit} although its answer is Success; \
         this is an error of the driver",
        command = command.name(),
        exit = exit_text(*exit)
    )]
    Contradiction {
        /// The command.
        command: Command,
        /// The exit code; `None` after a signal.
        exit: Option<i32>,
    },
    /// A driver has to support `init`.
    #[error("init command failed: the driver does not support it; this is an error of the driver")]
    InitNotSupported,
}

fn exit_text(exit: Option<i32>) -> String {
    exit.map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"))
}

/// What a driver can do, as `init` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Its volumes are attached to nodes and mounted as devices.
    pub attach: bool,
    /// Its volumes can be relabelled for SELinux.
    pub selinux_relabel: bool,
    /// Its volumes are measured with statfs.
    pub supports_metrics: bool,
    /// The agent applies fsGroup to its volumes.
    pub fs_group: bool,
    /// Its filesystems have to be grown.
    pub requires_fs_resize: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            attach: true,
            selinux_relabel: true,
            supports_metrics: false,
            fs_group: true,
            requires_fs_resize: true,
        }
    }
}

/// The answer of a call that succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The device; empty if none.
    pub device: String,
    /// The volume's name; empty if none.
    pub volume_name: String,
    /// The volume is attached.
    pub attached: bool,
    /// What the driver can do.
    pub capabilities: Capabilities,
}

/// What a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded.
    Success(Answer),
    /// The driver does not support the command; [`Support::record`] remembers it.
    NotSupported,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Output {
    status: String,
    message: Option<String>,
    device: Option<String>,
    volume_name: Option<String>,
    attached: Option<bool>,
    #[serde(alias = "Capabilities")]
    capabilities: Option<OutputCapabilities>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct OutputCapabilities {
    attach: Option<bool>,
    selinux_relabel: Option<bool>,
    supports_metrics: Option<bool>,
    fs_group: Option<bool>,
    #[serde(rename = "requiresFSResize")]
    requires_fs_resize: Option<bool>,
}

impl OutputCapabilities {
    fn or_default(&self) -> Capabilities {
        let default = Capabilities::default();
        Capabilities {
            attach: self.attach.unwrap_or(default.attach),
            selinux_relabel: self.selinux_relabel.unwrap_or(default.selinux_relabel),
            supports_metrics: self.supports_metrics.unwrap_or(default.supports_metrics),
            fs_group: self.fs_group.unwrap_or(default.fs_group),
            requires_fs_resize: self.requires_fs_resize.unwrap_or(default.requires_fs_resize),
        }
    }
}

/// What a call came to that wrote `stdout` and ended with `exit`; `None` after a signal.
pub fn read(command: Command, stdout: &[u8], exit: Option<i32>) -> Result<Outcome, AnswerError> {
    let output: Output = serde_json::from_slice(stdout).map_err(|source| AnswerError::Unparsable {
        command,
        output: String::from_utf8_lossy(stdout).chars().take(SHOWN).collect(),
        source,
    })?;
    match output.status.as_str() {
        "Not supported" if command == Command::Init => Err(AnswerError::InitNotSupported),
        "Not supported" => Ok(Outcome::NotSupported),
        "Success" if exit == Some(0) => Ok(Outcome::Success(Answer {
            device: output.device.unwrap_or_default(),
            volume_name: output.volume_name.unwrap_or_default(),
            attached: output.attached.unwrap_or_default(),
            capabilities: output.capabilities.unwrap_or_default().or_default(),
        })),
        "Success" => Err(AnswerError::Contradiction { command, exit }),
        _ => Err(AnswerError::Failed {
            command,
            status: output.status,
            message: output.message.unwrap_or_default(),
        }),
    }
}

/// What the agent does instead of a command that a driver does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultAction {
    /// Use the volume's inner name.
    UseVolumeName,
    /// Nothing; the command counts as done.
    Nothing,
    /// Take the answer of the API for it.
    TrustApi,
    /// Use the device path that is known.
    UseDevicePath,
    /// Format if blank, and mount the device.
    FormatAndMount,
    /// Unmount the device and remove the folder.
    UnmountDevice,
    /// Bind-mount the device mount to the pod.
    BindMount,
    /// Unmount, and remove the folder.
    CleanUp,
    /// Grow the filesystem with its own tool.
    GrowFilesystem,
}

/// What replaces `command`. `None` for `init`, which has no replacement.
pub const fn default_action(command: Command) -> Option<DefaultAction> {
    Some(match command {
        Command::Init => return None,
        Command::GetVolumeName => DefaultAction::UseVolumeName,
        Command::Attach | Command::Detach | Command::ExpandVolume => DefaultAction::Nothing,
        Command::IsAttached => DefaultAction::TrustApi,
        Command::WaitForAttach => DefaultAction::UseDevicePath,
        Command::MountDevice => DefaultAction::FormatAndMount,
        Command::UnmountDevice => DefaultAction::UnmountDevice,
        Command::Mount => DefaultAction::BindMount,
        Command::Unmount => DefaultAction::CleanUp,
        Command::ExpandFs => DefaultAction::GrowFilesystem,
    })
}

/// What happens for a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Call the driver.
    Call,
    /// Do this without a call.
    Default(DefaultAction),
}

/// The commands that a driver has said it does not support. A new `init` begins with an empty one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Support {
    unsupported: BTreeSet<Command>,
}

impl Support {
    /// What happens for `command`.
    pub fn way(&self, command: Command) -> Way {
        match default_action(command).filter(|_| self.unsupported.contains(&command)) {
            Some(action) => Way::Default(action),
            None => Way::Call,
        }
    }

    /// Remembers the outcome of a call.
    pub fn record(&mut self, command: Command, outcome: &Outcome) {
        match outcome {
            Outcome::NotSupported => {
                self.unsupported.insert(command);
            }
            Outcome::Success(_) => {}
        }
    }
}

/// The group that the agent applies to the files of a volume, if any.
pub fn fs_group(capabilities: Capabilities, wanted: Option<i64>, read_only: bool) -> Option<i64> {
    wanted.filter(|_| capabilities.fs_group && !read_only)
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    fn success(text: &str) -> Answer {
        match read(Command::Attach, text.as_bytes(), Some(0)).unwrap() {
            Outcome::Success(answer) => answer,
            Outcome::NotSupported => panic!("not supported: {text}"),
        }
    }

    #[test]
    fn a_success_has_the_fields_of_the_answer() {
        let text = concat!(
            r#"{"status": "Success", "message": "m", "device": "/dev/x", "volumeName": "v","#,
            r#" "attached": true, "new": 1}"#
        );
        let expected = Answer {
            device: "/dev/x".into(),
            volume_name: "v".into(),
            attached: true,
            capabilities: Capabilities::default(),
        };
        assert_eq!(success(text), expected);
        let nulls = r#"{"status": "Success", "message": null, "device": null, "attached": null}"#;
        assert_eq!((success(nulls).device.as_str(), success(nulls).attached), ("", false));
    }

    #[test]
    fn every_capability_but_metrics_is_assumed_and_can_be_denied() {
        let of = |capabilities: &str| {
            let text = format!(r#"{{"status": "Success", "capabilities": {capabilities}}}"#);
            success(&text).capabilities
        };
        let default = Capabilities {
            attach: true,
            selinux_relabel: true,
            supports_metrics: false,
            fs_group: true,
            requires_fs_resize: true,
        };
        for text in ["{}", "null", r#"{"attach": null, "fsGroup": null}"#] {
            assert_eq!(of(text), default, "{text}");
        }
        for (text, expected) in [
            (r#"{"attach": false}"#, Capabilities { attach: false, ..default }),
            (r#"{"selinuxRelabel": false}"#, Capabilities { selinux_relabel: false, ..default }),
            (r#"{"supportsMetrics": true}"#, Capabilities { supports_metrics: true, ..default }),
            (r#"{"fsGroup": false}"#, Capabilities { fs_group: false, ..default }),
            (r#"{"requiresFSResize": false}"#, Capabilities { requires_fs_resize: false, ..default }),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
        let upper = r#"{"status": "Success", "Capabilities": {"attach": false}}"#;
        assert!(!success(upper).capabilities.attach);
    }

    #[test]
    fn not_supported_is_an_outcome_with_every_exit_code_but_an_error_of_init() {
        let text = br#"{"status": "Not supported"}"#;
        for exit in [Some(0), Some(1), None] {
            for command in Command::ALL {
                let result = read(command, text, exit);
                if command == Command::Init {
                    assert!(matches!(result, Err(AnswerError::InitNotSupported)), "{result:?}");
                } else {
                    assert!(matches!(result, Ok(Outcome::NotSupported)), "{result:?}");
                }
            }
        }
    }

    #[test]
    fn every_other_status_is_an_error_with_the_drivers_message() {
        for status in ["Failure", "success", "not supported", "NotSupported", ""] {
            let text = format!(r#"{{"status": "{status}", "message": "no disk"}}"#);
            for exit in [Some(0), Some(1), None] {
                let error = read(Command::Mount, text.as_bytes(), exit).unwrap_err().to_string();
                assert_eq!(error, format!("mount command failed, status: {status}, reason: no disk"));
            }
        }
    }

    #[test]
    fn a_success_with_another_exit_code_is_an_error_of_the_driver() {
        for (exit, expected) in [(Some(1), "exit code 1"), (None, "a signal")] {
            let error = read(Command::Unmount, br#"{"status": "Success"}"#, exit).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("error of the driver"), "{error}");
        }
    }

    #[test]
    fn output_that_is_no_answer_is_an_error_that_shows_its_beginning() {
        let long = "x".repeat(1000);
        for output in ["", "oops", "{}", "[]", r#"{"status": 1}"#, r#"{"status": "Success"} x"#, &long] {
            let error = read(Command::Init, output.as_bytes(), Some(0)).unwrap_err();
            let text = error.to_string();
            let shown: String = output.chars().take(200).collect();
            assert!(text.contains(&format!("{shown:?}")) && text.len() < 600, "{text}");
            assert!(error.source().is_some());
        }
        assert!(read(Command::Init, b"\xff\xfe", Some(0)).is_err());
        let bad = br#"{"status": "Success", "capabilities": {"attach": "yes"}}"#;
        assert!(matches!(read(Command::Init, bad, Some(0)), Err(AnswerError::Unparsable { .. })));
    }

    #[test]
    fn an_unsupported_command_is_replaced_from_then_on() {
        for command in Command::ALL {
            let mut support = Support::default();
            assert_eq!(support.way(command), Way::Call);
            support.record(command, &Outcome::Success(success(r#"{"status": "Success"}"#)));
            assert_eq!(support.way(command), Way::Call);
            support.record(command, &Outcome::NotSupported);
            let expected = default_action(command).map_or(Way::Call, Way::Default);
            assert_eq!(support.way(command), expected);
            let others = Command::ALL.into_iter().filter(|other| *other != command);
            assert!(others.into_iter().all(|other| support.way(other) == Way::Call), "{command:?}");
        }
    }

    #[test]
    fn every_command_but_init_has_the_default_of_the_specification() {
        for (command, expected) in [
            (Command::Init, None),
            (Command::GetVolumeName, Some(DefaultAction::UseVolumeName)),
            (Command::MountDevice, Some(DefaultAction::FormatAndMount)),
            (Command::Mount, Some(DefaultAction::BindMount)),
            (Command::Unmount, Some(DefaultAction::CleanUp)),
            (Command::UnmountDevice, Some(DefaultAction::UnmountDevice)),
            (Command::WaitForAttach, Some(DefaultAction::UseDevicePath)),
            (Command::ExpandFs, Some(DefaultAction::GrowFilesystem)),
            (Command::Attach, Some(DefaultAction::Nothing)),
            (Command::Detach, Some(DefaultAction::Nothing)),
            (Command::ExpandVolume, Some(DefaultAction::Nothing)),
            (Command::IsAttached, Some(DefaultAction::TrustApi)),
        ] {
            assert_eq!(default_action(command), expected, "{command:?}");
        }
    }

    #[test]
    fn fs_group_needs_the_capability_and_a_writable_volume() {
        let yes = Capabilities::default();
        let no = Capabilities { fs_group: false, ..yes };
        assert_eq!(fs_group(yes, Some(5), false), Some(5));
        assert_eq!(fs_group(yes, Some(5), true), None);
        assert_eq!(fs_group(no, Some(5), false), None);
        assert_eq!(fs_group(yes, None, false), None);
    }
}
