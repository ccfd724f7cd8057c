//! `cargo xtask fmt`, `lint` and `ci`: the gates that every change must pass.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{cargo, cargo_stdout, check, packages, run_command, test, workspace};

/// The list of the tests marked `#[ignore]`. Each line has the test binary, the test's name and the reason.
const IGNORED_TESTS: &str = ".ci/ignored-tests.txt";

/// The arguments of `cargo xtask fmt`.
#[derive(Debug, Args)]
pub struct FmtArguments {
    /// Only report files that are not formatted
    #[arg(long)]
    check: bool,
}

/// Formats the source code.
///
/// # Errors
/// rustfmt fails, or `--check` is given and a file is not formatted.
pub fn fmt(arguments: &FmtArguments) -> anyhow::Result<()> {
    let mut command = cargo();
    command.args(["fmt", "--all"]);
    if arguments.check {
        command.arg("--check");
    }
    run_command(&mut command)
}

/// Runs clippy, cargo-deny and the checks of the workspace.
///
/// # Errors
/// One of them finds a violation or cannot run.
pub fn lint() -> anyhow::Result<()> {
    print_gate("clippy");
    run_command(cargo().args([
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    print_gate("bans, licences, sources");
    run_command(cargo().args(["deny", "--locked", "check", "bans", "licenses", "sources"])).context(
        "cargo-deny reported errors or is not installed; install it with: cargo install --locked cargo-deny",
    )?;
    print_gate("rules of the workspace");
    check::run()
}

/// Runs every gate of CI.
///
/// # Errors
/// The first gate that fails.
pub fn ci() -> anyhow::Result<()> {
    print_gate("packages");
    packages::install_to_test(false)?;
    print_gate("format");
    fmt(&FmtArguments { check: true })?;
    lint()?;
    print_gate("ignored tests");
    check_ignored_tests()?;
    print_gate("tests");
    test::run(&test::TestArguments::default())?;
    print_gate("all gates passed");
    Ok(())
}

fn print_gate(name: &str) {
    println!("\n=== {name}");
}

/// Checks that [`IGNORED_TESTS`] lists exactly the tests marked `#[ignore]`.
fn check_ignored_tests() -> anyhow::Result<()> {
    let text = fs::read_to_string(workspace().join(IGNORED_TESTS))
        .with_context(|| format!("cannot read {IGNORED_TESTS}"))?;
    let listed = listed(&text)?;
    let found = cargo_stdout(&[
        "nextest",
        "list",
        "--workspace",
        "--run-ignored",
        "ignored-only",
        "--message-format",
        "oneline",
    ])?;
    let found: BTreeSet<String> = found.lines().map(str::to_owned).collect();
    let missing: Vec<&String> = found.difference(&listed).collect();
    let gone: Vec<&String> = listed.difference(&found).collect();
    if missing.is_empty() && gone.is_empty() {
        return Ok(());
    }
    bail!(
        "{IGNORED_TESTS} does not match the tests marked #[ignore]; add {missing:?}, each with its reason, and remove {gone:?}"
    )
}

/// Parses the list; returns each test as `binary test`.
fn listed(text: &str) -> anyhow::Result<BTreeSet<String>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            match (words.next(), words.next(), words.next()) {
                (Some(binary), Some(test), Some(_)) => Ok(format!("{binary} {test}")),
                _ => bail!("this line of {IGNORED_TESTS} has no reason: {line}"),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_a_reason_for_ignoring_the_test_is_an_error() {
        let text = "# package test reason\n\nkeelson-tests::soak runs_for_an_hour\ttakes an hour\n";
        assert_eq!(
            listed(text).unwrap(),
            BTreeSet::from(["keelson-tests::soak runs_for_an_hour".to_owned()])
        );
        let error = listed("keelson-tests::soak runs_for_an_hour\n").unwrap_err().to_string();
        assert!(error.contains("has no reason"), "{error}");
    }
}
