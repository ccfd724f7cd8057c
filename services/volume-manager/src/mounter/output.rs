//! How commands end, and what that means to people.

use std::time::Duration;

use keelson_volume_manager_core::filesystem::Ended;
use keelson_volume_manager_core::world::FailureClass;

use super::runner::RunError;
use crate::plugin_error::PluginError;

/// Shown in place of each secret.
const MASK: &str = "<masked>";
/// The longest output in an error, in bytes.
const MAX_SHOWN: usize = 2000;

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandOutput {
    /// Its exit code; `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    /// What it wrote to stdout.
    pub(crate) stdout: String,
    /// What it wrote to stderr.
    pub(crate) stderr: String,
}

impl CommandOutput {
    /// Whether it exited with 0.
    pub(crate) fn is_success(&self) -> bool {
        self.code == Some(0)
    }

    /// What it wrote, stdout first, without surrounding white space.
    pub(crate) fn text(&self) -> String {
        [self.stdout.trim(), self.stderr.trim()].join("\n").trim().to_owned()
    }

    /// How it ended, in words: `mount exited with 32: no such device`.
    pub(super) fn describe(&self, program: &str, secrets: &[String]) -> String {
        let end = self.code.map_or("was killed by a signal".to_owned(), |code| format!("exited with {code}"));
        match shown(&self.text(), secrets) {
            text if text.is_empty() => format!("{program} {end}"),
            text => format!("{program} {end}: {text}"),
        }
    }
}

/// The output as an error shows it: without the secrets, and not too long.
fn shown(output: &str, secrets: &[String]) -> String {
    let mut text = output.to_owned();
    let parts = secrets.iter().flat_map(|secret| secret.split(','));
    let values = parts.flat_map(|part| [part, part.split_once('=').map_or("", |(_, value)| value)]);
    let mut values: Vec<&str> = values.filter(|value| !value.is_empty()).collect();
    // Longer ones first, so that no part of one is left.
    values.sort_by_key(|value| std::cmp::Reverse(value.len()));
    for value in values {
        text = text.replace(value, MASK);
    }
    if text.len() > MAX_SHOWN {
        let end = (0..=MAX_SHOWN).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

/// The package with a program, as Debian names it.
fn package(program: &str) -> Option<&'static str> {
    Some(match program {
        "mount" | "umount" | "blkid" | "losetup" | "fsck" => "util-linux",
        "mkfs.ext2" | "mkfs.ext3" | "mkfs.ext4" | "resize2fs" => "e2fsprogs",
        "mkfs.xfs" | "xfs_growfs" => "xfsprogs",
        "mkfs.btrfs" | "btrfs" => "btrfs-progs",
        "mount.nfs" => "nfs-common",
        "iscsiadm" => "open-iscsi",
        "multipath" | "multipathd" => "multipath-tools",
        _ => return None,
    })
}

/// What to do if the program is missing.
pub(super) fn missing_advice(program: &str) -> String {
    package(program).map_or_else(String::new, |package| format!("; install it (package {package})"))
}

/// What to do if mount(8) has no helper for the filesystem.
pub(super) fn helper_advice(fs_type: &str, output: &str) -> String {
    let is_missing = output.contains("helper program") || output.contains("unknown filesystem type");
    let helper = match fs_type {
        "nfs" | "nfs4" => "mount.nfs",
        _ => return String::new(),
    };
    if is_missing { missing_advice(helper) } else { String::new() }
}

/// The error of a command without an exit code. `what` is what it should have done.
pub(super) fn run_error(what: &str, program: &str, error: RunError, secrets: &[String]) -> PluginError {
    match error {
        RunError::Missing => {
            let advice = missing_advice(program);
            PluginError::new(format!("cannot {what}: the program {program} is not on this node{advice}"))
                .for_you()
        }
        RunError::Start(error) => PluginError::new(format!("cannot {what}: cannot run {program}: {error}")),
        RunError::Refused(refusal) => {
            let message = format!("cannot {what} yet: {refusal}; it is retried");
            PluginError::new(message).of_class(FailureClass::Transient)
        }
        RunError::Deadline { after, output } => {
            let output = shown(output.trim(), secrets);
            let colon = if output.is_empty() { "" } else { ": " };
            let seconds = seconds(after);
            let message = format!("cannot {what}: {program} has not ended after {seconds}{colon}{output}");
            PluginError::new(message).of_class(FailureClass::Uncertain)
        }
    }
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

/// The end of a command as the rules of filesystems read it. `output` is where its text is put.
pub(super) fn ended<'a>(
    result: &Result<CommandOutput, RunError>,
    output: &'a mut String,
) -> Option<Ended<'a>> {
    match result {
        Ok(done) => match done.code {
            Some(0) => {
                output.clone_from(&done.stdout);
                Some(Ended::Exited { code: 0, output })
            }
            Some(code) => {
                *output = done.text();
                Some(Ended::Exited { code, output })
            }
            // The number of the signal is of no use to anyone: only an operator or the kernel sends one.
            None => Some(Ended::Killed { signal: 9 }),
        },
        Err(RunError::Missing) => Some(Ended::Missing),
        Err(RunError::Start(_) | RunError::Refused(_) | RunError::Deadline { .. }) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_in_the_output_of_a_program_are_masked() {
        let secrets = ["user=joe,password=hunter2".to_owned(), "hunter2more".to_owned()];
        let output = CommandOutput {
            code: Some(1),
            stdout: "bad hunter2more".into(),
            stderr: "password=hunter2".into(),
        };
        assert_eq!(output.describe("mount", &secrets), "mount exited with 1: bad <masked>\n<masked>");
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        for (program, package) in
            [("mkfs.xfs", "xfsprogs"), ("mkfs.ext4", "e2fsprogs"), ("blkid", "util-linux")]
        {
            let error = run_error("do it", program, RunError::Missing, &[]);
            assert!(
                error
                    .message
                    .contains(&format!("{program} is not on this node; install it (package {package})"))
            );
            assert_eq!(error.owner, keelson_volume_manager_core::wait_owner::WaitOwner::You);
        }
        let text = "mount: bad option; you might need a /sbin/mount.<type> helper program.";
        assert_eq!(helper_advice("nfs", text), "; install it (package nfs-common)");
        assert_eq!(helper_advice("ext4", text), "");
    }

    #[test]
    fn only_a_short_part_of_an_endless_output_is_shown() {
        let text = shown(&"ä".repeat(MAX_SHOWN), &[]);
        assert!(text.len() < MAX_SHOWN + 4 && text.ends_with('…'));
    }
}
