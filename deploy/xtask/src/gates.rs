//! `cargo xtask fmt`, `lint` and `ci`: what every change has to pass.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{ask_cargo, cargo, check, packages, run_command, test, workspace};

/// The tests marked `#[ignore]`, each with its reason: package and test, name, reason.
const IGNORED_TESTS: &str = ".ci/ignored-tests.txt";

/// How `cargo xtask fmt` runs.
#[derive(Debug, Args)]
pub struct FmtArguments {
    /// Only report what is not formatted
    #[arg(long)]
    check: bool,
}

/// Formats the sources.
///
/// # Errors
/// With `--check`: a file is not formatted.
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
/// One of them has a finding.
pub fn lint() -> anyhow::Result<()> {
    gate("clippy");
    run_command(cargo().args([
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    gate("bans, licences, sources");
    run_command(cargo().args(["deny", "--locked", "check", "bans", "licenses", "sources"]))
        .context("cargo-deny found something, or is missing: cargo install --locked cargo-deny")?;
    gate("rules of the workspace");
    check::run()
}

/// Runs every gate of CI.
///
/// # Errors
/// The first gate that fails.
pub fn ci() -> anyhow::Result<()> {
    gate("packages");
    packages::install_to_test(false)?;
    gate("format");
    fmt(&FmtArguments { check: true })?;
    lint()?;
    gate("ignored tests");
    check_ignored_tests()?;
    gate("tests");
    test::run(&test::TestArguments::default())?;
    gate("all gates are green");
    Ok(())
}

fn gate(name: &str) {
    println!("\n=== {name}");
}

/// The tests marked `#[ignore]` are those of the list.
fn check_ignored_tests() -> anyhow::Result<()> {
    let text = fs::read_to_string(workspace().join(IGNORED_TESTS))
        .with_context(|| format!("cannot read {IGNORED_TESTS}"))?;
    let listed = listed(&text)?;
    let found = ask_cargo(&[
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
        "{IGNORED_TESTS} has to list {missing:?}, each with its reason, and not {gone:?}, which are not ignored"
    )
}

/// The tests of the list, as `package test`.
fn listed(text: &str) -> anyhow::Result<BTreeSet<String>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            match (words.next(), words.next(), words.next()) {
                (Some(package), Some(test), Some(_)) => Ok(format!("{package} {test}")),
                _ => bail!("this line of {IGNORED_TESTS} has no reason: {line}"),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ignored_test_is_listed_with_its_reason() {
        let text = "# package test reason\n\nkeelson-tests::soak runs_for_an_hour\ttakes an hour\n";
        assert_eq!(
            listed(text).unwrap(),
            BTreeSet::from(["keelson-tests::soak runs_for_an_hour".to_owned()])
        );
        let error = listed("keelson-tests::soak runs_for_an_hour\n").unwrap_err().to_string();
        assert!(error.contains("has no reason"), "{error}");
    }
}
