//! `cargo xtask skew`: tests whether the services of this release work with those of the previous release.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::Args;
use keelson_testkit::binary_names;

use crate::{cargo, packages, require_root, run_command, workspace};

/// The variable through which the tests get the folder with the binaries of the previous release.
const PREVIOUS_BIN_DIR: &str = "KEELSON_PREVIOUS_BIN_DIR";

/// The arguments of `cargo xtask skew`.
#[derive(Debug, Args)]
pub struct SkewArguments {
    /// The git revision of the previous release [default: the newest tag v… before HEAD]
    #[arg(long, value_name = "REVISION")]
    previous: Option<String>,
}

/// Builds the previous release and runs the tests that combine it with this one.
pub fn run(arguments: &SkewArguments) -> anyhow::Result<()> {
    require_root("skew")?;
    let previous = match &arguments.previous {
        Some(revision) => revision.clone(),
        None => newest_tag()?,
    };
    let commit = git(&["rev-parse", "--verify", "--quiet", &format!("{previous}^{{commit}}")])
        .with_context(|| format!("{previous} is not a commit of this repository"))?;
    packages::install_to_test(true)?;
    let binaries = build(&commit)?;
    run_command(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    println!("{} with {previous} ({})", git(&["rev-parse", "--short", "HEAD"])?, &commit[..12]);
    let mut command = cargo();
    command.args(["nextest", "run", "--workspace", "--run-ignored", "ignored-only"]);
    command
        .args(["-E", "package(keelson-tests) & (binary(skew) + binary(cluster_upgrade))"])
        .env(PREVIOUS_BIN_DIR, binaries);
    run_command(&mut command)
}

/// The newest release tag among the ancestors of HEAD, HEAD itself excluded.
fn newest_tag() -> anyhow::Result<String> {
    git(&["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"])
        .context("there is no release tag before HEAD; name a commit: cargo xtask skew --previous REVISION")
}

/// Builds the binaries of a commit in a separate worktree below the target folder, or reuses those of an earlier run. Returns
/// their folder.
fn build(commit: &str) -> anyhow::Result<PathBuf> {
    let folder = workspace().join("target/skew");
    let binaries = folder.join(commit);
    if binary_names().iter().all(|name| binaries.join(name).is_file()) {
        return Ok(binaries);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let worktree = Worktree::add(&folder.join("checkout"), commit)?;
    let target = folder.join("build");
    let mut command = cargo();
    command.args(["build", "--locked", "--workspace", "--bins"]).current_dir(&worktree.folder);
    run_command(command.env("CARGO_TARGET_DIR", &target))?;
    fs::create_dir_all(&binaries)?;
    for name in binary_names() {
        let source = target.join("debug").join(name);
        fs::copy(&source, binaries.join(name))
            .with_context(|| format!("cannot copy {}", source.display()))?;
    }
    Ok(binaries)
}

/// A git worktree that is removed when this value is dropped.
struct Worktree {
    folder: PathBuf,
}

impl Worktree {
    fn add(folder: &Path, commit: &str) -> anyhow::Result<Self> {
        let worktree = Self { folder: folder.to_owned() };
        // An interrupted run may have left one.
        worktree.remove();
        git(&[
            OsStr::new("worktree"),
            "add".as_ref(),
            "--detach".as_ref(),
            folder.as_ref(),
            commit.as_ref(),
        ])?;
        Ok(worktree)
    }

    fn remove(&self) {
        // Both fail if there is no worktree.
        let _ = git(&[OsStr::new("worktree"), "remove".as_ref(), "--force".as_ref(), self.folder.as_ref()]);
        let _ = git(&["worktree", "prune"]);
    }
}

impl Drop for Worktree {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Runs git in the workspace and returns its trimmed output.
fn git(arguments: &[impl AsRef<OsStr>]) -> anyhow::Result<String> {
    let mut command = Command::new("git");
    let output = command.arg("-C").arg(workspace()).args(arguments).output().context("cannot run git")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {}", output.status, error.trim());
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
