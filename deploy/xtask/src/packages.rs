//! Installing what is missing from Debian's packages, without starting any daemon.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use keelson_testkit::{Component, find_file};

use crate::progress::Step;

/// Asked by Debian's maintainer scripts before they start a daemon (invoke-rc.d(8)); 101 forbids it.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// The line by which a policy that an interrupted run has left is known as ours.
const POLICY_MARK: &str = "# Left by `cargo xtask`, which was interrupted; it may be removed.";

/// Installs what is missing to build and to run; does nothing when all is there.
pub fn install_to_run() -> anyhow::Result<()> {
    install_missing(&Component::TO_RUN)
}

/// Installs what is missing to build, to run and to test; with `long` also what the tests need that take minutes.
pub fn install_to_test(long: bool) -> anyhow::Result<()> {
    let of_long: &[Component] = if long { &Component::TO_TEST_LONG } else { &[] };
    install_missing(&[&Component::TO_RUN[..], &Component::TO_TEST, of_long].concat())
}

fn install_missing(components: &[Component]) -> anyhow::Result<()> {
    let policy = Policy { path: PathBuf::from(POLICY) };
    policy.forget_interrupted();
    let absent = components.iter().filter(|component| component.find().is_err());
    let missing: Vec<&str> = absent.map(|component| component.package()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    ensure!(
        rustix::process::geteuid().is_root(),
        "packages are missing; install them as root with: apt-get install -y {list}"
    );
    ensure!(
        find_file("apt-get").is_ok(),
        "this is no Debian; install what these Debian packages have, then run this again: {list}"
    );
    let mut step = Step::start(&format!("Installing {list}"));
    let _interrupts = HeldInterrupts::hold();
    let _policy = policy.forbid_daemons()?;
    step.run(apt().args(["update", "--quiet"]))?;
    step.run(apt().args(["install", "--quiet", "--yes", "--no-install-recommends"]).args(&missing))?;
    for component in components {
        component.find().context("installing the packages did not help")?;
    }
    step.done("installed");
    Ok(())
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Where the policy is.
struct Policy {
    path: PathBuf,
}

/// Removes our policy again.
struct PolicyGuard<'a> {
    path: Option<&'a Path>,
}

impl Policy {
    /// Forbids daemons unless the machine has a policy already, which then decides.
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

    /// Removes a policy of ours that was never removed.
    fn forget_interrupted(&self) {
        if fs::read_to_string(&self.path).is_ok_and(|text| text.contains(POLICY_MARK)) {
            // Without the right to remove it there is no right to install either, which says so.
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

/// While it lives, Ctrl-C ends apt-get but not us, so that the policy is removed.
struct HeldInterrupts;

impl HeldInterrupts {
    fn hold() -> Self {
        extern "C" fn ignore(_signal: libc::c_int) {}
        let handler: extern "C" fn(libc::c_int) = ignore;
        // SAFETY: the handler does nothing, which is async-signal-safe; a handler, unlike SIG_IGN, is not
        // inherited by the programs that we run.
        unsafe {
            libc::signal(libc::SIGINT, handler as libc::sighandler_t);
        }
        Self
    }
}

impl Drop for HeldInterrupts {
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
    fn the_policy_is_there_only_while_packages_are_installed() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let policy = Policy { path: scratch.path().join("policy-rc.d") };
        let guard = policy.forbid_daemons().unwrap();
        assert!(fs::read_to_string(&policy.path).unwrap().contains("exit 101"));
        drop(guard);
        assert!(!policy.path.exists());
    }

    #[test]
    fn a_policy_of_the_machine_stays_as_it_is() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let policy = Policy { path: scratch.path().join("policy-rc.d") };
        fs::write(&policy.path, "#!/bin/sh\nexit 101\n").unwrap();
        drop(policy.forbid_daemons().unwrap());
        policy.forget_interrupted();
        assert!(policy.path.exists());
    }

    #[test]
    fn what_an_interrupted_run_left_is_removed() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let policy = Policy { path: scratch.path().join("policy-rc.d") };
        std::mem::forget(policy.forbid_daemons().unwrap());
        policy.forget_interrupted();
        assert!(!policy.path.exists());
    }
}
