//! Installs missing programs from Debian packages, without starting any daemon.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use keelson_testkit::{Component, find_file};

use crate::progress::Step;

/// The script that Debian's maintainer scripts run before they start a daemon (invoke-rc.d(8)); exit code 101 forbids the start.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// The line that marks a policy as ours, so that a later run removes it if this one is interrupted.
const POLICY_MARK: &str = "# Left by `cargo xtask`, which was interrupted; you can remove this file.";

/// Installs the packages that are missing for building and running. Does nothing if all are installed.
pub fn install_to_run() -> anyhow::Result<()> {
    install_missing(&Component::TO_RUN)
}

/// Installs the packages that are missing for building, running and testing; with `long` also those for the tests that take
/// minutes.
pub fn install_to_test(long: bool) -> anyhow::Result<()> {
    let for_long: &[Component] = if long { &Component::TO_TEST_LONG } else { &[] };
    install_missing(&[&Component::TO_RUN[..], &Component::TO_TEST, for_long].concat())
}

fn install_missing(components: &[Component]) -> anyhow::Result<()> {
    let policy = Policy { path: PathBuf::from(POLICY) };
    policy.remove_leftover();
    let absent = components.iter().filter(|component| component.find().is_err());
    let missing: Vec<&str> = absent.map(|component| component.package()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    ensure!(
        rustix::process::geteuid().is_root(),
        "Debian packages are missing; install them as root with: apt-get install -y {list}"
    );
    ensure!(
        find_file("apt-get").is_ok(),
        "there is no apt-get; install the programs of these Debian packages in another way, then run this again: {list}"
    );
    let mut step = Step::start(&format!("Installing {list}"));
    let _interrupts = IgnoredInterrupts::ignore();
    let _policy = policy.forbid_daemons()?;
    step.run(apt().args(["update", "--quiet"]))?;
    step.run(apt().args(["install", "--quiet", "--yes", "--no-install-recommends"]).args(&missing))?;
    for component in components {
        component.find().context("a program is still missing after the packages were installed")?;
    }
    step.done("installed");
    Ok(())
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// The policy script of the host.
struct Policy {
    path: PathBuf,
}

/// Removes our policy script when it is dropped.
struct PolicyGuard<'a> {
    /// `None` if the host has a policy of its own.
    path: Option<&'a Path>,
}

impl Policy {
    /// Writes a policy that forbids starting daemons. A policy that the host already has stays in effect instead.
    fn forbid_daemons(&self) -> anyhow::Result<PolicyGuard<'_>> {
        if self.path.exists() {
            return Ok(PolicyGuard { path: None });
        }
        let script = format!("#!/bin/sh\n{POLICY_MARK}\nexit 101\n");
        fs::write(&self.path, script)
            .and_then(|()| fs::set_permissions(&self.path, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        Ok(PolicyGuard { path: Some(&self.path) })
    }

    /// Removes our policy script if an interrupted run has left it.
    fn remove_leftover(&self) {
        if fs::read_to_string(&self.path).is_ok_and(|text| text.contains(POLICY_MARK)) {
            // If this process may not remove it, it may not install packages either, and that error is reported.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for PolicyGuard<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.path
            && let Err(error) = fs::remove_file(path)
        {
            eprintln!("cannot remove {}: {error}; remove it yourself", path.display());
        }
    }
}

/// While this value exists, Ctrl-C ends apt-get but not this program, so that the policy script is removed.
struct IgnoredInterrupts;

impl IgnoredInterrupts {
    fn ignore() -> Self {
        extern "C" fn do_nothing(_signal: libc::c_int) {}
        let handler: extern "C" fn(libc::c_int) = do_nothing;
        // SAFETY: the handler does nothing, which is async-signal-safe; a handler, unlike SIG_IGN, is not
        // inherited by the programs that we run.
        unsafe {
            libc::signal(libc::SIGINT, handler as libc::sighandler_t);
        }
        Self
    }
}

impl Drop for IgnoredInterrupts {
    fn drop(&mut self) {
        // SAFETY: the default action is always a valid disposition.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_script_exists_only_during_an_installation() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let policy = Policy { path: scratch.path().join("policy-rc.d") };
        let guard = policy.forbid_daemons().unwrap();
        assert!(fs::read_to_string(&policy.path).unwrap().contains("exit 101"));
        drop(guard);
        assert!(!policy.path.exists());
    }

    #[test]
    fn a_policy_script_of_the_host_is_never_changed() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let policy = Policy { path: scratch.path().join("policy-rc.d") };
        fs::write(&policy.path, "#!/bin/sh\nexit 101\n").unwrap();
        drop(policy.forbid_daemons().unwrap());
        policy.remove_leftover();
        assert!(policy.path.exists());
    }

    #[test]
    fn a_policy_script_of_an_interrupted_run_is_removed() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let policy = Policy { path: scratch.path().join("policy-rc.d") };
        std::mem::forget(policy.forbid_daemons().unwrap());
        policy.remove_leftover();
        assert!(!policy.path.exists());
    }
}
