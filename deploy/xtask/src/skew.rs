//! `cargo xtask skew`: whether this release works with the one before, service by service.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::Args;
use keelson_testkit::binary_names;

use crate::{cargo, packages, require_root, run_command, workspace};

/// Names the folder of the release before to the tests.
const PREVIOUS: &str = "KEELSON_PREVIOUS_BIN_DIR";

/// What is compared.
#[derive(Debug, Args)]
pub struct SkewArguments {
    /// The release before, as git knows it [default: the newest tag v… before HEAD]
    #[arg(long, value_name = "REVISION")]
    previous: Option<String>,
}

/// Builds the release before, and runs the tests that mix it with this one.
pub fn run(arguments: &SkewArguments) -> anyhow::Result<()> {
    require_root("skew")?;
    let previous = match &arguments.previous {
        Some(revision) => revision.clone(),
        None => newest_tag()?,
    };
    let commit = git(&["rev-parse", "--verify", "--quiet", &format!("{previous}^{{commit}}")])
        .with_context(|| format!("{previous} is no revision here"))?;
    packages::install_to_test(true)?;
    let binaries = build(&commit)?;
    run_command(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    println!("{} with {previous} ({})", git(&["rev-parse", "--short", "HEAD"])?, &commit[..12]);
    let mut command = cargo();
    command.args(["nextest", "run", "--workspace", "--run-ignored", "ignored-only"]);
    command
        .args(["-E", "package(keelson-tests) & (binary(skew) + binary(cluster_upgrade))"])
        .env(PREVIOUS, binaries);
    run_command(&mut command)
}

/// The newest release that HEAD has, but not HEAD itself.
fn newest_tag() -> anyhow::Result<String> {
    git(&["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"])
        .context("no release is tagged yet; name a commit: cargo xtask skew --previous REVISION")
}

/// The binaries of a commit, built in a checkout of its own below the target folder; those of an earlier run are taken.
fn build(commit: &str) -> anyhow::Result<PathBuf> {
    let folder = workspace().join("target/skew");
    let binaries = folder.join(commit);
    if binary_names().iter().all(|name| binaries.join(name).is_file()) {
        return Ok(binaries);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let checkout = Checkout::make(&folder.join("checkout"), commit)?;
    let target = folder.join("build");
    let mut command = cargo();
    command.args(["build", "--locked", "--workspace", "--bins"]).current_dir(&checkout.folder);
    run_command(command.env("CARGO_TARGET_DIR", &target))?;
    fs::create_dir_all(&binaries)?;
    for name in binary_names() {
        let source = target.join("debug").join(name);
        fs::copy(&source, binaries.join(name))
            .with_context(|| format!("cannot copy {}", source.display()))?;
    }
    Ok(binaries)
}

/// A worktree that is gone in the end.
struct Checkout {
    folder: PathBuf,
}

impl Checkout {
    fn make(folder: &Path, commit: &str) -> anyhow::Result<Self> {
        let checkout = Self { folder: folder.to_owned() };
        // Of a run that was interrupted.
        checkout.remove();
        git(&[
            OsStr::new("worktree"),
            "add".as_ref(),
            "--detach".as_ref(),
            folder.as_ref(),
            commit.as_ref(),
        ])?;
        Ok(checkout)
    }

    fn remove(&self) {
        // Both fail where there is none.
        let _ = git(&[OsStr::new("worktree"), "remove".as_ref(), "--force".as_ref(), self.folder.as_ref()]);
        let _ = git(&["worktree", "prune"]);
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        self.remove();
    }
}

/// What git prints, in the workspace.
fn git(arguments: &[impl AsRef<OsStr>]) -> anyhow::Result<String> {
    let mut command = Command::new("git");
    let output = command.arg("-C").arg(workspace()).args(arguments).output().context("cannot run git")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", problem.trim());
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
