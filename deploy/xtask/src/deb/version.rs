//! The version and the time of a package.

use std::process::Command;

use anyhow::{Context as _, ensure};

use super::stdout_of;
use crate::{cargo_stdout, workspace};

/// The facts from cargo and git on which version, time and licence of a package are based.
pub(super) struct Facts {
    /// The version of the workspace.
    workspace: String,
    /// The licence of the workspace, an SPDX identifier.
    pub(super) license: String,
    /// `None` outside a git checkout.
    commit: Option<Commit>,
}

/// The facts about HEAD that a version contains.
#[derive(Debug)]
struct Commit {
    /// The newest tag `v…` among its ancestors and itself, without the `v`.
    tag: Option<String>,
    /// The number of commits since that tag, or of all commits without a tag.
    count: u64,
    /// The abbreviated hash.
    hash: String,
    /// The commit time, in seconds since 1970.
    time: u64,
    /// Whether tracked files differ from the commit.
    changed: bool,
}

impl Facts {
    /// Reads the facts from cargo and git.
    pub(super) fn read() -> anyhow::Result<Self> {
        let metadata = cargo_stdout(&["metadata", "--format-version", "1", "--no-deps", "--locked"])?;
        let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
        let packages = metadata["packages"].as_array().context("`cargo metadata` prints no packages")?;
        let command = packages.iter().find(|package| package["name"] == "keelson-cli");
        let command = command.context("`cargo metadata` prints no package keelson-cli")?;
        let text = |field: &str| {
            command[field].as_str().map(str::to_owned).with_context(|| format!("keelson-cli has no {field}"))
        };
        Ok(Self { workspace: text("version")?, license: text("license")?, commit: Commit::read()? })
    }

    /// Returns the version of the workspace. Unless HEAD is that version's tag, a suffix with the number of commits makes later
    /// commits sort higher.
    ///
    /// `0.1.0~git12.abc` comes before `0.1.0`, which comes before `0.1.0+git3.abc` (deb-version(7)).
    pub(super) fn version(&self) -> String {
        let (workspace, Some(commit)) = (&self.workspace, &self.commit) else {
            return self.workspace.clone();
        };
        let is_released = commit.tag.as_ref() == Some(workspace);
        let changed = if commit.changed { ".changed" } else { "" };
        match (is_released, commit.count) {
            (true, 0) if !commit.changed => workspace.clone(),
            (true, count) => format!("{workspace}+git{count}.{}{changed}", commit.hash),
            (false, count) => format!("{workspace}~git{count}.{}{changed}", commit.hash),
        }
    }

    /// Returns `SOURCE_DATE_EPOCH` if it is set, else the commit time; in seconds since 1970.
    pub(super) fn epoch(&self) -> anyhow::Result<u64> {
        if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
            return epoch.parse().context("SOURCE_DATE_EPOCH must be a number of seconds since 1970");
        }
        let commit = self.commit.as_ref();
        commit
            .map(|commit| commit.time)
            .context("this is not a git checkout, so the time of the files is unknown; set SOURCE_DATE_EPOCH")
    }
}

impl Commit {
    /// Reads the facts about HEAD; `None` outside a git checkout.
    fn read() -> anyhow::Result<Option<Self>> {
        if !workspace().join(".git").exists() {
            return Ok(None);
        }
        let tag = git(&["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]).ok();
        let range = tag.as_ref().map_or_else(|| "HEAD".to_owned(), |tag| format!("{tag}..HEAD"));
        let number =
            |text: String| text.parse().with_context(|| format!("git printed {text:?} instead of a number"));
        Ok(Some(Self {
            tag: tag.map(|tag| tag.trim_start_matches('v').to_owned()),
            count: number(git(&["rev-list", "--count", &range])?)?,
            hash: git(&["rev-parse", "--short=12", "HEAD"])?,
            time: number(git(&["log", "-1", "--format=%ct"])?)?,
            changed: !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty(),
        }))
    }
}

fn git(arguments: &[&str]) -> anyhow::Result<String> {
    stdout_of(Command::new("git").arg("-C").arg(workspace()).args(arguments))
}

/// Checks that `version` is valid for dpkg (deb-version(7)) and can be part of a file name.
///
/// # Errors
/// It is not.
pub(super) fn validate(version: &str) -> anyhow::Result<()> {
    let starts_with_digit = version.starts_with(|first: char| first.is_ascii_digit());
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".+~-".contains(c);
    ensure!(
        starts_with_digit && version.chars().all(is_allowed),
        "{version:?} is not a valid version: it must begin with a digit and may contain only letters, digits, and . + ~ -"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(tag: Option<&str>, count: u64, changed: bool) -> String {
        let tag = tag.map(str::to_owned);
        let commit = Some(Commit { tag, count, hash: "abc".into(), time: 7, changed });
        Facts { workspace: "0.2.0".into(), license: "Apache-2.0".into(), commit }.version()
    }

    #[test]
    fn later_commits_have_higher_versions() {
        let rising = [
            version(None, 9, false),
            version(None, 10, false),
            version(None, 10, true),
            version(Some("0.2.0"), 0, false),
            version(Some("0.2.0"), 2, false),
            version(Some("0.2.0"), 10, false),
        ];
        assert_eq!(rising[0], "0.2.0~git9.abc");
        assert_eq!(rising[3], "0.2.0");
        assert_eq!(rising[5], "0.2.0+git10.abc");
        for pair in rising.windows(2) {
            let [low, high] = pair else { panic!("two") };
            validate(high).unwrap();
            let compared =
                Command::new("dpkg").args(["--compare-versions", low, "lt", high]).status().unwrap();
            assert!(compared.success(), "{low} is not lower than {high}");
        }
        // The tag of an earlier release does not make this version a released one.
        assert_eq!(version(Some("0.1.0"), 3, false), "0.2.0~git3.abc");
    }

    #[test]
    fn a_version_with_other_characters_is_an_error() {
        for wrong in ["", "v1", "1/2", "1:2", "1 2"] {
            validate(wrong).unwrap_err();
        }
    }
}
