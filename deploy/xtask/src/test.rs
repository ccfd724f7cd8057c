//! `cargo xtask test`.

use std::ffi::OsString;

use clap::Args;
use keelson_testkit::find_file;

use crate::{cargo, packages, run_command};

/// What is run.
#[derive(Debug, Default, Args)]
pub struct TestArguments {
    /// Also the tests that take minutes (those marked #[ignore])
    #[arg(long)]
    long: bool,
    /// More arguments for `cargo nextest run`, or for `cargo test` where there is no nextest
    #[arg(last = true)]
    more: Vec<OsString>,
}

/// Runs every test, or with `--long` also the ignored ones.
pub fn run(arguments: &TestArguments) -> anyhow::Result<()> {
    packages::install_to_test(arguments.long)?;
    // The whole-agent tests start the services' binaries.
    // With the tests, so that both are built with the same features of their dependencies, once.
    run_command(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    let nextest = find_file("cargo-nextest").is_ok() || cargo_bin_has_nextest();
    if nextest {
        let mut command = cargo();
        command.args(["nextest", "run", "--workspace", "--no-fail-fast"]);
        if arguments.long {
            // `cargo xtask skew` is a command of its own, because it needs the release before.
            command.args(["--run-ignored", "all", "-E", "not binary(skew)"]);
        }
        run_command(command.args(&arguments.more))?;
        // Examples in the documentation are tests, too, and nextest does not run them.
        return run_command(cargo().args(["test", "--workspace", "--doc"]));
    }
    eprintln!("cargo-nextest is not installed; `cargo test` is slower and runs test files one by one");
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-fail-fast"]).args(&arguments.more);
    if arguments.long {
        command.args(["--", "--include-ignored", "--skip", "previous_release"]);
    }
    run_command(&mut command)
}

/// Whether `cargo install` has put nextest beside cargo, in a folder that is not in PATH.
fn cargo_bin_has_nextest() -> bool {
    let home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let home =
        home.or_else(|| std::env::var_os("HOME").map(|home| std::path::Path::new(&home).join(".cargo")));
    home.is_some_and(|home| home.join("bin/cargo-nextest").is_file())
}
