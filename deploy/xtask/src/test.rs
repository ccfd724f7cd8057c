//! `cargo xtask test`: builds and runs the tests.

use std::ffi::OsString;

use clap::Args;
use keelson_testkit::find_file;

use crate::{cargo, packages, run_command};

/// The arguments of `cargo xtask test`.
#[derive(Debug, Default, Args)]
pub struct TestArguments {
    /// Also run the tests that take minutes (those marked #[ignore])
    #[arg(long)]
    long: bool,
    /// More arguments for `cargo nextest run`, or for `cargo test` if nextest is not installed
    #[arg(last = true)]
    more: Vec<OsString>,
}

/// Runs all tests; the ignored ones only with `--long`.
pub fn run(arguments: &TestArguments) -> anyhow::Result<()> {
    packages::install_to_test(arguments.long)?;
    // The whole-agent tests start the services' binaries. Building both together builds each dependency once, with one set of
    // features.
    run_command(cargo().args(["build", "--workspace", "--bins", "--tests"]))?;
    let nextest = find_file("cargo-nextest").is_ok() || cargo_bin_has_nextest();
    if nextest {
        let mut command = cargo();
        command.args(["nextest", "run", "--workspace", "--no-fail-fast"]);
        if arguments.long {
            // The skew tests need the previous release: `cargo xtask skew` runs them.
            command.args(["--run-ignored", "all", "-E", "not binary(skew)"]);
        }
        run_command(command.args(&arguments.more))?;
        // nextest does not run the examples in the documentation.
        return run_command(cargo().args(["test", "--workspace", "--doc"]));
    }
    eprintln!(
        "cargo-nextest is not installed; using `cargo test`, which is slower and runs one test binary at a time"
    );
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-fail-fast"]).args(&arguments.more);
    if arguments.long {
        command.args(["--", "--include-ignored", "--skip", "previous_release"]);
    }
    run_command(&mut command)
}

/// Whether nextest is in cargo's own bin folder, which may not be in PATH.
fn cargo_bin_has_nextest() -> bool {
    let home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let home =
        home.or_else(|| std::env::var_os("HOME").map(|home| std::path::Path::new(&home).join(".cargo")));
    home.is_some_and(|home| home.join("bin/cargo-nextest").is_file())
}
