//! The version and the time of a package.

use std::process::Command;

use anyhow::{Context as _, ensure};

use super::said;
use crate::{ask_cargo, workspace};

/// What cargo and git tell.
pub(super) struct Facts {
    /// The version of the workspace.
    workspace: String,
    /// The licence of the workspace, an SPDX name.
    pub(super) license: String,
    /// None where this is no checkout.
    commit: Option<Commit>,
}

/// A commit as far as a version tells it.
#[derive(Debug)]
struct Commit {
    /// The newest tag `v…` that it has, without the `v`.
    tag: Option<String>,
    /// How many commits it has after that, or at all where there is no tag.
    count: u64,
    /// Its short name.
    name: String,
    /// When it was made, in seconds since 1970.
    time: u64,
    /// Whether files differ from it.
    changed: bool,
}

impl Facts {
    pub(super) fn ask() -> anyhow::Result<Self> {
        let metadata = ask_cargo(&["metadata", "--format-version", "1", "--no-deps", "--locked"])?;
        let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
        let packages = metadata["packages"].as_array().context("cargo names no packages")?;
        let command = packages.iter().find(|package| package["name"] == "keelson-cli");
        let command = command.context("there is no keelson-cli")?;
        let text = |field: &str| {
            command[field].as_str().map(str::to_owned).with_context(|| format!("keelson-cli has no {field}"))
        };
        Ok(Self { workspace: text("version")?, license: text("license")?, commit: Commit::ask()? })
    }

    /// The version of the workspace; with a commit that is no tag of it also which one, so that later ones are higher.
    ///
    /// `0.1.0~git12.abc` comes before `0.1.0`, which comes before `0.1.0+git3.abc` (deb-version(7)).
    pub(super) fn version(&self) -> String {
        let (workspace, Some(commit)) = (&self.workspace, &self.commit) else {
            return self.workspace.clone();
        };
        let is_after = commit.tag.as_ref() == Some(workspace);
        let changed = if commit.changed { ".changed" } else { "" };
        match (is_after, commit.count) {
            (true, 0) if !commit.changed => workspace.clone(),
            (true, count) => format!("{workspace}+git{count}.{}{changed}", commit.name),
            (false, count) => format!("{workspace}~git{count}.{}{changed}", commit.name),
        }
    }

    /// `SOURCE_DATE_EPOCH`, or when the commit was made.
    pub(super) fn epoch(&self) -> anyhow::Result<u64> {
        if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
            return epoch.parse().context("SOURCE_DATE_EPOCH is no number of seconds");
        }
        let commit = self.commit.as_ref();
        commit.map(|commit| commit.time).context("this is no git checkout; set SOURCE_DATE_EPOCH")
    }
}

impl Commit {
    fn ask() -> anyhow::Result<Option<Self>> {
        if !workspace().join(".git").exists() {
            return Ok(None);
        }
        let tag = git(&["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]).ok();
        let range = tag.as_ref().map_or_else(|| "HEAD".to_owned(), |tag| format!("{tag}..HEAD"));
        let number = |text: String| text.parse().context("git printed no number");
        Ok(Some(Self {
            tag: tag.map(|tag| tag.trim_start_matches('v').to_owned()),
            count: number(git(&["rev-list", "--count", &range])?)?,
            name: git(&["rev-parse", "--short=12", "HEAD"])?,
            time: number(git(&["log", "-1", "--format=%ct"])?)?,
            changed: !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty(),
        }))
    }
}

fn git(arguments: &[&str]) -> anyhow::Result<String> {
    said(Command::new("git").arg("-C").arg(workspace()).args(arguments))
}

/// Fails for what dpkg takes for no version (deb-version(7)), or what would not stand in a file's name.
pub(super) fn check(version: &str) -> anyhow::Result<()> {
    let begins = version.starts_with(|first: char| first.is_ascii_digit());
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || ".+~-".contains(letter);
    ensure!(
        begins && version.chars().all(allowed),
        "{version:?} is no version: it begins with a digit and has letters, digits and . + ~ - only"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(tag: Option<&str>, count: u64, changed: bool) -> String {
        let tag = tag.map(str::to_owned);
        let commit = Some(Commit { tag, count, name: "abc".into(), time: 7, changed });
        Facts { workspace: "0.2.0".into(), license: "Apache-2.0".into(), commit }.version()
    }

    #[test]
    fn versions_rise_with_the_commits() {
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
            check(high).unwrap();
            let compared =
                Command::new("dpkg").args(["--compare-versions", low, "lt", high]).status().unwrap();
            assert!(compared.success(), "{low} is not lower than {high}");
        }
        // A tag of an earlier release says nothing of this one.
        assert_eq!(version(Some("0.1.0"), 3, false), "0.2.0~git3.abc");
    }

    #[test]
    fn a_path_is_no_version() {
        for wrong in ["", "v1", "1/2", "1:2", "1 2"] {
            check(wrong).unwrap_err();
        }
    }
}
