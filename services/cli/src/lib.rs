//! The `keelson` command: what the people who operate a node use.
//!
//! It owns nothing. Every command is one or a few gRPC calls on the sockets below the run folder, and a table,
//! JSON or YAML made of the answers. Standard output carries the answer alone; notices and errors go to
//! standard error, an error as one `error:` line with a `try:` line where there is a way out.
//!
//! The exit codes are in the README and in `keelson --help`; [`error`] decides which failure has which.
//!
//! [`fleet`] speaks to etcd in place of an agent, for a fleet of nodes. [`status`], [`human`], [`near`], [`seen`], [`figures`] and
//! [`waterfall`] hold what is decided and are pure; [`agent`] is the only module that
//! calls a service; [`watch`] follows one through its restarts; [`cmd`] has one module per command.

mod agent;
mod args;
mod cmd;
mod describer;
mod error;
mod figures;
mod fleet;
mod human;
mod keeper;
mod machine;
mod near;
mod output;
mod plain;
mod pods;
mod screen;
mod seen;
mod status;
mod table;
mod terminal;
mod watch;
mod waterfall;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser as _;

use crate::args::Cli;
use crate::error::Failure;

/// Exit code of a wrong command line (`EX_USAGE`).
const EX_USAGE: u8 = 64;

/// Runs the command line `args`, the program's name included.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if let Some(end) = cmd::completion::answer(&args) {
        return end;
    }
    let args = args::split_type_and_name(args);
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe under `--help` is nobody's problem.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EX_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let colour = output::Colour::for_stderr(cli.global.no_color);
    match run_to_end(cli) {
        Ok(()) | Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print(colour);
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run_to_end(cli: Cli) -> Result<(), Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Failure::Runtime { source })?
        .block_on(cmd::dispatch(cli))
}

#[cfg(test)]
mod docs_tests;
