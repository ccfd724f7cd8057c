//! `cargo xtask`: build, run, measure and check Keelson.

mod bench;
mod check;
mod compose;
mod deb;
mod down;
mod fuzz;
mod gates;
mod packages;
mod progress;
mod quickstart;
mod skew;
mod test;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};
use clap::{Parser, Subcommand};

/// Build, run, measure and check Keelson.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Install what is missing, build, and run the agent with example pods in the background (needs root)
    Quickstart,
    /// Stop the quickstart and remove everything it created (needs root)
    Down,
    /// Run the two nodes and the etcd of compose.yaml in containers (needs root and Docker)
    Compose {
        #[command(subcommand)]
        task: compose::ComposeTask,
    },
    /// Install the Debian packages that building, running and testing need, without starting any daemon
    Packages,
    /// Run the tests
    Test(test::TestArguments),
    /// Test that services of this release work with services of the previous release (needs root)
    Skew(skew::SkewArguments),
    /// Fuzz the parsers of untrusted text (needs cargo-fuzz and a C++ compiler)
    Fuzz(fuzz::FuzzArguments),
    /// Compare the agent with the same requests sent directly to containerd (needs root)
    Bench(bench::BenchArguments),
    /// Build the Debian packages
    Deb(deb::DebArguments),
    /// Check the rules that the compiler cannot: pure cores, allowed calls, module layers, test names, citations, the ledger
    Check,
    /// Format the source code
    Fmt(gates::FmtArguments),
    /// Run clippy, cargo-deny and our own checks
    Lint,
    /// Run every gate of CI: packages, formatting, lints, tests (needs root)
    Ci,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Task::Quickstart => quickstart::run(),
        Task::Down => down::run(),
        Task::Compose { task } => compose::run(task),
        Task::Packages => packages::install_to_test(false),
        Task::Test(arguments) => test::run(&arguments),
        Task::Skew(arguments) => skew::run(&arguments),
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::Bench(arguments) => bench::run(&arguments).map(|never| match never {}),
        Task::Deb(arguments) => deb::run(&arguments),
        Task::Check => check::run(),
        Task::Fmt(arguments) => gates::fmt(&arguments),
        Task::Lint => gates::lint(),
        Task::Ci => gates::ci(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The root folder of the workspace that this program was built from.
fn workspace() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).unwrap_or(own).to_owned()
}

/// A command that runs cargo in the workspace's root folder: the cargo that started this program, if one did.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace());
    command
}

/// Returns what cargo prints to stdout when run with `args`.
///
/// # Errors
/// Cargo cannot be run, fails, or prints something that is not UTF-8.
fn cargo_stdout(args: &[&str]) -> anyhow::Result<String> {
    let output = cargo().args(args).output().context("cannot run cargo")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo {}: {}", args.join(" "), error.trim());
    String::from_utf8(output.stdout).context("the output of cargo is not UTF-8")
}

/// Runs `command`; its output goes to this program's stdout and stderr.
///
/// # Errors
/// The command cannot be run or fails.
fn run_command(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

/// Fails unless this process runs as root. `task` is the name of the subcommand, for the error.
fn require_root(task: &str) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "`cargo xtask {task}` needs root: it runs containers. Become root and run it again, \
         or: sudo env \"PATH=$PATH\" \"HOME=$HOME\" cargo xtask {task}"
    );
    Ok(())
}
